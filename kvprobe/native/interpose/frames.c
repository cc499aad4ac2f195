/* The Python stack of a thread to its last frame, for whoever has to know what lies below it: faulthandler's ends at
 * the hundredth. Python's own functions walk it, which need the GIL. A thread that does not hold it lets another one
 * take it, and waits for that one for a while only: it may hold a lock that the GIL's holder waits for. */
#define _GNU_SOURCE
#include "../src/kvp_signals.h"
#include "interpose.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PATIENCE_S 1

enum { ASKED, WALKING, WALKED, GIVEN_UP };

struct walk {
    const kvp_python *python;
    void *thread;
    int fd, state; /* guarded by `walking` */
};
static pthread_mutex_t walking = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t walked = PTHREAD_COND_INITIALIZER;

static void write_text(const kvp_python *p, int fd, void *object, const char *name) {
    void *text = p->attribute(object, name);
    void *bytes = text ? p->encode(text, "ascii", "backslashreplace") : NULL;
    if (bytes)
        dprintf(fd, "%s", p->text(bytes));
    else
        p->clear();
    if (bytes) p->release(bytes);
    if (text) p->release(text);
}

/* With the GIL. No Python code runs in here, the collector's neither. */
static void write_frames(const struct walk *w) {
    const kvp_python *p = w->python;
    int collects = p->gc_disable();
    for (void *frame = p->thread_frame(w->thread); frame;) {
        void *code = p->frame_code(frame), *back = p->frame_back(frame);
        dprintf(w->fd, "  File \"");
        write_text(p, w->fd, code, "co_filename");
        dprintf(w->fd, "\", line %d in ", p->frame_line(frame));
        write_text(p, w->fd, code, "co_name");
        dprintf(w->fd, "\n");
        p->release(code);
        p->release(frame);
        frame = back;
    }
    if (collects) p->gc_enable();
}

static void *helper(void *arg) {
    struct walk *w = arg;
    int gil = w->python->gil_ensure();
    pthread_mutex_lock(&walking);
    int given_up = w->state == GIVEN_UP;
    if (!given_up) w->state = WALKING;
    pthread_mutex_unlock(&walking);
    if (!given_up) write_frames(w);
    w->python->gil_release(gil);
    if (given_up) {
        free(w);
        return NULL;
    }
    pthread_mutex_lock(&walking);
    w->state = WALKED;
    pthread_cond_broadcast(&walked);
    pthread_mutex_unlock(&walking);
    return NULL;
}

static int wait_for_helper(struct walk *w) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    int late = 0;
    pthread_mutex_lock(&walking);
    while (w->state == WALKING || (w->state == ASKED && !late)) {
        if (w->state == WALKING)
            pthread_cond_wait(&walked, &walking);
        else
            late = pthread_cond_timedwait(&walked, &walking, &until);
    }
    int done = w->state == WALKED;
    if (!done) w->state = GIVEN_UP;
    pthread_mutex_unlock(&walking);
    return done;
}

int kvp_write_whole_stack(const kvp_python *python, int fd) {
    void *thread = python->this_thread();
    if (!thread) return 1; /* it runs no Python */
    if (python->gil_held()) {
        write_frames(&(struct walk){python, thread, fd, WALKING});
        return 1;
    }
    struct walk *w = malloc(sizeof *w);
    pthread_t by;
    sigset_t before;
    if (!w) return 0;
    *w = (struct walk){python, thread, fd, ASKED};
    kvp_block_signals(&before);
    int code = pthread_create(&by, NULL, helper, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!code) pthread_detach(by);
    int done = !code && wait_for_helper(w);
    if (done || code) free(w); /* else the helper does, if it ever gets the GIL */
    return done;
}
