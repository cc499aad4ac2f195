/* The submission loop: issues a transfer's copies and times every one. */
#define _GNU_SOURCE
#include "submitter.h"

#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PREEMPTED_NS 5000 /* losing the CPU and getting it back takes longer than this */
#define EVENT_FACTOR 4    /* recording an event may cost more than a copy; blocked_ns is a copy's */

static uint32_t forks = 1; /* getpid() would be a system call, which costs up to a microsecond in a sandbox */

static void forked_child(void) { forks++; }

__attribute__((constructor)) static void count_forks(void) { pthread_atfork(NULL, NULL, forked_child); }

uint32_t kvp_forks(void) { return __atomic_load_n(&forks, __ATOMIC_RELAXED); }

uint32_t kvp_thread_id(void) {
    static __thread uint32_t tid __attribute__((tls_model("initial-exec")));
    static __thread uint32_t of __attribute__((tls_model("initial-exec")));
    /* a forked child keeps the thread-local of its parent */
    uint32_t now = kvp_forks();
    if (of != now) of = now, tid = (uint32_t)syscall(SYS_gettid);
    return tid;
}

static uint64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* How often this thread lost the CPU, and how often it gave it up to wait. */
struct switches {
    long taken, given;
};

static struct switches switches_now(void) {
    struct rusage usage;
    if (kvp_clock_is_given() || getrusage(RUSAGE_THREAD, &usage)) return (struct switches){0, 0};
    return (struct switches){usage.ru_nivcsw, usage.ru_nvcsw};
}

/* No clock, no record: the loop that everything else is measured against. */
static int submit_bare(const kvp_submit_options *o, size_t n, const uint64_t *dst, const uint64_t *src,
                       const uint64_t *sizes, uint64_t size, kvp_submit_result *r) {
    int result = 0;
    size_t i = 0;
    for (; i < n; i++) {
        uint64_t bytes = sizes ? sizes[i] : size;
        result = o->copy((void *)dst[i], (const void *)src[i], bytes, o->kind, o->stream);
        if (__builtin_expect(result, 0)) break;
        r->bytes += bytes;
    }
    r->submitted = i;
    return r->result = result;
}

/* A call that took too long; where it was long enough to have lost the CPU, a system call more does not matter. */
static void note_blocked(kvp_submit_result *r, size_t index, uint64_t start, uint64_t took, struct switches *before) {
    if (took >= PREEMPTED_NS) {
        struct switches now = switches_now();
        /* A call that waited in the kernel, and was then made to wait for a CPU too, was blocked all the same. */
        if (now.taken != before->taken && now.given == before->given) {
            r->preempted++;
            r->preempted_ns += took;
        }
        *before = now;
    }
    if (!r->blocked) {
        r->first_blocked = index;
        r->first_blocked_ns = start;
    }
    r->blocked++;
    r->blocked_sum_ns += took;
    if (took > r->max_ns) r->max_ns = took, r->max_index = index;
}

int kvp_submit(const kvp_submit_options *o, size_t n, const uint64_t *dst, const uint64_t *src, const uint64_t *sizes,
               uint64_t size, kvp_submit_result *r) {
    memset(r, 0, sizeof *r);
    r->first_blocked = UINT64_MAX;
    if (o->detail == KVP_OFF) return submit_bare(o, n, dst, src, sizes, size, r);

    kvp_record record = {.stream = (uint64_t)(uintptr_t)o->stream,
                         .tid = kvp_thread_id(),
                         .transfer = o->transfer,
                         .count = 1,
                         .call = KVP_CALL_cudaMemcpyAsync,
                         .direction = o->direction};
    int keep = o->detail >= KVP_COPIES;
    int ranges = keep && o->range_push != NULL;
    uint32_t until_event = o->events_max ? o->every : 0;
    uint64_t cpu_before = cpu_ns();
    struct switches switches = switches_now();
    uint64_t now = kvp_now_ns();
    r->start_ns = now;
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes = sizes ? sizes[i] : size;
        if (__builtin_expect(ranges, 0)) {
            o->range_push(bytes, o->direction & 15, record.stream, o->transfer);
            now = kvp_now_ns();
        }
        int result = o->copy((void *)dst[i], (const void *)src[i], bytes, o->kind, o->stream);
        uint64_t end = kvp_now_ns(), took = end - now;
        record.start_ns = now;
        record.dur_ns = took;
        record.src = src[i];
        record.dst = dst[i];
        record.bytes = bytes;
        record.result = (uint16_t)result;
        kvp_ring_write(&record, keep);
        if (__builtin_expect(ranges, 0)) o->range_pop();
        now = end;
        if (__builtin_expect(result, 0)) {
            r->result = result;
            break;
        }
        r->submitted++;
        r->bytes += bytes;
        if (__builtin_expect(took < o->blocked_ns, 1)) {
            r->fast++;
            r->fast_ns += took;
        } else {
            note_blocked(r, i, record.start_ns, took, &switches);
            now = kvp_now_ns();
        }
        if (took > r->max_ns) r->max_ns = took, r->max_index = i;
        if (__builtin_expect(until_event && !--until_event, 0)) {
            if (r->events < o->events_max) {
                now = kvp_now_ns();
                r->result = o->event_record(o->events[r->events], o->stream);
                if (r->result) break;
                r->events++;
                /* an event takes a place too, and waits for one */
                took = kvp_now_ns() - now;
                if (__builtin_expect(took >= EVENT_FACTOR * o->blocked_ns, 0)) note_blocked(r, i, now, took, &switches);
            }
            until_event = o->every;
            now = kvp_now_ns();
        }
        if (r->blocked && ((o->stop_after && r->blocked >= o->stop_after) ||
                           (o->stop_after_ns && r->blocked_sum_ns >= o->stop_after_ns)))
            break;
    }
    r->end_ns = now;
    if (r->blocked) r->cpu_ns = cpu_ns() - cpu_before;
    return r->result;
}

typedef cudaError_t (*batch_12)(void **, void **, size_t *, size_t, kvp_memcpy_attributes *, size_t *, size_t, size_t *,
                                cudaStream_t);
typedef cudaError_t (*batch_13)(const void **, const void **, const size_t *, size_t, kvp_memcpy_attributes *, size_t *,
                                size_t, cudaStream_t);

int kvp_submit_batch(const kvp_submit_options *o, void *batch_fn, int fn_has_fail_index, size_t n, const uint64_t *dst,
                     const uint64_t *src, const uint64_t *sizes, uint64_t size, kvp_submit_result *r) {
    memset(r, 0, sizeof *r);
    r->first_blocked = UINT64_MAX;
    if (!n) return 0;
    enum { CHUNK = 4096 };
    size_t same[CHUNK];
    /* A cap on descriptors a call: drivers were seen to crash or hang past 50,000 (vLLM issue 49276). */
    r->start_ns = kvp_now_ns();
    for (size_t at = 0; at < n && !r->result; at += CHUNK) {
        size_t count = n - at < CHUNK ? n - at : CHUNK, fail = SIZE_MAX, zero = 0;
        uint64_t bytes = 0;
        const size_t *each = (const size_t *)(sizes ? sizes + at : NULL);
        if (!each) {
            for (size_t i = 0; i < count; i++) same[i] = size;
            each = same;
            bytes = size * count;
        } else {
            for (size_t i = 0; i < count; i++) bytes += each[i];
        }
        /* srcAccessOrderStream: the source is read in stream order; never earlier, so a live block is safe. */
        kvp_memcpy_attributes attributes = {.srcAccessOrder = 1};
        uint64_t begin = kvp_now_ns();
        int result = fn_has_fail_index ? ((batch_12)batch_fn)((void **)(dst + at), (void **)(src + at), (size_t *)each,
                                                              count, &attributes, &zero, 1, &fail, o->stream)
                                       : ((batch_13)batch_fn)((const void **)(dst + at), (const void **)(src + at),
                                                              each, count, &attributes, &zero, 1, o->stream);
        uint64_t took = kvp_now_ns() - begin;
        kvp_record record = {.start_ns = begin,
                             .dur_ns = took,
                             .stream = (uint64_t)(uintptr_t)o->stream,
                             .src = src[at],
                             .dst = dst[at],
                             .bytes = bytes,
                             .tid = kvp_thread_id(),
                             .transfer = o->transfer,
                             .count = (uint32_t)count,
                             .result = (uint16_t)result,
                             .call = KVP_CALL_cudaMemcpyBatchAsync,
                             .direction = o->direction};
        if (o->detail != KVP_OFF) kvp_ring_write(&record, o->detail >= KVP_COPIES);
        r->result = result;
        if (result) break;
        r->submitted += count;
        r->bytes += bytes;
        if (took > r->max_ns) r->max_ns = took, r->max_index = at;
    }
    r->end_ns = kvp_now_ns();
    return r->result;
}
