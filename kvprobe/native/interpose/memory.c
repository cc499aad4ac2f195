/* What kind of memory an address is: remembered per thread as ranges, so that a copy costs a few compares.
 *
 * The driver is asked once per allocation (cuPointerGetAttributes: it leaves the runtime's last error alone), after the
 * copy's own call has returned; of pageable memory, which it knows no ranges of, once per address. Freeing or
 * registering memory makes every thread forget. */
#define _GNU_SOURCE
#include "interpose.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RANGES 8

enum { ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_IS_MANAGED = 8, ATTRIBUTE_RANGE_START = 11, ATTRIBUTE_RANGE_SIZE = 12 };

typedef int pointer_attributes_fn(unsigned count, int *attributes, void **data, uint64_t address);

static pointer_attributes_fn *_Atomic ask;
static atomic_int looked;

static __thread struct {
    uint32_t generation, next, last; /* last: the range that answered, most often the one that will */
    struct {
        uint64_t start, size;
        uint8_t kind, node; /* node: of NUMA, plus one; 0 where it was not asked or not told */
    } range[RANGES];
} known KVP_THREAD_ALIGNED __attribute__((tls_model("initial-exec")));

void kvp_fetch_ranges(void) { __builtin_prefetch(&known.range[known.last]); }

void kvp_forget_ranges(void) { atomic_fetch_add(&kvp_watch.generation, 1); }

/* NUMA node of a page, plus one. Only where there are several: one system call an allocation. */
static uint8_t node_of(uint64_t address) {
    static atomic_int several; /* 1: no, 2: yes */
    if (!several) several = access("/sys/devices/system/node/node1", F_OK) ? 1 : 2;
    int node = -1;
    enum { NODE_OF_ADDRESS = 1 | 2 }; /* MPOL_F_NODE, MPOL_F_ADDR */
    if (several == 1 || syscall(SYS_get_mempolicy, &node, NULL, 0, address, NODE_OF_ADDRESS)) return 0;
    return node >= 0 && node < 254 ? (uint8_t)(node + 1) : 0;
}

static inline int is_host(int kind) { return kind == KVP_MEM_PAGEABLE || kind == KVP_MEM_PINNED; }

static __attribute__((noinline)) int ask_driver(uint64_t address) {
    if (!looked) {
        ask = (pointer_attributes_fn *)kvp_driver_symbol("cuPointerGetAttributes");
        looked = 1;
        if (!ask) kvp_watch.no_driver = 1;
    }
    pointer_attributes_fn *function = ask;
    if (!function) return KVP_MEM_UNKNOWN;
    uint32_t type = 0, managed = 0;
    uint64_t start = 0, size = 0;
    int attributes[] = {ATTRIBUTE_MEMORY_TYPE, ATTRIBUTE_IS_MANAGED, ATTRIBUTE_RANGE_START, ATTRIBUTE_RANGE_SIZE};
    void *data[] = {&type, &managed, &start, &size};
    int kind = KVP_MEM_UNKNOWN;
    if (!function(4, attributes, data, address))
        kind = managed ? KVP_MEM_MANAGED : type == 1 ? KVP_MEM_PINNED : type == 2 ? KVP_MEM_DEVICE : KVP_MEM_PAGEABLE;
    if (!size || address - start >= size) { /* the answer holds for this address alone: its neighbour may be pinned */
        start = address;
        size = kind == KVP_MEM_PAGEABLE || kind == KVP_MEM_UNKNOWN;
    }
    if (size) {
        unsigned at = size == 1 ? RANGES - 1 : known.next++ % (RANGES - 1); /* single addresses crowd out no range */
        known.range[at].start = start;
        known.range[at].size = size;
        known.range[at].kind = (uint8_t)kind;
        int was = errno;
        known.range[at].node = is_host(kind) ? node_of(address) : 0;
        errno = was;
        kvp_thread.node = known.range[at].node;
    }
    return kind;
}

static inline int kind_of(uint64_t address) {
    uint32_t now = kvp_watch.generation;
    if (unlikely(known.generation != now)) {
        memset(known.range, 0, sizeof known.range);
        known.generation = now;
    }
    uint32_t last = known.last;
    if (likely(address - known.range[last].start < known.range[last].size)) {
        if (unlikely(known.range[last].node)) kvp_thread.node = known.range[last].node;
        return known.range[last].kind;
    }
    for (uint32_t i = 0; i < RANGES; i++)
        if (address - known.range[i].start < known.range[i].size) {
            known.last = i;
            if (unlikely(known.range[i].node)) kvp_thread.node = known.range[i].node;
            return known.range[i].kind;
        }
    return ask_driver(address);
}

int kvp_known_memory(uint64_t address) {
    if (known.generation != kvp_watch.generation) return KVP_MEM_UNKNOWN;
    for (uint32_t i = 0; i < RANGES; i++)
        if (address - known.range[i].start < known.range[i].size) return known.range[i].kind;
    return KVP_MEM_UNKNOWN;
}

void kvp_range_of(uint64_t address, uint64_t *base, uint64_t *bytes) {
    for (uint32_t i = 0; i < RANGES; i++)
        if (address - known.range[i].start < known.range[i].size) {
            *base = known.range[i].start;
            *bytes = known.range[i].size;
        }
}

void kvp_classify(kvp_record *r) {
    int direction = r->direction & 15, memory = 0;
    if (kvp_watch.no_driver) return;
    if (direction == KVP_H2D)
        memory = kind_of(r->src);
    else if (direction == KVP_D2H)
        memory = kind_of(r->dst);
    else if (direction == KVP_DIR_UNKNOWN) {
        int src = kind_of(r->src), dst = kind_of(r->dst);
        if (is_host(src) && dst == KVP_MEM_DEVICE)
            direction = KVP_H2D, memory = src;
        else if (src == KVP_MEM_DEVICE && is_host(dst))
            direction = KVP_D2H, memory = dst;
        else if (src == KVP_MEM_DEVICE && dst == KVP_MEM_DEVICE)
            direction = KVP_D2D, memory = KVP_MEM_DEVICE;
        else if (is_host(src) && is_host(dst))
            direction = KVP_H2H, memory = src;
        else if (src == KVP_MEM_MANAGED || dst == KVP_MEM_MANAGED)
            memory = KVP_MEM_MANAGED;
    }
    r->direction = (uint8_t)(direction | memory << 4);
}
