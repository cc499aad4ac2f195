/* Copies the integer columns of one table out of an SQLite file, leaf by leaf, many times faster than row by row.
 *
 * File format: https://www.sqlite.org/fileformat2.html (b-tree pages, varints, the record format). Only ordinary rowid
 * tables whose wanted columns hold integers, reals or nothing are read here; whatever else is met (text in a number's
 * place, a column in an overflow page, damage) makes the scan give up, and SQLite itself reads the table. The file is
 * not trusted: every offset is checked, and no page is visited more often than a file of that size has pages.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define KVT_EXPORT __attribute__((visibility("default")))

enum { SQL_MORE = 0, SQL_DONE = 1, SQL_UNFIT = 2, SQL_MEMORY = 3 };
enum { MOST_DEPTH = 20, MOST_COLUMNS = 128, MOST_WANTED = 32 };

typedef struct {
    uint8_t *page; /* a copy: a file that shrinks under a mapping would kill the process */
    uint32_t number;
    uint32_t cell; /* the next one */
} level;

typedef struct {
    int fd;
    uint32_t page_size, usable, pages;
    level stack[MOST_DEPTH];
    int depth;
    uint64_t visited;
    int wanted;                  /* columns to copy */
    int column[MOST_WANTED];     /* their places in the record, ascending */
    int64_t absent[MOST_WANTED]; /* for NULL, and for records that are too short */
    int rowid;                   /* the place of an INTEGER PRIMARY KEY, stored as NULL; -1 none */
} kvt_table;

static uint32_t be16(const uint8_t *p) { return (uint32_t)p[0] << 8 | p[1]; }
static uint32_t be32(const uint8_t *p) { return be16(p) << 16 | be16(p + 2); }

/* A varint of up to nine bytes; NULL past the end. Most are one byte. */
static inline const uint8_t *varint(const uint8_t *p, const uint8_t *end, uint64_t *out) {
    uint64_t n = 0;
    if (p < end && !(*p & 0x80)) {
        *out = *p;
        return p + 1;
    }
    for (int i = 0; i < 8; i++) {
        if (p >= end) return NULL;
        uint8_t b = *p++;
        n = n << 7 | (b & 0x7f);
        if (!(b & 0x80)) {
            *out = n;
            return p;
        }
    }
    if (p >= end) return NULL;
    *out = n << 8 | *p++;
    return p;
}

static int push(kvt_table *t, uint32_t number) {
    if (t->depth >= MOST_DEPTH || ++t->visited > t->pages || number < 1 || number > t->pages) return -1;
    level *top = &t->stack[t->depth];
    if (!top->page && !(top->page = malloc(t->page_size))) return -1;
    if (pread(t->fd, top->page, t->page_size, (off_t)(number - 1) * t->page_size) != (ssize_t)t->page_size) return -1;
    top->number = number;
    top->cell = 0;
    t->depth++;
    return 0;
}

KVT_EXPORT void kvt_table_close(kvt_table *t) {
    if (!t) return;
    for (int i = 0; i < MOST_DEPTH; i++) free(t->stack[i].page);
    free(t);
}

/* Opens the table whose root page is `root` in the file of descriptor `fd`, which stays the caller's. NULL where it is
 * none that can be read here. */
KVT_EXPORT kvt_table *kvt_table_open(int fd, uint32_t root, const int *columns, const int64_t *absent, int wanted,
                                     int rowid) {
    uint8_t header[100];
    struct stat about;
    if (pread(fd, header, sizeof header, 0) != sizeof header || fstat(fd, &about)) return NULL;
    if (memcmp(header, "SQLite format 3", 16) || wanted < 1 || wanted > MOST_WANTED) return NULL;
    uint32_t size = be16(header + 16);
    if (size == 1) size = 65536;
    if (size < 512 || (size & (size - 1)) || size - header[20] < 480) return NULL;
    kvt_table *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->fd = fd;
    t->page_size = size;
    t->usable = size - header[20];
    uint64_t pages = (uint64_t)about.st_size / size;
    t->pages = (uint32_t)(pages < UINT32_MAX ? pages : UINT32_MAX);
    t->wanted = wanted;
    t->rowid = rowid;
    int fit = 1;
    for (int i = 0; i < wanted; i++) {
        fit &= columns[i] >= 0 && columns[i] < MOST_COLUMNS && (!i || columns[i] > columns[i - 1]);
        t->column[i] = columns[i];
        t->absent[i] = absent[i];
    }
    if (!fit || push(t, root)) {
        kvt_table_close(t);
        return NULL;
    }
    return t;
}

/* A big-endian integer of 1 to 8 bytes; `end`: of what may be read. */
static inline int64_t integer(const uint8_t *p, uint64_t width, const uint8_t *end) {
    if (end - p >= 8) {
        uint64_t n = (uint64_t)be32(p) << 32 | be32(p + 4);
        return (int64_t)n >> (64 - 8 * width);
    }
    uint64_t n = p[0] & 0x80 ? ~0ull : 0;
    for (uint64_t i = 0; i < width; i++) n = n << 8 | p[i];
    return (int64_t)n;
}

static const uint8_t WIDTH[10] = {0, 1, 2, 3, 4, 6, 8, 8, 0, 0};

/* The wanted columns of one leaf cell; nonzero where SQLite has to read this table. */
static int read_cell(const kvt_table *t, const uint8_t *cell, const uint8_t *end, int64_t *out) {
    uint64_t payload, rowid, header;
    const uint8_t *p = varint(cell, end, &payload);
    if (!p || !(p = varint(p, end, &rowid))) return 1;
    /* What does not fit the page goes on elsewhere; wanted columns come early, so the local part suffices. */
    uint64_t local = payload, most = t->usable - 35;
    if (payload > most) {
        uint64_t least = (t->usable - 12) * 32 / 255 - 23;
        uint64_t k = least + (payload - least) % (t->usable - 4);
        local = k <= most ? k : least;
    }
    if (local > (uint64_t)(end - p)) return 1;
    const uint8_t *stop = p + local;
    const uint8_t *types = varint(p, stop, &header);
    if (!types || header < (uint64_t)(types - p) || header > local) return 1;
    const uint8_t *body = p + header, *types_end = p + header;
    int next = 0;
    for (int place = 0; next < t->wanted; place++) {
        if (types >= types_end) { /* columns that were added later */
            for (; next < t->wanted; next++) out[next] = t->absent[next];
            return 0;
        }
        uint64_t type;
        if (!(types = varint(types, types_end, &type))) return 1;
        uint64_t width = type < 10 ? WIDTH[type] : type < 12 ? UINT64_MAX : (type - 12) / 2;
        if (place == t->column[next]) {
            if (type > 9 || width > (uint64_t)(stop - body)) return 1;
            if (type == 0) {
                out[next] = place == t->rowid ? (int64_t)rowid : t->absent[next];
            } else if (type >= 8) {
                out[next] = (int64_t)type - 8;
            } else {
                int64_t n = integer(body, width, end);
                if (type == 7) {
                    double real;
                    memcpy(&real, &n, 8);
                    if (!(fabs(real) < 9.2e18)) return 1;
                    n = (int64_t)real;
                }
                out[next] = n;
            }
            next++;
        }
        if (width > (uint64_t)(stop - body)) {
            if (next < t->wanted) return 1; /* a wanted column lies in an overflow page */
            return 0;
        }
        body += width;
    }
    return 0;
}

/* Fills up to `room` rows of out[column * `room` + row]. SQL_MORE: there may be more; SQL_DONE; SQL_UNFIT: not for
 * here.
 */
KVT_EXPORT int kvt_table_read(kvt_table *t, int64_t *out, uint64_t room, uint64_t *rows) {
    int64_t one[MOST_WANTED];
    *rows = 0;
    while (t->depth) {
        level *top = &t->stack[t->depth - 1];
        const uint8_t *page = top->page, *end = page + t->usable;
        const uint8_t *head = page + (top->number == 1 ? 100 : 0);
        uint32_t cells = be16(head + 3);
        int leaf = head[0] == 13;
        if (!leaf && head[0] != 5) return SQL_UNFIT;
        const uint8_t *pointers = head + (leaf ? 8 : 12);
        if (pointers + 2 * (uint64_t)cells > end) return SQL_UNFIT;
        if (leaf) {
            for (; top->cell < cells; top->cell++) {
                if (*rows == room) return SQL_MORE;
                uint32_t at = be16(pointers + 2 * top->cell);
                if (at < 8 || at >= t->usable || read_cell(t, page + at, end, one)) return SQL_UNFIT;
                for (int i = 0; i < t->wanted; i++) out[(uint64_t)i * room + *rows] = one[i];
                ++*rows;
            }
            t->depth--;
        } else if (top->cell < cells) {
            uint32_t at = be16(pointers + 2 * top->cell++);
            if (at + 4 > t->usable || push(t, be32(page + at))) return SQL_UNFIT;
        } else if (top->cell == cells) {
            top->cell++;
            if (push(t, be32(head + 8))) return SQL_UNFIT;
        } else {
            t->depth--;
        }
    }
    return SQL_DONE;
}
