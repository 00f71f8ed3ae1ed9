"""Which kernels break a rule of the programming model, and which only look as if they did?

All share one library: `case` chooses what the kernel does.
"""

import functools
import signal
import threading
import time

import pytest
import torch
from pythons import run_python

from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.runtime import cuda

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]

# Block 0 gives x to block 1 by a flag in memory.
FLAG = """int* f = (int*)(out + 128); if (blockIdx.x == 0) { out[t] = x[t]; FENCE __syncthreads();
if (t == 0) asm volatile("st.relaxed.gpu.global.s32 [%0], 1;" ::"l"(f) : "memory"); } else { int v = 0; if (t == 0)
do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(f) : "memory"); while (!v);
__syncthreads(); out[64 + t] = out[t]; }"""
# The block writes 256 bytes of out, and the copy engine loads them again.
LOAD_AGAIN = """__shared__ __align__(128) float s[64]; __shared__ u64 b;
if (t == 0) { mbarrier_init(shared_address(&b), 1); fence_mbarrier_init(); } out[64 + t] = x[63 - t]; BEFORE
__syncthreads(); if (t == 0) { AFTER
mbarrier_arrive_expect_tx(shared_address(&b), 256); bulk_load(shared_address(s), out + 64, 256, shared_address(&b)); }
mbarrier_wait(shared_address(&b), 0); out[t] = s[t];"""


def load_again(before="", after=""):
    fences = [
        each and f'asm volatile("fence.proxy.async{each[1:]};" ::: "memory");' for each in (before, after)
    ]
    return LOAD_AGAIN.replace("BEFORE", fences[0]).replace("AFTER", fences[1])


# A product of a swizzled tile that begins so many bytes behind memory that the kernel aligns to 1,024 bytes.
SWIZZLED = """__shared__ __align__(1024) int s[4096]; float d[4];
for (int i = t; i < 4096; i += 128) s[i] = 0; fence_proxy_async(); __syncthreads();
unsigned long long a = (unsigned long long)(shared_address(s) + %d) >> 4 | 64ull << 32 | 1ull << 62;
asm volatile("wgmma.fence.sync.aligned;\\n"
"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%%0, %%1, %%2, %%3}, %%4, %%4, 0, 1, 1, 0, 0;\\n"
"wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;"
: "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a) : "memory"); out[t] = d[0] + 1;"""
# One warp waits, and its thread 0 lets thread 128 overwrite the tile. PTX: wgmma.commit_group makes one group per warp
# group, and wgmma.wait_group waits for whole groups. CUTLASS relies on it: one thread of each gives a stage back.
FILL, PRODUCT = (SWIZZLED % 1024).split("__syncthreads();")
ONE_WARP_WAITS = f"""{FILL} __shared__ u64 b; if (t == 0) mbarrier_init(shared_address(&b), 1); __syncthreads();
if (t < 128) {{ {PRODUCT} if (t == 0) mbarrier_arrive(shared_address(&b)); }}
else if (t == 128) {{ mbarrier_wait(shared_address(&b), 0); s[256] = 1; }}"""
# A product whose A comes from registers, which change BEFORE or AFTER the wait.
FROM_REGISTERS = """__shared__ __align__(1024) int s[256]; float d[4]; u32 a[4] = {1, 2, 3, 4};
s[t] = s[t + 128] = 0; fence_proxy_async(); __syncthreads();
unsigned long long b = (unsigned long long)shared_address(s) >> 4 | 64ull << 32 | 1ull << 62;
asm volatile("wgmma.fence.sync.aligned;\\n"
"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%%0, %%1, %%2, %%3}, {%%4, %%5, %%6, %%7}, %%8, 0, 1, 1, 0;\\n"
"wgmma.commit_group.sync.aligned;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
: "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory"); BEFORE
asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); AFTER out[t] = d[0] + a[2] - 6;""".replace(
    "%%", "%"
)
# Half of the block meets at barrier 0, and then the whole block, with or without an ORDER between.
HALF = (
    """if (t < 64) { asm volatile("bar.sync 0, 64;" ::: "memory"); } ORDER __syncthreads(); out[t] = x[t];"""
)
# 0 and -3, one reduction after the other.
REDUCE = (
    "__shared__ __align__(16) int s[4]; int* o = (int*)(out + 4); if (t == 0) { for (int i = 0; i < 4; ++i) s[i] = -3;"
    "fence_proxy_async();"
    + "".join(
        f'asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{each} [%0], [%1], 16;\\n'
        'cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" :: "l"(o), "r"(shared_address(s)) : "memory");'
        for each in "min.s32 and.b32 xor.b32 max.u32 xor.b32 or.b32 xor.b32 inc.u32 max.s32 dec.u32 inc.u32".split()
    )
    + "out[0] = o[3]; }"
)
SETMAXNREG = 'asm volatile("setmaxnreg.%s.sync.aligned.u32 %d;");'
# Each block of a cluster of two reads what the other one has written.
PARTNER = """__shared__ float s[64]; s[t] = x[t]; __syncthreads(); FENCE
asm volatile("barrier.cluster.arrive.relaxed.aligned;\\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
float v; u32 at;
asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(s + t)), "r"(1 - blockIdx.x));
asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
cluster_arrive(); cluster_wait(); out[blockIdx.x * 64 + t] = v;"""
# The threads of a block exchange values behind an mbarrier.
MEET = """__shared__ float s[64]; __shared__ u64 b; if (t == 0) mbarrier_init(shared_address(&b), 64); __syncthreads();
s[t] = x[t]; asm volatile("mbarrier.arrive.SEM.cta.shared::cta.b64 _, [%0];" :: "r"(shared_address(&b)) : "memory");
mbarrier_wait(shared_address(&b), 0); out[t] = s[63 - t];"""
# A thread asks once whether a load has landed.
POLL = """__shared__ __align__(128) float s[64]; __shared__ u64 b; if (t == 0) { mbarrier_init(shared_address(&b), 1);
fence_mbarrier_init(); mbarrier_arrive_expect_tx(shared_address(&b), 256);
bulk_load(shared_address(s), x, 256, shared_address(&b)); } __syncthreads(); u32 done = 0;
LOOP asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
: "=r"(done) : "r"(shared_address(&b)) : "memory"); out[t] = s[t];"""


# name: what the kernel does, what the emulator says, and the launch where it is not one block of 64 threads
WRONG = {
    "sum in shared memory": (
        "__shared__ float s; if (t == 0) s = 0; __syncthreads(); s += x[t]; __syncthreads(); out[0] = s;",
        "a data race",
    ),
    "a load of what threads wrote": (load_again(), "without a proxy fence of global memory"),
    "a fence of shared memory before such a load": (
        load_again("+.shared::cta"),
        "reads byte 256 of the tensor `out`, which thread 0 has written in this launch without a proxy fence",
    ),
    "a read-only load of what threads wrote": (
        "out[t] = x[t]; __syncthreads(); out[64 + t] = __ldg(out + 63 - t);",
        r"byte \d+ of the tensor `out` through the cache for read-only data",
    ),
    "one poll of an mbarrier without a loop": (
        POLL.replace("LOOP", ""),
        "has not waited for its mbarrier|may still be landing",
    ),
    "a relaxed arrival at the barrier of the cluster": (
        PARTNER.replace("FENCE", ""),
        "shared address .* of block [01], .*nothing orders the two blocks",
        {"grid": 2, "cluster": 2},
    ),
    "a relaxed arrival at an mbarrier": (MEET.replace("SEM", "relaxed"), "a data race"),
    "an atomic for the block alone": (
        "atomicAdd_block((int*)out + t, 1);",
        "in the scope of its block",
        {"grid": 2},
    ),
    "an acquire for the block alone": (
        FLAG.replace("FENCE", "__threadfence();").replace("ld.acquire.gpu", "ld.acquire.cta"),
        "in the scope of its block",
        {"grid": 2},
    ),
    "a volatile flag without a fence of the reader": (
        "volatile int* f = (int*)(out + 128); if (blockIdx.x == 0) { out[t] = x[t]; __threadfence(); __syncthreads();"
        "if (t == 0) *f = 1; } else { if (t == 0) while (!*f); __syncthreads(); out[64 + t] = out[t]; }",
        "nothing orders the two blocks",
        {"grid": 2},
    ),
    "setmaxnreg of one warp": (
        f"if (t < 32) {SETMAXNREG % ('inc', 240)}",
        "have not executed the setmaxnreg of the others",
        {"block": 128},
    ),
    "setmaxnreg of more registers than there are": (
        f"if (t < 256) {SETMAXNREG % ('inc', 240)} else {SETMAXNREG % ('dec', 40)}",
        "waits for ever in setmaxnreg: the warp groups would have 520 registers per thread in sum",
        {"block": 384},
    ),
    "a prefetch of a part of 16 bytes": (
        'asm volatile("cp.async.bulk.prefetch.L2.global [%0], 20;" ::"l"(x) : "memory");',
        "of 20 bytes at .*: both must be multiples of 16",
    ),
    "barrier 0 for half of the block": (
        HALF.replace("ORDER", ""),
        "comes to barrier 0 in .*: __syncthreads\\(\\) is barrier 0",
        {"block": 128},
    ),
    "a tile that begins within its swizzle": (SWIZZLED % 128, "in row 1 of a swizzle", {"block": 128}),
    "sum in global memory": ("out[0] += x[t];", "a data race"),
    "histogram": ("__shared__ int h[8]; if (t < 8) h[t] = 0; __syncthreads(); h[t % 8]++;", "a data race"),
    "no barrier": ("__shared__ float s[64]; s[t] = x[t]; out[t] = s[63 - t];", "no barrier lies between"),
    "no second barrier": (
        "__shared__ float s[64];"
        "for (int i = 0; i < 2; ++i) { s[t] = x[t + i]; __syncthreads(); out[t] += s[63 - t]; }",
        "a data race",
    ),
    "no __syncwarp": (
        "__shared__ float s[64]; s[t] = x[t]; __syncwarp(); float v = s[t ^ 1]; s[t] = v;",
        "no __syncwarp",
    ),
    "a block writes its neighbour's part": (
        "int i = blockIdx.x * 64 + t; out[i] = x[i]; if (t == 63) out[(i + 1) % n] = -1;",
        "nothing orders the two blocks",
        {"grid": 3, "n": 192},
    ),
    "dynamic memory that is not given": (
        "extern __shared__ float d[]; d[t] = 1;",
        "dynamic shared memory, and the launch gives none",
    ),
    "too little dynamic memory": (
        "extern __shared__ float d[]; d[t] = 1;",
        "of which the launch gives 128",
        {"smem": 128},
    ),
    "an index past a shared array": ("__shared__ float s[32]; s[t] = 1;", "out of the bounds"),
    "an index past the end of a tile": (
        "__shared__ float s[2][32], other[64]; other[t] = 0; float* p = &s[0][0]; s[0][t + 1] = p - s[0];",
        "behind the end of its array",
    ),
    "a row past the end of a tile": (
        "__shared__ float s[2][8], other[99]; other[t] = s[t / 8][t % 8];",
        "of the bounds",
    ),
    "one past a tensor": ("out[n] = 1;", "0 bytes past the end of the tensor `out`", {"n": 256}),
    "one before a tensor": ("out[0] = x[n - 65];", "4 bytes before the start of the tensor `x`"),
    "a null pointer": ("float* p = n ? nullptr : x; p[3] = 1;", "null pointer"),
    "division": ("out[0] = 7 % (n - 64);", "divides an integer by zero"),
    "a misaligned load": ("out[0] = reinterpret_cast<float4*>(x + 1)->x;", "misaligned"),
    "a load that nobody waits for": (
        "__shared__ __align__(128) float s[64]; __shared__ u64 b; if (t == 0) {"
        "mbarrier_init(shared_address(&b), 1); fence_mbarrier_init(); for (int i = 0; i < 2; ++i) {"
        "mbarrier_arrive_expect_tx(shared_address(&b), 256); bulk_load(shared_address(s), x, 256, shared_address(&b));"
        "if (!i) mbarrier_wait(shared_address(&b), 0); } }",
        "still writ",
    ),
    "lanes that part before a cluster call": (
        "__shared__ u64 b; if (t == 0) mbarrier_init(shared_address(&b), 1); cluster_arrive(); cluster_wait();",
        "the lanes of its warp may have parted",
    ),
    "cp.async without a wait": (
        "__shared__ __align__(16) float s[256]; cp_async_16(shared_address(s + 4 * t), x + 4 * t);"
        "cp_async_commit(); out[t] = s[4 * t];",
        "cp_async_wait must come first",
    ),
    "cp.async without a commit": (
        "__shared__ __align__(16) float s[256]; cp_async_16(shared_address(s + 4 * t), x + 4 * t);"
        "cp_async_wait<0>(); out[t] = s[4 * t];",
        "cp_async_commit",
    ),
    "cp.async without a barrier": (
        "__shared__ __align__(16) float s[256]; cp_async_16(shared_address(s + 4 * t), x + 4 * t);"
        "cp_async_commit(); cp_async_wait<0>(); out[t] = s[252 - 4 * t];",
        "a data race",
    ),
    "a misaligned cp.async": (
        "__shared__ __align__(16) float s[256]; cp_async_16(shared_address(s + 4 * t), x + t);",
        "multiples of 16",
    ),
    "an mbarrier initialised twice": (
        "__shared__ u64 b; for (int i = 0; i < 2; ++i) { if (t == 0) mbarrier_init(shared_address(&b), 64);"
        "__syncthreads(); }",
        "a second time",
    ),
    "an mbarrier overwritten": (
        "__shared__ u64 b[2]; if (t == 0) mbarrier_init(shared_address(&b[1]), 1); __syncthreads();"
        "if (t == 32) b[1] = 7;",
        "mbarrier_inval must come first",
    ),
    "an mbarrier without a barrier": (
        "__shared__ u64 b; if (t == 0) mbarrier_init(shared_address(&b), 64);"
        "mbarrier_arrive(shared_address(&b));",
        "mbarrier",
    ),
    "a barrier without end": ("while (true) __syncthreads();", "a loop does not end"),
    "a flag without end": (
        "__shared__ volatile int f; if (t == 0) f = 0; __syncthreads(); while (!f) __nanosleep(20);",
        "polls memory that nobody changes",
        {"block": 32},
    ),
    "a flag without a fence": (
        "__shared__ volatile int f; __shared__ float v; if (t == 0) f = 0; __syncthreads();"
        "if (t == 40) { v = 3; f = 1; } if (t < 32) { while (!f); out[t] = v; }",
        "a data race",
    ),
    "the last block without a fence": (
        "__shared__ bool last; int* c = (int*)(out + 128); out[blockIdx.x] = x[blockIdx.x];"
        "if (t == 0) last = atomicAdd(c, 1) == int(gridDim.x) - 1; __syncthreads();"
        "if (last && t == 0) for (int i = 0; i < gridDim.x; ++i) out[200] += out[i];",
        "nothing orders the two blocks",
        {"grid": 4, "block": 32},
    ),
    "a fence for the block alone": (
        FLAG.replace("FENCE", "__threadfence_block();"),
        "nothing orders",
        {"grid": 2},
    ),
    "a release for the block alone": (
        FLAG.replace("FENCE", "").replace("st.relaxed.gpu", "st.release.cta"),
        "nothing orders",
        {"grid": 2},
    ),
    "a relaxed load without a fence": (
        FLAG.replace("FENCE", "__threadfence();").replace("ld.acquire", "ld.relaxed"),
        "nothing orders",
        {"grid": 2},
    ),
    "an atomic beside a plain read": (
        "__shared__ int s; if (t == 0) s = 0; __syncthreads(); atomicAdd(&s, 1); out[t] = s;",
        "a data race",
    ),
}
# name: what the kernel does, and out[0] afterwards
RIGHT = {
    "a flag with a fence": (FLAG.replace("FENCE", "__threadfence();"), 1, {"grid": 2}),
    "a flag that releases": (FLAG.replace("FENCE", "").replace("st.relaxed", "st.release"), 1, {"grid": 2}),
    "polls of an mbarrier": (POLL.replace("LOOP", "while (!done)"), 1),
    "a relaxed arrival behind a fence": (
        PARTNER.replace("FENCE", 'asm volatile("fence.acq_rel.cluster;" ::: "memory");'),
        1,
        {"grid": 2, "cluster": 2},
    ),
    "an arrival that releases": (MEET.replace("SEM", "release"), 64),
    "setmaxnreg of a producer and two consumers": (
        f"if (t < 256) {SETMAXNREG % ('inc', 232)} else {SETMAXNREG % ('dec', 40)} out[t % 256] = 1;",
        1,
        {"block": 384},
    ),
    "setmaxnreg that waits for registers of another warp group": (
        f"if (t >= 256) {SETMAXNREG % ('inc', 240)} __syncthreads();"
        f"if (t >= 256) {SETMAXNREG % ('dec', 24)} else {SETMAXNREG % ('inc', 240)} out[t % 256] = 1;",
        1,
        {"block": 384},
    ),
    "a tile that begins with its swizzle": (SWIZZLED % 1024, 1, {"block": 128}),
    "reductions in memory": (REDUCE, 1),
    "one warp that waits for its warp group": (ONE_WARP_WAITS, 1, {"block": 256}),
    # A variable is no register: the compiler keeps what the product reads, and gives the new value another one.
    "a variable of A that changes before the wait": (
        FROM_REGISTERS.replace("BEFORE", "a[2] = x[0] + 6;").replace("AFTER", ""),
        1,
        {"block": 128},
    ),
    "barrier 0 for half of the block, and then for all": (
        HALF.replace("ORDER", 'asm volatile("bar.sync 1, 128;" ::: "memory");'),
        1,
        {"block": 128},
    ),
    "st.async beside an mbarrier": (
        "__shared__ float s[64]; __shared__ u64 b; if (t == 0) { mbarrier_init(shared_address(&b), 1);"
        "fence_mbarrier_init(); mbarrier_arrive_expect_tx(shared_address(&b), 256); } __syncwarp(); cluster_arrive();"
        'cluster_wait(); u32 at, to; asm volatile("mapa.shared::cluster.u32 %0, %2, %4;'
        'mapa.shared::cluster.u32 %1, %3, %4;" : "=r"(at), "=r"(to) : "r"(shared_address(s + t)),'
        '"r"(shared_address(&b)), "r"(1 - blockIdx.x)); asm volatile('
        '"st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"'
        ' :: "r"(at), "r"(__float_as_uint(x[63 - t])), "r"(to) : "memory");'
        "mbarrier_wait(shared_address(&b), 0); out[blockIdx.x * 64 + t] = s[t];",
        64,
        {"grid": 2, "cluster": 2},
    ),
    "one lane of a warp wins": ("if (t < 32) { out[1] = t; __syncwarp(); out[0] = out[1] < 32; }", 1),
    "a flag": (
        "__shared__ volatile int f; __shared__ float v; if (t == 0) f = 0; __syncthreads();"
        "if (t == 40) { v = 3; __threadfence_block(); f = 1; }"
        "if (t < 32) { while (!f) __nanosleep(20); __threadfence_block(); out[t] = v; }",
        3,
    ),
    "all write the same value": ("out[0] = n; __shared__ int s; s = 3; __syncthreads(); out[1] = s;", 64),
    "a reduction": (
        "__shared__ float s[64]; s[t] = x[t]; __syncthreads();"
        "for (int k = 32; k; k /= 2) { if (t < k) s[t] += s[t + k]; __syncthreads(); } if (t == 0) out[0] = s[0];",
        2080,
    ),
    "the rows of a tile as one array": (
        "__shared__ float s[2][32]; s[0][t] = x[t]; __syncthreads(); out[t] = s[0][63 - t];",
        64,
    ),
    "atomics": ("atomicAdd(out, x[t]);", 4160, {"grid": 2}),
    "the last block": (
        "__shared__ bool last; int* c = (int*)(out + 128); out[1 + blockIdx.x * 32 + t] = x[blockIdx.x];"
        "__threadfence(); __syncthreads(); if (t == 0) last = atomicAdd(c, 1) == int(gridDim.x) - 1;"
        "__syncthreads(); if (last && t == 0) { __threadfence();"
        "for (int i = 0; i < gridDim.x; ++i) out[0] += out[1 + 32 * i]; }",
        6,
        {"grid": 3, "block": 32},
    ),
    "a barrier of the grid": (
        "volatile int* c = (volatile int*)(out + 128); out[blockIdx.x * 32 + t] = x[blockIdx.x];"
        "__syncthreads(); if (t == 0) { __threadfence(); atomicAdd((int*)c, 1); while (*c < int(gridDim.x));"
        "__threadfence(); } __syncthreads(); out[160 + blockIdx.x] = out[(blockIdx.x + 1) % gridDim.x * 32];",
        1,
        {"grid": 4, "block": 32},
    ),
    "blocks that wait for later ones": (
        "volatile int* f = (volatile int*)(out + 128); if (t == 0) { int b = blockIdx.x;"
        "while (b + 1 < gridDim.x && f[b + 1] == 0); __threadfence();"
        "out[b] = x[b] + (b + 1 < gridDim.x ? out[b + 1] : 0); __threadfence(); f[b] = 1; }",
        21,
        {"grid": 6, "block": 32},
    ),
    "a lock": (
        "__shared__ int lock, s; if (t == 0) lock = s = 0; __syncthreads(); if (t % 32 == 0) {"
        "while (atomicExch(&lock, 1)); __threadfence_block(); s += 1; __threadfence_block();"
        "atomicExch(&lock, 0); } __syncthreads(); out[0] = s;",
        2,
    ),
    "a load of what threads wrote, and a fence of each writer": (load_again(before="+"), 64),
    "the same with a fence of global memory": (load_again(before="+.global"), 64),
    "the same with a fence of the thread that loads": (load_again(after="+"), 64),
    "one thread's fence for its block, and a load of another block": (
        "int* f = (int*)(out + 192); if (blockIdx.x == 0) { out[64 + t] = x[t]; __syncthreads(); if (t == 0) {"
        'asm volatile("fence.proxy.async;" ::: "memory"); __threadfence(); atomicExch(f, 1); } return; }'
        "__shared__ __align__(128) float s[64]; __shared__ u64 b; if (t == 0) { mbarrier_init(shared_address(&b), 1);"
        "fence_mbarrier_init(); while (!atomicAdd(f, 0)); __threadfence();"
        "mbarrier_arrive_expect_tx(shared_address(&b), 256);"
        "bulk_load(shared_address(s), out + 64, 256, shared_address(&b)); } __syncthreads();"
        "mbarrier_wait(shared_address(&b), 0); out[t] = s[63 - t];",
        64,
        {"grid": 2},
    ),
    "a bulk load into both blocks of a cluster": (
        "__shared__ __align__(128) float s[64]; __shared__ u64 b; if (t == 0) { mbarrier_init(shared_address(&b), 1);"
        "fence_mbarrier_init(); mbarrier_arrive_expect_tx(shared_address(&b), 256); } __syncwarp(); cluster_arrive();"
        "cluster_wait(); if (t == 0 && blockIdx.x == 0) asm volatile("
        '"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "'
        '"[%0], [%1], %2, [%3], %4;"'
        '::"r"(shared_address(s)), "l"(x), "r"(256), "r"(shared_address(&b)), "h"((unsigned short)3) : "memory");'
        "mbarrier_wait(shared_address(&b), 0); out[64 * (1 - blockIdx.x) + 63 - t] = s[t];",
        64,
        {"grid": 2, "cluster": 2},
    ),
    "two buffers of cp.async": (
        "__shared__ __align__(16) float s[2][64]; auto load = [&](int i) {"
        "if (t < 16) cp_async_16(shared_address(&s[i % 2][4 * t]), x + 64 * i + 4 * t); cp_async_commit(); };"
        "load(0); float v = 0; for (int i = 0; i < 4; ++i) { if (i < 3) load(i + 1); else cp_async_commit();"
        "cp_async_wait<1>(); __syncthreads(); v += s[i % 2][63 - t]; __syncthreads(); } out[t] = v;",
        640,
    ),
    "lanes that meet before a cluster call": (
        "__shared__ u64 b; if (t == 0) mbarrier_init(shared_address(&b), 1); __syncwarp(); cluster_arrive();"
        "cluster_wait(); __syncthreads(); cluster_arrive(); cluster_wait();"
        "out[t] = 1;",
        1,
    ),
    "named barriers": (
        "__shared__ float s[128]; int g = t / 64, i = t % 64; s[g * 64 + i] = x[t];"
        "named_barrier_sync(1 + g, 64); out[t] = s[g * 64 + 63 - i];",
        64,
        {"block": 128},
    ),
    "threads that leave": (
        "if (t >= 40) return; __shared__ float s[64]; s[t] = 1; __syncthreads(); out[t] = s[39 - t];",
        1,
    ),
    "the address behind an array": ("__shared__ float s[8]; out[0] = shared_address(s + 8) ? 1 : 0;", 1),
    "a proxy fence after the initialisation": (
        "__shared__ __align__(128) float s[64]; __shared__ u64 b; if (t == 0) {"
        "mbarrier_init(shared_address(&b), 1); fence_proxy_async();"
        "mbarrier_arrive_expect_tx(shared_address(&b), 256); bulk_load(shared_address(s), x, 256, shared_address(&b));"
        "} __syncthreads(); mbarrier_wait(shared_address(&b), 0); out[t] = s[t];",
        1,
    ),
}
CASES = list(WRONG) + list(RIGHT)


ENDLESS = """
import signal, sys, threading, torch
from tilelab.cells import cuda_magic
kernel = cuda_magic.find_kernels('extern "C" __global__ void f(float* x) { while (true) __syncthreads(); }')["f"]
run = kernel.prepare(1, 64, (torch.zeros(1),))
try:
    threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT)).start()
    run()
except KeyboardInterrupt:
    sys.exit(7)
"""


@functools.cache
def find_kernel():
    bodies = [(WRONG | RIGHT)[name][0] for name in CASES]
    parts = [
        f"__device__ void case_{i}(float* x, float* out, int n, int t) {{ {body} }}"
        for i, body in enumerate(bodies)
    ]
    calls = " ".join(f"if (which == {i}) case_{i}(x, out, n, threadIdx.x);" for i in range(len(bodies)))
    kernel = f'extern "C" __global__ void rules(float* x, float* out, int n, int which) {{ {calls} }}'
    return cuda_magic.find_kernels("\n".join(['#include "tma.cuh"', *parts, kernel]))["rules"]


def launch(name, seed=0, grid=1, block=64, n=64, smem=0, cluster=1):
    x, out = torch.arange(256.0) + 1, torch.zeros(256)
    with emulator.with_seed(seed):
        find_kernel()[grid, block, smem, cluster](x, out, n, CASES.index(name))
    return out


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_named(name):
    _, said, *given = WRONG[name]
    for seed in (0,) if "one poll" in name else (0, 3):  # a load may have landed before the poll
        with pytest.raises(emulator.EmulationError, match=said):
            launch(name, seed, **dict(*given))


def test_a_tick_after_a_run_does_not_end_the_process():
    """Its signal may be pending when the run ends, and by default it would end the process."""
    before = signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    try:
        launch(next(iter(RIGHT)))
        signal.raise_signal(signal.SIGVTALRM)
    finally:
        signal.signal(signal.SIGVTALRM, before)


def test_busy_threads_beside_a_kernel_are_not_its_time(monkeypatch):
    """A thread of torch that computes meanwhile once made a kernel's loop look endless, and could get its signal."""
    text = "float v = 0; for (int i = 0; i < n; ++i) v += x[i % 64]; out[0] = v;"
    loop = cuda_magic.find_kernels(f'extern "C" __global__ void f(float* x, float* out, int n) {{ {text} }}')[
        "f"
    ]
    x, out, square, done = torch.ones(64), torch.zeros(1), torch.ones(256, 256), threading.Event()
    loop.prepare(1, 1, (x, out, 1))()
    begin = time.thread_time()
    loop.prepare(1, 1, (x, out, 100_000))()
    run = loop.prepare(1, 1, (x, out, int(100_000 * 0.15 / (time.thread_time() - begin))))  # 0.15 s

    def compute():
        while not done.is_set():
            square @ square

    monkeypatch.setattr(emulator, "LONGEST_RUN_S", 0.4)
    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            run()
    finally:
        done.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_not_accused(name):
    _, first, *given = RIGHT[name]
    for seed in emulator.SEEDS:
        assert launch(name, seed, **dict(*given))[0] == first, seed


NO_LAUNCHES = [{"grid": -1}, {"grid": 0}, {"grid": 2**31}, {"grid": (1, 65536)}, {"block": 0}, {"block": -32}]
NO_LAUNCHES += [{"block": 2048}, {"smem": -1}, {"smem": 1 << 40}, {"cluster": 3}, {"cluster": 1 << 20}]


@pytest.mark.parametrize("given", NO_LAUNCHES)
def test_a_launch_that_does_not_exist_is_refused(given):
    with pytest.raises((ValueError, RuntimeError), match=r"\w+ .*\d"):
        launch("atomics", **given)


def test_threads_may_launch_at_once():
    found = []
    threads = [threading.Thread(target=lambda: found.append(launch("atomics", grid=2)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [4160] * 4


def test_ctrl_c_ends_a_loop_of_barriers_and_a_cache_path_may_hold_anything(tmp_path):
    folder = tmp_path / "a, b: c"
    folder.symlink_to(cuda.cubin_folder())  # so that the engine need not be compiled again
    done = run_python("-c", ENDLESS.replace("(true)", f"(true) /* {tmp_path} */"), TILES_CUBINS=str(folder))
    assert done.returncode == 7, done.stderr


def test_a_barrier_of_the_grid_is_refused_by_name():
    source = """#include <cooperative_groups.h>
    extern "C" __global__ void f(float* x) { cooperative_groups::this_grid().sync(); x[0] = 1; }"""
    kernel, x = cuda_magic.find_kernels(source)["f"], torch.zeros(1)
    says = r"grid.sync\(\) in a grid of 2 blocks, which the emulator does not"
    with pytest.raises(emulator.EmulationError, match=says):
        kernel[2, 32](x)
    kernel[1, 32](x)
    assert x == 1
