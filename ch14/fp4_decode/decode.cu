// out (M x N) = x (M x K, bf16) W^T for up to TOKENS tokens and MXFP4 weights W (N x K), on Hopper's tensor cores.
//
// The weights are the left operand of wgmma, which takes them from registers: 64 rows of W are 64 rows of a product of
// TOKENS columns. So each weight is decoded once, whatever the number of tokens. A CTA owns a tile of CONSUMERS x 64
// rows and a share of K. A step multiplies a slab of 128 columns, which is four blocks of 32 weights in each row.
//
// A ring of STAGES connects the first warp group with CONSUMERS others. A stage holds a slab of the codes, of the scales
// and of the tokens. One thread loads the codes and the tokens with the copy engine, as early as the ring has room. The
// warps 1 to 3 take every third slab and copy its scales. The consumers decode the codes into registers, and multiply.
//
// Lane l of a consumer's warp decodes block c = l % 4 of two rows, l / 4 and the row 8 below. A word of codes becomes
// four pairs: columns 0 and 4 of its eight, 1 and 5, 2 and 6, 3 and 7 (decode_word). A wgmma m64k16 expects two pairs
// per lane and row. So the word w of all lanes makes two wgmma, and the 16 places of K in the first of them are
//
//     place     0  1 |  2  3 |  4  5 |  6  7 |  8  9 | 10 11 | 12 13 | 14 15
//     block       0  |   1   |   2   |   3   |   0   |   1   |   2   |   3
//     column    0  4 |  0  4 |  0  4 |  0  4 |  1  5 |  1  5 |  1  5 |  1  5     of word w
//
// A sum over K may take its terms in any order. A small kernel, arrange_tokens, brings the tokens into this order first,
// and into the bytes that a stage receives.
//
// Each of the `splits` CTAs of a tile stores its sums. The last one adds them, always in the same order. (In a cluster
// they could add them through shared memory. But clusters of four CTAs that need an SM each do not fit on all SMs.)
// Sources: OCP MX v1.0, 5.3 and 5.4. PTX ISA, "wgmma" (which lane holds which element) and "mul" (bf16x2, subnormals).
//
// The macros, set with -D (DecodeConfig.constants in configs.py): TOKENS (8, 16, 32, 48 or 64), CONSUMERS (1 to 4),
// STAGES, and CTAS, how many CTAs share an SM.
#include "wgmma.cuh"

constexpr int SLAB = 128, ROWS = 64 * CONSUMERS, SUMS = TOKENS / 2;
constexpr u32 CODE_BYTES = ROWS * SLAB / 2, TOKEN_BYTES = TOKENS * SLAB * 2, SCALE_BYTES = ROWS * 4;
constexpr u32 RING_BYTES = STAGES * (CODE_BYTES + TOKEN_BYTES);
constexpr int COPIERS = 3;
static_assert(STAGES >= COPIERS, "a warp that copies may be at most one phase ahead of a barrier");
constexpr int THREADS = 128 * (1 + CONSUMERS);
// All threads start with an equal share of the registers. The first warp group keeps some, and the others get the rest.
constexpr int LOADER_REGISTERS = 40, SHARE_OF_REGISTERS = 65536 / CTAS / THREADS / 8 * 8;
constexpr int EQUAL_REGISTERS = SHARE_OF_REGISTERS > 248 ? 248 : SHARE_OF_REGISTERS;
constexpr int REST = (EQUAL_REGISTERS * (CONSUMERS + 1) - LOADER_REGISTERS) / CONSUMERS / 8 * 8;
constexpr int CONSUMER_REGISTERS = REST > 240 ? 240 : REST;

// The names of the first registers of d in PTX, and the registers themselves: inline PTX has no arrays.
#define NAMES_4 "%0, %1, %2, %3"
#define SUMS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define SUMS_8 SUMS_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_16 \
    SUMS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SUMS_24 \
    SUMS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_32 \
    SUMS_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

// d (64 x TOKENS) += A (64 x 16, in registers) B^T. A0 to A3 and B are the numbers of the operands after d.
#define WGMMA(N, R, A0, A1, A2, A3, B)                                              \
    if constexpr (TOKENS == N)                                                      \
        asm volatile(                                                               \
            "{\n .reg .pred p;\n setp.eq.u32 p, 0, 0;\n"                            \
            " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES_##R \
            "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n}"  \
            : SUMS_##R                                                              \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));

__device__ __forceinline__ void wgmma_m64k16_registers(float (&d)[SUMS], const u32 (&a)[4], u64 b) {
    WGMMA(8, 4, 4, 5, 6, 7, 8)
    WGMMA(16, 8, 8, 9, 10, 11, 12)
    WGMMA(32, 16, 16, 17, 18, 19, 20)
    WGMMA(48, 24, 24, 25, 26, 27, 28)
    WGMMA(64, 32, 32, 33, 34, 35, 36)
}

// Shared memory, in this order: tokens, codes, scales, barriers, and a flag per consumer.
extern __shared__ __align__(1024) char shared[];

struct Memory {
    u32 tokens, codes, scales, full, empty, flags;  // addresses in shared memory
};

__device__ __forceinline__ Memory divide_memory() {
    const u32 tokens = shared_address(shared), codes = tokens + STAGES * TOKEN_BYTES, scales = tokens + RING_BYTES;
    const u32 full = scales + STAGES * SCALE_BYTES, empty = full + 8 * STAGES;
    return {tokens, codes, scales, full, empty, empty + 8 * STAGES};
}

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ u32 load_shared_byte(u32 address) {
    u32 value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Copy 4 bytes when they arrive. Unlike cp_async_16, the copy signals a barrier (copies_arrive).
__device__ __forceinline__ void cp_async_4(u32 tile, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(tile), "l"(__cvta_generic_to_global(source))
                 : "memory");
}

// Arrive at a barrier once all earlier cp.async of this thread have landed.
__device__ __forceinline__ void copies_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Decode two of the eight codes of a word, times 2^-126: a code is s e e m. The mask chooses two codes that lie 16 bits
// apart. One multiplication makes two shifted copies of each, and the second mask keeps the sign of one and the
// magnitude of the other. Of code 0.5 the result is a subnormal.
//
//     bit       15  14 ... 9   8 7 6   5 ... 0
//     bf16       s  0  ... 0   e e m   0 ... 0
__device__ __forceinline__ u32 decode_pair(u32 codes, bool upper_nibbles) {
    return (upper_nibbles ? (codes & 0x00F000F0) * 0x0104u : (codes & 0x000F000F) * 0x1040u) & 0x81C081C0;
}

// Decode a word into pairs 0 to 3. `scale` is an E8M0 code. As a pair of bf16 it is 2^126 times too large, to make up for
// decode_pair. WIDE scales, of more than 2, do not fit into bf16 then, so they are multiplied separately. There scale 0 is
// 2^-127, a subnormal, and 255 is NaN.
template <bool WIDE>
__device__ __forceinline__ void decode_word(u32 word, u32 scale, u32& p0, u32& p1, u32& p2, u32& p3) {
    const u32 factor = scale * 0x00800080 + (!WIDE ? 0x3F003F00 : scale == 0 || scale == 255 ? 0x00400040 : 0);
    auto scaled = [&](u32 pair) { return multiply_bf16x2(WIDE ? multiply_bf16x2(pair, 0x7E807E80) : pair, factor); };
    p0 = scaled(decode_pair(word, false)), p1 = scaled(decode_pair(word, true));
    p2 = scaled(decode_pair(word >> 8, false)), p3 = scaled(decode_pair(word >> 8, true));
}

__device__ __forceinline__ u32 get_word(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Return the bytes of the tokens in the order of a stage, for all slabs.
__device__ __forceinline__ u64 arranged_bytes(int K) { return static_cast<u64>(K) * TOKENS * 2; }

// Arrange a slab of the tokens in the order that the header draws. Each CTA takes a slab, and each thread word `word` of
// the four blocks of a token. Pair i of these words is 16 bytes: unit 4 word + i of the 16 units of the token. Units 0
// to 7 are a row of the first box, and 8 to 15 of the second. Each box has the swizzle that wgmma expects.
extern "C" __global__ void __launch_bounds__(4 * TOKENS)
    arrange_tokens(const uint4* x, unsigned char* arranged, int M, int K) {
    griddepcontrol_launch_dependents();
    const int slab = blockIdx.x, token = threadIdx.x / 4, word = threadIdx.x % 4;
    griddepcontrol_wait();
    uint4 block[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
        block[c] = token < M ? __ldg(x + (static_cast<u64>(token) * K + slab * SLAB) / 8 + word + 4 * c)
                             : make_uint4(0, 0, 0, 0);
    auto pick = [&](u32 uint4::* low, u32 uint4::* high, u32 selector, int i) {
        const u32 offset = token * 128 + (word % 2 * 4 + i) * 16;
        unsigned char* box = arranged + static_cast<u64>(slab) * TOKEN_BYTES + word / 2 * (TOKENS * 128);
        *reinterpret_cast<uint4*>(box + swizzle_offset(offset, 128)) = make_uint4(
            __byte_perm(block[0].*low, block[0].*high, selector), __byte_perm(block[1].*low, block[1].*high, selector),
            __byte_perm(block[2].*low, block[2].*high, selector), __byte_perm(block[3].*low, block[3].*high, selector));
    };
    pick(&uint4::x, &uint4::z, 0x5410, 0), pick(&uint4::x, &uint4::z, 0x7632, 1);
    pick(&uint4::y, &uint4::w, 0x5410, 2), pick(&uint4::y, &uint4::w, 0x7632, 3);
}

// Store the sums of one of the `splits` CTAs of a tile. The last to arrive adds all sums in their order; it gets true.
__device__ __forceinline__ bool reduce_splits(float (&acc)[SUMS], float4* parts, u32* arrivals, u32 flag, int tile,
                                              int split, int splits) {
    const u32 consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
    float4* first = parts + (static_cast<u64>(tile) * CONSUMERS + consumer) * splits * (32 * SUMS) + thread;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        __stcg(first + (split * SUMS + i) * 32, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
    named_barrier_sync(1 + consumer, 128);
    if (thread == 0) {
        __threadfence();  // the barrier and the fence order the sums of all threads before the arrival
        const u32 arrived = atomicAdd(arrivals + tile * CONSUMERS + consumer, 1);
        __threadfence();
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(arrived) : "memory");
    }
    named_barrier_sync(1 + consumer, 128);
    u32 arrived;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(arrived) : "r"(flag) : "memory");
    if (arrived != splits - 1) return false;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i] = 0;
    // Every load takes long, so those of two CTAs are under way at the same time.
#pragma unroll 2
    for (int other = 0; other < splits; ++other)
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float4 sum = __ldcg(first + (other * SUMS + i) * 32);
            acc[i] += sum.x, acc[i + 1] += sum.y, acc[i + 2] += sum.z, acc[i + 3] += sum.w;
        }
    if (thread == 0) arrivals[tile * CONSUMERS + consumer] = 0;  // for the next launch
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    decode_wgmma(const __grid_constant__ TensorMap weight_map, const unsigned char* scales, unsigned short* out,
                 unsigned char* work, u32* arrivals, int M, int N, int K, int splits) {
    const Memory memory = divide_memory();
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(memory.full + 8 * s, 1 + 32);  // the thread that loads, and a warp that copies scales
            mbarrier_init(memory.empty + 8 * s, 4 * CONSUMERS);
        }
        fence_mbarrier_init();
        prefetch_tensormap(weight_map);
    }
    __syncthreads();
    griddepcontrol_launch_dependents();
    const int tile = blockIdx.x / splits, split = blockIdx.x % splits, slabs = K / SLAB, row = tile * ROWS;
    const int first = static_cast<long long>(slabs) * split / splits;
    const int last = static_cast<long long>(slabs) * (split + 1) / splits;
    Ring<STAGES> state;
    if (warp < 4) {
        warpgroup_reg_dealloc<LOADER_REGISTERS>();
        auto load_tokens = [&](int slab) {
            bulk_load(memory.tokens + state.stage * TOKEN_BYTES, work + static_cast<u64>(slab) * TOKEN_BYTES,
                      TOKEN_BYTES, memory.full + 8 * state.stage);
        };
        for (int slab = first; slab < last; ++slab, state.advance()) {
            const u32 ready = memory.full + 8 * state.stage, empty = memory.empty + 8 * state.stage;
            if (threadIdx.x == 0) {
                mbarrier_wait(empty, state.phase ^ 1);  // a new stage is empty
                mbarrier_arrive_expect_tx(ready, CODE_BYTES + TOKEN_BYTES);
                tma_load_2d(memory.codes + state.stage * CODE_BYTES, weight_map, slab * SLAB / 2, row, ready);
                if (slab >= first + STAGES) load_tokens(slab);
                else if (slab == last - 1 || slab == first + STAGES - 1) {
                    // The weights of the first stages are on their way. The tokens come from the kernel before.
                    griddepcontrol_wait();
                    state = Ring<STAGES>();
                    for (int early = first; early < slab; ++early, state.advance()) load_tokens(early);
                    load_tokens(slab);
                }
            } else if (warp > 0 && (slab - first) % COPIERS == warp - 1) {
                mbarrier_wait(empty, state.phase ^ 1);
                for (int i = lane; i < ROWS; i += 32)
                    cp_async_4(memory.scales + state.stage * SCALE_BYTES + 4 * i,
                               scales + static_cast<u64>(min(row + i, N - 1)) * (K / 32) + slab * 4);
                copies_arrive(ready);
            }
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const u32 consumer = warp / 4 - 1, upper = consumer * 64 + warp % 4 * 16 + lane / 4;  // and the row 8 below
        float acc[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) acc[i] = 0;
        u32 used_stage = 0;
        for (int slab = first; slab < last; ++slab) {
            mbarrier_wait(memory.full + 8 * state.stage, state.phase);
            const u32 codes = memory.codes + state.stage * CODE_BYTES + upper * 64 + lane % 4 * 16;
            const u32 scale = memory.scales + state.stage * SCALE_BYTES + upper * 4 + lane % 4;
            const uint4 above = load_shared_16(codes), below = load_shared_16(codes + 8 * 64);
            const u32 scale_above = load_shared_byte(scale), scale_below = load_shared_byte(scale + 8 * 4);
            const bool is_wide = __any_sync(~0u, max(scale_above, scale_below) > 128);
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                u32 a[2][4];  // the left operands of two wgmma: rows above and below, pairs 0 and 1 or 2 and 3
                const u32 word_above = get_word(above, word), word_below = get_word(below, word);
                if (is_wide) {
                    decode_word<true>(word_above, scale_above, a[0][0], a[0][2], a[1][0], a[1][2]);
                    decode_word<true>(word_below, scale_below, a[0][1], a[0][3], a[1][1], a[1][3]);
                } else {
                    decode_word<false>(word_above, scale_above, a[0][0], a[0][2], a[1][0], a[1][2]);
                    decode_word<false>(word_below, scale_below, a[0][1], a[0][3], a[1][1], a[1][3]);
                }
                const u32 box = memory.tokens + state.stage * TOKEN_BYTES + word / 2 * (TOKENS * 128);
                const u64 b = wgmma_descriptor(box) + word % 2 * 4;
                warpgroup_fence_operand(acc);
                wgmma_fence();
                wgmma_m64k16_registers(acc, a[0], b);
                wgmma_m64k16_registers(acc, a[1], b + 2);
                wgmma_commit();
                // Three words may be under way, each with registers of its own. So the word that is decoded next finds
                // the registers free that it had in the last slab. And after the third word that slab has been read.
                wgmma_wait<3>();
                if (word == 2 && slab > first && lane == 0) mbarrier_arrive(memory.empty + 8 * used_stage);
            }
            used_stage = state.stage;
            state.advance();
        }
        wgmma_wait<0>();
        warpgroup_fence_operand(acc);
        griddepcontrol_wait();  // the previous kernel may still read `out` and use the work space
        float4* parts = reinterpret_cast<float4*>(work + arranged_bytes(K));
        if (splits > 1 && !reduce_splits(acc, parts, arrivals, memory.flags + 4 * consumer, tile, split, splits))
            return;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            const int n = row + upper + i % 4 / 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (n < N && token < M) out[static_cast<u64>(token) * N + n] = pack_bf16x2(acc[i], 0);
        }
    }
}
