"""The command line of `ch14.attention`: check and time steps of the ladder against cuDNN, or compile them."""

from __future__ import annotations

import argparse

from ch14.attention import configs, job
from ch14.attention.configs import HEAD_DIMS, best_config, rejection
from ch14.attention.lesson import experiments
from tilelab import cli
from tilelab.runtime import build, device

COLUMNS = [
    "name",
    "config",
    "status",
    "ms",
    "tflops",
    "ratio",
    "error",
    "peer_error",
    "registers",
    "spills",
    "smem",
    "tma_load",
    "wgmma",
    "tcgen05_mma",
    "mma_sync",
    "reason",
]


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = cli._parse_numbers(text)
    except ValueError:
        shape = ()
    if (
        len(shape) != 5
        or min(shape) < 1
        or shape[1] % shape[2]
        or shape[3] > 1 << 16
        or shape[4] not in HEAD_DIMS
        or shape[0] * shape[1] * shape[3] > 1 << 26
    ):
        raise argparse.ArgumentTypeError(
            "a shape is B,H,HK,S,D with H a multiple of HK, S up to 65,536, D 64 or 128, "
            f"and B x H x S up to 67,108,864; it is {text[:60]!r}."
        )
    return shape


def _parse_options(argv) -> argparse.Namespace:
    parser = cli.make_parser(
        "ch14.attention",
        "Check and time flash attention (forward, bf16) against cuDNN's; with --target only compile it.",
    )
    parser.add_argument(
        "--shape",
        type=_parse_shape,
        default=(4, 16, 16, 8192, 128),
        metavar="B,H,HK,S,D",
        help="batch, heads, key heads, length, head dimension (default 4,16,16,8192,128)",
    )
    parser.add_argument("--causal", action="store_true", help="query i sees keys 0 to i")
    parser.add_argument("--step", default="best", choices=(*configs(), "best", "all"))
    parser.add_argument(
        "--target", choices=device.TARGETS[1:], help="compile only, for this target; needs no GPU"
    )
    return cli.parse_options(parser, argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status of `cli.run_and_report`."""
    options = _parse_options(argv)
    return cli.run_and_report(
        "ch14.attention",
        COLUMNS,
        experiments.source(),
        options.json,
        lambda: _compile(options) if options.target else _measure(options),
    )


def _choose_steps(options, target: str) -> dict:
    b, h, hk, s, d = options.shape
    every = {**configs(d), "best": best_config(d, target, (b, h, hk, s, s, d, options.causal))}
    return every if options.step == "all" else {options.step: every[options.step]}


def _compile(options) -> list[dict]:
    rows = []
    for name, config in _choose_steps(options, options.target).items():
        if reason := rejection(config, options.target):
            row = {"status": "unsupported", "reason": reason}
        else:
            row = build.build_one(job(config, options.target, options.shape[4], options.causal)).row()
        rows.append(row | {"name": name, "config": str(config)})
    return rows


def _measure(options) -> list[dict]:
    device.require("has_tma", "timing attention", "compile it with --target sm_100a")
    b, h, hk, s, d = options.shape
    case, target = (b, h, hk, s, s, d, options.causal), device.current().target
    steps, rows = _choose_steps(options, target), {}
    for name, config in steps.items():
        reason = rejection(config, target)
        rows[name] = (
            {"status": "unsupported", "reason": reason} if reason else experiments.verify(config, case)
        )
    right = {
        name: experiments.prepare_attention(steps[name], options.causal)
        for name, row in rows.items()
        if row["status"] == "ok"
    }
    timed = {row["name"]: row for row in experiments.compare_with_cudnn(right, case)} if right else {}
    return [
        row | timed.get(name, {}) | experiments.label(case, name, steps[name]) for name, row in rows.items()
    ]


if __name__ == "__main__":
    cli.run_main(main)
