/* Where the descriptors lead that a tier reads and writes: the folder of a file, a device, the kind of a socket's peer.
 * Each place has a number in the records; what it means is a line of tiers-<pid>.jsonl in the run folder, written when
 * the place is met first.
 *
 * What is known of a descriptor is believed as long as fstat tells the same file, and forgotten at close(). No lock:
 * a thread that meets a place while another is writing it down gives it a second number, which the reader joins. */
#define _GNU_SOURCE
#include "files.h"
#include "secrets.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

enum {
    DESCRIPTORS = 4096, /* that are remembered at a time */
    PLACES = 32,
    OF_FOLDERS = 24, /* from here on files are told apart by their disk alone */
    SIBLINGS = 4,    /* folders of one folder, beyond which that one is the place */
    PATH_BYTES = 1024,
    IGNORED = 255 /* remembered of a descriptor that is no tier's */
};

enum { FREE, TAKING, USED };

struct place {
    atomic_int state;
    int whole_tree; /* of all that lies below, too */
    uint64_t device;
    long filesystem;
    int direct, port, here;
    const char *kind;
    char path[PATH_BYTES];
};

static struct place places[PLACES]; /* number: index + 2 */
static _Atomic uint64_t known[DESCRIPTORS];
static const char *_Atomic run_folder;
static atomic_int all_told; /* in the file of this process and run */

void kvp_places_start(const char *folder) {
    run_folder = folder;
    all_told = 0;
}

void kvp_place_closes(int fd) {
    _Atomic uint64_t *word = &known[(unsigned)fd % DESCRIPTORS];
    if (atomic_load_explicit(word, memory_order_relaxed)) atomic_store_explicit(word, 0, memory_order_relaxed);
}

/* ---- what is told ------------------------------------------------------------------------------------------------ */

static void put(char **at, const char *end, const char *text) {
    static const char digits[] = "0123456789abcdef";
    for (; *text && end - *at > 8; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            *(*at)++ = '\\', *(*at)++ = (char)c;
        else if (c < ' ' || c >= 127) /* a name need not be UTF-8: bytes as Latin-1 */
            *at += sprintf(*at, "\\u00%c%c", digits[c >> 4], digits[c & 15]);
        else
            *(*at)++ = (char)c;
    }
    **at = 0;
}

static void tell(int i) {
    const struct place *p = &places[i];
    char shown[PATH_BYTES], line[PATH_BYTES * 6 + 256], file[4096], *at = line;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    kvp_redact(p->path, strlen(p->path), shown, sizeof shown);
    at += sprintf(at, "{\"t_ns\":%llu,\"place\":%d,\"kind\":\"%s\",\"path\":\"",
                  (unsigned long long)now.tv_sec * 1000000000u + (unsigned long long)now.tv_nsec, i + 2, p->kind);
    put(&at, line + sizeof line - 160, shown);
    at += sprintf(at, "\",\"filesystem\":%ld,\"device\":\"%u:%u\",\"direct\":%d,\"port\":%d,\"here\":%d}\n",
                  p->filesystem, major(p->device), minor(p->device), p->direct, p->port, p->here);
    snprintf(file, sizeof file, "%s/tiers-%d.jsonl", run_folder, (int)getpid());
    int fd = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return;
    if (write(fd, line, (size_t)(at - line)) < 0) errno = 0;
    close(fd);
}

/* All of them, for a process that has told none: a child of fork, or one that is in another run now. */
static void tell_all(void) {
    if (atomic_exchange(&all_told, 1)) return;
    for (int i = 0; i < PLACES; i++)
        if (places[i].state == USED) tell(i);
}

/* ---- finding a place --------------------------------------------------------------------------------------------- */

static int same(const struct place *a, const struct place *b) {
    return a->kind == b->kind && a->device == b->device && a->port == b->port && a->here == b->here &&
           !strcmp(a->path, b->path);
}

static int below(const char *path, const char *folder) {
    size_t length = strlen(folder);
    return !strncmp(path, folder, length) && (!path[length] || path[length] == '/');
}

static int used(int i) { return atomic_load_explicit(&places[i].state, memory_order_acquire) == USED; }

static size_t parent_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) : 0;
}

/* The folder itself, or the one above it where several of that one's are places already. */
static void widen(struct place *p) {
    size_t parent = parent_of(p->path);
    int siblings = 0;
    for (int i = 0; i < PLACES && parent > 1; i++) {
        if (!used(i) || places[i].kind != p->kind || places[i].device != p->device) continue;
        siblings += parent_of(places[i].path) == parent && !strncmp(places[i].path, p->path, parent);
    }
    if (siblings < SIBLINGS) return;
    p->path[parent] = 0;
    p->whole_tree = 1;
}

static unsigned insert(const struct place *p, int from, int to) {
    for (int i = from; i < to; i++) {
        int none = FREE;
        if (used(i) && same(&places[i], p)) return (unsigned)i + 2;
        if (!atomic_compare_exchange_strong(&places[i].state, &none, TAKING)) continue;
        memcpy((char *)&places[i] + sizeof places[i].state, (const char *)p + sizeof p->state,
               sizeof *p - sizeof p->state);
        atomic_store_explicit(&places[i].state, USED, memory_order_release);
        tell(i);
        return (unsigned)i + 2;
    }
    return UNTOLD_PLACE;
}

static unsigned number_of(struct place *p) {
    int file = !strcmp(p->kind, "file");
    for (int i = 0; i < PLACES; i++) {
        if (!used(i)) continue;
        if (same(&places[i], p)) return (unsigned)i + 2;
        if (file && places[i].whole_tree && places[i].device == p->device && below(p->path, places[i].path))
            return (unsigned)i + 2;
    }
    if (file) widen(p);
    unsigned number = insert(p, 0, OF_FOLDERS);
    if (number != UNTOLD_PLACE) return number;
    if (file) p->kind = "disk", p->path[0] = 0;
    return insert(p, OF_FOLDERS, PLACES);
}

/* What programs and the system read for themselves. */
static int is_program(const char *path) {
    static const char *const endings[] = {".py", ".pyc", ".so"}, *const roots[] = {"/proc/", "/sys/", "/dev/nvidia"};
    size_t length = strlen(path);
    for (unsigned i = 0; i < sizeof roots / sizeof *roots; i++)
        if (!strncmp(path, roots[i], strlen(roots[i]))) return 1;
    for (unsigned i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t ending = strlen(endings[i]);
        if (length > ending && !strcmp(path + length - ending, endings[i])) return 1;
    }
    return strstr(path, ".so.") != NULL || below(path, run_folder);
}

static int describe_socket(int fd, struct place *p) {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_storage room;
    } peer;
    socklen_t bytes = sizeof peer;
    p->kind = "socket";
    if (getpeername(fd, &peer.any, &bytes)) return 1;
    if (peer.any.sa_family == AF_UNIX) p->kind = "unix socket", p->here = 1;
    if (peer.any.sa_family == AF_INET) {
        p->port = ntohs(peer.v4.sin_port);
        p->here = ntohl(peer.v4.sin_addr.s_addr) >> 24 == 127;
    }
    if (peer.any.sa_family == AF_INET6) {
        const uint8_t *address = peer.v6.sin6_addr.s6_addr;
        p->port = ntohs(peer.v6.sin6_port);
        p->here = IN6_IS_ADDR_LOOPBACK(&peer.v6.sin6_addr) ||
                  (IN6_IS_ADDR_V4MAPPED(&peer.v6.sin6_addr) && address[12] == 127);
    }
    if (p->port >= 32768) p->port = 0; /* most likely one that the system picked: each connection has another */
    return 1;
}

/* 0: it is no tier's. */
static int describe(int fd, const struct stat *s, struct place *p) {
    if (S_ISSOCK(s->st_mode)) return describe_socket(fd, p);
    if (S_ISFIFO(s->st_mode)) {
        p->kind = "pipe";
        return 1;
    }
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, p->path, sizeof p->path - 1);
    p->path[length > 0 ? length : 0] = 0;
    if (is_program(p->path)) return 0;
    p->direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    if (!S_ISREG(s->st_mode)) {
        p->kind = S_ISBLK(s->st_mode) ? "block device" : "device";
        p->device = s->st_rdev;
        return 1;
    }
    struct statfs system;
    p->kind = "file";
    p->device = s->st_dev;
    if (!fstatfs(fd, &system)) p->filesystem = (long)system.f_type;
    p->path[parent_of(p->path)] = 0;
    return 1;
}

/* Of the file behind a descriptor: never 0. */
static uint64_t identity(int fd, const struct stat *s) {
    uint64_t h = (uint64_t)s->st_ino * 0x9e3779b97f4a7c15u ^ (uint64_t)s->st_dev;
    h = (h ^ h >> 29 ^ (uint64_t)fd << 40 ^ (s->st_mode & S_IFMT)) * 0xbf58476d1ce4e5b9u;
    return (h ^ h >> 32) << 8;
}

/* On a signal handler's own stack there may be no space to look. */
static int on_small_stack(void) {
    stack_t stack;
    return !sigaltstack(NULL, &stack) && (stack.ss_flags & SS_ONSTACK);
}

static __attribute__((noinline)) unsigned find(int fd, const struct stat *s) {
    struct place p = {.kind = ""};
    return describe(fd, s, &p) ? number_of(&p) : IGNORED;
}

unsigned kvp_place_of(int fd) {
    struct stat s;
    if (fd < 0 || fstat(fd, &s)) return UNTOLD_PLACE;
    if (unlikely(!all_told) && !on_small_stack()) tell_all();
    _Atomic uint64_t *word = &known[(unsigned)fd % DESCRIPTORS];
    uint64_t is = identity(fd, &s), was = atomic_load_explicit(word, memory_order_relaxed);
    unsigned number = (unsigned)(was & 255);
    if (unlikely((was & ~(uint64_t)255) != is || !number)) {
        if (on_small_stack()) return UNTOLD_PLACE;
        number = find(fd, &s);
        atomic_store_explicit(word, is | number, memory_order_relaxed);
    }
    return number == IGNORED ? NO_PLACE : number;
}
