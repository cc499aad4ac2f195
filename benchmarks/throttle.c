/* Preloaded: reads of one file at a given rate, as of a slow disk. Each really reads, piece by piece, and sleeps. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)256 << 10)

static int slow = -1;
static double bytes_per_ns;

void throttle(int fd, double bytes_per_s) {
    slow = fd;
    bytes_per_ns = bytes_per_s / 1e9;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static ssize_t slowly(char *to, size_t bytes, off_t offset) {
    ssize_t (*read_at)(int, void *, size_t, off_t) =
        (ssize_t(*)(int, void *, size_t, off_t))(size_t)dlsym(RTLD_NEXT, "pread64");
    double began = now();
    size_t done = 0;
    while (done < bytes) {
        ssize_t got = read_at(slow, to + done, bytes - done < PIECE ? bytes - done : PIECE, offset + (off_t)done);
        if (got <= 0) break;
        done += (size_t)got;
        double left = began + (double)done / bytes_per_ns - now();
        if (left > 0) nanosleep(&(struct timespec){(time_t)(left / 1e9), (long)left % 1000000000}, NULL);
    }
    return (ssize_t)done;
}

#define READS(NAME, PARAMETERS, ARGUMENTS)                                                                             \
    ssize_t NAME PARAMETERS;                                                                                           \
    ssize_t NAME PARAMETERS {                                                                                          \
        if (fd == slow && bytes_per_ns > 0 && count == 1) return slowly(v->iov_base, v->iov_len, offset);              \
        return ((ssize_t(*) PARAMETERS)(size_t)dlsym(RTLD_NEXT, #NAME))ARGUMENTS;                                      \
    }
READS(preadv, (int fd, const struct iovec *v, int count, off_t offset), (fd, v, count, offset))
READS(preadv64, (int fd, const struct iovec *v, int count, off64_t offset), (fd, v, count, offset))
READS(preadv2, (int fd, const struct iovec *v, int count, off_t offset, int flags), (fd, v, count, offset, flags))
READS(preadv64v2, (int fd, const struct iovec *v, int count, off64_t offset, int flags), (fd, v, count, offset, flags))
