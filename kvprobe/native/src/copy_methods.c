/* The methods: how many places each takes, and the calls that submit it. */
#include "kvp_copy.h"

#include <string.h>

#define BATCH_COPIES 4096 /* a call; drivers were seen to crash or hang past 50,000 (vLLM issue 49276) */
#define BATCH_PLACES 0.041

/* How copy.cu lays out the shared memory of a warp: RING_HEADER bytes of barriers, then stages. */
#define RING_HEADER 512
#define WARP 32
#define STAGES_MAX 16
#define STAGES 4 /* that a ring has at least */
#define PACED_STAGES 8
#define LEAST_PACE 1000000000u /* bytes per second */
#define STAGE_LEAST 1024
#define UNIT_BYTES 16384 /* what one warp moves at a time; smaller where there would be too few for all warps */
#define UNIT_LEAST 4096

/* ---- places --------------------------------------------------------------------------------------------------------
 */

/* Copies from the first on whose payload is at most max_bytes; the first one always. */
static uint32_t within(const kvp_copy *copies, uint32_t count, uint64_t max_bytes) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += copies[i].bytes;
        if (i && sum > max_bytes) return i;
    }
    return count;
}

/* Copies from the first on whose host sides follow one another. */
static uint32_t contiguous(const kvp_copy *copies, uint32_t count, int direction) {
    for (uint32_t i = 1; i < count; i++) {
        const kvp_copy *a = &copies[i - 1], *b = &copies[i];
        if (direction == KVP_H2D ? b->src != a->src + a->bytes : b->dst != a->dst + a->bytes) return i;
    }
    return count;
}

static const kvp_copy_kernel *kernel_of(const kvp_copier *c, int direction) {
    const kvp_copy_kernel *kernel = direction == KVP_D2H ? &c->store_kernel : &c->load_kernel;
    return kernel->function && c->cuda.launch_kernel ? kernel : NULL;
}

static double places_of_batch(const kvp_copier *c) { return c->batch_places > 0 ? c->batch_places : BATCH_PLACES; }

static uint32_t batch_limit(const kvp_copier *c) {
    return c->batch_max && c->batch_max < BATCH_COPIES ? c->batch_max : BATCH_COPIES;
}

static uint32_t round_up(double value) {
    uint32_t whole = (uint32_t)value;
    return whole < value ? whole + 1 : whole;
}

uint32_t kvp_copy_plan(const kvp_copier *c, int method, const kvp_copy *copies, uint32_t count, int direction,
                       uint32_t room, uint64_t max_bytes, uint32_t list_capacity, uint32_t *places) {
    *places = 0;
    if (!count || !room) return 0;
    uint32_t n = count;
    switch (method) {
    case KVP_LOOP:
        n = within(copies, n < room ? n : room, max_bytes);
        *places = n;
        return n;
    case KVP_BATCH: {
        if (!c->cuda.memcpy_batch_async) return 0;
        double each = places_of_batch(c), most = room / each;
        if (n > batch_limit(c)) n = batch_limit(c);
        if (n > most) n = (uint32_t)most;
        n = within(copies, n, max_bytes);
        *places = n ? round_up(n * each) : 0;
        return n;
    }
    case KVP_KERNEL:
        if (!kernel_of(c, direction)) return 0;
        if (n > list_capacity) n = list_capacity;
        n = n ? within(copies, n, max_bytes) : 0;
        *places = n ? 1 : 0;
        return n;
    case KVP_STAGED: {
        uint64_t half = c->staging_bytes / 2 & ~(uint64_t)15; /* one for each direction */
        if (!kernel_of(c, direction) || !c->cuda.memcpy_async || !c->staging || room < 2) return 0;
        if (n > list_capacity) n = list_capacity;
        n = contiguous(copies, n, direction);
        n = n ? within(copies, n, max_bytes < half ? max_bytes : half) : 0;
        if (!n || copies[0].bytes > half) return 0;
        *places = 2;
        return n;
    }
    default:
        return 0;
    }
}

/* ---- batch
 * ----------------------------------------------------------------------------------------------------------- */

typedef cudaError_t (*batch_12)(void **, void **, size_t *, size_t, kvp_memcpy_attributes *, size_t *, size_t, size_t *,
                                cudaStream_t);
typedef cudaError_t (*batch_13)(void **, void **, size_t *, size_t, kvp_memcpy_attributes *, size_t *, size_t,
                                cudaStream_t);

static int submit_batch(const kvp_copier *c, const kvp_copy *copies, uint32_t count, void *stream, uint32_t *submitted,
                        uint32_t *calls) {
    void *dst[BATCH_COPIES], *src[BATCH_COPIES];
    size_t bytes[BATCH_COPIES];
    uint32_t limit = batch_limit(c);
    for (uint32_t at = 0; at < count;) {
        size_t n = 0, zero = 0, fail = SIZE_MAX;
        uint32_t i = at;
        for (; i < count && n < limit; i++) {
            if (!copies[i].bytes) continue; /* CUDA refuses an empty copy of a batch */
            dst[n] = (void *)(uintptr_t)copies[i].dst;
            src[n] = (void *)(uintptr_t)copies[i].src;
            bytes[n++] = copies[i].bytes;
        }
        if (n) {
            /* The source is read in stream order, never earlier: what an earlier operation writes there is seen. */
            kvp_memcpy_attributes attributes = {.srcAccessOrder = 1};
            int code =
                c->cuda.runtime_version < 13000
                    ? ((batch_12)c->cuda.memcpy_batch_async)(dst, src, bytes, n, &attributes, &zero, 1, &fail, stream)
                    : ((batch_13)c->cuda.memcpy_batch_async)(dst, src, bytes, n, &attributes, &zero, 1, stream);
            ++*calls;
            if (code) return code;
        }
        *submitted += i - at;
        at = i;
    }
    return cudaSuccess;
}

/* ---- kernel
 * ---------------------------------------------------------------------------------------------------------- */

typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                         void **);

static uint64_t units_in(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit; }

/* Launches a copy kernel on the list's first `count` entries. Copies that all have the same number of units are cut
 * into them by the kernel; else the longest are cut here, as far as the list has space. */
static int launch(const kvp_copier *c, const kvp_copy_kernel *k, uint32_t count, uint32_t ctas, void *stream,
                  kvp_copy_list *list) {
    uint64_t sum = 0, longest = 0, shortest = UINT64_MAX;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = list->host[i].bytes;
        sum += bytes;
        if (bytes > longest) longest = bytes;
        if (bytes < shortest) shortest = bytes;
    }
    list->used = count;
    if (!sum) return cudaSuccess;
    uint32_t most = k->max_ctas ? k->max_ctas : 1, warps = k->threads / WARP;
    if (!ctas) ctas = 1;
    if (ctas > most) ctas = most;
    uint64_t unit = UNIT_BYTES;
    while (unit > UNIT_LEAST && sum / unit < 4ull * ctas * warps) unit /= 2;
    while (units_in(longest, unit) > (UINT32_MAX >> 1) / count) unit *= 2; /* their number has 32 bits */
    uint64_t units = units_in(longest, unit);
    if (units != units_in(shortest, unit)) {
        /* Entries of unlike length: one warp takes an entry, so none may be much longer than the rest. */
        units = 1;
        for (uint64_t longest_entry = 4 * unit; longest > longest_entry; longest_entry *= 2) {
            uint64_t entries = 0;
            for (uint32_t i = 0; i < count; i++) {
                uint64_t of_one = units_in(list->host[i].bytes, longest_entry);
                entries += of_one ? of_one : 1;
            }
            if (entries > list->capacity) continue;
            uint32_t to = (uint32_t)entries;
            for (uint32_t i = count; i--;) { /* from the back: an entry never overwrites one not yet read */
                kvp_copy whole = list->host[i];
                uint64_t of_one = units_in(whole.bytes, longest_entry);
                for (uint64_t p = of_one ? of_one : 1; p--;) {
                    uint64_t at = p * longest_entry, left = whole.bytes - at;
                    list->host[--to] =
                        (kvp_copy){whole.dst + at, whole.src + at, left < longest_entry ? left : longest_entry};
                }
            }
            list->used = count = (uint32_t)entries;
            break;
        }
        unit = UINT32_MAX & ~(uint64_t)15; /* an entry is not cut again; the kernel loops over its stages */
        units = units_in(longest, unit);
    }
    uint64_t total = units * count, per_cta = (total + warps - 1) / warps;
    if (ctas > per_cta) ctas = (uint32_t)per_cta;
    /* As many chunks for each warp, at least four where there are so many units: nobody waits for a last long one. */
    uint64_t all_warps = (uint64_t)ctas * warps, rounds = (total + WARP * all_warps - 1) / (WARP * all_warps);
    if (rounds < 4) rounds = 4;
    uint64_t chunk = (total + rounds * all_warps - 1) / (rounds * all_warps);
    uint32_t ring = k->shared_bytes / warps, stage = 0, stages = 0, pace = 0;
    if (ring > RING_HEADER) {
        ring -= RING_HEADER;
        if (k == &c->store_kernel && c->store_bytes_per_s >= LEAST_PACE)
            pace = (uint32_t)((double)ctas * warps * (1 << 20) * 1e9 / (double)c->store_bytes_per_s);
        uint32_t largest = ring / (pace ? PACED_STAGES : STAGES);
        uint64_t wanted = longest < unit ? longest : unit;
        stage = wanted < STAGE_LEAST ? STAGE_LEAST : wanted < largest ? (uint32_t)(wanted + 15) & ~15u : largest;
        for (stages = STAGES_MAX; stages > 2 && stages * stage > ring;) stages /= 2;
    }
    struct {
        uint64_t list;
        uint32_t total, units, unit, chunk, stage, stages, pace;
    } work = {list->device, (uint32_t)total, (uint32_t)units, (uint32_t)unit, (uint32_t)chunk, stage, stages, pace};
    void *parameters[] = {&work};
    return ((launch_fn)c->cuda.launch_kernel)(k->function, ctas, 1, 1, k->threads, 1, 1, k->shared_bytes, stream,
                                              parameters, NULL);
}

static int submit_kernel(const kvp_copier *c, const kvp_copy *copies, uint32_t count, int direction, uint32_t ctas,
                         void *stream, kvp_copy_list *list, uint32_t *submitted, uint32_t *calls) {
    const kvp_copy_kernel *k = kernel_of(c, direction);
    if (!k || !list || count > list->capacity) return cudaErrorNotSupported;
    memcpy(list->host, copies, count * sizeof *copies);
    int code = launch(c, k, count, ctas, stream, list);
    *calls = 1;
    if (!code) *submitted = count;
    return code;
}

/* ---- staged
 * ---------------------------------------------------------------------------------------------------------- */

static int submit_staged(const kvp_copier *c, const kvp_copy *copies, uint32_t count, int direction, uint32_t ctas,
                         void *stream, kvp_copy_list *list, uint32_t *submitted, uint32_t *calls) {
    const kvp_copy_kernel *k = kernel_of(c, direction);
    uint64_t half = c->staging_bytes / 2 & ~(uint64_t)15, sum = 0;
    if (!k || !list || count > list->capacity || !c->staging) return cudaErrorNotSupported;
    int load = direction == KVP_H2D;
    uint64_t staging = c->staging + (load ? 0 : half);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = staging + sum;
        list->host[i] =
            load ? (kvp_copy){copies[i].dst, at, copies[i].bytes} : (kvp_copy){at, copies[i].src, copies[i].bytes};
        sum += copies[i].bytes;
    }
    if (sum > half || contiguous(copies, count, direction) != count) return cudaErrorInvalidValue;
    kvp_memcpy_async_fn copy = (kvp_memcpy_async_fn)c->cuda.memcpy_async;
    int code = cudaSuccess;
    if (load && sum) {
        code = copy((void *)(uintptr_t)staging, (const void *)(uintptr_t)copies[0].src, sum, cudaMemcpyHostToDevice,
                    stream);
        ++*calls;
    }
    if (!code) {
        code = launch(c, k, count, ctas, stream, list);
        ++*calls;
    }
    if (!code && !load && sum) {
        code = copy((void *)(uintptr_t)copies[0].dst, (const void *)(uintptr_t)staging, sum, cudaMemcpyDeviceToHost,
                    stream);
        ++*calls;
    }
    if (!code) *submitted = count;
    return code;
}

int kvp_copy_submit(const kvp_copier *c, int method, const kvp_copy *copies, uint32_t count, int direction,
                    uint32_t ctas, void *stream, kvp_copy_list *list, uint32_t *submitted, uint32_t *calls) {
    *submitted = *calls = 0;
    if (!count) return cudaSuccess;
    switch (method) {
    case KVP_BATCH:
        return c->cuda.memcpy_batch_async ? submit_batch(c, copies, count, stream, submitted, calls)
                                          : cudaErrorNotSupported;
    case KVP_KERNEL:
        return submit_kernel(c, copies, count, direction, ctas, stream, list, submitted, calls);
    case KVP_STAGED:
        return submit_staged(c, copies, count, direction, ctas, stream, list, submitted, calls);
    default:
        return cudaErrorInvalidValue;
    }
}
