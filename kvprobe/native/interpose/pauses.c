/* How much CPU a thread and its process used while the thread made no CUDA call for a millisecond and more.
 *
 * Whether somebody works in such a pause or sleeps is in no call. The kernel counts it (CLOCK_THREAD_CPUTIME_ID,
 * CLOCK_PROCESS_CPUTIME_ID: some hundred ns each, so they are read only where the pause ends, and behind a call that
 * took KVP_LONG_CALL_NS). What was used since the reading before holds more than the pause: told is how much time. */
#define _GNU_SOURCE
#include "interpose.h"

#include <time.h>

static __thread struct {
    uint64_t at_ns, thread_ns, process_ns;
    uint32_t epoch; /* of the ring: a forked child's counts begin anew */
} before __attribute__((tls_model("initial-exec")));

static atomic_int stopped;

void kvp_pauses_go(int on) { atomic_store(&stopped, !on); }

static uint64_t ns_of(clockid_t clock) {
    struct timespec t;
    if (clock_gettime(clock, &t)) return 0;
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* 0: it is not to be told. */
static int read_both(uint64_t *thread_ns, uint64_t *process_ns) {
    if (atomic_load_explicit(&stopped, memory_order_relaxed) || kvp_watch.detail == DETAIL_TOTALS ||
        kvp_clock_is_given())
        return 0;
    *thread_ns = ns_of(CLOCK_THREAD_CPUTIME_ID);
    *process_ns = ns_of(CLOCK_PROCESS_CPUTIME_ID);
    return 1;
}

static void remember(uint64_t at_ns, uint64_t thread_ns, uint64_t process_ns) {
    before.at_ns = at_ns;
    before.thread_ns = thread_ns;
    before.process_ns = process_ns;
    before.epoch = kvp_thread.epoch;
}

void kvp_pause_may_begin(uint64_t now) {
    uint64_t thread_ns, process_ns;
    if (before.epoch == kvp_thread.epoch && now - before.at_ns < KVP_LONG_CALL_NS) return;
    if (read_both(&thread_ns, &process_ns)) remember(now, thread_ns, process_ns);
}

void kvp_pause_ends(uint64_t now, uint64_t lasted_ns) {
    uint64_t thread_ns, process_ns, begin = now - lasted_ns;
    if (!read_both(&thread_ns, &process_ns)) return;
    if (before.epoch == kvp_thread.epoch && before.at_ns && thread_ns >= before.thread_ns &&
        process_ns >= before.process_ns && lasted_ns < now) {
        kvp_record note = {.call = KVP_CALL_pause,
                           .start_ns = begin,
                           .dur_ns = lasted_ns,
                           .src = thread_ns - before.thread_ns,
                           .dst = process_ns - before.process_ns,
                           .bytes = begin > before.at_ns ? begin - before.at_ns : 0,
                           .count = 1};
        kvp_ring_note(&note);
    }
    remember(now, thread_ns, process_ns);
}
