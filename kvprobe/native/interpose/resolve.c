/* Wrappers for functions, wherever a program gets a function's address: what dlsym and dlvsym answer. No name of CUDA's
 * is exported: where there is no runtime a program finds none, and where there is one it finds what it would have found
 * without us, wrapped. */
#define _GNU_SOURCE
#include "interpose.h"

#include <dlfcn.h>
#include <link.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *dlsym_fn(void *, const char *);

extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char _end[] __attribute__((visibility("hidden")));

static int is_ours(const void *p) { return (const char *)p >= __ehdr_start && (const char *)p < _end; }

uintptr_t kvp_own_base(void) { return (uintptr_t)__ehdr_start; }

/* The C library's own, whatever the program has put before it: a tool's may not be ready yet. */
static NOT_SANITIZED void *next_function(const char *name) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    void *found = NULL;
    for (unsigned i = 0; i < sizeof versions / sizeof *versions && !found; i++)
        found = dlvsym(RTLD_NEXT, name, versions[i]);
    return found;
}

/* The dlsym behind ours. */
static dlsym_fn *_Atomic next_dlsym;

static NOT_SANITIZED __attribute__((noinline)) dlsym_fn *find_dlsym(void) {
    next_dlsym = (dlsym_fn *)next_function("dlsym");
    return next_dlsym;
}

/* In a child of fork whose parent was loading a library: dlopen would end it. What it has loaded stays. */
static void *loaded_without_asking(const char *path) {
    struct link_map *map = _r_debug.r_map;
    if (path && path[0])
        while (map && strcmp(map->l_name, path) != 0) map = map->l_next;
    return map;
}

void *kvp_loaded(const char *path) {
    if (kvp_stays_away) return loaded_without_asking(path);
    static void *(*_Atomic open)(const char *, int);
    if (!open) open = (void *(*)(const char *, int))next_function("dlopen");
    return open(path && path[0] ? path : NULL, RTLD_LAZY | RTLD_NOLOAD);
}

void kvp_let_go(void *handle) {
    if (kvp_stays_away) return;
    static int (*_Atomic close)(void *);
    if (!close) close = (int (*)(void *))next_function("dlclose");
    close(handle);
}

static inline NOT_SANITIZED dlsym_fn *real_dlsym(void) {
    dlsym_fn *found = next_dlsym;
    return likely(found != NULL) ? found : find_dlsym();
}

/* version: NULL for the default one. */
static void *look_up(void *handle, const char *name, const char *version) {
    return version ? dlvsym(handle, name, version) : real_dlsym()(handle, name);
}

struct wrapped *kvp_find_wrapped(const char *name) {
    if (name[0] != 'c' || name[1] != 'u') return NULL;
    for (int i = 0; i < kvp_wrapped_count; i++)
        if (!strcmp(name, kvp_wrapped[i].name)) return &kvp_wrapped[i];
    return NULL;
}

/* ---- loaded libraries ------------------------------------------------------------------------------------------ */

static struct link_map *map_of(const void *address) {
    Dl_info info;
    struct link_map *map = NULL;
    return dladdr1(address, &info, (void **)&map, RTLD_DL_LINKMAP) ? map : NULL;
}

/* A symbol as the object that holds `address` would find it in itself and what it depends on. */
void *kvp_symbol_beside(const void *address, const char *name) {
    struct link_map *map = map_of(address);
    if (!map) return NULL;
    void *handle = kvp_loaded(map->l_name);
    if (!handle) return NULL;
    void *found = real_dlsym()(handle, name);
    kvp_let_go(handle);
    return is_ours(found) ? NULL : found;
}

/* The path of the how manyth loaded library whose name begins so. Only the path: whoever asks for the loader's lock
 * inside dl_iterate_phdr waits for a thread that holds it and wants to add its library to the list. */
struct search {
    const char *prefix;
    int skip;
    char path[4096];
};

static int path_of(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct search *s = data;
    const char *path = info->dlpi_name, *base = path ? strrchr(path, '/') : NULL;
    base = base ? base + 1 : path;
    if (!base || strncmp(base, s->prefix, strlen(s->prefix)) || strlen(path) >= sizeof s->path) return 0;
    if (s->skip-- > 0) return 0;
    strcpy(s->path, path);
    return 1;
}

/* 1: it is in s->path. */
static NOT_SANITIZED int find_path(struct search *s) {
    int found = kvp_list(path_of, s);
    for (struct link_map *map = found < 0 ? _r_debug.r_map : NULL; map && found < 1; map = map->l_next)
        found = path_of(&(struct dl_phdr_info){.dlpi_name = map->l_name}, 0, s);
    return found > 0;
}

static void *search_libraries(const char *prefix, const char *name) {
    for (int i = 0;; i++) {
        struct search s = {.prefix = prefix, .skip = i};
        if (!find_path(&s)) return NULL;
        void *handle = kvp_loaded(s.path);
        if (!handle) continue;
        void *found = real_dlsym()(handle, name);
        kvp_let_go(handle);
        if (found && !is_ours(found)) return found;
    }
}

/* The embedded host runtime is its own driver. */
void *kvp_driver_symbol(const char *name) {
    void *found = search_libraries("libcuda.so", name);
    return found ? found : search_libraries("libkvprobe_hostrt.so", name);
}

/* The last library that was there when the program started: those up to it are never unloaded, and RTLD_NEXT goes
 * through them in this order. NULL where we came later. */
static struct link_map *last_at_start;

void kvp_note_libraries(void) {
    struct link_map *map = map_of(__ehdr_start);
    while (map && map->l_next) map = map->l_next;
    last_at_start = map;
}

/* The first definition in the libraries behind that one. */
static void *definition_behind(struct link_map *map, const char *name, const char *version) {
    while (map && map != last_at_start) {
        map = map->l_next;
        void *handle = map && map->l_name && map->l_name[0] ? kvp_loaded(map->l_name) : NULL;
        if (!handle) continue;
        void *found = look_up(handle, name, version);
        kvp_let_go(handle);
        if (found && map_of(found) == map) return found;
    }
    return NULL;
}

static int known_at_start(struct link_map *map) {
    for (; map && last_at_start; map = map->l_next)
        if (map == last_at_start) return 1;
    return 0;
}

/* A program that is linked to a fixed address and takes a function's address makes its own entry for calls that address
 * for everybody. It is no definition, and leads to a word of the program that is wrapped itself. */
int kvp_is_call_entry(const void *address) {
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    if (!dladdr1(address, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol) return 0;
    return symbol->st_shndx == SHN_UNDEF;
}

/* A definition without a version serves a reference with one, and dlvsym passes it over. */
static int has_version(const void *address, const struct link_map *map) {
    Dl_info info;
    const ElfW(Sym) *symbol = NULL, *symbols = NULL;
    const ElfW(Half) *versions = NULL;
    if (!dladdr1(address, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol) return 1;
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)d->d_un.d_ptr;
        if (d->d_tag == DT_VERSYM) versions = (const ElfW(Half) *)d->d_un.d_ptr;
    }
    return versions && symbols && (versions[symbol - symbols] & 0x7fff) > VER_NDX_GLOBAL;
}

/* What the loader finds in the global scope, where a library was preloaded, too, that stands before the C library. */
static void *in_global_scope(const char *name, const char *version) {
    void *found = look_up(RTLD_DEFAULT, name, version), *first = version ? look_up(RTLD_DEFAULT, name, NULL) : NULL;
    if (!first || first == found || is_ours(first)) return found;
    struct link_map *map = map_of(first), *behind = found ? map_of(found) : NULL, *m = map;
    while (m && m != behind) m = m->l_next;
    return map && map != behind && (m || !found) && !has_version(first, map) ? first : found;
}

/* As a library that `handle` stands for would be bound to it: the global scope first. */
void *kvp_symbol_of(void *handle, const char *name, const char *version) {
    void *found = in_global_scope(name, version);
    if (!found || is_ours(found)) found = look_up(handle, name, version);
    if (found && kvp_is_call_entry(found)) found = definition_behind(map_of(found), name, version);
    return is_ours(found) ? NULL : found;
}

void *kvp_reached(const char *name) { return real_dlsym()(RTLD_DEFAULT, name); }

/* ---- wrappers for functions -------------------------------------------------------------------------------------- */

enum {
    FREE = 0,
    TAKING = 1,
    USED = 2,
    STATES = 3,
    ANOTHER = 4
}; /* binding.state: one of the first three, and a count */

struct place {
    uintptr_t address, base, dynamic;
};

static int place_in(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct place *p = data;
    uintptr_t dynamic = 0;
    int inside = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        uintptr_t from = info->dlpi_addr + h->p_vaddr;
        if (h->p_type == PT_LOAD && p->address >= from && p->address - from < h->p_memsz) inside = 1;
        if (h->p_type == PT_DYNAMIC) dynamic = from;
    }
    if (inside) p->base = info->dlpi_addr, p->dynamic = dynamic;
    return inside;
}

/* Which library holds the function: none, where that cannot be asked. Not by dladdr: a thread that is loading a library
 * may be waiting for this one. */
static void note_place(struct binding *b, const void *function) {
    struct place p = {.address = (uintptr_t)function};
    kvp_list(place_in, &p);
    atomic_store(&b->base, p.base);
    atomic_store(&b->dynamic, p.dynamic);
}

/* Whether wrapper i stands for `found`, and goes on doing so. */
static int stands_for(struct wrapped *w, int i, void *found) {
    struct binding *b = &w->binding[i];
    uint64_t was = atomic_load(&b->state);
    do {
        if (w->real[i] != (any_fn *)found || (was & STATES) == TAKING) return 0;
        if ((was & STATES) == FREE) note_place(b, found);
    } while (!atomic_compare_exchange_weak(&b->state, &was, ((was + ANOTHER) & ~(uint64_t)STATES) | USED));
    return 1;
}

static int takes(struct wrapped *w, int i, void *found) {
    struct binding *b = &w->binding[i];
    uint64_t was = atomic_load(&b->state), taking = ((was + ANOTHER) & ~(uint64_t)STATES) | TAKING;
    if ((was & STATES) != FREE || !atomic_compare_exchange_strong(&b->state, &was, taking)) return 0;
    w->real[i] = (any_fn *)found;
    note_place(b, found);
    atomic_store(&b->state, taking - TAKING + ANOTHER + USED);
    return 1;
}

void *kvp_wrap_pointer(struct wrapped *w, void *found) {
    if (!kvp_watch.on || !found || is_ours(found)) return found;
    for (int i = 0; i < BOUND; i++)
        if (w->real[i] == (any_fn *)found && stands_for(w, i, found)) return (void *)w->bound[i];
    for (int i = 0; i < BOUND; i++)
        if (takes(w, i, found)) return (void *)w->bound[i];
    kvp_not_wrapped();
    return found;
}

static int still_there(const struct binding *b, uint64_t state, const void *function) {
    if ((state & STATES) != USED || !atomic_load(&b->base)) return 1;
    struct place p = {.address = (uintptr_t)function};
    dl_iterate_phdr(place_in, &p); /* in a scan: nobody forks */
    return p.base == b->base && p.dynamic == b->dynamic;
}

void kvp_give_up_wrappers(void) {
    for (int n = 0; n < kvp_wrapped_count; n++)
        for (int i = 0; i < BOUND; i++) {
            struct binding *b = &kvp_wrapped[n].binding[i];
            uint64_t was = atomic_load(&b->state);
            if (kvp_wrapped[n].real[i] && !still_there(b, was, (void *)kvp_wrapped[n].real[i]))
                /* unless it has been asked for meanwhile: another library is there */
                atomic_compare_exchange_strong(&b->state, &was, ((was + ANOTHER) & ~(uint64_t)STATES) | FREE);
        }
}

int kvp_is_given_up(const struct wrapped *w, const void *wrapper) {
    for (int i = 0; i < BOUND; i++)
        if (w->bound[i] == (any_fn *)wrapper) return (atomic_load(&w->binding[i].state) & STATES) == FREE;
    return 0;
}

static int is_wrapped(const struct wrapped *w, const void *function) {
    for (int i = 0; i < BOUND; i++)
        if (w->real[i] == (any_fn *)function && (atomic_load(&w->binding[i].state) & STATES) == USED) return 1;
    return 0;
}

/* ---- what programs ask ---------------------------------------------------------------------------------------------
 */

/* Whether the caller asks for what stands behind a function of its own that is wrapped: the call is recorded there. */
static int asks_for_its_own(struct link_map *caller, const struct wrapped *w) {
    void *handle = kvp_loaded(caller->l_name);
    if (!handle) return 0;
    void *found = real_dlsym()(handle, w->name);
    kvp_let_go(handle);
    return found && map_of(found) == caller && is_wrapped(w, found);
}

/* The answer to dlsym or dlvsym; NULL where there is none, or where the loader has to be asked by the caller itself. */
static __attribute__((noinline)) void *answer(void *handle, struct wrapped *w, const char *version, void *from) {
    struct link_map *caller = map_of(from);
    void *found = NULL;
    if (handle == RTLD_NEXT)
        found = known_at_start(caller) ? definition_behind(caller, w->name, version) : NULL;
    else
        found = look_up(handle, w->name, version);
    if (!found && handle == RTLD_DEFAULT && caller && caller->l_name && caller->l_name[0]) {
        void *own = kvp_loaded(caller->l_name); /* its scope ends with what it was loaded with */
        if (own) {
            found = look_up(own, w->name, version);
            kvp_let_go(own);
        }
    }
    if (!found || kvp_is_call_entry(found) || (caller && asks_for_its_own(caller, w))) return found;
    return kvp_wrap_pointer(w, found);
}

/* Must end in a jump, not a call, wherever the name is not ours: glibc finds what RTLD_NEXT and RTLD_DEFAULT mean from
 * the return address. (A test holds it.) */
CUDA_EXPORT void *dlsym(void *restrict handle, const char *restrict name);
CUDA_EXPORT NOT_SANITIZED void *dlsym(void *restrict handle, const char *restrict name) {
    if (unlikely(kvp_watch.redirects)) {
        kvp_redirect_new();
        struct wrapped *w = kvp_find_wrapped(name);
        void *found = unlikely(w != NULL) ? answer(handle, w, NULL, __builtin_return_address(0)) : NULL;
        if (found) return found;
    }
    return real_dlsym()(handle, name);
}

/* As dlsym. */
NOT_SANITIZED void *kvp_dlvsym(void *restrict handle, const char *restrict name, const char *restrict version) {
    if (kvp_watch.redirects && version) {
        kvp_redirect_new();
        struct wrapped *w = kvp_find_wrapped(name);
        void *found = w ? answer(handle, w, version, __builtin_return_address(0)) : NULL;
        if (found) return found;
    }
    return dlvsym(handle, name, version);
}

/* ---- loading -------------------------------------------------------------------------------------------------------
 */

struct paths {
    uintptr_t caller, main; /* main: where the program's dynamic section lies */
    int matter;
};

static int paths_in(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct paths *p = data;
    const ElfW(Dyn) *dynamic = NULL;
    int inside = 0, first = !p->main;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        uintptr_t from = info->dlpi_addr + h->p_vaddr;
        if (h->p_type == PT_LOAD && p->caller >= from && p->caller - from < h->p_memsz) inside = 1;
        if (h->p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)from;
    }
    p->main = 1;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++)
        if ((dynamic->d_tag == DT_RUNPATH && inside) || (dynamic->d_tag == DT_RPATH && !first)) p->matter = 1;
    return p->matter;
}

/* Whether a name without a path is searched for otherwise where that caller asks than where we do; -1: not known. */
static int caller_matters(const void *caller) {
    struct paths p = {.caller = (uintptr_t)caller};
    return kvp_list(paths_in, &p) < 0 ? -1 : p.matter;
}

static int is_called(const struct link_map *map, const char *file) {
    const char *base = map->l_name ? strrchr(map->l_name, '/') : NULL, *strings = NULL;
    size_t name = 0;
    for (const ElfW(Dyn) *d = map->l_ld; d && d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_STRTAB) strings = (const char *)d->d_un.d_ptr;
        if (d->d_tag == DT_SONAME) name = d->d_un.d_val;
    }
    return (base && !strcmp(base + 1, file)) ||
           (name && strings > (const char *)map->l_addr && !strcmp(strings + name, file));
}

/* A library without a path in its name, from where the loader would take it for that caller; NULL: it has to be asked
 * by the caller itself. */
static void *open_for(const void *caller, const char *file, int mode) {
    void *found = kvp_loaded(file);
    if (found) {
        int called = is_called(found, file);
        kvp_let_go(found);
        return called ? dlopen(file, mode) : NULL;
    }
    struct link_map *map = map_of(caller);
    void *own = map ? kvp_loaded(map->l_name) : NULL;
    Dl_serinfo size, *folders = NULL;
    if (own && !dlinfo(own, RTLD_DI_SERINFOSIZE, &size) && (folders = malloc(size.dls_size))) {
        memcpy(folders, &size, offsetof(Dl_serinfo, dls_serpath));
        if (dlinfo(own, RTLD_DI_SERINFO, folders)) folders->dls_cnt = 0;
        for (unsigned i = 0; i < folders->dls_cnt && !found; i++) {
            char path[4096], variants[4096];
            const char *folder = folders->dls_serpath[i].dls_name;
            if (folder[0] != '/' || strlen(folder) + strlen(file) + 32 > sizeof path) break;
            snprintf(variants, sizeof variants, "%s/glibc-hwcaps", folder);
            if (!access(variants, F_OK)) break; /* of several builds the loader chooses by the processor */
            snprintf(path, sizeof path, "%s/%s", folder, file);
            if (!access(path, F_OK)) found = dlopen(path, mode);
        }
    }
    free(folders);
    if (own) kvp_let_go(own);
    return found;
}

/* In place of dlopen. Where the loader has to see the caller ($ORIGIN in the name, a search path that nobody foresaw)
 * it must end in a jump, and what it loaded is met at the next dlsym or dlopen. */
void *kvp_dlopen(const char *file, int mode) {
    if (!kvp_watch.redirects || !file) return dlopen(file, mode);
    kvp_before_load();
    kvp_redirect_new();
    if (strchr(file, '$')) return dlopen(file, mode);
    const void *caller = __builtin_return_address(0);
    int matters = strchr(file, '/') ? 0 : caller_matters(caller);
    if (matters < 0) return dlopen(file, mode);
    void *handle = matters ? open_for(caller, file, mode) : dlopen(file, mode);
    if (matters && !handle) return dlopen(file, mode);
    if (!handle) return NULL; /* what the loader says of it stands until its next call: dlerror is the program's */
    kvp_redirect_new();
    return handle;
}
