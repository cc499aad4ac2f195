/* What copies carry: of a sample of them a hash of the host's side, so that bytes that are moved again can be told from
 * bytes that the program has rewritten. Equal addresses alone tell neither.
 *
 * WHEN. In the copy's own call, after it has been submitted: later its source may hold the next step's bytes. Of a copy
 * from the device it is what lies where it will go, which is what the store before it left there.
 *
 * WHICH. By place, not by chance: a place that is chosen is looked at in each of its copies, for two looks at one
 * place are what tells. A mask over a hash of the address lets as many places through as the budget pays for.
 *
 * HOW MUCH. All of a copy of up to LOOK bytes, else of PIECES parts spread over it, which begin at pages; of a batch, a
 * part of each of up to PIECES of its copies, and where they lie: equal are only those of the same places. Of a 2D copy
 * whose rows lie one behind the other on the device, likewise of PIECES of its rows, and how far apart they are. A
 * thousandth of the wall time, and of a process's age not more looks than the ring can hold of hours.
 *
 * HAZARDS. The memory may be gone or unreadable by now: the kernel reads it (process_vm_writev, into memory of ours),
 * and a fault there is an error, not a signal. Reading the local side it follows the process's own page tables, so
 * memory that a driver has mapped can be read as well. Where the call is refused (a container's filter), nothing is
 * looked at any more. A program under seccomp may die of it: seccomp.c ends it. */
#define _GNU_SOURCE
#include "interpose.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PIECES 16
#define PIECE 256
#define LOOK (PIECES * PIECE)
#define PAGE 4096u
#define FIRST_LOOKS 1000
#define FIRST_NS 2000000     /* what the first looks may take */
#define MOST_A_SECOND 1000.0 /* looks */
#define OF_AN_AGE 2000.0     /* looks between an age of the process, in seconds, and twice that, roughly */
#define OF_TIME 1e-3
#define MOST_NS 20000       /* of one look: who takes longer has lost the CPU */
#define WINDOW_S 0.25       /* budgets are given for so long */
#define FAULTS 64           /* until nothing is looked at any more */
#define MOST_PLACES 0xffffu /* in a mask */

static struct {
    _Atomic uint64_t born_ns;
    _Atomic uint64_t began_ns; /* of this budget */
    _Atomic int64_t looks, ns; /* left of it */
    int64_t given_looks, given_ns;
    atomic_int turning, faults;
} budget;

static void give(uint64_t from_ns, int64_t looks, int64_t ns) {
    budget.given_looks = looks;
    budget.given_ns = ns;
    atomic_store(&budget.looks, looks);
    atomic_store(&budget.ns, ns);
    atomic_store(&budget.began_ns, from_ns);
}

void kvp_contents_start(void) {
    if (says_no(getenv("KVPROBE_CONTENTS"))) return;
    budget.born_ns = 0; /* the first copy */
    kvp_watch.contents_mask = 0;
    atomic_store(&kvp_watch.contents_from_ns, 0);
}

void kvp_contents_stop(void) { atomic_store(&kvp_watch.contents_from_ns, UINT64_MAX); }

/* The first budget; 0: another thread is giving it just now. */
static int be_born(uint64_t now) {
    int no = 0;
    if (!atomic_compare_exchange_strong(&budget.turning, &no, 1)) return 0;
    if (!budget.born_ns) {
        give(now, FIRST_LOOKS, FIRST_NS);
        budget.born_ns = now;
    }
    atomic_store(&budget.turning, 0);
    return 1;
}

/* A budget is spent, or lasts longer than it was meant to: the next one, for more places or fewer. */
static void turn(uint64_t now) {
    int no = 0;
    if (!atomic_compare_exchange_strong(&budget.turning, &no, 1)) return;
    double age = (double)(now - budget.born_ns) / 1e9, elapsed = (double)(now - budget.began_ns) / 1e9;
    double rate = age > 2 ? OF_AN_AGE / age : MOST_A_SECOND;
    double by_looks = (double)(budget.given_looks - atomic_load(&budget.looks)) / rate;
    double by_time = (double)(budget.given_ns - atomic_load(&budget.ns)) / 1e9 / OF_TIME;
    double owed = by_looks > by_time ? by_looks : by_time, over = owed / (elapsed + 1e-9);
    uint32_t mask = kvp_watch.contents_mask;
    for (; over > 1.5 && mask < MOST_PLACES; over /= 2) mask = mask * 2 + 1;
    if (over < 0.4) mask >>= 1;
    kvp_watch.contents_mask = mask;
    uint64_t from = budget.began_ns + (uint64_t)(owed * 1e9);
    if (from < now) from = now;
    double s = elapsed - owed > WINDOW_S ? elapsed - owed : WINDOW_S; /* what was not used is saved up, to a degree */
    double looks = rate * s < FIRST_LOOKS ? rate * s : FIRST_LOOKS, ns = OF_TIME * s * 1e9;
    give(from, looks > 16 ? (int64_t)looks : 16, ns < FIRST_NS ? (int64_t)ns : FIRST_NS);
    uint64_t is = atomic_load(&kvp_watch.contents_from_ns);
    if (is != UINT64_MAX) atomic_compare_exchange_strong(&kvp_watch.contents_from_ns, &is, from);
    atomic_store(&budget.turning, 0);
}

/* Reads these parts of memory into one; how many bytes, 0: they could not be. */
static size_t gather(const struct iovec *from, int pieces, struct iovec to) {
    long got = syscall(SYS_process_vm_writev, (long)getpid(), from, (long)pieces, &to, 1L, 0L);
    if (got == (long)to.iov_len) return to.iov_len;
    if ((got < 0 && errno != EFAULT) || atomic_fetch_add(&budget.faults, 1) >= FAULTS) kvp_contents_stop();
    return 0;
}

/* Reads what is looked at of [address, address + bytes) into `into`; how many bytes, 0: none could be. */
static size_t read_some(uint64_t address, uint64_t bytes, void *into) {
    struct iovec from[PIECES], to = {into, LOOK};
    int pieces = 1;
    from[0] = (struct iovec){(void *)(uintptr_t)address, bytes < LOOK ? bytes : LOOK};
    if (bytes > LOOK)
        for (pieces = 0; pieces < PIECES; pieces++) {
            uint64_t at = bytes / PIECES * (unsigned)pieces;
            if (bytes >= PIECES * PAGE) at &= ~(uint64_t)(PAGE - 1);
            if (pieces == PIECES - 1) at = bytes - PIECE;
            from[pieces] = (struct iovec){(void *)(uintptr_t)(address + at), PIECE};
        }
    to.iov_len = bytes < LOOK ? bytes : LOOK;
    return gather(from, pieces, to);
}

/* The same of copies spread over a batch, whose places are `at`: PIECES words, those that are not used 0. */
static size_t read_batch(const struct kvp_pieces *batch, int direction, void *into, uint64_t *at) {
    struct iovec from[PIECES], to = {into, 0};
    size_t pieces = batch->count < PIECES ? batch->count : PIECES;
    for (size_t i = 0; i < pieces; i++) {
        size_t one = batch->count * i / pieces, bytes = batch->sizes[one], length = bytes < PIECE ? bytes : PIECE;
        size_t within = (bytes - length) / pieces * i & ~(size_t)63;
        at[i] = (uint64_t)(uintptr_t)(direction == KVP_H2D ? batch->srcs : batch->dsts)[one];
        from[i] = (struct iovec){(void *)(uintptr_t)(at[i] + within), length};
        to.iov_len += length;
    }
    return gather(from, (int)pieces, to);
}

/* The same of rows of a 2D copy; `apart`: bytes from one to the next on the host. */
static size_t read_2d(uint64_t address, const struct kvp_rows *rows, size_t apart, void *into) {
    struct iovec from[PIECES], to = {into, 0};
    size_t pieces = rows->count < PIECES ? rows->count : PIECES, length = rows->width < PIECE ? rows->width : PIECE;
    for (size_t i = 0; i < pieces; i++) {
        size_t within = (rows->width - length) / pieces * i & ~(size_t)63;
        from[i] = (struct iovec){(void *)(uintptr_t)(address + rows->count * i / pieces * apart + within), length};
        to.iov_len += length;
    }
    return gather(from, (int)pieces, to);
}

int kvp_read_rows(uint64_t address, uint64_t stride, size_t rows, size_t width, void *into) {
    struct iovec from[KVP_ROWS], to = {into, rows * width};
    for (size_t i = 0; i < rows; i++) from[i] = (struct iovec){(void *)(uintptr_t)(address + i * stride), width};
    return syscall(SYS_process_vm_writev, (long)getpid(), from, (long)rows, &to, 1L, 0L) == (long)to.iov_len;
}

int kvp_read_memory(uint64_t address, uint64_t bytes, void *into) { return kvp_read_rows(address, 0, 1, bytes, into); }

/* Four lanes of multiplications, so that each word does not wait for the one before. */
uint64_t kvp_hash_words(const uint64_t *words, size_t count) {
    uint64_t lane[4] = {0x243f6a8885a308d3u, 0x13198a2e03707344u, 0xa4093822299f31d0u, 0x082efa98ec4e6c89u};
    for (size_t i = 0; i < count; i++) {
        uint64_t mixed = (lane[i & 3] ^ words[i]) * 0x9e3779b97f4a7c15u;
        lane[i & 3] = mixed ^ mixed >> 29;
    }
    uint64_t all = count;
    for (int i = 0; i < 4; i++) all = (all ^ lane[i]) * 0xbf58476d1ce4e5b9u, all ^= all >> 32;
    return all;
}

static int is_plain(const kvp_record *r) {
    return r->call == KVP_CALL_cudaMemcpyAsync || r->call == KVP_CALL_cudaMemcpy || r->call == KVP_CALL_cuMemcpyAsync ||
           r->call == KVP_CALL_cuMemcpyHtoDAsync || r->call == KVP_CALL_cuMemcpyDtoHAsync ||
           r->call == KVP_CALL_cudaMemcpyWithAttributesAsync ||
           (r->call >= KVP_CALL_cuMemcpy && r->call <= KVP_CALL_cuMemcpyDtoH);
}

void kvp_contents_look(const kvp_record *r, const struct kvp_pieces *batch, const struct kvp_rows *rows) {
    int direction = r->direction & 15, memory = r->direction >> 4, to_device = direction == KVP_H2D;
    if (r->result || !r->bytes || (!to_device && direction != KVP_D2H)) return;
    int in_batch = kvp_is_batch(r), in_rows = kvp_is_2d(r);
    if (!is_plain(r) && !in_batch && !in_rows) return;
    if (in_rows && (to_device ? rows->dpitch : rows->spitch) != rows->width) return;
    if (memory != KVP_MEM_PINNED && memory != KVP_MEM_PAGEABLE) return;
    if (kvp_watch.captures || kvp_watch.detail == DETAIL_TOTALS) return;
    uint64_t words[LOOK / 8 + PIECES], places[PIECES] = {0}, begin = kvp_clock();
    int was = errno;
    if (unlikely(!budget.born_ns) && !be_born(begin)) return;
    uint64_t host = to_device ? r->src : r->dst;
    size_t got, apart = to_device ? rows->spitch : rows->dpitch;
    int several = (in_batch && batch->count > 1) || (in_rows && apart != rows->width);
    if (several && in_batch)
        got = read_batch(batch, direction, words, places);
    else if (several)
        got = read_2d(host, rows, places[0] = apart, words);
    else
        got = read_some(host, r->bytes, words);
    errno = was;
    if (got) {
        size_t count = (got + 7) / 8, same = 1;
        memset((char *)words + got, 0, count * 8 - got);
        while (same < count && words[same] == words[0]) same++;
        kvp_record note = *r;
        note.call = KVP_CALL_contents;
        note.result = same == count;
        if (several) {
            memcpy(words + count, places, sizeof places);
            count += PIECES;
        }
        note.dur_ns = kvp_hash_words(words, count);
        note.count = (uint32_t)got;
        kvp_ring_note(&note);
        if (to_device && !several) kvp_device_look_next(r, note.dur_ns);
    }
    uint64_t now = kvp_clock();
    int64_t took = now - begin < MOST_NS ? (int64_t)(now - begin) : MOST_NS;
    int64_t looks = atomic_fetch_sub(&budget.looks, 1), ns = atomic_fetch_sub(&budget.ns, took);
    if (looks <= 1 || ns <= took || now - budget.began_ns > 1000000000u) turn(now);
}
