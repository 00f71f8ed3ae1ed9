"""Prepare on the host what the kernel in gluon_gemm.py needs: tensor descriptors with layouts, and a grid."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilelab.runtime import device


def prepare(gemm, a, b, *more, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M):
    *bias, out = more  # only an exercise has a bias
    descs = []
    for matrix, box in ((a, [BLOCK_M, BLOCK_K]), (b.T, [BLOCK_N, BLOCK_K]), (out, [BLOCK_M, BLOCK_N])):
        layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
        descs.append(TensorDescriptor.from_tensor(matrix, box, layout))
    arguments = (*descs, *bias, a.shape[1], STAGES, GROUP_M)
    return lambda: gemm[(device.current().sms or 4,)](*arguments, num_warps=8)
