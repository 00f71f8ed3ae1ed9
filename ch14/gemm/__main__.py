"""The command line of `ch14.gemm`: check, time, sweep, or compile for another GPU."""

from __future__ import annotations

import dataclasses
import sys

from tqdm import tqdm

from ch14.descriptors.lesson import tile_copy_experiments
from ch14.gemm import find_best
from ch14.gemm.configs import ITEMSIZE, SETS, configs, parse, rank_configs, rejection
from ch14.gemm.lesson import experiments, tuning
from ch14.gemm.lesson.sweep import grid, make_space
from tilelab import cli
from tilelab.records import results
from tilelab.runtime import device
from tilelab.sweeps import tune
from tilelab.sweeps.journal import Journal
from tilelab.sweeps.sweep import Sweep


def _parse_options(argv):
    parser = cli.make_parser(
        "ch14.gemm",
        "Check and time tile configurations of a descriptor GEMM against cuBLAS; "
        "with --target only compile them.",
    )
    parser.add_argument("--mnk", default="4096,4096,4096", help="M,N,K (default 4096,4096,4096)")
    parser.add_argument("--dtype", default="bf16", choices=tuple(ITEMSIZE))
    parser.add_argument(
        "--layout", default="k", choices=("k", "n"), help="B as weight.T (k, default) or by rows (n)"
    )
    parser.add_argument(
        "--config",
        default="best",
        metavar="SET|best|NAME|BM,BN,BK,WARPS,STAGES",
        help=f"a set ({', '.join(SETS)}), best (default), a configuration's name, or one tile",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="try a grid of 96 configurations, best predicted first"
    )
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    parser.add_argument(
        "--copy", action="store_true", help="time the copy configurations instead of the GEMM"
    )
    parser.add_argument(
        "--claim",
        action="store_true",
        help="time the note's two sets and the best tile at six "
        "sizes: speed, bandwidth, memory; recorded figures without a GPU",
    )
    parser.add_argument(
        "--tune",
        metavar="FILE",
        help="find the fastest configuration for each shape M,N,K of a file, "
        'and keep it in tuned/, where config="best" finds it',
    )
    parser.add_argument(
        "--journal", metavar="PATH", help="keep each row in this JSONL file, and resume from it"
    )
    options = cli.parse_options(parser, argv)
    given = {name for name in vars(options) if getattr(options, name) != parser.get_default(name)}
    for alone in ("copy", "claim", "tune"):
        if alone in given and (others := given - {alone, *({"json"} if alone != "tune" else ())}):
            parser.error(
                f"--{alone} {'stands alone' if alone == 'tune' else 'goes with --json only'}; --{min(others)} "
                "was given too."
            )
    if options.sweep and "config" in given:
        parser.error("--sweep brings its own configurations: leave out --config.")
    if options.journal is not None:  # refused before the work, not after it
        if reason := cli.unwritable_reason(options.journal):
            parser.error(f"--journal takes a file; {reason}.")
        try:
            options.journal = Journal(options.journal)
        except (OSError, ValueError) as error:
            parser.error(f"--journal: {error}")
    if options.dtype == "fp8" and options.layout == "n":
        parser.error("float8 tensor cores read B with K contiguous: leave out --layout n.")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 when all is fine, 1 for a wrong result, 2 when nothing could run, 130 cancelled."""
    options = _parse_options(argv)
    if options.tune is not None:
        return tune.run_command("ch14.gemm", tuning.TUNABLE, options.tune)
    journal = options.journal
    try:
        record = (
            _measure_copies(options)
            if options.copy
            else _show_claim(options)
            if options.claim
            else _run_sweep(options)
        )
        if options.json:
            cli.write_json(record.data, options.json)
    except BrokenPipeError:
        raise  # to `cli.run_main`
    except (ValueError, OSError, device.Unsupported) as error:
        print(f"python -m ch14.gemm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = "nothing was kept (--journal PATH keeps rows)"
        if journal and (rows := len(journal.rows())):
            kept = f"{journal.path} keeps {rows} rows, and the same command goes on from there"
        print(f"python -m ch14.gemm: cancelled; {kept}.", file=sys.stderr)
        return 130
    statuses = {row["status"] for row in record.rows}
    return 1 if "wrong" in statuses else 0 if "ok" in statuses else 2


def _measure_copies(options) -> results.Record:
    device.require("has_tma", "timing the copy", "read results/")
    record = tile_copy_experiments.measure_copies()
    if options.json != "-":
        print(record)
    return record


def _show_claim(options) -> results.Record:
    record = experiments.measure_claim()
    if options.json != "-":
        rows = [
            experiments.add_bandwidth(row, record.device["name"])
            for row in sorted(record.rows, key=lambda row: row["shape"])
        ]
        columns = [
            "shape",
            "name",
            "kernel",
            "status",
            "ms",
            "tflops",
            "ratio",
            "gbps",
            "floor_percent",
            "peak_mib",
        ]
        print(
            results.table(rows, record.label(), columns),
            "gbps counts A, B and C once; "
            "floor_percent is the share that gbps has in the bandwidth of the GPU's datasheet.",
            sep="\n",
        )
    return record


def _choose_configs(options, m, n, k) -> list:
    here = device.current()
    if options.sweep:
        return grid(options.dtype)
    if options.config in SETS:
        return list(configs(options.config, options.dtype).values())
    if options.config != "best":
        return [parse(options.config, options.dtype)]
    target, sms = (here.target, here.sms) if here.has_tma else ("sm_90a", 132)
    if options.target:
        return rank_configs("course", m, n, k, options.dtype, options.target, sms)[:1]
    return [find_best(m, n, k, options.dtype, options.layout == "k", target, sms)[0]]


def _run_sweep(options) -> results.Record:
    """Measure what was asked for; print a row as each finishes, with a progress bar on stderr beside a sweep."""
    try:
        m, n, k = cli._parse_numbers(options.mnk)
    except ValueError:
        raise ValueError(
            f"--mnk takes three sizes such as 4096,4096,4096; it is {options.mnk[:60]!r}."
        ) from None
    space = make_space((m, n, k), options.dtype, options.target)
    if options.target:
        device.target_limits(options.target)
    else:
        device.require("has_tma", "timing the GEMM", "compile it with --target sm_100a")
    chosen = _choose_configs(options, m, n, k)
    if not chosen:
        raise device.Unsupported(rejection(next(iter(configs().values())), options.target, options.dtype))
    which = "sweep" if options.sweep else options.config if "," not in options.config else "tile"
    space = dataclasses.replace(space, layout=options.layout, which=which, careful=not options.sweep)
    sweep = Sweep(chosen, space, journal=options.journal)
    show = print if options.json != "-" else lambda *_, **__: None
    # `disable=None` leaves the bar out where stderr is no terminal.
    with tqdm(total=sweep.total, unit=" configurations", disable=None if options.sweep else True) as bar:
        for row in sweep:
            with tqdm.external_write_mode():
                show(_format_row(row), flush=True)
            bar.update("final_ms" not in row)  # the fastest few come again
    if options.sweep:
        counts = ", ".join(f"{count} {status}" for status, count in sweep.counts.items())
        resumed = sum(row.get("resumed", False) for row in sweep.rows.values())
        show(
            f"{counts} in {sweep.elapsed_s:.0f} s"
            + f", {resumed} of them kept from before" * bool(resumed)
            + (f"; the fastest is {sweep.winner['kernel']}" if sweep.winner else "")
        )
    return results.Record(results.make_record("ch14_gemm", sweep.finish(), experiments.source()), live=True)


def _format_row(row: dict) -> str:
    start = f"{row['kernel']:34} {row['status']:8} "
    if "final_ms" in row:
        again = f"{row['kernel']:34} {'again':8} {row['final_ms'] * 1e3:9.1f} us"
        return f"{again} {'':14} {row['final_ratio']:6.3f} x cuBLAS   interleaved with the other finalists"
    if row.get("ms"):
        more = experiments.add_bandwidth(row, device.current().name)
        floor = f" ({more['floor_percent']:.0f} % of the datasheet's)" if "floor_percent" in more else ""
        return start + (
            f"{row['ms'] * 1e3:9.1f} us {row['tflops']:6.0f} TFLOP/s {row['ratio']:6.3f} x cuBLAS   "
            f"{more['gbps']:5.0f} GB/s{floor}   error {row['error']:.1e} (cuBLAS {row['peer_error']:.1e})"
        )
    if row["status"] == "ok":
        return (
            start
            + f"{row['registers']} registers, {row['smem']:,} B of shared memory, {row['spills']} B spilled"
        )
    return start + row["reason"]


if __name__ == "__main__":
    cli.run_main(main)
