/* Memory of the host that is pinned, and how much of it may be: what the engine's pool (pinned_pool.c) and the
 * interposer's cures share. */
#ifndef KVP_HOST_MEMORY_H
#define KVP_HOST_MEMORY_H

#include "kvp.h"

#include <pthread.h>
#include <stddef.h>

#define KVP_INSIDE __attribute__((visibility("hidden")))

/* ---- memory_left.c: what this process may still take ------------------------------------------------------------ */

typedef struct {
    uint64_t total_bytes; /* of the machine, or of the tightest cgroup above this process */
    uint64_t left_bytes;  /* until that, or a cgroup's memory.high, is reached; page cache counts as free */
} kvp_memory;

/* `root` stands before /proc and /sys: "" but in tests. Zeros: it could not be read. */
KVP_EXPORT kvp_memory kvp_memory_left(const char *root);
/* Less than this left is pressure: a sixteenth of the total, at least 256 MiB, at most 4 GiB. */
KVP_EXPORT uint64_t kvp_memory_reserve(const kvp_memory *memory);

/* ---- populate.c: pages made by several threads --------------------------------------------------------------------
 */

#define KVP_HUGE_PAGE (2u << 20)
#define KVP_MOST_POPULATERS 16

typedef struct {
    uint64_t chunk_bytes;    /* what a thread takes at a time; 0: 64 MiB */
    uint32_t threads;        /* the caller included; 0: four, or as many processors as this process may use */
    int32_t node;            /* NUMA node that is preferred; -1: where the threads run */
    uint32_t pages;          /* enum kvp_pages */
    uint32_t fork;           /* enum kvp_fork */
    const _Atomic int *stop; /* not 0: it is given up after a chunk, ECANCELED; NULL: never */
} kvp_populating;

/* Processors that this process may use, by its affinity and its cgroup's quota; at least one. */
KVP_INSIDE uint32_t kvp_processors(void);

enum kvp_pages { KVP_PAGES_ANY = 0, KVP_PAGES_SMALL = 1, KVP_PAGES_HUGE = 2 }; /* any: huge ones are asked for */
enum kvp_fork { KVP_FORK_COPY = 0, KVP_FORK_NONE = 1, KVP_FORK_SHARED = 2 };   /* what a forked child gets */

/* New zeroed memory whose pages are there, `bytes` rounded up to huge pages. NULL: errno says why; nothing is left. */
KVP_EXPORT void *kvp_populate(uint64_t bytes, const kvp_populating *how);
KVP_EXPORT void kvp_unpopulate(void *memory, uint64_t bytes);
/* Whether the kernel's switch for huge pages ("enabled", "shmem_enabled") stands at one of `words`. */
KVP_INSIDE int kvp_huge_pages_stand_at(const char *name, const char *words);

/* ---- kept.c: buffers that were given back, within a budget ----------------------------------------------------------
 */

typedef struct {
    void *memory;
    uint64_t bytes;
    uint64_t key;   /* only equal ones are handed out: flags, context */
    uint64_t taken; /* of `bytes`, those that were asked for when it was handed out again */
    void *tag;      /* the keeper's own */
} kvp_kept_buffer;

typedef struct {
    uint64_t kept_bytes;   /* held and handed to nobody */
    uint64_t excess_bytes; /* of buffers handed out for a smaller request */
    uint64_t most_bytes;   /* that both ever were together */
    uint64_t reused, reused_bytes, kept, given_up,
        pressed; /* buffers: handed out again; taken; let go; under pressure */
} kvp_kept_counts;

typedef struct kvp_kept {
    uint64_t budget_bytes;
    const char *root; /* of kvp_memory_left; NULL: pressure is not looked at */
    void (*release)(void *context, const kvp_kept_buffer *buffer); /* for good; called without a lock of ours */
    void *context;
    uint32_t watch_ms; /* how often a thread looks for pressure while something is kept; 0: only calls do */
    /* ours */
    pthread_mutex_t lock;
    kvp_kept_buffer *buffers; /* oldest first */
    uint32_t count, room;
    kvp_kept_counts counts;
    uint64_t unseen_bytes; /* came since somebody looked for pressure */
    pthread_cond_t changed;
    pthread_t watcher;
    int watching, stop; /* the thread is there; it is to end */
} kvp_kept;

KVP_INSIDE void kvp_kept_open(kvp_kept *kept);
KVP_INSIDE void kvp_kept_stop(kvp_kept *kept); /* looking for pressure; returns when nothing is being let go by it */
KVP_INSIDE void kvp_kept_in_child(kvp_kept *kept); /* forked: the locks and the thread stayed behind */
/* 1: it is kept, older ones may have gone for it. 0: it does not fit, the caller's again. */
KVP_INSIDE int kvp_kept_put(kvp_kept *kept, const kvp_kept_buffer *buffer);
/* 1: `found` is the smallest that serves, at most an eighth larger than asked for. */
KVP_INSIDE int kvp_kept_take(kvp_kept *kept, uint64_t bytes, uint64_t key, kvp_kept_buffer *found);
/* A buffer that was handed out larger than asked for has come back, or has gone. */
KVP_INSIDE void kvp_kept_returned(kvp_kept *kept, const kvp_kept_buffer *buffer);
/* 1: so many bytes could be kept without letting any go; they count as handed out until they have `returned`. */
KVP_INSIDE int kvp_kept_promise(kvp_kept *kept, uint64_t bytes);
/* Keeps what was promised: at no moment is more there than was. 0: it is not kept, the promise still holds. */
KVP_INSIDE int kvp_kept_put_promised(kvp_kept *kept, const kvp_kept_buffer *buffer);
/* 1: it was kept, and is the caller's; it counts as handed out until it has `returned`. */
KVP_INSIDE int kvp_kept_take_this(kvp_kept *kept, const void *memory, kvp_kept_buffer *found);
/* Lets the oldest go until no more than so many bytes are kept. */
KVP_INSIDE void kvp_kept_trim(kvp_kept *kept, uint64_t most_bytes);
/* Lets go what the machine or the cgroup is short of, oldest first, `wanted_bytes` more than that. 1: it was short. */
KVP_INSIDE int kvp_kept_press(kvp_kept *kept, uint64_t wanted_bytes);
KVP_INSIDE int kvp_kept_holds(kvp_kept *kept, const void *memory);
/* What was kept is gone without us: a context that was destroyed, a fork. Says how many bytes. */
KVP_INSIDE uint64_t kvp_kept_forget(kvp_kept *kept);

#endif
