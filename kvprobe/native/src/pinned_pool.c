/* A pool of pinned memory: several threads make the pages of a large buffer, the runtime registers it, and what comes
 * back is kept for the next request.
 *
 * The runtime's own cudaHostAlloc makes the pages on one thread and holds the context's lock for all of it: 5 to 6 s
 * for 16 GiB on an H200, in which no other thread of the process could launch. Registering pages that are there takes a
 * twentieth of that. Where it is refused, the runtime's own way is gone, and its error is the caller's.
 *
 * A fork: the child inherits no pool, and its memory only where cudaHostAlloc gave it; its calls do nothing. */
#define _GNU_SOURCE
#include "pinned_pool.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OUT_OF_MEMORY = cudaErrorMemoryAllocation };

/* One that was made. */
typedef struct one {
    struct one *next;
    kvp_kept_buffer buffer;
    uint64_t piece_bytes, generation;
    int populated; /* by us; else the runtime's */
} one;

struct kvp_pinned_pool {
    kvp_pinned_options options;
    kvp_kept kept;
    pthread_mutex_t lock; /* of `out` and the counts below */
    one *out;             /* handed out */
    kvp_pinned_counts counts;
    uint64_t generation;
    pid_t pid;
    int closed;
};

static int is_mine(const kvp_pinned_pool *pool) { return pool->pid == getpid(); }

static uint64_t piece_of(const one *o, uint64_t at) {
    uint64_t left = o->buffer.bytes - at;
    return o->piece_bytes && o->piece_bytes < left ? o->piece_bytes : left;
}

/* What is registered of [0, end). */
static cudaError_t unregister(const kvp_pinned_pool *pool, const one *o, uint64_t end) {
    cudaError_t error = 0;
    for (uint64_t at = 0; at < end; at += piece_of(o, at)) {
        cudaError_t this = pool->options.calls.host_unregister((uint8_t *)o->buffer.memory + at);
        if (this && !error) error = this;
    }
    return error;
}

static cudaError_t destroy(kvp_pinned_pool *pool, one *o) {
    cudaError_t error = 0;
    int gone = o->generation != pool->generation; /* the runtime has forgotten it, and freed what was its own */
    if (!o->populated) {
        if (!gone) error = pool->options.calls.free_host(o->buffer.memory);
    } else {
        if (!gone) error = unregister(pool, o, o->buffer.bytes);
        if (!error) kvp_unpopulate(o->buffer.memory, o->buffer.bytes); /* else the device may still reach it */
    }
    free(o);
    return error;
}

static void release(void *context, const kvp_kept_buffer *buffer) {
    kvp_pinned_pool *pool = context;
    pool->options.calls.set_device(pool->options.device);
    if (destroy(pool, buffer->tag)) pool->options.calls.get_last_error();
}

kvp_pinned_pool *kvp_pinned_open(const kvp_pinned_options *options) {
    kvp_pinned_pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->options = *options;
    pool->pid = getpid();
    pool->kept = (kvp_kept){.budget_bytes = options->budget_bytes,
                            .root = options->root ? options->root : "",
                            .release = release,
                            .context = pool,
                            .watch_ms = options->watch_ms};
    kvp_kept_open(&pool->kept);
    pthread_mutex_init(&pool->lock, NULL);
    return pool;
}

static cudaError_t register_pieces(kvp_pinned_pool *pool, const one *o, uint64_t *longest) {
    for (uint64_t at = 0; at < o->buffer.bytes; at += piece_of(o, at)) {
        uint64_t since = kvp_now_ns();
        cudaError_t error = pool->options.calls.host_register((uint8_t *)o->buffer.memory + at, piece_of(o, at), 0);
        uint64_t ns = kvp_now_ns() - since;
        if (ns > *longest) *longest = ns;
        if (!error) continue;
        pool->options.calls.get_last_error();
        unregister(pool, o, at);
        return error;
    }
    return 0;
}

/* 1: made so. 0: the runtime is to make it. */
static int populate(kvp_pinned_pool *pool, one *o) {
    kvp_memory memory = kvp_memory_left(pool->kept.root);
    /* what is too much is the runtime's to refuse, or to be killed for */
    if (memory.left_bytes < o->buffer.bytes) return 0;
    uint64_t began = kvp_now_ns(), longest = 0;
    o->buffer.memory = kvp_populate(o->buffer.bytes, &pool->options.populating);
    if (!o->buffer.memory) return 0;
    uint64_t there = kvp_now_ns();
    if (register_pieces(pool, o, &longest)) {
        kvp_unpopulate(o->buffer.memory, o->buffer.bytes);
        return 0;
    }
    o->populated = 1;
    pthread_mutex_lock(&pool->lock);
    kvp_pinned_counts *counts = &pool->counts;
    counts->populated++;
    counts->populated_bytes += o->buffer.bytes;
    counts->populate_ns += there - began;
    counts->register_ns += kvp_now_ns() - there;
    if (longest > counts->longest_register_ns) counts->longest_register_ns = longest;
    pthread_mutex_unlock(&pool->lock);
    return 1;
}

static cudaError_t make(kvp_pinned_pool *pool, one *o) {
    uint64_t began = kvp_now_ns();
    kvp_kept_press(&pool->kept, o->buffer.bytes);
    int large = o->buffer.bytes >= pool->options.populate_bytes;
    if (!large || !populate(pool, o)) {
        cudaError_t error = pool->options.calls.host_alloc(&o->buffer.memory, o->buffer.bytes, 0);
        if (error == OUT_OF_MEMORY && pool->kept.counts.kept_bytes) { /* what is kept may be what it lacks */
            pool->options.calls.get_last_error();
            kvp_kept_trim(&pool->kept, 0);
            error = pool->options.calls.host_alloc(&o->buffer.memory, o->buffer.bytes, 0);
        }
        if (error) return error;
    }
    pthread_mutex_lock(&pool->lock);
    pool->counts.made++;
    pool->counts.made_bytes += o->buffer.bytes;
    pool->counts.made_ns += kvp_now_ns() - began;
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

int kvp_pinned_take(kvp_pinned_pool *pool, uint64_t bytes, uint64_t piece_bytes, void **memory, void **buffer) {
    kvp_kept_buffer found;
    if (!is_mine(pool)) return cudaErrorInitializationError;
    if (!bytes || piece_bytes % KVP_HUGE_PAGE) return cudaErrorInvalidValue;
    one *o;
    if (kvp_kept_take(&pool->kept, bytes, piece_bytes, &found)) {
        o = found.tag;
        o->buffer = found;
    } else {
        if (!(o = calloc(1, sizeof *o))) return OUT_OF_MEMORY;
        o->buffer = (kvp_kept_buffer){.bytes = bytes, .key = piece_bytes, .taken = bytes, .tag = o};
        o->piece_bytes = piece_bytes;
        o->generation = pool->generation;
        cudaError_t error = make(pool, o);
        if (error) return free(o), error;
    }
    pthread_mutex_lock(&pool->lock);
    o->next = pool->out;
    pool->out = o;
    pool->counts.out++;
    pool->counts.out_bytes += o->buffer.taken;
    pthread_mutex_unlock(&pool->lock);
    *memory = o->buffer.memory;
    *buffer = o;
    return 0;
}

static void free_pool(kvp_pinned_pool *pool) {
    pthread_mutex_destroy(&pool->lock);
    free(pool->kept.buffers);
    free(pool);
}

/* Takes it out of what is handed out; NULL: it is not. `last` is set where a closed pool has nothing left. */
static one *taken_back(kvp_pinned_pool *pool, const void *buffer, int *last) {
    pthread_mutex_lock(&pool->lock);
    one **at = &pool->out, *o;
    while (*at && *at != buffer) at = &(*at)->next;
    if ((o = *at)) {
        *at = o->next;
        pool->counts.out--;
        pool->counts.out_bytes -= o->buffer.taken;
    }
    *last = pool->closed && !pool->out;
    pthread_mutex_unlock(&pool->lock);
    return o;
}

int kvp_pinned_give(kvp_pinned_pool *pool, void *buffer) {
    int last, keep;
    if (!is_mine(pool)) return 0;
    one *o = taken_back(pool, buffer, &last);
    if (!o) return cudaErrorInvalidValue;
    cudaError_t error = 0;
    keep = !pool->closed && o->generation == pool->generation;
    if (keep && (error = pool->options.calls.device_synchronize())) keep = 0;
    kvp_kept_returned(&pool->kept, &o->buffer);
    o->buffer.taken = o->buffer.bytes;
    if (!keep || !kvp_kept_put(&pool->kept, &o->buffer)) {
        cudaError_t freed = destroy(pool, o);
        if (!error) error = freed;
    } else
        kvp_kept_press(&pool->kept, 0);
    if (last) free_pool(pool);
    return error;
}

void kvp_pinned_trim(kvp_pinned_pool *pool, uint64_t most_bytes) {
    if (is_mine(pool)) kvp_kept_trim(&pool->kept, most_bytes);
}

void kvp_pinned_read(kvp_pinned_pool *pool, kvp_pinned_counts *counts) {
    if (!is_mine(pool)) {
        *counts = (kvp_pinned_counts){0};
        return;
    }
    pthread_mutex_lock(&pool->lock);
    *counts = pool->counts;
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_lock(&pool->kept.lock);
    counts->kept = pool->kept.counts;
    pthread_mutex_unlock(&pool->kept.lock);
}

void kvp_pinned_reset(kvp_pinned_pool *pool) {
    if (!is_mine(pool)) return;
    pool->generation++;
    kvp_kept_trim(&pool->kept, 0); /* frees what is not the runtime's */
}

void kvp_pinned_close(kvp_pinned_pool *pool) {
    if (!is_mine(pool)) return; /* the child of a fork: its locks may be held by nobody */
    kvp_kept_stop(&pool->kept);
    kvp_kept_trim(&pool->kept, 0);
    pthread_mutex_lock(&pool->lock);
    pool->closed = 1;
    int last = !pool->out;
    pthread_mutex_unlock(&pool->lock);
    if (last) free_pool(pool);
}
