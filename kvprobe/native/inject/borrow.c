/* Borrows a thread of the process: stops it, has it make a few system calls and call one function, and gives it back.
 *
 * The order of the steps is what keeps the process whole when the injector is killed between two of them: the frame is
 * written before the registers lead to it, signals are blocked after that, and let in before the registers are as they
 * were (frame.c). */
#define _GNU_SOURCE
#include "inject.h"

#include <dirent.h>
#include <elf.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

uint64_t kvp_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#if defined(__x86_64__)
enum { FLAG_TRAP = 0x100, FLAG_DIRECTION = 0x400 };
enum { STOP_MS = 1000, HELD_MS = 60 }; /* until a thread stops; until one that is slow is let go on its own */
enum { TRIED_EACH_TIME = 2 };
#define LAST_RESORT_NS UINT64_C(500000000) /* before threads are taken whose waiting begins anew */
#define MS UINT64_C(1000000)

static const char STUCK[] = "one of its threads does not react (it waits for a disk or a device): try again";

enum stop { GONE, STOPPED, RUNNING };

/* SIGCHLD is blocked: it wakes this up. */
static enum stop wait_for_stop(pid_t tid, int *status, uint64_t until_ns) {
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    for (;;) {
        pid_t got = waitpid(tid, status, WNOHANG | __WALL);
        if (got == tid) return WIFSTOPPED(*status) ? STOPPED : GONE;
        if (got < 0) return GONE;
        if (kvp_now_ns() > until_ns) return RUNNING;
        sigtimedwait(&child, NULL, &(struct timespec){0, 2 * MS});
    }
}

static int is_trap(int status) { return status >> 16 == PTRACE_EVENT_STOP && WSTOPSIG(status) == SIGTRAP; }
static int is_group_stop(int status) { return status >> 16 == PTRACE_EVENT_STOP && WSTOPSIG(status) != SIGTRAP; }
static int is_system_call(int status) { return WSTOPSIG(status) == (SIGTRAP | 0x80); }

/* The signal to hand on from this stop, 0 for none. */
static int signal_of(int status) { return status >> 16 || is_system_call(status) ? 0 : WSTOPSIG(status); }

static int is_fault(int signal) {
    return signal == SIGSEGV || signal == SIGBUS || signal == SIGILL || signal == SIGFPE || signal == SIGTRAP ||
           signal == SIGSYS || signal == SIGABRT;
}

/* Stops it where a signal would be delivered: what a handler would find is what is read and written here. A stop of
 * another kind takes the interruption away. */
static enum stop stop_thread(pid_t tid, int *status) {
    uint64_t until_ns = kvp_now_ns() + STOP_MS * MS;
    ptrace(PTRACE_INTERRUPT, tid, 0, 0);
    for (;;) {
        enum stop how = wait_for_stop(tid, status, until_ns);
        if (how != STOPPED || is_trap(*status) || is_group_stop(*status)) return how;
        ptrace(PTRACE_INTERRUPT, tid, 0, 0);
        ptrace(PTRACE_CONT, tid, 0, signal_of(*status));
    }
}

static void detach(struct borrowed *b, int signal) {
    ptrace(PTRACE_DETACH, b->tid, 0, signal);
    b->t->held_ns += kvp_now_ns() - b->since_ns;
}

static void release(struct borrowed *b, int status) {
    ptrace(PTRACE_SETREGS, b->tid, 0, &b->was);
    detach(b, signal_of(status));
}

static int hold(struct target *t, struct borrowed *b, pid_t tid) {
    int status;
    b->t = t, b->tid = tid, b->since_ns = kvp_now_ns(), b->entering = b->alone = 0;
    if (ptrace(PTRACE_SEIZE, tid, 0, PTRACE_O_TRACESYSGOOD)) {
        t->refused |= errno == EPERM;
        return 0;
    }
    STEP(1);
    enum stop how = stop_thread(tid, &status);
    if (how == RUNNING) t->stuck = STUCK;
    if (how != STOPPED) return 0;
    b->stopped_ns = kvp_now_ns();
    STEP(2);
    if (ptrace(PTRACE_GETREGS, tid, 0, &b->was)) return 0;
    kvp_undo_interruption(&b->was);
    struct iovec image = {b->xstate, sizeof b->xstate};
    if (!is_group_stop(status) && !ptrace(PTRACE_GETSIGMASK, tid, 8, &b->mask) &&
        !ptrace(PTRACE_GETREGSET, tid, NT_X86_XSTATE, &image)) {
        b->xstate_bytes = image.iov_len;
        if (kvp_fits(b) && kvp_frame_write(b)) return 1;
    }
    if (is_group_stop(status)) {
        t->stopped = 1;
        detach(b, 0); /* it stays stopped */
    } else
        release(b, status);
    return 0;
}

/* Threads are asked in the order that the system lists them in, and not more than so many stopped. */
static int try_all(struct target *t, struct borrowed *b, enum may wanted, int most) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)t->pid);
    DIR *folder = opendir(path);
    if (!folder) {
        t->stuck = "it has ended";
        return 0;
    }
    int held = 0;
    for (struct dirent *entry; !held && !t->stuck && (entry = readdir(folder)) && most;) {
        pid_t tid = (pid_t)atoi(entry->d_name);
        if (tid <= 0 || kvp_may_fit(t, tid) != wanted) continue;
        held = hold(t, b, tid);
        most--;
    }
    closedir(folder);
    return held;
}

int kvp_borrow(struct target *t, struct borrowed *b, uint64_t until_ns) {
    uint64_t start_ns = kvp_now_ns(), now_ns = start_ns;
    for (; now_ns < until_ns && !t->stuck; now_ns = kvp_now_ns()) {
        kvp_target_areas(t);
        t->refused = t->stopped = 0;
        if (try_all(t, b, RUNS, TRIED_EACH_TIME) || try_all(t, b, WAITS, TRIED_EACH_TIME)) return 1;
        if (now_ns - start_ns > LAST_RESORT_NS && try_all(t, b, WAITS_ANEW, TRIED_EACH_TIME)) return 1;
        nanosleep(&(struct timespec){0, MS}, NULL);
    }
    return 0;
}

/* ---- what it is made to do ----------------------------------------------------------------------------------------
 */

/* It is slow, and finds back by itself. A thread cannot be let go while it runs, but at any stop. */
static int let_go_alone(struct borrowed *b) {
    int status;
    b->alone = 1;
    ptrace(PTRACE_INTERRUPT, b->tid, 0, 0);
    if (wait_for_stop(b->tid, &status, kvp_now_ns() + STOP_MS * MS) == STOPPED)
        detach(b, signal_of(status));
    else
        b->t->stuck = STUCK;
    return 0;
}

/* Lets it run to the end of a system call, or until it is about to return from the frame. */
static int run(struct borrowed *b, int to_frame, uint64_t *result) {
    int status = 0, signal = 0;
    struct user_regs_struct r;
    for (;;) {
        if (ptrace(PTRACE_SYSCALL, b->tid, 0, signal)) return 0;
        enum stop how = wait_for_stop(b->tid, &status, b->stopped_ns + HELD_MS * MS);
        if (how == GONE) return 0;
        if (how == RUNNING) return let_go_alone(b);
        signal = signal_of(status);
        if (is_fault(signal)) return 0;
        if (!is_system_call(status)) continue;
        b->entering = !b->entering;
        if (ptrace(PTRACE_GETREGS, b->tid, 0, &r)) return 0;
        if (to_frame ? b->entering && r.orig_rax == SYS_rt_sigreturn : !b->entering) {
            *result = r.rax;
            return 1;
        }
    }
}

static int start(struct borrowed *b, uint64_t at, long number, const uint64_t a[6]) {
    static const uint64_t all = ~UINT64_C(0);
    struct user_regs_struct r = b->was;
    r.rip = at, r.rsp = b->frame, r.rax = (unsigned long long)number;
    r.rdi = a[0], r.rsi = a[1], r.rdx = a[2], r.rcx = r.r10 = a[3], r.r8 = a[4], r.r9 = a[5];
    r.eflags &= ~(unsigned long long)(FLAG_TRAP | FLAG_DIRECTION);
    r.orig_rax = (unsigned long long)-1;
    if (ptrace(PTRACE_SETREGS, b->tid, 0, &r)) return 0;
    STEP(3);
    ptrace(PTRACE_SETSIGMASK, b->tid, 8, &all); /* the thread that it makes inherits that */
    STEP(4);
    return 1;
}

int kvp_borrow_system_call(struct borrowed *b, long number, const uint64_t arguments[6], uint64_t *result) {
    if (b->entering) { /* what it was about to do is skipped: it is at the end of that */
        if (!start(b, b->t->system_call, number, arguments) || !run(b, 0, result)) return 0;
    }
    return start(b, b->t->system_call, number, arguments) && run(b, 0, result);
}

/* A thread that ran finds back exactly, and alone is soonest. One that waited does not: a signal that comes meanwhile
 * would not end the system call. */
int kvp_borrow_call(struct borrowed *b, uint64_t function, const uint64_t arguments[4]) {
    uint64_t ignored, six[6] = {arguments[0], arguments[1], arguments[2], arguments[3]};
    if (!start(b, function, 0, six)) return 0;
    if (kvp_waits(&b->was)) return run(b, 1, &ignored);
    b->alone = 1;
    detach(b, 0);
    return 1;
}

/* From the stop before the return through the frame, or at a fault. That return would restore all but how long a
 * system call has waited already; so the kernel is told to go on with the call, at a stop where it listens. */
void kvp_give_back(struct borrowed *b) {
    int status;
    if (b->alone) return;
    struct iovec image = {b->xstate, b->xstate_bytes};
    struct user_regs_struct resting = kvp_resting(&b->was);
    STEP(8);
    ptrace(PTRACE_SETREGSET, b->tid, NT_X86_XSTATE, &image);
    ptrace(PTRACE_SETSIGMASK, b->tid, 8, &b->mask);
    STEP(9);
    ptrace(PTRACE_SETREGS, b->tid, 0, &resting);
    STEP(10);
    ptrace(PTRACE_INTERRUPT, b->tid, 0, 0);
    ptrace(PTRACE_CONT, b->tid, 0, 0);
    enum stop how = wait_for_stop(b->tid, &status, kvp_now_ns() + STOP_MS * MS);
    STEP(11);
    if (how == STOPPED) release(b, status);
    if (how == RUNNING) b->t->stuck = STUCK;
}
#endif
