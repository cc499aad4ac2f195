/* Where threads of the submitter may be exchanged for one another: at every lock, at every sleep, and at the points
 * that are declared with YIELD. Built with KVP_EXPLORE a scheduler decides there who goes on (tests/native/programs),
 * so that an interleaving has a number and comes again; else all of it is nothing. */
#ifndef KVP_EXPLORE_H
#define KVP_EXPLORE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef KVP_EXPLORE

void kvp_explore_yield(void);
int kvp_explore_lock(pthread_mutex_t *mutex);
int kvp_explore_trylock(pthread_mutex_t *mutex);
int kvp_explore_unlock(pthread_mutex_t *mutex);
int kvp_explore_create(pthread_t *thread, void *(*begin)(void *), void *arg);
int kvp_explore_join(pthread_t thread);
int kvp_explore_sleep(atomic_uint *word, uint32_t value, uint64_t ns); /* 1: the time ran out, and nobody woke it */
void kvp_explore_wake(atomic_uint *word);
int kvp_explore_no_memory(void); /* 1: this allocation fails */

int kvp_explore_exact(void); /* 1: memory is had for each request anew, and not a word more than it asks for */

#define YIELD() kvp_explore_yield()
#define EXACT_MEMORY() kvp_explore_exact()
#ifndef KVP_EXPLORE_SCHEDULER
#define pthread_mutex_lock(mutex) kvp_explore_lock(mutex)
#define pthread_mutex_trylock(mutex) kvp_explore_trylock(mutex)
#define pthread_mutex_unlock(mutex) kvp_explore_unlock(mutex)
#define pthread_create(thread, attributes, begin, arg) kvp_explore_create(thread, begin, arg)
#define pthread_join(thread, result) kvp_explore_join(thread)
#define malloc(bytes) (kvp_explore_no_memory() ? NULL : malloc(bytes))
#define calloc(count, bytes) (kvp_explore_no_memory() ? NULL : calloc(count, bytes))
#define sched_yield() kvp_explore_yield()
#endif

#else
#define YIELD() ((void)0)
#define EXACT_MEMORY() 0
#endif

#endif
