/* Puts wrappers where loaded libraries keep the addresses of the functions they are linked to, and puts the addresses
 * back: what preloading does before a program starts, done to one that runs.
 *
 * Only relocated words are written (PLT and GOT entries, tables of function pointers), each by one aligned store, so a
 * thread in the middle of a call reads either address. Hazards:
 *  - the loader's lock must not be asked for inside dl_iterate_phdr: words are gathered there, and judged afterwards;
 *  - a library may be unloaded meanwhile: it is held (dlopen, RTLD_NOLOAD) while its words are touched. Holding waits
 *    for whoever is inside dlopen, so no library is met before the loader has finished its relocations;
 *  - two threads that scan would wait for each other through the loader's lock: the second leaves its wish to the
 * first;
 *  - a word that was not bound yet leads to the loader's binder: the function is looked up as the binder would do it.
 */
#define _GNU_SOURCE
#include "interpose.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
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
    void *was, *now; /* now: NULL while the word is as it was */
    int wrapped;     /* index of kvp_wrapped, or kvp_wrapped_count + index of kvp_redirected */
    int own;         /* the object itself defines the symbol: its own address is no binder's */
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
static int word_count, object_count, scan_number;
static char names[NAME_BYTES];
static size_t name_bytes;
static volatile int scanning, scan_again;
static struct changes {
    unsigned long long adds, subs;
} seen; /* loaded and unloaded libraries that the newest scan knew of; read by threads that do not scan */

/* ---- gathering ----------------------------------------------------------------------------------------------- */

static int find_function(const char *name) {
    struct wrapped *w = kvp_find_wrapped(name);
    if (w) return (int)(w - kvp_wrapped);
    if (!strchr("depE_", name[0])) return -1;
    for (int i = 0; i < kvp_redirected_count; i++)
        if (!strcmp(name, kvp_redirected[i].name)) return kvp_wrapped_count + i;
    return -1;
}

static void gather_table(struct object *o, const ElfW(Rela) * table, size_t bytes, size_t skip,
                         const ElfW(Sym) * symbols, const char *strings) {
    for (size_t i = skip; i < bytes / sizeof *table && word_count < WORDS; i++) {
        int kind = (int)ELF64_R_TYPE(table[i].r_info);
        if (kind != RELOC_PLT && kind != RELOC_GOT && (kind != RELOC_ABSOLUTE || table[i].r_addend)) continue;
        uintptr_t at = o->base + table[i].r_offset;
        if (at % sizeof(void *) || at < o->first || at >= o->last) continue;
        const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(table[i].r_info)];
        int function = find_function(strings + symbol->st_name);
        if (function < 0) continue;
        words[word_count++] =
            (struct word){.at = (void *volatile *)at, .wrapped = function, .own = symbol->st_shndx != SHN_UNDEF};
        o->word_count++;
    }
}

static uintptr_t loaded(const struct object *o, ElfW(Addr) address) {
    return address < o->base ? o->base + address : address; /* the loader adds the base in place, in most objects */
}

static int gather(struct dl_phdr_info *info, size_t size, void *ours) {
    (void)size;
    if (info->dlpi_addr == *(uintptr_t *)ours || object_count >= OBJECTS) return 0;
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
    uintptr_t symbols = 0, strings = 0, plt = 0, table = 0;
    size_t plt_bytes = 0, table_bytes = 0, relative = 0;
    for (const ElfW(Dyn) *d = dynamic; d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_SYMTAB) symbols = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_STRTAB) strings = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_JMPREL) plt = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_RELA) table = loaded(&o, d->d_un.d_ptr);
        if (d->d_tag == DT_PLTRELSZ) plt_bytes = d->d_un.d_val;
        if (d->d_tag == DT_RELASZ) table_bytes = d->d_un.d_val;
        if (d->d_tag == DT_RELACOUNT) relative = d->d_un.d_val;
    }
    o.dynamic = dynamic;
    o.relocations = plt_bytes + table_bytes;
    for (int i = 0; i < object_count; i++) {
        struct object *k = &objects[i];
        if (k->base != o.base || k->dynamic != o.dynamic || k->relocations != o.relocations || strcmp(k->name, name))
            continue;
        k->seen = scan_number;
        return 0;
    }
    size_t length = strlen(name) + 1;
    if (name_bytes + length > NAME_BYTES) return 0;
    if (symbols && strings && plt)
        gather_table(&o, (const ElfW(Rela) *)plt, plt_bytes, 0, (const ElfW(Sym) *)symbols, (const char *)strings);
    if (symbols && strings && table)
        gather_table(&o, (const ElfW(Rela) *)table, table_bytes, relative, (const ElfW(Sym) *)symbols,
                     (const char *)strings);
    o.name = memcpy(names + name_bytes, name, length);
    name_bytes += length;
    objects[object_count++] = o;
    return 0;
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
    struct link_map *map = dlopen(o->name[0] ? o->name : NULL, RTLD_LAZY | RTLD_NOLOAD);
    if (map && (uintptr_t)map->l_addr != o->base) {
        dlclose(map);
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

static void write_wrappers(struct object *o, void *handle) {
    for (struct word *w = &words[o->words], *end = w + o->word_count; w < end; w++) {
        void *is = *w->at, *function = is, *now;
        if (!is || is == w->now) continue;
        const char *name = w->wrapped < kvp_wrapped_count ? kvp_wrapped[w->wrapped].name
                                                          : kvp_redirected[w->wrapped - kvp_wrapped_count].name;
        if (!w->own && (uintptr_t)is >= o->first && (uintptr_t)is < o->last) function = kvp_symbol_of(handle, name);
        if (!function) continue;
        if (w->wrapped < kvp_wrapped_count)
            now = kvp_wrap_pointer(&kvp_wrapped[w->wrapped], function);
        else {
            const struct redirected *r = &kvp_redirected[w->wrapped - kvp_wrapped_count];
            now = function == kvp_symbol_of(RTLD_NEXT, name) ? (void *)r->ours : function;
        }
        if (now == function || !store(o, w->at, is, now)) continue;
        w->was = is;
        w->now = now;
    }
}

/* All objects, or those alone that no scan has met. */
static void scan(int all) {
    do {
        __atomic_store_n(&scan_again, 0, __ATOMIC_SEQ_CST);
        struct changes now = changes_now();
        /* one that was unloaded may have come back, its words as the loader made them */
        int from = all || now.subs != seen.subs ? 0 : object_count;
        scan_number++;
        uintptr_t ours = kvp_own_base();
        dl_iterate_phdr(gather, &ours);
        for (int i = from; i < object_count; i++) {
            if (objects[i].seen != scan_number || !objects[i].word_count) continue;
            void *handle = hold(&objects[i]);
            if (!handle) continue;
            write_wrappers(&objects[i], handle);
            dlclose(handle);
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

static void end_scan(void) { __atomic_store_n(&scanning, 0, __ATOMIC_SEQ_CST); }

void kvp_redirect_new(void) {
    if (!kvp_watch.attached) return;
    int was = errno;
    struct changes now = changes_now();
    /* each count tells on its own that a scan has begun since: no need to see both of one scan */
    if (now.adds != __atomic_load_n(&seen.adds, __ATOMIC_ACQUIRE) ||
        now.subs != __atomic_load_n(&seen.subs, __ATOMIC_ACQUIRE)) {
        if (begin_scan()) {
            if (kvp_watch.attached) scan(0);
            end_scan();
        } else
            __atomic_store_n(&scan_again, 1, __ATOMIC_SEQ_CST);
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
    if (!begin_scan()) return -EBUSY;
    scan(1);
    scan(1); /* a binder that was at work may have written over a word */
    int written = 0;
    for (int i = 0; i < word_count; i++) written += words[i].now && leads_to_call(&words[i]);
    end_scan();
    return written;
}

int kvp_restore_all(void) {
    for (int tries = 0; !begin_scan(); tries++) {
        if (tries == 2000) return -EBUSY;
        usleep(1000);
    }
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
        if (handle) dlclose(handle);
    }
    word_count = object_count = 0;
    name_bytes = 0;
    end_scan();
    return restored;
}
