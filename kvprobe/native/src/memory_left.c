/* How much memory this process may still take: what the machine has left, and the cgroups above it and
 * `ulimit -v` allow. */
#define _GNU_SOURCE
#include "host_memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define PATH 4096

/* The number behind `key` in a file of lines "key number"; key NULL: the number alone. UINT64_MAX: none, or "max". */
static uint64_t number_in(const char *path, const char *key) {
    char line[256];
    unsigned long long value = UINT64_MAX;
    FILE *file = fopen(path, "re");
    if (!file) return UINT64_MAX;
    size_t length = key ? strlen(key) : 0;
    while (fgets(line, sizeof line, file))
        if ((!key || (!strncmp(line, key, length) && strchr(" :\t", line[length]))) &&
            sscanf(line + length + (key && line[length] == ':'), "%llu", &value) == 1)
            break;
    fclose(file);
    return value;
}

static void tighten(kvp_memory *memory, uint64_t limit, uint64_t used) {
    if (limit == UINT64_MAX || used == UINT64_MAX || limit >= memory->total_bytes) return;
    uint64_t left = limit > used ? limit - used : 0;
    if (left < memory->left_bytes) memory->left_bytes = left;
    memory->total_bytes = limit;
}

/* Of what a cgroup uses the cache of files is given up before anything else. */
static uint64_t used_by(const char *folder, const char *usage, const char *cache[2]) {
    char path[PATH + 64];
    snprintf(path, sizeof path, "%s/%s", folder, usage);
    uint64_t used = number_in(path, NULL);
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    for (int i = 0; i < 2 && used != UINT64_MAX; i++) {
        uint64_t files = number_in(path, cache[i]);
        if (files != UINT64_MAX) used -= files < used ? files : used;
    }
    return used;
}

/* `folder` and the cgroups above it, up to `top` characters of it. */
static void climb(kvp_memory *memory, char *folder, size_t top, const char *const limits[2], const char *usage,
                  const char *cache[2]) {
    for (;;) {
        char path[PATH + 64];
        for (int i = 0; i < 2 && limits[i]; i++) {
            snprintf(path, sizeof path, "%s/%s", folder, limits[i]);
            uint64_t limit = number_in(path, NULL);
            if (limit != UINT64_MAX) tighten(memory, limit, used_by(folder, usage, cache));
        }
        char *last = strrchr(folder, '/');
        if (!last || (size_t)(last - folder) < top) return;
        *last = 0;
    }
}

kvp_memory kvp_memory_left(const char *root) {
    static const char *const limits[] = {"memory.max", "memory.high"};
    static const char *const old_limits[] = {"memory.limit_in_bytes", NULL};
    char path[PATH], line[PATH];
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    uint64_t total = number_in(path, "MemTotal"), left = number_in(path, "MemAvailable");
    if (total == UINT64_MAX || left == UINT64_MAX) return (kvp_memory){0, 0};
    kvp_memory memory = {total << 10, left << 10};
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group || strstr(group, "/..")) continue;
        *group++ = 0;
        int second = !controllers[1];
        if (!second && !strstr(controllers + 1, "memory")) continue;
        int top = snprintf(path, sizeof path, "%s/sys/fs/cgroup%s", root, second ? "" : "/memory");
        if (strcmp(group, "/")) snprintf(path + top, sizeof path - (size_t)top, "%s", group);
        if (second)
            climb(&memory, path, (size_t)top, limits, "memory.current",
                  (const char *[2]){"inactive_file", "active_file"});
        else
            climb(&memory, path, (size_t)top, old_limits, "memory.usage_in_bytes",
                  (const char *[2]){"total_inactive_file", "total_active_file"});
    }
    if (file) fclose(file);
    struct rlimit space;
    snprintf(path, sizeof path, "%s/proc/self/statm", root);
    if (!getrlimit(RLIMIT_AS, &space) && space.rlim_cur != RLIM_INFINITY) {
        uint64_t pages = number_in(path, NULL), used = pages * (uint64_t)sysconf(_SC_PAGESIZE);
        uint64_t more = pages != UINT64_MAX && space.rlim_cur > used ? space.rlim_cur - used : 0;
        if (more < memory.left_bytes) memory.left_bytes = more;
    }
    return memory;
}

uint64_t kvp_memory_reserve(const kvp_memory *memory) {
    uint64_t reserve = memory->total_bytes / 16, least = 256u << 20, most = (uint64_t)4 << 30;
    return reserve < least ? least : reserve > most ? most : reserve;
}
