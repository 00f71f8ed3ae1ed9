"""The command line of `ch10.wgmma_gemm`: check and time steps of the ladder against cuBLAS, or compile them."""

from __future__ import annotations

import argparse

from ch10.wgmma_gemm import INSTEAD, experiments, resolve_config
from ch10.wgmma_gemm.configs import STEPS, predict_us
from tilelab import cli, device


def _shape(text: str) -> tuple[int, int, int]:
    try:
        m, n, k = cli.parse_sizes(text)
    except ValueError:
        m = n = k = 0
    if not 1 <= min(m, n, k) <= max(m, n, k) < 1 << 31 or n % 8 or k % 8:
        raise argparse.ArgumentTypeError(f"bad shape {text[:60]!r}; give M,N,K below 2^31, N and K multiples of 8.")
    return m, n, k


def _parse_arguments(argv):
    parser = cli.make_parser("ch10.wgmma_gemm", "Check and time C = A B (bf16) against cuBLAS; with --compile only "
                             "compile it for sm_90a.")
    parser.add_argument("--mnk", type=_shape, default=(4096, 4096, 4096), metavar="M,N,K")
    parser.add_argument("--step", default="best", metavar="NAME|best|all",
                        help=f"{', '.join(STEPS)}, best (default), or all")
    parser.add_argument("--compile", action="store_true", help="compile only; needs no GPU")
    options = cli.parse_options(parser, argv)
    named = {"best": resolve_config("best", *options.mnk), **STEPS}
    options.configs = cli.choose_variants(parser, options.step, named, "--step")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _parse_arguments(argv)
    columns = ["name", "config", "status", "ms", "predicted_ms", "tflops", "ratio", "error", "peer_error",
               "registers", "spills", "smem", "HGMMA", "reason"]
    return cli.run_and_report("ch10.wgmma_gemm", columns, experiments.source(), options.json, lambda: (
        experiments.compile_steps(options.configs) if options.compile else _check_and_time(options)))


def _check_and_time(options) -> list[dict]:
    device.require("has_wgmma", "wgmma_gemm", INSTEAD)
    rows = cli.check_and_time(options.configs, lambda config: experiments.verify(config, *options.mnk),
                              lambda right: experiments.compare_with_cublas(right, *options.mnk))
    return [{**row, "predicted_ms": predict_us(options.configs[row["name"]], *options.mnk, device.current().sms) / 1e3}
            for row in rows]


if __name__ == "__main__":
    cli.run_main(main)
