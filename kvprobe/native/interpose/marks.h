/* Marks: timing events of ours in the program's own streams, which tell when the device was done with what stood in
 * front of them. What the files of marks share; marks.c says what is promised. */
#ifndef KVP_MARKS_H
#define KVP_MARKS_H

#include "interpose.h"

/* The driver's functions that marks call, past every wrapper. They leave the runtime's last error alone. */
#define KVP_MARK_CALLS(X)                                                                                              \
    X(cuCtxGetCurrent, (void **))                                                                                      \
    X(cuCtxSetCurrent, (void *))                                                                                       \
    X(cuCtxGetDevice, (int *))                                                                                         \
    X(cuDeviceGetCount, (int *))                                                                                       \
    X(cuStreamQuery, (void *))                                                                                         \
    X(cuStreamGetCtx, (void *, void **))                                                                               \
    X(cuStreamIsCapturing, (void *, int *))                                                                            \
    X(cuThreadExchangeStreamCaptureMode, (int *))                                                                      \
    X(cuEventCreate, (void **, unsigned))                                                                              \
    X(cuEventRecord, (void *, void *))                                                                                 \
    X(cuEventQuery, (void *))                                                                                          \
    X(cuEventElapsedTime, (float *, void *, void *))

struct mark_driver {
#define X(NAME, PARAMETERS) int(*NAME) PARAMETERS;
    KVP_MARK_CALLS(X)
#undef X
};
extern struct mark_driver kvp_mark_driver;

enum { MARK_NOT_READY = 600 }; /* CUDA_ERROR_NOT_READY */

#define MARK_STREAMS 256
#define MARK_GONE UINT64_MAX /* key of a stream that was destroyed: it is asked nothing, marks in it are still read */
#define MARK_CONTEXTS 16
#define MARK_POOL 2048          /* marks of one context that may be outstanding */
#define MARK_FIRST_EVENTS 32    /* of them: made by a program's first submission; the helper makes the others */
#define MARK_BUSY_LIMIT 400     /* submissions in a stream above which a mark waits for its turn; a queue takes 1,021 */
extern uint32_t kvp_mark_limit; /* the same, scaled as the environment scales queues */
extern int kvp_marks_asked;     /* by name: then on the embedded host runtime, too */
#define MARK_FIRST_NS 20000000  /* what they may cost at first: short programs are covered whole */
#define MARK_LATER_NS 45000000  /* the same, a little at a time when that is spent (mark_reader.c) */
#define MARK_CREDIT_NS 3000000  /* what may be saved up later */
#define MARK_SAVED_NS 500000    /* so much is saved up before marking comes back for a stretch */
#define MARK_STRETCH_NS 5000000 /* a stretch is so long at least, from when all streams are known */
#define MARK_SHORTEST_NS 1500000 /* the same where the one before cost much: it is never shorter */
#define MARK_DEBT_NS 5000000     /* no stretch costs more: it is saved up before another one */
#define MARK_DEVICE_NS 1000      /* of a record, beside what its caller waits: its stream does nothing else meanwhile */
#define MARK_MOST_NS 20000       /* of one call: it was not marking that took longer */
#define MARK_USUAL_NS 2000       /* all together, in simulated time */
#define MARK_GAP_NS 10000u       /* from one submission to the next: the stream may have run dry meanwhile */
#define MARK_FEW 16              /* marks that may stand in a stream with twice MARK_BUSY_LIMIT submissions */
#define MARK_LONE 4              /* runs of one submission in a row: the next one's mark is put right behind it */
#define MARK_TURNS 8             /* copies that take turns so often are one run, of MARK_TURNS_RUN */
#define MARK_TURNS_RUN 64
#define MARK_TURNS_BYTES (128 << 10) /* of one; those that are larger take much longer than a mark */
#define MARK_PROBE_NS 5000000u
#define MARK_STALE_NS 100000u /* so long without a submission: the helper ends the run */
#define MARK_LONG_NS 1000000u /* so long without one, and the helper did not: nobody saw when it ended */

/* What stands in a stream since its newest mark. */
enum mark_kind {
    MARK_NONE,
    MARK_KERNEL,
    MARK_H2D,
    MARK_D2H,
    MARK_COPY,
    MARK_MEMSET,
    MARK_GRAPH,
    MARK_WAIT,    /* for an event */
    MARK_FUNCTION /* for a function of the host */
};

/* What a run of several kinds holds of each; bytes of H2D, D2H and COPY. Memsets count with what stands before them. */
struct mark_parts {
    uint32_t count[MARK_FUNCTION + 1];
    uint64_t bytes[MARK_COPY - MARK_H2D + 1];
};

enum mark_flags {
    MARK_UNKNOWN = 1, /* what stood before it was not followed */
    MARK_UNSEEN = 2,  /* recorded after a gap: the stream may have been idle long before */
    MARK_PROBE = 4,   /* recorded where the stream was idle: places the device's clock on the host's */
    MARK_SAMPLE = 8,  /* in the middle of a run: was the stream dry here? */
    MARK_ITEM = 16,   /* right after the one submission that follows a MARK_SAMPLE */
    MARK_MIXED = 32,  /* several kinds stand in front of it */
    MARK_IDLE = 64,   /* the stream said that it was idle when this was recorded */
    MARK_LOOSE = 128  /* submissions that nothing counted may stand before it, since first_ns */
};

struct mark {
    struct mark *next;
    void *event;
    uint64_t entry_ns, return_ns; /* host: of the call that recorded it */
    uint64_t first_ns, last_ns; /* host: the first submission's return since the mark before; newest time it was busy */
    uint64_t bytes, at;         /* at: submissions in the stream up to here */
    uint32_t count, graph;
    uint8_t kind, flags;
    struct mark_parts parts; /* MARK_MIXED */
    uint64_t given_ns;       /* host: the newest submission in front of it */
    uint64_t asked_ns;       /* host: when it was asked and not over; 0: never */
};

/* A run of submissions of one kind that is over, as it goes into the ring; the last of them is in front of a mark. */
struct mark_span {
    uint64_t start_ns, end_ns; /* host's clock */
    uint64_t busy_ns;          /* of it, as far as its sample tells */
    uint64_t bytes;
    uint64_t at, entry_ns; /* slots of the stream given with its mark; when the call that recorded that was entered */
    uint32_t count, graph;
    uint8_t kind, dry;
};

/* Words of a stream that a submission of the kind that goes on changes without the lock, as two threads may at once: a
 * count may then be short by one, and no compiler tears a word apart. */
#define get(WORD) __atomic_load_n(&(WORD), __ATOMIC_RELAXED)
#define put(WORD, VALUE) __atomic_store_n(&(WORD), (VALUE), __ATOMIC_RELAXED)

/* One stream. The first line is what a submission of the kind that goes on touches, by get and put; the rest belongs to
 * who holds `lock`. */
struct mark_stream {
    _Atomic uint64_t key; /* 0: free */
    uint64_t last_ns, first_ns, bytes;
    uint32_t count, next_sample, graph;
    _Atomic uint32_t lock;
    union {
        struct {
            uint8_t kind, flags, gappy, after;
        };
        uint32_t state; /* all of them */
    };
    uint8_t sampled, per_thread, legacy, context, ordered, ran; /* ran: the newest kind */
    void *handle __attribute__((aligned(64)));
    uint64_t number;          /* as records have it */
    uint64_t submitted, done; /* submissions and marks up to the newest mark, and of these what is over */
    uint64_t busy_ns;         /* when the helper saw it busy last */
    struct mark *head, *tail; /* outstanding */
    uint32_t standing;        /* so many */
    double mark_ns;           /* of the newest mark that was read, on the device's clock; 0: none */
    /* Loose submissions: no mark follows them, as there was no event yet or somebody else had the lock. How many have
     * been entered; how many have returned; of these, how many a mark stands behind; since when there are others. */
    _Atomic uint32_t begun, ended;
    uint32_t settled;
    uint64_t loose_ns;
    struct mark_parts parts; /* of a run that is MARK_MIXED */
    uint8_t newest;          /* of that: what came last but memsets */
    uint8_t lone;            /* how many runs in a row were of one submission: from MARK_LONE on the next is taken so */
    uint8_t turns;           /* how often in a row a copy or two of one kind were followed by one of another */
    struct mark_span held;   /* a part of a run that waits for its sample; count 0: none */
} __attribute__((aligned(64)));

struct mark_context {
    void *handle;
    int device;
    _Atomic int ready;  /* there are events */
    _Atomic int making; /* the first submission makes events: until it is done the helper makes none */
    int made;           /* events of the pool so far */
    struct mark marks[MARK_POOL], *free, *reference;
    double reference_ns;               /* device's clock: 0 is its first mark */
    double offset_ns, probed_ns;       /* host's minus device's clock; the best of the probes since a while, 0: none */
    int placed;                        /* a probe was read: before that offset_ns may be far too small */
    int probes;                        /* that were read in this while */
    int anew;                          /* the next one places the clock, whatever it was before a pause */
    double call_ns;                    /* what a record usually takes its caller */
    uint64_t probe_until_ns, probe_at; /* when that while ends; the newest probe */
    uint64_t from_ns, written_ns;      /* coverage: since when; what is in the ring of it */
};

extern struct mark_stream kvp_mark_streams[MARK_STREAMS];
extern struct mark_context kvp_mark_contexts[MARK_CONTEXTS];
extern _Atomic int kvp_mark_context_count;
extern _Atomic int64_t kvp_mark_left_ns; /* what marks may still cost */
extern _Atomic int kvp_mark_pool_lock;   /* of every pool: held for a few instructions */
extern _Atomic uint64_t kvp_mark_empty;  /* marks that found the pool empty */

static inline void kvp_mark_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static inline int kvp_mark_try(struct mark_stream *s) {
    uint32_t no = 0;
    return atomic_compare_exchange_strong_explicit(&s->lock, &no, 1, memory_order_acquire, memory_order_relaxed);
}
static inline int kvp_mark_is_gone(const struct mark_stream *s) { return atomic_load(&s->key) == MARK_GONE; }
static inline void kvp_mark_release(struct mark_stream *s) { atomic_store_explicit(&s->lock, 0, memory_order_release); }

/* marks.c. 1: there is a mark now. The caller holds the stream's lock. */
int kvp_mark_place(struct mark_stream *s, int flags);
int kvp_mark_submits(const kvp_record *r);
void kvp_mark_forget(struct mark_stream *s);    /* its place is free; marks of it that stand are not read */
int kvp_mark_end_all(void);                     /* ends what stands in each stream; 1: time has passed */
int kvp_mark_idle(const struct mark_stream *s); /* 1: the stream has nothing left to do */
void kvp_mark_give(struct mark_context *c, struct mark *m);
/* Whether something stands in the stream, or is about to, that no mark follows. */
static inline int kvp_mark_is_loose(const struct mark_stream *s) { return atomic_load(&s->begun) != get(s->settled); }
/* Where a stream is looked for first. */
static inline uint32_t kvp_mark_place_of(uint64_t key) { return (uint32_t)((key >> 4) * 0x9e3779b97f4a7c15u >> 56); }

/* Whether one submission of ours may stand in front of a call that nothing has counted yet: the stream, locked, with a
 * mark behind all that was counted; NULL: not here and now. */
struct mark_stream *kvp_mark_clear(uint64_t handle, uint64_t now);
/* Counts that submission and puts a mark behind it: how many slots the stream was given with that; 0: there is none. */
uint64_t kvp_mark_behind(struct mark_stream *s);
void kvp_mark_spend(uint64_t since_ns); /* what has passed since then was ours */

/* What copies of a direction are, four bits each: a table would be another line to come. */
static inline uint8_t kvp_mark_kind_of(uint8_t direction) {
    const uint64_t kinds = MARK_COPY | MARK_H2D << 4 | MARK_D2H << 8 | MARK_COPY << 12 | MARK_COPY << 16;
    return kinds >> (direction & 15) * 4 & 15;
}

/* A submission of the kind that goes on, without flags and gaps: 1, and it is counted. 0: there is more to do. */
static inline int kvp_mark_goes_on(struct mark_stream *s, uint8_t kind, uint64_t bytes, uint64_t now) {
    uint32_t count = get(s->count), but_after = 0xffffff;
    if (unlikely((get(s->state) & but_after) != kind || count - 1 >= get(s->next_sample) - 1 /* nor 0 */ ||
                 now - get(s->last_ns) >= MARK_GAP_NS))
        return 0;
    put(s->count, count + 1);
    put(s->bytes, get(s->bytes) + bytes);
    put(s->last_ns, now);
    return 1;
}

/* kvp_mark_before, of what copies mostly are: one more of their kind in a stream that has a name and waits for no
 * other. 0: not of this one, or the copy does not say which way it goes. */
static inline int kvp_mark_copy(uint64_t stream, uint8_t direction, uint64_t bytes, uint64_t now) {
    _Static_assert(MARK_H2D == KVP_H2D + 1 && MARK_D2H == KVP_D2H + 1 && MARK_COPY == KVP_D2D + 1, "kinds of copies");
    if (unlikely(direction - 1u >= KVP_D2D || stream < KVP_FIRST_ADDRESS)) return 0;
    struct mark_stream *s = kvp_thread.marked; /* mostly this thread's newest submission went there, too */
    if (unlikely(!s || atomic_load_explicit(&s->key, memory_order_acquire) != stream)) {
        s = &kvp_mark_streams[kvp_mark_place_of(stream)];
        if (unlikely(atomic_load_explicit(&s->key, memory_order_acquire) != stream)) return 0;
        kvp_thread.marked = s;
    }
    return kvp_mark_goes_on(s, (uint8_t)(direction + 1), bytes, now);
}
static inline uint64_t kvp_mark_outstanding(const struct mark_stream *s) {
    return get(s->submitted) + get(s->count) - get(s->done);
}

/* device_looks.c, for marks. `read`: compares those that are over; `lose`: of a stream that ends. */
void kvp_device_looks_prepare(struct mark_context *c);
void kvp_device_looks_read(void);
void kvp_device_looks_lose(const struct mark_stream *s);
void kvp_device_looks_end(void);

/* mark_reader.c */
enum mark_reason {
    REASON_NONE,
    REASON_BUDGET,
    REASON_CAPTURE,
    REASON_END,
    REASON_ERROR,
    REASON_UNSEEN,
    REASON_POOL,
    REASON_LOOSE
};
void kvp_mark_missed(void);                           /* something was submitted to a stream that is not known yet */
void kvp_mark_pool(struct mark_context *c, int more); /* makes so many, where the context is current */
/* A stream has done all that was loose when `ended` of it had returned; its lock is held. */
void kvp_mark_settle(struct mark_stream *s, uint32_t ended);
void kvp_mark_reader_start(void);                   /* the thread, once; in simulated time there is none */
void kvp_mark_step(int closing);                    /* reads what is over */
void kvp_marks_await_reader(void);                  /* until the helper asks nothing, for 0.1 s at most */
void kvp_mark_pause(enum mark_reason reason);       /* from now on nothing is marked */
int kvp_mark_follows(const struct mark_context *c); /* 1: a stream that is met only now was idle when this began */
extern _Atomic int kvp_mark_synchronous;            /* simulated time: the program's own calls read */
void kvp_marks_simulated(uint64_t (*now)(void));

#endif
