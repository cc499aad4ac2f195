/* What a recorded process starts is recorded, too: the environment that it hands on is completed on the way, whatever a
 * launcher took out of it. The process's own environment stays as it is: other threads may be reading it.
 *
 * Left alone is an environment that says so (KVPROBE=off, an empty KVPROBE_RUN) or that names a run of its own. What a
 * process runs by system() or popen() gets the process's own environment: those call no function that leads here. */
#define _GNU_SOURCE
#include "waits.h"

#include <alloca.h>
#include <dlfcn.h>
#include <errno.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Lists that a program may have of its own: ours comes behind what it has, but for Python's path. */
static struct join {
    const char *name, *ours, *sign; /* sign: what says that it is there already */
    size_t length;
    int first;
} joins[3];
#define ADDED 16
static const char *added[ADDED]; /* NAME=value */
static int added_count, join_count;
static char texts[24576];
static size_t text_bytes;
static const char *run_folder;    /* value of KVPROBE_RUN among them; NULL: nothing is handed on */
static const char *inherited_run; /* this process's own, from a run that it is in no more */
#define RUN "KVPROBE_RUN="
#define NO_ORDER "verify_asan_link_order=0"
#define CARRIED "/instrument/carried" /* where `kvprobe run` has the start-up part of Python */

static const char *keep_text(const char *name, const char *value) {
    size_t bytes = strlen(name) + strlen(value) + 1;
    if (bytes > sizeof texts - text_bytes) return NULL;
    char *text = texts + text_bytes;
    text_bytes += bytes;
    return strcat(strcpy(text, name), value);
}

static void add(const char *name, const char *value) {
    const char *text = value && added_count < ADDED ? keep_text(name, value) : NULL;
    if (text) added[added_count++] = text;
}

static void add_join(const char *name, const char *value, const char *sign, int first) {
    const char *text = keep_text("", value);
    if (text) joins[join_count++] = (struct join){name, text, sign, strlen(name), first};
}

static int begin(const char *library, const char *folder) {
    kvp_hand_on_nothing();
    text_bytes = 0;
    added_count = join_count = 0;
    add_join("LD_PRELOAD=", library, "libkvprobe_interpose.so", 0);
    add(RUN, folder);
    return join_count == 1 && added_count == 1;
}

int kvp_hand_on(const char *library, const char *folder, const char *detail, uint64_t max_bytes) {
    char number[32];
    snprintf(number, sizeof number, "%llu", (unsigned long long)max_bytes);
    if (!begin(library, folder)) return -ENAMETOOLONG;
    add("KVPROBE_DETAIL=", detail);
    add("KVPROBE_FIX=", "off");
    add("KVPROBE_MAX_BYTES=", number);
    inherited_run = getenv("KVPROBE_RUN");
    run_folder = added[0] + strlen(RUN);
    return 0;
}

void kvp_hand_on_environment(const char *library, const char *folder) {
    static const char *const names[] = {
        "KVPROBE_DETAIL=",       "KVPROBE_FIX=",        "KVPROBE_MAX_BYTES=",    "KVPROBE_OBSERVER=",
        "KVPROBE_STACKS=",       "KVPROBE_INTERPOSER=", "KVPROBE_RING_RECORDS=", "KVPROBE_SLOW_NS=",
        "KVPROBE_LOCKED_BYTES=", "KVPROBE_NVTX=",       "KVPROBE_CARRY="};
    if (!begin(library, folder)) return;
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        char name[32];
        memcpy(name, names[i], strlen(names[i]));
        name[strlen(names[i]) - 1] = 0;
        add(names[i], getenv(name));
    }
    const char *path = getenv("PYTHONPATH"), *options = getenv("ASAN_OPTIONS");
    char front[4096];
    size_t length = path ? strcspn(path, ":") : 0;
    if (length >= sizeof CARRIED && length < sizeof front &&
        !memcmp(path + length - strlen(CARRIED), CARRIED, strlen(CARRIED))) {
        memcpy(front, path, length);
        front[length] = 0;
        add_join("PYTHONPATH=", front, CARRIED, 1);
    }
    /* a program with a shared AddressSanitizer ends at once where something was loaded before its runtime */
    if (options && strstr(options, NO_ORDER)) add_join("ASAN_OPTIONS=", NO_ORDER, NO_ORDER, 0);
    run_folder = added[0] + strlen(RUN);
}

void kvp_hand_on_nothing(void) { run_folder = NULL; }

/* ---- an environment, completed ------------------------------------------------------------------------------------
 */

static const char *value_in(char *const *env, const char *name) {
    size_t length = strlen(name);
    for (; env && *env; env++)
        if (!strncmp(*env, name, length)) return *env + length;
    return NULL;
}

static size_t count(char *const *list) {
    size_t n = 0;
    while (list && list[n]) n++;
    return n;
}

static int is_left_alone(char *const *env) {
    if (!run_folder || says_no(value_in(env, "KVPROBE="))) return 1;
    const char *run = value_in(env, RUN);
    return run && strcmp(run, run_folder) && (!*run || !inherited_run || strcmp(run, inherited_run));
}

static int is_added(const char *word) {
    for (int i = 0; i < added_count; i++)
        if (!strncmp(word, added[i], (size_t)(strchr(added[i], '=') - added[i]) + 1)) return 1;
    return 0;
}

static const struct join *join_of(const char *word) {
    for (int i = 0; i < join_count; i++)
        if (!strncmp(word, joins[i].name, joins[i].length)) return &joins[i];
    return NULL;
}

/* The list with ours in it; `to` is behind it afterwards. */
static char *join(const struct join *j, const char *given, char **to) {
    char *text = *to;
    int both = given && *given, there = both && strstr(given, j->sign);
    strcpy(text, j->name);
    if (there)
        strcat(text, given);
    else {
        if (both && !j->first) strcat(strcat(text, given), ":");
        strcat(text, j->ours);
        if (both && j->first) strcat(strcat(text, ":"), given);
    }
    *to = text + strlen(text) + 1;
    return text;
}

/* `to` has space for count(env) + ADDED + 4 words, `memory` for `room(env)` bytes. */
static void complete(char **to, char *memory, char *const *env) {
    size_t n = 0;
    int same = value_in(env, RUN) && !strcmp(value_in(env, RUN), run_folder);
    for (char *const *word = env; word && *word; word++)
        if (!join_of(*word) && (same || !is_added(*word))) to[n++] = *word;
    for (int i = 0; i < join_count; i++) to[n++] = join(&joins[i], value_in(env, joins[i].name), &memory);
    for (int i = 0; i < added_count && !same; i++) to[n++] = (char *)added[i];
    to[n] = NULL;
}

static size_t room(char *const *env) {
    size_t bytes = 1;
    for (int i = 0; i < join_count; i++) {
        const char *given = value_in(env, joins[i].name);
        bytes += joins[i].length + strlen(joins[i].ours) + 2 + (given ? strlen(given) : 0);
    }
    return bytes;
}

/* ---- what starts programs ------------------------------------------------------------------------------------------
 */

/* In this function's frame: these run between vfork and exec, where nothing may be allocated. Where the completed
 * environment is too long for the kernel the program's own goes. */
#define COMPLETED(ENV)                                                                                                 \
    char **list = alloca((count(ENV) + ADDED + 4) * sizeof *list);                                                     \
    complete(list, alloca(room(ENV)), ENV)

static int our_execve(const char *path, char *const *argv, char *const *env) {
    if (is_left_alone(env)) return execve(path, argv, env);
    COMPLETED(env);
    int result = execve(path, argv, list);
    return errno == E2BIG ? execve(path, argv, env) : result;
}

static int our_execv(const char *path, char *const *argv) { return our_execve(path, argv, environ); }

static int our_execvpe(const char *file, char *const *argv, char *const *env) {
    if (is_left_alone(env)) return execvpe(file, argv, env);
    COMPLETED(env);
    int result = execvpe(file, argv, list);
    return errno == E2BIG ? execvpe(file, argv, env) : result;
}

static int our_execvp(const char *file, char *const *argv) { return our_execvpe(file, argv, environ); }

static int our_fexecve(int fd, char *const *argv, char *const *env) {
    if (is_left_alone(env)) return fexecve(fd, argv, env);
    COMPLETED(env);
    int result = fexecve(fd, argv, list);
    return errno == E2BIG ? fexecve(fd, argv, env) : result;
}

/* By its number: older C libraries have no function. */
static int our_execveat(int folder, const char *path, char *const *argv, char *const *env, int flags) {
    if (is_left_alone(env)) return (int)syscall(SYS_execveat, folder, path, argv, env, flags);
    COMPLETED(env);
    int result = (int)syscall(SYS_execveat, folder, path, argv, list, flags);
    return errno == E2BIG ? (int)syscall(SYS_execveat, folder, path, argv, env, flags) : result;
}

/* The arguments behind FIRST as a list; NEXT is what stands behind them. */
#define LISTED(FIRST, NEXT)                                                                                            \
    va_list words;                                                                                                     \
    size_t n = 0;                                                                                                      \
    va_start(words, FIRST);                                                                                            \
    for (const char *word = FIRST; word; word = va_arg(words, const char *)) n++;                                      \
    va_end(words);                                                                                                     \
    char **argv = alloca((n + 1) * sizeof *argv);                                                                      \
    va_start(words, FIRST);                                                                                            \
    argv[0] = (char *)(uintptr_t)FIRST;                                                                                \
    for (size_t i = 1; i <= n; i++) argv[i] = va_arg(words, char *);                                                   \
    NEXT;                                                                                                              \
    va_end(words)

static int our_execl(const char *path, const char *first, ...) {
    LISTED(first, (void)0);
    return our_execve(path, argv, environ);
}

static int our_execlp(const char *file, const char *first, ...) {
    LISTED(first, (void)0);
    return our_execvpe(file, argv, environ);
}

static int our_execle(const char *path, const char *first, ...) {
    char *const *env;
    LISTED(first, env = va_arg(words, char *const *));
    return our_execve(path, argv, env);
}

static int our_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                           const posix_spawnattr_t *attributes, char *const *argv, char *const *env) {
    if (is_left_alone(env)) return posix_spawn(pid, path, actions, attributes, argv, env);
    COMPLETED(env);
    int error = posix_spawn(pid, path, actions, attributes, argv, list);
    return error == E2BIG ? posix_spawn(pid, path, actions, attributes, argv, env) : error;
}

static int our_posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                            const posix_spawnattr_t *attributes, char *const *argv, char *const *env) {
    if (is_left_alone(env)) return posix_spawnp(pid, file, actions, attributes, argv, env);
    COMPLETED(env);
    int error = posix_spawnp(pid, file, actions, attributes, argv, list);
    return error == E2BIG ? posix_spawnp(pid, file, actions, attributes, argv, env) : error;
}

/* Of files.c and waits.c, each with parameters of its own. */
#define X(NAME) extern any_fn kvp_our_##NAME;
FILE_FUNCTIONS(X)
WAIT_FUNCTIONS(X)
#undef X

#define OURS(NAME, FUNCTION) {NAME, (any_fn *)(void *)FUNCTION, NULL}
const struct redirected kvp_redirected[] = {
    OURS("dlsym", dlsym),
    OURS("dlvsym", kvp_dlvsym),
    OURS("dlopen", kvp_dlopen),
    OURS("_exit", _exit),
    OURS("_Exit", _Exit),
    OURS("execve", our_execve),
    OURS("execv", our_execv),
    OURS("execvp", our_execvp),
    OURS("execvpe", our_execvpe),
    OURS("execl", our_execl),
    OURS("execle", our_execle),
    OURS("execlp", our_execlp),
    OURS("execveat", our_execveat),
    OURS("fexecve", our_fexecve),
    OURS("posix_spawn", our_posix_spawn),
    OURS("posix_spawnp", our_posix_spawnp),
    {"seccomp_load", (any_fn *)(void *)kvp_seccomp_load, &kvp_real_seccomp_load},
#define X(NAME) {#NAME, kvp_our_##NAME, &kvp_real_##NAME},
    FILE_FUNCTIONS(X) WAIT_FUNCTIONS(X)
#undef X
};
const int kvp_redirected_count = sizeof kvp_redirected / sizeof *kvp_redirected;
