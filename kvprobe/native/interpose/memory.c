/* What kind of memory an address is: remembered per thread as ranges, so that a copy costs a few compares.
 *
 * The driver is asked once per allocation (cuPointerGetAttributes: it leaves the runtime's last error alone), after the
 * copy's own call has returned, or before it where a mark has to know which way the copy goes; of pageable memory,
 * which it knows no ranges of, once per address. Freeing or registering memory makes every thread forget. */
#define _GNU_SOURCE
#include "interpose.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_IS_MANAGED = 8, ATTRIBUTE_RANGE_START = 11, ATTRIBUTE_RANGE_SIZE = 12 };

typedef int pointer_attributes_fn(unsigned count, int *attributes, void **data, uint64_t address);

static pointer_attributes_fn *_Atomic ask;
static atomic_int looked;

/* What this thread knows of memory, beside what its newest copy found (thread.h). */
#define KVP_RANGES 8
static __thread struct {
    struct kvp_range range[KVP_RANGES];
    uint32_t next;
} known __attribute__((tls_model("initial-exec")));

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

static int is_host(int kind) { return kind == KVP_MEM_PAGEABLE || kind == KVP_MEM_PINNED; }

static int ask_driver(uint64_t address) {
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
        unsigned at = size == 1 ? KVP_RANGES - 1 : known.next++ % (KVP_RANGES - 1); /* crowds out no range */
        int was = errno;
        uint8_t node = is_host(kind) ? node_of(address) : 0;
        errno = was;
        known.range[at] = (struct kvp_range){start, size, (uint8_t)kind, node};
        kvp_thread.node = node;
    }
    return kind;
}

int kvp_look_up(uint64_t address, struct kvp_range *newest) {
    if (kvp_thread.generation != kvp_watch.generation) {
        memset(&known, 0, sizeof known);
        kvp_thread.src = kvp_thread.dst = (struct kvp_range){0};
        kvp_thread.generation = kvp_watch.generation;
    }
    for (uint32_t i = 0; i < KVP_RANGES; i++)
        if (address - known.range[i].start < known.range[i].size) {
            *newest = known.range[i];
            if (newest->node) kvp_thread.node = newest->node;
            return newest->kind;
        }
    return ask_driver(address);
}

static const struct kvp_range *range_of(uint64_t address) {
    for (uint32_t i = 0; i < KVP_RANGES; i++)
        if (address - known.range[i].start < known.range[i].size) return &known.range[i];
    return address - kvp_thread.src.start < kvp_thread.src.size   ? &kvp_thread.src
           : address - kvp_thread.dst.start < kvp_thread.dst.size ? &kvp_thread.dst
                                                                  : NULL;
}

int kvp_known_memory(uint64_t address) {
    const struct kvp_range *range = kvp_thread.generation == kvp_watch.generation ? range_of(address) : NULL;
    return range ? range->kind : KVP_MEM_UNKNOWN;
}

void kvp_range_of(uint64_t address, uint64_t *base, uint64_t *bytes) {
    const struct kvp_range *range = range_of(address);
    if (range) *base = range->start, *bytes = range->size;
}

unsigned kvp_classify_both(uint64_t src_address, uint64_t dst_address) {
    int direction = KVP_DIR_UNKNOWN, memory = KVP_MEM_UNKNOWN;
    int src = kvp_kind_of(src_address, &kvp_thread.src), dst = kvp_kind_of(dst_address, &kvp_thread.dst);
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
    return (unsigned)(direction | memory << 4);
}
