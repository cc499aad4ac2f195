/* What is outstanding when nothing can go on: a line for each call that waits, each stream with work, each actor. */
#include "simulation.h"

#include <stdarg.h>
#include <stdio.h>

static const char *const classes[] = {"compute", "H2D", "D2H"};

__attribute__((format(printf, 2, 3))) static void add(simulation *s, const char *format, ...) {
    size_t used = 0;
    while (used < sizeof s->stuck && s->stuck[used]) used++;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(s->stuck + used, sizeof s->stuck - used, format, arguments);
    va_end(arguments);
}

static void describe_waiters(runtime *rt, const parkers *list, const char *what) {
    for (const parker *p = list->head; p; p = p->next) {
        add(rt->simulation, "%s", kvhostCallName(p->api));
        if (p->of) add(rt->simulation, " on stream %u", p->of->number);
        add(rt->simulation, " waits for %s\n", what);
    }
}

/* The stream on which a record of this marker is pending; NULL: none is. */
static const stream *recorded_on(runtime *rt, const marker *m) {
    for (const stream *s = rt->streams; s; s = s->next)
        for (const op *o = s->head; o; o = o->next)
            if (o->kind == OP_RECORD && o->marker == m) return s;
    return NULL;
}

static void describe_stream(runtime *rt, const stream *s) {
    static const char *const kinds[] = {
        "a copy",   "an event record", "a wait for an event",   "a delay",        "a kernel",
        "a memset", "a free",          "a gate that is closed", "a host function"};
    const op *o = s->head;
    add(rt->simulation, "stream %u: %llu operations, the first is %s", s->number,
        (unsigned long long)(s->submitted - s->completed), kinds[o->kind]);
    if (o->kind == OP_WAIT) {
        const stream *by = recorded_on(rt, o->marker);
        if (by) add(rt->simulation, " recorded on stream %u", by->number);
    } else if (!o->started && o->channel->head && o->channel->head != o) {
        add(rt->simulation, " behind stream %u in channel %u for %s", o->channel->head->stream->number,
            o->channel->index, classes[o->class]);
    }
    add(rt->simulation, "\n");
}

void kvh_describe_stuck(runtime *rt) {
    simulation *s = rt->simulation;
    char what[64];
    s->stuck[0] = 0;
    add(s, "nothing that is outstanding can wake anyone at %llu ns%s\n", (unsigned long long)s->now_ns,
        s->polls > 1000 ? "; actors only poll" : "");
    for (int k = 0; k < CLASSES; k++)
        for (uint32_t i = 0; i < rt->channels_of[k]; i++) {
            const channel *ch = &rt->channels[k][i];
            snprintf(what, sizeof what, "a place in channel %u for %s (%u are taken)", i, classes[k], ch->outstanding);
            describe_waiters(rt, &ch->waiters, what);
        }
    describe_waiters(rt, &rt->ctx_want_exclusive, "the context lock");
    describe_waiters(rt, &rt->ctx_want_shared, "the context lock");
    for (const event *e = rt->events; e; e = e->next)
        if (e->marker) describe_waiters(rt, &e->marker->waiters, "an event");
    for (const stream *of = rt->streams; of; of = of->next) {
        describe_waiters(rt, &of->waiters, "the stream's work");
        describe_waiters(rt, &of->lock_waiters, "another call on it");
        if (of->head) describe_stream(rt, of);
    }
    for (const actor *a = s->actors; a; a = a->next)
        add(s, "actor %d: %s\n", a->id,
            a->state == ACTOR_IDLE      ? "waits to be woken"
            : a->state == ACTOR_WAITING ? "waits in a call"
                                        : "is in a step that waits");
}
