"""The command of `ch14.gemm`: check, time, sweep, or compile for another GPU."""

import dataclasses
import os

from tqdm import tqdm

from ch14.descriptors.lesson import tile_copy_experiments
from ch14.gemm import find_best
from ch14.gemm.configs import ITEMSIZE, SETS, apply_switch, configs, parse, rank_configs, rejection
from ch14.gemm.lesson import experiments
from ch14.gemm.lesson.sweep import GemmSpace, grid, measure_claim
from tilelab import cli
from tilelab.records import results
from tilelab.runtime import build, device
from tilelab.sweeps import tune
from tilelab.sweeps.journal import Journal
from tilelab.sweeps.sweep import Sweep

JOURNAL = cli.file("keep each row in this JSONL file, and resume from it")
CLAIM = "speed, bandwidth, memory; recorded figures without a GPU"


def _open_journal(path: str, options: cli.Options) -> Journal:
    return Journal(JOURNAL.convert(path, options))


def _complete(options: cli.Options) -> None:
    if "config" not in options.given and not options.sweep:
        options.config = os.environ.get("TILES_GEMM_CONFIG") or options.config
    if options.sweep and "config" in options.given:
        raise ValueError("--sweep brings its own configurations: leave out --config.")
    apply_switch(next(iter(configs().values())))  # a bad TILES_TMA is bad usage
    if options.dtype == "fp8" and options.layout == "n":
        raise ValueError("float8 needs B with K contiguous: leave out --layout n.")


def _tune(options: cli.Options) -> int:
    return tune.run(GemmSpace, options.tune)


def _say_built(options: cli.Options, report: build.Report) -> dict:
    row = report.row() | {"kernel": report.job.name}
    options.say(format_row(row))
    return row


def _measure_copies(options: cli.Options) -> results.Record | list[dict]:
    if options.target:
        space = tile_copy_experiments.CopySpace(tile_copy_experiments.LARGE, "bf16", options.target)
        chosen = {str(config): config for tiles in tile_copy_experiments.SETS.values() for config in tiles}
        return [_say_built(options, report) for report in build.build(map(space.job, chosen.values()))]
    record = tile_copy_experiments.measure_copies()
    options.say(str(record))
    return record


def _show_claim(options: cli.Options) -> results.Record:
    record = measure_claim()
    ordered = sorted(record.rows, key=lambda row: row["shape"])
    rows = [experiments.add_bandwidth(row, record.device["name"]) for row in ordered]
    columns = "shape name kernel status ms tflops ratio gbps floor_percent peak_mib".split()
    options.say(
        str(results.table(rows, record.label(), columns)),
        "gbps counts A, B and C once; floor_percent is the share that gbps has in the bandwidth of the GPU's "
        "datasheet.",
    )
    return record


def _choose_configs(options: cli.Options) -> list:
    if options.sweep:
        return grid(options.dtype)
    if options.config in SETS:
        return list(configs(options.config, options.dtype).values())
    if options.config != "best":
        return [parse(options.config, options.dtype)]
    here = device.current()
    target, sms = (here.target, here.sms) if here.has_tma else ("sm_90a", 132)
    if options.target:
        return rank_configs("course", *options.mnk, options.dtype, options.target, sms)[:1]
    return [find_best(*options.mnk, options.dtype, options.layout == "k", target, sms)[0]]


def _run_sweep(options: cli.Options) -> list[dict]:
    """Measure what was asked for; print a row as each finishes, with a progress bar on stderr beside a sweep."""
    space = GemmSpace(options.mnk, options.dtype, options.target)
    if not options.target:
        device.require("has_tma", "timing the GEMM", "compile it with --target sm_100a")
    chosen = [apply_switch(config) for config in _choose_configs(options)]
    if not chosen:
        raise device.Unsupported(rejection(next(iter(configs().values())), options.target, options.dtype))
    which = "sweep" if options.sweep else options.config if options.config in (*SETS, "best") else "tile"
    space = dataclasses.replace(space, layout=options.layout, which=which, careful=not options.sweep)
    sweep = Sweep(chosen, space, journal=options.journal)
    # `disable=None` leaves the bar out where stderr is no terminal.
    with tqdm(total=sweep.total, unit=" configurations", disable=None if options.sweep else True) as bar:
        for row in sweep:
            with tqdm.external_write_mode():
                options.say(format_row(row))
            bar.update("final_ms" not in row)  # the fastest few come again
    if options.sweep:
        counts = ", ".join(f"{count} {status}" for status, count in sweep.counts.items())
        resumed = sum(row.get("resumed", False) for row in sweep.rows.values())
        kept = f", {resumed} of them kept from before" if resumed else ""
        fastest = f"; the fastest is {sweep.winner['kernel']}" if sweep.winner else ""
        options.say(f"{counts} in {sweep.elapsed_s:.0f} s{kept}{fastest}")
    return sweep.finish()


def format_row(row: dict) -> str:
    """Return the line of a configuration that was measured or compiled."""
    start = f"{row['kernel']:60} {row['status']:8} "
    if "final_ms" in row:
        again = f"{row['kernel']:60} {'again':8} {row['final_ms'] * 1e3:9.1f} us"
        return f"{again} {'':14} {row['final_ratio']:6.3f} x cuBLAS   interleaved with the other finalists"
    if row.get("ms"):
        more = experiments.add_bandwidth(row, device.current().name)
        floor = f" ({more['floor_percent']:.0f} % of the datasheet's)" if "floor_percent" in more else ""
        return start + (
            f"{row['ms'] * 1e3:9.1f} us {row['tflops']:6.0f} TFLOP/s {row['ratio']:6.3f} x cuBLAS   "
            f"{more['gbps']:5.0f} GB/s{floor}   error {row['error']:.1e} (cuBLAS {row['peer_error']:.1e})"
        )
    if row["status"] == "ok":
        resources = f"{row['registers']} registers, {row['smem']:,} B of shared memory"
        return f"{start}{resources}, {row['spills']} B spilled"
    return start + row["reason"]


def _describe_kept(options: cli.Options) -> str:
    if options.tune:
        return "the shapes that were printed are kept"
    if options.journal and (rows := len(options.journal.rows())):
        return f"{options.journal.path} keeps {rows} rows, and the same command goes on from there"
    return "nothing was kept (--journal PATH keeps rows)"


COMMAND = cli.Command(
    module="ch14.gemm",
    description="Check and time tiles of a descriptor GEMM against cuBLAS; with --target only compile them.",
    options={
        "mnk": cli.sizes("M,N,K", (4096, 4096, 4096)),
        "dtype": cli.choice(ITEMSIZE, "bf16"),
        "layout": cli.choice(("k", "n"), "k", "B as weight.T (k, default) or by rows (n)"),
        "config": cli.Option(
            f"a set ({', '.join(SETS)}), best (default), a configuration's name, or a tile such as "
            "'128x256x64, 8 warps, 4 stages'",
            default="best",
            metavar="SET|best|NAME|TILE",
        ),
        "sweep": cli.flag("try a grid of 96 configurations, best predicted first"),
        "target": cli.target(),
        "copy": cli.flag("time the copy configurations instead; recorded figures without a GPU"),
        "claim": cli.flag(f"time the note's two sets and the best tile at six sizes: {CLAIM}"),
        "tune": cli.tune(),
        "journal": cli.Option(JOURNAL.keywords["help"], _open_journal, metavar="PATH"),
    },
    complete=_complete,
    alone={"copy": ("json", "target"), "claim": ("json",), "tune": ()},
    actions={"tune": _tune, "copy": _measure_copies, "claim": _show_claim},
    source=experiments.source,
    measure=_run_sweep,
    compile=_run_sweep,
    kept=_describe_kept,
    partial=True,
)
