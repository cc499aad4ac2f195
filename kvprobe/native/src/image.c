/* Images: runs of bytes that are packed once, travel by the copy engine, and are unpacked where they arrive. */
#include "wire.h"

#include <string.h>

uint64_t kvp_wire_pack(uint32_t type, const void *raw, uint64_t raw_bytes, void *image) {
    uint32_t pieces = kvp_wire_cells(raw_bytes);
    uint8_t cell[KVP_WIRE_CELL], *to = image;
    kvp_wire_index *index = image;
    uint64_t at = kvp_wire_up(pieces * sizeof *index);
    memset(to + pieces * sizeof *index, 0, at - pieces * sizeof *index);
    for (uint32_t i = 0; i < pieces; i++) {
        const uint8_t *piece = (const uint8_t *)raw + (uint64_t)i * KVP_WIRE_CELL;
        uint32_t size = kvp_wire_piece(raw_bytes, i), bytes = (uint32_t)kvp_wire_code(type, piece, size, cell);
        uint32_t room = (uint32_t)kvp_wire_up(bytes);
        memcpy(to + at, bytes < size ? cell : piece, bytes);
        memset(to + at + bytes, 0, room - bytes);
        index[i] = (kvp_wire_index){bytes, (uint32_t)(at / 16)};
        at += room;
    }
    return at;
}

int kvp_wire_unpack(const void *image, void *raw, uint64_t raw_bytes) {
    const kvp_wire_index *index = image;
    int refused = KVP_WIRE_WHOLE;
    for (uint32_t i = 0; i < kvp_wire_cells(raw_bytes); i++) {
        const uint8_t *cell = (const uint8_t *)image + 16 * (uint64_t)index[i].at;
        uint8_t *piece = (uint8_t *)raw + (uint64_t)i * KVP_WIRE_CELL;
        uint32_t size = kvp_wire_piece(raw_bytes, i);
        if (index[i].bytes == size) {
            memcpy(piece, cell, size);
            continue;
        }
        int code = index[i].bytes < size ? kvp_wire_decode(cell, index[i].bytes, piece, size) : KVP_WIRE_SHORT;
        if (code) refused = code;
    }
    return refused;
}
