// kvp_coded_unpack: unpacks an image (wire.h) that the copy engine has brought to GPU memory. It stands behind coded.cu.
//
// A CTA takes every gridDim-th piece. It needs no shared memory to speak of, so that it finds a place beside the model.

// Shared memory of a CTA.
struct kvp_unpack_team {
    u64 sums[KVP_LOAD_TEAM / 32];
    u32 refused, unused[3];
};

extern "C" __global__ void __launch_bounds__(KVP_LOAD_TEAM) kvp_coded_unpack(const kvp_wire_unpacking w) {
    extern __shared__ __align__(128) u8 kvp_coded_shared[];
    constexpr u32 team = KVP_LOAD_TEAM, warps = team / 32;
    u32 pieces = kvp_wire_cells(w.raw_bytes), thread = threadIdx.x;
    kvp_unpack_team &t = *(kvp_unpack_team *)kvp_coded_shared;
    if (thread == 0) t.refused = KVP_WIRE_WHOLE;
    for (u32 i = blockIdx.x; i < pieces; i += gridDim.x) {
        u64 place = kvp_get8(w.image + i * sizeof(kvp_wire_index)), to = w.to + (u64)i * KVP_WIRE_CELL, sum = 0;
        u32 bytes = (u32)place, raw = kvp_wire_piece(w.raw_bytes, i);
        const u8 *cell = (const u8 *)(w.image + 16 * (place >> 32));
        if (bytes == raw) { // no thread reads what another wrote
            sum = kvp_raw_stage(cell, to, raw, thread, false);
            continue;
        }
        const kvp_wire_header *h = (const kvp_wire_header *)cell;
        u32 refusal = bytes < raw ? kvp_refusal_of(cell, bytes, raw, h->checksum) : (u32)KVP_WIRE_SHORT;
        if (!refusal) sum = kvp_decode_stage(cell, to, raw, thread);
        kvp_team_wait(0, team); // all have written, and the sums of the piece before have been read
        for (u32 e = thread; !refusal && e < h->escapes; e += team) {
            kvp_escape escape;
            sum += escape.read(cell, raw, e, &t.refused);
            escape.put(to, raw);
        }
        sum = kvp_sum_of_warp(sum);
        if (thread % 32 == 0) t.sums[thread / 32] = sum;
        kvp_team_wait(0, team);
        if (thread == 0) {
            sum = kvp_wire_seed(raw);
            for (u32 k = 0; k < warps; k++) sum += t.sums[k];
            if (!refusal) refusal = t.refused;
            if (!refusal && sum != h->checksum) refusal = KVP_WIRE_CHECKSUM;
            if (refusal) *(volatile u32 *)w.refused = refusal;
            t.refused = KVP_WIRE_WHOLE;
        }
    }
}
