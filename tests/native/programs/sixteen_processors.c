/* Preloaded: whoever asks may use sixteen processors, whatever the machine has. */
#define _GNU_SOURCE
#include <sched.h>

int sched_getaffinity(pid_t process, size_t bytes, cpu_set_t *set) {
    (void)process;
    CPU_ZERO_S(bytes, set);
    for (int i = 0; i < 16; i++) CPU_SET_S(i, bytes, set);
    return 0;
}
