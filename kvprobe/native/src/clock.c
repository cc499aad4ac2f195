/* The clock: nanoseconds of CLOCK_MONOTONIC from the CPU's invariant counter.
 *
 * Each thread keeps a base pair (ticks, ns) and renews it from clock_gettime every 2 ms, so the result strays from
 * CLOCK_MONOTONIC by the rate's error over 2 ms: 0.6 us in the first milliseconds of a process (the rate is measured
 * over 200 us when the library is loaded; some us where it was interrupted meanwhile), a few ns once it has been
 * measured over a second. */
#include "thread.h"

#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define RENEW_NS 2000000.0

static uint64_t first_ticks, first_ns; /* the pair taken at load; 0 = no usable counter */
static uint64_t first_scale;
static uint64_t renew_ticks;
static uint64_t (*other_clock)(void);

__thread struct kvp_thread kvp_thread;
struct kvp_process kvp_process;

static uint64_t wall_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The pair (ticks, ns) read closest together out of a few tries: a try that was descheduled is dropped. */
static void pair(int tries, uint64_t *t, uint64_t *n) {
    uint64_t best = UINT64_MAX;
    *t = *n = 0;
    while (tries--) {
        uint64_t a = kvp_ticks(), w = wall_ns(), b = kvp_ticks();
        if (b - a < best) best = b - a, *t = a + (b - a) / 2, *n = w;
    }
}

#if defined(__x86_64__)
/* Virtual machines often hide that bit (a guest that sees it cannot be moved); the kernel's own choice tells, too. */
static int kernel_trusts_tsc(void) {
    char name[8] = {0};
    int fd = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, name, sizeof name - 1);
    close(fd);
    return got >= 3 && !strncmp(name, "tsc", 3) && (got == 3 || name[3] == '\n');
}
#endif

static int invariant(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return (__get_cpuid(0x80000007, &a, &b, &c, &d) && ((d >> 8) & 1)) || kernel_trusts_tsc();
#elif defined(__aarch64__)
    return 1; /* the generic timer runs at a constant rate by architecture */
#else
    return 0;
#endif
}

static uint64_t scale_between(uint64_t t0, uint64_t n0, uint64_t t1, uint64_t n1) {
    return (uint64_t)((double)(n1 - n0) / (double)(t1 - t0) * 4294967296.0);
}

__attribute__((constructor)) static void measure(void) {
    if (!invariant()) return;
    uint64_t t0, n0, t1, n1;
    pair(16, &t0, &n0);
    do pair(4, &t1, &n1);
    while (n1 - n0 < 200000);
    first_scale = scale_between(t0, n0, t1, n1);
    kvp_process.renew_ticks = renew_ticks = (uint64_t)(RENEW_NS * (double)(t1 - t0) / (double)(n1 - n0));
    first_ns = n0;
    first_ticks = t0;
}

uint64_t kvp_renew_clock(void) {
    struct kvp_thread *base = &kvp_thread;
    if (other_clock) return other_clock();
    if (!first_ticks) return wall_ns();
    uint64_t t, n;
    pair(3, &t, &n);
    uint64_t scale = n - first_ns > 10000000 ? scale_between(first_ticks, first_ns, t, n) : first_scale;
    /* never step back: a thread's clock is monotonic, so a duration cannot come out negative. What ran ahead runs
     * slower until the next renewal instead. */
    if (base->ticks) {
        uint64_t was = base->ns + (uint64_t)(((unsigned __int128)(t - base->ticks) * base->scale) >> 32);
        if (was > n && was - n < 1000000) {
            double ahead = (double)(was - n) / RENEW_NS;
            scale -= (uint64_t)((double)scale * (ahead < 0.5 ? ahead : 0.5));
            n = was;
        }
    }
    base->scale = scale;
    base->ns = n;
    base->ticks = t;
    return n;
}

void kvp_set_clock(uint64_t (*now)(void)) {
    other_clock = now;
    kvp_process.renew_ticks = now ? 0 : renew_ticks; /* 0: every reading asks */
}

int kvp_clock_is_given(void) { return other_clock != NULL; }

uint64_t kvp_now_ns(void) { return __builtin_expect(other_clock != NULL, 0) ? other_clock() : kvp_clock(); }

const char *kvp_clock_name(void) {
    if (!first_ticks) return "clock_gettime";
#if defined(__aarch64__)
    return "cntvct";
#else
    return "tsc";
#endif
}
