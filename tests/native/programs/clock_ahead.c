/* A thread's clock that ran ahead: prints its distance from CLOCK_MONOTONIC (ns) before and after, and steps back. */
#include <stdio.h>
#include <stdlib.h>

#include "clock.c"

static int64_t distance(void) {
    int64_t best = INT64_MAX;
    for (int i = 0; i < 2000; i++) {
        uint64_t before = wall_ns(), now = kvp_clock(), after = wall_ns();
        int64_t apart = (int64_t)(now - before - (after - before) / 2);
        if (after - before < 2000 && llabs(apart) < llabs(best)) best = apart;
    }
    return best;
}

int main(void) {
    kvp_clock();
    if (!first_ticks) return puts("no counter"), 0;
    kvp_thread.ns += 50000; /* as if the rate had been measured wrong */
    int64_t ahead = distance();
    uint64_t last = kvp_clock(), end = wall_ns() + 30000000, back = 0;
    while (wall_ns() < end) {
        uint64_t now = kvp_clock();
        back += now < last;
        last = now;
    }
    printf("%lld %lld %llu\n", (long long)ahead, (long long)distance(), (unsigned long long)back);
    return 0;
}
