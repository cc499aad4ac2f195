/* Pools of cells: their launches, what loads found damaged, and whether coding pays. wire.h says what a launch is. */
#include "submitter.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(kvp_wire_entry) == sizeof(kvp_copy), "entries of a launch lie in the ring of copies");

#define LEAST_ADDRESS 256 /* a lower `note` of an entry is what the kernel refused its cell for */
#define LOOKED_AT 16      /* blocks of a store */
#define LEAST_SHARE 0.97f /* a wire that carries more than that saves nothing */
#define REST 64           /* stores that are not coded then, before it is tried again */

static uint64_t cells_of_layer(const kvp_submitter *s) { return s->config.cpu.blocks * s->config.cpu.factor; }

void kvp_cells_open(kvp_submitter *s) {
    s->cell_share = 1;
    if (!s->config.cells.step_bytes) s->config.cells.step_bytes = s->config.copy_bytes;
}

/* Which block of the CPU's pool lies at an address: `layer` is where the one before was, and becomes its own. */
static uint64_t cell_at(const kvp_submitter *s, uint64_t address, uint64_t *layer) {
    const kvp_submitter_config *c = &s->config;
    uint64_t cells = cells_of_layer(s), offset;
    for (uint32_t i = 0; i < c->layers; i++, *layer = (*layer + 1) % c->layers) {
        offset = address - c->cpu.bases[*layer];
        /* a layer may lie in the gaps of another's rows */
        if (offset < cells * c->cells.step_bytes && offset % c->cells.step_bytes == 0)
            return *layer * cells + offset / c->cells.step_bytes;
    }
    return UINT64_MAX;
}

/* How fast the kernels are that move cells, where that was measured; else how fast those are that move bytes. */
const kvp_method_table *kvp_cells_methods(const kvp_submitter *s) {
    return s->config.cells.methods ? s->config.cells.methods : s->config.methods;
}

/* ---- packed pools: who has which tail ---------------------------------------------------------------------------- */

/* A store that is asked for: as many tails as it may need, at worst, or it is refused, and `left` says how many are. */
bool kvp_cells_claim(kvp_submitter *s, struct kvp_job *j, int64_t *left) {
    kvp_reserve *r = s->config.cells.reserve;
    if (!r || j->direction != STORE) return true;
    uint64_t needs = j->status.copies * kvp_wire_cells(s->config.copy_bytes);
    if (!kvp_reserve_claim(r, needs)) {
        *left = (int64_t)kvp_reserve_left(r);
        return false;
    }
    j->claim = needs;
    return true;
}

void kvp_cells_unclaim(kvp_submitter *s, struct kvp_job *j) {
    if (j->claim) kvp_reserve_unclaim(s->config.cells.reserve, j->claim);
    j->claim = 0;
}

/* So many of the job's copies were submitted: their cells have what was promised. */
void kvp_cells_begun(const kvp_submitter *s, struct kvp_job *j, uint64_t copies) {
    if (j->claim) j->claim -= copies * kvp_wire_cells(s->config.copy_bytes);
}

enum tails { BEGIN, END, KEEP };

/* Of each entry of a store. */
static void tails_of(const kvp_submitter *s, const kvp_wire_entry *entries, uint32_t count, enum tails how) {
    const kvp_cells *cells = &s->config.cells;
    uint32_t parts = kvp_wire_cells(s->config.copy_bytes);
    for (uint32_t i = 0; cells->reserve && i < count; i++) {
        uint64_t first = (uint64_t)((const kvp_wire_note *)(uintptr_t)entries[i].note - cells->notes);
        if (how == BEGIN)
            kvp_reserve_begin(cells->reserve, first, parts);
        else
            kvp_reserve_end(cells->reserve, first, parts, how == KEEP);
    }
}

void kvp_cells_drop(kvp_submitter *s, const struct marker *m) {
    tails_of(s, (const kvp_wire_entry *)(s->config.list[STORE].host + m->first_entry), m->cells, KEEP);
}

/* Launches the run's first `count` copies. */
int kvp_cells_submit(kvp_submitter *s, int d, uint32_t count, uint32_t ctas, void *stream, kvp_copy_list *list) {
    const kvp_copier *copier = &s->config.copier;
    const kvp_copy_kernel *k = d == STORE ? &copier->coded_store_kernel : &copier->coded_load_kernel;
    const kvp_cells *cells = &s->config.cells;
    typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                             void **, void **);
    kvp_wire_entry *entries = (kvp_wire_entry *)list->host;
    if (!k->function || !copier->cuda.launch_kernel) return cudaErrorNotSupported;
    uint64_t layer = 0, warps = (uint64_t)ctas * (k->threads / 32), parts = kvp_wire_cells(s->config.copy_bytes);
    for (uint32_t i = 0; i < count; i++) {
        const kvp_copy *copy = &s->run[i];
        uint64_t cell = cell_at(s, d == STORE ? copy->dst : copy->src, &layer);
        kvp_must(s, cell != UINT64_MAX && copy->bytes == s->config.copy_bytes, "a copy that is no cell");
        entries[i] = (kvp_wire_entry){copy->dst, copy->src, (uint64_t)(uintptr_t)&cells->notes[cell * parts]};
        if (d == STORE) cells->stored_ns[cell] = 0;
    }
    list->used = count;
    if (d == STORE) {
        s->coding = cells->type && !s->cell_rest;
        if (s->cell_rest) s->cell_rest--;
    }
    kvp_wire_work work = {.list = list->device,
                          .count = count,
                          .raw_bytes = (uint32_t)s->config.copy_bytes,
                          .type = d == STORE && s->coding ? cells->type : 0,
                          .check = cells->check,
                          .room = cells->room,
                          .tails = cells->tails};
    if (d == STORE && copier->store_bytes_per_s)
        work.pace = (uint32_t)((double)warps * (1 << 20) * 1e9 / (double)copier->store_bytes_per_s);
    void *parameters[] = {&work};
    if (d == STORE) tails_of(s, entries, count, BEGIN);
    int code = ((launch_fn)copier->cuda.launch_kernel)(k->function, ctas, 1, 1, k->threads, 1, 1, k->shared_bytes,
                                                       stream, parameters, NULL);
    if (d == STORE && code) tails_of(s, entries, count, END); /* it never ran */
    if (d == STORE && !code && cells->reserve) kvp_reserve_unclaim(cells->reserve, count * parts);
    return code;
}

/* ---- afterwards ------------------------------------------------------------------------------------------------ */

/* Whether the CPU's memory does not hold the block either. */
static bool lost(const kvp_submitter *s, uint64_t cell, uint64_t address) {
    void *raw = malloc(s->config.copy_bytes);
    kvp_wire_place place = {s->config.cells.room, (uint8_t *)(uintptr_t)s->config.cells.tails};
    int refused = raw ? kvp_wire_take(&s->config.cells.notes[cell * kvp_wire_cells(s->config.copy_bytes)],
                                      (const void *)(uintptr_t)address, raw, s->config.copy_bytes, &place)
                      : KVP_WIRE_CHECKSUM;
    free(raw);
    return refused != KVP_WIRE_WHOLE;
}

/* The transfers that wanted this cell fail, once they have ended. */
static void refuse(kvp_submitter *s, const kvp_wire_entry *e, uint64_t sequence, uint64_t end_ns) {
    struct direction *dir = &s->direction[LOAD];
    uint64_t layer = 0, cell = cell_at(s, e->src, &layer);
    struct kvp_job *j = dir->flying ? dir->flying : dir->first;
    atomic_fetch_add(&s->refused, 1);
    for (; j && j->sequence <= sequence; j = j->next ? j->next : j == dir->flying_last ? dir->first : NULL) {
        if (j->status.fault || !kvp_job_has(j, layer, e->dst, e->src)) continue;
        j->failed = j->status.error = (int)e->note;
        j->status.cell = cell;
        j->status.cell_stored_ns = s->config.cells.stored_ns[cell];
        j->status.cell_loaded_ns = end_ns ? end_ns : kvp_now_ns();
        j->status.cell_lost = lost(s, cell, e->src);
        j->status.fault = KVP_FAULT_CELL;
    }
}

/* What coding made of some blocks of a store. Where it saves nothing, the next stores are spared. */
static void look(kvp_submitter *s, const kvp_wire_entry *entries, uint32_t count) {
    uint32_t step = (count + LOOKED_AT - 1) / LOOKED_AT, seen = 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i += step, seen++)
        for (uint32_t k = 0; k < kvp_wire_cells(s->config.copy_bytes); k++)
            bytes += ((const kvp_wire_note *)(uintptr_t)entries[i].note)[k].bytes;
    float share = (float)((double)bytes / ((double)seen * (double)s->config.copy_bytes));
    s->cell_share += (share - s->cell_share) * 0.5f;
    if (s->config.cells.look && share > LEAST_SHARE && s->cell_share > LEAST_SHARE) s->cell_rest = REST;
}

/* The device has reached the end of a coded copy. */
void kvp_cells_retire(kvp_submitter *s, int d, const struct marker *m, uint64_t end_ns) {
    const kvp_wire_entry *entries = (const kvp_wire_entry *)(s->config.list[d].host + m->first_entry);
    if (!m->cells) return;
    if (d == STORE) {
        if (m->coded) look(s, entries, m->cells);
        tails_of(s, entries, m->cells, END);
        return;
    }
    for (uint32_t i = 0; i < m->cells; i++)
        if (entries[i].note < LEAST_ADDRESS) refuse(s, &entries[i], m->begun, end_ns);
}

void kvp_cells_stored(kvp_submitter *s, const struct kvp_job *j) {
    uint64_t at = j->status.copy_end_ns ? j->status.copy_end_ns : j->status.noticed_ns, cells = cells_of_layer(s);
    uint32_t factor = s->config.cpu.factor;
    for (uint64_t p = 0; j->cpu && p < j->count; p++) {
        uint64_t cell = (uint64_t)j->cpu[p / factor] * factor + p % factor;
        for (uint32_t layer = 0; layer < s->config.layers; layer++)
            s->config.cells.stored_ns[layer * cells + cell] = at;
    }
}
