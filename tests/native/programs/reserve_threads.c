/* The reserve of a packed pool under several threads: reserve_threads ROUNDS. Each thread stores into cells of its own,
 * of which some need their tail afterwards and some do not, and gives others up, while one looks on. Built with a
 * sanitizer: no race, no error; in the end every tail is there, once. */
#include "kvp_submitter.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 3, CELLS = 8, PART = 2, TAILS = 16, ROOM = 100 };
#define CHECK(what) ((what) ? (void)0 : (fprintf(stderr, "line %d: %s\n", __LINE__, #what), exit(1)))

static kvp_wire_note notes[THREADS * CELLS + TAILS];
static kvp_reserve *reserve;
static _Atomic int running = THREADS, stores;
static int rounds;

static void *stores_cells(void *number) {
    uint64_t own = (uint64_t)(intptr_t)number * CELLS;
    unsigned seed = (unsigned)own + 1;
    for (int r = 0; r < rounds; r++) {
        uint64_t first = own + (uint64_t)rand_r(&seed) % (CELLS / PART) * PART;
        if (!kvp_reserve_claim(reserve, PART)) {
            CHECK(kvp_reserve_discard(reserve, own, CELLS));
            continue;
        }
        kvp_reserve_begin(reserve, first, PART);
        kvp_reserve_unclaim(reserve, PART);
        for (uint64_t i = first; i < first + PART; i++) {
            CHECK(notes[i].summed >> 1 >= 1 && notes[i].summed >> 1 <= TAILS);
            notes[i].bytes = ROOM - 1 + (uint32_t)rand_r(&seed) % 3;
        }
        CHECK(!kvp_reserve_discard(reserve, own, CELLS)); /* one is being stored */
        kvp_reserve_end(reserve, first, PART, 0);
        for (uint64_t i = first; i < first + PART; i++) CHECK(!(notes[i].summed >> 1) == (notes[i].bytes <= ROOM));
        stores++;
    }
    CHECK(kvp_reserve_discard(reserve, own, CELLS));
    for (uint64_t i = own; i < own + CELLS; i++) CHECK(!notes[i].bytes && !notes[i].summed);
    running--;
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc > 1);
    rounds = atoi(argv[1]);
    reserve = kvp_reserve_open(notes, THREADS * CELLS + TAILS, TAILS, ROOM);
    CHECK(reserve);
    pthread_t threads[THREADS];
    for (intptr_t t = 0; t < THREADS; t++) pthread_create(&threads[t], NULL, stores_cells, (void *)t);
    while (running) CHECK(kvp_reserve_left(reserve) <= TAILS);
    for (int t = 0; t < THREADS; t++) pthread_join(threads[t], NULL);
    CHECK(stores && kvp_reserve_left(reserve) == TAILS);
    CHECK(!kvp_reserve_claim(reserve, TAILS + 1) && kvp_reserve_claim(reserve, TAILS));
    kvp_reserve_begin(reserve, THREADS * CELLS, TAILS);
    int seen[TAILS + 1] = {0};
    for (int i = 0; i < TAILS; i++) CHECK(!seen[notes[THREADS * CELLS + i].summed >> 1]++);
    CHECK(!seen[0]);
    kvp_reserve_close(reserve);
    printf("stores %d\n", stores);
    return 0;
}
