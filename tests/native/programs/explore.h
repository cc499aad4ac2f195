/* One thread at a time, and a number that says which: the scheduler behind kvp_explore.h. Time is virtual: a step of it
 * at each yield, and to the next sleeper's end where nobody can go on. */
#ifndef EXPLORE_H
#define EXPLORE_H

#define KVP_EXPLORE_SCHEDULER 1
#include "kvp_explore.h"

void explore_begin(uint64_t seed, void (*idle)(void)); /* this thread is the first; `idle`: nobody can go on */
void explore_end(void);
uint64_t explore_now(void);
uint32_t explore_below(uint32_t bound);
void explore_no_memory(uint32_t number); /* that allocation of those to come fails; 0: none */
int explore_had_no_memory(void);
void explore_exact(int exact); /* kvp_explore_exact from now on */
int explore_self(void);        /* number of the thread that goes */
void explore_fail(const char *what); /* names the seed and ends the process */
uint64_t explore_digest(void);       /* of who went on when: equal where two interleavings are */
int explore_holds(const pthread_mutex_t *mutex); /* whether this thread does; NULL: any */
/* Whether anybody sleeps on the word without an end. */
int explore_sleeps_for_good(const atomic_uint *word);

#endif
