/* What is known of the process: its libraries, their functions and its stacks, read from its memory and from /proc. */
#define _GNU_SOURCE
#include "inject.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define USER_END (UINT64_C(1) << 47)

int kvp_target_read(const struct target *t, uint64_t address, void *to, size_t bytes) {
    return pread(t->mem, to, bytes, (off_t)address) == (ssize_t)bytes;
}

int kvp_target_write(const struct target *t, uint64_t address, const void *from, size_t bytes) {
    return pwrite(t->mem, from, bytes, (off_t)address) == (ssize_t)bytes;
}

/* ---- one library --------------------------------------------------------------------------------------------------
 */

static uint64_t loaded(const struct object *o, uint64_t address) {
    return address < o->bias ? o->bias + address : address; /* the loader adds the base in place, in most objects */
}

/* Its tables of symbols. 0: it is no library that the loader has loaded. */
static int read_header(struct target *t, struct object *o) {
    Elf64_Ehdr header;
    Elf64_Phdr program[32];
    if (!kvp_target_read(t, o->first, &header, sizeof header) || memcmp(header.e_ident, ELFMAG, SELFMAG) ||
        header.e_phnum > 32 || header.e_phentsize != sizeof *program)
        return 0;
    if (!kvp_target_read(t, o->first + header.e_phoff, program, header.e_phnum * sizeof *program)) return 0;
    uint64_t dynamic = 0, entries = 0;
    int based = 0;
    for (int i = 0; i < header.e_phnum; i++) {
        if (program[i].p_type == PT_LOAD && !based)
            o->bias = o->first - (program[i].p_vaddr & ~UINT64_C(4095)), based = 1;
        if (program[i].p_type == PT_DYNAMIC) dynamic = program[i].p_vaddr, entries = program[i].p_memsz / 16;
    }
    for (uint64_t i = 0; dynamic && i < entries && i < 256; i++) {
        Elf64_Dyn d;
        if (!kvp_target_read(t, o->bias + dynamic + i * sizeof d, &d, sizeof d)) return 0;
        if (d.d_tag == DT_NULL) break;
        if (d.d_tag == DT_SYMTAB) o->symbols = loaded(o, d.d_un.d_ptr);
        if (d.d_tag == DT_STRTAB) o->strings = loaded(o, d.d_un.d_ptr);
        if (d.d_tag == DT_GNU_HASH) o->hashes = loaded(o, d.d_un.d_ptr);
    }
    return o->symbols && o->strings && o->hashes;
}

static uint32_t hash_of(const char *name) {
    uint32_t hash = 5381;
    for (; *name; name++) hash = hash * 33 + (unsigned char)*name;
    return hash;
}

/* Where a library defines a function or a variable, 0 where it does not. */
static uint64_t find_in(const struct target *t, const struct object *o, const char *name) {
    uint32_t head[4], at, hash = hash_of(name); /* buckets, first symbol, words of the filter, its shift */
    if (!kvp_target_read(t, o->hashes, head, sizeof head) || !head[0]) return 0;
    uint64_t buckets = o->hashes + 16 + (uint64_t)head[2] * 8, chains = buckets + (uint64_t)head[0] * 4;
    if (!kvp_target_read(t, buckets + hash % head[0] * 4, &at, 4) || at < head[1]) return 0;
    for (uint32_t chain = 0; !(chain & 1); at++) {
        Elf64_Sym symbol;
        char found[64] = "";
        if (!kvp_target_read(t, chains + (uint64_t)(at - head[1]) * 4, &chain, 4)) return 0;
        if ((chain | 1) != (hash | 1)) continue;
        if (!kvp_target_read(t, o->symbols + (uint64_t)at * sizeof symbol, &symbol, sizeof symbol)) return 0;
        kvp_target_read(t, o->strings + symbol.st_name, found, strlen(name) + 1);
        int type = ELF64_ST_TYPE(symbol.st_info);
        if (symbol.st_shndx != SHN_UNDEF && (type == STT_FUNC || type == STT_OBJECT) && !strcmp(found, name))
            return o->bias + symbol.st_value;
    }
    return 0;
}

static int named(const struct object *o, const char *start) { return !strncmp(o->name, start, strlen(start)); }

static void look_into(struct target *t, struct object *o) {
    if (find_in(t, o, "malloc")) o->is |= DEFINES_MALLOC;
    if (find_in(t, o, "pthread_create")) o->is |= DEFINES_THREADS;
    if (named(o, "ld-linux") || named(o, "ld-2") || named(o, "ld.so")) o->is |= IS_LOADER;
    if (named(o, "libc.") || named(o, "libc-2") || named(o, "libpthread") || named(o, "libdl.") || named(o, "libdl-2"))
        o->is |= IS_C_LIBRARY;
}

/* ---- all of it ----------------------------------------------------------------------------------------------------
 */

static void *grown(void *list, size_t count, size_t bytes) {
    if (count & (count - 1)) return list;
    void *more = realloc(list, (count ? count * 2 : 1) * bytes);
    if (!more) _exit(1);
    return more;
}

static void add_area(struct target *t, uint64_t first, uint64_t last, const char *path) {
    t->areas = grown(t->areas, t->area_count, sizeof *t->areas);
    t->areas[t->area_count++] = (struct area){first, last, !strcmp(path, "[stack]")};
}

/* A line of the file of mappings; `o` is the library that the line before belongs to. */
static void add_mapping(struct target *t, struct object *o, char *path_of_o, const char *line) {
    unsigned long first, last, offset;
    char may[8], path[PATH_BYTES] = "";
    if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %4095[^\n]", &first, &last, may, &offset, path) < 4) return;
    if (first < USER_END && first - t->mapped_to > t->free_bytes) { /* far from all that grows */
        t->free_bytes = first - t->mapped_to;
        t->free_at = (t->mapped_to + t->free_bytes / 2) & ~UINT64_C(4095);
    }
    t->mapped_to = last;
    if (may[1] == 'w' && may[0] == 'r') add_area(t, first, last, path);
    if (path[0] != '/') return;
    if (!offset) {
        *o = (struct object){.first = first};
        strcpy(path_of_o, path);
        const char *name = strrchr(path, '/') + 1;
        snprintf(o->name, sizeof o->name, "%.63s", name);
    } else if (!o->first || strcmp(path, path_of_o))
        return;
    o->last = last;
    if (may[2] != 'x' || o->text_first) return;
    o->text_first = first, o->text_last = last;
}

static int read_mappings(struct target *t, int with_objects) {
    static char line[PATH_BYTES + 256], path[PATH_BYTES];
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/maps", (int)t->pid);
    FILE *file = fopen(name, "re");
    if (!file) return 0;
    struct object o = {0};
    t->area_count = t->mapped_to = t->free_bytes = 0;
    while (fgets(line, sizeof line, file)) {
        uint64_t text = o.text_first, first = o.first;
        add_mapping(t, &o, path, line);
        if (!with_objects || !o.text_first || (text && first == o.first)) continue;
        if (!read_header(t, &o)) continue;
        look_into(t, &o);
        t->objects = grown(t->objects, t->object_count, sizeof o);
        t->objects[t->object_count++] = o;
    }
    fclose(file);
    return 1;
}

/* Nothing but memory that was mapped for code, and by nobody else: of just these bounds. */
int kvp_target_is_code(const struct target *t, uint64_t first, uint64_t last) {
    char name[64], line[512], wanted[64];
    snprintf(name, sizeof name, "/proc/%d/maps", (int)t->pid);
    snprintf(wanted, sizeof wanted, "%lx-%lx r-xp 00000000 00:00 0", (unsigned long)first, (unsigned long)last);
    FILE *file = fopen(name, "re");
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) found = !strncmp(line, wanted, strlen(wanted));
    if (file) fclose(file);
    return found;
}

void kvp_target_areas(struct target *t) { read_mappings(t, 0); }

const struct object *kvp_target_object(const struct target *t, uint64_t address) {
    for (size_t i = 0; i < t->object_count; i++)
        if (address >= t->objects[i].text_first && address < t->objects[i].text_last) return &t->objects[i];
    return NULL;
}

const struct area *kvp_target_area(const struct target *t, uint64_t address) {
    for (size_t i = 0; i < t->area_count; i++)
        if (address >= t->areas[i].first && address < t->areas[i].last) return &t->areas[i];
    return NULL;
}

uint64_t kvp_target_symbol(struct target *t, const char *name) {
    uint64_t found = 0;
    for (size_t i = 0; i < t->object_count && !found; i++)
        if (t->objects[i].is & (IS_C_LIBRARY | IS_LOADER)) found = find_in(t, &t->objects[i], name);
    return found;
}

/* Where some code stands in the C library; 0: nowhere. */
static uint64_t find_code(const struct target *t, const void *code, size_t bytes) {
    for (size_t i = 0; i < t->object_count; i++) {
        const struct object *o = &t->objects[i];
        size_t size = o->text_last - o->text_first;
        if (!(o->is & IS_C_LIBRARY) || !(o->is & DEFINES_MALLOC) || size > 1u << 26) continue;
        char *text = malloc(size), *found = NULL;
        if (text && kvp_target_read(t, o->text_first, text, size)) found = memmem(text, size, code, bytes);
        uint64_t address = found ? o->text_first + (uint64_t)(found - text) : 0;
        free(text);
        if (address) return address;
    }
    return 0;
}

const char *kvp_target_open(struct target *t, pid_t pid) {
    char name[64];
    *t = (struct target){.pid = pid};
    snprintf(name, sizeof name, "/proc/%d/mem", (int)pid);
    t->mem = open(name, O_RDWR | O_CLOEXEC);
    if (t->mem < 0) return errno == ENOENT ? "it has ended" : "the system does not permit to look into it";
    if (!read_mappings(t, 1)) return "it has ended";
    /* mov $15 (rt_sigreturn), %rax; syscall */
    t->restore = find_code(t, "\x48\xc7\xc0\x0f\0\0\0\x0f\x05", 9);
    t->system_call = find_code(t, "\x0f\x05\xc3", 3);
    if (!t->restore || !t->system_call) return "it does not run glibc's C library, or is just starting or ending";
    return NULL;
}
