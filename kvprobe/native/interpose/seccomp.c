/* A program that puts itself under seccomp may die of any system call that it did not foresee. From then on the ring
 * makes none: calls go on being counted, in the space that is there (in strict mode they are not). Seen are prctl and
 * libseccomp's seccomp_load; who calls the kernel directly is not. */
#define _GNU_SOURCE
#include "cures.h"
#include "files.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/seccomp.h>
#include <stdarg.h>
#include <sys/prctl.h>

typedef int prctl_fn(int, ...);
typedef int load_fn(void *);

static prctl_fn *_Atomic next_prctl;

static prctl_fn *find_prctl(void) {
    static const char *const versions[] = {"GLIBC_2.2.5", "GLIBC_2.17"};
    for (unsigned i = 0; i < sizeof versions / sizeof *versions && !next_prctl; i++)
        next_prctl = (prctl_fn *)dlvsym(RTLD_NEXT, "prctl", versions[i]);
    return next_prctl;
}

/* Before the filter is there: another thread may be about to grow its ring. */
static void seal(void) {
    kvp_files_stop(); /* a look at a descriptor is a system call */
    kvp_cures_stop();
    kvp_marks_stop();
    kvp_contents_stop();
    kvp_witness_stop();
    kvp_pauses_go(0);
    if (!kvp_ring_is_open()) kvp_watch.on = 0;
    kvp_ring_seal(1);
}

static void unseal(int on) {
    kvp_ring_seal(0);
    kvp_pauses_go(1);
    kvp_watch.on = on;
    if (kvp_ring_is_open()) kvp_files_least = KVP_FILE_LEAST;
}

CUDA_EXPORT int prctl(int option, ...);
int prctl(int option, ...) {
    unsigned long words[4];
    va_list rest;
    va_start(rest, option);
    for (int i = 0; i < 4; i++) words[i] = va_arg(rest, unsigned long); /* what is not passed is not read there */
    va_end(rest);
    prctl_fn *real = next_prctl ? next_prctl : find_prctl();
    if (!real) {
        errno = ENOSYS;
        return -1;
    }
    int seals = option == PR_SET_SECCOMP, was = kvp_watch.on;
    if (seals) seal();
    if (seals && words[0] == SECCOMP_MODE_STRICT) kvp_watch.on = 0; /* it takes the CPU's counter, our clock, away */
    int result = real(option, words[0], words[1], words[2], words[3]);
    if (seals && result) unseal(was);
    return result;
}

any_fn *_Atomic kvp_real_seccomp_load;

/* In place of libseccomp's function, where a library is linked to it. */
int kvp_seccomp_load(void *filter) {
    load_fn *real = (load_fn *)kvp_real_seccomp_load;
    int was = kvp_watch.on;
    seal();
    int result = real(filter);
    if (result) unseal(was);
    return result;
}
