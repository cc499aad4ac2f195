// The coded copy kernels on ordinary memory: every thread of a CTA is a fiber, and who goes next is drawn by lot, so
// that a wait that is missing shows. Bulk copies are made as late as their waits allow. `kvp_wire_work` and the memory
// that it names are a GPU's; what the GPU does at a time, and how fast, only a GPU shows.
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "wire.h"

#define __global__
#define __device__
#define __noinline__
#define __forceinline__ inline
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct dim3_ {
    uint32_t x;
};
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

alignas(128) uint8_t kvp_coded_shared[232448];

namespace {
constexpr size_t STACK = 64 << 10;
struct Copy {
    void *to;
    const void *from;
    uint32_t bytes;
    unsigned long long *gate;
    uint32_t group;
};
struct Fiber {
    ucontext_t context;
    char *stack;
    bool done;
    uint32_t thread, group = 0;
    std::vector<Copy> out;
};
std::vector<Fiber> fibers;
std::vector<Copy> coming;
ucontext_t scheduler;
Fiber *self;
uint64_t seed;
uint32_t random_below(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(seed >> 33) % n;
}
struct Meeting {
    uint32_t here = 0, turn = 0;
};
Meeting teams[16], warps[32];
uint64_t said[32][32];
void yield() { swapcontext(&self->context, &scheduler); }
void meet(Meeting &m, uint32_t many) {
    uint32_t turn = m.turn;
    if (++m.here == many) {
        m.here = 0, m.turn++;
        return;
    }
    while (m.turn == turn) yield();
}
template <class F> auto together(uint64_t mine, F read) {
    uint32_t warp = self->thread / 32, lane = self->thread % 32;
    said[warp][lane] = mine;
    meet(warps[warp], 32);
    auto result = read(said[warp], lane);
    meet(warps[warp], 32);
    return result;
}
void send(Fiber &f, uint32_t keep) {
    std::vector<Copy> rest;
    for (auto &c : f.out)
        if (c.group + keep < f.group)
            memcpy(c.to, c.from, c.bytes);
        else
            rest.push_back(c);
    f.out = rest;
}
} // namespace

static dim3_ blockIdx, gridDim, blockDim;
#define threadIdx (dim3_{self->thread})

static void __syncwarp() {
    together(0, [](uint64_t *, uint32_t) { return 0; });
}
template <class T> static T __shfl_xor_sync(uint32_t, T v, int d) {
    return together(v, [=](uint64_t *all, uint32_t lane) { return T(all[lane ^ d]); });
}
template <class T> static T __shfl_up_sync(uint32_t, T v, int d) {
    return together(v, [=](uint64_t *all, uint32_t lane) { return T(int(lane) >= d ? all[lane - d] : all[lane]); });
}
template <class T> static T __shfl_sync(uint32_t, T v, int from) {
    return together(v, [=](uint64_t *all, uint32_t) { return T(all[from]); });
}
static uint32_t __ballot_sync(uint32_t, bool v) {
    return together(v, [](uint64_t *all, uint32_t) {
        uint32_t bits = 0;
        for (int i = 0; i < 32; i++) bits |= uint32_t(all[i]) << i;
        return bits;
    });
}
static uint32_t __reduce_max_sync(uint32_t, uint32_t v) {
    return together(v, [](uint64_t *all, uint32_t) {
        uint64_t best = 0;
        for (int i = 0; i < 32; i++) best = all[i] > best ? all[i] : best;
        return uint32_t(best);
    });
}
static uint32_t __reduce_add_sync(uint32_t, uint32_t v) {
    return together(v, [](uint64_t *all, uint32_t) {
        uint64_t sum = 0;
        for (int i = 0; i < 32; i++) sum += all[i];
        return uint32_t(sum);
    });
}
static uint32_t __popc(uint32_t v) { return uint32_t(__builtin_popcount(v)); }
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t which) {
    uint64_t both = uint64_t(b) << 32 | a;
    uint32_t made = 0;
    for (int i = 0; i < 4; i++) made |= uint32_t(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return made;
}
static int __ffs(uint32_t v) { return __builtin_ffs(int(v)); }
static uint32_t atomicAdd(uint32_t *at, uint32_t n) { return (*at += n) - n; }

#define KVP_CODED_MACHINE
static void kvp_team_wait(uint32_t id, uint32_t threads) { meet(teams[id], threads); }
// Of a gate: in the upper half the phases that have passed.
static void kvp_gate_open(unsigned long long *gate) { *gate = 0; }
static void kvp_gate_pass(unsigned long long *gate) { ++*gate; }
static void kvp_gate_wait(unsigned long long *gate, uint32_t parity) {
    while ((*gate & 1) == parity) {
        for (size_t i = 0; i < coming.size(); i++)
            if (coming[i].gate == gate) {
                Copy c = coming[i];
                coming.erase(coming.begin() + long(i));
                memcpy(c.to, c.from, c.bytes);
                ++*gate;
                break;
            }
        if ((*gate & 1) == parity) yield();
    }
}
static void check_bulk(const void *a, const void *b, uint32_t bytes) {
    if ((uintptr_t(a) | uintptr_t(b) | bytes) & 15 || !bytes) abort();
}
static void kvp_bulk_in(void *to, uint64_t from, uint32_t bytes, unsigned long long *gate) {
    check_bulk(to, (void *)from, bytes);
    coming.push_back({to, (void *)from, bytes, gate, 0});
}
static void kvp_bulk_out(uint64_t to, const void *from, uint32_t bytes) {
    check_bulk((void *)to, from, bytes);
    self->out.push_back({(void *)to, from, bytes, nullptr, self->group});
}
static void kvp_bulk_commit() { self->group++; }
template <uint32_t KEEP> static void kvp_bulk_read_all_but() { send(*self, KEEP); }
static void kvp_bulk_done() { send(*self, 0); }
static void kvp_bulk_sees() {}
static uint4 kvp_get16(uint64_t p) {
    if (p & 15) abort();
    uint4 v;
    memcpy(&v, (void *)p, 16);
    return v;
}
static void kvp_put16(uint64_t p, uint4 v) {
    if (p & 15) abort();
    memcpy((void *)p, &v, 16);
}
static void kvp_put1(uint64_t p, uint32_t v) { *(uint8_t *)p = uint8_t(v); }
static uint32_t kvp_permute(uint32_t a, uint32_t b, uint32_t which) {
    if (which & 0x8888) abort(); // that would repeat a sign
    return __byte_perm(a, b, which);
}
static uint32_t kvp_not_and(uint32_t a, uint32_t b) { return ~(a & b); }
static uint32_t kvp_add_min16(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t both = 0;
    for (int i = 0; i < 32; i += 16) {
        uint16_t sum = uint16_t((a >> i) + (b >> i)), most = uint16_t(c >> i);
        both |= uint32_t(sum < most ? sum : most) << i;
    }
    return both;
}
static uint64_t kvp_get8(uint64_t p) {
    uint64_t v;
    memcpy(&v, (void *)p, 8);
    return v;
}
static uint32_t kvp_clock_ns() {
    static uint32_t clock;
    return clock += 50;
}

#include "coded.cu"
#include "image.cu"

static std::function<void()> body;
static void enter() {
    body();
    self->done = true;
    swapcontext(&self->context, &scheduler);
}

// Runs `body` in every thread of a launch: 0, or 1 where threads wait for one another for ever.
static int run(uint32_t threads, uint32_t ctas, uint64_t lot) {
    gridDim.x = ctas, blockDim.x = threads, seed = lot;
    for (uint32_t cta = 0; cta < ctas; cta++) {
        blockIdx.x = cta;
        memset(kvp_coded_shared, 0xa5, sizeof kvp_coded_shared);
        for (auto &m : teams) m = {};
        for (auto &m : warps) m = {};
        fibers.assign(threads, {});
        for (uint32_t i = 0; i < threads; i++) {
            Fiber &f = fibers[i];
            f.thread = i, f.stack = (char *)malloc(STACK);
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack, f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
            makecontext(&f.context, enter, 0);
        }
        uint32_t left = threads;
        for (uint64_t turns = 0; left; turns++) {
            if (turns > 40000) return 1;
            uint32_t at = random_below(threads), step = 2 * random_below(threads / 2) + 1;
            for (uint32_t i = 0; i < threads; i++, at = (at + step) % threads) {
                if (fibers[at].done) continue;
                self = &fibers[at];
                swapcontext(&scheduler, &self->context);
                if (fibers[at].done) left--;
            }
        }
        for (auto &f : fibers) free(f.stack);
    }
    return 0;
}
extern "C" __attribute__((visibility("default"))) int coded_run(int store, const kvp_wire_work *work, uint32_t ctas,
                                                                uint64_t lot) {
    static_assert(sizeof(kvp_store_team) * KVP_STORE_TEAMS <= sizeof kvp_coded_shared);
    static_assert(sizeof(kvp_load_team) * KVP_LOAD_TEAMS <= sizeof kvp_coded_shared);
    kvp_wire_work w = *work;
    body = [=] { store ? kvp_coded_store(w) : kvp_coded_load(w); };
    return run(store ? KVP_STORE_TEAM * KVP_STORE_TEAMS : (KVP_LOAD_TEAM + 32) * KVP_LOAD_TEAMS, ctas, lot);
}
extern "C" __attribute__((visibility("default"))) int coded_unpack(const kvp_wire_unpacking *work, uint32_t ctas,
                                                                   uint64_t lot) {
    kvp_wire_unpacking w = *work;
    body = [=] { kvp_coded_unpack(w); };
    return run(KVP_LOAD_TEAM, ctas, lot);
}
extern "C" __attribute__((visibility("default"))) uint32_t unpack_shared_bytes() { return sizeof(kvp_unpack_team); }
extern "C" __attribute__((visibility("default"))) uint32_t coded_shared_bytes(int store) {
    return store ? sizeof(kvp_store_team) * KVP_STORE_TEAMS : sizeof(kvp_load_team) * KVP_LOAD_TEAMS;
}
