"""The command line of `ch10.wgmma_gemm`: check and time steps of the ladder against cuBLAS, or compile them."""

from __future__ import annotations

import argparse
import sys

from ch10 import wgmma_gemm
from ch10.wgmma_gemm import experiments
from ch10.wgmma_gemm.configs import STEPS, predicted_us
from tilelab import cli, device


def _shape(text: str) -> tuple[int, int, int]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 3 or not 1 <= min(shape) <= max(shape) < 1 << 31 or shape[1] % 8 or shape[2] % 8:
        raise argparse.ArgumentTypeError(f"M,N,K from 1 and below 2^31, N and K multiples of 8; here it is {text!r}.")
    return shape


def _arguments(argv):
    parser = cli.make_parser("ch10.wgmma_gemm", "C = A B^T, bf16, on Hopper's tensor cores, against cuBLAS; with --compile "
                        "only compile it for sm_90a.")
    parser.add_argument("--mnk", type=_shape, default=(4096, 4096, 4096), metavar="M,N,K")
    parser.add_argument("--step", default="best", metavar="NAME|best|all|CONFIG",
                        help=f"{', '.join(STEPS)}, best (default), all, or "
                             "KERNEL,BLOCK_M,BLOCK_N,STAGES,NAME=NUMBER...")
    parser.add_argument("--compile", action="store_true", help="compile only; needs no GPU")
    options = cli.parse_options(parser, argv)
    names = [*STEPS, "best"] if options.step == "all" else [options.step]
    try:
        options.chosen = {name: wgmma_gemm.chosen(name, *options.mnk, device.current().sms or 132) for name in names}
    except (ValueError, device.Unsupported) as error:
        parser.error(f"--step: {device.first_line(error).rstrip('.')}.")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _arguments(argv)
    columns = ["name", "config", "status", "ms", "predicted_ms", "tflops", "ratio", "error", "peer_error",
               "registers", "spills", "smem", "HGMMA", "reason"]
    return cli.run_and_report("ch10.wgmma_gemm", columns, experiments.source(), options.json,
                      lambda: experiments.built(options.chosen) if options.compile else _measured(options))


def _measured(options) -> list[dict]:
    device.require("has_wgmma", "wgmma_gemm", wgmma_gemm.INSTEAD)
    checked = {name: experiments.verify(config, *options.mnk) for name, config in options.chosen.items()}
    right = {name: options.chosen[name] for name, row in checked.items() if row["status"] == "ok"}
    timed = {row["name"]: row for row in experiments.against_cublas(right, *options.mnk)} if right else {}
    return [{"config": str(options.chosen[name]), **row, **timed.get(name, {}), "name": name,
             "predicted_ms": predicted_us(options.chosen[name], *options.mnk, device.current().sms) / 1e3}
            for name, row in checked.items()]


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
