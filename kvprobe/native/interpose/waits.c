/* Waits in which nobody asks for anything: a thread of a server is in accept, poll, select, epoll_wait or recv until a
 * connection or a request comes from outside. Each that takes KVP_PAUSE_NS and more is noted.
 *
 * Told are only waits at sockets by which others ask: those that listen, those that accept has made, and those that the
 * program has bound for datagrams of anybody, of IPv4, IPv6 or of virtual machines. By any other descriptor (a
 * connection that the program itself has made, a pipe, a socket of this machine) comes what it has asked for, or what
 * its own workers prepare; who waits there may well be kept from its work. A set in which one of those became ready is
 * told where one that is served did, too; one in which nothing did until it was over, where all of it is served.
 *
 * What is promised is what files.c promises: the real function gets what the program gave, its answer and errno are the
 * program's, nothing is held meanwhile, and of the program's memory only what the kernel has just read or written is
 * looked at. A call costs two reads of the clock; one that waited, some system calls more, and a set of epoll's the
 * look into /proc at what stands behind it: for a hundredth of the time, or once in ten milliseconds.
 *
 * Not seen: sockets that another process has accepted, waits by io_uring or by system calls that a program makes
 * without the C library. */
#define _GNU_SOURCE
#include "waits.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- who asks by a descriptor ------------------------------------------------------------------------------------ */

#ifndef SO_COOKIE
#define SO_COOKIE 57
#endif
enum { SOCKETS = 4096, LOOKED_AT = 64, FDINFO_BYTES = 16384, LOOKS_COST = 100, LOOKS_APART_NS = 10000000 };

/* Sockets that accept has made or that datagrams come to, by the kernel's own number of each, which no other gets. A
 * newer one may take an older one's place, which then counts as not known. */
static _Atomic uint64_t asked_by[SOCKETS];

/* 0: no socket, or the kernel does not number it. */
static uint64_t number_of(int fd) {
    uint64_t number = 0;
    socklen_t bytes = sizeof number;
    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &number, &bytes) ? 0 : number;
}

static int option_of(int fd, int option) {
    int value = 0;
    socklen_t bytes = sizeof value;
    return getsockopt(fd, SOL_SOCKET, option, &value, &bytes) ? -1 : value;
}

static int takes_datagrams(int fd) { return option_of(fd, SO_TYPE) == SOCK_DGRAM; }

static int has_peer(int fd) {
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof peer;
    return !getpeername(fd, (struct sockaddr *)&peer, &bytes);
}

/* Before the first call of CUDA, too: connections may last. */
static int may_ask(void) { return kvp_watch.on && (!kvp_ring_is_open() || active()); }

static void is_asked_by(int fd) {
    if (fd < 0 || !may_ask()) return;
    int was = errno;
    uint64_t number = number_of(fd);
    if (number) atomic_store_explicit(&asked_by[number % SOCKETS], number, memory_order_relaxed);
    errno = was;
}

typedef int bind_fn(int fd, const struct sockaddr *to, socklen_t bytes);
any_fn *_Atomic kvp_real_bind;
int kvp_our_bind(int fd, const struct sockaddr *to, socklen_t bytes) {
    int result = AS(bind)(fd, to, bytes), was = errno;
    if (!result && may_ask() && takes_datagrams(fd)) is_asked_by(fd);
    errno = was;
    return result;
}

int kvp_is_served(int fd) {
    int was = errno, domain = option_of(fd, SO_DOMAIN), served = 0;
    if (domain == AF_INET || domain == AF_INET6 || domain == AF_VSOCK) {
        uint64_t number = number_of(fd);
        int known = number && atomic_load_explicit(&asked_by[number % SOCKETS], memory_order_relaxed) == number;
        served = option_of(fd, SO_ACCEPTCONN) == 1 || (known && (!takes_datagrams(fd) || !has_peer(fd)));
    }
    errno = was;
    return served;
}

/* ---- one wait ---------------------------------------------------------------------------------------------------- */

static int is_told(void) { return kvp_watch.detail != DETAIL_TOTALS && kvp_thread.ended && !kvp_clock_is_given(); }

uint64_t kvp_wait_begins(void) { return is_told() ? kvp_file_begins() : NOT_KEPT; }

uint64_t kvp_waited_until(uint64_t began) {
    if (began <= COUNTED_ONLY || !is_told() || kvp_thread.inside || !kvp_ring_is_open()) return 0;
    kvp_thread.inside = IN_KVPROBE;
    uint64_t now = kvp_clock();
    kvp_thread.inside = OUTSIDE;
    return now - began >= KVP_PAUSE_NS ? now : 0;
}

void kvp_waited(unsigned how, uint64_t began, uint64_t until) {
    int was = errno, cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* a ring that grows opens a file */
    kvp_thread.inside = IN_KVPROBE;
    kvp_record note = {.call = KVP_CALL_pause,
                       .start_ns = began,
                       .dur_ns = until - began,
                       .transfer = 1,
                       .count = 1,
                       .result = (uint16_t)how};
    kvp_ring_note(&note);
    kvp_thread.inside = OUTSIDE;
    pthread_setcancelstate(cancel, NULL);
    errno = was;
}

/* ---- sets of descriptors ----------------------------------------------------------------------------------------- */

static int polled(const struct pollfd *set, nfds_t count, int ready) {
    if (ready < 0 || !count || count > LOOKED_AT) return 0;
    for (nfds_t i = 0; i < count; i++) {
        if (ready && (!set[i].revents || set[i].fd < 0)) continue;
        if (kvp_is_served(set[i].fd)) {
            if (ready) return 1;
        } else if (!ready)
            return 0;
    }
    return !ready;
}

/* What the kernel left in the set is what can be read; of one in which nothing came it has taken out all. */
static int selected(const fd_set *set, int count, int ready) {
    const unsigned long *words = (const unsigned long *)(const void *)set;
    if (!set || ready <= 0) return 0;
    for (int fd = 0, bits = 8 * (int)sizeof *words, left = LOOKED_AT; fd < count && left > 0; fd++) {
        unsigned long word = words[fd / bits] >> (fd % bits);
        if (!word) fd |= bits - 1;
        if (!(word & 1)) continue;
        if (kvp_is_served(fd)) return 1;
        left--;
    }
    return 0;
}

static __thread uint64_t next_look_ns __attribute__((tls_model("initial-exec")));

static ssize_t registered(int set, char *text, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", set);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    size_t bytes = 0;
    for (ssize_t got; bytes < size - 1 && (got = read(fd, text + bytes, size - 1 - bytes)) > 0;) bytes += (size_t)got;
    close(fd);
    text[bytes] = 0;
    return (ssize_t)bytes;
}

/* Whether a line that begins with "tfd:" is of the descriptor that came with `data`; it is told in `fd`. */
static int came_by(const char *line, uint64_t data, int *fd) {
    const char *told = strstr(line, "data:"), *end = strchr(line, '\n');
    if (!told || (end && told > end) || strtoull(told + 5, NULL, 16) != data) return 0;
    *fd = (int)strtol(line + 4, NULL, 10);
    return 1;
}

/* Space for the text lies in the frame of this function alone, which is entered after a wait only. */
static __attribute__((noinline)) int look_at(int set, const struct epoll_event *events, int ready) {
    char text[FDINFO_BYTES];
    if (!registered(set, text, sizeof text)) return 0;
    for (int i = 0; i < ready && i < LOOKED_AT; i++)
        for (const char *line = strstr(text, "tfd:"); line; line = strstr(line + 4, "tfd:")) {
            int fd;
            if (came_by(line, events[i].data.u64, &fd) && kvp_is_served(fd)) return 1;
        }
    return 0;
}

static int epolled(int set, const struct epoll_event *events, int ready, uint64_t until) {
    if (ready <= 0 || until < next_look_ns) return 0;
    int was = errno, cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    kvp_thread.inside = IN_KVPROBE;
    int served = look_at(set, events, ready);
    uint64_t now = kvp_clock();
    kvp_thread.inside = OUTSIDE;
    uint64_t pause_ns = (now - until) * LOOKS_COST;
    next_look_ns = now + (pause_ns < LOOKS_APART_NS ? pause_ns : LOOKS_APART_NS);
    pthread_setcancelstate(cancel, NULL);
    errno = was;
    return served;
}

/* ---- the functions ----------------------------------------------------------------------------------------------- */

/* SERVED: whether what came, or did not, is somebody's question; looked at after a wait alone. */
#define WAIT_CALL(NAME, HOW, PARAMETERS, ARGUMENTS, SERVED, ...)                                                       \
    typedef int NAME##_fn PARAMETERS;                                                                                  \
    any_fn *_Atomic kvp_real_##NAME;                                                                                   \
    int kvp_our_##NAME PARAMETERS {                                                                                    \
        uint64_t began = active() ? kvp_wait_begins() : NOT_KEPT;                                                      \
        int ready = AS(NAME) ARGUMENTS;                                                                                \
        uint64_t until = kvp_waited_until(began);                                                                      \
        if (unlikely(until) && (SERVED)) kvp_waited(KVP_WAIT_##HOW, began, until);                                     \
        __VA_ARGS__;                                                                                                   \
        return ready;                                                                                                  \
    }

/* One that was interrupted, or that found nothing in its time, has waited as well. */
WAIT_CALL(accept, accept, (int fd, struct sockaddr *from, socklen_t *bytes), (fd, from, bytes), kvp_is_served(fd),
          is_asked_by(ready))
WAIT_CALL(accept4, accept, (int fd, struct sockaddr *from, socklen_t *bytes, int flags), (fd, from, bytes, flags),
          kvp_is_served(fd), is_asked_by(ready))

WAIT_CALL(poll, poll, (struct pollfd * set, nfds_t count, int limit), (set, count, limit), polled(set, count, ready), )
WAIT_CALL(__poll_chk, poll, (struct pollfd * set, nfds_t count, int limit, size_t room), (set, count, limit, room),
          polled(set, count, ready), )
WAIT_CALL(ppoll, poll, (struct pollfd * set, nfds_t count, const struct timespec *limit, const sigset_t *signals),
          (set, count, limit, signals), polled(set, count, ready), )
WAIT_CALL(__ppoll_chk, poll,
          (struct pollfd * set, nfds_t count, const struct timespec *limit, const sigset_t *signals, size_t room),
          (set, count, limit, signals, room), polled(set, count, ready), )

WAIT_CALL(select, select, (int count, fd_set *reads, fd_set *writes, fd_set *others, struct timeval *limit),
          (count, reads, writes, others, limit), selected(reads, count, ready), )
WAIT_CALL(pselect, select,
          (int count, fd_set *reads, fd_set *writes, fd_set *others, const struct timespec *limit,
           const sigset_t *signals),
          (count, reads, writes, others, limit, signals), selected(reads, count, ready), )

WAIT_CALL(epoll_wait, epoll, (int set, struct epoll_event *events, int room, int limit), (set, events, room, limit),
          epolled(set, events, ready, until), )
WAIT_CALL(epoll_pwait, epoll, (int set, struct epoll_event *events, int room, int limit, const sigset_t *signals),
          (set, events, room, limit, signals), epolled(set, events, ready, until), )
WAIT_CALL(epoll_pwait2, epoll,
          (int set, struct epoll_event *events, int room, const struct timespec *limit, const sigset_t *signals),
          (set, events, room, limit, signals), epolled(set, events, ready, until), )
