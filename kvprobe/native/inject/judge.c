/* Whether a thread may be borrowed to make a thread: not inside the allocator, the loader or the making of a thread,
 * whose locks that takes. Other threads may be: they run on, and give the locks up.
 *
 * A thread outside these libraries is not inside their functions either, for they call nobody. A thread that waits in a
 * system call which none of them makes is not, too. Either may be a signal handler that interrupted one of them: then a
 * handler's frame with an address of theirs lies on the stack. */
#define _GNU_SOURCE
#include "inject.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { RESTART = 512, NO_HANDLER = 514, RESTART_BLOCK = 516 }; /* how the kernel marks a system call to be made again */
#define HANDLERS_BYTES (UINT64_C(256) << 10)                   /* of the stack, looked through for handlers */
#define CALLER_BYTES 1024 /* of the stack, where an allocator's wrapper would have its addresses */
#ifndef PTRACE_GET_RSEQ_CONFIGURATION
#define PTRACE_GET_RSEQ_CONFIGURATION 0x420f
#endif

int kvp_waits(const struct user_regs_struct *r) {
    int64_t result = (int64_t)r->rax;
    return (int64_t)r->orig_rax >= 0 &&
           (result == -RESTART || result == -513 || result == -NO_HANDLER || result == -RESTART_BLOCK);
}

/* System calls that the kernel ends with EINTR when a thread is stopped, without any signal. */
static int ends_early(uint64_t number) {
    return number == SYS_epoll_wait || number == SYS_epoll_pwait || number == SYS_epoll_pwait2 || number == SYS_semop ||
           number == SYS_semtimedop || number == SYS_rt_sigtimedwait || number == SYS_io_getevents ||
           number == SYS_io_pgetevents || number == SYS_io_uring_enter;
}

/* Made again, unless a handler is to run: as if nobody had stopped the thread. */
void kvp_undo_interruption(struct user_regs_struct *r) {
    if ((int64_t)r->rax == -EINTR && ends_early(r->orig_rax)) r->rax = (unsigned long long)-NO_HANDLER;
}

/* NO: an allocator, loader or maker of threads could wait in it. */
static enum may may_wait_in(uint64_t number, const uint64_t a[6]) {
    switch (number) {
    case SYS_futex: /* condition variables, semaphores; a mutex waits otherwise */
        return (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET ? WAITS : NO;
    case SYS_epoll_wait:
    case SYS_epoll_pwait:
        return (int32_t)a[3] < 0 ? WAITS : WAITS_ANEW;
    case SYS_epoll_pwait2:
        return a[3] ? WAITS_ANEW : WAITS;
    case SYS_rt_sigtimedwait:
        return a[2] ? WAITS_ANEW : WAITS;
    case SYS_poll:
    case SYS_ppoll:
    case SYS_select:
    case SYS_pselect6:
    case SYS_nanosleep:
    case SYS_clock_nanosleep:
    case SYS_pause:
    case SYS_rt_sigsuspend:
    case SYS_wait4:
    case SYS_waitid:
    case SYS_accept:
    case SYS_accept4:
    case SYS_connect:
    case SYS_recvfrom:
    case SYS_recvmsg:
    case SYS_sendto:
    case SYS_sendmsg:
    case SYS_read:
    case SYS_readv:
    case SYS_write:
    case SYS_writev:
    case SYS_ioctl:
    case SYS_flock:
        return WAITS;
    default:
        return NO;
    }
}

enum may kvp_may_fit(const struct target *t, pid_t tid) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/task/%d/syscall", (int)t->pid, (int)tid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t bytes = file < 0 ? -1 : read(file, line, sizeof line - 1);
    if (file >= 0) close(file);
    if (bytes <= 0) return file < 0 || bytes == 0 ? NO : RUNS; /* not told: it has to be stopped to know */
    line[bytes] = 0;
    if (!strncmp(line, "running", 7)) return RUNS;
    long number;
    unsigned long a[6];
    if (sscanf(line, "%ld %lx %lx %lx %lx %lx %lx", &number, a, a + 1, a + 2, a + 3, a + 4, a + 5) < 7) return NO;
    return may_wait_in((uint64_t)number, (uint64_t[]){a[0], a[1], a[2], a[3], a[4], a[5]});
}

/* On the stack that the thread began with, or that the C library gave it: there a signal could come as well. */
static int has_room(const struct borrowed *b) {
    const struct target *t = b->t;
    uint64_t self = 0, sp = b->was.rsp;
    if (!kvp_target_read(t, b->was.fs_base + 16, &self, 8) || self != b->was.fs_base) return 0;
    const struct area *stack = kvp_target_area(t, sp);
    if (!stack) return 0;
    if (stack->main_stack) return 1;
    return stack == kvp_target_area(t, b->was.fs_base) && sp - stack->first > FUNCTION_BYTES + FRAME_BYTES;
}

/* Inside code that the kernel must begin anew when the thread has been away (rseq). */
static int restarts(const struct borrowed *b) {
    struct {
        uint64_t address;
        uint32_t bytes, signature, flags, pad;
    } area = {0};
    uint64_t section = 0;
    if (ptrace(PTRACE_GET_RSEQ_CONFIGURATION, b->tid, sizeof area, &area) <= 0 || !area.address) return 0;
    return kvp_target_read(b->t, area.address + 8, &section, 8) && section;
}

static int is_delicate(const struct object *o) {
    return o && (o->is & (DEFINES_MALLOC | DEFINES_THREADS | IS_LOADER | IS_C_LIBRARY));
}

/* An allocator that is not the C library's. */
static int is_allocator(const struct object *o) {
    return o && o->is & DEFINES_MALLOC && !(o->is & (IS_C_LIBRARY | IS_LOADER));
}

static int interrupted_delicate_code(const struct borrowed *b) {
    static uint64_t words[HANDLERS_BYTES / 8];
    const struct target *t = b->t;
    const struct area *stack = kvp_target_area(t, b->was.rsp);
    uint64_t bytes = (stack->last - b->was.rsp) & ~UINT64_C(7);
    if (bytes > HANDLERS_BYTES) bytes = HANDLERS_BYTES;
    if (!kvp_target_read(t, b->was.rsp, words, bytes)) return 1;
    for (uint64_t i = 0; i < bytes / 8; i++) {
        if (i * 8 < CALLER_BYTES && is_allocator(kvp_target_object(t, words[i]))) return 1;
        uint64_t rip = i + 22; /* words from the return address of a handler's frame to the interrupted place */
        if (words[i] == t->restore && rip < bytes / 8 && is_delicate(kvp_target_object(t, words[rip]))) return 1;
    }
    return 0;
}

int kvp_fits(const struct borrowed *b) {
    const struct user_regs_struct *r = &b->was;
    const struct object *at = kvp_target_object(b->t, r->rip);
    if (r->cs != 0x33 || !has_room(b) || restarts(b)) return 0;
    if (kvp_waits(r)) {
        uint64_t a[6] = {r->rdi, r->rsi, r->rdx, r->r10, r->r8, r->r9};
        if (may_wait_in(r->orig_rax, a) == NO || is_allocator(at) || (at && at->is & IS_LOADER)) return 0;
    } else if (is_delicate(at))
        return 0;
    return !interrupted_delicate_code(b);
}
#endif
