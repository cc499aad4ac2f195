/* The cell format: how a block of numbers travels in fewer bytes, without loss. docs/wire.md describes it byte by byte.
 *
 * bf16 and fp32 have a sign, eight bits of exponent and a mantissa. Signs and mantissas of trained numbers are random;
 * their exponents lie close together, so that four bits name nearly all of them:
 *
 *   code 0 to 13   exponent emax less this
 *   code 14        exponent 0: zeros and denormals, however far below the others they lie
 *   code 15        an escape: the exponent stands in a list
 *
 * A cell is a header, then sections that each begin at a multiple of 16 bytes: the low bytes (fp32: two a value; bf16:
 * none), signs with the upper seven bits of mantissas (a byte a value), codes (half a byte a value), escapes (four
 * bytes each). A block that would not shrink travels as it is: without a header, so that it never needs more space than
 * the block, and whoever keeps it notes that it has as many bytes as the block.
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

#define KVP_WIRE_MAGIC 0x0157564bu /* "KVW", then the version: 1 */
#define KVP_WIRE_CODES 14          /* exponents from emax down that have a code of their own */
#define KVP_WIRE_ZERO 14
#define KVP_WIRE_ESCAPE 15
#define KVP_WIRE_MOST_VALUES (1u << 24) /* a place has 24 bits; larger blocks travel raw, or cut */

/* Values of two and of four bytes whose upper half is a bf16. */
enum kvp_wire_type { KVP_WIRE_BF16 = 1, KVP_WIRE_FP32 = 2 };

typedef struct {
    uint32_t magic;
    uint8_t type; /* enum kvp_wire_type */
    uint8_t emax;
    uint8_t zero[2];
    uint8_t tail[4]; /* the raw_bytes % width bytes at the block's end that are no value; the others are 0 */
    uint32_t escapes;
    uint64_t raw_bytes;
    uint64_t checksum; /* of the block, kvp_wire_checksum */
} kvp_wire_header;     /* 32 bytes */

/* Where the sections of a cell begin, in bytes from its own beginning; bytes: of all of it. */
typedef struct {
    uint64_t values, low, high, codes, escapes, bytes;
} kvp_wire_layout;

/* Bytes of a value; 0: no such type. */
KVP_WIRE_FN uint32_t kvp_wire_width(uint32_t type) { return type == KVP_WIRE_BF16 ? 2 : type == KVP_WIRE_FP32 ? 4 : 0; }

KVP_WIRE_FN uint64_t kvp_wire_up(uint64_t bytes) { return (bytes + 15) & ~(uint64_t)15; }

KVP_WIRE_FN kvp_wire_layout kvp_wire_layout_of(uint32_t width, uint64_t raw_bytes, uint64_t escapes) {
    kvp_wire_layout l;
    l.values = raw_bytes / width;
    l.low = sizeof(kvp_wire_header);
    l.high = l.low + kvp_wire_up(l.values * (width - 2));
    l.codes = l.high + kvp_wire_up(l.values);
    l.escapes = l.codes + kvp_wire_up((l.values + 1) / 2);
    l.bytes = l.escapes + 4 * escapes;
    return l;
}

/* `half` is a bf16, or the upper half of an fp32. */
KVP_WIRE_FN uint32_t kvp_wire_exponent(uint32_t half) { return half >> 7 & 255; }
KVP_WIRE_FN uint32_t kvp_wire_high(uint32_t half) { return (half >> 8 & 128) | (half & 127); }
KVP_WIRE_FN uint32_t kvp_wire_half(uint32_t high, uint32_t exponent) {
    return (high & 128) << 8 | exponent << 7 | (high & 127);
}

KVP_WIRE_FN uint32_t kvp_wire_code_of(uint32_t exponent, uint32_t emax) {
    uint32_t below = emax - exponent;
    return below < KVP_WIRE_CODES ? below : exponent ? KVP_WIRE_ESCAPE : KVP_WIRE_ZERO;
}
/* Of a code that is no escape. */
KVP_WIRE_FN uint32_t kvp_wire_exponent_of(uint32_t code, uint32_t emax) {
    return code == KVP_WIRE_ZERO ? 0 : (emax - code) & 255;
}

KVP_WIRE_FN uint32_t kvp_wire_escape(uint32_t place, uint32_t exponent) { return place << 8 | exponent; }

/* The emax that leaves the fewest escapes, of how often each exponent comes; `escapes` receives how many. */
KVP_WIRE_FN uint32_t kvp_wire_emax(const uint32_t *histogram, uint64_t *escapes) {
    uint64_t all = 0, inside = 0, most = 0;
    uint32_t emax = KVP_WIRE_CODES;
    for (uint32_t e = 1; e < 256; e++) {
        all += histogram[e];
        inside += histogram[e];
        if (e > KVP_WIRE_CODES) inside -= histogram[e - KVP_WIRE_CODES];
        if (e >= KVP_WIRE_CODES && inside > most) most = inside, emax = e;
    }
    *escapes = all - most;
    return emax;
}

/* What word `index` of a block adds to its checksum: the sum may be made in any order, by any number of threads. A last
 * word that is not whole is filled up with zeros. */
KVP_WIRE_FN uint64_t kvp_wire_mix(uint64_t word, uint64_t index) {
    uint64_t x = (word ^ (index + 1) * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 32) * 0x94d049bb133111ebu;
    return x ^ x >> 29;
}
/* What the sum is begun with. */
KVP_WIRE_FN uint64_t kvp_wire_seed(uint64_t raw_bytes) { return kvp_wire_mix(raw_bytes, ~(uint64_t)0); }

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
    uint32_t bytes;    /* of the cell; as many as the piece has: it lies there as it is */
    uint32_t summed;   /* 1: the checksum is the piece's; always where it is coded */
    uint64_t checksum; /* kvp_wire_checksum of the piece */
} kvp_wire_note;

/* One block; 24 bytes, as kvp_copy is. Loads: src is where its cells lie; stores: dst is. */
typedef struct {
    uint64_t dst, src;
    uint64_t note; /* address of its first kvp_wire_note, in pinned memory */
} kvp_wire_entry;

/* The parameter of a launch, by value; 32 bytes. */
typedef struct {
    uint64_t list;      /* of kvp_wire_entry */
    uint32_t count;     /* entries */
    uint32_t raw_bytes; /* of every block */
    uint32_t type;      /* stores: enum kvp_wire_type, or 0: nothing is coded */
    uint32_t check;     /* stores: pieces that lie there as they are get a checksum, too */
    uint32_t pace;      /* stores: least ns in which one warp puts 1 MiB on the wire; 0: as fast as it can */
    uint32_t zero;
} kvp_wire_work;

enum kvp_wire_refusal {
    KVP_WIRE_WHOLE = 0,
    KVP_WIRE_SHORT = 1,    /* more or fewer bytes than the header says */
    KVP_WIRE_UNKNOWN = 2,  /* no cell, or one of another version or type */
    KVP_WIRE_OTHER = 3,    /* of a block of another size */
    KVP_WIRE_DAMAGED = 4,  /* it contradicts itself */
    KVP_WIRE_CHECKSUM = 5, /* what comes out is not what went in */
};

#ifndef __CUDACC__
#include "kvp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of any bytes, at any alignment. */
KVP_EXPORT uint64_t kvp_wire_checksum(const void *raw, uint64_t raw_bytes);

/* How often each exponent comes, as `type`; 256 counts are added to. */
KVP_EXPORT void kvp_wire_histogram(uint32_t type, const void *raw, uint64_t raw_bytes, uint32_t *histogram);

/* Bytes of the cell that a block would have; raw_bytes: it would not shrink, and travels as it is. */
KVP_EXPORT uint64_t kvp_wire_size(uint32_t type, const void *raw, uint64_t raw_bytes);

/* Writes the block's cell and returns its bytes, fewer than raw_bytes; or writes nothing and returns raw_bytes. `cell`
 * has space for raw_bytes. Blocks of other types are given as 0: they travel as they are. */
KVP_EXPORT uint64_t kvp_wire_code(uint32_t type, const void *raw, uint64_t raw_bytes, void *cell);

/* Writes the block again: 0, or enum kvp_wire_refusal, and then what stands in `raw` means nothing. Reads cell_bytes
 * and writes raw_bytes at most, whatever the cell says. */
KVP_EXPORT int kvp_wire_decode(const void *cell, uint64_t cell_bytes, void *raw, uint64_t raw_bytes);

/* As kvp_coded_store: puts a block into its cells, of `type` or as it is, and writes their notes. */
KVP_EXPORT void kvp_wire_put(uint32_t type, int check, const void *raw, uint64_t raw_bytes, void *cells,
                             kvp_wire_note *notes);
/* As kvp_coded_load: writes the block that cells hold. 0, or enum kvp_wire_refusal of the first that holds none. */
KVP_EXPORT int kvp_wire_take(const kvp_wire_note *notes, const void *cells, void *raw, uint64_t raw_bytes);

#ifdef __cplusplus
}
#endif
#endif

#endif
