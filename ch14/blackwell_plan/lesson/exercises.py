"""Inputs, compilations and checks for `notebooks/17_ch14_blackwell_plan.ipynb`. Nothing here needs a GPU.

A `prepare` of a cell takes the operands of `make_operands` and the options of a version, and returns a launch that is
only compiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.blockscaled.lesson import note_attempts, smem_planner
from ch14.blockscaled.native import FORMS, tensor_core_instruction
from ch14.mx_formats import number_formats, packing
from tilelab.cells import lesson
from tilelab.measure.check import make_checker
from tilelab.runtime import build, device

SHAPE = (256, 256, 1024)  # M, N and K of what is compiled
FP8 = {"ab_dtype": "Float8E4M3FN", "sf_vec_size": 32}
COUNTED = {"scales stored": "tcgen05.st", "scales copied": "tcgen05.cp"}


def constants_of(form: str) -> dict:
    """Return FORMAT, PACKED and GROUP: Triton's name of the elements, elements per byte, and elements per scale."""
    found = number_formats.lookup(form)
    return {"FORMAT": FORMS[form], "PACKED": 8 // found.element.bits, "GROUP": found.block[1]}


def make_operands(form: str) -> list[torch.Tensor]:
    """Return codes and scales of A (M, K), codes and scales of B's transpose (N, K), and out in bf16, on the CPU.

    Codes are e4m3 or bytes with two codes, scales bytes (E8M0) or e4m3.
    """
    (m, n, k), constants = SHAPE, constants_of(form)
    tensors = []
    for rows in (m, n):
        codes, scales = (
            torch.zeros(rows, k // each, dtype=torch.uint8)
            for each in (constants["PACKED"], constants["GROUP"])
        )
        fp8 = torch.float8_e4m3fn
        tensors += [
            codes.view(fp8) if constants["PACKED"] == 1 else codes,
            scales.view(fp8) if constants["GROUP"] == 16 else scales,
        ]
    return [*tensors, torch.zeros(m, n, dtype=torch.bfloat16)]


def compile_versions(versions: dict[tuple, tuple[Callable, str, str]], keys: Sequence[str]) -> list[dict]:
    """Return a row for each version: what the compiler makes of it.

    `versions` maps a tuple of values, named by `keys`, to a `prepare(operands, form)`, a format and a target. The
    columns "scales stored" and "scales copied" count instructions that bring scales to tensor memory: by threads, and
    by the copy unit. `tmem` is in columns.
    """
    jobs = {
        key: lesson.triton_cell.job_of(
            lesson.triton_cell.record_launch(functools.partial(prepare, form=form), make_operands(form)),
            target,
        )
        for key, (prepare, form, target) in versions.items()
    }
    reports = {id(made.job): made for made in build.build(jobs.values())}
    rows = []
    for key, job in jobs.items():
        made = reports[id(job)]
        name, count = tensor_core_instruction(made.ptx or "")
        row = dict(zip(keys, key)) | {"instruction": name, "products": count}
        row |= {"block-scaled": "yes" if "block_scale" in name else "no"}
        row |= {column: (made.ptx or "").count(text) for column, text in COUNTED.items()}
        row |= {"shared bytes": made.smem, "TMEM columns": made.tmem, "spills": made.spills}
        reason = device.first_line(made.reason) if made.reason else ""
        rows.append(row | {"status": made.status, "reason": reason})
    return rows


# ---- the reader's kernels


@triton.jit
def _load_all(desc, out_ptr, GROUPS_IN_ALL, ROWS: tl.constexpr, GROUPS: tl.constexpr, LOAD: tl.constexpr):
    row, group = tl.program_id(0) * ROWS, tl.program_id(1) * GROUPS
    scales = LOAD(desc, row, group, ROWS, GROUPS)
    at = (row + tl.arange(0, ROWS))[:, None] * GROUPS_IN_ALL + group + tl.arange(0, GROUPS)[None, :]
    tl.store(out_ptr + at, scales)


def _where() -> str:
    return "cuda" if device.current().has_tma else "cpu"


def check_load(load) -> None:
    """Raise AssertionError unless `load(desc, row, group, ROWS, GROUPS)` returns scales from tiles of 128 x 4.

    desc describes bytes (rows / 128, scales per row / 4, 2, 256), two halves of 256 bytes per tile.
    """
    lesson.require_written(load)
    for rows, groups, block_rows, block_groups in ((128, 4, 128, 4), (256, 8, 128, 8), (512, 16, 256, 4)):
        scales = torch.randint(0, 255, (rows, groups), dtype=torch.uint8, device=_where())
        tiled = packing.tile_scales(scales).view(rows // 128, groups // 4, 2, 256)
        memory = lesson.LaunchMemory([tiled, ~scales])
        tiled, out = memory.tensors
        desc = TensorDescriptor.from_tensor(tiled, [block_rows // 128, block_groups // 4, 2, 256])
        grid = rows // block_rows, groups // block_groups
        sizes = dict(ROWS=block_rows, GROUPS=block_groups, LOAD=load)
        fault = lesson.run_launch(
            memory,
            lambda _, out, desc=desc, groups=groups, grid=grid, sizes=sizes: _load_all[grid](
                desc, out, groups, **sizes
            ),
        )
        if fault := fault or memory.find_fault(out != scales):
            raise AssertionError(f"{rows} rows of {groups} scales: {fault}")


@triton.jit
def _store_all(scales_ptr, desc, GROUPS_IN_ALL, GROUPS: tl.constexpr, STORE: tl.constexpr):
    row, group = tl.program_id(0) * 128, tl.program_id(1) * GROUPS
    at = (row + tl.arange(0, 128))[:, None] * GROUPS_IN_ALL + group + tl.arange(0, GROUPS)[None, :]
    STORE(desc, tl.load(scales_ptr + at), row, group)


def check_store(store) -> None:
    """Raise AssertionError unless `store(desc, scales, row, group)` stores scales (128, GROUPS) as tiles of 128 x 4."""
    lesson.require_written(store)
    for rows, groups, block_groups in ((128, 4, 4), (256, 16, 8)):
        scales = torch.randint(1, 255, (rows, groups), dtype=torch.uint8, device=_where())
        wanted = packing.tile_scales(scales)
        memory = lesson.LaunchMemory([scales, ~wanted])
        scales, tiled = memory.tensors
        boxes = tiled.view(rows // 128, groups // 4, 2, 256)
        desc = TensorDescriptor.from_tensor(boxes, [1, block_groups // 4, 2, 256])
        grid = rows // 128, groups // block_groups
        sizes = dict(GROUPS=block_groups, STORE=store)
        fault = lesson.run_launch(
            memory,
            lambda scales, _, desc=desc, groups=groups, grid=grid, sizes=sizes: _store_all[grid](
                scales, desc, groups, **sizes
            ),
        )
        if fault := fault or memory.find_fault(tiled != wanted):
            raise AssertionError(f"{rows} rows of {groups} scales: {fault}")


def check_two_accumulators(prepare: Callable, options: dict) -> None:
    """Raise AssertionError unless the kernel has two accumulators of 128 columns, and four stages of MXFP4."""
    if not options:
        raise NotImplementedError
    report = lesson.compile_launch(
        functools.partial(prepare, form="mxfp4", **options), make_operands("mxfp4"), "sm_100a"
    )
    assert report.launchable, report.reason
    assert "block_scale" in report.ptx and "tcgen05.cp" in report.ptx, (
        "it must multiply by block-scaled instructions"
    )
    assert report.tmem == 512, (
        f"{report.tmem} columns of tensor memory: that is one accumulator and the scales"
    )
    assert options.get("stages", 3) == 4, "four stages are asked for"


def check_widest(widest: Callable) -> None:
    """Raise AssertionError unless `widest(ab_stages, **formats)` returns the largest tile with so many A/B stages."""
    tiles = [(m, n) for m in (128, 256) for n in (64, 128, 192, 256)]
    for formats in ({}, FP8, {"c_dtype": "Float32"}, FP8 | {"c_dtype": "Float32"}):
        for count in range(8, 1, -1):
            options = dict(formats, ab_stages=count, c_stages=2)
            fitting = [
                tile
                for tile in tiles
                if smem_planner.plan(smem_planner.Blackwell(tile, (2, 1), **options)).fits
            ]
            found, wanted = tuple(widest(count, **formats)), max(fitting, key=math.prod)
            assert found == wanted, f"{found} is not the widest with {count} stages, {formats or 'fp4'}"


def check_scale_columns(columns: Callable) -> None:
    """Raise AssertionError unless `columns(n, k, group, instruction_k)` gives the TMEM columns of both scales."""
    for tile, formats in (
        ((128, 128), {}),
        ((128, 256), {}),
        ((128, 64), {}),
        ((128, 192), {}),
        ((128, 256), FP8),
        ((128, 256), {"tile_k": 128}),
        ((128, 128), {"sf_dtype": "Float8E4M3FN"}),
    ):
        choice = smem_planner.Blackwell(tile, (1, 1), **formats)
        wanted = sum(choice.scale_columns().values())
        found = columns(choice.n, choice.k, choice.sf_vec_size, choice.format.instruction_k)
        assert found == wanted, (
            f"{found} columns for N = {choice.n}, {formats or 'fp4'}; the example takes {wanted}"
        )


# ---- the whole kernel


def prepare_gemm(
    kernel, a, a_scales, b, b_scales, out, form: str, block_n: int = 256, stages: int = 3
) -> Callable:
    """Return a launch of a kernel with the arguments of the notebook's `scaled_tiles`, tiles of 128 x `block_n`."""
    (m, n), constants = out.shape, constants_of(form)
    groups = 128 * constants["PACKED"] // constants["GROUP"] // 4
    tiles = [each.view(each.shape[0] // 128, each.shape[1] // 4, 2, 256) for each in (a_scales, b_scales)]
    boxes = [128, 128], [1, groups, 2, 256], [block_n, 128], [block_n // 128, groups, 2, 256], [128, block_n]
    operands = [TensorDescriptor.from_tensor(*pair) for pair in zip((a, tiles[0], b, tiles[1], out), boxes)]
    sizes = dict(BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=128 * constants["PACKED"])
    k, grid = a.shape[1] * constants["PACKED"], ((m // 128) * (n // block_n),)
    return lambda: kernel[grid](*operands, n, k, **constants, **sizes, num_warps=4, num_stages=stages)


def _make_random(form: str, where: str) -> list[torch.Tensor]:
    """Return operands as `make_operands` does, with random codes and scales, the scales in tiles of 128 x 4.

    In MXFP4 K is longer, and but for eight columns its halves cancel, so that rounded sums show.
    """
    found, tensors = number_formats.lookup(form), []
    m, n, k = (128, 768, 1024) if form == "mxfp4" else (256, 512, 512)
    for rows, sign in ((m, 8), (n, 0)):
        codes = number_formats.encode(torch.randn(rows, k), found.element)
        if found.block[1] == 16:
            scales = (torch.rand(rows, k // 16) + 0.5).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            scales = torch.randint(124, 131, (rows, k // 32), dtype=torch.uint8)
        if form == "mxfp4":
            scales[:, 15] = 127
            codes[:, 512:-8], scales[:, 16:] = codes[:, :504] ^ sign, scales[:, :16]
        tiled = packing.tile_scales(scales).view(rows, k // found.block[1])
        codes = packing.pack(codes, found.element.bits)
        tensors += [
            codes.view(torch.float8_e4m3fn) if found.element.bits == 8 else codes,
            tiled.view(torch.float8_e4m3fn) if found.block[1] == 16 else tiled,
        ]
    return [each.to(where) for each in [*tensors, torch.zeros(m, n, dtype=torch.bfloat16)]]


def _spec(a, a_scales, b, b_scales, form: str) -> torch.Tensor:
    """Return A (M, K) B (N, K) transposed, in float64, from codes and tiled scales."""
    found, values = number_formats.lookup(form), []
    for codes, tiled in ((a, a_scales), (b, b_scales)):
        rows, columns = tiled.shape
        codes = packing.unpack(codes.view(torch.uint8).cpu(), found.element.bits, columns * found.block[1])
        scales = packing.untile_scales(tiled.view(torch.uint8).cpu().flatten(), rows, columns)
        e8m0 = found.block[1] == 32
        scales = number_formats.decode_e8m0(scales) if e8m0 else scales.view(torch.float8_e4m3fn).float()
        blocks = number_formats.decode(codes, found.element).double().unflatten(1, (columns, -1))
        values.append((blocks * scales.double()[:, :, None]).flatten(1))
    return values[0] @ values[1].T


def check_gemm(kernel) -> None:
    """Raise AssertionError unless a kernel with the signature of `scaled_tiles` is right, and native on sm_100a."""
    lesson.require_written(kernel)
    forms, runs, options = ["mxfp8_e4m3", "mxfp4", "nvfp4"], 3, {}
    if _where() == "cuda":
        # A GPU that decodes has less room, and up to Triton 3.7 it cannot decode NVFP4.
        runs, options = 2, {"block_n": 128, "stages": 2}
    for form in forms[:runs]:
        fault = lesson.check_launch(
            functools.partial(prepare_gemm, kernel, form=form, **options),
            {"cpu": [form], "cuda": [form]},
            _make_random,
            lambda *given, form=form: _spec(*given, form).to(given[0].device),
        )
        assert not fault, fault
    versions = {(form,): (functools.partial(prepare_gemm, kernel), form, "sm_100a") for form in forms}
    for row in compile_versions(versions, ["format"]):
        what = f"for sm_100a in {row['format']}"
        assert row["status"] == "ok", f"{what} {row['reason']}"
        assert "block_scale" in row["instruction"], f"{what} the product is {row['instruction'] or 'none'}"
        assert row["scales copied"], f"{what} threads carry the scales: no tcgen05.cp"


CHECKS = {
    "Exercise 1": check_two_accumulators,
    "Exercise 2": check_load,
    "Exercise 3": check_store,
    "Exercise 4": check_widest,
    "Exercise 5": check_scale_columns,
    "Exercise 6": check_gemm,
}
check = make_checker(CHECKS)


def check_plan(divide: Callable) -> str:
    """Return for how many plans `divide(n, ctas, k, bits, group, c_bytes)` agrees with `smem_planner`, as text."""
    right, wrong = 0, ""
    cases = [case.choice() for case in note_attempts.CASES] + [
        smem_planner.Blackwell(tile, (2, 1), ab_dtype, sf_vec_size=group, c_dtype=c_dtype)
        for tile in ((256, 64), (256, 192), (128, 256))
        for ab_dtype, group in (("Float4E2M1FN", 32), ("Float8E4M3FN", 32))
        for c_dtype in ("Float16", "Float32")
    ]
    for choice in cases:
        wanted = smem_planner.plan(choice)
        found = divide(
            choice.n,
            choice.ctas_per_tile,
            choice.k,
            choice.format.bits,
            choice.sf_vec_size,
            smem_planner.C_ITEMSIZE[choice.c_dtype],
        )
        if tuple(found) == (wanted.ab_stages, wanted.c_stages):
            right += 1
        else:
            wrong = (
                wrong or f"; {choice.mma_tiler_mn}: {tuple(found)}, not {(wanted.ab_stages, wanted.c_stages)}"
            )
    return f"{right} of {len(cases)} plans agree with the module's planner{wrong}"
