/* The submitter: takes transfers (jobs), submits their copies without ever blocking the caller, and tells when they
 * end.
 *
 * One native thread alone touches the copy streams. A caller hands a job over and leaves; a copy is submitted once what
 * it waits for on the device is over and the launch queue has slots for it, so nothing of ours ever stands in a launch
 * queue behind compute work, and no call of ours meets a full queue. Each submission is followed by an event (a
 * marker): whatever is outstanding is covered by something that will tell. Within a direction jobs start and end in the
 * order they came.
 *
 *   caller: kvp_job_request ----> queue of its direction ----> the thread: kvp_step ----> kvp_job.state
 *   caller, shared policy: kvp_job_request -> kvp_job_inline (submits in the caller's own thread, as a server does)
 *
 * On the host runtime with a virtual clock there is no thread: the runtime calls kvp_step_actor when its time has come.
 */
#ifndef KVP_SUBMITTER_H
#define KVP_SUBMITTER_H

#include "kvp_choose.h"
#include "kvp_copy.h"
#include "kvp_engine.h"
#include "wire.h"

enum kvp_job_state { KVP_WAITING = 0, KVP_SUBMITTING = 1, KVP_IN_FLIGHT = 2, KVP_DONE = 3, KVP_FAILED = 4 };

/* What failed, when `error` is set. */
enum kvp_job_fault {
    KVP_FAULT_NONE = 0,
    KVP_FAULT_COPY = 1,   /* a submitting call */
    KVP_FAULT_WAIT = 2,   /* cudaStreamWaitEvent */
    KVP_FAULT_DEVICE = 3, /* asking the device how far it is: it is lost */
    KVP_FAULT_CLOSED = 4, /* the submitter was closed or stopped first */
    KVP_FAULT_STUCK = 5,  /* it did not move for the time set */
    KVP_FAULT_RESET = 6,  /* the runtime was torn down under it */
    KVP_FAULT_CELL = 7,   /* the CPU's memory does not hold a block that it loads; `error`: enum kvp_wire_refusal */
    KVP_FAULT_LAUNCH = 8  /* launching a coded copy */
};

/* What a caller may read of a job while it holds it (kvp_job_release gives it back). Times: the submitter's clock. */
typedef struct {
    uint32_t state;   /* enum kvp_job_state; the last field written */
    int32_t error;    /* cudaError_t */
    uint32_t fault;   /* enum kvp_job_fault */
    uint32_t methods; /* bit i: enum kvp_method i was used */
    uint64_t id;
    uint64_t stream;      /* the stream of its newest submission */
    uint64_t copies;      /* asked for */
    uint64_t submitted;   /* of them, how many were submitted */
    uint64_t descriptors; /* as how many: neighbours are merged, large ones cut */
    uint64_t bytes;
    uint64_t calls;      /* submitting calls made for it; one that carried several jobs counts for each */
    uint64_t submit_ns;  /* host time in them, on the submitting thread */
    uint64_t longest_ns; /* the longest */
    uint64_t blocked;    /* of the calls of the shared policy, those that met a full queue */
    uint64_t copy_start_ns, copy_end_ns; /* on the device; 0: not known */
    uint64_t noticed_ns;
    uint64_t submitted_ns;           /* the last copy was submitted */
    uint64_t requested_ns, built_ns; /* asked for; put together, before it was handed over */
    uint64_t tid;                    /* thread that asked */
    /* KVP_FAULT_CELL: the first such cell, when it was stored (0: not known) and when it was loaded; whether the CPU's
     * memory still does not hold the block: else it came to the GPU otherwise than it lies there. */
    uint64_t cell, cell_stored_ns, cell_loaded_ns;
    uint32_t cell_lost;
} kvp_job_status;

typedef struct kvp_job kvp_job;
typedef struct kvp_submitter kvp_submitter;

/* Block ids of both sides; a block of a side with factor f holds f copies: copy c is part c % f of block ids[c / f]. */
typedef struct {
    const uint64_t *bases; /* address of every layer */
    uint64_t blocks;       /* at most 2^32 */
    uint32_t factor;
    uint32_t bounds; /* entries of `bound`: addresses, ascending, over which no two copies are merged */
    const uint64_t *bound;
} kvp_side;

/* What makes the CPU's pool one of cells (wire.h): its blocks are moved by coded copies alone, on pooled streams, one
 * entry of a launch a copy of a job, of blocks or with addresses. Copy `layer * (blocks * factor of the CPU's side) +
 * c` has this place in `stored_ns` and, times kvp_wire_cells of a copy, its first note in `notes`. */
typedef struct {
    kvp_wire_note *notes; /* pinned; NULL: the pool is none of cells */
    uint64_t *stored_ns;  /* when each was stored, as far as it is known; any memory */
    /* by CTAs, how fast cells are moved; NULL: those of copies as they are say which CTAs are taken */
    const kvp_method_table *methods;
    uint32_t type;               /* enum kvp_wire_type; 0: nothing is coded */
    uint32_t check;              /* a checksum of every block */
    uint32_t look;               /* 1: stores are not coded while blocks do not shrink */
    uint32_t room;               /* a packed pool's, see wire.h; else 0 */
    uint64_t step_bytes;         /* from a copy's place in the CPU's pool to the next of its layer; 0: copy_bytes */
    uint64_t tails;              /* where they begin */
    struct kvp_reserve *reserve; /* which of them are free */
} kvp_cells;

/* The tails of a packed pool: which cell has which, and how many are promised to stores that were asked for. A store is
 * promised one for each of its cells, since what a cell takes is known when the GPU has coded it; those that it does
 * not need are free again when it has ended. From any thread; `first` and `count` name notes. */
typedef struct kvp_reserve kvp_reserve;
KVP_EXPORT kvp_reserve *kvp_reserve_open(kvp_wire_note *notes, uint64_t cells, uint64_t tails, uint32_t room);
KVP_EXPORT void kvp_reserve_close(kvp_reserve *r);
/* Tails that are neither in use nor promised. */
KVP_EXPORT uint64_t kvp_reserve_left(kvp_reserve *r);
/* Promises `count` tails: 1; or, where there are not so many, nothing: 0. */
KVP_EXPORT int kvp_reserve_claim(kvp_reserve *r, uint64_t count);
KVP_EXPORT void kvp_reserve_unclaim(kvp_reserve *r, uint64_t count);
/* A store to these cells is submitted: each has a tail from now on. The promise is given back once it was. */
KVP_EXPORT void kvp_reserve_begin(kvp_reserve *r, uint64_t first, uint32_t count);
/* It has ended: the tails that no store needs any more go back; `keep`: nobody knows what it wrote, so none does. */
KVP_EXPORT void kvp_reserve_end(kvp_reserve *r, uint64_t first, uint32_t count, int keep);
/* Nothing lies in these cells any more, and their tails are free. 0: a store is on its way to one of them. */
KVP_EXPORT int kvp_reserve_discard(kvp_reserve *r, uint64_t first, uint64_t count);

typedef struct {
    kvp_copier copier;
    kvp_method_table *methods; /* which method carries what; read at every submission */
    kvp_side gpu, cpu;
    uint64_t copy_bytes; /* of each copy of a job of blocks; 0: there are no pools, only jobs with addresses */
    uint32_t layers;
    uint32_t pageable; /* the CPU side is not pinned: one cudaMemcpyAsync a copy */
    int32_t device;
    uint32_t depth;   /* operations that one stream takes */
    uint32_t detail;  /* enum kvp_detail */
    uint32_t streams; /* pooled streams of each direction */
    void *const *pooled[2];
    void *shared[2];
    void *clock_stream;
    uint64_t clock_try_ns;        /* an event on it that is not reached so soon is given up */
    kvp_copy_list list[2];        /* of loads and of stores, a ring; capacity 0: there is no copy kernel */
    uint64_t burst_ns;            /* work submitted ahead of the device, each direction; 0: 1.2 ms, 2.4 by kernels */
    uint64_t bytes_per_s[2];      /* cap on the rate; 0: none */
    uint64_t link_bytes_per_s[2]; /* first guess of the rate; 0: 20 GB/s */
    uint64_t stuck_ns;            /* a transfer that does not move for so long is given up; 0: never */
    uint32_t ceiling; /* shared policy: a run ends where so many operations stand in the stream; 0: nowhere */
    uint32_t every;   /* shared policy: copies between two markers */
    uint32_t ranges;  /* NVTX ranges around transfers (and copies at detail COPIES) */
    /* kvhost.h, where the runtime's clock is virtual, else NULL */
    int (*actor_add)(uint64_t (*step)(void *, uint64_t), void *);
    void (*actor_wake)(int);
    void (*actor_remove)(int);
    int (*run_until)(int (*condition)(void *), void *, uint64_t until_ns);
    uint64_t (*slots)(void *stream); /* that its operations hold */
    kvp_cells cells;
} kvp_submitter_config;

/* Makes the first events and starts the thread. The config's arrays of streams, bases and bounds are copied;
 * what they name must live until kvp_submitter_close has returned. NULL: an event could not be made (cudaError_t in
 * `why`), or no memory or no thread could be had (0). */
KVP_EXPORT kvp_submitter *kvp_submitter_open(const kvp_submitter_config *config, int *why);
/* Ends all jobs (those not submitted fail with KVP_FAULT_CLOSED unless `drain`) and stops the thread; every later call
 * refuses. In a forked child: does nothing. */
KVP_EXPORT void kvp_submitter_close(kvp_submitter *s, int drain);
/* Destroys its events, after kvp_submitter_close; all of them where one fails. 0, or the first error. */
KVP_EXPORT int kvp_submitter_destroy_events(kvp_submitter *s);
/* In place of kvp_submitter_close, once the runtime was torn down: its streams and events are gone, their handles may
 * be somebody else's soon, so none of them is used any more. All jobs fail with KVP_FAULT_RESET. Nobody may be inside
 * kvp_job_inline. */
KVP_EXPORT void kvp_submitter_abandon(kvp_submitter *s);
/* Frees it, once nobody is inside any call of it any more; jobs that are still held stay readable. */
KVP_EXPORT void kvp_submitter_hold(kvp_submitter *s); /* one more kvp_submitter_free is to come */
KVP_EXPORT void kvp_submitter_free(kvp_submitter *s);
/* Whoever sleeps in kvp_wait_ended comes back with -1, and does so from now on. */
KVP_EXPORT void kvp_submitter_stop(kvp_submitter *s);

enum kvp_job_refusal {
    KVP_BAD_ID = -1,
    KVP_TWICE = -2,
    KVP_NO_MEMORY = -3,
    KVP_BROKEN = -4,
    KVP_FORKED = -5,
    KVP_SIGNALS = -6, /* the calling thread should look at signals and ask again */
    KVP_STUCK = -7,   /* nothing outstanding can free a slot for it */
    KVP_NO_ROOM = -8  /* a packed pool has too few tails left for a store; `bad`: how many */
};

/* How far kvp_job_inline came with a job. */
enum kvp_run_end { KVP_MORE_IS_LEFT, KVP_ALL_SUBMITTED, KVP_COPY_FAILED /* `error` of the job: CUDA's code */ };

/* Why kvp_job_wait came back. */
enum kvp_wait_end {
    KVP_WOULD_NEVER_END = -2, /* nothing that is outstanding can end it (virtual clock) */
    KVP_LOOK_AT_SIGNALS = -1, /* it slept 100 ms or was interrupted: the calling thread should look, and ask again */
    KVP_TIME_RAN_OUT,
    KVP_HAS_ENDED
};

enum kvp_request_what {
    KVP_REQUEST_STORE = 1, /* else a load */
    KVP_REQUEST_AFTER = 2, /* it waits for what the stream `after` holds now */
    KVP_REQUEST_PUSH = 4   /* it is handed over */
};
typedef struct {
    int64_t bad;   /* the id that is out of range; of a job that was made, its address */
    uint64_t made; /* id of the newest job that was made */
    int why;
} kvp_job_refused;
typedef struct {
    kvp_submitter *submitter;
    kvp_job_refused *refused;
    void *after; /* a stream */
    uint64_t id, copies /* of one layer */, gpu_count, cpu_count, requested_ns;
    uint32_t what; /* enum kvp_request_what */
} kvp_request;
/* A job of GPU block ids and CPU block ids that cover the same copies; both are copied. Returns the job's status, held
 * once for the caller and once for the submitter; or NULL, a refusal (below 0) or cudaEventRecord's code in `refused`,
 * and nothing was asked for. */
KVP_EXPORT kvp_job_status *kvp_job_request(const kvp_request *request, const int64_t *gpu, const int64_t *cpu);

/* Copies whose addresses count from a pair of bases. */
typedef struct {
    uint64_t count;
    const uint64_t *dst, *src, *sizes; /* sizes NULL: `size` each */
    uint64_t size;
} kvp_offsets;
/* Copies given by address, of one job or of several that follow one another; all arrays are copied, once for all jobs:
 * layers of a model differ in their bases alone. */
typedef struct {
    uint64_t dst, src;
    uint64_t list; /* which of `offsets` is copied from here */
} kvp_bases;
typedef struct {
    const kvp_offsets *offsets;
    const kvp_bases *bases;
    const uint64_t *ends;  /* of each job: where its bases end and the next one's begin */
    const uint64_t *bound; /* addresses, ascending, over which no two copies are merged */
    uint32_t lists, jobs, bounds;
} kvp_addresses;
enum kvp_waits {
    KVP_WAITS_NOT,
    KVP_WAITS,           /* the longer the wait, the longer compute is thought to go on, 20 ms at most */
    KVP_WAITS_FOR_COPIES /* whose stream waits for copies that others make: that is no sign of compute */
};
/* The same with addresses, handed over at once: jobs `id` and on, of which the first waits for `after`. All of them
 * are in `made` then; else none was asked for, and a refusal or cudaEventRecord's code is returned. `waits`: enum
 * kvp_waits. */
KVP_EXPORT int kvp_job_request_addresses(kvp_submitter *s, int direction, uint64_t id, const kvp_addresses *copies,
                                         void *after, int waits, uint64_t requested_ns, kvp_job_status **made);
/* A job that is not handed over after all: the submitter's reference goes, the caller's stays. */
KVP_EXPORT void kvp_job_unused(kvp_submitter *s, kvp_job_status *job);
/* Hands the job to the thread, behind those of its direction that came before; once, however often it is called. Never
 * blocks. 0 or a refusal. */
KVP_EXPORT int kvp_job_push(kvp_submitter *s, kvp_job_status *job);
/* Submits (more of) the job in the calling thread to the shared stream, one cudaMemcpyAsync a copy, at most `max`
 * copies, until it is all submitted or what `options` says stops it; `outstanding` receives the operations that stood
 * in the stream when the run began. An `enum kvp_run_end`, or a refusal. Only while kvp_inline_free(): else push. */
KVP_EXPORT int kvp_job_inline(kvp_submitter *s, kvp_job_status *job, const kvp_submit_options *options, uint64_t max,
                              kvp_submit_result *result, uint64_t *outstanding);
/* Whether nothing of a direction waits in the submitter: the shared stream may take the next job. */
KVP_EXPORT int kvp_inline_free(kvp_submitter *s, int direction);
/* Gives up what one reference holds; the caller's pointer is dead. */
KVP_EXPORT void kvp_job_release(kvp_job_status *job);

/* Sleeps until the job has ended (NULL: all jobs have), or timeout_ns of the submitter's clock has passed (UINT64_MAX:
 * no limit). */
KVP_EXPORT enum kvp_wait_end kvp_job_wait(kvp_submitter *s, kvp_job_status *job, uint64_t timeout_ns);
/* Makes later work of `stream` wait for the job: at once where it is submitted; else it goes to the front of what the
 * submitter does, with its waits on the device, and the call returns when it is submitted. 0, a cudaError_t, or a
 * refusal; a job that has ended: 0 and nothing is done. */
KVP_EXPORT int kvp_job_fence(kvp_submitter *s, kvp_job_status *job, void *stream);
/* Ids of jobs that ended since the last call, in the order they ended; returns how many. */
KVP_EXPORT uint64_t kvp_take_ended(kvp_submitter *s, uint64_t *ids, uint64_t max);
/* Sleeps until there is something to take, the submitter closes (-1) or 100 ms have passed (0). */
KVP_EXPORT int kvp_wait_ended(kvp_submitter *s);

typedef struct {
    uint64_t pending;          /* jobs that have not ended */
    uint64_t pending_bytes[2]; /* bytes asked for and not known to be copied */
    uint64_t in_flight_bytes[2];
    uint64_t in_flight_places[2];
    uint64_t shared_places[2];
    uint64_t stream[2];                /* the pooled stream in use */
    uint64_t launches[2][KVP_METHODS]; /* submitting calls by method */
    uint64_t bytes[2][KVP_METHODS];
    uint64_t cta_bytes[2]; /* bytes by kernel, each as often as there were CTAs in its launch */
    uint64_t rate[2];      /* bytes per second, lately */
    uint64_t events_free, events, listed[2] /* entries of the rings in use */, fences_used, fences;
    uint64_t longest_call_ns; /* of the thread's submitting calls */
    uint64_t steps;
    int32_t broken; /* cudaError_t or fault that ended it; 0: works */
    uint32_t fault;
    uint32_t methods_off; /* bit i: method i failed and is not used any more */
    int32_t method_error; /* with what code */
    uint64_t stuck_job;
    const char *wrong; /* the first invariant that was broken (all are looked at on a virtual clock); NULL: none */
    uint32_t coding;   /* the newest store was coded */
    float cell_share;  /* of a block's bytes that its cell takes, as coded stores were seen lately */
    uint64_t refused;  /* cells that did not hold their block */
} kvp_submitter_stats;
KVP_EXPORT void kvp_submitter_read(kvp_submitter *s, kvp_submitter_stats *out);

#endif
