/* Pinned buffers that were given back: handed out again, or let go, oldest first, where the budget or memory ends. */
#define _GNU_SOURCE
#include "host_memory.h"
#include "kvp_signals.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#define LOOK_BYTES (64u << 20)
#define LARGER_BY 8 /* a buffer serves a request that is smaller by one part in so many */

void kvp_kept_open(kvp_kept *kept) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&kept->lock, NULL);
    pthread_cond_init(&kept->changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

void kvp_kept_in_child(kvp_kept *kept) {
    kept->watching = kept->stop = 0;
    kept->count = 0;
    kept->counts = (kvp_kept_counts){0};
    kvp_kept_open(kept);
}

/* While nobody calls, too, somebody else may need the memory. */
static void *watch(void *given) {
    kvp_kept *kept = given;
    prctl(PR_SET_NAME, "kvprobe-kept");
    pthread_mutex_lock(&kept->lock);
    while (!kept->stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        uint64_t ns = (uint64_t)until.tv_nsec + (uint64_t)kept->watch_ms * 1000000u;
        until.tv_sec += (time_t)(ns / 1000000000u);
        until.tv_nsec = (long)(ns % 1000000000u);
        if (kept->count)
            pthread_cond_timedwait(&kept->changed, &kept->lock, &until);
        else
            pthread_cond_wait(&kept->changed, &kept->lock);
        pthread_mutex_unlock(&kept->lock);
        kvp_kept_press(kept, 1);
        pthread_mutex_lock(&kept->lock);
    }
    pthread_mutex_unlock(&kept->lock);
    return NULL;
}

/* Lock held. A thread that cannot be had leaves the looking to the calls. */
static void have_watched(kvp_kept *kept) {
    if (!kept->watch_ms || !kept->root || kept->stop) return;
    if (kept->watching) {
        pthread_cond_signal(&kept->changed);
        return;
    }
    sigset_t were;
    kvp_block_signals(&were);
    kept->watching = !pthread_create(&kept->watcher, NULL, watch, kept);
    pthread_sigmask(SIG_SETMASK, &were, NULL);
}

void kvp_kept_stop(kvp_kept *kept) {
    pthread_mutex_lock(&kept->lock);
    int was = kept->watching;
    kept->stop = 1;
    kept->watching = 0;
    pthread_cond_signal(&kept->changed);
    pthread_mutex_unlock(&kept->lock);
    if (was) pthread_join(kept->watcher, NULL);
}

static void note_most(kvp_kept *kept) {
    uint64_t now = kept->counts.kept_bytes + kept->counts.excess_bytes;
    if (now > kept->counts.most_bytes) kept->counts.most_bytes = now;
}

static kvp_kept_buffer take_out(kvp_kept *kept, uint32_t at) {
    kvp_kept_buffer one = kept->buffers[at];
    memmove(&kept->buffers[at], &kept->buffers[at + 1], (--kept->count - at) * sizeof one);
    kept->counts.kept_bytes -= one.bytes;
    return one;
}

/* Lets the oldest go until no more than `most` bytes are kept; says how many bytes went. */
static uint64_t let_go(kvp_kept *kept, uint64_t most, uint64_t *count) {
    uint64_t bytes = 0;
    for (;;) {
        pthread_mutex_lock(&kept->lock);
        int some = kept->count && kept->counts.kept_bytes > most;
        kvp_kept_buffer one = some ? take_out(kept, 0) : (kvp_kept_buffer){0};
        if (some) ++*count;
        kept->counts.excess_bytes += one.bytes; /* until it has gone, another thread's may not come in its place */
        pthread_mutex_unlock(&kept->lock);
        if (!some) return bytes;
        bytes += one.bytes;
        kept->release(kept->context, &one);
        one.taken = 0;
        kvp_kept_returned(kept, &one);
    }
}

static int has_room(kvp_kept *kept) {
    if (kept->count < kept->room) return 1;
    uint32_t room = kept->room ? 2 * kept->room : 64;
    kvp_kept_buffer *more = realloc(kept->buffers, room * sizeof *more);
    if (!more) return 0;
    kept->buffers = more;
    kept->room = room;
    return 1;
}

/* Lock held. */
static void add(kvp_kept *kept, const kvp_kept_buffer *buffer) {
    kept->buffers[kept->count++] = *buffer;
    kept->counts.kept_bytes += buffer->bytes;
    kept->counts.kept++;
    kept->unseen_bytes += buffer->bytes;
    note_most(kept);
    have_watched(kept);
}

int kvp_kept_put(kvp_kept *kept, const kvp_kept_buffer *buffer) {
    pthread_mutex_lock(&kept->lock);
    uint64_t excess = kept->counts.excess_bytes;
    pthread_mutex_unlock(&kept->lock);
    if (buffer->bytes > kept->budget_bytes || excess > kept->budget_bytes - buffer->bytes) return 0;
    let_go(kept, kept->budget_bytes - buffer->bytes - excess, &kept->counts.given_up);
    pthread_mutex_lock(&kept->lock);
    /* another thread's may have come in between */
    int fits =
        kept->counts.kept_bytes + kept->counts.excess_bytes <= kept->budget_bytes - buffer->bytes && has_room(kept);
    if (fits) add(kept, buffer);
    pthread_mutex_unlock(&kept->lock);
    return fits;
}

int kvp_kept_take(kvp_kept *kept, uint64_t bytes, uint64_t key, kvp_kept_buffer *found) {
    uint32_t best = UINT32_MAX;
    pthread_mutex_lock(&kept->lock);
    for (uint32_t i = kept->count; i--;) { /* of equal ones the newest, whose pages the caches know */
        const kvp_kept_buffer *one = &kept->buffers[i];
        if (one->key != key || one->bytes < bytes || one->bytes - bytes > bytes / LARGER_BY) continue;
        if (best == UINT32_MAX || one->bytes < kept->buffers[best].bytes) best = i;
    }
    if (best != UINT32_MAX) {
        *found = take_out(kept, best);
        found->taken = bytes;
        kept->counts.excess_bytes += found->bytes - bytes;
        kept->counts.reused++;
        kept->counts.reused_bytes += bytes;
    }
    pthread_mutex_unlock(&kept->lock);
    return best != UINT32_MAX;
}

int kvp_kept_promise(kvp_kept *kept, uint64_t bytes) {
    pthread_mutex_lock(&kept->lock);
    uint64_t now = kept->counts.kept_bytes + kept->counts.excess_bytes;
    int fits = now <= kept->budget_bytes && kept->budget_bytes - now >= bytes;
    if (fits) {
        kept->counts.excess_bytes += bytes;
        note_most(kept);
    }
    pthread_mutex_unlock(&kept->lock);
    return fits;
}

int kvp_kept_put_promised(kvp_kept *kept, const kvp_kept_buffer *buffer) {
    pthread_mutex_lock(&kept->lock);
    int fits = has_room(kept);
    if (fits) {
        kept->counts.excess_bytes -= buffer->bytes;
        add(kept, buffer);
    }
    pthread_mutex_unlock(&kept->lock);
    return fits;
}

int kvp_kept_take_this(kvp_kept *kept, const void *memory, kvp_kept_buffer *found) {
    int there = 0;
    pthread_mutex_lock(&kept->lock);
    for (uint32_t i = 0; i < kept->count && !there; i++)
        if (kept->buffers[i].memory == memory) {
            *found = take_out(kept, i);
            kept->counts.excess_bytes += found->bytes;
            there = 1;
        }
    pthread_mutex_unlock(&kept->lock);
    return there;
}

void kvp_kept_returned(kvp_kept *kept, const kvp_kept_buffer *buffer) {
    pthread_mutex_lock(&kept->lock);
    kept->counts.excess_bytes -= buffer->bytes - buffer->taken;
    pthread_mutex_unlock(&kept->lock);
}

void kvp_kept_trim(kvp_kept *kept, uint64_t most_bytes) { let_go(kept, most_bytes, &kept->counts.given_up); }

int kvp_kept_press(kvp_kept *kept, uint64_t wanted_bytes) {
    pthread_mutex_lock(&kept->lock);
    uint64_t kept_bytes = kept->counts.kept_bytes;
    /* a look takes longer than handing a buffer over: where a thread looks, too, one a few buffers is enough */
    int looks = kept->root && kept_bytes && (wanted_bytes || !kept->watching || kept->unseen_bytes >= LOOK_BYTES);
    if (looks) kept->unseen_bytes = 0;
    pthread_mutex_unlock(&kept->lock);
    if (!looks) return 0;
    kvp_memory memory = kvp_memory_left(kept->root);
    uint64_t need = kvp_memory_reserve(&memory) + wanted_bytes;
    if (!memory.total_bytes || memory.left_bytes >= need) return 0;
    uint64_t missing = need - memory.left_bytes;
    let_go(kept, missing < kept_bytes ? kept_bytes - missing : 0, &kept->counts.pressed);
    return 1;
}

int kvp_kept_holds(kvp_kept *kept, const void *memory) {
    int found = 0;
    pthread_mutex_lock(&kept->lock);
    for (uint32_t i = 0; i < kept->count && !found; i++) found = kept->buffers[i].memory == memory;
    pthread_mutex_unlock(&kept->lock);
    return found;
}

uint64_t kvp_kept_forget(kvp_kept *kept) {
    pthread_mutex_lock(&kept->lock);
    uint64_t bytes = kept->counts.kept_bytes;
    kept->counts.given_up += kept->count;
    kept->count = 0;
    kept->counts.kept_bytes = 0;
    pthread_mutex_unlock(&kept->lock);
    return bytes;
}
