/* The gate of a test: calls that the test forbids are written to a file as they return, each with the Python stack of
 * its thread. One line a call, then the stack as faulthandler writes it, then a line ".":
 *
 *   call direction bytes count stream start_ns dur_ns tid after_copy queue_full
 *
 * `direction` is that of the record (kvp.h). `after_copy` is 1 for a synchronisation that directly follows a copy of
 * the same thread on the same stream: the copy was waited for. */
#define _GNU_SOURCE
#include "interpose.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

enum rule { NEVER, ALWAYS, IF_PAGEABLE };
enum { STREAM_SYNC = 17, CU_STREAM_SYNC = 32 }; /* of KVP_CALLS */
enum { CALLS = 128, A_COPY_CALL = 128 };        /* a table's byte: a rule, and whether the call copies */

static struct {
    uint8_t rules[CALLS];
    void (*write_stack)(int); /* faulthandler's handler of `signal`: needs no GIL, and no signal is raised */
    int signal, fd, pid;
    uint64_t slow_ns;             /* a copy of at least that is written, too; 0: none */
    uint64_t (*queue_full)(void); /* of the host runtime: calls of this thread that found a full queue */
    uint32_t opened;              /* how often */
    uint64_t room, left_out;      /* calls that may still be written, and those that were not */
} gate;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static __thread struct {
    uint64_t stream, full;
    uint32_t opened; /* the gate that the rest is of */
    int copied;
} before __attribute__((tls_model("initial-exec")));

CUDA_EXPORT int kvprobe_gate_open(const uint8_t *rules, void (*write_stack)(int), int signal, int fd, uint64_t slow_ns,
                                  uint64_t (*queue_full)(void), uint64_t room);
CUDA_EXPORT uint64_t kvprobe_gate_close(void);

/* 0, or -EBUSY where one is open. */
int kvprobe_gate_open(const uint8_t *rules, void (*write_stack)(int), int signal, int fd, uint64_t slow_ns,
                      uint64_t (*queue_full)(void), uint64_t room) {
    if (kvp_watch.gate) return -EBUSY;
    memcpy(gate.rules, rules, CALLS);
    gate.write_stack = write_stack;
    gate.signal = signal, gate.fd = fd, gate.pid = (int)getpid();
    gate.slow_ns = slow_ns;
    gate.queue_full = queue_full;
    gate.room = room, gate.left_out = 0;
    gate.opened++;
    kvp_watch.gate = 1;
    return 0;
}

/* The number of forbidden calls that found no room in the file. */
uint64_t kvprobe_gate_close(void) {
    pthread_mutex_lock(&writing);
    kvp_watch.gate = 0;
    pthread_mutex_unlock(&writing);
    return gate.left_out;
}

static void put(const char *text, size_t bytes) {
    while (bytes) {
        ssize_t done = write(gate.fd, text, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return;
        text += done, bytes -= (size_t)done;
    }
}

static void report(const kvp_record *r, int after_copy, int full) {
    char line[192];
    int length =
        snprintf(line, sizeof line, "%d %d %llu %u %llu %llu %llu %u %d %d\n", r->call, r->direction,
                 (unsigned long long)r->bytes, r->count, (unsigned long long)r->stream, (unsigned long long)r->start_ns,
                 (unsigned long long)r->dur_ns, (unsigned)syscall(SYS_gettid), after_copy, full);
    pthread_mutex_lock(&writing);
    if (kvp_watch.gate && gate.pid == (int)getpid()) { /* a forked child's calls are not the test's */
        if (gate.room) {
            gate.room--;
            put(line, (size_t)length);
            gate.write_stack(gate.signal);
            put(".\n", 2);
        } else
            gate.left_out++;
    }
    pthread_mutex_unlock(&writing);
}

void kvp_gate(const kvp_record *r) {
    int was = errno;
    if (before.opened != gate.opened) {
        before.opened = gate.opened;
        before.copied = 0;
        before.full = UINT64_MAX;
    }
    uint8_t rule = r->call < CALLS ? gate.rules[r->call] : NEVER;
    int copies = rule & A_COPY_CALL, full = 0;
    rule &= (uint8_t)~A_COPY_CALL;
    if (gate.queue_full) {
        uint64_t now = gate.queue_full();
        full = before.full != UINT64_MAX && now != before.full;
        before.full = now;
    }
    int waits = r->call == STREAM_SYNC || r->call == CU_STREAM_SYNC;
    int after_copy = before.copied && waits && r->stream == before.stream;
    int slow = gate.slow_ns && copies && r->dur_ns >= gate.slow_ns;
    if (rule == ALWAYS || full || slow || (rule == IF_PAGEABLE && r->direction >> 4 == KVP_MEM_PAGEABLE))
        report(r, after_copy, full);
    before.copied = copies;
    before.stream = r->stream;
    errno = was;
}
