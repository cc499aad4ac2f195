/* What the host runtime's files share: its structures, the rules of its locks, and who offers what.
 *
 * THE WALL. The model (sched.c, engines.c, submit.c) says what happens next and when; it never waits. A timekeeper
 * makes time pass: realtime.c by threads that sleep, simulation.c by an event loop. Each of them calls the same few
 * functions of engines.c, and the model calls the five functions of struct timekeeper.
 *
 * LOCKS, in the order in which they may be taken:
 *   runtime.lock    the scheduler: queues, engines, events, stream and context locks; held for well under a microsecond
 *   memory lock, trace lock, fault lock: leaves
 * A stream's lock is held through every call that names the stream, also while it blocks for a slot. It and the context
 * lock are no mutexes but states, because who waits for them may be a simulated thread.
 * Wake-ups are collected under runtime.lock and sent after it: a futex call takes longer than everything else there.
 */
#ifndef KVHOST_RT_H
#define KVHOST_RT_H

#include "kvhost.h"
#include "wire.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define MAX_CHANNELS 32
#define MAX_DEVICES 4
#define CLASSES 3

enum {
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorIllegalState = 401,
    cudaErrorLaunchTimeout = 702,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorCapturedEvent = 907,
    cudaErrorStreamCaptureWrongThread = 908
};

/* Every exported call: its name and its number in the record format (0: none). */
#define KVH_APIS(X)                                                                                                    \
    X(none, 0)                                                                                                         \
    X(cudaGetDeviceCount, 0)                                                                                           \
    X(cudaSetDevice, 0)                                                                                                \
    X(cudaGetDevice, 0)                                                                                                \
    X(cudaDeviceGetAttribute, 0)                                                                                       \
    X(cudaDeviceGetStreamPriorityRange, 0)                                                                             \
    X(cudaMemGetInfo, 0)                                                                                               \
    X(cudaMalloc, 22)                                                                                                  \
    X(cudaFree, 25)                                                                                                    \
    X(cudaMallocAsync, 29)                                                                                             \
    X(cudaFreeAsync, 0)                                                                                                \
    X(cudaHostAlloc, 23)                                                                                               \
    X(cudaMallocHost, 23)                                                                                              \
    X(cudaFreeHost, 26)                                                                                                \
    X(cudaHostRegister, 24)                                                                                            \
    X(cudaHostUnregister, 42)                                                                                          \
    X(cudaPointerGetAttributes, 0)                                                                                     \
    X(cudaMemcpy, 10)                                                                                                  \
    X(cudaMemcpyAsync, 1)                                                                                              \
    X(cudaMemcpy2DAsync, 2)                                                                                            \
    X(cudaMemcpyBatchAsync, 3)                                                                                         \
    X(cudaMemset, 0)                                                                                                   \
    X(cudaMemsetAsync, 11)                                                                                             \
    X(cudaStreamCreate, 20)                                                                                            \
    X(cudaStreamCreateWithFlags, 20)                                                                                   \
    X(cudaStreamCreateWithPriority, 20)                                                                                \
    X(cudaStreamGetPriority, 0)                                                                                        \
    X(cudaStreamDestroy, 0)                                                                                            \
    X(cudaStreamQuery, 0)                                                                                              \
    X(cudaStreamSynchronize, 17)                                                                                       \
    X(cudaStreamWaitEvent, 28)                                                                                         \
    X(cudaEventCreate, 21)                                                                                             \
    X(cudaEventCreateWithFlags, 21)                                                                                    \
    X(cudaEventDestroy, 0)                                                                                             \
    X(cudaEventRecord, 27)                                                                                             \
    X(cudaEventQuery, 0)                                                                                               \
    X(cudaEventSynchronize, 18)                                                                                        \
    X(cudaEventElapsedTime, 0)                                                                                         \
    X(cudaDeviceSynchronize, 19)                                                                                       \
    X(cudaLaunchKernel, 12)                                                                                            \
    X(cudaLaunchKernelExC, 13)                                                                                         \
    X(cudaLaunchHostFunc, 63)                                                                                          \
    X(cudaGetDriverEntryPoint, 0)                                                                                      \
    X(cudaGetDriverEntryPointByVersion, 0)                                                                             \
    X(kvhostLaunchDelay, 12)                                                                                           \
    X(kvhostLaunchWork, 12)                                                                                            \
    X(kvhostGateLaunch, 12)                                                                                            \
    X(cuInit, 0)                                                                                                       \
    X(cuGetProcAddress, 0)                                                                                             \
    X(cuMemcpyAsync, 4)                                                                                                \
    X(cuMemcpyHtoDAsync_v2, 5)                                                                                         \
    X(cuMemcpyDtoHAsync_v2, 6)                                                                                         \
    X(cuMemcpyDtoDAsync_v2, 7)                                                                                         \
    X(cuMemcpy2DAsync_v2, 8)                                                                                           \
    X(cuMemcpyBatchAsync, 9)                                                                                           \
    X(cuMemcpyBatchAsync_v2, 9)                                                                                        \
    X(cuStreamSynchronize, 32)                                                                                         \
    X(cuCtxSynchronize, 34)                                                                                            \
    X(cuStreamCreate, 35)                                                                                              \
    X(cuEventCreate, 36)                                                                                               \
    X(cuLaunchKernel, 14)                                                                                              \
    X(cuModuleLoadData, 0)                                                                                             \
    X(cuModuleGetFunction, 0)                                                                                          \
    X(cuFuncSetAttribute, 0)                                                                                           \
    X(cuEventRecord, 27)                                                                                               \
    X(cuStreamQuery, 0)                                                                                                \
    X(cuEventQuery, 0)                                                                                                 \
    X(cuEventElapsedTime, 0)                                                                                           \
    X(cuStreamDestroy_v2, 0)                                                                                           \
    X(cuMemHostRegister_v2, 39)                                                                                        \
    X(cuMemHostAlloc, 38)                                                                                              \
    X(cuMemFreeHost, 44)                                                                                               \
    X(cuMemHostUnregister, 45)                                                                                         \
    X(cuMemHostGetFlags, 0)                                                                                            \
    X(cudaHostGetFlags, 0)                                                                                             \
    X(cuMemAddressReserve, 0)                                                                                          \
    X(cuMemAddressFree, 0)                                                                                             \
    X(cuMemCreate, 56)                                                                                                 \
    X(cuMemMap, 57)                                                                                                    \
    X(cuMemUnmap, 58)                                                                                                  \
    X(cuMemRelease, 59)                                                                                                \
    X(cuMemSetAccess, 60)                                                                                              \
    X(cudaStreamBeginCapture, 0)                                                                                       \
    X(cudaStreamEndCapture, 0)                                                                                         \
    X(cuStreamBeginCapture_v2, 0)                                                                                      \
    X(cudaDeviceReset, 0)                                                                                              \
    X(cuStreamEndCapture, 0)                                                                                           \
    X(cudaStreamAddCallback, 71)                                                                                       \
    X(cuMemcpy, 74)                                                                                                    \
    X(cuMemcpyHtoD_v2, 75)                                                                                             \
    X(cuMemcpyDtoH_v2, 76)                                                                                             \
    X(cuMemcpyDtoD_v2, 77)                                                                                             \
    X(cudaMemcpy2D, 78)                                                                                                \
    X(cudaDeviceGetDefaultMemPool, 0)                                                                                  \
    X(cudaMemPoolTrimTo, 79)                                                                                           \
    X(cuMemPoolTrimTo, 80)

enum kvh_api {
#define X(name, call) API_##name,
    KVH_APIS(X)
#undef X
        API_COUNT
};

typedef struct runtime runtime;
typedef struct stream stream;
typedef struct event event;
typedef struct channel channel;

/* ---- parking ------------------------------------------------------------------------------------------------- */

enum { PARK_WAITING = 0, PARK_ASLEEP = 1, PARK_GO = 2, PARK_ABORTED = 3 };

/* One thread's wait for one thing; lives on its stack, linked into the list of what it waits for. */
typedef struct parker {
    _Atomic uint32_t state;
    struct parker *next;
    uint64_t target;     /* of a stream's waiter: the count of completed operations that it waits for */
    const channel *slot; /* of a submitter: the channel of which it wants one; else NULL */
    const stream *of;    /* the stream that the call names; NULL: none */
    uint16_t api;
    uint8_t reason;
} parker;

typedef struct {
    parker *head, *tail;
} parkers;

/* ---- operations ---------------------------------------------------------------------------------------------- */

enum op_kind { OP_COPY, OP_RECORD, OP_WAIT, OP_DELAY, OP_WORK, OP_MEMSET, OP_FREE, OP_GATE, OP_HOSTFN };

/* One occurrence of a record: done once, whatever the event is used for afterwards. Reference-counted under the lock.
 */
typedef struct marker {
    struct marker *next_free;
    uint32_t refs;
    bool done;
    uint64_t time_ns;
    struct op *waits; /* OP_WAIT operations at the head of their streams */
    parkers waiters;  /* threads in cudaEventSynchronize */
} marker;

typedef struct {
    void *dst;
    const void *src;
    size_t bytes;
} piece;

/* What the chunks of one call share; freed with the last of them. */
typedef struct {
    uint32_t refs;
    void *staging; /* copies of pageable sources */
    piece pieces[];
} batch;

typedef struct op {
    struct op *next;         /* in its stream */
    struct op *next_channel; /* in its channel; afterwards in a marker's waits, a gate, the workers' queue */
    stream *stream;
    channel *channel; /* NULL: OP_WAIT */
    uint8_t kind, class, direction;
    bool started, holds_slot;
    bool pageable; /* a copy of which one side is: it moves at its own rate */
    int fail;      /* error to raise when executed */
    uint64_t submit_ns, ready_ns, start_ns, finish_ns;
    uint64_t order;       /* among compute work that ends at the same time */
    uint64_t trace_index; /* 1 + index; 0: not traced */
    uint32_t trace_epoch;
    uint32_t count; /* pieces */
    uint64_t bytes;
    union {
        struct {
            piece one; /* count 1 without batch */
            const piece *pieces;
            batch *batch;
            size_t dst_pitch, src_pitch, height; /* height > 0: a 2D copy of `one`, one.bytes is the width */
        } copy;
        marker *marker; /* OP_RECORD, OP_WAIT */
        struct {
            uint64_t ns;
            void (*fn)(void *);
            void *arg;
        } work; /* OP_DELAY, OP_WORK, OP_HOSTFN */
        struct {
            void *dst;
            int value;
            size_t bytes;
        } set;
        kvhost_gate *gate;
        void *freed;
    };
} op;

/* ---- streams, channels, engines ------------------------------------------------------------------------------ */

#define STREAM_ALIVE 0x5354524du
#define EVENT_ALIVE 0x45564e54u

enum stream_lock { STREAM_FREE = 0, STREAM_HELD = 1, STREAM_WANTED = 2 };

/* Streams and events live in memory that is reused and never given back: a stale handle is recognised, not followed. */
struct stream {
    _Atomic uint32_t alive;
    uint32_t number;
    _Atomic(runtime *) rt;
    _Atomic uint32_t lock; /* enum stream_lock */
    parkers lock_waiters;  /* first come, first served */
    stream *next, *prev;   /* of the runtime's streams, or free */
    op *head, *tail;
    uint64_t submitted, completed; /* operations; never reset, so a waiter of an earlier life is never stranded */
    uint64_t ready_ns;             /* when its newest completed operation ended */
    parkers waiters;
    int priority;
    uint8_t last_class;
    bool destroyed;  /* pending work keeps it */
    bool blocking;   /* the legacy default stream waits for it */
    bool is_default; /* of its device */
    uint8_t device;
    uint8_t capture, capture_mode; /* enum cudaStreamCaptureStatus, enum cudaStreamCaptureMode */
    uint32_t capture_tid;          /* who began it */
};

struct event {
    _Atomic uint32_t alive;
    unsigned flags;
    _Atomic(runtime *) rt;
    marker *marker; /* newest record */
    uint8_t device;
    _Atomic bool captured; /* that one was on a stream that was being captured */
    event *next, *prev;
};

struct channel {
    uint8_t class, index;
    op *head, *tail; /* not started */
    uint32_t outstanding;
    uint32_t waiting;
    uint64_t started_ns; /* start of its newest started operation: the next one cannot start earlier */
    parkers waiters;     /* for a slot */
    uint64_t ready_ns;   /* where the clock is virtual: when it became ready */
    bool dirty, ready;
    channel *next_dirty, *next_ready;
};

/* Channels whose first operation is a copy that could start, in the order in which they came to that. */
typedef struct {
    channel *ready_head, *ready_tail;
    uint64_t free_ns;           /* end of the newest copy */
    _Atomic uint64_t finish_ns; /* scheduled end of what it executes; 0: idle */
} copy_engine;

typedef struct {
    op **heap; /* by finish_ns */
    uint32_t size, room;
} compute_engine;

typedef struct {
    op *head; /* by next_channel */
} host_functions;

struct kvhost_gate {
    bool open;
    uint32_t refs, reached;
};

typedef struct memory memory;

/* ---- time ---------------------------------------------------------------------------------------------------- */

enum engine { ENGINE_COMPUTE = KVHOST_COMPUTE, ENGINE_H2D, ENGINE_D2H, ENGINE_HOST, ENGINES };

/* Who makes time pass. */
typedef struct {
    void (*start)(runtime *rt);
    void (*stop)(runtime *rt);                     /* nothing is pending and nobody waits any more */
    void (*look)(runtime *rt, enum engine engine); /* runtime.lock held: the engine has something new to do */
    /* Until the parker goes; cudaErrorLaunchTimeout: it never will. */
    cudaError_t (*wait)(runtime *rt, parker *p);
    void (*spend)(runtime *rt, uint64_t until_ns); /* the caller's own time */
} timekeeper;
typedef struct threads threads;
typedef struct simulation simulation;

struct runtime {
    pthread_mutex_t lock;
    kvhost_config config;
    uint32_t channels_of[CLASSES], room, slack;
    _Atomic int sticky;
    bool stop;
    uint64_t context_id;
    bool used;       /* something was created or submitted: kvhostConfigure refuses */
    uint32_t inside; /* threads parked */
    parker *leaving; /* kvhostReset, waiting for them and for pending operations */

    channel channels[CLASSES][MAX_CHANNELS];
    uint32_t slack_used[CLASSES];
    _Atomic uint32_t waiting[CLASSES];
    channel *dirty;

    int devices; /* contexts, each with a default stream; they share memory, channels and engines */
    stream *zero[MAX_DEVICES];
    stream *streams; /* list, zero included */
    event *events;
    uint32_t next_stream;
    uint64_t next_correlation, next_order;

    bool ctx_exclusive;
    uint32_t ctx_shared;
    parkers ctx_want_exclusive, ctx_want_shared;

    copy_engine copy[CLASSES]; /* [0] unused */
    compute_engine compute;
    host_functions host;
    op *gates_running; /* by next_channel */

    const timekeeper *time;
    threads *threads;       /* of the real clock, else NULL */
    simulation *simulation; /* of the virtual clock, else NULL */

    op *free_ops;
    marker *free_markers;
    _Atomic uint32_t *wakes[16];
    uint32_t wake_count;

    kvhost_stats stats;
    memory *memory;
    _Atomic bool tracing;
    _Atomic bool faults;
    _Atomic uint32_t captures; /* streams that are being captured */
    _Atomic uint32_t calls;    /* threads in a call; where the clock is virtual they take turns anyway */
    _Atomic bool closed;       /* kvhostReset has begun: nothing begins any more */
    runtime *graveyard;
};

/* ---- one call -------------------------------------------------------------------------------------------------- */

/* What a call knows of itself; on its stack. */
typedef struct {
    runtime *rt;
    uint16_t api;
    uint8_t reason;
    bool tracing;
    bool owns;    /* the simulation, until it returns */
    bool counted; /* in runtime.calls */
    uint32_t trace_epoch;
    uint64_t trace_index; /* 1 + index; 0: none */
    uint64_t blocked_ns, longest_ns, queue_ns;
    uint64_t correlation;
    uint32_t chunks;
} call;

/* lifecycle.c: the runtime, started at first use; errors of the thread. */
runtime *kvh_start(void);
extern _Atomic(runtime *) kvh_current;
extern __thread int kvh_device; /* this thread's current one */
static inline runtime *kvh_runtime(void) {
    runtime *rt = atomic_load_explicit(&kvh_current, memory_order_acquire);
    return __builtin_expect(rt != NULL, 1) ? rt : kvh_start();
}
uint32_t kvh_tid(void);
cudaError_t kvh_begin(call *c, enum kvh_api api, uint64_t stream_handle); /* 0, or what the call must return */
cudaError_t kvh_end(call *c, cudaError_t error);
void kvh_blocked(call *c, enum kvhost_reason reason, uint64_t since_ns);
void kvh_set_last_error(cudaError_t error);
/* What CUDA remembers for each thread; an actor has its own. */
typedef struct {
    cudaError_t last_error;
    uint64_t correlation;
} thread_state;
thread_state kvh_swap_thread(thread_state of);

/* sched.c: the scheduler; all but lock/unlock want runtime.lock held. */
void kvh_lock(runtime *rt);
void kvh_unlock(runtime *rt);
void kvh_wake_later(runtime *rt, _Atomic uint32_t *word);
void kvh_remove(parkers *list, parker *p);
void kvh_push(parkers *list, parker *p);
void kvh_go(runtime *rt, parker *p, uint32_t state);
void kvh_go_all(runtime *rt, parkers *list, uint32_t state);
bool kvh_more_ops(runtime *rt);
op *kvh_op(runtime *rt);
marker *kvh_marker(runtime *rt);
void kvh_unref(runtime *rt, marker *m);
void kvh_settle_stream(runtime *rt, stream *s);
void kvh_pump(runtime *rt);
void kvh_complete(runtime *rt, op *o, uint64_t finish_ns);
void kvh_start_op(runtime *rt, op *o); /* out of its channel */
void kvh_release_slot(runtime *rt, op *o);
void kvh_fail(runtime *rt, cudaError_t code); /* sticky */
void kvh_let_leave(runtime *rt);

/* submit.c: from a call to an operation. */
cudaError_t kvh_lock_stream(call *c, stream *s);
void kvh_unlock_stream(runtime *rt, stream *s);
void kvh_unlock_stream_held(runtime *rt, stream *s); /* runtime.lock held */
cudaError_t kvh_submit(call *c, stream *s, const op *proto);
cudaError_t kvh_submit_one(call *c, cudaStream_t handle, const op *proto); /* lock, submit, unlock */
cudaError_t kvh_wait_stream(call *c, stream *s, uint64_t target, enum kvhost_reason reason);
cudaError_t kvh_wait_event(call *c, event *e);
cudaError_t kvh_wait_all(call *c);
cudaError_t kvh_ctx_lock(call *c);
void kvh_ctx_unlock(call *c);

/* engines.c: what the scheduler hands to them ... */
void kvh_engine_ready(runtime *rt, channel *ch);
void kvh_compute_start(runtime *rt, op *o);
void kvh_host_start(runtime *rt, op *o);
void kvh_look_all(runtime *rt);
void kvh_gate_unref(kvhost_gate *gate);
/* ... and how a timekeeper drives them. All with runtime.lock held; the last two let go of it meanwhile. */
op *kvh_copy_begin(runtime *rt, uint8_t class, uint64_t *service_ns); /* NULL: none is ready */
enum half { FIRST_HALF = 1, SECOND_HALF = 2, BOTH_HALVES = 3 };
void kvh_move(const op *o, enum half half); /* of every piece; without the lock */
void kvh_copy_end(runtime *rt, op *o, uint64_t finish_ns, bool moved);
const op *kvh_compute_first(runtime *rt); /* the next to end, at finish_ns; NULL: none */
void kvh_compute_end(runtime *rt);
void kvh_host_end(runtime *rt); /* calls the oldest host function */
static inline bool kvh_lost(runtime *rt) { return atomic_load_explicit(&rt->sticky, memory_order_acquire) != 0; }

/* realtime.c, simulation.c */
extern const timekeeper kvh_realtime, kvh_simulated;
uint64_t kvh_simulated_now(runtime *rt);
uint32_t kvh_choose(runtime *rt, uint32_t n); /* one of n that happen at the same time: 0 where time is real */
uint64_t kvh_random(runtime *rt);
bool kvh_simulation_enter(runtime *rt); /* true: kvh_simulation_leave it */
void kvh_simulation_leave(runtime *rt);
void kvh_simulation_lock(runtime *rt); /* for functions that are no calls */
void kvh_simulation_unlock(runtime *rt);
bool kvh_simulation_busy(runtime *rt); /* a call is under way in it */
uint32_t kvh_simulated_thread(runtime *rt);
static inline uint64_t kvh_now(runtime *rt) { return rt->simulation ? kvh_simulated_now(rt) : kvp_now_ns(); }
#define QUERY_NS 100
#define STAGING_BYTES_PER_S 10e9

/* memory.c */
typedef struct {
    uint8_t direction; /* enum kvp_direction */
    uint8_t memory;    /* enum kvp_memory of the host side; H2H: of the less able one */
    uint8_t class;
} route;
memory *kvh_memory_new(const kvhost_config *config);
void kvh_memory_free(memory *m);
cudaError_t kvh_route(runtime *rt, const void *dst, const void *src, size_t bytes, int kind, route *r);
cudaError_t kvh_device_check(runtime *rt, const void *p, size_t bytes);
void kvh_memory_release(runtime *rt, void *base); /* of cudaFreeAsync: the mapping */
void kvh_memory_stats(runtime *rt, kvhost_stats *stats);

/* kernels.c: kvprobe's copy kernels */
bool kvh_is_copy_kernel(const void *fn);
cudaError_t kvh_launch_copy_kernel(call *c, const void *fn, unsigned ctas, void **params, cudaStream_t stream);
void kvh_weigh(runtime *rt, op *o);      /* a coded copy begins: what it moves; lock held */
void kvh_share_link(runtime *rt, op *o); /* OP_WORK whose bytes are the time in ns that it needs the link; lock held */

/* cells.c: the coded ones */
typedef struct {
    kvp_wire_work work;
    bool store;
    unsigned ctas;
} kvh_cells;
/* Bytes on the wire; `busy` receives what one CTA would be busy for, in bytes at the link's rate. */
double kvh_cells_weigh(runtime *rt, const kvh_cells *c, double *busy);
bool kvh_cells_move(runtime *rt, const kvh_cells *c); /* false: an address that a GPU cannot reach */

/* copy.c, launch.c, streams.c: what the runtime's and the driver's entry points share. */
cudaError_t kvh_copy(call *c, void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream, bool wait);
cudaError_t kvh_copy_2d(call *c, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                        size_t height, int kind, cudaStream_t stream, bool wait);
cudaError_t kvh_batch(call *c, void *const *dsts, const void *const *srcs, const size_t *sizes, size_t count,
                      const void *attrs, const size_t *attr_indices, size_t attr_count, cudaStream_t stream);
cudaError_t kvh_launch(call *c, const void *fn, void **args, cudaStream_t stream);
cudaError_t kvh_stream_create(call *c, cudaStream_t *out, unsigned flags, int priority);
cudaError_t kvh_stream_sync(call *c, cudaStream_t stream);
cudaError_t kvh_event_create(call *c, cudaEvent_t *out, unsigned flags);
cudaError_t kvh_stream_query(call *c, cudaStream_t stream);
cudaError_t kvh_event_record(call *c, cudaEvent_t event, cudaStream_t stream);
cudaError_t kvh_event_query(call *c, cudaEvent_t event);
cudaError_t kvh_event_elapsed(call *c, float *ms, cudaEvent_t from, cudaEvent_t to);
cudaError_t kvh_stream_destroy(enum kvh_api api, cudaStream_t handle);
cudaError_t kvh_host_register(call *c, void *p, size_t bytes, unsigned flags);
void kvh_release_handles(runtime *rt); /* at teardown */
void kvh_handles_in_child(void);
stream *kvh_stream(runtime *rt, cudaStream_t handle); /* NULL: invalid */
stream *kvh_stream_new(runtime *rt, int priority);
void kvh_stream_retire(runtime *rt, stream *s);

/* capture.c */
cudaError_t kvh_capture_forbids(runtime *rt, uint16_t api);    /* what the call must return, or 0 */
bool kvh_captured(runtime *rt, stream *s, cudaError_t *error); /* true: what was to be submitted is not executed */
bool kvh_capture_conflicts(runtime *rt, stream *s);            /* true: it was captured, and can no longer be */
void kvh_capture_leave(runtime *rt, stream *s);

/* faults.c, trace.c */
cudaError_t kvh_fault(enum kvh_api api);
cudaError_t kvh_fault_copy(int *execution);
void kvh_faults_clear(void);
void kvh_faults_in_child(void);
void kvh_memory_in_child(void);
void kvh_trace_begin(call *c, uint64_t stream_handle);
void kvh_trace_end(call *c, cudaError_t error);
void kvh_trace_about(call *c, const void *dst, const void *src, uint64_t bytes, uint32_t count, uint8_t direction,
                     uint8_t memory);
void kvh_trace_submitted(call *c, const stream *s, const channel *ch);
void kvh_trace_executed(const op *o, bool dropped);
void kvh_trace_forget(void);
void kvh_trace_in_child(void);

#define KVH_ENTER(name, handle)                                                                                        \
    call frame;                                                                                                        \
    call *c = &frame;                                                                                                  \
    {                                                                                                                  \
        cudaError_t first = kvh_begin(c, API_##name, (uint64_t)(uintptr_t)(handle));                                   \
        if (__builtin_expect(first != 0, 0)) return kvh_end(c, first);                                                 \
    }
#define KVH_LEAVE(error) return kvh_end(c, (error))

#endif
