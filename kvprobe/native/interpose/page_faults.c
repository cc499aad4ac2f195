/* Page faults of the calling thread inside large calls that pin or copy, and the NUMA nodes of the memory afterwards.
 *
 * A driver that pins, and one that copies to memory nobody has touched, makes pages on the thread that called: the time
 * is in the call and nothing says so. Asked is the kernel's own count (getrusage), before the call and after it, which
 * is 0.2 us each: of calls of KVP_PAGES_FROM bytes and more, and of copies only where the host's side is not known to
 * be pinned. Told is what took a millisecond. What other threads make, kvprobe's own as well, is not counted. */
#define _GNU_SOURCE
#include "interpose.h"

#include <errno.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TOLD_NS 1000000u
#define PLACES 5
#define OTHER_NODE 15 /* bit of all nodes from 15 on */

static __thread struct {
    uint64_t minor, major;
    int asked;
} before __attribute__((tls_model("initial-exec")));

static int ask(uint64_t *minor, uint64_t *major) {
    struct rusage used;
    if (getrusage(RUSAGE_THREAD, &used)) return 0;
    *minor = (uint64_t)used.ru_minflt;
    *major = (uint64_t)used.ru_majflt;
    return 1;
}

/* Pinned memory is a call's dst, too. */
static uint64_t host_side(const kvp_record *r) { return (r->direction & 15) == KVP_H2D ? r->src : r->dst; }

void kvp_pages_before(const kvp_record *r) {
    int was = errno;
    int pinned = kvp_known_memory(r->src) == KVP_MEM_PINNED || kvp_known_memory(r->dst) == KVP_MEM_PINNED;
    before.asked = (r->direction & 15) != KVP_D2D && !pinned && ask(&before.minor, &before.major);
    errno = was;
}

/* A bit for each node that a few pages lie on; 0: not known. */
static uint16_t nodes_of(uint64_t at, uint64_t bytes) {
    enum { NODE_OF_ADDRESS = 1 | 2 }; /* MPOL_F_NODE, MPOL_F_ADDR */
    unsigned found = 0;
    for (unsigned i = 0; at && i < PLACES; i++) {
        int node = -1;
        if (syscall(SYS_get_mempolicy, &node, NULL, 0, at + (bytes - 1) / (PLACES - 1) * i, NODE_OF_ADDRESS)) return 0;
        if (node >= 0) found |= 1u << (node < OTHER_NODE ? node : OTHER_NODE);
    }
    return (uint16_t)found;
}

void kvp_pages_after(const kvp_record *r) {
    uint64_t minor, major;
    int was = errno;
    if (before.asked && r->dur_ns != KVP_UNTIMED && r->dur_ns >= TOLD_NS && !r->result && ask(&minor, &major)) {
        kvp_record note = *r;
        uint64_t more = minor - before.minor;
        note.call = KVP_CALL_pages;
        note.count = more < UINT32_MAX ? (uint32_t)more : UINT32_MAX;
        note.transfer = (uint32_t)(major - before.major);
        note.result = nodes_of(host_side(r), r->bytes);
        kvp_ring_note(&note);
    }
    before.asked = 0;
    errno = was;
}
