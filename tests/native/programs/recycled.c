/* A program that pins memory, copies, and frees it again and again, as one that puts its model to sleep does.
 *
 *   recycled PLAY [ROUNDS]
 *
 * It prints, and that must be the same whoever watches, what each call returned and how many bytes were wrong. The most
 * that was pinned beside what the program held goes to stderr. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvhost.h"

int cudaMalloc(void **, size_t), cudaHostAlloc(void **, size_t, unsigned), cudaMallocHost(void **, size_t);
int cudaFreeHost(void *), cudaMemcpy(void *, const void *, size_t, int), cudaGetLastError(void);
int cudaPeekAtLastError(void), cudaDeviceReset(void), cudaDeviceSynchronize(void);
int cudaStreamCreateWithFlags(cudaStream_t *, unsigned), cudaStreamQuery(cudaStream_t);
int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, uint64_t), cuMemRelease(uint64_t);
int cuMemCreate(uint64_t *, size_t, const void *, uint64_t), cuMemMap(uint64_t, size_t, size_t, uint64_t, uint64_t);
int cuMemUnmap(uint64_t, size_t), cuMemSetAccess(uint64_t, size_t, const void *, size_t);
int cuMemAddressFree(uint64_t, size_t);
int cudaHostRegister(void *, size_t, unsigned), cudaHostUnregister(void *), cudaHostGetFlags(unsigned *, void *);
int cuMemHostAlloc(void **, size_t, unsigned), cuMemFreeHost(void *);
int cudaStreamBeginCapture(cudaStream_t, int), cudaStreamEndCapture(cudaStream_t, void **);

enum { MIB = 1 << 20, MODEL = 6, TO_DEVICE = 1, TO_HOST = 2 };

static const size_t sizes[MODEL] = {4 * MIB, 2 * MIB, 3 * MIB + 4096, 2 * MIB, 1 * MIB, 8192};
static uint8_t *weights[MODEL], *backup[MODEL];
static uint64_t most, held, handles[MODEL];
static int moves; /* the weights' memory comes and goes under addresses that stay */
static long wrong;
static size_t looked_at = 1 << 30; /* so many bytes of each weight are copied and compared */

static void check(int error) {
    if (!error) return;
    printf("error %d\n", error);
    exit(3);
}

static void look(void) {
    kvhost_stats stats;
    check(kvhostStats(&stats));
    if (stats.pinned_bytes - held > most) most = stats.pinned_bytes - held;
}

static uint8_t *pin(size_t bytes) {
    uint8_t *at = NULL;
    check(cudaMallocHost((void **)&at, bytes));
    held += bytes;
    look();
    return at;
}

static void unpin(uint8_t *at, size_t bytes) {
    check(cudaFreeHost(at));
    held -= bytes;
    look();
}

static void fill(uint8_t *at, size_t bytes, unsigned turn) {
    for (size_t i = 0; i < bytes; i += 509) at[i] = (uint8_t)(turn + i);
}

static void compare(const uint8_t *at, size_t bytes, unsigned turn) {
    for (size_t i = 0; i < bytes; i += 509) wrong += at[i] != (uint8_t)(turn + i);
}

static void map(int i) {
    static const uint64_t any[4];
    check(cuMemCreate(&handles[i], sizes[i], any, 0));
    check(cuMemMap((uintptr_t)weights[i], sizes[i], 0, handles[i], 0));
    check(cuMemSetAccess((uintptr_t)weights[i], sizes[i], any, 1));
}

static void unmap(int i) {
    check(cuMemUnmap((uintptr_t)weights[i], sizes[i]));
    check(cuMemRelease(handles[i]));
}

/* Puts the model to sleep and wakes it; other bytes each time. */
static void sleep_and_wake(unsigned turn) {
    for (int i = 0; i < MODEL; i++) {
        size_t bytes = sizes[i] < looked_at ? sizes[i] : looked_at;
        fill(weights[i], bytes, turn); /* the host runtime's device memory is ordinary memory */
        backup[i] = pin(sizes[i]);
        check(cudaMemcpy(backup[i], weights[i], bytes, TO_HOST));
        if (moves)
            unmap(i);
        else
            memset(weights[i], 0, bytes);
    }
    for (int i = 0; i < MODEL; i++) {
        size_t bytes = sizes[i] < looked_at ? sizes[i] : looked_at;
        if (moves) map(i);
        check(cudaMemcpy(weights[i], backup[i], bytes, TO_DEVICE));
        unpin(backup[i], sizes[i]);
        compare(weights[i], bytes, turn);
    }
}

static void prepare(void) {
    for (int i = 0; i < MODEL; i++) check(cudaMalloc((void **)&weights[i], sizes[i]));
}

static void virtual(void) {
    uint64_t at, free_before, free_after, total;
    int cudaMemGetInfo(uint64_t *, uint64_t *);
    check(cudaMemGetInfo(&free_before, &total));
    moves = 1;
    for (int i = 0; i < MODEL; i++) {
        check(cuMemAddressReserve(&at, sizes[i], 0, 0, 0));
        weights[i] = (uint8_t *)at;
        map(i);
    }
    for (unsigned i = 0; i < 3; i++) sleep_and_wake(i);
    unmap(0);
    printf("unmapped %d", cudaMemcpy(weights[1], weights[0], 8192, 3));
    printf(" last %d", cudaGetLastError());
    printf(" twice %d %d", cuMemUnmap((uintptr_t)weights[0], sizes[0]), cuMemRelease(handles[0]));
    printf(" address %d", cuMemAddressFree((uintptr_t)weights[0], sizes[0]));
    for (int i = 1; i < MODEL; i++) unmap(i);
    check(cudaMemGetInfo(&free_after, &total));
    printf(" left %d\n", free_before == free_after);
}

/* A call that makes pages for more than a millisecond. */
static void pages(void) {
    uint8_t *at = pin((size_t)256 * MIB);
    unpin(at, (size_t)256 * MIB);
}

/* In a cgroup of 400 MiB: what is given back may be kept, and then the program needs memory of its own. */
static void presses(void) {
    enum { COUNT = 8, EACH = 32 * MIB, OWN = 220 * MIB };
    uint8_t *at[COUNT], *own = malloc(OWN);
    for (int i = 0; i < COUNT; i++) at[i] = pin(EACH);
    for (int i = 0; i < COUNT; i++) unpin(at[i], EACH);
    for (size_t i = 0; i < OWN; i += 4096) own[i] = 1;
    free(own);
}

static void exceeds(void) {
    enum { EACH = 32 * MIB };
    for (int i = 0; i < 16; i++) memset(pin(EACH), 1, EACH);
}

static void sleeps(int rounds) {
    if (rounds > 100) looked_at = 16384;
    for (int i = 0; i < rounds; i++) sleep_and_wake((unsigned)i);
}

static void other_flags(void) {
    for (unsigned flags = 0; flags < 4; flags++) {
        uint8_t *at;
        check(cudaHostAlloc((void **)&at, MIB, flags));
        fill(at, MIB, flags);
        compare(at, MIB, flags);
        check(cudaFreeHost(at));
    }
}

/* What the runtime answers about memory that it has allocated, and what it refuses to do with it. */
static void answers(void) {
    struct {
        int type, device;
        void *on_device, *on_host, *more[8];
    } a;
    int cudaPointerGetAttributes(void *, const void *);
    for (unsigned asked = 0; asked < 8; asked++) {
        uint8_t *at = NULL;
        unsigned flags[2] = {99, 99};
        check(cudaHostAlloc((void **)&at, 3 * MIB + 100, asked));
        int got = cudaHostGetFlags(&flags[0], at), inside = cudaHostGetFlags(&flags[1], at + MIB);
        printf("flags %u: %d %u inside %d %u", asked, got, flags[0], inside, flags[1]);
        printf(" attributes %d", cudaPointerGetAttributes(&a, at + 2 * MIB));
        printf(" %d %d %d %d", a.type, a.device, a.on_device == at + 2 * MIB, a.on_host == at + 2 * MIB);
        for (size_t i = 0; i < 3 * MIB + 100; i++) wrong += at[i] != 0;
        printf(" unregister %d", cudaHostUnregister(at));
        printf(" last %d register", cudaGetLastError());
        printf(" %d last", cudaHostRegister(at, MIB, 0));
        printf(" %d free", cudaGetLastError());
        printf(" %d again", cudaFreeHost(at));
        printf(" %d last", cudaFreeHost(at));
        printf(" %d\n", cudaGetLastError());
    }
}

static void by_the_driver(void) {
    uint8_t *at = NULL;
    check(cuMemHostAlloc((void **)&at, 4 * MIB, 1));
    fill(at, 4 * MIB, 7);
    compare(at, 4 * MIB, 7);
    printf("freed %d", cuMemFreeHost(at));
    printf(" again %d", cuMemFreeHost(at));
    check(cudaMallocHost((void **)&at, 4 * MIB));
    printf(" the runtime's %d", cuMemFreeHost(at));
    check(cuMemHostAlloc((void **)&at, 4 * MIB, 0));
    printf(" by the runtime %d", cudaFreeHost(at));
    printf(" last %d\n", cudaGetLastError());
}

/* A child that, once it is told to, finds `expected` there and leaves 3s. */
static pid_t child_at(uint8_t *at, int tell[2], uint8_t expected) {
    char c = 0;
    if (pipe(tell)) exit(4);
    pid_t child = fork();
    if (child) return child;
    if (read(tell[0], &c, 1) != 1) _exit(9);
    compare(at, 4 * MIB, expected);
    fill(at, 4 * MIB, 3);
    _exit(wrong != 0);
}

/* Tells it, and waits for its end. */
static int told(pid_t child, const int tell[2]) {
    char c = 0;
    int status = -1;
    if (write(tell[1], &c, 1) != 1) exit(4);
    waitpid(child, &status, 0);
    return status;
}

/* A child reads what its parent writes after the fork. */
static void shares(void) {
    int tell[2];
    uint8_t *at = pin(4 * MIB);
    fill(at, 4 * MIB, 1);
    pid_t child = child_at(at, tell, 2);
    fill(at, 4 * MIB, 2);
    int status = told(child, tell);
    compare(at, 4 * MIB, 3);
    printf("child %d\n", status);
    unpin(at, 4 * MIB);
}

/* A child goes on using what its parent has freed. */
static void outlives(void) {
    int tell[2];
    uint8_t *at = pin(4 * MIB);
    fill(at, 4 * MIB, 1);
    pid_t child = child_at(at, tell, 1);
    unpin(at, 4 * MIB);
    at = pin(4 * MIB);
    fill(at, 4 * MIB, 2);
    int status = told(child, tell);
    compare(at, 4 * MIB, 2);
    printf("child %d\n", status);
    unpin(at, 4 * MIB);
}

static void wrong_frees(void) {
    uint8_t *at = pin(2 * MIB);
    printf("inside %d", cudaFreeHost(at + 4096));
    printf(" last %d", cudaGetLastError());
    unpin(at, 2 * MIB);
    printf(" again %d", cudaFreeHost(at));
    printf(" last %d", cudaGetLastError());
    printf(" nothing %d %d\n", cudaFreeHost(NULL), cudaHostAlloc((void **)&at, 0, 0));
}

static void waits(void) {
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, 1));
    uint8_t *at = pin(2 * MIB);
    check(kvhostLaunchDelay(stream, 3000000));
    printf("before %d", cudaStreamQuery(stream));
    unpin(at, 2 * MIB);
    printf(" after %d\n", cudaStreamQuery(stream));
}

static void captures(void) {
    cudaStream_t stream;
    void *graph;
    check(cudaStreamCreateWithFlags(&stream, 1));
    uint8_t *at = pin(2 * MIB), *more = NULL;
    unpin(pin(2 * MIB), 2 * MIB);
    check(cudaStreamBeginCapture(stream, 0));
    printf("pin %d", cudaMallocHost((void **)&more, 2 * MIB));
    printf(" unpin %d", cudaFreeHost(at));
    printf(" end %d last %d\n", cudaStreamEndCapture(stream, &graph), cudaGetLastError());
}

static void resets(void) {
    sleep_and_wake(1);
    uint8_t *at = pin(2 * MIB);
    check(cudaDeviceReset());
    held = 0;
    printf("of before %d %d\n", cudaFreeHost(at), cudaGetLastError());
    prepare();
    sleep_and_wake(2);
}

static void forks(void) {
    sleep_and_wake(1);
    pid_t child = fork();
    if (!child) _exit(cudaPeekAtLastError());
    int status = -1;
    waitpid(child, &status, 0);
    printf("child %d\n", status);
    sleep_and_wake(2);
}

/* KVHOST_PINNED_BYTES says how much there is. */
static void out_of_memory(void) {
    uint8_t *at = NULL;
    sleep_and_wake(1);
    at = pin(14 * MIB);
    printf("last %d\n", cudaPeekAtLastError());
    unpin(at, 14 * MIB);
    printf("too much %d", cudaMallocHost((void **)&at, 17 * MIB));
    printf(" last %d\n", cudaGetLastError());
    sleep_and_wake(2);
}

static void locked_limit(void) {
    struct rlimit none = {0, 0};
    check(setrlimit(RLIMIT_MEMLOCK, &none));
    sleep_and_wake(1);
    sleep_and_wake(2);
}

/* What was freed can be had again in one piece, if nobody keeps it. */
static void limited_space(void) {
    enum { COUNT = 64, EACH = 4 * MIB, OTHERS = 160 * MIB }; /* recording takes some, too */
    long pages = 0;
    uint8_t *at[COUNT];
    FILE *file = fopen("/proc/self/statm", "r");
    check(!file || fscanf(file, "%ld", &pages) != 1);
    fclose(file);
    rlim_t bytes = (rlim_t)pages * 4096 + COUNT * (rlim_t)EACH + OTHERS;
    struct rlimit space = {bytes, bytes};
    check(setrlimit(RLIMIT_AS, &space));
    for (int i = 0; i < COUNT; i++) at[i] = pin(EACH);
    for (int i = 0; i < COUNT; i++) unpin(at[i], EACH);
    printf("all of it %d, more %d\n", malloc(COUNT * EACH) != NULL, malloc((size_t)4 * COUNT * EACH) != NULL);
}

/* Twice what may be kept comes and goes, each size once. */
static void in_vain(void) {
    for (size_t i = 2; i < 9; i++) unpin(pin(i * i * MIB / 4), i * i * MIB / 4);
}

static void *play_on(void *given) {
    unsigned turn = *(unsigned *)given;
    for (int i = 0; i < 200; i++) {
        uint8_t *at = NULL;
        check(cudaMallocHost((void **)&at, 2 * MIB));
        fill(at, 2 * MIB, turn);
        sched_yield();
        for (size_t k = 0; k < 2 * MIB; k += 509)
            if (at[k] != (uint8_t)(turn + k)) __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED);
        check(cudaFreeHost(at));
    }
    return NULL;
}

static void threads(void) {
    pthread_t others[4];
    unsigned turns[4] = {3, 50, 90, 200};
    for (int i = 0; i < 4; i++) pthread_create(&others[i], NULL, play_on, &turns[i]);
    for (int i = 0; i < 4; i++) pthread_join(others[i], NULL);
}

int main(int count, char **arguments) {
    const char *play = arguments[1];
    prepare();
    if (!strcmp(play, "sleeps")) sleeps(count > 2 ? atoi(arguments[2]) : 3);
    if (!strcmp(play, "virtual")) virtual();
    if (!strcmp(play, "pages")) pages();
    if (!strcmp(play, "presses")) presses();
    if (!strcmp(play, "exceeds")) exceeds();
    if (!strcmp(play, "flags")) other_flags();
    if (!strcmp(play, "answers")) answers();
    if (!strcmp(play, "driver")) by_the_driver();
    if (!strcmp(play, "shares")) shares();
    if (!strcmp(play, "outlives")) outlives();
    if (!strcmp(play, "wrong")) wrong_frees();
    if (!strcmp(play, "waits")) waits();
    if (!strcmp(play, "captures")) captures();
    if (!strcmp(play, "resets")) resets();
    if (!strcmp(play, "forks")) forks();
    if (!strcmp(play, "memory")) out_of_memory();
    if (!strcmp(play, "locked")) locked_limit();
    if (!strcmp(play, "space")) limited_space();
    if (!strcmp(play, "in-vain")) in_vain();
    if (!strcmp(play, "threads")) threads();
    printf("%ld wrong\n", wrong);
    fprintf(stderr, "most kept %llu\n", (unsigned long long)most);
    return 0;
}
