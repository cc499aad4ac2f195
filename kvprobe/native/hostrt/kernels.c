/* kvprobe's copy kernels, as the host runtime executes them: the driver's calls that load and launch them, the bytes
 * they move, and the time they take.
 *
 * An image is the text IMAGE in place of a cubin. A launch reads its list when it executes, as a kernel does: who
 * changes the list too early gets wrong bytes. Addresses that a GPU could not reach end in an illegal address, which is
 * sticky.
 *
 * TIME (figures: an H100 behind PCIe 5.0 x16, scaled to the configured link). Multiprocessors reach 90% of the link
 * when they read host memory and 93% when they write it; one CTA reaches 84%, and moves a piece below 2 KiB no faster
 * than one of 2 KiB. Each warp keeps to its pace. Launches of different streams share the link. Within device memory
 * one CTA moves twice the link.
 */
#include "rt.h"

#include <stdlib.h>
#include <string.h>

#define IMAGE "KVPROBE HOST KERNELS" /* kvprobe/cuda/kernels.py has the same */
#define START_NS 4000                /* a launch: scheduling it, reading its list */
#define PIECE_LEAST 2048
#define ONE_CTA 0.84
#define WARPS 8         /* of a CTA */
#define UNPACK_RATE 4.0 /* bytes per ns that a CTA unpacks */

typedef struct {
    uint64_t dst, src, bytes;
} entry; /* kvp_copy */

typedef struct {
    uint64_t list;
    uint32_t total, units, unit, chunk, stage, stages, pace;
} work; /* launch() in copy_methods.c, copy.cu */

static const char *const names[] = {"kvp_copy_load",  "kvp_copy_store",  "kvp_copy_registers", "kvp_read",
                                    "kvp_coded_load", "kvp_coded_store", "kvp_coded_unpack"};
enum { KERNELS = sizeof names / sizeof *names, READ = 3, CODED_LOAD = 4, CODED_STORE = 5, UNPACK = 6 };
static char module, functions[KERNELS];

/* What a launch leaves for its execution. All stay linked and are used again. */
typedef struct launched {
    struct launched *next;
    _Atomic bool busy;
    runtime *rt;
    const entry *list;
    uint32_t count;
    kvh_cells cells; /* of a coded copy, which reads no `list` */
    kvp_wire_unpacking image;
} launched;
static _Atomic(launched *) all;

static launched *new_launched(void) {
    for (launched *l = atomic_load(&all); l; l = l->next) {
        bool idle = false;
        if (atomic_compare_exchange_strong(&l->busy, &idle, true)) return l;
    }
    launched *l = calloc(1, sizeof *l);
    if (!l) return NULL;
    atomic_store(&l->busy, true);
    l->next = atomic_load(&all);
    while (!atomic_compare_exchange_weak(&all, &l->next, l)) continue;
    return l;
}

static bool reachable(runtime *rt, const entry *e, route *r) {
    return !kvh_route(rt, (void *)(uintptr_t)e->dst, (const void *)(uintptr_t)e->src, e->bytes, cudaMemcpyDefault, r) &&
           r->memory != KVP_MEM_PAGEABLE;
}

static void execute(void *argument) {
    launched *l = argument;
    runtime *rt = l->rt;
    bool bad = false;
    for (uint32_t i = 0; i < l->count && !bad; i++) {
        const entry *e = &l->list[i];
        route r;
        if (!e->bytes) continue;
        bad = !reachable(rt, e, &r);
        if (!bad) memmove((void *)(uintptr_t)e->dst, (const void *)(uintptr_t)e->src, e->bytes);
    }
    atomic_store(&l->busy, false);
    if (bad) {
        kvh_lock(rt);
        kvh_fail(rt, cudaErrorIllegalAddress);
        kvh_unlock(rt);
    }
}

static double rate_of(const kvhost_config *config, uint8_t direction) {
    double rate = direction == KVP_D2H ? config->d2h_bytes_per_s : config->h2d_bytes_per_s;
    return rate > 0 ? rate / 1e9 : 4; /* bytes per ns */
}

static cudaError_t launch_copies(call *c, unsigned ctas, const work *w, cudaStream_t stream) {
    if (!w->list || !w->units || !ctas) return cudaErrorInvalidValue;
    launched *l = new_launched();
    if (!l) return cudaErrorMemoryAllocation;
    l->rt = c->rt;
    l->list = (const entry *)(uintptr_t)w->list;
    l->count = w->total / w->units;
    uint64_t bytes = 0, of_ctas = 0;
    route r = {.direction = KVP_H2D, .memory = KVP_MEM_PINNED};
    for (uint32_t i = 0, known = 0; i < l->count; i++) {
        const entry *e = &l->list[i];
        if (e->bytes && !known) known = reachable(c->rt, e, &r);
        bytes += e->bytes;
        of_ctas += e->bytes > PIECE_LEAST ? e->bytes : PIECE_LEAST;
    }
    double rate = rate_of(&c->rt->config, r.direction), most = r.direction == KVP_D2H ? 0.93 : 0.90;
    bool inside = r.direction == KVP_D2D;
    double ns = (double)of_ctas / (ctas * rate * (inside ? 2 : ONE_CTA)),
           link = inside ? 0 : (double)bytes / (rate * most);
    op o = {.kind = OP_WORK, .class = KVHOST_COMPUTE, .direction = r.direction, .bytes = (uint64_t)link};
    double paced = (double)bytes * w->pace / ((double)ctas * WARPS * (1 << 20));
    if (link < paced) link = paced;
    o.work.ns = START_NS + (uint64_t)(ns > link ? ns : link);
    o.work.fn = execute;
    o.work.arg = l;
    if (c->tracing && l->count)
        kvh_trace_about(c, (void *)(uintptr_t)l->list->dst, (void *)(uintptr_t)l->list->src, bytes, l->count,
                        r.direction, r.memory);
    cudaError_t error = kvh_submit_one(c, stream, &o);
    if (error) atomic_store(&l->busy, false);
    return error;
}

/* ---- coded copies: cells.c ---------------------------------------------------------------------------------------
 */

static void execute_cells(void *argument) {
    launched *l = argument;
    runtime *rt = l->rt;
    bool bad = !kvh_cells_move(rt, &l->cells);
    atomic_store(&l->busy, false);
    if (bad) {
        kvh_lock(rt);
        kvh_fail(rt, cudaErrorIllegalAddress);
        kvh_unlock(rt);
    }
}

static void weigh(runtime *rt, op *o) {
    const kvh_cells *c = &((launched *)o->work.arg)->cells;
    double rate = rate_of(&rt->config, o->direction), busy = 0, wire = kvh_cells_weigh(rt, c, &busy);
    double link = wire / (rate * (c->store ? 0.93 : 0.90)), ns = busy / (c->ctas * rate);
    double paced = wire * c->work.pace / ((double)c->ctas * WARPS * (1 << 20));
    if (link < paced) link = paced;
    o->bytes = (uint64_t)link;
    o->work.ns = START_NS + (uint64_t)(ns > link ? ns : link);
}

/* Where time is real the lock is too dear to look at blocks under it: those were looked at when it was launched. */
void kvh_weigh(runtime *rt, op *o) {
    if (rt->simulation && o->work.fn == execute_cells) weigh(rt, o);
}

static cudaError_t launch_cells(call *c, bool store, unsigned ctas, const kvp_wire_work *w, cudaStream_t stream) {
    if (!w->list || !w->count || !w->raw_bytes || !ctas) return cudaErrorInvalidValue;
    launched *l = new_launched();
    if (!l) return cudaErrorMemoryAllocation;
    l->rt = c->rt;
    l->cells = (kvh_cells){.work = *w, .store = store, .ctas = ctas};
    op o = {.kind = OP_WORK, .class = KVHOST_COMPUTE, .direction = store ? KVP_D2H : KVP_H2D};
    o.work.fn = execute_cells;
    o.work.arg = l;
    if (!c->rt->simulation) weigh(c->rt, &o);
    const kvp_wire_entry *first = (const kvp_wire_entry *)(uintptr_t)w->list;
    if (c->tracing)
        kvh_trace_about(c, (void *)(uintptr_t)first->dst, (void *)(uintptr_t)first->src,
                        (uint64_t)w->count * w->raw_bytes, w->count, o.direction, KVP_MEM_PINNED);
    cudaError_t error = kvh_submit_one(c, stream, &o);
    if (error) atomic_store(&l->busy, false);
    return error;
}

/* ---- images ---------------------------------------------------------------------------------------------------- */

static void execute_unpack(void *argument) {
    launched *l = argument;
    const kvp_wire_unpacking w = l->image;
    runtime *rt = l->rt;
    void *to = (void *)(uintptr_t)w.to, *refused = (void *)(uintptr_t)w.refused;
    const void *image = (const void *)(uintptr_t)w.image;
    uint64_t least = kvp_wire_cells(w.raw_bytes) * sizeof(kvp_wire_index);
    bool bad = kvh_device_check(rt, to, w.raw_bytes) || kvh_device_check(rt, image, least) ||
               kvh_device_check(rt, refused, sizeof(uint32_t));
    int code = bad ? KVP_WIRE_WHOLE : kvp_wire_unpack(image, to, w.raw_bytes);
    if (code) *(volatile uint32_t *)refused = (uint32_t)code;
    atomic_store(&l->busy, false);
    if (bad) {
        kvh_lock(rt);
        kvh_fail(rt, cudaErrorIllegalAddress);
        kvh_unlock(rt);
    }
}

static cudaError_t launch_unpack(call *c, unsigned ctas, const kvp_wire_unpacking *w, cudaStream_t stream) {
    if (!w->image || !w->to || !w->raw_bytes || !w->refused || !ctas) return cudaErrorInvalidValue;
    launched *l = new_launched();
    if (!l) return cudaErrorMemoryAllocation;
    l->rt = c->rt;
    l->image = *w;
    op o = {.kind = OP_WORK, .class = KVHOST_COMPUTE, .direction = KVP_D2D};
    o.work.fn = execute_unpack;
    o.work.arg = l;
    o.work.ns = START_NS + (uint64_t)((double)w->raw_bytes / (UNPACK_RATE * ctas));
    cudaError_t error = kvh_submit_one(c, stream, &o);
    if (error) atomic_store(&l->busy, false);
    return error;
}

/* Which of the kernels a function handle names; -1: none. */
static int number_of(const void *fn) {
    for (int i = 0; i < KERNELS; i++)
        if (fn == &functions[i]) return i;
    return -1;
}

bool kvh_is_copy_kernel(const void *fn) { return number_of(fn) >= 0; }

cudaError_t kvh_launch_copy_kernel(call *c, const void *fn, unsigned ctas, void **params, cudaStream_t stream) {
    if (!params || !params[0]) return cudaErrorInvalidValue;
    int number = number_of(fn);
    if (number == UNPACK) return launch_unpack(c, ctas, params[0], stream);
    if (number >= CODED_LOAD) return launch_cells(c, number == CODED_STORE, ctas, params[0], stream);
    if (number != READ) return launch_copies(c, ctas, params[0], stream);
    op o = {.kind = OP_DELAY, .class = KVHOST_COMPUTE}; /* a CTA reads 16 KiB, all together 1,000 bytes an ns */
    o.work.ns = START_NS + (uint64_t)ctas * 16;
    return kvh_submit_one(c, stream, &o);
}

/* Launches of different streams share the link: runtime.lock is held. */
void kvh_share_link(runtime *rt, op *o) {
    static struct {
        runtime *rt;
        uint64_t free_ns[5];
    } link;
    if (link.rt != rt) memset(&link, 0, sizeof link), link.rt = rt;
    uint64_t *free_ns = &link.free_ns[o->direction % 5];
    if (o->start_ns < *free_ns) o->start_ns = *free_ns;
    *free_ns = o->start_ns + o->bytes;
}

/* ---- the driver's calls
 * ---------------------------------------------------------------------------------------------- */

KVP_EXPORT int cuModuleLoadData(void **out, const void *image) {
    KVH_ENTER(cuModuleLoadData, 0);
    if (!out || !image) KVH_LEAVE(cudaErrorInvalidValue);
    if (memcmp(image, IMAGE, sizeof IMAGE - 1)) KVH_LEAVE(200); /* CUDA_ERROR_INVALID_IMAGE */
    kvh_ctx_lock(c);
    *out = &module;
    kvh_ctx_unlock(c);
    KVH_LEAVE(cudaSuccess);
}

KVP_EXPORT int cuModuleGetFunction(void **fn, void *from, const char *name) {
    KVH_ENTER(cuModuleGetFunction, 0);
    if (!fn || !name || from != &module) KVH_LEAVE(cudaErrorInvalidValue);
    for (int i = 0; i < KERNELS; i++)
        if (!strcmp(name, names[i])) {
            *fn = &functions[i];
            KVH_LEAVE(cudaSuccess);
        }
    KVH_LEAVE(500); /* CUDA_ERROR_NOT_FOUND */
}

KVP_EXPORT int cuFuncSetAttribute(void *fn, int attribute, int value) {
    KVH_ENTER(cuFuncSetAttribute, 0);
    (void)attribute;
    KVH_LEAVE(number_of(fn) < 0 || value < 0 ? cudaErrorInvalidValue : cudaSuccess);
}
