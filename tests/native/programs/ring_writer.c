/* Writes a ring file in the ways that could break it: ring_writer MODE PATH [CALLS] [THREADS].
 * Prints what it wrote, one "name value" a line. */
#include "kvp.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static long calls;

static void put(uint64_t stream, uint64_t bytes, uint64_t dur, int detail) {
    kvp_record r = {.start_ns = kvp_now_ns(),
                    .dur_ns = dur,
                    .stream = stream,
                    .bytes = bytes,
                    .count = 1,
                    .call = 1,
                    .direction = KVP_H2D,
                    .tid = (uint32_t)syscall(SYS_gettid)};
    kvp_ring_write(&r, detail);
}

static pthread_barrier_t together; /* of mode small: all threads write before any ends */
static int waits;

static void *many(void *stream) {
    if (waits) pthread_barrier_wait(&together);
    for (long i = 0; i < calls; i++) put((uintptr_t)stream, 100, i % 1000 == 7 ? 30000 : 500, 1);
    if (waits) pthread_barrier_wait(&together);
    return NULL;
}

static volatile sig_atomic_t signalled;
static void handler(int sig) {
    (void)sig;
    signalled++;
    put(1, 100, 500, 1);
}

int main(int argc, char **argv) {
    const char *mode = argv[1], *path = argv[2];
    calls = argc > 3 ? atol(argv[3]) : 1000;
    int threads = argc > 4 ? atoi(argv[4]) : 1;
    kvp_ring_options options = {0};
    if (!strcmp(mode, "small")) options.ring_capacity = 1024, options.sections_max = 4, options.slot_count = 16;
    if (!strcmp(mode, "limit")) signal(SIGXFSZ, SIG_DFL);
    if (!strcmp(mode, "limit")) setrlimit(RLIMIT_FSIZE, &(struct rlimit){atol(argv[4]), atol(argv[4])}), threads = 1;
    printf("open %d\n", kvp_ring_open(path, "engine", &options));
    if (!strcmp(mode, "signals")) {
        signal(SIGALRM, handler);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 50}, {0, 50}}, NULL);
        many((void *)1);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
        printf("written %ld\n", calls + (long)signalled);
    } else if (!strcmp(mode, "streams")) {
        for (long i = 0; i < calls; i++) put((uint64_t)i, 10, 500, 1);
        printf("written %ld\n", calls);
    } else if (!strcmp(mode, "fork") || !strcmp(mode, "rawfork")) {
        put(1, 100, 500, 1);
        pid_t child = mode[0] == 'r' ? (pid_t)syscall(SYS_fork) : fork();
        if (!child) {
            put(1, 100, 500, 1); /* must not reach the parent's file */
            int is_open = kvp_ring_is_open();
            char own[4096];
            snprintf(own, sizeof own, "%s.child", path);
            int opened = kvp_ring_open(own, "engine", &options);
            for (int i = 0; i < 5; i++) put(1, 100, 500, 1);
            kvp_ring_close();
            _exit(is_open || opened ? 9 : 0);
        }
        int status;
        waitpid(child, &status, 0);
        put(1, 100, 500, 1);
        printf("child %d\n", status);
    } else if (!strcmp(mode, "kill")) {
        printf("ready\n");
        fflush(stdout);
        for (;;) put(1, 100, 500, 1);
    } else if (!strcmp(mode, "unlink")) {
        put(1, 100, 500, 1);
        unlink(path);
        many((void *)1);
        printf("written %ld\n", calls + 1);
    } else {
        pthread_t ids[512];
        waits = !strcmp(mode, "small");
        pthread_barrier_init(&together, NULL, (unsigned)threads);
        for (int t = 0; t < threads; t++) {
            pthread_create(&ids[t], NULL, many, (void *)(uintptr_t)(t + 1));
            if (!strcmp(mode, "sequence")) pthread_join(ids[t], NULL);
        }
        for (int t = 0; t < threads && strcmp(mode, "sequence"); t++) pthread_join(ids[t], NULL);
        printf("written %ld\n", calls * threads);
    }
    kvp_ring_close();
    put(1, 100, 500, 1); /* after the end: ignored */
    return 0;
}
