/* Reads and writes files, pipes and sockets in every way that the interposer stands before, and counts for itself what
 * it is to keep: operations that moved 16 KiB or more. Prints `name direction calls bytes`, and after "results" each
 * call's answer and errno. Arguments: FOLDER MODE [N]. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
extern int cudaMalloc(void **, size_t);
extern int cudaHostAlloc(void **, size_t, unsigned);
extern int cudaStreamCreateWithPriority(void **, unsigned, int);
extern int cudaStreamSynchronize(void *);

enum { LEAST = 16 << 10, BYTES = 64 << 10, PIECE = 10000 };
enum { PREAD, PREADV, READ, PWRITE, PWRITEV, WRITE, RECV, SEND, AIO, FSYNC, NAMES };
static const char *const names[] = {"pread", "preadv", "read", "pwrite",    "pwritev",
                                    "write", "recv",   "send", "io_submit", "fsync"};
static uint64_t counts[NAMES][2]; /* calls, bytes */
static char *memory, *device, results[1 << 16];
static size_t result_bytes;
static int traced; /* one thread alone */
static void *stream, *volatile nowhere = (void *)8;

static ssize_t saw(int name, ssize_t result) {
    int error = errno;
    if (result >= LEAST || (name == FSYNC && !result)) {
        __atomic_fetch_add(&counts[name][0], 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&counts[name][1], (uint64_t)result, __ATOMIC_RELAXED);
    }
    if (traced)
        result_bytes +=
            (size_t)sprintf(results + result_bytes, "%s %zd %d\n", names[name], result, result < 0 ? error : 0);
    errno = 0;
    return result;
}

static void must(int ok, const char *what) {
    if (ok) return;
    perror(what);
    exit(1);
}

static void cuda(void) {
    must(!cudaMalloc((void **)&device, BYTES) && !cudaHostAlloc((void **)&memory, BYTES, 0), "allocate");
    must(!cudaStreamCreateWithPriority(&stream, 1, 0), "stream");
    must(!cudaMemcpyAsync(device, memory, BYTES, 1, stream) && !cudaStreamSynchronize(stream), "copy");
}

static int file_in(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    must(fd >= 0 && !ftruncate(fd, 4 * BYTES), path);
    return fd;
}

/* Records of a log, each smaller than what is kept. */
static void flushes(const char *folder, char *buffer) {
    int fd = file_in(folder, "log");
    for (int i = 0; i < 3; i++) {
        saw(WRITE, write(fd, buffer, 100));
        saw(FSYNC, fsync(fd));
    }
}

static void every_call(const char *folder, char *buffer) {
    int fd = file_in(folder, "cache.bin"), ends[2], pair[2];
    traced = 1;
    struct iovec pieces[] = {{buffer, PIECE}, {buffer + PIECE, PIECE}};
    saw(PWRITE, pwrite(fd, buffer, BYTES, 0));
    saw(PWRITE, pwrite64(fd, buffer, BYTES, BYTES));
    saw(WRITE, write(fd, buffer, LEAST));
    saw(WRITE, write(fd, buffer, LEAST - 1));
    saw(PWRITEV, writev(fd, pieces, 2));
    saw(PWRITEV, pwritev(fd, pieces, 2, BYTES));
    saw(PWRITEV, pwritev64(fd, pieces, 1, 0));
    saw(PWRITEV, pwritev2(fd, pieces, 2, 0, 0));
    saw(PWRITEV, pwritev64v2(fd, pieces, 2, -1, 0));
    saw(PREAD, pread(fd, buffer, BYTES, 4096));
    saw(PREAD, pread64(fd, buffer, BYTES, 0));
    saw(PREAD, pread(fd, buffer, BYTES, 4 * BYTES - PIECE)); /* the end of the file */
    saw(PREAD, pread(fd, buffer, BYTES, 4 * BYTES - LEAST - 1));
    saw(PREAD, pread(fd, buffer, BYTES, 4 * BYTES));
    saw(PREAD, pread(-1, buffer, BYTES, 0));
#ifndef SANITIZED /* its own functions would look there */
    saw(PREAD, pread(fd, nowhere, BYTES, 0));
    saw(PREADV, readv(fd, nowhere, 2));
#endif
    saw(PREAD, pread(fd, buffer, BYTES, -1));
    saw(PREADV, readv(fd, pieces, 2));
    saw(PREADV, preadv(fd, pieces, 2, 64));
    saw(PREADV, preadv64(fd, pieces, 1, 64));
    saw(PREADV, preadv2(fd, pieces, 2, 0, 0));
    saw(PREADV, preadv64v2(fd, pieces, 2, -1, 0));
    saw(FSYNC, fsync(fd));
    saw(FSYNC, fdatasync(fd));
    saw(FSYNC, fsync(-1));
    must(lseek(fd, 0, SEEK_SET) == 0, "seek");
    saw(READ, read(fd, buffer, BYTES));
    saw(READ, read(fd, buffer, 100));
    must(!pipe(ends) && fcntl(ends[1], F_SETPIPE_SZ, 4 * BYTES) > 0, "pipe");
    saw(WRITE, write(ends[1], buffer, BYTES));
    saw(READ, read(ends[0], buffer, 2 * LEAST));
    saw(READ, read(ends[0], buffer, LEAST - 5)); /* a part of what was asked for later */
    must(!fcntl(ends[0], F_SETFL, O_NONBLOCK), "nonblock");
    saw(READ, read(ends[0], buffer, BYTES));
    saw(READ, read(ends[0], buffer, BYTES)); /* EAGAIN */
    must(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socketpair");
    int large = 1 << 20;
    setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &large, sizeof large);
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    saw(SEND, send(pair[0], buffer, LEAST, 0));
    saw(SEND, sendto(pair[0], buffer, LEAST, 0, NULL, 0));
    saw(SEND, sendmsg(pair[0], &message, 0));
    saw(RECV, recv(pair[1], buffer, LEAST, MSG_PEEK) > 0 ? 0 : -1);
    saw(RECV, recv(pair[1], buffer, LEAST, MSG_WAITALL));
    saw(RECV, recvfrom(pair[1], buffer, LEAST, MSG_WAITALL, NULL, NULL));
    saw(RECV, recvmsg(pair[1], &message, MSG_WAITALL));
    saw(RECV, recv(pair[1], buffer, LEAST, MSG_DONTWAIT)); /* EAGAIN */
    saw(SEND, send(-1, buffer, LEAST, 0));
    close(pair[1]);
    saw(SEND, send(pair[0], buffer, LEAST, MSG_NOSIGNAL)); /* EPIPE */
    close(fd), close(ends[0]), close(ends[1]), close(pair[0]);
}

/* ---- several of everything ------------------------------------------------------------------------------------- */

static const char *folder;
static int rounds;

static void *reads(void *number) {
    char name[32], *buffer = malloc(BYTES);
    sprintf(name, "of-%ld", (long)number);
    int fd = file_in(folder, name);
    for (int i = 0; i < rounds; i++) {
        saw(PWRITE, pwrite(fd, buffer, LEAST + (size_t)i % 7, 0));
        saw(PREAD, pread(fd, buffer, LEAST + (size_t)i % 5, 0));
        saw(PREAD, pread(fd, buffer, 64, 0));
    }
    close(fd);
    free(buffer);
    return NULL;
}

static void threads(int count) {
    pthread_t all[64];
    for (long i = 0; i < count; i++) must(!pthread_create(&all[i], NULL, reads, (void *)i), "thread");
    for (int i = 0; i < count; i++) pthread_join(all[i], NULL);
}

/* The same descriptor leads elsewhere, by close and open and by dup2. */
static void reuse(void) {
    char other[4096], *buffer = memory;
    for (int i = 0; i < rounds; i++) {
        snprintf(other, sizeof other, "%s/%s", folder, i % 2 ? "second" : "first");
        int fd = file_in(other, "one.bin");
        saw(PWRITE, pwrite(fd, buffer, i % 2 ? 2 * LEAST : LEAST, 0));
        if (i % 3 == 0) {
            snprintf(other, sizeof other, "%s/third", folder);
            int third = file_in(other, "one.bin");
            must(dup2(third, fd) == fd, "dup2");
            saw(PREAD, pread(fd, buffer, 3 * LEAST, 0));
            close(third);
        }
        close(fd);
    }
}

static void tick(int signal) {
    (void)signal;
    static char buffer[LEAST];
    static int fd = -1;
    int was = errno;
    if (fd < 0) fd = open("/dev/zero", O_RDONLY);
    saw(READ, read(fd, buffer, LEAST)); /* a handler's own */
    errno = was;
}

/* A read that signals interrupt, again and again, and a handler that reads. */
static void signals(void) {
    int ends[2];
    must(!pipe(ends), "pipe");
    struct sigaction action = {.sa_handler = tick};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    for (int interrupted = 0; interrupted < rounds;) {
        ssize_t got = read(ends[0], memory, BYTES);
        must(got < 0 && errno == EINTR, "an interrupted read");
        interrupted++;
    }
    for (int i = 0; i < rounds; i++) {
        int fd = file_in(folder, "signalled");
        saw(PWRITE, pwrite(fd, memory, LEAST, 0));
        close(fd);
    }
    setitimer(ITIMER_REAL, &never, NULL);
}

static void copies(void *unused) {
    (void)unused;
    must(!cudaMemcpyAsync(device, memory, 3, 1, stream), "copy");
}

static void *blocks(void *ends) {
    char *buffer = memory;
    pthread_cleanup_push(copies, NULL);
    ssize_t got = read(((int *)ends)[0], buffer, BYTES);
    must(0, got < 0 ? "read" : "not cancelled");
    pthread_cleanup_pop(0);
    return NULL;
}

/* Threads that are cancelled in a read; what they clean up with is recorded as ever. */
static void cancelled(void) {
    int ends[2];
    must(!pipe(ends), "pipe");
    for (int i = 0; i < rounds; i++) {
        pthread_t thread;
        void *how;
        must(!pthread_create(&thread, NULL, blocks, ends), "thread");
        usleep(200);
        pthread_cancel(thread);
        pthread_join(thread, &how);
        must(how == PTHREAD_CANCELED, "cancelled");
    }
}

/* A child of fork that goes on with its parent's descriptors, and makes a copy of its own first. */
static void forks(const char *into) {
    int fd = file_in(folder, "forked");
    saw(PWRITE, pwrite(fd, memory, LEAST, 0));
    for (int i = 0; i < rounds; i++) {
        pid_t child = fork();
        if (!child) {
            memset(counts, 0, sizeof counts);
            char *buffer = malloc(BYTES);
            must(pread(fd, buffer, BYTES, 0) == BYTES, "read before any call of CUDA");
            cuda();
            saw(PREAD, pread(fd, buffer, BYTES, 0));
            FILE *out = fopen(into, "a");
            fprintf(out, "%d %llu\n", (int)getpid(), (unsigned long long)counts[PREAD][1]);
            fclose(out);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        must(!status, "child");
    }
    close(fd);
}

/* Goes on until a file is there. When another came, it says how much it had done and goes on for at least 100 rounds:
   for an attach in the middle. */
static void serves(void) {
    char stop[4096], attached[4096];
    snprintf(stop, sizeof stop, "%s/stop", folder);
    snprintf(attached, sizeof attached, "%s/attached", folder);
    int after = 0; /* rounds since it was said, and one */
    int fd = file_in(folder, "served");
    printf("ready\n");
    fflush(stdout);
    while (access(stop, F_OK) || (after && after <= 100)) {
        must(!cudaMemcpyAsync(device, memory, BYTES, 1, stream), "copy");
        saw(PWRITE, pwrite(fd, memory, LEAST, 0));
        saw(PREAD, pread(fd, memory, BYTES, 0));
        must(!cudaStreamSynchronize(stream), "synchronise");
        if (after) after++;
        if (!after && !access(attached, F_OK)) {
            after = 1;
            printf("%llu\n", (unsigned long long)counts[PREAD][0]);
            fflush(stdout);
        }
        usleep(100);
    }
}

int main(int argc, char **argv) {
    folder = argv[1];
    rounds = argc > 3 ? atoi(argv[3]) : 1;
    const char *mode = argv[2];
    if (!strcmp(mode, "no-cuda")) {
        every_call(folder, malloc(BYTES));
        return 0;
    }
    cuda();
    if (!strcmp(mode, "all")) every_call(folder, memory);
    if (!strcmp(mode, "flushes")) flushes(folder, memory);
    if (!strcmp(mode, "threads")) threads(8);
    if (!strcmp(mode, "reuse")) reuse();
    if (!strcmp(mode, "signals")) signals();
    if (!strcmp(mode, "cancelled")) cancelled();
    if (!strcmp(mode, "forks")) forks(argv[4]);
    if (!strcmp(mode, "serves")) serves();
    for (int i = 0; i < NAMES; i++)
        if (counts[i][0])
            printf("%s %llu %llu\n", names[i], (unsigned long long)counts[i][0], (unsigned long long)counts[i][1]);
    printf("results\n%.*s", (int)result_bytes, results);
    return 0;
}
