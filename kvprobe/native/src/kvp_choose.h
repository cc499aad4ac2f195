/* Which method is done first: a table of measured times, and a function that asks it.
 *
 * A row says what one way of moving copies takes: a method and, where it launches kernels, a number of CTAs. The time
 * of a transfer of n copies of one size is fixed_ns + n * copy_ns, both measured at every power of two from 1 KiB to
 * 4 MiB; between two sizes and beyond the last both are straight lines, below the first they are the first's.
 */
#ifndef KVP_CHOOSE_H
#define KVP_CHOOSE_H

#include "kvp_copy.h"

#define KVP_CHOOSE_SIZES 13 /* 1 KiB << i: 1 KiB to 4 MiB */
#define KVP_CHOOSE_ROWS 16

typedef struct {
    uint32_t method; /* enum kvp_method */
    uint32_t ctas;   /* of one launch; 0: takes no multiprocessors */
    /* What a memory-bound kernel beside it takes longer than beside the same copies by DMA: 0.02 is 2%. */
    float slowdown;
    /* And a matrix product, whose CTAs need whole multiprocessors: a share of the time that the copies take. */
    float product;
    float fixed_ns[KVP_CHOOSE_SIZES];  /* of a transfer: from the first call to completion, without its copies */
    float copy_ns[KVP_CHOOSE_SIZES];   /* that each copy adds */
    float submit_ns[KVP_CHOOSE_SIZES]; /* host time in the submitting calls, a copy */
} kvp_method_row;

typedef struct {
    uint32_t rows[2];     /* of loads, of stores */
    uint32_t measured;    /* 0: the figures of an H100, 1: this machine's */
    float max_slowdown;   /* rows above it are not chosen; 0.03 */
    float near;           /* rows that take up to so many times the first one's time count as equally fast; 1.03 */
    uint64_t paced_store; /* bytes per second of store kernels while compute is seen; 0: as fast as they can */
    kvp_method_row row[2][KVP_CHOOSE_ROWS];
} kvp_method_table;

/* Fills the table with figures of an H100 behind PCIe 5.0 x16, for the methods that this copier has. */
KVP_EXPORT void kvp_method_table_default(kvp_method_table *table, const kvp_copier *copier);

/* The method (enum kvp_method) that is done first with `count` copies of `median_copy_bytes` in a direction (KVP_H2D or
 * KVP_D2H), among the rows within max_slowdown; `ctas` receives its CTAs. Of rows that are `near` the first one, the
 * one that takes the fewest CTAs: more of them cost the model more. Never KVP_STAGED, which needs a contiguous host
 * side: ask kvp_choose_among. KVP_LOOP where the table has no row. Pure: reads the table alone, from any thread. */
KVP_EXPORT int kvp_choose(const kvp_method_table *table, int direction, uint64_t median_copy_bytes, uint32_t count,
                          uint32_t *ctas);

/* The same among methods whose bit (1 << enum kvp_method) is set: after a method failed, or where staged can be used.
 */
KVP_EXPORT int kvp_choose_among(const kvp_method_table *table, uint32_t methods, int direction,
                                uint64_t median_copy_bytes, uint32_t count, uint32_t *ctas);

enum kvp_compute {
    KVP_QUIET = -1, /* none was seen: nobody pays; up to 8 CTAs, 4 from 16 KiB on, whatever max_slowdown is */
    KVP_UNKNOWN = 0,
    KVP_BESIDE = 1 /* a millisecond that its products lose (`product`) counts like one that the copies take */
};

/* The same with what each row was seen to take lately against what it says (`factors`, one a row; NULL: as it says):
 * copies beside a model that saturates memory, or the multiprocessors, take longer than alone, by some methods more
 * than by others. `compute`: what is known of the model meanwhile.
 * Returns the row's index, or -1 where there is none. */
KVP_EXPORT int kvp_choose_row(const kvp_method_table *table, uint32_t methods, const float *factors, int compute,
                              int direction, uint64_t median_copy_bytes, uint32_t count);

/* What a row says that a transfer takes, in ns. */
KVP_EXPORT double kvp_method_ns(const kvp_method_row *row, uint64_t copy_bytes, uint32_t count);

#endif
