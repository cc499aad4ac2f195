/* Waits of the program's threads for somebody who asks it for something (waits.c). */
#ifndef KVP_WAITS_H
#define KVP_WAITS_H

#include "files.h"

/* Of a call that may wait: its time, or NOT_KEPT or COUNTED_ONLY. */
uint64_t kvp_wait_begins(void);
/* Its end: the time, where it waited so long that it is told of; else 0. */
uint64_t kvp_waited_until(uint64_t began);
void kvp_waited(unsigned how, uint64_t began, uint64_t until);
/* Whether somebody else asks by this descriptor. */
int kvp_is_served(int fd);

/* The end of a call that received by this descriptor, or was told that nothing more comes: from when on it did not wait
 * for somebody to ask, which is `began` unless that wait is told of. */
static inline uint64_t kvp_received(uint64_t began, int fd) {
    uint64_t until = kvp_waited_until(began);
    if (likely(!until) || !kvp_is_served(fd)) return began;
    kvp_waited(KVP_WAIT_recv, began, until);
    return until;
}

/* The functions in whose place waits.c stands; files.c stands in that of recv and read. */
#define WAIT_FUNCTIONS(X)                                                                                              \
    X(bind)                                                                                                            \
    X(accept)                                                                                                          \
    X(accept4)                                                                                                         \
    X(poll)                                                                                                            \
    X(__poll_chk)                                                                                                      \
    X(ppoll)                                                                                                           \
    X(__ppoll_chk)                                                                                                     \
    X(select)                                                                                                          \
    X(pselect)                                                                                                         \
    X(epoll_wait)                                                                                                      \
    X(epoll_pwait)                                                                                                     \
    X(epoll_pwait2)
#define X(NAME) extern any_fn *_Atomic kvp_real_##NAME; /* what the function of ours for it calls (waits.c) */
WAIT_FUNCTIONS(X)
#undef X

#endif
