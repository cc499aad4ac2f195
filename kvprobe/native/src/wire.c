/* Cells on the CPU: what wire.h describes. */
#include "wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define STRIP 64 /* values that are taken apart together, in loops that the compiler makes SIMD of */

/* The upper halves of `count` values, at most STRIP; zeros behind them. */
static void halves_of(const uint8_t *raw, uint32_t width, uint64_t count, uint16_t *half) {
    uint32_t word[STRIP];
    if (width == 2 && count == STRIP) { /* of a size that the compiler knows */
        memcpy(half, raw, STRIP * sizeof *half);
        return;
    }
    memset(half, 0, STRIP * sizeof *half);
    if (width == 2) {
        memcpy(half, raw, 2 * count);
        return;
    }
    memcpy(word, raw, 4 * count);
    for (uint64_t i = 0; i < count; i++) half[i] = (uint16_t)(word[i] >> 16);
}

static uint64_t strip(uint64_t at, uint64_t values) { return values - at < STRIP ? values - at : STRIP; }

uint64_t kvp_wire_checksum(const void *raw, uint64_t raw_bytes) {
    const uint8_t *from = raw;
    uint64_t sum = kvp_wire_seed(raw_bytes), words = raw_bytes / 8, word;
    for (uint64_t i = 0; i < words; i++) {
        memcpy(&word, from + 8 * i, 8);
        sum += kvp_wire_mix(word, i);
    }
    if (raw_bytes % 8) {
        word = 0;
        memcpy(&word, from + 8 * words, raw_bytes % 8);
        sum += kvp_wire_mix(word, words);
    }
    return sum;
}

void kvp_wire_histogram(uint32_t type, const void *raw, uint64_t raw_bytes, uint32_t *histogram) {
    uint32_t width = kvp_wire_width(type), counts[4][256] = {0}; /* four: equal neighbours wait for one another */
    uint64_t values = width ? raw_bytes / width : 0;
    for (uint64_t at = 0; at < values; at += STRIP) {
        uint16_t half[STRIP];
        uint8_t exponent[STRIP];
        uint64_t n = strip(at, values);
        halves_of((const uint8_t *)raw + at * width, width, n, half);
        for (int i = 0; i < STRIP; i++) exponent[i] = (uint8_t)(half[i] >> 7);
        if (n < STRIP) {
            for (uint64_t i = 0; i < n; i++) counts[0][exponent[i]]++;
            break;
        }
        for (int i = 0; i < STRIP; i += 4)
            for (int k = 0; k < 4; k++) counts[k][exponent[i + k]]++;
    }
    for (uint32_t e = 0; e < 256; e++) histogram[e] += counts[0][e] + counts[1][e] + counts[2][e] + counts[3][e];
}

/* The look: emax, and where everything goes; bytes is raw_bytes where the block would not shrink. */
static kvp_wire_layout look(uint32_t type, const void *raw, uint64_t raw_bytes, uint32_t *emax) {
    kvp_wire_layout l = {.bytes = raw_bytes};
    uint32_t width = kvp_wire_width(type), histogram[256] = {0};
    if (!width || raw_bytes / width > KVP_WIRE_MOST_VALUES) return l;
    if (kvp_wire_layout_of(width, raw_bytes, 0).bytes >= raw_bytes) return l;
    uint64_t escapes;
    kvp_wire_histogram(type, raw, raw_bytes, histogram);
    *emax = kvp_wire_emax(histogram, &escapes);
    l = kvp_wire_layout_of(width, raw_bytes, escapes);
    if (l.bytes > raw_bytes) l.bytes = raw_bytes;
    return l;
}

uint64_t kvp_wire_size(uint32_t type, const void *raw, uint64_t raw_bytes) {
    uint32_t emax;
    return look(type, raw, raw_bytes, &emax).bytes;
}

/* Codes a strip of `n` values: into its places of the sections. How many escapes there are, with those before. */
static uint32_t code_strip(const uint8_t *from, uint32_t width, uint64_t at, uint64_t n, uint32_t emax, uint8_t *to,
                           const kvp_wire_layout *l, uint32_t escapes) {
    uint16_t half[STRIP];
    uint8_t exponent[STRIP], high[STRIP], code[STRIP], pairs[STRIP / 2], escaped = 0;
    halves_of(from + at * width, width, n, half);
    for (int i = 0; i < STRIP; i++) {
        exponent[i] = (uint8_t)(half[i] >> 7);
        high[i] = (uint8_t)((half[i] >> 8 & 128) | (half[i] & 127));
    }
    for (int i = 0; i < STRIP; i++) { /* kvp_wire_code_of in bytes: emax is 14 or more, so nothing wraps round */
        uint8_t below = (uint8_t)(emax - exponent[i]);
        code[i] = below < KVP_WIRE_CODES ? below : exponent[i] ? KVP_WIRE_ESCAPE : KVP_WIRE_ZERO;
    }
    memset(code + n, 0, STRIP - n);
    for (int i = 0; i < STRIP; i++) escaped |= code[i] == KVP_WIRE_ESCAPE;
    for (int i = 0; i < STRIP / 2; i++) pairs[i] = (uint8_t)(code[2 * i] | code[2 * i + 1] << 4);
    memcpy(to + l->high + at, high, n);
    memcpy(to + l->codes + at / 2, pairs, (n + 1) / 2);
    for (uint64_t i = 0; width == 4 && i < n; i++) memcpy(to + l->low + 2 * (at + i), from + 4 * (at + i), 2);
    for (uint64_t i = 0; escaped && i < n; i++) {
        if (code[i] != KVP_WIRE_ESCAPE) continue;
        uint32_t escape = kvp_wire_escape((uint32_t)(at + i), exponent[i]);
        memcpy(to + l->escapes + 4 * (uint64_t)escapes++, &escape, 4);
    }
    return escapes;
}

uint64_t kvp_wire_code(uint32_t type, const void *raw, uint64_t raw_bytes, void *cell) {
    const uint8_t *from = raw;
    uint8_t *to = cell;
    uint32_t emax = 0, width = kvp_wire_width(type), escapes = 0;
    kvp_wire_layout l = look(type, raw, raw_bytes, &emax);
    if (l.bytes == raw_bytes) return raw_bytes;
    memset(to, 0, l.escapes);
    for (uint64_t at = 0; at < l.values; at += STRIP)
        escapes = code_strip(from, width, at, strip(at, l.values), emax, to, &l, escapes);
    kvp_wire_header header = {.magic = KVP_WIRE_MAGIC,
                              .type = (uint8_t)type,
                              .emax = (uint8_t)emax,
                              .escapes = escapes,
                              .raw_bytes = raw_bytes,
                              .checksum = kvp_wire_checksum(raw, raw_bytes)};
    memcpy(header.tail, from + l.values * width, raw_bytes % width);
    memcpy(to, &header, sizeof header);
    return l.bytes;
}

static int headed(const kvp_wire_header *h, uint64_t cell_bytes, uint64_t raw_bytes) {
    uint32_t width = kvp_wire_width(h->type);
    if (h->magic != KVP_WIRE_MAGIC || !width) return KVP_WIRE_UNKNOWN;
    if (h->raw_bytes != raw_bytes || raw_bytes / width > KVP_WIRE_MOST_VALUES) return KVP_WIRE_OTHER;
    if (h->emax < KVP_WIRE_CODES || h->zero[0] || h->zero[1]) return KVP_WIRE_DAMAGED;
    if (kvp_wire_layout_of(width, raw_bytes, h->escapes).bytes != cell_bytes) return KVP_WIRE_SHORT;
    return KVP_WIRE_WHOLE;
}

static bool zeros(const uint8_t *from, uint64_t at, uint64_t end) {
    uint8_t any = 0;
    for (; at < end; at++) any |= from[at];
    return !any;
}

/* Whether nothing stands between the sections: so every byte of a cell counts, and a damaged one is always told. */
static bool tidy(const uint8_t *from, const kvp_wire_header *h, const kvp_wire_layout *l, uint32_t width) {
    uint64_t tail = h->raw_bytes % width, codes = l->codes + l->values / 2;
    if (l->values % 2 && from[codes++] >> 4) return false;
    return zeros(h->tail, tail, sizeof h->tail) && zeros(from, l->low + l->values * (width - 2), l->high) &&
           zeros(from, l->high + l->values, l->codes) && zeros(from, codes, l->escapes);
}

/* Writes a strip of `n` values again; `used`: escapes so far. False: its escapes are not those of its codes. */
static bool decode_strip(const uint8_t *from, const kvp_wire_header *h, const kvp_wire_layout *l, uint32_t width,
                         uint64_t at, uint64_t n, uint8_t *to, uint32_t *used) {
    uint16_t half[STRIP];
    uint8_t exponent[STRIP], high[STRIP] = {0}, code[STRIP], pairs[STRIP / 2] = {0}, escaped = 0;
    memcpy(high, from + l->high + at, n);
    memcpy(pairs, from + l->codes + at / 2, (n + 1) / 2);
    for (int i = 0; i < STRIP / 2; i++) code[2 * i] = pairs[i] & 15, code[2 * i + 1] = pairs[i] >> 4;
    for (int i = 0; i < STRIP; i++) {
        exponent[i] = code[i] == KVP_WIRE_ZERO ? 0 : (uint8_t)(h->emax - code[i]);
        escaped |= code[i] == KVP_WIRE_ESCAPE;
    }
    for (uint64_t i = 0; escaped && i < n; i++) { /* in the order of their places */
        uint32_t escape;
        if (code[i] != KVP_WIRE_ESCAPE) continue;
        if (*used == h->escapes) return false;
        memcpy(&escape, from + l->escapes + 4 * (uint64_t)(*used)++, 4);
        if (escape >> 8 != at + i) return false;
        exponent[i] = (uint8_t)escape;
    }
    for (int i = 0; i < STRIP; i++) half[i] = (uint16_t)((high[i] & 128) << 8 | exponent[i] << 7 | (high[i] & 127));
    if (width == 2) memcpy(to + 2 * at, half, 2 * n);
    for (uint64_t i = 0; width == 4 && i < n; i++) {
        memcpy(to + 4 * (at + i), from + l->low + 2 * (at + i), 2);
        memcpy(to + 4 * (at + i) + 2, &half[i], 2);
    }
    return true;
}

int kvp_wire_decode(const void *cell, uint64_t cell_bytes, void *raw, uint64_t raw_bytes) {
    const uint8_t *from = cell;
    uint8_t *to = raw;
    kvp_wire_header h;
    if (cell_bytes < sizeof h) return KVP_WIRE_SHORT;
    memcpy(&h, from, sizeof h);
    int refused = headed(&h, cell_bytes, raw_bytes);
    if (refused) return refused;
    uint32_t width = kvp_wire_width(h.type), used = 0;
    kvp_wire_layout l = kvp_wire_layout_of(width, raw_bytes, h.escapes);
    if (!tidy(from, &h, &l, width)) return KVP_WIRE_DAMAGED;
    for (uint64_t at = 0; at < l.values; at += STRIP)
        if (!decode_strip(from, &h, &l, width, at, strip(at, l.values), to, &used)) return KVP_WIRE_DAMAGED;
    if (used != h.escapes) return KVP_WIRE_DAMAGED;
    memcpy(to + l.values * width, h.tail, raw_bytes % width);
    return kvp_wire_checksum(raw, raw_bytes) == h.checksum ? KVP_WIRE_WHOLE : KVP_WIRE_CHECKSUM;
}

/* ---- pools of cells ---------------------------------------------------------------------------------------------- */

/* What of a cell has no room in its place; NULL: there is no tail for it. */
static uint8_t *tail_of(const kvp_wire_note *note, const kvp_wire_place *place, uint64_t raw_bytes) {
    uint64_t number = note->summed >> 1;
    return number ? place->tails + (number - 1) * kvp_wire_tail_bytes(raw_bytes, place->room) : NULL;
}

void kvp_wire_put(uint32_t type, int check, const void *raw, uint64_t raw_bytes, void *cells, kvp_wire_note *notes,
                  const kvp_wire_place *place) {
    uint8_t whole[KVP_WIRE_CELL];
    for (uint32_t i = 0; i < kvp_wire_cells(raw_bytes); i++) {
        const uint8_t *piece = (const uint8_t *)raw + (uint64_t)i * KVP_WIRE_CELL;
        uint8_t *cell = (uint8_t *)cells + (uint64_t)i * kvp_wire_step(place->room);
        uint32_t size = kvp_wire_piece(raw_bytes, i), fits = kvp_wire_fits(size, place->room);
        uint8_t *to = fits < size ? whole : cell, *tail = fits < size ? tail_of(&notes[i], place, raw_bytes) : NULL;
        uint32_t bytes = (uint32_t)kvp_wire_code(type, piece, size, to);
        bool summed = bytes < size || check;
        kvp_wire_note note = {.bytes = bytes, .summed = (notes[i].summed & ~1u) | summed};
        if (bytes == size) memcpy(to, piece, size);
        if (summed) note.checksum = kvp_wire_checksum(piece, size);
        if (to == whole && (bytes <= fits || tail)) {
            memcpy(cell, whole, bytes < fits ? bytes : fits);
            if (bytes > fits) memcpy(tail, whole + fits, bytes - fits);
        } else if (to == whole) {
            note.bytes = 0;
        }
        notes[i] = note;
    }
}

/* Writes the piece of one cell, all of whose bytes lie in `cell`. */
static int take(const kvp_wire_note *note, const uint8_t *cell, uint8_t *piece, uint32_t size) {
    uint64_t checksum;
    if (note->bytes == size) {
        memcpy(piece, cell, size);
        return note->summed & 1 && kvp_wire_checksum(piece, size) != note->checksum ? KVP_WIRE_CHECKSUM
                                                                                    : KVP_WIRE_WHOLE;
    }
    int refused = kvp_wire_decode(cell, note->bytes, piece, size);
    if (refused || !(note->summed & 1)) return refused;
    memcpy(&checksum, cell + offsetof(kvp_wire_header, checksum), sizeof checksum); /* what came out has this one */
    return checksum == note->checksum ? KVP_WIRE_WHOLE : KVP_WIRE_CHECKSUM;
}

int kvp_wire_take(const kvp_wire_note *notes, const void *cells, void *raw, uint64_t raw_bytes,
                  const kvp_wire_place *place) {
    uint8_t whole[KVP_WIRE_CELL];
    for (uint32_t i = 0; i < kvp_wire_cells(raw_bytes); i++) {
        const uint8_t *cell = (const uint8_t *)cells + (uint64_t)i * kvp_wire_step(place->room);
        uint32_t size = kvp_wire_piece(raw_bytes, i), fits = kvp_wire_fits(size, place->room);
        kvp_wire_note note = notes[i];
        if (!note.bytes) return KVP_WIRE_NONE;
        if (note.bytes > size) return KVP_WIRE_SHORT;
        if (note.bytes > fits) {
            const uint8_t *tail = tail_of(&note, place, raw_bytes);
            if (!tail) return KVP_WIRE_SHORT;
            memcpy(whole, cell, fits);
            memcpy(whole + fits, tail, note.bytes - fits);
            cell = whole;
        }
        int refused = take(&note, cell, (uint8_t *)raw + (uint64_t)i * KVP_WIRE_CELL, size);
        if (refused) return refused;
    }
    return KVP_WIRE_WHOLE;
}
