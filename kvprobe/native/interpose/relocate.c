/* Puts wrappers where loaded libraries keep the addresses of the functions they are linked to, and puts the addresses
 * back: at the start of a program, whenever it has loaded libraries, and in one that runs.
 *
 * Only relocated words are written (PLT and GOT entries, tables of function pointers), each by one aligned store, so a
 * thread in the middle of a call reads either address. Hazards:
 *  - the loader's lock must not be asked for inside dl_iterate_phdr: words are gathered there, and judged afterwards;
 *  - a library may be unloaded meanwhile: it is held (dlopen, RTLD_NOLOAD) while its words are touched. Holding waits
 *    for whoever is inside dlopen, so no library is met before the loader has finished its relocations;
 *  - two threads that scan would wait for each other through the loader's lock: the second leaves its wish to the
 * first;
 *  - a word that was not bound yet leads to the loader's binder: the function is looked up as the binder would do it,
 *    in the version that the library was linked to;
 *  - a word in a table of the program's own may hold something else by now: it is left alone;
 *  - a library that was looked up for a word may be unloaded: the word is the binder's again. */
#define _GNU_SOURCE
#include "interpose.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define WORDS 32768
#define OBJECTS 4096
#define NAME_BYTES (1u << 20)

#if defined(__x86_64__)
enum { RELOC_ABSOLUTE = 1, RELOC_GOT = 6, RELOC_PLT = 7 };
#elif defined(__aarch64__)
enum { RELOC_ABSOLUTE = 257, RELOC_GOT = 1025, RELOC_PLT = 1026 };
#else
enum { RELOC_ABSOLUTE = -1, RELOC_GOT = -2, RELOC_PLT = -3 };
#endif

struct word {
    void *volatile *at;
    void *was, *now;     /* now: NULL while the word is as it was */
    int wrapped;         /* index of kvp_wrapped, or kvp_wrapped_count + index of kvp_redirected */
    int own;             /* the object itself defines the symbol: its own address is no binder's */
    int table;           /* it lies among the program's data, not in the linker's tables */
    int refused;         /* it could not be written, and that was said */
    const char *version; /* of the symbol that the object was linked to; NULL: none */
};

struct object {
    uintptr_t base, first, last;         /* last: one past the end */
    uintptr_t sealed_first, sealed_last; /* read-only since the loader relocated it */
    const char *name;
    const void *dynamic;
    size_t relocations; /* bytes of them: with base, name and dynamic it tells a library from one that took its place */
    int words, word_count;
    int seen; /* in the newest scan */
};

static struct word words[WORDS];
static struct object objects[OBJECTS];
static int word_count, object_count, scan_number, no_room;
static char names[NAME_BYTES];
static size_t name_bytes;
static int expected; /* the object that comes next in most scans */
static volatile int scanning, scan_again;
static struct changes {
    unsigned long long adds, subs;
} seen; /* loaded and unloaded libraries that the newest scan knew of; read by threads that do not scan */

/* ---- gathering ----------------------------------------------------------------------------------------------- */

/* Which names of kvp_redirected have equal first letters: a program has tens of thousands that are none of them. */
enum { CHAINS = 64, MOST_NAMES = 128 };
static uint8_t first_of[CHAINS], next_of[MOST_NAMES]; /* index + 1; 0: none */

static unsigned chain_of(const char *name) { return ((unsigned char)name[0] * 5u ^ (unsigned char)name[1]) % CHAINS; }

static void chain_names(void) {
    static int chained;
    for (; chained < kvp_redirected_count && chained < MOST_NAMES; chained++) {
        unsigned at = chain_of(kvp_redirected[chained].name);
        next_of[chained] = first_of[at];
        first_of[at] = (uint8_t)(chained + 1);
    }
}

static int find_function(const char *name) {
    struct wrapped *w = kvp_find_wrapped(name);
    if (w) return (int)(w - kvp_wrapped);
    for (int i = name[0] ? first_of[chain_of(name)] : 0; i; i = next_of[i - 1])
        if (!strcmp(name, kvp_redirected[i - 1].name)) return kvp_wrapped_count + i - 1;
    return -1;
}

static const char *name_of(const struct word *w) {
    return w->wrapped < kvp_wrapped_count ? kvp_wrapped[w->wrapped].name
                                          : kvp_redirected[w->wrapped - kvp_wrapped_count].name;
}

/* Where an object keeps its symbols. */
struct tables {
    const ElfW(Sym) * symbols;
    const char *strings;
    const ElfW(Half) * versions; /* of each symbol, an index of what follows; NULL: it has none */
    const ElfW(Verneed) * needed;
};

static const char *version_of(const struct tables *t, size_t symbol) {
    if (!t->versions || !t->needed) return NULL;
    unsigned index = t->versions[symbol] & 0x7fff;
    const ElfW(Verneed) *library = t->needed;
    for (;;) {
        const ElfW(Vernaux) *one = (const ElfW(Vernaux) *)((const char *)library + library->vn_aux);
        for (;;) {
            if (one->vna_other == index) return t->strings + one->vna_name;
            if (!one->vna_next) break;
            one = (const ElfW(Vernaux) *)((const char *)one + one->vna_next);
        }
        if (!library->vn_next) return NULL;
        library = (const ElfW(Verneed) *)((const char *)library + library->vn_next);
    }
}

static void gather_table(struct object *o, const ElfW(Rela) * table, size_t bytes, size_t skip,
                         const struct tables *t) {
    for (size_t i = skip; i < bytes / sizeof *table; i++) {
        int kind = (int)ELF64_R_TYPE(table[i].r_info);
        if (kind != RELOC_PLT && kind != RELOC_GOT && (kind != RELOC_ABSOLUTE || table[i].r_addend)) continue;
        uintptr_t at = o->base + table[i].r_offset;
        if (at % sizeof(void *) || at < o->first || at >= o->last) continue;
        size_t number = ELF64_R_SYM(table[i].r_info);
        const ElfW(Sym) *symbol = &t->symbols[number];
        int function = find_function(t->strings + symbol->st_name);
        if (function < 0) continue;
        if (word_count == WORDS) {
            no_room = 1;
            return;
        }
        words[word_count++] = (struct word){.at = (void *volatile *)at,
                                            .wrapped = function,
                                            .own = symbol->st_shndx != SHN_UNDEF,
                                            .table = kind == RELOC_ABSOLUTE,
                                            .version = version_of(t, number)};
        o->word_count++;
    }
}

static uintptr_t loaded(const struct object *o, ElfW(Addr) address) {
    return address < o->base ? o->base + address : address; /* the loader adds the base in place, in most objects */
}

static int gather(struct dl_phdr_info *info, size_t size, void *ours) {
    (void)size;
    if (info->dlpi_addr == *(uintptr_t *)ours) return 0;
    const char *name = info->dlpi_name ? info->dlpi_name : "";
    struct object o = {.base = info->dlpi_addr, .first = UINTPTR_MAX, .words = word_count, .seen = scan_number};
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        uintptr_t from = o.base + p->p_vaddr, to = from + p->p_memsz;
        if (p->p_type == PT_LOAD) {
            if (from < o.first) o.first = from;
            if (to > o.last) o.last = to;
        } else if (p->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)from;
        else if (p->p_type == PT_GNU_RELRO)
            o.sealed_first = from, o.sealed_last = to;
    }
    if (!dynamic) return 0;
    uintptr_t symbols = 0, strings = 0, plt = 0, table = 0, versions = 0, needed = 0;
    size_t plt_bytes = 0, table_bytes = 0, relative = 0;
    for (const ElfW(Dyn) *d = dynamic; d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_SYMTAB) symbols = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_STRTAB) strings = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_VERSYM) versions = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_VERNEED) needed = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_JMPREL) plt = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_RELA) table = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_PLTRELSZ) plt_bytes = d->d_un.d_val;
        if (d->d_tag == DT_RELASZ) table_bytes = d->d_un.d_val;
        if (d->d_tag == DT_RELACOUNT) relative = d->d_un.d_val;
    }
    o.dynamic = dynamic;
    o.relocations = plt_bytes + table_bytes;
    for (int n = 0, i = expected; n < object_count; n++, i = i + 1 < object_count ? i + 1 : 0) {
        struct object *k = &objects[i];
        if (k->base != o.base || k->dynamic != o.dynamic || k->relocations != o.relocations || strcmp(k->name, name))
            continue;
        k->seen = scan_number;
        expected = i + 1 < object_count ? i + 1 : 0;
        return 0;
    }
    size_t length = strlen(name) + 1;
    if (object_count == OBJECTS || name_bytes + length > NAME_BYTES) {
        no_room = 1;
        return 0;
    }
    struct tables t = {.symbols = (const ElfW(Sym) *)symbols,
                       .strings = (const char *)strings,
                       .versions = (const ElfW(Half) *)versions,
                       .needed = (const ElfW(Verneed) *)needed};
    if (symbols && strings && plt) gather_table(&o, (const ElfW(Rela) *)plt, plt_bytes, 0, &t);
    if (symbols && strings && table) gather_table(&o, (const ElfW(Rela) *)table, table_bytes, relative, &t);
    o.name = memcpy(names + name_bytes, name, length);
    name_bytes += length;
    objects[object_count++] = o;
    return 0;
}

/* Gives up what is known of libraries that have gone: their words, and their place in the tables. */
static void forget_unloaded(void) {
    int to = 0, words_to = 0;
    size_t names_to = 0;
    for (int i = 0; i < object_count; i++) {
        struct object o = objects[i];
        if (o.seen != scan_number) continue;
        size_t length = strlen(o.name) + 1;
        memmove(words + words_to, words + o.words, (size_t)o.word_count * sizeof *words);
        o.name = memmove(names + names_to, o.name, length);
        o.words = words_to;
        words_to += o.word_count, names_to += length;
        objects[to++] = o;
    }
    object_count = to, word_count = words_to, name_bytes = names_to;
}

static int read_changes(struct dl_phdr_info *info, size_t size, void *changes) {
    (void)size;
    *(struct changes *)changes = (struct changes){info->dlpi_adds, info->dlpi_subs};
    return 1;
}

static struct changes changes_now(void) {
    struct changes now = {0, 0};
    dl_iterate_phdr(read_changes, &now);
    return now;
}

/* ---- one object ---------------------------------------------------------------------------------------------- */

/* Keeps an object loaded; NULL: it has gone. The main program stays by itself.
 * The loader wrote what is read here under its own lock, which dlopen takes and the sanitizer does not see. */
__attribute__((no_sanitize("thread"))) static void *hold(const struct object *o) {
    struct link_map *map = kvp_loaded(o->name);
    if (map && (uintptr_t)map->l_addr != o->base) {
        kvp_let_go(map);
        return NULL;
    }
    return map;
}

static int store(const struct object *o, void *volatile *at, void *expected, void *value) {
    static long page_bytes;
    if (!page_bytes) page_bytes = sysconf(_SC_PAGESIZE);
    uintptr_t word = (uintptr_t)at, page = word & ~(uintptr_t)(page_bytes - 1);
    int sealed = word >= o->sealed_first && word < (o->sealed_last & ~(uintptr_t)(page_bytes - 1));
    if (sealed && mprotect((void *)page, (size_t)page_bytes, PROT_READ | PROT_WRITE)) return 0;
    int stored = __atomic_compare_exchange_n(at, &expected, value, 0, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
    if (sealed) mprotect((void *)page, (size_t)page_bytes, PROT_READ);
    return stored;
}

/* The function that a word leads to, or will once the loader has bound it; NULL: to none that is known. */
static void *function_of(const struct object *o, const struct word *w, void *handle, void *is) {
    if (!w->own && (uintptr_t)is >= o->first && (uintptr_t)is < o->last)
        return kvp_symbol_of(handle, name_of(w), w->version);
    if (w->table && is != kvp_symbol_of(handle, name_of(w), w->version)) return NULL;
    return kvp_is_call_entry(is) ? NULL : is;
}

static void *replacement_of(const struct word *w, void *function) {
    if (w->wrapped < kvp_wrapped_count) return kvp_wrap_pointer(&kvp_wrapped[w->wrapped], function);
    const struct redirected *r = &kvp_redirected[w->wrapped - kvp_wrapped_count];
    if (!r->real) return function == kvp_reached(r->name) ? (void *)r->ours : function;
    any_fn *none = NULL;
    int known = atomic_compare_exchange_strong(r->real, &none, (any_fn *)function) || none == (any_fn *)function;
    return known ? (void *)r->ours : function;
}

static void write_wrappers(struct object *o, void *handle) {
    for (struct word *w = &words[o->words], *end = w + o->word_count; w < end; w++) {
        void *is = *w->at;
        if (is && is == w->now) {
            if (w->wrapped >= kvp_wrapped_count || !kvp_is_given_up(&kvp_wrapped[w->wrapped], w->now)) continue;
            if (!store(o, w->at, w->now, w->was)) continue;
            is = w->was, w->now = NULL;
        }
        void *function = is ? function_of(o, w, handle, is) : NULL;
        if (!function) continue;
        void *now = replacement_of(w, function);
        if (now == function) continue;
        if (!store(o, w->at, is, now)) {
            if (*w->at == is && !w->refused++) kvp_not_wrapped();
            continue;
        }
        w->was = is;
        w->now = now;
    }
}

/* All objects, or those alone that no scan has met. */
static void scan(int all) {
    chain_names();
    do {
        __atomic_store_n(&scan_again, 0, __ATOMIC_SEQ_CST);
        struct changes now = changes_now();
        int unloaded = now.subs != seen.subs, had_room = !no_room, from = object_count;
        scan_number++;
        uintptr_t ours = kvp_own_base();
        if (unloaded && object_count) kvp_forget_signatures(), kvp_give_up_wrappers();
        dl_iterate_phdr(gather, &ours);
        if (unloaded) forget_unloaded();
        if (no_room && had_room) kvp_not_wrapped();
        /* one that was unloaded may have come back, its words as the loader made them */
        for (int i = all || unloaded ? 0 : from; i < object_count; i++) {
            if (objects[i].seen != scan_number || !objects[i].word_count) continue;
            void *handle = hold(&objects[i]);
            if (!handle) continue;
            write_wrappers(&objects[i], handle);
            kvp_let_go(handle);
        }
        __atomic_store_n(&seen.adds, now.adds, __ATOMIC_RELEASE);
        __atomic_store_n(&seen.subs, now.subs, __ATOMIC_RELEASE);
    } while (__atomic_load_n(&scan_again, __ATOMIC_SEQ_CST));
}

/* ---- the whole process --------------------------------------------------------------------------------------- */

/* The pid, not 1: a child of fork must not wait for a thread that it does not have. */
static int begin_scan(void) {
    int me = (int)getpid(), owner = __atomic_load_n(&scanning, __ATOMIC_SEQ_CST);
    return owner != me && __atomic_compare_exchange_n(&scanning, &owner, me, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* 1: it has begun. */
static int wait_for_scan(int ms) {
    int begun = begin_scan();
    for (int tries = 0; !begun && tries < ms * 10; tries++) {
        usleep(100);
        begun = begin_scan();
    }
    return begun;
}

static void end_scan(void) { __atomic_store_n(&scanning, 0, __ATOMIC_SEQ_CST); }

/* ---- forks: a child has the loader's locks as they were, and not the threads that would give them up ------------- */

enum { FORK_WAIT_MS = 100, ATTACH_WAIT_MS = 2000 };
int kvp_stays_away;
static __thread int forking __attribute__((tls_model("initial-exec"))); /* 2: and meanwhile nobody scans */
static atomic_int forks, listing; /* threads that fork, and that are in dl_iterate_phdr because of us */
static struct list {
    struct link_map *last; /* NULL: of no child */
    int count;
} at_fork;

static NOT_SANITIZED struct list list_now(void) {
    struct list now = {NULL, 0};
    for (struct link_map *map = _r_debug.r_map; map; map = map->l_next) now.last = map, now.count++;
    return now;
}

/* Whether the loader is among its list: a child that is forked meanwhile ends at its first dlopen. */
static NOT_SANITIZED int loader_is_busy(void) { return _r_debug.r_state != RT_CONSISTENT; }

/* Whether the lock of the list of libraries is no dead thread's. The C library makes the loader's other locks anew in a
 * child of fork, this one not: it is known to be free once the child itself has added to the list or taken from it. */
static NOT_SANITIZED int list_is_free(void) {
    if (forking) return 0;
    if (likely(!at_fork.last)) return 1;
    if (kvp_stays_away || loader_is_busy()) return 0;
    struct list now = list_now();
    if (now.last == at_fork.last && now.count == at_fork.count) return 0;
    at_fork.last = NULL;
    return 1;
}

int kvp_list(int (*each)(struct dl_phdr_info *, size_t, void *), void *data) {
    if (!list_is_free()) return -1;
    atomic_fetch_add(&listing, 1);
    int result = atomic_load(&forks) ? -1 : dl_iterate_phdr(each, data);
    atomic_fetch_sub(&listing, 1);
    return result;
}

/* No scan while the process forks, nor a lock of the list that a child would find taken because of us. Scans make a
 * fork meet the loader at work more often than without us, so that, too, is waited for. A thread that waits for the
 * forking one, which may be in a library's constructor, is not waited for without end. */
static void before_fork(void) {
    atomic_fetch_add(&forks, 1);
    forking = 1 + wait_for_scan(FORK_WAIT_MS);
    for (int tries = 0; (atomic_load(&listing) || loader_is_busy()) && tries < FORK_WAIT_MS * 10; tries++) usleep(100);
}

void kvp_before_load(void) {
    for (int tries = 0; !forking && atomic_load(&forks) && tries < FORK_WAIT_MS * 10; tries++) usleep(100);
}

static void in_parent(void) {
    int held = forking == 2;
    atomic_fetch_sub(&forks, 1);
    forking = 0;
    if (!held) return;
    end_scan();
    if (__atomic_load_n(&scan_again, __ATOMIC_SEQ_CST)) kvp_redirect_new();
}

static void in_child(void) {
    end_scan();
    kvp_stays_away |= forking != 2 || loader_is_busy();
    at_fork = list_now();
    forks = listing = forking = 0;
}

static void watch_forks(void) {
    static int watched;
    if (!watched) watched = !pthread_atfork(before_fork, in_parent, in_child);
}

void kvp_redirect_new(void) {
    if (!kvp_watch.redirects || kvp_stays_away) return;
    int was = errno, begun = 0;
    struct changes now;
    int known = kvp_list(read_changes, &now) > 0;
    /* each count tells on its own that a scan has begun since: no need to see both of one scan */
    if (!known || now.adds != __atomic_load_n(&seen.adds, __ATOMIC_ACQUIRE) ||
        now.subs != __atomic_load_n(&seen.subs, __ATOMIC_ACQUIRE)) {
        begun = known && begin_scan();
        if (!begun) __atomic_store_n(&scan_again, 1, __ATOMIC_SEQ_CST);
    }
    if (begun) {
        if (kvp_watch.redirects) scan(0);
        end_scan();
    }
    errno = was;
}

/* Whether a word leads to a call that is recorded: not to what hands out addresses, nor to dlopen, exec and the like.
 */
static int leads_to_call(const struct word *w) {
    if (w->wrapped >= kvp_wrapped_count) return 0;
    const char *name = kvp_wrapped[w->wrapped].name;
    return strncmp(name, "cuGetProcAddress", 16) && strncmp(name, "cudaGetDriverEntryPoint", 23);
}

int kvp_redirect_all(void) {
    watch_forks();
    if (!wait_for_scan(ATTACH_WAIT_MS)) return -EBUSY;
    scan(1);
    scan(1); /* a binder that was at work may have written over a word */
    int written = 0;
    for (int i = 0; i < word_count; i++) written += words[i].now && leads_to_call(&words[i]);
    end_scan();
    return written;
}

int kvp_restore_all(void) {
    if (kvp_stays_away) return -EBUSY;
    if (!wait_for_scan(ATTACH_WAIT_MS)) return -EBUSY;
    int restored = 0;
    scan_number++;
    uintptr_t ours = kvp_own_base();
    dl_iterate_phdr(gather, &ours);
    for (int i = 0; i < object_count; i++) {
        struct object *o = &objects[i];
        void *handle = o->word_count && o->seen == scan_number ? hold(o) : NULL;
        for (struct word *w = &words[o->words], *end = w + o->word_count; w < end; w++) {
            if (w->now && handle && store(o, w->at, w->now, w->was)) restored += leads_to_call(w);
            w->now = w->was = NULL;
        }
        if (handle) kvp_let_go(handle);
    }
    word_count = object_count = expected = no_room = 0;
    name_bytes = 0;
    end_scan();
    return restored;
}

#ifdef KVP_LEADS_BY_TURNS
/* For benchmarks/copy_cost.py, between kvprobe_attach and kvprobe_detach: has the words that lead to recorded calls
 * lead there (1), or to the program's own functions as before (0). How many of them it wrote. */
CUDA_EXPORT int kvprobe_lead(int here);
int kvprobe_lead(int here) {
    int written = 0;
    for (int i = 0; i < object_count; i++) {
        struct object *o = &objects[i];
        for (struct word *w = &words[o->words], *end = w + o->word_count; w < end; w++)
            if (w->now && leads_to_call(w)) written += store(o, w->at, here ? w->was : w->now, here ? w->now : w->was);
    }
    return written;
}
#endif
