/* What an attached process starts is recorded, too: the environment that it hands on is completed on the way. The
 * process's own environment stays as it is: other threads may be reading it. */
#define _GNU_SOURCE
#include "interpose.h"

#include <alloca.h>
#include <dlfcn.h>
#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define ADDED 4
static char preload[4200];
static char added[ADDED][3200]; /* NAME=value; the first are those that a child may not have of its own */
static int added_count;

int kvp_hand_on(const char *library, const char *folder, const char *detail, uint64_t max_bytes) {
    if (strlen(library) >= sizeof preload - 16 || strlen(folder) >= sizeof added[0] - 16) return -ENAMETOOLONG;
    snprintf(preload, sizeof preload, "LD_PRELOAD=%s", library);
    int n = 0;
    snprintf(added[n++], sizeof added[0], "KVPROBE_RUN=%s", folder);
    snprintf(added[n++], sizeof added[0], "KVPROBE_DETAIL=%s", detail);
    snprintf(added[n++], sizeof added[0], "KVPROBE_FIX=off");
    snprintf(added[n++], sizeof added[0], "KVPROBE_MAX_BYTES=%llu", (unsigned long long)max_bytes);
    added_count = n;
    return 0;
}

static int same_name(const char *a, const char *b) {
    size_t length = (size_t)(strchr(b, '=') - b) + 1;
    return !strncmp(a, b, length);
}

static size_t count(char *const *list) {
    size_t n = 0;
    while (list && list[n]) n++;
    return n;
}

/* `to` has room for count(env) + ADDED + 2 words, `joined` for the value of LD_PRELOAD and ours. */
static void complete(char **to, char *joined, char *const *env) {
    size_t n = 0;
    const char *given = NULL;
    for (; env && *env; env++) {
        int ours = 0;
        for (int i = 0; i < added_count; i++) ours |= same_name(*env, added[i]);
        if (same_name(*env, preload))
            given = *env;
        else if (!ours)
            to[n++] = *env;
    }
    if (given && strstr(given, preload + 11))
        strcpy(joined, given);
    else if (given && given[11])
        strcat(strcat(strcpy(joined, given), ":"), preload + 11);
    else
        strcpy(joined, preload);
    to[n++] = joined;
    for (int i = 0; i < added_count; i++) to[n++] = added[i];
    to[n] = NULL;
}

static size_t room(char *const *env) {
    size_t bytes = strlen(preload) + 2;
    for (; env && *env; env++)
        if (same_name(*env, preload)) bytes += strlen(*env);
    return bytes;
}

/* In this function's frame: these run between vfork and exec, where nothing may be allocated. */
#define COMPLETED(ENV)                                                                                                 \
    char **list = alloca((count(ENV) + ADDED + 2) * sizeof *list);                                                     \
    complete(list, alloca(room(ENV)), ENV)

static int our_execve(const char *path, char *const *argv, char *const *env) {
    if (!kvp_watch.attached || !env) return execve(path, argv, env);
    COMPLETED(env);
    return execve(path, argv, list);
}

static int our_execv(const char *path, char *const *argv) { return our_execve(path, argv, environ); }

static int our_execvpe(const char *file, char *const *argv, char *const *env) {
    if (!kvp_watch.attached || !env) return execvpe(file, argv, env);
    COMPLETED(env);
    return execvpe(file, argv, list);
}

static int our_execvp(const char *file, char *const *argv) { return our_execvpe(file, argv, environ); }

static int our_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                           const posix_spawnattr_t *attributes, char *const *argv, char *const *env) {
    if (!kvp_watch.attached || !env) return posix_spawn(pid, path, actions, attributes, argv, env);
    COMPLETED(env);
    return posix_spawn(pid, path, actions, attributes, argv, list);
}

static int our_posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                            const posix_spawnattr_t *attributes, char *const *argv, char *const *env) {
    if (!kvp_watch.attached || !env) return posix_spawnp(pid, file, actions, attributes, argv, env);
    COMPLETED(env);
    return posix_spawnp(pid, file, actions, attributes, argv, list);
}

#define OURS(NAME, FUNCTION) {NAME, (any_fn *)(void *)FUNCTION}
const struct redirected kvp_redirected[] = {
    OURS("dlsym", dlsym),
    OURS("dlopen", kvp_dlopen),
    OURS("_exit", _exit),
    OURS("_Exit", _Exit),
    OURS("execve", our_execve),
    OURS("execv", our_execv),
    OURS("execvp", our_execvp),
    OURS("execvpe", our_execvpe),
    OURS("posix_spawn", our_posix_spawn),
    OURS("posix_spawnp", our_posix_spawnp),
};
const int kvp_redirected_count = sizeof kvp_redirected / sizeof *kvp_redirected;
