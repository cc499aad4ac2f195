/* Calibration: how many copies a held-back stream takes before one blocks, and what a submission costs until then. */
#define _GNU_SOURCE
#include "kvp_engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    atomic_int open;        /* the gate's function may return */
    atomic_int held;        /* the gate's function runs: nothing drains any more */
    atomic_ullong progress; /* submissions that returned */
    atomic_int done;
    uint64_t stall_ns;
    uint64_t stalled_at; /* progress when the watcher opened the gate; UINT64_MAX = it did not */
    clockid_t cpu_clock; /* of the submitting thread */
    int tid;
} gate;

static void nap(uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    nanosleep(&t, NULL);
}

/* Runs on a thread of the CUDA runtime, in stream order; touches nothing but the gate. */
static void wait_at_gate(void *argument) {
    gate *g = argument;
    atomic_store(&g->held, 1);
    while (!atomic_load(&g->open)) nap(50000);
}

static uint64_t cpu_ns(const gate *g) {
    struct timespec t;
    if (clock_gettime(g->cpu_clock, &t)) return 0;
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Whether the submitting thread waits for something else than a CPU; yes, where the kernel does not say. */
static int sleeps(const gate *g) {
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", g->tid);
    FILE *file = fopen(path, "re");
    if (!file) return 1;
    char *end = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return !end || end[2] == 'S';
}

/* A blocked submission sleeps (the host runtime) or uses its CPU (CUDA); one that has lost its CPU does neither. */
static void *watch(void *argument) {
    gate *g = argument;
    uint64_t last = 0, since = kvp_now_ns(), began = since, cpu_since = cpu_ns(g);
    while (!atomic_load(&g->done)) {
        nap(200000);
        uint64_t now = kvp_now_ns(), seen = atomic_load(&g->progress);
        if (seen != last) last = seen, since = now, cpu_since = cpu_ns(g);
        int stalled = seen && now - since >= g->stall_ns && (cpu_ns(g) - cpu_since >= g->stall_ns || sleeps(g));
        /* 5 s: a runtime on which nothing moves at all must not hang the caller */
        if (stalled || now - began > 5000000000u) {
            g->stalled_at = seen;
            atomic_store(&g->open, 1);
            return NULL;
        }
    }
    return NULL;
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

int kvp_calibrate(const kvp_calibrate_calls *calls, size_t streams, void *const *stream, void *event, void *dst,
                  const void *src, size_t bytes, int kind, uint64_t limit, uint64_t stall_ns, kvp_calibration *out) {
    memset(out, 0, sizeof *out);
    uint32_t *took = malloc(limit * sizeof *took);
    if (!took) return out->result = cudaErrorMemoryAllocation;
    gate g = {.stall_ns = stall_ns, .stalled_at = UINT64_MAX, .tid = (int)syscall(SYS_gettid)};
    pthread_getcpuclockid(pthread_self(), &g.cpu_clock);
    int result = calls->launch_host_func(stream[0], wait_at_gate, &g);
    if (!result && streams > 1) {
        result = calls->event_record(event, stream[0]);
        for (size_t s = 1; s < streams && !result; s++) result = calls->stream_wait_event(stream[s], event, 0);
    }
    pthread_t watcher;
    int watching = !result && !pthread_create(&watcher, NULL, watch, &g);
    uint64_t i = 0;
    if (watching) {
        for (uint64_t waited = 0; !atomic_load(&g.held) && waited < 1000000000u; waited += 50000) nap(50000);
        for (; i < limit && !result; i++) {
            uint64_t begin = kvp_now_ns();
            result = calls->copy(dst, src, bytes, kind, stream[i % streams]);
            uint64_t ns = kvp_now_ns() - begin;
            if (atomic_load(&g.open)) break; /* this call was the blocked one */
            took[i] = ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
            atomic_store(&g.progress, i + 1);
        }
    }
    atomic_store(&g.done, 1);
    atomic_store(&g.open, 1);
    if (watching) pthread_join(watcher, NULL);
    for (size_t s = 0; s < streams; s++) {
        int synced = calls->stream_synchronize(stream[s]);
        if (!result) result = synced;
    }
    out->accepted = g.stalled_at == UINT64_MAX ? i : g.stalled_at;
    out->blocked = g.stalled_at != UINT64_MAX;
    if (i) {
        qsort(took, i, sizeof *took, ascending);
        out->median_ns = took[i / 2];
        out->p99_ns = took[i - 1 - i / 100];
    }
    free(took);
    return out->result = result;
}
