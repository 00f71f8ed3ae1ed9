"""Do cells and the emulator take the CUDA C++ that NVRTC takes, and refuse what it refuses?"""

import ctypes

import pytest
import torch
from cases import cases

from tilelab import emulator
from tilelab.cells import cuda_magic
from tilelab.runtime import cuda

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]


def run(source, threads=32, count=64, smem_bytes=0, args=(), **options):
    (kernel,) = cuda_magic.find_kernels(source, **options).values()
    y = torch.zeros(count)
    kernel[1, threads, smem_bytes](y, *args)
    return y


def test_builtins_have_the_values_of_a_gpu():
    body = {
        "fminf(NAN_, 3.f) + max(1.f, NAN_)": 4,
        "__fadd_rz(1.f, 0x1.8p-24f) - 1": 0,
        "(__fadd_ru(1.f, 0x1p-30f) - 1) * (1 << 23)": 1,
        "__float2int_rn(2.5f) + __float2int_ru(2.1f)": 5,
        "__float2int_rz(1e20f) == 0x7fffffff": 1,
        "__byte_perm(0x03020100, 0x07060504, 0x7531) == 0x07050301": 1,
        "__funnelshift_l(0x80000000u, 1, 1)": 3,
        "__dp4a(0x01ff0203, 0x01010101, 10)": 15,
        "__vadd4(0x01ff0000, 0x01020000) == 0x02010000": 1,
        "__vmaxs2(0xffff0002, 0x00010001) == 0x00010002": 1,
        "__brev(1) == 0x80000000u": 1,
        "__umulhi(0x80000000u, 6)": 3,
        "__popcll(~0ull) + __ffsll(8)": 68,
        "warpSize + sizeof(float3) + sizeof(double2) + alignof(float4)": 76,
        "normcdff(0.f) + rsqrtf(4.f) + cospif(1.f)": 0,
        "__syncthreads_count(threadIdx.x < 5)": 5,
        "__reduce_max_sync(~0u, threadIdx.x)": 31,
        "__popc(__match_any_sync(~0u, threadIdx.x / 8))": 8,
        "__popc(__activemask())": 32,
        "(float)__double2hiint(1.0) / 0x3ff00000": 1,
    }
    lines = "".join(f"    y[{i}] = {each};\n" for i, each in enumerate(body))
    source = (
        f'extern "C" __global__ void k(float* y) {{\n    float NAN_ = __int_as_float(0x7fffffff);\n{lines}}}'
    )
    found = run(source)
    assert dict(zip(body, found.tolist())) == body


def test_a_header_of_the_toolkit_and_the_clock():
    source = """#include <cuda/std/array>
extern "C" __global__ void k(float* y) {
    cuda::std::array<float, 2> pair{1, 2};
    y[0] = pair[1];
    y[1] = clock() > 0 && clock64() > 0;
    reinterpret_cast<long long*>(y)[1] = clock64();
}"""
    assert run(source)[:2].tolist() == [2, 1]


def test_atomics():
    source = """extern "C" __global__ void k(float* y, int* n, unsigned long long* w) {
    atomicAdd_block(y, 0.5f);
    atomicSub(n, 2);
    atomicInc((unsigned*)n + 1, 6);
    atomicOr(n + 2, 1 << threadIdx.x);
    atomicMax(n + 3, int(threadIdx.x));
    int old = n[4], seen;
    do { seen = old; old = atomicCAS(n + 4, seen, seen + 3); } while (old != seen);
    atomicXor_system(w, 1ull << 40);
}"""
    n, w = torch.zeros(5, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    y = run(source, args=(n, w))
    assert y[0] == 16 and n.tolist() == [-64, 32 % 7, -1, 31, 96] and w.item() == 1


HALVES = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <typename H>
__device__ void store(float* y, H a, H b) {
    y[0] = float(a + b), y[1] = float(__hfma(a, b, a)), y[2] = float(H(float(a) / 3)), y[3] = a > b;
}
extern "C" __global__ void k(float* y, const half* a, const __nv_bfloat16* b, half factor) {
    const int i = threadIdx.x;
    store(y + 8 * i, a[i], a[i + 1] * factor);
    store(y + 8 * i + 4, b[i], __float2bfloat16(3.1f));
}"""


def test_halves_round_as_torch_does():
    x = torch.cat([torch.tensor([65504.0, 6e-8, -1e-5, float("inf"), 0.1]), torch.randn(28)])
    a, b = x.half(), x.bfloat16()
    y = run(HALVES, 32, 256, args=(a, b, 0.3)).view(32, 2, 4)
    for found, left, right in (
        (y[:, 0], a[:-1], a[1:] * torch.tensor(0.3).half()),
        (y[:, 1], b[:-1], torch.full((32,), 3.1, dtype=torch.bfloat16)),
    ):
        fused = (left.double() * right.double() + left.double()).float().to(left.dtype)
        expected = torch.stack([left + right, fused, (left.float() / 3).to(left.dtype), left > right], 1)
        torch.testing.assert_close(found, expected.float(), rtol=0, atol=0, equal_nan=True)


@cases(
    "declaration",
    "extern __shared__ float s[];",
    "extern __shared__ __align__(sizeof(float4)) volatile float s[];",
    "__shared__ extern float s[];",
    "extern __shared__ float t[], s[];",
    "extern __shared__ unsigned char raw[]; float* s = (float*)raw;",
    "__shared__ alignas(128) float s[32];",
    "static __shared__ __attribute__((aligned(16))) float s[32];",
    "SHARED(s)",
    "float* s = helper<float>();",
    "float* s = fixed<32>();",
)
def test_shared_memory_in_all_its_forms(declaration):
    source = f"""#define SHARED(name) __shared__ float name[LENGTH];
template <typename T> __device__ T* helper() {{ extern __shared__ unsigned char memory[]; return (T*)memory; }}
template <int N> __device__ float* fixed() {{ __shared__ float own[N]; return own; }}
extern "C" __global__ void k(float* y) {{
    {declaration}
    s[threadIdx.x] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = s[31 - threadIdx.x];
}}"""
    found = run(source, smem_bytes=128, options=["-DLENGTH=32"])
    assert found[:32].tolist() == list(range(31, -1, -1))


@cases(
    "kind, given, read, value",
    ("unsigned long long int", 2**63, "n == 1ull << 63", 1),
    ("short", -7, "n", -7),
    ("Wide", 2**40, "n >> 38", 4),
    ("Colour", 2, "n == BLUE", 1),
    ("float4", (1.0, 2.0, 3.0, 4.0), "n.w", 4),
    ("dim3", (5, 6, 7), "n.z", 7),
    ("Pair", (ctypes.c_float * 2)(3, 4), "n.b", 4),
    ("float const* const*", [torch.ones(3), torch.full((3,), 5.0)], "n[1][2]", 5),
    ("size_t", -1, "", "n of k is -1, which does not fit its type size_t"),
    ("Wide&", 3, "", "n of k is a reference; declare a value or a pointer"),
    ("Pair", 3, "", "n of k has the type Pair of 8 bytes; 3 is no such value"),
)
def test_types_of_parameters(kind, given, read, value):
    source = f"""typedef long long Wide; enum Colour {{ RED, BLUE = 2 }}; struct Pair {{ float a, b; }};
extern "C" __global__ void k(float* y, {kind} n) {{ y[0] = {read or 0}; }}"""
    if isinstance(value, str):
        with pytest.raises(ValueError, match=value):
            run(source, args=(given,))
    else:
        assert run(source, args=(given,))[0] == value


def test_spellings_of_a_kernel():
    found = cuda_magic.find_kernels("""#define KERNEL extern "C" __global__ void
#define NAMED(name, T) __global__ void name##_kernel(T* y)
extern "C" __global__ __launch_bounds__(128, (2)) void a(float* y) {}
extern "C" { static __global__ void b(const float *__restrict__ y, int n = (3, 4)) { if (n) {} } }
extern "C" void __global__ c(float (*y)[4], int z[3]) {}
KERNEL d(float /* first, */ y, // second
         unsigned) {}
NAMED(e, int) {}
namespace outer { namespace { __global__ void f(int* y) {} } }
template <int N> __global__ void g(int* y) {}
template __global__ void g<4>(int*);
#if __CUDA_ARCH__ < 900
__global__ void never(int* y) {}
#endif
""", instances=["h=g<8>"])  # fmt: skip
    assert list(found) == ["a", "b", "c", "d", "e_kernel", "f", "g", "h"]
    assert found["c"].parameters == (("float*", "y"), ("int*", "z"))
    assert found["d"].parameters == (("float", "y"), ("unsigned", "argument 2"))
    assert (found["f"].expression, found["h"].expression) == ("outer::f", "g<8>")
    assert found["e_kernel"].symbol == "_Z8e_kernelPi" and found["h"].symbol == "_Z1gILi8EEvPi"


FILE = """#include <cstdio>
#include <vector>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
using namespace std;
#define CHECK(call) if (call != cudaSuccess) exit(1)
constexpr int round_up(int n) { return (n + 31) / 32 * 32; }
static const int LENGTH = 64;
template <typename T, int N>
__global__ void sums(T* y, uint32_t n) {
    __shared__ T parts[N];
    cg::thread_block block = cg::this_thread_block();
    auto warp = cg::tiled_partition<32>(block);
    T sum = cg::reduce(warp, T(block.thread_rank() < n), cg::plus<T>());
    if (warp.thread_rank() == 0) parts[warp.meta_group_rank()] = sum;
    block.sync();
    if (block.thread_rank() == 0) y[0] = parts[0] + parts[1] + (FLT_MAX > 1) * round_up(LENGTH);
}
void launch(float* y, cudaStream_t stream) { sums<float, 2><<<1, 64, 0, stream>>>(y, 40); }
int main() {
    vector<float> v(3);
    printf("%f", v[0]);
}
"""


def test_a_file_with_host_code_runs_as_it_is():
    assert run(FILE, 64, args=(40,), instances=["sums<float, 2>"])[0] == 40 + 64


@cases(
    "source, error, said",
    ("uint32_t n = 3;", cuda.CompileError, r'cell\(2\): error: identifier "uint32_t" is undefined'),
    ("y[0] = INFINITY;", cuda.CompileError, 'identifier "INFINITY" is undefined'),
    ("} \n#include <stdint.h>\n__device__ void f() {", cuda.CompileError, r'cell\(3\).*"stdint.h"'),
    ("assert(y[0] > threadIdx.x);", emulator.EmulationError, "the assertion 'y.0. > threadIdx.x' of line 2"),
    ("y[0] = tex1Dfetch<float>(0, 1);", emulator.NotEmulated, "uses tex1Dfetch in line 2, which the"),
)
def test_what_is_refused_is_named(source, error, said):
    with pytest.raises(error, match=said):
        run(f'extern "C" __global__ void k(float* y) {{ {source} }}')


def test_printf(capsys):
    run(
        'extern "C" __global__ void k(float* y) { if (threadIdx.x == 3) printf("lane %d: %.1f\\n", 3, y[3]); }'
    )
    assert capsys.readouterr().out == "lane 3: 0.0\n"


def test_wmma_fragments():
    source = """#include <mma.h>
using namespace nvcuda;
extern "C" __global__ void k(float* y) {
    __shared__ alignas(32) half a[256], b[256];
    for (int i = threadIdx.x; i < 256; i += 32) a[i] = float(i % 16 == i / 16), b[i] = float(i);
    __syncwarp();
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
    wmma::fill_fragment(sums, 1.f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(sums, fa, fb, sums);
    for (int i = 0; i < sums.num_elements; ++i) sums.x[i] *= 2;
    wmma::store_matrix_sync(y, sums, 16, wmma::mem_row_major);
}"""
    expected = 2 * torch.arange(256.0).view(16, 16).T + 2
    torch.testing.assert_close(run(source, count=256).view(16, 16), expected)


def test_a_file_launches_one_instance_and_fills_a_constant():
    source = """constexpr int BLOCK = 32;
__constant__ float filled[4];
__device__ float exp(float x) { return x + BLOCK; }
template <int N, typename T> __global__ void k(T* y, float* nothing) { y[threadIdx.x] = exp(T(N)) + !nothing; }
__global__ void reads(float* y) { y[threadIdx.x] = filled[threadIdx.x % 4]; }
StopWatch* timer;
int main() { float* y; k<BLOCK, float><<<1, BLOCK>>>(y); }"""
    kernels = cuda_magic.find_kernels(source)
    y = torch.zeros(32)
    kernels["k"][1, 32](y, None)
    assert y.tolist() == [65.0] * 32
    says = "reads reads filled of line 3, __constant__ memory that the host"
    with pytest.raises(emulator.NotEmulated, match=says):
        kernels["reads"][1, 32](y)
