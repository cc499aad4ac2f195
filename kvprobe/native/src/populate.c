/* Memory whose pages several threads make: one thread makes 3 to 4 GB a second, and a driver that pins what is not
 * there yet does it on one thread, with a lock held that every other thread of the process waits for. */
#define _GNU_SOURCE
#include "host_memory.h"
#include "kvp_signals.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif
enum { PREFERRED = 1 }; /* MPOL_PREFERRED */

typedef struct {
    uint8_t *memory;
    uint64_t bytes, chunk;
    int collapse; /* huge pages of shared memory are to be asked for one by one */
    const _Atomic int *stop;
    _Atomic uint64_t next;
    _Atomic int error;
} work;

/* The kernel makes huge pages of shared memory by itself only where shmem_enabled allows it, which it does nowhere by
 * default; asked like this it makes one of what holds a page. */
static int collapse(uint8_t *memory, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += KVP_HUGE_PAGE) *(volatile uint8_t *)(memory + at) = 0;
    return madvise(memory, bytes, MADV_COLLAPSE);
}

/* Whether a switch of the kernel stands at one of `words`. */
int kvp_huge_pages_stand_at(const char *name, const char *words) {
    char path[128], line[128] = "";
    snprintf(path, sizeof path, "/sys/kernel/mm/transparent_hugepage/%s", name);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    char *end, *word = fgets(line, sizeof line, file) ? strchr(line, '[') : NULL;
    fclose(file);
    if (!word || !(end = strchr(++word, ']'))) return 0;
    *end = 0;
    return strstr(words, word) != NULL;
}

static int touch(uint8_t *memory, uint64_t bytes) {
    if (!madvise(memory, bytes, MADV_POPULATE_WRITE)) return 0;
    if (errno != EINVAL) return errno == EFAULT ? ENOMEM : errno;
    for (uint64_t at = 0; at < bytes; at += 4096) *(volatile uint8_t *)(memory + at) = 0; /* an older kernel */
    return 0;
}

static void *populate(void *given) {
    work *w = given;
    for (;;) {
        uint64_t at = atomic_fetch_add(&w->next, w->chunk);
        if (at >= w->bytes) break;
        if (w->stop && atomic_load(w->stop)) atomic_store(&w->error, ECANCELED);
        if (atomic_load(&w->error)) break;
        uint64_t bytes = w->bytes - at < w->chunk ? w->bytes - at : w->chunk;
        int error = w->collapse && !collapse(w->memory + at, bytes) ? 0 : touch(w->memory + at, bytes);
        if (error) atomic_store(&w->error, error);
    }
    return NULL;
}

uint32_t kvp_processors(void) {
    cpu_set_t set;
    uint32_t cores = sched_getaffinity(0, sizeof set, &set) ? 1 : (uint32_t)CPU_COUNT(&set);
    unsigned long long quota, period;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (file) {
        if (fscanf(file, "%llu %llu", &quota, &period) == 2 && period && quota / period < cores)
            cores = (uint32_t)(quota / period);
        fclose(file);
    }
    return cores ? cores : 1;
}

static uint32_t threads_for(const kvp_populating *how, uint64_t chunks) {
    uint32_t threads = how->threads;
    if (!threads) {
        uint32_t cores = kvp_processors();
        threads = cores < 4 ? cores : 4;
    }
    if (threads > KVP_MOST_POPULATERS) threads = KVP_MOST_POPULATERS;
    return chunks < threads ? (uint32_t)chunks : threads;
}

static uint64_t rounded(uint64_t bytes) { return (bytes + KVP_HUGE_PAGE - 1) & ~(uint64_t)(KVP_HUGE_PAGE - 1); }

/* The kernel gives huge pages of shared memory only where address and offset begin at a border of them. */
static uint8_t *map_shared(uint64_t bytes) {
    int anonymous = MAP_ANONYMOUS | MAP_NORESERVE;
    uint8_t *at = mmap(NULL, bytes + KVP_HUGE_PAGE, PROT_NONE, MAP_PRIVATE | anonymous, -1, 0);
    if (at == MAP_FAILED) return NULL;
    uint64_t before = (KVP_HUGE_PAGE - (uintptr_t)at % KVP_HUGE_PAGE) % KVP_HUGE_PAGE;
    void *shared = mmap(at + before, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | anonymous, -1, 0);
    if (before) munmap(at, before);
    munmap(at + before + bytes, KVP_HUGE_PAGE - before);
    if (shared == MAP_FAILED) return munmap(at + before, bytes), NULL;
    madvise(shared, bytes, MADV_DONTDUMP); /* nor is what the driver makes */
    return shared;
}

/* At a border of huge pages, or the kernel gives none for the first and the last of them. */
static uint8_t *map(uint64_t bytes) {
    uint8_t *at = mmap(NULL, bytes + KVP_HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return NULL;
    uint64_t before = (KVP_HUGE_PAGE - (uintptr_t)at % KVP_HUGE_PAGE) % KVP_HUGE_PAGE;
    if (before) munmap(at, before);
    munmap(at + before + bytes, KVP_HUGE_PAGE - before);
    return at + before;
}

/* Of shared memory. 0, or the error where nothing but huge pages will do, and there are none. */
static int look_for_huge_pages(work *w, const kvp_populating *how) {
    if (how->pages == KVP_PAGES_SMALL) return 0;
    if (kvp_huge_pages_stand_at("shmem_enabled", "always within_size advise force")) return 0;
    w->collapse = !kvp_huge_pages_stand_at("enabled", "never") && !collapse(w->memory, KVP_HUGE_PAGE);
    return w->collapse || how->pages != KVP_PAGES_HUGE ? 0 : EOPNOTSUPP;
}

void *kvp_populate(uint64_t bytes, const kvp_populating *how) {
    uint64_t whole = rounded(bytes), chunk = how->chunk_bytes ? rounded(how->chunk_bytes) : 64u << 20;
    if (whole < bytes || whole + KVP_HUGE_PAGE < whole) return errno = ENOMEM, NULL;
    int shared = how->fork == KVP_FORK_SHARED;
    work w = {.memory = (shared ? map_shared : map)(whole), .bytes = whole, .chunk = chunk, .stop = how->stop};
    if (!w.memory) return NULL;
    /* each of these is a request: without it the memory is as good */
    if (how->pages != KVP_PAGES_SMALL) madvise(w.memory, whole, MADV_HUGEPAGE);
    if (how->node >= 0 && how->node < 64) {
        uint64_t nodes = (uint64_t)1 << how->node;
        syscall(SYS_mbind, w.memory, whole, PREFERRED, &nodes, 64 + 1, 0);
    }
    int error = how->fork == KVP_FORK_NONE && madvise(w.memory, whole, MADV_DONTFORK) ? errno : 0;
    if (shared) error = look_for_huge_pages(&w, how);
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
