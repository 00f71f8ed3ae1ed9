"""Inputs and checks for the kernels that a reader writes in `notebooks/13_ch14_attention_gluon.ipynb`."""

from __future__ import annotations

import functools

from ch14 import attention
from ch14.attention.lesson.exercises import (
    CASES,
    LOG2_E,
    SHAPE,
    check_attention,
    check_kernel,
    count_programs,
    describe,
    make_inputs,
)
from tilelab import ROOT
from tilelab.cells import lesson, triton_cell
from tilelab.emulator import gluon as gluon_emulator
from tilelab.measure import check as checks
from tilelab.records import results

__all__ = ["LOG2_E", "SHAPE", "check_attention", "count_programs", "describe", "make_inputs"]

STEPS = ("tuned", "one_group", "with_producer", "two_consumers", "overlapped")
VERSIONS = ("first", *STEPS, "persistent")  # `persistent` is the solution of the last exercise
NOTEBOOKS = ("solutions/13_ch14_attention_gluon", "12_ch14_attention", "13_ch14_attention_gluon")


def _register(experiment: str, *versions: str, sweep: bool = False) -> None:
    lesson.register(experiment, NOTEBOOKS, *(f"{each}:prepare_{each}" for each in versions), sweep=sweep)


_register("ch14_attention_gluon_lesson", *STEPS)
_register("ch14_attention_full", *VERSIONS, sweep=True)
_register("ch14_attention_causal", *VERSIONS, sweep=True)


def define_kernels() -> dict:
    """Return the versions of both lessons and of the solution, with `launch` and what prepares them, by name."""
    texts = [
        text for name in NOTEBOOKS for text in lesson.notebook_texts(ROOT / "notebooks" / f"{name}.ipynb")
    ]
    names = [name for version in VERSIONS for name in (version, f"prepare_{version}")]
    return lesson.define("\n\n".join(triton_cell.collect(texts, "exercises", *names)))


def tabulate(full: results.Record, causal: results.Record) -> results.Table:
    """Return a table of both sweeps of all versions, without and with a causal mask."""
    names = {"ratio": "× cuDNN", "spread": "±"}
    rows = [
        {"version": row["version"]}
        | {
            f"{kind}{named}": found.get(key)
            for kind, found in (("", row), ("causal, ", masked))
            for key, named in names.items()
        }
        for row, masked in zip(full.rows, causal.rows)
    ]
    return results.table(rows, f"batch 4, 16 heads, 4,096 tokens, D = 128; {full.label()}")


def check_producer(load_blocks, with_producer) -> None:
    """Raise AssertionError unless two kernels are right with this `load_blocks`, in the emulator.

    `with_producer` runs with 1, 2 and 3 stages. In the solutions' `persistent` two groups consume, and a program takes
    several tiles, so the first use of the ring is not always number 0.
    """
    gluon_emulator.enable()
    lesson.require_written(load_blocks)
    cells = define_kernels()

    def prepare_stages(q, k, v, out, causal, stages):
        return cells["launch"](with_producer, q, k, v, out, causal, block_m=64, block_n=64, STAGES=stages)

    small, several_tiles = CASES["cpu"][:2], CASES["cpu"][2:]
    runs = [
        (f"with {stages} stage{'s' * (stages > 1)}", functools.partial(prepare_stages, stages=stages), small)
        for stages in (1, 2, 3)
    ]
    runs.append(("in `persistent`", cells["prepare_persistent"], several_tiles))
    for where, prepare, cases in runs:
        for seed in gluon_emulator.SEEDS[:2]:
            with gluon_emulator.with_seed(seed), gluon_emulator.replacing(load_blocks=load_blocks):
                fault = lesson.check_launch(
                    functools.partial(prepare, causal=True),
                    {"cpu": cases},
                    make_inputs,
                    functools.partial(attention.spec, is_causal=True),
                    where="cpu",
                )
            assert not fault, f"{where}, {fault}"


def check_persistent(prepare) -> None:
    """Raise AssertionError unless a version is right on every shape with one program per SM."""
    inputs = make_inputs(CASES["cpu"][2], "cpu")
    launch, sms = triton_cell.record_launch(prepare, inputs), count_programs(inputs[-1])
    lesson.require_written(launch.kernel)
    programs = launch.grid[0]
    assert programs <= sms, f"{programs} programs for {sms} SMs: let each take several tiles"
    check_kernel(prepare)


CHECKS = {"Exercise 2": check_producer, "Exercise 3": check_producer, "Exercise 4": check_persistent}
check = checks.make_checker(CHECKS)
