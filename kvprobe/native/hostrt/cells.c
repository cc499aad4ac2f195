/* The coded copy kernels, as the host runtime executes them: the cells of wire.h, by its functions for the CPU.
 *
 * What is on the wire is known when the kernel starts and sees its blocks, so its time is weighed then. A large store
 * is weighed by a sample of its blocks.
 *
 * TIME (figures: a prototype on an H200, scaled to the configured link). Cells travel at the rate of other kernels'
 * copies. Beside that one CTA decodes 1.08 times the link's rate and codes 0.78 times, and each block costs it as much
 * as 26 KB on the link, or 46 KB.
 */
#include "rt.h"

#define WEIGHED 64 /* blocks of a store */

/* An entry whose block, cells, tails and notes a GPU could reach. */
static bool reachable(runtime *rt, const kvh_cells *c, const kvp_wire_entry *e) {
    const kvp_wire_work *w = &c->work;
    uint32_t cells = kvp_wire_cells(w->raw_bytes);
    uint64_t block = c->store ? e->src : e->dst;
    route r;
    if (e->note & 15 || kvh_device_check(rt, (const void *)(uintptr_t)e->note, cells * sizeof(kvp_wire_note)) ||
        kvh_device_check(rt, (const void *)(uintptr_t)block, w->raw_bytes) ||
        kvh_route(rt, (void *)(uintptr_t)e->dst, (const void *)(uintptr_t)e->src, kvp_wire_span(w->raw_bytes, w->room),
                  c->store ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, &r) ||
        r.memory == KVP_MEM_PAGEABLE)
        return false;
    const kvp_wire_note *notes = (const kvp_wire_note *)(uintptr_t)e->note;
    for (uint32_t i = 0; w->room && i < cells; i++) {
        uint64_t tail = notes[i].summed >> 1, bytes = kvp_wire_tail_bytes(w->raw_bytes, w->room);
        if (tail && kvh_device_check(rt, (const void *)(uintptr_t)(w->tails + (tail - 1) * bytes), bytes)) return false;
    }
    return true;
}

double kvh_cells_weigh(runtime *rt, const kvh_cells *c, double *busy) {
    const kvp_wire_entry *list = (const kvp_wire_entry *)(uintptr_t)c->work.list;
    uint32_t count = c->work.count, step = c->store && c->work.type ? (count + WEIGHED - 1) / WEIGHED : 1, seen = 0;
    uint32_t cells = kvp_wire_cells(c->work.raw_bytes);
    uint64_t wire = 0, raw_bytes = c->work.raw_bytes;
    *busy = count * (c->store ? 46e3 + (double)raw_bytes / 0.78 : 26e3 + (double)raw_bytes / 1.08);
    for (uint32_t i = 0; i < count; i += step, seen++) {
        const kvp_wire_entry *e = &list[i];
        const kvp_wire_note *notes = (const kvp_wire_note *)(uintptr_t)e->note;
        const uint8_t *block = (const uint8_t *)(uintptr_t)e->src;
        bool known = reachable(rt, c, e);
        for (uint32_t k = 0; k < cells; k++) {
            uint64_t piece = kvp_wire_piece(raw_bytes, k), bytes = piece;
            if (known && c->store) bytes = kvp_wire_size(c->work.type, block + (uint64_t)k * KVP_WIRE_CELL, piece);
            if (known && !c->store && notes[k].bytes < piece) bytes = notes[k].bytes;
            wire += bytes;
        }
    }
    return (double)wire * count / seen;
}

bool kvh_cells_move(runtime *rt, const kvh_cells *c) {
    kvp_wire_entry *list = (kvp_wire_entry *)(uintptr_t)c->work.list;
    kvp_wire_place place = {c->work.room, (uint8_t *)(uintptr_t)c->work.tails};
    for (uint32_t i = 0; i < c->work.count; i++) {
        kvp_wire_entry *e = &list[i];
        if (!reachable(rt, c, e)) return false;
        kvp_wire_note *notes = (kvp_wire_note *)(uintptr_t)e->note;
        void *dst = (void *)(uintptr_t)e->dst;
        const void *src = (const void *)(uintptr_t)e->src;
        if (c->store) {
            kvp_wire_put(c->work.type, (int)c->work.check, src, c->work.raw_bytes, dst, notes, &place);
            continue;
        }
        int refused = kvp_wire_take(notes, src, dst, c->work.raw_bytes, &place);
        if (refused) e->note = (uint64_t)refused;
    }
    return true;
}
