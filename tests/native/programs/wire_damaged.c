/* Codes blocks, damages their cells, and decodes: argv[1] rounds from seed argv[2]. Every buffer is exactly as large as
 * it may be used, so that AddressSanitizer sees a byte read or written too many. Prints how many were refused. */
#include "wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state;

static uint64_t dice(uint64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

static void fill(uint8_t *raw, uint64_t bytes, uint32_t width) {
    uint32_t narrow = (uint32_t)dice(4);
    for (uint64_t i = 0; i < bytes; i++) raw[i] = (uint8_t)dice(256);
    if (narrow == 0) return;
    for (uint64_t i = width - 1; i < bytes; i += width) raw[i] = (uint8_t)(dice(narrow == 1 ? 40 : 400) ? 0x3d : 0x10);
}

static uint8_t *exactly(const uint8_t *from, uint64_t bytes) {
    uint8_t *made = malloc(bytes ? bytes : 1);
    if (bytes) memcpy(made, from, bytes);
    return made;
}

/* Whether it was refused; where it was not, the block is as it was. */
static int decoded(const uint8_t *cell, uint64_t cell_bytes, const uint8_t *block, uint64_t raw_bytes, uint64_t says) {
    uint8_t *exact = exactly(cell, cell_bytes), *raw = malloc(says ? says : 1);
    int refused = kvp_wire_decode(exact, cell_bytes, raw, says);
    if (!refused && (says != raw_bytes || memcmp(raw, block, says))) {
        fprintf(stderr, "other bytes came out of a damaged cell\n");
        exit(1);
    }
    free(exact), free(raw);
    return refused != 0;
}

int main(int argc, char **argv) {
    uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 0) : 1000, refused = 0, tried = 0;
    state = argc > 2 ? strtoull(argv[2], NULL, 0) * 2 + 1 : 1;
    for (uint64_t round = 0; round < rounds; round++) {
        uint32_t type = 1 + (uint32_t)dice(2), width = kvp_wire_width(type);
        uint64_t bytes = dice(3000);
        uint8_t *block = malloc(bytes ? bytes : 1), *cell = malloc(bytes ? bytes : 1);
        fill(block, bytes, width);
        uint64_t travels = kvp_wire_code(type, block, bytes, cell);
        if (travels < bytes) {
            if (decoded(cell, travels, block, bytes, bytes)) return fprintf(stderr, "a whole cell was refused\n"), 1;
            for (int i = 0; i < 8; i++, tried++) { /* bits, and the header's fields by chance */
                uint8_t *damaged = exactly(cell, travels);
                uint64_t at = dice(3) ? dice(travels) : dice(32);
                damaged[at] ^= (uint8_t)(1 + dice(255));
                refused += (uint64_t)decoded(damaged, travels, block, bytes, bytes);
                free(damaged);
            }
            for (int i = 0; i < 3; i++, tried++) refused += (uint64_t)decoded(cell, dice(travels), block, bytes, bytes);
            refused += (uint64_t)decoded(cell, travels, block, bytes, bytes + 1);
            refused += (uint64_t)decoded(cell, travels, block, bytes, bytes - 1);
            tried += 2;
        }
        free(block), free(cell);
    }
    printf("%llu of %llu refused\n", (unsigned long long)refused, (unsigned long long)tried);
    return 0;
}
