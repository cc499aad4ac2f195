/* A thread of ours in somebody's process: signals that are sent go to the program's threads. */
#ifndef KVP_SIGNALS_H
#define KVP_SIGNALS_H

#include <signal.h>
#include <stddef.h>

/* Blocks them for threads that are made from now on; `before` goes to pthread_sigmask afterwards. A fault is the
 * thread's own: the program's handler runs for it as in any thread (one that maps pages when they are touched, one that
 * writes a stack before the process ends), where a blocked fault would end the process without a word. */
static inline void kvp_block_signals(sigset_t *before) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    sigset_t all;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, before);
}

#endif
