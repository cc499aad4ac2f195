/* Jobs: what one transfer copies, in its order; neighbours become one copy. */
#include "submitter.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SPARE_WORDS (1u << 20) /* larger ones are not kept */

/* Room for a job's ids: what an ended job left, or fresh. */
static bool data_alloc(struct kvp_job *j, uint64_t words) {
    kvp_submitter *s = j->owner;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = s->spares; i-- > 0;) {
        if (s->spare[i].words < words || s->spare[i].words > 4 * words + 64) continue;
        j->data = s->spare[i].data;
        j->words = s->spare[i].words;
        s->spare[i] = s->spare[--s->spares];
        break;
    }
    pthread_mutex_unlock(&s->lock);
    if (!j->data) {
        j->words = words < 64 ? 64 : words;
        j->data = malloc(j->words * sizeof *j->data);
    }
    return j->data != NULL;
}

/* The job has ended: its ids' room goes to another. */
void kvp_job_spare(struct kvp_job *j) {
    kvp_submitter *s = j->owner;
    int64_t *data = j->data;
    j->data = NULL;
    if (data && j->words <= SPARE_WORDS) {
        pthread_mutex_lock(&s->lock);
        if (s->spares < SPARE) {
            s->spare[s->spares].data = data;
            s->spare[s->spares++].words = j->words;
            data = NULL;
        }
        pthread_mutex_unlock(&s->lock);
    }
    free(data);
}

static struct kvp_job *job_alloc(kvp_submitter *s, int direction, uint64_t id, uint64_t words) {
    struct kvp_job *j = calloc(1, sizeof *j);
    if (!j) return NULL;
    j->owner = s;
    if (!data_alloc(j, words)) {
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
static bool take_ids(int64_t *to, const int64_t *ids, uint64_t count, uint64_t blocks, int64_t *bad) {
    int64_t signs = 0, last = (int64_t)blocks - 1;
    for (uint64_t i = 0; i < count; i++) {
        int64_t id = ids[i];
        to[i] = id;
        signs |= id | (int64_t)((uint64_t)last - (uint64_t)id); /* one of them is negative where it does not */
    }
    for (uint64_t i = 0; signs < 0 && i < count; i++) {
        if ((uint64_t)ids[i] < blocks) continue;
        *bad = ids[i];
        return false;
    }
    return true;
}

/* Whether an id stands twice; a bit a block, on the stack where that suffices. */
static int twice(const int64_t *ids, uint64_t count, uint64_t blocks) {
    enum { SMALL = 1024 };
    uint64_t small[SMALL], *seen = small, words = (blocks + 63) / 64;
    if (count <= 16 || (count <= 64 && words > SMALL)) {
        for (uint64_t i = 1; i < count; i++)
            for (uint64_t k = 0; k < i; k++)
                if (ids[i] == ids[k]) return 1;
        return 0;
    }
    if (words > SMALL) seen = malloc(words * 8);
    if (!seen) return -1;
    memset(seen, 0, words * 8);
    uint64_t found = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t *word = &seen[(uint64_t)ids[i] >> 6], bit = UINT64_C(1) << (ids[i] & 63);
        found |= *word & bit;
        *word |= bit;
    }
    if (seen != small) free(seen);
    return found != 0;
}

static kvp_job_status *job_of_blocks(kvp_submitter *s, int direction, uint64_t id, uint64_t copies, const int64_t *gpu,
                                     uint64_t gpu_count, const int64_t *cpu, uint64_t cpu_count, int *why,
                                     int64_t *bad) {
    struct kvp_job *j = job_alloc(s, direction, id, gpu_count + cpu_count);
    *why = j ? 0 : KVP_NO_MEMORY;
    *bad = INT64_MIN;
    if (!j) return NULL;
    j->gpu = j->data;
    j->cpu = j->data + gpu_count;
    j->gpu_count = gpu_count;
    j->cpu_count = cpu_count;
    j->count = copies;
    j->status.copies = copies * s->config.layers;
    j->status.bytes = j->status.copies * s->config.copy_bytes;
    if (!take_ids(j->data, gpu, gpu_count, s->config.gpu.blocks, bad) ||
        !take_ids(j->data + gpu_count, cpu, cpu_count, s->config.cpu.blocks, bad)) {
        *why = KVP_BAD_ID;
    } else {
        int repeated = direction == KVP_D2H ? twice(j->cpu, cpu_count, s->config.cpu.blocks)
                                            : twice(j->gpu, gpu_count, s->config.gpu.blocks);
        if (repeated) *why = repeated > 0 ? KVP_TWICE : KVP_NO_MEMORY;
    }
    if (!*why) return &j->status;
    kvp_job_spare(j);
    free(j);
    return NULL;
}

static struct kvp_job *job_of_addresses(kvp_submitter *s, int direction, uint64_t id, const kvp_addresses *copies) {
    uint64_t n = copies->count, sized = copies->sizes ? n : 0;
    struct kvp_job *j = job_alloc(s, direction, id, 2 * n + sized + copies->bounds);
    if (!j) return NULL;
    uint64_t *data = (uint64_t *)j->data;
    j->dst = memcpy(data, copies->dst, n * 8);
    j->src = memcpy(data + n, copies->src, n * 8);
    if (sized) j->sizes = memcpy(data + 2 * n, copies->sizes, n * 8);
    if (copies->bounds) j->bound = memcpy(data + 2 * n + sized, copies->bound, copies->bounds * 8);
    j->bounds = copies->bounds;
    j->size = copies->size;
    j->count = j->status.copies = n;
    for (uint64_t i = 0; i < sized; i++) j->status.bytes += j->sizes[i];
    if (!sized) j->status.bytes = copies->size * n;
    return j;
}

/* The rest of a request: what the job waits for, its times, and into the queue. */
static kvp_job_status *requested(kvp_submitter *s, kvp_job_status *job, void *after, bool waits, bool push,
                                 uint64_t requested_ns, int *why) {
    *why = waits ? kvp_job_after(s, (struct kvp_job *)job, after) : 0;
    if (!*why) {
        job->built_ns = kvp_now_ns();
        job->requested_ns = requested_ns < job->built_ns ? requested_ns : job->built_ns;
        if (push) *why = kvp_job_push(s, job);
        if (!*why) return job;
    }
    kvp_job_unused(s, job);
    kvp_job_release(job);
    return NULL;
}

kvp_job_status *kvp_job_request(kvp_submitter *s, uint32_t what, uint64_t id, uint64_t copies, const int64_t *gpu,
                                uint64_t gpu_count, const int64_t *cpu, uint64_t cpu_count, void *after,
                                uint64_t requested_ns, kvp_job_refused *refused) {
    int *why = &refused->why, direction = what & KVP_REQUEST_STORE ? KVP_D2H : KVP_H2D;
    if ((*why = kvp_refusal(s))) return NULL;
    kvp_job_status *job = job_of_blocks(s, direction, id, copies, gpu, gpu_count, cpu, cpu_count, why, &refused->bad);
    bool waits = what & KVP_REQUEST_AFTER, push = what & KVP_REQUEST_PUSH;
    job = job ? requested(s, job, after, waits, push, requested_ns, why) : NULL;
    if (job) refused->made = id, refused->bad = (int64_t)(uintptr_t)job;
    return job;
}

kvp_job_status *kvp_job_request_addresses(kvp_submitter *s, int direction, uint64_t id, const kvp_addresses *copies,
                                          void *after, int waits, uint64_t requested_ns, int *why) {
    if ((*why = kvp_refusal(s))) return NULL;
    struct kvp_job *j = job_of_addresses(s, direction, id, copies);
    if (j) return requested(s, &j->status, after, waits, 1, requested_ns, why);
    *why = KVP_NO_MEMORY;
    return NULL;
}

void kvp_job_release(kvp_job_status *job) {
    struct kvp_job *j = (struct kvp_job *)job;
    if (atomic_fetch_sub_explicit(&j->holders, 1, memory_order_acq_rel) != 1) return;
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
    if (j->dst) {
        copy = (kvp_copy){j->dst[at->copy], j->src[at->copy], j->sizes ? j->sizes[at->copy] : j->size};
    } else {
        uint32_t gf = c->gpu.factor, cf = c->cpu.factor;
        uint64_t p = at->copy;
        uint64_t g = gf == 1 ? (uint64_t)j->gpu[p] : (uint64_t)j->gpu[p / gf] * gf + p % gf;
        uint64_t h = cf == 1 ? (uint64_t)j->cpu[p] : (uint64_t)j->cpu[p / cf] * cf + p % cf;
        g = c->gpu.bases[at->layer] + g * c->copy_bytes;
        h = c->cpu.bases[at->layer] + h * c->copy_bytes;
        copy = j->direction == STORE ? (kvp_copy){h, g, c->copy_bytes} : (kvp_copy){g, h, c->copy_bytes};
    }
    copy.dst += at->offset;
    copy.src += at->offset;
    copy.bytes -= at->offset;
    return copy;
}

bool kvp_job_all(const struct kvp_job *j, const struct cursor *at) {
    return j->dst ? at->copy >= j->count : at->layer >= j->owner->config.layers;
}

/* Writes the job's next copies, at most `max` of them and until they come to `budget` bytes, none larger than
 * `largest`; moves the cursor. `bytes` and `asked` are added to: a copy as it was asked for counts when its last byte
 * is written down. */
uint32_t kvp_job_copies(const struct kvp_job *j, struct cursor *at, kvp_copy *out, uint32_t max, uint64_t budget,
                        uint64_t largest, bool merge, uint64_t *bytes, uint64_t *asked) {
    const kvp_submitter_config *c = &j->owner->config;
    uint32_t n = 0;
    uint64_t dst_bound = 0, src_bound = 0;
    bool bounded = j->dst ? j->bounds > 0 : c->gpu.bounds || c->cpu.bounds;
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
            if (bounded && j->dst) {
                dst_bound = next_bound(j->bound, j->bounds, p.dst);
                src_bound = next_bound(j->bound, j->bounds, p.src);
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
        if (++at->copy == j->count && !j->dst) at->copy = 0, at->layer++;
    }
    return n;
}

/* Whether the job writes where a job from sequence `since` on wrote; notes what it writes. Jobs with addresses
 * always do: nobody knows what they write. */
bool kvp_job_conflicts(struct kvp_job *j, uint32_t *stamp, uint64_t since) {
    if (j->dst || !stamp) return true;
    const kvp_submitter_config *c = &j->owner->config;
    const int64_t *ids = j->direction == STORE ? j->cpu : j->gpu;
    uint64_t f = j->direction == STORE ? c->cpu.factor : c->gpu.factor;
    bool found = false;
    for (uint64_t p = 0; p < j->count; p++) {
        uint32_t *writer = &stamp[(uint64_t)ids[p / f] * f + p % f];
        found |= *writer >= (uint32_t)since;
        *writer = (uint32_t)j->sequence;
    }
    return found;
}
