/* Inputs of libFuzzer for the native readers of recordings: events of a trace, its queues, tables of an SQLite file.
 *
 * clang -fsanitize=fuzzer,address,undefined with kvprobe/native/trace/(all).c; `make fuzz-native` does that. The first
 * byte of an input says how it is cut into pieces; what follows it says which reader gets it.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kineto.h"

typedef struct kvt_queues kvt_queues;
kvt_queues *kvt_queues_open(void);
void kvt_queues_close(kvt_queues *q);
int kvt_queues_want(kvt_queues *q, const char *category, uint8_t code, uint8_t role);
int kvt_queues_scan(kvt_queues *q, const char *text, size_t length, size_t *consumed);
uint32_t kvt_queues_words(const kvt_queues *q);
const char *kvt_queues_word(const kvt_queues *q, uint32_t number, uint32_t *length, uint32_t *role, int32_t *cbid);
int kvt_queues_measure(kvt_queues *q, const uint8_t *meanings, const uint32_t *groups, uint32_t words);

typedef struct kvt_table kvt_table;
kvt_table *kvt_table_open(int fd, uint32_t root, const int *columns, const int64_t *absent, int wanted, int rowid);
int kvt_table_read(kvt_table *t, int64_t *out, uint64_t room, uint64_t *rows);
void kvt_table_close(kvt_table *t);

uint64_t kvt_bad(const kvt_scan_state *s);

static const char *const CATEGORIES[] = {"cuda_runtime", "kernel", "gpu_memcpy", "overhead", "cpu_op"};
static const uint8_t ROLES[] = {1, 2, 3, 4, 0};
enum { MANY = 5, ROOM = 7 };

static uint64_t mixed(uint64_t sum, const void *data, size_t size) {
    const uint8_t *byte = data;
    for (size_t i = 0; i < size; i++) sum = (sum ^ byte[i]) * 1099511628211u;
    return sum;
}

/* What the scanner makes of a text that comes in pieces of `piece` bytes more, each piece in memory of its own. */
static uint64_t scanned(const char *text, size_t length, size_t piece) {
    kvt_scan_state *s = kvt_open();
    kvt_row rows[ROOM];
    size_t done = 0, seen = piece < length ? piece : length;
    uint64_t sum = 0;
    for (int i = 0; i < MANY; i++) kvt_want(s, CATEGORIES[i], (uint8_t)(i + 1));
    for (int state = KVT_MORE; state == KVT_MORE || state == KVT_FULL;) {
        size_t written = 0, consumed = 0;
        char *copy = malloc(seen - done + 1);
        memcpy(copy, text + done, seen - done);
        state = kvt_scan(s, copy, seen - done, rows, ROOM, &written, &consumed);
        free(copy);
        if (written > ROOM || consumed > seen - done) abort();
        for (size_t i = 0; i < written; i++) sum = mixed(sum, &rows[i], offsetof(kvt_row, category) + 1);
        done += consumed;
        if (state == KVT_MORE) {
            if (seen == length) break;
            seen = piece < length - seen ? seen + piece : length;
        }
    }
    for (uint32_t i = 0; i < kvt_names(s); i++) {
        uint32_t many = 0;
        const char *name = kvt_name(s, i, &many);
        sum = mixed(sum, name, many);
    }
    sum += kvt_bad(s);
    kvt_close(s);
    return sum;
}

static void measured(const char *text, size_t length) {
    kvt_queues *q = kvt_queues_open();
    size_t consumed = 0;
    for (int i = 0; i < MANY; i++)
        if (ROLES[i]) kvt_queues_want(q, CATEGORIES[i], (uint8_t)(i + 1), ROLES[i]);
    int state = kvt_queues_scan(q, text, length, &consumed);
    if (consumed > length) abort();
    uint32_t words = kvt_queues_words(q);
    if (state == KVT_END && words) {
        uint8_t *meanings = calloc(words, 1);
        uint32_t *groups = calloc(words, sizeof *groups);
        for (uint32_t i = 0; i < words; i++) {
            uint32_t many = 0, role = 0;
            int32_t cbid = 0;
            const char *word = kvt_queues_word(q, i, &many, &role, &cbid);
            groups[i] = i;
            meanings[i] = many ? (uint8_t)(word[0] % 4) : 1;
        }
        kvt_queues_measure(q, meanings, groups, words);
        free(meanings);
        free(groups);
    }
    kvt_queues_close(q);
}

static void table(const uint8_t *data, size_t length, uint8_t how) {
    int fd = memfd_create("export", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, length) != (ssize_t)length) abort();
    const int columns[] = {0, how & 3 ? 1 : 3, 4, 9};
    const int64_t absent[] = {-1, 0, 7, -1};
    for (uint32_t root = 1 + how % 3; root < 12; root += 3) {
        kvt_table *t = kvt_table_open(fd, root, columns, absent, 1 + how % 4, how & 16 ? 0 : -1);
        int64_t out[4 * ROOM];
        uint64_t rows = 0, all = 0;
        while (t && kvt_table_read(t, out, ROOM, &rows) == 0) {
            all += rows;
            if (!rows || rows > ROOM || all > length) abort(); /* a row takes a byte at least */
        }
        kvt_table_close(t);
    }
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    const char *text = (const char *)data + 1;
    size_t length = size - 1;
    if (length >= 16 && !memcmp(text, "SQLite format 3", 16)) {
        table(data + 1, length, data[0]);
        return 0;
    }
    if (scanned(text, length, length) != scanned(text, length, 40 + 4 * (size_t)data[0])) abort();
    measured(text, length);
    return 0;
}
