/* A program that copies pageable memory and does with it what programs do.
 *
 *   pageable PLAY [SECONDS]
 *
 * It prints, and that must be the same whoever watches, each result and how many bytes were wrong. A play that repeats
 * goes on until the interposer has made up its mind about loads and stores (a line in $KVPROBE_RUN says so), or for so
 * many seconds; how often it repeated goes to stderr. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kvhost.h"

int cudaMemcpyAsync(void *, const void *, size_t, int, cudaStream_t);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
int cudaMemcpy2DAsync(void *, size_t, const void *, size_t, size_t, size_t, int, cudaStream_t);
int cuMemcpy(uint64_t, uint64_t, size_t);
int cuMemcpyHtoD_v2(uint64_t, const void *, size_t);
int cuMemcpyDtoH_v2(void *, uint64_t, size_t);
int cuMemcpyAsync(uint64_t, uint64_t, size_t, cudaStream_t);
int cuMemcpyHtoDAsync_v2(uint64_t, const void *, size_t, cudaStream_t);
int cuMemcpyDtoHAsync_v2(void *, uint64_t, size_t, cudaStream_t);
int cudaStreamCreateWithFlags(cudaStream_t *, unsigned);
int cudaStreamSynchronize(cudaStream_t);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaDeviceReset(void);
int cudaHostAlloc(void **, size_t, unsigned);
int cudaHostRegister(void *, size_t, unsigned);
int cudaHostUnregister(void *);
int cudaPointerGetAttributes(void *, const void *);
int cudaStreamBeginCapture(cudaStream_t, int);
int cudaStreamEndCapture(cudaStream_t, void **);

enum { MIB = 1 << 20, ROOM = 8 * MIB };

static _Thread_local cudaStream_t stream;
static _Thread_local uint8_t *device;
static long wrong, repeated;
static double until;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void check(int error) {
    if (!error) return;
    printf("error %d\n", error);
    exit(3);
}

/* The n-th byte of the `turn`-th pattern. */
static inline uint8_t byte_of(unsigned turn, size_t n) { return (uint8_t)(turn * 31 + n * 7 + (n >> 12)); }

static void fill(uint8_t *at, size_t bytes, unsigned turn) {
    for (size_t i = 0; i < bytes; i++) at[i] = byte_of(turn, i);
}

static long differing(const uint8_t *at, size_t bytes, unsigned turn) {
    long count = 0;
    for (size_t i = 0; i < bytes; i++) count += at[i] != byte_of(turn, i);
    return count;
}

static void prepare(void) {
    check(cudaMalloc((void **)&device, ROOM));
    check(cudaStreamCreateWithFlags(&stream, 1));
}

static int decided(void) {
    static char text[1 << 16];
    char path[4096];
    const char *folder = getenv("KVPROBE_RUN");
    if (!folder) return 1;
    snprintf(path, sizeof path, "%s/events-%d.jsonl", folder, (int)getpid());
    int file = open(path, O_RDONLY);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length > 0 ? length : 0] = 0;
    return strstr(text, "failed") || (strstr(text, "pageable loads") && strstr(text, "pageable stores"));
}

static int again(void) {
    repeated++;
    return now() < until && (repeated < 60 || repeated % 8 || !decided());
}

static uint64_t word(const void *at) { return (uint64_t)(uintptr_t)at; }

/* By one of the calls that return when the copy is over; rows of 4096 bytes that lie one behind the other are one. */
enum { WAYS = 5, ROW = 4096 };
static int synchronously(unsigned way, void *dst, const void *src, size_t bytes, int kind) {
    switch (way % WAYS) {
    case 0:
        return cudaMemcpy(dst, src, bytes, kind);
    case 1:
        return kind == 1 ? cuMemcpyHtoD_v2(word(dst), src, bytes) : cuMemcpyDtoH_v2(dst, word(src), bytes);
    case 2:
        return cuMemcpy(word(dst), word(src), bytes);
    case 3:
        return cudaMemcpy2D(dst, bytes, src, bytes, bytes, 1, kind);
    default: {
        size_t rows = bytes / ROW, rest = bytes % ROW, at = rows * ROW;
        int error = cudaMemcpy2D(dst, ROW, src, ROW, ROW, rows, kind);
        if (error || !rest) return error;
        return cudaMemcpy((char *)dst + at, (const char *)src + at, rest, kind);
    }
    }
}

/* Loads and stores `bytes` from `at`, which is changed the moment each call returns. */
static void there_and_back(uint8_t *at, uint8_t *back, size_t bytes, unsigned turn) {
    fill(at, bytes, turn);
    switch (turn % 5) {
    case 0:
        check(cudaMemcpyAsync(device, at, bytes, 1, stream));
        break;
    case 1:
        check(cuMemcpyHtoDAsync_v2(word(device), at, bytes, stream));
        break;
    case 2:
        check(cuMemcpyAsync(word(device), word(at), bytes, stream));
        break;
    case 3:
        check(cudaMemcpy2DAsync(device, bytes, at, bytes, bytes, 1, 1, stream));
        break;
    default:
        check(cudaMemcpyAsync(device, at, bytes, 4, stream));
        break;
    }
    memset(at, 0xee, bytes);
    memset(back, 0xdd, bytes);
    if (turn % 2)
        check(cudaMemcpyAsync(back, device, bytes, 2, stream));
    else
        check(cuMemcpyDtoHAsync_v2(back, word(device), bytes, stream));
    __atomic_fetch_add(&wrong, differing(back, bytes, turn), __ATOMIC_SEQ_CST);
}

static size_t some_bytes(unsigned turn) { return MIB + (size_t)(turn * 7919) % (MIB - 16); }

static void overwrites(void) {
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    for (unsigned turn = 0; again(); turn++) there_and_back(at + turn % 61, back + turn % 13, some_bytes(turn), turn);
    free(at);
    free(back);
}

/* The same addresses are other memory each time: anonymous, of a file, cut out and put back. */
static void remaps(void) {
    char name[] = "/tmp/kvprobe-pageable-XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    check(ftruncate(file, 4 * MIB) ? 4 : 0);
    uint8_t *back = malloc(4 * MIB), *at = mmap(NULL, 4 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (unsigned turn = 0; again(); turn++) {
        int kind = turn % 4 ? MAP_PRIVATE | MAP_ANONYMOUS : turn % 8 ? MAP_SHARED : MAP_PRIVATE;
        mmap(at, 4 * MIB, PROT_READ | PROT_WRITE, kind | MAP_FIXED, turn % 4 ? -1 : file, 0);
        there_and_back(at, back, some_bytes(turn), turn);
        if (turn % 3 == 0) madvise(at, 2 * MIB, MADV_DONTNEED);
        munmap(at, 4 * MIB);
        uint8_t *other = malloc(some_bytes(turn)); /* often takes the place */
        memset(other, 1, some_bytes(turn));
        other = realloc(other, 2 * some_bytes(turn));
        check(cudaMemcpyAsync(device, other, some_bytes(turn), 1, stream));
        free(other);
    }
}

/* The source is written by work that stands in front of the copy in its stream. */
static void write_source(void *at) { fill(at, 2 * MIB, 77); }
static void behind_work(void) {
    uint8_t *at = malloc(2 * MIB), *back = malloc(2 * MIB);
    overwrites();
    for (int turn = 0; turn < 60; turn++) {
        memset(at, 0, 2 * MIB);
        check(kvhostLaunchWork(stream, write_source, at, 100000));
        check(cudaMemcpyAsync(device, at, 2 * MIB, 1, stream));
        check(cudaMemcpyAsync(back, device, 2 * MIB, 2, stream));
        wrong += differing(back, 2 * MIB, 77);
    }
}

/* Work in front of a load waits for what its caller does after the call. The host runtime takes a small source at once,
 * without a look at the stream. */
static void gated(void) {
    enum { SMALL = 512 << 10 };
    uint8_t *at = malloc(SMALL), *back = malloc(SMALL);
    overwrites();
    for (unsigned turn = 0; turn < 60; turn++) {
        kvhost_gate *gate = turn < 15 ? kvhostGateCreate() : NULL;
        if (gate) check(kvhostGateLaunch(gate, stream));
        fill(at, SMALL, turn);
        check(cudaMemcpyAsync(device, at, SMALL, 1, stream));
        memset(at, 0xee, SMALL);
        if (gate) kvhostGateOpen(gate);
        check(cudaMemcpyAsync(back, device, SMALL, 2, stream));
        wrong += differing(back, SMALL, turn);
        if (gate) kvhostGateDestroy(gate);
    }
}

/* Streams without work of their own share their channel with one that is held back until these calls have returned.
 * Small sources are taken at once, as in `gated`. */
static void held_up(void) {
    enum { SMALL = 512 << 10, STREAMS = 12 };
    uint8_t *at = malloc(SMALL), *back = malloc(SMALL), *in_front, *of[STREAMS];
    cudaStream_t held, streams[STREAMS];
    void *pinned;
    overwrites();
    check(cudaHostAlloc(&pinned, 64, 0));
    check(cudaMalloc((void **)&in_front, 64));
    check(cudaStreamCreateWithFlags(&held, 1));
    for (int i = 0; i < STREAMS; i++) {
        check(cudaMalloc((void **)&of[i], SMALL));
        check(cudaStreamCreateWithFlags(&streams[i], 1));
    }
    for (unsigned round = 0; round < 4; round++) {
        kvhost_gate *gate = kvhostGateCreate();
        check(kvhostGateLaunch(gate, held));
        check(cudaMemcpyAsync(in_front, pinned, 64, 1, held));
        for (unsigned i = 0; i < STREAMS; i++) {
            fill(at, SMALL, round * STREAMS + i);
            check(cudaMemcpyAsync(of[i], at, SMALL, 1, streams[i]));
            memset(at, 0xee, SMALL);
        }
        kvhostGateOpen(gate);
        for (unsigned i = 0; i < STREAMS; i++) {
            check(cudaMemcpyAsync(back, of[i], SMALL, 2, streams[i]));
            wrong += differing(back, SMALL, round * STREAMS + i);
        }
        check(cudaStreamSynchronize(held));
        kvhostGateDestroy(gate);
    }
}

static void synchronous(void) {
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    for (unsigned turn = 0; again(); turn++) {
        size_t bytes = some_bytes(turn);
        fill(at, bytes, turn);
        check(synchronously(turn, device, at, bytes, 1));
        wrong += differing(device, bytes, turn); /* the host runtime's device memory can be read: it must be there */
        memset(back, 0, bytes);
        check(synchronously(turn / WAYS, back, device, bytes, 2));
        wrong += differing(back, bytes, turn);
    }
}

static void forks(void) {
    overwrites();
    until = 0;
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    fill(at, 2 * MIB, 5);
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        prepare(); /* the host runtime starts afresh in a child */
        wrong = 0;
        for (unsigned turn = 0; turn < 40; turn++) there_and_back(at, back, some_bytes(turn), turn);
        printf("child: %ld wrong\n", wrong);
        exit(0);
    }
    for (unsigned turn = 0; turn < 40; turn++) there_and_back(at, back, some_bytes(turn), turn);
    int status;
    waitpid(child, &status, 0);
    printf("child ended with %d\n", status);
}

/* What the program registers is its own: calls and answers are as ever, before, between and after staged copies. */
static void registers(void) {
    struct {
        int type, device;
        void *a, *b;
        long reserved[8];
    } what;
    uint8_t *at = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *back = malloc(4 * MIB);
    int results[5] = {0};
    for (unsigned turn = 0; again(); turn++) {
        there_and_back(at, back, some_bytes(turn), turn);
        check(cudaPointerGetAttributes(&what, at));
        results[0] += what.type;
        results[1] += cudaHostUnregister(at) != 713;
        results[2] += cudaHostRegister(at, 4 * MIB, 0);
        check(cudaPointerGetAttributes(&what, at + MIB));
        results[3] += what.type != 1;
        fill(at, 2 * MIB, turn + 1);
        check(cudaMemcpyAsync(device, at, 2 * MIB, 1, stream));
        check(cudaMemcpyAsync(back, device, 2 * MIB, 2, stream));
        wrong += differing(back, 2 * MIB, turn + 1);
        results[4] += cudaHostUnregister(at);
    }
    for (int i = 0; i < 5; i++) printf("%d ", results[i]);
    printf("\n");
}

/* Gigabytes, if not so many here: to memory whose pages are there and to memory whose are not. */
static long words_differ(const uint64_t *at, size_t bytes, uint64_t first) {
    long count = 0;
    for (size_t i = 0; i < bytes / 8; i++) count += at[i] != first + i * 0x9e3779b97f4a7c15u;
    return count;
}

static void large_by(int by_driver) {
    enum { LARGE = 372 * MIB + 4096, OFF = 24 };
    uint8_t *there, *at = malloc(LARGE + OFF);
    check(cudaMalloc((void **)&there, LARGE));
    for (uint64_t turn = 0; turn < 4; turn++) {
        size_t bytes = LARGE - turn * 8 * 1023;
        uint64_t *words = (uint64_t *)(at + turn % 2 * OFF);
        for (size_t i = 0; i < bytes / 8; i++) words[i] = turn + i * 0x9e3779b97f4a7c15u;
        check(by_driver  ? synchronously((unsigned)turn + 1, there, words, bytes, 1)
              : turn % 2 ? cudaMemcpyAsync(there, words, bytes, 1, stream)
                         : cudaMemcpy(there, words, bytes, 1));
        memset(words, 0xee, bytes);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | (turn < 2 ? 0 : MAP_POPULATE);
        uint8_t *back = mmap(NULL, LARGE + 4096, PROT_READ | PROT_WRITE, flags, -1, 0), *begins = back + turn * OFF;
        check(by_driver  ? synchronously((unsigned)turn + 1, begins, there, bytes, 2)
              : turn % 2 ? cudaMemcpyAsync(begins, there, bytes, 2, stream)
                         : cudaMemcpy(begins, there, bytes, 2));
        wrong += words_differ((uint64_t *)begins, bytes, turn);
        for (uint8_t *p = back; p < begins; p++) wrong += *p != 0;
        for (uint8_t *p = begins + bytes; p < back + LARGE + 4096; p++) wrong += *p != 0;
        munmap(back, LARGE + 4096);
    }
    check(cudaFree(there));
}

static void large(void) { large_by(0); }
static void large_driver(void) { large_by(1); }

/* Of one large copy up, and of one down to memory without pages: the bytes of the first five parts that the driver
 * copies by itself. The slots are there before. */
static void large_counts(void) {
    enum { LARGE = 372 * MIB, ENTRIES = 4096 };
    static kvhost_trace_record calls[ENTRIES];
    kvhost_stats stats = {0};
    uint64_t bytes[2] = {0, 0}, parts[2] = {0, 0};
    uint8_t *there, *at = malloc(LARGE), *small = malloc(MIB);
    check(cudaMalloc((void **)&there, LARGE));
    memset(at, 7, LARGE);
    while (stats.pinned_bytes < 32 * MIB && now() < until) {
        check(cudaMemcpyAsync(device, small, MIB, 1, stream));
        kvhostStats(&stats);
        usleep(1000);
    }
    usleep(20000); /* for the events, which are made after them */
    check(kvhostTraceStart(ENTRIES));
    check(cudaMemcpy(there, at, LARGE, 1));
    uint8_t *back = mmap(NULL, LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(cudaMemcpy(back, there, LARGE, 2));
    check(kvhostTraceStop());
    uint64_t count = kvhostTraceRead(calls, 0, ENTRIES);
    for (uint64_t i = 0; i < count; i++) {
        int down = calls[i].direction == KVP_D2H;
        if (calls[i].memory == KVP_MEM_PAGEABLE && parts[down]++ < 5) bytes[down] += calls[i].bytes;
    }
    wrong += memcmp(at, back, LARGE) != 0;
    printf("%d MiB up, %d MiB down\n", (int)(bytes[0] / MIB), (int)(bytes[1] / MIB));
}

/* A part of a load fails, as it is or staged, and a part of a store. */
static void large_fails(void) {
    check(kvhostFailCall("cuMemcpyHtoDAsync_v2", 50, 999));
    check(kvhostFailCall("cuMemcpyDtoHAsync_v2", 3, 999));
    large();
}

/* Nobody has such memory: what the call says is said. */
static void large_refusals(void) {
    large();
    uint8_t *at = malloc(64 * MIB), *small;
    check(cudaMalloc((void **)&small, 64 * MIB));
    int beyond = cudaMemcpy(small, at, 64 * MIB + 1, 1), other = cudaMemcpy(small, at, 64 * MIB, 2);
    kvhostLoseDevice();
    printf("%d %d %d\n", beyond, other, cudaMemcpy(small, at, 64 * MIB, 1));
}

/* Refused calls are refused, and change nothing. */
static void refusals(void) {
    overwrites();
    uint8_t *at = malloc(4 * MIB), *small;
    check(cudaMalloc((void **)&small, MIB));
    memset(small, 3, MIB);
    memset(at, 9, 4 * MIB);
    for (int i = 0; i < 20; i++) {
        int beyond = cudaMemcpyAsync(small, at, MIB + 1, 1, stream);
        int kind = cudaMemcpyAsync(small, at, MIB, 2, stream);
        int no_stream = cudaMemcpyAsync(small, at, MIB, 1, (cudaStream_t)at);
        int nothing = cudaMemcpyAsync(small, at, 0, 1, stream);
        if (i == 19) printf("%d %d %d %d\n", beyond, kind, no_stream, nothing);
    }
    check(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < MIB; i++) wrong += small[i] != 3;
}

/* A healthy program: its large copies are pinned, and the driver need not be asked about each of them. */
static void pinned_copies(void) {
    void *at;
    kvhost_stats before, after;
    check(cudaHostAlloc(&at, 4 * MIB, 0));
    for (unsigned turn = 0; turn < 110; turn++) {
        if (turn == 10) kvhostStats(&before);
        check(cudaMemcpyAsync(device, at, MIB, turn % 2 ? 4 : 1, stream));
        check(cudaMemcpyAsync((uint8_t *)at + MIB, device, MIB, turn % 2 ? 4 : 2, stream));
    }
    check(cudaStreamSynchronize(stream));
    kvhostStats(&after);
    printf("%d questions\n", (int)(after.pointers_asked - before.pointers_asked));
}

/* While another stream is being captured a synchronous copy is refused and spoils the capture, another one is not. */
static void captures(void) {
    overwrites();
    cudaStream_t captured;
    void *graph;
    check(cudaStreamCreateWithFlags(&captured, 1));
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    int refused = 0, spoilt = 0;
    for (unsigned turn = 0; turn < 60; turn++) {
        check(cudaStreamBeginCapture(captured, 0));
        there_and_back(at, back, some_bytes(turn), turn);
        check(cudaStreamEndCapture(captured, &graph));
        check(cudaStreamBeginCapture(captured, 0));
        refused += synchronously(turn, device, at, some_bytes(turn), 1) == 900;
        spoilt += cudaStreamEndCapture(captured, &graph) == 901;
        there_and_back(at, back, some_bytes(turn), turn);
    }
    printf("%d refused, %d spoilt\n", refused, spoilt);
}

/* The device is reset again and again: streams, events and memory of before are gone. */
static void resets(void) {
    overwrites();
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    for (unsigned turn = 0; turn < 6; turn++) {
        check(cudaMemcpyAsync(device, at, 4 * MIB, 1, stream));
        check(cudaDeviceReset());
        prepare();
        for (unsigned i = 0; i < 40; i++) there_and_back(at, back, some_bytes(i), i);
        usleep(20000); /* for slots to be made anew */
    }
    /* A busy machine makes them later. Of a size that was not tried yet: what does not pay on a busy machine rests. */
    kvhost_stats stats = {0};
    for (unsigned i = 0; stats.pinned_bytes < 32 * MIB && now() < until; i++) {
        there_and_back(at, back, MIB / 4, i);
        kvhostStats(&stats);
    }
}

/* A device that fails in the middle: the program's calls say so, and go on saying so. */
static void loses_device(void) {
    overwrites();
    uint8_t *at = malloc(4 * MIB);
    kvhostLoseDevice();
    for (int i = 0; i < 3; i++) printf("%d ", cudaMemcpyAsync(device, at, 4 * MIB, 1, stream));
    printf("%d\n", cudaMemcpyAsync(at, device, 4 * MIB, 2, stream));
}

/* One of the calls that staging makes fails, which the program never made: it must not hear of it. */
static void fails_inside(const char *name) {
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    check(kvhostFailCall(name, 3, 999));
    for (unsigned turn = 0; again(); turn++) { /* by cudaMemcpyAsync alone */
        fill(at, 2 * MIB, turn);
        check(cudaMemcpyAsync(device, at, 2 * MIB, 1, stream));
        memset(at, 0xee, 2 * MIB);
        check(cudaMemcpyAsync(back, device, 2 * MIB, 2, stream));
        wrong += differing(back, 2 * MIB, turn);
    }
}
static void record_fails(void) { fails_inside("cuEventRecord"); }
static void query_fails(void) { fails_inside("cuEventQuery"); }
static void load_fails(void) { fails_inside("cuMemcpyHtoDAsync_v2"); }
static void store_fails(void) { fails_inside("cuMemcpyDtoHAsync_v2"); }

/* From here on it is killed for opening a file or starting a thread. */
static void confined(void) {
    overwrites();
    until = 0;
    struct sock_filter rules[] = {
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, nr)},
        {BPF_JMP | BPF_JEQ | BPF_K, 2, 0, SYS_openat},
        {BPF_JMP | BPF_JEQ | BPF_K, 1, 0, SYS_clone},
        {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_clone3},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_KILL_PROCESS},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
    };
    struct sock_fprog filter = {sizeof rules / sizeof *rules, rules};
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) ? 9 : 0);
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    for (unsigned turn = 0; turn < 40; turn++) there_and_back(at, back, some_bytes(turn), turn);
}

static void *of_a_thread(void *which) {
    prepare();
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    for (unsigned turn = 0; turn < 60 || now() < until; turn++) {
        there_and_back(at, back, some_bytes(turn), turn + (unsigned)(uintptr_t)which);
        if (turn % 8 == 0 && turn > 60 && decided()) break;
    }
    return NULL;
}

static void threads(void) {
    pthread_t all[4];
    for (uintptr_t i = 0; i < 4; i++) pthread_create(&all[i], NULL, of_a_thread, (void *)i);
    for (int i = 0; i < 4; i++) pthread_join(all[i], NULL);
}

/* A thread copies without an end. */
static void *copies_on(void *unused) {
    (void)unused;
    prepare();
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    for (unsigned turn = 0;; turn++) there_and_back(at, back, some_bytes(turn), turn);
    return NULL;
}

static void goes_on(void) { copies_on(NULL); }

/* The program ends while another thread copies. */
static void exits(void) {
    pthread_t other;
    overwrites();
    pthread_create(&other, NULL, copies_on, NULL);
    usleep(50000);
    printf("ends, %ld wrong\n", wrong);
    exit(7);
}

/* Children are made while another thread copies; each copies, too. */
static void forks_beside(void) {
    pthread_t other;
    overwrites();
    pthread_create(&other, NULL, copies_on, NULL);
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    for (int i = 0; i < 12; i++) {
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            prepare();
            wrong = 0;
            for (unsigned turn = 0; turn < 5; turn++) there_and_back(at, back, some_bytes(turn), turn);
            _exit(wrong != 0);
        }
        int status;
        waitpid(child, &status, 0);
        printf("%d ", status);
    }
    printf("ended, %ld wrong\n", wrong);
    exit(0);
}

static void limit(int what, rlim_t bytes) {
    struct rlimit most = {bytes, bytes};
    check(setrlimit(what, &most));
}

/* So little address space is left that what staging wants is a large part of it: the program still gets all of it. */
static void limited_space(void) {
    enum { LEFT = 224 * MIB, OWN = 96 * MIB }; /* recording takes some, too */
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    check(!file || fscanf(file, "%ld", &pages) != 1);
    fclose(file);
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    limit(RLIMIT_AS, (rlim_t)pages * 4096 + 8 * MIB + LEFT);
    for (unsigned turn = 0; turn < 40; turn++) there_and_back(at, back, some_bytes(turn), turn);
    usleep(20000); /* for slots, where some are made */
    for (unsigned turn = 0; turn < 40; turn++) there_and_back(at, back, some_bytes(turn), turn);
    printf("all of it %d, more %d\n", malloc(OWN) != NULL, malloc(2 * LEFT) != NULL);
}

static void limited_locks(void) {
    limit(RLIMIT_MEMLOCK, 65536);
    overwrites();
}

/* No thread may be made any more: none is for staging. Of a user of its own, where it is root's. */
static void limited_threads(void) {
    if (!getuid()) check(setresuid(54321, 54321, 54321));
    prctl(PR_SET_DUMPABLE, 1); /* its own files under /proc stay its own */
    limit(RLIMIT_NPROC, 1);
    uint8_t *at = malloc(4 * MIB), *back = malloc(4 * MIB);
    for (unsigned turn = 0; turn < 40; turn++) there_and_back(at, back, some_bytes(turn), turn);
}

/* In a cgroup of 400 MiB: up and down to fresh memory, in all 300 of it; then more than there is. */
static void fills(size_t bytes) {
    uint8_t *there, *at = malloc(bytes);
    check(cudaMalloc((void **)&there, bytes));
    memset(at, 7, bytes);
    check(cudaMemcpy(there, at, bytes, 1));
    uint8_t *back = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(cudaMemcpy(back, there, bytes, 2));
    for (size_t i = 0; i < bytes; i++) wrong += back[i] != 7;
}
static void fills_most(void) { fills(100 * (size_t)MIB); }
static void fills_more(void) { fills(160 * (size_t)MIB); }

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*play)(void);
    } plays[] = {{"overwrites", overwrites},
                 {"remaps", remaps},
                 {"behind-work", behind_work},
                 {"gated", gated},
                 {"held-up", held_up},
                 {"synchronous", synchronous},
                 {"forks", forks},
                 {"registers", registers},
                 {"refusals", refusals},
                 {"captures", captures},
                 {"resets", resets},
                 {"pinned", pinned_copies},
                 {"device", loses_device},
                 {"threads", threads},
                 {"confined", confined},
                 {"record-fails", record_fails},
                 {"query-fails", query_fails},
                 {"load-fails", load_fails},
                 {"store-fails", store_fails},
                 {"goes-on", goes_on},
                 {"exits", exits},
                 {"forks-beside", forks_beside},
                 {"limited-space", limited_space},
                 {"limited-locks", limited_locks},
                 {"limited-threads", limited_threads},
                 {"fills-most", fills_most},
                 {"fills-more", fills_more},
                 {"large", large},
                 {"large-driver", large_driver},
                 {"large-refusals", large_refusals},
                 {"large-counts", large_counts},
                 {"large-fails", large_fails}};
    until = now() + (argc > 2 ? atof(argv[2]) : 60);
    prepare();
    for (unsigned i = 0; i < sizeof plays / sizeof *plays; i++)
        if (!strcmp(argv[1], plays[i].name)) plays[i].play();
    printf("%ld wrong\n", wrong);
    kvhost_stats stats;
    kvhostStats(&stats);
    fprintf(stderr, "repeated %ld times, %llu bytes pinned\n", repeated, (unsigned long long)stats.pinned_bytes);
    return 0;
}
