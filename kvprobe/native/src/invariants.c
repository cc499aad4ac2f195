/* What holds after every step: whatever is outstanding is covered by something that will tell. Looked at in
 * simulations, where a state that breaks it is found the moment it comes about, and not when somebody has waited long
 * enough. */
#include "submitter.h"

static const char *check_line(const struct line *l, uint64_t places, uint64_t *entries) {
    uint64_t sum = 0;
    for (uint32_t i = l->head; i != l->tail; i++) {
        const struct marker *m = &l->marker[i % MARKERS];
        sum += m->places;
        *entries += m->entries;
        if (!m->event && !m->stream) return "a marker without an event or a stream";
    }
    return sum == places ? NULL : "the places of the markers are not those that are taken";
}

/* The newest sequence that a marker of the line will end; 0: none. */
static uint64_t covered(const struct line *l) {
    uint64_t newest = 0;
    for (uint32_t i = l->head; i != l->tail; i++)
        if (l->marker[i % MARKERS].sequence > newest) newest = l->marker[i % MARKERS].sequence;
    return newest;
}

static const char *check_pooled(struct direction *dir, uint64_t next, uint64_t *jobs) {
    uint64_t entries = 0;
    const char *wrong = check_line(&dir->line, atomic_load(&dir->places), &entries);
    if (wrong) return wrong;
    if (entries != dir->listed) return "a list of copies that nobody holds";
    uint64_t before = 0;
    for (struct kvp_job *j = dir->flying; j; j = j->next, ++*jobs) {
        if (j->sequence <= before) return "transfers in flight out of order";
        before = j->sequence;
        if (j->status.state != KVP_IN_FLIGHT) return "a transfer among those in flight that is not";
        if (!j->next && j != dir->flying_last) return "the newest transfer in flight is not the last";
    }
    if (before > covered(&dir->line)) return "a transfer in flight that no marker ends";
    for (struct kvp_job *j = dir->first; j; j = j->next, ++*jobs) {
        if (j->sequence <= before) return "waiting transfers out of order";
        before = j->sequence;
        if (j->status.state >= KVP_IN_FLIGHT) return "a transfer among those that wait that does not";
    }
    bool some = dir->first || dir->flying || dir->line.head != dir->line.tail;
    return some && next == UINT64_MAX ? "transfers that nobody will look at again" : NULL;
}

static const char *check_shared(struct direction *dir, uint64_t next, uint64_t *jobs) {
    if (pthread_mutex_trylock(&dir->shared_lock)) return NULL; /* a caller is at it */
    uint64_t none = 0, newest = 0;
    const char *wrong = check_line(&dir->shared, atomic_load(&dir->shared_places), &none);
    for (struct kvp_job *j = dir->inlined; j; j = j->next, ++*jobs)
        if (j->status.state == KVP_IN_FLIGHT) newest = j->sequence;
    if (!wrong && newest > covered(&dir->shared)) wrong = "a transfer on the shared stream that no marker ends";
    if (!wrong && dir->shared.head != dir->shared.tail && next == UINT64_MAX)
        wrong = "copies on the shared stream that nobody will look at again";
    pthread_mutex_unlock(&dir->shared_lock);
    return wrong;
}

const char *kvp_check(kvp_submitter *s, uint64_t next) {
    uint64_t jobs = 0;
    for (int d = 0; d < 2; d++) {
        struct direction *dir = &s->direction[d];
        const char *wrong = check_pooled(dir, next, &jobs);
        if (!wrong) wrong = check_shared(dir, next, &jobs);
        if (wrong) return wrong;
    }
    pthread_mutex_lock(&s->lock);
    for (struct kvp_job *j = s->incoming; j; j = j->next) jobs++;
    bool short_of = s->events_free + s->limbo_count > s->events_made;
    pthread_mutex_unlock(&s->lock);
    if (short_of) return "an event was given back twice";
    return jobs > atomic_load(&s->pending) ? "more transfers than were asked for" : NULL;
}
