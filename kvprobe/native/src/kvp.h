/* What kvprobe's native parts share: the clock, the record, and the layout of a ring file.
 *
 * C11, no Python.h, no CUDA headers. A ring file is written by one process and read, without a lock, by any
 * number of others, also after the writer was killed. Layout (all integers little endian, all offsets in bytes):
 *
 *   file  := kvp_file_header (4096) | section 0 | section 1 | ... (section_bytes each, sections_used of them are valid)
 *   section  := kvp_section_header (4096) | kvp_slot x slot_count | kvp_record x ring_capacity | kvp_record x
 * slow_capacity
 *
 * A section belongs to one thread at a time, so a record costs plain stores: no lock, no atomic read-modify-write.
 * `head` counts records ever published; record i lies at ring[i % ring_capacity]. A reader copies, reads `head`
 * again, and drops what may have been overwritten meanwhile. Totals and histograms in the slots are never
 * overwritten, so they stay exact when the ring wraps. Calls that took at least slow_ns go to the slow ring too:
 * a flood of fast calls does not wash the interesting ones away.
 */
#ifndef KVP_H
#define KVP_H

#include <stddef.h>
#include <stdint.h>

#ifdef KVP_PRIVATE_CORE
/* In the interposer: it is preloaded, so whatever it exported here would take the place of another library's own. */
#define KVP_EXPORT __attribute__((visibility("hidden")))
#else
#define KVP_EXPORT __attribute__((visibility("default")))
#endif

/* ---- clock -------------------------------------------------------------------------------------------------- */

/* Nanoseconds of CLOCK_MONOTONIC, read from the CPU's invariant counter where there is one (about 10 ns a read on
 * x86-64 instead of 23), else from clock_gettime. */
KVP_EXPORT uint64_t kvp_now_ns(void);
/* Another clock for all of this library, such as the virtual one of the host runtime; NULL: the processor's again. */
KVP_EXPORT void kvp_set_clock(uint64_t (*now)(void));
/* Whether it is such a one: then no thread loses its CPU, as far as anybody can tell. */
KVP_EXPORT int kvp_clock_is_given(void);
KVP_EXPORT const char *kvp_clock_name(void); /* "tsc", "cntvct" or "clock_gettime" */

/* ---- record ------------------------------------------------------------------------------------------------- */

/* What was called. X(id, kind, name): the number in the file, what it does, the name that a report prints.
 * Numbers are part of the file format: never renumber, only append. */
#define KVP_CALLS(X)                                                                                                   \
    X(1, COPY, cudaMemcpyAsync)                                                                                        \
    X(2, COPY, cudaMemcpy2DAsync)                                                                                      \
    X(3, BATCH, cudaMemcpyBatchAsync)                                                                                  \
    X(4, COPY, cuMemcpyAsync)                                                                                          \
    X(5, COPY, cuMemcpyHtoDAsync)                                                                                      \
    X(6, COPY, cuMemcpyDtoHAsync)                                                                                      \
    X(7, COPY, cuMemcpyDtoDAsync)                                                                                      \
    X(8, COPY, cuMemcpy2DAsync)                                                                                        \
    X(9, BATCH, cuMemcpyBatchAsync)                                                                                    \
    X(10, COPY_SYNC, cudaMemcpy)                                                                                       \
    X(11, MEMSET, cudaMemsetAsync)                                                                                     \
    X(12, LAUNCH, cudaLaunchKernel)                                                                                    \
    X(13, LAUNCH, cudaLaunchKernelExC)                                                                                 \
    X(14, LAUNCH, cuLaunchKernel)                                                                                      \
    X(15, LAUNCH, cuLaunchKernelEx)                                                                                    \
    X(16, GRAPH, cudaGraphLaunch)                                                                                      \
    X(17, SYNC, cudaStreamSynchronize)                                                                                 \
    X(18, SYNC, cudaEventSynchronize)                                                                                  \
    X(19, SYNC, cudaDeviceSynchronize)                                                                                 \
    X(20, CREATE, cudaStreamCreate)                                                                                    \
    X(21, CREATE, cudaEventCreate)                                                                                     \
    X(22, ALLOC, cudaMalloc)                                                                                           \
    X(23, ALLOC, cudaHostAlloc)                                                                                        \
    X(24, ALLOC, cudaHostRegister)                                                                                     \
    X(25, FREE, cudaFree)                                                                                              \
    X(26, FREE, cudaFreeHost)                                                                                          \
    X(27, EVENT, cudaEventRecord)                                                                                      \
    X(28, EVENT, cudaStreamWaitEvent)                                                                                  \
    X(29, ALLOC, cudaMallocAsync)                                                                                      \
    X(30, COPY, cudaMemcpy3DAsync)                                                                                     \
    X(31, COPY, cudaMemcpyPeerAsync)                                                                                   \
    X(32, SYNC, cuStreamSynchronize)                                                                                   \
    X(33, SYNC, cuEventSynchronize)                                                                                    \
    X(34, SYNC, cuCtxSynchronize)                                                                                      \
    X(35, CREATE, cuStreamCreate)                                                                                      \
    X(36, CREATE, cuEventCreate)                                                                                       \
    X(37, ALLOC, cuMemAlloc)                                                                                           \
    X(38, ALLOC, cuMemHostAlloc)                                                                                       \
    X(39, ALLOC, cuMemHostRegister)                                                                                    \
    X(40, COPY, cudaMemcpyWithAttributesAsync)                                                                         \
    X(41, COPY, cuMemcpy3DAsync)                                                                                       \
    X(42, FREE, cudaHostUnregister)                                                                                    \
    X(43, FREE, cuMemFree)                                                                                             \
    X(44, FREE, cuMemFreeHost)                                                                                         \
    X(45, FREE, cuMemHostUnregister)                                                                                   \
    X(46, FILE, pread)                                                                                                 \
    X(47, FILE, preadv)                                                                                                \
    X(48, FILE, read)                                                                                                  \
    X(49, FILE, pwrite)                                                                                                \
    X(50, FILE, pwritev)                                                                                               \
    X(51, FILE, write)                                                                                                 \
    X(52, FILE, recv)                                                                                                  \
    X(53, FILE, send)                                                                                                  \
    X(54, FILE, cuFile)                                                                                                \
    X(55, FILE, io_submit)                                                                                             \
    X(56, ALLOC, cuMemCreate)                                                                                          \
    X(57, ALLOC, cuMemMap)                                                                                             \
    X(58, FREE, cuMemUnmap)                                                                                            \
    X(59, FREE, cuMemRelease)                                                                                          \
    X(60, ALLOC, cuMemSetAccess)                                                                                       \
    X(61, ALLOC, cuMemExportToShareableHandle)                                                                         \
    X(62, ALLOC, cuMemImportFromShareableHandle)                                                                       \
    X(63, EVENT, cudaLaunchHostFunc)                                                                                   \
    X(64, TRANSFER, transfer) /* one engine or server transfer; src and dst hold its split, see kvp_record */          \
    X(65, MARKS, span)        /* no call: what stood in a stream between two marks (interpose/marks.h) */              \
    X(66, MARKS, coverage)    /* no call: an interval in which marks missed nothing, or something */                   \
    X(67, MARKS, graph)       /* no call: what a graph that can be launched holds */                                   \
    X(68, NOTE, contents)     /* no call: what a copy carried, see below */                                            \
    X(69, NOTE, pages)        /* no call: page faults in a call, see below */                                          \
    X(70, NOTE, pause)        /* no call: what CPU time was used between two calls, see below */                       \
    X(71, EVENT, cudaStreamAddCallback)                                                                                \
    X(72, EVENT, cuLaunchHostFunc)                                                                                     \
    X(73, EVENT, cuStreamAddCallback)                                                                                  \
    X(74, COPY_SYNC, cuMemcpy)                                                                                         \
    X(75, COPY_SYNC, cuMemcpyHtoD)                                                                                     \
    X(76, COPY_SYNC, cuMemcpyDtoH)                                                                                     \
    X(77, COPY_SYNC, cuMemcpyDtoD)                                                                                     \
    X(78, COPY_SYNC, cudaMemcpy2D)                                                                                     \
    X(79, FREE, cudaMemPoolTrimTo)                                                                                     \
    X(80, FREE, cuMemPoolTrimTo)                                                                                       \
    X(81, NOTE, destination) /* no call: what the device had where a load went, see below */                           \
    X(82, FILE, fsync)       /* and fdatasync */

enum kvp_call {
#define X(id, kind, name) KVP_CALL_##name = id,
    KVP_CALLS(X)
#undef X
};

enum kvp_direction {
    KVP_DIR_UNKNOWN = 0,
    KVP_H2D = 1,
    KVP_D2H = 2,
    KVP_D2D = 3,
    KVP_H2H = 4,
    KVP_READ = 5, /* FILE: into memory */
    KVP_WRITE = 6 /* FILE: out of it */
};
enum kvp_memory {
    KVP_MEM_UNKNOWN = 0,
    KVP_MEM_PAGEABLE = 1,
    KVP_MEM_PINNED = 2,
    KVP_MEM_DEVICE = 3,
    KVP_MEM_MANAGED = 4
};

#define KVP_UNTIMED UINT64_MAX
/* Set in kvp_record.call: this record stands for `count` calls of one kind, stream and direction in a row, none of
 * which took slow_ns. dur_ns reaches from the first one's entry to the last one's return, src is the time inside them.
 */
#define KVP_SEVERAL 0x80
#define KVP_SEVERAL_MOST 64 /* calls in one of them, at most */

/* One call: 64 bytes, one cache line. Those of marks are no calls, stand in the ring alone (kvp_ring_note), and use the
 * words thus; `transfer` is the device's number.
 *
 *   span      [start_ns, start_ns + dur_ns) of `stream` on the host's clock; result: enum mark_kind; dst: part of
 *             dur_ns in which something ran, as far as the middle of a run tells; bytes, count (of submissions),
 *             direction as in a copy; src: of a graph its number, else how many slots of the stream's queue had been
 *             given with the mark behind it, by a count of its own; tid: 1 + how long before the end that mark was
 *             recorded, ns, at most UINT32_MAX. A run of several kinds has result 0, and behind it a record with dst
 *             0 for each kind: how many submissions and bytes of that it holds, everything else as in its own. But
 *             where its end was not seen, they last until it was over at the latest, and tid is 1 + how long after
 *             its last submission the stream was seen busy
 *   coverage  result 0: spans are complete in [start_ns, start_ns + dur_ns); else they are not, and that is why (enum
 *             mark_reason)
 *   graph     src: its number, which spans name; stream, dst, bytes: bytes to the device, from it, within it; dur_ns:
 *             launches so far; count: kernels; transfer: copies; result: host functions; tid: 1 + memsets; direction:
 *             1 where they were captured in several streams. The newest record of a number counts. */
typedef struct {
    uint64_t start_ns; /* entry of the call, CLOCK_MONOTONIC */
    uint64_t dur_ns;   /* host time inside the call; KVP_UNTIMED = counted only */
    uint64_t stream;   /* handle as the caller gave it; 0 = legacy default stream */
    /* Address; of a batch: its first copy's. EVENT, and SYNC on an event: the event's handle. TRANSFER: two float32,
     * build_us then submit_us. */
    uint64_t src;
    /* Address; of a batch: its first copy's. LAUNCH: the how manyth launch of its thread this is, from 1; SYNC: how
     * many its thread has made (interposer). TRANSFER: two float32, queue_wait_us then copy_us. */
    uint64_t dst;
    uint64_t bytes;    /* payload; of a batch: the sum. ALLOC: bytes asked for */
    uint32_t tid;      /* kernel thread id; 0 in kvp_ring_write: the calling thread's */
    uint32_t transfer; /* id of the transfer this call belongs to; 0 = none known */
    uint32_t count;    /* copies in this call (1 but for batches and TRANSFER) */
    uint16_t result;   /* the call's own return code, capped at 65535 */
    uint8_t call;      /* enum kvp_call */
    uint8_t direction; /* low 4 bits enum kvp_direction, high 4 bits enum kvp_memory of the host side */
} kvp_record;

/* FILE: reads and writes of a tier below CPU memory, by system calls that are no CUDA calls (interpose/files.c), of
 * KVP_FILE_LEAST bytes and more, and of no bytes those that wait until a file is on its disk. stream: number of the
 * place, as in tiers-<pid>.jsonl; src: address of the memory, of several pieces the first one's; dst: where in the
 * file, KVP_NOWHERE where that is not known; bytes: moved; count: pieces; transfer: enum kvp_file_seen. They stand in
 * the ring of all calls, never in that of slow ones: a disk would fill that. */
#define KVP_FILE_LEAST (16 << 10)
#define KVP_NOWHERE UINT64_MAX
enum kvp_file_seen {
    KVP_FILE_WHOLE = 0,     /* dur_ns is the time of the operation */
    KVP_FILE_SUBMITTED = 1, /* it goes on after the call: bytes are what was asked for, dur_ns is the call's own */
    KVP_FILE_COUNTED = 2    /* a submission whose files and bytes cannot be seen: `count` operations */
};

/* A record from KVP_NOTES on is no call, and stands in the ring alone (kvp_ring_note), never in totals. Its words:
 *
 *   contents  what lay in host memory when a sampled copy was submitted: the source of one to the device, the place
 *             where one from the device will go. start_ns, stream, src, dst, bytes, tid, direction: as in the copy's
 * own record; dur_ns: hash of what was looked at; count: bytes looked at (interpose/contents.c says which); result: 1
 * where they were one word over and over, as in memory that nobody has filled.
 *   destination  what the device had where a load was about to go (interpose/device_looks.c). start_ns, stream, src,
 * dst, bytes, tid, direction: as in the load's own record; count: bytes looked at; result: 1 where they were those that
 * the host sent. count 0: no more such looks, because a call of the driver failed with `result`.
 *
 *   pages     page faults of the thread inside a call that pinned or copied, and took long (interpose/page_faults.c).
 *             start_ns, dur_ns, stream, src, dst, bytes, tid, direction: as in the call's own record; count: minor
 * faults; transfer: major ones; result: a bit for each NUMA node that a few pages of the host's side lie on, the last
 * for all others; 0: not known.
 *   pause     [start_ns, start_ns + dur_ns), in which the thread tid was in no call, for a millisecond or more
 * (interpose/pauses.c). src, dst: CPU time that the thread, and its whole process, used in it and in so many ns before
 * it as `bytes` says; transfer: how often the thread gave up its CPU in that time. result: 0; else enum kvp_wait, and
 * the record is of a part of a pause, for a millisecond or more, in which the thread tid waited for somebody outside to
 * ask for something (interpose/waits.c); src, dst: 0, transfer: 1. */
#define KVP_NOTES 65
enum kvp_wait {
    KVP_WAIT_accept = 1, /* and accept4 */
    KVP_WAIT_poll,       /* and ppoll */
    KVP_WAIT_select,     /* and pselect */
    KVP_WAIT_epoll,
    KVP_WAIT_recv /* and read */
};

/* ---- totals and histogram ----------------------------------------------------------------------------------- */

#define KVP_BUCKETS 128

/* Bucket of a duration: four buckets to the octave from 4 ns, so a percentile read back is within 12.5% of the truth;
 * the last bucket takes everything from about 7.5 s. Lower bound of bucket b: b < 4 ? b : (4 + b % 4) << (b / 4 - 1).
 */
static inline uint64_t kvp_bucket(uint64_t ns) {
    uint64_t e =
        63u ^ (unsigned)__builtin_clzll(ns | 4); /* below 4 ns a bucket is a nanosecond, as in the next octave */
    uint64_t b = e * 4 - 8 + (ns >> (e - 2));    /* 0 to 7 */
    return b < KVP_BUCKETS ? b : KVP_BUCKETS - 1;
}

/* Totals of one (stream, call, direction) of one section. A slot with call 0 is free; used slots are the first
 * slots_used. count and bytes are one 16-byte store, so that a kill between two instructions leaves them in step; the
 * histogram and the other sums may then be one call ahead. */
typedef struct {
    uint64_t stream;
    uint8_t call;
    uint8_t direction; /* as in kvp_record */
    uint8_t pad[6];
    uint64_t count;   /* calls */
    uint64_t bytes;   /* sum */
    uint64_t copies;  /* sum of kvp_record.count */
    uint64_t dur_ns;  /* sum, of timed calls */
    uint64_t last_ns; /* end of the newest timed call */
    uint64_t max_ns;  /* longest */
    uint64_t slow;    /* calls of at least slow_ns */
    uint64_t slow_ns; /* their sum */
    uint64_t errors;  /* calls that failed: a result that is neither 0 nor KVP_NOT_READY */
    uint64_t untimed; /* calls that were counted and not timed; count - untimed = sum of the histogram */
    /* Part of `bytes` by the NUMA node of the host side: 0, 1, 2, all others. Asked once an allocation, of one of its
     * pages, and only on machines of several nodes (interposer). */
    uint64_t node_bytes[4];
    uint64_t histogram[KVP_BUCKETS];
} kvp_slot; /* 1152 bytes */

/* ---- file --------------------------------------------------------------------------------------------------- */

#define KVP_MAGIC "KVPRING1"
#define KVP_FILE_VERSION 1 /* history: 1 first */
#define KVP_HEADER_BYTES 4096

enum kvp_state {
    KVP_STARTING = 0,
    KVP_RUNNING = 1,
    KVP_CLOSED = 2 /* exit handlers ran: the process was not killed */
};

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;  /* KVP_HEADER_BYTES */
    uint32_t record_bytes;  /* 64 */
    uint32_t slot_bytes;    /* 1152 */
    uint32_t buckets;       /* KVP_BUCKETS */
    uint32_t slot_count;    /* slots in a section */
    uint64_t ring_capacity; /* records, a power of two */
    uint64_t slow_capacity; /* records, a power of two */
    uint64_t section_bytes;
    uint32_t sections_max;
    volatile uint32_t sections_used; /* grows only; one that could not be made is all zero, or beyond the file's end */
    uint64_t slow_ns;                /* threshold of the slow ring */
    uint32_t pid;
    uint32_t ppid;
    uint64_t start_monotonic_ns;
    uint64_t start_realtime_ns;
    volatile uint32_t state; /* enum kvp_state */
    volatile uint32_t forks; /* children seen by fork() */
    volatile uint64_t end_monotonic_ns;
    char clock[16];
    char producer[32]; /* "engine", "interposer" */
    /* What a section could not take (more threads than sections, a call inside a signal handler, more streams than
     * slots, disk full): counted here with atomics, so that totals stay exact. Index: enum kvp_call. */
    volatile uint64_t over_count[128];
    volatile uint64_t over_bytes[128];
    volatile uint64_t over_dur_ns[128];
    char command[512]; /* /proc/self/cmdline, NULs turned to spaces, secrets taken out, cut */
    char rank[16];     /* what the environment says: RANK, VLLM_DP_RANK, ... (ring.c); empty where it says nothing */
    uint64_t pid_namespace; /* inode of /proc/self/ns/pid; 0 = not known */
    uint64_t start_ticks;   /* when the process began, as in /proc/self/stat; 0 = not known */
    /* Processes that found no space for a file of their own: their calls are in over_*, together; pid is 0 then, and
     * there are no sections. 0 = the file is one process's. */
    volatile uint32_t sharers;
} kvp_file_header;

#define KVP_FAILURES 16
#define KVP_FAILURES_ALIKE 4
#define KVP_NOT_READY 600 /* cudaErrorNotReady, CUDA_ERROR_NOT_READY: an answer, no failure */

typedef struct {
    volatile uint64_t head;      /* records ever published */
    volatile uint64_t slow_head; /* likewise, slow ring */
    volatile uint32_t tid;       /* owner now; 0 = free for another thread */
    volatile uint32_t owners;    /* threads that have owned this section */
    volatile uint32_t busy;      /* 1 while the owner writes: a signal handler's call goes to over_* */
    uint32_t slots_used;
    char name[32]; /* thread name of the newest owner */
    /* Records that this section's rings hold: the file's capacities, or less in a later section or where the disk was
     * full. Record i lies at ring[i % ring_records]. */
    volatile uint64_t ring_records;
    volatile uint64_t slow_records;
    /* The call that the owner is inside of now, for an observer that asks who has been blocked, and for how long. */
    volatile uint32_t in_call;     /* enum kvp_call; 0 = none */
    volatile uint32_t in_sequence; /* counts entries: the same value twice = the same call */
    volatile uint64_t in_since_ns; /* 0 = the call is counted, not timed */
    volatile uint64_t in_stream;
    volatile uint64_t notes; /* of `head`: records that are no calls */
    /* The first calls that failed, whatever detail is kept, at most KVP_FAILURES_ALIKE with one call and result: never
     * overwritten. Of a call that is not timed start_ns is its end, and dur_ns 0. */
    volatile uint32_t failed_used;
    uint32_t pad;
    kvp_record failed[KVP_FAILURES];
    /* As its first owner made it: CLOCK_MONOTONIC, 0 = not known; what the kernel had counted of that thread by then,
     * time on a CPU and time waiting for one. An observer comes later. */
    volatile uint64_t begun_ns;
    uint64_t begun_ran_ns;
    uint64_t begun_waited_ns;
} kvp_section_header;

/* ---- ring: writing ------------------------------------------------------------------------------------------ */

/* Only the first sections hold ring_capacity records; a later one holds at most this many. */
#define KVP_LARGE_SECTIONS 8
#define KVP_SMALL_RECORDS 16384

typedef struct {
    uint64_t ring_capacity; /* 0 = default 16384; rounded up to a power of two */
    uint64_t slow_capacity; /* 0 = default 4096 */
    uint32_t slot_count;    /* 0 = default 128 */
    uint32_t sections_max;  /* 0 = default 256 */
    uint64_t slow_ns;       /* 0 = default 20000 */
} kvp_ring_options;

/* Opens this process's ring file at `path` (created, must not exist). Returns 0 or a negative errno. At most one ring
 * is open in a process (per shared library that links this file). */
KVP_EXPORT int kvp_ring_open(const char *path, const char *producer, const kvp_ring_options *options);
/* Instead: opens a file that all processes without one of their own share (made where it is missing). Calls are counted
 * in it, by what was called, and nothing else; so it never grows. Returns as kvp_ring_open. */
KVP_EXPORT int kvp_ring_open_shared(const char *path, const char *producer);
/* Marks the file closed and stops writing; memory stays mapped, so a late writer cannot crash. */
KVP_EXPORT void kvp_ring_close(void);
/* After kvp_ring_close: gives the file's memory back; a late writer writes into memory of the process. */
KVP_EXPORT void kvp_ring_release(void);
/* on != 0: from now on no system call; the file keeps its size, threads without a section are counted in over_*. For a
 * process that puts itself under seccomp. */
KVP_EXPORT void kvp_ring_seal(int on);
/* Adds one call to over_*, from any context. */
KVP_EXPORT void kvp_ring_count(const kvp_record *record);
KVP_EXPORT int kvp_ring_is_open(void);
/* Whether another thread is inside a call that it has entered. */
KVP_EXPORT int kvp_ring_busy(void);
KVP_EXPORT const char *kvp_ring_path(void);
/* Whether another thread has been inside one call, that is no wait, for so long. */
KVP_EXPORT int kvp_ring_blocked(uint64_t least_ns, uint64_t now_ns);
/* Keeps a record that is no call: in this thread's ring alone, no totals. */
KVP_EXPORT void kvp_ring_note(const kvp_record *record);
/* How many records this thread's ring has been given, and how many it holds; 0 and 0: it has none. */
KVP_EXPORT uint64_t kvp_ring_noted(uint64_t *records);
/* In a forked child: forgets the parent's file without touching it. */
KVP_EXPORT void kvp_ring_after_fork(void);
/* Adds one call to totals and, with detail != 0, to the rings (see enum kvp_keep). Never blocks, never fails, any
 * thread. A call that began with kvp_ring_enter ends here. */
KVP_EXPORT void kvp_ring_write(const kvp_record *record, int detail);
enum kvp_keep {
    KVP_KEEP_NONE = 0,
    KVP_KEEP_ALL = 1,   /* both rings */
    KVP_KEEP_SLOW = -1, /* slow ring only */
    /* Copies and memsets that are not slow in records of several; those that are, waits between them and launches of
     * graphs one by one; of all else what is slow. Enough to follow how full a queue was. */
    KVP_KEEP_SEVERAL = -2
};
/* Says that this thread enters a call, so that an observer can see it blocked there, and has the lines fetched that
 * kvp_ring_write will touch. Optional. 0: there is no ring, or no space in it for this thread. */
KVP_EXPORT int kvp_ring_enter(uint32_t call, uint64_t stream, uint64_t now_ns);

#endif
