"""Inputs and checks for the kernels that a reader writes in `notebooks/ch14_attention.ipynb`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import attention
from tilelab import ROOT
from tilelab.cells import lesson, triton_cell
from tilelab.emulator import gluon as gluon_emulator
from tilelab.measure import check as checks
from tilelab.records import results
from tilelab.runtime import device

LOG2_E = attention.LOG2_E
SHAPE = (4, 16, 16, 4096, 4096, 128)  # batch, heads, key heads, queries, keys, features: what is timed
CASES = {
    "cpu": [(1, 2, 1, 70, 300, 128), (1, 3, 3, 150, 3, 128), (2, 2, 1, 300, 200, 128)],
    "cuda": [
        (2, 4, 2, 333, 333, 128),
        (1, 2, 2, 1, 700, 128),
        (1, 3, 3, 65, 3, 128),
        (2, 2, 2, 129, 1025, 128),
        (1, 8, 2, 2048, 2048, 128),
        (4, 16, 4, 700, 700, 128),
    ],
}
# Rows of 256 bytes are split into boxes of 128, in which TMA moves pieces of 16 bytes, and wgmma reads them so.
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)

VERSIONS = (
    "first:prepare_first",
    "tuned:prepare_tuned",
    "one_group:prepare_one_group",
    "with_producer:prepare_with_producer",
    "two_consumers:prepare_two_consumers",
    "overlapped:prepare_overlapped",
    "persistent:prepare_persistent",
)
NOTEBOOK = ROOT / "notebooks" / "ch14_attention.ipynb"
lesson.register("ch14_attention_lesson", NOTEBOOK.stem, *VERSIONS)
lesson.register("ch14_attention_tiles", NOTEBOOK.stem, "tuned:prepare_tuned", sweep=True)
lesson.register("ch14_attention_full", NOTEBOOK.stem, *VERSIONS, sweep=True)
lesson.register("ch14_attention_causal", NOTEBOOK.stem, *VERSIONS, sweep=True)


def make_inputs(shape=SHAPE, where: str = "") -> list[torch.Tensor]:
    """Return random q, k, v in bf16 and memory for the output. Without a GPU those of SHAPE are not filled."""
    b, h, hk, s, t, d = shape
    sizes = [(b, heads, length, d) for heads, length in ((h, s), (hk, t), (hk, t))]
    if not where and not device.current().has_tma:
        q, k, v = (torch.empty(size, dtype=torch.bfloat16) for size in sizes)
    else:
        q, k, v = (torch.randn(size, device=where or "cuda").bfloat16() for size in sizes)
    return [q, k, v, torch.empty_like(q)]


def describe(tensor: torch.Tensor, rows: int, kernel):
    """Return a host descriptor of a (B, H, S, D) tensor as (B H, S, D), in boxes of `rows` rows of one head."""
    flat = tensor.flatten(0, 1)
    if triton_cell.is_gluon(kernel):
        return GluonDescriptor.from_tensor(flat, [1, rows, tensor.shape[3]], TILE_LAYOUT)
    return TensorDescriptor.from_tensor(flat, [1, rows, tensor.shape[3]])


def count_programs(out: torch.Tensor) -> int:
    """Return how many programs of one per SM run on the tensor's device; the emulator has three SMs."""
    return device.current().sms if out.is_cuda else 3


def _spread_scores(q, k, v, out):
    return [q * 3, k, v, out]  # weights of few keys: a wrong maximum or a wrong factor shows


def check_attention(prepare: Callable) -> str:
    """Run a version on ragged shapes, with and without a causal mask; return "" or what is wrong.

    `prepare(q, k, v, out, causal)` returns the launch. A Gluon kernel runs in the emulator first, so that one that
    would wait for ever does not reach the GPU.
    """
    gluon_emulator.enable()
    launch = triton_cell.record_launch(prepare, make_inputs(CASES["cpu"][0], "cpu"))
    gluon, has_gpu = triton_cell.is_gluon(launch.kernel), device.current().has_tma
    for where in ["cpu"] * (gluon or not has_gpu) + ["cuda"] * has_gpu:
        for seed in gluon_emulator.SEEDS[: 1 if has_gpu else 3] if gluon and where == "cpu" else (0,):
            for causal in (False, True):
                with gluon_emulator.with_seed(seed):
                    fault = lesson.check_launch(
                        functools.partial(prepare, causal=causal),
                        CASES,
                        lambda case, where: _spread_scores(*make_inputs(case, where)),
                        functools.partial(attention.spec, is_causal=causal),
                        where=where,
                    )
                if fault:
                    place = " (in the emulator)" if gluon and where == "cpu" else ""
                    return f"{'causal, ' * causal}{fault}{place}"
    return ""


def tabulate(full: results.Record, causal: results.Record) -> results.Table:
    """Return a table of both sweeps of all versions, without and with a causal mask."""
    names = {"ms": "ms", "peer_ms": "cuDNN, ms", "ratio": "× cuDNN", "spread": "±"}
    rows = [
        {"version": row["version"]}
        | {
            f"{kind}{named}": found.get(key)
            for kind, found in (("", row), ("causal ", masked))
            for key, named in names.items()
        }
        for row, masked in zip(full.rows, causal.rows)
    ]
    return results.table(rows, f"{'×'.join(map(str, SHAPE))}: {full.label()}")


def tabulate_ladder(ladder: results.Record) -> results.Table:
    """Return the module's ladder: each step with the time of cuDNN in its own run, without and with a causal mask."""
    names = {"ms": "ms", "peer_ms": "its cuDNN, ms", "ratio": "× cuDNN", "spread": "±"}
    names = {key: name for key, name in names.items() if any(key in row for row in ladder.rows)}
    found = {(row["name"], row["causal"]): row for row in ladder.rows}
    steps = dict.fromkeys(row["name"] for row in ladder.rows)
    rows = [
        {"step": step}
        | {
            f"{kind}{named}": found[step, causal].get(key)
            for causal, kind in ((False, ""), (True, "causal "))
            for key, named in names.items()
        }
        for step in steps
    ]
    return results.table(rows, f"4 × 16 × 8192 × 128, {ladder.label()}")


# ---- exercises


def define_kernels() -> dict:
    """Return the functions of the lesson's cells, by name, for the solutions and for tests."""
    names = [name for version in VERSIONS for name in version.split(":")]
    return lesson.define(
        "\n\n".join(triton_cell.collect(lesson.notebook_texts(NOTEBOOK), "exercises", *names))
    )


def check_kernel(prepare: Callable) -> None:
    """Raise AssertionError unless a version is right on every shape."""
    lesson.require_written(triton_cell.record_launch(prepare, make_inputs(CASES["cpu"][0], "cpu")).kernel)
    fault = check_attention(prepare) or _check_extremes(prepare)
    assert not fault, fault


def _check_extremes(prepare: Callable) -> str:
    """Run a version where scores that a mask removes are far above the others; return "" or what is wrong.

    A maximum that is too high by 200 makes every weight 0 in float32. Missing keys have the score 0.
    """

    def make(case, where, slope):
        q, k, v, out = make_inputs(case, where)
        step = torch.linspace(-1, 1, k.shape[2], device=where)[:, None] if slope else -1
        return [q / 8 + 1, k / 8 + (20 * step), v, out]

    for causal, slope, said in ((False, False, "scores of about -200"), (True, True, "rising scores")):
        where = "cuda" if device.current().has_tma else "cpu"
        fault = lesson.check_launch(
            functools.partial(prepare, causal=causal),
            {where: CASES[where][:2]},
            lambda case, where, slope=slope: [each.bfloat16() for each in make(case, where, slope)],
            functools.partial(attention.spec, is_causal=causal),
            where=where,
        )
        if fault:
            return f"{said}, {'causal, ' * causal}{fault}"
    return ""


def check_producer(load_blocks, with_producer) -> None:
    """Raise AssertionError unless two kernels are right with this `load_blocks`, in the emulator.

    `with_producer` runs with 1, 2 and 3 stages. In the notebook's `persistent` two groups consume, and a program takes
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


def attend_to_part(q, k, v):
    """Return the output of some keys before the division, in float32, and the maximum and the sum of each row."""
    s = (q.float() @ k.float().mT) * LOG2_E * q.shape[-1] ** -0.5
    row_max = s.amax(-1)
    p = torch.exp2(s - row_max[:, None])
    return p @ v.float(), row_max, p.sum(-1)


def check_merge(merge) -> None:
    """Raise AssertionError unless the Triton kernel `merge` puts two parts together."""
    lesson.require_written(merge)
    where = "cuda" if device.current().has_tma else "cpu"
    # Rows, keys of the first part, and what is added to the keys of both: scores and maxima of about ± 200 and ± 400.
    for rows, split, first, second in (
        (16, 30, 0, 0),
        (48, 5, 17, 17),
        (32, 80, -17, -17),
        (16, 45, 17, 16.9),
        (16, 45, 35, -35),
        (32, 45, -35, 35),
    ):
        q, k, v = (torch.randn(length, 64, device=where) for length in (rows, 90, 90))
        q, k = q / 8 + 1, k * 2
        k[:split] += first
        k[split:] += second
        parts = [*attend_to_part(q, k[:split], v[:split]), *attend_to_part(q, k[split:], v[split:])]
        memory = lesson.LaunchMemory([*parts, torch.full((rows, 64), float("nan"), device=where)])

        def run(*tensors, rows=rows):
            merge[rows // 16,](*tensors, BLOCK=16, D=64)

        fault = lesson.run_launch(memory, run)
        wanted = attention.spec(*(each[None, None] for each in (q, k, v)))[0, 0]
        error = checks.relative_error(memory.tensors[-1], wanted)
        said = f"where the maxima are about {parts[1].mean():.0f} and {parts[4].mean():.0f}"
        assert not fault, f"{said}, {fault}"
        assert error < 1e-3, f"{said}, the relative error is {error:.1e}"
        fault = memory.find_damage()
        assert not fault, f"{said}, {fault}"


CHECKS = {
    "Exercise 1": check_kernel,
    "Exercise 2": check_producer,
    "Exercise 3": check_producer,
    "Exercise 4": check_kernel,
    "Exercise 5": check_merge,
}


def check(exercise: str, *answer) -> None:
    """Print whether a reader's kernel solves an exercise."""
    checks.check_exercise(exercise, lambda: CHECKS[exercise](*answer))
