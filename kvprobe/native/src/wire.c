/* Cells on the CPU: what wire.h describes. */
#include "wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

static uint32_t upper_at(const uint8_t *raw, uint32_t width, uint64_t i) { return raw[i * width + width - 1]; }

uint64_t kvp_wire_checksum(const void *raw, uint64_t raw_bytes) {
    const uint8_t *from = raw;
    uint64_t sum = kvp_wire_seed(raw_bytes), words = raw_bytes / 4;
    uint32_t word;
    for (uint64_t i = 0; i < words; i++) {
        memcpy(&word, from + 4 * i, 4);
        sum += (uint64_t)word * kvp_wire_weight((uint32_t)i);
    }
    if (raw_bytes % 4) {
        word = 0;
        memcpy(&word, from + 4 * words, raw_bytes % 4);
        sum += (uint64_t)word * kvp_wire_weight((uint32_t)words);
    }
    return sum;
}

void kvp_wire_histogram(uint32_t type, const void *raw, uint64_t raw_bytes, uint32_t *counts) {
    uint32_t width = kvp_wire_width(type), found[4][128] = {0}; /* four: equal neighbours wait for one another */
    uint64_t values = width ? raw_bytes / width : 0;
    for (uint64_t i = 0; i < values; i++) found[i & 3][upper_at(raw, width, i) & 127]++;
    for (uint32_t h = 0; h < 128; h++) counts[h] += found[0][h] + found[1][h] + found[2][h] + found[3][h];
}

/* The look: top and last, and where everything goes; bytes is raw_bytes where the block would not shrink. */
static kvp_wire_layout look(uint32_t type, const void *raw, uint64_t raw_bytes, uint32_t *top, uint32_t *last) {
    kvp_wire_layout l = {.bytes = raw_bytes};
    uint32_t width = kvp_wire_width(type), counts[128] = {0};
    if (!width || raw_bytes / width > KVP_WIRE_MOST_VALUES) return l;
    if (kvp_wire_layout_of(width, raw_bytes, 0).bytes >= raw_bytes) return l;
    uint64_t escapes;
    kvp_wire_histogram(type, raw, raw_bytes, counts);
    *top = kvp_wire_top(counts, last, &escapes);
    l = kvp_wire_layout_of(width, raw_bytes, escapes);
    if (l.bytes > raw_bytes) l.bytes = raw_bytes;
    return l;
}

uint64_t kvp_wire_size(uint32_t type, const void *raw, uint64_t raw_bytes) {
    uint32_t top, last;
    return look(type, raw, raw_bytes, &top, &last).bytes;
}

/* The byte of the codes' section that holds value `i`; its code is in the upper half where that is an odd one. */
static uint64_t byte_of_code(uint64_t i) { return i / 8 * 4 + kvp_wire_shift(i) / 8; }
static uint32_t half_of_code(uint64_t i) { return kvp_wire_shift(i) & 4; }

uint64_t kvp_wire_code(uint32_t type, const void *raw, uint64_t raw_bytes, void *cell) {
    const uint8_t *from = raw;
    uint8_t *to = cell;
    uint32_t top = 0, last = 0, width = kvp_wire_width(type), escapes = 0;
    kvp_wire_layout l = look(type, raw, raw_bytes, &top, &last);
    if (l.bytes == raw_bytes) return raw_bytes;
    memset(to, 0, l.escapes);
    for (uint64_t i = 0; i < l.values; i++) {
        uint32_t upper = upper_at(from, width, i), code = kvp_wire_code_of(upper, top);
        if (width == 4) memcpy(to + l.low + 2 * i, from + 4 * i, 2);
        to[l.middle + i] = from[i * width + width - 2];
        to[l.codes + byte_of_code(i)] |= (uint8_t)(code << half_of_code(i));
        if (kvp_wire_upper_of(code, top, last) == upper) continue;
        uint32_t escape = kvp_wire_escape(i, upper);
        memcpy(to + l.escapes + 4 * (uint64_t)escapes++, &escape, 4);
    }
    kvp_wire_header header = {.magic = KVP_WIRE_MAGIC,
                              .type = (uint8_t)type,
                              .top = (uint8_t)top,
                              .last = (uint8_t)last,
                              .parity = (uint8_t)kvp_wire_parity(type, top, last),
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
    if (!kvp_wire_sound(h->type, h->top, h->last, h->parity)) return KVP_WIRE_DAMAGED;
    if (kvp_wire_layout_of(width, raw_bytes, h->escapes).bytes != cell_bytes) return KVP_WIRE_SHORT;
    return KVP_WIRE_WHOLE;
}

static bool zeros(const uint8_t *from, uint64_t at, uint64_t end) {
    uint8_t any = 0;
    for (; at < end; at++) any |= from[at];
    return !any;
}

static uint32_t code_at(const uint8_t *codes, uint64_t i) { return codes[byte_of_code(i)] >> half_of_code(i) & 15; }

/* Whether nothing stands between the sections: so every byte of a cell counts, and a damaged one is always told. */
static bool tidy(const uint8_t *from, const kvp_wire_header *h, const kvp_wire_layout *l, uint32_t width) {
    for (uint64_t i = l->values; i < 2 * (l->escapes - l->codes); i++)
        if (code_at(from + l->codes, i)) return false;
    return zeros(h->tail, h->raw_bytes % width, sizeof h->tail) &&
           zeros(from, l->low + l->values * (width - 2), l->middle) && zeros(from, l->middle + l->values, l->codes);
}

int kvp_wire_decode(const void *cell, uint64_t cell_bytes, void *raw, uint64_t raw_bytes) {
    const uint8_t *from = cell;
    uint8_t *to = raw;
    kvp_wire_header h;
    if (cell_bytes < sizeof h) return KVP_WIRE_SHORT;
    memcpy(&h, from, sizeof h);
    int refused = headed(&h, cell_bytes, raw_bytes);
    if (refused) return refused;
    uint32_t width = kvp_wire_width(h.type);
    kvp_wire_layout l = kvp_wire_layout_of(width, raw_bytes, h.escapes);
    if (!tidy(from, &h, &l, width)) return KVP_WIRE_DAMAGED;
    for (uint64_t i = 0; i < l.values; i++) {
        uint8_t *at = to + i * width;
        if (width == 4) memcpy(at, from + l.low + 2 * i, 2);
        at[width - 2] = from[l.middle + i];
        at[width - 1] = (uint8_t)kvp_wire_upper_of(code_at(from + l.codes, i), h.top, h.last);
    }
    for (uint64_t j = 0; j < h.escapes; j++) {
        uint32_t escape, upper;
        memcpy(&escape, from + l.escapes + 4 * j, 4);
        uint64_t place = escape >> 8;
        upper = escape & 255;
        if (place >= l.values || !kvp_wire_escapes(upper, code_at(from + l.codes, place), h.last))
            return KVP_WIRE_DAMAGED;
        to[place * width + width - 1] = (uint8_t)upper;
    }
    memcpy(to + l.values * width, h.tail, raw_bytes % width);
    return kvp_wire_checksum(raw, raw_bytes) == h.checksum ? KVP_WIRE_WHOLE : KVP_WIRE_CHECKSUM;
}

/* ---- pools of cells ---------------------------------------------------------------------------------------------- */

/* What of a cell has no space in its place; NULL: there is no tail for it. */
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
