/* What the witness saw, for the run folder: mismatches-<pid>.jsonl, a line each as it is found, and verify-<pid>.json,
 * which is replaced as a whole each second and at the end. */
#define _GNU_SOURCE
#include "witness.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define MOST_LINES 200 /* of a process; all are counted */

static const char *folder_;
static _Atomic unsigned lines;

void kvp_witness_tells_into(const char *folder) { folder_ = folder; }

typedef unsigned long long number;

static uint64_t monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int put(int file, const char *text, int length) {
    return file >= 0 && length > 0 && write(file, text, (size_t)length) == length;
}

void kvp_witness_tells(const char *kind, const kvp_record *load, const struct witness_look *looks, int count) {
    char line[1536], path[4096];
    int was = errno, changed = 0, first = -1, last = 0;
    if (atomic_fetch_add(&lines, 1) >= MOST_LINES) {
        COUNT(untold, 1);
        return;
    }
    uint64_t store = 0;
    for (int i = 0; i < count; i++) {
        if (looks[i].store && looks[i].store > store) store = looks[i].store;
        if (looks[i].sum == looks[i].was || (!looks[i].store && *kind == 'c')) continue;
        if (first < 0) first = i;
        last = i;
        changed++;
    }
    const struct witness_store *s = store ? kvp_store_of(store) : NULL;
    unsigned home = s ? s->home : WITNESS_HOMES - 1;
    const struct witness_home *h = &kvp_witness_homes[home];
    int length = snprintf(
        line, sizeof line,
        "{\"t_ns\":%llu,\"kind\":\"%s\",\"address\":%llu,\"device\":%llu,\"bytes\":%llu,\"stream\":%llu,\"thread\":%u,"
        "\"call\":%u,\"load_ns\":%llu,\"pages\":%d,\"changed\":%d,\"first\":%llu,\"last\":%llu,\"home\":%llu,"
        "\"home_bytes\":%llu",
        (number)monotonic(), kind, (number)load->src, (number)load->dst, (number)load->bytes, (number)load->stream,
        load->tid, load->call, (number)load->start_ns, count, changed,
        (number)(first < 0 ? 0 : looks[first].page * WITNESS_PAGE), (number)(looks[last].page * WITNESS_PAGE),
        (number)h->base, (number)h->bytes);
    if (s)
        length += snprintf(line + length, sizeof line - (size_t)length,
                           ",\"store\":{\"start_ns\":%llu,\"summed_ns\":%llu,\"device\":%llu,\"address\":%llu,"
                           "\"bytes\":%llu,\"stream\":%llu,\"thread\":%u,\"call\":%u}",
                           (number)s->start_ns, (number)s->done_ns, (number)s->src, (number)s->dst, (number)s->bytes,
                           (number)s->stream, s->tid, s->call);
    length += snprintf(line + length, sizeof line - (size_t)length, "}\n");
    snprintf(path, sizeof path, "%s/mismatches-%d.jsonl", folder_, (int)getpid());
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (!put(file, line, length)) COUNT(untold, 1);
    if (file >= 0) close(file);
    errno = was;
}

/* Homes: base, bytes, comparisons, changed ones, of each allocation that was compared with. */
static int homes(char *text, int room) {
    int length = 0;
    const char *before = "";
    for (int i = 0; i < WITNESS_HOMES && length < room - 128; i++) {
        const struct witness_home *h = &kvp_witness_homes[i];
        if (!h->compared) continue;
        length += snprintf(text + length, (size_t)(room - length), "%s[%llu,%llu,%llu,%llu]", before, (number)h->base,
                           (number)h->bytes, (number)h->compared, (number)h->changed);
        before = ",";
    }
    return length;
}

void kvp_witness_tell_counts(const char *folder, int closing) {
    static char text[32768];
    static _Atomic int telling;
    char path[4096], partial[4096];
    int was = errno, no = 0;
    if (!atomic_compare_exchange_strong(&telling, &no, 1)) return;
    int length = snprintf(text, sizeof text, "{\"t_ns\":%llu,\"closed\":%s,\"level\":%d", (number)monotonic(),
                          closing ? "true" : "false", kvp_witness_level);
#define X(NAME)                                                                                                        \
    length +=                                                                                                          \
        snprintf(text + length, sizeof text - (size_t)length, ",\"" #NAME "\":%llu", (number)kvp_witness_counts.NAME);
    WITNESS_COUNTS(X)
#undef X
    length += snprintf(text + length, sizeof text - (size_t)length, ",\"homes\":[");
    length += homes(text + length, (int)sizeof text - length - 8);
    length += snprintf(text + length, sizeof text - (size_t)length, "]}\n");
    snprintf(path, sizeof path, "%s/verify-%d.json", folder, (int)getpid());
    snprintf(partial, sizeof partial, "%s/.verify-%d", folder, (int)getpid());
    int file = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    int whole = put(file, text, length);
    if (file >= 0) close(file);
    if (!whole || rename(partial, path)) unlink(partial);
    telling = 0;
    errno = was;
}
