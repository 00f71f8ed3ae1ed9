"""What the operations of `ch10.tile_pipeline` mean, in plain torch: bits for those that only move, else float64."""

from __future__ import annotations

import ctypes

import torch


def copy_spec(x):
    """x (R, C) -> (R, C): the same bits."""
    return x.clone()


def stencil_spec(x, centre: float, edge: float, fill: str = "zero"):
    """x (R, C) -> (R, C) in float64: centre x + edge (up + down + left + right), with `fill` outside of x; the weights
    as the float32 that the kernel takes."""
    centre, edge = (ctypes.c_float(value).value for value in (centre, edge))
    wide = torch.nn.functional.pad(x.double(), (1, 1, 1, 1), value=float("nan") if fill == "nan" else 0.0)
    return centre * x.double() + edge * (wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:])


def transpose_spec(x):
    """x (R, C) -> (C, R): the same bits."""
    return x.T.clone()


def add_shared_spec(x, y):
    """x (B, R, C), y (R, C) -> (B, R, C) in float64: x[b] + y."""
    return x.double() + y.double()


def accumulate_spec(x):
    """x (B, R, C) -> (R, C) in float64: the sum over b of x[b]."""
    return x.double().sum(0)
