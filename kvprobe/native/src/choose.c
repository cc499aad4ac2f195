/* The chooser, and the figures it starts from. */
#include "kvp_choose.h"

#include <math.h>
#include <string.h>

#define NEAR 1.03f
#define MAX_SLOWDOWN 0.03f

/* ---- asking ------------------------------------------------------------------------------------------------------ */

double kvp_method_ns(const kvp_method_row *row, uint64_t bytes, uint32_t count) {
    int last = KVP_CHOOSE_SIZES - 1, at = 0;
    while (at < last - 1 && bytes > (2048ull << at)) at++;
    double low = (double)(1024ull << at), t = ((double)bytes - low) / low;
    if (t < 0) t = 0;
    double fixed = row->fixed_ns[at] + (t < 1 ? t : 1) * (row->fixed_ns[at + 1] - row->fixed_ns[at]);
    double each = row->copy_ns[at] + t * (row->copy_ns[at + 1] - row->copy_ns[at]);
    return fixed + each * count;
}

int kvp_choose_row(const kvp_method_table *table, uint32_t methods, const float *factors, int compute, int direction,
                   uint64_t median_copy_bytes, uint32_t count) {
    int d = direction == KVP_D2H, chosen = -1;
    double ns[KVP_CHOOSE_ROWS], first = INFINITY;
    uint32_t rows = table->rows[d] < KVP_CHOOSE_ROWS ? table->rows[d] : KVP_CHOOSE_ROWS;
    const kvp_method_row *row = table->row[d];
    for (uint32_t i = 0; i < rows; i++) {
        int free =
            compute == KVP_QUIET && table->max_slowdown >= 0 && row[i].ctas <= (median_copy_bytes < 16384 ? 8 : 4);
        int allowed = row[i].method < KVP_METHODS && (methods >> row[i].method & 1) &&
                      (!row[i].ctas || row[i].slowdown <= table->max_slowdown || free);
        double factor =
            (factors ? (double)factors[i] : 1.0) * (compute == KVP_BESIDE ? 1.0 + (double)row[i].product : 1.0);
        ns[i] = allowed ? kvp_method_ns(&row[i], median_copy_bytes, count) * factor : INFINITY;
        if (ns[i] < first) first = ns[i];
    }
    double best = INFINITY;
    for (uint32_t i = 0; i < rows; i++) {
        if (!(ns[i] <= first * (double)table->near) || isinf(ns[i])) continue;
        if (chosen < 0 || row[i].ctas < row[chosen].ctas || (row[i].ctas == row[chosen].ctas && ns[i] < best))
            chosen = (int)i, best = ns[i];
    }
    return chosen;
}

int kvp_choose_among(const kvp_method_table *table, uint32_t methods, int direction, uint64_t median_copy_bytes,
                     uint32_t count, uint32_t *ctas) {
    int i = kvp_choose_row(table, methods, NULL, KVP_UNKNOWN, direction, median_copy_bytes, count);
    const kvp_method_row *row = i < 0 ? NULL : &table->row[direction == KVP_D2H][i];
    if (ctas) *ctas = row ? row->ctas : 0;
    return row ? (int)row->method : KVP_LOOP;
}

int kvp_choose(const kvp_method_table *table, int direction, uint64_t median_copy_bytes, uint32_t count,
               uint32_t *ctas) {
    return kvp_choose_among(table, ~(1u << KVP_STAGED), direction, median_copy_bytes, count, ctas);
}

/* ---- the default: an H100, PCIe 5.0 x16 ----------------------------------------------------------------------------
 */

static kvp_method_row *add(kvp_method_table *t, int d, uint32_t method, uint32_t ctas, float slowdown, float product) {
    kvp_method_row *row = &t->row[d][t->rows[d]++];
    row->method = method;
    row->ctas = ctas;
    row->slowdown = slowdown;
    row->product = product;
    return row;
}

/* bytes_per_ns: of large copies; least_ns a copy or more; gap_ns more for each copy than its bytes take. */
static void fill(kvp_method_row *row, double fixed, double gap_ns, double bytes_per_ns, double least_ns,
                 double submit) {
    for (int i = 0; i < KVP_CHOOSE_SIZES; i++) {
        double ns = (double)(1024ull << i) / bytes_per_ns + gap_ns;
        row->fixed_ns[i] = (float)fixed;
        row->copy_ns[i] = (float)(ns > least_ns ? ns : least_ns);
        row->submit_ns[i] = (float)submit;
    }
}

void kvp_method_table_default(kvp_method_table *t, const kvp_copier *c) {
    static const struct {
        uint32_t ctas;
        float slowdown, product[2];
        double least_ns[2], gap_ns[2], bytes_per_ns[2]; /* of loads, of stores */
    } kernels[] = {{1, 0.000f, {0.23f, 0.20f}, {70, 85}, {20, 25}, {46.5, 44.0}},
                   {2, 0.005f, {0.28f, 0.74f}, {37, 45}, {6, 6}, {50.0, 51.5}},
                   {4, 0.015f, {0.43f, 1.1f}, {26, 26}, {3, 3}, {50.2, 51.5}},
                   {8, 0.040f, {0.47f, 1.6f}, {25, 25}, {3, 3}, {50.2, 51.5}},
                   {16, 0.30f, {1.1f, 2.5f}, {25, 24}, {3, 3}, {49.8, 51.0}}};
    memset(t, 0, sizeof *t);
    t->max_slowdown = MAX_SLOWDOWN;
    t->near = NEAR;
    for (int d = 0; d < 2; d++) {
        const kvp_copy_kernel *kernel = d ? &c->store_kernel : &c->load_kernel;
        fill(add(t, d, KVP_LOOP, 0, 0, 0), 4000, 2400, 55.0, 0, 1040);
        if (c->cuda.memcpy_batch_async)
            fill(add(t, d, KVP_BATCH, 0, 0, 0), 9000, 20, 55.0, d ? 410 : 500, d ? 410 : 500);
        if (!kernel->function || !c->cuda.launch_kernel) continue;
        for (unsigned i = 0; i < sizeof kernels / sizeof *kernels; i++)
            if (kernels[i].ctas <= kernel->max_ctas)
                fill(add(t, d, KVP_KERNEL, kernels[i].ctas, kernels[i].slowdown, kernels[i].product[d]), 8000,
                     kernels[i].gap_ns[d], kernels[i].bytes_per_ns[d], kernels[i].least_ns[d], 25);
    }
}
