// out (M x N) = x (M x K, bf16) W^T for up to TOKENS tokens and MXFP4 weights W (N x K), on Hopper's tensor cores.
//
// The weights are the left operand of wgmma, which takes them from registers: 64 rows of W are 64 rows of a product of
// TOKENS columns. So each weight is decoded once, whatever the number of tokens. A CTA owns a tile of CONSUMERS x 64
// rows and a share of K. A step multiplies a slab of 128 columns, which is four blocks of 32 weights in each row.
//
// A ring of STAGES connects the first warp group with CONSUMERS others. A stage holds a slab of the codes, of the scales
// and of the tokens:
//
//     warp 0          loads the codes by TMA, as early as the ring has room
//     warps 1 to 3    take every third slab: they copy its scales, and bring its tokens into the order of the codes
//     consumers       decode the codes into registers, and multiply
//
// Lane l of a consumer's warp decodes block c = l % 4 of two rows, l / 4 and the row 8 below. A word of codes becomes
// four pairs: columns 0 and 4 of its eight, 1 and 5, 2 and 6, 3 and 7 (decode_word). A wgmma m64k16 expects two pairs
// per lane and row. So the word w of all lanes makes two wgmma, and the 16 places of K in the first of them are
//
//     place     0  1 |  2  3 |  4  5 |  6  7 |  8  9 | 10 11 | 12 13 | 14 15
//     block       0  |   1   |   2   |   3   |   0   |   1   |   2   |   3
//     column    0  4 |  0  4 |  0  4 |  0  4 |  1  5 |  1  5 |  1  5 |  1  5     of word w
//
// A sum over K may take its terms in any order, so the tokens are stored in this order, too (stage_tokens).
//
// The `splits` CTAs of a tile are a cluster. In the end each leaves its sums in shared memory, and adds those of some
// tokens of all CTAs, always in the same order. Sources: OCP MX v1.0, 5.3 and 5.4. PTX ISA, "wgmma" (which lane holds
// which element) and "mul" (bf16x2, subnormals).
//
// The macros, set with -D (DecodeConfig.constants in configs.py): TOKENS (8, 16, 32, 48 or 64), CONSUMERS (1 to 4),
// STAGES, and CTAS, how many CTAs share an SM.
#include "wgmma.cuh"

constexpr int SLAB = 128, SLABS = 2, ROWS = 64 * CONSUMERS, SUMS = TOKENS / 2;
constexpr u32 CODE_BYTES = ROWS * 64 * SLABS, TOKEN_BYTES = TOKENS * 256 * SLABS, SCALE_BYTES = ROWS * 4 * SLABS;
constexpr u32 RING_BYTES = STAGES * (CODE_BYTES + TOKEN_BYTES);
constexpr u32 SUMS_BYTES = 128 * CONSUMERS * 16;  // four sums of each thread
static_assert(SUMS / 4 * SUMS_BYTES <= RING_BYTES, "the sums lie in the ring");
constexpr int STAGERS = 3;
static_assert(STAGES >= STAGERS, "a warp that stages may be at most one phase ahead of a barrier");
constexpr int THREADS = 128 * (1 + CONSUMERS);
constexpr int PASSES = TOKENS / 8, BATCH = PASSES == 1 ? 1 : 2;  // a warp stages 8 tokens per pass
// All threads start with an equal share of the registers. The first warp group keeps some, and the others get the rest.
constexpr int STAGER_REGISTERS = 64, SHARE_OF_REGISTERS = 65536 / CTAS / THREADS / 8 * 8;
constexpr int EQUAL_REGISTERS = SHARE_OF_REGISTERS > 248 ? 248 : SHARE_OF_REGISTERS;
constexpr int REST = (EQUAL_REGISTERS * (CONSUMERS + 1) - STAGER_REGISTERS) / CONSUMERS / 8 * 8;
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

// Shared memory, in this order: tokens, codes, scales, and barriers. In the end the sums take the place of the ring.
extern __shared__ __align__(1024) char shared[];

struct Memory {
    u32 tokens, codes, scales, full, empty;  // addresses in shared memory
};

__device__ __forceinline__ Memory divide_memory() {
    const u32 tokens = shared_address(shared), codes = tokens + STAGES * TOKEN_BYTES, scales = tokens + RING_BYTES;
    const u32 full = scales + STAGES * SCALE_BYTES, empty = full + 8 * STAGES;
    return {tokens, codes, scales, full, empty};
}

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_16(u32 address, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
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
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(tile), "l"(__cvta_generic_to_global(source))
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

// Decode a word into pairs 0 to 3. WIDE scales, of more than 2, would not fit into bf16 together with the factor 2^126.
template <bool WIDE>
__device__ __forceinline__ void decode_word(u32 word, u32 scale, u32& p0, u32& p1, u32& p2, u32& p3) {
    auto scaled = [&](u32 pair) { return multiply_bf16x2(WIDE ? multiply_bf16x2(pair, 0x7E807E80) : pair, scale); };
    p0 = scaled(decode_pair(word, false)), p1 = scaled(decode_pair(word, true));
    p2 = scaled(decode_pair(word >> 8, false)), p3 = scaled(decode_pair(word >> 8, true));
}

// Return an E8M0 scale as a pair of bf16, times 2^126 unless WIDE. Scale 0 is 2^-127, a subnormal, and 255 is NaN.
template <bool WIDE>
__device__ __forceinline__ u32 scale_pair(u32 scale) {
    if constexpr (WIDE) return scale * 0x00800080 + (scale == 0 || scale == 255 ? 0x00400040 : 0);
    return scale * 0x00800080 + 0x3F003F00;
}

// Decode two words of each of two rows into the left operands of four wgmma.
template <bool WIDE>
__device__ __forceinline__ void decode_half(u32 (&a)[4][4], const u32 (&words)[4], u32 scale_above, u32 scale_below) {
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
        decode_word<WIDE>(words[w / 2], scale_pair<WIDE>(scale_above), a[w][0], a[w][2], a[w + 1][0], a[w + 1][2]);
        decode_word<WIDE>(words[2 + w / 2], scale_pair<WIDE>(scale_below), a[w][1], a[w][3], a[w + 1][1], a[w + 1][3]);
    }
}

// A warp stores a slab of the tokens in the order that the header draws: 16-byte unit i of word w holds pair i of the
// four blocks. Units 0 to 7 are a row of the first box, and 8 to 15 of the second; each box is swizzled for wgmma.
__device__ __forceinline__ void stage_tokens(u32 tile, const uint4* x, int M, int K, int first, u32 empty, u32 phase) {
    const u32 lane = threadIdx.x % 32, word = lane % 4;
    for (int pass = 0; pass < PASSES; pass += BATCH) {
        uint4 block[BATCH][4];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int token = (pass + i) * 8 + lane / 4;
            const uint4* row = x + (static_cast<u64>(token) * K + first) / 8 + word;
#pragma unroll
            for (int c = 0; c < 4; ++c) block[i][c] = token < M ? __ldg(row + 4 * c) : make_uint4(0, 0, 0, 0);
        }
        if (pass == 0) mbarrier_wait(empty, phase);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const u32 offset = ((pass + i) * 8 + lane / 4) * 128 + word % 2 * 64;
            auto store = [&](int unit, u32 selector, u32 uint4::* low, u32 uint4::* high) {
                u32 pair[4];
#pragma unroll
                for (int c = 0; c < 4; ++c) pair[c] = __byte_perm(block[i][c].*low, block[i][c].*high, selector);
                store_shared_16(tile + word / 2 * (TOKENS * 128) + swizzle_offset(offset + unit * 16, 128), pair[0],
                                pair[1], pair[2], pair[3]);
            };
            store(0, 0x5410, &uint4::x, &uint4::z);
            store(1, 0x7632, &uint4::x, &uint4::z);
            store(2, 0x5410, &uint4::y, &uint4::w);
            store(3, 0x7632, &uint4::y, &uint4::w);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
    decode_wgmma(const __grid_constant__ TensorMap weight_map, const uint4* x, const unsigned char* scales,
                 unsigned short* out, int M, int N, int K, int splits) {
    const Memory memory = divide_memory();
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(memory.full + 8 * s, 1 + 2 * 32);  // the codes; a warp's tokens and its copies of scales
            mbarrier_init(memory.empty + 8 * s, 4 * CONSUMERS);
        }
        fence_mbarrier_init();
        prefetch_tensormap(weight_map);
    }
    __syncthreads();
    griddepcontrol_launch_dependents();
    const int tile = blockIdx.x / splits, split = blockIdx.x % splits, slabs = K / SLAB / SLABS, row = tile * ROWS;
    const int first = static_cast<long long>(slabs) * split / splits;
    const int last = static_cast<long long>(slabs) * (split + 1) / splits;
    // A consumer's thread decodes and sums this row of the tile and the one 8 below.
    const int upper = (warp / 4 - 1) * 64 + warp % 4 * 16 + (lane / 4 % 2 * 4 + lane / 8);
    const u32 own_sums = memory.tokens + (threadIdx.x - 128) * 16;
    Ring<STAGES> state;
    if (warp < 4) {
        warpgroup_reg_dealloc<STAGER_REGISTERS>();
        if (warp > 0) griddepcontrol_wait();  // the kernel before may still write the tokens, but not the weights
        for (int slab = first; slab < last; ++slab, state.advance()) {
            const u32 ready = memory.full + 8 * state.stage, empty = memory.empty + 8 * state.stage;
            const u32 phase = state.phase ^ 1;  // a new stage is empty
            if (threadIdx.x == 0) {
                mbarrier_wait(empty, phase);
                mbarrier_arrive_expect_tx(ready, CODE_BYTES);
                tma_load_2d(memory.codes + state.stage * CODE_BYTES, weight_map, slab * 64 * SLABS, row, ready);
            } else if (warp > 0 && (slab - first) % STAGERS == warp - 1) {
                for (int part = 0; part < SLABS; ++part)
                    stage_tokens(memory.tokens + state.stage * TOKEN_BYTES + part * TOKENS * 256, x, M, K,
                                 (slab * SLABS + part) * SLAB, empty, phase);
                for (int i = lane; i < ROWS; i += 32)
                    cp_async_4(memory.scales + state.stage * SCALE_BYTES + 4 * SLABS * i,
                               scales + static_cast<u64>(min(row + i, N - 1)) * (K / 32) + slab * 4 * SLABS);
                copies_arrive(ready);
                fence_proxy_async();
                mbarrier_arrive(ready);
            }
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        float acc[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) acc[i] = 0;
        u32 used_stage = 0;
        for (int slab = first; slab < last; ++slab) {
            mbarrier_wait(memory.full + 8 * state.stage, state.phase);
#pragma unroll
          for (int part = 0; part < SLABS; ++part) {
            const u32 codes = memory.codes + state.stage * CODE_BYTES + upper * 128 + ((part * 4 + lane % 4) ^ (upper % 8)) * 16;
            const u32 scale = memory.scales + state.stage * SCALE_BYTES + upper * 8 + part * 4 + lane % 4;
            const uint4 above = load_shared_16(codes), below = load_shared_16(codes + 8 * 128);
            const u32 scale_above = load_shared_byte(scale), scale_below = load_shared_byte(scale + 8 * 8);
            const bool is_wide = __any_sync(~0u, max(scale_above, scale_below) > 128);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[4][4];  // the left operands of four wgmma: two words
                const u32 words[4] = {half ? above.z : above.x, half ? above.w : above.y, half ? below.z : below.x,
                                      half ? below.w : below.y};
                if (is_wide) decode_half<true>(a, words, scale_above, scale_below);
                else decode_half<false>(a, words, scale_above, scale_below);
                const u64 b = wgmma_descriptor(memory.tokens + state.stage * TOKEN_BYTES + part * TOKENS * 256 + half * TOKENS * 128);
                warpgroup_fence_operand(acc);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) wgmma_m64k16_registers(acc, a[i], b + 2 * i);
                wgmma_commit();
                wgmma_wait<1>();  // the products before these have read their registers and their stage
                if (part == 0 && half == 0 && slab > first && lane == 0) mbarrier_arrive(memory.empty + 8 * used_stage);
            }
          }
            used_stage = state.stage;
            state.advance();
        }
        wgmma_wait<0>();
        warpgroup_fence_operand(acc);
        named_barrier_sync(1, 128 * CONSUMERS);  // no consumer reads the ring any more, so the sums can lie there
#pragma unroll
        for (int i = 0; i < SUMS; i += 4)
            store_shared_16(own_sums + i / 4 * SUMS_BYTES, __float_as_uint(acc[i]), __float_as_uint(acc[i + 1]),
                            __float_as_uint(acc[i + 2]), __float_as_uint(acc[i + 3]));
    }
    __syncwarp();
    cluster_arrive(), cluster_wait();
    if (warp >= 4) {
        griddepcontrol_wait();  // the previous kernel may still read `out`
        for (int group = split; group < SUMS / 4; group += splits) {  // of eight tokens
            float4 sum = make_float4(0, 0, 0, 0);
            for (int rank = 0; rank < splits; ++rank) {
                const float4 other = load_shared_cluster(own_sums + group * SUMS_BYTES, rank);
                sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
            }
            const int token = group * 8 + lane % 4 * 2, n = row + upper;
            auto store = [&](int token, int n, float value) {
                if (n < N && token < M) out[static_cast<u64>(token) * N + n] = pack_bf16x2(value, 0);
            };
            store(token, n, sum.x), store(token + 1, n, sum.y);
            store(token, n + 8, sum.z), store(token + 1, n + 8, sum.w);
        }
    }
    cluster_arrive(), cluster_wait();  // no CTA ends while another one reads its sums
}
