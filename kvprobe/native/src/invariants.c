/* What holds after every step: whatever is outstanding is covered by something that will tell. Looked at in
 * simulations, where a state that breaks it is found the moment it comes about, and not when somebody has waited long
 * enough. */
#include "submitter.h"

void kvp_wrong(kvp_submitter *s, const char *what) {
    const char *none = NULL;
    atomic_compare_exchange_strong(&s->wrong, &none, what);
}

/* ---- marks ------------------------------------------------------------------------------------------------------ */

struct held {
    uint64_t places, bytes, entries, events;
    uint64_t covered; /* newest sequence that a mark ends */
};

static struct held check_line(kvp_submitter *s, const struct line *l) {
    struct held held = {0};
    const struct marker *before = NULL;
    kvp_must(s, l->tail - l->head <= MARKERS, "more marks than there is space for");
    for (uint32_t i = l->head; i != l->tail; i++) {
        const struct marker *m = &l->marker[i % MARKERS];
        uint32_t marks = (m->event != NULL) + (m->start != NULL);
        held.places += m->places;
        held.bytes += m->bytes;
        held.entries += m->entries;
        held.events += marks;
        kvp_must(s, m->event || m->stream, "a marker without an event or a stream");
        kvp_must(s, m->places >= marks, "a mark that takes no place");
        if (before) {
            kvp_must(s, m->stream == before->stream, "marks of two streams in one line");
            kvp_must(s, m->sequence >= before->sequence || !m->sequence, "marks out of order");
            kvp_must(s, m->begun >= before->begun, "marks out of order");
        }
        if (m->sequence > held.covered) held.covered = m->sequence;
        before = m;
    }
    return held;
}

/* The event behind a transfer's last copy is a mark's that ends it, or a later one's. */
static void check_end(kvp_submitter *s, const struct kvp_job *j, const struct line *l) {
    bool found = !j->end_event;
    for (uint32_t i = l->head; i != l->tail && !found; i++) {
        const struct marker *m = &l->marker[i % MARKERS];
        found = m->event == j->end_event && m->sequence >= j->sequence;
    }
    kvp_must(s, found, "the end of a transfer is an event that marks something else");
}

/* ---- what the runtime holds ------------------------------------------------------------------------------------- */

static void check_room(kvp_submitter *s, int d) {
    enum { LEAST = 4 }; /* a copy, and what is around it: so much is always submitted */
    struct direction *dir = &s->direction[d];
    uint64_t places = atomic_load(&dir->places), usable = kvp_usable(s), slots = 0;
    kvp_must(s, places <= (usable > LEAST ? usable : LEAST), "more was submitted than there are slots for");
    if (!s->config.slots) return;
    for (uint32_t i = 0; i < s->config.streams; i++) slots += s->config.slots(s->config.pooled[d][i]);
    kvp_must(s, slots <= places, "operations in a launch queue that are not counted");
}

/* ---- transfers -------------------------------------------------------------------------------------------------- */

static uint64_t check_pooled(kvp_submitter *s, int d, uint64_t next, uint64_t *bytes) {
    struct direction *dir = &s->direction[d];
    struct held held = check_line(s, &dir->line);
    kvp_must(s, held.places == atomic_load(&dir->places), "the places of the markers are not those that are taken");
    kvp_must(s, held.bytes == atomic_load(&dir->bytes), "the bytes of the markers are not those in flight");
    kvp_must(s, held.entries == dir->listed, "a list of copies that nobody holds");
    uint64_t before = 0, jobs = 0;
    for (struct kvp_job *j = dir->flying; j; j = j->next, jobs++) {
        kvp_must(s, j->sequence > before, "transfers in flight out of order");
        before = j->sequence;
        kvp_must(s, j->status.state == KVP_IN_FLIGHT, "a transfer among those in flight that is not");
        kvp_must(s, j->next || j == dir->flying_last, "the newest transfer in flight is not the last");
        kvp_must(s, !j->after, "a transfer in flight that waits");
        check_end(s, j, &dir->line);
        *bytes += j->status.bytes;
    }
    kvp_must(s, before <= held.covered, "a transfer in flight that no marker ends");
    for (struct kvp_job *j = dir->first; j; j = j->next, jobs++) {
        kvp_must(s, j->sequence > before, "waiting transfers out of order");
        before = j->sequence;
        kvp_must(s, j->status.state < KVP_IN_FLIGHT, "a transfer among those that wait that does not");
        kvp_must(s, j->next || j == dir->last, "the newest transfer that waits is not the last");
        kvp_must(s, j == dir->first || !j->begun, "two transfers that are partly submitted");
        kvp_must(s, !j->begun || !j->after, "a transfer that was begun before what it waits for");
        *bytes += j->status.bytes;
    }
    bool some = dir->first || dir->flying || dir->line.head != dir->line.tail;
    kvp_must(s, !some || next != UINT64_MAX, "transfers that nobody will look at again");
    return jobs;
}

static uint64_t check_shared(kvp_submitter *s, int d, uint64_t next, uint64_t *bytes) {
    struct direction *dir = &s->direction[d];
    uint64_t newest = 0, jobs = 0, places = atomic_load(&dir->shared_places);
    if (pthread_mutex_trylock(&dir->shared_lock)) return 0; /* a caller is at it */
    struct held held = check_line(s, &dir->shared);
    bool busy = dir->inlined_last && dir->inlined_last->busy;
    for (struct kvp_job *j = dir->inlined; j; j = j->next, jobs++) {
        *bytes += j->status.bytes;
        if (j->status.state != KVP_IN_FLIGHT) continue;
        kvp_must(s, j->sequence > newest, "transfers on the shared stream out of order");
        newest = j->sequence;
        check_end(s, j, &dir->shared);
    }
    kvp_must(s, held.places == places, "the places of the shared markers are not those that are taken");
    kvp_must(s, newest <= held.covered, "a transfer on the shared stream that no marker ends");
    kvp_must(s, dir->shared.head == dir->shared.tail || next != UINT64_MAX,
             "copies on the shared stream that nobody will look at again");
    if (s->config.slots && !busy)
        kvp_must(s, s->config.slots(s->config.shared[d]) <= places, "copies on the shared stream that are not counted");
    pthread_mutex_unlock(&dir->shared_lock);
    return jobs;
}

/* ---- fences and events ------------------------------------------------------------------------------------------ */

static void check_fences(kvp_submitter *s) {
    uint32_t standing[COMPUTE_STREAMS] = {0}, used = 0;
    for (struct fence *f = s->fences_all; f; f = f->all) {
        if (!f->users) continue;
        used++;
        for (int i = 0; i < s->computes && (f->state == FENCE_RECORDED || f->state == FENCE_RECORDING); i++)
            standing[i] += s->compute[i].stream == f->stream;
    }
    kvp_must(s, used <= s->fences_used, "a fence is used that was given back");
    for (int i = 0; i < s->computes; i++) {
        const struct fence *open = s->compute[i].open;
        kvp_must(s, !open || (open->users && open->state == FENCE_OPEN),
                 "later requests share a fence that was recorded");
        kvp_must(s, !open || open->stream == s->compute[i].stream, "a fence of another stream is shared");
        kvp_must(s, standing[i] == s->compute[i].recorded, "fences on a stream are not counted");
    }
}

void kvp_check_unused(kvp_submitter *s, void *event) {
    kvp_must(s, !s->pins, "an event may be used again while a fence is about to wait for one");
    for (int i = 0; i < PINNED; i++)
        kvp_must(s, s->pinned[i] != event, "an event is used again while a fence is about to wait for it");
    if (s->threaded) return; /* nobody else may look at the lists then */
    for (int d = 0; d < 2; d++)
        for (int shared = 0; shared < 2; shared++)
            for (struct kvp_job *j = shared ? s->direction[d].inlined : s->direction[d].flying; j; j = j->next)
                kvp_must(s, j->end_event != event || j->status.state != KVP_IN_FLIGHT,
                         "an event is used again while a transfer in flight ends at it");
}

void kvp_check(kvp_submitter *s, uint64_t next) {
    uint64_t jobs = 0;
    for (int d = 0; d < 2; d++) {
        struct direction *dir = &s->direction[d];
        uint64_t bytes = 0, pooled = check_pooled(s, d, next, &bytes), coming = 0;
        for (struct kvp_job *j = s->incoming; j; j = j->next)
            if (j->direction == d) coming++, bytes += j->status.bytes;
        uint64_t shared = check_shared(s, d, next, &bytes);
        check_room(s, d);
        for (int m = 0; m < KVP_METHODS; m++)
            kvp_must(s, !s->launches[d][m] == !s->moved[d][m], "launches that moved nothing, or bytes that none did");
        kvp_must(s, pooled + coming == atomic_load(&dir->pushed), "the transfers handed over are not those counted");
        kvp_must(s, shared <= atomic_load(&dir->inlined_jobs), "more transfers on the shared stream than are counted");
        kvp_must(s, bytes <= atomic_load(&dir->pending_bytes), "more bytes are pending than are counted");
        jobs += pooled + coming + shared;
    }
    pthread_mutex_lock(&s->lock);
    check_fences(s);
    kvp_must(s, s->events_free + s->limbo_count <= s->events_made, "an event was given back twice");
    pthread_mutex_unlock(&s->lock);
    kvp_must(s, jobs <= atomic_load(&s->pending), "more transfers than were asked for");
}
