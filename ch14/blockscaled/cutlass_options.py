"""Read the command line of `ch14.blockscaled`: the field note uses these options of CUTLASS's example."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ch14 import blockscaled, mx_formats
from ch14.blockscaled import smem_planner
from ch14.blockscaled.smem_planner import require_one_of
from tilelab import cli, device

FORMS = {("Float4E2M1FN", "Float8E8M0FNU", 32): "mxfp4", ("Float4E2M1FN", "Float8E4M3FN", 16): "nvfp4",
         ("Float4E2M1FN", "Float8E8M0FNU", 16): "fp4_e8m0_16", ("Float8E4M3FN", "Float8E8M0FNU", 32): "mxfp8_e4m3",
         ("Float8E5M2", "Float8E8M0FNU", 32): "mxfp8_e5m2", ("Float6E3M2FN", "Float8E8M0FNU", 32): "mxfp6_e3m2",
         ("Float6E2M3FN", "Float8E8M0FNU", 32): "mxfp6_e2m3"}
FP8 = ("Float8E4M3FN", "Float32", 128)  # DeepSeek's format, which CUTLASS's example does not have
FP8_PLAN = ("Float8E4M3FN", "Float8E8M0FNU", 32)  # its tiles and clusters, for the planner
C_DTYPES = {"Float16": torch.float16, "BFloat16": torch.bfloat16, "Float32": torch.float32}
KERNELS = ("best", "native", "emulated", "naive")
PEER = "cuBLAS bf16"
LARGEST = 1 << 17


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with what `_interpret` adds. Bad usage ends the process with one line and status 2."""
    parser = cli.make_parser("ch14.blockscaled", "Check a block-scaled GEMM against float64 and time it against cuBLAS "
                             "bf16; with --target compile it and plan its stages, without a GPU.")
    usual = smem_planner.Blackwell()
    parser.add_argument("--mnkl", default="8192,8192,1024,1", metavar="M,N,K,L",
                        help="C (M, N) = A (M, K) B (K, N), L times (default 8192,8192,1024,1)")
    for name in ("mma_tiler_mn", "cluster_shape_mn"):
        default = ",".join(map(str, getattr(usual, name)))
        parser.add_argument(f"--{name}", default=default, metavar="M,N", help=f"for tcgen05 (default {default})")
    for name, choices in (("ab_dtype", smem_planner.FORMATS),
                          ("sf_dtype", ("Float8E8M0FNU", "Float8E4M3FN", "Float32")),
                          ("sf_vec_size", ("16", "32", "128")), ("c_dtype", C_DTYPES)):
        default = getattr(usual, name)
        parser.add_argument(f"--{name}", default=default, type=type(default),
                            help=f"{', '.join(choices)} (default {default})")
    parser.add_argument("--kernel", default="best", choices=KERNELS, help="best (default): by formats and GPU")
    for name, text in (("use_baseline", "time naive dot_scaled beside it, where that exists"),
                       ("skip_ref_check", "do not compare with float64"),
                       ("benchmark_mode", f"time it against {PEER}")):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--target", choices=device.TARGETS[1:], help="compile and plan only, for this target")
    options = cli.parse_options(parser, argv)
    try:
        _interpret(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _numbers(name: str, text: str, count: int) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != count or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ValueError(f"--{name} is {text[:60]!r}; it must be {count} whole numbers separated by commas.")
    return tuple(map(int, parts))


def _interpret(options) -> None:
    """Add choice (of the planner), forms, form, timed and mnkl as numbers; raise ValueError for impossible ones."""
    given = options.ab_dtype, options.sf_dtype, options.sf_vec_size
    if options.sf_dtype == "Float32" and given != FP8:
        raise ValueError("Float32 scales go over 128 elements of Float8E4M3FN, not over "
                         f"{options.sf_vec_size} of {options.ab_dtype}.")
    tile = (_numbers(name, getattr(options, name), 2) for name in ("mma_tiler_mn", "cluster_shape_mn"))
    options.choice = smem_planner.Blackwell(*tile, *(FP8_PLAN if given == FP8 else given), c_dtype=options.c_dtype)
    options.forms = blockscaled.PAIR if given == FP8 else (mx_formats.format_with_kernels(FORMS[given]).name,) * 2
    options.form = options.forms[0]
    require_one_of("c_dtype of a kernel that runs (smem_planner plans more)", options.c_dtype, C_DTYPES)
    if given == FP8 and options.c_dtype != "BFloat16":
        raise ValueError(f"c_dtype is {options.c_dtype}; with Float32 scales C is BFloat16.")
    size = options.sf_vec_size
    m, n, k, count = options.mnkl = _numbers("mnkl", options.mnkl, 4)
    if min(options.mnkl) < 1 or max(m, n, k) > LARGEST or count > 1024 or k % size:
        raise ValueError(f"--mnkl is {m},{n},{k},{count}; M, N and K must be from 1 to {LARGEST:,}, K a multiple of "
                         f"--sf_vec_size ({size}), and L from 1 to 1,024.")
    options.timed = options.benchmark_mode or options.use_baseline
    if options.kernel == "naive" and options.use_baseline:
        raise ValueError("--kernel naive is the baseline: a kernel compared with itself shows the noise of the clock, "
                         "not a speedup; leave out one of --kernel naive and --use_baseline.")
    if options.target and (options.benchmark_mode or options.skip_ref_check):
        raise ValueError("--target only compiles and plans: leave out --benchmark_mode and --skip_ref_check.")
    if options.skip_ref_check and not options.timed:
        raise ValueError("with --skip_ref_check and no --benchmark_mode or --use_baseline there is nothing to do.")


def describe_tile(options, config: str) -> str:
    """Return a sentence that says why the requested tile does not apply to a kernel of the course."""
    tile, cluster = options.choice.mma_tiler_mn, options.choice.cluster_shape_mn
    return (f"A tile of {tile[0]} x {tile[1]} and a cluster of {cluster[0]} x {cluster[1]} are CUTLASS's words for a "
            f"tcgen05 kernel; they do not apply to this one, whose tile is its own: {config}.")
