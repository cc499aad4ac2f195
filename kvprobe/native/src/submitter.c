/* The submitter's steps: take what was handed over, see what the device has reached, submit what finds slots. */
#include "submitter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAUNCHES 3 /* submissions that make up the work submitted ahead */
#define BURST_NS 1200000
#define KERNEL_LAUNCHES 2 /* by kernels fewer and longer: each begins and ends with the link half idle */
#define KERNEL_BURST_NS 2400000
#define WAITED_NS 50000         /* so long a copy waits for compute: an idle stream's mark is reached sooner */
#define GOES_ON 50              /* times as long as that it is thought to go on */
#define GOES_ON_NS 20000000     /* at most: steps of a model come more often */
#define IDLE_JOBS 4             /* so many in a row found their stream with nothing to do: compute is over */
#define IDLE_APART_NS 1000000   /* they were handed over at so different times: a step asks for several at once */
#define LARGE_COPY 65536        /* bytes: from here on a batch goes at the link's rate */
#define FIRST_LAUNCH (4u << 20) /* of the first one after a pause, bytes */
#define LEAST_LAUNCH 262144     /* bytes */
#define LEAST_LIST 16           /* part of a ring of copies that a launch is begun with */
#define MOST_LAUNCH (64u << 20) /* bytes */
#define SHORT_REST 4            /* part of a launch */
#define MOST_PAUSE_NS 250000
#define SHARED_PAUSE_NS 60000

/* Compute stood in front of a job until now. */
static void note_wait(kvp_submitter *s, uint64_t now, uint64_t for_ns) {
    uint64_t until = now + (for_ns < GOES_ON_NS ? for_ns : GOES_ON_NS);
    if (until > s->waits_until_ns) s->waits_until_ns = until;
    s->idle_jobs = 0;
}

/* Whether it had ended already when the job was handed over. */
static void note_idle(kvp_submitter *s, struct kvp_job *j, uint64_t now) {
    if (!j->after || now >= s->waits_until_ns || (s->idle_jobs && now < s->idle_ns + IDLE_APART_NS)) return;
    if (!kvp_fence_passed(s, j)) {
        s->idle_jobs = 0;
        return;
    }
    s->idle_ns = now;
    if (++s->idle_jobs == IDLE_JOBS) s->waits_until_ns = 0;
}

/* Jobs that were handed over come behind those that wait. */
void kvp_take_incoming(kvp_submitter *s, uint64_t now) {
    struct kvp_job *newest = atomic_load(&s->incoming) ? atomic_exchange(&s->incoming, NULL) : NULL, *j = NULL;
    while (newest) { /* the oldest first */
        struct kvp_job *before = newest->next;
        newest->next = j;
        j = newest;
        newest = before;
    }
    while (j) {
        struct kvp_job *next = j->next;
        struct direction *dir = &s->direction[j->direction];
        kvp_must(s, j->handed, "a transfer that nobody handed over");
        j->next = NULL;
        j->sequence = ++dir->sequence;
        if (dir->last)
            dir->last->next = j;
        else
            dir->first = j;
        dir->last = j;
        note_idle(s, j, now);
        j = next;
    }
}

static void pop(struct direction *dir) {
    dir->first = dir->first->next;
    if (!dir->first) dir->last = NULL;
}

static void fly(struct direction *dir, struct kvp_job *j) {
    j->next = NULL;
    if (dir->flying_last)
        dir->flying_last->next = j;
    else
        dir->flying = j;
    dir->flying_last = j;
}

/* All of it is submitted, or will ever be: it ends at the newest marker of its direction. */
static void submitted(kvp_submitter *s, struct direction *dir, struct kvp_job *j, void *end_event) {
    uint64_t sequence = j->sequence; /* once it has ended, its memory may be gone */
    kvp_fence_drop(s, j);
    j->status.submitted_ns = kvp_now_ns();
    pthread_mutex_lock(&s->lock);
    j->end_event = end_event;
    __atomic_store_n(&j->status.state, KVP_IN_FLIGHT, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&s->lock);
    if (line_empty(&dir->line)) { /* nothing of it, nor of its predecessors, is outstanding */
        kvp_end_flying(s, dir, sequence, 0);
    } else {
        struct marker *newest = &dir->line.marker[(dir->line.tail - 1) % MARKERS];
        if (newest->sequence < sequence) newest->sequence = sequence;
    }
    kvp_changed(s);
}

static void fail_head(kvp_submitter *s, struct direction *dir, int code, uint32_t fault) {
    struct kvp_job *j = dir->first;
    int d = j->direction;
    pop(dir);
    fly(dir, j);
    j->failed = code;
    j->status.error = code;
    j->status.fault = fault;
    struct marker *newest = line_empty(&dir->line) ? NULL : &dir->line.marker[(dir->line.tail - 1) % MARKERS];
    submitted(s, dir, j, newest ? newest->event : NULL);
    /* A call that failed for good, or a device that is gone? */
    void *stream = dir->stream ? dir->stream : s->config.pooled[d][0];
    int code_now = 0;
    for (int i = 0; i < BAD_QUERIES; i++) {
        code_now = CALL(s, stream_query, handle_fn)(stream);
        if (!code_now || code_now == NOT_READY) return;
        kvp_clear_error(s);
    }
    if (code_now) kvp_lose(s, code_now, KVP_FAULT_DEVICE);
}

enum gate { FAILED = -1, SHUT, OPEN, HURRIED }; /* HURRIED: the head waits on the device, with all behind it */

/* Whether the head may start: what it waits for is over, or it must be submitted before. */
static enum gate gate(kvp_submitter *s, struct direction *dir, uint64_t now) {
    struct kvp_job *j = dir->first;
    struct fence *f = j->after;
    if (!f) return OPEN;
    int code = kvp_fence_record(s, f);
    if (code == NOT_READY) return SHUT;
    if (!code) code = CALL(s, event_query, handle_fn)(f->event);
    if (code == NOT_READY) {
        bool hurry = j->sequence <= dir->hurry;
        bool alone = !atomic_load(&s->direction[0].bytes) && !atomic_load(&s->direction[1].bytes);
        if (!dir->gate_since) dir->gate_since = now;
        if (!alone) dir->alone_since = 0;
        if (alone && !dir->alone_since) dir->alone_since = now;
        uint64_t waited = alone ? now - dir->alone_since : 0;
        if (!j->behind_copies && (hurry || waited >= WAITED_NS))
            note_wait(s, now, hurry ? GOES_ON_NS : GOES_ON * waited);
        return hurry ? HURRIED : SHUT;
    }
    if (code) {
        kvp_clear_error(s);
        fail_head(s, dir, code, KVP_FAULT_WAIT);
        return FAILED;
    }
    dir->gate_since = dir->alone_since = 0;
    kvp_fence_over(s, j);
    return OPEN;
}

/* Bytes of one submission, so that `launches` of them are the work that lies ahead of the device. */
static uint64_t launch_bytes(const kvp_submitter *s, const struct direction *dir, int d, bool kernel, int *launches) {
    uint64_t rate = dir->rate, burst = s->config.burst_ns;
    if (!burst) burst = kernel ? KERNEL_BURST_NS : BURST_NS;
    *launches = kernel ? KERNEL_LAUNCHES : LAUNCHES;
    if (s->config.bytes_per_s[d] && s->config.bytes_per_s[d] < rate) rate = s->config.bytes_per_s[d];
    uint64_t bytes = (uint64_t)((double)rate * (double)burst * 1e-9) / (uint64_t)*launches;
    return bytes < LEAST_LAUNCH ? LEAST_LAUNCH : bytes > MOST_LAUNCH ? MOST_LAUNCH : bytes;
}

static bool by_kernel(int method) { return method == KVP_KERNEL || method == KVP_STAGED; }

/* The next pooled stream; the one that others held up least. */
static void take_stream(kvp_submitter *s, struct direction *dir, int d) {
    uint32_t n = s->config.streams, best = (dir->at_stream + 1) % n;
    for (uint32_t i = 1; i <= n; i++) {
        uint32_t at = (dir->at_stream + i) % n;
        if (dir->held_up[at] < dir->held_up[best]) best = at;
    }
    dir->at_stream = best;
    dir->stream = s->config.pooled[d][best];
    dir->leave = false;
}

/* Loads and stores may share a channel: each takes at most half of its places, the shared streams' included. */
uint64_t kvp_usable(const kvp_submitter *s) {
    uint32_t spare = s->config.depth / 4 < 32 ? s->config.depth / 4 : 32;
    return (s->config.depth - spare) / 2;
}

static uint32_t room_for(const kvp_submitter *s, const struct direction *dir) {
    uint64_t usable = kvp_usable(s), held = atomic_load(&dir->places) + atomic_load(&dir->shared_places);
    if (held + 2 < usable) return (uint32_t)(usable - held - 2); /* 2: the events around the copies */
    return held ? 0 : 1;
}

struct attempt {
    uint32_t count, places;
    uint64_t bytes, ns;
    int code;
};

/* One submission by one method; `taken` of the run's copies. */
static struct attempt try_method(kvp_submitter *s, struct direction *dir, int d, int method, uint32_t ctas, uint32_t n,
                                 uint32_t room, uint64_t most, kvp_copy_list *list) {
    struct attempt a = {0};
    int direction = d == STORE ? KVP_D2H : KVP_H2D;
    uint32_t transfer = (uint32_t)dir->first->status.id;
    if (method == KVP_LOOP) {
        a.count = n < room ? n : room;
        uint64_t *dst = s->dst, *src = s->src, *sizes = s->sizes;
        for (uint32_t i = 0; i < a.count; i++)
            dst[i] = s->run[i].dst, src[i] = s->run[i].src, sizes[i] = s->run[i].bytes;
        kvp_submit_options o = {
            .copy = (kvp_memcpy_async_fn)s->config.copier.cuda.memcpy_async,
            .stream = dir->stream,
            .kind = d == STORE ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
            .transfer = transfer,
            .direction = (uint8_t)(direction | (s->config.pageable ? KVP_MEM_PAGEABLE : KVP_MEM_PINNED) << 4),
            .detail = (uint8_t)s->config.detail,
            .blocked_ns = UINT64_MAX};
        if (s->config.ranges && s->config.detail >= KVP_COPIES)
            o.range_push = kvp_nvtx_push, o.range_pop = kvp_nvtx_pop;
        kvp_submit_result r;
        uint64_t begin = kvp_now_ns();
        a.code = kvp_submit(&o, a.count, dst, src, sizes, 0, &r);
        a.ns = kvp_now_ns() - begin;
        a.count = (uint32_t)r.submitted;
        a.places = a.count;
        if (r.max_ns > s->longest_ns) s->longest_ns = r.max_ns;
    } else {
        uint32_t calls = 0, taken = 0;
        a.count = kvp_copy_plan(&s->config.copier, method, s->run, n, direction, room, most, list->capacity, &a.places);
        if (!a.count) return a;
        uint64_t bytes = 0, begin = kvp_now_ns();
        for (uint32_t i = 0; i < a.count; i++) bytes += s->run[i].bytes;
        a.code = of_cells(s) ? kvp_cells_submit(s, d, a.count, ctas, dir->stream, list)
                             : kvp_copy_submit(&s->config.copier, method, s->run, a.count, direction, ctas, dir->stream,
                                               list, &taken, &calls);
        a.ns = kvp_now_ns() - begin;
        if (a.ns > s->longest_ns) s->longest_ns = a.ns;
        kvp_record record = {.start_ns = begin,
                             .dur_ns = a.ns,
                             .stream = (uint64_t)(uintptr_t)dir->stream,
                             .src = s->run[0].src,
                             .dst = s->run[0].dst,
                             .bytes = bytes,
                             .tid = kvp_thread_id(),
                             .transfer = transfer,
                             .count = a.count,
                             .result = (uint16_t)a.code,
                             .call = method == KVP_BATCH ? KVP_CALL_cudaMemcpyBatchAsync : KVP_CALL_cuLaunchKernel,
                             .direction = (uint8_t)(direction | KVP_MEM_PINNED << 4)};
        if (s->config.detail != KVP_OFF) kvp_ring_write(&record, s->config.detail >= KVP_COPIES);
        if (a.code) a.count = 0; /* submitted again by another method: the same bytes to the same place */
    }
    if (a.code) kvp_clear_error(s);
    return a;
}

static int lower_method(const kvp_submitter *s, int method) {
    static const int order[] = {KVP_KERNEL, KVP_STAGED, KVP_BATCH, KVP_LOOP};
    int at = 0;
    while (order[at] != method) at++;
    for (at++; at < 3; at++)
        if (!(s->methods_off & 1u << order[at])) return order[at];
    return KVP_LOOP;
}

/* Puts an event behind what was just submitted; where that fails the stream itself is asked. */
static void add_marker(kvp_submitter *s, struct direction *dir, const struct attempt *a, int method, void *start,
                       uint32_t entries, uint64_t begun, uint64_t now, bool idle) {
    /* the first copy of a loop begins while the others are submitted, all of a batch or kernel after its call */
    uint64_t after = kvp_now_ns(), ready = method == KVP_LOOP ? now : after;
    void *event = kvp_event_take(s);
    if (event && CALL(s, event_record, event_stream_fn)(event, dir->stream)) {
        kvp_clear_error(s);
        kvp_event_give(s, event);
        event = NULL;
    }
    uint32_t places = a->places + (event != NULL) + (start != NULL);
    kvp_must(s, dir->line.tail - dir->line.head < MARKERS, "more marks than there is space for");
    dir->line.marker[dir->line.tail % MARKERS] = (struct marker){.event = event,
                                                                 .start = start,
                                                                 .stream = dir->stream,
                                                                 .bytes = a->bytes,
                                                                 .begun = begun,
                                                                 .ready_ns = ready,
                                                                 .called_ns = after - a->ns,
                                                                 .idle = idle,
                                                                 .due_ns = kvp_due_ns(dir, a->bytes, now),
                                                                 .places = places,
                                                                 .entries = entries};
    dir->line.tail++;
    dir->pause_ns = LEAST_PAUSE_NS;
    atomic_fetch_add(&dir->places, places);
    atomic_fetch_add(&dir->bytes, a->bytes);
}

/* The event in front of copies that were not submitted after all: it takes a place until it is reached. */
static void leave_start(struct direction *dir, void *start, uint64_t now) {
    if (!start) return;
    const struct marker *before = line_empty(&dir->line) ? NULL : &dir->line.marker[(dir->line.tail - 1) % MARKERS];
    dir->line.marker[dir->line.tail++ % MARKERS] = (struct marker){.event = start,
                                                                   .stream = dir->stream,
                                                                   .begun = before ? before->begun : 0,
                                                                   .sequence = before ? before->sequence : 0,
                                                                   .due_ns = now,
                                                                   .places = 1};
    atomic_fetch_add(&dir->places, 1);
}

/* Entries of the direction's ring for a launch of `wanted` copies: fewer where there are no more side by side, none
 * where waiting for those in use gives a better launch. `over`: those at the ring's end that it does not take. */
static kvp_copy_list entries_for(const kvp_submitter *s, const struct direction *dir, int d, uint32_t wanted,
                                 uint32_t *over) {
    const kvp_copy_list *ring = &s->config.list[d];
    uint32_t at = dir->list_at, left = ring->capacity - dir->listed, here = ring->capacity - at;
    *over = 0;
    if (here > left) here = left;
    if (here < wanted && left - here > here) *over = here, here = left - here, at = 0;
    if (here < wanted && here < ring->capacity / LEAST_LIST) here = 0;
    return (kvp_copy_list){ring->host + at, ring->device + at * sizeof(kvp_copy), here, 0};
}

/* Jobs whose copies may stand in one submission with the head's: ready, and writing other blocks. */
static uint32_t gather(kvp_submitter *s, struct direction *dir, uint64_t most, uint64_t largest, bool many) {
    uint64_t bytes = 0, asked = 0;
    uint32_t n = 0;
    for (struct kvp_job *j = dir->first; j; j = j->next) {
        if (j != dir->first) {
            if (!many || !kvp_fence_passed(s, j)) break;
            if (j == dir->first->next) kvp_job_conflicts(dir->first, dir->stamp, UINT64_MAX); /* what it writes */
            if (kvp_job_conflicts(j, dir->stamp, dir->first->sequence)) break;
        }
        struct cursor at = j->at;
        n += kvp_job_copies(j, &at, s->run + n, RUN_MAX - n, most, largest, !of_cells(s), &bytes, &asked);
        if (n == RUN_MAX || bytes >= most || !kvp_job_all(j, &at)) break;
    }
    return n;
}

/* Books the first `count` copies of the run with the jobs they belong to. */
static uint64_t book(kvp_submitter *s, struct direction *dir, const struct attempt *a, uint64_t most, uint64_t largest,
                     int method) {
    uint64_t left = a->count, bytes = 0, begun = 0;
    while (left && dir->first) {
        struct kvp_job *j = dir->first;
        uint64_t asked = 0;
        kvp_must(s, !j->after, "copies are submitted before what they wait for");
        j->begun = 1;
        __atomic_store_n(&j->status.state, KVP_SUBMITTING, __ATOMIC_RELAXED);
        begun = j->sequence;
        uint32_t pieces =
            kvp_job_copies(j, &j->at, s->run, (uint32_t)left, most, largest, !of_cells(s), &bytes, &asked);
        left -= pieces;
        kvp_cells_begun(s, j, asked);
        j->status.submitted += asked;
        j->status.descriptors += pieces;
        j->status.stream = (uint64_t)(uintptr_t)dir->stream;
        j->status.calls += method == KVP_LOOP ? a->count : 1;
        j->status.submit_ns += a->ns;
        if (a->ns > j->status.longest_ns) j->status.longest_ns = a->ns;
        j->status.methods |= 1u << method;
        if (!kvp_job_all(j, &j->at)) break;
        pop(dir);
        fly(dir, j);
    }
    return begun;
}

/* Places that the head may take now; 0: enough is ahead of the device, or something is used up. */
static uint32_t room_now(kvp_submitter *s, const struct direction *dir, int d, uint64_t now, bool others) {
    bool hurry = dir->first->sequence <= dir->hurry;
    int launches;
    uint64_t launch = launch_bytes(s, dir, d, by_kernel(dir->method), &launches);
    uint64_t ahead = launch * (uint64_t)(others ? 1 : launches), in_flight = atomic_load(&dir->bytes);
    if (in_flight && in_flight + launch / 2 > ahead && !hurry) return 0;
    if (dir->leave && in_flight && !hurry) return 0;
    if (s->config.bytes_per_s[d] && dir->next_ns > now) return 0;
    uint32_t room = room_for(s, dir);
    if (!room || kvp_events_left(s) < 4 || dir->line.tail - dir->line.head >= MARKERS - 1) return 0;
    return room;
}

/* The stream waits for what the head comes after. False: that failed, and the head with it. */
static bool wait_on_the_device(kvp_submitter *s, struct direction *dir) {
    struct kvp_job *head = dir->first;
    int code = CALL(s, stream_wait_event, stream_event_fn)(dir->stream, head->after->event, 0);
    if (code) {
        kvp_clear_error(s);
        fail_head(s, dir, code, KVP_FAULT_WAIT);
        return false;
    }
    kvp_fence_drop(s, head);
    head->begun = 1; /* the stream is kept */
    return true;
}

/* One submission as it is put together. */
struct launch {
    uint64_t gathered, largest, most; /* bytes: of the run, of one copy in it, of what the method takes of it */
    uint32_t n, ctas, entries;        /* copies of the run; entries of the list that a kernel uses */
    uint32_t first_entry;
    int method, row;
    const kvp_method_row *chosen; /* by calibration; NULL where another method did it */
    void *start;                  /* the event in front, or NULL */
    bool idle;                    /* nothing of the direction was outstanding */
};

/* The same, or all that is left of the head where that is little more: a launch of the rest would cost its beginning
 * and end for a few bytes, and the rate that is seen of it would make the next launches shorter still. */
static uint64_t with_the_rest(const struct kvp_job *head, uint64_t bytes) {
    const kvp_job_status *t = &head->status;
    uint64_t left = (uint64_t)((double)t->bytes * (double)(t->copies - t->submitted) / (double)t->copies);
    return left > bytes && left <= bytes + bytes / SHORT_REST ? left : bytes;
}

/* The next copies, and the method that is best for them. */
static struct launch put_together(kvp_submitter *s, struct direction *dir, int d, uint64_t now) {
    struct launch l = {.method = KVP_LOOP, .row = -1, .idle = line_empty(&dir->line)};
    int launches;
    l.largest = launch_bytes(s, dir, d, false, &launches);
    l.gathered = launch_bytes(s, dir, d, true, &launches);
    if (l.idle) dir->ramp = FIRST_LAUNCH; /* the device begins at once */
    if (l.gathered > dir->ramp) l.gathered = dir->ramp;
    l.gathered = with_the_rest(dir->first, l.gathered);
    dir->ramp = dir->ramp < MOST_LAUNCH ? 2 * dir->ramp : dir->ramp; /* put together while the one before is copied */
    if (l.largest > l.gathered) l.largest = l.gathered;
    if (of_cells(s)) l.largest = UINT64_MAX; /* a cell is never cut */
    l.n = gather(s, dir, l.gathered, l.largest, !s->config.pageable && !dir->first->of);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < l.n; i++) bytes += s->run[i].bytes;
    bool computing = now < s->waits_until_ns || now < s->hindered_until_ns;
    const kvp_method_table *table = of_cells(s) ? kvp_cells_methods(s) : s->config.methods;
    uint32_t allowed = of_cells(s) ? 1u << KVP_KERNEL : ~(s->methods_off | 1u << KVP_STAGED);
    if (of_cells(s)) l.method = KVP_KERNEL, l.ctas = 1; /* where no row may be taken */
    if (!s->config.pageable && table)
        l.row = kvp_choose_row(table, allowed, dir->factors, computing ? KVP_BESIDE : KVP_QUIET,
                               d == STORE ? KVP_D2H : KVP_H2D, bytes / l.n, l.n);
    s->config.copier.store_bytes_per_s = computing && s->config.methods ? s->config.methods->paced_store : 0;
    if (l.row >= 0) {
        l.chosen = &table->row[d][l.row];
        l.method = (int)l.chosen->method, l.ctas = l.chosen->ctas;
    }
    l.most = l.gathered;
    if (!by_kernel(l.method)) { /* shorter submissions: what others copy stands behind them */
        l.most = l.largest;
        bytes = 0;
        for (uint32_t i = 0; i < l.n; i++)
            if ((bytes += s->run[i].bytes) >= l.most) l.n = i + 1;
    }
    return l;
}

/* Submits by the method, and where that takes nothing by a lower one. No copies and no error: there are no slots yet.
 */
static struct attempt try_methods(kvp_submitter *s, struct direction *dir, int d, uint32_t room, struct launch *l) {
    for (;;) {
        kvp_copy_list list = {0};
        uint32_t passed_over = 0;
        if (by_kernel(l->method) && !(list = entries_for(s, dir, d, l->n, &passed_over)).capacity)
            return (struct attempt){0};
        struct attempt a = try_method(s, dir, d, l->method, l->ctas, l->n, room, l->most, &list);
        l->entries = list.used ? list.used + passed_over : 0;
        l->first_entry = (uint32_t)(list.host - s->config.list[d].host);
        if (of_cells(s)) return a; /* what lies in a cell is no block: no other method moves it */
        if (a.count || l->method == KVP_LOOP) {
            if (l->chosen && l->method != (int)l->chosen->method) l->chosen = NULL;
            return a;
        }
        if (a.code) { /* it failed, not just did not fit: it is not asked again */
            s->methods_off |= 1u << l->method;
            s->method_error = a.code;
        }
        l->method = lower_method(s, l->method);
    }
}

/* Books what was submitted with its jobs, and puts an event behind it. */
static void note_launch(kvp_submitter *s, struct direction *dir, int d, const struct launch *l, struct attempt *a,
                        uint64_t now) {
    int method = l->method;
    for (uint32_t i = 0; i < a->count; i++) a->bytes += s->run[i].bytes;
    s->launches[d][method] += method == KVP_LOOP ? a->count : 1;
    s->moved[d][method] += a->bytes;
    if (by_kernel(method)) s->cta_bytes[d] += a->bytes * l->ctas;
    struct kvp_job *before = dir->flying_last;
    dir->method = method;
    uint64_t expected = l->chosen ? (uint64_t)kvp_method_ns(l->chosen, a->bytes / a->count, a->count) : 0;
    uint64_t begun = book(s, dir, a, l->gathered, l->largest, method);
    dir->listed += l->entries;
    if (l->entries) dir->list_at = (dir->list_at + l->entries) % s->config.list[d].capacity;
    add_marker(s, dir, a, method, l->start, l->entries, begun, now, l->idle);
    struct marker *newest = &dir->line.marker[(dir->line.tail - 1) % MARKERS];
    newest->expected_ns = expected;
    newest->row = l->row;
    newest->first_entry = l->first_entry;
    newest->cells = of_cells(s) ? a->count : 0;
    newest->coded = d == STORE && s->coding;
    newest->unhindered = method == KVP_BATCH && a->bytes / a->count >= LARGE_COPY;
    if (s->config.bytes_per_s[d])
        dir->next_ns = (dir->next_ns > now ? dir->next_ns : now) +
                       (uint64_t)((double)a->bytes / (double)s->config.bytes_per_s[d] * 1e9);
    for (struct kvp_job *j = before ? before->next : dir->flying; j; j = j->next) {
        newest->sequence = j->sequence;
        submitted(s, dir, j, newest->event);
    }
}

/* Submits once from the head of a direction. 1: it did; 0: nothing may be submitted now. */
static int submit_once(kvp_submitter *s, int d, uint64_t now, bool others) {
    struct direction *dir = &s->direction[d];
    struct kvp_job *head = dir->first;
    if (!head) return 0;
    if (atomic_load(&dir->inlined_jobs) || atomic_load(&dir->shared_places)) return 0; /* those came before */
    enum gate open = gate(s, dir, now);
    if (open == FAILED) return 1;
    uint32_t room = open == SHUT ? 0 : room_now(s, dir, d, now, others);
    if (!room) return 0;
    if (line_empty(&dir->line) && !head->begun) { /* nothing is outstanding: any stream keeps the order */
        take_stream(s, dir, d);
        dir->progress_ns = now;
    }
    if (open == HURRIED && !wait_on_the_device(s, dir)) return 1;
    if (s->config.ranges && !head->range)
        head->range = kvp_nvtx_range_start(head->direction == STORE, (uint32_t)head->status.id,
                                           (uint64_t)(uintptr_t)dir->stream, head->status.bytes);
    struct launch l = put_together(s, dir, d, now);
    if (open == HURRIED) l.start = kvp_event_take(s);
    if (l.start && CALL(s, event_record, event_stream_fn)(l.start, dir->stream)) {
        kvp_clear_error(s);
        kvp_event_give(s, l.start);
        l.start = NULL;
    }
    struct attempt a = try_methods(s, dir, d, room, &l);
    uint32_t refused = of_cells(s) ? KVP_FAULT_LAUNCH : KVP_FAULT_COPY;
    if (a.count) {
        note_launch(s, dir, d, &l, &a, now);
        if (a.code && dir->first) fail_head(s, dir, a.code, refused);
        return 1;
    }
    leave_start(dir, l.start, now);
    if (a.code) fail_head(s, dir, a.code, refused);
    return a.code != 0;
}

/* Nothing waits in a direction, and little is in flight. */
bool kvp_hungry(kvp_submitter *s, int d) {
    struct direction *dir = &s->direction[d];
    int launches;
    uint64_t launch = launch_bytes(s, dir, d, by_kernel(dir->method), &launches);
    return !dir->first && atomic_load(&dir->bytes) < launch * (uint64_t)launches / 2;
}

/* When the thread should look again at a direction. */
static uint64_t next_look(kvp_submitter *s, int d, uint64_t now) {
    struct direction *dir = &s->direction[d];
    uint64_t at = UINT64_MAX;
    if (atomic_load(&dir->inlined_jobs) || atomic_load(&dir->shared_places)) at = now + SHARED_PAUSE_NS;
    if (!line_empty(&dir->line)) {
        uint64_t due = dir->line.marker[dir->line.head % MARKERS].due_ns;
        if (due > now + 2 * LEAST_PAUSE_NS) { /* the estimate may be too late: half of the way, then again */
            uint64_t half = now + (due - now) / 2;
            at = half < at ? half : at;
        } else {
            at = now + dir->pause_ns < at ? now + dir->pause_ns : at;
            dir->pause_ns = dir->pause_ns * 3 / 2 < MOST_PAUSE_NS ? dir->pause_ns * 3 / 2 : MOST_PAUSE_NS;
        }
    }
    if (dir->first) {
        if (dir->gate_since) {
            uint64_t waited = (now - dir->gate_since) / 16;
            uint64_t pause = waited < LEAST_PAUSE_NS ? LEAST_PAUSE_NS : waited > MOST_PAUSE_NS ? MOST_PAUSE_NS : waited;
            if (now + pause < at) at = now + pause;
        }
        if (s->config.bytes_per_s[d] && dir->next_ns > now && dir->next_ns < at) at = dir->next_ns;
        if (at == UINT64_MAX) at = now + MOST_PAUSE_NS; /* short of events, which the other direction holds */
    }
    return at;
}

/* A transfer that does not move is named, and the submitter steps aside. */
static void watch(kvp_submitter *s, int d, uint64_t now) {
    struct direction *dir = &s->direction[d];
    struct kvp_job *j = dir->flying ? dir->flying : dir->first;
    if (!s->config.stuck_ns || !j || line_empty(&dir->line) || now < dir->progress_ns + s->config.stuck_ns) return;
    s->stuck_job = j->status.id;
    kvp_lose(s, 0, KVP_FAULT_STUCK);
}

uint64_t kvp_step(kvp_submitter *s, uint64_t now) {
    s->steps++;
    kvp_take_incoming(s, now);
    if (atomic_load(&s->broken)) {
        kvp_lose(s, atomic_load(&s->broken), atomic_load(&s->fault) ? atomic_load(&s->fault) : KVP_FAULT_DEVICE);
        return UINT64_MAX;
    }
    if (atomic_load(&s->closing) == 2) {
        for (int d = 0; d < 2; d++) kvp_fail_all(s, &s->direction[d].first, &s->direction[d].last, 0, KVP_FAULT_CLOSED);
    }
    if (atomic_exchange(&s->hurrying, 0)) {
        for (int d = 0; d < 2; d++)
            for (struct kvp_job *j = s->direction[d].first; j; j = j->next) {
                if (!atomic_load(&j->hurry)) continue;
                while (j->of && j->next && j->next->of == j->of) j = j->next; /* whoever waits for one, waits for all */
                s->direction[d].hurry = j->sequence;
            }
    }
    bool idle = !s->direction[LOAD].flying && !s->direction[STORE].flying;
    if (idle && now - s->clock_at > RENEW_CLOCK_NS && atomic_load(&s->pending)) kvp_renew_device_clock(s);
    for (int d = 0; d < 2; d++) {
        kvp_retire_shared(s, d);
        kvp_retire(s, d, now);
        if (atomic_load(&s->broken)) return now;
    }
    pthread_mutex_lock(&s->lock);
    if (!s->pins)
        while (s->limbo_count) kvp_event_free(s, s->limbo[--s->limbo_count]);
    pthread_mutex_unlock(&s->lock);
    kvp_events_grow(s, now);
    for (int d = 0; d < 2; d++) {
        struct direction *loads = &s->direction[LOAD];
        bool others = d == STORE && (loads->flying || loads->first);
        while (submit_once(s, d, now, others)) now = kvp_now_ns();
        if (atomic_load(&s->broken)) return now;
        watch(s, d, now);
    }
    uint64_t a = next_look(s, LOAD, now), b = next_look(s, STORE, now), c = kvp_fences_record(s, now);
    a = a < b ? a : b;
    return a < c ? a : c;
}

uint64_t kvp_step_actor(void *ctx, uint64_t now) {
    kvp_submitter *s = ctx;
    uint64_t next = kvp_step(s, now);
    if (!atomic_load(&s->broken)) kvp_check(s, next);
    return next;
}
