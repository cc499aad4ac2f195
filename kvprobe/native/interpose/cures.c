/* The cure of pageable copies: by way of pinned memory of kvprobe's own, which several threads fill (`staged`).
 *
 * A driver moves pageable memory through a small pinned buffer that one thread fills: 8 to 10 GB/s over a link of 55.
 * Here the same is done with several threads (staged_copy.c). The program's memory is never registered, so nothing has
 * to be noticed when it is freed, unmapped, remapped, forked or registered by the program itself: it is read and
 * written by the CPU within the call, as the driver does it. Mapped files and the heap are served like anything else.
 *
 * WHAT A PROGRAM MAY RELY ON, and does with this (CUDA's "API synchronization behavior"; copies above 64 KiB)
 * - Host to device: the source may be changed as soon as the call has returned, because all of it is in the slots by
 *   then; cudaMemcpy waits for the device, too. Behind work "the driver may synchronize with the stream", or take the
 *   source at once, and somebody may count on a call that returns while that work waits for what its caller does next.
 *   So it is looked at first: once a call of the size has returned before the work in front of it was over, such copies
 *   are never staged again. Where each of the first ones waited (WATCHED_BEHIND), staged ones wait, too, but not for
 *   longer than STAGING_MOST_WAIT_NS. No longer is waited for the device anywhere where the program's call might
 * return: a stream without work may share its channel with one that waits for this caller. Then the copy goes as it is.
 * - Device to host: all bytes have arrived when the call returns, whatever was in front of it.
 * - Order in the stream, and what an event recorded behind the call covers, are those of one copy.
 * - An error: nothing is reported from here. The program's own call is made, over the same bytes, and its result is the
 *   result; staging is not used again in this process. A call that would be refused is not touched: destination or
 *   source that leaves its allocation, a stream or memory of another context, a kind that the memory contradicts.
 * - While any stream is being captured: untouched, so that what CUDA refuses meanwhile is refused. A capture that
 * nobody saw begin goes on: the thread's capture mode is relaxed around what is called here.
 * - The runtime's last error: only the driver is called.
 * - A context that is destroyed: before that the device is done with every slot, and no event of it is asked for again.
 *
 * WHAT IS NOT DONE, and why
 * - Registering the program's pageable memory (cudaHostRegister behind its back). Freeing it would have to be seen, and
 *   cannot: glibc's free, realloc and malloc_trim unmap by calls of their own that nothing can interpose. The driver
 *   would go on copying the pages that were there before: wrong bytes without an error. After fork, before Linux 5.12,
 *   the same follows from the parent's first write. And the program's own cudaHostRegister, cudaPointerGetAttributes
 *   and torch's is_pinned would answer otherwise.
 * - Merging neighbouring calls. A copy that is held back has to be submitted before whatever could observe it: an event
 *   recorded by another thread, a launch through a function that nobody wraps, a graph, the CPU polling the destination
 *   without any call. Its error would be another call's.
 * - Registering in chunks what the program registers. Copies may not cross the border of two registrations, the range
 *   that cuPointerGetAttributes names would be the chunk's, and cudaHostUnregister takes the one pointer. Its pages are
 *   not touched first by several threads, either: they would lie on those threads' NUMA nodes, not on the caller's.
 *
 * A LARGE COPY (64 MiB and more) is made in parts, and its account counts parts: a program that moves its gigabytes
 * once has the better way for most of them. Parts that go as they are have the driver copy the program's own memory. A
 * store to memory whose pages are not there (three were looked at) has an account of its own: there the pages are the
 * time, and several threads make them. Where the kernel gives huge pages if asked (madvise), they are asked for, for
 * the pages that the copy writes: OTHERWISE THAN WITHOUT, that range is a mapping of its own from then on, and a
 * program that calls mremap on more than it, in one call, is refused by kernels before 6.17. realloc copies then.
 *
 * Each direction and size class is measured for itself, both ways in turn, kept where a call gets at least a quarter
 * shorter, looked at again, and taken back where that is no longer so (cure_account.c). The slots are made by a thread
 * of their own. One copy at a time: a second thread's goes as it is. A forked child cures nothing. */
#define _GNU_SOURCE
#include "cures.h"

#include "../src/host_memory.h"
#include "../src/kvp_signals.h"
#include "cure_account.h"
#include "recycle.h"
#include "staging.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define FIRST_CLASS 17    /* of sizes: log2(KVP_CURED_FROM) */
#define LARGE (64u << 20) /* from here on a copy is made in parts, and each part can go either way */
#define PART_NS 20000000  /* what a part may wait for a helper: no longer than it takes as it is, at 1.6 GB/s */
#define LARGE_CLASS 9     /* of LARGE and more */
#define FRESH_CLASS 10    /* of these, stores into memory whose pages are not there yet */
#define CLASSES 11
#define PART (32u << 20)           /* while it is found out whether it pays */
#define PART_AS_IT_IS (4u << 20)   /* one that goes as it is: a rate needs no more, and those bytes are the slow ones */
#define MOST_PART (1u << 30)       /* afterwards */
#define MOST_SETTING_NS 500000000u /* for slots: the driver alone moves no more than some GB a second */
#define DEFAULT_BYTES (32u << 20)  /* copies of an H100 reach 36 to 40 GB/s with 16, 47 with 32 or 64 */
#define CONTEXTS 16
#define WATCHED_BEHIND 3      /* calls behind work that all waited for it, before one is staged behind work */
#define REST_NS 20000000u     /* how long the rest of a copy that has returned is waited for, to know what it took */
#define TO_END_NS 1000000000u /* how long the rest of a synchronous load is waited for */
#define GIVE_UPS 3            /* copies in a row that the device did not take in time, until there are no more */
#define OF_MEMORY_LEFT 8      /* locked is at most one part in so many of what the machine has left */

enum { TO_DEVICE = 1, TO_HOST = 2, UNKNOWN_KIND = 4 }; /* cudaMemcpyKind */
enum { HOST_PAGE_TABLES = 100 }; /* CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES */
enum { MEMORY_TYPE = 2, IS_MANAGED = 8, DEVICE_ORDINAL = 9, RANGE_START = 11, RANGE_SIZE = 12 };
enum { HOST = 1, DEVICE = 2 };
enum { RELAXED = 2, DISABLE_TIMING = 2, PORTABLE = 1 };

struct staging_driver kvp_driver;

static const char *volatile folder;
static size_t allowed = DEFAULT_BYTES;

static struct {
    _Atomic int busy;    /* 1: a thread has the right to copy, and holds the accounts */
    _Atomic int setting; /* a thread makes slots or events */
    _Atomic int pid;     /* of the process that began; 0: none has */
    uint8_t *memory;
    size_t locked;
    int failed;
    int huge_if_asked; /* the kernel gives huge pages where they are asked for, and only there */
    staging_events contexts[CONTEXTS];
    _Atomic uint32_t context_count;
    kvp_account accounts[2][CLASSES];
    struct {
        uint8_t waited; /* loads behind work whose call waited for it */
        uint8_t early;  /* 1: one did not */
    } behind[CLASSES];
    _Atomic uint64_t behind_work, beside_another; /* copies that went as they are */
    uint64_t copies[2], bytes[2];                 /* staged */
    uint32_t given_up;
    double ns[2][2]; /* what they took, by the accounts, by enum kvp_way: what they would have taken */
} cure;

/* ---- start and end --------------------------------------------------------------------------------------------- */

static void in_child(void) {
    if (atomic_load(&cure.pid)) kvp_watch.cures = 0;
}

void kvp_cures_start(const char *run_folder) {
    const char *fix = getenv("KVPROBE_FIX"), *bytes = getenv("KVPROBE_LOCKED_BYTES");
    char *end;
    while (fix && *fix == ' ') fix++;
    if (!fix || strncasecmp(fix, "auto", 4) || fix[4 + strspn(fix + 4, " ")]) return;
    unsigned long long value = bytes ? strtoull(bytes, &end, 10) : 0;
    if (bytes && *bytes && *bytes != '-' && !*end) allowed = (size_t)value;
    folder = run_folder;
    if (!pthread_atfork(NULL, NULL, in_child)) kvp_watch.cures = 1;
    kvp_recycle_start(run_folder);
}

void kvp_cures_stop(void) {
    kvp_recycle_stop();
    kvp_watch.cures = 0;
    folder = NULL; /* nothing is written, either */
}

void kvp_cures_close(void) {
    if (!folder || atomic_load(&cure.pid) != (int)getpid()) return;
    kvp_watch.cures = 0;
    atomic_store(&cure.pid, 0);
    unsigned long long behind = atomic_load(&cure.behind_work), beside = atomic_load(&cure.beside_another);
    if (!(cure.copies[0] + cure.copies[1] + behind + beside)) return;
    char text[2][160] = {"", ""}, left[160] = "";
    if (behind + beside)
        snprintf(left, sizeof left,
                 "; not staged: %llu loads with work before them in their stream, %llu copies beside another one",
                 behind, beside);
    for (int store = 0; store < 2; store++)
        if (cure.copies[store])
            snprintf(text[store], sizeof text[store], "%s%llu %s of %.3f GB in about %.3f s (%.3f s if not staged)",
                     store && cure.copies[0] ? "; " : "", (unsigned long long)cure.copies[store],
                     store ? "stores" : "loads", (double)cure.bytes[store] / 1e9, cure.ns[store][KVP_CURED] / 1e9,
                     cure.ns[store][KVP_AS_IT_IS] / 1e9);
    kvp_decision(folder, "note", NULL, NULL, 0,
                 "pageable copies went through %.0f MiB of pinned memory, moved by %u threads: %s%s%s",
                 (double)cure.locked / (1 << 20), kvp_staging_threads(), text[0], text[1], left);
}

/* ---- the slots ------------------------------------------------------------------------------------------------- */

/* 1: it can do it. 0: it is not loaded yet. -1: it lacks a function. */
static int open_driver(void) {
    const char *missing = NULL;
    if (!kvp_driver_symbol("cuInit")) return 0;
#define X(NAME, PARAMETERS)                                                                                            \
    kvp_driver.NAME = (int(*) PARAMETERS)(uintptr_t)kvp_driver_symbol(#NAME);                                          \
    if (!kvp_driver.NAME) missing = #NAME;
    KVP_STAGING_CALLS(X)
#undef X
    if (!missing) return 1;
    kvp_decision(folder, "refuse", NULL, NULL, 0, "this driver lacks %s of CUDA 12: copies are not staged", missing);
    return -1;
}

/* Three in four of the processors that this process may use, of which two thirds help where the pages are there, and
 * half with copies that are not large (staged_copy.c); the caller is one more. */
static unsigned helpers(void) {
    unsigned most = kvp_processors() * 3 / 4;
    return most ? most : 1;
}

static void refuse(const char *why, size_t bytes, int error) {
    cure.failed = 1;
    kvp_watch.cures = 0;
    if (error)
        kvp_decision(folder, "refuse", NULL, NULL, 0, "%s (%zu bytes, error %d): copies are not staged", why, bytes,
                     error);
    else if (bytes)
        kvp_decision(folder, "refuse", NULL, NULL, 0, "%s (%zu bytes): copies are not staged", why, bytes);
    else
        kvp_decision(folder, "refuse", NULL, NULL, 0, "%s: copies are not staged", why);
}

typedef struct {
    uint32_t type, managed;
    int ordinal;
    uint64_t start, size;
} place;

static int look(uint64_t address, place *p) {
    *p = (place){.ordinal = -1};
    int attributes[] = {MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, RANGE_START, RANGE_SIZE};
    void *data[] = {&p->type, &p->managed, &p->ordinal, &p->start, &p->size};
    return !kvp_driver.cuPointerGetAttributes(5, attributes, data, address);
}

/* Registered by a context that was destroyed since, it no longer is. */
static int pin(void *memory, size_t bytes) {
    place p;
    if (look((uint64_t)(uintptr_t)memory, &p) && p.type == HOST) return 0;
    return kvp_driver.cuMemHostRegister_v2(memory, bytes, PORTABLE);
}

/* Huge pages, where there are any, made by several threads: a copy may be waiting for them. A child does not get them:
 * pinned pages and copy-on-write do not go together. */
static const kvp_populating slot_pages = {.chunk_bytes = KVP_HUGE_PAGE, .node = -1, .fork = KVP_FORK_NONE};

static int make_slots(void) {
    size_t bytes = allowed / STAGING_SLOT_BYTES * STAGING_SLOT_BYTES, most = (size_t)STAGING_SLOTS * STAGING_SLOT_BYTES;
    if (bytes > most) bytes = most;
    if (bytes < STAGING_FEWEST * STAGING_SLOT_BYTES) {
        refuse("KVPROBE_LOCKED_BYTES leaves less than the 4 MiB that staging takes", allowed, 0);
        return 0;
    }
    size_t left = (size_t)kvp_memory_left("").left_bytes;
    if (left / OF_MEMORY_LEFT < bytes) {
        refuse("too little memory is left on this machine to lock a part of it", left, 0);
        return 0;
    }
    void *memory = kvp_populate(bytes, &slot_pages);
    if (!memory) {
        refuse("no memory for staging", bytes, errno);
        return 0;
    }
    int error = pin(memory, bytes);
    if (error) {
        kvp_unpopulate(memory, bytes);
        refuse("memory for staging could not be locked", bytes, error);
        return 0;
    }
    if (kvp_staging_open(memory, (uint32_t)(bytes / STAGING_SLOT_BYTES), helpers())) {
        refuse("no threads for staging", bytes, EAGAIN); /* the memory stays: threads that were made may look at it */
        return 0;
    }
    cure.huge_if_asked = kvp_huge_pages_stand_at("enabled", "madvise");
    cure.locked = bytes;
    cure.memory = memory;
    return 1;
}

/* On a thread of its own: registering takes milliseconds, and holds the context's lock. */
static void *set_up(void *context) {
    int mode = RELAXED, error, device = 0, by_itself = 0;
    uint64_t id = 0;
    prctl(PR_SET_NAME, "kvprobe-staging");
    kvp_driver.cuThreadExchangeStreamCaptureMode(&mode);
    error = kvp_driver.cuCtxSetCurrent(context);
    if (!error) error = kvp_driver.cuCtxGetId(context, &id);
    if (!error) error = kvp_driver.cuCtxGetDevice(&device);
    if (!error) error = kvp_driver.cuDeviceGetAttribute(&by_itself, HOST_PAGE_TABLES, device);
    uint32_t at = atomic_load(&cure.context_count);
    if (error)
        refuse("the context cannot be used by another thread", 0, error);
    else if (by_itself)
        refuse("the GPU reads this machine's pageable memory by itself, and pins none", 0, 0);
    else if (cure.memory && (error = pin(cure.memory, cure.locked)))
        refuse("memory for staging could not be locked again", cure.locked, error);
    else if (cure.memory || make_slots()) {
        staging_events *of = &cure.contexts[at];
        for (uint32_t i = 0; !error && i < cure.locked / STAGING_SLOT_BYTES; i++)
            error = kvp_driver.cuEventCreate(&of->events[i], DISABLE_TIMING);
        if (!error) error = kvp_driver.cuEventCreate(&of->probe, DISABLE_TIMING);
        of->context = id;
        if (error)
            refuse("no events for staging", 0, error);
        else
            atomic_store(&cure.context_count, at + 1);
    }
    kvp_driver.cuCtxSetCurrent(NULL);
    atomic_store(&cure.setting, 0);
    return NULL;
}

/* The driver's own exit handlers, which are older and so run later, are not to meet that thread. */
static void wait_for_set_up(void) {
    for (int tries = 0; atomic_load(&cure.pid) == (int)getpid() && atomic_load(&cure.setting) && tries < 2000; tries++)
        usleep(1000);
}

static void ask_for_slots(void *context) {
    static int told;
    int no = 0;
    if (cure.failed || atomic_load(&cure.context_count) == CONTEXTS) return;
    if (!atomic_compare_exchange_strong(&cure.setting, &no, 1)) return;
    if (!told++) atexit(wait_for_set_up);
    sigset_t were;
    pthread_t thread;
    pthread_attr_t attributes;
    kvp_block_signals(&were);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int error = pthread_create(&thread, &attributes, set_up, context);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &were, NULL);
    if (error) refuse("no thread for staging", 0, error);
}

static const staging_events *events_of(uint64_t context) {
    for (uint32_t i = 0, n = atomic_load(&cure.context_count); i < n; i++)
        if (cure.contexts[i].context == context) return &cure.contexts[i];
    return NULL;
}

void kvp_context_ends(void) {
    if (!kvp_watch.cures || atomic_load(&cure.pid) != (int)getpid()) return;
    int was = errno, no = 0, mode = RELAXED, held = 0;
    uint64_t until = kvp_clock() + TO_END_NS;
    while (!(held = !atomic_load(&cure.setting) && atomic_compare_exchange_strong(&cure.busy, &no, 1)) &&
           kvp_clock() < until)
        usleep(100), no = 0;
    if (held && !kvp_driver.cuThreadExchangeStreamCaptureMode(&mode)) {
        held = !kvp_staging_drain(until);
        kvp_driver.cuThreadExchangeStreamCaptureMode(&mode);
        atomic_store(&cure.busy, 0);
    }
    if (!held) refuse("a context was destroyed while copies were under way", 0, 0);
    errno = was;
}

/* ---- one copy -------------------------------------------------------------------------------------------------- */

static int is_pageable(uint64_t address, size_t bytes) {
    place first, last;
    return address + bytes > address && look(address, &first) && look(address + bytes - 1, &last) && !first.type &&
           !last.type && !first.managed && !last.managed;
}

static int is_inside(const place *p, uint64_t address, size_t bytes) {
    return p->type == DEVICE && !p->managed && p->size >= bytes && address - p->start <= p->size - bytes;
}

static int class_of(size_t bytes) {
    int class = 63 - __builtin_clzll(bytes) - FIRST_CLASS;
    return class < LARGE_CLASS ? class : LARGE_CLASS;
}

/* Whether three pages of it that lie apart are not there yet. */
static int is_fresh(uint64_t at, size_t bytes) {
    unsigned char there = 0;
    for (uint64_t i = 1; i < 4 && !(there & 1); i++)
        if (mincore((void *)((at + bytes / 4 * i) & ~(uint64_t)4095), 4096, &there)) return 0;
    return !(there & 1);
}

/* The events for this copy where it can be staged, else NULL. A large one waits for its slots, some milliseconds: where
 * parts went as they are meanwhile, one behind the other, an H100 had no slots before 4 GiB were over, and more. */
static const staging_events *events_for(const place *p, void *stream, size_t bytes) {
    void *current = NULL, *of_stream = NULL;
    uint64_t id = 0;
    int ordinal = -1, capturing = 0;
    if (kvp_driver.cuCtxGetCurrent(&current) || !current) return NULL;
    if (kvp_driver.cuStreamIsCapturing(stream, &capturing) || capturing) return NULL;
    if (kvp_driver.cuStreamGetCtx(stream, &of_stream) || of_stream != current) return NULL;
    if (kvp_driver.cuCtxGetDevice(&ordinal) || ordinal != p->ordinal || kvp_driver.cuCtxGetId(current, &id))
        return NULL;
    const staging_events *events = events_of(id);
    if (events) return events;
    ask_for_slots(current);
    if (bytes < LARGE) return NULL;
    uint64_t until = kvp_clock() + (bytes < MOST_SETTING_NS ? bytes : MOST_SETTING_NS); /* at 1 GB/s */
    while (atomic_load(&cure.setting) && kvp_clock() < until) usleep(200);
    return events_of(id);
}

static void tell(enum kvp_verdict verdict, const kvp_account *account, int to_device, int class) {
    static const char *const what[] = {[KVP_KEEP] = "keep", [KVP_REFUSE] = "refuse", [KVP_TAKE_BACK] = "rollback"};
    if (verdict == KVP_NOTHING_NEW) return;
    int kept = verdict == KVP_KEEP;
    double from_kib = (double)(1ull << (FIRST_CLASS + class)) / 1024;
    char sizes[80];
    if (class < LARGE_CLASS)
        snprintf(sizes, sizeof sizes, "from %.0f KiB, below %.0f", from_kib, 2 * from_kib);
    else
        snprintf(sizes, sizeof sizes, "from %u MiB%s", LARGE >> 20,
                 class == FRESH_CLASS ? " into memory that has no pages yet" : "");
    kvp_decision(folder, what[verdict], kept ? "as it is" : "staged", kept ? "staged" : "as it is",
                 kvp_account_gain(account), "pageable %s %s: %.1f GB/s without staging, %.1f GB/s staged",
                 to_device ? "loads" : "stores", sizes, 1 / kvp_account_cost(account, KVP_AS_IT_IS),
                 1 / kvp_account_cost(account, KVP_CURED));
}

/* A call costs what it takes until the device has it all: a load may return before. */
static void add(kvp_account *account, enum kvp_way way, uint64_t ns, size_t bytes) {
    ptrdiff_t at = account - &cure.accounts[0][0];
    enum kvp_verdict verdict = kvp_account_add(account, way, (double)ns / (double)bytes);
    tell(verdict, account, at < CLASSES, (int)(at % CLASSES));
}

/* Until what is in the stream now is over, whatever others put behind it, and no longer than `most_ns`: the copy itself
 * has returned, and the stream may share its channel with one that waits for its caller. The holder of `busy` alone. */
static int wait_here(const staging_events *events, void *stream, uint64_t most_ns) {
    uint64_t until = kvp_clock() + most_ns;
    int error = kvp_driver.cuEventRecord(events->probe, stream);
    if (error) return error;
    while ((error = kvp_driver.cuEventQuery(events->probe)) == STAGING_NOT_READY && kvp_clock() < until)
        kvp_staging_pause();
    return error;
}

/* 1: nothing is in front of a load any more. 0: it is to go as it is, *watched says whether somebody looks at it. */
static int nothing_in_front(kvp_watched *watched, int class, const staging_events *events, void *stream) {
    int state = kvp_driver.cuStreamQuery(stream);
    if (state != STAGING_NOT_READY) return !state; /* an error is the program's own call's to find */
    uint64_t until = kvp_clock() + STAGING_MOST_WAIT_NS;
    if (!cure.behind[class].early && cure.behind[class].waited >= WATCHED_BEHIND)
        while ((state = kvp_driver.cuStreamQuery(stream)) == STAGING_NOT_READY && kvp_clock() < until)
            kvp_staging_pause();
    if (state != STAGING_NOT_READY) return !state;
    atomic_fetch_add(&cure.behind_work, 1);
    if (!cure.behind[class].early && !kvp_driver.cuEventRecord(events->probe, stream))
        *watched = (kvp_watched){&cure.accounts[0][class], events, stream, 1, 0, 0};
    return 0;
}

/* One that lost its processor at the end of the copy before may be about for a while. */
static int helpers_have_left(uint64_t most_ns) {
    uint64_t until = kvp_clock() + most_ns;
    while (!kvp_staging_is_free())
        if (kvp_clock() > until)
            return atomic_fetch_add(&cure.beside_another, 1), 0;
        else
            sched_yield();
    return 1;
}

static int stage(kvp_account *account, const staging_events *events, uint64_t dst, uint64_t src, size_t bytes, int load,
                 void *stream, int to_end) {
    uint64_t start = kvp_clock();
    int ask = kvp_account_asks(account, KVP_CURED);
    int error =
        kvp_staged_copy(events, load, load ? dst : src, (uint8_t *)(uintptr_t)(load ? src : dst), bytes, stream, 0);
    if (error == STAGING_NOT_READY) {
        if (++cure.given_up == GIVE_UPS) refuse("the device took nothing for 100 ms, three times", bytes, 0);
        return 0;
    }
    if (!error && load && (to_end || ask)) error = wait_here(events, stream, to_end ? TO_END_NS : REST_NS);
    if (error && error != STAGING_NOT_READY) {
        refuse("a staged copy failed", bytes, error);
        return 0;
    }
    if (ask)
        add(account, KVP_CURED, kvp_clock() - start, bytes);
    else
        kvp_account_pass(account);
    cure.given_up = 0;
    cure.copies[!load]++;
    cure.bytes[!load] += bytes;
    for (int way = 0; way < 2; way++) cure.ns[!load][way] += kvp_account_cost(account, way) * (double)bytes;
    return 1;
}

/* ---- one large copy -------------------------------------------------------------------------------------------- */

/* A program may copy its gigabytes once: so both ways take turns within the first copy, part by part, and the rest goes
 * the better one. Parts that go as they are have the driver copy the program's own memory. */
typedef struct {
    kvp_account *account;
    const staging_events *events;
    uint64_t device;
    uint8_t *host;
    size_t bytes;
    void *stream;
    int load, to_end, fresh;
} large_copy;

/* While it is tried, memory without pages goes as it is first: what is asked of the kernel for the other parts holds up
 * to the memory's end, and is not asked for twice. */
static enum kvp_way way_of_part(const large_copy *c, size_t at, int asked) {
    const kvp_account *a = c->account;
    if (asked) return a->state == KVP_LEFT ? KVP_AS_IT_IS : KVP_CURED;
    if (c->fresh && a->state == KVP_TRYING) return a->count[KVP_AS_IT_IS] < KVP_SAMPLES ? KVP_AS_IT_IS : KVP_CURED;
    return a->state == KVP_KEPT && at ? KVP_CURED : kvp_account_way(a);
}

/* The pages that the copy touches, whole: nothing else of the program's is asked for. */
static void ask_for_huge_pages(uint8_t *host, size_t bytes) {
    uintptr_t from = (uintptr_t)host & ~(uintptr_t)4095, to = ((uintptr_t)host + bytes + 4095) & ~(uintptr_t)4095;
    if (cure.huge_if_asked) madvise((void *)from, to - from, MADV_HUGEPAGE);
}

static int as_it_is(const large_copy *c, size_t at, size_t bytes) {
    return c->load ? kvp_driver.cuMemcpyHtoDAsync_v2(c->device + at, c->host + at, bytes, c->stream)
                   : kvp_driver.cuMemcpyDtoHAsync_v2(c->host + at, c->device + at, bytes, c->stream);
}

/* What the device did not take in time, and what helpers cannot move because one of them is still about: all that is
 * left goes as it is. Bytes, or 0: the program's own call makes all of it, and finds the error. */
static size_t rest_as_it_is(const large_copy *c, size_t at) {
    return as_it_is(c, at, c->bytes - at) ? 0 : c->bytes - at;
}

/* One part from `at` on; as rest_as_it_is. */
static size_t part_of(const large_copy *c, size_t at, enum kvp_way way) {
    kvp_account *account = c->account;
    size_t left = c->bytes - at, most = account->state == KVP_KEPT ? MOST_PART : PART, least = PART;
    if (way == KVP_AS_IT_IS) most = least = PART_AS_IT_IS;
    size_t bytes = left < most + least ? left : most;
    uint64_t since = kvp_clock();
    int ask = kvp_account_asks(account, way);
    int error = way == KVP_AS_IT_IS ? as_it_is(c, at, bytes)
                                    : kvp_staged_copy(c->events, c->load, c->device + at, c->host + at, bytes,
                                                      c->stream, STAGING_LARGE | (c->fresh ? STAGING_FRESH : 0));
    if (way == KVP_CURED && error == STAGING_NOT_READY) {
        if (++cure.given_up == GIVE_UPS) refuse("the device took nothing for 100 ms, three times", bytes, 0);
        return rest_as_it_is(c, at);
    }
    if (!error && c->load && ask) error = wait_here(c->events, c->stream, REST_NS);
    if (error && error != STAGING_NOT_READY) {
        if (way == KVP_CURED) refuse("a staged copy failed", bytes, error);
        return 0;
    }
    if (ask)
        add(account, way, kvp_clock() - since, bytes);
    else
        kvp_account_pass(account);
    if (way == KVP_AS_IT_IS) return bytes;
    cure.given_up = 0;
    cure.bytes[!c->load] += bytes;
    for (int i = 0; i < 2; i++) cure.ns[!c->load][i] += kvp_account_cost(account, i) * (double)bytes;
    return bytes;
}

static int in_parts(const large_copy *c) {
    int asked = 0, staged = 0;
    for (size_t at = 0, bytes; at < c->bytes; at += bytes) {
        enum kvp_way way = way_of_part(c, at, asked);
        if (way == KVP_CURED && c->fresh && !asked++) ask_for_huge_pages(c->host + at, c->bytes - at);
        int rest = c->account->state == KVP_LEFT || (way == KVP_CURED && !helpers_have_left(PART_NS));
        if (!kvp_watch.cures || !(bytes = rest ? rest_as_it_is(c, at) : part_of(c, at, way))) return 0;
        staged |= !rest && way == KVP_CURED;
    }
    int error = c->load && c->to_end ? wait_here(c->events, c->stream, TO_END_NS) : 0;
    cure.copies[!c->load] += (unsigned)staged;
    return !error || error == STAGING_NOT_READY;
}

static int try_copy(kvp_watched *watched, uint64_t dst, uint64_t src, size_t bytes, int kind, void *stream,
                    int to_end) {
    int class = class_of(bytes), no = 0, load = kind != TO_HOST;
    place p;
    if (kind == UNKNOWN_KIND) {
        if (!look(dst, &p)) return 0;
        load = p.type == DEVICE;
    }
    int fresh = !load && class == LARGE_CLASS && is_fresh(dst, bytes);
    if (fresh) class = FRESH_CLASS;
    kvp_account *account = &cure.accounts[!load][class];
    uint64_t device = load ? dst : src;
    if (account->state == KVP_LEFT) {
        if (!atomic_compare_exchange_strong(&cure.busy, &no, 1)) return 0;
        if (account->state == KVP_LEFT) kvp_account_rest(account);
        atomic_store(&cure.busy, 0);
        return 0;
    }
    if (!look(device, &p) || !is_inside(&p, device, bytes) || !is_pageable(load ? src : dst, bytes)) return 0;
    const staging_events *events = events_for(&p, stream, bytes);
    if (!events) return 0;
    /* a store's own call would wait for its stream, too; an error is that call's to find */
    if (!load && kvp_driver.cuStreamSynchronize(stream)) return 0;
    if (!atomic_compare_exchange_strong(&cure.busy, &no, 1)) {
        atomic_fetch_add(&cure.beside_another, 1);
        return 0;
    }
    int made = 0;
    if (kvp_watch.cures && (!load || nothing_in_front(watched, class, events, stream)) &&
        (class >= LARGE_CLASS || helpers_have_left(200000))) {
        if (class >= LARGE_CLASS)
            made = in_parts(&(large_copy){account, events, device, (uint8_t *)(uintptr_t)(load ? src : dst), bytes,
                                          stream, load, to_end, fresh});
        else if (kvp_account_way(account) == KVP_CURED)
            made = stage(account, events, dst, src, bytes, load, stream, to_end);
        else if (account->state != KVP_LEFT)
            *watched = (kvp_watched){account, events, stream, 0, kvp_clock(), bytes};
    }
    if (!watched->account) atomic_store(&cure.busy, 0);
    return made;
}

/* 1: an earlier copy showed so, and the driver need not be asked. */
static int needs_no_cure(uint64_t dst, uint64_t src, int kind) {
    if (kind != UNKNOWN_KIND) return kvp_known_memory(kind == TO_HOST ? dst : src) == KVP_MEM_PINNED;
    int to = kvp_known_memory(dst), from = kvp_known_memory(src);
    return to == KVP_MEM_PINNED || from == KVP_MEM_PINNED || (to == KVP_MEM_DEVICE && from == KVP_MEM_DEVICE);
}

int kvp_copy_cured(kvp_watched *watched, uint64_t dst, uint64_t src, size_t bytes, int kind, uint64_t stream,
                   int to_end) {
    if (atomic_load(&kvp_watch.captures) || (kind != TO_DEVICE && kind != TO_HOST && kind != UNKNOWN_KIND)) return 0;
    if (needs_no_cure(dst, src, kind)) return 0;
    int was = errno, made = 0, me = (int)getpid(), began = atomic_load(&cure.pid), mode = RELAXED;
    if (began != me) {
        int able = began ? -1 : open_driver(); /* began: in a child */
        if (able < 0) kvp_watch.cures = 0;
        if (able > 0) atomic_store(&cure.pid, me);
        errno = was;
        if (able <= 0) return 0;
    }
    if (!kvp_driver.cuThreadExchangeStreamCaptureMode(&mode)) {
        made = try_copy(watched, dst, src, bytes, kind, (void *)(uintptr_t)stream, to_end);
        kvp_driver.cuThreadExchangeStreamCaptureMode(&mode);
    }
    errno = was;
    return made;
}

void kvp_copy_made(kvp_watched *watched, int result) {
    int was = errno, mode = RELAXED, class = (int)(((kvp_account *)watched->account - &cure.accounts[0][0]) % CLASSES);
    const staging_events *events = watched->events;
    if (!result && !kvp_driver.cuThreadExchangeStreamCaptureMode(&mode)) {
        if (watched->behind_work) {
            if (kvp_driver.cuEventQuery(events->probe) == STAGING_NOT_READY)
                cure.behind[class].early = 1;
            else if (cure.behind[class].waited < WATCHED_BEHIND)
                cure.behind[class].waited++;
        } else {
            int error = wait_here(events, watched->stream, REST_NS);
            if (!error || error == STAGING_NOT_READY)
                add(watched->account, KVP_AS_IT_IS, kvp_clock() - watched->start_ns, watched->bytes);
        }
        kvp_driver.cuThreadExchangeStreamCaptureMode(&mode);
    }
    atomic_store(&cure.busy, 0);
    errno = was;
}
