// The copy kernels, and a memory-bound kernel to weigh them with. Compiled at run time by NVRTC: no header is included.
//
//   kvp_copy_load, kvp_copy_store   bulk asynchronous copies (compute capability 9.0 on), host to device and back
//   kvp_copy_registers              any GPU: vector loads and stores
//   kvp_read                        reads device memory as fast as it can, as a decode step reads its weights
//
// Work is dealt out in units: at most `unit` bytes of one entry of the list. Chunks of neighbouring units go round the
// warps of all CTAs. Each warp reads the entries of its next chunk, which lie in host memory, while it moves this one.
//
// Bulk: lane 0 of each warp drives a ring of stages in shared memory. A piece is loaded into a stage and, once it has
// come, stored from there; `keep` stores may still be reading their stages while all other stages are being loaded.
//
// Paced: stores that saturate the link stand in a queue behind the GPU's memory, and the end of every kernel beside them
// waits until that queue is empty (`kvprobe calibrate` measures it: work "short"). Each warp keeps to its share of a rate
// a little below the link's, where none builds up. Most stages are left to the reads of device memory, which are slow
// while the model reads it.
// What is no multiple of 16 bytes at the ends is moved by bytes; what is not aligned alike on both sides, by registers.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct kvp_entry { // kvp_copy
    u64 dst, src, bytes;
};

struct kvp_work { // launch() in copy_methods.c
    u64 list;
    u32 total;  // units of all entries
    u32 units;  // units of one entry; those beyond its end are empty
    u32 unit;   // bytes, a multiple of 16
    u32 chunk;  // units that a warp takes at a time, at most 32
    u32 stage;  // bytes of one stage, a multiple of 16
    u32 stages; // of one warp: 2, 4, 8 or 16
    u32 pace;   // least ns in which one warp stores 1 MiB; 0: as fast as it can
};

#define KVP_FULL 0xffffffffu
#define KVP_SLACK_NS 4000u // of a rate that a warp may make up for
#define KVP_RING_HEADER 512 // barriers, then what each stage holds; RING_HEADER in copy_methods.c

__device__ __forceinline__ uint4 kvp_read16(u64 p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

template <class T> struct kvp_vector {
    static __device__ __forceinline__ T read(u64 p) { return *(const volatile T *)p; }
};
template <> struct kvp_vector<uint4> {
    static __device__ __forceinline__ uint4 read(u64 p) { return kvp_read16(p); }
};

// One warp, both sides aligned to T; the loads of a round are all under way before its first store.
template <class T, int DEEP> __device__ __forceinline__ void kvp_move(u64 dst, u64 src, u64 count, u32 lane) {
    for (u64 at = lane; at < count; at += 32 * DEEP) {
        T v[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; i++)
            if (at + 32 * i < count) v[i] = kvp_vector<T>::read(src + (at + 32 * i) * sizeof(T));
#pragma unroll
        for (int i = 0; i < DEEP; i++)
            if (at + 32 * i < count) ((T *)dst)[at + 32 * i] = v[i];
    }
}

template <class T, int DEEP> __device__ __forceinline__ void kvp_move_aligned(u64 dst, u64 src, u64 bytes, u32 lane) {
    u64 head = (0 - dst) & (sizeof(T) - 1);
    if (head > bytes) head = bytes;
    u64 body = (bytes - head) / sizeof(T), tail = (bytes - head) % sizeof(T), end = head + body * sizeof(T);
    if (lane < head)
        ((u8 *)dst)[lane] = *(const volatile u8 *)(src + lane);
    else if (lane >= 16 && lane - 16 < tail)
        ((u8 *)dst)[end + lane - 16] = *(const volatile u8 *)(src + end + lane - 16);
    kvp_move<T, DEEP>(dst + head, src + head, body, lane);
}

template <int DEEP> __device__ __forceinline__ void kvp_by_registers(u64 dst, u64 src, u64 bytes, u32 lane) {
    u32 apart = (u32)(dst ^ src) & 15;
    if (apart == 0)
        kvp_move_aligned<uint4, DEEP>(dst, src, bytes, lane);
    else if ((apart & 7) == 0)
        kvp_move_aligned<u64, DEEP>(dst, src, bytes, lane);
    else if ((apart & 3) == 0)
        kvp_move_aligned<u32, DEEP>(dst, src, bytes, lane);
    else if ((apart & 1) == 0)
        kvp_move_aligned<u16, DEEP>(dst, src, bytes, lane);
    else
        kvp_move<u8, DEEP>(dst, src, bytes, lane);
}

// One lane's entry as it was read: nothing is computed with it before its turn, so that nobody waits for the reading.
struct kvp_read_entry {
    u64 dst, src, bytes;
};

__device__ __forceinline__ kvp_read_entry kvp_entry_of(const kvp_work &w, u32 number, u32 lane) {
    kvp_read_entry e = {0, 0, 0};
    if (lane < w.chunk && number < w.total) {
        u64 at = w.list + (u64)(w.units == 1 ? number : number / w.units) * sizeof(kvp_entry);
        asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(e.dst) : "l"(at));
        asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(e.src) : "l"(at + 8));
        asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(e.bytes) : "l"(at + 16));
    }
    return e;
}

// Calls move(dst, src, bytes) with the whole warp for each of its units.
template <class Mover> __device__ __forceinline__ void kvp_walk(const kvp_work &w, Mover &mover) {
    u32 lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
    // neighbouring chunks on different CTAs, so that few of them keep all CTAs busy
    u32 chunks = (w.total + w.chunk - 1) / w.chunk, mine = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    if (mine >= chunks) return;
    kvp_read_entry next = kvp_entry_of(w, mine * w.chunk + lane, lane);
    for (u32 c = mine; c < chunks; c += warps) {
        u32 first = c * w.chunk, here = w.total - first < w.chunk ? w.total - first : w.chunk;
        kvp_read_entry now = next;
        if (c + warps < chunks) next = kvp_entry_of(w, (c + warps) * w.chunk + lane, lane);
        for (u32 i = 0; i < here; i++) {
            u64 dst = __shfl_sync(KVP_FULL, now.dst, i), src = __shfl_sync(KVP_FULL, now.src, i);
            u64 bytes = __shfl_sync(KVP_FULL, now.bytes, i);
            u64 offset = w.units == 1 ? 0 : (u64)((first + i) % w.units) * w.unit;
            if (offset >= bytes) continue;
            mover.move(dst + offset, src + offset, bytes - offset < w.unit ? (u32)(bytes - offset) : w.unit, lane);
        }
    }
}

struct kvp_registers {
    __device__ __forceinline__ void move(u64 dst, u64 src, u32 bytes, u32 lane) {
        kvp_by_registers<8>(dst, src, bytes, lane);
    }
};

extern "C" __global__ void __launch_bounds__(512) kvp_copy_registers(const kvp_work w) {
    kvp_registers mover;
    kvp_walk(w, mover);
}

#if __CUDA_ARCH__ >= 900

// At most N of the newest stores still read their stages.
__device__ __forceinline__ void kvp_stores_read(u32 n) {
    switch (n) {
    case 1:
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        break;
    case 2:
        asm volatile("cp.async.bulk.wait_group.read 2;" ::: "memory");
        break;
    case 4:
        asm volatile("cp.async.bulk.wait_group.read 4;" ::: "memory");
        break;
    default:
        asm volatile("cp.async.bulk.wait_group.read 8;" ::: "memory");
    }
}

__device__ __forceinline__ u32 kvp_now_ns() {
    u32 t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t));
    return t;
}

struct kvp_ring { // lane 0's
    u32 base;     // shared address of the warp's header; the stages follow it
    u32 stage, mask, keep;
    u32 pace;
    u32 loaded, stored;
    u32 due; // when the next store may go, ns

    __device__ __forceinline__ u32 barrier(u32 s) const { return base + 8 * s; }
    __device__ __forceinline__ u32 to(u32 s) const { return base + 128 + 8 * s; }
    __device__ __forceinline__ u32 size(u32 s) const { return base + 256 + 4 * s; }
    __device__ __forceinline__ u32 data(u32 s) const { return base + KVP_RING_HEADER + s * stage; }

    __device__ __forceinline__ void open() {
        for (u32 s = 0; s <= mask; s++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(s)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }

    __device__ __forceinline__ void await_turn(u32 bytes) {
        u32 t = kvp_now_ns();
        if ((int)(t - due) > (int)KVP_SLACK_NS) due = t - KVP_SLACK_NS;
        while ((int)(due - t) > 0) t = kvp_now_ns();
        due += (u32)((u64)bytes * pace >> 20);
    }

    __device__ __forceinline__ void store_oldest() {
        u32 s = stored & mask, parity = stored / (mask + 1) & 1, done = 0, bytes;
        u64 dst;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done)
                         : "r"(barrier(s)), "r"(parity)
                         : "memory");
        asm volatile("ld.shared.u64 %0, [%1];" : "=l"(dst) : "r"(to(s)) : "memory");
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bytes) : "r"(size(s)) : "memory");
        if (pace) await_turn(bytes);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(data(s)), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        stored++;
    }

    __device__ __forceinline__ void piece(u64 dst, u64 src, u32 bytes) {
        if (loaded - stored == mask + 1 - keep) store_oldest();
        // The stage's last store must have read it. Of those since, as many may be reading as are kept free.
        if (loaded > mask) kvp_stores_read(keep);
        u32 s = loaded & mask;
        asm volatile("st.shared.u64 [%0], %1;" ::"r"(to(s)), "l"(dst) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(size(s)), "r"(bytes) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(s)), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         data(s)),
                     "l"(src), "r"(bytes), "r"(barrier(s))
                     : "memory");
        loaded++;
    }

    __device__ __forceinline__ void move(u64 dst, u64 src, u32 bytes, u32 lane) {
        if (((dst ^ src) & 15) || bytes < 64) {
            kvp_by_registers<2>(dst, src, bytes, lane);
            return;
        }
        u32 head = (u32)(0 - dst) & 15, body = (bytes - head) & ~15u, tail = bytes - head - body;
        if (head | tail) {
            if (lane < head)
                ((u8 *)dst)[lane] = *(const volatile u8 *)(src + lane);
            else if (lane >= 16 && lane - 16 < tail)
                ((u8 *)dst)[head + body + lane - 16] = *(const volatile u8 *)(src + head + body + lane - 16);
        }
        if (lane == 0)
            for (u32 at = 0; at < body; at += stage)
                piece(dst + head + at, src + head + at, body - at < stage ? body - at : stage);
        __syncwarp();
    }

    __device__ __forceinline__ void close() {
        while (stored != loaded) store_oldest();
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
};

__device__ __forceinline__ void kvp_bulk(const kvp_work &w, u32 keep) {
    extern __shared__ __align__(128) u8 shared[];
    u32 bytes, all = (u32)__cvta_generic_to_shared(shared);
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    u32 base = all + threadIdx.x / 32 * (bytes / (blockDim.x / 32));
    kvp_ring ring = {base, w.stage, w.stages - 1, keep, w.pace, 0, 0, kvp_now_ns()};
    if (threadIdx.x % 32 == 0) ring.open();
    __syncwarp();
    kvp_walk(w, ring);
    if (threadIdx.x % 32 == 0) ring.close();
}

// Loads wait for the link at their reads: all stages but one are being read. Stores wait at their writes, or their turn.
extern "C" __global__ void __launch_bounds__(256) kvp_copy_load(const kvp_work w) { kvp_bulk(w, 1); }
extern "C" __global__ void __launch_bounds__(256) kvp_copy_store(const kvp_work w) {
    kvp_bulk(w, w.pace ? (w.stages + 3) / 4 : w.stages / 2);
}

#else

extern "C" __global__ void kvp_copy_load(const kvp_work) {}
extern "C" __global__ void kvp_copy_store(const kvp_work) {}

#endif

// Every CTA reads 16 KiB; the sum is written only where it is a value that it never is, so that the reads are kept.
extern "C" __global__ void __launch_bounds__(256) kvp_read(const uint4 *from, u32 *never) {
    const uint4 *p = from + (u64)blockIdx.x * 1024 + threadIdx.x;
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = p[i * 256];
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9e3779b9u) *never = sum;
}
