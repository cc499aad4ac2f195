/* The reserve of a packed pool: tails for what of cells has no space, and which of them are free or promised. */
#include "submitter.h"

#include <stdlib.h>

struct kvp_reserve {
    pthread_mutex_t lock;
    kvp_wire_note *notes;
    uint32_t *free;         /* the first `left` of them */
    uint16_t *storing;      /* by cell: launches on their way to it */
    uint64_t left, claimed; /* free ones; those promised, for which there are as many, free or taken just now */
    uint32_t room;
};

kvp_reserve *kvp_reserve_open(kvp_wire_note *notes, uint64_t cells, uint64_t tails, uint32_t room) {
    kvp_reserve *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    pthread_mutex_init(&r->lock, NULL);
    *r = (kvp_reserve){.lock = r->lock, .notes = notes, .left = tails, .room = room};
    r->free = calloc(tails + 1, sizeof *r->free);
    r->storing = calloc(cells, sizeof *r->storing);
    if (!r->free || !r->storing) {
        kvp_reserve_close(r);
        return NULL;
    }
    for (uint64_t i = 0; i < tails; i++) r->free[i] = (uint32_t)(tails - i); /* from 1 on */
    return r;
}

void kvp_reserve_close(kvp_reserve *r) {
    pthread_mutex_destroy(&r->lock);
    free(r->free);
    free(r->storing);
    free(r);
}

uint64_t kvp_reserve_left(kvp_reserve *r) {
    pthread_mutex_lock(&r->lock);
    uint64_t left = r->left > r->claimed ? r->left - r->claimed : 0;
    pthread_mutex_unlock(&r->lock);
    return left;
}

int kvp_reserve_claim(kvp_reserve *r, uint64_t count) {
    pthread_mutex_lock(&r->lock);
    int has = r->left >= r->claimed + count;
    if (has) r->claimed += count;
    pthread_mutex_unlock(&r->lock);
    return has;
}

void kvp_reserve_unclaim(kvp_reserve *r, uint64_t count) {
    pthread_mutex_lock(&r->lock);
    r->claimed -= count;
    pthread_mutex_unlock(&r->lock);
}

void kvp_reserve_begin(kvp_reserve *r, uint64_t first, uint32_t count) {
    pthread_mutex_lock(&r->lock);
    for (uint64_t i = first; i < first + count; i++)
        if (!r->storing[i]++ && !(r->notes[i].summed >> 1)) r->notes[i].summed |= r->free[--r->left] << 1;
    pthread_mutex_unlock(&r->lock);
}

/* The cell's tail is free. A load that reads the note meanwhile needs none, or must not be there. */
static void give(kvp_reserve *r, kvp_wire_note *note) {
    uint32_t tail = note->summed >> 1;
    if (!tail) return;
    r->free[r->left++] = tail;
    note->summed &= 1;
}

void kvp_reserve_end(kvp_reserve *r, uint64_t first, uint32_t count, int keep) {
    pthread_mutex_lock(&r->lock);
    for (uint64_t i = first; i < first + count; i++)
        if (!--r->storing[i] && !keep && r->notes[i].bytes <= r->room) give(r, &r->notes[i]);
    pthread_mutex_unlock(&r->lock);
}

int kvp_reserve_discard(kvp_reserve *r, uint64_t first, uint64_t count) {
    int idle = 1;
    pthread_mutex_lock(&r->lock);
    for (uint64_t i = first; i < first + count; i++) idle &= !r->storing[i];
    for (uint64_t i = first; idle && i < first + count; i++) {
        r->notes[i].bytes = 0;
        give(r, &r->notes[i]);
    }
    pthread_mutex_unlock(&r->lock);
    return idle;
}
