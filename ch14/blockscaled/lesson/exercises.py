"""Inputs, ladders and checks for the kernels of `notebooks/15_ch14_blockscaled.ipynb`, the reader's among them.

A `prepare` of a cell takes the tensors that `make_products` or `make_epilogues` returns.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import fp8_gemm, mx_formats
from ch14.fp8_gemm.lesson import impacts
from ch14.fp8_gemm.lesson.experiments import FP8_FLOPS, SHAPES, SPLIT, prepare_torch
from ch14.fp8_gemm.lesson.verification import BF16, fp8_operands
from ch14.mx_formats import number_formats
from tilelab.cells import lesson
from tilelab.measure.check import make_checker, relative_error
from tilelab.records import results
from tilelab.runtime import device

CUBE = (4096, 4096, 4096)  # (M, N, K) that is timed
LAYER = (8192, 8192, 1024)  # for the epilogue: C is large and K is short
EXAMPLE = (256, 256, 512)  # for a compiler, where there is no GPU
# On a GPU the sizes are multiples of 16, as those that are timed, so that Triton compiles a version once for both.
CASES = {"cpu": [(70, 256, 640), (1, 128, 384)], "cuda": [(80, 256, 640), (304, 384, 640), (1008, 640, 1664)]}
SUMS = (512, 1024, 2048, 4096, 8192, 16384)  # K of the comparison of two ways to add

STEPS = {
    "versions": (
        "by_block:prepare_by_block",
        "by_block:prepare_by_block(block_m=64, warps=4)",
        "scratch_ahead:prepare_scratch_ahead",
        "scales_by_tma:prepare_scales_by_tma",
    ),
    "split": ("scales_by_tma:prepare_scales_by_tma", "split_k:prepare_split_k(splits=4)"),
    "fused": ("scales_by_tma:prepare_passes", "fused:prepare_fused"),
    "sums": ("one_sum:prepare_one_sum",),
}
for _name, _steps in STEPS.items():
    lesson.register(f"ch14_blockscaled_{_name}", "15_ch14_blockscaled", *_steps)
lesson.register("ch14_blockscaled_splits", "15_ch14_blockscaled", "split_k:prepare_split_k", sweep=True)


def _where() -> str:
    return "cuda" if device.current().capability else "cpu"


# ---- fp8 with block scales


def make_products(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return a (M, K), b (K, N) in fp8, scale_a (M, K / 128), scale_b (K / 128, N / 128), and out in bf16.

    The scales differ by powers of two, so that a scale out of place shows.
    """
    a, b, scale_a, scale_b, out = fp8_operands(*case, where)
    for scale in (scale_a, scale_b):
        scale *= torch.exp2(torch.randint(-3, 4, scale.shape, device=where).float())
    return a, b, scale_a, scale_b, out


def make_inputs(shape: tuple[int, int, int] = CUBE) -> tuple[torch.Tensor, ...]:
    """Return the operands that are timed, or small ones without a GPU, where only their types count."""
    return tuple(fp8_operands(*(shape if device.current().capability else EXAMPLE), _where()))


def check_version(prepare: Callable) -> str:
    """Run a product with block scales on ragged shapes; return "" or what is wrong."""
    return lesson.check_launch(prepare, CASES, make_products, fp8_gemm.spec)


def make_ladder(name: str = "versions") -> lesson.Ladder:
    """Return the ladder "versions" at CUBE or "split" at SPLIT, beside torch's product with the same scales."""
    shape = {"versions": CUBE, "split": SPLIT}[name]
    m, n, k = shape
    return lesson.Ladder(
        f"ch14_blockscaled_{name}",
        "torch",
        prepare_torch,
        functools.partial(make_inputs, shape),
        check_version,
        flops=2 * m * n * k,
        repeats=False,
    )


def order_of(prepare: Callable, pattern: str) -> str:
    """Return the instructions of a version's SASS that match `pattern`, in order, neighbours of one name as a count."""
    report = lesson.compile_launch(prepare, fp8_operands(*EXAMPLE, "cpu"), "sm_90a")
    found = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", report.sass, re.MULTILINE
    )
    names = [re.match(pattern, name)[0] for name in found if re.match(pattern, name)]
    counts = ((name, len(list(group))) for name, group in itertools.groupby(names))
    return ", ".join(f"{name}*{count}" if count > 1 else name for name, count in counts)


# ---- the quantiser of A


def check_rows_quantiser(kernel) -> str:
    """Run `kernel(x, codes, scales, M, K, stride, ROWS)`, 1 × 128, against torch's definition; say what came of it."""

    def make(case, where):
        x = torch.randn(case, device=where) * torch.exp2(
            torch.randint(-9, 9, (case[0], 1), device=where).float()
        )
        x[-1] = 0
        codes = torch.zeros(case, dtype=torch.uint8, device=where)
        return x.to(BF16), codes, torch.zeros(case[1] // 128, case[0], device=where)

    def prepare(x, codes, scales):
        (m, k), stride = x.shape, scales.stride(0)
        return lambda: kernel[(triton.cdiv(m, 16), k // 128)](x, codes, scales, m, k, stride, ROWS=16)

    def spec(x):
        made = number_formats.quantise(x, number_formats.lookup("fp8_1x128"))
        return made.codes, made.scales.T.double()

    cases = {"cpu": [(70, 640), (1, 128)], "cuda": [(70, 640), (1000, 4096)]}
    lesson.require_launch(prepare, cases, make, spec, outputs=2)
    return "codes and scales are those of torch's definition"


# ---- how exactly the tensor core adds


def measure_sums(kernel, prepare: Callable) -> results.Record:
    """Measure the errors of one sum over K and of a sum that is promoted every 128 columns.

    `prepare(a, b, out, promote)` launches either. The elements are uniform from 0 to 1, so that the sums grow with K.
    """

    def measure():
        rows = []
        for k in SUMS:
            a, weight = (torch.rand(256, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
            exact, out = a.double() @ weight.double().T, torch.empty(256, 256, device="cuda")
            row = {"K": k}
            for name, promote in (("one sum", False), ("promoted", True)):
                prepare(a, weight.T, out, promote)()
                row[name] = relative_error(out, exact)
            rows.append(row)
        return rows

    code = lesson.ladder_hash([lesson.code_hash(kernel, prepare)])
    record = results.experiment("ch14_blockscaled_sums", lambda: code)(measure)()
    if not record.stale:
        return record
    blank = results.make_record(record.experiment, [], "")
    return results.Record(blank, live=False, stale="but this version was not measured")


# ---- an epilogue that quantises


def make_epilogues(shape: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return the operands of a product, a bias (N,) in bf16, and room for MXFP8: values and scales, both bytes."""
    m, n, _ = shape
    *operands, _ = make_products(shape, where)
    operands[2] *= 2.0**-7  # so that SiLU has something to do, and exp does not overflow
    packed = mx_formats.empty((m, n), "mxfp8_e4m3", torch.device(where))
    return *operands, torch.randn(n, device=where).to(BF16), packed.values, packed.scales


def check_epilogue(prepare: Callable) -> str:
    """Run a product with bias, SiLU and MXFP8 on ragged shapes; return "" or what is wrong.

    Sums may be added in another order, so that a code may differ by one step. A scale may differ where the largest
    number of its block lies beside a power of two: one in a hundred does, so one may where there are only four.
    """
    where = _where() if device.current().has_tma else "cpu"
    for shape in CASES[where]:
        *operands, values, scales = make_epilogues(shape, where)
        exact = fp8_gemm.spec(*operands, "silu").to(BF16)
        wanted = number_formats.quantise(exact.float(), number_formats.lookup("mxfp8_e4m3"))
        rooms = [torch.full_like(each, 0x7F) for each in (values, scales)]
        memory = lesson.LaunchMemory([*operands, *rooms], outputs=2)
        if fault := lesson.run_launch(memory, lambda *tensors: prepare(*tensors)()):
            return f"{shape}: {fault}"
        out, out_scales = memory.tensors[-2:]
        apart = (out_scales.int() - wanted.scales.int()).abs()
        if int(apart.max()) > 1 or int((apart > 0).sum()) > max(1, 0.02 * apart.numel()):
            return f"{shape}: {int((apart > 0).sum()):,} of {apart.numel():,} scales are wrong"
        found = out.view(torch.float8_e4m3fn).float() * number_formats.decode_e8m0(
            out_scales
        ).repeat_interleave(32, 1)
        amax = exact.float().abs().view(shape[0], -1, 32).amax(2).repeat_interleave(32, 1)
        step = torch.maximum(exact.float().abs() / 8, amax / 2**15) + amax / 100
        step = torch.where(
            exact.float().abs() > 0.87 * amax, amax / 7, step
        )  # the largest numbers may saturate
        wrong = ~((found - exact.float()).abs() <= step)
        if fault := memory.find_fault(wrong, apart > 1):
            return f"{shape}: {fault}"
    return ""


def finish_in_passes(c, bias, hidden, values, scales) -> tuple:
    """Launch bias and SiLU from c to hidden, and the quantiser from hidden to MXFP8. c and hidden are bf16 (M, N)."""
    out = mx_formats.Packed(number_formats.lookup("mxfp8_e4m3"), tuple(c.shape), values, scales, None, False)
    impacts.bias_silu(c, bias, hidden)()
    mx_formats.prepare_quantise(hidden, out=out)()
    return c, hidden


def make_epilogue_ladder() -> lesson.Ladder:
    """Return the ladder of products with bias, SiLU and MXFP8 at LAYER, beside torch's product without them."""
    m, n, k = LAYER

    def prepare_product(a, b, scale_a, scale_b, bias, values, scales):
        return prepare_torch(a, b, scale_a, scale_b, None)

    return lesson.Ladder(
        "ch14_blockscaled_fused",
        "torch's product alone",
        prepare_product,
        lambda: make_epilogues(LAYER if device.current().capability else EXAMPLE, _where()),
        check_epilogue,
        flops=2 * m * n * k,
    )


# ---- what the lesson's tables show


def tabulate_shapes(record: results.Record) -> results.Table:
    """Return a row for three shapes: what block scales cost the course's kernel, and torch, over a single scale."""
    by, rows = {(row["name"], tuple(row["shape"])): row for row in record.rows}, []
    for shape in SHAPES[:3]:
        course, free = by["course", shape], by["one scale", shape]
        sizes, cost = {"M × N × K": " × ".join(map(str, shape))}, "time over one scale"
        rows.append(sizes | {"× torch": course["ratio"], "±": course["spread"]})
        rows[-1] |= {f"the course's {cost}": f"{course['ms'] / free['ms'] - 1:+.0%}"}
        rows[-1] |= {f"torch's {cost}": f"{course['peer_ms'] / free['ms'] - 1:+.0%}"}
    return results.table(rows, record.label())


def tabulate_rates(record: results.Record) -> results.Table:
    """Return rows for the course's kernel and one scale: rates as shares of what the tensor cores do at that clock."""
    rows, timed = [], [row for row in record.rows if "ghz" in row]
    for row in (row for row in timed if row["name"] in ("course", "one scale")):
        peak = record.device["sms"] * FP8_FLOPS * row["ghz"] / 1e3
        rows.append({"product": row["name"], "clock, GHz": row["ghz"], "power, W": f"{row['watts']:.0f}"})
        rows[-1] |= {"TFLOP/s": f"{row['tflops']:,.0f}", "at most, at this clock": f"{peak:,.0f}"}
        rows[-1] |= {"share": f"{row['tflops'] / peak:.0%}"}
    return results.table(rows, f"{' × '.join(map(str, timed[0]['shape']))}; {record.label()}")


def tabulate_tiles(thin: results.Record) -> results.Table:
    """Return the module's choice at SPLIT, and the two fastest other tiles without a split."""
    here = [row for row in thin.rows if tuple(row["shape"]) == SPLIT and row.get("ms")]
    chosen = next(row for row in here if row["name"] == "course")
    tile = chosen["config"].split(" · ")[0]
    others = [row for row in here if "unsplit" in row["name"] and not row["config"].startswith(f"{tile} ")]
    rows = []
    for row in (chosen, *sorted(others, key=lambda row: -row["ratio"])[:2]):
        tile, stages, *words = row["config"].split(" · ")
        split = next((word for word in words if "split" in word), "no split")
        said = f"{tile}, {split}{', the choice' * (row is chosen)}"
        rows.append(
            {"tile": said, "stages": stages.split()[0], "× torch": row["ratio"], "±": row.get("spread")}
        )
    return results.table(rows, f"the module's kernel; {thin.label()}")


def tabulate_epilogue(epilogue: results.Record, copy_gbps: float) -> results.Table:
    """Return a row per K: what a free epilogue would gain over passes at `copy_gbps`, and what the module gains."""
    rows = []
    for shape in dict.fromkeys(tuple(row["shape"]) for row in epilogue.rows):
        by = {row["name"]: row for row in epilogue.rows if tuple(row["shape"]) == shape}
        product_ms = by["product alone"]["ms"]
        passes_ms = (by["in passes"]["c_bytes"] - 2 * shape[0] * shape[1]) / copy_gbps / 1e6
        rows.append({"K": shape[2], "product, ms": product_ms, "passes, ms": passes_ms})
        rows[-1] |= {"free epilogue": f"{(product_ms + passes_ms) / product_ms:.2f} ×"}
        for said, name in (("all fused", "all fused"), ("bias and SiLU alone", "bias and SiLU fused")):
            rows[-1] |= {said: f"{by[name]['ratio']:.2f} ×"}
    return results.table(rows, f"speed over the product with passes; {epilogue.label()}")


def tabulate_impacts(measured: results.Record, epilogue, thin, workers) -> results.Table:
    """Return a row for each pair of versions of the module's kernel that tests one of the note's four impacts."""
    spoken = {
        "unsplit, low": "1 split",
        "unsplit, thin": "1 split",
        "64 rows of a tile for each four": "64 rows of a tile per four warps",
    }

    def speak(text: str) -> str:
        for old, new in (
            (", 1 scratch", ", one scratch"),
            (", 2 scratch", ", two scratches"),
            (" x ", " × "),
        ):
            text = text.replace(old, new)
        return spoken.get(text, text)

    rows = []
    for row in impacts.verdicts(measured.rows, epilogue.rows, thin.rows, workers=workers.rows):
        if any(part in row["where"] for part in ("alone", "SiLU and bf16", "against")):
            continue  # "against" are tiles of the module's choice, which the section on split-K has compared
        said = {"the note's claim": f"{row['claim']}, {row['note']}", "time saved": row["time saved"]}
        named = {"from": "from", "to": "to", "measured with": "where"}
        rows.append(said | {column: speak(row[field]) for column, field in named.items()})
    return results.table(rows, f"claimed and measured; {measured.label()}")


# ---- the reader's kernels


def _raise(fault: str) -> None:
    assert not fault, fault


def launch(
    kernel, operands: Sequence[torch.Tensor], out, *, tile=(64, 128), stride_b=None, programs=(), **constants
) -> None:
    """Launch a kernel with by_block's arguments: (a_desc, b_desc, scale_a, scale_b, out, M, N, K, stride_a, stride_b).

    `operands` are those of `make_products`, and `out` is what the kernel writes to. stride_a leads from one block of K
    to the next, and stride_b, if none is given, from one block of N to the next. `programs` are further axes of the
    grid.
    """
    a, b, scale_a, scale_b = operands
    (m, k), n, (block_m, block_n) = a.shape, b.shape[1], tile
    kernel[(triton.cdiv(m, block_m) * (n // block_n), *programs)](
        TensorDescriptor.from_tensor(a, [block_m, 128]),
        TensorDescriptor.from_tensor(b.T, [block_n, 128]),
        scale_a,
        scale_b,
        out,
        m,
        n,
        k,
        scale_a.stride(1),
        scale_b.stride(1) if stride_b is None else stride_b,
        **constants,
        num_warps=4,
        num_stages=3,
    )


def check_fit(prepare: Callable, options: dict) -> None:
    """Raise AssertionError unless four programs of three stages or more fit on an SM, without spills."""
    if not options:
        raise NotImplementedError
    example = fp8_operands(*EXAMPLE, "cpu")
    report = lesson.compile_launch(functools.partial(prepare, **options), example, "sm_90a")
    assert report.launchable, report.reason
    assert not report.spills, (
        f"{report.spills} bytes per thread are spilled: the accumulators need more registers"
    )
    assert options.get("stages", 3) >= 3, "keep at least three stages"
    assert report.programs_per_sm >= 4, (
        f"{report.programs_per_sm} programs per SM: {report.registers} registers "
        f"for each of {report.threads} threads, {report.smem:,} B of shared memory"
    )
    _raise(check_version(functools.partial(prepare, **options)))


def check_index(kernel) -> None:
    """Raise AssertionError unless a kernel with the arguments of by_block is right with tiles of 32 to 128 columns."""

    def prepare(*operands, columns):
        *operands, out = operands
        c_desc = TensorDescriptor.from_tensor(out, [64, columns])
        return lambda: launch(kernel, operands, c_desc, tile=(64, columns), BLOCK_M=64, BLOCK_N=columns)

    for columns in (64, 128, 32):
        fault = check_version(functools.partial(prepare, columns=columns))
        assert not fault, f"with tiles of 64 × {columns}, {fault}"


def make_rows(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return the operands of a product whose B has a scale per column and 128 of K: scale_b is (K / 128, N)."""
    _, n, k = case
    a, b, scale_a, scale_b, out = make_products(case, where)
    sizes = torch.exp2(torch.randint(-3, 4, (k // 128, n), device=where).float())
    return a, b, scale_a, (scale_b.repeat_interleave(128, 1) * sizes).contiguous(), out


def multiply_rows(a, b, scale_a, scale_b) -> torch.Tensor:
    """Return the product of `make_rows` in float64."""
    left = a.double() * scale_a.double().repeat_interleave(128, 1)
    return left @ (b.double() * scale_b.double().repeat_interleave(128, 0))


def check_rows(kernel) -> None:
    """Raise AssertionError unless a kernel multiplies with scale_a (M, K / 128) and scale_b (K / 128, N).

    Its arguments are (a_desc, b_desc, scale_a, scale_b, c_desc, M, N, K, stride_a, stride_b, BLOCK_M, BLOCK_N).
    stride_a leads from one block of K to the next, and stride_b, too.
    """
    lesson.require_written(kernel)

    def prepare(*operands):
        *operands, out = operands
        c_desc, stride_b = TensorDescriptor.from_tensor(out, [64, 128]), operands[3].stride(0)
        return lambda: launch(kernel, operands, c_desc, stride_b=stride_b, BLOCK_M=64, BLOCK_N=128)

    _raise(lesson.check_launch(prepare, CASES, make_rows, multiply_rows))
    report = lesson.compile_launch(prepare, make_rows(EXAMPLE, "cpu"), "sm_90a")
    assert report.launchable and report.counts["wgmma"], report.reason or "it must multiply by wgmma"


def check_split(kernel) -> None:
    """Raise AssertionError unless a kernel stores the sums of each split of K: parts (SPLITS, M, N) in float32.

    Its arguments are (a_desc, b_desc, scale_a, scale_b, parts, M, N, K, stride_a, stride_b, SPLITS, BLOCK_M, BLOCK_N),
    and program_id(1) is the split.
    """
    lesson.require_written(kernel)
    splits, where = 3, _where() if device.current().has_tma else "cpu"
    for m, n, k in ((70, 256, 640), (128, 128, 896)):
        *operands, _ = make_products((m, n, k), where)
        memory = lesson.LaunchMemory([*operands, torch.full((splits * m * n,), float("nan"), device=where)])
        parts = memory.tensors[-1]

        def run(*tensors):
            *given, parts = tensors
            launch(kernel, given, parts, programs=(splits,), SPLITS=splits, BLOCK_M=64, BLOCK_N=128)

        fault = lesson.run_launch(memory, run) or memory.find_fault(~torch.isfinite(parts))
        assert not fault, f"{(m, n, k)}: {fault}"
        a, b, scale_a, scale_b = operands
        exact = fp8_gemm.spec(*operands)
        error = relative_error(parts.view(splits, m, n).double().sum(0), exact)
        # Within a block of 128, Hopper's tensor core adds with about 14 bits.
        assert error < 2**-8, (
            f"{(m, n, k)}: the parts do not add up to C (error {error:.0e}); is a step missing?"
        )
        steps, a_wide = k // 128, a.double() * scale_a.double().repeat_interleave(128, 1)
        b_wide = b.double() * scale_b.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        longest = -(-steps // splits) * 128
        largest = (a_wide.abs() @ b_wide.abs()).max()
        for part in parts.view(splits, m, n).double():
            assert float((part - exact).abs().max()) > 1e-3 * largest, (
                f"one part has all of K ({longest} would do)"
            )


@triton.jit
def _product_then(
    a_desc, b_desc, scale_a, scale_b, c_desc, M, N, K, stride_a, stride_b, EPILOGUE: tl.constexpr
):
    m, n = tl.program_id(0) // (N // 128) * 64, tl.program_id(0) % (N // 128) * 128
    rows = m + tl.arange(0, 64)
    acc = tl.zeros((64, 128), tl.float32)
    for step in range(K // 128):
        row_scale = tl.load(scale_a + step * stride_a + rows, mask=rows < M, other=0)
        tile_scale = tl.load(scale_b + n // 128 * stride_b + step)
        product = tl.dot(a_desc.load([m, step * 128]), b_desc.load([n, step * 128]).T)
        acc += product * (row_scale * tile_scale)[:, None]
    c_desc.store([m, n // 2], EPILOGUE(acc).to(tl.bfloat16))


def check_gated(epilogue) -> None:
    """Raise AssertionError unless `epilogue(acc)` returns silu(gate) * up for the even and odd columns of a tile."""
    lesson.require_written(epilogue)

    def make(case, where, scale):
        a, b, scale_a, scale_b, _ = make_products(case, where)
        return a, b, scale_a * scale, scale_b, torch.empty(case[0], case[1] // 2, dtype=BF16, device=where)

    def prepare(*operands):
        *operands, out = operands
        c_desc = TensorDescriptor.from_tensor(out, [64, 64])
        return lambda: launch(_product_then, operands, c_desc, EPILOGUE=epilogue)

    def spec(*operands):
        c = fp8_gemm.spec(*operands)
        return torch.nn.functional.silu(c[:, ::2]) * c[:, 1::2]

    for scale, said in ((2.0**-7, ""), (1, "with large numbers, ")):  # whose exp overflows
        fault = lesson.check_launch(prepare, CASES, functools.partial(make, scale=scale), spec)
        assert not fault, said + fault


def make_cancelling(case: tuple[int, int, int], where: str) -> tuple[torch.Tensor, ...]:
    """Return operands as `make_products` does, whose halves of K cancel but for eight columns, so that rounding shows.

    The scales of B lie in wider memory, so that stride_b is not K / 128.
    """
    a, b, scale_a, scale_b, out = make_products(case, where)
    left, right, half = a.view(torch.uint8), b.T.view(torch.uint8), case[2] // 2
    order = torch.randperm(half - 8, device=where)
    left[:, half:-8], right[:, half:-8] = left[:, order] ^ 0x80, right[:, order]  # 0x80 is the sign
    scale_a[:] = scale_a[:, :1]
    wide = torch.zeros(case[1] // 128, case[2] // 128 + 1, device=where)
    wide[:, :-1] = scale_b[:1].T
    return a, b, scale_a, wide[:, :-1].T, out


def check_gemm(kernel) -> None:
    """Raise AssertionError unless a kernel with the arguments of by_block multiplies with block scales."""
    lesson.require_written(kernel)

    def prepare(*operands, tile):
        *operands, out = operands
        sizes = dict(zip(("BLOCK_M", "BLOCK_N"), tile))
        return lambda: launch(kernel, operands, TensorDescriptor.from_tensor(out, tile), tile=tile, **sizes)

    for tile in ([64, 128], [32, 64]):
        fault = check_version(functools.partial(prepare, tile=tile))
        assert not fault, f"with tiles of {tile[0]} × {tile[1]}, {fault}"
    long = dict.fromkeys(CASES, [(70, 256, 2048)])
    fault = lesson.check_launch(
        functools.partial(prepare, tile=[64, 128]), long, make_cancelling, fp8_gemm.spec
    )
    assert not fault, f"where large sums cancel, {fault}"
    example = fp8_operands(*EXAMPLE, "cpu")
    report = lesson.compile_launch(functools.partial(prepare, tile=[64, 128]), example, "sm_90a")
    assert report.launchable and report.counts["wgmma"], report.reason or "it must multiply by wgmma"


CHECKS = {
    "Exercise 1": check_fit,
    "Exercise 2": check_index,
    "Exercise 3": check_rows,
    "Exercise 4": check_split,
    "Exercise 5": check_gated,
    "Exercise 6": check_gemm,
}
check = make_checker(CHECKS)
