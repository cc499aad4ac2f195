/* Stream capture, as far as it can be broken: what a capturing stream takes is not executed, and calls that CUDA calls
 * potentially unsafe are refused and invalidate the captures that forbid them. The graph itself is not kept. */
#include "rt.h"

enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };
enum { NOT_CAPTURING = 0, ACTIVE = 1, INVALIDATED = 2 };

static __thread int mode_of_thread __attribute__((tls_model("initial-exec")));

static bool is_unsafe(uint16_t api) {
    switch (api) {
    case API_cudaMalloc:
    case API_cudaFree:
    case API_cudaHostAlloc:
    case API_cudaMallocHost:
    case API_cudaFreeHost:
    case API_cudaHostRegister:
    case API_cudaHostUnregister:
    case API_cudaMemcpy:
    case API_cudaMemcpy2D:
    case API_cuMemcpy:
    case API_cuMemcpyHtoD_v2:
    case API_cuMemcpyDtoH_v2:
    case API_cuMemcpyDtoD_v2:
    case API_cudaMemset:
    case API_cudaStreamQuery:
    case API_cudaStreamSynchronize:
    case API_cudaEventQuery:
    case API_cudaEventSynchronize:
    case API_cudaDeviceSynchronize:
    case API_cuStreamQuery:
    case API_cuStreamSynchronize:
    case API_cuEventQuery:
    case API_cuCtxSynchronize:
    case API_cuMemHostRegister_v2:
    case API_cuMemHostUnregister:
    case API_cuMemHostAlloc:
    case API_cuMemFreeHost:
        return true;
    default:
        return false;
    }
}

cudaError_t kvh_capture_forbids(runtime *rt, uint16_t api) {
    if (mode_of_thread == MODE_RELAXED || !is_unsafe(api)) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    kvh_lock(rt);
    for (stream *s = rt->streams; s; s = s->next) {
        if (!s->capture) continue;
        bool own = s->capture_tid == kvh_tid() && s->capture_mode != MODE_RELAXED;
        if (!own && !(mode_of_thread == MODE_GLOBAL && s->capture_mode == MODE_GLOBAL)) continue;
        s->capture = INVALIDATED;
        error = cudaErrorStreamCaptureUnsupported;
    }
    kvh_unlock(rt);
    return error;
}

/* Of the legacy default stream: whether a stream that it waits for is being captured. */
static bool is_implied(runtime *rt, const stream *s, bool spoil) {
    bool implied = false;
    for (stream *other = rt->streams; s->is_default && other; other = other->next)
        if (other->capture && other->blocking) {
            implied = true;
            if (spoil) other->capture = INVALIDATED;
        }
    return implied;
}

bool kvh_captured(runtime *rt, stream *s, cudaError_t *error) {
    *error = cudaSuccess;
    if (!atomic_load_explicit(&rt->captures, memory_order_relaxed)) return false;
    kvh_lock(rt);
    bool captured = s->capture != NOT_CAPTURING;
    if (s->capture == INVALIDATED) *error = cudaErrorStreamCaptureInvalidated;
    if (is_implied(rt, s, true)) captured = true, *error = cudaErrorStreamCaptureImplicit;
    kvh_unlock(rt);
    return captured;
}

bool kvh_capture_conflicts(runtime *rt, stream *s) {
    if (!atomic_load_explicit(&rt->captures, memory_order_relaxed)) return false;
    kvh_lock(rt);
    bool conflicts = s->capture != NOT_CAPTURING;
    if (conflicts) s->capture = INVALIDATED;
    kvh_unlock(rt);
    return conflicts;
}

/* Runtime.lock held: the stream is destroyed or its capture ends. */
void kvh_capture_leave(runtime *rt, stream *s) {
    if (s->capture) atomic_fetch_sub(&rt->captures, 1);
    s->capture = NOT_CAPTURING;
}

/* ---- entry points ----------------------------------------------------------------------------------------------- */

static cudaError_t begin_capture(call *c, cudaStream_t handle, int mode) {
    stream *s = kvh_stream(c->rt, handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (mode < MODE_GLOBAL || mode > MODE_RELAXED) return cudaErrorInvalidValue;
    if (s->is_default) return cudaErrorStreamCaptureUnsupported;
    kvh_lock(c->rt);
    cudaError_t error = s->capture ? cudaErrorIllegalState : cudaSuccess;
    if (!error) {
        s->capture = ACTIVE;
        s->capture_mode = (uint8_t)mode;
        s->capture_tid = kvh_tid();
        atomic_fetch_add(&c->rt->captures, 1);
    }
    kvh_unlock(c->rt);
    return error;
}

static cudaError_t end_capture(call *c, cudaStream_t handle, void **graph) {
    static char a_graph;
    stream *s = kvh_stream(c->rt, handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (!graph) return cudaErrorInvalidValue;
    *graph = NULL;
    kvh_lock(c->rt);
    cudaError_t error = cudaSuccess;
    if (!s->capture)
        error = cudaErrorIllegalState;
    else if (s->capture_mode != MODE_RELAXED && s->capture_tid != kvh_tid())
        error = cudaErrorStreamCaptureWrongThread;
    else if (s->capture == INVALIDATED)
        error = cudaErrorStreamCaptureInvalidated;
    if (error != cudaErrorIllegalState) kvh_capture_leave(c->rt, s);
    if (!error) *graph = &a_graph;
    kvh_unlock(c->rt);
    return error;
}

static cudaError_t is_capturing(cudaStream_t handle, int *status) {
    runtime *rt = kvh_runtime();
    stream *s = kvh_stream(rt, handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    kvh_lock(rt);
    *status = s->capture;
    bool implied = is_implied(rt, s, false);
    kvh_unlock(rt);
    return implied ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}

static cudaError_t exchange_mode(int *mode) {
    if (*mode < MODE_GLOBAL || *mode > MODE_RELAXED) return cudaErrorInvalidValue;
    int was = mode_of_thread;
    mode_of_thread = *mode;
    *mode = was;
    return cudaSuccess;
}

KVP_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode) {
    KVH_ENTER(cudaStreamBeginCapture, stream);
    KVH_LEAVE(begin_capture(c, stream, mode));
}
KVP_EXPORT cudaError_t cudaStreamBeginCapture_ptsz(cudaStream_t, int) __attribute__((alias("cudaStreamBeginCapture")));

KVP_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, void **graph) {
    KVH_ENTER(cudaStreamEndCapture, stream);
    KVH_LEAVE(end_capture(c, stream, graph));
}
KVP_EXPORT cudaError_t cudaStreamEndCapture_ptsz(cudaStream_t, void **) __attribute__((alias("cudaStreamEndCapture")));

KVP_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status) { return is_capturing(stream, status); }
KVP_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) { return exchange_mode(mode); }

KVP_EXPORT int cuStreamBeginCapture_v2(cudaStream_t stream, int mode) {
    KVH_ENTER(cuStreamBeginCapture_v2, stream);
    KVH_LEAVE(begin_capture(c, stream, mode));
}
KVP_EXPORT int cuStreamBeginCapture_v2_ptsz(cudaStream_t, int) __attribute__((alias("cuStreamBeginCapture_v2")));

KVP_EXPORT int cuStreamEndCapture(cudaStream_t stream, void **graph) {
    KVH_ENTER(cuStreamEndCapture, stream);
    KVH_LEAVE(end_capture(c, stream, graph));
}
KVP_EXPORT int cuStreamEndCapture_ptsz(cudaStream_t, void **) __attribute__((alias("cuStreamEndCapture")));

KVP_EXPORT int cuStreamIsCapturing(cudaStream_t stream, int *status) { return is_capturing(stream, status); }
KVP_EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) { return exchange_mode(mode); }
