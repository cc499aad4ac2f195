/* What a CUDA graph holds, counted while it is captured and told when it is instantiated: kernels, copies, bytes.
 * It is told again now and then, as a ring keeps only what is new and a server launches its graphs for days.
 *
 * Told of graphs alone that were captured with no other capture at the same time and no host function, and whether all
 * of it stood in one stream, one behind the other: of these the time of a launch can be divided. Of several streams,
 * copies may have run beside kernels. A graph that is made node by node stays one piece. */
#define _GNU_SOURCE
#include "marks.h"

#include <pthread.h>
#include <string.h>

#define KEPT 256  /* graphs that are captured and not instantiated yet; the oldest give way */
#define TOLD 4096 /* graphs that are told of again */

struct graph {
    uint64_t handle, stream, bytes[3]; /* bytes: to the device, from it, within it */
    uint32_t kernels, copies, memsets;
    int clear;   /* all of it is known */
    int several; /* it was captured in several streams */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct graph captured, kept[KEPT];
static unsigned next_kept;
static int active; /* captures that go on */
static kvp_record told[TOLD];
static unsigned told_count, told_again; /* told_again: of the first so many it was told since */

void kvp_graph_begins(uint64_t stream) {
    pthread_mutex_lock(&lock);
    int alone = !active++;
    if (alone) captured = (struct graph){.stream = stream};
    captured.clear = alone;
    pthread_mutex_unlock(&lock);
}

void kvp_graph_holds_more(void) {
    pthread_mutex_lock(&lock);
    captured.clear = 0;
    pthread_mutex_unlock(&lock);
}

static int is_captured(uint64_t stream) {
    int state = 0;
    return kvp_mark_driver.cuStreamIsCapturing &&
           !kvp_mark_driver.cuStreamIsCapturing(kvp_stream_handle(stream), &state) && state;
}

void kvp_graph_holds(const kvp_record *r) {
    uint32_t copies = r->call <= 10 || r->call == 30 || r->call == 31 || r->call == 40 || r->call == 41;
    uint32_t kernels = r->call >= 12 && r->call <= 15, memsets = r->call == 11;
    uint32_t functions = r->call == KVP_CALL_cudaLaunchHostFunc || r->call >= KVP_CALL_cudaStreamAddCallback;
    if (functions) kvp_graph_holds_more();
    if (!(copies | kernels | memsets) || !is_captured(r->stream)) return;
    unsigned way = (r->direction & 15) == KVP_H2D ? 0 : (r->direction & 15) == KVP_D2H ? 1 : 2;
    pthread_mutex_lock(&lock);
    if (r->stream != captured.stream) captured.several = 1;
    captured.copies += copies * r->count;
    captured.kernels += kernels;
    captured.memsets += memsets;
    if (copies) captured.bytes[way] += r->bytes;
    pthread_mutex_unlock(&lock);
}

void kvp_graph_ends(const void *graph) {
    pthread_mutex_lock(&lock);
    if (active) active--;
    captured.handle = (uint64_t)(uintptr_t)graph;
    if (graph && captured.clear) kept[next_kept++ % KEPT] = captured;
    captured.clear = 0;
    pthread_mutex_unlock(&lock);
}

void kvp_graph_instantiated(const void *launchable, const void *graph) {
    kvp_record r = {.call = KVP_CALL_graph, .start_ns = kvp_clock(), .src = (uint32_t)(uintptr_t)launchable};
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < KEPT && !r.count && graph; i++) {
        const struct graph *g = &kept[(next_kept - 1 - i) % KEPT];
        if (g->handle != (uint64_t)(uintptr_t)graph) continue;
        r.stream = g->bytes[0], r.dst = g->bytes[1], r.bytes = g->bytes[2];
        r.count = g->kernels;
        r.transfer = g->copies;
        r.tid = 1 + g->memsets;
        r.direction = (uint8_t)g->several;
        break;
    }
    for (unsigned i = 0; r.tid && i <= told_count && i < TOLD; i++) /* its number may have been another's */
        if (i == told_count || told[i].src == r.src) {
            told[i] = r;
            told_count += i == told_count;
            if (told_again > i) told_again = i;
            break;
        }
    pthread_mutex_unlock(&lock);
    if (r.tid) kvp_ring_note(&r);
}

void kvp_graphs_tell(void) {
    static uint64_t since; /* only one thread at a time comes here */
    uint64_t records, head = kvp_ring_noted(&records);
    pthread_mutex_lock(&lock);
    if (head < since || head - since > records / 2) told_again = 0;
    if (told_again < told_count && told_count <= records / 4) {
        while (told_again < told_count) kvp_ring_note(&told[told_again++]);
        since = kvp_ring_noted(&records);
    }
    pthread_mutex_unlock(&lock);
}

/* A forked child's copy of the lock may have been held. */
void kvp_graphs_in_child(void) {
    pthread_mutex_init(&lock, NULL);
    active = 0;
    told_count = told_again = 0;
}
