/* Memory whose pages several threads make: one thread makes 3 to 4 GB a second, and a driver that pins what is not
 * there yet does it on one thread, with a lock held that every other thread of the process waits for. */
#define _GNU_SOURCE
#include "host_memory.h"
#include "kvp_signals.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
enum { PREFERRED = 1 }; /* MPOL_PREFERRED */

typedef struct {
    uint8_t *memory;
    uint64_t bytes, chunk;
    _Atomic uint64_t next;
    _Atomic int error;
} work;

static int touch(uint8_t *memory, uint64_t bytes) {
    if (!madvise(memory, bytes, MADV_POPULATE_WRITE)) return 0;
    if (errno != EINVAL) return errno == EFAULT ? ENOMEM : errno;
    for (uint64_t at = 0; at < bytes; at += 4096) *(volatile uint8_t *)(memory + at) = 0; /* an older kernel */
    return 0;
}

static void *populate(void *given) {
    work *w = given;
    while (!atomic_load(&w->error)) {
        uint64_t at = atomic_fetch_add(&w->next, w->chunk);
        if (at >= w->bytes) break;
        uint64_t bytes = w->bytes - at < w->chunk ? w->bytes - at : w->chunk;
        int error = touch(w->memory + at, bytes);
        if (error) atomic_store(&w->error, error);
    }
    return NULL;
}

static uint32_t threads_for(const kvp_populating *how, uint64_t chunks) {
    cpu_set_t set;
    uint32_t threads = how->threads, cores = 1;
    if (!threads) {
        if (!sched_getaffinity(0, sizeof set, &set)) cores = (uint32_t)CPU_COUNT(&set);
        threads = cores < 4 ? cores : 4;
    }
    if (threads > KVP_MOST_POPULATERS) threads = KVP_MOST_POPULATERS;
    return chunks < threads ? (uint32_t)chunks : threads;
}

static uint64_t rounded(uint64_t bytes) { return (bytes + KVP_HUGE_PAGE - 1) & ~(uint64_t)(KVP_HUGE_PAGE - 1); }

/* At a border of huge pages, or the kernel gives none for the first and the last of them. */
static uint8_t *map(uint64_t bytes) {
    uint8_t *at = mmap(NULL, bytes + KVP_HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return NULL;
    uint64_t before = (KVP_HUGE_PAGE - (uintptr_t)at % KVP_HUGE_PAGE) % KVP_HUGE_PAGE;
    if (before) munmap(at, before);
    munmap(at + before + bytes, KVP_HUGE_PAGE - before);
    return at + before;
}

void *kvp_populate(uint64_t bytes, const kvp_populating *how) {
    uint64_t whole = rounded(bytes), chunk = how->chunk_bytes ? rounded(how->chunk_bytes) : 64u << 20;
    if (whole < bytes || whole + KVP_HUGE_PAGE < whole) return errno = ENOMEM, NULL;
    work w = {.memory = map(whole), .bytes = whole, .chunk = chunk};
    if (!w.memory) return NULL;
    /* each of these is a request: without it the memory is as good */
    if (!how->small_pages) madvise(w.memory, whole, MADV_HUGEPAGE);
    if (how->node >= 0 && how->node < 64) {
        uint64_t nodes = (uint64_t)1 << how->node;
        syscall(SYS_mbind, w.memory, whole, PREFERRED, &nodes, 64 + 1, 0);
    }
    int error = how->private && madvise(w.memory, whole, MADV_DONTFORK) ? errno : 0;
    pthread_t threads[KVP_MOST_POPULATERS];
    uint32_t wanted = threads_for(how, (whole + chunk - 1) / chunk), made = 0;
    sigset_t were;
    kvp_block_signals(&were);
    while (!error && made + 1 < wanted && !pthread_create(&threads[made], NULL, populate, &w)) made++;
    pthread_sigmask(SIG_SETMASK, &were, NULL);
    if (!error) populate(&w);
    while (made) pthread_join(threads[--made], NULL);
    if (!error) error = atomic_load(&w.error);
    if (!error) return w.memory;
    munmap(w.memory, whole);
    errno = error;
    return NULL;
}

void kvp_unpopulate(void *memory, uint64_t bytes) { munmap(memory, rounded(bytes)); }
