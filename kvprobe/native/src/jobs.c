/* Jobs: what one transfer copies, in its order; neighbours become one copy. */
#include "submitter.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The analyzer knows a job by the pointer that job_alloc returned, and thinks it leaked where `made` alone holds it. */
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Wanalyzer-malloc-leak"

#define LEAST_WORDS 64
#define KEPT_BYTES (4u << 20)    /* of each class */
#define STOCKED_BYTES (1u << 18) /* of each class, from the beginning; larger ones are not */
#define STOCKED_LEAST (1u << 21) /* of the smallest class, which jobs come from and the block ids of small requests */

/* Memory for what requests copy, in classes of twice as many words each: 0 holds LEAST_WORDS. */
static uint32_t class_of(uint64_t words) {
    uint32_t class = 0;
    while ((uint64_t)LEAST_WORDS << class < words) class ++;
    return class;
}

/* At least so many words; `words` is then what there are. */
static void *take_spare(kvp_submitter *s, uint64_t *words) {
    uint32_t class = class_of(*words);
    struct spare *spare = NULL;
    if (EXACT_MEMORY()) return malloc(*words * 8);
    *words = (uint64_t)LEAST_WORDS << class;
    if (class < CLASSES) {
        pthread_mutex_lock(&s->lock);
        spare = s->spare[class];
        if (spare) s->spare[class] = spare->next, s->spares[class]--;
        pthread_mutex_unlock(&s->lock);
    }
    return spare ? spare : malloc(*words * 8);
}

/* What nobody needs any more goes to the next request of its class: fresh memory costs its caller page faults. */
static void give_spare(kvp_submitter *s, void *data, uint64_t words) {
    uint32_t class = class_of(words);
    struct spare *spare = data;
    if (spare && class < CLASSES && !EXACT_MEMORY()) {
        pthread_mutex_lock(&s->lock);
        if (s->spares[class] < KEPT_BYTES / (8 * words)) {
            spare->next = s->spare[class];
            s->spare[class] = spare;
            s->spares[class]++;
            spare = NULL;
        }
        pthread_mutex_unlock(&s->lock);
    }
    free(spare);
}

/* The request's memory, once none of its jobs needs it any more. */
static struct addresses *last_of(struct kvp_job *j) {
    struct addresses *of = j->of;
    j->of = NULL;
    return of && atomic_fetch_sub_explicit(&of->jobs, 1, memory_order_acq_rel) == 1 ? of : NULL;
}

void kvp_job_spare(struct kvp_job *j) {
    struct addresses *of = last_of(j);
    if (of) give_spare(j->owner, of, of->words);
    give_spare(j->owner, j->data, j->words);
    j->data = NULL;
}

void kvp_spares_open(kvp_submitter *s) {
    for (uint32_t class = 0; class < CLASSES; class ++) {
        uint64_t words = (uint64_t)LEAST_WORDS << class, bytes = class ? STOCKED_BYTES : STOCKED_LEAST;
        for (uint64_t i = 0; i < bytes / (8 * words); i++) {
            void *data = malloc(words * 8);
            if (data) give_spare(s, memset(data, 1, words * 8), words); /* 1: zeros could be had without touching it */
        }
    }
}

void kvp_spares_free(kvp_submitter *s) {
    for (uint32_t class = 0; class < CLASSES; class ++)
        for (struct spare *spare = s->spare[class], *next; spare; spare = next) {
            next = spare->next;
            free(spare);
        }
}

static struct kvp_job *job_alloc(kvp_submitter *s, int direction, uint64_t id, uint64_t words) {
    uint64_t own = (sizeof(struct kvp_job) + 7) / 8;
    struct kvp_job *j = take_spare(s, &own);
    if (!j) return NULL;
    memset(j, 0, sizeof *j);
    j->owner = s;
    j->words = words;
    if (words && !(j->data = take_spare(s, &j->words))) {
        free(j);
        return NULL;
    }
    atomic_init(&j->holders, 2);
    j->direction = direction == KVP_D2H ? STORE : LOAD;
    j->status.tid = kvp_thread_id();
    j->status.id = id;
    return j;
}

/* Copies block ids and looks whether each lies in the pool (in one loop that the compiler makes SIMD of). */
static bool take_ids(uint32_t *restrict to, const int64_t *restrict ids, uint64_t count, uint64_t blocks,
                     int64_t *bad) {
    int64_t signs = 0, last = (int64_t)blocks - 1;
    for (uint64_t i = 0; i < count; i++) {
        int64_t id = ids[i];
        to[i] = (uint32_t)id;
        signs |= id | (int64_t)((uint64_t)last - (uint64_t)id); /* one of them is negative where it does not */
    }
    if (signs >= 0) return true;
    for (uint64_t i = count; i-- > 0;)
        if ((uint64_t)ids[i] >= blocks) *bad = ids[i]; /* the first one's stays */
    return false;
}

static inline uint64_t name_block(uint64_t *bits, uint64_t id) {
    uint64_t *word = &bits[id / 64], bit = UINT64_C(1) << id % 64, before = *word & bit;
    *word |= bit;
    return before;
}

/* Whether a destination stands twice. Four quarters in turn: neighbours share a word, and each would wait for what the
 * one before has stored. The bits are clear again afterwards, at a cost that does not grow with the pool. */
static bool twice(struct named *named, const uint32_t *ids, uint64_t count) {
    uint64_t *bits = named->bits, found = 0, quarter = count / 4;
    pthread_mutex_lock(&named->lock);
    for (uint64_t i = 0; i < quarter; i++)
        for (uint64_t k = 0; k < 4; k++) found |= name_block(bits, ids[i + k * quarter]);
    for (uint64_t i = 4 * quarter; i < count; i++) found |= name_block(bits, ids[i]);
    if (named->words <= 4 * count) {
        memset(bits, 0, named->words * sizeof *bits);
    } else {
        for (uint64_t i = 0; i < count; i++) bits[ids[i] / 64] = 0;
    }
    pthread_mutex_unlock(&named->lock);
    return found != 0;
}

static struct kvp_job *job_of_blocks(const kvp_request *r, const int64_t *gpu, const int64_t *cpu) {
    kvp_submitter *s = r->submitter;
    bool store = r->what & KVP_REQUEST_STORE;
    struct kvp_job *j = job_alloc(s, store ? KVP_D2H : KVP_H2D, r->id, (r->gpu_count + r->cpu_count + 1) / 2);
    r->refused->why = KVP_NO_MEMORY;
    if (!j) return NULL;
    uint32_t *ids = (uint32_t *)j->data;
    j->gpu = ids;
    j->cpu = ids + r->gpu_count;
    j->count = r->copies;
    j->status.copies = r->copies * s->config.layers;
    j->status.bytes = j->status.copies * s->config.copy_bytes;
    r->refused->why = KVP_BAD_ID;
    if (take_ids(ids, gpu, r->gpu_count, s->config.gpu.blocks, &r->refused->bad) &&
        take_ids(ids + r->gpu_count, cpu, r->cpu_count, s->config.cpu.blocks, &r->refused->bad)) {
        r->refused->why = KVP_TWICE;
        if (!twice(&s->named[j->direction], store ? j->cpu : j->gpu, store ? r->cpu_count : r->gpu_count)) {
            if (kvp_cells_claim(s, j, &r->refused->bad)) return j;
            r->refused->why = KVP_NO_ROOM;
        }
    }
    kvp_job_spare(j);
    free(j);
    return NULL;
}

static const uint64_t *put(uint64_t **to, const void *from, uint64_t words) {
    uint64_t *at = *to;
    *to += words;
    return words ? memcpy(at, from, words * 8) : at;
}

static struct addresses *addresses_of(kvp_submitter *s, const kvp_addresses *given, const kvp_bases **bases) {
    const uint64_t of_list = sizeof(kvp_offsets) / 8, of_pair = sizeof(kvp_bases) / 8;
    uint64_t pairs = given->ends[given->jobs - 1], words = (sizeof(struct addresses) + 7) / 8 + given->bounds;
    words += given->lists * of_list + pairs * of_pair;
    for (uint32_t i = 0; i < given->lists; i++) words += given->offsets[i].count * (given->offsets[i].sizes ? 3 : 2);
    struct addresses *of = take_spare(s, &words);
    if (!of) return NULL;
    of->words = words;
    uint64_t *at = of->data;
    kvp_offsets *lists = (kvp_offsets *)at;
    at += given->lists * of_list;
    *bases = (const kvp_bases *)put(&at, given->bases, pairs * of_pair);
    for (uint32_t i = 0; i < given->lists; i++) {
        const kvp_offsets *from = &given->offsets[i];
        kvp_offsets *list = &lists[i];
        *list = *from;
        list->dst = put(&at, from->dst, from->count);
        list->src = put(&at, from->src, from->count);
        if (!from->sizes) continue;
        list->sizes = put(&at, from->sizes, from->count);
        list->size = 0; /* of all of them, from here on */
        for (uint64_t c = 0; c < list->count; c++) list->size += list->sizes[c];
    }
    of->offsets = lists;
    of->bound = put(&at, given->bound, given->bounds);
    of->bounds = given->bounds;
    atomic_init(&of->jobs, 0);
    return of;
}

/* These jobs are not carried out. */
static void undo(kvp_submitter *s, kvp_job_status **jobs, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        kvp_job_unused(s, jobs[i]);
        kvp_job_release(jobs[i]);
    }
}

/* Makes a request's jobs: all or none. */
static bool jobs_of_addresses(kvp_submitter *s, int direction, uint64_t id, const kvp_addresses *given,
                              kvp_job_status **made) {
    const kvp_bases *bases;
    struct addresses *of = addresses_of(s, given, &bases);
    uint64_t pair = 0;
    uint32_t n = 0;
    for (; of && n < given->jobs; n++) {
        struct kvp_job *j = job_alloc(s, direction, id + n, 0);
        if (!j) break;
        j->of = of;
        j->bases = bases + pair;
        j->pairs = (uint32_t)(given->ends[n] - pair);
        for (; pair < given->ends[n]; pair++) {
            const kvp_offsets *list = &of->offsets[bases[pair].list];
            j->status.copies += list->count;
            j->status.bytes += list->sizes ? list->size : list->size * list->count;
        }
        atomic_fetch_add(&of->jobs, 1);
        made[n] = &j->status;
    }
    if (n == given->jobs) return true;
    if (!n) free(of);
    undo(s, made, n);
    return false;
}

/* The rest of a request: what its jobs wait for, their times, and into the queue. 0, or why not: they are gone then. */
static int requested(kvp_submitter *s, kvp_job_status **jobs, uint32_t count, void *after, bool waits, bool push,
                     uint64_t requested_ns) {
    int why = waits ? kvp_job_after(s, (struct kvp_job *)jobs[0], after) : 0;
    if (!why) {
        uint64_t now = kvp_now_ns();
        for (uint32_t i = 0; i < count; i++) {
            jobs[i]->built_ns = now;
            jobs[i]->requested_ns = requested_ns < now ? requested_ns : now;
        }
        if (push) why = kvp_jobs_push(s, jobs, count);
    }
    if (why) undo(s, jobs, count);
    return why;
}

kvp_job_status *kvp_job_request(const kvp_request *r, const int64_t *gpu, const int64_t *cpu) {
    kvp_submitter *s = r->submitter;
    int *why = &r->refused->why;
    if ((*why = kvp_refusal(s))) return NULL;
    struct kvp_job *j = job_of_blocks(r, gpu, cpu);
    if (!j) return NULL;
    kvp_job_status *job = &j->status;
    *why = requested(s, &job, 1, r->after, r->what & KVP_REQUEST_AFTER, r->what & KVP_REQUEST_PUSH, r->requested_ns);
    if (*why) return NULL;
    r->refused->made = r->id;
    r->refused->bad = (int64_t)(uintptr_t)job;
    return job;
}

int kvp_job_request_addresses(kvp_submitter *s, int direction, uint64_t id, const kvp_addresses *copies, void *after,
                              int waits, uint64_t requested_ns, kvp_job_status **made) {
    int why = kvp_refusal(s);
    if (why) return why;
    if (!jobs_of_addresses(s, direction, id, copies, made)) return KVP_NO_MEMORY;
    ((struct kvp_job *)made[0])->behind_copies = waits == KVP_WAITS_FOR_COPIES;
    return requested(s, made, copies->jobs, after, waits != KVP_WAITS_NOT, true, requested_ns);
}

void kvp_job_release(kvp_job_status *job) {
    struct kvp_job *j = (struct kvp_job *)job;
    if (atomic_fetch_sub_explicit(&j->holders, 1, memory_order_acq_rel) != 1) return;
    free(last_of(j));
    free(j->data);
    free(j);
}

/* First address after `from` over which nothing is merged; UINT64_MAX: none. */
static uint64_t next_bound(const uint64_t *bound, uint32_t bounds, uint64_t from) {
    uint32_t low = 0, high = bounds;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (bound[middle] <= from)
            low = middle + 1;
        else
            high = middle;
    }
    return low < bounds ? bound[low] : UINT64_MAX;
}

static inline kvp_copy copy_at(const struct kvp_job *j, const struct cursor *at) {
    const kvp_submitter_config *c = &j->owner->config;
    kvp_copy copy;
    if (j->of) {
        const kvp_bases *b = &j->bases[at->layer];
        const kvp_offsets *list = &j->of->offsets[b->list];
        copy = (kvp_copy){b->dst + list->dst[at->copy], b->src + list->src[at->copy],
                          list->sizes ? list->sizes[at->copy] : list->size};
    } else {
        uint32_t gf = c->gpu.factor, cf = c->cpu.factor;
        uint64_t p = at->copy;
        uint64_t g = gf == 1 ? (uint64_t)j->gpu[p] : (uint64_t)j->gpu[p / gf] * gf + p % gf;
        uint64_t h = cf == 1 ? (uint64_t)j->cpu[p] : (uint64_t)j->cpu[p / cf] * cf + p % cf;
        g = c->gpu.bases[at->layer] + g * c->copy_bytes;
        h = c->cpu.bases[at->layer] + h * c->cells.step_bytes;
        copy = j->direction == STORE ? (kvp_copy){h, g, c->copy_bytes} : (kvp_copy){g, h, c->copy_bytes};
    }
    copy.dst += at->offset;
    copy.src += at->offset;
    copy.bytes -= at->offset;
    return copy;
}

/* Whether it copies from `src` to `dst` in a layer; of a job with addresses: anywhere. */
bool kvp_job_has(const struct kvp_job *j, uint64_t layer, uint64_t dst, uint64_t src) {
    struct cursor at = {.layer = j->of ? 0 : (uint32_t)layer};
    do {
        uint64_t count = j->of ? j->of->offsets[j->bases[at.layer].list].count : j->count;
        for (at.copy = 0; at.copy < count; at.copy++) {
            kvp_copy copy = copy_at(j, &at);
            if (copy.dst == dst && copy.src == src) return true;
        }
    } while (j->of && ++at.layer < j->pairs);
    return false;
}

bool kvp_job_all(const struct kvp_job *j, const struct cursor *at) {
    return at->layer >= (j->of ? j->pairs : j->owner->config.layers);
}

/* Writes the job's next copies, at most `max` of them and until they come to `budget` bytes, none larger than
 * `largest`; moves the cursor. `bytes` and `asked` are added to: a copy as it was asked for counts when its last byte
 * is written down. */
uint32_t kvp_job_copies(const struct kvp_job *j, struct cursor *at, kvp_copy *out, uint32_t max, uint64_t budget,
                        uint64_t largest, bool merge, uint64_t *bytes, uint64_t *asked) {
    const kvp_submitter_config *c = &j->owner->config;
    uint32_t n = 0;
    uint64_t dst_bound = 0, src_bound = 0;
    bool bounded = j->of ? j->of->bounds > 0 : c->gpu.bounds || c->cpu.bounds;
    while (!kvp_job_all(j, at)) {
        kvp_copy p = copy_at(j, at);
        bool cut = p.bytes > largest;
        if (cut) p.bytes = largest;
        kvp_copy *before = n ? &out[n - 1] : NULL;
        bool joins = merge && before && before->dst + before->bytes == p.dst && before->src + before->bytes == p.src &&
                     before->bytes + p.bytes <= largest;
        if (joins && bounded) joins = p.dst < dst_bound && p.src < src_bound;
        if (joins) {
            before->bytes += p.bytes;
        } else {
            if (n == max || *bytes >= budget) break;
            out[n++] = p;
            if (bounded && j->of) {
                dst_bound = next_bound(j->of->bound, j->of->bounds, p.dst);
                src_bound = next_bound(j->of->bound, j->of->bounds, p.src);
            } else if (bounded) {
                const kvp_side *to = j->direction == STORE ? &c->cpu : &c->gpu;
                const kvp_side *from = j->direction == STORE ? &c->gpu : &c->cpu;
                dst_bound = next_bound(to->bound, to->bounds, p.dst);
                src_bound = next_bound(from->bound, from->bounds, p.src);
            }
        }
        *bytes += p.bytes;
        if (cut) {
            at->offset += p.bytes;
            continue;
        }
        at->offset = 0;
        ++*asked;
        if (++at->copy == (j->of ? j->of->offsets[j->bases[at->layer].list].count : j->count))
            at->copy = 0, at->layer++;
    }
    return n;
}

/* Whether the job writes where a job from sequence `since` on wrote; notes what it writes. Jobs with addresses
 * always do: nobody knows what they write. */
bool kvp_job_conflicts(struct kvp_job *j, uint32_t *stamp, uint64_t since) {
    if (j->of || !stamp) return true;
    const kvp_submitter_config *c = &j->owner->config;
    const uint32_t *ids = j->direction == STORE ? j->cpu : j->gpu;
    uint64_t f = j->direction == STORE ? c->cpu.factor : c->gpu.factor;
    bool found = false;
    for (uint64_t p = 0; p < j->count; p++) {
        uint32_t *writer = &stamp[(uint64_t)ids[p / f] * f + p % f];
        found |= *writer >= (uint32_t)since && *writer != (uint32_t)j->sequence; /* it was looked at before */
        *writer = (uint32_t)j->sequence;
    }
    return found;
}
