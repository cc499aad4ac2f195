/* What stores left in host memory: the sum of each page that a copy from the device has filled, until something else
 * that we see writes there.
 *
 * WHICH PAGES. One of 2^level, spread evenly: each aligned group of 2^level pages has one, so a block of that size most
 * often has one whatever the level is, and an overwrite of a whole block is seen at a fraction of its bytes. A page of
 * a level is also one of every level below.
 *
 * A page is void, pending (a store is under way), crossed (two stores on two streams were) or summed. Whoever compares
 * reads its state before and behind its own look: what changed meanwhile is not compared. */
#define _GNU_SOURCE
#include "witness.h"

#include <sys/mman.h>

#define PAGES (1u << 20) /* entries: 24 MiB, touched as they are needed */
#define PROBES 8
#define STORES (1u << 19) /* that are remembered: 36 MiB, likewise */
#define LEVELS 24
#define MOST_PAGES 4096 /* of one store: a larger one makes the level coarser */
#define BANS 64

enum { VOID, PENDING, CROSSED, SUMMED };

struct page {
    _Atomic uint64_t page;  /* 0: free */
    _Atomic uint64_t store; /* number << 2 | state */
    _Atomic uint64_t sum;
};

static struct page *_Atomic pages;
static struct witness_store *stores;
static _Atomic uint64_t newest, floor_; /* of stores; those up to floor_ hold no more */
static _Atomic uint64_t since[LEVELS];  /* pages of exactly this level are known of stores from here on */
_Atomic int kvp_witness_level;
static struct {
    _Atomic uint64_t first, last;
} bans[BANS];
static _Atomic unsigned ban_count;
struct witness_home kvp_witness_homes[WITNESS_HOMES];

int kvp_pages_ready(void) {
    if (likely(pages != NULL)) return 1;
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *a = mmap(NULL, PAGES * sizeof *pages, PROT_READ | PROT_WRITE, how, -1, 0);
    void *b = mmap(NULL, STORES * sizeof *stores, PROT_READ | PROT_WRITE, how, -1, 0);
    if (a == MAP_FAILED || b == MAP_FAILED) return 0;
    stores = b;
    pages = a;
    return 1;
}

/* ---- which pages ----------------------------------------------------------------------------------------------- */

static inline uint64_t side(uint64_t group, int level) {
    return (group + (uint64_t)level * 0xbf58476d1ce4e5b9u) * 0x9e3779b97f4a7c15u >> 63;
}

uint64_t kvp_page_chosen(uint64_t group, int level) {
    for (; level; level--) group = group << 1 | side(group, level);
    return group;
}

static int level_of(uint64_t page) {
    int level = 0;
    while (level < LEVELS - 1 && (page & 1) == side(page >> 1, level + 1)) page >>= 1, level++;
    return level;
}

void kvp_pages_finer(void) {
    int level = kvp_witness_level;
    if (!level) return;
    atomic_store(&since[level - 1], newest + 1);
    kvp_witness_level = level - 1;
}

void kvp_pages_coarser(void) {
    if (kvp_witness_level < LEVELS - 2) kvp_witness_level++;
}

/* ---- the table ------------------------------------------------------------------------------------------------- */

static inline struct page *place_of(uint64_t page) {
    return &pages[page * 0x9e3779b97f4a7c15u >> 44 & (PAGES - PROBES)];
}

static struct page *find(uint64_t page) {
    struct page *at = place_of(page);
    for (int i = 0; i < PROBES; i++)
        if (atomic_load(&at[i].page) == page) return &at[i];
    return NULL;
}

/* Its entry, made where there is none: in a free place, or in that of a page that is not looked at any more. Another
 * entry of the same page, which two threads may have made at once, is void. */
static struct page *enter(uint64_t page, int level) {
    struct page *at = place_of(page), *mine = NULL;
    for (int i = 0; i < PROBES; i++) {
        uint64_t is = atomic_load(&at[i].page);
        if (is == page && mine) atomic_store(&at[i].store, VOID);
        if (is == page && !mine) mine = &at[i];
    }
    for (int i = 0; i < PROBES && !mine; i++) {
        uint64_t is = atomic_load(&at[i].page);
        if (is && (is == page || level_of(is) >= level)) {
            if (is == page) mine = &at[i];
            continue;
        }
        atomic_store(&at[i].store, VOID);
        if (atomic_compare_exchange_strong(&at[i].page, &is, page) || is == page) mine = &at[i];
    }
    return mine;
}

/* The store that a page's bytes are of, as far as is known; 0: none is. */
static uint64_t store_in(uint64_t word, uint64_t page) {
    uint64_t number = word >> 2, now = newest;
    if (number <= floor_ || now - number >= STORES || number < since[level_of(page)]) return 0;
    return number;
}

const struct witness_store *kvp_store_of(uint64_t number) {
    struct witness_store *s = &stores[number % STORES];
    return atomic_load(&s->number) == number ? s : NULL;
}

void kvp_pages_forget_all(void) { floor_ = newest; }

void kvp_pages_never(uint64_t address, uint64_t bytes) {
    unsigned at = atomic_fetch_add(&ban_count, 1);
    if (at >= BANS) at = BANS - 1; /* one for all the others: it grows */
    uint64_t first = address / WITNESS_PAGE, last = (address + bytes - 1) / WITNESS_PAGE + 1;
    if (!bans[at].last || first < bans[at].first) bans[at].first = first;
    if (last > bans[at].last) bans[at].last = last;
    kvp_pages_forget_all();
}

static int is_banned(uint64_t first, uint64_t last) {
    unsigned count = ban_count < BANS ? ban_count : BANS;
    for (unsigned i = 0; i < count; i++)
        if (first < bans[i].last && last > bans[i].first) return 1;
    return 0;
}

void kvp_pages_written(uint64_t address, uint64_t bytes, uint64_t stream) {
    uint64_t first = address / WITNESS_PAGE, last = (address + bytes - 1) / WITNESS_PAGE + 1;
    int level = kvp_witness_level;
    if ((last - first) >> level > 16 * MOST_PAGES) {
        kvp_pages_forget_all();
        return;
    }
    EACH_PAGE(p, first, last, level) {
        struct page *at = place_of(p);
        for (int i = 0; i < PROBES; i++) {
            if (atomic_load_explicit(&at[i].page, memory_order_relaxed) != p) continue;
            uint64_t was = atomic_load(&at[i].store);
            const struct witness_store *s = (was & 3) == PENDING ? kvp_store_of(was >> 2) : NULL;
            atomic_store(&at[i].store, (was & ~3ull) | (s && s->stream != stream ? CROSSED : VOID));
        }
    }
}

/* ---- stores ---------------------------------------------------------------------------------------------------- */

unsigned kvp_home_of(uint64_t address) {
    uint64_t base = address, bytes = 0;
    kvp_range_of(address, &base, &bytes);
    for (unsigned i = 0, at = (unsigned)(base * 0x9e3779b97f4a7c15u >> 56); i < WITNESS_HOMES - 1; i++) {
        struct witness_home *h = &kvp_witness_homes[(at + i) % (WITNESS_HOMES - 1)];
        uint64_t none = 0;
        if (h->base != base && !atomic_compare_exchange_strong(&h->base, &none, base) && none != base) continue;
        if (bytes) h->bytes = bytes;
        return (at + i) % (WITNESS_HOMES - 1);
    }
    return WITNESS_HOMES - 1;
}

uint64_t kvp_pages_stored(const kvp_record *r, uint64_t dst, uint64_t bytes, unsigned home, int level) {
    uint64_t first = (dst + WITNESS_PAGE - 1) / WITNESS_PAGE, last = (dst + bytes) / WITNESS_PAGE, number = 0;
    int entered = 0, crossed = 0;
    if ((last - first) >> level > MOST_PAGES) {
        kvp_pages_coarser();
        COUNT(crowded, 1);
        return 0;
    }
    if (ban_count && is_banned(first, last)) {
        COUNT(captured, 1);
        return 0;
    }
    EACH_PAGE(p, first, last, level) {
        if (!number) {
            number = atomic_fetch_add(&newest, 1) + 1;
            struct witness_store *s = &stores[number % STORES];
            *s = (struct witness_store){number, r->start_ns, 0,      r->src,         dst,
                                        bytes,  r->stream,   r->tid, (uint16_t)home, r->call};
        }
        struct page *at = enter(p, level);
        if (!at) continue;
        int crosses = (atomic_load(&at->store) & 3) == CROSSED;
        atomic_store(&at->store, number << 2 | (crosses ? VOID : PENDING));
        crossed += crosses;
        entered += !crosses;
    }
    if (crossed) COUNT(crossed, 1);
    if (!number)
        COUNT(unchosen, 1);
    else if (!entered && !crossed)
        COUNT(crowded, 1);
    return entered ? number : 0;
}

void kvp_pages_arrived(uint64_t number, int level) {
    struct witness_store *s = &stores[number % STORES];
    if (atomic_load(&s->number) != number) return;
    uint64_t first = (s->dst + WITNESS_PAGE - 1) / WITNESS_PAGE, last = (s->dst + s->bytes) / WITNESS_PAGE;
    int summed = 0;
    s->done_ns = kvp_clock();
    EACH_PAGE(p, first, last, level) {
        struct page *at = find(p);
        uint64_t pending = number << 2 | PENDING, sum;
        if (!at || atomic_load(&at->store) != pending) continue;
        if (!kvp_page_sum(p, &sum)) {
            atomic_compare_exchange_strong(&at->store, &pending, number << 2 | VOID);
            COUNT(unreadable, 1);
            continue;
        }
        atomic_store(&at->sum, sum);
        summed += atomic_compare_exchange_strong(&at->store, &pending, number << 2 | SUMMED);
    }
    if (summed) COUNT(summed, 1);
}

/* ---- looks ----------------------------------------------------------------------------------------------------- */

int kvp_page_sum(uint64_t page, uint64_t *sum) {
    uint64_t words[WITNESS_PAGE / 8];
    if (!kvp_read_memory(page * WITNESS_PAGE, WITNESS_PAGE, words)) return 0;
    *sum = kvp_hash_words(words, WITNESS_PAGE / 8);
    return 1;
}

int kvp_page_look(struct witness_look *look, uint64_t page) {
    struct page *at = find(page);
    uint64_t is = at ? atomic_load(&at->store) : 0, was = at ? atomic_load(&at->sum) : 0;
    *look = (struct witness_look){.page = page};
    if (!kvp_page_sum(page, &look->sum)) return -1;
    uint64_t number = at ? store_in(is, page) : 0;
    if (!number || atomic_load(&at->store) != is || atomic_load(&at->page) != page) return PAGE_UNKNOWN;
    if ((is & 3) != SUMMED) return (is & 3) == PENDING ? PAGE_EARLY : PAGE_UNKNOWN;
    look->store = number;
    look->was = was;
    return PAGE_STORED;
}
