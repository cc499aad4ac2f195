// Copy kernels that code on the way: kvp_coded_store, GPU to CPU, and kvp_coded_load, back. The format, and what a
// launch is given, are in wire.h, which stands before this file when it is compiled (kvprobe/cuda/kernels.py).
//
// A block is a row of cells, one for each KVP_WIRE_CELL of its bytes. A CTA is a few teams of threads; each team takes
// cells of its own, and waits for nobody but itself. The cells of a launch are dealt in as many rows as there are teams:
// a team reads entries and notes that lie side by side, and teams are far from one another in large blocks.
//
// Store: bulk copies bring pieces of blocks into a ring of stages. The team looks at an eighth of a piece for its top,
// and writes the cell into one of a ring of others, from where one thread starts the bulk copy of its bytes; a piece
// that does not shrink goes out of its stage, and no thread touches it. After a few of those the team looks at fewer
// and fewer; where nothing is to be coded or summed, one warp of a team moves pieces through all of its memory.
//
// Load: bulk copies bring the cells' bytes, as many as their notes say, into a ring of stages; the team decodes a stage
// straight into the block. A piece that lies there as it is, and has no checksum, goes on by bulk copy. A warp more in
// each team, the feeder, reads the list, starts what comes into a stage once the team is done with it, and compares
// checksums: where one of the warps that decode did so, the others waited for it.
//
// Eight values are coded or decoded at a time, without a branch, by permuting bytes: the codes of four values are the
// selectors of a permutation of the eight upper bytes that have one. The few escapes are seen to afterwards. Addresses
// and sizes that are no multiple of 16 go by bytes: slower, and as right.
//
// Compute capability 9.0 on.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef KVP_LOAD_TEAM // threads of a team that decode; kvprobe/cuda/kernels.py knows these figures
#define KVP_LOAD_TEAM 128 // the best of eight ways to cut it on an H100: reports/h100-wire.txt
#define KVP_LOAD_TEAMS 4
#define KVP_LOAD_STAGES 3
#define KVP_LOAD_HAND 4 // vectors of 16 bytes that a thread has in hand
#endif
#ifndef KVP_STORE_TEAM // the same; codes 0.94 of the link on average at 2 to 8 CTAs, the next best 0.87
#define KVP_STORE_TEAM 128
#define KVP_STORE_TEAMS 4
#define KVP_STORE_STAGES 2
#define KVP_STORE_CELLS 1
#define KVP_STORE_HAND 8
#endif

#define KVP_ALL 0xffffffffu
#define KVP_STAGE (KVP_WIRE_CELL + 128) // bytes; reads of a last vector that is not whole stay within it
#define KVP_REFUSED 256u                // an entry's note below this is an enum kvp_wire_refusal
#define KVP_CODED_SLACK_NS 4000u        // of a rate that a team may make up for
#define KVP_DRY 4u                      // pieces in a row that do not shrink, before some are not looked at
#define KVP_MOST_PASSED 31u             // pieces in a row that are not looked at

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
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(kvp_shared(to)),
        "l"(from), "r"(bytes), "r"(kvp_shared(gate))
        : "memory");
}
__device__ __forceinline__ void kvp_bulk_out(u64 to, const void *from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(kvp_shared(from)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void kvp_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <u32 KEEP> __device__ __forceinline__ void kvp_bulk_read_all_but() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(KEEP) : "memory");
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
__device__ __forceinline__ void kvp_put16(u64 p, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
__device__ __forceinline__ void kvp_put1(u64 p, u32 v) { asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(v)); }
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
// Bytes of b:a; no selector is above 7.
__device__ __forceinline__ u32 kvp_permute(u32 a, u32 b, u32 which) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(which));
    return r;
}
// What the compiler makes two instructions of.
__device__ __forceinline__ u32 kvp_not_and(u32 a, u32 b) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, 0, 0x3f;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
// Of both halves the smaller of a + b and c.
__device__ __forceinline__ u32 kvp_add_min16(u32 a, u32 b, u32 c) {
    u32 r;
    asm("{ .reg .b32 t; add.u16x2 t, %1, %2; min.u16x2 %0, t, %3; }" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
#endif

// ---- what both directions share
// --------------------------------------------------------------------------------------

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

// What the first warp of a team takes its cells from.
template <bool LOAD> struct kvp_cell_feed {
    u32 units, mine; // cells of a block; cells of this team, which follow one another
    u64 first;       // of its cells
    kvp_cell_list now, next;

    // False: there are none.
    __device__ __forceinline__ bool open(const kvp_wire_work &w, u32 team, u32 id) {
        units = kvp_wire_cells(w.raw_bytes);
        u32 teams = gridDim.x * (blockDim.x / (LOAD ? team + 32 : team)), number = id * gridDim.x + blockIdx.x;
        u64 total = (u64)w.count * units;
        first = total * number / teams;
        mine = (u32)(total * (number + 1) / teams - first);
        return mine;
    }
    __device__ __forceinline__ void prepare(const kvp_wire_work &w, u64 number) {
        next.place(units, number);
        if (LOAD) next.read_note();
    }
    __device__ __forceinline__ void begin(const kvp_wire_work &w, u32 lane) {
        next.read(w, units, first + lane);
        prepare(w, first + lane);
    }
    // Cell k of this team into a stage: what it is, and its bytes.
    __device__ __forceinline__ void start(const kvp_wire_work &w, u32 k, u32 lane, kvp_cell_job &job, u8 *stage,
                                          u64 *gate) {
        u64 following = first + k / 32 * 32 + 32 + lane;
        __syncwarp();
        if (k % 32 == 0) {
            now = next;
            next.read(w, units, following);
        } else if (k % 32 == 12) { // its entries have come long since
            prepare(w, following);
        }
        if (lane == k % 32) {
            u32 travel = LOAD ? (now.bytes + 15) & ~15u : now.raw;
            job.block = LOAD ? now.dst : now.src, job.cell = LOAD ? now.src : now.dst;
            job.note = now.note, job.entry = now.entry, job.raw = now.raw;
            job.bytes = now.bytes <= now.raw ? now.bytes : 0;
            job.summed = now.summed || now.bytes < now.raw, job.checksum = now.checksum;
            job.by_bytes = LOAD ? (now.src & 15) || travel > now.raw : ((now.src | now.dst | now.raw) & 15) != 0;
            if (job.by_bytes || !travel || (LOAD && !job.bytes))
                kvp_gate_pass(gate);
            else
                kvp_bulk_in(stage, now.src, travel, gate);
        }
        __syncwarp();
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

// What vector `v` of a piece adds to its checksum; bytes that do not exist are 0 in it.
__device__ __forceinline__ u64 kvp_sum_of(uint4 x, u32 v) {
    u32 weight = kvp_wire_weight(4 * v), step = kvp_wire_weight(0);
    return (u64)x.x * weight + (u64)x.y * (weight + step) + (u64)x.z * (weight + 2 * step) +
           (u64)x.w * (weight + 3 * step);
}
__device__ __forceinline__ u64 kvp_sum_of_warp(u64 sum) {
    u32 part = (1u << 27) - 1; // 32 of them are below 2^32
    u64 low = __reduce_add_sync(KVP_ALL, (u32)sum & part), middle = __reduce_add_sync(KVP_ALL, (u32)(sum >> 27) & part);
    return low + (middle << 27) + ((u64)__reduce_add_sync(KVP_ALL, (u32)(sum >> 54)) << 54);
}
// The sum of what a thread's vectors of a piece in shared memory add.
__device__ __forceinline__ u64 kvp_sum_of_stage(const u8 *stage, u32 raw, u32 thread, u32 team) {
    u64 sum = 0;
    for (u32 v = thread; v < (raw + 15) / 16; v += team) sum += kvp_sum_of(*(const uint4 *)(stage + 16 * v), v);
    return sum;
}

// The upper bytes that have a code: of codes 0 to 3, and of 4 to 7.
struct kvp_table {
    u32 low, high, last;
    __device__ __forceinline__ kvp_table(u32 top, u32 last_) {
        low = top * 0x01010101u - 0x03020100u, last = last_;
        high = ((top * 0x01010101u - 0x00060504u) & 0x00ffffff) | last << 24;
    }
    // Of the codes of values 0, 2, 1, 3 and of 4, 6, 5, 7, a byte a value.
    __device__ __forceinline__ u32 first(u32 codes) const {
        return kvp_permute(low, high, kvp_permute(codes, 0, 0x4420));
    }
    __device__ __forceinline__ u32 second(u32 codes) const {
        return kvp_permute(low, high, kvp_permute(codes, 0, 0x4431));
    }
};

// ---- store
// -----------------------------------------------------------------------------------------------------------

// Eight coded values; `wrong`: where a byte is not 0, the value is an escape, in the order of kvp_table.
struct kvp_eight {
    uint2 middle, wrong;
    u32 codes;
};

// `above` is top + 1 in both halves.
__device__ __forceinline__ u32 kvp_codes_of(u32 x, u32 above) {
    return kvp_add_min16(kvp_not_and(x >> 8, 0x007f007f), above, 0x00070007) | (x >> 12 & 0x00080008);
}
__device__ __forceinline__ kvp_eight kvp_code(uint4 x, u32 above, const kvp_table &table) {
    kvp_eight e;
    e.codes = kvp_codes_of(x.x, above) +
              16 * (kvp_codes_of(x.y, above) + 16 * (kvp_codes_of(x.z, above) + 16 * kvp_codes_of(x.w, above)));
    e.middle = make_uint2(kvp_permute(x.x, x.y, 0x6420), kvp_permute(x.z, x.w, 0x6420));
    u32 codes = e.codes & 0x77777777;
    e.wrong.x = (table.first(codes) ^ kvp_permute(x.x, x.y, 0x7351)) & 0x7f7f7f7f;
    e.wrong.y = (table.second(codes) ^ kvp_permute(x.z, x.w, 0x7351)) & 0x7f7f7f7f;
    return e;
}
// The same where only `values` of the eight exist.
__device__ __noinline__ kvp_eight kvp_code_some(uint4 x, u32 above, kvp_table table, u32 values) {
    kvp_eight e = kvp_code(x, above, table);
    for (u32 i = values; i < 8; i++) {
        u32 byte = ((i & 1) << 1 | (i >> 1 & 1)) * 8, keep = ~(255u << byte);
        e.codes &= ~(15u << kvp_wire_shift(i));
        if (i < 4)
            e.middle.x &= ~(255u << 8 * i), e.wrong.x &= keep;
        else
            e.middle.y &= ~(255u << 8 * (i - 4)), e.wrong.y &= keep;
    }
    return e;
}

// Shared memory of a team that stores.
struct alignas(128) kvp_store_team {
    u8 stage[KVP_STORE_STAGES][KVP_STAGE], cell[KVP_STORE_CELLS][KVP_STAGE];
    u32 counts[3][8 + 128]; // of upper bytes; the first eight are 0
    u16 queue[KVP_WIRE_CELL / 16];
    kvp_cell_job job[KVP_STORE_STAGES + KVP_STORE_CELLS]; // the cells' own: while nothing is coded they are stages, too
    u64 gate[KVP_STORE_STAGES + KVP_STORE_CELLS];
    u64 sums[KVP_STORE_TEAM / 32];
    u32 queued, found; // vectors with escapes; escapes
};

// As kvp_wire_top: values that have a code << 7 | 127 - top, of the best top.
__device__ __forceinline__ u32 kvp_best_top(const u32 *counts, u32 lane) {
    const uint4 *four = (const uint4 *)counts + lane; // those before a top that has no code end the lane's sixteen
    uint4 p = four[0], q = four[1], r = four[2];
    u32 a[12] = {p.x, p.y, p.z, p.w, q.x, q.y, q.z, q.w, r.x, r.y, r.z, r.w}, zeros = counts[8], best = 0;
    u32 inside = a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        u32 top = 4 * lane + j;
        inside += a[8 + j];
        u32 one = (inside + (a[1 + j] > zeros ? a[1 + j] : zeros)) << 7 | (127 - top);
        if (top >= KVP_WIRE_LAST && one > best) best = one;
        inside -= a[2 + j];
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
// Brings a piece where a bulk copy cannot; zeros fill its last vector.
__device__ __noinline__ void kvp_take_by_bytes(u8 *to, u64 from, u32 bytes, u32 thread, u32 threads) {
    for (u32 at = 16 * thread; at < bytes; at += 16 * threads)
        *(uint4 *)(to + at) = kvp_get_bytes(from + at, bytes - at);
}

// One thread of a team, and the piece that the team stores.
struct kvp_storing {
    static constexpr u32 TEAM = KVP_STORE_TEAM, WARPS = TEAM / 32;
    kvp_store_team &t;
    u32 id, thread, warp, lane;
    u32 raw, values, whole; // of the piece: bytes, values, vectors of eight of them
    u32 top, last, room;    // the last: the most escapes with which a cell is shorter than its piece
    u32 dry, pass, looks;   // pieces in a row that did not shrink; pieces not to look at; pieces looked at

    __device__ __forceinline__ void wait() const { kvp_team_wait(id, TEAM); }

    __device__ __forceinline__ void take(u32 bytes) {
        raw = bytes, values = raw / 2, whole = values / 8;
        u64 none = kvp_wire_layout_of(2, raw, 0).bytes;
        room = none < raw ? (u32)(raw - none - 1) / 4 : 0;
    }

    // Counts one vector of eight, each time another of them, so that no row of columns is passed over; all, if few.
    __device__ __forceinline__ void count(const u8 *stage, u32 *counts) const {
        for (u32 i = thread;; i += TEAM) {
            u32 v = whole > 256 ? 8 * i + (i + i / 8) % 8 : i;
            if (v >= whole) break;
            uint4 x = *(const uint4 *)(stage + 16 * v);
            u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                atomicAdd(&counts[8 + (word[j] >> 8 & 127)], 1u);
                atomicAdd(&counts[8 + (word[j] >> 24 & 127)], 1u);
            }
        }
    }
    // Finds top; whether the piece shrinks, as far as was counted.
    __device__ __forceinline__ bool choose(const u32 *counts) {
        u32 best = kvp_best_top(counts, lane), inside = (best >> 7) * (whole > 256 ? 8 : 1);
        top = 127 - (best & 127);
        u32 below = top - KVP_WIRE_LAST;
        last = counts[8 + below] > counts[8] ? below : 0;
        return inside + room >= 8 * whole;
    }

    template <u32 MANY>
    __device__ __forceinline__ u64 some(const u8 *stage, u8 *cell, u32 v, const kvp_wire_layout &l,
                                        const kvp_table &table, u32 *escaped) const {
        uint4 x[MANY];
        u64 sum = 0;
#pragma unroll
        for (u32 i = 0; i < MANY; i++) x[i] = *(const uint4 *)(stage + 16 * (v + i * TEAM));
#pragma unroll
        for (u32 i = 0; i < MANY; i++) {
            u32 at = v + i * TEAM;
            kvp_eight e = kvp_code(x[i], (top + 1) * 0x00010001u, table);
            *(uint2 *)(cell + (u32)l.middle + 8 * at) = e.middle;
            *(u32 *)(cell + (u32)l.codes + 4 * at) = e.codes;
            sum += kvp_sum_of(x[i], at);
            if (e.wrong.x | e.wrong.y) *escaped |= 1u << i;
        }
        return sum;
    }
    __device__ __forceinline__ void queue(u32 v, u32 escaped) const {
        for (; escaped; escaped &= escaped - 1)
            t.queue[atomicAdd(&t.queued, 1u)] = (u16)(v + (__ffs(escaped) - 1) * TEAM);
    }

    // Writes the sections and queues the vectors that have escapes; returns what this thread adds to the checksum.
    __device__ __forceinline__ u64 code(const u8 *stage, u8 *cell) const {
        kvp_wire_layout l = kvp_wire_layout_of(2, raw, 0);
        kvp_table table(top, last);
        u64 sum = 0;
        u32 v = thread;
        for (; v + (KVP_STORE_HAND - 1) * TEAM < whole; v += KVP_STORE_HAND * TEAM) {
            u32 escaped = 0;
            sum += some<KVP_STORE_HAND>(stage, cell, v, l, table, &escaped);
            queue(v, escaped);
        }
        for (; v < whole; v += TEAM) {
            u32 escaped = 0;
            sum += some<1>(stage, cell, v, l, table, &escaped);
            queue(v, escaped);
        }
        if (v < (raw + 15) / 16) { // the last one, of less than eight values
            uint4 x = *(const uint4 *)(stage + 16 * v);
            kvp_eight e = kvp_code_some(x, (top + 1) * 0x00010001u, table, values % 8);
            if (values % 8) *(uint2 *)(cell + l.middle + 8 * v) = e.middle, *(u32 *)(cell + l.codes + 4 * v) = e.codes;
            sum += kvp_sum_of(x, v);
            queue(v, (e.wrong.x | e.wrong.y) != 0);
        }
        if (values % 32) { // zeros up to the next section
            u32 coded = (values + 7) / 8;
            if (l.middle + 8 * coded + 4 * thread < l.codes) *(u32 *)(cell + l.middle + 8 * coded + 4 * thread) = 0;
            if (l.codes + 4 * coded + 4 * thread < l.escapes) *(u32 *)(cell + l.codes + 4 * coded + 4 * thread) = 0;
        }
        return sum;
    }

    // The escapes of the vectors in the queue.
    __device__ __forceinline__ void list_escapes(const u8 *stage, u8 *cell, u32 queued) const {
        u32 *list = (u32 *)(cell + (u32)kvp_wire_layout_of(2, raw, 0).escapes);
        kvp_table table(top, last);
        for (u32 q = thread; q < queued; q += TEAM) {
            u32 v = t.queue[q];
            kvp_eight e = kvp_code_some(*(const uint4 *)(stage + 16 * v), (top + 1) * 0x00010001u, table,
                                        v < whole ? 8 : values % 8);
            u32 first = (e.wrong.x + 0x7f7f7f7f) & 0x80808080, second = (e.wrong.y + 0x7f7f7f7f) & 0x80808080;
            u32 many = __popc(first) + __popc(second), at = atomicAdd(&t.found, many);
            if (at + many > room) continue;
            for (; first | second; at++) {
                u32 byte = __ffs(first ? first : second) / 8 - 1, place = 8 * v + (first ? 0 : 4);
                place += (byte & 1) << 1 | byte >> 1;
                list[at] = kvp_wire_escape(place, stage[2 * place + 1]);
                if (first)
                    first &= first - 1;
                else
                    second &= second - 1;
            }
        }
    }

    // By one thread: the header of a cell, if it has one, and its note. Bytes that travel.
    __device__ __forceinline__ u32 finish(const kvp_wire_work &w, const kvp_cell_job &job, const u8 *stage, u8 *cell,
                                          bool coded) const {
        u32 found = t.found;
        u32 bytes = coded && found <= room ? (u32)kvp_wire_layout_of(2, raw, found).bytes : raw;
        bool summed = bytes < raw || w.check;
        u64 checksum = kvp_wire_seed(raw);
        for (u32 i = 0; i < WARPS && summed; i++) checksum += t.sums[i];
        if (!summed) checksum = 0;
        t.found = t.queued = 0;
        if (bytes < raw) {
            u32 about = KVP_WIRE_BF16 | top << 8 | last << 16 | kvp_wire_parity(KVP_WIRE_BF16, top, last) << 24;
            *(uint4 *)cell = make_uint4(KVP_WIRE_MAGIC, about, raw & 1 ? stage[raw - 1] : 0, found);
            *(uint4 *)(cell + 16) = make_uint4(raw, 0, (u32)checksum, (u32)(checksum >> 32));
            for (u32 i = bytes; i & 15; i += 4) *(u32 *)(cell + i) = 0; // behind the cell, in its block's place
        }
        if (job.note >= KVP_REFUSED)
            kvp_put16(job.note, make_uint4(bytes, summed, (u32)checksum, (u32)(checksum >> 32)));
        return bytes;
    }

    // Codes a piece, where that is asked for and pays. Afterwards all threads have done their part.
    __device__ __forceinline__ bool make(const kvp_wire_work &w, const u8 *stage, u8 *cell) {
        bool coded = w.type == KVP_WIRE_BF16 && room && !pass;
        if (coded) {
            u32 *counts = t.counts[looks % 3], *following = t.counts[++looks % 3];
            count(stage, counts);
            for (u32 i = thread; i < 8 + 128; i += TEAM) following[i] = 0;
            wait();
            coded = choose(counts);
            dry = coded ? 0 : dry + 1;
            u32 passed = dry < KVP_DRY ? 0 : (2u << (dry - KVP_DRY)) - 1; // 1, 3, 7 and so on
            pass = dry > KVP_DRY + 4 || passed > KVP_MOST_PASSED ? KVP_MOST_PASSED : passed;
        } else {
            wait();
            pass -= pass != 0;
        }
        if (!coded && !w.check) return false;
        u64 sum = coded ? code(stage, cell) : kvp_sum_of_stage(stage, raw, thread, TEAM);
        sum = kvp_sum_of_warp(sum);
        if (lane == 0) t.sums[warp] = sum;
        if (coded) {
            wait();
            list_escapes(stage, cell, t.queued);
            kvp_bulk_sees();
        }
        wait();
        return coded;
    }
};

// Of one warp: all pieces of its team as they are, without a checksum, through as many stages as the team has memory.
__device__ __forceinline__ void kvp_store_as_it_is(const kvp_wire_work &w, kvp_store_team &t,
                                                   kvp_cell_feed<false> &feed, u32 lane) {
    constexpr u32 stages = KVP_STORE_STAGES + KVP_STORE_CELLS, warps = KVP_STORE_TEAM / 32;
    u32 started = 0, due = kvp_clock_ns();
    if (lane == 0) {
        for (u32 i = 0; i < stages; i++) kvp_gate_open(&t.gate[i]);
        kvp_bulk_sees();
    }
    __syncwarp();
    feed.begin(w, lane);
    for (; started < stages && started < feed.mine; started++)
        feed.start(w, started, lane, t.job[started], t.stage[0] + started * KVP_STAGE, &t.gate[started]);
    for (u32 k = 0; k < feed.mine; k++) {
        const kvp_cell_job &job = t.job[k % stages];
        u8 *stage = t.stage[0] + k % stages * KVP_STAGE;
        kvp_gate_wait(&t.gate[k % stages], k / stages & 1);
        if (job.by_bytes) {
            kvp_take_by_bytes(stage, job.block, job.raw, lane, 32);
            __syncwarp();
            kvp_store_by_bytes(job.cell, stage, job.raw, lane, 32);
        }
        if (lane == 0) {
            if (job.note >= KVP_REFUSED) kvp_put16(job.note, make_uint4(job.raw, 0, 0, 0));
            if (w.pace) due = kvp_await_turn(due, (u32)((u64)job.raw * w.pace / warps >> 20));
            if (!job.by_bytes) kvp_bulk_out(job.cell, stage, job.raw);
            kvp_bulk_commit();
        }
        if (k && started < feed.mine) { // into the stage of the piece before, which has gone by now
            u32 into = (k - 1) % stages;
            if (lane == 0) kvp_bulk_read_all_but<1>();
            feed.start(w, started, lane, t.job[into], t.stage[0] + into * KVP_STAGE, &t.gate[into]);
            started++;
        }
    }
    if (lane == 0) kvp_bulk_done();
}

extern "C" __global__ void __launch_bounds__(KVP_STORE_TEAM *KVP_STORE_TEAMS, 1)
    kvp_coded_store(const kvp_wire_work w) {
    extern __shared__ __align__(128) u8 kvp_coded_shared[];
    constexpr u32 team = KVP_STORE_TEAM, stages = KVP_STORE_STAGES, cells = KVP_STORE_CELLS;
    u32 id = threadIdx.x / team, thread = threadIdx.x % team, lane = thread % 32, due = kvp_clock_ns();
    kvp_store_team &t = ((kvp_store_team *)kvp_coded_shared)[id];
    kvp_storing s = {t, id, thread, thread / 32, lane};
    kvp_cell_feed<false> feed;
    if (!feed.open(w, team, id)) return;
    if (w.type != KVP_WIRE_BF16 && !w.check) {
        if (s.warp == 0) kvp_store_as_it_is(w, t, feed, lane);
        return;
    }
    if (thread == 0) {
        for (u32 i = 0; i < stages; i++) kvp_gate_open(&t.gate[i]);
        t.queued = t.found = 0;
        kvp_bulk_sees();
    }
    for (u32 i = thread; i < 8 + 128; i += team) t.counts[0][i] = 0;
    s.wait();
    u32 started = 0, raw_before = 0; // a bit a piece: it went out of its stage
    if (s.warp == 0) {
        feed.begin(w, lane);
        for (; started < stages && started < feed.mine; started++)
            feed.start(w, started, lane, t.job[started], t.stage[started], &t.gate[started]);
    }
    for (u32 k = 0; k < feed.mine; k++) {
        const kvp_cell_job &job = t.job[k % stages];
        u8 *stage = t.stage[k % stages], *cell = t.cell[k % cells];
        kvp_gate_wait(&t.gate[k % stages], k / stages & 1);
        s.take(job.raw);
        bool by_bytes = job.by_bytes;
        if (by_bytes) {
            kvp_take_by_bytes(stage, job.block, s.raw, thread, team);
            s.wait();
        }
        if (thread == 0) kvp_bulk_read_all_but<cells - 1>(); // what lay in this cell's place has gone
        bool coded = s.make(w, stage, cell);
        u32 bytes = s.raw;
        if (by_bytes) {
            if (thread == 0) t.job[k % stages].bytes = s.finish(w, job, stage, cell, coded);
            s.wait();
            bytes = job.bytes;
            kvp_store_by_bytes(job.cell, bytes < s.raw ? cell : stage, bytes, thread, team);
        }
        if (s.warp) continue;
        if (thread == 0) {
            if (!by_bytes) {
                bytes = s.finish(w, job, stage, cell, coded);
                if (w.pace) due = kvp_await_turn(due, (u32)((u64)bytes * w.pace / s.WARPS >> 20));
                kvp_bulk_sees();
                kvp_bulk_out(job.cell, bytes < s.raw ? cell : stage, (bytes + 15) & ~15u);
            }
            kvp_bulk_commit();
        }
        raw_before = raw_before << 1 | (by_bytes || __shfl_sync(KVP_ALL, bytes, 0) == s.raw);
        for (; started < feed.mine && started - stages <= k; started++) {
            u32 into = started % stages;
            if (raw_before & 1 && into == k % stages) break; // it is being read; in the next round
            if (raw_before & 2 && thread == 0) kvp_bulk_read_all_but<1>();
            feed.start(w, started, lane, t.job[into], t.stage[into], &t.gate[into]);
        }
    }
    if (thread == 0) kvp_bulk_done();
}

// ---- load
// ------------------------------------------------------------------------------------------------------------

// Shared memory of a team that loads.
struct alignas(128) kvp_load_team {
    u8 stage[KVP_LOAD_STAGES][KVP_STAGE];
    kvp_cell_job job[KVP_LOAD_STAGES];
    u64 gate[KVP_LOAD_STAGES], done[KVP_LOAD_STAGES]; // the bytes have come; nobody reads them any more
    u64 sums[KVP_LOAD_STAGES][KVP_LOAD_TEAM / 32];
    u32 refused[KVP_LOAD_STAGES];
};

// Eight values at once; those that are escapes have a wrong upper byte.
__device__ __forceinline__ uint4 kvp_decode(uint2 middle, u32 codes, const kvp_table &table) {
    u32 plain = codes & 0x77777777, a = table.first(plain), b = table.second(plain), sign = 0x80008000;
    return make_uint4(
        kvp_permute(middle.x, a, 0x6140) | (codes << 12 & sign), kvp_permute(middle.x, a, 0x7352) | (codes << 8 & sign),
        kvp_permute(middle.y, b, 0x6140) | (codes << 4 & sign), kvp_permute(middle.y, b, 0x7352) | (codes & sign));
}

// What stands in the way of decoding a cell; 0: nothing seen yet.
__device__ __forceinline__ u32 kvp_refusal_of(const u8 *cell, u32 bytes, u32 raw, u64 checksum) {
    if (bytes < sizeof(kvp_wire_header)) return KVP_WIRE_SHORT;
    const kvp_wire_header *h = (const kvp_wire_header *)cell;
    if (h->magic != KVP_WIRE_MAGIC || h->type != KVP_WIRE_BF16) return KVP_WIRE_UNKNOWN;
    if (h->raw_bytes != raw) return KVP_WIRE_OTHER;
    if (!kvp_wire_sound(h->type, h->top, h->last, h->parity)) return KVP_WIRE_DAMAGED;
    if (kvp_wire_layout_of(2, raw, h->escapes).bytes != bytes) return KVP_WIRE_SHORT;
    if (*(const u32 *)h->tail >> 8 * (raw & 1)) return KVP_WIRE_DAMAGED;
    return h->checksum == checksum ? KVP_WIRE_WHOLE : KVP_WIRE_CHECKSUM;
}

// Brings the bytes of a cell where a bulk copy cannot.
__device__ __noinline__ void kvp_load_by_bytes(u8 *to, u64 from, u32 bytes, u32 thread, u32 threads) {
    for (u32 i = thread; i < bytes; i += threads) to[i] = *(const volatile u8 *)(from + i);
}

// A vector that is not whole, or whose address is no multiple of 16; those of its bytes that exist.
__device__ __noinline__ uint4 kvp_put_some(u64 to, uint4 x, u32 bytes, u32 tail) {
    u32 word[4] = {x.x, x.y, x.z, x.w};
    for (u32 i = 0; i < 4; i++) {
        u32 left = bytes > 4 * i ? bytes - 4 * i : 0;
        if (left < 4) word[i] &= (1u << 8 * left) - 1;
        if (left && left < 4 && (left & 1)) word[i] = (word[i] & ~(255u << 8 * (left - 1))) | tail << 8 * (left - 1);
    }
    x = make_uint4(word[0], word[1], word[2], word[3]);
    kvp_put_bytes(to, x, bytes);
    return x;
}

template <u32 MANY>
__device__ __forceinline__ u64 kvp_decode_some(const u8 *stage, u32 codes, u64 to, u32 v, const kvp_table &table) {
    uint2 middle[MANY];
    u32 code[MANY];
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < MANY; i++) {
        u32 at = v + i * KVP_LOAD_TEAM;
        middle[i] = *(const uint2 *)(stage + sizeof(kvp_wire_header) + 8 * at);
        code[i] = *(const u32 *)(stage + codes + 4 * at);
    }
#pragma unroll
    for (u32 i = 0; i < MANY; i++) {
        u32 at = v + i * KVP_LOAD_TEAM;
        uint4 x = kvp_decode(middle[i], code[i], table);
        kvp_put16(to + 16 * at, x);
        sum += kvp_sum_of(x, at);
    }
    return sum;
}

// This thread's share of a stage, into the block; returns what it adds to the checksum.
__device__ __forceinline__ u64 kvp_decode_stage(const u8 *stage, u64 to, u32 raw, u32 thread) {
    constexpr u32 team = KVP_LOAD_TEAM;
    const kvp_wire_header *h = (const kvp_wire_header *)stage;
    u32 whole = to & 15 ? 0 : raw / 16, codes = (u32)kvp_wire_layout_of(2, raw, 0).codes, v = thread;
    kvp_table table(h->top, h->last);
    u64 sum = 0;
    for (; v + (KVP_LOAD_HAND - 1) * team < whole; v += KVP_LOAD_HAND * team)
        sum += kvp_decode_some<KVP_LOAD_HAND>(stage, codes, to, v, table);
    for (; v < whole; v += team) sum += kvp_decode_some<1>(stage, codes, to, v, table);
    for (; v < (raw + 15) / 16; v += team) {
        uint2 middle = *(const uint2 *)(stage + sizeof(kvp_wire_header) + 8 * v);
        uint4 x = kvp_decode(middle, *(const u32 *)(stage + codes + 4 * v), table);
        sum += kvp_sum_of(kvp_put_some(to + 16 * v, x, raw - 16 * v, h->tail[0]), v);
    }
    return sum;
}

// The same for a block that lies in its cell as it is.
template <u32 MANY> __device__ __forceinline__ u64 kvp_raw_some(const u8 *stage, u64 to, u32 v, bool summed) {
    uint4 x[MANY];
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < MANY; i++) x[i] = *(const uint4 *)(stage + 16 * (v + i * KVP_LOAD_TEAM));
#pragma unroll
    for (u32 i = 0; i < MANY; i++) kvp_put16(to + 16 * (v + i * KVP_LOAD_TEAM), x[i]);
    for (u32 i = 0; i < MANY && summed; i++) sum += kvp_sum_of(x[i], v + i * KVP_LOAD_TEAM);
    return sum;
}
__device__ __forceinline__ u64 kvp_raw_stage(const u8 *stage, u64 to, u32 raw, u32 thread, bool summed) {
    constexpr u32 team = KVP_LOAD_TEAM;
    u32 whole = to & 15 ? 0 : raw / 16, v = thread;
    u64 sum = 0;
    for (; v + (KVP_LOAD_HAND - 1) * team < whole; v += KVP_LOAD_HAND * team)
        sum += kvp_raw_some<KVP_LOAD_HAND>(stage, to, v, summed);
    for (; v < whole; v += team) sum += kvp_raw_some<1>(stage, to, v, summed);
    for (; v < (raw + 15) / 16; v += team) {
        uint4 x = *(const uint4 *)(stage + 16 * v);
        sum += kvp_sum_of(kvp_put_some(to + 16 * v, x, raw - 16 * v, stage[raw - 1]), v);
    }
    return sum;
}

// An escape of a cell, and the byte of the block that it is.
struct kvp_escape {
    u32 place, upper;
    // Returns what it adds to the checksum, or sets `refused`.
    __device__ __forceinline__ u64 read(const u8 *stage, u32 raw, u32 at, u32 *refused) {
        kvp_wire_layout l = kvp_wire_layout_of(2, raw, 0);
        const kvp_wire_header *h = (const kvp_wire_header *)stage;
        u32 e = ((const u32 *)(stage + l.escapes))[at];
        place = e >> 8, upper = e & 255;
        u32 known = place < raw / 2 ? place : 0, code = *(const u32 *)(stage + l.codes + 4 * (known / 8));
        if (known != place || !kvp_wire_escapes(upper, code >> kvp_wire_shift(known) & 15, h->last)) {
            *refused = KVP_WIRE_DAMAGED, place = raw;
            return 0;
        }
        u64 less = (u64)((long long)(upper & 127) - h->last) * kvp_wire_weight(place / 2);
        return less << (place & 1 ? 24 : 8);
    }
    __device__ __forceinline__ void put(u64 block, u32 raw) const {
        if (place < raw) kvp_put1(block + 2 * place + 1, upper);
    }
};

// One thread of a team that loads; the last warp is the feeder.
struct kvp_loading {
    static constexpr u32 TEAM = KVP_LOAD_TEAM, WARPS = TEAM / 32, STAGES = KVP_LOAD_STAGES;
    kvp_load_team &t;
    u32 id, thread, warp, lane;

    __device__ __forceinline__ void wait() const { kvp_team_wait(id, TEAM); }

    // Writes the block of a stage but for `escape`; what stands in its way. What the threads add to the checksum is in
    // shared memory after the next wait.
    __device__ __forceinline__ u32 decode(const kvp_cell_job &job, const u8 *stage, u32 s, kvp_escape &escape) {
        u32 refusal = KVP_WIRE_WHOLE, raw = job.raw;
        u64 sum = 0, to = job.block;
        if (!job.bytes)
            refusal = KVP_WIRE_SHORT;
        else if (job.bytes == raw)
            sum = kvp_raw_stage(stage, to, raw, thread, job.summed);
        else
            refusal = kvp_refusal_of(stage, job.bytes, raw, job.checksum);
        if (!refusal && job.bytes < raw) {
            u32 count = ((const kvp_wire_header *)stage)->escapes, *refused = &t.refused[s];
            sum = kvp_decode_stage(stage, to, raw, thread);
            if (count > TEAM) wait(); // more than are held until the others have written
            for (u32 i = thread + TEAM; i < count; i += TEAM) {
                sum += escape.read(stage, raw, i, refused);
                escape.put(to, raw);
            }
            escape.place = raw;
            if (thread < count) sum += escape.read(stage, raw, thread, refused);
        }
        if (job.summed) {
            sum = kvp_sum_of_warp(sum);
            if (lane == 0) t.sums[s][warp] = sum;
        }
        return refusal;
    }

    // By one thread of the feeder: tells of a stage that does not hold its block.
    __device__ __forceinline__ void judge(const kvp_cell_job &job, u32 s) {
        u32 refusal = t.refused[s];
        t.refused[s] = KVP_WIRE_WHOLE;
        if (!refusal && job.summed) {
            u64 sum = kvp_wire_seed(job.raw);
            for (u32 i = 0; i < WARPS; i++) sum += t.sums[s][i];
            refusal = sum == job.checksum ? KVP_WIRE_WHOLE : KVP_WIRE_CHECKSUM;
        }
        if (refusal && job.note >= KVP_REFUSED) *(volatile u64 *)(job.entry + 16) = refusal;
    }

    __device__ __forceinline__ void feed(const kvp_wire_work &w, kvp_cell_feed<true> &cells) {
        cells.begin(w, lane);
        for (u32 k = 0; k < STAGES && k < cells.mine; k++) cells.start(w, k, lane, t.job[k], t.stage[k], &t.gate[k]);
        for (u32 k = 0; k < cells.mine; k++) {
            u32 s = k % STAGES;
            kvp_gate_wait(&t.done[s], k / STAGES & 1);
            if (lane == 0) judge(t.job[s], s);
            if (k + STAGES < cells.mine) cells.start(w, k + STAGES, lane, t.job[s], t.stage[s], &t.gate[s]);
        }
    }
};

extern "C" __global__ void __launch_bounds__((KVP_LOAD_TEAM + 32) * KVP_LOAD_TEAMS, 1)
    kvp_coded_load(const kvp_wire_work w) {
    extern __shared__ __align__(128) u8 kvp_coded_shared[];
    constexpr u32 team = KVP_LOAD_TEAM, stages = KVP_LOAD_STAGES;
    u32 id = threadIdx.x / (team + 32), thread = threadIdx.x % (team + 32), lane = thread % 32;
    kvp_load_team &t = ((kvp_load_team *)kvp_coded_shared)[id];
    kvp_loading l = {t, id, thread, thread / 32, lane};
    kvp_cell_feed<true> feed;
    if (!feed.open(w, team, id)) return;
    if (thread == 0) {
        for (u32 s = 0; s < stages; s++) kvp_gate_open(&t.gate[s]), kvp_gate_open(&t.done[s]), t.refused[s] = 0;
        kvp_bulk_sees();
    }
    kvp_team_wait(id, team + 32);
    if (l.warp == l.WARPS) {
        l.feed(w, feed);
        return;
    }
    for (u32 k = 0; k < feed.mine; k++) {
        u32 s = k % stages, refusal = KVP_WIRE_WHOLE;
        const kvp_cell_job &job = t.job[s];
        kvp_gate_wait(&t.gate[s], k / stages & 1);
        if (job.by_bytes && job.bytes) {
            kvp_load_by_bytes(t.stage[s], job.cell, job.bytes, thread, team);
            kvp_bulk_sees();
            l.wait();
        }
        u32 raw = job.raw;
        u64 block = job.block;
        kvp_escape escape = {raw, 0};
        bool as_it_is = job.bytes == raw && !job.summed && !job.by_bytes && !((block | raw) & 15);
        if (as_it_is && thread == 0) kvp_bulk_out(block, t.stage[s], raw), kvp_bulk_commit();
        if (!as_it_is) refusal = l.decode(job, t.stage[s], s, escape);
        l.wait(); // the stage has been read, or is about to be
        if (thread == 0) {
            if (as_it_is) kvp_bulk_read_all_but<0>();
            if (refusal) t.refused[s] = refusal;
            kvp_gate_pass(&t.done[s]);
        }
        escape.put(block, raw);
    }
    if (thread == 0) kvp_bulk_done();
}
