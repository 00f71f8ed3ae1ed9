"""Inline PTX gives in the emulator what PTX says, whatever the form of the asm statement."""

import os
import struct

import pytest
import torch
from cases import cases

from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.emulator import inline_ptx

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]

NAN = float("nan")


def f(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def d(value):
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def h(value):
    return struct.unpack("<H", struct.pack("<e", value))[0]


def pair(low, high):
    return low | high << 16


def bf(value):
    return f(value) >> 16


# An instruction, its sources %1, %2, ... as bits, and the bits of its result %0.
INSTRUCTIONS = [
    ("add.s32 %0, %1, %2;", (0x7FFFFFFF, 1), 0x80000000),
    ("add.u64 %0, %1, %2;", (2**64 - 1, 2), 1),
    ("sub.f32 %0, %1, %2;", (f(1.5), f(0.25)), f(1.25)),
    ("mul.lo.s32 %0, %1, %2;", (0xFFFFFFFF, 7), 0xFFFFFFF9),
    ("mul.hi.u32 %0, %1, %2;", (0xFFFFFFFF, 16), 15),
    ("mul.wide.s32 %0, %1, %2;", (0xFFFFFFFF, 3), 2**64 - 3),
    ("mad.lo.u32 %0, %1, %2, %3;", (3, 5, 7), 22),
    ("fma.rn.f32 %0, %1, %2, %3;", (f(1 + 2**-12), f(1 - 2**-12), f(-1.0)), f(-(2**-24))),
    ("fma.rn.f16x2 %0, %1, %2, %3;", (pair(h(2), h(3)), pair(h(0.5), h(2)), pair(h(1), h(-1))), pair(h(2), h(5))),
    ("add.rn.bf16x2 %0, %1, %2;", (pair(bf(1), bf(256)), pair(bf(2), bf(1))), pair(bf(3), bf(256))),
    ("add.f64 %0, %1, %2;", (d(0.1), d(0.2)), d(0.1 + 0.2)),
    ("min.s32 %0, %1, %2;", (0xFFFFFFFF, 1), 0xFFFFFFFF),
    ("min.u32 %0, %1, %2;", (0xFFFFFFFF, 1), 1),
    ("max.f32 %0, %1, %2;", (f(NAN), f(2.0)), f(2.0)),
    ("max.NaN.f32 %0, %1, %2;", (0x7FFFFFFF, f(2.0)), 0x7FFFFFFF),
    ("abs.f32 %0, %1;", (f(-3.0),), f(3.0)),
    ("neg.s32 %0, %1;", (5,), 2**32 - 5),
    ("add.sat.f32 %0, %1, %2;", (f(0.75), f(0.75)), f(1.0)),
    ("add.ftz.f32 %0, %1, %2;", (1, 1), 0),
    ("div.s32 %0, %1, %2;", (2**32 - 7, 2), 2**32 - 3),
    ("rem.u32 %0, %1, %2;", (17, 5), 2),
    ("and.b32 %0, %1, 0xff00;", (0x1234,), 0x1200),
    ("not.b32 %0, %1;", (0,), 0xFFFFFFFF),
    ("shl.b32 %0, %1, %2;", (1, 33), 0),
    ("shr.s32 %0, %1, %2;", (0x80000000, 31), 0xFFFFFFFF),
    ("shr.u32 %0, %1, 4;", (0x80000000,), 0x08000000),
    ("shf.l.wrap.b32 %0, %1, %2, %3;", (0x80000000, 1, 1), 3),
    ("lop3.b32 %0, %1, %2, %3, 0x96;", (0b1100, 0b1010, 0b0110), 0),
    ("prmt.b32 %0, %1, %2, 0x5410;", (0x33221100, 0x77665544), 0x55441100),
    ("bfe.s32 %0, %1, 4, 4;", (0xF0,), 0xFFFFFFFF),
    ("bfe.u32 %0, %1, 4, 4;", (0xF0,), 15),
    ("bfi.b32 %0, %1, %2, 8, 4;", (0xF, 0), 0xF00),
    ("popc.b32 %0, %1;", (0xFF,), 8),
    ("clz.b32 %0, %1;", (1,), 31),
    ("brev.b32 %0, %1;", (1,), 0x80000000),
    ("dp4a.s32.s32 %0, %1, %2, %3;", (0x01FF01FF, 0x01010101, 10), 10),
    ("ex2.approx.ftz.f32 %0, %1;", (f(3.0),), f(8.0)),
    ("lg2.approx.f32 %0, %1;", (f(8.0),), f(3.0)),
    ("rcp.approx.f32 %0, %1;", (f(4.0),), f(0.25)),
    ("rsqrt.approx.f32 %0, %1;", (f(16.0),), f(0.25)),
    ("tanh.approx.f32 %0, %1;", (f(0.0),), 0),
    ("cvt.rn.bf16x2.f32 %0, %1, %2;", (f(1.0), f(2.0)), pair(bf(2), bf(1))),
    ("cvt.rn.f16x2.f32 %0, %1, %2;", (f(1.0), f(2.0)), pair(h(2), h(1))),
    ("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;", (f(1000.0), f(1.0)), 0x7E38),
    ("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;", (f(-1.0), f(1.0)), 0xBC3C),
    ("cvt.rn.f16x2.e4m3x2 %0, %1;", (0x7E38,), pair(h(1), h(448))),
    ("cvt.rna.tf32.f32 %0, %1;", (0x3F801000,), 0x3F802000),
    ("cvt.rn.f32.s32 %0, %1;", (2**32 - 3,), f(-3.0)),
    ("cvt.rzi.s32.f32 %0, %1;", (f(-2.7),), 2**32 - 2),
    ("cvt.rni.u32.f32 %0, %1;", (f(-5.0),), 0),
    ("cvt.rzi.s32.f32 %0, %1;", (f(1e20),), 0x7FFFFFFF),
    ("cvt.sat.u8.s32 %0, %1;", (300,), 255),
    ("cvt.s64.s32 %0, %1;", (0xFFFFFFFF,), 2**64 - 1),
    ("cvt.u32.u64 %0, %1;", (2**32 + 5,), 5),
    ("cvt.f64.f32 %0, %1;", (f(0.5),), d(0.5)),
    ("selp.b32 %0, %1, %2, 1;", (3, 4), 3),
    ("mov.b64 %0, {%1, %2};", (7, 9), 7 | 9 << 32),
    ("{ .reg .b32 a, b; mov.b64 {a, b}, %1; mov.b32 %0, b; }", (7 | 9 << 32,), 9),
    ("{ .reg .pred p, q; setp.lt.s32 p|q, %1, %2; selp.u32 %0, 1, 2, q; }", (0xFFFFFFFF, 0), 2),
    ("{ .reg .pred p; setp.gtu.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }", (f(NAN), 0), 1),
    ("{ .reg .pred p; setp.eq.u32 p, %1, 3; @!p mov.u32 %0, 5; @p mov.u32 %0, 6; }", (3,), 6),
    ("{ .reg .b32 t<3>; mov.b32 t0, %1; LOOP: add.u32 t0, t0, 1; .reg .pred p; setp.lt.u32 p, t0, 9; "
     "@p bra LOOP; mov.b32 %0, t0; }", (2,), 9),
    ("// a comment; with a semicolon\n add.u32 %0, %1, /* , */ 1;", (2,), 3),
    ("fma.rn.f32x2 %0, %1, %2, %3;", (f(2) | f(3) << 32, f(5) | f(7) << 32, 0), f(10) | f(21) << 32),
    ("mul.rn.f32 %0, %1, 0f40000000;", (f(3.0),), f(6.0)),
    ("mov.u32 %0, %%ntid.x;", (), 32),
    ("mov.u32 %0, %%cluster_nctarank;", (), 1),
]  # fmt: skip


def test_instructions_on_numbers():
    lines = [
        f'{{ u64 y = 0; asm volatile("{text.encode("unicode_escape").decode()}" : "+l"(y)'
        f'{" : " + ", ".join(f""" "l"({value}ull)""" for value in values)}); out[{index}] = y; }}'
        for index, (text, values, _) in enumerate(INSTRUCTIONS)
    ]
    source = 'extern "C" __global__ void run(u64* out) {\n' + "\n".join(lines) + "\n}"
    kernel = cuda_magic.find_kernels("typedef unsigned long long u64;\n" + source)["run"]
    out = torch.zeros(len(INSTRUCTIONS), dtype=torch.int64)
    kernel[1, 32](out)
    found = [value % 2**64 for value in out.tolist()]
    wrong = {
        text: (hex(value), hex(expected))
        for (text, _, expected), value in zip(INSTRUCTIONS, found)
        if value != expected
    }
    assert wrong == {}


EXCHANGES = """
__device__ unsigned smem(const void* p) {
    unsigned long long address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(p));
    return address;
}
extern "C" __global__ void run(unsigned* out, unsigned long long* counter) {
    __shared__ __align__(16) unsigned short tile[64];
    __shared__ unsigned words[32];
    unsigned lane, r = 0, inside = 0;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 31, 0xffffffff;" : "=r"(r) : "r"(lane));
    out[lane] = r;
    asm volatile("{ .reg .pred p; shfl.sync.up.b32 %0|p, %2, 4, 0, -1; selp.u32 %1, 1, 0, p; }"
                 : "=r"(r), "=r"(inside) : "r"(lane));
    out[32 + lane] = inside ? r : 100;
    asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, 4; vote.sync.ballot.b32 %0, p, -1; }" : "=r"(r) : "r"(lane));
    out[64 + lane] = r;
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(lane));
    out[96 + lane] = r;
    r = 0;
    asm volatile("{ .reg .pred P; elect.sync _|P, %1; @P mov.s32 %0, 1; }" : "+r"(r) : "r"(0xFFFF'FFFF));
    out[128 + lane] = r;
    tile[lane] = lane, tile[32 + lane] = 32 + lane;
    asm volatile("bar.warp.sync -1;");
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r) : "r"(smem(tile) + lane % 8 * 16));
    out[160 + lane] = r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(r));
    out[192 + lane] = r;
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(smem(&words[lane])), "r"(lane * 3) : "memory");
    asm volatile("barrier.sync 0;");
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2 + 8];"
                 : "=r"(r), "=r"(inside) : "r"(smem(words) + lane / 16 * 8));
    out[224 + lane] = r + 1000 * inside;
    asm volatile("red.global.add.u64 [%0], %1;" :: "l"(counter), "l"((unsigned long long)lane) : "memory");
}
"""


def test_instructions_that_exchange_values():
    kernel = cuda_magic.find_kernels(EXCHANGES)["run"]
    out, counter = torch.zeros(256, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    kernel[1, 32](out, counter)
    lanes = torch.arange(32, dtype=torch.int32)
    tile = torch.arange(64, dtype=torch.int16).reshape(8, 8)
    expected = [lanes ^ 1, torch.where(lanes < 4, 100, lanes - 4), torch.full_like(lanes, 15)]
    expected += [torch.full_like(lanes, 496), (lanes == 0).int()]
    expected += [tile.T.contiguous().view(torch.int32).flatten(), tile.view(torch.int32).flatten()]
    expected += [torch.where(lanes < 16, 6 + 9000, 12 + 15000)]
    assert [part.tolist() for part in out.reshape(8, 32)] == [part.tolist() for part in expected]
    assert counter.item() == 496


TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn}
TYPES |= {"e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8}


def draw(shape, name):
    values = torch.randint(0 if name == "u8" else -4, 5, shape)
    return values.to(TYPES[name])


@cases(
    "depth, sums, a, b",
    (16, "f32", "bf16", "bf16"),
    (16, "f16", "f16", "f16"),
    (8, "f32", "f16", "f16"),
    (8, "f32", "tf32", "tf32"),
    (32, "s32", "s8", "u8"),
    (32, "f32", "e4m3", "e5m2"),
)
def test_mma(depth, sums, a, b):
    size = TYPES[a].itemsize
    words, count = depth * size // 8, 2 if sums == "f16" else 4
    d_list, a_list, b_list = (
        [f"%{first + i}" for i in range(n)]
        for first, n in ((0, count), (count, words), (count + words, words // 2))
    )
    text = (
        f"mma.sync.aligned.m16n8k{depth}.row.col.{sums}.{a}.{b}.{sums} "
        f"{{{', '.join(d_list)}}}, {{{', '.join(a_list)}}}, {{{', '.join(b_list)}}}, {{{', '.join(d_list)}}};"
    )
    outputs = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    inputs = ", ".join(
        [f'"r"(a[(l / 4 + {i % 2 * 8}) * {2 * words} + l % 4 + {i // 2 * 4}])' for i in range(words)]
        + [f'"r"(b[l / 4 * {2 * words} + l % 4 + {i * 4}])' for i in range(words // 2)]
    )
    source = f"""extern "C" __global__ void run(const unsigned* a, const unsigned* b, unsigned* out) {{
    const int l = threadIdx.x;
    unsigned d[{count}] = {{}};
    asm volatile("{text}" : {outputs} : {inputs});
    asm volatile("{text}" : {outputs} : {inputs});
    for (int i = 0; i < {count}; ++i) out[l * {count} + i] = d[i];
}}"""
    left, right = draw((16, depth), a), draw((8, depth), b)
    out = torch.zeros(32 * count, dtype=torch.int32)
    cuda_magic.find_kernels(source)["run"][1, 32](left.view(torch.int32), right.view(torch.int32), out)
    kind = {"f32": torch.float32, "f16": torch.float16, "s32": torch.int32}[sums]
    found = out.view(kind).reshape(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)
    assert torch.equal(found.double(), 2 * (left.double() @ right.double().T))


GROUP = """
__device__ unsigned smem(const void* p) {
    unsigned long long address;
    asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(p));
    return address;
}
__device__ unsigned long long describe(const void* p, unsigned leading, unsigned stride) {
    return (smem(p) & 0x3ffff) >> 4 | (unsigned long long)(leading >> 4) << 16 |
           (unsigned long long)(stride >> 4) << 32;
}
extern "C" __global__ void run(const unsigned* a, const unsigned* b, float* out, int again) {
    __shared__ __align__(128) unsigned tile_a[512];
    __shared__ __align__(128) unsigned tile_b[8 * WIDTH];
    for (int i = threadIdx.x; i < 512; i += 128) tile_a[PLACE(i, 8)] = a[i];
    for (int i = threadIdx.x; i < 8 * WIDTH; i += 128) tile_b[B_PLACE] = b[i];
    float d[WIDTH / 2];
    unsigned ra[4];
    const int l = threadIdx.x % 32, w = threadIdx.x / 32;
    for (int i = 0; i < 4; ++i) ra[i] = a[(16 * w + l / 4 + i % 2 * 8) * 8 + l % 4 + i / 2 * 4];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int step = 0; step <= again; ++step)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " STEP ", 0;\\n"
                     "wgmma.mma_async.sync.aligned.m64n" SHAPE " {" NAMES "}, " A_NAME ", " B_NAME ", p" FLAGS "; }"
                     : OPERANDS
                     : "l"(describe(tile_a, 128, 256)), "l"(describe(tile_b, 128, B_STRIDE)), "r"(step),
                       "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(0) : "memory");
    for (int i = 0; i < WIDTH / 2; ++i)
        out[(16 * w + l / 4 + i / 2 % 2 * 8) * WIDTH + i / 4 * 8 + l % 4 * 2 + i % 2] = d[i];
}
"""


@cases(
    "width, a, b, in_registers, transposed, negative",
    (8, "bf16", "bf16", False, False, False),
    (24, "f16", "f16", True, False, False),
    (64, "bf16", "bf16", False, True, True),
    (16, "tf32", "tf32", True, False, False),
    (32, "e5m2", "e4m3", False, False, False),
    (16, "s8", "u8", True, False, False),
)
def test_wgmma(width, a, b, in_registers, transposed, negative):
    depth = 32 // TYPES[a].itemsize
    names = [f"%{i}" for i in range(width // 2)]
    sums = "s32" if a == "s8" else "f32"
    operands = ", ".join(
        f'"+{"r" if sums == "s32" else "f"}"({"(int&)" * (sums == "s32")}d[{i}])' for i in range(width // 2)
    )
    flags = f", 1, {-1 if negative else 1}" if sums == "f32" else ""
    if a in ("bf16", "f16"):
        flags += f", {int(transposed)}" if in_registers else f", 0, {int(transposed)}"
    place = "((i) / (8 * (r)) * (8 * (r)) + (i) % (r) / 4 * 32 + (i) / (r) % 8 * 4 + (i) % 4)"
    # Core matrices of 8 rows of 16 bytes. B transposed: 8 x 8 elements, of which a row runs along N.
    b_place = f"(i % {width // 2} / 4 * 64 + i / {width // 2} * 4 + i % 4)" if transposed else "PLACE(i, 8)"
    # NVRTC takes no names of operands
    registers = "{" + ", ".join(f"%{width // 2 + 3 + i}" for i in range(4)) + "}"
    macros = {"WIDTH": width, "PLACE(i, r)": place, "B_PLACE": b_place, "B_STRIDE": 256}
    macros |= {"SHAPE": f'"{width}k{depth}.{sums}.{a}.{b}"', "NAMES": f'"{", ".join(names)}"'}
    macros |= {"A_NAME": f'"{registers}"' if in_registers else f'"%{width // 2}"'}
    macros |= {"B_NAME": f'"%{width // 2 + 1}"', "STEP": f'"%{width // 2 + 2}"', "FLAGS": f'"{flags}"'}
    macros |= {"OPERANDS": operands}
    source = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + GROUP
    left, right = draw((64, depth), a), draw((width, depth), b)
    given = right.T.contiguous() if transposed else right
    out = torch.zeros(64, width)
    kernel = cuda_magic.find_kernels(source)["run"]
    kernel[1, 128](left.view(torch.int32), given.view(torch.int32), out, 1)
    found = out.view(torch.int32) if sums == "s32" else out
    expected = (-2 if negative else 2) * (left.double() @ right.double().T)
    assert torch.equal(found.double(), expected)


@cases(
    "asm, said",
    ('asm("tcgen05.alloc.cta_group::1 [%0], 32;" :: "r"(0));', "instruction `tcgen05.alloc.cta_group::1`"),
    ('asm("mov.u32 %0, %%envreg3;" : "=r"(x));', "special register `%envreg3`"),
    ('asm("add.rz.f32 %0, %0, %0;" : "+r"(x));', "instruction `add.rz.f32`"),
    ('asm("cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%0, %0, '
     '%0}], [%0], {%2};" :: "r"(x), "l"(0ll), "h"((short)0));', "instruction `cp.async.bulk.tensor.3d.*im2col"),
    ('asm("add.u32 %0, %0, missing;" : "+r"(x));', "operand `missing`"),
    ('asm("mov.u32 %0;" : "=r"(x));', "cannot read `mov.u32`"),
)  # fmt: skip
def test_what_is_missing_is_refused_by_name_and_line(asm, said):
    source = (
        f'extern "C" __global__ void run(int* out) {{\n    unsigned x = 0;\n    {asm}\n    out[0] = x;\n}}'
    )
    kernel = cuda_magic.find_kernels(source)["run"]
    with pytest.raises(emulator.NotEmulated, match=f"line 4: the emulator .*{said}"):
        kernel[1, 1](torch.zeros(1, dtype=torch.int32))


def test_unknown_code_that_nobody_calls_is_no_hindrance():
    source = """template <int N> __device__ void allocate() { asm volatile("tcgen05.alloc 1;"); }
extern "C" __global__ void run(int* out) { out[0] = 1; }"""
    out = torch.zeros(1, dtype=torch.int32)
    cuda_magic.find_kernels(source)["run"][1, 1](out)
    assert out.item() == 1


def test_the_text_of_an_asm_statement_keeps_its_lines():
    text = '# 7 "cell"\nvoid f() {\n    asm volatile("bad.one;\\n"\n        "bad.two;" ::: "memory");\n}\n'
    rewritten = inline_ptx.rewrite(text)
    assert "line 8: the emulator does not know the instruction `bad.one`" in rewritten
    assert rewritten.endswith('\n# 9 "cell"\n;\n}\n')


LIBRARY = """#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda/ptx>
using barrier = cuda::barrier<cuda::thread_scope_block>;
namespace cde = cuda::device::experimental;
namespace ptx = cuda::ptx;
extern "C" __global__ void by_barrier(const __grid_constant__ CUtensorMap map, const CUtensorMap* pointer) {
    __shared__ alignas(128) float tile[256];
    #pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ barrier full;
    if (threadIdx.x == 0) {
        init(&full, blockDim.x);
        cde::fence_proxy_async_shared_cta();
    }
    __syncthreads();
    for (int i = 0; i < 2; ++i) {
        barrier::arrival_token token;
        if (threadIdx.x == 0) {
            cde::cp_async_bulk_tensor_2d_global_to_shared(tile, &map, 0, 8 * i, full);
            token = cuda::device::barrier_arrive_tx(full, 1, sizeof tile);
        } else token = full.arrive();
        full.wait(std::move(token));
        for (int j = threadIdx.x; j < 256; j += blockDim.x) tile[j] *= 2;
        cde::fence_proxy_async_shared_cta();
        __syncthreads();
        if (threadIdx.x == 0) {
            cde::cp_async_bulk_tensor_2d_shared_to_global(pointer, 0, 8 * i, tile);
            cde::cp_async_bulk_commit_group();
            cde::cp_async_bulk_wait_group_read<0>();
        }
        __syncthreads();
    }
}
extern "C" __global__ void by_ptx(const float* x, float* out) {
    __shared__ alignas(128) float tile[256];
    __shared__ uint64_t full;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(&full, 1);
        ptx::fence_proxy_async(ptx::space_shared);
        ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full, sizeof tile);
        ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, tile, x, sizeof tile, &full);
    }
    __syncthreads();
    while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}
    for (int j = threadIdx.x; j < 256; j += blockDim.x) out[j] = 2 * tile[j];
}
extern "C" __global__ void by_pipeline(const float* x, float* out) {
    __shared__ alignas(16) float tile[2][256];
    auto pipe = cuda::make_pipeline();
    for (int i = 0; i < 2; ++i) {
        pipe.producer_acquire();
        const int j = 4 * threadIdx.x;
        cuda::memcpy_async(&tile[i][j], x + 256 * i + j, cuda::aligned_size_t<16>(16), pipe);
        pipe.producer_commit();
    }
    for (int i = 0; i < 2; ++i) {
        pipe.consumer_wait();
        __syncthreads();
        for (int j = threadIdx.x; j < 256; j += blockDim.x) out[256 * i + j] = 2 * tile[i][j];
        pipe.consumer_release();
    }
}
int main() {}"""


@pytest.fixture(autouse=True)
def without_the_compiler_of_gpus(request, monkeypatch):  # which takes seconds for headers of libcu++
    if "libcu" in request.node.name and "[by_barrier]" not in request.node.name:
        monkeypatch.setattr(cuda_magic.CudaKernel, "check", lambda self: None)


def run_library(name, change=("", "")):
    kernel = cuda_magic.find_kernels(LIBRARY.replace(*change))[name]
    x = torch.randn(16, 32)
    out = torch.zeros_like(x)
    maps = [cuda_magic.make_tensor_map(each, (8, 32)) for each in (x, out)]
    for seed in emulator.SEEDS:
        with emulator.with_seed(seed):
            kernel[1, 64](*(maps if name == "by_barrier" else (x, out)))
    count = 256 if name == "by_ptx" else 512
    assert torch.equal(out.view(-1)[:count], 2 * x.view(-1)[:count])


@pytest.mark.parametrize("name", ["by_barrier", "by_ptx", "by_pipeline"])
def test_barriers_pipelines_and_ptx_of_libcu(name):
    run_library(name)


@cases(
    "name, change, said",
    ("by_barrier", ("full.wait(std::move(token));", ""), "no barrier lies between|may still be landing"),
    ("by_barrier", ("1, sizeof tile);", "1, 4);"), "1020 bytes|waits for ever"),
    ("by_barrier", ("0, 8 * i, full", "1, 8 * i, full"), "line 20: .*within a unit of 16 bytes"),
    ("by_ptx", ("while (!ptx::mbarrier_try_wait_parity(&full, 0)) {}", ""), "not waited for its mbarrier"),
    ("by_pipeline", ("pipe.consumer_wait();", ""), "cp_async may still write|no barrier lies between"),
)
def test_a_broken_rule_is_named_behind_libcu(name, change, said):
    with pytest.raises(emulator.EmulationError, match=said):
        run_library(name, change)


@cases(
    "change, said",
    (("thread_scope_block>;", "thread_scope_device>;"), "knows cuda::barrier for the threads of a block"),
    (("auto pipe = cuda::make_pipeline();", "cuda::pipeline_shared_state<cuda::thread_scope_block, 2> pipe;"),
     "uses .*pipeline_shared_state"),
)  # fmt: skip
def test_other_scopes_of_libcu_are_refused(change, said):
    with pytest.raises(emulator.NotEmulated, match=said):
        run_library("by_barrier", change)


LAST_BLOCK = """#include <cuda.h>
#include <cuda/atomic>
#include <cuda/barrier>
extern "C" __global__ void sum(const float* x, float* parts, float* out, int* count) {
    __shared__ cuda::atomic<int, cuda::thread_scope_block> last;
    parts[blockIdx.x * 64 + threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        cuda::atomic_ref<int, cuda::thread_scope_device> counter(*count);
        last.store(counter.fetch_add(1, cuda::std::memory_order_acq_rel) == gridDim.x - 1);
    }
    __syncthreads();
    for (int i = 0; last.load() && i < gridDim.x; ++i) out[threadIdx.x] += parts[i * 64 + threadIdx.x];
}"""


@cases(
    "change, said",
    (("", ""), None),
    (("scope_device", "scope_block"), "in the scope of its block"),
    (("acq_rel", "relaxed"), "nothing orders the two blocks"),
)
def test_atomics_of_libcu(change, said):
    x, out = torch.randn(4, 64), torch.zeros(64)
    kernel = cuda_magic.find_kernels(LAST_BLOCK.replace(*change))["sum"]
    given = x, torch.zeros(4, 64), out, torch.zeros(1, dtype=torch.int32)
    if said:
        with pytest.raises(emulator.EmulationError, match=said):
            kernel[4, 64](*given)
    else:
        kernel[4, 64](*given)
        assert torch.allclose(out, x.sum(0))


@cases(
    "folder, expected",
    (os.fspath(emulator.FOLDER), True),
    ("/home/another/copy/tilelab/emulator/cuda", True),  # whose precompiled header lies in the cache
    ("/cache/cubins/emulator-1", True),
    ("/usr/include/c++/12", True),
    ("/home/reader/kernels", False),
    ("", False),
)
def test_lines_of_every_copy_of_the_emulator_are_left_out(folder, expected):
    assert emulator._is_not_the_readers(folder, "/cache/cubins/emulator-1/kernel.so") is expected
