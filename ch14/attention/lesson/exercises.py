"""Inputs and checks for the kernels that a reader writes in `notebooks/12_ch14_attention.ipynb`."""

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

VERSIONS = ("first:prepare_first", "tuned:prepare_tuned")
NOTEBOOK = ROOT / "notebooks" / "12_ch14_attention.ipynb"
lesson.register("ch14_attention_lesson", NOTEBOOK.stem, *VERSIONS)
lesson.register("ch14_attention_tiles", NOTEBOOK.stem, "tuned:prepare_tuned", sweep=True)


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


def tabulate_ladder(ladder: results.Record, baseline: str, *names: str) -> results.Table:
    """Return how many times as fast as `baseline` some kernels of the module's ladder are, without and with a mask.

    The spread is that of the ratio to cuDNN, so it is shown only where this is the baseline. A GPU may lack a kernel.
    """
    found = {(row["name"], row["causal"]): row for row in ladder.rows if row.get("ratio")}
    rows = []
    for name in names:
        shown = {"kernel": name}
        for causal, kind in ((False, ""), (True, "causal, ")):
            if (name, causal) in found and (baseline, causal) in found:
                row = found[name, causal]
                shown[f"{kind}× {baseline}"] = row["ratio"] / found[baseline, causal]["ratio"]
                if baseline == "cuDNN":
                    shown[f"{kind}±"] = row.get("spread")
        rows.append(shown)
    return results.table(rows, f"batch 4, 16 heads, 8,192 tokens, D = 128; {ladder.label()}")


def tabulate_tiles(searched: results.Record) -> results.Table:
    """Return a table of a sweep of tiles; before one is recorded it has only what the compiler says."""
    names = {
        "num_warps": "warps",
        "num_stages": "stages",
        "spills": "spilled, B per thread",
        "programs_per_sm": "programs per SM",
        "ratio": "× cuDNN",
        "spread": "±",
    }
    rows = [
        {"queries × keys": f"{row['block_m']} × {row['block_n']}"}
        | {shown: row[name] for name, shown in names.items() if name in row}
        for row in searched.rows
    ]
    return results.table(rows, searched.label())


# ---- exercises


def define_launch() -> Callable:
    """Return `launch` of the lesson's cells, for the solutions and for tests."""
    return lesson.define("\n\n".join(triton_cell.collect(lesson.notebook_texts(NOTEBOOK), "launch")))[
        "launch"
    ]


def check_kernel(prepare: Callable) -> None:
    """Raise AssertionError unless a version is right on every shape."""
    lesson.require_written(triton_cell.record_launch(prepare, make_inputs(CASES["cpu"][0], "cpu")).kernel)
    fault = check_attention(prepare) or _check_extremes(prepare)
    assert not fault, fault


def _check_extremes(prepare: Callable) -> str:
    """Run a version where scores are far from 0, or where a mask removes the largest; return "" or what is wrong.

    A maximum that is too high by 200 makes every weight 0 in float32, and one that is too low by 200 makes it infinite.
    Missing keys have the score 0. One case has 64 features, and so another `scale`.
    """

    def make(case, where, first, last):
        q, k, v, out = make_inputs(case, where)
        added = torch.linspace(first, last, k.shape[2], device=where)[:, None]
        return [each.bfloat16() for each in (q / 8 + 1, k / 8 + added, v, out)]

    where = "cuda" if device.current().has_tma else "cpu"
    for causal, first, last, said in (
        (False, -20, -20, "scores of about -200"),
        (False, 20, 20, "scores of about 200"),
        (True, -20, 20, "scores from -200 to 200"),
    ):
        fault = lesson.check_launch(
            functools.partial(prepare, causal=causal),
            {where: [CASES[where][0], (1, 2, 1, 70, 100, 64)]},
            functools.partial(make, first=first, last=last),
            functools.partial(attention.spec, is_causal=causal),
            where=where,
        )
        if fault:
            return f"{said}, {'causal, ' * causal}{fault}"
    return ""


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


CHECKS = {"Exercise 2": check_kernel, "Exercise 3": check_merge, "Exercise 4": check_kernel}
check = checks.make_checker(CHECKS)
