/* The gate of a test: calls that the test forbids are written to a file as they return, each with the Python stack of
 * its thread. One line a call, then the stack as faulthandler writes it, then a line ".":
 *
 *   call direction bytes count stream start_ns dur_ns tid after_copy queue_full
 *
 * Where only calls below some modules count, the others leave the file again and take none of its space; a stack that
 * faulthandler cut is written once more behind what says so, whole.
 *
 * `direction` is that of the record (kvp.h). `after_copy` is 1 for a synchronisation that directly follows a copy of
 * the same thread on the same stream: the copy was waited for. */
#define _GNU_SOURCE
#include "interpose.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum rule { NEVER, ALWAYS, IF_PAGEABLE };
enum { STREAM_SYNC = 17, CU_STREAM_SYNC = 32 }; /* of KVP_CALLS */
enum { CALLS = 128, A_COPY_CALL = 128 };        /* a table's byte: a rule, and whether the call copies */

typedef struct {
    const uint8_t *rules;
    void (*write_stack)(int); /* faulthandler's handler of `signal`: needs no GIL, and no signal is raised */
    int32_t signal, fd;
    uint64_t slow_ns;             /* a copy of at least that is written, too; 0: none */
    uint64_t (*queue_full)(void); /* of the host runtime: calls of this thread that found a full queue */
    uint64_t room, slow_room; /* calls that may be written: those that break a rule, and slow ones that break none */
    const char *below;        /* texts of which one is in the stack of a call that counts, each behind the zero of
                                 the one before, the last one empty; NULL: all calls count */
    kvp_python python;
} kvp_gate_options;

typedef struct {
    uint64_t left_out, slow_left_out; /* calls that found no space, or could not be written */
    int32_t blind;                    /* nothing of this process was seen any more */
} kvp_gate_seen;

static struct {
    kvp_gate_options how;
    kvp_gate_seen seen;
    uint8_t rules[CALLS];
    int pid;
    uint32_t opened; /* how often */
} gate;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static __thread struct {
    uint64_t stream, full;
    uint32_t opened; /* the gate that the rest is of */
    int copied;
} before __attribute__((tls_model("initial-exec")));

CUDA_EXPORT int kvprobe_gate_open(const kvp_gate_options *options);
CUDA_EXPORT void kvprobe_gate_close(kvp_gate_seen *seen);

/* 0, -EBUSY where one is open, -ENODEV where this process's calls are not seen. What `options` names stays until
 * kvprobe_gate_close. */
int kvprobe_gate_open(const kvp_gate_options *options) {
    if (kvp_watch.gate) return -EBUSY;
    if (!kvp_watch.on) return -ENODEV;
    gate.how = *options;
    memcpy(gate.rules, options->rules, CALLS);
    gate.pid = (int)getpid();
    memset(&gate.seen, 0, sizeof gate.seen);
    gate.opened++;
    kvp_watch.gate = 1;
    return 0;
}

void kvprobe_gate_close(kvp_gate_seen *seen) {
    pthread_mutex_lock(&writing);
    kvp_watch.gate = 0;
    pthread_mutex_unlock(&writing);
    gate.seen.blind = !kvp_watch.on;
    *seen = gate.seen;
}

static int put(const char *text, size_t bytes) {
    while (bytes) {
        ssize_t done = write(gate.how.fd, text, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return 0;
        text += done, bytes -= (size_t)done;
    }
    return 1;
}

/* What stands in the file from `start` on, ended by a zero; NULL: it cannot be had. */
static char *written_since(off_t start) {
    off_t end = lseek(gate.how.fd, 0, SEEK_CUR);
    size_t bytes = end > start ? (size_t)(end - start) : 0;
    char *text = malloc(bytes + 1);
    if (!text) return NULL;
    ssize_t got = pread(gate.how.fd, text, bytes, start);
    text[got > 0 ? got : 0] = 0;
    return text;
}

/* Whether faulthandler may have left some of it out: frames behind the hundredth, which not every Python's says, or the
 * end of a long name of a file. */
static int is_cut(const char *stack) {
    enum { MOST_FRAMES = 100 };
    int frames = 0;
    for (const char *at = stack; (at = strstr(at, "  File \"")); at++) frames++;
    return frames >= MOST_FRAMES || strstr(stack, "...\", line ");
}

static int names_one(const char *stack, const char *texts) {
    for (; *texts; texts += strlen(texts) + 1)
        if (strstr(stack, texts)) return 1;
    return 0;
}

/* Whether the call whose stack stands in the file from `start` on counts. One whose stack cannot be seen whole does:
 * what is not known passes no test. */
static int counts(off_t start) {
    if (!gate.how.below) return 1;
    char *stack = written_since(start);
    int whole = stack != NULL;
    if (stack && is_cut(stack)) {
        static const char again[] = "  ...\n"; /* also where only a name was cut */
        whole = put(again, sizeof again - 1) && kvp_write_whole_stack(&gate.how.python, gate.how.fd);
        free(stack);
        stack = written_since(start);
    }
    int found = !whole || !stack || names_one(stack, gate.how.below);
    free(stack);
    return found;
}

/* Writes a call down, unless it does not count. */
static void write_call(const char *line, size_t bytes, uint64_t *room, uint64_t *left_out) {
    off_t start = lseek(gate.how.fd, 0, SEEK_CUR);
    if (*room) {
        int whole = put(line, bytes);
        off_t stack = lseek(gate.how.fd, 0, SEEK_CUR);
        gate.how.write_stack(gate.how.signal);
        int counted = counts(stack);
        whole = put(".\n", 2) && whole; /* else some of the stack may be missing, too */
        if (whole && counted) {
            --*room;
            return;
        }
        if (ftruncate(gate.how.fd, start) == 0) lseek(gate.how.fd, start, SEEK_SET);
        if (whole) return;
    }
    ++*left_out;
}

static void report(const kvp_record *r, int after_copy, int full, int only_slow) {
    char line[192];
    int length =
        snprintf(line, sizeof line, "%d %d %llu %u %llu %llu %llu %u %d %d\n", r->call, r->direction,
                 (unsigned long long)r->bytes, r->count, (unsigned long long)r->stream, (unsigned long long)r->start_ns,
                 (unsigned long long)r->dur_ns, (unsigned)syscall(SYS_gettid), after_copy, full);
    pthread_mutex_lock(&writing);
    if (kvp_watch.gate && gate.pid == (int)getpid()) { /* a forked child's calls are not the test's */
        uint64_t *room = only_slow ? &gate.how.slow_room : &gate.how.room;
        write_call(line, (size_t)length, room, only_slow ? &gate.seen.slow_left_out : &gate.seen.left_out);
    }
    pthread_mutex_unlock(&writing);
}

void kvp_gate_begin(void) {
    if (before.opened != gate.opened) {
        before.opened = gate.opened;
        before.copied = 0;
    }
    before.full = gate.how.queue_full ? gate.how.queue_full() : 0;
}

void kvp_gate(const kvp_record *r) {
    if (before.opened != gate.opened) return; /* it began before the gate was there */
    int was = errno;
    uint8_t rule = r->call < CALLS ? gate.rules[r->call] : NEVER;
    int copies = rule & A_COPY_CALL;
    rule &= (uint8_t)~A_COPY_CALL;
    int full = gate.how.queue_full && gate.how.queue_full() != before.full;
    int waits = r->call == STREAM_SYNC || r->call == CU_STREAM_SYNC;
    int after_copy = before.copied && waits && r->stream == before.stream;
    int slow = gate.how.slow_ns && copies && r->dur_ns >= gate.how.slow_ns;
    int breaks = rule == ALWAYS || full || (rule == IF_PAGEABLE && r->direction >> 4 == KVP_MEM_PAGEABLE);
    if (breaks || slow) report(r, after_copy, full, !breaks);
    before.copied = copies;
    before.stream = r->stream;
    errno = was;
}
