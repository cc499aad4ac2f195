/* Copies: from the arguments of a call to operations of a copy engine. */
#include "rt.h"

#include <stdlib.h>
#include <string.h>

/* Pageable sources up to this size are staged and the call returns; larger ones keep their caller until all is moved,
 * because CUDA's staging memory too is bounded. */
#define STAGING_BYTES (1u << 20)

/* Operations that a batch of n becomes. Measured: a gated stream took 8,168 copies in batches of 8 (a slot each), about
 * 23,000 in batches of 80 (3.5 slots each), 25,000 in batches of 1,000 (40.8 slots each): n * 0.041, rounded up. */
#define BATCH_SLOTS(n) (((n) * 41 + 999) / 1000)

typedef struct {
    const void *user_src; /* before staging */
    void *staging;
    bool wait; /* for completion: pageable */
} pageable;

/* The memcpy into staging memory takes its caller's time by itself where time is real. */
static void spend_staging(runtime *rt, size_t bytes) {
    if (rt->simulation) rt->time->spend(rt, kvh_now(rt) + (uint64_t)((double)bytes * 1e9 / STAGING_BYTES_PER_S));
}

static cudaError_t stage(const route *r, size_t bytes, pageable *p) {
    if (r->memory != KVP_MEM_PAGEABLE) return cudaSuccess;
    p->wait = r->direction != KVP_H2D || bytes > STAGING_BYTES;
    if (p->wait) return cudaSuccess;
    p->staging = malloc(bytes);
    return p->staging ? cudaSuccess : cudaErrorMemoryAllocation;
}

/* Submits one copy behind the stream and waits as its memory asks for. */
static cudaError_t submit_copy(call *c, cudaStream_t handle, op *o, const pageable *p, bool wait) {
    stream *s = kvh_stream(c->rt, handle);
    o->pageable = p->wait || p->staging;
    cudaError_t error = s ? kvh_fault_copy(&o->fail) : cudaErrorInvalidResourceHandle;
    if (!error && p->staging) {
        o->copy.batch = calloc(1, sizeof(batch) + sizeof(piece));
        if (o->copy.batch) {
            *o->copy.batch = (batch){.refs = 1, .staging = p->staging};
            o->copy.batch->pieces[0] = o->copy.one;
            o->copy.pieces = o->copy.batch->pieces;
        } else {
            error = cudaErrorMemoryAllocation;
        }
    }
    if (!error) error = kvh_lock_stream(c, s);
    if (error) {
        free(o->copy.batch);
        free(p->staging);
        return error;
    }
    error = kvh_submit(c, s, o);
    uint64_t target = 0;
    if (!error && (wait || p->wait)) {
        kvh_lock(c->rt);
        target = s->submitted;
        kvh_unlock(c->rt);
    }
    kvh_unlock_stream(c->rt, s);
    if (error && p->staging) {
        free(o->copy.batch);
        free(p->staging);
    }
    return target ? kvh_wait_stream(c, s, target, p->wait ? KVHOST_PAGEABLE : KVHOST_SYNC) : error;
}

cudaError_t kvh_copy(call *c, void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream_handle,
                     bool wait) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidValue;
    if (!bytes) return kvh_stream(c->rt, stream_handle) ? cudaSuccess : cudaErrorInvalidResourceHandle;
    route r;
    cudaError_t error = kvh_route(c->rt, dst, src, bytes, kind, &r);
    stream *s = error ? NULL : kvh_stream(c->rt, stream_handle);
    if (error || (s && kvh_captured(c->rt, s, &error))) return error;
    if (c->tracing) kvh_trace_about(c, dst, src, bytes, 1, r.direction, r.memory);
    pageable p = {0};
    error = stage(&r, bytes, &p);
    if (error) return error;
    if (p.staging) {
        src = memcpy(p.staging, src, bytes);
        spend_staging(c->rt, bytes);
    }
    op o = {.kind = OP_COPY, .class = r.class, .direction = r.direction, .count = 1, .bytes = bytes};
    o.copy.one = (piece){dst, src, bytes};
    return submit_copy(c, stream_handle, &o, &p, wait);
}

cudaError_t kvh_copy_2d(call *c, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                        size_t height, int kind, cudaStream_t stream, bool wait) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidValue;
    if (!width || !height) return cudaSuccess;
    if (dst_pitch < width || src_pitch < width) return 12; /* cudaErrorInvalidPitchValue */
    size_t bytes = width * height, dst_span, src_span;
    if (__builtin_mul_overflow(dst_pitch, height - 1, &dst_span) ||
        __builtin_mul_overflow(src_pitch, height - 1, &src_span))
        return cudaErrorInvalidValue;
    route r, unused;
    cudaError_t error = kvh_route(c->rt, dst, src, width, kind, &r);
    /* the last row too must lie inside, and in the same memory */
    if (!error) error = kvh_route(c->rt, (char *)dst + dst_span, (const char *)src + src_span, width, kind, &unused);
    struct stream *s = error ? NULL : kvh_stream(c->rt, stream);
    if (error || (s && kvh_captured(c->rt, s, &error))) return error;
    if (c->tracing) kvh_trace_about(c, dst, src, bytes, 1, r.direction, r.memory);
    pageable p = {0};
    error = stage(&r, bytes, &p);
    if (error) return error;
    op o = {.kind = OP_COPY, .class = r.class, .direction = r.direction, .count = 1, .bytes = bytes};
    if (p.staging) {
        for (size_t y = 0; y < height; y++)
            memcpy((char *)p.staging + y * width, (const char *)src + y * src_pitch, width);
        src = p.staging;
        src_pitch = width;
        spend_staging(c->rt, bytes);
    }
    o.copy.one = (piece){dst, src, width};
    o.copy.dst_pitch = dst_pitch;
    o.copy.src_pitch = src_pitch;
    o.copy.height = height;
    return submit_copy(c, stream, &o, &p, wait);
}

/* ---- batches -------------------------------------------------------------------------------------------------------
 */

static cudaError_t batch_arguments(void *const *dsts, const void *const *srcs, const size_t *sizes, size_t count,
                                   const kvp_memcpy_attributes *attrs, const size_t *indices, size_t attr_count) {
    if (!dsts || !srcs || !sizes || !count || count > UINT32_MAX) return cudaErrorInvalidValue;
    if (!attrs || !indices || !attr_count || attr_count > count || indices[0] != 0) return cudaErrorInvalidValue;
    for (size_t i = 0; i < attr_count; i++) {
        if (attrs[i].srcAccessOrder < 1 || attrs[i].srcAccessOrder > 3) return cudaErrorInvalidValue;
        if (i && (indices[i] <= indices[i - 1] || indices[i] >= count)) return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

/* Builds the pieces and one route for each; stages what is pageable. */
static cudaError_t build(call *c, void *const *dsts, const void *const *srcs, const size_t *sizes, size_t count,
                         batch **out, route **routes_out, bool *wait) {
    batch *b = malloc(sizeof *b + count * sizeof(piece));
    route *routes = calloc(count, sizeof *routes);
    cudaError_t error = b && routes ? cudaSuccess : cudaErrorMemoryAllocation;
    size_t staged = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; !error && i < count; i++) {
        error = sizes[i] ? kvh_route(c->rt, dsts[i], srcs[i], sizes[i], cudaMemcpyDefault, &routes[i])
                         : cudaErrorInvalidValue;
        if (error) break;
        b->pieces[i] = (piece){dsts[i], srcs[i], sizes[i]};
        bytes += sizes[i];
        if (routes[i].memory == KVP_MEM_PAGEABLE) {
            if (routes[i].direction == KVP_H2D)
                staged += sizes[i];
            else
                *wait = true;
        }
    }
    if (!error && c->tracing && routes)
        kvh_trace_about(c, dsts[0], srcs[0], bytes, (uint32_t)count, routes[0].direction, routes[0].memory);
    if (!error) {
        b->refs = 1;
        b->staging = NULL;
        if (staged > STAGING_BYTES)
            *wait = true;
        else if (staged && !(b->staging = malloc(staged)))
            error = cudaErrorMemoryAllocation;
    }
    if (error) {
        free(b);
        free(routes);
        return error;
    }
    char *at = b->staging;
    for (size_t i = 0; at && i < count; i++)
        if (routes[i].memory == KVP_MEM_PAGEABLE && routes[i].direction == KVP_H2D) {
            b->pieces[i].src = memcpy(at, srcs[i], sizes[i]);
            at += sizes[i];
        }
    if (b->staging) spend_staging(c->rt, staged);
    *out = b;
    *routes_out = routes;
    return cudaSuccess;
}

cudaError_t kvh_batch(call *c, void *const *dsts, const void *const *srcs, const size_t *sizes, size_t count,
                      const void *attrs, const size_t *attr_indices, size_t attr_count, cudaStream_t handle) {
    if ((uintptr_t)handle <= 2) return cudaErrorInvalidValue; /* measured: refused on the default stream */
    stream *s = kvh_stream(c->rt, handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    cudaError_t error;
    if (kvh_captured(c->rt, s, &error)) return error;
    error = batch_arguments(dsts, srcs, sizes, count, attrs, attr_indices, attr_count);
    int fail = 0;
    bool wait = false;
    batch *b = NULL;
    route *routes = NULL;
    if (!error) error = build(c, dsts, srcs, sizes, count, &b, &routes, &wait);
    if (error) return error;
    error = kvh_fault_copy(&fail);
    if (!error) error = kvh_lock_stream(c, s);
    uint64_t target = 0;
    if (!error) {
        size_t slots = BATCH_SLOTS(count), per_slot = (count + slots - 1) / slots;
        for (size_t i = 0; !error && i < count;) {
            op o = {.kind = OP_COPY, .class = routes[i].class, .direction = routes[i].direction, .fail = fail};
            size_t n = 0;
            for (; n < per_slot && i + n < count && routes[i + n].direction == o.direction; n++)
                o.bytes += b->pieces[i + n].bytes;
            o.count = (uint32_t)n;
            o.copy.batch = b;
            o.copy.pieces = &b->pieces[i];
            kvh_lock(c->rt);
            b->refs++;
            kvh_unlock(c->rt);
            error = kvh_submit(c, s, &o);
            if (error) {
                kvh_lock(c->rt);
                b->refs--;
                kvh_unlock(c->rt);
            }
            i += n;
        }
        kvh_lock(c->rt);
        target = s->submitted;
        kvh_unlock(c->rt);
        kvh_unlock_stream(c->rt, s);
    }
    kvh_lock(c->rt);
    bool last = --b->refs == 0;
    kvh_unlock(c->rt);
    if (last) {
        free(b->staging);
        free(b);
    }
    free(routes);
    return !error && wait ? kvh_wait_stream(c, s, target, KVHOST_PAGEABLE) : error;
}

/* ---- entry points ---------------------------------------------------------------------------------------------------
 */

KVP_EXPORT cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, int kind) {
    KVH_ENTER(cudaMemcpy, 0);
    KVH_LEAVE(kvh_copy(c, dst, src, bytes, kind, NULL, true));
}

KVP_EXPORT cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream) {
    KVH_ENTER(cudaMemcpyAsync, stream);
    KVH_LEAVE(kvh_copy(c, dst, src, bytes, kind, stream, false));
}
KVP_EXPORT cudaError_t cudaMemcpyAsync_ptsz(void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream)
    __attribute__((alias("cudaMemcpyAsync")));

KVP_EXPORT cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                         size_t height, int kind, cudaStream_t stream) {
    KVH_ENTER(cudaMemcpy2DAsync, stream);
    KVH_LEAVE(kvh_copy_2d(c, dst, dst_pitch, src, src_pitch, width, height, kind, stream, false));
}
KVP_EXPORT cudaError_t cudaMemcpy2DAsync_ptsz(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                                              size_t width, size_t height, int kind, cudaStream_t stream)
    __attribute__((alias("cudaMemcpy2DAsync")));

KVP_EXPORT cudaError_t cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                                    size_t height, int kind) {
    KVH_ENTER(cudaMemcpy2D, 0);
    KVH_LEAVE(kvh_copy_2d(c, dst, dst_pitch, src, src_pitch, width, height, kind, NULL, true));
}

/* 13.0: eighth the stream. 12.8 and 12.9: eighth the index of the copy that failed, ninth the stream. One function can
 * serve both, because a caller of the short form pushes nothing that reading a ninth argument could harm. */
KVP_EXPORT __attribute__((no_sanitize_address)) cudaError_t
cudaMemcpyBatchAsync(void *const *dsts, const void *const *srcs, const size_t *sizes, size_t count,
                     kvp_memcpy_attributes *attrs, size_t *attr_indices, size_t attr_count, void *eighth, void *ninth) {
    bool old = kvh_runtime()->config.runtime_version < 13000;
    cudaStream_t stream = (cudaStream_t)(old ? ninth : eighth);
    KVH_ENTER(cudaMemcpyBatchAsync, stream);
    cudaError_t error = kvh_batch(c, dsts, srcs, sizes, count, attrs, attr_indices, attr_count, stream);
    if (old && error && eighth) *(size_t *)eighth = SIZE_MAX;
    KVH_LEAVE(error);
}
KVP_EXPORT cudaError_t cudaMemcpyBatchAsync_ptsz(void *const *dsts, const void *const *srcs, const size_t *sizes,
                                                 size_t count, kvp_memcpy_attributes *attrs, size_t *attr_indices,
                                                 size_t attr_count, void *eighth, void *ninth)
    __attribute__((alias("cudaMemcpyBatchAsync")));

static cudaError_t set(call *c, void *dst, int value, size_t bytes, cudaStream_t stream) {
    if (!bytes) return cudaSuccess;
    cudaError_t error = kvh_device_check(c->rt, dst, bytes);
    if (error) return error;
    if (c->tracing) kvh_trace_about(c, dst, NULL, bytes, 1, 0, KVP_MEM_DEVICE);
    op o = {.kind = OP_MEMSET, .class = KVHOST_COMPUTE};
    o.set.dst = dst;
    o.set.value = value;
    o.set.bytes = bytes;
    return kvh_submit_one(c, stream, &o);
}

KVP_EXPORT cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream) {
    KVH_ENTER(cudaMemsetAsync, stream);
    KVH_LEAVE(set(c, dst, value, bytes, stream));
}
KVP_EXPORT cudaError_t cudaMemsetAsync_ptsz(void *dst, int value, size_t bytes, cudaStream_t stream)
    __attribute__((alias("cudaMemsetAsync")));

KVP_EXPORT cudaError_t cudaMemset(void *dst, int value, size_t bytes) {
    KVH_ENTER(cudaMemset, 0);
    cudaError_t error = set(c, dst, value, bytes, NULL);
    KVH_LEAVE(error ? error : kvh_stream_sync(c, NULL));
}
