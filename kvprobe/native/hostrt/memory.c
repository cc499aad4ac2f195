/* Memory: what is device, what is pinned, what is neither, and whether a copy stays inside it.
 *
 * Device addresses come out of one reserved range, so that a stale device pointer is recognised even where the kind of
 * the copy is left to the runtime; a page between allocations that nothing may touch catches overruns. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "rt.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    RANGE_DEVICE,
    RANGE_HOST,
    RANGE_REGISTERED,
    RANGE_DYING,    /* cudaFreeAsync was called, its turn has not come */
    RANGE_RESERVED, /* addresses without memory (cuMemAddressReserve) */
    RANGE_MAPPED    /* the same with a handle's memory (cuMemMap) */
};

typedef struct {
    uintptr_t base;
    size_t bytes, mapped;
    uint8_t kind, flags; /* flags: of host memory */
} range;

/* What cuMemCreate gives: its number is the place in the list, plus one. */
typedef struct {
    size_t bytes;   /* 0: released */
    uintptr_t base; /* where it is mapped; 0: nowhere */
    bool released;  /* and mapped still */
} physical;

struct memory {
    pthread_rwlock_t lock;
    physical *handles;
    size_t handle_count;
    range *ranges; /* by base */
    size_t count, room;
    uintptr_t arena, arena_end, next;
    size_t page;
    bool kept; /* resident memory outlives what it was allocated for */
    uint64_t device_bytes, pinned_bytes, device_limit, pinned_limit;
    _Atomic uint64_t asked;
};

/* ---- memory that is kept ----------------------------------------------------------------------------------------
 * Simulations follow one another by the thousand, and making memory resident would be most of what they cost: where the
 * clock is virtual freed memory stays mapped for the next allocation of its size. */

#define SPARE 64
#define SPARE_BYTES (32u << 20) /* larger ones are not kept */

typedef struct {
    uintptr_t at;
    size_t mapped;
} mapping;

static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER;
static mapping spare_host[SPARE], spare_device[SPARE];
static uintptr_t spare_arena, spare_arena_end, spare_next;

static uintptr_t take_spare(mapping *spare, size_t mapped, uintptr_t low, uintptr_t high) {
    uintptr_t at = 0;
    pthread_mutex_lock(&spare_lock);
    for (int i = 0; i < SPARE && !at; i++) {
        if (!spare[i].at || spare[i].mapped != mapped || spare[i].at < low || spare[i].at >= high) continue;
        at = spare[i].at;
        spare[i].at = 0;
    }
    pthread_mutex_unlock(&spare_lock);
    return at;
}

static bool keep_spare(mapping *spare, uintptr_t at, size_t mapped) {
    bool kept = false;
    pthread_mutex_lock(&spare_lock);
    for (int i = 0; i < SPARE && !kept && mapped <= SPARE_BYTES; i++) {
        if (spare[i].at) continue;
        spare[i] = (mapping){at, mapped};
        kept = true;
    }
    pthread_mutex_unlock(&spare_lock);
    return kept;
}

/* A place that is used for something else is no spare any more. */
static void forget_spare(mapping *spare, uintptr_t at, size_t mapped) {
    pthread_mutex_lock(&spare_lock);
    for (int i = 0; i < SPARE; i++)
        if (spare[i].at < at + mapped && at < spare[i].at + spare[i].mapped) spare[i].at = 0;
    pthread_mutex_unlock(&spare_lock);
}

/* Bytes to map; kept ones come in powers of two, so that they fit the next. */
static size_t mapped_bytes(const memory *m, size_t bytes) {
    size_t mapped = (bytes + m->page - 1) & ~(m->page - 1), power = m->page;
    if (!m->kept || mapped > SPARE_BYTES || mapped < bytes) return mapped;
    while (power < mapped) power *= 2;
    return power;
}

static void *map_host(memory *m, size_t mapped) {
    uintptr_t at = m->kept ? take_spare(spare_host, mapped, 0, UINTPTR_MAX) : 0;
    if (at) return (void *)at;
    int populate = m->kept ? 0 : MAP_POPULATE;
    return mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | populate, -1, 0);
}

static void unmap_host(memory *m, uintptr_t at, size_t mapped) {
    if (!m->kept || !keep_spare(spare_host, at, mapped)) munmap((void *)at, mapped);
}

static void *map_device(memory *m, uintptr_t at, size_t mapped) {
    /* Up to 256 MiB is made resident at once, as device memory is: first use must not look like a slow link. */
    int populate = !m->kept && mapped <= (256u << 20) ? MAP_POPULATE : 0;
    if (m->kept) forget_spare(spare_device, at, mapped);
    return mmap((void *)at, mapped, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE | populate, -1, 0);
}

static void unmap_device(memory *m, const range *r) {
    if (m->kept && keep_spare(spare_device, r->base, r->mapped)) return;
    mmap((void *)r->base, r->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

static bool take_arena(memory *m, size_t size) {
    pthread_mutex_lock(&spare_lock);
    bool taken = m->kept && spare_arena && spare_arena_end - spare_arena == size;
    if (taken) {
        m->arena = spare_arena;
        m->arena_end = spare_arena_end;
        m->next = spare_next;
        spare_arena = 0;
    }
    pthread_mutex_unlock(&spare_lock);
    return taken;
}

static bool keep_arena(memory *m) {
    for (size_t i = 0; m->kept && i < m->count; i++)
        if (m->ranges[i].kind != RANGE_HOST && m->ranges[i].kind != RANGE_REGISTERED) unmap_device(m, &m->ranges[i]);
    pthread_mutex_lock(&spare_lock);
    bool kept = m->kept && !spare_arena;
    if (kept) {
        spare_arena = m->arena;
        spare_arena_end = m->arena_end;
        spare_next = m->next;
    }
    pthread_mutex_unlock(&spare_lock);
    if (!kept) forget_spare(spare_device, m->arena, m->arena_end - m->arena);
    return kept;
}

void kvh_memory_in_child(void) {
    pthread_mutex_init(&spare_lock, NULL);
    memset(spare_host, 0, sizeof spare_host);
    memset(spare_device, 0, sizeof spare_device);
    spare_arena = 0;
}

/* ---- life ------------------------------------------------------------------------------------------------------ */

memory *kvh_memory_new(const kvhost_config *config) {
    memory *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    pthread_rwlock_init(&m->lock, NULL);
    m->page = (size_t)sysconf(_SC_PAGESIZE);
    m->device_limit = config->memory_bytes;
    m->pinned_limit = config->pinned_bytes;
    size_t size = ((size_t)config->memory_bytes * 4 + (1u << 30)) & ~(m->page - 1);
    m->kept = config->virtual_clock == 1;
    if (take_arena(m, size)) return m;
    for (; size > (1u << 24); size = size / 2 & ~(m->page - 1)) {
        void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) continue;
        m->arena = m->next = (uintptr_t)p;
        m->arena_end = m->arena + size;
        break;
    }
    return m;
}

void kvh_memory_free(memory *m) {
    for (size_t i = 0; i < m->count; i++)
        if (m->ranges[i].kind == RANGE_HOST) unmap_host(m, m->ranges[i].base, m->ranges[i].mapped);
    if (m->arena && !keep_arena(m)) munmap((void *)m->arena, m->arena_end - m->arena);
    pthread_rwlock_destroy(&m->lock);
    free(m->ranges);
    free(m->handles);
    free(m);
}

/* ---- the registry; lock held ----------------------------------------------------------------------------------------
 */

static bool is_device(int kind) { return kind == RANGE_DEVICE || kind == RANGE_MAPPED; }

/* Index of the first range that begins above `address`. */
static size_t above(const memory *m, uintptr_t address) {
    size_t low = 0, high = m->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (m->ranges[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static range *find(memory *m, uintptr_t address) {
    size_t i = above(m, address);
    if (!i || address - m->ranges[i - 1].base >= m->ranges[i - 1].bytes) return NULL;
    return &m->ranges[i - 1];
}

/* The analyzer loses sight of what realloc gave: it takes m->ranges for leaked where this is inlined. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Wanalyzer-malloc-leak"
static bool insert(memory *m, range r) {
    if (m->count == m->room) {
        size_t room = m->room ? 2 * m->room : 64;
        range *ranges = realloc(m->ranges, room * sizeof *ranges);
        if (!ranges) return false;
        m->ranges = ranges;
        m->room = room;
    }
    size_t i = above(m, r.base);
    memmove(&m->ranges[i + 1], &m->ranges[i], (m->count++ - i) * sizeof r);
    m->ranges[i] = r;
    return true;
}

static void erase(memory *m, range *r) {
    size_t i = (size_t)(r - m->ranges);
    memmove(r, r + 1, (--m->count - i) * sizeof *r);
}

/* ---- classification
 * --------------------------------------------------------------------------------------------------- */

enum { PLAIN, PINNED, DEVICE, BAD };

static int classify(memory *m, uintptr_t p, size_t bytes) {
    if (p + bytes < p) return BAD;
    range *r = find(m, p);
    if (!r) return p >= m->arena && p < m->arena_end ? BAD : PLAIN;
    if (r->kind == RANGE_DYING || r->kind == RANGE_RESERVED) return BAD;
    int kind = is_device(r->kind) ? DEVICE : PINNED;
    uintptr_t end = r->base + r->bytes;
    while (p + bytes > end) { /* registrations that touch one another count as one */
        if (++r == m->ranges + m->count || r->kind != RANGE_REGISTERED || r->base != end) return BAD;
        end += r->bytes;
    }
    return kind;
}

cudaError_t kvh_route(runtime *rt, const void *dst, const void *src, size_t bytes, int kind, route *r) {
    memory *m = rt->memory;
    pthread_rwlock_rdlock(&m->lock);
    int d = classify(m, (uintptr_t)dst, bytes), s = classify(m, (uintptr_t)src, bytes);
    pthread_rwlock_unlock(&m->lock);
    if (d == BAD || s == BAD || !dst || !src) return cudaErrorInvalidValue;
    bool to_device = d == DEVICE, from_device = s == DEVICE;
    static const int found_kind[2][2] = {{cudaMemcpyHostToHost, cudaMemcpyDeviceToHost},
                                         {cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice}};
    int found = found_kind[to_device][from_device];
    if (kind != cudaMemcpyDefault && kind != found) return cudaErrorInvalidValue;
    static const uint8_t directions[] = {KVP_H2H, KVP_H2D, KVP_D2H, KVP_D2D};
    r->direction = directions[found];
    r->class = found == cudaMemcpyHostToDevice ? KVHOST_H2D : KVHOST_D2H;
    r->memory = KVP_MEM_DEVICE;
    if (!to_device || !from_device)
        r->memory = (!to_device && d == PLAIN) || (!from_device && s == PLAIN) ? KVP_MEM_PAGEABLE : KVP_MEM_PINNED;
    return cudaSuccess;
}

cudaError_t kvh_device_check(runtime *rt, const void *p, size_t bytes) {
    memory *m = rt->memory;
    pthread_rwlock_rdlock(&m->lock);
    int kind = classify(m, (uintptr_t)p, bytes);
    pthread_rwlock_unlock(&m->lock);
    return kind == DEVICE || kind == PINNED ? cudaSuccess : cudaErrorInvalidValue;
}

/* ---- device memory
 * ---------------------------------------------------------------------------------------------------- */

/* First free place of `bytes` and a guard page in the arena, from `from` on; 0: none. */
static uintptr_t place(memory *m, uintptr_t from, size_t bytes) {
    for (size_t i = above(m, from);; i++) {
        if (i && m->ranges[i - 1].base >= m->arena && m->ranges[i - 1].base < m->arena_end) {
            uintptr_t end = m->ranges[i - 1].base + m->ranges[i - 1].mapped + m->page;
            if (end > from) from = end;
        }
        uintptr_t limit = i < m->count && m->ranges[i].base < m->arena_end ? m->ranges[i].base : m->arena_end;
        if (from < limit && limit - from >= bytes + m->page) return from;
        if (limit == m->arena_end) return 0;
    }
}

static cudaError_t device_alloc(runtime *rt, void **out, size_t bytes) {
    memory *m = rt->memory;
    if (!out) return cudaErrorInvalidValue;
    *out = NULL;
    if (!bytes) return cudaSuccess;
    size_t mapped = mapped_bytes(m, bytes);
    if (mapped < bytes) return cudaErrorMemoryAllocation;
    cudaError_t error = cudaErrorMemoryAllocation;
    pthread_rwlock_wrlock(&m->lock);
    uintptr_t at = 0, spare = 0;
    if (bytes <= m->device_limit && m->device_bytes <= m->device_limit - bytes) {
        at = spare = m->kept ? take_spare(spare_device, mapped, m->arena, m->arena_end) : 0;
        if (!at) at = place(m, m->next, mapped);
        if (!at) at = place(m, m->arena, mapped);
    }
    if (at && (spare || map_device(m, at, mapped) != MAP_FAILED)) {
        if (insert(m, (range){at, bytes, mapped, RANGE_DEVICE, 0})) {
            if (spare)
                memset((void *)at, 0, bytes);
            else
                m->next = at + mapped + m->page;
            m->device_bytes += bytes;
            *out = (void *)at;
            error = cudaSuccess;
        }
    }
    pthread_rwlock_unlock(&m->lock);
    return error;
}

static cudaError_t forget(memory *m, void *p, int kind, range *was) {
    cudaError_t error = cudaErrorInvalidValue;
    pthread_rwlock_wrlock(&m->lock);
    range *r = find(m, (uintptr_t)p);
    if (r && r->base == (uintptr_t)p && r->kind == kind) {
        *was = *r;
        if (kind == RANGE_DEVICE || kind == RANGE_DYING)
            m->device_bytes -= r->bytes;
        else
            m->pinned_bytes -= r->bytes;
        erase(m, r);
        error = cudaSuccess;
    } else if (kind == RANGE_REGISTERED) {
        error = cudaErrorHostMemoryNotRegistered;
    }
    pthread_rwlock_unlock(&m->lock);
    return error;
}

/* Unmaps first: a range that is still known is not handed out again. */
void kvh_memory_release(runtime *rt, void *base) {
    memory *m = rt->memory;
    pthread_rwlock_rdlock(&m->lock);
    range *r = find(m, (uintptr_t)base), was = r ? *r : (range){0};
    pthread_rwlock_unlock(&m->lock);
    if (was.kind != RANGE_DYING) return;
    unmap_device(m, &was);
    forget(m, base, RANGE_DYING, &was);
}

KVP_EXPORT cudaError_t cudaMalloc(void **p, size_t bytes) {
    KVH_ENTER(cudaMalloc, 0);
    kvh_trace_about(c, NULL, NULL, bytes, 1, 0, 0);
    cudaError_t error = kvh_ctx_lock(c);
    if (error) KVH_LEAVE(error);
    error = device_alloc(c->rt, p, bytes);
    kvh_ctx_unlock(c);
    KVH_LEAVE(error);
}

/* Waits for all work first, as CUDA does, so that no copy in flight loses its memory. */
KVP_EXPORT cudaError_t cudaFree(void *p) {
    KVH_ENTER(cudaFree, 0);
    if (!p) KVH_LEAVE(cudaSuccess);
    cudaError_t error = kvh_wait_all(c);
    range was;
    if (!error) error = kvh_ctx_lock(c);
    if (error) KVH_LEAVE(error);
    error = forget(c->rt->memory, p, RANGE_DEVICE, &was);
    if (!error) unmap_device(c->rt->memory, &was);
    kvh_ctx_unlock(c);
    KVH_LEAVE(error);
}

/* Ready at once: stream order is met trivially. Does not take the context lock (measured: goes through). */
KVP_EXPORT cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t stream) {
    KVH_ENTER(cudaMallocAsync, stream);
    kvh_trace_about(c, NULL, NULL, bytes, 1, 0, 0);
    if (!kvh_stream(c->rt, stream)) KVH_LEAVE(cudaErrorInvalidResourceHandle);
    KVH_LEAVE(device_alloc(c->rt, p, bytes));
}

/* Later copies that name it are refused from now on; the pages go in stream order. */
KVP_EXPORT cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) {
    KVH_ENTER(cudaFreeAsync, stream);
    if (!p) KVH_LEAVE(cudaSuccess);
    if (!kvh_stream(c->rt, stream)) KVH_LEAVE(cudaErrorInvalidResourceHandle);
    memory *m = c->rt->memory;
    pthread_rwlock_wrlock(&m->lock);
    range *r = find(m, (uintptr_t)p);
    bool known = r && r->base == (uintptr_t)p && r->kind == RANGE_DEVICE;
    if (known) r->kind = RANGE_DYING;
    pthread_rwlock_unlock(&m->lock);
    if (!known) KVH_LEAVE(cudaErrorInvalidValue);
    op o = {.kind = OP_FREE, .class = KVHOST_COMPUTE, .freed = p};
    KVH_LEAVE(kvh_submit_one(c, stream, &o)); /* an error: the device is lost, its pages go with it */
}

/* There is one pool, and it keeps nothing: a trim finds only what waits for its turn in a stream. */
KVP_EXPORT cudaError_t cudaDeviceGetDefaultMemPool(void **pool, int device) {
    KVH_ENTER(cudaDeviceGetDefaultMemPool, 0);
    if (!pool || device) KVH_LEAVE(device ? cudaErrorInvalidDevice : cudaErrorInvalidValue);
    *pool = c->rt->memory;
    KVH_LEAVE(cudaSuccess);
}

#define TRIMS(NAME)                                                                                                    \
    KVP_EXPORT int NAME(void *pool, size_t keep) {                                                                     \
        KVH_ENTER(NAME, 0);                                                                                            \
        (void)keep;                                                                                                    \
        if (pool != c->rt->memory) KVH_LEAVE(cudaErrorInvalidValue);                                                   \
        cudaError_t error = kvh_ctx_lock(c);                                                                           \
        if (!error) kvh_ctx_unlock(c);                                                                                 \
        KVH_LEAVE(error);                                                                                              \
    }
TRIMS(cudaMemPoolTrimTo)
TRIMS(cuMemPoolTrimTo)

KVP_EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    KVH_ENTER(cudaMemGetInfo, 0);
    memory *m = c->rt->memory;
    pthread_rwlock_rdlock(&m->lock);
    if (free_bytes) *free_bytes = m->device_limit - m->device_bytes;
    if (total_bytes) *total_bytes = m->device_limit;
    pthread_rwlock_unlock(&m->lock);
    KVH_LEAVE(cudaSuccess);
}

/* ---- virtual memory: addresses that stay while their memory comes and goes
 * -------------------------------------------- A handle is mapped whole, at one place, and what it held is gone when it
 * is unmapped. */

KVP_EXPORT int cuMemAddressReserve(uint64_t *at, size_t bytes, size_t alignment, uint64_t wanted, uint64_t flags) {
    (void)alignment, (void)wanted, (void)flags;
    KVH_ENTER(cuMemAddressReserve, 0);
    memory *m = c->rt->memory;
    if (!at || !bytes || bytes % m->page) KVH_LEAVE(cudaErrorInvalidValue);
    pthread_rwlock_wrlock(&m->lock);
    uintptr_t found = place(m, m->next, bytes);
    if (!found) found = place(m, m->arena, bytes);
    bool reserved = found && insert(m, (range){found, bytes, bytes, RANGE_RESERVED, 0});
    if (reserved) m->next = found + bytes + m->page;
    pthread_rwlock_unlock(&m->lock);
    *at = reserved ? found : 0;
    KVH_LEAVE(reserved ? cudaSuccess : cudaErrorMemoryAllocation);
}

/* The range that begins at `at` and is of that kind and size; lock held. */
static range *exactly(memory *m, uint64_t at, size_t bytes, int kind) {
    range *r = find(m, at);
    return r && r->base == at && r->bytes == bytes && r->kind == kind ? r : NULL;
}

KVP_EXPORT int cuMemAddressFree(uint64_t at, size_t bytes) {
    KVH_ENTER(cuMemAddressFree, 0);
    memory *m = c->rt->memory;
    pthread_rwlock_wrlock(&m->lock);
    range *r = exactly(m, at, bytes, RANGE_RESERVED);
    if (r) erase(m, r);
    pthread_rwlock_unlock(&m->lock);
    KVH_LEAVE(r ? cudaSuccess : cudaErrorInvalidValue);
}

KVP_EXPORT int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, uint64_t flags) {
    (void)flags;
    KVH_ENTER(cuMemCreate, 0);
    kvh_trace_about(c, NULL, NULL, bytes, 1, 0, 0);
    memory *m = c->rt->memory;
    if (!handle || !properties || !bytes || bytes % m->page) KVH_LEAVE(cudaErrorInvalidValue);
    cudaError_t error = cudaErrorMemoryAllocation;
    pthread_rwlock_wrlock(&m->lock);
    physical *more = realloc(m->handles, (m->handle_count + 1) * sizeof *more);
    if (more) m->handles = more;
    if (more && bytes <= m->device_limit && m->device_bytes <= m->device_limit - bytes) {
        m->handles[m->handle_count] = (physical){.bytes = bytes};
        m->device_bytes += bytes;
        *handle = ++m->handle_count;
        error = cudaSuccess;
    }
    pthread_rwlock_unlock(&m->lock);
    KVH_LEAVE(error);
}

static physical *handle_of(memory *m, uint64_t handle) {
    physical *p = handle && handle <= m->handle_count ? &m->handles[handle - 1] : NULL;
    return p && p->bytes && !p->released ? p : NULL;
}

static void give_back(memory *m, physical *p) {
    m->device_bytes -= p->bytes;
    *p = (physical){0};
}

/* What is mapped stays until it is unmapped. */
KVP_EXPORT int cuMemRelease(uint64_t handle) {
    KVH_ENTER(cuMemRelease, 0);
    memory *m = c->rt->memory;
    pthread_rwlock_wrlock(&m->lock);
    physical *p = handle_of(m, handle);
    if (p && p->base)
        p->released = true;
    else if (p)
        give_back(m, p);
    pthread_rwlock_unlock(&m->lock);
    KVH_LEAVE(p ? cudaSuccess : cudaErrorInvalidValue);
}

KVP_EXPORT int cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    (void)flags;
    KVH_ENTER(cuMemMap, 0);
    memory *m = c->rt->memory;
    pthread_rwlock_wrlock(&m->lock);
    physical *p = handle_of(m, handle);
    range *r = exactly(m, at, bytes, RANGE_RESERVED);
    bool fits = p && r && !p->base && p->bytes == bytes && !offset && map_device(m, r->base, r->mapped) != MAP_FAILED;
    if (fits) {
        p->base = r->base;
        r->kind = RANGE_MAPPED;
    }
    pthread_rwlock_unlock(&m->lock);
    KVH_LEAVE(fits ? cudaSuccess : cudaErrorInvalidValue);
}

KVP_EXPORT int cuMemUnmap(uint64_t at, size_t bytes) {
    KVH_ENTER(cuMemUnmap, 0);
    cudaError_t error = kvh_wait_all(c);
    if (error) KVH_LEAVE(error);
    memory *m = c->rt->memory;
    pthread_rwlock_wrlock(&m->lock);
    range *r = exactly(m, at, bytes, RANGE_MAPPED);
    if (r) {
        mmap((void *)r->base, r->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        r->kind = RANGE_RESERVED;
        for (size_t i = 0; i < m->handle_count; i++)
            if (m->handles[i].base == at) {
                m->handles[i].base = 0;
                if (m->handles[i].released) give_back(m, &m->handles[i]);
            }
    }
    pthread_rwlock_unlock(&m->lock);
    KVH_LEAVE(r ? cudaSuccess : cudaErrorInvalidValue);
}

/* Everything may be read and written here; only whether there is memory is looked at. */
KVP_EXPORT int cuMemSetAccess(uint64_t at, size_t bytes, const void *access, size_t count) {
    KVH_ENTER(cuMemSetAccess, 0);
    memory *m = c->rt->memory;
    pthread_rwlock_rdlock(&m->lock);
    bool there = access && count && exactly(m, at, bytes, RANGE_MAPPED);
    pthread_rwlock_unlock(&m->lock);
    KVH_LEAVE(there ? cudaSuccess : cudaErrorInvalidValue);
}

/* ---- host memory
 * ------------------------------------------------------------------------------------------------------ */

static cudaError_t host_alloc(call *c, void **p, size_t bytes, unsigned flags) {
    memory *m = c->rt->memory;
    if (!p) return cudaErrorInvalidValue;
    *p = NULL;
    if (!bytes) return cudaSuccess;
    cudaError_t error = kvh_ctx_lock(c);
    if (error) return error;
    error = cudaErrorMemoryAllocation;
    size_t mapped = mapped_bytes(m, bytes);
    pthread_rwlock_wrlock(&m->lock);
    if (mapped >= bytes &&
        (!m->pinned_limit || (bytes <= m->pinned_limit && m->pinned_bytes <= m->pinned_limit - bytes))) {
        void *at = map_host(m, mapped);
        if (at != MAP_FAILED) {
            if (insert(m, (range){(uintptr_t)at, bytes, mapped, RANGE_HOST, (uint8_t)flags})) {
                m->pinned_bytes += bytes;
                *p = at;
                error = cudaSuccess;
            } else {
                unmap_host(m, (uintptr_t)at, mapped);
            }
        }
    }
    pthread_rwlock_unlock(&m->lock);
    kvh_ctx_unlock(c);
    return error;
}

KVP_EXPORT cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
    KVH_ENTER(cudaHostAlloc, 0);
    kvh_trace_about(c, NULL, NULL, bytes, 1, 0, 0);
    KVH_LEAVE(host_alloc(c, p, bytes, flags));
}

KVP_EXPORT cudaError_t cudaMallocHost(void **p, size_t bytes) {
    KVH_ENTER(cudaMallocHost, 0);
    kvh_trace_about(c, NULL, NULL, bytes, 1, 0, 0);
    KVH_LEAVE(host_alloc(c, p, bytes, 0));
}

KVP_EXPORT int cuMemHostAlloc(void **p, size_t bytes, unsigned flags) {
    KVH_ENTER(cuMemHostAlloc, 0);
    kvh_trace_about(c, NULL, NULL, bytes, 1, 0, 0);
    KVH_LEAVE(host_alloc(c, p, bytes, flags));
}

static cudaError_t free_host(call *c, void *p) {
    if (!p) return cudaSuccess;
    cudaError_t error = kvh_wait_all(c);
    range was;
    if (!error) error = kvh_ctx_lock(c);
    if (error) return error;
    error = forget(c->rt->memory, p, RANGE_HOST, &was);
    if (!error) unmap_host(c->rt->memory, was.base, was.mapped);
    kvh_ctx_unlock(c);
    return error;
}

KVP_EXPORT cudaError_t cudaFreeHost(void *p) {
    KVH_ENTER(cudaFreeHost, 0);
    KVH_LEAVE(free_host(c, p));
}

KVP_EXPORT int cuMemFreeHost(void *p) {
    KVH_ENTER(cuMemFreeHost, 0);
    KVH_LEAVE(free_host(c, p));
}

static cudaError_t host_flags(call *c, unsigned *flags, void *p) {
    memory *m = c->rt->memory;
    pthread_rwlock_rdlock(&m->lock);
    range *r = find(m, (uintptr_t)p);
    bool there = flags && r && !is_device(r->kind);
    if (there) *flags = r->flags;
    pthread_rwlock_unlock(&m->lock);
    return there ? cudaSuccess : cudaErrorInvalidValue;
}

KVP_EXPORT cudaError_t cudaHostGetFlags(unsigned *flags, void *p) {
    KVH_ENTER(cudaHostGetFlags, 0);
    KVH_LEAVE(host_flags(c, flags, p));
}

KVP_EXPORT int cuMemHostGetFlags(unsigned *flags, void *p) {
    KVH_ENTER(cuMemHostGetFlags, 0);
    KVH_LEAVE(host_flags(c, flags, p));
}

cudaError_t kvh_host_register(call *c, void *p, size_t bytes, unsigned flags) {
    kvh_trace_about(c, NULL, p, bytes, 1, 0, 0);
    uintptr_t base = (uintptr_t)p;
    if (!p || !bytes || base + bytes < base) return cudaErrorInvalidValue;
    memory *m = c->rt->memory;
    cudaError_t error = kvh_ctx_lock(c);
    if (error) return error;
    pthread_rwlock_wrlock(&m->lock);
    error = cudaErrorMemoryAllocation;
    size_t i = above(m, base + bytes - 1);
    if (i && m->ranges[i - 1].base + m->ranges[i - 1].bytes > base)
        error = cudaErrorHostMemoryAlreadyRegistered;
    else if ((!m->pinned_limit || (bytes <= m->pinned_limit && m->pinned_bytes <= m->pinned_limit - bytes)) &&
             insert(m, (range){base, bytes, 0, RANGE_REGISTERED, (uint8_t)flags}))
        m->pinned_bytes += bytes, error = cudaSuccess;
    pthread_rwlock_unlock(&m->lock);
    kvh_ctx_unlock(c);
    return error;
}

KVP_EXPORT cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags) {
    KVH_ENTER(cudaHostRegister, 0);
    KVH_LEAVE(kvh_host_register(c, p, bytes, flags));
}

static cudaError_t host_unregister(call *c, void *p) {
    cudaError_t error = kvh_wait_all(c);
    range was;
    if (!error) error = kvh_ctx_lock(c);
    if (error) return error;
    error = forget(c->rt->memory, p, RANGE_REGISTERED, &was);
    kvh_ctx_unlock(c);
    return error;
}

KVP_EXPORT cudaError_t cudaHostUnregister(void *p) {
    KVH_ENTER(cudaHostUnregister, 0);
    KVH_LEAVE(host_unregister(c, p));
}

KVP_EXPORT int cuMemHostUnregister(void *p) {
    KVH_ENTER(cuMemHostUnregister, 0);
    KVH_LEAVE(host_unregister(c, p));
}

/* struct cudaPointerAttributes, the part that all versions share. */
typedef struct {
    int type; /* 0 unregistered, 1 host, 2 device */
    int device;
    void *device_pointer, *host_pointer;
} pointer_attributes;

KVP_EXPORT cudaError_t cudaPointerGetAttributes(pointer_attributes *attributes, const void *p) {
    KVH_ENTER(cudaPointerGetAttributes, 0);
    if (!attributes) KVH_LEAVE(cudaErrorInvalidValue);
    memory *m = c->rt->memory;
    pthread_rwlock_rdlock(&m->lock);
    range *r = find(m, (uintptr_t)p);
    void *at = (void *)(uintptr_t)p;
    if (!r)
        *attributes = (pointer_attributes){0, -2, NULL, NULL};
    else if (is_device(r->kind))
        *attributes = (pointer_attributes){2, 0, at, NULL};
    else
        *attributes = (pointer_attributes){1, 0, at, at};
    pthread_rwlock_unlock(&m->lock);
    KVH_LEAVE(cudaSuccess);
}

/* The attributes that a tool asks of an address without a call of the runtime's: memory type, managed, range. */
KVP_EXPORT int cuPointerGetAttributes(unsigned count, const int *attributes, void **data, uint64_t address) {
    enum {
        MEMORY_TYPE = 2,
        DEVICE_POINTER = 3,
        HOST_POINTER = 4,
        IS_MANAGED = 8,
        DEVICE_ORDINAL = 9,
        RANGE_START = 11,
        RANGE_SIZE = 12
    };
    memory *m = kvh_runtime()->memory;
    atomic_fetch_add(&m->asked, 1);
    pthread_rwlock_rdlock(&m->lock);
    const range *r = find(m, (uintptr_t)address);
    for (unsigned i = 0; i < count; i++) {
        if (attributes[i] == MEMORY_TYPE)
            *(uint32_t *)data[i] = !r ? 0 : is_device(r->kind) ? 2 : 1;
        else if (attributes[i] == DEVICE_POINTER || attributes[i] == HOST_POINTER)
            *(uint64_t *)data[i] = r && (attributes[i] == DEVICE_POINTER || !is_device(r->kind)) ? address : 0;
        else if (attributes[i] == DEVICE_ORDINAL)
            *(int *)data[i] = r ? 0 : -2;
        else if (attributes[i] == IS_MANAGED)
            *(uint32_t *)data[i] = 0;
        else if (attributes[i] == RANGE_START)
            *(uint64_t *)data[i] = r ? r->base : 0;
        else if (attributes[i] == RANGE_SIZE)
            *(uint64_t *)data[i] = r ? r->bytes : 0;
    }
    pthread_rwlock_unlock(&m->lock);
    return cudaSuccess;
}

void kvh_memory_stats(runtime *rt, kvhost_stats *stats) {
    memory *m = rt->memory;
    pthread_rwlock_rdlock(&m->lock);
    stats->device_bytes = m->device_bytes;
    stats->pinned_bytes = m->pinned_bytes;
    stats->pointers_asked = atomic_load(&m->asked);
    pthread_rwlock_unlock(&m->lock);
}
#pragma GCC diagnostic pop
