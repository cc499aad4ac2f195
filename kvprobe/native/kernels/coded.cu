// Copy kernels that code on the way: kvp_coded_store, GPU to CPU, and kvp_coded_load, back. The format, and what a launch
// is given, are in wire.h, which stands before this file when it is compiled (kvprobe/cuda/kernels.py).
//
// A block is a row of cells, one for each KVP_WIRE_CELL of its bytes. A CTA is a few teams of threads; each team takes
// cells of its own, and waits for nobody but itself. The cells of a launch go round the teams of all CTAs.
//
// Store: every thread of a team holds some vectors of 16 bytes of the cell's block in registers. The team counts their
// exponents, takes the emax that leaves the fewest escapes, writes the cell into shared memory, and one thread starts
// the bulk copy of its bytes. Two cells of a team may be on their way.
//
// Load: bulk copies bring the cells' bytes, as many as their notes say, into a ring of stages; the team decodes a stage
// straight into the block. Addresses and sizes that are no multiple of 16 go by bytes: slower, and as right.
//
// Compute capability 9.0 on.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef KVP_LOAD_TEAM // threads of a team; kvprobe/cuda/kernels.py knows these figures
#define KVP_LOAD_TEAM 128
#define KVP_LOAD_TEAMS 4
#define KVP_LOAD_STAGES 3
#endif
#ifndef KVP_STORE_TEAM
#define KVP_STORE_TEAM 128
#define KVP_STORE_TEAMS 4
#endif
#ifndef KVP_STORE_COUNTS // of how many vectors one is counted; 1: all, as the CPU's coder does
#define KVP_STORE_COUNTS 1
#endif

#define KVP_ALL 0xffffffffu
#define KVP_STAGE (KVP_WIRE_CELL + 128) // bytes; reads of a last vector that is not whole stay within it
#define KVP_REFUSED 256u                // an entry's note below this is an enum kvp_wire_refusal
#define KVP_CODED_SLACK_NS 4000u        // of a rate that a team may make up for

#ifndef KVP_CODED_MACHINE // the tests put ordinary threads in the place of this part
#define KVP_CODED_MACHINE

__device__ __forceinline__ u32 kvp_shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Team `id` of `threads`.
__device__ __forceinline__ void kvp_team_wait(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id + 1), "r"(threads) : "memory");
}
__device__ __forceinline__ void kvp_gate_open(u64 *gate) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(kvp_shared(gate)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void kvp_gate_wait(u64 *gate, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(kvp_shared(gate)), "r"(parity)
                     : "memory");
}
__device__ __forceinline__ void kvp_gate_pass(u64 *gate) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(kvp_shared(gate)) : "memory");
}
// The gate lets through when the bytes have come.
__device__ __forceinline__ void kvp_bulk_in(void *to, u64 from, u32 bytes, u64 *gate) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(kvp_shared(gate)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     kvp_shared(to)),
                 "l"(from), "r"(bytes), "r"(kvp_shared(gate))
                 : "memory");
}
__device__ __forceinline__ void kvp_bulk_out(u64 to, const void *from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(kvp_shared(from)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void kvp_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void kvp_bulk_all_but_one_read() {
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}
__device__ __forceinline__ void kvp_bulk_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What this thread wrote to shared memory is seen by bulk copies started after it.
__device__ __forceinline__ void kvp_bulk_sees() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ uint4 kvp_get16(u64 p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ u64 kvp_get8(u64 p) {
    u64 v;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 kvp_clock_ns() {
    u32 t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
    return t;
}
#endif

// ---- what both directions share --------------------------------------------------------------------------------------

// One cell of a launch and the piece of a block that it holds.
struct kvp_cell_job {
    u64 block, cell; // addresses of the piece and of its cell
    u64 note, entry; // addresses
    u32 raw;         // bytes of the piece
    u32 bytes;       // loads: that travel; 0: nothing can be read
    u32 summed, by_bytes;
    u64 checksum;
};

// The entries of the next cells of a team, one a lane of its first warp.
struct kvp_cell_list {
    u64 dst, src, note, entry, checksum;
    u32 raw, bytes, summed;

    // Cell `number` of the launch; nothing is computed with what is read before its turn.
    __device__ __forceinline__ void read(const kvp_wire_work &w, u32 units, u64 number) {
        raw = bytes = summed = 0;
        dst = src = note = entry = checksum = 0;
        if (number >= (u64)w.count * units) return;
        entry = w.list + number / units * sizeof(kvp_wire_entry);
        u64 at = number % units * KVP_WIRE_CELL;
        raw = w.raw_bytes - at < KVP_WIRE_CELL ? (u32)(w.raw_bytes - at) : KVP_WIRE_CELL;
        dst = kvp_get8(entry), src = kvp_get8(entry + 8), note = kvp_get8(entry + 16);
    }
    __device__ __forceinline__ void place(u32 units, u64 number) {
        u64 at = number % units;
        dst += at * KVP_WIRE_CELL, src += at * KVP_WIRE_CELL;
        if (note >= KVP_REFUSED) note += at * sizeof(kvp_wire_note);
    }
    __device__ __forceinline__ void read_note() {
        if (!raw || note < KVP_REFUSED) return;
        uint4 v = kvp_get16(note);
        bytes = v.x, summed = v.y, checksum = (u64)v.w << 32 | v.z;
    }
};

// 16 bytes at any address, of which `bytes` exist; the others are 0.
__device__ __noinline__ uint4 kvp_get_bytes(u64 p, u32 bytes) {
    u64 half[2] = {0, 0};
    for (u32 i = 0; i < bytes && i < 16; i++) half[i / 8] |= (u64) * (const volatile u8 *)(p + i) << 8 * (i % 8);
    return make_uint4((u32)half[0], (u32)(half[0] >> 32), (u32)half[1], (u32)(half[1] >> 32));
}
__device__ __noinline__ void kvp_put_bytes(u64 p, uint4 v, u32 bytes) {
    u64 half[2] = {(u64)v.y << 32 | v.x, (u64)v.w << 32 | v.z};
    for (u32 i = 0; i < bytes && i < 16; i++) *(volatile u8 *)(p + i) = (u8)(half[i / 8] >> 8 * (i % 8));
}

// What vector `v` of a piece of `raw` bytes adds to its checksum; bytes that do not exist are 0 in it.
__device__ __forceinline__ u64 kvp_sum_of(uint4 x, u32 v, u32 raw) {
    u64 sum = kvp_wire_mix((u64)x.y << 32 | x.x, 2 * v);
    if (16 * v + 8 < raw) sum += kvp_wire_mix((u64)x.w << 32 | x.z, 2 * v + 1);
    return sum;
}
__device__ __forceinline__ u64 kvp_sum_of_warp(u64 sum) {
#pragma unroll
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(KVP_ALL, sum, d);
    return sum;
}

__device__ __forceinline__ u32 kvp_bytes_of(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }

// ---- store -----------------------------------------------------------------------------------------------------------

// Eight values, one by one: those that have no code, zeros, and those beyond the piece's end.
// Returns the escapes, a bit a value.
__device__ __noinline__ u32 kvp_code_slowly(uint4 x, u32 emax, u32 values, uint2 *high, u32 *codes) {
    u64 half[2] = {(u64)x.y << 32 | x.x, (u64)x.w << 32 | x.z}, h = 0;
    u32 c = 0, escapes = 0;
    for (u32 j = 0; j < 8 && j < values; j++) {
        u32 one = (u32)(half[j / 4] >> 16 * (j % 4)) & 0xffff, exponent = kvp_wire_exponent(one);
        u32 code = kvp_wire_code_of(exponent, emax);
        h |= (u64)kvp_wire_high(one) << 8 * j;
        c |= code << 4 * j;
        if (code == KVP_WIRE_ESCAPE) escapes |= 1u << j;
    }
    *high = make_uint2((u32)h, (u32)(h >> 32));
    *codes = c;
    return escapes;
}

// Eight values at once. True where they all have one of the codes 0 to 13.
__device__ __forceinline__ bool kvp_code_fast(uint4 x, u32 emax2, uint2 *high, u32 *codes) {
    u32 h0 = (x.x >> 8 & 0x00800080) | (x.x & 0x007f007f), h1 = (x.y >> 8 & 0x00800080) | (x.y & 0x007f007f);
    u32 h2 = (x.z >> 8 & 0x00800080) | (x.z & 0x007f007f), h3 = (x.w >> 8 & 0x00800080) | (x.w & 0x007f007f);
    *high = make_uint2(kvp_bytes_of(h0, h1, 0x6420), kvp_bytes_of(h2, h3, 0x6420));
    // 0x8000 more in each half: none borrows from the other, and what lies above emax loses that bit
    u32 d0 = emax2 - (x.x >> 7 & 0x00ff00ff), d1 = emax2 - (x.y >> 7 & 0x00ff00ff);
    u32 d2 = emax2 - (x.z >> 7 & 0x00ff00ff), d3 = emax2 - (x.w >> 7 & 0x00ff00ff);
    u32 a = kvp_bytes_of(d0, d1, 0x6240), b = kvp_bytes_of(d2, d3, 0x6240);
    u32 even = kvp_bytes_of(a, b, 0x5410), odd = kvp_bytes_of(a, b, 0x7632);
    u32 c = odd << 4 | (even & 0x0f0f0f0f);
    *codes = c;
    u32 above = ~(d0 & d1 & d2 & d3) & 0x80008000, far = (even | odd) & 0xf0f0f0f0;
    u32 last = c & c >> 1 & c >> 2 & 0x22222222; // 14 or 15
    return !(above | far | last);
}

// The escapes of eight values, in order.
__device__ __noinline__ void kvp_put_escapes(u8 *to, uint4 x, u32 escapes, u32 place, u32 at) {
    u64 half[2] = {(u64)x.y << 32 | x.x, (u64)x.w << 32 | x.z};
    for (u32 j = 0; j < 8; j++)
        if (escapes >> j & 1)
            ((u32 *)to)[at++] =
                kvp_wire_escape(place + j, kvp_wire_exponent((u32)(half[j / 4] >> 16 * (j % 4)) & 0xffff));
}

// Shared memory of a team that stores.
struct alignas(128) kvp_store_team {
    u8 cell[2][KVP_STAGE];
    u32 counts[256];
    kvp_cell_job job[2];
    u64 sums[KVP_STORE_TEAM / 32];
    u32 best[KVP_STORE_TEAM / 32], escapes[KVP_STORE_TEAM / 32];
};

// This warp's part of kvp_wire_emax: values that emax leaves a code << 8 | 255 - emax, the best of them.
__device__ __forceinline__ u32 kvp_best_of_warp(const u32 *counts, u32 warp, u32 warps, u32 lane) {
    u32 best = 0;
    for (u32 base = 32 * warp; base < 256; base += 32 * warps) {
        u32 e = base + lane, inside = 0;
        if (e >= KVP_WIRE_CODES)
            for (u32 i = 0; i < KVP_WIRE_CODES; i++) inside += counts[e - i];
        u32 one = inside << 8 | (255 - e); // of equals the smallest emax
        if (e >= KVP_WIRE_CODES && one > best) best = one;
    }
    return __reduce_max_sync(KVP_ALL, best);
}

// Waits until `due`, unless it is long past; when the next may go that then takes `ns`.
__device__ __forceinline__ u32 kvp_await_turn(u32 due, u32 ns) {
    u32 clock = kvp_clock_ns();
    if ((int)(clock - due) > (int)KVP_CODED_SLACK_NS) due = clock - KVP_CODED_SLACK_NS;
    while ((int)(due - clock) > 0) clock = kvp_clock_ns();
    return due + ns;
}

// Puts the bytes of a cell into the CPU's memory where a bulk copy cannot.
__device__ __noinline__ void kvp_store_by_bytes(u64 to, const u8 *from, u32 bytes, u32 thread, u32 threads) {
    for (u32 i = thread; i < bytes; i += threads) *(volatile u8 *)(to + i) = from[i];
}

// One thread of a team, and its vectors of the piece that the team stores.
struct kvp_storing {
    static constexpr u32 TEAM = KVP_STORE_TEAM, WARPS = TEAM / 32, MOST = KVP_WIRE_CELL / 16 / TEAM;
    kvp_store_team &t;
    u32 id, thread, warp, lane;
    u32 raw, vectors, values;
    u32 each, begin; // vectors begin, begin + 32, ... of `each`: those of a warp are neighbours
    u32 emax, room;  // escapes that leave the cell shorter than the piece
    uint4 x[MOST];
    u64 escapes; // a bit a value

    __device__ __forceinline__ bool has(u32 i) const { return i < each && begin + 32 * i < vectors; }
    __device__ __forceinline__ void wait() const { kvp_team_wait(id, TEAM); }

    __device__ __forceinline__ void take(const kvp_cell_job &job) {
        raw = job.raw, vectors = (raw + 15) / 16, values = raw / 2;
        each = (vectors + TEAM - 1) / TEAM, begin = warp * 32 * each + lane;
        u64 none = kvp_wire_layout_of(2, raw, 0).bytes;
        room = none < raw ? (u32)(raw - none - 1) / 4 : 0;
#pragma unroll
        for (u32 i = 0; i < MOST; i++) {
            u32 at = 16 * (begin + 32 * i);
            x[i] = make_uint4(0, 0, 0, 0);
            if (has(i)) x[i] = job.by_bytes ? kvp_get_bytes(job.block + at, raw - at) : kvp_get16(job.block + at);
        }
    }

    // Whether the piece shrinks, as far as was counted; finds emax. The counts are 0 before and after.
    __device__ __forceinline__ bool look(u64 block) {
#pragma unroll
        for (u32 i = 0; i < MOST; i++) {
            u32 v = begin + 32 * i, word[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
            if (i % KVP_STORE_COUNTS || !has(i)) continue;
            if (8 * v + 8 <= values) {
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    atomicAdd(&t.counts[word[j] >> 7 & 255], 1u);
                    atomicAdd(&t.counts[word[j] >> 23 & 255], 1u);
                }
            } else {
                for (u32 j = 8 * v; j < values; j++)
                    atomicAdd(&t.counts[kvp_get_bytes(block + 2 * j, 2).x >> 7 & 255], 1u);
            }
        }
        wait();
        u32 zeros = t.counts[0], best = kvp_best_of_warp(t.counts, warp, WARPS, lane);
        if (lane == 0) t.best[warp] = best;
        wait();
        for (u32 i = 0; i < WARPS; i++) best = t.best[i] > best ? t.best[i] : best;
        for (u32 i = thread; i < 256; i += TEAM) t.counts[i] = 0;
        emax = 255 - (best & 255);
        if (kvp_wire_layout_of(2, raw, 0).bytes >= raw) return false;
        return KVP_STORE_COUNTS > 1 || values - zeros - (best >> 8) <= room;
    }

    // Writes the sections; returns what this thread adds to the checksum.
    __device__ __forceinline__ u64 code(u8 *cell) {
        kvp_wire_layout l = kvp_wire_layout_of(2, raw, 0);
        u32 emax2 = (0x8000 | emax) * 0x00010001u;
        u64 sum = 0;
#pragma unroll
        for (u32 i = 0; i < MOST; i++) {
            u32 v = begin + 32 * i, codes, found = 0;
            uint2 high;
            if (!has(i)) continue;
            if (8 * v + 8 > values || !kvp_code_fast(x[i], emax2, &high, &codes)) {
                uint2 slow;
                u32 slow_codes;
                found = kvp_code_slowly(x[i], emax, 8 * v < values ? values - 8 * v : 0, &slow, &slow_codes);
                high = slow, codes = slow_codes;
            }
            sum += kvp_sum_of(x[i], v, raw);
            if (8 * v < values) {
                *(uint2 *)(cell + l.high + 8 * v) = high;
                *(u32 *)(cell + l.codes + 4 * v) = codes;
            }
            escapes |= (u64)found << 8 * i;
        }
        u64 coded = (values + 7) / 8; // zeros from there up to the next section
        if (l.high + 8 * coded + 4 * thread < l.codes) *(u32 *)(cell + l.high + 8 * coded + 4 * thread) = 0;
        if (l.codes + 4 * coded + 4 * thread < l.escapes) *(u32 *)(cell + l.codes + 4 * coded + 4 * thread) = 0;
        return sum;
    }

    // Writes the piece as it is.
    __device__ __forceinline__ u64 keep(u8 *cell, bool sum_it) {
        u64 sum = 0;
#pragma unroll
        for (u32 i = 0; i < MOST; i++) {
            u32 v = begin + 32 * i;
            if (!has(i)) continue;
            if (sum_it) sum += kvp_sum_of(x[i], v, raw);
            *(uint4 *)(cell + 16 * v) = x[i];
        }
        return sum;
    }

    // The list of escapes, in order; `before` have those of the warps before this one.
    __device__ __forceinline__ void list_escapes(u8 *to, u32 before) {
#pragma unroll
        for (u32 i = 0; i < MOST; i++) {
            u32 here = (u32)(escapes >> 8 * i) & 255;
            if (!__ballot_sync(KVP_ALL, here != 0)) continue;
            u32 upto = __popc(here);
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                u32 other = __shfl_up_sync(KVP_ALL, upto, d);
                if (lane >= d) upto += other;
            }
            if (here) kvp_put_escapes(to, x[i], here, 8 * (begin + 32 * i), before + upto - __popc(here));
            before += __shfl_sync(KVP_ALL, upto, 31);
        }
    }

    // The piece's cell, in shared memory: its bytes. Every thread has seen to it that bulk copies see what it wrote.
    __device__ __forceinline__ u32 make(const kvp_wire_work &w, const kvp_cell_job &job, u8 *cell, u32 *found) {
        escapes = 0;
        bool coded = w.type == KVP_WIRE_BF16 ? look(job.block) : (wait(), false);
        u64 sum = kvp_sum_of_warp(coded ? code(cell) : keep(cell, w.check != 0));
        u32 count = __reduce_add_sync(KVP_ALL, __popc((u32)escapes) + __popc((u32)(escapes >> 32))), before = 0;
        if (lane == 0) t.sums[warp] = sum, t.escapes[warp] = count;
        kvp_bulk_sees();
        wait();
        *found = 0;
        for (u32 i = 0; i < WARPS; i++) {
            if (i < warp) before += t.escapes[i];
            *found += t.escapes[i];
        }
        if (!coded) return raw;
        u32 bytes = (u32)kvp_wire_layout_of(2, raw, *found).bytes;
        if (*found > room) bytes = raw, keep(cell, false); // more than those that were counted
        else if (*found) list_escapes(cell + (u32)kvp_wire_layout_of(2, raw, 0).escapes, before);
        if (*found) {
            kvp_bulk_sees();
            wait();
        }
        return bytes;
    }
};

// By one thread: the header of a cell, if it has one, and its note.
__device__ __forceinline__ void kvp_finish_cell(const kvp_storing &s, const kvp_wire_work &w, const kvp_cell_job &job,
                                                u8 *cell, u32 bytes, u32 found) {
    u64 checksum = kvp_wire_seed(s.raw);
    bool coded = bytes < s.raw, summed = coded || w.check;
    for (u32 i = 0; i < s.WARPS; i++) checksum += s.t.sums[i];
    if (!summed) checksum = 0;
    if (coded) {
        u32 tail = s.raw & 1 ? kvp_get_bytes(job.block + s.raw - 1, 1).x : 0;
        *(uint4 *)cell = make_uint4(KVP_WIRE_MAGIC, KVP_WIRE_BF16 | s.emax << 8, tail, found);
        *(uint4 *)(cell + 16) = make_uint4(s.raw, 0, (u32)checksum, (u32)(checksum >> 32));
        for (u32 i = bytes; i & 15; i += 4) *(u32 *)(cell + i) = 0; // behind the cell, in its block's place
        kvp_bulk_sees();
    }
    if (job.note >= KVP_REFUSED) *(uint4 *)job.note = make_uint4(bytes, summed, (u32)checksum, (u32)(checksum >> 32));
}

extern "C" __global__ void __launch_bounds__(KVP_STORE_TEAM *KVP_STORE_TEAMS, 1) kvp_coded_store(const kvp_wire_work w) {
    extern __shared__ __align__(128) u8 kvp_coded_shared[];
    constexpr u32 team = KVP_STORE_TEAM;
    u32 id = threadIdx.x / team, thread = threadIdx.x % team, lane = thread % 32;
    kvp_storing s = {((kvp_store_team *)kvp_coded_shared)[id], id, thread, thread / 32, lane};
    u32 units = kvp_wire_cells(w.raw_bytes), teams = gridDim.x * (blockDim.x / team), due = kvp_clock_ns(), k = 0;
    u64 total = (u64)w.count * units, first = id * gridDim.x + blockIdx.x;
    if (first >= total) return;
    kvp_cell_list now, next;
    if (s.warp == 0) next.read(w, units, first + (u64)lane * teams);
    for (u32 i = thread; i < 256; i += team) s.t.counts[i] = 0;
    for (u64 number = first; number < total; number += teams, k++) {
        kvp_cell_job &job = s.t.job[k & 1];
        u8 *cell = s.t.cell[k & 1];
        if (s.warp == 0) {
            if (k % 32 == 0) {
                now = next;
                now.place(units, number + (u64)lane * teams);
                next.read(w, units, number + (u64)(32 + lane) * teams);
            }
            if (lane == k % 32) {
                job.cell = now.dst, job.block = now.src, job.note = now.note, job.raw = now.raw;
                job.by_bytes = ((now.dst | now.src | now.raw) & 15) != 0;
            }
        }
        s.wait();
        s.take(job);
        bool by_bytes = job.by_bytes;
        u32 found;
        if (thread == 0) kvp_bulk_all_but_one_read(); // what lay in this cell's place has gone; the others wait in make
        u32 bytes = s.make(w, job, cell, &found);
        if (thread == 0) {
            kvp_finish_cell(s, w, job, cell, bytes, found);
            if (!by_bytes) {
                if (w.pace) due = kvp_await_turn(due, (u32)((u64)bytes * w.pace / s.WARPS >> 20));
                kvp_bulk_out(job.cell, cell, (bytes + 15) & ~15u);
            }
            kvp_bulk_commit();
        }
        if (by_bytes) {
            s.wait();
            kvp_store_by_bytes(job.cell, cell, bytes, thread, team);
        }
    }
    if (thread == 0) kvp_bulk_done();
}

// ---- load ------------------------------------------------------------------------------------------------------------

// Shared memory of a team that loads.
struct alignas(128) kvp_load_team {
    u8 stage[KVP_LOAD_STAGES][KVP_STAGE];
    kvp_cell_job job[KVP_LOAD_STAGES];
    u64 gate[KVP_LOAD_STAGES];
    u64 sums[2][KVP_LOAD_TEAM / 32];
    u32 refused[2];
};

// Exponents of the escapes among eight values, each found in the ordered list; false: one is not there.
__device__ __noinline__ bool kvp_decode_slowly(uint4 *x, u32 codes, u32 emax, u32 place, u32 values, const u32 *list,
                                               u32 count) {
    u64 half[2] = {(u64)x->y << 32 | x->x, (u64)x->w << 32 | x->z};
    bool all = true;
    for (u32 j = 0; j < 8; j++) {
        u32 code = codes >> 4 * j & 15, exponent = kvp_wire_exponent_of(code, emax), shift = 16 * (j % 4);
        u64 keep = j < values ? 0x807full << shift : 0;
        if (j >= values) exponent = 0;
        else if (code == KVP_WIRE_ESCAPE) {
            u32 low = 0, high = count; // the first whose place is not before this one
            while (low < high) {
                u32 middle = (low + high) / 2;
                if (list[middle] >> 8 < place + j) low = middle + 1;
                else high = middle;
            }
            if (low < count && list[low] >> 8 == place + j) exponent = list[low] & 255;
            else all = false, exponent = 0;
        }
        half[j / 4] = (half[j / 4] & ~(0xffffull << shift)) | (half[j / 4] & keep) | (u64)exponent << (shift + 7);
    }
    *x = make_uint4((u32)half[0], (u32)(half[0] >> 32), (u32)half[1], (u32)(half[1] >> 32));
    return all;
}

// Eight values at once; right where all of their codes are below 14.
__device__ __forceinline__ uint4 kvp_decode_fast(uint2 high, u32 codes, u32 emax2) {
    u32 even = codes & 0x0f0f0f0f, odd = codes >> 4 & 0x0f0f0f0f;
    u32 a = kvp_bytes_of(even, odd, 0x5140), b = kvp_bytes_of(even, odd, 0x7362); // a byte a code, in order
    u32 c[4] = {kvp_bytes_of(a, 0, 0x4140), kvp_bytes_of(a, 0, 0x4342), kvp_bytes_of(b, 0, 0x4140),
                kvp_bytes_of(b, 0, 0x4342)};
    u32 h[4] = {kvp_bytes_of(high.x, 0, 0x4140), kvp_bytes_of(high.x, 0, 0x4342), kvp_bytes_of(high.y, 0, 0x4140),
                kvp_bytes_of(high.y, 0, 0x4342)};
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = (h[i] << 8 & 0x80008000) | ((emax2 - c[i]) << 7 & 0x7f807f80) | (h[i] & 0x007f007f);
    return make_uint4(x[0], x[1], x[2], x[3]);
}

// What stands in the way of decoding a cell; 0: nothing seen yet.
__device__ __forceinline__ u32 kvp_refusal_of(const u8 *cell, u32 bytes, u32 raw, u64 checksum) {
    if (bytes < sizeof(kvp_wire_header)) return KVP_WIRE_SHORT;
    const kvp_wire_header *h = (const kvp_wire_header *)cell;
    if (h->magic != KVP_WIRE_MAGIC || h->type != KVP_WIRE_BF16) return KVP_WIRE_UNKNOWN;
    if (h->raw_bytes != raw) return KVP_WIRE_OTHER;
    if (h->emax < KVP_WIRE_CODES || h->zero[0] || h->zero[1]) return KVP_WIRE_DAMAGED;
    if (kvp_wire_layout_of(2, raw, h->escapes).bytes != bytes) return KVP_WIRE_SHORT;
    if (*(const u32 *)h->tail >> 8 * (raw & 1)) return KVP_WIRE_DAMAGED;
    return h->checksum == checksum ? KVP_WIRE_WHOLE : KVP_WIRE_CHECKSUM;
}

// Brings the bytes of a cell where a bulk copy cannot.
__device__ __noinline__ void kvp_load_by_bytes(u8 *to, u64 from, u32 bytes, u32 thread, u32 threads) {
    for (u32 i = thread; i < bytes; i += threads) to[i] = *(const volatile u8 *)(from + i);
}

// This thread's share of a stage, into the block; returns what it adds to the checksum.
__device__ __forceinline__ u64 kvp_decode_stage(const u8 *stage, const kvp_cell_job &job, u32 thread, u32 *refused) {
    u32 raw = job.raw, vectors = (raw + 15) / 16, values = raw / 2;
    kvp_wire_layout l = kvp_wire_layout_of(2, raw, 0);
    const kvp_wire_header *h = (const kvp_wire_header *)stage;
    u32 emax = h->emax, emax2 = emax * 0x00010001u, count = h->escapes;
    const u32 *list = (const u32 *)(stage + l.escapes);
    u64 sum = 0, to = job.block;
    bool aligned = !(to & 15);
#pragma unroll 4
    for (u32 v = thread; v < vectors; v += KVP_LOAD_TEAM) {
        uint2 high = *(const uint2 *)(stage + l.high + 8 * v);
        u32 codes = *(const u32 *)(stage + l.codes + 4 * v);
        uint4 x = kvp_decode_fast(high, codes, emax2);
        bool whole = 8 * v + 8 <= values;
        if ((codes & codes >> 1 & codes >> 2 & 0x22222222) || !whole) {
            uint4 slow = x;
            if (!kvp_decode_slowly(&slow, codes, emax, 8 * v, whole ? 8 : 8 * v < values ? values - 8 * v : 0, list, count))
                *refused = KVP_WIRE_DAMAGED;
            if (!whole && (raw & 1)) { // the last byte is no value
                u32 at = (raw - 1) % 16, byte = (u32)h->tail[0] << 8 * (at % 4);
                if (at / 4 == 0) slow.x |= byte;
                else if (at / 4 == 1) slow.y |= byte;
                else if (at / 4 == 2) slow.z |= byte;
                else slow.w |= byte;
            }
            x = slow;
        }
        sum += kvp_sum_of(x, v, raw);
        if (aligned && 16 * v + 16 <= raw) *(uint4 *)(to + 16 * v) = x;
        else kvp_put_bytes(to + 16 * v, x, raw - 16 * v);
    }
    return sum;
}

// The same for a block that lies in its cell as it is.
__device__ __forceinline__ u64 kvp_raw_stage(const u8 *stage, const kvp_cell_job &job, u32 thread) {
    u32 raw = job.raw, vectors = (raw + 15) / 16;
    u64 sum = 0, to = job.block;
    bool aligned = !(to & 15);
#pragma unroll 4
    for (u32 v = thread; v < vectors; v += KVP_LOAD_TEAM) {
        uint4 x = *(const uint4 *)(stage + 16 * v);
        if (16 * v + 16 > raw) { // what lies behind the block is not of it
            u32 rest = raw - 16 * v, word[4] = {x.x, x.y, x.z, x.w};
            for (u32 i = 0; i < 4; i++) {
                u32 left = rest > 4 * i ? rest - 4 * i : 0;
                if (left < 4) word[i] &= (1u << 8 * left) - 1;
            }
            x = make_uint4(word[0], word[1], word[2], word[3]);
        }
        if (job.summed) sum += kvp_sum_of(x, v, raw);
        if (aligned && 16 * v + 16 <= raw) *(uint4 *)(to + 16 * v) = x;
        else kvp_put_bytes(to + 16 * v, x, raw - 16 * v);
    }
    return sum;
}

// One thread of a team that loads. Its first warp reads the list and starts what comes into the stages.
struct kvp_loading {
    static constexpr u32 TEAM = KVP_LOAD_TEAM, WARPS = TEAM / 32, STAGES = KVP_LOAD_STAGES;
    kvp_load_team &t;
    u32 id, thread, warp, lane;
    u32 units, teams, mine; // cells of a block; teams of all CTAs; cells of this team
    u64 first;              // of its cells
    kvp_cell_list now, next;

    __device__ __forceinline__ void wait() const { kvp_team_wait(id, TEAM); }

    __device__ __forceinline__ void open(const kvp_wire_work &w) {
        if (thread == 0) {
            for (u32 s = 0; s < STAGES; s++) kvp_gate_open(&t.gate[s]);
            t.refused[0] = t.refused[1] = 0;
            kvp_bulk_sees();
        }
        wait();
        if (warp) return;
        next.read(w, units, first + (u64)lane * teams);
        next.place(units, first + (u64)lane * teams);
        next.read_note();
        for (u32 k = 0; k < STAGES && k < mine; k++) start(w, k);
    }

    // Cell k of this team into its stage; by the first warp.
    __device__ __forceinline__ void start(const kvp_wire_work &w, u32 k) {
        u64 following = first + (u64)(k / 32 * 32 + 32 + lane) * teams;
        if (k % 32 == 0) {
            now = next;
            next.read(w, units, following);
        } else if (k % 32 == 12) { // its entries have come long since
            next.place(units, following);
            next.read_note();
        }
        if (lane == k % 32) {
            u32 s = k % STAGES, travel = (now.bytes + 15) & ~15u;
            kvp_cell_job &job = t.job[s];
            job.block = now.dst, job.cell = now.src, job.note = now.note, job.entry = now.entry;
            job.raw = now.raw, job.bytes = now.bytes <= now.raw ? now.bytes : 0;
            job.summed = now.summed || now.bytes < now.raw, job.checksum = now.checksum;
            job.by_bytes = (now.src & 15) || travel > now.raw;
            if (!job.bytes || job.by_bytes) kvp_gate_pass(&t.gate[s]);
            else kvp_bulk_in(t.stage[s], now.src, travel, &t.gate[s]);
        }
        __syncwarp();
    }

    // Decodes a stage; what stands in its way. The threads' sums are in shared memory after the next wait.
    __device__ __forceinline__ u32 decode(const kvp_cell_job &job, const u8 *stage, u32 turn) {
        u32 refusal = KVP_WIRE_WHOLE;
        u64 sum = 0;
        if (!job.bytes) refusal = KVP_WIRE_SHORT;
        else if (job.bytes == job.raw) sum = kvp_raw_stage(stage, job, thread);
        else refusal = kvp_refusal_of(stage, job.bytes, job.raw, job.checksum);
        if (!refusal && job.bytes < job.raw) sum = kvp_decode_stage(stage, job, thread, &t.refused[turn]);
        if (job.summed) {
            sum = kvp_sum_of_warp(sum);
            if (lane == 0) t.sums[turn][warp] = sum;
        }
        return refusal;
    }

    // By one thread: whether what came out is what went in.
    __device__ __forceinline__ u32 compare(u32 raw, u64 checksum, u32 turn) {
        u32 refusal = t.refused[turn];
        t.refused[turn] = 0;
        u64 sum = kvp_wire_seed(raw);
        for (u32 i = 0; i < WARPS; i++) sum += t.sums[turn][i];
        return refusal ? refusal : sum == checksum ? KVP_WIRE_WHOLE : KVP_WIRE_CHECKSUM;
    }
};

extern "C" __global__ void __launch_bounds__(KVP_LOAD_TEAM *KVP_LOAD_TEAMS, 1) kvp_coded_load(const kvp_wire_work w) {
    extern __shared__ __align__(128) u8 kvp_coded_shared[];
    constexpr u32 team = KVP_LOAD_TEAM, stages = KVP_LOAD_STAGES;
    u32 id = threadIdx.x / team, thread = threadIdx.x % team, units = kvp_wire_cells(w.raw_bytes);
    u32 teams = gridDim.x * (blockDim.x / team);
    u64 total = (u64)w.count * units, first = id * gridDim.x + blockIdx.x;
    if (first >= total) return;
    kvp_load_team &t = ((kvp_load_team *)kvp_coded_shared)[id];
    kvp_loading l = {t, id, thread, thread / 32, thread % 32, units, teams, (u32)((total - first + teams - 1) / teams)};
    l.first = first;
    l.open(w);
    for (u32 k = 0; k < l.mine; k++) {
        u32 s = k % stages;
        const kvp_cell_job &job = t.job[s];
        kvp_gate_wait(&t.gate[s], k / stages & 1);
        if (job.by_bytes && job.bytes) {
            kvp_load_by_bytes(t.stage[s], job.cell, job.bytes, thread, team);
            kvp_bulk_sees();
            l.wait();
        }
        u32 refusal = l.decode(job, t.stage[s], k & 1), raw = job.raw, summed = job.summed;
        u64 checksum = job.checksum, entry = job.entry, note = job.note;
        l.wait(); // the stage has been read
        if (l.warp == 0 && k + stages < l.mine) l.start(w, k + stages);
        if (thread == 0) {
            if (!refusal && summed) refusal = l.compare(raw, checksum, k & 1);
            if (refusal && note >= KVP_REFUSED) *(volatile u64 *)(entry + 16) = refusal;
        }
    }
}
