/* Jobs: what one transfer copies, made into copies piece by piece; neighbours become one copy. */
#include "submitter.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SPARE_WORDS (1u << 20) /* larger ones are not kept */

/* Room for a job's ids: what an ended job left, or fresh. */
static bool data_alloc(struct kvp_job *j, uint64_t words) {
    kvp_submitter *s = j->owner;
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < SPARE && !j->data; i++) {
        if (s->spare[i].words < words || s->spare[i].words > 4 * words + 64) continue;
        j->data = s->spare[i].data;
        j->words = s->spare[i].words;
        s->spare[i].data = NULL;
        s->spare[i].words = 0;
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
        for (int i = 0; i < SPARE && data; i++) {
            if (s->spare[i].data) continue;
            s->spare[i].data = data;
            s->spare[i].words = j->words;
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
    j->tid = kvp_thread_id();
    j->status.id = id;
    return j;
}

static int64_t out_of_range(const int64_t *ids, uint64_t count, uint64_t blocks) {
    uint64_t bad = 0;
    for (uint64_t i = 0; i < count; i++) bad |= (uint64_t)ids[i] >= blocks;
    for (uint64_t i = 0; bad && i < count; i++)
        if ((uint64_t)ids[i] >= blocks) return ids[i];
    return INT64_MIN;
}

/* Whether an id stands twice; a bit a block, on the stack where that suffices. */
static int twice(const int64_t *ids, uint64_t count, uint64_t blocks) {
    enum { SMALL = 4096 };
    uint64_t small[SMALL / 8], *seen = small;
    if (count <= 64) {
        for (uint64_t i = 1; i < count; i++)
            for (uint64_t k = 0; k < i; k++)
                if (ids[i] == ids[k]) return 1;
        return 0;
    }
    uint64_t words = (blocks + 63) / 64;
    if (words > SMALL / 8) seen = malloc(words * 8);
    if (!seen) return -1;
    memset(seen, 0, words * 8);
    int found = 0;
    for (uint64_t i = 0; i < count && !found; i++) {
        uint64_t bit = UINT64_C(1) << (ids[i] & 63);
        found = (seen[ids[i] >> 6] & bit) != 0;
        seen[ids[i] >> 6] |= bit;
    }
    if (seen != small) free(seen);
    return found;
}

kvp_job_status *kvp_job_new(kvp_submitter *s, int direction, uint64_t id, uint64_t pieces, const int64_t *gpu,
                            uint64_t gpu_count, const int64_t *cpu, uint64_t cpu_count, int *why, int64_t *bad) {
    *why = 0;
    *bad = out_of_range(gpu, gpu_count, s->config.gpu.blocks);
    if (*bad == INT64_MIN) *bad = out_of_range(cpu, cpu_count, s->config.cpu.blocks);
    if (*bad != INT64_MIN) {
        *why = KVP_BAD_ID;
        return NULL;
    }
    int repeated = direction == KVP_D2H ? twice(cpu, cpu_count, s->config.cpu.blocks)
                                        : twice(gpu, gpu_count, s->config.gpu.blocks);
    struct kvp_job *j = repeated ? NULL : job_alloc(s, direction, id, gpu_count + cpu_count);
    if (!j) {
        *why = repeated > 0 ? KVP_TWICE : KVP_NO_MEMORY;
        return NULL;
    }
    memcpy(j->data, gpu, gpu_count * sizeof *gpu);
    memcpy(j->data + gpu_count, cpu, cpu_count * sizeof *cpu);
    j->gpu = j->data;
    j->cpu = j->data + gpu_count;
    j->gpu_count = gpu_count;
    j->cpu_count = cpu_count;
    j->count = pieces;
    j->status.pieces = pieces * s->config.layers;
    j->status.bytes = j->status.pieces * s->config.piece_bytes;
    return &j->status;
}

kvp_job_status *kvp_job_request(kvp_submitter *s, int direction, uint64_t id, uint64_t pieces, const int64_t *gpu,
                                uint64_t gpu_count, const int64_t *cpu, uint64_t cpu_count, void *after, int marked,
                                int push, uint64_t requested_ns, int *why, int64_t *bad) {
    if ((*why = kvp_refusal(s))) return NULL;
    kvp_job_status *job = kvp_job_new(s, direction, id, pieces, gpu, gpu_count, cpu, cpu_count, why, bad);
    if (!job) return NULL;
    *why = marked ? kvp_job_after(s, job, after) : 0;
    if (!*why) {
        kvp_job_times(job, requested_ns, kvp_now_ns());
        if (push) *why = kvp_job_push(s, job);
        if (!*why) return job;
    }
    kvp_job_unused(s, job);
    kvp_job_release(job);
    return NULL;
}

kvp_job_status *kvp_job_new_raw(kvp_submitter *s, int direction, uint64_t id, uint64_t count, const uint64_t *dst,
                                const uint64_t *src, const uint64_t *sizes, uint64_t size, int *why) {
    *why = KVP_NO_MEMORY;
    struct kvp_job *j = job_alloc(s, direction, id, count * (sizes ? 3 : 2));
    if (!j) return NULL;
    uint64_t *data = (uint64_t *)j->data;
    memcpy(data, dst, count * 8);
    memcpy(data + count, src, count * 8);
    if (sizes) memcpy(data + 2 * count, sizes, count * 8);
    j->dst = data;
    j->src = data + count;
    j->sizes = sizes ? data + 2 * count : NULL;
    j->size = size;
    j->count = j->status.pieces = count;
    for (uint64_t i = 0; sizes && i < count; i++) j->status.bytes += sizes[i];
    if (!sizes) j->status.bytes = size * count;
    *why = 0;
    return &j->status;
}

void kvp_job_release(kvp_job_status *job) {
    struct kvp_job *j = (struct kvp_job *)job;
    if (atomic_fetch_sub_explicit(&j->holders, 1, memory_order_acq_rel) != 1) return;
    free(j->data);
    free(j);
}

/* First address after `from` over which nothing is merged; UINT64_MAX: none. */
static uint64_t next_bound(const kvp_side *side, uint64_t from) {
    uint32_t low = 0, high = side->bounds;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (side->bound[middle] <= from)
            low = middle + 1;
        else
            high = middle;
    }
    return low < side->bounds ? side->bound[low] : UINT64_MAX;
}

static inline kvp_copy piece_at(const struct kvp_job *j, const struct cursor *at) {
    const kvp_submitter_config *c = &j->owner->config;
    kvp_copy copy;
    if (j->dst) {
        copy = (kvp_copy){j->dst[at->piece], j->src[at->piece], j->sizes ? j->sizes[at->piece] : j->size};
    } else {
        uint32_t gf = c->gpu.factor, cf = c->cpu.factor;
        uint64_t p = at->piece;
        uint64_t g = gf == 1 ? (uint64_t)j->gpu[p] : (uint64_t)j->gpu[p / gf] * gf + p % gf;
        uint64_t h = cf == 1 ? (uint64_t)j->cpu[p] : (uint64_t)j->cpu[p / cf] * cf + p % cf;
        g = c->gpu.bases[at->layer] + g * c->piece_bytes;
        h = c->cpu.bases[at->layer] + h * c->piece_bytes;
        copy = j->direction == STORE ? (kvp_copy){h, g, c->piece_bytes} : (kvp_copy){g, h, c->piece_bytes};
    }
    copy.dst += at->offset;
    copy.src += at->offset;
    copy.bytes -= at->offset;
    return copy;
}

bool kvp_job_all(const struct kvp_job *j, const struct cursor *at) {
    return j->dst ? at->piece >= j->count : at->layer >= j->owner->config.layers;
}

/* Writes the job's next copies, at most `max` of them and until they come to `budget` bytes, none larger than
 * `largest`; moves the cursor. `bytes` and `pieces` are added to: a piece counts when its last byte is in a copy. */
uint32_t kvp_job_copies(const struct kvp_job *j, struct cursor *at, kvp_copy *out, uint32_t max, uint64_t budget,
                        uint64_t largest, bool merge, uint64_t *bytes, uint64_t *pieces) {
    const kvp_submitter_config *c = &j->owner->config;
    uint32_t n = 0;
    uint64_t dst_bound = 0, src_bound = 0;
    bool bounded = c->gpu.bounds || c->cpu.bounds;
    while (!kvp_job_all(j, at)) {
        kvp_copy p = piece_at(j, at);
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
            if (bounded) {
                const kvp_side *to = j->direction == STORE ? &c->cpu : &c->gpu;
                const kvp_side *from = j->direction == STORE ? &c->gpu : &c->cpu;
                dst_bound = next_bound(to, p.dst);
                src_bound = next_bound(from, p.src);
            }
        }
        *bytes += p.bytes;
        if (cut) {
            at->offset += p.bytes;
            continue;
        }
        at->offset = 0;
        ++*pieces;
        if (++at->piece == j->count && !j->dst) at->piece = 0, at->layer++;
    }
    return n;
}

/* Whether the job writes a piece that a job from sequence `since` on wrote; notes what it writes. Jobs with addresses
 * always do: nobody knows what they write. */
bool kvp_job_conflicts(struct kvp_job *j, uint32_t *stamp, uint64_t since) {
    if (j->dst || !stamp) return true;
    const kvp_submitter_config *c = &j->owner->config;
    const int64_t *ids = j->direction == STORE ? j->cpu : j->gpu;
    uint64_t f = j->direction == STORE ? c->cpu.factor : c->gpu.factor;
    bool found = false;
    for (uint64_t p = 0; p < j->count; p++) {
        uint32_t *mark = &stamp[(uint64_t)ids[p / f] * f + p % f];
        found |= *mark >= (uint32_t)since;
        *mark = (uint32_t)j->sequence;
    }
    return found;
}
