/* A thread's clock that ran ahead: prints its distance from CLOCK_MONOTONIC (ns) before and after, and steps back. */
#include <stdio.h>
#include <stdlib.h>

#include "clock.c"

/* Of a few readings the one that was interrupted least. */
static int64_t distance(void) {
    int64_t best = 0;
    uint64_t shortest = UINT64_MAX;
    for (int i = 0; i < 16; i++) {
        uint64_t before = wall_ns(), now = kvp_clock(), after = wall_ns();
        if (after - before >= shortest) continue;
        shortest = after - before;
        best = (int64_t)(now - before - shortest / 2);
    }
    return best;
}

int main(void) {
    kvp_clock();
    if (!first_ticks) return puts("no counter"), 0;
    kvp_thread.ns += 50000; /* as if the rate had been measured wrong */
    int64_t ahead = distance();
    uint64_t last = kvp_clock(), begin = wall_ns(), back = 0, passed = 0;
    int64_t after = ahead;
    while (passed < 30000000 || (llabs(after) >= 5000 && passed < 60000000000u)) {
        for (int i = 0; i < 100; i++) {
            uint64_t now = kvp_clock();
            back += now < last;
            last = now;
        }
        after = distance();
        passed = wall_ns() - begin;
    }
    printf("%lld %lld %llu\n", (long long)ahead, (long long)after, (unsigned long long)back);
    return 0;
}
