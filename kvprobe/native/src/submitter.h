/* Inside the submitter: jobs, markers, fences, and who may touch what. */
#ifndef KVP_SUBMITTER_INTERNAL_H
#define KVP_SUBMITTER_INTERNAL_H

#include "kvp_explore.h"
#include "kvp_submitter.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define RUN_MAX 16384 /* copies that are looked at together */
#define CLASSES 15    /* of spare memory; the last one holds 8 MiB */
#define COMPUTE_STREAMS 64
#define NOT_READY cudaErrorNotReady
#define BAD_QUERIES 3        /* in a row: the device does not answer */
#define LEAST_PAUSE_NS 15000 /* between two looks at the device */
#define PINNED 16
#define RENEW_CLOCK_NS UINT64_C(10000000000)

enum { LOAD = 0, STORE = 1 };

/* A napping thread looks again so soon that no caller pays for waking it. */
enum sleep { AWAKE = 0, ASLEEP = 1, NAPPING = 2 };

/* Where a job's next copy begins. */
struct cursor {
    uint64_t copy; /* within the layer */
    uint64_t offset;
    uint32_t layer; /* addresses: pair of bases */
};

/* An event on a compute stream: what a job waits for. Guarded by the submitter's lock. */
struct fence {
    struct fence *next, *all;
    void *event, *stream;
    uint64_t opened_ns;
    uint32_t users;
    enum { FENCE_OPEN, FENCE_RECORDING, FENCE_RECORDED, FENCE_PASSED } state;
    int code;
};

struct kvp_job {
    kvp_job_status status; /* first: a pointer to it is a pointer to the job */
    atomic_uint holders;
    kvp_submitter *owner;
    struct kvp_job *next;
    uint64_t sequence; /* within its direction, from 1 */
    struct fence *after;
    void *end_event; /* in flight: the event behind its last copy */
    struct cursor at;
    uint8_t direction, begun, inlined, busy /* a caller is inside with it; guarded by shared_lock */;
    bool behind_copies; /* `after` waits for others' copies, too */
    bool handed;        /* the thread has it, or has had it; the caller's own */
    atomic_uint hurry;  /* somebody's stream waits for it: its waits go to the device */
    int failed;         /* CUDA's code of the submission that failed; what was submitted before still drains */
    void *range;
    /* pools: block ids of both sides */
    uint64_t count;
    const uint32_t *gpu, *cpu;
    int64_t *data;  /* what they point into; gone when the job has ended */
    uint64_t words; /* space in it */
    uint64_t claim; /* tails of a packed pool that are promised to what is not submitted yet */
    /* addresses: what all jobs of a request share, until they have ended; and this one's part of its bases */
    struct addresses *of;
    const kvp_bases *bases;
    uint32_t pairs;
};

/* What the jobs of a request copy: its own copy of a kvp_addresses. */
struct addresses {
    atomic_uint jobs; /* that have not ended */
    uint32_t bounds;
    const kvp_offsets *offsets;
    const uint64_t *bound;
    uint64_t words; /* of all of it */
    uint64_t data[];
};

/* An event behind copies of one stream: when it is reached they are done. */
struct marker {
    void *event; /* NULL: recording it failed, the stream itself is asked */
    void *start; /* recorded in front of the copies, where they wait for compute on the device */
    void *stream;
    uint64_t bytes, sequence /* jobs up to it end here */, begun /* jobs up to it have begun */;
    uint64_t ready_ns;    /* the device could begin with it, as far as this thread was concerned; 0: not known */
    uint64_t called_ns;   /* its submission began */
    uint64_t due_ns;      /* of the oldest one: when it should be reached */
    uint64_t expected_ns; /* by the table of methods; 0: not known */
    uint32_t places;
    uint32_t entries;     /* of the direction's ring of copies, with those that were passed over at its end */
    uint32_t first_entry; /* of a coded copy: where its entries begin in the ring, and how many there are */
    uint32_t cells;
    bool coded; /* a store that was coded, not just checked */
    int32_t row;
    bool idle;       /* nothing of ours stood in front of them */
    bool unhindered; /* a batch of copies so large that only what else uses the device can make it slower */
};

#define MARKERS 1024
#define EVENTS_MOST 1024 /* timing events: launches in flight, both directions and policies */

struct line { /* markers of one stream after another, first in, first out */
    struct marker marker[MARKERS];
    uint32_t head, tail;
    uint64_t end_ns; /* when the device reached the newest marker that it has reached */
};

struct direction {
    struct kvp_job *first, *last;           /* not wholly submitted; the thread's own */
    struct kvp_job *flying, *flying_last;   /* begun or ended in submission, in order; the thread's own */
    struct line line;                       /* pooled; the thread's own */
    struct line shared;                     /* guarded by shared_lock */
    struct kvp_job *inlined, *inlined_last; /* jobs on the shared stream, in order; guarded by shared_lock */
    pthread_mutex_t shared_lock;
    uint64_t shared_sequence, sequence;
    atomic_ullong shared_places, places, bytes, pending_bytes;
    atomic_uint hungry;               /* a job that comes now should be seen at once */
    atomic_uint pushed, inlined_jobs; /* not ended: handed to the thread; on the shared stream */
    uint32_t at_stream;
    float factors[KVP_CHOOSE_ROWS]; /* what each row of the table took lately, against what it says */
    int method;                     /* of the newest submission */
    bool leave;                     /* the stream is held up by others: take another once it is empty */
    uint64_t left_ns;               /* when one was left last */
    uint32_t *held_up;              /* by pooled stream: how often it was */
    void *_Atomic stream;
    atomic_ullong rate; /* bytes per second, lately */
    uint64_t next_ns, progress_ns;
    uint64_t gate_since;  /* the head waits for compute; 0: it does not */
    uint64_t alone_since; /* and nothing of ours is in flight, which may hold up the mark that it waits for */
    uint32_t pause_ns;
    uint64_t ramp;      /* most bytes of the next submission: doubles from the first one after a pause */
    uint32_t *stamp;    /* by destination, in copies: sequence of the job that wrote it last */
    atomic_uint listed; /* entries of the ring of copies in use */
    uint32_t list_at;   /* where the next ones begin */
    uint64_t hurry;     /* jobs up to this sequence are in a hurry, because one of them is */
};

/* The first bytes of memory that no job has. */
struct spare {
    struct spare *next;
};

/* Destinations that the request in hand has named so far, a bit a block; all clear between two. */
struct named {
    pthread_mutex_t lock;
    uint64_t *bits, words;
};

struct kvp_submitter {
    kvp_submitter_config config;
    uint32_t forks; /* kvp_forks() of the process that made it */
    pthread_t thread;
    int threaded, actor;
    pthread_mutex_t lock;             /* spare, ended, fences, events, pins; never held over a call of the runtime */
    struct kvp_job *_Atomic incoming; /* the newest first */
    struct named named[2];
    uint64_t *ended;
    uint64_t ended_first, ended_count, ended_room;
    struct fence *fences_free, *fences_all;
    uint32_t fence_count, fences_used;
    struct {
        void *stream;
        uint32_t recorded;
        struct fence *open; /* not yet recorded, for those who come while many are */
    } compute[COMPUTE_STREAMS];
    atomic_int computes; /* entries of it that were ever used; grows with the lock */
    uint32_t uncounted;
    void **made, **events, **limbo; /* all timing events; the free ones; those that somebody may still wait for */
    uint32_t events_made, events_free, limbo_count, pins;
    uint64_t make_again_ns;
    void *clock_event[2]; /* the one in use, and the one that is recorded next */
    struct direction direction[2];
    uint64_t clock_ns, clock_at; /* host time of the clock event; when it was paired */
    uint64_t clock_took_ns;      /* from asking to hearing: the pair is wrong by half of that at most */
    atomic_uint clock_pair;      /* counts pairs: it moves before an event of the one before is recorded anew */
    kvp_copy run[RUN_MAX];
    uint64_t dst[RUN_MAX], src[RUN_MAX], sizes[RUN_MAX]; /* the same in columns, for the loop */
    atomic_uint work, changed, waiters;
    atomic_uint sleeping;                       /* enum sleep */
    uint64_t busy_ns;                           /* when the thread last had something to do */
    uint64_t waits_until_ns, hindered_until_ns; /* compute seen in front of a copy, beside one, is thought to go on */
    uint64_t idle_ns;                           /* when a job last found its stream with nothing to do */
    uint32_t idle_jobs;                         /* so many in a row did */
    atomic_uint hurrying;
    atomic_uint closing, stopped, users;
    atomic_ullong pending;
    atomic_int broken;
    atomic_uint fault;
    struct spare *spare[CLASSES]; /* memory of jobs that ended, for those to come */
    uint32_t spares[CLASSES];
    atomic_uint bad_queries;
    atomic_uint methods_off;
    atomic_int method_error;
    atomic_ullong launches[2][KVP_METHODS], moved[2][KVP_METHODS];
    atomic_ullong cta_bytes[2];
    atomic_ullong longest_ns, steps, stuck_job;
    void *pinned[PINNED];      /* events that somebody is about to wait for, so far as there is space; with the lock */
    const char *_Atomic wrong; /* the first invariant that was broken */
    float cell_share;          /* of pools of cells, all the thread's own: see cells.c */
    uint32_t cell_rest;        /* launches that are not coded before it is tried again */
    atomic_ullong refused;
    bool coding;
#ifdef KVP_EXPLORE
    atomic_uint handing; /* callers that hand over just now */
#endif
};

#define KVP_INSIDE __attribute__((visibility("hidden")))

/* invariants.c */
KVP_INSIDE void kvp_check(kvp_submitter *s, uint64_t next);      /* in a simulation, after a step */
KVP_INSIDE void kvp_check_unused(kvp_submitter *s, void *event); /* before it is recorded anew; with the lock */
KVP_INSIDE void kvp_wrong(kvp_submitter *s, const char *what);   /* the first one is kept */

/* events.c */
KVP_INSIDE int kvp_events_open(kvp_submitter *s);                /* 0, or CUDA's code: none is left */
KVP_INSIDE void kvp_events_grow(kvp_submitter *s, uint64_t now); /* on the thread: more, before they run out */
KVP_INSIDE int kvp_events_close(kvp_submitter *s);
KVP_INSIDE void kvp_events_free(kvp_submitter *s);
KVP_INSIDE void *kvp_event_take(kvp_submitter *s);
KVP_INSIDE uint32_t kvp_events_left(kvp_submitter *s);
KVP_INSIDE void kvp_event_give(kvp_submitter *s, void *event);
KVP_INSIDE void kvp_event_free(kvp_submitter *s, void *event); /* it may be recorded anew; with the lock */
KVP_INSIDE void kvp_event_pin(kvp_submitter *s, void *event);  /* who counts in `pins` says for which; with the lock */
KVP_INSIDE void kvp_event_unpin(kvp_submitter *s, void *event);
KVP_INSIDE struct fence *kvp_fence_take(kvp_submitter *s);
KVP_INSIDE struct fence *kvp_fence_make(kvp_submitter *s);
KVP_INSIDE void kvp_fence_give(kvp_submitter *s, struct fence *f); /* with the lock */

/* jobs.c */
KVP_INSIDE uint32_t kvp_job_copies(const struct kvp_job *j, struct cursor *at, kvp_copy *out, uint32_t max,
                                   uint64_t budget, uint64_t largest, bool merge, uint64_t *bytes, uint64_t *asked);
KVP_INSIDE void kvp_job_spare(struct kvp_job *j);  /* it has ended: its memory goes to another */
KVP_INSIDE void kvp_spares_open(kvp_submitter *s); /* no early caller meets page faults either */
KVP_INSIDE void kvp_spares_free(kvp_submitter *s);
KVP_INSIDE bool kvp_job_all(const struct kvp_job *j, const struct cursor *at);
KVP_INSIDE bool kvp_job_conflicts(struct kvp_job *j, uint32_t *stamp, uint64_t since);

KVP_INSIDE bool kvp_job_has(const struct kvp_job *j, uint64_t layer, uint64_t dst, uint64_t src);

/* cells.c: pools of cells */
KVP_INSIDE void kvp_cells_open(kvp_submitter *s);
KVP_INSIDE const kvp_method_table *kvp_cells_methods(const kvp_submitter *s);
KVP_INSIDE int kvp_cells_submit(kvp_submitter *s, int d, uint32_t count, uint32_t ctas, void *stream,
                                kvp_copy_list *list);
KVP_INSIDE void kvp_cells_retire(kvp_submitter *s, int d, const struct marker *m, uint64_t end_ns);
KVP_INSIDE void kvp_cells_drop(kvp_submitter *s, const struct marker *m); /* the device is lost, and will not tell */
KVP_INSIDE bool kvp_cells_claim(kvp_submitter *s, struct kvp_job *j, int64_t *left);
KVP_INSIDE void kvp_cells_unclaim(kvp_submitter *s, struct kvp_job *j);
KVP_INSIDE void kvp_cells_begun(const kvp_submitter *s, struct kvp_job *j, uint64_t copies);
KVP_INSIDE void kvp_cells_stored(kvp_submitter *s, const struct kvp_job *j); /* when each was */

/* fences.c */
KVP_INSIDE int kvp_job_after(kvp_submitter *s, struct kvp_job *j, void *stream);
KVP_INSIDE int kvp_fence_record(kvp_submitter *s, struct fence *f);
KVP_INSIDE uint64_t kvp_fences_record(kvp_submitter *s, uint64_t now);
KVP_INSIDE bool kvp_fence_passed(kvp_submitter *s, struct kvp_job *j);
KVP_INSIDE void kvp_fence_over(kvp_submitter *s, struct kvp_job *j);
KVP_INSIDE void kvp_fence_drop(kvp_submitter *s, struct kvp_job *j);

/* device_clock.c */
KVP_INSIDE void kvp_renew_device_clock(kvp_submitter *s);
KVP_INSIDE uint64_t kvp_device_ns(kvp_submitter *s, void *event);

/* completion.c */
KVP_INSIDE void kvp_retire(kvp_submitter *s, int d, uint64_t now);
KVP_INSIDE void kvp_retire_shared(kvp_submitter *s, int d);
KVP_INSIDE void kvp_finish(kvp_submitter *s, struct kvp_job *j, int error, uint32_t fault);
KVP_INSIDE void kvp_end_flying(kvp_submitter *s, struct direction *dir, uint64_t sequence, uint64_t end_ns);
KVP_INSIDE void kvp_fail_all(kvp_submitter *s, struct kvp_job **first, struct kvp_job **last, int code, uint32_t fault);
/* Nothing on this device will complete any more, or may be believed: every job ends, nothing touches the device. */
KVP_INSIDE void kvp_lose(kvp_submitter *s, int code, uint32_t fault);

/* submitter.c */
KVP_INSIDE uint64_t kvp_step(kvp_submitter *s, uint64_t now);
KVP_INSIDE uint64_t kvp_step_actor(void *s, uint64_t now);
KVP_INSIDE void kvp_take_incoming(kvp_submitter *s, uint64_t now); /* new jobs tell whether compute is over */
KVP_INSIDE bool kvp_hungry(kvp_submitter *s, int d);
KVP_INSIDE uint64_t kvp_usable(const kvp_submitter *s); /* places of a direction */

/* submitter_thread.c */
KVP_INSIDE int kvp_refusal(kvp_submitter *s);
KVP_INSIDE int kvp_jobs_push(kvp_submitter *s, kvp_job_status **jobs, uint32_t count);
KVP_INSIDE void kvp_changed(kvp_submitter *s);
KVP_INSIDE uint32_t kvp_thread_id(void);
KVP_INSIDE uint32_t kvp_forks(void);

/* What must hold here. */
static inline void kvp_must(kvp_submitter *s, bool holds, const char *otherwise) {
    if (__builtin_expect(!holds, 0)) kvp_wrong(s, otherwise);
}

/* Typed calls of the runtime. */
#define CALL(s, name, type) ((type)(s)->config.copier.cuda.name)
typedef cudaError_t (*event_stream_fn)(void *, void *);
typedef cudaError_t (*stream_event_fn)(void *, void *, unsigned);
typedef cudaError_t (*handle_fn)(void *);
typedef cudaError_t (*elapsed_fn)(float *, void *, void *);
typedef cudaError_t (*create_fn)(void **, unsigned);
typedef cudaError_t (*none_fn)(void);
typedef cudaError_t (*device_fn)(int);
typedef cudaError_t (*mode_fn)(int *);

static inline bool of_cells(const kvp_submitter *s) { return s->config.cells.notes != NULL; }

static inline bool line_empty(const struct line *l) { return l->head == l->tail; }

/* When copies of so many bytes should be over that begin then. */
static inline uint64_t kvp_due_ns(const struct direction *dir, uint64_t bytes, uint64_t begin_ns) {
    uint64_t rate = dir->rate ? dir->rate : 1;
    return begin_ns + (uint64_t)((double)bytes / (double)rate * 1e9);
}

static inline void kvp_clear_error(kvp_submitter *s) {
    if (s->config.copier.cuda.get_last_error) CALL(s, get_last_error, none_fn)();
}

#endif
