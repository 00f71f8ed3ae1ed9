# TRITON_INTERPRET=1 python descriptor_gemm.py    (on a Hopper or Blackwell GPU: python descriptor_gemm.py)
#
# The persistent GEMM of chapter 14 in one file, without any import of the course. It checks itself on ragged matrices:
# in Triton's interpreter where there is no GPU, else on the GPU, where it is also timed beside torch.mm. Its elements
# are float16, because Triton's own interpreter does not compute with bfloat16.
#
#     who                     what it does                                     what becomes safe
#     a program               takes every PROGRAMS-th tile of C                no two programs write one tile
#     TMA                     loads boxes of A and B, STAGES - 1 steps ahead   Triton waits for a box before its product
#     the epilogue            stores C in PARTS, each through one buffer       two programs have room on an SM
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton, which reads it when it meets @triton.jit
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PARTS = 128, 128, 64, 3, 4
UNIT = 8  # float16 elements in 16 bytes, the unit in which TMA moves rows


@triton.jit
def tile_coordinates(tile_id, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    first_m = tile_id // (GROUP_M * tiles_n) * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)  # the last group may have fewer
    within = tile_id % (GROUP_M * tiles_n)
    return first_m + within % rows, within // rows


@triton.jit
def split_columns(tile):
    """Return the left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def persistent_gemm(a_desc, b_desc, c_desc, M, N, K, PROGRAMS: tl.constexpr, GROUP_M: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    tiles_m, tiles_n, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    tile_id_c = tl.program_id(0) - PROGRAMS  # of the epilogue, while the loads are at the next tile
    for tile_id in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_coordinates(tile_id, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):  # outside of A and B, TMA fills a box with zeros
            a = a_desc.load([tile_m * BLOCK_M, step * BLOCK_K])
            acc = tl.dot(a, b_desc.load([tile_n * BLOCK_N, step * BLOCK_K]).T, acc)
        tile_id_c += PROGRAMS
        tile_m, tile_n = tile_coordinates(tile_id_c, tiles_m, tiles_n, GROUP_M)
        m, n, part = tile_m * BLOCK_M, tile_n * BLOCK_N, BLOCK_N // 4
        left, right = split_columns(acc)
        first, second = split_columns(left)
        third, fourth = split_columns(right)
        c_desc.store([m, n], first.to(tl.float16))
        c_desc.store([m, n + part], second.to(tl.float16))
        c_desc.store([m, n + 2 * part], third.to(tl.float16))
        c_desc.store([m, n + 3 * part], fourth.to(tl.float16))


def empty_padded(rows, columns, like):
    """Return a float16 matrix whose rows lie whole 16 bytes apart: a store by TMA may write up to there."""
    return like.new_empty(rows, triton.cdiv(columns, UNIT) * UNIT)[:, :columns]


def prepare(a, weight, out, programs):
    """Return a function that launches out = a weight.T, with a (M, K), weight (N, K) and out (M, N) in float16."""
    for name, tensor in (("a", a), ("weight", weight), ("out", out)):
        if tensor.stride() != (tensor.stride(0), 1) or tensor.stride(0) % UNIT or tensor.data_ptr() % 16:
            raise ValueError(f"{name} must be stored by rows that start at whole 16 bytes; use empty_padded.")
    (m, k), n = a.shape, len(weight)
    descriptors = (
        TensorDescriptor.from_tensor(a, [BLOCK_M, BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K]),
        TensorDescriptor.from_tensor(out, [BLOCK_M, BLOCK_N // PARTS]),
    )
    blocks = {"GROUP_M": 8, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
    return lambda: persistent_gemm[(programs,)](
        *descriptors, m, n, k, PROGRAMS=programs, **blocks, num_warps=4, num_stages=STAGES
    )


def make_case(m, n, k, where):
    """Return a, weight and out, with NaN in out and in all padding."""
    tensors = [
        empty_padded(*size, torch.empty(0, dtype=torch.float16, device=where))
        for size in ((m, k), (n, k), (m, n))
    ]
    for tensor in tensors:
        tensor._base.fill_(float("nan"))
    for tensor in tensors[:2]:
        tensor.normal_()
    return tensors


def is_right(m, n, k, programs, where):
    a, weight, out = make_case(m, n, k, where)
    prepare(a, weight, out, programs)()
    expected = a.double() @ weight.double().T
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    verdict = "right" if error < 1e-2 else "WRONG"  # NaN, an element that nobody wrote, is no smaller
    print(
        f"{m} × {n} × {k} by {programs} programs: {verdict}, largest error {error:.1e} of the largest element"
    )
    return error < 1e-2


def time_ms(calls, rounds=20, repeats=10):
    """Return the median milliseconds of each call; the calls take turns, so that all see the same clock of the chip."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats)
    return {name: sorted(each)[rounds // 2] for name, each in times.items()}


def main():
    where = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    cases = [
        (300, 264, 136, 3),
        (129, 131, 72, 1),
        (40, 1160, 200, 7),
    ]  # ragged, and more tiles than programs
    checks = [is_right(*case, where) for case in cases]
    if where == "cuda" and all(checks):
        a, weight, out = make_case(4096, 4096, 4096, where)
        programs = 2 * torch.cuda.get_device_properties(where).multi_processor_count
        calls = {
            "this file": prepare(a, weight, out, programs),
            "torch.mm": lambda: torch.mm(a, weight.T, out=out),
        }
        print(", ".join(f"{name} {ms:.3f} ms" for name, ms in time_ms(calls).items()), "at 4096³")
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
