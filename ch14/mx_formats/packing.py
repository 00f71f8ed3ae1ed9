"""Lay codes and scales out in memory: fp4 two to a byte, fp6 four to three bytes, and scales in tiles of 128 x 4.

Sources: PTX ISA, "Packed data types" (e2m1x2: the first element in the lower nibble) and "Tensor dimension, size and
format", b4x16 and b6x16 (TMA reads 16 six-bit elements from 12 bytes without gaps); CUDA driver API,
CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B; cuBLAS, "Scaling factors layouts" (1D block scaling); cuDNN frontend, "The 128x4
scale factor layout".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ch14.mx_formats.configs import format_with_kernels
from ch14.mx_formats.number_formats import BlockFormat, Quantised

TILE = (128, 4)
CODES_PER_WORD = {4: 2, 6: 4, 8: 1}  # by the bits of a code: the codes that fill whole bytes together


def _check_bytes(name: str, given: torch.Tensor, bits: int, columns: int | None = None) -> int:
    """Return the codes per word, or raise ValueError unless `given` is a uint8 matrix with that many columns."""
    if bits not in CODES_PER_WORD:
        raise ValueError(f"bits must be 4, 6 or 8; it is {bits}.")
    if given.dtype != torch.uint8 or given.ndim != 2 or columns not in (None, given.shape[1]):
        raise ValueError(
            f"{name} must be a uint8 matrix{'' if columns is None else f' of {columns} columns'}; it is "
            f"{tuple(given.shape)} of {str(given.dtype)[6:]}."
        )
    return CODES_PER_WORD[bits]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes uint8 (R, C) of 4, 6 or 8 bits into bytes (R, ceil(C * bits / 8)), the first code in the lowest bits.

    Zeros fill a row that ends within a byte. Raise ValueError for codes that do not fit into `bits`.

        4 bits:  byte 0  b b b b a a a a        6 bits:  byte 0  b b a a a a a a
                                                         byte 1  c c c c b b b b
                                                         byte 2  d d d d d d c c
    """
    count = _check_bytes("codes", codes, bits)
    if codes.numel() and int(codes.max()) >= 2**bits:
        raise ValueError(f"codes of {bits} bits must be at most {2**bits - 1}; one is {int(codes.max())}.")
    padded = F.pad(codes, (0, -codes.shape[1] % count)).int()
    word = sum(padded[:, k::count] << bits * k for k in range(count))
    packed = (
        torch.stack([word >> 8 * k & 255 for k in range(bits * count // 8)], 2).flatten(1).to(torch.uint8)
    )
    return packed[:, : math.ceil(codes.shape[1] * bits / 8)].contiguous()


def unpack(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Return the codes uint8 (R, columns) that `pack` made these bytes from. Raise ValueError for another width."""
    count = _check_bytes("packed", packed, bits, math.ceil(columns * bits / 8))
    size = bits * count // 8  # bytes per word
    padded = F.pad(packed, (0, -packed.shape[1] % size)).int()
    word = sum(padded[:, k::size] << 8 * k for k in range(size))
    codes = torch.stack([word >> bits * k & 2**bits - 1 for k in range(count)], 2).flatten(1).to(torch.uint8)
    return codes[:, :columns].contiguous()


def tiled_size(rows: int, columns: int) -> int:
    """Return the bytes that scales of (rows, columns) take in tiles."""
    return -(-rows // TILE[0]) * -(-columns // TILE[1]) * TILE[0] * TILE[1]


def tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales uint8 (rows, scales per row) as the bytes, in one dimension, that Blackwell's tensor cores read.

    A tile of 128 rows x 4 scales takes 512 bytes. The tiles of the same rows follow each other. In a tile, scale (r, c)
    lies at byte r % 32 * 16 + r // 32 * 4 + c, so 16 bytes hold the four scales of four rows that are 32 apart:

        byte 0 to 15     row 0: c 0 1 2 3    row 32: c 0 1 2 3    row 64: c 0 1 2 3    row 96: c 0 1 2 3
        byte 16 to 31    row 1: c 0 1 2 3    row 33: c 0 1 2 3    row 65: c 0 1 2 3    row 97: c 0 1 2 3

    Rows and scales that are missing in the last tiles are zero.
    """
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % 4, 0, -rows % 128))
    # tile row, quarter, row, tile column, scale
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))
    return tiles.permute(0, 3, 2, 1, 4).flatten().contiguous()


def untile_scales(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the scales (rows, columns) that `tile_scales` made these bytes from."""
    if tiled.numel() != tiled_size(rows, columns):
        raise ValueError(
            f"scales of {rows} x {columns} take {tiled_size(rows, columns):,} bytes in tiles; there are "
            f"{tiled.numel():,}."
        )
    tiles = tiled.view(-(-rows // 128), -(-columns // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-(-rows // 128) * 128, -(-columns // 4) * 4)[:rows, :columns].contiguous()


@dataclass(frozen=True)
class Packed:
    """A matrix of `shape` (R, C) in a block format, as it lies in memory. All tensors are contiguous, on one device.

    values: uint8 (R, ceil(C * bits / 8)). scales: one per block, uint8 (R, G), or float32 for fp8_1x128; where `tiled`,
    one-dimensional as `tile_scales` makes them. pair: float32, NVFP4's tensor scale and its reciprocal, else None.
    `format` may be given by name. Raise ValueError for a format without kernels and for tensors of other shapes.
    """

    format: BlockFormat
    shape: tuple[int, int]
    values: torch.Tensor
    scales: torch.Tensor
    pair: torch.Tensor | None = None
    tiled: bool = False

    def __post_init__(self):
        object.__setattr__(self, "format", format_with_kernels(self.format))
        layout, tensors = _layout(self.format, self.shape, self.tiled), self.tensors()
        if list(layout) != list(tensors):
            raise ValueError(
                f"{self.format.name} needs {', '.join(layout)}; it was given {', '.join(tensors)}."
            )
        for name, (shape, dtype) in layout.items():
            found = tensors[name]
            if not isinstance(found, torch.Tensor):
                raise ValueError(f"{name} must be a torch.Tensor; it is a {type(found).__name__}.")
            if (tuple(found.shape), found.dtype, found.device) != (
                shape,
                dtype,
                self.values.device,
            ) or not found.is_contiguous():
                raise ValueError(
                    f"{name} of {self.shape[0]} x {self.shape[1]} in {self.format.name} must be {shape} "
                    f"of {dtype}, contiguous, on {self.values.device}; it is {tuple(found.shape)} of "
                    f"{found.dtype} on {found.device}, with strides {found.stride()}."
                )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        tensors = {"values": self.values, "scales": self.scales, "pair": self.pair}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the values and the scales."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def T(self) -> Transposed:
        """The transposed matrix (C, R), in the same memory: block-scaled GEMMs take it as b (K, N)."""
        return Transposed(self)

    def unpack(self) -> Quantised:
        """Return the same matrix with one code per byte, which `number_formats` works on."""
        rows, columns = self.shape
        scales = self.scales
        if self.tiled:
            scales = untile_scales(scales, rows, math.ceil(columns / self.format.block[1]))
        codes = unpack(self.values, self.format.element.bits, columns)
        return Quantised(self.format, codes, scales, None if self.pair is None else self.pair[:1])


@dataclass(frozen=True)
class Transposed:
    """Present a Packed (R, C) as its transpose (C, R), in the same memory; `T` is the Packed."""

    T: Packed

    @property
    def shape(self) -> tuple[int, int]:
        return self.T.shape[::-1]


def _layout(format: BlockFormat, shape: tuple[int, int], tiled: bool) -> dict[str, tuple[tuple, torch.dtype]]:
    """Return shape and dtype of each tensor that a Packed of `shape` holds."""
    if tiled and format.scale == "fp32":
        raise ValueError(f"tiles of 128 x 4 are for scales of one byte; those of {format.name} are float32.")
    # Under torch.compile an extent may be a SymInt, which stands for any number.
    if len(shape) != 2 or not all(isinstance(extent, int | torch.SymInt) and extent >= 0 for extent in shape):
        raise ValueError(f"shape must be two whole numbers from 0; it is {tuple(shape)!r:.60}.")
    rows, columns = shape
    groups = -(-columns // format.block[1])
    layout = {
        "values": ((rows, -(-columns * format.element.bits // 8)), torch.uint8),
        "scales": (
            (tiled_size(rows, groups),) if tiled else (rows, groups),
            torch.float32 if format.scale == "fp32" else torch.uint8,
        ),
    }
    return layout | ({"pair": ((2,), torch.float32)} if format.scale == "e4m3" else {})


def empty(
    shape: tuple[int, int], format: str | BlockFormat, device: str | torch.device = "cpu", tiled: bool = False
) -> Packed:
    """Return a Packed with new memory for a matrix of `shape`. The padding of tiled scales is zero."""
    format = format_with_kernels(format)
    tensors = {
        name: torch.empty(size, dtype=dtype, device=device)
        for name, (size, dtype) in _layout(format, shape, tiled).items()
    }
    if tiled:
        tensors["scales"].zero_()
    return Packed(format, shape, **tensors, tiled=tiled)


def make_allocator(packed: Packed) -> Callable[[], Packed]:
    """Return a function that makes new memory for matrices like `packed`, as `empty` does, in a fifth of its time."""
    kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in packed.tensors().items()]
    (rows, columns), device = packed.shape, packed.values.device
    has_padding = packed.tiled and tiled_size(rows, -(-columns // packed.format.block[1])) > (
        rows * -(-columns // packed.format.block[1])
    )
    fields = {"format": packed.format, "shape": packed.shape, "pair": None, "tiled": packed.tiled}

    def allocate():
        made = object.__new__(Packed)  # which was checked once
        made.__dict__.update(fields)
        for name, shape, dtype in kinds:
            made.__dict__[name] = torch.empty(shape, dtype=dtype, device=device)
        if has_padding:
            made.scales.zero_()
        return made

    return allocate
