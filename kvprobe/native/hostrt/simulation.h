/* What the files of the virtual clock share: the simulation, its actors, and what a suspended caller waits for. */
#ifndef KVHOST_SIMULATION_H
#define KVHOST_SIMULATION_H

#include "rt.h"

#include <semaphore.h>
#include <ucontext.h>

#define NEVER UINT64_MAX
#define START_NS 1000000000u

/* A caller's wait, until the first of these: its parker goes, its condition holds, the time has come. */
typedef struct {
    parker *p;
    int (*condition)(void *ctx);
    void *ctx;
    uint64_t until_ns;
    bool last; /* after all else that is due at until_ns */
    cudaError_t error;
} waiting;

/* RUNNING: its step is on some stack and not suspended, though calls that it made may be running others. */
enum actor_state { ACTOR_IDLE, ACTOR_RUNNING, ACTOR_WAITING };

typedef struct actor {
    runtime *rt;
    int id;
    kvhost_step step;
    void *ctx;
    bool on_callers_stack, on_own_thread, woken, removed, leaves;
    enum actor_state state;
    uint64_t wake_ns; /* ACTOR_IDLE: of its next step */
    waiting *waiting; /* ACTOR_WAITING: on its own stack */
    thread_state thread;
    ucontext_t context, loop; /* its own, and that of who runs it */
    void *stack;
    pthread_t own; /* on_own_thread: whose turn it is, its own or that of who runs it */
    sem_t go, back;
    struct actor *next;
} actor;

struct simulation {
    pthread_mutex_t lock;
    _Atomic uint32_t owner; /* tid of the thread that is in a call; 0: none */
    bool locked_briefly;    /* by kvh_lock of a function that is no call */
    uint64_t now_ns, random, events, digest;
    uint64_t polls; /* steps of actors since the model's newest event */
    bool peeking;   /* inside a condition */
    op *copying[CLASSES];
    uint64_t copy_end_ns[CLASSES];
    enum half copy_then[CLASSES]; /* what of the copy moves when it ends; 0: nothing */
    bool copy_moves[CLASSES];
    waiting *innermost; /* of the callers whose waits run the loop on their stacks */
    actor *current;     /* whose step makes the calls now; NULL: a caller's */
    actor *actors, **actors_end;
    int next_actor;
    char stuck[8192];
};

/* Until `w` holds: runs the loop on a caller's stack, suspends an actor that has its own. */
cudaError_t kvh_simulate(runtime *rt, waiting *w);
void kvh_resume(runtime *rt, actor *a);    /* from the loop: its next step, or the call that it waits in */
void kvh_suspend(runtime *rt, waiting *w); /* the current actor */
void kvh_remove_actor(runtime *rt, actor *a);
void kvh_describe_stuck(runtime *rt);

#endif
