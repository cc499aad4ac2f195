/* The wrapped calls: what is recorded of each, and the table of their symbols. */
#define _GNU_SOURCE
#include "cures.h"
#include "files.h"
#include "marks.h"
#include "prepare.h"
#include "recycle.h"
#include "ring_write.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <dirent.h>
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* Detail of one thread, at most: 8 MiB, taken as it is needed. A cause needs the calls that filled a queue, not only
 * those that it blocked, and an account needs all of its window. On a host's caches a copy is as cheap as with a fourth
 * of it (KVPROBE_RING_RECORDS=N python benchmarks/copy_cost.py). */
#define RECORDS 131072
#define SEVERAL_RECORDS 8192   /* the same where most are of several calls: half a million calls */
#define LEAST_BYTES (48 << 10) /* that a file takes, with a thread that makes a few calls */
#define SYMBOL_NOT_FOUND 302   /* cudaErrorSharedObjectSymbolNotFound, CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND */

struct watch kvp_watch = {.detail = DETAIL_COPIES, .generation = 1, .contents_from_ns = UINT64_MAX};
static char run_folder[3072];
static uint64_t max_bytes;

/* ---- this process's ring file -------------------------------------------------------------------------------- */

static uint64_t number_from(const char *name) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : 0;
}

static uint64_t folder_bytes(void) {
    uint64_t total = 0;
    DIR *folder = opendir(run_folder);
    if (!folder) return 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        struct stat s;
        if (!fstatat(dirfd(folder), entry->d_name, &s, 0)) total += (uint64_t)s.st_blocks * 512;
    }
    closedir(folder);
    return total;
}

/* Half of what is left for each process, and half of that for the detail of its first threads; those that find no space
 * are counted. 0: there is no space for another file. The observer packs those of short processes that have ended. */
static int limit(kvp_ring_options *options) {
    if (!options->ring_capacity) options->ring_capacity = kvp_watch.detail == DETAIL_TOTALS ? SEVERAL_RECORDS : RECORDS;
    if (!options->slow_capacity) options->slow_capacity = RECORDS / 8;
    if (!max_bytes) return 1;
    uint64_t used = folder_bytes(), budget = used < max_bytes ? (max_bytes - used) / 2 : 0;
    uint64_t records = options->ring_capacity;
    while (records > 16 && records * 80 * KVP_LARGE_SECTIONS > budget / 2) records /= 2;
    if (options->ring_capacity > records) options->ring_capacity = records;
    if (options->slow_capacity > records / 4) options->slow_capacity = records / 4;
    uint64_t large = 24576 + records * 80, sections = budget / large + 1;
    uint64_t small = 24576 + (records < KVP_SMALL_RECORDS ? records : KVP_SMALL_RECORDS) * 80;
    if (sections > KVP_LARGE_SECTIONS) sections = KVP_LARGE_SECTIONS + (budget - KVP_LARGE_SECTIONS * large) / small;
    options->sections_max = sections < 256 ? (uint32_t)sections : 256;
    return used + LEAST_BYTES <= max_bytes;
}

/* Yama lets only ancestors look into a process; the observer that takes its stacks is none. A child inherits nothing of
 * this. */
static void allow_observer(void) {
    uint64_t pid = number_from("KVPROBE_OBSERVER");
    if (pid) prctl(PR_SET_PTRACER, (unsigned long)pid, 0, 0, 0);
}

/* Says in the run folder that this process is not recorded, and why, by a name: that takes no descriptor. */
static void step_aside(int error) {
    char path[sizeof run_folder + 64];
    snprintf(path, sizeof path, "%s/not-recorded-%d-%d", run_folder, (int)getpid(), error);
    mkdir(path, 0700);
}

/* Calls that a signal handler makes while the ring is being opened, by number. */
static struct {
    volatile uint64_t calls, bytes;
} early[128];

static void count_early(const kvp_record *r) {
    __atomic_fetch_add(&early[r->call].bytes, r->bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&early[r->call].calls, 1, __ATOMIC_RELAXED);
}

static void add_early(void) {
    for (unsigned call = 0; call < sizeof early / sizeof *early; call++) {
        kvp_record r = {.call = (uint8_t)call, .dur_ns = KVP_UNTIMED, .count = 1};
        uint64_t calls = __atomic_exchange_n(&early[call].calls, 0, __ATOMIC_RELAXED);
        if (calls) r.bytes = __atomic_exchange_n(&early[call].bytes, 0, __ATOMIC_RELAXED);
        for (; calls; calls--, r.bytes = 0) kvp_ring_count(&r);
    }
}

/* First recorded call of this process. 1: there is a ring now. */
static KVP_RARE int open_ring(void) {
    static volatile int opening;
    int was = errno;
    kvp_thread.inside = IN_KVPROBE;
    for (int tries = 0; tries < 5000 && kvp_watch.on && !kvp_ring_is_open(); tries++) {
        int owner = __atomic_load_n(&opening, __ATOMIC_ACQUIRE), me = (int)getpid();
        /* a fork may have caught the parent in the middle of this: its claim is not ours */
        if (owner == me || !__atomic_compare_exchange_n(&opening, &owner, me, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            nanosleep(&(struct timespec){0, 1000000}, NULL);
            continue;
        }
        if (kvp_ring_is_open()) {
            __atomic_store_n(&opening, 0, __ATOMIC_RELEASE);
            break;
        }
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        char path[sizeof run_folder + 64];
        snprintf(path, sizeof path, "%s/%d-%llu.kvp", run_folder, me,
                 (unsigned long long)now.tv_sec * 1000000000u + (unsigned long long)now.tv_nsec);
        kvp_ring_options options = {.ring_capacity = number_from("KVPROBE_RING_RECORDS"),
                                    .slow_ns = number_from("KVPROBE_SLOW_NS")};
        int room = limit(&options), error;
        if (!room) snprintf(path, sizeof path, "%s/no-room.kvp", run_folder);
        error = room ? kvp_ring_open(path, "interposer", &options) : kvp_ring_open_shared(path, "interposer");
        if (error < 0) { /* no disk, no folder: leave it alone */
            kvp_watch.on = 0;
            step_aside(-error);
        } else
            kvp_files_start(run_folder);
        __atomic_store_n(&opening, 0, __ATOMIC_RELEASE);
    }
    kvp_nvtx_start();
    allow_observer();
    if (kvp_ring_is_open()) add_early();
    kvp_thread.inside = OUTSIDE;
    errno = was;
    return kvp_ring_is_open();
}

static KVP_RARE void count_interrupting(kvp_record r) {
    r.dur_ns = KVP_UNTIMED; /* the clock's own state may be half written */
    (kvp_ring_is_open() ? kvp_ring_count : count_early)(&r);
}

static inline int recording(void) { return likely(kvp_watch.on) && !kvp_thread.inside; }

/* Whether a call that is not to be recorded in full is a signal handler's that came in the middle of another. */
static inline int interrupts(enum inside level) {
    enum inside in = kvp_thread.inside;
    return unlikely(in && (in != IN_RUNTIME || level == IN_RUNTIME)) && kvp_watch.on;
}

static void set_detail(const char *level) {
    kvp_watch.detail = DETAIL_COPIES;
    if (level && !strcmp(level, "totals")) kvp_watch.detail = DETAIL_TOTALS;
    if (level && !strcmp(level, "launches")) kvp_watch.detail = DETAIL_LAUNCHES;
}

/* Each number of them that is a power of two leaves a name in the run folder, which takes no descriptor: so much is
 * known of a process that is killed, too. */
void kvp_not_wrapped(void) {
    static atomic_uint before;
    unsigned n = atomic_fetch_add(&before, 1) + 1;
    if (n & (n - 1)) return;
    char path[sizeof run_folder + 64];
    int was = errno;
    snprintf(path, sizeof path, "%s/not-wrapped-%d-%u", run_folder, (int)getpid(), n);
    mkdir(path, 0700);
    errno = was;
}

/* From the start of a program on, or from where its environment's run was joined: a library that Python loads. */
static void begin_run(void) {
    Dl_info us;
    if (dladdr(run_folder, &us) && us.dli_fname[0] == '/') kvp_hand_on_environment(us.dli_fname, run_folder);
    const char *preloaded = getenv("LD_PRELOAD");
    if (preloaded && strstr(preloaded, "libkvprobe_interpose")) kvp_note_libraries();
    kvp_watch.redirects = 1;
    kvp_redirect_all();
}

__attribute__((constructor)) static void start(void) {
    const char *run = getenv("KVPROBE_RUN"), *asked = getenv("KVPROBE"), *level = getenv("KVPROBE_DETAIL");
    if (!run || !*run || strlen(run) >= sizeof run_folder || getauxval(AT_SECURE)) return;
    if (says_no(asked)) return;
    strcpy(run_folder, run);
    set_detail(level);
    max_bytes = number_from("KVPROBE_MAX_BYTES");
    kvp_watch.on = 1;
    kvp_marks_start();
    kvp_contents_start();
    kvp_witness_start(run_folder);
    kvp_cures_start(run_folder);
    begin_run();
}

static void finish(void) {
    kvp_witness_stop();
    kvp_files_stop();
    kvp_marks_stop();
    kvp_watch.on = 0;
    kvp_contents_stop();
    kvp_cures_close();
    kvp_recycle_close();
    kvp_ring_close();
}

__attribute__((destructor)) static void at_exit(void) { finish(); }

/* Children of multiprocessing and of shells end with _exit, which runs no exit handlers: without this they would look
 * killed. Usable in signal handlers and after fork, as _exit is: the next definition was looked up at load. */
static void (*next_exit)(int);

static __attribute__((noreturn)) void leave(int status) {
    kvp_witness_leaves();
    kvp_cures_close();
    kvp_recycle_close();
    kvp_ring_close();
    if (next_exit) next_exit(status);
    for (;;) syscall(SYS_exit_group, status);
}

CUDA_EXPORT __attribute__((noreturn)) void _exit(int status);
void _exit(int status) { leave(status); }
CUDA_EXPORT __attribute__((noreturn)) void _Exit(int status);
void _Exit(int status) { leave(status); }

__attribute__((constructor)) static void find_exit(void) {
    static const char *const versions[] = {"GLIBC_2.2.5", "GLIBC_2.17"};
    for (unsigned i = 0; i < sizeof versions / sizeof *versions && !next_exit; i++)
        next_exit = (void (*)(int))dlvsym(RTLD_NEXT, "_exit", versions[i]);
}

/* ---- attaching ------------------------------------------------------------------------------------------------
 * Called by a thread that the injector made (inject/stub.c), the others running on. Both return a number of words
 * written that lead to recorded calls, or a negative errno. */

CUDA_EXPORT int kvprobe_attach(const char *library, const char *folder, const char *detail, uint64_t limit_bytes);
int kvprobe_attach(const char *library, const char *folder, const char *detail, uint64_t limit_bytes) {
    if (kvp_watch.on || kvp_watch.attached) return -EALREADY;
    if (strlen(folder) >= sizeof run_folder) return -ENAMETOOLONG;
    int error = kvp_hand_on(library, folder, detail, limit_bytes), was = errno;
    if (error) return error;
    strcpy(run_folder, folder);
    set_detail(detail);
    max_bytes = limit_bytes;
    kvp_watch.on = 1;
    if (!open_ring()) {
        kvp_watch.on = 0;
        kvp_hand_on_nothing();
        return -EACCES;
    }
    kvp_watch.attached = kvp_watch.redirects = 1;
    kvp_marks_start();
    kvp_contents_start();
    int written = kvp_redirect_all();
    if (written < 0) {
        kvp_watch.attached = kvp_watch.redirects = 0;
        kvp_hand_on_nothing();
        finish();
    }
    errno = was;
    return written;
}

CUDA_EXPORT int kvprobe_detach(void);
int kvprobe_detach(void) {
    if (!kvp_watch.attached) return -ENOENT;
    int was = errno, restored;
    kvp_watch.attached = kvp_watch.redirects =
        0; /* nobody scans again; calls are recorded until no library leads here */
    kvp_hand_on_nothing();
    restored = kvp_restore_all();
    kvp_watch.on = 0;
    /* calls that are inside are recorded at their end; one that waits for long is not waited for */
    for (int tries = 0; kvp_ring_busy() && tries < 100; tries++) nanosleep(&(struct timespec){0, 1000000}, NULL);
    finish();
    errno = was;
    return restored;
}

/* ---- one call ------------------------------------------------------------------------------------------------ */

enum what { A_COPY, A_PLAIN_COPY, A_CALL, A_LAUNCH, A_EVENT, A_WAIT, A_FREE };

/* The batch that this thread is about to submit, and the rows of a 2D copy. */
static __thread struct kvp_pieces batch __attribute__((tls_model("initial-exec")));
static __thread struct kvp_rows rows_2d __attribute__((tls_model("initial-exec")));

/* What few calls do gets the record by value (ring_write.h says why), and returns its start_ns. */

/* A process's first call, or that of a thread that has no section. */
static KVP_RARE uint64_t begin_first(kvp_record r) {
    if (!kvp_ring_is_open() && !open_ring()) return r.start_ns;
    kvp_thread.inside = IN_KVPROBE;
    if (r.dur_ns != KVP_UNTIMED) r.start_ns = kvp_clock();
    kvp_ring_enter(r.call, r.stream, r.start_ns);
    return r.start_ns;
}

static inline __attribute__((always_inline)) int is_timed(enum what what) {
    return what != A_LAUNCH || kvp_watch.detail != DETAIL_TOTALS;
}

/* What is asked of a call only where something else goes on: a capture, a test, a tool, a witness. */
static KVP_RARE uint64_t begin_unusual(kvp_record r, enum what what) {
    if (what == A_EVENT || !kvp_watch.marks)
        if (kvp_watch.captures) kvp_mark_beside(&r);
    if (what == A_COPY && kvp_watch.witness) {
        kvp_witness_before(&r, &batch);
        r.start_ns = kvp_clock();
    }
    if (what == A_FREE && kvp_watch.witness) kvp_witness_frees(r.call);
    if (kvp_watch.gate) kvp_gate_begin();
    if (kvp_watch.nvtx && what != A_LAUNCH && what != A_EVENT && what != A_WAIT) kvp_nvtx_range_push(&r);
    return r.start_ns;
}

static KVP_RARE void end_unusual(kvp_record r, enum what what) {
    if (kvp_watch.nvtx && what != A_LAUNCH && what != A_EVENT && what != A_WAIT) kvp_nvtx_range_pop();
    if (kvp_watch.captures && !r.result) kvp_graph_holds(&r);
    if (what == A_COPY && kvp_watch.witness) kvp_witness_after(&r, &batch);
    if (kvp_watch.gate) kvp_gate(&r);
}

static KVP_RARE uint64_t begin_after_pause(uint64_t now, uint64_t paused_ns) {
    if (!kvp_thread.ended) return now; /* a thread's first call */
    kvp_pause_ends(now, paused_ns);
    return kvp_clock();
}

static KVP_RARE uint64_t look_at_device(kvp_record r) {
    kvp_device_look(&r);
    return r.start_ns;
}

/* When the call begins. What takes longer than marking does waited for what the call would have waited for, such as a
 * lock of the driver's while another thread frees memory: that time is the call's. */
static KVP_RARE uint64_t mark_before(kvp_record r, int timed) {
    if (!kvp_mark_before(&r) || !timed) return r.start_ns;
    uint64_t now = kvp_clock();
    return now - r.start_ns > MARK_MOST_NS ? r.start_ns : now;
}

static KVP_RARE void mark_after(kvp_record r) { kvp_mark_after(&r); }
static KVP_RARE void mark_refused(kvp_record r) { kvp_mark_refused(&r); }
static KVP_RARE void pages_before(kvp_record r) { kvp_pages_before(&r); }
static KVP_RARE void pages_after(kvp_record r) { kvp_pages_after(&r); }
static KVP_RARE void look_at_contents(kvp_record r) { kvp_contents_look(&r, &batch, &rows_2d); }
static __attribute__((noinline)) void write_totals(kvp_record r) { kvp_ring_write(&r, KVP_KEEP_SEVERAL); }

/* A plain copy (is_plain) is one of which none of what few calls ask is asked; all the rest is a call's as any other's.
 */
static inline __attribute__((always_inline)) int is_copy(enum what what) {
    return what == A_COPY || what == A_PLAIN_COPY;
}

static inline __attribute__((always_inline)) void begin(kvp_record *r, enum what what) {
    kvp_thread.inside = IN_KVPROBE;
    int timed = is_timed(what);
    if (what == A_LAUNCH) r->dst = ++kvp_thread.launches;
    if (timed)
        r->start_ns = kvp_clock();
    else
        r->dur_ns = KVP_UNTIMED;
    if (is_copy(what)) __builtin_prefetch(&kvp_thread.src);
    if (unlikely(!kvp_ring_entered(r->call, r->stream, r->start_ns))) r->start_ns = begin_first(kvp_apart(r));
    uint32_t since = (uint32_t)(r->start_ns >> 10) - kvp_thread.ended;
    if (unlikely(since > KVP_PAUSE_NS >> 10) && timed)
        r->start_ns = begin_after_pause(r->start_ns, (uint64_t)since << 10);
    if (what == A_COPY && unlikely(kvp_watch.device_looks)) r->start_ns = look_at_device(kvp_apart(r));
    if (likely(kvp_watch.marks)) {
        if (what == A_EVENT)
            kvp_mark_event(r->stream);
        else if (!(what == A_PLAIN_COPY || (what == A_COPY && !kvp_watch.blocking)) ||
                 unlikely(!kvp_mark_copy(r->stream, r->direction, r->bytes, r->start_ns)))
            r->start_ns = mark_before(kvp_apart(r), timed);
    }
    if (what == A_PLAIN_COPY) return;
    if (unlikely(kvp_watch.unusual)) r->start_ns = begin_unusual(kvp_apart(r), what);
    if ((what == A_COPY || what == A_FREE) && unlikely(r->bytes >= KVP_PAGES_FROM)) pages_before(kvp_apart(r));
}

static inline __attribute__((always_inline)) void end(kvp_record *r, enum what what, int result) {
    int timed = what != A_LAUNCH || r->dur_ns != KVP_UNTIMED;
    uint64_t dur_ns = KVP_UNTIMED;
    if (timed) {
        uint64_t now = kvp_clock();
        r->dur_ns = dur_ns = now - r->start_ns;
        kvp_thread.ended = (uint32_t)(now >> 10);
        if (unlikely(dur_ns > KVP_LONG_CALL_NS)) kvp_pause_may_begin(now);
    }
    if (what == A_FREE) kvp_forget_ranges();
    unsigned code = likely((unsigned)result < 65535) ? (unsigned)result : 65535, node, direction;
    if (what == A_PLAIN_COPY) {
        unsigned memory = likely(r->direction == KVP_H2D) ? kvp_host_memory(r->src, &kvp_thread.src)
                                                          : kvp_host_memory(r->dst, &kvp_thread.dst);
        direction = r->direction | (memory & 15) << 4, node = memory >> 8;
    } else {
        direction = what == A_COPY && likely(!result) ? kvp_classify(r) : r->direction;
        node = kvp_thread.node;
    }
    r->result = (uint16_t)code;
    r->direction = (uint8_t)direction;
    uint64_t last = kvp_ring_last(r, code, direction);
    int detail = what == A_PLAIN_COPY ? DETAIL_COPIES : kvp_watch.detail;
    if (what == A_EVENT || what == A_LAUNCH) /* they would wash copies out of the ring */
        kvp_ring_written(r, dur_ns, last, timed,
                         detail == DETAIL_LAUNCHES ? KVP_KEEP_ALL
                         : timed                   ? KVP_KEEP_SLOW
                                                   : KVP_KEEP_NONE,
                         node);
    else if (likely(detail != DETAIL_TOTALS))
        kvp_ring_written(r, dur_ns, last, timed, KVP_KEEP_ALL, node);
    else
        write_totals(kvp_apart(r));
    if ((what == A_COPY || what == A_FREE) && unlikely(r->bytes >= KVP_PAGES_FROM)) pages_after(kvp_apart(r));
    if (what != A_PLAIN_COPY && what != A_EVENT && unlikely(result) && kvp_watch.marks) mark_refused(kvp_apart(r));
    if (what != A_EVENT && unlikely(kvp_thread.mark)) mark_after(kvp_apart(r));
    if (is_copy(what) && unlikely(kvp_contents_due(r))) look_at_contents(kvp_apart(r));
    if (unlikely(kvp_watch.unusual)) end_unusual(kvp_apart(r), what);
    kvp_thread.doing = OUTSIDE;
}

/* Both of each kind once: the functions that a program uses by turns share the code. */
#define AROUND(WHAT)                                                                                                   \
    static KVP_HOT __attribute__((noinline)) void begin_##WHAT(kvp_record *r) { begin(r, WHAT); }                      \
    static KVP_HOT __attribute__((noinline)) void end_##WHAT(kvp_record *r, int result) { end(r, WHAT, result); }
AROUND(A_COPY)
AROUND(A_CALL)
AROUND(A_LAUNCH)
AROUND(A_EVENT)
AROUND(A_WAIT)
AROUND(A_FREE)
static KVP_RARE int end_failed(kvp_record r, int result) {
    end_A_COPY(&r, result);
    return result;
}

/* Whether a copy is what most of them are: between host and device by its own word, in a process in which nothing is
 * asked of copies but to be recorded, and not so large that it matters for how long it keeps its thread. */
static inline __attribute__((always_inline)) int is_plain(unsigned direction, size_t bytes) {
    return likely(kvp_watch.mode == KVP_PLAIN_MODE) && likely(!kvp_watch.unusual) && likely(!kvp_thread.doing) &&
           likely(direction - 1 < KVP_D2H) && likely(bytes < KVP_PAGES_FROM);
}

/* Four bits for each of cudaMemcpyKind: a table would be another line to come. */
static inline uint8_t direction_of(int kind) {
    const unsigned directions = KVP_H2H | KVP_H2D << 4 | KVP_D2H << 8 | KVP_D2D << 12;
    return (unsigned)kind < 4 ? directions >> kind * 4 & 15 : KVP_DIR_UNKNOWN;
}

#define WORD(value) ((uint64_t)(uintptr_t)(value))
#define HANDLE(s) (per_thread && !(s) ? 2u : WORD(s)) /* 2: cudaStreamPerThread */
#define STREAM(s) kvp_stream_number(HANDLE(s))
#define AT(type, base, offset) (*(const type *)((const char *)(base) + (offset)))

/* NAME_P and NAME_A are a call's parameters and arguments; the rest says what to record. Every parameter is passed on
 * as it came. */
#define CALL(NAME, WHAT, ...) CALL_BY(NAME, WHAT, real(NAME##_A), __VA_ARGS__)
#define CALL_BY(NAME, WHAT, MADE, ...)                                                                                 \
    CALL_IS(NAME)                                                                                                      \
    AS_ANY(NAME, NAME##_via, inline __attribute__((always_inline)), WHAT, MADE, __VA_ARGS__)
#define CALL_IS(NAME)                                                                                                  \
    typedef int NAME##_fn(NAME##_P);                                                                                   \
    static inline enum inside NAME##_level(void) { return #NAME[2] == 'd' ? IN_RUNTIME : IN_DRIVER; } /* cuda or cu */
#define AS_ANY(NAME, VIA, IN_LINE, WHAT, MADE, ...)                                                                    \
    static IN_LINE int VIA(any_fn *function, const int per_thread, NAME##_P) {                                         \
        NAME##_fn *real = (NAME##_fn *)function;                                                                       \
        (void)per_thread;                                                                                              \
        if (unlikely(!real)) return SYMBOL_NOT_FOUND;                                                                  \
        int full = recording();                                                                                        \
        if (unlikely(!full) && !interrupts(NAME##_level())) return real(NAME##_A);                                     \
        kvp_record r = {.count = 1};                                                                                   \
        __VA_ARGS__;                                                                                                   \
        if (unlikely(!full)) {                                                                                         \
            enum inside was = kvp_thread.inside;                                                                       \
            kvp_thread.inside = NAME##_level();                                                                        \
            int result = real(NAME##_A);                                                                               \
            kvp_thread.inside = was;                                                                                   \
            count_interrupting(r);                                                                                     \
            return result;                                                                                             \
        }                                                                                                              \
        begin_##WHAT(&r);                                                                                              \
        kvp_thread.inside = NAME##_level();                                                                            \
        int result = MADE;                                                                                             \
        kvp_thread.inside = IN_KVPROBE;                                                                                \
        end_##WHAT(&r, result);                                                                                        \
        return result;                                                                                                 \
    }
/* A copy that programs make by the thousand: where it is plain all of it is in its own wrapper, and the record is never
 * in memory before it is in the ring. `DIRECTION`: enum kvp_direction where it is KVP_H2D or KVP_D2H, else anything. */
#define COPY_BY(NAME, DIRECTION, MADE, IS)                                                                             \
    CALL_IS(NAME)                                                                                                      \
    AS_ANY(NAME, NAME##_any, KVP_HOT __attribute__((noinline)), A_COPY, MADE, IS)                                      \
    static inline __attribute__((always_inline)) int NAME##_via(any_fn *function, const int per_thread, NAME##_P) {    \
        NAME##_fn *real = (NAME##_fn *)function;                                                                       \
        unsigned direction = (DIRECTION);                                                                              \
        if (unlikely(!real || !is_plain(direction, bytes))) return NAME##_any(function, per_thread, NAME##_A);         \
        kvp_record r = {.count = 1};                                                                                   \
        IS;                                                                                                            \
        r.direction = (uint8_t)direction;                                                                              \
        begin(&r, A_PLAIN_COPY);                                                                                       \
        kvp_thread.inside = NAME##_level();                                                                            \
        int result = real(NAME##_A);                                                                                   \
        kvp_thread.inside = IN_KVPROBE;                                                                                \
        if (unlikely(result)) return end_failed(kvp_apart(&r), result);                                                \
        end(&r, A_PLAIN_COPY, 0);                                                                                      \
        return 0;                                                                                                      \
    }

#define COPY_IS(CALL_ID, DST, SRC, BYTES, DIRECTION, ON)                                                               \
    r.call = CALL_ID, r.dst = WORD(DST), r.src = WORD(SRC), r.bytes = (BYTES), r.direction = (DIRECTION),              \
    r.stream = STREAM(ON)

#define cudaMemcpyAsync_P void *dst, const void *src, size_t bytes, int kind, void *stream
#define cudaMemcpyAsync_A dst, src, bytes, kind, stream
#define CURED(NAME, KIND, ON, TO_END) KVP_CURED(real(NAME##_A), WORD(dst), WORD(src), bytes, KIND, HANDLE(ON), TO_END)
_Static_assert(KVP_H2D == 1 && KVP_D2H == 2, "as in cudaMemcpyKind");
COPY_BY(cudaMemcpyAsync, (unsigned)kind, CURED(cudaMemcpyAsync, kind, stream, 0),
        COPY_IS(1, dst, src, bytes, direction_of(kind), stream))

#define cudaMemcpy2DAsync_P                                                                                            \
    void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height, int kind, void *stream
#define cudaMemcpy2DAsync_A dst, dpitch, src, spitch, width, height, kind, stream
#define CURED_2D(NAME, ON, TO_END)                                                                                     \
    KVP_CURED(real(NAME##_A), WORD(dst), WORD(src), in_one_piece(dpitch, spitch, width, height), kind, HANDLE(ON),     \
              TO_END)
/* Bytes of rows that lie one behind the other on both sides; 0: they do not. */
static inline size_t in_one_piece(size_t dpitch, size_t spitch, size_t width, size_t height) {
    size_t bytes;
    return dpitch == width && spitch == width && !__builtin_mul_overflow(width, height, &bytes) ? bytes : 0;
}
#define ROWS_ARE                                                                                                       \
    rows_2d = (struct kvp_rows) { width, height, dpitch, spitch }
CALL_BY(cudaMemcpy2DAsync, A_COPY, CURED_2D(cudaMemcpy2DAsync, stream, 0),
        COPY_IS(2, dst, src, width *height, direction_of(kind), stream);
        ROWS_ARE)
#define cudaMemcpy2D_P void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height, int kind
#define cudaMemcpy2D_A dst, dpitch, src, spitch, width, height, kind
CALL_BY(cudaMemcpy2D, A_COPY, CURED_2D(cudaMemcpy2D, (void *)0, 1),
        COPY_IS(78, dst, src, width *height, direction_of(kind), (void *)0);
        ROWS_ARE)

/* cudaMemcpy3DParms: srcPtr at 32, dstPtr at 96, extent at 128, kind at 152 */
#define cudaMemcpy3DAsync_P const void *parms, void *stream
#define cudaMemcpy3DAsync_A parms, stream
CALL(
    cudaMemcpy3DAsync, A_COPY, if (parms) {
        COPY_IS(30, AT(void *, parms, 96), AT(void *, parms, 32),
                AT(size_t, parms, 128) * AT(size_t, parms, 136) * AT(size_t, parms, 144),
                direction_of(AT(int, parms, 152)), stream);
    } else r.call = KVP_CALL_cudaMemcpy3DAsync)

#define cudaMemcpyPeerAsync_P void *dst, int dst_device, const void *src, int src_device, size_t bytes, void *stream
#define cudaMemcpyPeerAsync_A dst, dst_device, src, src_device, bytes, stream
CALL(cudaMemcpyPeerAsync, A_COPY, COPY_IS(31, dst, src, bytes, KVP_D2D, stream))

/* Whether some attributes have the call itself read the source, which may be another's when it has returned. */
static int takes_at_once(const void *attributes, size_t count) {
    enum { ATTRIBUTES_BYTES = 24, DURING_CALL = 2 };
    for (size_t i = 0; attributes && i < count; i++)
        if (AT(int, attributes, i *ATTRIBUTES_BYTES) == DURING_CALL) return 1;
    return 0;
}

#define cudaMemcpyWithAttributesAsync_P void *dst, const void *src, size_t bytes, void *attributes, void *stream
#define cudaMemcpyWithAttributesAsync_A dst, src, bytes, attributes, stream
CALL(cudaMemcpyWithAttributesAsync, A_COPY, COPY_IS(40, dst, src, bytes, KVP_DIR_UNKNOWN, stream);
     batch.taken = takes_at_once(attributes, 1))

#define cudaMemcpy_P void *dst, const void *src, size_t bytes, int kind
#define cudaMemcpy_A dst, src, bytes, kind
CALL_BY(cudaMemcpy, A_COPY, CURED(cudaMemcpy, kind, (void *)0, 1),
        COPY_IS(10, dst, src, bytes, direction_of(kind), (void *)0))

#define cudaMemsetAsync_P void *dst, int value, size_t bytes, void *stream
#define cudaMemsetAsync_A dst, value, bytes, stream
CALL(cudaMemsetAsync, A_CALL, COPY_IS(11, dst, (void *)0, bytes, KVP_DIR_UNKNOWN, stream))

/* ---- batches --------------------------------------------------------------------------------------------------
 * CUDA 12.8 and 12.9 have `size_t *failIdx` before the stream, 13.0 has not. Nine words are passed on either way: what
 * a function does not take, it does not read. */

/* Direction that the attributes of a batch's first copy name: location types 1 device, 2 host. */
static uint8_t hinted(const void *attributes, size_t count) {
    if (!attributes || !count) return KVP_DIR_UNKNOWN;
    int src = AT(int, attributes, 4), dst = AT(int, attributes, 12);
    return src == 2 && dst == 1 ? KVP_H2D : src == 1 && dst == 2 ? KVP_D2H : src == 1 && dst == 1 ? KVP_D2D : 0;
}

static void fill_batch(kvp_record *r, uint8_t call, void *const *dsts, void *const *srcs, const size_t *sizes,
                       size_t count, const void *attributes, size_t attribute_count, uint64_t stream) {
    r->call = call;
    r->count = (uint32_t)count;
    r->stream = stream;
    batch = (struct kvp_pieces){0};
    if (!dsts || !srcs || !sizes || !count) return;
    batch = (struct kvp_pieces){dsts, srcs, sizes, count, takes_at_once(attributes, attribute_count)};
    r->dst = WORD(dsts[0]);
    r->src = WORD(srcs[0]);
    for (size_t i = 0; i < count; i++) r->bytes += sizes[i];
    r->direction = hinted(attributes, attribute_count);
}

static struct {
    void *_Atomic real;
    atomic_int answer; /* 0: none yet, 1: no, 2: yes */
} signatures[4];

void kvp_forget_signatures(void) {
    for (int i = 0; i < 4; i++) {
        signatures[i].answer = 0;
        signatures[i].real = NULL;
    }
}

int kvp_batch_has_fail_index(void *real) {
    for (int i = 0; i < 4; i++)
        if (signatures[i].real == real && signatures[i].answer) return signatures[i].answer == 2;
    int version = 0, answer = 1;
    int (*get_version)(int *) = (int (*)(int *))kvp_symbol_beside(real, "cudaRuntimeGetVersion");
    if (get_version && !get_version(&version)) answer = version < 13000 ? 2 : 1;
    for (int i = 0; i < 4; i++) {
        void *none = NULL;
        if (atomic_compare_exchange_strong(&signatures[i].real, &none, real)) {
            signatures[i].answer = answer;
            break;
        }
    }
    return answer == 2;
}

#define BATCH_P                                                                                                        \
    void **dsts, void **srcs, size_t *sizes, size_t count, void *attributes, size_t *indexes, size_t attribute_count,  \
        void *eighth, void *ninth
#define BATCH_A dsts, srcs, sizes, count, attributes, indexes, attribute_count, eighth, ninth
#define BATCH_IS(CALL_ID, ON) fill_batch(&r, CALL_ID, dsts, srcs, sizes, count, attributes, attribute_count, STREAM(ON))
#define cudaMemcpyBatchAsync_P BATCH_P
#define cudaMemcpyBatchAsync_A BATCH_A
CALL(cudaMemcpyBatchAsync, A_COPY, void *on = kvp_batch_has_fail_index((void *)function) ? ninth : eighth;
     BATCH_IS(3, on))
#define cuMemcpyBatchAsync_P BATCH_P
#define cuMemcpyBatchAsync_A BATCH_A
CALL(cuMemcpyBatchAsync, A_COPY, BATCH_IS(9, ninth))
#define cuMemcpyBatchAsync_v2_P BATCH_P
#define cuMemcpyBatchAsync_v2_A BATCH_A
CALL(cuMemcpyBatchAsync_v2, A_COPY, BATCH_IS(9, eighth))

/* ---- the driver's copies ------------------------------------------------------------------------------------- */

#define cuMemcpyAsync_P uint64_t dst, uint64_t src, size_t bytes, void *stream
#define cuMemcpyAsync_A dst, src, bytes, stream
CALL_BY(cuMemcpyAsync, A_COPY, CURED(cuMemcpyAsync, 4, stream, 0), COPY_IS(4, dst, src, bytes, KVP_DIR_UNKNOWN, stream))
#define cuMemcpyHtoDAsync_P uint64_t dst, const void *src, size_t bytes, void *stream
#define cuMemcpyHtoDAsync_A dst, src, bytes, stream
COPY_BY(cuMemcpyHtoDAsync, KVP_H2D, CURED(cuMemcpyHtoDAsync, 1, stream, 0),
        COPY_IS(5, dst, src, bytes, KVP_H2D, stream))
#define cuMemcpyDtoHAsync_P void *dst, uint64_t src, size_t bytes, void *stream
#define cuMemcpyDtoHAsync_A dst, src, bytes, stream
COPY_BY(cuMemcpyDtoHAsync, KVP_D2H, CURED(cuMemcpyDtoHAsync, 2, stream, 0),
        COPY_IS(6, dst, src, bytes, KVP_D2H, stream))
#define cuMemcpyDtoDAsync_P uint64_t dst, uint64_t src, size_t bytes, void *stream
#define cuMemcpyDtoDAsync_A dst, src, bytes, stream
CALL(cuMemcpyDtoDAsync, A_COPY, COPY_IS(7, dst, src, bytes, KVP_D2D, stream))

#define cuMemcpy_P uint64_t dst, uint64_t src, size_t bytes
#define cuMemcpy_A dst, src, bytes
CALL_BY(cuMemcpy, A_COPY, CURED(cuMemcpy, 4, (void *)0, 1), COPY_IS(74, dst, src, bytes, KVP_DIR_UNKNOWN, (void *)0))
#define cuMemcpyHtoD_P uint64_t dst, const void *src, size_t bytes
#define cuMemcpyHtoD_A dst, src, bytes
CALL_BY(cuMemcpyHtoD, A_COPY, CURED(cuMemcpyHtoD, 1, (void *)0, 1), COPY_IS(75, dst, src, bytes, KVP_H2D, (void *)0))
#define cuMemcpyDtoH_P void *dst, uint64_t src, size_t bytes
#define cuMemcpyDtoH_A dst, src, bytes
CALL_BY(cuMemcpyDtoH, A_COPY, CURED(cuMemcpyDtoH, 2, (void *)0, 1), COPY_IS(76, dst, src, bytes, KVP_D2H, (void *)0))
#define cuMemcpyDtoD_P uint64_t dst, uint64_t src, size_t bytes
#define cuMemcpyDtoD_A dst, src, bytes
CALL(cuMemcpyDtoD, A_COPY, COPY_IS(77, dst, src, bytes, KVP_D2D, (void *)0))

/* One side of CUDA_MEMCPY2D and 3D: memory type (1 host, 2 device, 4 unified), host pointer 8 bytes on, device 16. */
static uint64_t side(const void *parms, size_t at, int *type) {
    *type = AT(int, parms, at);
    return *type == 1 ? AT(uint64_t, parms, at + 8) : AT(uint64_t, parms, at + 16);
}

static void fill_sides(kvp_record *r, uint8_t call, const void *parms, size_t src_at, size_t dst_at, uint64_t bytes,
                       uint64_t stream) {
    int src, dst;
    r->call = call;
    r->src = side(parms, src_at, &src);
    r->dst = side(parms, dst_at, &dst);
    r->bytes = bytes;
    r->stream = stream;
    r->direction = src == 1 && dst == 2 ? KVP_H2D : src == 2 && dst == 1 ? KVP_D2H : src == 2 && dst == 2 ? KVP_D2D : 0;
}

#define cuMemcpy2DAsync_P const void *parms, void *stream
#define cuMemcpy2DAsync_A parms, stream
CALL(cuMemcpy2DAsync, A_COPY, r.call = KVP_CALL_cuMemcpy2DAsync;
     if (parms) fill_sides(&r, 8, parms, 16, 72, AT(size_t, parms, 112) * AT(size_t, parms, 120), STREAM(stream)))
#define cuMemcpy3DAsync_P const void *parms, void *stream
#define cuMemcpy3DAsync_A parms, stream
CALL(cuMemcpy3DAsync, A_COPY, r.call = KVP_CALL_cuMemcpy3DAsync;
     if (parms) fill_sides(&r, 41, parms, 32, 120,
                           AT(size_t, parms, 176) * AT(size_t, parms, 184) * AT(size_t, parms, 192), STREAM(stream)))

/* ---- launches ------------------------------------------------------------------------------------------------ */

typedef struct {
    unsigned x, y, z;
} dim3;
#define cudaLaunchKernel_P const void *func, dim3 grid, dim3 block, void **args, size_t shared, void *stream
#define cudaLaunchKernel_A func, grid, block, args, shared, stream
CALL(cudaLaunchKernel, A_LAUNCH, r.call = KVP_CALL_cudaLaunchKernel; r.stream = STREAM(stream))
#define cudaLaunchKernelExC_P const void *config, const void *func, void **args
#define cudaLaunchKernelExC_A config, func, args
CALL(cudaLaunchKernelExC, A_LAUNCH, r.call = KVP_CALL_cudaLaunchKernelExC;
     if (config) r.stream = STREAM(AT(void *, config, 32)))
#define cuLaunchKernel_P                                                                                               \
    void *func, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,         \
        void *stream, void **args, void **extra
#define cuLaunchKernel_A func, gx, gy, gz, bx, by, bz, shared, stream, args, extra
CALL(cuLaunchKernel, A_LAUNCH, r.call = KVP_CALL_cuLaunchKernel; r.stream = STREAM(stream))
#define cuLaunchKernelEx_P const void *config, void *func, void **args, void **extra
#define cuLaunchKernelEx_A config, func, args, extra
CALL(cuLaunchKernelEx, A_LAUNCH, r.call = KVP_CALL_cuLaunchKernelEx;
     if (config) r.stream = STREAM(AT(void *, config, 32)))
#define cudaGraphLaunch_P void *graph, void *stream
#define cudaGraphLaunch_A graph, stream
CALL(cudaGraphLaunch, A_CALL, r.call = KVP_CALL_cudaGraphLaunch; r.stream = STREAM(stream); r.src = WORD(graph))

/* Says how many launches a wait came after: those that a queue had taken since the wait before are counted so. */
#define AFTER_LAUNCHES r.dst = kvp_thread.launches

/* ---- waits, events, creation, memory ------------------------------------------------------------------------- */

/* Where an event was last recorded, so that a wait for it can name the stream. One entry stands for many events: the
 * newest record takes it, and a wait whose event is not in it names none. */
enum { EVENTS = 4096 };
static struct {
    _Atomic uint64_t event, stream;
} recorded[EVENTS];

static inline uint32_t place_of(uint64_t event) { return (uint32_t)((event >> 4) * 0x9e3779b97f4a7c15u >> 52); }

static inline void note_record(uint64_t event, uint64_t stream) {
    uint32_t at = place_of(event);
    if (likely(atomic_load_explicit(&recorded[at].event, memory_order_relaxed) == event &&
               atomic_load_explicit(&recorded[at].stream, memory_order_relaxed) == stream))
        return;
    atomic_store_explicit(&recorded[at].event, 0, memory_order_release);
    atomic_store_explicit(&recorded[at].stream, stream, memory_order_release);
    atomic_store_explicit(&recorded[at].event, event, memory_order_release);
}

static inline uint64_t recorded_on(uint64_t event) {
    uint32_t at = place_of(event);
    if (atomic_load_explicit(&recorded[at].event, memory_order_acquire) != event) return 0;
    uint64_t stream = atomic_load_explicit(&recorded[at].stream, memory_order_acquire);
    return atomic_load_explicit(&recorded[at].event, memory_order_acquire) == event ? stream : 0;
}

#define cudaStreamSynchronize_P void *stream
#define cudaStreamSynchronize_A stream
CALL(cudaStreamSynchronize, A_CALL, r.call = KVP_CALL_cudaStreamSynchronize; r.stream = STREAM(stream); AFTER_LAUNCHES)
#define cudaEventSynchronize_P void *event
#define cudaEventSynchronize_A event
CALL(cudaEventSynchronize, A_CALL, r.call = KVP_CALL_cudaEventSynchronize; r.src = WORD(event);
     r.stream = recorded_on(r.src); AFTER_LAUNCHES)
#define cudaDeviceSynchronize_P void *unused /* takes nothing; a word more does no harm and lets one macro serve */
#define cudaDeviceSynchronize_A unused
CALL(cudaDeviceSynchronize, A_CALL, r.call = KVP_CALL_cudaDeviceSynchronize; AFTER_LAUNCHES)
#define cuStreamSynchronize_P void *stream
#define cuStreamSynchronize_A stream
CALL(cuStreamSynchronize, A_CALL, r.call = KVP_CALL_cuStreamSynchronize; r.stream = STREAM(stream); AFTER_LAUNCHES)
#define cuEventSynchronize_P void *event
#define cuEventSynchronize_A event
CALL(cuEventSynchronize, A_CALL, r.call = KVP_CALL_cuEventSynchronize; r.src = WORD(event);
     r.stream = recorded_on(r.src); AFTER_LAUNCHES)
#define cuCtxSynchronize_P void *context /* from 13.0 on; before, it takes nothing */
#define cuCtxSynchronize_A context
CALL(cuCtxSynchronize, A_CALL, r.call = KVP_CALL_cuCtxSynchronize; AFTER_LAUNCHES)

#define cudaEventRecord_P void *event, void *stream
#define cudaEventRecord_A event, stream
CALL(cudaEventRecord, A_EVENT, r.call = KVP_CALL_cudaEventRecord; r.stream = STREAM(stream); r.src = WORD(event);
     note_record(r.src, r.stream))
#define cudaEventRecordWithFlags_P void *event, void *stream, unsigned flags
#define cudaEventRecordWithFlags_A event, stream, flags
CALL(cudaEventRecordWithFlags, A_EVENT, r.call = KVP_CALL_cudaEventRecord; r.stream = STREAM(stream);
     r.src = WORD(event); note_record(r.src, r.stream))
#define cudaStreamWaitEvent_P void *stream, void *event, unsigned flags
#define cudaStreamWaitEvent_A stream, event, flags
CALL(cudaStreamWaitEvent, A_WAIT, r.call = KVP_CALL_cudaStreamWaitEvent; r.stream = STREAM(stream); r.src = WORD(event))

/* ---- host functions in a stream: it stands still while one runs -------------------------------------------------- */

#define FUNCTION_IS(CALL_ID) r.call = (CALL_ID), r.stream = STREAM(stream), r.src = WORD(called)
#define cudaLaunchHostFunc_P void *stream, void *called, void *data
#define cudaLaunchHostFunc_A stream, called, data
CALL(cudaLaunchHostFunc, A_WAIT, FUNCTION_IS(KVP_CALL_cudaLaunchHostFunc))
#define cuLaunchHostFunc_P void *stream, void *called, void *data
#define cuLaunchHostFunc_A stream, called, data
CALL(cuLaunchHostFunc, A_WAIT, FUNCTION_IS(KVP_CALL_cuLaunchHostFunc))
#define cudaStreamAddCallback_P void *stream, void *called, void *data, unsigned flags
#define cudaStreamAddCallback_A stream, called, data, flags
CALL(cudaStreamAddCallback, A_WAIT, FUNCTION_IS(KVP_CALL_cudaStreamAddCallback))
#define cuStreamAddCallback_P void *stream, void *called, void *data, unsigned flags
#define cuStreamAddCallback_A stream, called, data, flags
CALL(cuStreamAddCallback, A_WAIT, FUNCTION_IS(KVP_CALL_cuStreamAddCallback))

#define cudaStreamCreate_P void **stream
#define cudaStreamCreate_A stream
#define BLOCKS_UNLESS(NON_BLOCKING)                                                                                    \
    if (!(NON_BLOCKING)) kvp_watch.blocking = 1
CALL(cudaStreamCreate, A_CALL, r.call = KVP_CALL_cudaStreamCreate; BLOCKS_UNLESS(0))
#define cudaStreamCreateWithFlags_P void **stream, unsigned flags
#define cudaStreamCreateWithFlags_A stream, flags
CALL(cudaStreamCreateWithFlags, A_CALL, r.call = KVP_CALL_cudaStreamCreate; BLOCKS_UNLESS(flags & 1))
#define cudaStreamCreateWithPriority_P void **stream, unsigned flags, int priority
#define cudaStreamCreateWithPriority_A stream, flags, priority
CALL(cudaStreamCreateWithPriority, A_CALL, r.call = KVP_CALL_cudaStreamCreate; BLOCKS_UNLESS(flags & 1))
#define cudaEventCreate_P void **event
#define cudaEventCreate_A event
CALL(cudaEventCreate, A_CALL, r.call = KVP_CALL_cudaEventCreate)
#define cudaEventCreateWithFlags_P void **event, unsigned flags
#define cudaEventCreateWithFlags_A event, flags
CALL(cudaEventCreateWithFlags, A_CALL, r.call = KVP_CALL_cudaEventCreate)
#define cuStreamCreate_P void **stream, unsigned flags
#define cuStreamCreate_A stream, flags
CALL(cuStreamCreate, A_CALL, r.call = KVP_CALL_cuStreamCreate; BLOCKS_UNLESS(flags & 1))
#define cuStreamCreateWithPriority_P void **stream, unsigned flags, int priority
#define cuStreamCreateWithPriority_A stream, flags, priority
CALL(cuStreamCreateWithPriority, A_CALL, r.call = KVP_CALL_cuStreamCreate; BLOCKS_UNLESS(flags & 1))
#define cuEventCreate_P void **event, unsigned flags
#define cuEventCreate_A event, flags
CALL(cuEventCreate, A_CALL, r.call = KVP_CALL_cuEventCreate)

/* Where the memory lies is recorded once it is there. */
#define PLACED_AT(MADE)                                                                                                \
    ({                                                                                                                 \
        int error = MADE;                                                                                              \
        if (likely(!error)) r.dst = WORD(*pointer);                                                                    \
        error;                                                                                                         \
    })
#define cudaMalloc_P void **pointer, size_t bytes
#define cudaMalloc_A pointer, bytes
CALL_BY(cudaMalloc, A_CALL, PLACED_AT(real(cudaMalloc_A)), r.call = KVP_CALL_cudaMalloc; r.bytes = bytes)
#define cudaMallocAsync_P void **pointer, size_t bytes, void *stream
#define cudaMallocAsync_A pointer, bytes, stream
CALL(cudaMallocAsync, A_CALL, r.call = KVP_CALL_cudaMallocAsync; r.bytes = bytes; r.stream = STREAM(stream))
#define cudaHostAlloc_P void **pointer, size_t bytes, unsigned flags
#define cudaHostAlloc_A pointer, bytes, flags
CALL_BY(cudaHostAlloc, A_FREE, PLACED_AT(KVP_RECYCLED_ALLOC(real(cudaHostAlloc_A), bytes, flags)),
        r.call = KVP_CALL_cudaHostAlloc;
        r.bytes = bytes)
#define cudaMallocHost_P void **pointer, size_t bytes
#define cudaMallocHost_A pointer, bytes
CALL_BY(cudaMallocHost, A_FREE, PLACED_AT(KVP_RECYCLED_ALLOC(real(cudaMallocHost_A), bytes, 0)),
        r.call = KVP_CALL_cudaHostAlloc;
        r.bytes = bytes)
#define cudaHostRegister_P void *pointer, size_t bytes, unsigned flags
#define cudaHostRegister_A pointer, bytes, flags
CALL(cudaHostRegister, A_FREE, r.call = KVP_CALL_cudaHostRegister; r.bytes = bytes; r.dst = WORD(pointer))
#define cudaFree_P void *pointer
#define cudaFree_A pointer
CALL(cudaFree, A_FREE, r.call = KVP_CALL_cudaFree; r.dst = WORD(pointer))
#define cudaMemPoolTrimTo_P void *pool, size_t keep
#define cudaMemPoolTrimTo_A pool, keep
CALL(cudaMemPoolTrimTo, A_CALL, r.call = KVP_CALL_cudaMemPoolTrimTo)
#define cuMemPoolTrimTo_P void *pool, size_t keep
#define cuMemPoolTrimTo_A pool, keep
CALL(cuMemPoolTrimTo, A_CALL, r.call = KVP_CALL_cuMemPoolTrimTo)
#define cudaFreeHost_P void *pointer
#define cudaFreeHost_A pointer
CALL_BY(cudaFreeHost, A_FREE, KVP_RECYCLED_FREE, r.call = KVP_CALL_cudaFreeHost)
#define cudaHostUnregister_P void *pointer
#define cudaHostUnregister_A pointer
CALL_BY(cudaHostUnregister, A_FREE, KVP_RECYCLED_UNREGISTER, r.call = KVP_CALL_cudaHostUnregister)
#define cuMemAlloc_P uint64_t *pointer, size_t bytes
#define cuMemAlloc_A pointer, bytes
CALL_BY(cuMemAlloc, A_CALL, PLACED_AT(real(cuMemAlloc_A)), r.call = KVP_CALL_cuMemAlloc; r.bytes = bytes)
#define cuMemHostAlloc_P void **pointer, size_t bytes, unsigned flags
#define cuMemHostAlloc_A pointer, bytes, flags
CALL_BY(cuMemHostAlloc, A_FREE, PLACED_AT(KVP_RECYCLED_ALLOC(real(cuMemHostAlloc_A), bytes, flags)),
        r.call = KVP_CALL_cuMemHostAlloc;
        r.bytes = bytes)
#define cuMemAllocHost_P void **pointer, size_t bytes
#define cuMemAllocHost_A pointer, bytes
CALL_BY(cuMemAllocHost, A_FREE, PLACED_AT(KVP_RECYCLED_ALLOC(real(cuMemAllocHost_A), bytes, 0)),
        r.call = KVP_CALL_cuMemHostAlloc;
        r.bytes = bytes)
#define cuMemHostRegister_P void *pointer, size_t bytes, unsigned flags
#define cuMemHostRegister_A pointer, bytes, flags
CALL(cuMemHostRegister, A_FREE, r.call = KVP_CALL_cuMemHostRegister; r.bytes = bytes; r.dst = WORD(pointer))
#define cuMemFree_P uint64_t pointer
#define cuMemFree_A pointer
CALL(cuMemFree, A_FREE, r.call = KVP_CALL_cuMemFree; r.dst = pointer)
#define cuMemFreeHost_P void *pointer
#define cuMemFreeHost_A pointer
CALL_BY(cuMemFreeHost, A_FREE, KVP_RECYCLED_FREE, r.call = KVP_CALL_cuMemFreeHost)
#define cuMemHostUnregister_P void *pointer
#define cuMemHostUnregister_A pointer
CALL_BY(cuMemHostUnregister, A_FREE, KVP_RECYCLED_UNREGISTER, r.call = KVP_CALL_cuMemHostUnregister)

/* ---- GPU memory whose addresses stay (cuMemRelease does not say how much it was) --------------------------------- */

#define cuMemCreate_P uint64_t *handle, size_t bytes, const void *properties, uint64_t flags
#define cuMemCreate_A handle, bytes, properties, flags
CALL(cuMemCreate, A_CALL, r.call = KVP_CALL_cuMemCreate; r.bytes = bytes)
#define cuMemMap_P uint64_t pointer, size_t bytes, size_t offset, uint64_t handle, uint64_t flags
#define cuMemMap_A pointer, bytes, offset, handle, flags
CALL_BY(cuMemMap, A_FREE, KVP_MAPPED(real(cuMemMap_A)), r.call = KVP_CALL_cuMemMap; r.bytes = bytes; r.dst = pointer)
#define cuMemUnmap_P uint64_t pointer, size_t bytes
#define cuMemUnmap_A pointer, bytes
CALL_BY(cuMemUnmap, A_FREE, KVP_UNMAPPED(real(cuMemUnmap_A)), r.call = KVP_CALL_cuMemUnmap; r.bytes = bytes;
        r.dst = pointer)
#define cuMemRelease_P uint64_t handle
#define cuMemRelease_A handle
CALL(cuMemRelease, A_CALL, r.call = KVP_CALL_cuMemRelease)
#define cuMemSetAccess_P uint64_t pointer, size_t bytes, const void *access, size_t count
#define cuMemSetAccess_A pointer, bytes, access, count
CALL(cuMemSetAccess, A_CALL, r.call = KVP_CALL_cuMemSetAccess; r.bytes = bytes)
#define cuMemExportToShareableHandle_P void *shareable, uint64_t handle, int type, uint64_t flags
#define cuMemExportToShareableHandle_A shareable, handle, type, flags
CALL(cuMemExportToShareableHandle, A_CALL, r.call = KVP_CALL_cuMemExportToShareableHandle)
#define cuMemImportFromShareableHandle_P uint64_t *handle, void *shareable, int type
#define cuMemImportFromShareableHandle_A handle, shareable, type
CALL(cuMemImportFromShareableHandle, A_CALL, r.call = KVP_CALL_cuMemImportFromShareableHandle)

/* ---- functions that hand out functions ----------------------------------------------------------------------- */

/* The symbol that has the interface which cuGetProcAddress gives for a name and a version, or NULL for one
 * that we do not watch. From version `since` on a name means its _v2 form; before CUDA 3.2 addresses had 32 bits. */
static struct wrapped *driver_symbol(const char *name, int version, uint64_t flags) {
    static const struct {
        const char *name;
        int since, oldest;
    } v2[] = {{"cuMemcpyHtoD", 3020, 3020},
              {"cuMemcpyDtoH", 3020, 3020},
              {"cuMemcpyDtoD", 3020, 3020},
              {"cuMemcpyHtoDAsync", 3020, 3020},
              {"cuMemcpyDtoHAsync", 3020, 3020},
              {"cuMemcpyDtoDAsync", 3020, 3020},
              {"cuMemcpy2DAsync", 3020, 3020},
              {"cuMemcpy3DAsync", 3020, 3020},
              {"cuMemAlloc", 3020, 3020},
              {"cuMemFree", 3020, 3020},
              {"cuMemAllocHost", 3020, 3020},
              {"cuMemHostRegister", 6050, 4000},
              {"cuMemcpyBatchAsync", 13000, 1},
              {"cuGetProcAddress", 12000, 1},
              {"cuStreamBeginCapture", 10010, 10010},
              {"cuCtxDestroy", 4000, 4000},
              {"cuStreamDestroy", 4000, 4000},
              {"cuDevicePrimaryCtxReset", 11000, 11000},
              {"cuDevicePrimaryCtxRelease", 11000, 11000}};
    char symbol[64];
    const char *suffix = "";
    for (unsigned i = 0; i < sizeof v2 / sizeof *v2; i++)
        if (!strcmp(name, v2[i].name)) {
            if (version < v2[i].oldest) return NULL;
            if (version >= v2[i].since) suffix = "_v2";
        }
    struct wrapped *found = NULL;
    static const char *const per_thread[] = {"ptsz", "ptds"}; /* with a stream as an argument, and without */
    for (int i = 0; flags & 2 && !found && i < 2; i++) {      /* per-thread default stream */
        snprintf(symbol, sizeof symbol, "%s%s_%s", name, suffix, per_thread[i]);
        found = kvp_find_wrapped(symbol);
    }
    if (found) return found;
    snprintf(symbol, sizeof symbol, "%s%s", name, suffix);
    return kvp_find_wrapped(symbol);
}

static void wrap_driver(const char *name, void **pointer, int version, uint64_t flags) {
    if (!kvp_watch.on || !name || !pointer || !*pointer || name[0] != 'c' || name[1] != 'u') return;
    struct wrapped *w = driver_symbol(name, version, flags);
    if (w) *pointer = kvp_wrap_pointer(w, *pointer);
}

/* A call that is not recorded. AFTER may look at `result`. */
#define UNRECORDED(NAME, BEFORE, AFTER)                                                                                \
    typedef int NAME##_fn(NAME##_P);                                                                                   \
    static inline enum inside NAME##_level(void) { return IN_RUNTIME; }                                                \
    static inline int NAME##_via(any_fn *function, const int per_thread, NAME##_P) {                                   \
        NAME##_fn *real = (NAME##_fn *)function;                                                                       \
        (void)per_thread;                                                                                              \
        if (!real) return SYMBOL_NOT_FOUND;                                                                            \
        BEFORE;                                                                                                        \
        int result = real(NAME##_A);                                                                                   \
        AFTER;                                                                                                         \
        return result;                                                                                                 \
    }
#define RESOLVER(NAME, AFTER) UNRECORDED(NAME, (void)0, if (!result) AFTER)

#define cuGetProcAddress_P const char *name, void **pointer, int version, uint64_t flags
#define cuGetProcAddress_A name, pointer, version, flags
RESOLVER(cuGetProcAddress, wrap_driver(name, pointer, version, flags))
#define cuGetProcAddress_v2_P const char *name, void **pointer, int version, uint64_t flags, void *status
#define cuGetProcAddress_v2_A name, pointer, version, flags, status
RESOLVER(cuGetProcAddress_v2, wrap_driver(name, pointer, version, flags))

/* The version that the runtime asks for: its own. 0, unknown, wraps nothing whose interface depends on it. */
static int version_beside(void *real) {
    int version = 0;
    int (*get_version)(int *) = (int (*)(int *))kvp_symbol_beside(real, "cudaRuntimeGetVersion");
    if (get_version) get_version(&version);
    return version;
}
#define STREAM_FLAGS (per_thread && !flags ? 2 : flags)
#define cudaGetDriverEntryPoint_P const char *name, void **pointer, uint64_t flags, void *status
#define cudaGetDriverEntryPoint_A name, pointer, flags, status
RESOLVER(cudaGetDriverEntryPoint, wrap_driver(name, pointer, version_beside((void *)function), STREAM_FLAGS))
#define cudaGetDriverEntryPointByVersion_P                                                                             \
    const char *name, void **pointer, unsigned version, uint64_t flags, void *status
#define cudaGetDriverEntryPointByVersion_A name, pointer, version, flags, status
RESOLVER(cudaGetDriverEntryPointByVersion, wrap_driver(name, pointer, (int)version, STREAM_FLAGS))

/* ---- captures of graphs: what is being captured is only counted (cures.c) -------------------------------------- */

enum { CAPTURES = 900, WRONG_THREAD = 908 }; /* the errors that end a capture lie between */
static __thread int in_capture_call
    __attribute__((tls_model("initial-exec"))); /* the runtime's call makes the driver's */

static void nothing_captured(void) {
    int now = atomic_load(&kvp_watch.captures);
    while (now > 0 && !atomic_compare_exchange_weak(&kvp_watch.captures, &now, now - 1)) {
    }
    kvp_marks_nothing_holds();
}

static void capture_begins(void) {
    if (!in_capture_call++) kvp_marks_hold(1);
}

static void capture_began(int result, uint64_t stream) {
    if (--in_capture_call) return;
    if (!result) kvp_graph_begins(stream);
    kvp_marks_go_on();
    if (result) {
        kvp_marks_capture_ends();
        nothing_captured();
    }
}

static void capture_ended(int result, void **graph) {
    if (--in_capture_call || (result && (result < CAPTURES || result >= WRONG_THREAD))) return;
    kvp_graph_ends(!result && graph ? *graph : NULL);
    kvp_marks_capture_ends();
    nothing_captured();
}

#define BEGINS_CAPTURE(NAME) UNRECORDED(NAME, capture_begins(), capture_began(result, STREAM(stream)))
#define ADDS_TO_GRAPH(NAME)                                                                                            \
    UNRECORDED(NAME, capture_begins(), (capture_began(result, STREAM(stream)), kvp_graph_holds_more()))
#define ENDS_CAPTURE(NAME) UNRECORDED(NAME, in_capture_call++, capture_ended(result, graph))
#define cudaStreamBeginCapture_P void *stream, int mode
#define cudaStreamBeginCapture_A stream, mode
BEGINS_CAPTURE(cudaStreamBeginCapture)
#define TO_GRAPH_P void *stream, void *graph, const void *dependencies, const void *data, size_t count, int mode
#define TO_GRAPH_A stream, graph, dependencies, data, count, mode
#define cudaStreamBeginCaptureToGraph_P TO_GRAPH_P
#define cudaStreamBeginCaptureToGraph_A TO_GRAPH_A
ADDS_TO_GRAPH(cudaStreamBeginCaptureToGraph)
#define cudaStreamEndCapture_P void *stream, void **graph
#define cudaStreamEndCapture_A stream, graph
ENDS_CAPTURE(cudaStreamEndCapture)
#define cuStreamBeginCapture_v2_P void *stream, int mode
#define cuStreamBeginCapture_v2_A stream, mode
BEGINS_CAPTURE(cuStreamBeginCapture_v2)
#define cuStreamBeginCaptureToGraph_P TO_GRAPH_P
#define cuStreamBeginCaptureToGraph_A TO_GRAPH_A
ADDS_TO_GRAPH(cuStreamBeginCaptureToGraph)
#define cuStreamEndCapture_P void *stream, void **graph
#define cuStreamEndCapture_A stream, graph
ENDS_CAPTURE(cuStreamEndCapture)

/* Of every form and version the first two parameters are these; words that a function does not take it does not read.
 */
#define INSTANTIATE_P void **launchable, void *graph, uintptr_t more, void *text, size_t size
#define INSTANTIATE_A launchable, graph, more, text, size
#define INSTANTIATES(NAME)                                                                                             \
    UNRECORDED(NAME, (void)0, if (!result && launchable && kvp_watch.on) instantiated(*launchable, graph))
static void instantiated(const void *launchable, const void *graph) {
    uint32_t inside = kvp_thread.inside;
    if (inside == IN_KVPROBE) return;
    kvp_thread.inside = IN_KVPROBE;
    kvp_graph_instantiated(launchable, graph);
    kvp_thread.inside = inside;
}
#define cudaGraphInstantiate_P INSTANTIATE_P
#define cudaGraphInstantiate_A INSTANTIATE_A
INSTANTIATES(cudaGraphInstantiate)
#define cudaGraphInstantiateWithFlags_P INSTANTIATE_P
#define cudaGraphInstantiateWithFlags_A INSTANTIATE_A
INSTANTIATES(cudaGraphInstantiateWithFlags)
#define cudaGraphInstantiateWithParams_P INSTANTIATE_P
#define cudaGraphInstantiateWithParams_A INSTANTIATE_A
INSTANTIATES(cudaGraphInstantiateWithParams)

/* ---- contexts that end (cures.c) -------------------------------------------------------------------------------- */

#define ENDS_CONTEXT(NAME)                                                                                             \
    UNRECORDED(NAME,                                                                                                   \
               (kvp_context_ends(), kvp_recycle_context_ends(), kvp_marks_context_ends(), kvp_witness_context_ends()), \
               kvp_recycle_context_ended())
#define cudaDeviceReset_P void *unused
#define cudaDeviceReset_A unused
ENDS_CONTEXT(cudaDeviceReset)
#define cuCtxDestroy_P void *context
#define cuCtxDestroy_A context
ENDS_CONTEXT(cuCtxDestroy)
#define cuDevicePrimaryCtxReset_P int device
#define cuDevicePrimaryCtxReset_A device
ENDS_CONTEXT(cuDevicePrimaryCtxReset)
#define cuDevicePrimaryCtxRelease_P int device
#define cuDevicePrimaryCtxRelease_A device
ENDS_CONTEXT(cuDevicePrimaryCtxRelease)

/* ---- addresses of GPU memory that are given back (prepare.c) ----------------------------------------------------- */

#define cuMemAddressFree_P uint64_t pointer, size_t bytes
#define cuMemAddressFree_A pointer, bytes
UNRECORDED(cuMemAddressFree, (void)0, if (!result && kvp_watch.recycles) kvp_prepare_unreserved(pointer, bytes))

/* ---- streams that end (marks.c) --------------------------------------------------------------------------------- */

#define ENDS_STREAM(NAME) UNRECORDED(NAME, kvp_marks_stream_ends(WORD(stream)), (void)0)
#define cudaStreamDestroy_P void *stream
#define cudaStreamDestroy_A stream
ENDS_STREAM(cudaStreamDestroy)
#define cuStreamDestroy_P void *stream
#define cuStreamDestroy_A stream
ENDS_STREAM(cuStreamDestroy)

/* ---- symbols: X(call, symbol, per-thread default stream) --------------------------------------------- */

#define BOTH(X, NAME) X(NAME, NAME, 0) X(NAME, NAME##_ptsz, 1)
#define BOTH_SYNC(X, NAME, SYMBOL) X(NAME, SYMBOL, 0) X(NAME, SYMBOL##_ptds, 1)
/* By hand: clang-format moves this table at every pass. */
/* clang-format off */
#define SYMBOLS(X) \
    BOTH(X, cudaMemcpyAsync) BOTH(X, cudaMemcpy2DAsync) BOTH(X, cudaMemcpy3DAsync) \
    X(cudaMemcpyPeerAsync, cudaMemcpyPeerAsync, 0) BOTH(X, cudaMemcpyBatchAsync) \
    BOTH(X, cudaMemcpyWithAttributesAsync) BOTH_SYNC(X, cudaMemcpy, cudaMemcpy) \
    BOTH_SYNC(X, cudaMemcpy2D, cudaMemcpy2D) BOTH_SYNC(X, cuMemcpy, cuMemcpy) \
    BOTH_SYNC(X, cuMemcpyHtoD, cuMemcpyHtoD_v2) BOTH_SYNC(X, cuMemcpyDtoH, cuMemcpyDtoH_v2) \
    BOTH_SYNC(X, cuMemcpyDtoD, cuMemcpyDtoD_v2) \
    BOTH(X, cudaMemsetAsync) BOTH(X, cuMemcpyAsync) BOTH(X, cuMemcpyBatchAsync) BOTH(X, cuMemcpyBatchAsync_v2) \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 0) X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2_ptsz, 1) \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 0) X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2_ptsz, 1) \
    X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 0) X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2_ptsz, 1) \
    X(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, 0) X(cuMemcpy2DAsync, cuMemcpy2DAsync_v2_ptsz, 1) \
    X(cuMemcpy3DAsync, cuMemcpy3DAsync_v2, 0) X(cuMemcpy3DAsync, cuMemcpy3DAsync_v2_ptsz, 1) \
    BOTH(X, cudaLaunchKernel) BOTH(X, cudaLaunchKernelExC) BOTH(X, cuLaunchKernel) BOTH(X, cuLaunchKernelEx) \
    BOTH(X, cudaGraphLaunch) BOTH(X, cudaStreamSynchronize) X(cudaEventSynchronize, cudaEventSynchronize, 0) \
    X(cudaDeviceSynchronize, cudaDeviceSynchronize, 0) BOTH(X, cuStreamSynchronize) \
    X(cuEventSynchronize, cuEventSynchronize, 0) X(cuCtxSynchronize, cuCtxSynchronize, 0) \
    X(cuCtxSynchronize, cuCtxSynchronize_v2, 0) BOTH(X, cudaEventRecord) BOTH(X, cudaEventRecordWithFlags) \
    BOTH(X, cudaStreamWaitEvent) X(cudaStreamCreate, cudaStreamCreate, 0) \
    X(cudaStreamCreateWithFlags, cudaStreamCreateWithFlags, 0) \
    X(cudaStreamCreateWithPriority, cudaStreamCreateWithPriority, 0) X(cudaEventCreate, cudaEventCreate, 0) \
    X(cudaEventCreateWithFlags, cudaEventCreateWithFlags, 0) X(cuStreamCreate, cuStreamCreate, 0) \
    X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 0) X(cuEventCreate, cuEventCreate, 0) \
    X(cudaMalloc, cudaMalloc, 0) BOTH(X, cudaMallocAsync) X(cudaHostAlloc, cudaHostAlloc, 0) \
    X(cudaMallocHost, cudaMallocHost, 0) X(cudaHostRegister, cudaHostRegister, 0) X(cudaFree, cudaFree, 0) \
    X(cudaMemPoolTrimTo, cudaMemPoolTrimTo, 0) X(cuMemPoolTrimTo, cuMemPoolTrimTo, 0) \
    X(cudaFreeHost, cudaFreeHost, 0) X(cudaHostUnregister, cudaHostUnregister, 0) \
    X(cuMemAlloc, cuMemAlloc_v2, 0) X(cuMemHostAlloc, cuMemHostAlloc, 0) X(cuMemAllocHost, cuMemAllocHost_v2, 0) \
    X(cuMemHostRegister, cuMemHostRegister, 0) X(cuMemHostRegister, cuMemHostRegister_v2, 0) \
    X(cuMemFree, cuMemFree_v2, 0) X(cuMemFreeHost, cuMemFreeHost, 0) \
    X(cuMemHostUnregister, cuMemHostUnregister, 0) X(cuMemCreate, cuMemCreate, 0) X(cuMemMap, cuMemMap, 0) \
    X(cuMemUnmap, cuMemUnmap, 0) X(cuMemRelease, cuMemRelease, 0) X(cuMemAddressFree, cuMemAddressFree, 0) X(cuMemSetAccess, cuMemSetAccess, 0) \
    X(cuMemExportToShareableHandle, cuMemExportToShareableHandle, 0) \
    X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 0) X(cuGetProcAddress, cuGetProcAddress, 0) \
    X(cuGetProcAddress_v2, cuGetProcAddress_v2, 0) BOTH(X, cudaGetDriverEntryPoint) \
    BOTH(X, cudaGetDriverEntryPointByVersion) \
    X(cudaGraphInstantiate, cudaGraphInstantiate, 0) \
    X(cudaGraphInstantiateWithFlags, cudaGraphInstantiateWithFlags, 0) \
    BOTH(X, cudaGraphInstantiateWithParams) BOTH(X, cudaLaunchHostFunc) BOTH(X, cuLaunchHostFunc) \
    BOTH(X, cudaStreamAddCallback) BOTH(X, cuStreamAddCallback) \
    BOTH(X, cudaStreamBeginCapture) BOTH(X, cudaStreamBeginCaptureToGraph) BOTH(X, cudaStreamEndCapture) \
    BOTH(X, cuStreamBeginCapture_v2) BOTH(X, cuStreamBeginCaptureToGraph) BOTH(X, cuStreamEndCapture) \
    X(cudaStreamDestroy, cudaStreamDestroy, 0) X(cuStreamDestroy, cuStreamDestroy_v2, 0) \
    X(cudaDeviceReset, cudaDeviceReset, 0) X(cuCtxDestroy, cuCtxDestroy_v2, 0) \
    X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, 0) \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 0)
/* clang-format on */

enum {
#define X(CALL_NAME, SYMBOL, PER_THREAD) INDEX_##SYMBOL,
    SYMBOLS(X)
#undef X
        INDEX_COUNT
};

/* Several functions can have one name: those of other runtimes, and what tools put before them. Each has a wrapper of
 * its own, which knows its function. The first one, as good as always the only one, has its call to itself. A call of
 * the driver's inside one of the runtime's is passed on at once. */
#define REAL(SYMBOL, I) kvp_wrapped[INDEX_##SYMBOL].real[I]
#define FURTHER(CALL_NAME, SYMBOL, I)                                                                                  \
    static int SYMBOL##_bound_##I(CALL_NAME##_P) { return SYMBOL##_through(REAL(SYMBOL, I), CALL_NAME##_A); }
#define FURTHER_4(C, S, I, J, K, L) FURTHER(C, S, I) FURTHER(C, S, J) FURTHER(C, S, K) FURTHER(C, S, L)
#define X(CALL_NAME, SYMBOL, PER_THREAD)                                                                               \
    static KVP_HOT __attribute__((noinline)) int SYMBOL##_first(CALL_NAME##_P) {                                       \
        return CALL_NAME##_via(REAL(SYMBOL, 0), PER_THREAD, CALL_NAME##_A);                                            \
    }                                                                                                                  \
    static KVP_HOT int SYMBOL##_bound_0(CALL_NAME##_P) {                                                               \
        if (CALL_NAME##_level() == IN_RUNTIME) return CALL_NAME##_via(REAL(SYMBOL, 0), PER_THREAD, CALL_NAME##_A);     \
        CALL_NAME##_fn *real = (CALL_NAME##_fn *)REAL(SYMBOL, 0);                                                      \
        return real && kvp_thread.inside == IN_RUNTIME ? real(CALL_NAME##_A) : SYMBOL##_first(CALL_NAME##_A);          \
    }                                                                                                                  \
    static __attribute__((noinline)) int SYMBOL##_through(any_fn *function, CALL_NAME##_P) {                           \
        return CALL_NAME##_via(function, PER_THREAD, CALL_NAME##_A);                                                   \
    }                                                                                                                  \
    FURTHER(CALL_NAME, SYMBOL, 1)                                                                                      \
    FURTHER(CALL_NAME, SYMBOL, 2)                                                                                      \
    FURTHER(CALL_NAME, SYMBOL, 3)                                                                                      \
    FURTHER_4(CALL_NAME, SYMBOL, 4, 5, 6, 7)                                                                           \
    FURTHER_4(CALL_NAME, SYMBOL, 8, 9, 10, 11)                                                                         \
    FURTHER_4(CALL_NAME, SYMBOL, 12, 13, 14, 15)
SYMBOLS(X)
#undef X

#define TO(S, I) (any_fn *)S##_bound_##I
#define TO_4(S, I, J, K, L) TO(S, I), TO(S, J), TO(S, K), TO(S, L)
struct wrapped kvp_wrapped[] = {
#define X(CALL_NAME, SYMBOL, PER_THREAD)                                                                               \
    [INDEX_##SYMBOL] = {.name = #SYMBOL,                                                                               \
                        .bound = {TO_4(SYMBOL, 0, 1, 2, 3), TO_4(SYMBOL, 4, 5, 6, 7), TO_4(SYMBOL, 8, 9, 10, 11),      \
                                  TO_4(SYMBOL, 12, 13, 14, 15)}},
    SYMBOLS(X)
#undef X
};
const int kvp_wrapped_count = INDEX_COUNT;
