"""Prepare on the host what the kernel in cuda_gemm.cu needs: tensor maps, constants, shared memory and a grid."""

import ctypes
import functools

from tilelab.runtime import cuda, device, tensor_map


def compile_kernel(path, target: str, **config) -> bytes:
    """Return the cubin of a configuration; it needs no GPU."""
    return cuda.compile_file(path, target, [f"-D{name}={value}" for name, value in config.items()])


@functools.cache
def load(path, **config):
    return cuda.load_cubin(compile_kernel(path, device.current().target, **config), "gemm")


def prepare(path, a, b, *more, BLOCK_M, BLOCK_N, STAGES, GROUP_M):
    *bias, out = more  # only an exercise has a bias
    (m, k), n = a.shape, b.shape[1]
    kernel = load(path, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=STAGES, GROUP_M=GROUP_M)
    boxes = (a, BLOCK_M), (b.T, BLOCK_N), (out, 64)
    maps = [tensor_map.make_tensor_map(matrix, [rows, 64], swizzle="128B") for matrix, rows in boxes]
    smem = STAGES * (BLOCK_M + BLOCK_N) * 128 + BLOCK_M * BLOCK_N * 2 + 16 * STAGES
    programs = min(device.current().sms, -(-m // BLOCK_M) * -(-n // BLOCK_N))
    arguments = [*maps, *map(ctypes.c_int, (m, n, k)), *bias]
    launch = cuda.prepare_launch(kernel, programs, 128 + 2 * BLOCK_M, arguments, smem)
    launch.tensors = a, b, more  # a tensor map holds only an address
    return launch
