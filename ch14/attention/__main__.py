"""The command line of `ch14.attention`: check and time steps of the ladder against cuDNN, or compile them."""

from __future__ import annotations

import argparse
import sys

from ch14.attention import experiments
from ch14.attention.configs import HEAD_DIMS, best, configs, job, rejection
from tilelab import build, cli, device

STEPS = tuple(configs(128))


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 5 or min(shape) < 1 or shape[1] % shape[2] or shape[3] > 1 << 16 or shape[4] not in HEAD_DIMS \
            or shape[0] * shape[1] * shape[3] > 1 << 26:
        raise argparse.ArgumentTypeError("B,H,HK,S,D: H a multiple of HK, S up to 65,536, D 64 or 128, B H S up to "
                                         f"67,108,864; here it is {text[:60]!r}.")
    return shape


def _arguments(argv):
    parser = cli.make_parser("ch14.attention", "Flash attention, forward, bf16, against cuDNN's; with --target only compile "
                        "it.")
    parser.add_argument("--shape", type=_shape, default=(4, 16, 16, 8192, 128), metavar="B,H,HK,S,D",
                        help="batch, heads, key heads, length, head dimension (default 4,16,16,8192,128)")
    parser.add_argument("--causal", action="store_true", help="query i sees keys 0 to i")
    parser.add_argument("--step", default="best", choices=(*STEPS, "best", "all"))
    parser.add_argument("--target", choices=device.TARGETS[1:], help="compile only, for this target; needs no GPU")
    return cli.parse_options(parser, argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _arguments(argv)
    columns = ["name", "config", "status", "ms", "tflops", "ratio", "error", "peer_error", "registers", "spills",
               "smem", "tma_load", "wgmma", "tcgen05_mma", "mma_sync", "reason"]
    return cli.run_and_report("ch14.attention", columns, experiments.source(), options.json,
                      lambda: _compiled(options) if options.target else _measured(options))


def _steps(options, target: str) -> dict:
    b, h, hk, s, d = options.shape
    every = {**configs(d), "best": best(d, target)}
    return every if options.step == "all" else {options.step: every[options.step]}


def _compiled(options) -> list[dict]:
    rows = []
    for name, config in _steps(options, options.target).items():
        if reason := rejection(config, options.target):
            rows.append({"status": "unsupported", "reason": reason})
        else:
            rows.append(build.build_one(job(config, options.target, options.shape[4],
                                                              options.causal)).row())
        rows[-1] |= {"name": name, "config": str(config)}
    return rows


def _measured(options) -> list[dict]:
    device.require("has_tma", "timing attention", "compile it with --target sm_100a")
    b, h, hk, s, d = options.shape
    case, target = (b, h, hk, s, s, d, options.causal), device.current().target
    steps = _steps(options, target)
    rows = {name: {"status": "unsupported", "reason": rejection(config, target)}
            for name, config in steps.items()}
    rows = {name: row if row["reason"] else experiments.verify(steps[name], case) for name, row in rows.items()}
    right = {name: experiments.ours(steps[name], options.causal) for name, row in rows.items()
             if row["status"] == "ok"}
    timed = {row["name"]: row for row in experiments.against_cudnn(right, case)} if right else {}
    return [row | timed.get(name, {}) | experiments.label(case, name, steps[name]) for name, row in rows.items()]


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
