"""Prepare on the host what the kernel in cute_gemm.py needs: layouts, tensor maps, a grid and wrapped tensors."""

import functools

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.utils import LayoutEnum


def make_launch(gemm):
    """Return a function for CuTe's compiler that makes layouts and tensor maps and launches the kernel `gemm`."""

    @cute.jit
    def launch(A, B, C, bias, stream: driver.CUstream, tile: cutlass.Constexpr, stages: cutlass.Constexpr):
        k_major, rows = OperandMajorMode.K, LayoutEnum.ROW_MAJOR
        warp_groups, size = (tile[0] // 64, 1, 1), (64, tile[1])
        mma = hopper.make_trivial_tiled_mma(BFloat16, BFloat16, k_major, k_major, Float32, warp_groups, size)
        a = hopper.make_smem_layout_a(rows, tile, BFloat16, stages)
        b = hopper.make_smem_layout_b(rows, tile, BFloat16, stages)
        one_stage = (None, None, 0)
        c = cute.slice_(hopper.make_smem_layout_epi(BFloat16, rows, tile[:2], 1), one_stage)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_a, A = cpasync.make_tiled_tma_atom(load, A, cute.slice_(a, one_stage), (tile[0], tile[2]))
        load_b, B = cpasync.make_tiled_tma_atom(load, B, cute.slice_(b, one_stage), (tile[1], tile[2]))
        store_c, C = cpasync.make_tiled_tma_atom(store, C, c, tile[:2])
        grid = (cute.ceil_div(C.shape[0], tile[0]), cute.ceil_div(C.shape[1], tile[1]), 1)
        threads = 2 * tile[0] + 32  # 128 per 64 rows, and a warp that loads
        more = (bias,) if cutlass.const_expr(bias is not None) else ()
        gemm(mma, load_a, A, load_b, B, store_c, C, *more, (a, b, c), tile).launch(
            grid=grid, block=(threads, 1, 1), stream=stream
        )

    return launch


def partition(atom, *both):
    """Return TMA's boxes in shared memory and in the matrix."""
    flat = [cute.group_modes(each, 0, 2) for each in both]
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), *flat)


def wrap(matrix):
    """Return a row-major matrix in CuTe's form, of any extents whose rows are whole 16 bytes."""
    tensor = from_dlpack(matrix, assumed_align=16).mark_layout_dynamic(leading_dim=1)
    return tensor.mark_compact_shape_dynamic(mode=1, divisibility=8)


def wrap_vector(vector=None):
    return vector if vector is None else from_dlpack(vector, assumed_align=16).mark_layout_dynamic()


@functools.cache
def compile_gemm(gemm, tile, stages, biases):
    matrix, bias = wrap(torch.empty(8, 8, dtype=torch.bfloat16)), [torch.empty(8)] * biases
    tensors = matrix, matrix, matrix, wrap_vector(*bias)
    return cute.compile(make_launch(gemm), *tensors, driver.CUstream(0), tile, stages)


def prepare(gemm, a, b, *more, tile, stages):
    *bias, out = more  # only an exercise has a bias
    kernel = compile_gemm(gemm, tuple(tile), stages, len(bias))
    tensors = wrap(a), wrap(b.T), wrap(out), wrap_vector(*bias)
    return lambda: kernel(*tensors, driver.CUstream(torch.cuda.current_stream().cuda_stream))
