/* Reads and writes of files and sockets, as tiers below CPU memory make them: each of at least KVP_FILE_LEAST bytes is
 * kept with its time, its place and its memory, and so is each wait until a file is on its disk. Smaller ones, and all
 * of a process that has made no CUDA call yet, pass after one compare; but where a thread that submits receives
 * something, how long it waited is looked at (waits.c).
 *
 * What is promised: the real function gets what the program gave and its answer and errno are the program's. While it
 * runs nothing is held: it may be cancelled, be interrupted, or never return. Afterwards no cancellation point is
 * acted on that the program has not reached itself. Only memory that the kernel has just read or written is looked at.
 *
 * Not seen: what the C library reads and writes for itself (fread, sendfile, pages of a mapped file), system calls that
 * a program makes without the C library, what happens inside a call of CUDA's (its own reads), and where an io_uring's
 * operations end. */
#define _GNU_SOURCE
#include "waits.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

_Atomic size_t kvp_files_least = SIZE_MAX;
__thread int kvp_in_file_call __attribute__((tls_model("initial-exec")));

void kvp_files_start(const char *folder) {
    kvp_places_start(folder);
    kvp_files_least = KVP_FILE_LEAST;
}

void kvp_files_stop(void) { kvp_files_least = SIZE_MAX; }

/* ---- one operation --------------------------------------------------------------------------------------------- */

static inline int kept(size_t bytes) {
    return unlikely(bytes >= atomic_load_explicit(&kvp_files_least, memory_order_relaxed));
}

/* The clock's state belongs to the thread: a signal handler must not find it half written, and so sees us inside. */
uint64_t kvp_file_begins(void) {
    enum inside in = kvp_thread.inside;
    if (kvp_in_file_call || !kvp_ring_is_open()) return NOT_KEPT;
    if (in) return in == IN_KVPROBE ? COUNTED_ONLY : NOT_KEPT; /* a handler's that interrupts us; the runtime's own */
    kvp_thread.inside = IN_KVPROBE;
    uint64_t now = kvp_clock();
    kvp_thread.inside = OUTSIDE;
    return now;
}

static inline void witnessed(const kvp_record *r) {
    if (unlikely(kvp_watch.witness) && r->direction == KVP_READ) kvp_witness_reads(r);
}

__attribute__((noinline)) void kvp_file_ends_at(uint64_t began, unsigned place, kvp_record *r) {
    witnessed(r);
    if (began == NOT_KEPT || place == NO_PLACE || !kvp_ring_is_open()) return;
    r->stream = place;
    if (!r->count) r->count = 1;
    if (began == COUNTED_ONLY || kvp_thread.inside) {
        r->dur_ns = KVP_UNTIMED;
        kvp_ring_count(r);
        return;
    }
    int was = errno, cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* a ring that grows opens a file */
    kvp_thread.inside = IN_KVPROBE;
    r->start_ns = began;
    r->dur_ns = kvp_clock() - began;
    kvp_ring_write(r, kvp_watch.detail == DETAIL_TOTALS ? KVP_KEEP_SEVERAL : KVP_KEEP_ALL);
    kvp_thread.inside = OUTSIDE;
    pthread_setcancelstate(cancel, NULL);
    errno = was;
}

__attribute__((noinline)) void kvp_file_ends(uint64_t began, int fd, kvp_record *r) {
    witnessed(r);
    if (began == NOT_KEPT || !kvp_ring_is_open()) return;
    if (began == COUNTED_ONLY || kvp_thread.inside) {
        kvp_file_ends_at(COUNTED_ONLY, UNTOLD_PLACE, r);
        return;
    }
    int was = errno, cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    kvp_thread.inside = IN_KVPROBE;
    uint64_t took = kvp_clock() - began;
    unsigned place = kvp_place_of(fd);
    if (place != NO_PLACE) {
        r->stream = place;
        r->start_ns = began;
        r->dur_ns = took;
        if (!r->count) r->count = 1;
        kvp_ring_write(r, kvp_watch.detail == DETAIL_TOTALS ? KVP_KEEP_SEVERAL : KVP_KEEP_ALL);
    }
    kvp_thread.inside = OUTSIDE;
    pthread_setcancelstate(cancel, NULL);
    errno = was;
}

/* ---- the functions --------------------------------------------------------------------------------------------- */

/* POSSIBLE: whether an operation with these arguments may be kept; MOVED: whether it is, by its result; WAITS: whether
 * it is looked at how long it waited, however little it receives; then the record. Arguments that point into the
 * program's memory are looked at after the call alone. */
#define ANY_CALL(NAME, RESULT, PARAMETERS, ARGUMENTS, POSSIBLE, MOVED, WAITS, FD, ...)                                 \
    typedef RESULT NAME##_fn PARAMETERS;                                                                               \
    any_fn *_Atomic kvp_real_##NAME;                                                                                   \
    RESULT kvp_our_##NAME PARAMETERS {                                                                                 \
        int possible = (POSSIBLE);                                                                                     \
        if (likely(!possible && !(WAITS))) return AS(NAME) ARGUMENTS;                                                  \
        uint64_t began = possible ? kvp_file_begins() : kvp_wait_begins();                                             \
        RESULT result = AS(NAME) ARGUMENTS;                                                                            \
        if (possible && result > 0 && (MOVED)) {                                                                       \
            kvp_record r = {.dst = KVP_NOWHERE, .bytes = (uint64_t)result};                                            \
            __VA_ARGS__;                                                                                               \
            if (WAITS) began = kvp_received(began, FD);                                                                \
            kvp_file_ends(began, FD, &r);                                                                              \
        } else if ((WAITS) && result >= 0)                                                                             \
            kvp_received(began, FD);                                                                                   \
        return result;                                                                                                 \
    }
#define FILE_CALL(NAME, RESULT, PARAMETERS, ARGUMENTS, POSSIBLE, MOVED, FD, ...)                                       \
    ANY_CALL(NAME, RESULT, PARAMETERS, ARGUMENTS, POSSIBLE, MOVED, 0, FD, __VA_ARGS__)
/* read is asked how long it waited of threads alone that submit. */
#define RECEIVING(NAME, PARAMETERS, ARGUMENTS, POSSIBLE, WAITS, ...)                                                   \
    ANY_CALL(NAME, ssize_t, PARAMETERS, ARGUMENTS, POSSIBLE, kept((size_t)result), WAITS, fd, __VA_ARGS__)

#define IS(CALL, DIRECTION, MEMORY) r.call = KVP_CALL_##CALL, r.direction = DIRECTION, r.src = (uintptr_t)(MEMORY)
#define AT_OFFSET(OFFSET) r.dst = (OFFSET) < 0 ? KVP_NOWHERE : (uint64_t)(OFFSET)
#define PLAIN(NAME, CONST, DIRECTION)                                                                                  \
    FILE_CALL(NAME, ssize_t, (int fd, CONST void *buffer, size_t bytes), (fd, buffer, bytes), kept(bytes),             \
              kept((size_t)result), fd, IS(NAME, DIRECTION, buffer))
#define PLACED(NAME, CALL, CONST, DIRECTION)                                                                           \
    FILE_CALL(NAME, ssize_t, (int fd, CONST void *buffer, size_t bytes, off_t offset), (fd, buffer, bytes, offset),    \
              kept(bytes), kept((size_t)result), fd, IS(CALL, DIRECTION, buffer);                                      \
              AT_OFFSET(offset))
#define PIECES(CALL, DIRECTION) IS(CALL, DIRECTION, pieces[0].iov_base), r.count = (uint32_t)count
#define PIECEWISE(NAME, CALL, DIRECTION, ARGUMENTS, ...)                                                               \
    FILE_CALL(NAME, ssize_t, (int fd, const struct iovec *pieces, int count, ##__VA_ARGS__), ARGUMENTS, active(),      \
              kept((size_t)result), fd, PIECES(CALL, DIRECTION))
#define PLACED_PIECES(NAME, CALL, DIRECTION)                                                                           \
    FILE_CALL(NAME, ssize_t, (int fd, const struct iovec *pieces, int count, off_t offset),                            \
              (fd, pieces, count, offset), active(), kept((size_t)result), fd, PIECES(CALL, DIRECTION);                \
              AT_OFFSET(offset))
#define FLAGGED_PIECES(NAME, CALL, DIRECTION)                                                                          \
    FILE_CALL(NAME, ssize_t, (int fd, const struct iovec *pieces, int count, off_t offset, int flags),                 \
              (fd, pieces, count, offset, flags), active(), kept((size_t)result), fd, PIECES(CALL, DIRECTION);         \
              AT_OFFSET(offset))

RECEIVING(read, (int fd, void *buffer, size_t bytes), (fd, buffer, bytes), kept(bytes), active() && kvp_thread.ended,
          IS(read, KVP_READ, buffer))
PLAIN(write, const, KVP_WRITE)
PLACED(pread, pread, , KVP_READ)
PLACED(pread64, pread, , KVP_READ)
PLACED(pwrite, pwrite, const, KVP_WRITE)
PLACED(pwrite64, pwrite, const, KVP_WRITE)
PIECEWISE(readv, preadv, KVP_READ, (fd, pieces, count))
PIECEWISE(writev, pwritev, KVP_WRITE, (fd, pieces, count))
PLACED_PIECES(preadv, preadv, KVP_READ)
PLACED_PIECES(preadv64, preadv, KVP_READ)
PLACED_PIECES(pwritev, pwritev, KVP_WRITE)
PLACED_PIECES(pwritev64, pwritev, KVP_WRITE)
FLAGGED_PIECES(preadv2, preadv, KVP_READ)
FLAGGED_PIECES(preadv64v2, preadv, KVP_READ)
FLAGGED_PIECES(pwritev2, pwritev, KVP_WRITE)
FLAGGED_PIECES(pwritev64v2, pwritev, KVP_WRITE)

/* What a compiler makes of the same calls where it knows how large the memory is. */
RECEIVING(__read_chk, (int fd, void *buffer, size_t bytes, size_t room), (fd, buffer, bytes, room), kept(bytes),
          active() && kvp_thread.ended, IS(read, KVP_READ, buffer))
#define CHECKED(NAME)                                                                                                  \
    FILE_CALL(NAME, ssize_t, (int fd, void *buffer, size_t bytes, off_t offset, size_t room),                          \
              (fd, buffer, bytes, offset, room), kept(bytes), kept((size_t)result), fd, IS(pread, KVP_READ, buffer);   \
              AT_OFFSET(offset))
CHECKED(__pread_chk)
CHECKED(__pread64_chk)

RECEIVING(recv, (int fd, void *buffer, size_t bytes, int flags), (fd, buffer, bytes, flags),
          kept(bytes) && !(flags & MSG_PEEK), active(), IS(recv, KVP_READ, buffer))
RECEIVING(__recv_chk, (int fd, void *buffer, size_t bytes, size_t room, int flags), (fd, buffer, bytes, room, flags),
          kept(bytes) && !(flags & MSG_PEEK), active(), IS(recv, KVP_READ, buffer))
RECEIVING(recvfrom, (int fd, void *buffer, size_t bytes, int flags, struct sockaddr *from, socklen_t *from_bytes),
          (fd, buffer, bytes, flags, from, from_bytes), kept(bytes) && !(flags & MSG_PEEK), active(),
          IS(recv, KVP_READ, buffer))
FILE_CALL(send, ssize_t, (int fd, const void *buffer, size_t bytes, int flags), (fd, buffer, bytes, flags), kept(bytes),
          kept((size_t)result), fd, IS(send, KVP_WRITE, buffer))
FILE_CALL(sendto, ssize_t,
          (int fd, const void *buffer, size_t bytes, int flags, const struct sockaddr *to, socklen_t to_bytes),
          (fd, buffer, bytes, flags, to, to_bytes), kept(bytes), kept((size_t)result), fd, IS(send, KVP_WRITE, buffer))
#define OF_MESSAGE(CALL, DIRECTION)                                                                                    \
    IS(CALL, DIRECTION, message->msg_iov[0].iov_base), r.count = (uint32_t)message->msg_iovlen
RECEIVING(recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags), active() && !(flags & MSG_PEEK),
          active(), OF_MESSAGE(recv, KVP_READ))
FILE_CALL(sendmsg, ssize_t, (int fd, const struct msghdr *message, int flags), (fd, message, flags), active(),
          kept((size_t)result), fd, OF_MESSAGE(send, KVP_WRITE))

#define FLUSHING(NAME)                                                                                                 \
    typedef int NAME##_fn(int fd);                                                                                     \
    any_fn *_Atomic kvp_real_##NAME;                                                                                   \
    int kvp_our_##NAME(int fd) {                                                                                       \
        uint64_t began = active() ? kvp_file_begins() : NOT_KEPT;                                                      \
        int result = AS(NAME)(fd);                                                                                     \
        kvp_record r = {.call = KVP_CALL_fsync, .direction = KVP_WRITE, .dst = KVP_NOWHERE};                           \
        if (!result) kvp_file_ends(began, fd, &r);                                                                     \
        return result;                                                                                                 \
    }
FLUSHING(fsync)
FLUSHING(fdatasync)

typedef int close_fn(int fd);
any_fn *_Atomic kvp_real_close;
int kvp_our_close(int fd) {
    kvp_place_closes(fd);
    return AS(close)(fd);
}

/* ---- operations that go on after their call --------------------------------------------------------------------- */

/* struct iocb of the kernel, which libaio hands on. */
struct control_block {
    uint64_t data;
    uint32_t key, flags;
    uint16_t opcode;
    int16_t priority;
    uint32_t fd;
    uint64_t buffer, bytes;
    int64_t offset;
};
enum { AIO_PREAD = 0, AIO_PWRITE = 1, AIO_PREADV = 7, AIO_PWRITEV = 8 };

static uint64_t bytes_of(const struct iovec *pieces, uint64_t count) {
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < count; i++) bytes += pieces[i].iov_len;
    return bytes;
}

/* One of several operations that a call submitted: the call's time belongs to the first. */
static void submitted(uint64_t began, int fd, int reads, int pieces, uint64_t buffer, uint64_t bytes, int64_t offset) {
    const struct iovec *list = (const struct iovec *)(uintptr_t)buffer;
    if (pieces && !bytes) return;
    kvp_record r = {.call = KVP_CALL_io_submit,
                    .direction = reads ? KVP_READ : KVP_WRITE,
                    .src = pieces ? (uintptr_t)list[0].iov_base : buffer,
                    .bytes = pieces ? bytes_of(list, bytes) : bytes,
                    .count = pieces ? (uint32_t)bytes : 1,
                    .transfer = KVP_FILE_SUBMITTED};
    AT_OFFSET(offset);
    if (kept(r.bytes)) kvp_file_ends(began, fd, &r);
}

static void counted(uint64_t began, unsigned operations) {
    kvp_record r = {.call = KVP_CALL_io_submit, .dst = KVP_NOWHERE, .count = operations, .transfer = KVP_FILE_COUNTED};
    if (operations) kvp_file_ends_at(began, UNTOLD_PLACE, &r);
}

typedef int io_submit_fn(void *context, long count, struct control_block **blocks);
any_fn *_Atomic kvp_real_io_submit;
int kvp_our_io_submit(void *context, long count, struct control_block **blocks) {
    if (likely(!active()) || kvp_in_file_call) return AS(io_submit)(context, count, blocks);
    uint64_t began = kvp_file_begins();
    kvp_in_file_call++; /* libaio may go through syscall() */
    int result = AS(io_submit)(context, count, blocks);
    kvp_in_file_call--;
    for (int i = 0; i < result; i++, began = kvp_file_begins()) {
        const struct control_block *b = blocks[i];
        int one = b->opcode == AIO_PREAD || b->opcode == AIO_PWRITE;
        if (one || b->opcode == AIO_PREADV || b->opcode == AIO_PWRITEV)
            submitted(began, (int)b->fd, b->opcode == AIO_PREAD || b->opcode == AIO_PREADV, !one, b->buffer, b->bytes,
                      b->offset);
    }
    return result;
}

/* liburing's queue of submissions, as its public header lays it out. */
struct uring {
    unsigned *head, *tail, *mask, *entries, *flags_word, *dropped, *array;
    const uint8_t *operations;
    unsigned operations_head, operations_tail;
    size_t ring_bytes;
    void *ring;
    unsigned ring_mask, ring_entries, pad[2];
    uint64_t completions[11];
    unsigned flags;
};
struct uring_operation {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, buffer;
    uint32_t bytes;
};
enum {
    URING_READV = 1,
    URING_WRITEV = 2,
    URING_READ_FIXED = 4,
    URING_WRITE_FIXED = 5,
    URING_READ = 22,
    URING_WRITE = 23,
    URING_SEND = 26,
    URING_RECV = 27,
    URING_REGISTERED_FILE = 1, /* flag of an operation: its fd is an index */
    URING_LARGE = 1 << 10,     /* flag of a ring: operations of 128 bytes */
    URING_MOST = 128           /* operations of one call that are looked at */
};

struct seen_operation {
    struct uring_operation is;
    int reads, pieces;
};

/* What is about to be submitted: the kernel takes it out of the queue. */
static int look(const struct uring *u, struct seen_operation *seen, unsigned *more) {
    int n = 0;
    unsigned step = u->flags & URING_LARGE ? 128 : 64, last = u->operations_tail;
    if (last - u->operations_head > URING_MOST) last = u->operations_head + URING_MOST;
    *more = u->operations_tail - last;
    for (unsigned i = u->operations_head; i != last; i++) {
        struct seen_operation s;
        memcpy(&s.is, u->operations + (size_t)(i & *u->mask) * step, sizeof s.is);
        s.pieces = s.is.opcode == URING_READV || s.is.opcode == URING_WRITEV;
        s.reads = s.is.opcode == URING_READV || s.is.opcode == URING_READ_FIXED || s.is.opcode == URING_READ ||
                  s.is.opcode == URING_RECV;
        int writes = s.is.opcode == URING_WRITEV || s.is.opcode == URING_WRITE_FIXED || s.is.opcode == URING_WRITE ||
                     s.is.opcode == URING_SEND;
        if (s.reads || writes) seen[n++] = s;
    }
    return n;
}

static void uring_submitted(uint64_t began, const struct seen_operation *seen, int count) {
    for (int i = 0; i < count; i++, began = kvp_file_begins()) {
        const struct uring_operation *is = &seen[i].is;
        int fd = is->flags & URING_REGISTERED_FILE ? -1 : is->fd;
        submitted(began, fd, seen[i].reads, seen[i].pieces, is->buffer, is->bytes, (int64_t)is->offset);
    }
}

/* Space for what is looked at lies in the frame of this function alone, which is entered for nothing else. */
static __attribute__((noinline)) int uring_call(any_fn *function, struct uring *u, unsigned wait, int waits) {
    struct seen_operation seen[URING_MOST];
    unsigned more;
    int count = look(u, seen, &more);
    uint64_t began = kvp_file_begins();
    kvp_in_file_call++;
    int result = waits ? ((int (*)(struct uring *, unsigned))(void *)function)(u, wait)
                       : ((int (*)(struct uring *))(void *)function)(u);
    kvp_in_file_call--;
    if (result > 0) uring_submitted(began, seen, count), counted(kvp_file_begins(), more);
    return result;
}

typedef int io_uring_submit_fn(struct uring *u);
any_fn *_Atomic kvp_real_io_uring_submit;
int kvp_our_io_uring_submit(struct uring *u) {
    if (likely(!active()) || kvp_in_file_call) return AS(io_uring_submit)(u);
    return uring_call(kvp_real_io_uring_submit, u, 0, 0);
}

typedef int io_uring_submit_and_wait_fn(struct uring *u, unsigned wait);
any_fn *_Atomic kvp_real_io_uring_submit_and_wait;
int kvp_our_io_uring_submit_and_wait(struct uring *u, unsigned wait) {
    if (likely(!active()) || kvp_in_file_call) return AS(io_uring_submit_and_wait)(u, wait);
    return uring_call(kvp_real_io_uring_submit_and_wait, u, wait, 1);
}

/* Who submits by the system call itself keeps its queue where we cannot look: counted, and said. All other numbers pass
 * by a jump: what comes back from a clone on another stack finds no frame of ours. */
#if defined(__x86_64__) || defined(__aarch64__)
typedef long syscall_fn(long, ...);
any_fn *_Atomic kvp_real_syscall;
__attribute__((used)) static long kvp_uring_enter(long number, long a, long b, long c, long d, long e, long f) {
    uint64_t began = active() ? kvp_file_begins() : NOT_KEPT;
    long result = AS(syscall)(number, a, b, c, d, e, f);
    if (result > 0) counted(began, (unsigned)result);
    return result;
}
_Static_assert(SYS_io_uring_enter == 426, "the number below");
#if defined(__x86_64__)
__asm__(".text\n.type kvp_our_syscall, @function\n.hidden kvp_our_syscall\n.globl kvp_our_syscall\nkvp_our_syscall:\n"
        "cmpq $426, %rdi\nje kvp_uring_enter\njmp *kvp_real_syscall(%rip)\n.size kvp_our_syscall, .-kvp_our_syscall\n");
#else
__asm__(".text\n.type kvp_our_syscall, %function\n.hidden kvp_our_syscall\n.globl kvp_our_syscall\nkvp_our_syscall:\n"
        "cmp x0, #426\nb.eq kvp_uring_enter\nadrp x16, kvp_real_syscall\n"
        "ldr x16, [x16, :lo12:kvp_real_syscall]\nbr x16\n.size kvp_our_syscall, .-kvp_our_syscall\n");
#endif
#endif
