/* Opens the next ring file while a thread is at work in the one before: ring_reopened MODE FOLDER CALLS.
 * The thread is held where it asks for disk space: in mode `attaching` it is making its section, in mode `writing` it
 * is in the middle of a record. It goes on as soon as the next file is open, or is seen to be waited for. FOLDER gets
 * first.kvp, held.kvp and next.kvp; stream 1 of next.kvp is the opener's, stream 2 the held thread's. */
#define _GNU_SOURCE
#include "kvp.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static sem_t held, go_on, opened;
static __thread int to_hold; /* requests for disk space, counted down; the last one is held */
static __thread int opens;   /* this thread opens a file, and told nobody yet */
static const char *folder;
static long calls;

static void told(void) {
    if (opens) sem_post(&go_on);
    opens = 0;
}

int posix_fallocate(int fd, off_t offset, off_t bytes) {
    if (to_hold && !--to_hold) {
        sem_post(&held);
        sem_wait(&go_on);
    }
    return ((int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate"))(fd, offset, bytes);
}

int nanosleep(const struct timespec *time, struct timespec *left) {
    told();
    return ((int (*)(const struct timespec *, struct timespec *))dlsym(RTLD_NEXT, "nanosleep"))(time, left);
}

static void put(uint64_t stream, long times) {
    kvp_record r = {.start_ns = kvp_now_ns(), .dur_ns = 500, .stream = stream, .bytes = 100, .count = 1, .call = 1};
    for (long i = 0; i < times; i++) kvp_ring_write(&r, 1);
}

static void open_file(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.kvp", folder, name);
    int error = kvp_ring_open(path, "engine", NULL);
    if (error) fprintf(stderr, "%s: %d\n", path, error), exit(3);
}

static void *attaching(void *unused) {
    to_hold = 1;
    put(2, 1);
    sem_wait(&opened);
    put(2, calls);
    return unused;
}

static void *writing(void *unused) {
    put(2, 256); /* as many records as a ring begins with: the next one asks for more */
    to_hold = 1;
    put(2, 1);
    sem_wait(&opened);
    put(2, calls);
    return unused;
}

static void *opener(void *unused) {
    opens = 1;
    open_file("next");
    put(1, 1);
    told();
    sem_post(&opened);
    put(1, calls - 1);
    return unused;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    folder = argv[2];
    calls = atol(argv[3]);
    sem_init(&held, 0, 0);
    sem_init(&go_on, 0, 0);
    sem_init(&opened, 0, 0);
    open_file("first"); /* leaves the addresses that both files after it will take */
    put(1, 1);
    kvp_ring_close();
    open_file("held");
    pthread_t one, other;
    pthread_create(&one, NULL, strcmp(argv[1], "writing") ? attaching : writing, NULL);
    sem_wait(&held);
    kvp_ring_close();
    pthread_create(&other, NULL, opener, NULL);
    pthread_join(one, NULL);
    pthread_join(other, NULL);
    put(3, 1);
    kvp_ring_close();
    return 0;
}
