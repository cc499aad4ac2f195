/* The embedded host runtime: the CUDA runtime's own symbols without a GPU, and the controls that CUDA has no words for.
 *
 * libkvprobe_hostrt.so exports cudaMemcpyAsync, cudaStreamCreateWithPriority, cuGetProcAddress_v2 and the rest with the
 * signatures of CUDA 13.0. What is behind them is small, but real: streams whose launch queue is bounded, hardware
 * channels that streams share, one copy engine per direction that moves the bytes, compute work of a chosen duration,
 * events with timing, a context lock, pageable and pinned memory. Nothing sleeps for show: a call blocks because a
 * queue is full, a lock is held, or the work it waits for is not done.
 *
 * THE LAUNCH QUEUE (figures: CUDA 13.0 on an H200, which this models)
 * - There are three classes of channels: compute, H2D copies, D2H copies; each has `channels` of them (4). Stream
 *   number n uses channel n % channels of every class. NULL, 1 and 2 (the legacy and per-thread default streams) all
 *   name stream 0, which is an ordinary stream: it neither waits for other streams nor makes them wait. Device to
 *   device and host to host copies go to the D2H class; memsets, launches, host functions to compute. An event record
 *   takes a slot of the channel that its stream used last. A wait takes no slot.
 * - A channel of depth D has D - slack slots of its own; a further slack of min(21, D / 8) slots belongs to all
 * channels of the class together. One stream therefore takes 1,021 copies, streams on C channels take C * 1,000 + 21.
 *   A copy holds its slot until it has completed; compute-class work only until it starts, so that behind a running
 *   kernel exactly 1,021 launches find a slot.
 * - A channel is first in, first out across its streams: an operation that cannot start (its stream waits) holds back
 *   what other streams put behind it.
 * - A call that finds no slot blocks until one is handed to it, first come, first served, one per completion. It then
 *   holds its stream's lock (every call that names the stream waits) and the context lock in shared mode
 *   (cudaEventCreate*, cudaStreamCreate*, cudaMalloc, cudaHostAlloc, cudaHostRegister, cudaFree, cudaFreeHost,
 *   cudaHostUnregister take it exclusively and wait).
 * - A batch of n copies is cut into ceil(n * 0.041) operations of equal length, a slot each: 1 for 8, 4 for 80, 40 for
 *   1,000, so that a gated stream takes 8,168, 20,400 and 25,000 copies in batches of those sizes.
 *
 * TIME. An engine keeps a schedule: an operation starts when it could (submitted, predecessor and waits done, engine
 * free) and ends after max(real time of the memcpy, latency + bytes / bandwidth); a piece of a batch after the first
 * adds latency / 5. An engine thread that the system ran late catches up, completing several operations at once.
 *
 * VIRTUAL CLOCK (kvhost_config.virtual_clock, KVHOST_CLOCK=virtual). The same model without a thread and without a
 * sleep: a discrete event simulation that starts at 1 s and is the same, event for event, on any machine under any
 * load.
 * - Time passes only inside a call, and only as the model says: a submission costs submit_ns, a query 100 ns, staging a
 *   pageable source its bytes at 10 GB/s, every other call nothing; a copy takes latency + bytes / bandwidth on its
 *   engine. A call that blocks runs what happens meanwhile and returns at the time at which what it waited for holds.
 *   Host functions and the functions of work kernels take no time.
 * - Simulated threads are actors (below). They and the engines take turns on the caller's own thread.
 * - The seed orders what happens at the same time, and decides for every copy whether its bytes move when it starts,
 * when it ends, or half of them each: each is possible on a GPU.
 * - A call that can never return, because nothing that is outstanding can wake it, returns cudaErrorLaunchTimeout;
 *   kvhostStuck then says what is outstanding.
 * - A call from another thread of the process waits until the running one has returned.
 *
 * ENVIRONMENT, read when the runtime starts (first call, or kvhostReset): KVHOST_DEPTH, KVHOST_CHANNELS,
 * KVHOST_DEVICES, KVHOST_H2D_GBPS, KVHOST_D2H_GBPS, KVHOST_PAGEABLE_GBPS, KVHOST_LATENCY_US, KVHOST_MEMORY_BYTES,
 * KVHOST_PINNED_BYTES, KVHOST_RUNTIME_VERSION, KVHOST_SUBMIT_NS, KVHOST_CLOCK (virtual or real), KVHOST_SEED;
 * CUDA_DEVICE_MAX_CONNECTIONS (all classes) and CUDA_DEVICE_MAX_COPY_CONNECTIONS (copies), 1 to 32;
 * CUDA_SCALE_LAUNCH_QUEUES 0.25x, 0.5x, 2x, 4x. Values out of range are ignored, as the driver ignores them.
 * KVHOST_ATTRIBUTES, "NUMBER=VALUE,..." of enum cudaDeviceAttr, is read at each question: another machine's device,
 * such as Grace's.
 *
 * CAPTURE. What a capturing stream takes is not executed and no graph is kept; cudaStreamEndCapture says whether the
 * capture is whole. As in CUDA a call of any thread that may be unsafe (allocating, registering, querying and waiting
 * for events and streams, synchronous copies) is refused with 900 and spoils captures in global mode, unless the
 * thread's own mode is another (cudaThreadExchangeStreamCaptureMode).
 *
 * FORK. A child starts afresh at its first call; its parent's streams, events and device pointers are invalid there.
 */
#ifndef KVHOST_H
#define KVHOST_H

#include "kvp.h"
#include "kvp_cuda.h"

/* ---- configuration ------------------------------------------------------------------------------------------- */

/* 0 in a field means: from the environment, else the default. */
typedef struct {
    uint64_t depth;            /* operations behind one stream; 1021; scaled by CUDA_SCALE_LAUNCH_QUEUES only when it
                                  does not come from here. 1 to 1,000,000 */
    uint64_t compute_channels; /* 4; 1 to 32 */
    uint64_t copy_channels;    /* 4; 1 to 32; of H2D and of D2H alike */
    double h2d_bytes_per_s;    /* 4e9 */
    double d2h_bytes_per_s;    /* 4e9 */
    double latency_ns;         /* 2000, per copy; negative: none */
    uint64_t memory_bytes;     /* device memory; 8 GiB */
    uint64_t pinned_bytes;     /* limit of pinned host memory; none */
    uint64_t runtime_version;  /* 13000; below 13000 the exported cudaMemcpyBatchAsync has 12.8's signature (failIdx) */
    double submit_ns;          /* 1000: host time of a submission that finds a slot, as a driver takes it (1.04 us on an
                                  H200); negative: as fast as this library can */
    uint64_t virtual_clock;    /* 1: time is simulated (see VIRTUAL CLOCK); 2: real, whatever the environment says */
    uint64_t seed;             /* 1; of the virtual clock: decides the order of what happens at the same time */
    double pageable_bytes_per_s; /* of single copies between pageable and device memory; as the link. 8e9 to 10e9 beside
                                    a link of 55e9 were measured on an H200 */
    uint64_t reserved[3];
} kvhost_config;

/* Sets the configuration of a runtime in which no stream was created and nothing was submitted yet, else
 * cudaErrorNotSupported: use kvhostReset then. */
KVP_EXPORT cudaError_t kvhostConfigure(const kvhost_config *config);
/* The configuration in force: no field 0 but pinned_bytes = no limit, latency_ns = none, pageable_bytes_per_s = as the
 * link. */
KVP_EXPORT cudaError_t kvhostGetConfig(kvhost_config *config);
/* Tears everything down and starts afresh with `config` (NULL: environment and defaults), errors and faults forgotten.
 * Calls blocked in other threads return cudaErrorDevicesUnavailable first; host functions that run are waited for. All
 * streams, events, device memory and cudaHostAlloc'd memory are gone after it: touching that memory then is a crash. */
KVP_EXPORT cudaError_t kvhostReset(const kvhost_config *config);

/* ---- time ----------------------------------------------------------------------------------------------------- */

/* The time in ns: virtual, or kvp_now_ns where the clock is real. */
KVP_EXPORT uint64_t kvhostNow(void);
/* From now on the device's own clock, by which events are timed, is so far ahead, as when a driver sets it. */
KVP_EXPORT void kvhostStepDeviceClock(int64_t ns);
/* 1: the clock is virtual. */
KVP_EXPORT int kvhostIsVirtual(void);

/* An actor: a simulated thread. Its step is called at a virtual time, calls the runtime as any thread would, and
 * returns the time at which it wants to be called next (UINT64_MAX: only when it is woken; a time that has passed: in 1
 * ns). A step whose call blocks is suspended, on a stack of its own of 256 KiB, and goes on when that call returns; all
 * else goes on meanwhile. It must not hold a lock across a call: who else wants it runs on the same thread. */
typedef uint64_t (*kvhost_step)(void *ctx, uint64_t now_ns);
/* Adds an actor, whose first step comes at the present time, and returns its id; -1: the clock is real. Resetting the
 * runtime removes all actors. */
KVP_EXPORT int kvhostActorAdd(kvhost_step step, void *ctx);
/* The same for a step that needs its caller's stack, as an interpreter's callback does. If a call in it blocks, calls
 * that were entered before it return only after it. */
KVP_EXPORT int kvhostActorAddInline(kvhost_step step, void *ctx);
/* The same for a step that needs a thread of its own, as a program's caller does: a call in it that blocks suspends
 * that thread, and one of all threads runs at any time. */
KVP_EXPORT int kvhostActorAddThread(kvhost_step step, void *ctx);
/* The actor's next step comes at the present time; after the one that is under way, if one is. */
KVP_EXPORT void kvhostActorWake(int id);
/* Waits for the step that is under way (unless that step is the caller), then removes the actor. */
KVP_EXPORT void kvhostActorRemove(int id);

/* Runs all that is due until then; the time is `until_ns` afterwards, if it was not later already. In an actor: sleeps.
 * cudaErrorNotSupported: the clock is real. */
KVP_EXPORT int kvhostAdvance(uint64_t until_ns);
/* Runs until the condition holds, which is asked after every event and must only look (its calls take no time).
 * cudaErrorLaunchTimeout: it can never hold, since nothing is due any more, or only actors that poll have run for a
 * million steps; kvhostStuck says what is outstanding. cudaErrorNotSupported: the clock is real. */
KVP_EXPORT int kvhostRunUntil(int (*condition)(void *ctx), void *ctx);
/* The same, and no longer than until `until_ns`, at which it returns 0 whether the condition holds or not. */
KVP_EXPORT int kvhostRunUntilTime(int (*condition)(void *ctx), void *ctx, uint64_t until_ns);
/* What was outstanding when a call last returned cudaErrorLaunchTimeout, a line each; "" if none has. */
KVP_EXPORT const char *kvhostStuck(void);
/* Events that the simulation has executed. */
KVP_EXPORT uint64_t kvhostEvents(void);
/* Of what, when and in which order: equal where two simulations ran alike. */
KVP_EXPORT uint64_t kvhostDigest(void);

/* ---- work ----------------------------------------------------------------------------------------------------- */

/* A kernel that takes `duration_ns` and does nothing. Kernels of different streams run at the same time. */
KVP_EXPORT cudaError_t kvhostLaunchDelay(cudaStream_t stream, uint64_t duration_ns);
/* A kernel that takes `duration_ns` and then calls fn(arg) on the compute engine's thread, before it counts as
 * completed: its effects on memory. fn must not wait for other work of the runtime. */
KVP_EXPORT cudaError_t kvhostLaunchWork(cudaStream_t stream, void (*fn)(void *), void *arg, uint64_t duration_ns);
/* The delay as a kernel for cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernel: pass its address as the function,
 * args[0] pointing to a uint64_t of nanoseconds. Never called. Other functions: error 98, invalid device function. */
KVP_EXPORT void kvhost_delay_kernel(void);

/* A kernel that runs until it is opened: the gate of saturation tests, without a thread and without a time. */
typedef struct kvhost_gate kvhost_gate;
KVP_EXPORT kvhost_gate *kvhostGateCreate(void);
KVP_EXPORT cudaError_t kvhostGateLaunch(kvhost_gate *gate, cudaStream_t stream);
KVP_EXPORT void kvhostGateOpen(kvhost_gate *gate);    /* once and for all launches of this gate, later ones too */
KVP_EXPORT int kvhostGateReached(kvhost_gate *gate);  /* launches of it that have started */
KVP_EXPORT void kvhostGateDestroy(kvhost_gate *gate); /* opens it first */

/* ---- errors on demand ------------------------------------------------------------------------------------------ */

/* The n-th copy call from now (1 = next; a batch is one call) returns `code` and submits nothing. n = 0 disarms. */
KVP_EXPORT cudaError_t kvhostFailCopy(uint64_t n, cudaError_t code);
/* The n-th copy call submitted from now fails while it executes: it moves nothing and `code` becomes sticky, as an
 * illegal address does: every later call returns it, outstanding work is dropped, blocked calls wake with it. */
KVP_EXPORT cudaError_t kvhostFailExecution(uint64_t n, cudaError_t code);
/* The n-th call from now of the named function ("cudaEventCreateWithFlags") returns `code` and does nothing else. n = 0
 * disarms all of that function. cudaErrorInvalidValue: no such function, or more than 16 armed. */
KVP_EXPORT cudaError_t kvhostFailCall(const char *name, uint64_t n, cudaError_t code);
/* How often a function failed on demand since the runtime was reset; "copy" and "execution" name those two. */
KVP_EXPORT uint64_t kvhostFailed(const char *name);
/* From now on every call returns cudaErrorDevicesUnavailable; outstanding work is dropped, blocked calls wake. */
KVP_EXPORT cudaError_t kvhostLoseDevice(void);

/* ---- patterns in memory ----------------------------------------------------------------------------------------- */

/* Fills `count` pieces of memory, one after another, each with its word. */
KVP_EXPORT void kvhostFillPieces(void *at, uint64_t piece_bytes, const uint64_t *words, uint64_t count);
/* The first piece that does not hold its word throughout, or -1; a word of 0: not looked at. */
KVP_EXPORT int64_t kvhostComparePieces(const void *at, uint64_t piece_bytes, const uint64_t *words, uint64_t count);

/* ---- ground truth ---------------------------------------------------------------------------------------------- */

enum kvhost_class { KVHOST_COMPUTE = 0, KVHOST_H2D = 1, KVHOST_D2H = 2, KVHOST_NO_CLASS = 255 };
enum kvhost_reason {
    KVHOST_NOT_BLOCKED = 0,
    KVHOST_QUEUE_FULL = 1,
    KVHOST_CONTEXT_LOCK = 2,
    KVHOST_STREAM_LOCK = 3,
    KVHOST_PAGEABLE = 4, /* waited for a pageable copy; the staging memcpy itself is not counted */
    KVHOST_SYNC = 5      /* a synchronising call waited for work */
};

/* One call. All times: ns of kvhostNow. 0 in exec_*: nothing executed (yet). */
typedef struct {
    uint64_t sequence;      /* order in which calls were entered, from 0 */
    uint64_t correlation;   /* id of the device operation; 0: the call submitted none. A batch has one */
    uint64_t start_ns;      /* entry */
    uint64_t end_ns;        /* return; 0 while the call is still inside */
    uint64_t blocked_ns;    /* part of it spent waiting, all reasons */
    uint64_t queue_ns;      /* part of blocked_ns that waited for a slot */
    uint64_t exec_start_ns; /* of a batch: its first chunk's */
    uint64_t exec_end_ns;   /* of a batch: its last finished chunk's */
    uint64_t stream;        /* handle as given */
    uint64_t src, dst;      /* of a batch: its first copy's */
    uint64_t bytes;
    uint32_t tid;           /* where the clock is virtual: 1 + the actor's id, 0 for a caller that is none */
    uint32_t count;         /* copies in the call */
    uint32_t chunks;        /* device operations it became */
    uint32_t executed;      /* of them, how many are over */
    uint32_t outstanding;   /* slots taken on the channel just after this submission */
    uint32_t stream_number; /* 0 = default stream, then in order of creation */
    uint16_t result;
    uint16_t api;     /* kvhostCallName(api) is the function */
    uint8_t call;     /* enum kvp_call; 0: the format has no number for it */
    uint8_t reason;   /* enum kvhost_reason: the longest wait of the call */
    uint8_t op_class; /* enum kvhost_class */
    uint8_t channel;
    uint8_t direction; /* enum kvp_direction */
    uint8_t memory;    /* enum kvp_memory of the host side */
    uint8_t dropped;   /* 1: the device was lost or failed; the work did not take place */
    uint8_t pad;
} kvhost_trace_record; /* 136 bytes */

/* Starts recording every call but queries, up to `capacity` calls; what came before is forgotten. */
KVP_EXPORT cudaError_t kvhostTraceStart(uint64_t capacity);
/* Stops recording; what was recorded stays readable, and executions still under way are filled in. */
KVP_EXPORT cudaError_t kvhostTraceStop(void);
/* Copies up to `max` records from number `first` on; returns how many. With records == NULL: how many there are. */
KVP_EXPORT uint64_t kvhostTraceRead(kvhost_trace_record *records, uint64_t first, uint64_t max);
/* Calls that found the buffer full. */
KVP_EXPORT uint64_t kvhostTraceDropped(void);
/* Name of a trace record's `api`; "?" for none. */
KVP_EXPORT const char *kvhostCallName(uint16_t api);
/* Correlation of this thread's newest submission; 0: none yet. */
KVP_EXPORT uint64_t kvhostLastCorrelation(void);

typedef struct {
    uint32_t outstanding[3][32];            /* slots taken, by class and channel */
    uint32_t waiting[3][32];                /* calls blocked for a slot */
    uint64_t capacity[3];                   /* slots of a class: channels * (depth - slack) + slack */
    uint64_t copies_submitted, copies_done; /* pieces: a batch of 80 counts 80 */
    uint64_t bytes_done[5];                 /* by enum kvp_direction */
    uint64_t launches;                      /* compute-class work submitted */
    uint64_t blocked_calls;                 /* calls that waited for a slot */
    uint64_t blocked_ns;                    /* their time */
    uint64_t operations_pending;            /* submitted, not completed, all streams */
    uint64_t streams, events;               /* alive, without the default stream */
    uint64_t device_bytes, pinned_bytes;    /* allocated (registered memory included) */
    uint64_t host_functions;                /* called so far */
    uint64_t sticky;                        /* error that every call returns; 0: none */
    uint64_t pointers_asked;                /* addresses that cuPointerGetAttributes was asked about */
} kvhost_stats;
KVP_EXPORT cudaError_t kvhostStats(kvhost_stats *stats);
/* Calls of this thread that waited for a slot so far. */
KVP_EXPORT uint64_t kvhostQueueFull(void);
/* Slots that a stream's operations hold. */
KVP_EXPORT uint64_t kvhostSlots(cudaStream_t stream);

#endif
