/* A program that would notice if a thread of it were held, and given back other than it was.
 *
 *   held COUNTS registers|waits|signals|forks
 *
 * COUNTS is a file of 64-bit words, shared with whoever watches: 0 what to do (2: end), 1 turns, 2 wrong ones.
 * registers: general, vector and flag registers and the red zone keep what was put there. waits: no system call ends
 * with EINTR, for nobody sends a signal. signals: a timer's; each pause ends by a handler that ran. forks: a child ends
 * with status 0. One thread, which makes no call of the C library that another could make for it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TODO, TURNS, WRONG };
static volatile uint64_t *words;
static volatile uint64_t handled;

static void registers(void) {
    uint64_t wrong;
    /* all of them from one seed; spin; the differences gathered */
    __asm__ volatile("mov $0x1122334455667788, %%rax\n"
                     "mov %%rax, -8(%%rsp)\n mov %%rax, -64(%%rsp)\n mov %%rax, -128(%%rsp)\n"
                     "mov %%rax, %%rbx\n mov %%rax, %%rdx\n mov %%rax, %%rsi\n mov %%rax, %%rdi\n"
                     "mov %%rax, %%r8\n mov %%rax, %%r9\n mov %%rax, %%r10\n mov %%rax, %%r11\n"
                     "mov %%rax, %%r12\n mov %%rax, %%r13\n mov %%rax, %%r14\n mov %%rax, %%r15\n"
                     "movq %%rax, %%xmm0\n punpcklqdq %%xmm0, %%xmm0\n movdqa %%xmm0, %%xmm7\n movdqa %%xmm0, %%xmm15\n"
                     "mov $20000, %%ecx\n stc\n"
                     "1: jnc 2f\n dec %%ecx\n jnz 1b\n stc\n"
                     "2: mov $0, %%ecx\n jc 3f\n mov $1, %%ecx\n"
                     "3: xor %%rax, %%rbx\n xor %%rax, %%rdx\n xor %%rax, %%rsi\n xor %%rax, %%rdi\n"
                     "xor %%rax, %%r8\n xor %%rax, %%r9\n xor %%rax, %%r10\n xor %%rax, %%r11\n"
                     "xor %%rax, %%r12\n xor %%rax, %%r13\n xor %%rax, %%r14\n xor %%rax, %%r15\n"
                     "or %%rdx, %%rbx\n or %%rsi, %%rbx\n or %%rdi, %%rbx\n or %%r8, %%rbx\n or %%r9, %%rbx\n"
                     "or %%r10, %%rbx\n or %%r11, %%rbx\n or %%r12, %%rbx\n or %%r13, %%rbx\n or %%r14, %%rbx\n"
                     "or %%r15, %%rbx\n or %%rcx, %%rbx\n"
                     "mov -8(%%rsp), %%rcx\n xor %%rax, %%rcx\n or %%rcx, %%rbx\n"
                     "mov -64(%%rsp), %%rcx\n xor %%rax, %%rcx\n or %%rcx, %%rbx\n"
                     "mov -128(%%rsp), %%rcx\n xor %%rax, %%rcx\n or %%rcx, %%rbx\n"
                     "pxor %%xmm0, %%xmm7\n pxor %%xmm0, %%xmm15\n por %%xmm15, %%xmm7\n"
                     "movq %%xmm7, %%rcx\n or %%rcx, %%rbx\n punpckhqdq %%xmm7, %%xmm7\n movq %%xmm7, %%rcx\n"
                     "or %%rcx, %%rbx\n movq %%xmm0, %%rcx\n xor %%rax, %%rcx\n or %%rcx, %%rbx\n"
                     "mov %%rbx, %0\n"
                     : "=m"(wrong)
                     :
                     : "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
                       "xmm0", "xmm7", "xmm15", "cc", "memory");
    words[WRONG] += wrong != 0;
}

static void waits(int timer, int set) {
    uint64_t ticks;
    struct epoll_event event;
    struct pollfd p = {.fd = timer, .events = POLLIN};
    fd_set fds;
    FD_ZERO(&fds);
    FD_SET(timer, &fds);
    int wrong = epoll_wait(set, &event, 1, -1) != 1;
    wrong |= read(timer, &ticks, sizeof ticks) != sizeof ticks;
    wrong |= poll(&p, 1, 1000) != 1;
    wrong |= read(timer, &ticks, sizeof ticks) != sizeof ticks;
    wrong |= read(timer, &ticks, sizeof ticks) != sizeof ticks;
    wrong |= epoll_wait(set, &event, 1, 1000) != 1;
    wrong |= read(timer, &ticks, sizeof ticks) != sizeof ticks;
    wrong |= select(timer + 1, &fds, NULL, NULL, NULL) != 1;
    wrong |= read(timer, &ticks, sizeof ticks) != sizeof ticks;
    wrong |= nanosleep(&(struct timespec){0, 2000000}, NULL) != 0;
    words[WRONG] += (uint64_t)wrong;
}

static void on_alarm(int number) {
    (void)number;
    handled++;
}

static void signals(void) {
    uint64_t before = handled;
    sigset_t alarm, was;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    sigprocmask(SIG_BLOCK, &alarm, &was);
    before = handled;
    sigsuspend(&was); /* as pause, with no handler before it */
    if (handled != before + 1 || errno != EINTR) words[WRONG]++;
    sigprocmask(SIG_SETMASK, &was, NULL);
}

static void forks(void) {
    int status = 0;
    pid_t child = fork();
    if (!child) _exit(0);
    if (waitpid(child, &status, 0) != child || status) words[WRONG]++;
}

int main(int argc, char **argv) {
    int fd = open(argv[1], O_RDWR);
    if (argc < 3 || fd < 0) return 7;
    words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC), set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    timerfd_settime(timer, 0, &(struct itimerspec){{0, 3000000}, {0, 3000000}}, NULL);
    epoll_ctl(set, EPOLL_CTL_ADD, timer, &event);
    if (!strcmp(argv[2], "signals")) {
        sigaction(SIGALRM, &(struct sigaction){.sa_handler = on_alarm}, NULL);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 2000}, {0, 2000}}, NULL);
    }
    while (words[TODO] != 2) {
        if (!strcmp(argv[2], "registers")) registers();
        if (!strcmp(argv[2], "waits")) waits(timer, set);
        if (!strcmp(argv[2], "signals")) signals();
        if (!strcmp(argv[2], "forks")) forks();
        words[TURNS]++;
    }
    return 0;
}
