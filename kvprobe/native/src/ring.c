/* The ring file's writer: sections, totals, histograms, detail, in memory that outlives the process.
 *
 * Hazards this file is built around:
 *  - a page of a mapped file that has no disk block behind it raises SIGBUS when the disk is full: every piece of a
 *    section is allocated before it is touched, and what cannot be allocated is counted in over_* or shortens the ring;
 *  - a program may close all descriptors, change its folder, or fork without telling anyone: no descriptor is kept, the
 *    path is absolute, and a page that the kernel wipes on fork tells a child that the file is not its own;
 *  - a signal handler may call in the middle of a write: `busy` sends it to over_*;
 *  - growing past RLIMIT_FSIZE raises SIGXFSZ: the limit is asked first;
 *  - the next file takes the addresses of the one before: it is opened when no thread is at work in that one any more;
 *  - a program that has put itself under seccomp may die of any system call: kvp_ring_seal ends all growing. */
#include "ring_write.h"
#include "secrets.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SECTIONS_LIMIT 1024
#define SLOTS_LIMIT 256
#define FIRST_SLOTS 16
#define FIRST_RECORDS 256
#define FIRST_SLOW 64
#define MORE_RECORDS 4096 /* at most, at once: the thread waits for its 256 KiB of pages */

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
/* Words that a thread may still look at after its section has become another's. */
#define get(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define set(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELEASE)

_Static_assert(sizeof(kvp_record) == 64, "kvp_record");
_Static_assert(sizeof(kvp_slot) == 1152, "kvp_slot");
_Static_assert(sizeof(kvp_file_header) <= KVP_HEADER_BYTES, "kvp_file_header");
_Static_assert(sizeof(kvp_section_header) <= KVP_HEADER_BYTES, "kvp_section_header");
_Static_assert(offsetof(kvp_slot, count) % 16 == 0 && offsetof(kvp_slot, bytes) == offsetof(kvp_slot, count) + 8,
               "count and bytes are one store");

typedef uint64_t u64_of_chars __attribute__((may_alias));

static struct {
    kvp_file_header *header;
    uint32_t epoch; /* of the newest file */
    uint32_t pid;   /* that opened it: the file's own copy may have been given back */
    uint32_t sections_max, slot_count;
    uint64_t ring_capacity, slow_capacity, section_bytes;
    volatile uint32_t sections_reserved, sections_free;
    volatile uint8_t free_section[SECTIONS_LIMIT]; /* 1 = made, and its owner has gone */
    struct section sections[SECTIONS_LIMIT];
    void *header_memory; /* as section.memory; of KVP_HEADER_BYTES */
    int sealed;          /* no system call any more */
    int shared;          /* the file is that of all processes that got no space */
    char path[4096];
} ring __attribute__((aligned(64)));

static struct kvp_alive not_alive; /* what kvp_process.alive points to before the first open */
static volatile int opening;
static pthread_key_t exit_key;
/* A signal handler's call comes while this thread makes its section. */
static __thread int attaching __attribute__((tls_model("initial-exec")));
static int prepared; /* exit_key, fork handlers and the wiped page exist */

/* ---- disk space --------------------------------------------------------------------------------------------- */

static int allocate(int fd, uint64_t offset, uint64_t bytes) {
    struct rlimit limit;
    if (!getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur != RLIM_INFINITY && offset + bytes > limit.rlim_cur)
        return EFBIG;
    int error, tries = 16;
    do error = posix_fallocate(fd, (off_t)offset, (off_t)bytes);
    while (error == EINTR && --tries);
    return error;
}

static uint64_t section_offset(uint32_t number) { return KVP_HEADER_BYTES + (uint64_t)number * ring.section_bytes; }

/* Gives [address, address + bytes) of a section disk space and, where the kernel can, present pages. */
static int grow(const struct section *section, const void *address, uint64_t bytes) {
    if (ring.sealed) return EPERM;
    int fd = open(ring.path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return errno;
    uint64_t inside = (uint64_t)((const char *)address - (const char *)section->header);
    int error = allocate(fd, section_offset(section->number) + inside, bytes);
    close(fd);
#ifdef MADV_POPULATE_WRITE
    if (!error) { /* one call now instead of a page fault inside every 64th record */
        uintptr_t from = (uintptr_t)address & ~(uintptr_t)4095;
        madvise((void *)from, (uintptr_t)address + bytes - from, MADV_POPULATE_WRITE);
    }
#endif
    return error;
}

/* ---- mappings ----------------------------------------------------------------------------------------------- */

/* Memory of the process instead of the file's: a late writer finds somewhere to write, and the file can go. */
static void let_go(void *memory, uint64_t bytes) {
    if (memory)
        mmap(memory, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/* Maps a piece of the file where an earlier file's piece was, if that was as large: files that are opened and closed
 * one after another take no more addresses than one. */
static int map(int fd, uint64_t at, uint64_t bytes, void **memory, uint64_t *mapped) {
    int again = *memory && *mapped >= bytes;
    void *found = mmap(again ? *memory : NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (again ? MAP_FIXED : 0), fd,
                       (off_t)at);
    int error = errno;
    if (!again || found == MAP_FAILED) let_go(*memory, *mapped);
    if (found == MAP_FAILED) return error;
    *memory = found;
    if (!again) *mapped = bytes;
    return 0;
}

/* ---- sections -------------------------------------------------------------------------------------------------- */

static int map_section(struct section *section, uint32_t number) {
    int fd = open(ring.path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return errno;
    uint64_t at = section_offset(number);
    /* the last block too: it sets the file's size, and never shrinks it as ftruncate could when two threads race */
    int error = allocate(fd, at, KVP_HEADER_BYTES + FIRST_SLOTS * sizeof(kvp_slot));
    if (!error) error = allocate(fd, at + ring.section_bytes - 64, 64);
    void *memory = section->memory;
    uint64_t mapped = section->mapped;
    if (!error) error = map(fd, at, ring.section_bytes, &memory, &mapped);
    close(fd);
    if (error) return error;
    memset(&section->last, 0, sizeof *section - offsetof(struct section, last));
    section->memory = memory;
    section->mapped = mapped;
    section->number = number;
    section->slots_ready = FIRST_SLOTS < ring.slot_count ? FIRST_SLOTS : ring.slot_count;
    section->slots = (kvp_slot *)((char *)memory + KVP_HEADER_BYTES);
    section->ring = section->next = section->ready = (kvp_record *)(section->slots + ring.slot_count);
    section->slow = section->ring + ring.ring_capacity;
    section->last = section->slots; /* no call's yet */
    section->counter = section->slots->histogram;
    set(section->header, memory);
    int small = number >= KVP_LARGE_SECTIONS && ring.ring_capacity > KVP_SMALL_RECORDS;
    section->header->ring_records = small ? KVP_SMALL_RECORDS : ring.ring_capacity;
    section->header->slow_records = ring.slow_capacity;
    uint32_t used;
    used = __atomic_load_n(&ring.header->sections_used, __ATOMIC_RELAXED);
    while (used <= number && !__atomic_compare_exchange_n(&ring.header->sections_used, &used, number + 1, 0,
                                                          __ATOMIC_RELEASE, __ATOMIC_RELAXED));
    set(section->epoch, kvp_ring_epoch());
    return 0;
}

static struct section *take_section(void) {
    if (__atomic_load_n(&ring.sections_free, __ATOMIC_RELAXED))
        for (uint32_t i = 0; i < ring.sections_max; i++)
            if (__atomic_load_n(&ring.free_section[i], __ATOMIC_RELAXED) &&
                __atomic_exchange_n(&ring.free_section[i], 0, __ATOMIC_ACQUIRE)) {
                __atomic_fetch_sub(&ring.sections_free, 1, __ATOMIC_RELAXED);
                return &ring.sections[i];
            }
    if (__atomic_load_n(&ring.sections_reserved, __ATOMIC_RELAXED) >= ring.sections_max) return NULL;
    uint32_t number = __atomic_fetch_add(&ring.sections_reserved, 1, __ATOMIC_RELAXED);
    if (number >= ring.sections_max) return NULL;
    if (!map_section(&ring.sections[number], number)) return &ring.sections[number];
    /* the disk is full or the path has gone: do not ask again at every call */
    __atomic_store_n(&ring.sections_reserved, ring.sections_max, __ATOMIC_RELAXED);
    return NULL;
}

/* Between these two no file is opened. Of the signal handlers that come in between only a fork's child must not count
 * down what it has not counted. */
static void begin_attaching(void) {
    attaching = 1;
    __atomic_fetch_add(&kvp_process.alive->attaching, 1, __ATOMIC_SEQ_CST);
}

static void end_attaching(void) {
    if (attaching) __atomic_fetch_sub(&kvp_process.alive->attaching, 1, __ATOMIC_RELEASE);
    attaching = 0;
}

static void append_several(struct section *section, kvp_section_header *header);

/* At thread exit: another thread may have the section. */
static void leave_section(void *unused) {
    (void)unused;
    struct section *section = kvp_thread.section;
    kvp_thread.section = NULL;
    if (!section || kvp_thread.epoch != kvp_ring_epoch()) return;
    begin_attaching();
    if (kvp_thread.epoch == kvp_ring_epoch()) {
        if (section->several.count) append_several(section, section->header);
        set(section->header->in_call, 0);
        set(section->header->busy, 0);
        set(section->header->tid, 0);
        __atomic_store_n(&ring.free_section[section->number], 1, __ATOMIC_RELEASE);
        __atomic_fetch_add(&ring.sections_free, 1, __ATOMIC_RELAXED);
    }
    end_attaching();
}

static ssize_t read_proc(const char *path, char *text, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, text, size - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return got;
}

/* What the kernel has counted of this thread: the observer's first look may come a second later. */
static void note_begin(kvp_section_header *header) {
    char text[64], *waited, *end;
    if (read_proc("/proc/thread-self/schedstat", text, sizeof text) <= 0) return;
    header->begun_ran_ns = strtoull(text, &waited, 10);
    header->begun_waited_ns = strtoull(waited, &end, 10);
    if (end > waited) set(header->begun_ns, kvp_now_ns());
}

/* This thread's section, made or taken over now. NULL: none to be had, or the ring is not open. */
struct section *kvp_ring_attach(void) {
    uint32_t epoch = kvp_ring_epoch();
    if (!epoch) {
        if (get(ring.header) && get(ring.pid) != (uint32_t)getpid()) kvp_ring_after_fork();
        return NULL;
    }
    if (attaching || ring.sealed) return NULL;
    int was = errno;
    begin_attaching();
    struct section *section = kvp_ring_epoch() == epoch ? take_section() : NULL;
    if (section) {
        kvp_section_header *header = section->header;
        set(header->busy, 0);
        set(header->in_call, 0);
        prctl(PR_GET_NAME, header->name, 0, 0, 0);
        set(header->begun_ns, 0);
        if (!header->owners++) note_begin(header);
        set(header->tid, (uint32_t)syscall(SYS_gettid));
        kvp_thread.epoch = epoch;
        kvp_thread.section = section;
        pthread_setspecific(exit_key, section);
    }
    end_attaching();
    errno = was;
    return section;
}

/* ---- slots -------------------------------------------------------------------------------------------------- */

kvp_slot *kvp_ring_find_slot(struct section *section, uint64_t stream, uint16_t key) {
    uint32_t at = (uint32_t)((stream ^ (uint64_t)key << 48) * 0x9E3779B97F4A7C15u >> 55); /* 9 bits: KVP_RING_INDEX */
    for (; section->index[at]; at = (at + 1) % KVP_RING_INDEX) {
        kvp_slot *slot = &section->slots[section->index[at] - 1];
        if (slot->stream == stream && (slot->call | slot->direction << 8) == key) return section->last = slot;
    }
    uint32_t number = section->header->slots_used;
    if (number >= section->slots_ready) {
        if (number >= ring.slot_count) return NULL;
        uint32_t more = number < ring.slot_count - number ? number : ring.slot_count - number;
        int was = errno, error = grow(section, &section->slots[number], more * sizeof(kvp_slot));
        errno = was;
        if (error) return NULL;
        section->slots_ready += more;
    }
    kvp_slot *slot = &section->slots[number];
    slot->stream = stream;
    slot->direction = (uint8_t)(key >> 8);
    __atomic_store_n(&slot->call, (uint8_t)key, __ATOMIC_RELEASE);
    __atomic_store_n(&section->header->slots_used, number + 1, __ATOMIC_RELEASE);
    section->index[at] = (uint16_t)(number + 1);
    return section->last = slot;
}

void kvp_ring_over(kvp_record r) {
    kvp_file_header *header = get(ring.header);
    if (!header || !kvp_ring_epoch()) return;
    unsigned call = r.call < 128 ? r.call : 0;
    __atomic_fetch_add(&header->over_count[call], 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&header->over_bytes[call], r.bytes, __ATOMIC_RELAXED);
    if (r.dur_ns != KVP_UNTIMED) __atomic_fetch_add(&header->over_dur_ns[call], r.dur_ns, __ATOMIC_RELAXED);
}

/* ---- detail ------------------------------------------------------------------------------------------------- */

/* More space for a ring that has filled what it has; where there is none, the ring stays this long. */
static void grow_ring(struct section *section, kvp_record *records, uint64_t *ready, uint64_t first,
                      volatile uint64_t *capacity) {
    uint64_t more = !*ready ? first : *ready < MORE_RECORDS ? *ready : MORE_RECORDS;
    if (more > *capacity - *ready) more = *capacity - *ready;
    int was = errno;
    if (grow(section, records + *ready, more * sizeof(kvp_record)))
        *capacity = *ready;
    else
        *ready += more;
    errno = was;
}

void kvp_ring_grow(struct section *section) {
    volatile uint64_t *capacity = &section->header->ring_records;
    uint64_t ready = (uint64_t)(section->ready - section->ring);
    if (ready < *capacity) grow_ring(section, section->ring, &ready, FIRST_RECORDS, capacity);
    section->ready = section->ring + ready;
    if (section->next == section->ready) section->next = section->ring;
}

static inline int is_slow(const kvp_record *r) { return r->dur_ns != KVP_UNTIMED && r->dur_ns >= kvp_process.slow_ns; }
static inline int is_failed(const kvp_record *r) { return r->result && r->result != KVP_NOT_READY; }
static inline int is_file(unsigned call) {
    return (call >= KVP_CALL_pread && call <= KVP_CALL_io_submit) || call == KVP_CALL_fsync;
}

static void append_slow(struct section *section, const kvp_record *r) {
    kvp_section_header *header = section->header;
    if (section->slow_at >= section->slow_ready) {
        if (section->slow_ready < header->slow_records)
            grow_ring(section, section->slow, &section->slow_ready, FIRST_SLOW, &header->slow_records);
        if (section->slow_at >= section->slow_ready) section->slow_at = 0;
        if (!section->slow_ready) return;
    }
    kvp_ring_put(&section->slow[section->slow_at], r, r->dur_ns, kvp_ring_last(r, r->result, r->direction),
                 header->tid);
    section->slow_at += 1;
    set(header->slow_head, header->slow_head + 1);
}

#define PAUSE_NS 50000 /* between two calls of one record of several: in it they are taken to follow one another */

static __attribute__((noinline)) void append_several(struct section *section, kvp_section_header *header) {
    kvp_record several = section->several;
    section->several.count = 0;
    if (several.count == 1) { /* as it was */
        several.call &= (uint8_t)~KVP_SEVERAL;
        several.dur_ns = several.src;
        several.src = 0;
    }
    kvp_ring_append(section, header, &several, several.dur_ns,
                    kvp_ring_last(&several, several.result, several.direction));
}

/* What KVP_KEEP_SEVERAL does with a call that is not slow: sums it up, keeps it by itself, or counts it only. */
enum role { ROLE_COUNT = 0, ROLE_SUM, ROLE_KEEP };
#define ROLE_COPY ROLE_SUM
#define ROLE_MEMSET ROLE_SUM
#define ROLE_BATCH ROLE_KEEP
#define ROLE_GRAPH ROLE_KEEP
#define ROLE_SYNC ROLE_KEEP
#define ROLE_COPY_SYNC ROLE_COUNT
#define ROLE_LAUNCH ROLE_COUNT
#define ROLE_CREATE ROLE_COUNT
#define ROLE_ALLOC ROLE_COUNT
#define ROLE_FREE ROLE_COUNT
#define ROLE_EVENT ROLE_COUNT
#define ROLE_FILE ROLE_SUM
#define ROLE_TRANSFER ROLE_COUNT
#define ROLE_MARKS ROLE_KEEP
#define ROLE_NOTE ROLE_KEEP
static const uint8_t roles[256] = {
#define X(id, kind, name) [id] = ROLE_##kind,
    KVP_CALLS(X)
#undef X
};

static inline int waits_for_device(unsigned call) {
    return (call >= KVP_CALL_cudaStreamSynchronize && call <= KVP_CALL_cudaDeviceSynchronize) ||
           (call >= KVP_CALL_cuStreamSynchronize && call <= KVP_CALL_cuCtxSynchronize);
}

/* Takes a call in as KVP_KEEP_SEVERAL says. */
void kvp_ring_sum_up(struct section *section, const kvp_record *r) {
    kvp_section_header *header = section->header;
    int slow = is_slow(r);
    int waits = r->call == KVP_CALL_cudaStreamWaitEvent || (r->call < 128 && waits_for_device(r->call));
    enum role role = waits ? ROLE_KEEP : (enum role)roles[r->call];
    kvp_record *several = &section->several;
    if ((role == ROLE_COUNT && !slow) || r->dur_ns == KVP_UNTIMED) return;
    uint64_t ended = several->start_ns + several->dur_ns;
    int fits = role == ROLE_SUM && !slow && several->stream == r->stream && several->direction == r->direction &&
               several->call == (r->call | KVP_SEVERAL) && !r->result && !several->result &&
               r->start_ns < ended + PAUSE_NS;
    if (several->count && (!fits || several->count == KVP_SEVERAL_MOST)) append_several(section, header);
    if (role != ROLE_SUM || slow) {
        if (waits && !slow && section->waited) return; /* for nothing new */
        section->waited = waits;
        kvp_ring_append(section, header, r, r->dur_ns, kvp_ring_last(r, r->result, r->direction));
    } else if (several->count) {
        several->dur_ns = r->start_ns + r->dur_ns - several->start_ns;
        several->src += r->dur_ns;
        several->bytes += r->bytes;
        several->count++;
    } else {
        *several = *r;
        several->call |= KVP_SEVERAL;
        several->src = r->dur_ns;
        several->dst = 0;
        several->count = 1;
        section->waited = 0;
    }
}

/* The first failures of each kind, for good: a ring that wraps would lose them. */
static void keep_failed(kvp_section_header *header, const kvp_record *r) {
    uint32_t used = header->failed_used, alike = 0;
    if (used >= KVP_FAILURES) return;
    for (uint32_t i = 0; i < used; i++)
        alike += header->failed[i].call == r->call && header->failed[i].result == r->result;
    if (alike >= KVP_FAILURES_ALIKE) return;
    header->failed[used] = *r;
    header->failed[used].tid = header->tid;
    if (r->dur_ns == KVP_UNTIMED) header->failed[used].start_ns = kvp_now_ns(), header->failed[used].dur_ns = 0;
    __atomic_store_n(&header->failed_used, used + 1, __ATOMIC_RELEASE);
}

void kvp_ring_unusual(struct section *section, kvp_slot *slot, kvp_record r, int detail) {
    if (is_slow(&r) && detail && !is_file(r.call)) append_slow(section, &r);
    if (is_failed(&r)) keep_failed(section->header, &r);
    if (slot && is_slow(&r)) slot->slow++, slot->slow_ns += r.dur_ns;
    if (slot && is_failed(&r)) slot->errors++;
}

KVP_HOT int kvp_ring_enter(uint32_t call, uint64_t stream, uint64_t now_ns) {
    return kvp_ring_entered(call, stream, now_ns);
}

KVP_HOT void kvp_ring_write(const kvp_record *r, int detail) {
    kvp_ring_written(r, r->dur_ns, kvp_ring_last(r, r->result, r->direction), r->dur_ns != KVP_UNTIMED, detail,
                     kvp_thread.node);
}

void kvp_ring_note(const kvp_record *r) {
    struct section *section = kvp_ring_section();
    kvp_section_header *header = likely(section != NULL) ? get(section->header) : NULL;
    if (unlikely(!header || get(header->busy))) return;
    set(header->busy, 1);
    __asm__ volatile("" ::: "memory");
    if (likely(kvp_thread.epoch == kvp_ring_epoch())) {
        header->notes++;
        kvp_ring_append(section, header, r, r->dur_ns, kvp_ring_last(r, r->result, r->direction));
    }
    set(header->busy, 0);
}

uint64_t kvp_ring_noted(uint64_t *records) {
    struct section *section = kvp_ring_section();
    kvp_section_header *header = section ? get(section->header) : NULL;
    *records = header ? header->ring_records : 0;
    return header ? header->head : 0;
}

/* ---- opening and closing ------------------------------------------------------------------------------------ */

static void forked_parent(void) {
    kvp_file_header *header = ring.header;
    if (header && kvp_ring_epoch()) __atomic_fetch_add(&header->forks, 1, __ATOMIC_RELAXED);
}

__attribute__((constructor)) static void start(void) {
    kvp_process.alive = &not_alive;
    /* early: a low key needs no memory at pthread_setspecific, so a thread's first call may come from anywhere */
    prepared = pthread_key_create(&exit_key, leave_section) == 0;
}

static int prepare(void) {
    static int done;
    if (!prepared) return -EAGAIN;
    if (!done) {
        void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return -errno;
#ifdef MADV_WIPEONFORK
        madvise(page, 4096, MADV_WIPEONFORK); /* refused by an old kernel: then only fork() itself is noticed */
#endif
        if (pthread_atfork(NULL, forked_parent, kvp_ring_after_fork)) {
            munmap(page, 4096);
            return -ENOMEM;
        }
        set(kvp_process.alive, page);
        done = 1;
    }
    return 0;
}

static uint64_t power_of_two(uint64_t n) { return n <= 1 ? 1 : 1ull << (64 - __builtin_clzll(n - 1)); }

static void read_command(char *text, size_t size) {
    char words[2048];
    ssize_t got = read_proc("/proc/self/cmdline", words, sizeof words);
    while (got > 0 && !words[got - 1]) got--;
    if (got > 0) kvp_redact(words, (size_t)got, text, size);
}

/* A pid alone names a process only until it has ended, and only inside its namespace. */
static void read_identity(kvp_file_header *header) {
    char text[1024];
    struct stat namespace;
    if (!stat("/proc/self/ns/pid", &namespace)) header->pid_namespace = namespace.st_ino;
    if (read_proc("/proc/self/stat", text, sizeof text) <= 0) return;
    const char *at = strrchr(text, ')'); /* the name before it may hold anything */
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    if (at) header->start_ticks = strtoull(at + 1, NULL, 10);
}

/* Here and not in the start-up hook: a process of another virtual environment has this library and not the hook. */
static void read_rank(char *text, size_t size) {
    static const char *const names[] = {"RANK", "VLLM_DP_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && *value) {
            snprintf(text, size, "%s", value);
            return;
        }
    }
}

static int absolute(const char *path, char *out, size_t size) {
    size_t used = 0;
    if (path[0] != '/') {
        if (!getcwd(out, size - 1)) return -errno;
        used = strlen(out);
        out[used++] = '/';
    }
    if (used + strlen(path) >= size) return -ENAMETOOLONG;
    strcpy(out + used, path);
    return 0;
}

/* Whether a thread is making a section of the closed file, or writing into one. */
static int in_use(void) {
    if (__atomic_load_n(&kvp_process.alive->attaching, __ATOMIC_ACQUIRE)) return 1;
    for (uint32_t i = 0; i < ring.sections_reserved && i < ring.sections_max; i++) {
        const kvp_section_header *header = ring.sections[i].header;
        if (header && __atomic_load_n(&header->busy, __ATOMIC_ACQUIRE)) return 1;
    }
    return 0;
}

/* Until nobody is at work in the file before. A writer stores `busy` and then reads the epoch, with no fence between
 * them at every call: every thread passes one here instead. */
static int wait_for_writers(void) {
    const struct timespec a_moment = {0, 1000000};
    if (!ring.header || ring.pid != (uint32_t)getpid()) return 0; /* of a parent's threads none is here */
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0)) {
        syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
        if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0)) nanosleep(&a_moment, NULL);
    }
    int tries = 5000;
    for (; in_use() && tries; tries--) nanosleep(&a_moment, NULL);
    return tries ? 0 : -EBUSY;
}

static void fit(const kvp_ring_options *options) {
    ring.ring_capacity = power_of_two(options && options->ring_capacity ? options->ring_capacity : 16384);
    ring.slow_capacity = power_of_two(options && options->slow_capacity ? options->slow_capacity : 4096);
    ring.slot_count = options && options->slot_count ? options->slot_count : 128;
    ring.sections_max = options && options->sections_max ? options->sections_max : 256;
    kvp_process.slow_ns = options && options->slow_ns ? options->slow_ns : 20000;
    if (ring.slot_count > SLOTS_LIMIT) ring.slot_count = SLOTS_LIMIT;
    if (ring.slot_count < FIRST_SLOTS) ring.slot_count = FIRST_SLOTS;
    if (ring.sections_max > SECTIONS_LIMIT) ring.sections_max = SECTIONS_LIMIT;
    if (ring.shared) ring.sections_max = 0;
    ring.section_bytes = KVP_HEADER_BYTES + ring.slot_count * sizeof(kvp_slot) +
                         (ring.ring_capacity + ring.slow_capacity) * sizeof(kvp_record);
    ring.section_bytes = (ring.section_bytes + 4095) & ~4095ull;
}

static void read_clocks(kvp_file_header *header) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    header->start_realtime_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    clock_gettime(CLOCK_MONOTONIC, &now);
    header->start_monotonic_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Of a shared file each process writes the same words but for the times, of which any will do. */
static void write_header(kvp_file_header *header, const char *producer) {
    header->version = KVP_FILE_VERSION;
    header->header_bytes = KVP_HEADER_BYTES;
    header->record_bytes = sizeof(kvp_record);
    header->slot_bytes = sizeof(kvp_slot);
    header->buckets = KVP_BUCKETS;
    header->slot_count = ring.slot_count;
    header->ring_capacity = ring.ring_capacity;
    header->slow_capacity = ring.slow_capacity;
    header->section_bytes = ring.section_bytes;
    header->sections_max = ring.sections_max;
    header->slow_ns = kvp_process.slow_ns;
    read_clocks(header);
    snprintf(header->clock, sizeof header->clock, "%s", kvp_clock_name());
    snprintf(header->producer, sizeof header->producer, "%s", producer);
    if (!ring.shared) {
        header->pid = ring.pid;
        header->ppid = (uint32_t)getppid();
        read_command(header->command, sizeof header->command);
        read_rank(header->rank, sizeof header->rank);
        read_identity(header);
    }
    header->state = ring.shared ? KVP_CLOSED : KVP_RUNNING; /* nobody can say when the last one ends */
    u64_of_chars magic;
    memcpy(&magic, KVP_MAGIC, sizeof magic);
    __atomic_store_n((u64_of_chars *)header->magic, magic, __ATOMIC_RELEASE); /* last: a file with the magic is whole */
}

static int open_file(const char *path, const char *producer, const kvp_ring_options *options, int shared) {
    int error = prepare();
    if (error) return error;
    if (kvp_ring_epoch()) return -EALREADY;
    if ((error = wait_for_writers())) return error;
    if ((error = absolute(path, ring.path, sizeof ring.path))) return error;
    ring.shared = shared;
    fit(options);

    int fd = open(ring.path, O_RDWR | O_CREAT | (shared ? 0 : O_EXCL) | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return -errno;
    uint64_t mapped = ring.header_memory ? KVP_HEADER_BYTES : 0;
    error = allocate(fd, 0, KVP_HEADER_BYTES); /* of what is there already nothing changes */
    if (!error) error = map(fd, 0, KVP_HEADER_BYTES, &ring.header_memory, &mapped);
    close(fd);
    kvp_file_header *header = ring.header_memory;
    if (error) {
        if (!shared) unlink(ring.path);
        return -error;
    }
    set(ring.pid, (uint32_t)getpid());
    if (!shared || memcmp(header->magic, KVP_MAGIC, sizeof header->magic)) write_header(header, producer);
    if (shared) __atomic_fetch_add(&header->sharers, 1, __ATOMIC_RELAXED);

    set(ring.header, header);
    ring.sections_reserved = ring.sections_free = 0;
    memset((void *)ring.free_section, 0, sizeof ring.free_section);
    if (!++ring.epoch) ring.epoch = 1;
    __atomic_store_n(&kvp_process.alive->epoch, ring.epoch, __ATOMIC_RELEASE);
    return 0;
}

static int open_once(const char *path, const char *producer, const kvp_ring_options *options, int shared) {
    if (ring.sealed) return -EPERM;
    int none = 0;
    if (!__atomic_compare_exchange_n(&opening, &none, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return -EBUSY;
    int was = errno, result = open_file(path, producer, options, shared);
    errno = was;
    __atomic_store_n(&opening, 0, __ATOMIC_RELEASE);
    return result;
}

int kvp_ring_open(const char *path, const char *producer, const kvp_ring_options *options) {
    return open_once(path, producer, options, 0);
}

int kvp_ring_open_shared(const char *path, const char *producer) { return open_once(path, producer, NULL, 1); }

void kvp_ring_close(void) {
    /* a child of vfork shares this memory and is somebody else */
    if (!kvp_ring_is_open() || (!ring.sealed && ring.pid != (uint32_t)getpid())) return;
    struct section *section =
        kvp_thread.section; /* others flush at their own end; a few calls of theirs may be missing */
    if (section && kvp_thread.epoch == kvp_ring_epoch() && section->several.count && !get(section->header->busy))
        append_several(section, section->header);
    if (!ring.shared) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        ring.header->end_monotonic_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
        __atomic_store_n(&ring.header->state, KVP_CLOSED, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&kvp_process.alive->epoch, 0, __ATOMIC_SEQ_CST);
}

int kvp_ring_busy(void) {
    uint32_t epoch = kvp_ring_epoch();
    if (!epoch) return 0;
    uint32_t self = (uint32_t)syscall(SYS_gettid);
    for (uint32_t i = 0; i < get(ring.sections_reserved) && i < ring.sections_max; i++) {
        if (get(ring.sections[i].epoch) != epoch) continue; /* a thread is mapping it */
        const kvp_section_header *header = get(ring.sections[i].header);
        if (!header || !get(header->tid) || get(header->tid) == self) continue;
        if (get(header->in_call) || get(header->busy)) return 1;
    }
    return 0;
}

static int is_wait(uint32_t call) {
    static const uint8_t waits[128] = {
#define KIND_SYNC 1
#define KIND_COPY 0
#define KIND_BATCH 0
#define KIND_COPY_SYNC 0
#define KIND_MEMSET 0
#define KIND_LAUNCH 0
#define KIND_GRAPH 0
#define KIND_CREATE 0
#define KIND_ALLOC 0
#define KIND_FREE 0
#define KIND_EVENT 0
#define KIND_FILE 0
#define KIND_TRANSFER 0
#define KIND_MARKS 0
#define KIND_NOTE 0
#define X(id, kind, name) [id] = KIND_##kind,
        KVP_CALLS(X)
#undef X
    };
    return waits[call & 127];
}

int kvp_ring_blocked(uint64_t least_ns, uint64_t now_ns) {
    uint32_t epoch = kvp_ring_epoch();
    if (!epoch) return 0;
    for (uint32_t i = 0; i < get(ring.sections_reserved) && i < ring.sections_max; i++) {
        if (get(ring.sections[i].epoch) != epoch) continue;
        const kvp_section_header *header = get(ring.sections[i].header);
        if (!header || !get(header->tid)) continue;
        uint32_t call = get(header->in_call);
        uint64_t since = get(header->in_since_ns);
        if (call && !is_wait(call) && since && since + least_ns < now_ns) return 1;
    }
    return 0;
}

void kvp_ring_release(void) {
    if (kvp_ring_is_open() || ring.sealed) return;
    let_go(ring.header_memory, KVP_HEADER_BYTES);
    for (uint32_t i = 0; i < SECTIONS_LIMIT; i++) let_go(ring.sections[i].memory, ring.sections[i].mapped);
}

void kvp_ring_seal(int on) { ring.sealed = on; }

void kvp_ring_count(const kvp_record *record) { kvp_ring_over(*record); }

int kvp_ring_is_open(void) { return kvp_ring_epoch() != 0; }

const char *kvp_ring_path(void) { return ring.path; }

void kvp_ring_after_fork(void) {
    /* the parent's mappings stay: a write that fork interrupted (in a signal handler) must not lose its memory */
    *kvp_process.alive = (struct kvp_alive){0};
    ring.header = NULL;
    ring.path[0] = 0;
    kvp_thread.section = NULL;
    attaching = 0;
    opening = 0;
}
