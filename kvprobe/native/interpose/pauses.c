/* How much CPU a thread and its process used while the thread made no CUDA call for a millisecond and more.
 *
 * Whether somebody works in such a pause or sleeps is in no call. The kernel counts it (CLOCK_THREAD_CPUTIME_ID,
 * CLOCK_PROCESS_CPUTIME_ID: some hundred ns each, so they are read only where the pause ends, and behind a call that
 * took KVP_LONG_CALL_NS). What was used since the reading before holds more than the pause: told is how much time. How
 * often the thread gave up its CPU is read with them: one that never did has not slept, however little it got. What the
 * helper that reads marks uses is no work of the program's: it tells that itself, at each of its rounds. */
#define _GNU_SOURCE
#include "interpose.h"

#include <sys/resource.h>
#include <time.h>

struct used {
    uint64_t thread_ns, process_ns, helper_ns, gave_up;
};

static __thread struct {
    uint64_t at_ns;
    struct used used;
    uint32_t epoch; /* of the ring: a forked child's counts begin anew */
} before __attribute__((tls_model("initial-exec")));

static atomic_int stopped;
static _Atomic uint64_t helper_ns;

void kvp_pauses_go(int on) { atomic_store(&stopped, !on); }

static uint64_t ns_of(clockid_t clock) {
    struct timespec t;
    if (clock_gettime(clock, &t)) return 0;
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void kvp_pauses_without_me(void) {
    static uint64_t told; /* by the helper; in a child another one begins anew */
    if (atomic_load_explicit(&stopped, memory_order_relaxed)) return;
    uint64_t mine = ns_of(CLOCK_THREAD_CPUTIME_ID);
    atomic_fetch_add(&helper_ns, mine >= told ? mine - told : mine);
    told = mine;
}

/* 0: it is not to be told. */
static int read_all(struct used *used) {
    struct rusage usage;
    if (atomic_load_explicit(&stopped, memory_order_relaxed) || kvp_watch.detail == DETAIL_TOTALS ||
        kvp_clock_is_given() || getrusage(RUSAGE_THREAD, &usage))
        return 0;
    used->thread_ns = ns_of(CLOCK_THREAD_CPUTIME_ID);
    used->process_ns = ns_of(CLOCK_PROCESS_CPUTIME_ID);
    used->helper_ns = atomic_load(&helper_ns);
    used->gave_up = (uint64_t)usage.ru_nvcsw;
    return 1;
}

static void remember(uint64_t at_ns, const struct used *used) {
    before.at_ns = at_ns;
    before.used = *used;
    before.epoch = kvp_thread.epoch;
}

void kvp_pause_may_begin(uint64_t now) {
    struct used used;
    if (before.epoch == kvp_thread.epoch && now - before.at_ns < KVP_LONG_CALL_NS) return;
    if (read_all(&used)) remember(now, &used);
}

void kvp_pause_ends(uint64_t now, uint64_t lasted_ns) {
    struct used used;
    const struct used *was = &before.used;
    uint64_t begin = now - lasted_ns;
    if (!read_all(&used)) return;
    if (before.epoch == kvp_thread.epoch && before.at_ns && used.thread_ns >= was->thread_ns &&
        used.process_ns >= was->process_ns && lasted_ns < now) {
        uint64_t process_ns = used.process_ns - was->process_ns, helpers = used.helper_ns - was->helper_ns;
        kvp_record note = {.call = KVP_CALL_pause,
                           .start_ns = begin,
                           .dur_ns = lasted_ns,
                           .src = used.thread_ns - was->thread_ns,
                           .dst = process_ns > helpers ? process_ns - helpers : 0,
                           .transfer = (uint32_t)(used.gave_up - was->gave_up),
                           .bytes = begin > before.at_ns ? begin - before.at_ns : 0,
                           .count = 1};
        kvp_ring_note(&note);
    }
    remember(now, &used);
}
