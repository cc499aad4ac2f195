/* The byte witness: whether what copies load are the bytes that copies had stored, and stay so while they are loaded.
 * witness.c says what is promised; witness_pages.c holds what is known of host memory, witness_told.c tells it. */
#ifndef KVP_WITNESS_H
#define KVP_WITNESS_H

#include "interpose.h"

#define WITNESS_PAGE 4096u
#define WITNESS_LOOKS 16 /* pages of one load that are looked at */

/* What is counted of a process; kvprobe/runfolder/folder.py describes each. */
#define WITNESS_COUNTS(X)                                                                                              \
    X(loads)                                                                                                           \
    X(stores)                                                                                                          \
    X(pageable)                                                                                                        \
    X(shapes)                                                                                                          \
    X(captured)                                                                                                        \
    X(small)                                                                                                           \
    X(unchosen)                                                                                                        \
    X(budget)                                                                                                          \
    X(crowded)                                                                                                         \
    X(elsewhere)                                                                                                       \
    X(unreadable)                                                                                                      \
    X(summed)                                                                                                          \
    X(unfinished)                                                                                                      \
    X(crossed)                                                                                                         \
    X(unstored)                                                                                                        \
    X(early)                                                                                                           \
    X(compared)                                                                                                        \
    X(compared_pages)                                                                                                  \
    X(changed)                                                                                                         \
    X(watched)                                                                                                         \
    X(past)                                                                                                            \
    X(overwritten)                                                                                                     \
    X(untold)                                                                                                          \
    X(spent_ns)                                                                                                        \
    X(helper_ns)                                                                                                       \
    X(lag_ns)

struct witness_counts {
#define X(NAME) _Atomic uint64_t NAME;
    WITNESS_COUNTS(X)
#undef X
};
extern struct witness_counts kvp_witness_counts;
#define COUNT(NAME, BY) atomic_fetch_add_explicit(&kvp_witness_counts.NAME, (BY), memory_order_relaxed)

/* One page of a load: its bytes' sum when the copy was submitted; of a page that a store filled (store != 0) also the
 * sum of what had arrived there. */
struct witness_look {
    uint64_t page, sum, store, was;
};

/* A store whose pages are remembered. `home` is the allocation that it went to. */
struct witness_store {
    _Atomic uint64_t number;
    uint64_t start_ns, done_ns, src, dst, bytes, stream;
    uint32_t tid;
    uint16_t home;
    uint8_t call;
};

struct witness_home {
    _Atomic uint64_t base;
    uint64_t bytes;
    _Atomic uint64_t compared, changed;
};
#define WITNESS_HOMES 256 /* the last one stands for all others */
extern struct witness_home kvp_witness_homes[WITNESS_HOMES];

/* witness_pages.c. A page is known by its number, address / WITNESS_PAGE. */
extern _Atomic int kvp_witness_level; /* pages of this level and above are looked at: one of 2^level */
int kvp_pages_ready(void);            /* 0: there is no memory for the table */
/* Calls `each` for every page of [first, last) of a level. */
uint64_t kvp_page_chosen(uint64_t group, int level);
#define EACH_PAGE(P, FIRST, LAST, LEVEL)                                                                               \
    for (uint64_t group_ = (FIRST) >> (LEVEL), P = kvp_page_chosen(group_, LEVEL); group_ << (LEVEL) < (LAST);         \
         group_++, P = kvp_page_chosen(group_, LEVEL))                                                                 \
        if (P >= (FIRST) && P < (LAST))
/* What is written to [address, address + bytes) from now on is no store's, or that of one on this stream. */
void kvp_pages_written(uint64_t address, uint64_t bytes, uint64_t stream);
void kvp_pages_forget_all(void);
void kvp_pages_never(uint64_t address, uint64_t bytes); /* a graph may store there, unseen */
void kvp_pages_finer(void);                             /* one level down: what it adds is not known yet */
void kvp_pages_coarser(void);
/* A store: its number, 0 where none of its pages is looked at. */
uint64_t kvp_pages_stored(const kvp_record *r, uint64_t dst, uint64_t bytes, unsigned home, int level);
void kvp_pages_arrived(uint64_t number, int level); /* its bytes are there: they are summed now */
enum witness_page { PAGE_UNKNOWN, PAGE_EARLY, PAGE_STORED };
/* Looks at a page of a load: fills `look`; -1: it cannot be read. */
int kvp_page_look(struct witness_look *look, uint64_t page);
int kvp_page_sum(uint64_t page, uint64_t *sum); /* 0: it cannot be read */
const struct witness_store *kvp_store_of(uint64_t number);
unsigned kvp_home_of(uint64_t address);

/* witness_told.c */
void kvp_witness_tells(const char *kind, const kvp_record *load, const struct witness_look *looks, int count);
void kvp_witness_tell_counts(const char *folder, int closing);
void kvp_witness_tells_into(const char *folder);

#endif
