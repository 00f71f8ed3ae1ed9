"""The command line of `ch10.wgmma_gemm`: check and time steps of the ladder against cuBLAS, or compile them."""

from __future__ import annotations

from ch10.wgmma_gemm import INSTEAD, LARGEST_EXTENT, resolve_config
from ch10.wgmma_gemm.configs import STEPS, predict_us
from ch10.wgmma_gemm.lesson import experiments, sweep
from tilelab import cli
from tilelab.runtime import device
from tilelab.sweeps import tune


def _parse_arguments(argv):
    parser = cli.make_parser(
        "ch10.wgmma_gemm",
        "Check and time C = A B (bf16) against cuBLAS; with --compile only compile it for sm_90a.",
    )
    parser.add_argument(
        "--mnk", default="4096,4096,4096", metavar="M,N,K", help="sizes (default 4096,4096,4096)"
    )
    parser.add_argument(
        "--step", default="best", metavar="NAME|best|all", help=f"{', '.join(STEPS)}, best (default), or all"
    )
    parser.add_argument(
        "--tune",
        metavar="FILE",
        help="find the fastest configuration for each shape M,N,K of a file, "
        'and keep it in tuned/, where config="best" finds it',
    )
    parser.add_argument("--compile", action="store_true", help="compile only; needs no GPU")
    options = cli.parse_options(parser, argv)
    given = {name for name in vars(options) if getattr(options, name) != parser.get_default(name)}
    if options.tune is not None and len(given) > 1:
        parser.error("--tune stands alone; another option was given too.")
    options.mnk = cli.require_sizes(parser, "--mnk", options.mnk, "M,N,K", LARGEST_EXTENT)
    if options.mnk[1] % 8 or options.mnk[2] % 8:
        parser.error(
            f"N and K of --mnk must be multiples of 8; they are {options.mnk[1]} and {options.mnk[2]}."
        )
    named = {"best": resolve_config("best", *options.mnk), **STEPS}
    options.configs = cli.choose_variants(parser, options.step, named, "--step")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _parse_arguments(argv)
    if options.tune is not None:
        return tune.run_command("ch10.wgmma_gemm", sweep.WgmmaSpace, options.tune)
    columns = [
        "name",
        "config",
        "status",
        "ms",
        "predicted_ms",
        "tflops",
        "ratio",
        "error",
        "peer_error",
        "registers",
        "spills",
        "smem",
        "HGMMA",
        "reason",
    ]
    return cli.run_and_report(
        "ch10.wgmma_gemm",
        columns,
        experiments.source(),
        options.json,
        lambda: experiments.compile_steps(options.configs) if options.compile else _check_and_time(options),
    )


def _check_and_time(options) -> list[dict]:
    device.require("has_wgmma", "wgmma_gemm", INSTEAD)
    rows = cli.check_and_time(
        options.configs,
        lambda config: experiments.verify(config, *options.mnk),
        lambda right: experiments.compare_with_cublas(right, *options.mnk),
    )
    return [
        {
            **row,
            "predicted_ms": predict_us(options.configs[row["name"]], *options.mnk, device.current().sms)
            / 1e3,
        }
        for row in rows
    ]


if __name__ == "__main__":
    cli.run_main(main)
