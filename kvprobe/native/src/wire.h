/* The cell format: how a block of numbers travels in fewer bytes, without loss. docs/wire.md describes it byte by byte.
 *
 * bf16 and fp32 have a sign, eight bits of exponent and a mantissa. Signs and mantissas of trained numbers are random;
 * their exponents lie close together. The upper byte of a number is its sign and the upper seven bits of its exponent;
 * half a byte, a code, names nearly all of them:
 *
 *   bit 3          the sign
 *   bits 0 to 2    0 to 6: top less that; 7: what the header says, 0 (zeros and denormals, however far below the others
 *                  they lie) or top - 7
 *
 * An upper byte that has no code has 7 in its place, and stands in a list: an escape.
 *
 * A cell is a header, then sections that each begin at a multiple of 16 bytes: the low bytes (fp32: two a value; bf16:
 * none), middle bytes (the exponent's lowest bit with the upper seven bits of the mantissa: a byte a value), codes
 * (half a byte a value, in words of eight values, those of even places in the lower half of a word: kvp_wire_shift),
 * escapes (four bytes each, in any order). A block that would not shrink travels as it is: without a header, so that it
 * never needs more space than the block, and whoever keeps it notes that it has as many bytes as the block.
 *
 * Which top is best is the coder's business: the CPU's looks at every value, the GPU's at some.
 *
 * Written for C11, CUDA C++ and NVRTC: what is inline here is the same in host and device code. Everything is
 * little-endian. The tests compile it as C and as C++. */
#ifndef KVP_WIRE_H
#define KVP_WIRE_H

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#ifdef __CUDACC__
#define KVP_WIRE_FN __host__ __device__ static __forceinline__
#else
#define KVP_WIRE_FN static inline
#endif

#define KVP_WIRE_MAGIC 0x0257564bu      /* "KVW", then the version: 2 */
#define KVP_WIRE_LAST 7                 /* the code of the header's `last`, and of escapes */
#define KVP_WIRE_MOST_VALUES (1u << 24) /* a place has 24 bits; larger blocks travel raw, or cut */

/* Values of two and of four bytes whose upper half is a bf16. */
enum kvp_wire_type { KVP_WIRE_BF16 = 1, KVP_WIRE_FP32 = 2 };

typedef struct {
    uint32_t magic;
    uint8_t type;    /* enum kvp_wire_type */
    uint8_t top;     /* KVP_WIRE_LAST to 127 */
    uint8_t last;    /* 0, or top - KVP_WIRE_LAST */
    uint8_t parity;  /* the three before it, by exclusive or: a block need not have every code */
    uint8_t tail[4]; /* the raw_bytes % width bytes at the block's end that are no value; the others are 0 */
    uint32_t escapes;
    uint64_t raw_bytes;
    uint64_t checksum; /* of the block, kvp_wire_checksum */
} kvp_wire_header;     /* 32 bytes */

/* Where the sections of a cell begin, in bytes from its own beginning; bytes: of all of it. */
typedef struct {
    uint64_t values, low, middle, codes, escapes, bytes;
} kvp_wire_layout;

/* Bytes of a value; 0: no such type. */
KVP_WIRE_FN uint32_t kvp_wire_width(uint32_t type) { return type == KVP_WIRE_BF16 ? 2 : type == KVP_WIRE_FP32 ? 4 : 0; }

KVP_WIRE_FN uint64_t kvp_wire_up(uint64_t bytes) { return (bytes + 15) & ~(uint64_t)15; }

KVP_WIRE_FN kvp_wire_layout kvp_wire_layout_of(uint32_t width, uint64_t raw_bytes, uint64_t escapes) {
    kvp_wire_layout l;
    l.values = raw_bytes / width;
    l.low = sizeof(kvp_wire_header);
    l.middle = l.low + kvp_wire_up(l.values * (width - 2));
    l.codes = l.middle + kvp_wire_up(l.values);
    l.escapes = l.codes + kvp_wire_up((l.values + 1) / 2);
    l.bytes = l.escapes + 4 * escapes;
    return l;
}

/* Where the code of value `i` lies in its word of eight values, in bits. */
KVP_WIRE_FN uint32_t kvp_wire_shift(uint64_t i) { return 4 * (uint32_t)(i & 6) / 2 + 16 * (uint32_t)(i & 1); }

/* `upper` is the upper byte of a value. */
KVP_WIRE_FN uint32_t kvp_wire_code_of(uint32_t upper, uint32_t top) {
    uint32_t below = top - (upper & 127);
    return (below < KVP_WIRE_LAST ? below : KVP_WIRE_LAST) | (upper >> 4 & 8);
}
KVP_WIRE_FN uint32_t kvp_wire_upper_of(uint32_t code, uint32_t top, uint32_t last) {
    return ((code & 7) == KVP_WIRE_LAST ? last : top - (code & 7)) | (code & 8) << 4;
}

KVP_WIRE_FN uint32_t kvp_wire_escape(uint64_t place, uint32_t upper) { return (uint32_t)place << 8 | upper; }
/* Whether an escape may stand where `code` does. */
KVP_WIRE_FN uint32_t kvp_wire_escapes(uint32_t upper, uint32_t code, uint32_t last) {
    return code == (KVP_WIRE_LAST | (upper >> 4 & 8)) && (upper & 127) != last;
}
KVP_WIRE_FN uint32_t kvp_wire_parity(uint32_t type, uint32_t top, uint32_t last) { return type ^ top ^ last; }
/* Whether a header may have these. */
KVP_WIRE_FN uint32_t kvp_wire_sound(uint32_t type, uint32_t top, uint32_t last, uint32_t parity) {
    return top >= KVP_WIRE_LAST && top < 128 && (!last || last == top - KVP_WIRE_LAST) &&
           parity == kvp_wire_parity(type, top, last);
}

/* The top and last that leave the fewest escapes, of how often each upper byte comes, signs apart; `escapes` receives
 * how many. */
KVP_WIRE_FN uint32_t kvp_wire_top(const uint32_t *counts, uint32_t *last, uint64_t *escapes) {
    uint64_t all = counts[0], inside = 0, most = 0;
    uint32_t top = KVP_WIRE_LAST;
    *last = 0;
    for (uint32_t h = 1; h < 128; h++) {
        all += counts[h];
        inside += counts[h];
        if (h > KVP_WIRE_LAST) inside -= counts[h - KVP_WIRE_LAST];
        if (h < KVP_WIRE_LAST) continue;
        uint32_t below = h - KVP_WIRE_LAST, other = counts[below] > counts[0] ? counts[below] : counts[0];
        if (inside + other > most) most = inside + other, top = h, *last = counts[below] > counts[0] ? below : 0;
    }
    *escapes = all - most;
    return top;
}

/* A block's checksum is the sum, modulo 2^64, of its words of four bytes, each times its weight; a last word that is
 * not whole is filled up with zeros. Threads may make it in any order, and a byte that is corrected later adds the
 * difference. One word that changed, two words that changed places, and one bit that changed in two words are always
 * found: a product of two numbers below 2^32 is below 2^64, and all weights of 16 GiB are different. */
KVP_WIRE_FN uint32_t kvp_wire_weight(uint32_t index) { return (index + 1) * 0x9e3779b1u; }
/* What the sum is begun with. */
KVP_WIRE_FN uint64_t kvp_wire_seed(uint64_t raw_bytes) { return (raw_bytes + 1) * 0x9e3779b97f4a7c15u; }

/* ---- a pool of cells, and the kernels that move its blocks ---------------------------------------------------------
 *
 * A pool of cells codes each block in pieces of KVP_WIRE_CELL bytes, the last one of what is left, for a team of
 * threads codes no more at once. A piece has a cell as large as itself, at its own address in CPU memory: block and
 * cells begin anywhere, cell i at i * KVP_WIRE_CELL. Cells are written by kvp_coded_store and read by kvp_coded_load
 * alone, or by the CPU while no transfer touches them.
 *
 *   void kvp_coded_load(const kvp_wire_work), void kvp_coded_store(const kvp_wire_work)
 *
 * `list` names kvp_wire_entry in pinned memory, which belongs to the launch until it has completed; all its blocks have
 * the same size. What a note says is read when the kernel runs: a load may be submitted before the store that it waits
 * for on the device has ended.
 *
 * A store codes each piece as `type` (0: as it is), writes the cell and then its note. A load reads the note, then as
 * many bytes of the cell as it says: as many as the piece has, and it lies there as it is; fewer, a cell, of the type
 * in its header. It sums what it writes, where the note is summed, and where something does not fit puts enum
 * kvp_wire_refusal in the place of the entry's `note` (below 256, as no address is); the block's bytes mean nothing
 * then, and no other block is concerned. Any number of CTAs is correct; `pace` concerns stores alone, and bytes on the
 * wire. */
#define KVP_WIRE_CELL 16384u

/* Cells of a block, of which each has a note. */
KVP_WIRE_FN uint32_t kvp_wire_cells(uint64_t raw_bytes) {
    return (uint32_t)((raw_bytes + KVP_WIRE_CELL - 1) / KVP_WIRE_CELL);
}
/* Bytes of the piece that cell `i` of a block holds. */
KVP_WIRE_FN uint32_t kvp_wire_piece(uint64_t raw_bytes, uint32_t i) {
    uint64_t left = raw_bytes - (uint64_t)i * KVP_WIRE_CELL;
    return left < KVP_WIRE_CELL ? (uint32_t)left : KVP_WIRE_CELL;
}

/* What the CPU's memory holds of a piece; 16 bytes, at a multiple of 16. Those of a block lie in a row. */
typedef struct {
    uint32_t bytes;    /* of the cell; as many as the piece has: it lies there as it is; 0: nothing lies there */
    uint32_t summed;   /* bit 0: the checksum is the piece's; always where it is coded. The others: see below */
    uint64_t checksum; /* kvp_wire_checksum of the piece */
} kvp_wire_note;

/* A packed pool gives cells less space than their pieces have: cell i of a block begins at i * `room`, a multiple of
 * 16, and a cell of more bytes goes on in a tail. Tails lie in a row, each as large as what a first piece that did not
 * shrink has more than `room`; a last piece that is no larger than `room` has all its bytes there. Which tail a cell
 * may use stands in its note before the store begins, in the upper 31 bits of `summed`, from 1 on; stores and loads
 * keep them. A cell that needs one and has none is not written: its note says 0 bytes. */
KVP_WIRE_FN uint32_t kvp_wire_step(uint32_t room) { return room ? room : KVP_WIRE_CELL; }
/* Bytes of a piece that lie in its own place. */
KVP_WIRE_FN uint32_t kvp_wire_fits(uint32_t piece, uint32_t room) { return room && room < piece ? room : piece; }
KVP_WIRE_FN uint32_t kvp_wire_tail_bytes(uint64_t raw_bytes, uint32_t room) {
    return (uint32_t)kvp_wire_up(kvp_wire_piece(raw_bytes, 0) - room);
}
/* Bytes that a block takes. */
KVP_WIRE_FN uint64_t kvp_wire_span(uint64_t raw_bytes, uint32_t room) {
    uint32_t last = kvp_wire_cells(raw_bytes) - 1;
    return (uint64_t)last * kvp_wire_step(room) + kvp_wire_fits(kvp_wire_piece(raw_bytes, last), room);
}

/* One block; 24 bytes, as kvp_copy is. Loads: src is where its cells lie; stores: dst is. */
typedef struct {
    uint64_t dst, src;
    uint64_t note; /* address of its first kvp_wire_note, in pinned memory */
} kvp_wire_entry;

/* The parameter of a launch, by value; 40 bytes. */
typedef struct {
    uint64_t list;      /* of kvp_wire_entry */
    uint32_t count;     /* entries */
    uint32_t raw_bytes; /* of every block */
    uint32_t type;      /* stores: enum kvp_wire_type, or 0: nothing is coded */
    uint32_t check;     /* stores: pieces that lie there as they are get a checksum, too */
    uint32_t pace;      /* stores: least ns in which one warp puts 1 MiB on the wire; 0: as fast as it can */
    uint32_t room;      /* of a packed pool; 0: cells are as large as their pieces */
    uint64_t tails;     /* where they begin */
} kvp_wire_work;

enum kvp_wire_refusal {
    KVP_WIRE_WHOLE = 0,
    KVP_WIRE_SHORT = 1,    /* more or fewer bytes than the header says */
    KVP_WIRE_UNKNOWN = 2,  /* no cell, or one of another version or type */
    KVP_WIRE_OTHER = 3,    /* of a block of another size */
    KVP_WIRE_DAMAGED = 4,  /* it contradicts itself */
    KVP_WIRE_CHECKSUM = 5, /* what comes out is not what went in */
    KVP_WIRE_NONE = 6,     /* nothing lies there */
};

/* ---- images: a run of bytes, packed, that travels by the copy engine and is unpacked where it arrives ---------------
 *
 * An image begins with a kvp_wire_index for each piece of KVP_WIRE_CELL bytes, the last one of what is left; then come
 * the cells, one after another, each at a multiple of 16 bytes. It names no address, so that it may lie anywhere.
 *
 *   void kvp_coded_unpack(const kvp_wire_unpacking)
 */
typedef struct {
    uint32_t bytes; /* of the cell; as many as the piece has: it lies there as it is */
    uint32_t at;    /* where it begins in the image, over 16 */
} kvp_wire_index;

/* Most bytes that an image can have. */
KVP_WIRE_FN uint64_t kvp_wire_image_most(uint64_t raw_bytes) {
    uint64_t pieces = (raw_bytes + KVP_WIRE_CELL - 1) / KVP_WIRE_CELL;
    return kvp_wire_up(pieces * sizeof(kvp_wire_index)) + kvp_wire_up(raw_bytes);
}

/* The parameter of a launch, by value; 32 bytes. Everything is a multiple of 16. Where a piece is refused, it means
 * nothing afterwards, and enum kvp_wire_refusal is written to the four bytes at `refused`, which the CPU sees. */
typedef struct {
    uint64_t image, to; /* addresses of GPU memory */
    uint64_t raw_bytes;
    uint64_t refused;
} kvp_wire_unpacking;

#ifndef __CUDACC__
#include "kvp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of any bytes, at any alignment. */
KVP_EXPORT uint64_t kvp_wire_checksum(const void *raw, uint64_t raw_bytes);

/* How often each upper byte comes, as `type`, signs apart; 128 counts are added to. */
KVP_EXPORT void kvp_wire_histogram(uint32_t type, const void *raw, uint64_t raw_bytes, uint32_t *counts);

/* Bytes of the cell that a block would have; raw_bytes: it would not shrink, and travels as it is. */
KVP_EXPORT uint64_t kvp_wire_size(uint32_t type, const void *raw, uint64_t raw_bytes);

/* Writes the block's cell and returns its bytes, fewer than raw_bytes; or writes nothing and returns raw_bytes. `cell`
 * has space for raw_bytes. Blocks of other types are given as 0: they travel as they are. */
KVP_EXPORT uint64_t kvp_wire_code(uint32_t type, const void *raw, uint64_t raw_bytes, void *cell);

/* Writes the block again: 0, or enum kvp_wire_refusal, and then what stands in `raw` means nothing. Reads cell_bytes
 * and writes raw_bytes at most, whatever the cell says. */
KVP_EXPORT int kvp_wire_decode(const void *cell, uint64_t cell_bytes, void *raw, uint64_t raw_bytes);

/* Where the cells of a pool lie: of a packed one `room` and its tails, else zeros. */
typedef struct {
    uint32_t room;
    uint8_t *tails;
} kvp_wire_place;

/* As kvp_coded_store: puts a block into its cells, of `type` or as it is, and writes their notes. */
KVP_EXPORT void kvp_wire_put(uint32_t type, int check, const void *raw, uint64_t raw_bytes, void *cells,
                             kvp_wire_note *notes, const kvp_wire_place *place);
/* As kvp_coded_load: writes the block that cells hold. 0, or enum kvp_wire_refusal of the first that holds none. */
KVP_EXPORT int kvp_wire_take(const kvp_wire_note *notes, const void *cells, void *raw, uint64_t raw_bytes,
                             const kvp_wire_place *place);

/* Writes the image of a run of bytes, a multiple of 16, and returns how many bytes it has. `image` has space for
 * kvp_wire_image_most of them. */
KVP_EXPORT uint64_t kvp_wire_pack(uint32_t type, const void *raw, uint64_t raw_bytes, void *image);
/* As kvp_coded_unpack: 0, or enum kvp_wire_refusal of the last piece that was refused. */
KVP_EXPORT int kvp_wire_unpack(const void *image, void *raw, uint64_t raw_bytes);

#ifdef __cplusplus
}
#endif
#endif

#endif
