/* Reads and writes of tiers below CPU memory: files and sockets (files.c, places.c). */
#ifndef KVP_FILES_H
#define KVP_FILES_H

#include "interpose.h"

#include <stddef.h>
#include <sys/types.h>

/* Bytes from which on an operation is kept; the largest number while none is: then each call passes after one compare.
 */
extern _Atomic size_t kvp_files_least;

static inline int active(void) {
    return unlikely(atomic_load_explicit(&kvp_files_least, memory_order_relaxed) != SIZE_MAX);
}

/* 1 inside a call whose own system calls are its own: libaio's, liburing's. */
extern __thread int kvp_in_file_call __attribute__((tls_model("initial-exec")));

/* By whoever opens a process's ring file, at its first recorded CUDA call, until that is closed. */
void kvp_files_start(const char *folder);
void kvp_files_stop(void);

enum { NOT_KEPT = 0, COUNTED_ONLY = 1 }; /* instead of a time */

/* Entry of an operation: its time, or one of the two above. Nothing is held while the real call runs: a thread that is
 * cancelled there, or a signal handler, leaves nothing behind. */
uint64_t kvp_file_begins(void);
/* Its return, with what it moved; errno stays. `r`: call, direction, src, dst, bytes, count, transfer. */
void kvp_file_ends(uint64_t began, int fd, kvp_record *r);
void kvp_file_ends_at(uint64_t began, unsigned place, kvp_record *r);

/* places.c: where a descriptor leads to: a number that tiers-<pid>.jsonl of the run folder explains. */
enum { NO_PLACE = 0, UNTOLD_PLACE = 1 };
void kvp_places_start(const char *folder);
unsigned kvp_place_of(int fd);
void kvp_place_closes(int fd);

/* The function in whose place one of ours stands. */
#define AS(NAME) ((NAME##_fn *)(void *)atomic_load_explicit(&kvp_real_##NAME, memory_order_relaxed))

/* The functions in whose place files.c stands. */
#define FILE_FUNCTIONS(X)                                                                                              \
    X(read)                                                                                                            \
    X(__read_chk)                                                                                                      \
    X(pread)                                                                                                           \
    X(pread64)                                                                                                         \
    X(__pread_chk)                                                                                                     \
    X(__pread64_chk)                                                                                                   \
    X(readv)                                                                                                           \
    X(preadv)                                                                                                          \
    X(preadv64)                                                                                                        \
    X(preadv2)                                                                                                         \
    X(preadv64v2)                                                                                                      \
    X(write)                                                                                                           \
    X(pwrite)                                                                                                          \
    X(pwrite64)                                                                                                        \
    X(writev)                                                                                                          \
    X(pwritev)                                                                                                         \
    X(pwritev64)                                                                                                       \
    X(pwritev2)                                                                                                        \
    X(pwritev64v2)                                                                                                     \
    X(recv)                                                                                                            \
    X(__recv_chk)                                                                                                      \
    X(recvfrom)                                                                                                        \
    X(recvmsg)                                                                                                         \
    X(send)                                                                                                            \
    X(sendto)                                                                                                          \
    X(sendmsg)                                                                                                         \
    X(fsync)                                                                                                           \
    X(fdatasync)                                                                                                       \
    X(io_submit)                                                                                                       \
    X(io_uring_submit)                                                                                                 \
    X(io_uring_submit_and_wait)                                                                                        \
    X(syscall)                                                                                                         \
    X(close)
#define X(NAME) extern any_fn *_Atomic kvp_real_##NAME; /* what the function of ours for it calls (files.c) */
FILE_FUNCTIONS(X)
#undef X

#endif
