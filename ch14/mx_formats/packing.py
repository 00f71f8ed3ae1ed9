"""How codes and scales lie in memory: fp4 two to a byte, fp6 four to three bytes, and scales in tiles of 128 x 4.

Sources: PTX ISA, "Packed data types" (e2m1x2: the first element in the lower nibble) and "Tensor dimension, size and
format", b4x16 and b6x16 (TMA reads 16 six-bit elements from 12 bytes without gaps); CUDA driver API,
CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B; cuBLAS, "Scaling factors layouts" (1D block scaling); cuDNN frontend, "The 128x4
scale factor layout".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE = (128, 4)


def _check_bits(bits: int) -> None:
    if bits not in (4, 6, 8):
        raise ValueError(f"codes of 4, 6 and 8 bits are packed; here it is {bits}.")


def _codes(codes: torch.Tensor, bits: int, whole: int) -> torch.Tensor:
    """Checked, with rows padded by zeros to a multiple of `whole` codes."""
    if codes.dtype != torch.uint8 or codes.ndim != 2:
        raise ValueError(f"codes are a uint8 matrix; here is {codes.ndim}-dimensional {str(codes.dtype)[6:]}.")
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"a code has {bits} bits, 0 to {2**bits - 1}; here is {int(codes.max())}.")
    return F.pad(codes, (0, -codes.shape[1] % whole))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 (R, C) of 4, 6 or 8 bits -> bytes (R, ceil(C * bits / 8)), a row at a time, the first code lowest.

    A row that ends within a byte is filled with zeros. ValueError for other codes.
    """
    _check_bits(bits)
    if bits == 8:
        return _codes(codes, 8, 1)
    if bits == 4:
        whole = _codes(codes, 4, 2)
        return whole[:, ::2] | whole[:, 1::2] << 4
    a, b, c, d = _codes(codes, 6, 4).int().unflatten(1, (-1, 4)).unbind(2)
    word = a | b << 6 | c << 12 | d << 18
    packed = torch.stack([word & 255, word >> 8 & 255, word >> 16], 2).flatten(1).to(torch.uint8)
    return packed[:, :-(-codes.shape[1] * 6 // 8)].contiguous()


def unpack(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The inverse of `pack`: codes uint8 (R, columns). ValueError for bytes of another width."""
    _check_bits(bits)
    if packed.dtype != torch.uint8 or packed.ndim != 2 or packed.shape[1] != -(-columns * bits // 8):
        raise ValueError(f"{columns} codes of {bits} bits are a uint8 matrix of {-(-columns * bits // 8)} columns; "
                         f"here is {tuple(packed.shape)} {str(packed.dtype)[6:]}.")
    if bits == 8:
        return packed.clone()
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], 2).flatten(1)[:, :columns].contiguous()
    low, middle, high = F.pad(packed, (0, -packed.shape[1] % 3)).int().unflatten(1, (-1, 3)).unbind(2)
    word = low | middle << 8 | high << 16
    codes = torch.stack([word >> 6 * k & 63 for k in range(4)], 2).flatten(1).to(torch.uint8)
    return codes[:, :columns].contiguous()


def tiled_size(rows: int, columns: int) -> int:
    """Bytes that scales of (rows, columns) take in tiles."""
    return -(-rows // TILE[0]) * -(-columns // TILE[1]) * TILE[0] * TILE[1]


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales uint8 (rows, blocks of a row) -> the bytes that Blackwell's tensor cores read, one-dimensional.

    Tiles of 128 rows x 4 scales take 512 bytes each, tiles of the same rows follow each other; in a tile, scale
    (r, c) lies at r % 32 * 16 + r // 32 * 4 + c: 16 bytes hold the four scales of four rows, 32 apart. Missing
    rows and scales are zero.
    """
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))  # tile row, quarter, row, tile column, scale
    return tiles.permute(0, 3, 2, 1, 4).flatten().contiguous()


def untile_scales(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `tile_scales`: (rows, columns). ValueError for another number of bytes."""
    if tiled.numel() != tiled_size(rows, columns):
        raise ValueError(f"scales of {(rows, columns)} take {tiled_size(rows, columns):,} bytes in tiles; here are "
                         f"{tiled.numel():,}.")
    tiles = tiled.view(-(-rows // 128), -(-columns // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-(-rows // 128) * 128, -(-columns // 4) * 4)[:rows, :columns].contiguous()
