/* Waits in every way that the interposer looks at, at descriptors by which others ask and at others. Prints a line a
 * wait, `name` where it is to be told, and after "results" each call's answer and errno. Argument: MODE.
 *
 * A helper lets a wait end when the kernel says that its thread sleeps and some milliseconds have passed since. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern int cudaStreamCreateWithFlags(void **, unsigned);
extern int cudaMemsetAsync(void *, int, size_t, void *);
extern int cudaStreamSynchronize(void *);
extern int __poll_chk(struct pollfd *, nfds_t, int, size_t);

static void must(int ok, const char *what) {
    if (ok) return;
    perror(what);
    _exit(1);
}

static void *stream, *volatile nowhere = (void *)8;

static void step(void) {
    must(stream || !cudaStreamCreateWithFlags(&stream, 1), "stream");
    must(!cudaMemsetAsync(NULL, 0, 0, stream) && !cudaStreamSynchronize(stream), "step");
}

/* ---- who lets waits end ------------------------------------------------------------------------------------------ */

enum action { NOTHING, CONNECTS, SENDS, SENDS_MUCH, INTERRUPTS, CANCELS };
enum { LARGE = 32 << 10 };
static char large[LARGE], received[LARGE];
static atomic_int action, ends_by, thread_id;
static pthread_t waiter;
static struct sockaddr_in address;
static int client; /* the newest connection of the helper's */

static int sleeps(int thread) {
    char path[64], text[512], state = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fgets(text, sizeof text, file)) state = strrchr(text, ')')[2];
    fclose(file);
    return state == 'S';
}

static void *help(void *nothing) {
    for (;;) {
        while (!action) sched_yield();
        while (!sleeps(thread_id)) sched_yield();
        nanosleep(&(struct timespec){0, 3000000}, NULL);
        int what = action, fd = ends_by;
        action = NOTHING;
        if (what == CONNECTS) {
            client = socket(AF_INET, SOCK_STREAM, 0);
            must(!connect(client, (struct sockaddr *)&address, sizeof address), "connect");
        }
        if (what == SENDS) must(write(fd, "x", 1) == 1, "send");
        if (what == SENDS_MUCH) must(write(fd, large, LARGE) == LARGE, "send");
        if (what == INTERRUPTS) pthread_kill(waiter, SIGUSR1);
        if (what == CANCELS) pthread_cancel(waiter);
    }
    return nothing;
}

static char results[1 << 14];
static size_t result_bytes;

static void ended(const char *name, int told, long answer) {
    int error = errno;
    if (told) puts(name);
    result_bytes += (size_t)sprintf(results + result_bytes, "%s %ld %d\n", name, answer, answer < 0 ? error : 0);
}

static void will(enum action what, int fd) {
    ends_by = fd;
    waiter = pthread_self();
    thread_id = (int)syscall(SYS_gettid);
    errno = 0;
    action = what;
}

#define WAITS(NAME, TOLD, WHAT, FD, CALL)                                                                              \
    do {                                                                                                               \
        will(WHAT, FD);                                                                                                \
        long answer = CALL;                                                                                            \
        ended(NAME, TOLD, answer);                                                                                     \
        while (action) sched_yield();                                                                                  \
    } while (0)

static void take(int fd) {
    char byte;
    must(read(fd, &byte, 1) == 1, "read");
}

static void interrupted(int number) { (void)number; }

/* ---- the waits --------------------------------------------------------------------------------------------------- */

static int served, asked; /* a connection that others made, the helper's end of it */
static int listening;

static void begin(void) {
    pthread_t thread;
    socklen_t bytes = sizeof address;
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    listening = socket(AF_INET, SOCK_STREAM, 0);
    must(!bind(listening, (struct sockaddr *)&address, bytes) && !listen(listening, 8), "listen");
    must(!getsockname(listening, (struct sockaddr *)&address, &bytes), "name");
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = interrupted}, NULL);
    must(!pthread_create(&thread, NULL, help, NULL), "thread");
}

static void in_sets(int fd, int end, int told) {
    struct pollfd one = {.fd = fd, .events = POLLIN};
    struct timespec long_ns = {30, 0};
    WAITS("poll", told, SENDS, end, poll(&one, 1, -1));
    take(fd);
    WAITS("poll", told, SENDS, end, __poll_chk(&one, 1, -1, sizeof one));
    take(fd);
    WAITS("poll", told, SENDS, end, ppoll(&one, 1, &long_ns, NULL));
    take(fd);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    WAITS("select", told, SENDS, end, select(fd + 1, &set, NULL, NULL, NULL));
    take(fd);
    WAITS("select", told, SENDS, end, pselect(fd + 1, &set, NULL, NULL, &long_ns, NULL));
    take(fd);
    int many = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0x1234567890abcdef}, got[4];
    must(!epoll_ctl(many, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
    WAITS("epoll_wait", told, SENDS, end, epoll_wait(many, got, 4, -1));
    nanosleep(&(struct timespec){0, 20000000}, NULL); /* longer than from one look into /proc to the next */
    take(fd);
    WAITS("epoll_wait", told, SENDS, end, epoll_pwait(many, got, 4, 30000, NULL));
    take(fd);
    close(many);
}

static void in_receiving(int fd, int end, int told) {
    char bytes[16];
    struct iovec piece = {bytes, sizeof bytes};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    WAITS("recv", told, SENDS, end, read(fd, bytes, sizeof bytes));
    WAITS("recv", told, SENDS, end, recv(fd, bytes, sizeof bytes, 0));
    WAITS("recv", told, SENDS, end, recvfrom(fd, bytes, sizeof bytes, 0, NULL, NULL));
    WAITS("recv", told, SENDS, end, recvmsg(fd, &message, 0));
    WAITS("recv", told, SENDS_MUCH, end, recv(fd, received, LARGE, MSG_WAITALL));
}

/* One that has no peer gets from anybody. */
static void in_datagrams(void) {
    int server = socket(AF_INET, SOCK_DGRAM, 0), from = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)}, back = to;
    socklen_t bytes = sizeof to;
    must(!bind(server, (struct sockaddr *)&to, bytes) && !bind(from, (struct sockaddr *)&back, bytes), "bind");
    must(!getsockname(server, (struct sockaddr *)&to, &bytes) && !connect(from, (struct sockaddr *)&to, bytes), "to");
    in_receiving(server, from, 1);
    must(!getsockname(from, (struct sockaddr *)&back, &bytes), "name");
    must(!connect(server, (struct sockaddr *)&back, bytes), "back");
    in_receiving(from, server, 0); /* asked for by the program itself */
    close(server);
    close(from);
}

static void all(void) {
    int pipes[2], pair[2];
    WAITS("accept", 1, CONNECTS, 0, (served = accept(listening, NULL, NULL)) >= 0);
    asked = client;
    WAITS("accept", 1, CONNECTS, 0, accept4(listening, NULL, NULL, SOCK_CLOEXEC) >= 0);
    in_sets(served, asked, 1);
    in_receiving(served, asked, 1);
    in_receiving(asked, served, 0); /* what the program itself has asked for */
    in_sets(asked, served, 0);
    must(!pipe(pipes) && !socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "pipe");
    in_sets(pipes[0], pipes[1], 0);
    in_sets(pair[0], pair[1], 0);
    in_receiving(pair[0], pair[1], 0);
    in_datagrams();
    struct pollfd both[] = {{.fd = pipes[0], .events = POLLIN}, {.fd = served, .events = POLLIN}};
    WAITS("poll", 1, SENDS, asked, poll(both, 2, -1));
    take(served);
    WAITS("poll", 0, SENDS, pipes[1], poll(both, 2, -1));
    take(pipes[0]);
    WAITS("poll", 1, NOTHING, 0, poll(&both[1], 1, 5)); /* nothing came */
    WAITS("poll", 0, NOTHING, 0, poll(both, 2, 5));
    WAITS("poll", 0, NOTHING, 0, poll(NULL, 0, 5));
    WAITS("poll", 0, INTERRUPTS, 0, poll(&both[1], 1, -1));
    WAITS("accept", 1, INTERRUPTS, 0, accept(listening, NULL, NULL));
    WAITS("poll", 0, NOTHING, 0, poll(nowhere, 1, 5));
    WAITS("select", 0, NOTHING, 0, select(4, nowhere, NULL, NULL, NULL));
    WAITS("accept", 0, NOTHING, 0, accept(pipes[0], NULL, NULL));
    WAITS("accept", 0, NOTHING, 0, accept(-1, NULL, NULL));
}

static void *until_cancelled(void *how) {
    step();
    pthread_cleanup_push((void (*)(void *))puts, "cleaned up");
    will(CANCELS, 0);
    struct epoll_event event = {.events = EPOLLIN}, got;
    int many = epoll_create1(0);
    epoll_ctl(many, EPOLL_CTL_ADD, listening, &event);
    if (how)
        accept(listening, NULL, NULL);
    else
        epoll_wait(many, &got, 1, -1);
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancelled(void) {
    for (intptr_t how = 0; how < 2; how++) {
        pthread_t thread;
        void *result;
        must(!pthread_create(&thread, NULL, until_cancelled, (void *)how), "thread");
        must(!pthread_join(thread, &result) && result == PTHREAD_CANCELED, "cancelled");
    }
    WAITS("accept", 1, CONNECTS, 0, accept(listening, NULL, NULL) >= 0);
}

/* A child of fork that makes calls of CUDA's, before its parent does, and one that makes none. */
static void forked(void) {
    for (int calls = 1; calls >= 0; calls--) {
        fflush(stdout);
        pid_t child = fork();
        if (!child) {
            pthread_t thread;
            must(!pthread_create(&thread, NULL, help, NULL), "thread");
            if (calls) step();
            WAITS("accept", calls, CONNECTS, 0, accept(listening, NULL, NULL) >= 0);
            if (calls) step();
            fflush(stdout);
            _exit(0);
        }
        int status;
        must(waitpid(child, &status, 0) == child && !status, "child");
        step();
    }
}

/* A thread that submits nothing. */
static void *elsewhere(void *nothing) {
    WAITS("accept", 0, CONNECTS, 0, accept(listening, NULL, NULL) >= 0);
    return nothing;
}

int main(int argc, char **argv) {
    pthread_t thread;
    const char *mode = argc > 1 ? argv[1] : "all";
    begin();
    if (strcmp(mode, "forked")) step();
    if (!strcmp(mode, "all")) all();
    if (!strcmp(mode, "cancelled")) cancelled();
    if (!strcmp(mode, "forked")) forked();
    if (!strcmp(mode, "elsewhere"))
        must(!pthread_create(&thread, NULL, elsewhere, NULL) && !pthread_join(thread, NULL), "thread");
    step();
    printf("results\n%s", results);
    return 0;
}
