/* What the device has where a load will go, of a sample. A load that brings the bytes that it brought before is needed
 * all the same where a kernel has written over them since, and only the device can tell.
 *
 * WHICH. A load whose source was looked at twice, with equal bytes and one destination (contents.c): a candidate.
 *
 * HOW. Right in front of the load, in its own stream, one copy of ours brings ROWS short pieces of the destination into
 * pinned memory. They lie equally far apart, and where the first one begins is drawn anew each time: whatever part of
 * the destination was rewritten, its share of all bytes is at least how likely one piece shows it. What the host sends
 * is read at the same places, and the two are compared when the device has passed the mark behind the copy
 * (mark_reader.c). Only what the load itself will write is read.
 *
 * WHEN. Once in FIRST_NS, and more rarely the older the process: of its age not more looks than a ring can hold of
 * hours. Only where marks may go, by the same rules (marks.c): no stream that is being captured, none with many
 * submissions outstanding, none that is not followed. A mark stands on both sides of the copy, so that it is in no
 * span, and its slots count as those of marks.
 *
 * HAZARDS. The pinned memory is made ahead by the helper thread. A call that fails ends these looks for good, with a
 * note. A stream that ends with a look of ours outstanding may still write it, so its place is not used again. */
#define _GNU_SOURCE
#include "marks.h"

#include <sys/syscall.h>
#include <unistd.h>

#define LOOKS 16    /* outstanding at a time */
#define PLACES 4096 /* a power of two */
#define FIRST_NS 8000000u
#define AGAIN_NS 1000000u       /* until the next try, where none can be taken just now */
#define PASSED_OVER 16          /* candidates, at most: a program has them in an order, and each is to have its turn */
#define IN_VAIN 2000            /* copies in a row, none of them a candidate: then none is waited for any more */
#define IN_VAIN_NS 1000000000u  /* for so long */
#define OF_AGE 256              /* the time between two is this part of the process's age, where that is longer */
#define PORTABLE 1              /* CU_MEMHOSTALLOC_PORTABLE */
#define HOST 1                  /* CU_MEMORYTYPE_HOST */
#define MOST_STRIDE 0x40000000u /* a pitch that every device takes */
#define DEVICE 2                /* CU_MEMORYTYPE_DEVICE */

/* CUDA_MEMCPY2D */
struct pieces {
    struct {
        size_t x, y;
        unsigned memory;
        void *host;
        uint64_t device;
        void *array;
        size_t pitch;
    } from, to;
    size_t width, height;
};

enum { FREE, SENT, LOST };

struct look {
    _Atomic int state;
    struct mark_stream *stream;
    uint64_t at;     /* slots of the stream that are given with the mark behind it */
    kvp_record note; /* count: bytes that were read */
    unsigned char host[KVP_ROWS * KVP_ROW];
};

/* A destination, and the newest look at what a load brought there. */
struct place {
    uint64_t dst, src, bytes, hash;
    int again; /* that look found what the one before it had */
};

static struct look looks[LOOKS];
static unsigned char (*_Atomic pinned)[KVP_ROWS * KVP_ROW]; /* of each look */
static _Atomic int wanted, ended;
static _Atomic uint64_t next_ns;
static int (*copy_pieces)(const struct pieces *, void *);

static atomic_flag busy = ATOMIC_FLAG_INIT; /* of what follows: who finds it set does without */
static struct place places[PLACES];
static uint64_t born_ns, random_word = 0x9e3779b97f4a7c15u, passed_over, in_vain;

static uint64_t draw(uint64_t below) {
    random_word ^= random_word << 13;
    random_word ^= random_word >> 7;
    random_word ^= random_word << 17;
    return below ? random_word % below : 0;
}

static struct place *place_of(uint64_t dst) { return &places[(dst >> 6) * 0x9e3779b97f4a7c15u >> 52]; }

static void end_all(int error, const kvp_record *load) {
    kvp_record note = *load;
    if (atomic_exchange(&ended, 1)) return;
    kvp_watch.device_looks = 0;
    note.call = KVP_CALL_destination;
    note.count = 0;
    note.result = (uint16_t)error;
    if (error) kvp_ring_note(&note);
}

void kvp_device_looks_end(void) { end_all(0, &(kvp_record){0}); }

void kvp_device_look_next(const kvp_record *r, uint64_t hash) {
    if (ended || !kvp_watch.marks || kvp_kind_of(r->dst, &kvp_thread.dst) != KVP_MEM_DEVICE) return;
    if (atomic_flag_test_and_set(&busy)) return;
    struct place *p = place_of(r->dst);
    int again = p->dst == r->dst && p->src == r->src && p->bytes == r->bytes && p->hash == hash;
    *p = (struct place){r->dst, r->src, r->bytes, hash, again};
    if (again && !born_ns) {
        born_ns = r->start_ns;
        random_word ^= r->start_ns << 20 ^ r->dst;
        atomic_store(&wanted, 1);
    }
    atomic_flag_clear(&busy);
}

static struct look *find_free(void) {
    for (int i = 0; i < LOOKS; i++)
        if (atomic_load(&looks[i].state) == FREE) return &looks[i];
    return NULL;
}

/* Copies the pieces. 1: they are on their way; 0: not here and now; or minus the error of the call that failed. */
static int look(const kvp_record *r, struct look *one) {
    size_t rows = r->bytes < KVP_ROWS * KVP_ROW ? 1 : KVP_ROWS, width = rows == 1 ? r->bytes : KVP_ROW;
    uint64_t stride = r->bytes / rows, first = draw(r->bytes - (rows - 1) * stride - width + 1);
    struct mark_stream *s = stride > MOST_STRIDE ? NULL : kvp_mark_clear(r->stream, r->start_ns);
    if (!s) return 0;
    if (!kvp_read_rows(r->src + first, stride, rows, width, one->host)) {
        kvp_mark_release(s);
        return 0;
    }
    struct pieces p = {.from = {.memory = DEVICE, .device = r->dst + first, .pitch = stride},
                       .to = {.memory = HOST, .host = pinned[one - looks], .pitch = width},
                       .width = width,
                       .height = rows};
    int error = copy_pieces(&p, s->handle);
    one->stream = s;
    one->at = error ? 0 : kvp_mark_behind(s);
    one->note = *r;
    one->note.call = KVP_CALL_destination;
    one->note.direction = KVP_H2D;
    one->note.tid = (uint32_t)syscall(SYS_gettid);
    one->note.count = (uint32_t)(rows * width);
    one->note.start_ns = kvp_clock();
    if (!error) atomic_store(&one->state, one->at ? SENT : LOST);
    kvp_mark_release(s);
    return error ? -error : 1;
}

static void wait_for(uint64_t ns) {
    atomic_store(&next_ns, ns);
    kvp_watch.device_looks = 0;
}

void kvp_device_look(kvp_record *r) {
    if (ended || !kvp_watch.marks) {
        kvp_watch.device_looks = 0;
        return;
    }
    if (atomic_flag_test_and_set(&busy)) return;
    const struct place *p = place_of(r->dst);
    struct look *one = NULL;
    uint64_t begin = r->start_ns, least = (begin - born_ns) / OF_AGE;
    if (least < FIRST_NS) least = FIRST_NS;
    if (p->again && p->dst == r->dst && p->src == r->src && p->bytes == r->bytes && r->count == 1 &&
        kvp_kind_of(r->dst, &kvp_thread.dst) == KVP_MEM_DEVICE)
        one = find_free();
    if (one && !passed_over--) {
        int taken = look(r, one);
        if (taken < 0) end_all(-taken, r);
        passed_over = draw(PASSED_OVER);
        wait_for(begin + (taken ? least / 2 + draw(least) : AGAIN_NS));
        r->start_ns = taken > 0 ? one->note.start_ns : kvp_clock(); /* the look names the load by it */
        kvp_mark_spend(begin);
        in_vain = 0;
    } else if (++in_vain == IN_VAIN) {
        wait_for(begin + IN_VAIN_NS);
        in_vain = 0;
    }
    atomic_flag_clear(&busy);
}

/* Makes what looks need, once a candidate was seen, and says when one is due: on a thread of ours, or in simulated time
 * between two calls. */
void kvp_device_looks_prepare(struct mark_context *c) {
    void *made = NULL;
    if (!wanted || ended || kvp_watch.captures || !kvp_watch.marks) return;
    if (pinned) {
        if (kvp_clock() >= next_ns) kvp_watch.device_looks = 1;
        return;
    }
    int (*allocate)(void **, size_t, unsigned) =
        (int (*)(void **, size_t, unsigned))(uintptr_t)kvp_driver_symbol("cuMemHostAlloc");
    copy_pieces = (int (*)(const struct pieces *, void *))(uintptr_t)kvp_driver_symbol("cuMemcpy2DAsync_v2");
    if (!allocate || !copy_pieces || kvp_mark_driver.cuCtxSetCurrent(c->handle)) {
        kvp_device_looks_end();
        return;
    }
    int error = allocate(&made, sizeof *pinned * LOOKS, PORTABLE);
    if (error)
        end_all(error, &(kvp_record){.start_ns = kvp_clock()});
    else
        pinned = made;
}

void kvp_device_looks_read(void) {
    for (int i = 0; i < LOOKS; i++) {
        struct look *one = &looks[i];
        if (atomic_load(&one->state) != SENT || __atomic_load_n(&one->stream->done, __ATOMIC_ACQUIRE) < one->at)
            continue;
        one->note.result = !memcmp(one->host, pinned[i], one->note.count);
        kvp_ring_note(&one->note);
        atomic_store(&one->state, FREE);
    }
}

void kvp_device_looks_lose(const struct mark_stream *s) {
    for (int i = 0; i < LOOKS; i++)
        if (atomic_load(&looks[i].state) == SENT && looks[i].stream == s) atomic_store(&looks[i].state, LOST);
}
