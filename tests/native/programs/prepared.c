/* A program whose allocator (saver.c) puts its memory to sleep.
 *
 *   prepared PLAY [ROUNDS]
 *
 * It prints, and that must be the same whoever watches, what each call returned and how many bytes were wrong. With
 * PREPARED_BYTES it waits, before a sleep, until so much is pinned that it does not hold. To stderr: the most that ever
 * was. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kvhost.h"

int cudaMalloc(void **, size_t), cudaMallocHost(void **, size_t), cudaFreeHost(void *), cudaDeviceReset(void);
int cudaMemcpy(void *, const void *, size_t, int), cudaPeekAtLastError(void), cudaGetLastError(void);
int cudaStreamCreateWithFlags(cudaStream_t *, unsigned);
int cudaStreamBeginCapture(cudaStream_t, int), cudaStreamEndCapture(cudaStream_t, void **);
int cuMemHostUnregister(void *);
void saver_backs_up(int);
int saver_new(uint64_t *, size_t, uint64_t *), saver_free(uint64_t, size_t, uint64_t);
int saver_map(uint64_t, size_t, uint64_t *), saver_unmap(uint64_t, size_t, uint64_t);

enum { MIB = 1 << 20, MODEL = 6, TO_DEVICE = 1, TO_HOST = 2 };

static const size_t sizes[MODEL] = {6 * MIB, 2 * MIB, 4 * MIB, 2 * MIB, 3 * MIB, 2 * MIB};
static uint64_t weights[MODEL], handles[MODEL], most, held;
static void *backup[MODEL];
static size_t (*asked)(size_t);
static long wrong;
static size_t looked_at = 1 << 30;

static void check(int error) {
    if (!error) return;
    printf("error %d\n", error);
    exit(3);
}

static uint64_t look(void) {
    kvhost_stats stats;
    check(kvhostStats(&stats));
    uint64_t beside = stats.pinned_bytes - held;
    if (beside > most) most = beside;
    return beside;
}

/* What it waits for needs real time; that it comes at all is what is tested. */
static void wait_for(uint64_t bytes) {
    for (int i = 0; i < 20000 && look() != bytes; i++) nanosleep(&(struct timespec){0, 1000000}, NULL);
    if (look() != bytes) {
        fprintf(stderr, "%llu of %llu bytes are there\n", (unsigned long long)look(), (unsigned long long)bytes);
        exit(5);
    }
}

static void wait_until_prepared(void) {
    const char *bytes = getenv("PREPARED_BYTES");
    if (bytes) wait_for(strtoull(bytes, NULL, 10));
}

static size_t exactly(size_t bytes) { return bytes; }
static size_t power_of_two(size_t bytes) {
    size_t power = 1;
    while (power < bytes) power *= 2;
    return power;
}

static void *pin(size_t bytes) {
    void *at = NULL;
    check(cudaMallocHost(&at, bytes));
    held += bytes;
    look();
    return at;
}

static void unpin(void *at, size_t bytes) {
    check(cudaFreeHost(at));
    held -= bytes;
    look();
}

static void load(int backs_up) {
    saver_backs_up(backs_up);
    for (int i = 0; i < MODEL; i++) check(saver_new(&weights[i], sizes[i], &handles[i]));
}

static void unload(void) {
    for (int i = 0; i < MODEL; i++) check(saver_free(weights[i], sizes[i], handles[i]));
}

static size_t looked(int i) { return sizes[i] < looked_at ? sizes[i] : looked_at; }

static void fall_asleep(unsigned turn, int backs_up) {
    for (int i = 0; i < MODEL; i++) {
        uint8_t *at = (uint8_t *)weights[i];
        for (size_t k = 0; k < looked(i); k += 509) at[k] = (uint8_t)(turn + k);
        if (backs_up) {
            backup[i] = pin(asked(sizes[i]));
            check(cudaMemcpy(backup[i], at, looked(i), TO_HOST));
        }
        check(saver_unmap(weights[i], sizes[i], handles[i]));
        look();
    }
}

static void wake_up(unsigned turn, int backs_up) {
    for (int i = 0; i < MODEL; i++) {
        uint8_t *at = (uint8_t *)weights[i];
        check(saver_map(weights[i], sizes[i], &handles[i]));
        if (!backs_up) continue;
        check(cudaMemcpy(at, backup[i], looked(i), TO_DEVICE));
        unpin(backup[i], asked(sizes[i]));
        for (size_t k = 0; k < looked(i); k += 509) wrong += at[k] != (uint8_t)(turn + k);
    }
}

static void sleeps(int rounds) {
    load(1);
    wait_until_prepared();
    if (rounds > 100) looked_at = 16384;
    for (int i = 0; i < rounds; i++) {
        fall_asleep((unsigned)i, 1);
        wake_up((unsigned)i, 1);
    }
    unload();
}

/* Its memory is thrown away: what was prepared goes. */
static void thrown_away(void) {
    load(1);
    wait_until_prepared();
    fall_asleep(0, 0);
    if (getenv("LEFT_BYTES")) wait_for(strtoull(getenv("LEFT_BYTES"), NULL, 10));
    wake_up(0, 0);
    unload();
}

static void of_no_backup(int how) {
    load(how);
    fall_asleep(0, 0);
    wake_up(0, 0);
    unload();
}

static void freed_and_made(void) {
    for (int i = 0; i < 50; i++) {
        load(1);
        unload();
    }
    sleeps(2);
}

static void forks(void) {
    load(1);
    wait_until_prepared();
    pid_t child = fork();
    if (!child) _exit(cudaPeekAtLastError());
    int status = -1;
    waitpid(child, &status, 0);
    printf("child %d\n", status);
    fall_asleep(1, 1);
    child = fork();
    if (!child) { /* what it has been handed is its child's, too */
        for (int i = 0; i < MODEL; i++)
            for (size_t k = 0; k < sizes[i]; k += 509) wrong += ((uint8_t *)backup[i])[k] != (uint8_t)(1 + k);
        _exit(wrong != 0);
    }
    waitpid(child, &status, 0);
    printf("child %d\n", status);
    wake_up(1, 1);
}

static void resets(void) {
    for (int i = 0; i < 20; i++) {
        load(1);
        if (i == 10) wait_until_prepared();
        check(cudaDeviceReset());
        held = 0;
    }
    sleeps(2);
}

static void captures(void) {
    cudaStream_t stream;
    void *graph;
    check(cudaStreamCreateWithFlags(&stream, 1));
    check(cudaStreamBeginCapture(stream, 0));
    load(1);
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    printf("end %d last %d\n", cudaStreamEndCapture(stream, &graph), cudaGetLastError());
    fall_asleep(1, 1);
    wake_up(1, 1);
}

/* Nothing is pinned while a stream is captured, but pages are made. */
static uint64_t shared_bytes(void) {
    char line[512];
    unsigned long long all = 0, kib = 0;
    int is_shared = 0;
    FILE *file = fopen("/proc/self/smaps", "re");
    while (file && fgets(line, sizeof line, file)) {
        if (strstr(line, "-") && strchr(line, ' ') > strchr(line, '-')) is_shared = strstr(line, "/dev/zero") != NULL;
        if (is_shared && sscanf(line, "Rss: %llu", &kib) == 1) all += kib * 1024;
    }
    if (file) fclose(file);
    return all;
}

static void pages_first(void) {
    cudaStream_t stream;
    void *graph;
    uint64_t model = 0;
    for (int i = 0; i < MODEL; i++) model += sizes[i];
    check(cudaStreamCreateWithFlags(&stream, 1));
    check(cudaStreamBeginCapture(stream, 0));
    load(1);
    for (int i = 0; i < 20000 && getenv("PAGES_FIRST") && shared_bytes() < model; i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    if (getenv("PAGES_FIRST") && shared_bytes() < model) exit(6);
    if (look()) exit(7);
    check(cudaStreamEndCapture(stream, &graph));
    fall_asleep(1, 1);
    wake_up(1, 1);
}

/* KVHOST_PINNED_BYTES says how much there is. */
static void out_of_memory(void) {
    void *at;
    load(1);
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    at = pin(14 * MIB);
    printf("last %d", cudaPeekAtLastError());
    unpin(at, 14 * MIB);
    printf(" too much %d", cudaMallocHost(&at, 17 * MIB));
    printf(" last %d\n", cudaGetLastError());
}

static void locked_limit(void) {
    struct rlimit none = {0, 0};
    check(setrlimit(RLIMIT_MEMLOCK, &none));
    sleeps(2);
}

static void *play_on(void *unused) {
    uint64_t at, handle;
    saver_backs_up(1);
    for (int i = 0; i < 100; i++) {
        check(saver_new(&at, 2 * MIB, &handle));
        void *backed = NULL;
        check(cudaMallocHost(&backed, 2 * MIB));
        check(cudaMemcpy(backed, (void *)at, 4096, TO_HOST));
        check(saver_unmap(at, 2 * MIB, handle));
        check(cudaFreeHost(backed));
        check(saver_free(at, 2 * MIB, 0));
    }
    return unused;
}

static void threads(void) {
    pthread_t others[4];
    for (int i = 0; i < 4; i++) pthread_create(&others[i], NULL, play_on, NULL);
    for (int i = 0; i < 4; i++) pthread_join(others[i], NULL);
}

/* While its buffers are being made, or just after. */
static void early(void) {
    uint64_t at, handle;
    saver_backs_up(1);
    for (int i = 0; i < 20; i++) check(saver_new(&at, 64 * MIB, &handle));
}

int main(int count, char **arguments) {
    const char *play = arguments[1];
    void *first;
    asked = exactly;
    check(cudaMalloc(&first, 4096));
    check(cudaMallocHost(&first, 4096));
    held += 4096;
    void (*is_backed_up)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "kvprobe_is_backed_up");
    if (getenv("ADAPTER")) {
        asked = power_of_two;
        if (is_backed_up) is_backed_up(atoi(getenv("ADAPTER")));
    }
    if (!strcmp(play, "sleeps")) sleeps(count > 2 ? atoi(arguments[2]) : 3);
    if (!strcmp(play, "thrown-away")) thrown_away();
    if (!strcmp(play, "no-backup")) of_no_backup(0);
    if (!strcmp(play, "pageable")) of_no_backup(2);
    if (!strcmp(play, "churn")) freed_and_made();
    if (!strcmp(play, "forks")) forks();
    if (!strcmp(play, "resets")) resets();
    if (!strcmp(play, "captures")) captures();
    if (!strcmp(play, "pages-first")) pages_first();
    if (!strcmp(play, "memory")) out_of_memory();
    if (!strcmp(play, "locked")) locked_limit();
    if (!strcmp(play, "threads")) threads();
    if (!strcmp(play, "early")) early();
    printf("%ld wrong\n", wrong);
    fflush(stdout);
    fprintf(stderr, "most beside %llu\n", (unsigned long long)most);
    return 0;
}
