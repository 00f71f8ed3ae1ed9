"""What to run of transpose.cu in the emulator: python -m tilelab.emulator transpose.cu --launch launch_transpose.py."""

import torch

from tilelab.cells.cuda_magic import make_tensor_map

ROWS, COLUMNS, STAGES = 128, 32, 3


def launch(transpose):
    """Return what the kernel has turned and what is right: 3 x 5 tiles, ragged at both edges, by 2 blocks."""
    x = torch.randn(260, 132)
    out = torch.full((132, 260), torch.nan)
    maps = make_tensor_map(x, (ROWS, COLUMNS), swizzle="128B"), make_tensor_map(out, (COLUMNS, ROWS))
    transpose[2, 256, (STAGES + 1) * ROWS * COLUMNS * 4](*maps, 5, 15)
    return out, x.T.contiguous()
