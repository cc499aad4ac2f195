/* Copies where little is allowed: confined signals|strict|filter|refused|unopened|descriptors CALLS. Prints the copies
 * it made. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

int cudaMemcpyAsync(void *, const void *, size_t, int, void *);

static long made;
static void copies(long n) {
    for (long i = 0; i < n; i++) cudaMemcpyAsync((void *)4096, (void *)8192, 100, 1, (void *)16);
    __atomic_fetch_add(&made, n, __ATOMIC_RELAXED);
}

static void handler(int signal) {
    (void)signal;
    copies(1);
}

/* Kills for everything but writing, giving a socket its address, and leaving. */
static void confine(void) {
    struct sock_filter rules[] = {
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, nr)},
        {BPF_JMP | BPF_JEQ | BPF_K, 3, 0, SYS_write},
        {BPF_JMP | BPF_JEQ | BPF_K, 2, 0, SYS_bind},
        {BPF_JMP | BPF_JEQ | BPF_K, 1, 0, SYS_exit_group},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_KILL_PROCESS},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
    };
    struct sock_fprog program = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(9);
}

int main(int argc, char **argv) {
    const char *mode = argv[1];
    long n = argc > 2 ? atol(argv[2]) : 1000;
    char text[64];
    if (!strcmp(mode, "signals")) {
        signal(SIGALRM, handler);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 50}, {0, 50}}, NULL);
        copies(n);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
        printf("%ld\n", made);
        return 0;
    }
    if (!strcmp(mode, "descriptors")) setrlimit(RLIMIT_NOFILE, &(struct rlimit){3, 3});
    if (strcmp(mode, "unopened")) copies(100);
    if (!strcmp(mode, "descriptors")) {
    } else if (!strcmp(mode, "refused"))
        prctl(PR_SET_SECCOMP, 77, NULL); /* no such mode: nothing is confined */
    else if (!strcmp(mode, "strict")) {
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) return 9;
    } else {
        int fd = socket(AF_INET, SOCK_DGRAM, 0);
        struct sockaddr_in any = {.sin_family = AF_INET};
        confine();
        if (bind(fd, (struct sockaddr *)&any, sizeof any)) return 7;
    }
    copies(n);
    /* no stdio: it may ask what kind of file it writes to */
    long number = made;
    char *at = text + sizeof text;
    *--at = '\n';
    do *--at = (char)('0' + number % 10);
    while (number /= 10);
    if (write(1, at, (size_t)(text + sizeof text - at)) < 0) return 8;
    if (!strcmp(mode, "strict")) syscall(SYS_exit, 0);
    _exit(0);
}
