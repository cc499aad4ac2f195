/* What the injector's files share: it has a thread of its own made in a running process, which loads a library there
 * and calls a function of it. `kvprobe attach` and `detach` use it.
 *
 * One thread of the process is borrowed for a few system calls (borrow.c); the others run on. Rules it keeps:
 *  - nothing is written into code that the process or a child of it could run: there is no breakpoint;
 *  - no signal is sent, and those that arrive meanwhile are delivered as they would have been;
 *  - whenever the injector dies, by whatever cause, the borrowed thread finds its own way back (frame.c), and the
 *    thread that was made undoes what it did within LET_GO_MS (stub.c). */
#ifndef KVP_INJECT_H
#define KVP_INJECT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/user.h>
#include <time.h>

#define LET_GO_MS 1000 /* the thread that was made hears nothing of the injector for so long: it undoes what it did */
#define STUB_PAUSE_MS 2
#define CODE_BYTES 4096 /* of the memory that is mapped in the process: the stub, then a struct injected */

/* ---- inject.c: what Python asks for ----------------------------------------------------------------------------- */

struct kvp_injection {
    const char *library;  /* its path */
    const char *function; /* int function(library, folder, detail, max_bytes): negative where it did nothing */
    const char *undo;     /* int undo(void): called unless the caller says that what was done is to stay; or "" */
    const char *folder, *detail;
    uint64_t max_bytes;
    uint32_t deadline_ms; /* for all until the function has returned */
};

/* ---- stub.c: what lies in the process --------------------------------------------------------------------------- */

enum state { STARTING, LOADED, DONE, FAILED };           /* written by the thread in the process */
enum order { NO_ORDER, GO_ON, LEAVE_IT, UNDO };          /* written by the injector */
enum { INJECTED_MAGIC = 0x6b767069, PATH_BYTES = 4096 }; /* "kvpi" */

struct injected {
    int (*munmap)(void *, size_t); /* the first three: known to the assembler in stub.c */
    void *base;
    size_t bytes;
    void *(*dlopen)(const char *, int);
    void *(*dlsym)(void *, const char *);
    int (*dlclose)(void *);
    char *(*dlerror)(void);
    int (*mprotect)(void *, size_t, int);
    int (*madvise)(void *, size_t, int);
    int (*nanosleep)(const struct timespec *, struct timespec *);
    unsigned long (*pthread_self)(void);
    int (*pthread_detach)(unsigned long);
    volatile uint32_t magic, state, order;
    volatile uint32_t beat; /* another one each time that the injector looked */
    volatile int32_t result;
    uint64_t max_bytes;
    struct timespec pause;
    char library[PATH_BYTES], folder[PATH_BYTES], detail[16], function[32], undo[32];
    volatile char error[512];
};

/* The linker's names for the ends of the section that the stub is in. */
extern const char __start_kvp_stub[] __attribute__((visibility("hidden")));
extern const char __stop_kvp_stub[] __attribute__((visibility("hidden")));
extern const char kvp_stub_entry[] __attribute__((visibility("hidden")));

/* ---- target.c: what is known of the process --------------------------------------------------------------------- */

enum { DEFINES_MALLOC = 1, DEFINES_THREADS = 2, IS_LOADER = 4, IS_C_LIBRARY = 8 };

struct object {
    uint64_t first, last, text_first, text_last; /* last: one past the end */
    uint64_t bias, symbols, strings, hashes;
    unsigned is;
    char name[64]; /* of its file, without the folder */
};

struct area {
    uint64_t first, last;
    int main_stack;
};

struct target {
    pid_t pid;
    int mem; /* /proc/PID/mem */
    struct object *objects;
    struct area *areas; /* memory that may be written */
    size_t object_count, area_count;
    uint64_t mapped_to;            /* end of the newest mapping that was read */
    uint64_t free_bytes, free_at;  /* the largest range where nothing is mapped, and the middle of it */
    uint64_t held_ns;              /* threads were, together; from asking one to stop, until it was let go */
    uint64_t restore, system_call; /* code of the C library: the end of a signal handler; `syscall; ret` */
    int refused, stopped;          /* a thread may not be traced; the process was stopped by a signal */
    const char *stuck;             /* why no further thread is tried */
    char text[640];                /* an error that is made up here */
};

/* NULL, or what stands against it. */
const char *kvp_target_open(struct target *t, pid_t pid);
void kvp_target_areas(struct target *t); /* anew: stacks come and go */
int kvp_target_is_code(const struct target *t, uint64_t first, uint64_t last);
uint64_t kvp_target_symbol(struct target *t, const char *name);
const struct object *kvp_target_object(const struct target *t, uint64_t address);
const struct area *kvp_target_area(const struct target *t, uint64_t address);
int kvp_target_read(const struct target *t, uint64_t address, void *to, size_t bytes);
int kvp_target_write(const struct target *t, uint64_t address, const void *from, size_t bytes);

/* ---- frame.c: how a thread finds back by itself ------------------------------------------------------------------ */

enum { RED_ZONE = 128, XSTATE_BYTES = 16384, FRAME_BYTES = XSTATE_BYTES + 1024, FUNCTION_BYTES = 32768 };

struct borrowed {
    struct target *t;
    pid_t tid;
    struct user_regs_struct was; /* as the kernel keeps them: a system call that waits is marked to be made again */
    uint64_t mask;               /* of blocked signals */
    uint8_t xstate[XSTATE_BYTES] __attribute__((aligned(64)));
    size_t xstate_bytes;
    uint64_t frame, scratch;       /* on its stack: where what it runs returns to; a word for a result */
    uint64_t since_ns, stopped_ns; /* asked to stop; seen to have stopped */
    int entering;                  /* the newest stop was at the beginning of a system call */
    int alone;                     /* it was let go, and finds back by itself */
};

/* Where a thread continues that is not to be told by the kernel: before the system call that it waited in. */
struct user_regs_struct kvp_resting(const struct user_regs_struct *was);
/* Writes the frame below what the thread's stack holds; 0: there is no space. */
int kvp_frame_write(struct borrowed *b);

/* ---- borrow.c ---------------------------------------------------------------------------------------------------- */

uint64_t kvp_now_ns(void);
/* Holds a thread that is neither inside the allocator nor inside the loader. 0: none came by until then. */
int kvp_borrow(struct target *t, struct borrowed *b, uint64_t until_ns);
/* Has it make a system call, or call a function. 0: the thread has gone, or was let go before it was done. */
int kvp_borrow_system_call(struct borrowed *b, long number, const uint64_t arguments[6], uint64_t *result);
int kvp_borrow_call(struct borrowed *b, uint64_t function, const uint64_t arguments[4]);
/* As it was. */
void kvp_give_back(struct borrowed *b);

/* judge.c: whether a thread may be borrowed, asked without stopping it, and of one that is stopped. */
enum may { NO, RUNS, WAITS, WAITS_ANEW }; /* the last: its waiting would begin anew */
enum may kvp_may_fit(const struct target *t, pid_t tid);
int kvp_fits(const struct borrowed *b);
int kvp_waits(const struct user_regs_struct *r);
void kvp_undo_interruption(struct user_regs_struct *r);

/* Where the injector may be killed; tests do. */
#ifdef KVP_INJECT_DIES
void kvp_inject_dies(int step);
#define STEP(N) kvp_inject_dies(N)
#else
#define STEP(N) ((void)0)
#endif

#endif
