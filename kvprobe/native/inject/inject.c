/* Has a library loaded into a running process and a function of it called: the injector, a process of its own that
 * nobody's Ctrl-C reaches, and what it says to whoever asked.
 *
 * It answers with one line: "ok RESULT HELD_NS" (the function's result; how long threads were held), or
 * "error TEXT". With `undo` it then waits for one letter: "k", what was done is kept; anything else, or the end of the
 * connection, and it is undone. */
#define _GNU_SOURCE
#include "inject.h"

#include <errno.h>
#include <link.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((visibility("default"))) int kvp_inject(int pid, const struct kvp_injection *what, int connection);

#if defined(__x86_64__)
enum { LOOK_MS = 2, BEAT_MS = 50, CLEAR_MS = 1000 };

struct injector {
    struct target t;
    int connection;
    uint64_t base, data, until_ns; /* `data`: of a struct injected, in the process */
    struct injected in;
};

static void say(const struct injector *i, const char *kind, const char *text) {
    char line[1024];
    int bytes = snprintf(line, sizeof line, "%s %s\n", kind, text);
    if (send(i->connection, line, (size_t)bytes, MSG_NOSIGNAL) < 0) return;
}

/* ---- the thread in the process ------------------------------------------------------------------------------------
 */

#define FIELD(NAME) (i->data + offsetof(struct injected, NAME))

static int read_word(const struct injector *i, uint64_t address, uint32_t *word) {
    uint32_t magic = 0;
    return kvp_target_read(&i->t, FIELD(magic), &magic, 4) && magic == INJECTED_MAGIC &&
           kvp_target_read(&i->t, address, word, 4);
}

static void order(struct injector *i, enum order what) {
    uint32_t word = what;
    kvp_target_write(&i->t, FIELD(order), &word, 4);
}

static void beat(struct injector *i) {
    i->in.beat++;
    kvp_target_write(&i->t, FIELD(beat), (const void *)&i->in.beat, 4);
}

/* Whether whoever asked has gone, or has changed their mind; 'k' is left where it is. */
static int unwanted(const struct injector *i, int wait_ms) {
    char letter = 0;
    struct pollfd p = {.fd = i->connection, .events = POLLIN};
    if (poll(&p, 1, wait_ms) <= 0) return 0;
    return recv(i->connection, &letter, 1, MSG_PEEK) <= 0 || letter != 'k';
}

static const char *address_all(struct injector *i) {
    const struct {
        const char *name;
        void *to;
    } needed[] = {{"munmap", &i->in.munmap},
                  {"dlopen", &i->in.dlopen},
                  {"dlsym", &i->in.dlsym},
                  {"dlclose", &i->in.dlclose},
                  {"dlerror", &i->in.dlerror},
                  {"mprotect", &i->in.mprotect},
                  {"madvise", &i->in.madvise},
                  {"nanosleep", &i->in.nanosleep},
                  {"pthread_self", &i->in.pthread_self},
                  {"pthread_detach", &i->in.pthread_detach}};
    for (size_t n = 0; n < sizeof needed / sizeof *needed; n++) {
        uint64_t address = kvp_target_symbol(&i->t, needed[n].name);
        if (!address) return "its C library is older than 2.34, and libpthread or libdl is not loaded";
        memcpy(needed[n].to, &address, sizeof address);
    }
    return NULL;
}

static const char LOST[] = "it has ended, or the machine is too busy to follow it: try again";
static const char SLOW[] = "its thread did not come back in time: try again";

/* Maps the memory, fills it and makes the thread. NULL, or what went wrong. */
static const char *make_thread(struct injector *i, struct borrowed *b, uint64_t create) {
    uint64_t made = 0, ignored, bytes = CODE_BYTES + ((sizeof i->in + 4095) & ~UINT64_C(4095));
    /* at an address that is known, should a thread be too slow to say; not writable and executable at once, which some
     * systems refuse: the thread itself opens its data */
    int mapped = i->base && kvp_target_is_code(&i->t, i->base, i->base + bytes);
    uint64_t base = mapped ? i->base : i->t.free_at;
    const uint64_t map[6] = {base, bytes, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
                             (uint64_t)-1};
    i->base = base;
    if (!mapped && (!kvp_borrow_system_call(b, SYS_mmap, map, &base) || base == (uint64_t)-EEXIST)) return SLOW;
    if (base > (uint64_t)-4096) return "the system refuses it executable memory (SELinux, MemoryDenyWriteExecute)";
    STEP(5);
    i->data = base + CODE_BYTES;
    i->in.base = (void *)(uintptr_t)base, i->in.bytes = bytes, i->in.magic = INJECTED_MAGIC;
    size_t code_bytes = (size_t)(__stop_kvp_stub - __start_kvp_stub);
    if (code_bytes > CODE_BYTES || !kvp_target_write(&i->t, base, __start_kvp_stub, code_bytes) ||
        !kvp_target_write(&i->t, i->data, &i->in, sizeof i->in) || !kvp_target_write(&i->t, b->scratch, &made, 8)) {
        kvp_borrow_system_call(b, SYS_munmap, (const uint64_t[6]){base, bytes}, &ignored);
        return "the system does not permit to write into it";
    }
    STEP(6);
    uint64_t entry = base + (uint64_t)(kvp_stub_entry - __start_kvp_stub);
    int back = kvp_borrow_call(b, create, (const uint64_t[4]){b->scratch, 0, entry, i->data});
    if (b->alone) return NULL; /* the thread will show */
    STEP(7);
    if (back && kvp_target_read(&i->t, b->scratch, &made, 8) && made) return NULL;
    if (back) kvp_borrow_system_call(b, SYS_munmap, (const uint64_t[6]){base, bytes}, &ignored);
    return back ? "it could not make a thread (a limit of threads or of memory)" : "it has ended, or its thread failed";
}

static const char *why_none(const struct target *t) {
    if (t->stuck) return t->stuck;
    if (t->stopped) return "it is stopped by a signal: let it go on first (kill -CONT)";
    if (t->refused)
        return "the system does not permit to trace it; in a container, add the capability SYS_PTRACE (docker run "
               "--cap-add SYS_PTRACE)";
    return "none of its threads came out of the allocator and the loader in time: try again";
}

/* The loader is at work. In a child of a fork that may have been so for good: there it would end the process. */
static int loader_is_busy(struct injector *i) {
    int32_t state = RT_CONSISTENT;
    uint64_t debug = kvp_target_symbol(&i->t, "_r_debug");
    if (debug) kvp_target_read(&i->t, debug + offsetof(struct r_debug, r_state), &state, sizeof state);
    return state != RT_CONSISTENT;
}

static const char *reach(struct injector *i) {
    static struct borrowed b;
    uint64_t create = kvp_target_symbol(&i->t, "pthread_create");
    const char *error = address_all(i);
    if (error || !create) return error ? error : "its C library is older than 2.34, and libpthread is not loaded";
    while (loader_is_busy(i)) {
        nanosleep(&(struct timespec){0, LOOK_MS * 1000000}, NULL);
        if (kvp_now_ns() > i->until_ns) return "its loader is at work, or was when the process was forked: try again";
    }
    do {
        if (!kvp_borrow(&i->t, &b, i->until_ns)) return why_none(&i->t);
        error = make_thread(i, &b, create);
        kvp_give_back(&b);
    } while (error == SLOW);
    return error;
}

/* Looks after the thread in the process until it has called the function. NULL, or what went wrong. */
static const char *follow(struct injector *i) {
    for (;; beat(i)) {
        uint32_t state = STARTING;
        if (!read_word(i, FIELD(state), &state)) return LOST; /* it ended, or heard nothing for LET_GO_MS */
        if (state == FAILED) {
            kvp_target_read(&i->t, FIELD(error), i->t.text, sizeof i->in.error - 1);
            return *i->t.text ? i->t.text : "the library has not what is needed";
        }
        if (state == DONE) return NULL;
        if (state == LOADED) order(i, GO_ON);
        if (unwanted(i, LOOK_MS)) return "nobody waits for it any more";
        if (kvp_now_ns() > i->until_ns)
            return state == STARTING ? "a library that it loads has not finished loading: try again"
                                     : "it did not finish in time: try again";
    }
}

/* Until the thread has taken its memory away, and is as good as gone. */
static void wait_until_clear(struct injector *i) {
    uint32_t word;
    uint64_t end_ns = kvp_now_ns() + CLEAR_MS * UINT64_C(1000000);
    while (kvp_now_ns() < end_ns && read_word(i, FIELD(state), &word)) {
        beat(i);
        nanosleep(&(struct timespec){0, LOOK_MS * 1000000}, NULL);
    }
}

static void converse(struct injector *i, int waits) {
    const char *error;
    do {
        i->base = 0;
        error = reach(i);
        STEP(12);
        if (!error) error = follow(i);
        STEP(13);
    } while (error == LOST && kvp_now_ns() < i->until_ns && !kill(i->t.pid, 0));
    if (error) {
        if (i->data) order(i, UNDO);
        if (i->data) wait_until_clear(i);
        say(i, "error", error);
        return;
    }
    char text[64];
    uint32_t result = 0;
    read_word(i, FIELD(result), &result);
    snprintf(text, sizeof text, "%d %llu", (int)result, (unsigned long long)i->t.held_ns);
    if (waits && (int)result >= 0) {
        say(i, "ok", text);
        struct pollfd p = {.fd = i->connection, .events = POLLIN};
        while (!poll(&p, 1, BEAT_MS)) beat(i);
        order(i, unwanted(i, 0) ? UNDO : LEAVE_IT);
        wait_until_clear(i);
        say(i, "end", "");
        return;
    }
    order(i, LEAVE_IT);
    wait_until_clear(i);
    say(i, "ok", text);
}

static void fill(struct injected *in, const struct kvp_injection *what) {
    snprintf(in->library, sizeof in->library, "%s", what->library);
    snprintf(in->folder, sizeof in->folder, "%s", what->folder);
    snprintf(in->detail, sizeof in->detail, "%s", what->detail);
    snprintf(in->function, sizeof in->function, "%s", what->function);
    snprintf(in->undo, sizeof in->undo, "%s", what->undo);
    in->max_bytes = what->max_bytes;
    in->pause.tv_nsec = STUB_PAUSE_MS * 1000000;
}

static void inject(pid_t pid, const struct kvp_injection *what, int connection) {
    static struct injector i;
    i.connection = connection;
    i.until_ns = kvp_now_ns() + (uint64_t)what->deadline_ms * 1000000;
    fill(&i.in, what);
    const char *error = kvp_target_open(&i.t, pid);
    if (error)
        say(&i, "error", error);
    else
        converse(&i, what->undo[0] != 0);
}
#endif

/* Returns the injector's pid, or a negative errno. */
int kvp_inject(int pid, const struct kvp_injection *what, int connection) {
#if defined(__x86_64__)
    pid_t child = fork();
    if (child) return child < 0 ? -errno : child;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    setsid();
    prctl(PR_SET_NAME, "kvprobe-attach", 0, 0, 0);
    /* where it may: a thread that is held waits for this process, whatever else the machine does */
    if (sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 1})) setpriority(PRIO_PROCESS, 0, -20);
    /* it must not keep open what others wait for the end of */
    int kept = dup2(connection, 3);
    for (int fd = 0; fd < 3; fd++) close(fd);
    if (syscall(SYS_close_range, 4u, ~0u, 0))
        for (int fd = 4; fd < 65536; fd++) close(fd);
    inject((pid_t)pid, what, kept);
    _exit(0);
#else
    (void)pid, (void)what, (void)connection;
    return -ENOTSUP;
#endif
}
