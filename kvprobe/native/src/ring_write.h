/* One call's way into its thread's section, inline: what every call runs is here, what few run is in ring.c. Inside one
 * library only. */
#ifndef KVP_RING_WRITE_H
#define KVP_RING_WRITE_H

#include "thread.h"

#define KVP_RING_INDEX 512 /* twice the slots there can be: probing stays short */

/* A section as its owner sees it; only the mapping is shared with readers. */
struct section {
    kvp_section_header *header; /* from its first file on never NULL again: a late writer may look */
    uint32_t epoch;             /* of the file that it is mapped for, once it is */
    kvp_slot *last;             /* newest call's; at first the first one, which no call has */
    uint64_t *counter;          /* of its histogram */
    kvp_record *ring;
    kvp_record *next, *ready; /* where the next record goes; the first one with no disk space behind it */
    kvp_slot *slots;
    kvp_record *slow;
    uint64_t slow_at, slow_ready; /* likewise, slow ring */
    void *memory;                 /* mapped for it now or in an earlier file, and how much */
    uint64_t mapped;
    uint32_t slots_ready, number;
    kvp_record several;             /* calls that are not in the ring yet; count 0: none */
    int waited;                     /* the newest record in the ring is a wait */
    uint16_t index[KVP_RING_INDEX]; /* hash of a slot's key -> its number + 1 */
} __attribute__((aligned(64)));

/* What the kernel makes 0 in a child. */
struct kvp_alive {
    uint32_t epoch;     /* of the file while it is open, else 0; a thread's section belongs to one epoch */
    uint32_t attaching; /* threads that are making, taking over or leaving a section */
};

/* ring.c */
KVP_HIDDEN KVP_RARE struct section *kvp_ring_attach(void); /* this thread's section, made or taken over; NULL: none */
/* `key`: a slot's call and direction, as kvp_ring_last has them. */
KVP_HIDDEN __attribute__((noinline)) kvp_slot *kvp_ring_find_slot(struct section *section, uint64_t stream,
                                                                  uint16_t key);
KVP_HIDDEN KVP_RARE void kvp_ring_grow(struct section *section);
/* Records by value, made by kvp_apart: one whose address is given away anywhere lies in memory everywhere, and that of
 * a copy is to stay in registers. */
KVP_HIDDEN KVP_RARE void kvp_ring_over(kvp_record r);
/* A call that was slow or returned something else than 0. */
KVP_HIDDEN KVP_RARE void kvp_ring_unusual(struct section *section, kvp_slot *slot, kvp_record r, int detail);
KVP_HIDDEN __attribute__((noinline)) void kvp_ring_sum_up(struct section *section, const kvp_record *r);

#define kvp_likely(x) __builtin_expect(!!(x), 1)
#define kvp_unlikely(x) __builtin_expect(!!(x), 0)

static inline uint32_t kvp_ring_epoch(void) {
    const struct kvp_alive *alive = __atomic_load_n(&kvp_process.alive, __ATOMIC_ACQUIRE);
    return __atomic_load_n(&alive->epoch, __ATOMIC_ACQUIRE);
}

static inline struct section *kvp_ring_section(void) {
    struct section *section = kvp_thread.section;
    if (kvp_likely(section && kvp_thread.epoch == kvp_ring_epoch())) return section;
    return kvp_ring_attach();
}

static inline __attribute__((always_inline)) kvp_record kvp_apart(const kvp_record *r) {
    return (kvp_record){.start_ns = r->start_ns,
                        .dur_ns = r->dur_ns,
                        .stream = r->stream,
                        .src = r->src,
                        .dst = r->dst,
                        .bytes = r->bytes,
                        .tid = r->tid,
                        .transfer = r->transfer,
                        .count = r->count,
                        .result = r->result,
                        .call = r->call,
                        .direction = r->direction};
}

/* A record's last word, composed: a load that is wider than a store just before it waits until that has left the
 * processor's queue. */
static inline uint64_t kvp_ring_last(const kvp_record *r, uint64_t result, uint64_t direction) {
    return r->count | result << 32 | (uint64_t)r->call << 48 | direction << 56;
}

/* Word by word for the same reason; not by plain stores, or the compiler makes vectors of them. */
static inline void kvp_ring_put(kvp_record *record, const kvp_record *r, uint64_t dur_ns, uint64_t last, uint32_t tid) {
    typedef uint64_t word __attribute__((may_alias));
#define PUT(AT, VALUE) __atomic_store_n((word *)record + (AT), (VALUE), __ATOMIC_RELAXED)
    PUT(0, r->start_ns);
    PUT(1, dur_ns);
    PUT(2, r->stream);
    PUT(3, r->src);
    PUT(4, r->dst);
    PUT(5, r->bytes);
    PUT(6, (r->tid ? r->tid : tid) | (uint64_t)r->transfer << 32);
    PUT(7, last);
#undef PUT
}

/* kvp_ring_enter, inline. */
static inline int kvp_ring_entered(uint32_t call, uint64_t stream, uint64_t now_ns) {
    struct section *section = kvp_ring_section();
    if (kvp_unlikely(!section)) return 0;
    kvp_section_header *header = __atomic_load_n(&section->header, __ATOMIC_ACQUIRE);
    /* not plain stores: kvp_ring_blocked looks at them from another thread */
    __atomic_store_n(&header->in_since_ns, now_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&header->in_stream, stream, __ATOMIC_RELAXED);
    __atomic_store_n(&header->in_sequence, header->in_sequence + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&header->in_call, call, __ATOMIC_RELEASE);
    /* The call takes longer than they need to come. A store that misses costs even though nobody waits for it: the
     * driver's next locked instruction does. Should the section be another thread's by now, a wrong address is fetched
     * and no harm done, which ThreadSanitizer cannot know. */
#ifndef __SANITIZE_THREAD__
    __builtin_prefetch(header, 1);
    __builtin_prefetch(section->next, 1);
    __builtin_prefetch(section->last, 1);
    __builtin_prefetch(section->last->node_bytes, 1);
    __builtin_prefetch(section->counter, 1);
#endif
    return 1;
}

/* One record more in the ring of all calls. */
static inline void kvp_ring_append(struct section *section, kvp_section_header *header, const kvp_record *r,
                                   uint64_t dur_ns, uint64_t last) {
    if (kvp_unlikely(section->next == section->ready)) {
        kvp_ring_grow(section);
        if (section->next == section->ready) return;
    }
    kvp_ring_put(section->next++, r, dur_ns, last, header->tid);
    __atomic_store_n(&header->head, header->head + 1, __ATOMIC_RELEASE);
}

/* kvp_ring_write, inline. `dur_ns` and `last` (kvp_ring_last) are the record's, as the caller has them in registers;
 * node: as in kvp_thread. */
static inline __attribute__((always_inline)) void kvp_ring_written(const kvp_record *r, uint64_t dur_ns, uint64_t last,
                                                                   int timed, int detail, unsigned node) {
    typedef uint64_t pair_of_u64 __attribute__((vector_size(16), may_alias));
    struct section *section = kvp_ring_section();
    kvp_section_header *header =
        kvp_likely(section != NULL) ? __atomic_load_n(&section->header, __ATOMIC_ACQUIRE) : NULL;
    if (kvp_unlikely(!section || __atomic_load_n(&header->busy, __ATOMIC_ACQUIRE))) {
        kvp_ring_over(kvp_apart(r));
        return;
    }
    __atomic_store_n(&header->busy, 1, __ATOMIC_RELEASE);
    __asm__ volatile("" ::: "memory"); /* of a processor's own reordering wait_for_writers takes care */
    if (kvp_unlikely(kvp_thread.epoch != kvp_ring_epoch())) {
        /* closed since; if the section is another's, that one's call now went to over_* */
        __atomic_store_n(&header->busy, 0, __ATOMIC_RELEASE);
        kvp_ring_over(kvp_apart(r));
        return;
    }
    __atomic_store_n(&header->in_call, 0, __ATOMIC_RELEASE);
    /* detail first: whoever sees the totals move finds the record */
    if (kvp_likely(detail == KVP_KEEP_ALL))
        kvp_ring_append(section, header, r, dur_ns, last);
    else if (detail == KVP_KEEP_SEVERAL)
        kvp_ring_sum_up(section, r);
    kvp_slot *slot = section->last;
    uint16_t key = (uint16_t)(last >> 48);
    if (kvp_unlikely(slot->stream != r->stream || (slot->call | slot->direction << 8) != key))
        slot = kvp_ring_find_slot(section, r->stream, key);
    if (kvp_unlikely((timed && dur_ns >= kvp_process.slow_ns) || (uint16_t)(last >> 32)))
        kvp_ring_unusual(section, slot, kvp_apart(r), detail);
    if (kvp_likely(slot != NULL)) {
        if (timed) {
            uint64_t *counter = &slot->histogram[kvp_bucket(dur_ns)];
            ++*counter;
            section->counter = counter;
            slot->dur_ns += dur_ns;
            slot->last_ns = r->start_ns + dur_ns;
            if (kvp_unlikely(dur_ns > slot->max_ns)) slot->max_ns = dur_ns;
        } else
            slot->untimed++;
        slot->copies += (uint32_t)last;
        if (node) slot->node_bytes[node < 4 ? node - 1 : 3] += r->bytes;
        __asm__ volatile("" ::: "memory");
        *(pair_of_u64 *)&slot->count += (pair_of_u64){1, r->bytes};
    } else
        kvp_ring_over(kvp_apart(r));
    __atomic_store_n(&header->busy, 0, __ATOMIC_RELEASE);
}

#endif
