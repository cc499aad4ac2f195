/* What the interposer's files share. libkvprobe_interpose.so is preloaded by `kvprobe run`, or loaded into a
 * running process by `kvprobe attach`: wherever a program keeps the address of a CUDA function it puts a wrapper's,
 * which calls that function and writes one record a call. It exports no name of CUDA's.
 *
 * Rules it keeps: results, errno and argument registers pass through; no lock and no allocation on the way of a call;
 * no CUDA call that the program did not make, but for a question about a pointer (memory.c), asked after the fact, and
 * what marks.c and device_looks.c say; anything it does not know goes through untouched. Under KVPROBE_FIX=auto, and
 * only there, large pageable copies are made another way where that pays: cures.c says with what care. */
#ifndef KVP_INTERPOSE_H
#define KVP_INTERPOSE_H

#include "thread.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* What the C library has, too, and what a debugger calls; the core's own functions stay inside (kvp.h). */
#define CUDA_EXPORT __attribute__((visibility("default")))

#define BOUND 16      /* functions of one name that are wrapped at a time: runtimes, their drivers, other tools */
typedef int any_fn(); /* a CUDA function of unknown parameters */

/* A sanitizer's runtime that a program brings asks these for functions before it can be told of anything. */
#define NOT_SANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))

/* Which function a wrapper stands for: given up when the function's library has gone, and then another's. */
struct binding {
    _Atomic uint64_t state;          /* resolve.c */
    _Atomic uintptr_t base, dynamic; /* of the library; 0: in none */
};

/* One wrapped symbol. */
struct wrapped {
    const char *name;
    any_fn *bound[BOUND]; /* each calls exactly the function in `real` beside it */
    any_fn *_Atomic real[BOUND];
    struct binding binding[BOUND];
};

extern struct wrapped kvp_wrapped[];
extern const int kvp_wrapped_count;

/* The value of a switch in the environment; kvprobe/environment.py describes the variables. */
static inline int says_no(const char *value) {
    return value && (!strcasecmp(value, "off") || !strcmp(value, "0") || !strcasecmp(value, "no") ||
                     !strcasecmp(value, "false"));
}

/* What a thread is in (kvp_thread.inside). A call of the driver inside one of the runtime is the runtime's own; any
 * other call inside a call is a signal handler's. */
enum inside { OUTSIDE, IN_KVPROBE, IN_RUNTIME, IN_DRIVER };

enum detail { DETAIL_TOTALS, DETAIL_COPIES, DETAIL_LAUNCHES };

enum recycles { KVP_KEEPS = 1, KVP_POPULATES = 2, KVP_POPULATED = 4 }; /* may; there is some that was */

/* What every call asks, in one cache line. Any thread may look while another attaches or detaches. */
struct watch {
    union {
        struct {
            atomic_schar on;     /* 1 while this process is to be recorded; what else a call needs is there before it */
            atomic_schar detail; /* enum detail */
            atomic_schar no_driver;    /* there is none to ask about a pointer */
            atomic_schar cures;        /* 1: pageable copies may go another way (cures.c) */
            atomic_schar blocking;     /* 1: there may be streams that the legacy default stream waits for */
            atomic_schar device_looks; /* 1: the next candidate is looked at on the device (device_looks.c) */
            atomic_schar pads[2];
        };
        _Atomic uint64_t mode; /* all of these: KVP_PLAIN_MODE where a copy asks for none of them */
    };
    atomic_int redirects; /* 1 while loaded libraries hold addresses of ours */
    atomic_int attached;  /* 1: because of an attach, which can be taken back; 0 where we were there from the start */
    union {
        struct {
            atomic_int captures;  /* streams that are being captured */
            atomic_schar gate;    /* 1: a test forbids calls */
            atomic_schar nvtx;    /* a tool listens */
            atomic_schar witness; /* 1: bytes that were stored are compared with those that are loaded (witness.c) */
            atomic_schar pad;
        };
        _Atomic uint64_t unusual; /* any of these, as most calls ask */
    };
    atomic_int recycles;               /* enum recycles: what is done about pinned memory (recycle.c) */
    atomic_int marks;                  /* 1: marks are recorded in the program's streams (marks.c) */
    atomic_uint generation;            /* of what is known of memory: freeing or registering some makes it another */
    atomic_uint contents_mask;         /* contents.c: which places of the host are looked at */
    _Atomic uint64_t contents_from_ns; /* from when on; the largest number: never */
    atomic_int one_device;             /* 1: there is no second one */
} __attribute__((aligned(64)));
extern struct watch kvp_watch;
enum { KVP_PLAIN_MODE = 1 | DETAIL_COPIES << 8 }; /* as little-endian machines load it: all that this is built for */

/* A stream in a record: its handle; a default stream's is 0, 1 or 2, and above these bits the number of its device. */
#define KVP_DEVICE_SHIFT 8
#define KVP_FIRST_ADDRESS (1u << 20)         /* handles from here on are addresses */
uint64_t kvp_default_stream(uint64_t which); /* devices.c */
static inline uint64_t kvp_stream_number(uint64_t handle) {
    return likely(handle > 2) || likely(kvp_watch.one_device) ? handle : kvp_default_stream(handle);
}
static inline void *kvp_stream_handle(uint64_t number) {
    return (void *)(uintptr_t)(number < KVP_FIRST_ADDRESS ? number & ((1u << KVP_DEVICE_SHIFT) - 1) : number);
}

/* wrap.c */
int kvp_batch_has_fail_index(void *real); /* of cudaMemcpyBatchAsync: CUDA 12.8's signature */
void kvp_forget_signatures(void);         /* of functions whose library may have gone */
/* A function or a word that leads to one finds no space here: the run folder is told, so that the recording does not
 * pass for a whole one. */
void kvp_not_wrapped(void);

/* resolve.c */
struct wrapped *kvp_find_wrapped(const char *name);
/* A pointer that behaves as `found`, and is recorded; `found` itself where that cannot be. */
void *kvp_wrap_pointer(struct wrapped *w, void *found);
void kvp_give_up_wrappers(void); /* of functions whose library has gone */
int kvp_is_given_up(const struct wrapped *w, const void *wrapper);
int kvp_is_call_entry(const void *address);
/* A symbol of a library that is loaded already. */
void *kvp_symbol_beside(const void *address, const char *name);
void *kvp_driver_symbol(const char *name);
/* As a library that `handle` stands for would be bound to it: the global scope first. version: NULL for any. */
void *kvp_symbol_of(void *handle, const char *name, const char *version);
void *kvp_reached(const char *name); /* by a call from here */
uintptr_t kvp_own_base(void);
void *kvp_loaded(const char *path); /* a handle that keeps a loaded library; "" is the program */
void kvp_let_go(void *handle);
extern int kvp_stays_away;     /* of a child of fork: the loader may be locked for good, so it is not asked to load */
void kvp_note_libraries(void); /* at the start of a program */
void *kvp_dlopen(const char *file, int mode);
void *kvp_dlvsym(void *restrict handle, const char *restrict name, const char *restrict version);

/* relocate.c: the words of loaded libraries. The number of words written that lead to recorded calls, or a negative
 * errno. */
int kvp_redirect_all(void);
int kvp_restore_all(void);
void kvp_redirect_new(void); /* in libraries that were loaded since */
void kvp_before_load(void);  /* a library: waits for forks that are under way */
struct dl_phdr_info;
/* dl_iterate_phdr; -1 and nothing done where it might wait for good: in a child of fork, and where one is being made,
 * whose own dlopen would wait. */
int kvp_list(int (*each)(struct dl_phdr_info *, size_t, void *), void *data);

/* Functions that are no CUDA calls and lead to us all the same. */
struct redirected {
    const char *name;
    any_fn *ours;
    any_fn *_Atomic *real; /* NULL: the C library's, which `ours` reaches by name. Else what was found is put here */
};
extern const struct redirected kvp_redirected[]; /* children.c */
extern const int kvp_redirected_count;

/* children.c: what this process starts is recorded, too. */
int kvp_hand_on(const char *library, const char *folder, const char *detail, uint64_t max_bytes);
void kvp_hand_on_environment(const char *library, const char *folder); /* as it is, of a run */
void kvp_hand_on_nothing(void);

/* seccomp.c */
int kvp_seccomp_load(void *filter);
extern any_fn *_Atomic kvp_real_seccomp_load;

/* memory.c */
__attribute__((noinline)) int kvp_look_up(uint64_t address, struct kvp_range *newest);
static inline int kvp_kind_of(uint64_t address, struct kvp_range *newest) {
    if (unlikely(kvp_thread.generation != kvp_watch.generation || address - newest->start >= newest->size))
        return kvp_look_up(address, newest);
    if (newest->node) kvp_thread.node = newest->node;
    return newest->kind;
}

/* The same for the host's side of a plain copy, in which nothing else is asked: the kind, and the node << 8. */
static inline unsigned kvp_host_memory(uint64_t address, struct kvp_range *newest) {
    if (unlikely(kvp_thread.generation != kvp_watch.generation || address - newest->start >= newest->size))
        return (unsigned)kvp_look_up(address, newest) | (unsigned)kvp_thread.node << 8;
    return newest->kind | (unsigned)newest->node << 8;
}

/* A copy's `direction`, with the memory of its host side, as far as its addresses are known; KVP_DIR_UNKNOWN is found
 * out. */
__attribute__((noinline)) unsigned kvp_classify_both(uint64_t src_address, uint64_t dst_address);
static inline unsigned kvp_classify(const kvp_record *record) {
    unsigned direction = record->direction;
    if (unlikely(kvp_watch.no_driver)) return direction;
    if (likely(direction == KVP_H2D)) return KVP_H2D | (unsigned)kvp_kind_of(record->src, &kvp_thread.src) << 4;
    if (direction == KVP_D2H) return KVP_D2H | (unsigned)kvp_kind_of(record->dst, &kvp_thread.dst) << 4;
    return direction == KVP_DIR_UNKNOWN ? kvp_classify_both(record->src, record->dst) : direction;
}
void kvp_forget_ranges(void); /* memory was freed or registered */
/* enum kvp_memory, as an earlier copy of this thread showed it. No question is asked: KVP_MEM_UNKNOWN says nothing. */
int kvp_known_memory(uint64_t address);
/* The allocation around an address that this thread has just classified; untouched where none is known. */
void kvp_range_of(uint64_t address, uint64_t *base, uint64_t *bytes);

/* marks.c, mark_reader.c: what the device did, by events of ours. `before`: of a call that begins now; 1: time has
 * passed. `after`: of one that has returned. */
void kvp_marks_start(void);
void kvp_marks_stop(void);
int kvp_mark_before(const kvp_record *record);
void kvp_mark_after(const kvp_record *record);
void kvp_mark_refused(const kvp_record *record); /* before that, where the call failed */
void kvp_mark_event(uint64_t stream);            /* the program records one: it takes a slot */
void kvp_marks_stream_ends(uint64_t stream);
void kvp_marks_context_ends(void);
void kvp_marks_hold(int captures); /* until kvp_marks_go_on nothing is marked; 1: a capture is about to begin */
void kvp_marks_go_on(void);
void kvp_marks_capture_ends(void);
void kvp_mark_beside(const kvp_record *record); /* of a call that begins while something is captured */
void kvp_marks_nothing_holds(void);             /* behind the end of a capture */

/* graphs.c: what a graph that is captured holds. `holds`: of a call that went into some capture, or not; `more`:
 * something that is not followed. */
void kvp_graph_begins(uint64_t stream);
void kvp_graph_holds(const kvp_record *record);
void kvp_graph_holds_more(void);
void kvp_graph_ends(const void *graph);
void kvp_graph_instantiated(const void *launchable, const void *graph);
/* Tells of all that were instantiated again, before this thread's records push out what was told: they are launched for
 * as long as a server lives. */
void kvp_graphs_tell(void);
void kvp_graphs_in_child(void);

/* page_faults.c: around a call of KVP_PAGES_FROM bytes or more that may pin or copy. */
#define KVP_PAGES_FROM (1u << 20)
void kvp_pages_before(const kvp_record *record);
void kvp_pages_after(const kvp_record *record);

/* pauses.c: what CPU time is used where a thread makes no call. `may_begin`: behind a long call. */
#define KVP_PAUSE_NS 1000000u
#define KVP_LONG_CALL_NS 200000u
void kvp_pause_may_begin(uint64_t now);
void kvp_pause_ends(uint64_t now, uint64_t lasted_ns);
void kvp_pauses_go(int on);       /* 0: a program under seccomp may die of a system call */
void kvp_pauses_without_me(void); /* the CPU time of the thread that calls is not the program's */

/* contents.c: what copies carry, of a sample. `due`: whether the copy that has just returned is to be looked at. */
void kvp_contents_start(void);
void kvp_contents_stop(void);
struct kvp_pieces;
struct kvp_rows { /* of a 2D copy, bytes each but `count` */
    size_t width, count, dpitch, spitch;
};
static inline int kvp_is_batch(const kvp_record *r) {
    return r->call == KVP_CALL_cudaMemcpyBatchAsync || r->call == KVP_CALL_cuMemcpyBatchAsync;
}
static inline int kvp_is_2d(const kvp_record *r) {
    return r->call == KVP_CALL_cudaMemcpy2DAsync || r->call == KVP_CALL_cudaMemcpy2D;
}
/* `batch`, `rows`: read where it is one, and where it is a 2D copy */
void kvp_contents_look(const kvp_record *record, const struct kvp_pieces *batch, const struct kvp_rows *rows);
static inline int kvp_contents_due(const kvp_record *r) {
    if (r->start_ns < atomic_load_explicit(&kvp_watch.contents_from_ns, memory_order_relaxed)) return 0;
    uint64_t place = (r->direction & 15) == KVP_D2H ? r->dst : r->src;
    return !((place >> 6) * 0x9e3779b97f4a7c15u >> 40 &
             atomic_load_explicit(&kvp_watch.contents_mask, memory_order_relaxed));
}

/* Copies [address, address + bytes), at most 4096 bytes, to `into`: 0 where it cannot be read, for which no signal
 * comes.
 */
int kvp_read_memory(uint64_t address, uint64_t bytes, void *into);
uint64_t kvp_hash_words(const uint64_t *words, size_t count);

/* device_looks.c: what the device has where a load will go, of a sample. `next`: of a load whose source was looked at;
 * the other, of a call that begins now, while kvp_watch.device_looks is set: its start_ns may be later afterwards. */
void kvp_device_look_next(const kvp_record *record, uint64_t hash);
KVP_RARE void kvp_device_look(kvp_record *record);
/* Pieces of `width` bytes, KVP_ROWS of KVP_ROW at most, `stride` apart, put into `into` one behind the other: 0 where
 * they cannot be read. */
#define KVP_ROWS 16
#define KVP_ROW 64
int kvp_read_rows(uint64_t address, uint64_t stride, size_t rows, size_t width, void *into);

/* witness.c: around a copy while kvp_watch.witness is set, and what else writes to or gives back host memory. */
struct kvp_pieces { /* of a batch, or of a copy by itself */
    void *const *dsts, *const *srcs;
    const size_t *sizes;
    size_t count;
    int taken; /* 1: sources may be rewritten once the call has returned (cudaMemcpySrcAccessOrderDuringApiCall) */
};
void kvp_witness_start(const char *folder);
void kvp_witness_stop(void);
void kvp_witness_leaves(void); /* without exit handlers */
void kvp_witness_context_ends(void);
void kvp_witness_before(const kvp_record *record, const struct kvp_pieces *batch);
void kvp_witness_after(const kvp_record *record, const struct kvp_pieces *batch);
void kvp_witness_frees(unsigned call);
void kvp_witness_reads(const kvp_record *record); /* a file's bytes went into memory */

/* gate.c: of every call while kvp_watch.gate is set */
void kvp_gate_begin(void);
void kvp_gate(const kvp_record *record);

/* frames.c: Python's functions, from whoever runs in it; kvprobe/testing/gate.py names them. */
typedef struct {
    void *(*this_thread)(void);
    int (*gil_held)(void), (*gil_ensure)(void);
    void (*gil_release)(int);
    int (*gc_disable)(void), (*gc_enable)(void);
    void *(*thread_frame)(void *thread), *(*frame_back)(void *frame), *(*frame_code)(void *frame);
    int (*frame_line)(void *frame);
    void *(*attribute)(void *object, const char *name);
    void *(*encode)(void *text, const char *encoding, const char *errors);
    const char *(*text)(void *bytes);
    void (*release)(void *object);
    void (*clear)(void);
} kvp_python;
/* The calling thread's frames, innermost first, a line each as faulthandler writes them. 0: it could not be had. */
int kvp_write_whole_stack(const kvp_python *python, int fd);

/* nvtx.c */
void kvp_nvtx_start(void);
void kvp_nvtx_range_push(const kvp_record *record);
void kvp_nvtx_range_pop(void);

#endif
