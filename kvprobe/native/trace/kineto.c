/* Scans the events of a Kineto trace: JSON text in, one row of numbers per wanted event out.
 *
 * The reader in Python works without this library; with it, a trace costs about as much as unzipping it. Nothing here
 * knows Python, allocates per event, recurses, or trusts the text: every step is bounded by the piece it was given.
 * A piece begins between two events; what the scan did not consume is given again with the next piece.
 */
#include "kineto.h"

#include <stdlib.h>
#include <string.h>

enum { META = 255, MOST_CATEGORIES = 64, LONGEST_NAME = 1 << 16 };

typedef struct {
    const char *text; /* the JSON string as written, without quotes; owned */
    uint32_t length;
    uint64_t hash;
} entry;

typedef struct {
    entry *entries;
    uint32_t count, room;
    uint32_t *slots;
    uint32_t mask;
} table;

struct kvt_scan_state {
    table names;
    table categories;
    uint8_t codes[MOST_CATEGORIES];
    uint64_t counts[MOST_CATEGORIES];
    uint64_t bad;
    int started;
};

/* ---- interning ---------------------------------------------------------------------------------------------- */

static uint64_t hash_of(const char *text, size_t length) {
    uint64_t h = 1469598103934665603ull ^ length;
    while (length >= 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        h = (h ^ word) * 0x9E3779B97F4A7C15ull;
        h ^= h >> 29;
        text += 8;
        length -= 8;
    }
    while (length--) h = (h ^ (unsigned char)*text++) * 1099511628211ull;
    return h ^ (h >> 32);
}

static int grow(table *t) {
    uint32_t size = t->slots ? (t->mask + 1) * 2 : 1024;
    uint32_t *slots = calloc(size, sizeof *slots);
    if (!slots) return -1;
    for (uint32_t i = 0; i < t->count; i++) {
        uint32_t at = (uint32_t)t->entries[i].hash & (size - 1);
        while (slots[at]) at = (at + 1) & (size - 1);
        slots[at] = i + 1;
    }
    free(t->slots);
    t->slots = slots;
    t->mask = size - 1;
    return 0;
}

/* Number of the text, -1 without memory. */
static int64_t intern(table *t, const char *text, size_t length) {
    if (length > LONGEST_NAME) length = LONGEST_NAME;
    uint64_t hash = hash_of(text, length);
    if (t->slots) {
        for (uint32_t at = (uint32_t)hash & t->mask; t->slots[at]; at = (at + 1) & t->mask) {
            entry *e = &t->entries[t->slots[at] - 1];
            if (e->hash == hash && e->length == length && !memcmp(e->text, text, length)) return t->slots[at] - 1;
        }
    }
    if (!t->slots || t->count * 2 > t->mask) {
        if (grow(t)) return -1;
    }
    if (t->count == t->room) {
        uint32_t room = t->room ? t->room * 2 : 256;
        entry *entries = realloc(t->entries, room * sizeof *entries);
        if (!entries) return -1;
        t->entries = entries;
        t->room = room;
    }
    char *copy = malloc(length + 1);
    if (!copy) return -1;
    memcpy(copy, text, length);
    copy[length] = 0;
    t->entries[t->count] = (entry){copy, (uint32_t)length, hash};
    uint32_t at = (uint32_t)hash & t->mask;
    while (t->slots[at]) at = (at + 1) & t->mask;
    t->slots[at] = ++t->count;
    return t->count - 1;
}

static void release(table *t) {
    for (uint32_t i = 0; i < t->count; i++) free((void *)t->entries[i].text);
    free(t->entries);
    free(t->slots);
}

/* ---- JSON, as little of it as is needed ------------------------------------------------------------------------ */

typedef struct {
    const char *at, *end;
} cursor;

/* A value: for a string its text between the quotes, else its text. */
typedef struct {
    const char *text;
    size_t length;
    char kind; /* '"', '{', '[', '0' number, 'l' literal, 0 none */
} value;

static inline int blank(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static inline void skip_blank(cursor *c) {
    while (c->at < c->end && blank(*c->at)) c->at++;
}

/* Past the closing quote of the string whose opening quote was passed; NULL where the piece ends first. */
static inline const char *string_end(const char *at, const char *end) {
    /* Most are short: looked at byte by byte as long as that is quicker than a call. */
    for (int i = 0; i < 16; i++, at++) {
        if (at >= end) return NULL;
        if (*at == '"') return at + 1;
        if (*at == '\\') break;
    }
    for (;;) {
        const char *quote = memchr(at, '"', (size_t)(end - at));
        if (!quote) return NULL;
        const char *back = quote;
        while (back > at && back[-1] == '\\') back--;
        /* An even number of backslashes escape each other. Those before `at` cannot be: it follows a quote or an
         * escaped character. */
        if (((quote - back) & 1) == 0) return quote + 1;
        at = quote + 1;
    }
}

/* A copy of no duration has an infinite bandwidth, which Kineto and Python write as no JSON has it: "inf", "NaN",
 * "-Infinity". In a field that nobody reads that is no reason to give up the event; where a number is wanted it is
 * none. */
static int known_literal(const char *text, size_t length) {
    static const char *const literals[] = {"true", "false", "null", "NaN", "Infinity", "nan", "inf"};
    int negative = *text == '-';
    for (int i = negative ? 3 : 0; i < 7; i++)
        if (length - (size_t)negative == strlen(literals[i]) &&
            !memcmp(text + negative, literals[i], length - (size_t)negative))
            return 1;
    return 0;
}

/* Reads any value; 0, or KVT_MORE + 1 (incomplete) as 1, or 2 (no JSON). */
static int read_value(cursor *c, value *v) {
    skip_blank(c);
    if (c->at >= c->end) return 1;
    const char *begin = c->at;
    char first = *begin;
    if (first == '"') {
        const char *after = string_end(begin + 1, c->end);
        if (!after) return 1;
        *v = (value){begin + 1, (size_t)(after - begin - 2), '"'};
        c->at = after;
        return 0;
    }
    if (first == '{' || first == '[') {
        uint64_t depth = 0;
        const char *at = begin;
        while (at < c->end) {
            char ch = *at++;
            if (ch == '"') {
                at = string_end(at, c->end);
                if (!at) return 1;
            } else if (ch == '{' || ch == '[') {
                depth++;
            } else if (ch == '}' || ch == ']') {
                if (--depth == 0) {
                    *v = (value){begin, (size_t)(at - begin), first};
                    c->at = at;
                    return 0;
                }
            }
        }
        return 1;
    }
    const char *at = begin;
    while (at < c->end && !blank(*at) && *at != ',' && *at != '}' && *at != ']' && *at != '"' && *at != ':' &&
           *at != '{' && *at != '[')
        at++;
    if (at == c->end) return 1; /* may go on in the next piece */
    if (at == begin) return 2;
    *v = (value){begin, (size_t)(at - begin), (first == '-' || (first >= '0' && first <= '9')) ? '0' : 'l'};
    if (first == '-' && (v->length == 1 || begin[1] < '0' || begin[1] > '9')) v->kind = 'l';
    if (v->kind == 'l' && !known_literal(begin, v->length)) return 2;
    c->at = at;
    return 0;
}

/* An integer id: -1 where it is beyond 64 bits. Nonzero: not an integer. */
static int read_int(const value *v, int64_t *out) {
    if (v->kind != '0') return 1;
    const char *at = v->text, *end = at + v->length;
    int negative = *at == '-';
    at += negative;
    if (at == end) return 1;
    uint64_t n = 0;
    int large = end - at > 18;
    for (; at < end; at++) {
        if (*at < '0' || *at > '9') return 1;
        if (!large) n = n * 10 + (uint64_t)(*at - '0');
    }
    *out = large ? -1 : negative ? -(int64_t)n : (int64_t)n;
    return 0;
}

/* Decimal microseconds to nanoseconds, rounded; 0 where out of range. Nonzero: not a number. */
static int read_us(const value *v, int64_t *out) {
    if (v->kind != '0') return 1;
    const char *at = v->text, *end = at + v->length;
    int negative = *at == '-';
    at += negative;
    if (at == end || *at < '0' || *at > '9') return 1;
    uint64_t whole = 0;
    int digits = 0;
    for (; at < end && *at >= '0' && *at <= '9'; at++) {
        if (++digits <= 16) whole = whole * 10 + (uint64_t)(*at - '0');
    }
    uint64_t ns = 0;
    unsigned place = 100;
    if (at < end && *at == '.') {
        at++;
        if (at == end || *at < '0' || *at > '9') return 1;
        for (; at < end && *at >= '0' && *at <= '9'; at++) {
            if (place) {
                ns += (uint64_t)(*at - '0') * place;
                place = place == 1 ? 0 : place / 10;
                if (!place && at + 1 < end && at[1] >= '5' && at[1] <= '9') ns++;
            }
        }
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        char copy[64];
        if (v->length >= sizeof copy) return 1;
        memcpy(copy, v->text, v->length);
        copy[v->length] = 0;
        char *stop;
        double us = strtod(copy, &stop);
        if (*stop) return 1;
        double scaled = us * 1000.0;
        *out = scaled > -9e18 && scaled < 9e18 ? (int64_t)(scaled + (scaled < 0 ? -0.5 : 0.5)) : 0;
        return 0;
    }
    if (at != end) return 1;
    if (digits > 16 || whole > 9200000000000000ull) {
        *out = 0;
        return 0;
    }
    int64_t total = (int64_t)(whole * 1000 + ns);
    *out = negative ? -total : total;
    return 0;
}

static uint32_t crc32_of(const char *text, size_t length) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < length; i++) {
        crc ^= (unsigned char)text[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1)));
    }
    return ~crc;
}

/* A process or thread id: 12, "12" and "stream 12" are 12, other text its CRC. Nonzero: neither number nor text. */
static int read_id(const value *v, int64_t *out) {
    if (v->kind == '0') return read_int(v, out);
    if (v->kind != '"') return 1;
    value number = *v;
    if (number.length > 7 && !memcmp(number.text, "stream ", 7)) {
        number.text += 7;
        number.length -= 7;
    }
    number.kind = '0';
    size_t digits = number.length - (number.length && number.text[0] == '-');
    if (!number.length || !digits || digits > 18 || read_int(&number, out)) *out = crc32_of(v->text, v->length);
    return 0;
}

#define IS(key, word) ((key).length == sizeof(word) - 1 && !memcmp((key).text, word, sizeof(word) - 1))

static int32_t narrow(int64_t n) { return n > INT32_MAX ? INT32_MAX : n < -1 ? -1 : (int32_t)n; }

/* What reading a part of an event came to. */
enum { DONE = 0, INCOMPLETE = 1, NO_JSON = 2 };

/* Steps to the next member of an object that was entered: key read, cursor at its value. `*last` at its end. */
static inline int next_member(cursor *c, value *key, int *last) {
    skip_blank(c);
    if (c->at < c->end && *c->at == ',') {
        c->at++;
        skip_blank(c);
    }
    if (c->at >= c->end) return INCOMPLETE;
    *last = *c->at == '}';
    if (*last) {
        c->at++;
        return DONE;
    }
    if (*c->at != '"') return NO_JSON;
    const char *begin = c->at + 1, *after = string_end(begin, c->end);
    if (!after) return INCOMPLETE;
    *key = (value){begin, (size_t)(after - begin - 1), '"'};
    c->at = after;
    skip_blank(c);
    if (c->at >= c->end) return INCOMPLETE;
    if (*c->at != ':') return NO_JSON;
    c->at++;
    return DONE;
}

/* Past the brace that closes the object the cursor is in. */
static int leave_object(cursor *c) {
    uint64_t depth = 1;
    while (c->at < c->end) {
        char ch = *c->at++;
        if (ch == '"') {
            const char *after = string_end(c->at, c->end);
            if (!after) return INCOMPLETE;
            c->at = after;
        } else if (ch == '{' || ch == '[') {
            depth++;
        } else if ((ch == '}' || ch == ']') && --depth == 0) {
            return DONE;
        }
    }
    return INCOMPLETE;
}

typedef struct {
    value name;
    int64_t graph_node, graph;
    int wrong; /* a wanted number is of another type */
} args_extra;

/* The wanted numbers of "args". */
static int read_args(cursor *c, kvt_row *row, args_extra *extra) {
    skip_blank(c);
    if (c->at >= c->end) return INCOMPLETE;
    value key, v;
    int state, last;
    if (*c->at != '{') {
        extra->wrong = 1;
        return read_value(c, &v);
    }
    c->at++;
    for (;;) {
        if ((state = next_member(c, &key, &last))) return state;
        if (last) return DONE;
        if ((state = read_value(c, &v))) return state;
        int64_t n = 0, *wide = NULL;
        int32_t *narrow_one = NULL;
        switch (key.length) {
        case 4:
            if (IS(key, "cbid"))
                narrow_one = &row->cbid;
            else if (IS(key, "name"))
                extra->name = v;
            break;
        case 5:
            if (IS(key, "bytes")) wide = &row->bytes;
            break;
        case 6:
            if (IS(key, "stream"))
                narrow_one = &row->stream;
            else if (IS(key, "device"))
                narrow_one = &row->device;
            break;
        case 7:
            if (IS(key, "channel")) narrow_one = &row->channel;
            break;
        case 8:
            if (IS(key, "graph id")) wide = &extra->graph;
            if (IS(key, "inDevice")) narrow_one = &row->device; /* of a copy between GPUs, which has no "device" */
            break;
        case 9:
            if (IS(key, "copyCount")) narrow_one = &row->count;
            break;
        case 11:
            if (IS(key, "correlation")) wide = &row->correlation;
            break;
        case 13:
            if (IS(key, "graph node id")) wide = &extra->graph_node;
            break;
        }
        if (!wide && !narrow_one) continue;
        if (read_int(&v, &n))
            extra->wrong = 1;
        else if (wide)
            *wide = n;
        else
            *narrow_one = narrow(n);
    }
}

enum { NOTHING = 0, ROW = 1, DAMAGED = -1, NO_MEMORY = -2 };

static const kvt_row EMPTY_ROW = {.pid = -1,
                                  .tid = -1,
                                  .correlation = -1,
                                  .graph = -1,
                                  .stream = -1,
                                  .device = -1,
                                  .channel = -1,
                                  .count = 1,
                                  .cbid = -1,
                                  .label = -1};

/* The number of a category; below 0: no memory. More categories than any recorder has: the rest counts as one. */
static int64_t category_slot(kvt_scan_state *s, const value *category) {
    const char *text = category->text ? category->text : "";
    if (s->categories.count < MOST_CATEGORIES - 1) return intern(&s->categories, text, category->length);
    for (uint32_t i = 0; i < s->categories.count; i++)
        if (s->categories.entries[i].length == category->length &&
            !memcmp(s->categories.entries[i].text, text, category->length))
            return i;
    return MOST_CATEGORIES - 1;
}

/* Reads one event that the cursor is at the opening brace of; `*got` says what came of it. */
static int read_event(kvt_scan_state *s, cursor *c, kvt_row *row, int *got) {
    value key, v, phase = {0}, category = {0}, name = {0}, ts = {0}, dur = {0}, pid = {0}, tid = {0};
    args_extra extra = {{0}, -1, -1, 0};
    int state, last;
    *row = EMPTY_ROW;
    c->at++;
    for (;;) {
        if ((state = next_member(c, &key, &last))) return state;
        if (last) break;
        if (IS(key, "args")) {
            if ((state = read_args(c, row, &extra))) return state;
            continue;
        }
        if ((state = read_value(c, &v))) return state;
        if (key.length == 2 && key.text[0] == 'p' && key.text[1] == 'h') {
            phase = v;
            /* Flows are a third of a trace; nothing more of them is looked at. */
            if (v.kind == '"' && v.length == 1 && (v.text[0] == 's' || v.text[0] == 'f')) {
                *got = NOTHING;
                return leave_object(c);
            }
        } else if (IS(key, "ts"))
            ts = v;
        else if (IS(key, "cat"))
            category = v;
        else if (IS(key, "dur"))
            dur = v;
        else if (IS(key, "pid"))
            pid = v;
        else if (IS(key, "tid"))
            tid = v;
        else if (IS(key, "name"))
            name = v;
    }
    *got = DAMAGED;
    if (phase.kind != '"' || phase.length != 1) return DONE;
    if (!memchr("XMsftiIBEbenNODPRcCSTpFvV(),=", phase.text[0], 29)) return DONE;
    int meta = phase.text[0] == 'M';
    if (!meta && phase.text[0] != 'X') {
        *got = NOTHING;
        return DONE;
    }
    if ((name.kind && name.kind != '"') || (category.kind && category.kind != '"') || extra.wrong) return DONE;
    if ((pid.kind && read_id(&pid, &row->pid)) || (tid.kind && read_id(&tid, &row->tid))) return DONE;
    int64_t number;
    if (meta) {
        *got = NOTHING;
        if (extra.name.kind != '"' || (!IS(name, "process_name") && !IS(name, "thread_name"))) return DONE;
        if ((number = intern(&s->names, extra.name.text, extra.name.length)) < 0) {
            *got = NO_MEMORY;
            return DONE;
        }
        row->label = (int32_t)number;
        row->category = META;
    } else {
        if (read_us(&ts, &row->start_ns) || (dur.kind && read_us(&dur, &row->dur_ns))) return DONE;
        if (row->dur_ns < 0) row->dur_ns = 0;
        int64_t slot = category_slot(s, &category);
        if (slot < 0) {
            *got = NO_MEMORY;
            return DONE;
        }
        s->counts[slot]++;
        row->category = s->codes[slot];
        *got = NOTHING;
        if (!row->category) return DONE;
        row->graph = extra.graph_node > 0 ? extra.graph_node : extra.graph > 0 ? extra.graph : -1;
    }
    number = intern(&s->names, name.text ? name.text : "", name.length);
    *got = number < 0 ? NO_MEMORY : ROW;
    row->name = (int32_t)number;
    return DONE;
}

/* ---- for Python ------------------------------------------------------------------------------------------------ */

KVT_EXPORT size_t kvt_row_bytes(void) { return sizeof(kvt_row); }

KVT_EXPORT kvt_scan_state *kvt_open(void) { return calloc(1, sizeof(kvt_scan_state)); }

KVT_EXPORT void kvt_close(kvt_scan_state *s) {
    if (!s) return;
    release(&s->names);
    release(&s->categories);
    free(s);
}

/* Events of this category come out as rows with `code` (1 to 254). Nonzero: no memory or too many. */
KVT_EXPORT int kvt_want(kvt_scan_state *s, const char *category, uint8_t code) {
    int64_t slot = s->categories.count < MOST_CATEGORIES / 2 ? intern(&s->categories, category, strlen(category)) : -1;
    if (slot < 0) return -1;
    s->codes[slot] = code;
    return 0;
}

/* Scans events from `text` on. Sets how many rows were written and how many bytes are done with. Returns
 * KVT_MORE: the piece ends, perhaps inside an event; KVT_END: the list ended, `consumed` is behind its bracket;
 * KVT_FULL: no space for rows; KVT_BROKEN: no JSON from `consumed` on; KVT_MEMORY. */
KVT_EXPORT int kvt_scan(kvt_scan_state *s, const char *text, size_t length, kvt_row *rows, size_t room, size_t *written,
                        size_t *consumed) {
    cursor c = {text, text + length};
    *written = 0;
    for (;;) {
        skip_blank(&c);
        *consumed = (size_t)(c.at - text);
        if (c.at >= c.end) return KVT_MORE;
        if (*c.at == ']') {
            ++*consumed;
            return KVT_END;
        }
        cursor here = c;
        if (*here.at == ',') {
            /* One comma between events; not before the first. */
            if (!s->started) return KVT_BROKEN;
            here.at++;
            skip_blank(&here);
            if (here.at >= here.end) return KVT_MORE;
        } else if (s->started) {
            return KVT_BROKEN;
        }
        if (*written == room) return KVT_FULL;
        cursor inside = here;
        int got = DAMAGED, state = NO_JSON;
        if (*here.at == '{') state = read_event(s, &inside, &rows[*written], &got);
        if (state == INCOMPLETE) return KVT_MORE;
        if (state == NO_JSON) {
            /* Not an event, or one with a flaw inside: what its brackets enclose is given up. */
            value whole;
            inside = here;
            got = DAMAGED;
            if ((state = read_value(&inside, &whole))) return state == INCOMPLETE ? KVT_MORE : KVT_BROKEN;
        }
        here = inside;
        if (got == NO_MEMORY) return KVT_MEMORY;
        if (got == DAMAGED) s->bad++;
        if (got == ROW) ++*written;
        s->started = 1;
        c = here;
    }
}

KVT_EXPORT uint64_t kvt_bad(const kvt_scan_state *s) { return s->bad; }
KVT_EXPORT uint32_t kvt_names(const kvt_scan_state *s) { return s->names.count; }
KVT_EXPORT uint32_t kvt_categories(const kvt_scan_state *s) { return s->categories.count; }

KVT_EXPORT const char *kvt_name(const kvt_scan_state *s, uint32_t number, uint32_t *length) {
    if (number >= s->names.count) return NULL;
    *length = s->names.entries[number].length;
    return s->names.entries[number].text;
}

KVT_EXPORT const char *kvt_category(const kvt_scan_state *s, uint32_t slot, uint32_t *length, uint64_t *count) {
    if (slot == MOST_CATEGORIES - 1) {
        *length = 8;
        *count = s->counts[slot];
        return "(others)";
    }
    if (slot >= s->categories.count) return NULL;
    *length = s->categories.entries[slot].length;
    *count = s->counts[slot];
    return s->categories.entries[slot].text;
}
