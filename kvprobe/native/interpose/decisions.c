/* What the interposer's cures decided, as lines of events-<pid>.jsonl. Rare: a few lines a process. */
#define _GNU_SOURCE
#include "staging.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

void kvp_decision(const char *folder, const char *what, const char *from, const char *to, double gain,
                  const char *format, ...) {
    int was = errno;
    char why[512], change[256] = "", evidence[64] = "", line[1024], path[4096];
    va_list rest;
    if (!folder) return;
    va_start(rest, format);
    vsnprintf(why, sizeof why, format, rest);
    va_end(rest);
    if (to) snprintf(change, sizeof change, ",\"from\":\"%s\",\"to\":\"%s\"", from, to);
    if (gain > 0) snprintf(evidence, sizeof evidence, ",\"evidence\":{\"gain\":%.3f}", gain);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int length = snprintf(line, sizeof line,
                          "{\"t_ns\":%llu,\"kind\":\"decision\",\"adapter\":\"kvprobe.staging\",\"what\":\"%s\"%s,"
                          "\"why\":\"%s\"%s}\n",
                          (unsigned long long)now.tv_sec * 1000000000u + (unsigned long long)now.tv_nsec, what, change,
                          why, evidence);
    snprintf(path, sizeof path, "%s/events-%d.jsonl", folder, (int)getpid());
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file >= 0) {
        if (length > 0 && (size_t)length < sizeof line && write(file, line, (size_t)length) < 0) errno = 0;
        close(file);
    }
    errno = was;
}
