/* Measures the launch queues of a Kineto trace as recordings/occupancy.py does, in a fraction of the time.
 *
 * The scanner's rows of calls and executions are kept as columns; at the end calls are joined with what they executed
 * and each stream's depth at every call, its baseline and its plateau are measured. What the numbers mean is concluded
 * in launchqueue/judge.py. Whatever is out of the ordinary makes this answer KVT_UNFIT: the whole reader takes
 * over. The text is not trusted: times and ids are bounded where they are taken, so that no sum below can overflow.
 */
#include "kineto.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KVT_UNFIT = 5 };
enum { ROLES = 5, CALL = 1, EXECUTION = 2, COPY = 3, LABEL = 4 }; /* of a category */
enum { SUBMITS = 1, GRAPH = 2, PAGEABLE = 3 };                    /* meaning of a word: two of calls, one of copies */
enum { ROWS = 512, MOST_NAMELESS = 64, MOST_CALLS = INT32_MAX / 2 };
static const uint32_t NONE = UINT32_MAX;
static const int64_t NEVER = INT64_MAX, LATEST_NS = (int64_t)1 << 62, LONGEST_NS = (int64_t)1 << 58;

/* As in launchqueue/constants.py (FEW: LEAST_SEEN); the last two as in recordings/occupancy.py. */
enum { ALIGNED_NS = 20000, LEAST_DEPTH = 16, LEAST_BAND = 4, FEW = 20, MOST_PICKED = 5000, LEAST_REACH_NS = 200000 };

typedef struct {
    int64_t start, dur;
    uint32_t id, thread, word;
    uint8_t code;
} call;

typedef struct {
    int64_t start, end;
    uint32_t id, stream, word; /* word: of copies only */
    uint8_t code;
} execution;

/* A name in a role: of a call (with its callback id where the name is INVALID), of a copy, of a label. */
typedef struct {
    uint32_t name;
    int32_t cbid;
    uint8_t role;
} word;

/* Numbers for keys: 0 for the first one met, and so on. */
typedef struct {
    int64_t *keys;
    uint32_t *slots; /* number + 1 */
    uint32_t count, mask, last;
} numbering;

typedef struct {
    uint32_t row; /* among the trace's streams by device and handle */
    int32_t device, handle;
    uint32_t calls, before, after, graphs;
    int32_t deepest, shallowest, ceiling;
    uint32_t slow, at_pin;
    int64_t lost_ns;
    double aligned, chance, drained, in_graphs;
} kvt_queue; /* 88 bytes */

typedef struct {
    kvt_scan_state *scan;
    uint8_t roles[256];
    kvt_row rows[ROWS];
    call *calls;
    execution *executions;
    word *words;
    uint32_t *word_of; /* by name and role: word + 1, NONE for a name that tells nothing without a callback id */
    size_t call_count, call_room, execution_count, execution_room, word_count, word_room, names;
    uint32_t nameless;
    numbering threads, streams;
    kvt_queue *queues;
    uint32_t queue_count;
} kvt_queues;

/* Space for one more. Nonzero: no memory. */
static int reserve(void **items, size_t *room, size_t count, size_t bytes) {
    if (count < *room) return 0;
    size_t more = *room ? *room * 2 : 1024;
    if (more > SIZE_MAX / bytes) return -1;
    void *grown = realloc(*items, more * bytes);
    if (!grown) return -1;
    *items = grown;
    *room = more;
    return 0;
}

#define RESERVE(items, room, count) reserve((void **)&(items), &(room), (count), sizeof *(items))

static void *array(size_t count, size_t bytes) {
    return count < SIZE_MAX / bytes ? malloc((count ? count : 1) * bytes) : NULL;
}

#define ARRAY(type, count) ((type *)array((count), sizeof(type)))

static uint32_t slot_of(const numbering *n, int64_t key) {
    uint64_t h = (uint64_t)key * 0x9E3779B97F4A7C15ull;
    uint32_t at = (uint32_t)(h >> 32) & n->mask;
    while (n->slots[at] && n->keys[n->slots[at] - 1] != key) at = (at + 1) & n->mask;
    return at;
}

/* The key's number; NONE without memory. */
static uint32_t number_of(numbering *n, int64_t key) {
    if (n->count && n->keys[n->last] == key) return n->last;
    if (n->count >= MOST_CALLS) return NONE;
    if (!n->slots || n->count * 2 > n->mask) {
        uint32_t size = n->slots ? (n->mask + 1) * 2 : 64;
        uint32_t *slots = calloc(size, sizeof *slots);
        int64_t *keys = realloc(n->keys, size / 2 * sizeof *keys + sizeof *keys);
        if (keys) n->keys = keys;
        if (!slots || !keys) {
            free(slots);
            return NONE;
        }
        free(n->slots);
        n->slots = slots;
        n->mask = size - 1;
        for (uint32_t i = 0; i < n->count; i++) n->slots[slot_of(n, n->keys[i])] = i + 1;
    }
    uint32_t at = slot_of(n, key);
    if (!n->slots[at]) {
        n->keys[n->count] = key;
        n->slots[at] = ++n->count;
    }
    return n->last = n->slots[at] - 1;
}

/* ---- what the scanner found ------------------------------------------------------------------------------------ */

static int add_word(kvt_queues *q, uint32_t name, int32_t cbid, uint8_t role, uint32_t *out) {
    if (RESERVE(q->words, q->word_room, q->word_count)) return KVT_MEMORY;
    *out = (uint32_t)q->word_count;
    q->words[q->word_count++] = (word){name, cbid, role};
    return KVT_MORE;
}

static int word_for(kvt_queues *q, const kvt_row *row, uint8_t role, uint32_t *out) {
    size_t name = (uint32_t)row->name;
    if (name >= q->names) {
        size_t names = q->names ? q->names * 2 : 1024;
        while (names <= name) names *= 2;
        uint32_t *grown = realloc(q->word_of, names * ROLES * sizeof *grown);
        if (!grown) return KVT_MEMORY;
        memset(grown + q->names * ROLES, 0, (names - q->names) * ROLES * sizeof *grown);
        q->word_of = grown;
        q->names = names;
    }
    uint32_t *known = &q->word_of[name * ROLES + role];
    if (*known && *known != NONE) {
        *out = *known - 1;
        return KVT_MORE;
    }
    uint32_t length = 0;
    const char *text = kvt_name(q->scan, (uint32_t)row->name, &length);
    if (role != CALL || length < 7 || memcmp(text, "INVALID", 7)) {
        int state = add_word(q, (uint32_t)row->name, -1, role, out);
        if (!state) *known = *out + 1;
        return state;
    }
    if (*known == NONE)
        for (size_t i = 0; i < q->word_count; i++)
            if (q->words[i].role == CALL && q->words[i].name == name && q->words[i].cbid == row->cbid) {
                *out = (uint32_t)i;
                return KVT_MORE;
            }
    if (q->nameless++ >= MOST_NAMELESS) return KVT_UNFIT;
    *known = NONE;
    return add_word(q, (uint32_t)row->name, row->cbid, role, out);
}

static int take(kvt_queues *q, const kvt_row *row) {
    uint8_t role = q->roles[row->category];
    if (!role) return KVT_MORE;
    uint32_t spoken = NONE;
    int state;
    if (role != EXECUTION && (state = word_for(q, row, role, &spoken))) return state;
    if (role == LABEL) return KVT_MORE;
    if (row->start_ns < 0 || row->start_ns > LATEST_NS || row->dur_ns < 0 || row->dur_ns > LONGEST_NS ||
        row->correlation >= (int64_t)NONE)
        return KVT_UNFIT;
    uint32_t id = row->correlation < 0 ? NONE : (uint32_t)row->correlation;
    if (role == CALL) {
        uint32_t thread = number_of(&q->threads, row->tid);
        if (thread == NONE || RESERVE(q->calls, q->call_room, q->call_count)) return KVT_MEMORY;
        q->calls[q->call_count++] = (call){row->start_ns, row->dur_ns, id, thread, spoken, row->category};
        return q->call_count > MOST_CALLS ? KVT_UNFIT : KVT_MORE;
    }
    uint32_t stream = NONE;
    if (row->stream >= 0) {
        /* Ascending keys are ascending devices, and handles of each. */
        stream = number_of(&q->streams, (int64_t)row->device * ((int64_t)1 << 32) + row->stream);
        if (stream == NONE) return KVT_MEMORY;
    }
    if (RESERVE(q->executions, q->execution_room, q->execution_count)) return KVT_MEMORY;
    q->executions[q->execution_count++] =
        (execution){row->start_ns, row->start_ns + row->dur_ns, id, stream, spoken, row->category};
    return q->execution_count > MOST_CALLS ? KVT_UNFIT : KVT_MORE;
}

/* ---- order ----------------------------------------------------------------------------------------------------- */

/* Those of one time are in the order that the whole reader files them in. */
static int call_before(const call *calls, uint32_t a, uint32_t b) {
    if (calls[a].start != calls[b].start) return calls[a].start < calls[b].start;
    if (calls[a].code != calls[b].code) return calls[a].code < calls[b].code;
    return a < b;
}

static int execution_before(const execution *executions, uint32_t a, uint32_t b) {
    if (executions[a].start != executions[b].start) return executions[a].start < executions[b].start;
    if (executions[a].code != executions[b].code) return executions[a].code < executions[b].code;
    return a < b;
}

/* Indexes of the calls in order of time, by merging the runs that they stand in; NULL without memory. */
static uint32_t *in_time(const call *calls, uint32_t count) {
    uint32_t *order = ARRAY(uint32_t, count), *spare = ARRAY(uint32_t, count),
             *cuts = ARRAY(uint32_t, (size_t)count + 2);
    uint32_t runs = 0;
    if (!order || !spare || !cuts) {
        free(order);
        order = NULL;
        goto done;
    }
    for (uint32_t i = 0; i < count; i++) {
        order[i] = i;
        if (!i || call_before(calls, i, i - 1)) cuts[runs++] = i;
    }
    cuts[runs] = count;
    while (runs > 1) {
        uint32_t merged = 0;
        for (uint32_t run = 0; run < runs; run += 2) {
            uint32_t a = cuts[run], middle = cuts[run + 1], b = middle, end = run + 1 < runs ? cuts[run + 2] : middle;
            cuts[merged++] = a;
            for (uint32_t at = a; at < end; at++)
                spare[at] =
                    b >= end || (a < middle && call_before(calls, order[a], order[b])) ? order[a++] : order[b++];
        }
        runs = merged;
        cuts[runs] = count;
        uint32_t *other = order;
        order = spare;
        spare = other;
    }
done:
    free(spare);
    free(cuts);
    return order;
}

static int by_value(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void sort_times(int64_t *times, size_t count) {
    for (size_t i = 1; i < count; i++)
        if (times[i] < times[i - 1]) {
            qsort(times, count, sizeof *times, by_value);
            return;
        }
}

/* How many of the ascending times are below `at`, or not above it. */
static size_t below(const int64_t *times, size_t count, int64_t at, int or_equal) {
    size_t low = 0;
    while (count) {
        size_t half = count / 2;
        int64_t t = times[low + half];
        if (t < at || (or_equal && t == at)) {
            low += half + 1;
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return low;
}

/* The value that would stand at this place if these, none negative, were sorted. */
static int64_t value_at(const int64_t *values, size_t count, size_t place) {
    uint64_t all = 0, prefix = 0, mask = 0;
    for (size_t i = 0; i < count; i++) all |= (uint64_t)values[i];
    int shift = 56;
    while (shift && !(all >> shift)) shift -= 8;
    for (; shift >= 0; shift -= 8) {
        size_t found[256] = {0};
        for (size_t i = 0; i < count; i++)
            if (((uint64_t)values[i] & mask) == prefix) found[(uint64_t)values[i] >> shift & 255]++;
        unsigned byte = 0;
        while (byte < 255 && place >= found[byte]) place -= found[byte++];
        prefix |= (uint64_t)byte << shift;
        mask |= (uint64_t)255 << shift;
    }
    return (int64_t)prefix;
}

/* The value below which this share of the values lies. */
static double quantile(const int64_t *values, size_t count, double share) {
    return (double)value_at(values, count, (size_t)nearbyint(share * (double)(count - 1)));
}

/* Positions of the keys below `groups`, group by group in their order; `begin` has groups + 1 entries. */
static void group_by(const uint32_t *keys, const uint32_t *order, size_t count, size_t groups, uint32_t *begin,
                     uint32_t *members) {
    memset(begin, 0, (groups + 1) * sizeof *begin);
    for (size_t i = 0; i < count; i++)
        if (keys[i] < groups) begin[keys[i] + 1]++;
    for (size_t g = 0; g < groups; g++) begin[g + 1] += begin[g];
    for (size_t i = 0; i < count; i++) {
        uint32_t at = order ? order[i] : (uint32_t)i;
        if (keys[at] < groups) members[begin[keys[at]]++] = at;
    }
    for (size_t g = groups; g > 0; g--) begin[g] = begin[g - 1];
    begin[0] = 0;
}

/* ---- calls and what they executed ------------------------------------------------------------------------------ */

typedef struct {
    int64_t start, end;
    uint32_t id, stream, index;
    uint8_t code;
} orphan; /* executions of one id that no call of the trace submitted */

/* The submissions, in the order of the trace, with what is known of each. */
typedef struct {
    const uint8_t *meanings;
    const uint32_t *groups; /* of words: the same for spellings of one call */
    uint32_t words;
    uint32_t count;
    uint32_t *order; /* in time */
    int64_t *began, *done;
    uint32_t *first, *stream;
    uint8_t *pageable;
    orphan *orphans;
    uint32_t orphan_count;
} joined;

static int by_id(const void *a, const void *b) {
    const orphan *x = a, *y = b;
    if (x->id != y->id) return x->id < y->id ? -1 : 1;
    if (x->start != y->start) return x->start < y->start ? -1 : 1;
    if (x->code != y->code) return x->code < y->code ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

/* One orphan of those with the same id: where the first one ran, from its start to the last end. */
static void unite(joined *j) {
    qsort(j->orphans, j->orphan_count, sizeof *j->orphans, by_id);
    uint32_t count = 0;
    for (uint32_t i = 0; i < j->orphan_count; i++) {
        orphan *one = &j->orphans[i], *last = count ? &j->orphans[count - 1] : NULL;
        if (last && last->id == one->id && one->id != NONE) {
            if (one->end > last->end) last->end = one->end;
        } else {
            j->orphans[count++] = *one;
        }
    }
    j->orphan_count = count;
}

static int join(kvt_queues *q, joined *j) {
    uint32_t count = 0, low = NONE, high = 0;
    for (size_t i = 0; i < q->call_count; i++) {
        uint8_t meaning = j->meanings[q->calls[i].word];
        if (meaning != SUBMITS && meaning != GRAPH) continue;
        q->calls[count] = q->calls[i];
        uint32_t id = q->calls[count++].id;
        if (id == NONE) continue;
        if (id < low) low = id;
        if (id > high) high = id;
    }
    j->count = count;
    /* Ids count up in practice: a table of all of them. */
    size_t size = low <= high ? (size_t)(high - low) + 1 : 0;
    if (size > 4 * (q->call_count + q->execution_count) + 1000000) return KVT_UNFIT;
    uint32_t *owner = calloc(size + 1, sizeof *owner); /* call + 1 */
    j->order = in_time(q->calls, count);
    j->began = ARRAY(int64_t, count);
    j->done = ARRAY(int64_t, count);
    j->first = ARRAY(uint32_t, count);
    j->stream = ARRAY(uint32_t, count);
    j->pageable = ARRAY(uint8_t, count);
    if (!owner || !j->order || !j->began || !j->done || !j->first || !j->stream || !j->pageable) {
        free(owner);
        return KVT_MEMORY;
    }
    for (uint32_t i = 0; i < count; i++) {
        j->began[i] = j->done[i] = NEVER;
        j->first[i] = NONE;
        if (q->calls[i].id != NONE) owner[q->calls[i].id - low] = i + 1;
    }
    size_t orphan_room = 0;
    for (uint32_t i = 0; i < (uint32_t)q->execution_count; i++) {
        const execution *e = &q->executions[i];
        uint32_t mine = e->id != NONE && e->id >= low && e->id <= high ? owner[e->id - low] : 0;
        if (mine--) {
            if (j->first[mine] == NONE || execution_before(q->executions, i, j->first[mine])) j->first[mine] = i;
            if (e->start < j->began[mine]) j->began[mine] = e->start;
            if (j->done[mine] == NEVER || e->end > j->done[mine]) j->done[mine] = e->end;
            continue;
        }
        if (RESERVE(j->orphans, orphan_room, j->orphan_count)) {
            free(owner);
            return KVT_MEMORY;
        }
        j->orphans[j->orphan_count++] = (orphan){e->start, e->end, e->id, e->stream, i, e->code};
    }
    for (uint32_t i = 0; i < count; i++) { /* ids repeat: each has what one of them has */
        uint32_t one = q->calls[i].id != NONE ? owner[q->calls[i].id - low] - 1 : i;
        j->began[i] = j->began[one];
        j->done[i] = j->done[one];
        j->first[i] = j->first[one];
        const execution *first = j->first[i] != NONE ? &q->executions[j->first[i]] : NULL;
        j->stream[i] = first ? first->stream : NONE;
        j->pageable[i] = first && first->word != NONE && j->meanings[first->word] == PAGEABLE;
    }
    free(owner);
    if (j->orphan_count) unite(j);
    return KVT_MORE;
}

/* A submission that never executed in the trace goes where its thread last submitted, else where it next did. */
static int assume_streams(const kvt_queues *q, joined *j) {
    uint32_t *last = ARRAY(uint32_t, q->threads.count);
    if (!last) return KVT_MEMORY;
    for (int backward = 0; backward < 2; backward++) {
        for (uint32_t t = 0; t < q->threads.count; t++) last[t] = NONE;
        for (uint32_t i = 0; i < j->count; i++) {
            uint32_t at = j->order[backward ? j->count - 1 - i : i], thread = q->calls[at].thread;
            if (j->stream[at] == NONE)
                j->stream[at] = last[thread];
            else
                last[thread] = j->stream[at];
        }
    }
    free(last);
    return KVT_MORE;
}

/* ---- one queue ------------------------------------------------------------------------------------------------- */

enum { JUDGED = 1, SHALLOW = 2, SLOW = 4, GRAPHS = 8 };

/* What is needed of a queue's calls, in order of time, and space to work in. */
typedef struct {
    int64_t *start, *dur, *ends, *values;
    int32_t *depth;
    uint32_t *group, *begin, *members; /* names, numbered anew in each queue */
    uint32_t *local;                   /* by group of words: its number in this queue + 1 */
    uint8_t *flags;
    double *baseline;
    size_t count, end_count, groups;
} work;

static int near(const work *w, int64_t at) {
    if (!w->end_count) return 0;
    size_t right = below(w->ends, w->end_count, at, 0);
    return (right && at - w->ends[right - 1] <= ALIGNED_NS) ||
           (right < w->end_count && w->ends[right] - at <= ALIGNED_NS);
}

/* Depth at every call's entry. `began` and `done` are those of the whole trace, `members` this queue's calls. */
static void count_depth(work *w, const kvt_queues *q, const joined *j, const uint32_t *members, const orphan *orphans,
                        const uint32_t *early, size_t early_count, kvt_queue *out) {
    size_t count = w->count, last = 0;
    int64_t first_began = NEVER;
    w->end_count = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t at = members[i];
        const call *c = &q->calls[at];
        int graph = j->meanings[c->word] == GRAPH;
        w->start[i] = c->start;
        w->dur[i] = c->dur;
        w->flags[i] = (uint8_t)((!j->pageable[at] && !graph ? JUDGED : 0) | (graph ? GRAPHS : 0));
        out->graphs += (uint32_t)graph;
        if (j->began[at] == NEVER) continue;
        last = i + 1; /* what comes later without an execution is still outstanding at the end */
        if (j->began[at] < first_began) first_began = j->began[at];
        w->ends[w->end_count++] = j->done[at];
    }
    /* Streams run in order: what has no call was in flight at the beginning only if it ran before all that has one. */
    for (size_t i = 0; i < early_count; i++) {
        const orphan *one = &orphans[early[i]];
        if (one->start > first_began || one->end <= w->start[0]) continue;
        w->ends[w->end_count++] = one->end;
        out->before++;
    }
    sort_times(w->ends, w->end_count);
    int64_t submitted = out->before;
    size_t ended = 0;
    for (size_t i = 0; i < count; i++) {
        while (ended < w->end_count && w->ends[ended] <= w->start[i]) ended++;
        int64_t depth = submitted - (int64_t)ended;
        w->depth[i] = depth > 0 ? (int32_t)depth : 0;
        if (w->depth[i] > out->deepest) out->deepest = w->depth[i];
        int executed = j->began[members[i]] != NEVER;
        submitted += executed || i >= last;
        out->after += !executed && i >= last;
    }
}

/* Numbers the names of this queue's calls and gathers each one's calls. */
static void gather_names(work *w, const kvt_queues *q, const joined *j, const uint32_t *members) {
    w->groups = 0;
    for (size_t i = 0; i < w->count; i++) {
        uint32_t *local = &w->local[j->groups[q->calls[members[i]].word]];
        if (!*local) *local = (uint32_t)++w->groups;
        w->group[i] = *local - 1;
    }
    for (size_t i = 0; i < w->count; i++) w->local[j->groups[q->calls[members[i]].word]] = 0;
    group_by(w->group, NULL, w->count, w->groups, w->begin, w->members);
}

/* Marks the slow ones of one name's calls where that name costs more at the top than below; sets its baseline. */
static void find_slow(work *w, size_t group, int32_t top) {
    const uint32_t *mine = w->members + w->begin[group];
    size_t count = w->begin[group + 1] - w->begin[group], sampled = 0, least = count / 10 ? count / 10 : 1;
    for (size_t i = 0; i < count; i++)
        if (w->flags[mine[i]] & SHALLOW) w->values[sampled++] = w->dur[mine[i]];
    if (sampled < FEW) { /* full from the start: the cheapest calls stand for the shallow ones */
        int64_t *every = w->values + sampled;
        for (size_t i = 0; i < count; i++) every[i] = w->dur[mine[i]];
        int64_t most = value_at(every, count, least - 1);
        size_t cheap = 0;
        for (size_t i = 0; i < count; i++)
            if (every[i] < most) every[cheap++] = every[i];
        while (cheap < least) every[cheap++] = most;
        sampled += least;
    }
    double baseline = quantile(w->values, sampled, 0.5), limit = quantile(w->values, sampled, 0.95);
    w->baseline[group] = baseline;
    if (limit < 1.5 * baseline) limit = 1.5 * baseline;
    double at_top = 0, at_shallow = 0; /* what they cost above the limit; of a queue that is not deep some are both */
    size_t tops = 0, shallows = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t at = mine[i];
        double excess = (double)w->dur[at] > limit ? (double)w->dur[at] - limit : 0;
        if (w->flags[at] & JUDGED && w->depth[at] >= top) {
            at_top += excess;
            tops++;
        }
        if (w->flags[at] & SHALLOW) {
            at_shallow += excess;
            shallows++;
        }
    }
    if (!tops) return;
    double typical = shallows >= FEW ? at_shallow / (double)shallows : 0.1 * baseline;
    double enough = 5 * typical > 0.25 * baseline ? 5 * typical : 0.25 * baseline;
    if (!(at_top / (double)tops > enough)) return;
    for (size_t i = 0; i < count; i++) {
        uint32_t at = mine[i];
        if (w->flags[at] & JUDGED && w->depth[at] >= top && (double)w->dur[at] > limit) w->flags[at] |= SLOW;
    }
}

/* Share of instants around the returns of slow calls that lie near an operation's end; `slow` are their places. */
static double by_chance(const work *w, const uint32_t *slow, size_t count) {
    size_t picked = count < MOST_PICKED ? count : MOST_PICKED, hits = 0;
    for (size_t i = 0; i < picked; i++) {
        uint32_t at = slow[i * (count - 1) / (picked > 1 ? picked - 1 : 1)];
        int64_t reach = w->dur[at] > LEAST_REACH_NS ? w->dur[at] : LEAST_REACH_NS, end = w->start[at] + w->dur[at];
        for (int64_t step = 1; step <= 20; step++) {
            int64_t offset = reach * step / 20;
            hits += (size_t)near(w, end - offset) + (size_t)near(w, end + offset);
        }
    }
    return (double)hits / (double)(picked * 40);
}

/* What a verdict rests on, of the calls that were found slow. */
static void measure_slow(work *w, const joined *j, const uint32_t *members, kvt_queue *out) {
    uint32_t *slow = w->members; /* the names' calls are needed no longer */
    size_t count = 0;
    out->shallowest = out->deepest;
    for (size_t i = 0; i < w->count; i++) {
        if (!(w->flags[i] & SLOW)) continue;
        slow[count++] = (uint32_t)i;
        out->lost_ns += (int64_t)((double)w->dur[i] - w->baseline[w->group[i]]);
        if (w->depth[i] < out->shallowest) out->shallowest = w->depth[i];
        if (w->depth[i] > out->ceiling) out->ceiling = w->depth[i];
    }
    out->slow = (uint32_t)count;
    if (!count) return;
    size_t aligned = 0, drained = 0, in_graphs = 0;
    for (size_t i = 0; i < count; i++) {
        int64_t start = w->start[slow[i]], end = start + w->dur[slow[i]];
        aligned += (size_t)near(w, end);
        drained += below(w->ends, w->end_count, end, 1) > below(w->ends, w->end_count, start, 0);
    }
    for (size_t i = 0; i < w->count; i++) out->at_pin += w->flags[i] & JUDGED && w->depth[i] >= out->shallowest;
    out->chance = by_chance(w, slow, count);
    if (out->graphs) {
        size_t graphs = 0, launched = 0, ended = 0;
        for (size_t i = 0; i < w->count; i++)
            if (w->flags[i] & GRAPHS) w->values[graphs++] = j->done[members[i]];
        sort_times(w->values, graphs);
        for (size_t i = 0; i < w->count; i++) {
            while (ended < graphs && w->values[ended] <= w->start[i]) ended++;
            in_graphs += w->flags[i] & SLOW && launched > ended;
            launched += (w->flags[i] & GRAPHS) != 0;
        }
    }
    out->aligned = (double)aligned / (double)count;
    out->drained = (double)drained / (double)count;
    out->in_graphs = (double)in_graphs / (double)count;
}

static void measure_queue(work *w, const kvt_queues *q, const joined *j, const uint32_t *members, const uint32_t *early,
                          size_t early_count, kvt_queue *out) {
    count_depth(w, q, j, members, j->orphans, early, early_count, out);
    if (out->deepest < LEAST_DEPTH) return;
    for (size_t i = 0; i < w->count; i++)
        if (w->flags[i] & JUDGED && w->depth[i] < 0.9 * out->deepest) w->flags[i] |= SHALLOW;
    double band = nearbyint(0.015 * out->deepest);
    int32_t top = out->deepest - (band > LEAST_BAND ? (int32_t)band : LEAST_BAND);
    gather_names(w, q, j, members);
    for (size_t group = 0; group < w->groups; group++) find_slow(w, group, top);
    measure_slow(w, j, members, out);
}

typedef struct {
    int64_t key;
    uint32_t number;
} ranked;

static int by_key(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

static int measure_all(kvt_queues *q, joined *j) {
    size_t streams = q->streams.count, largest = 0, most_orphans = 0;
    ranked *ranks = ARRAY(ranked, streams);
    uint32_t *begin = ARRAY(uint32_t, streams + 1), *members = ARRAY(uint32_t, j->count);
    uint32_t *early_begin = ARRAY(uint32_t, streams + 1), *early = ARRAY(uint32_t, j->orphan_count);
    uint32_t *orphan_stream = ARRAY(uint32_t, j->orphan_count);
    work w = {0};
    int state = KVT_MEMORY;
    free(q->queues);
    q->queues = ARRAY(kvt_queue, streams);
    q->queue_count = 0;
    if (!ranks || !begin || !members || !early_begin || !early || !orphan_stream || !q->queues) goto done;
    for (uint32_t i = 0; i < j->orphan_count; i++) orphan_stream[i] = j->orphans[i].stream;
    group_by(j->stream, j->order, j->count, streams, begin, members);
    group_by(orphan_stream, NULL, j->orphan_count, streams, early_begin, early);
    for (size_t s = 0; s < streams; s++) {
        ranks[s] = (ranked){q->streams.keys[s], (uint32_t)s};
        size_t calls = begin[s + 1] - begin[s], orphans = early_begin[s + 1] - early_begin[s];
        if (calls > largest) largest = calls;
        if (orphans > most_orphans) most_orphans = orphans;
    }
    qsort(ranks, streams, sizeof *ranks, by_key);
    w.start = ARRAY(int64_t, largest);
    w.dur = ARRAY(int64_t, largest);
    w.ends = ARRAY(int64_t, largest + most_orphans);
    w.values = ARRAY(int64_t, largest + FEW);
    w.depth = ARRAY(int32_t, largest);
    w.group = ARRAY(uint32_t, largest);
    w.begin = ARRAY(uint32_t, (size_t)j->words + 1);
    w.members = ARRAY(uint32_t, largest);
    w.local = calloc((size_t)j->words + 1, sizeof *w.local);
    w.flags = ARRAY(uint8_t, largest);
    w.baseline = ARRAY(double, j->words);
    if (!w.start || !w.dur || !w.ends || !w.values || !w.depth || !w.group || !w.begin || !w.members || !w.local ||
        !w.flags || !w.baseline)
        goto done;
    for (size_t row = 0; row < streams; row++) {
        uint32_t s = ranks[row].number;
        w.count = begin[s + 1] - begin[s];
        if (!w.count) continue;
        kvt_queue *out = &q->queues[q->queue_count++];
        int64_t handle = ranks[row].key & INT32_MAX;
        *out = (kvt_queue){.row = (uint32_t)row,
                           .device = (int32_t)((ranks[row].key - handle) / ((int64_t)1 << 32)),
                           .handle = (int32_t)handle,
                           .calls = (uint32_t)w.count,
                           .shallowest = -1,
                           .ceiling = -1};
        measure_queue(&w, q, j, members + begin[s], early + early_begin[s], early_begin[s + 1] - early_begin[s], out);
    }
    state = KVT_MORE;
done:
    free(ranks);
    free(begin);
    free(members);
    free(early_begin);
    free(early);
    free(orphan_stream);
    free(w.start);
    free(w.dur);
    free(w.ends);
    free(w.values);
    free(w.depth);
    free(w.group);
    free(w.begin);
    free(w.members);
    free(w.local);
    free(w.flags);
    free(w.baseline);
    return state;
}

/* ---- for Python ------------------------------------------------------------------------------------------------ */

KVT_EXPORT size_t kvt_queue_bytes(void) { return sizeof(kvt_queue); }

KVT_EXPORT void kvt_queues_close(kvt_queues *q) {
    if (!q) return;
    kvt_close(q->scan);
    free(q->calls);
    free(q->executions);
    free(q->words);
    free(q->word_of);
    free(q->threads.keys);
    free(q->threads.slots);
    free(q->streams.keys);
    free(q->streams.slots);
    free(q->queues);
    free(q);
}

KVT_EXPORT kvt_queues *kvt_queues_open(void) {
    kvt_queues *q = calloc(1, sizeof *q);
    if (q && !(q->scan = kvt_open())) {
        free(q);
        return NULL;
    }
    return q;
}

/* Events of this category are calls, executions, copies or labels, by `role`. Nonzero: no memory or too many. */
KVT_EXPORT int kvt_queues_want(kvt_queues *q, const char *category, uint8_t code, uint8_t role) {
    if (!role || role >= ROLES || kvt_want(q->scan, category, code)) return -1;
    q->roles[code] = role;
    return 0;
}

/* Scans events from `text` on, as kvt_scan does, and keeps what is needed; also returns KVT_UNFIT. */
KVT_EXPORT int kvt_queues_scan(kvt_queues *q, const char *text, size_t length, size_t *consumed) {
    size_t written, used;
    int state;
    *consumed = 0;
    do {
        state = kvt_scan(q->scan, text + *consumed, length - *consumed, q->rows, ROWS, &written, &used);
        *consumed += used;
        for (size_t i = 0; i < written; i++) {
            int taken = take(q, &q->rows[i]);
            if (taken) return taken;
        }
    } while (state == KVT_FULL);
    return state;
}

KVT_EXPORT uint32_t kvt_queues_words(const kvt_queues *q) { return (uint32_t)q->word_count; }

/* The text of a word, its role, and the callback id of a call that is named INVALID (else -1). */
KVT_EXPORT const char *kvt_queues_word(const kvt_queues *q, uint32_t number, uint32_t *length, uint32_t *role,
                                       int32_t *cbid) {
    if (number >= q->word_count) return NULL;
    *role = q->words[number].role;
    *cbid = q->words[number].cbid;
    return kvt_name(q->scan, q->words[number].name, length);
}

/* Measures all queues; once, as it uses up what was scanned.
 *
 * meanings: of each word 0, SUBMITS, GRAPH or PAGEABLE. groups: of each word a number below `words`, the same for words
 * that spell one call. Returns KVT_MORE, KVT_UNFIT or KVT_MEMORY. */
KVT_EXPORT int kvt_queues_measure(kvt_queues *q, const uint8_t *meanings, const uint32_t *groups, uint32_t words) {
    if (words != q->word_count || !q->execution_count) return KVT_UNFIT;
    for (uint32_t i = 0; i < words; i++)
        if (groups[i] >= words) return KVT_UNFIT;
    joined j = {.meanings = meanings, .groups = groups, .words = words};
    int state = join(q, &j);
    free(q->executions);
    q->executions = NULL;
    q->execution_count = q->execution_room = 0;
    free(j.first);
    if (!state) state = assume_streams(q, &j);
    if (!state) state = measure_all(q, &j);
    free(j.order);
    free(j.began);
    free(j.done);
    free(j.stream);
    free(j.pageable);
    free(j.orphans);
    q->call_count = 0;
    return state;
}

KVT_EXPORT uint32_t kvt_queues_count(const kvt_queues *q) { return q->queue_count; }

/* The queues in order of device and handle. */
KVT_EXPORT const kvt_queue *kvt_queues_all(const kvt_queues *q) { return q->queues; }
