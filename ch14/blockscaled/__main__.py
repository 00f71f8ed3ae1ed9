"""The command line of `ch14.blockscaled`, in the words of CUTLASS's example: check and time a block-scaled GEMM, or
compile it for another GPU and plan its stages."""

from __future__ import annotations

import dataclasses
import sys

import torch

from ch10 import wgmma_gemm
from ch14 import blockscaled, gemm, mx_formats
from ch14.blockscaled import emulated, fp8, native, native_kernels, smem_planner
from ch14.mx_formats import Packed, dequantise_kernels, number_formats, packing
from tilelab import bench, build, check, cli, device, results

FORMS = {("Float4E2M1FN", "Float8E8M0FNU", 32): "mxfp4", ("Float4E2M1FN", "Float8E4M3FN", 16): "nvfp4",
         ("Float4E2M1FN", "Float8E8M0FNU", 16): "fp4_e8m0_16", ("Float8E4M3FN", "Float8E8M0FNU", 32): "mxfp8_e4m3",
         ("Float8E5M2", "Float8E8M0FNU", 32): "mxfp8_e5m2", ("Float6E3M2FN", "Float8E8M0FNU", 32): "mxfp6_e3m2",
         ("Float6E2M3FN", "Float8E8M0FNU", 32): "mxfp6_e2m3"}
FP8 = ("Float8E4M3FN", "Float32", 128)  # DeepSeek's, which is none of CUTLASS's example: 1 x 128 of A, 128 x 128 of B
FP8_PLAN = ("Float8E4M3FN", "Float8E8M0FNU", 32)  # whose tiles and clusters the planner knows
C_DTYPES = {"Float16": torch.float16, "BFloat16": torch.bfloat16, "Float32": torch.float32}
KERNELS = ("best", "native", "emulated", "naive")
PEER = "cuBLAS bf16"
LARGEST = 1 << 17
STEP_LOSS = 2.0**-27  # a column of K: tensor cores add 16 at a time and cut the sum off, which costs up to 2^-23 of it


def _arguments(argv):
    made = cli.make_parser("ch14.blockscaled", "Check a block-scaled GEMM against float64 and time it against cuBLAS bf16; "
                      "with --target compile it and plan its stages, without a GPU.")
    usual = smem_planner.Blackwell()
    made.add_argument("--mnkl", default="8192,8192,1024,1", metavar="M,N,K,L",
                      help="C (M, N) = A (M, K) B (N, K)^T, L times (default 8192,8192,1024,1)")
    for name in ("mma_tiler_mn", "cluster_shape_mn"):
        default = ",".join(map(str, getattr(usual, name)))
        made.add_argument(f"--{name}", default=default, metavar="M,N", help=f"of a tcgen05 kernel (default {default})")
    for name, offered in (("ab_dtype", smem_planner.FORMATS), ("sf_dtype", ("Float8E8M0FNU", "Float8E4M3FN", "Float32")),
                          ("sf_vec_size", ("16", "32", "128")), ("c_dtype", C_DTYPES)):
        default = getattr(usual, name)
        made.add_argument(f"--{name}", default=default, type=type(default), help=f"{', '.join(offered)} "
                          f"(default {default})")
    made.add_argument("--kernel", default="best", choices=KERNELS, help="best: what ch14.blockscaled chooses (default)")
    made.add_argument("--use_baseline", action="store_true", help="time naive dot_scaled beside it, where that exists")
    made.add_argument("--skip_ref_check", action="store_true", help="do not compare with float64")
    made.add_argument("--benchmark_mode", action="store_true", help="time it against cuBLAS bf16")
    made.add_argument("--target", choices=device.TARGETS[1:], help="compile and plan only, for this target")
    options = cli.parse_options(made, argv)
    try:
        _understood(options)
    except ValueError as error:
        made.error(str(error))
    return options


def _numbers(name: str, text: str, count: int) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != count or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ValueError(f"--{name} is {count} whole numbers with commas between them; here it is {text[:60]!r}.")
    return tuple(map(int, parts))


def _understood(options) -> None:
    """The words as values: choice, form, shape, timed; ValueError for combinations that do not exist."""
    given = options.ab_dtype, options.sf_dtype, options.sf_vec_size
    if options.sf_dtype == "Float32" and given != FP8:
        raise ValueError("Float32 scales go over 128 elements of Float8E4M3FN; here are Float32 over "
                         f"{options.sf_vec_size} of {options.ab_dtype}.")
    tile = (_numbers(name, getattr(options, name), 2) for name in ("mma_tiler_mn", "cluster_shape_mn"))
    options.choice = smem_planner.Blackwell(*tile, *(FP8_PLAN if given == FP8 else given), c_dtype=options.c_dtype)
    options.forms = blockscaled.PAIR if given == FP8 else (mx_formats.fused(FORMS[given]).name,) * 2
    options.form = options.forms[0]
    smem_planner.among("c_dtype of a kernel that runs (ch14.blockscaled.smem_planner plans more)", options.c_dtype, C_DTYPES)
    if given == FP8 and options.c_dtype != "BFloat16":
        raise ValueError(f"with Float32 scales C is BFloat16; here it is {options.c_dtype}.")
    size = options.sf_vec_size
    options.mnkl = _numbers("mnkl", options.mnkl, 4)
    m, n, k, count = options.mnkl
    if min(options.mnkl) < 1 or max(m, n, k) > LARGEST or count > 1024 or k % size:
        raise ValueError(f"--mnkl is M, N and K from 1 to {LARGEST:,}, K a multiple of --sf_vec_size ({size}), and L "
                         f"from 1 to 1,024; here it is {','.join(map(str, options.mnkl))}.")
    options.timed = options.benchmark_mode or options.use_baseline
    if options.kernel == "naive" and options.use_baseline:
        raise ValueError("--kernel naive is the baseline: a kernel compared with itself shows the noise of the clock, "
                         "not a speedup; leave out one of --kernel naive and --use_baseline.")
    if options.target and (options.benchmark_mode or options.skip_ref_check):
        raise ValueError("--target only compiles and plans: leave out --benchmark_mode and --skip_ref_check.")
    if options.skip_ref_check and not options.timed:
        raise ValueError("with --skip_ref_check and no --benchmark_mode or --use_baseline there is nothing to do.")


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _arguments(argv)
    columns = ["name", "config", "status", "error", "tolerance", "ms", "tflops", "peer_ms", "ratio", "ab_stages",
               "c_stages", "instruction", "count", "block_scale", "tma_load", "registers", "smem", "tmem", "reason"]
    return cli.run_and_report("ch14.blockscaled", columns, source(), options.json,
                      lambda: _compiled(options) if options.target else _measured(options))


def source() -> str:
    """Hash of what is measured."""
    return results.source_hash(blockscaled, emulated, native, native_kernels,
                               fp8, fp8.SOURCE, mx_formats, dequantise_kernels, gemm,
                               wgmma_gemm, wgmma_gemm.SOURCE)


def _say(options, rows: list[dict], *sentences: str) -> list[dict]:
    """The rows with what they are about and `note`, the sentences, which are printed where JSON is not."""
    m, n, k, count = options.mnkl
    said = [each.strip() for each in sentences if each.strip()]
    if options.json != "-":
        print("\n".join(said))
    about = {"format": " x ".join(dict.fromkeys(options.forms)), "shape": [m, n, k, count], "c_dtype": options.c_dtype,
             "note": " ".join(said)}
    return [row | about for row in rows]


def _tile(options, config: str) -> str:
    """What becomes of --mma_tiler_mn and --cluster_shape_mn in a kernel that is not CUTLASS's."""
    tile, cluster = options.choice.mma_tiler_mn, options.choice.cluster_shape_mn
    return (f"A tile of {tile[0]} x {tile[1]} and a cluster of {cluster[0]} x {cluster[1]} are CUTLASS's words for a "
            f"tcgen05 kernel; they do not apply to this one, whose tile is its own: {config}.")


def _dot_scaled(options, kernel: str, target: str) -> tuple[native.NativeConfig, str, str]:
    """Of native or naive: the configuration, one with the tile that is asked for where there is one, else the first
    that can run; a sentence about the tile; and one if it cannot run, else an empty one."""
    every = native.configs(options.form, target, "tiled" if kernel == "native" else "pointers")
    asked = [config for config in every if kernel == "native" and options.choice.cluster_shape_mn == (1, 1)
             and (config.block_m, config.block_n) == options.choice.mma_tiler_mn]  # 256 rows are two CTAs' in CUTLASS
    refused = {}
    for config in asked or every:
        made = native.report(options.form, config, target, C_DTYPES[options.c_dtype])
        refused[config] = native.refusal(made, options.form, config)
        if not refused[config]:
            break
    config = min(refused, key=lambda each: refused[each] != "")
    had = f"Triton's kernel has the tile that was asked for: {config}."
    return config, had if asked else _tile(options, f"{config}"), refused[config]


def _kernel(options, target: str) -> str:
    """One of KERNELS but "best"."""
    m, n, k, _ = options.mnkl
    found = blockscaled.path(*options.forms, (m, n, k), target)
    if found == "fp8" and options.kernel != "best":
        raise ValueError(f"these operands take the path fp8: leave out --kernel {options.kernel}.")
    if options.kernel == "native" and found == "emulated":
        raise device.Unsupported(blockscaled.why(options.form, target, found))
    return found if options.kernel == "best" else options.kernel


def _beside(options, kernel: str, target: str) -> tuple[list[str], str]:
    """The kernel and the baseline where it was asked for, or why there is none."""
    if not options.use_baseline:
        return [kernel], ""
    reason = f"There is no naive kernel for {' x '.join(dict.fromkeys(options.forms))}."
    if options.form in native.FORMS:
        *_, reason = _dot_scaled(options, "naive", target)
    return ([kernel], f"{reason} The baseline is cuBLAS bf16.") if reason else ([kernel, "naive"], "")


def _why(options, target: str, kernel: str) -> str:
    if kernel == "naive":
        return f"The naive kernel is tl.dot_scaled on pointers; the compiler decides what becomes of it on {target}."
    if options.kernel == "emulated":
        return f"{options.form} is decoded to bf16 and multiplied there, as --kernel emulated asks."
    return blockscaled.why(options.form, target, kernel)


# ---- without a GPU


def _jobs(options, kernel: str, target: str) -> tuple[list[build.Job], str]:
    (m, n, k, _), c = options.mnkl, C_DTYPES[options.c_dtype]
    if kernel == "emulated":
        jobs = emulated.jobs(options.form, target, (m, n, k), c)
        return jobs, _tile(options, jobs[-1].name)
    if kernel == "fp8":
        job = fp8.job(fp8.best(m, n, k, device.KNOWN["H200"].sms), target)
        return [job], _tile(options, job.name)
    config, sentence, _ = _dot_scaled(options, kernel, target)
    return [native.job(options.form, config, target, out=c)], sentence


def _compiled(options) -> list[dict]:
    target, rows, sentences = options.target, [], []
    kernel = _kernel(options, target)
    kernels, missing = _beside(options, kernel, target)
    for each in kernels:
        jobs, sentence = _jobs(options, each, target)
        sentences += [sentence] if each == kernel else []
        for job in jobs:
            made = build.build_one(job)
            instruction, count = native.product(made.ptx)
            for name in ("HGMMA", "QGMMA"):  # of bf16 and of fp8; CUDA C++ is counted in SASS
                if made.counts.get(name):
                    instruction, count = name, made.counts[name]
            rows.append(made.row() | {"name": each, "config": job.name, "tmem": made.tmem, "instruction": instruction,
                                      "count": count})
    if device.target_limits(target).has_tcgen05:
        plan = smem_planner.plan(options.choice)
        rows.append({"name": "plan", "config": "CUTLASS's", "target": target, "ab_stages": plan.ab_stages,
                     "c_stages": plan.c_stages, "smem": plan.smem_bytes, "tmem": plan.tmem_columns,
                     "status": "ok" if plan.fits else "rejected", "reason": plan.problem})
        sentences.append(f"The plan is of CUTLASS's kernel. {plan.sentence}")
    else:
        sentences.append(f"{target} has no tensor memory, so that there is no stage plan: --target sm_100a shows it."
                         + options.choice.remark)
    return _say(options, rows, _why(options, target, kernel), *sentences, missing)


# ---- on a GPU


def _rows(of: Packed) -> Packed:
    """The same with scales row by row."""
    if not of.tiled:
        return of
    scales = packing.untile_scales(of.scales, of.shape[0], -(-of.shape[1] // of.format.block[1]))
    return dataclasses.replace(of, scales=scales, tiled=False)


def _launcher(options, kernel: str, x: torch.Tensor, y: torch.Tensor, a, b, out: torch.Tensor):
    if kernel == PEER:
        c = torch.empty_like(out, dtype=torch.bfloat16)
        return lambda: torch.mm(x, y.T, out=c)
    if kernel in ("native", "naive"):
        config, *_ = _dot_scaled(options, kernel, device.current().target)
        if kernel == "native":
            return native.prepare(a, b, out=out, config=config)
        return native.prepare(_rows(a), _rows(b), out=out, config=config, scales="pointers")
    return blockscaled.prepare(a, b, out=out, path=kernel)


def _operands(options, tiled: bool) -> tuple:
    """Random A and B in bf16, and as ch14.blockscaled takes them."""
    m, n, k, _ = options.mnkl
    x, y = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    if options.forms == blockscaled.PAIR:
        b = number_formats.quantise(y, number_formats.lookup(options.forms[1]))
        return x, y, mx_formats.quantise(x, options.form), (b.codes.view(torch.float8_e4m3fn), b.scales)
    return x, y, *(mx_formats.quantise(each, options.form, tiled=tiled) for each in (x, y))


def _verified(options, kernel: str) -> dict:
    """{status, reason, error, tolerance}: every product of L, into poisoned memory, against float64. Of the emulated
    path its `config` too."""
    m, n, k, count = options.mnkl
    dtype, worst = C_DTYPES[options.c_dtype], 0.0
    tolerance = check.TOLERANCE[dtype] + k * STEP_LOSS
    for _ in range(count):
        given = _operands(options, kernel == "native")
        out, touched = check.make_poisoned((m, n), dtype, "cuda")
        reference = blockscaled.spec(*given[2:])
        launch = _launcher(options, kernel, *given, out)
        launch()
        worst = max(worst, check.relative_error(out, reference))
        if reason := touched():
            return {"status": "wrong", "reason": reason}
    if worst == float("inf"):
        return {"status": "wrong", "reason": "elements are not finite, or were never written"}
    reason = f"the error {worst:.1e} is above {tolerance:.1e}" if worst > tolerance else ""
    return {"status": "wrong" if reason else "ok", "reason": reason, "error": worst, "tolerance": tolerance} | (
        {"config": launch.kernel} if kernel == "emulated" else {})


def _timed(options, kernels: list[str]) -> dict[str, dict]:
    """Rows of bench by name: L products, one after the other, of each kernel and of cuBLAS, interleaved."""
    (m, n, k, count), dtype = options.mnkl, C_DTYPES[options.c_dtype]

    def inputs():
        each = [_operands(options, "native" in kernels) for _ in range(count)]
        return [given for operands in each for given in (*operands, torch.empty(m, n, dtype=dtype, device="cuda"))]

    def batch(kernel):
        def prepare(*given):
            launches = [_launcher(options, kernel, *given[first:first + 5]) for first in range(0, len(given), 5)]
            return lambda: [launch() for launch in launches]
        return prepare

    found = bench.compare({name: batch(name) for name in (PEER, *kernels)}, inputs, PEER, flops=2 * m * n * k * count)
    return {kernel: found[kernel].row() for kernel in kernels}


def _measured(options) -> list[dict]:
    device.require("has_tma", "running a block-scaled GEMM", "compile and plan it with --target sm_100a, or read the "
                   "records in results/")
    target = device.current().target
    kernel = _kernel(options, target)
    kernels, missing = _beside(options, kernel, target)
    rows = {each: {"status": "ok", "reason": ""} if options.skip_ref_check else _verified(options, each)
            for each in kernels}
    right = [each for each, row in rows.items() if row["status"] == "ok"]
    timed = _timed(options, right) if options.timed and right else {}
    built = {each: _jobs(options, each, target) for each in kernels}
    made = [{"config": built[each][0][-1].name} | row | timed.get(each, {}) | {"name": each}
            for each, row in rows.items()]
    return _say(options, made, options.choice.remark, _why(options, target, kernel), built[kernel][1], missing)


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
