"""The command of `ch14.blockscaled`: check a block-scaled GEMM and time it, or compile it and plan its stages.

The options are the same as in CUTLASS's example, which the field note uses.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from ch14 import blockscaled, fp8_gemm, mx_formats
from ch14.blockscaled import emulated, native
from ch14.blockscaled.lesson import smem_planner
from ch14.blockscaled.lesson.experiments import EMULATED_SOURCES, FP8_SOURCES
from ch14.fp8_gemm.lesson.verification import judge
from ch14.mx_formats import number_formats
from tilelab import cli
from tilelab.measure import bench, check
from tilelab.runtime import build, device, provenance
from tilelab.runtime.operands import require_one_of

FORMS = {
    ("Float4E2M1FN", "Float8E8M0FNU", 32): "mxfp4",
    ("Float4E2M1FN", "Float8E4M3FN", 16): "nvfp4",
    ("Float4E2M1FN", "Float8E8M0FNU", 16): "fp4_e8m0_16",
    ("Float8E4M3FN", "Float8E8M0FNU", 32): "mxfp8_e4m3",
    ("Float8E5M2", "Float8E8M0FNU", 32): "mxfp8_e5m2",
    ("Float6E3M2FN", "Float8E8M0FNU", 32): "mxfp6_e3m2",
    ("Float6E2M3FN", "Float8E8M0FNU", 32): "mxfp6_e2m3",
}
FP8 = ("Float8E4M3FN", "Float32", 128)  # DeepSeek's format, which CUTLASS's example does not have
FP8_PLAN = ("Float8E4M3FN", "Float8E8M0FNU", 32)  # its tiles and clusters, for the planner
C_DTYPES = {"Float16": torch.float16, "BFloat16": torch.bfloat16, "Float32": torch.float32}
PEER = "cuBLAS bf16"
# Per column of K: tensor cores truncate each sum of 16 products, which costs up to 2^-23.
STEP_LOSS = 2.0**-27


def _complete(options: cli.Options) -> None:
    """Add c_dtype, choice (of the planner), forms, form and timed; ValueError for those that do not fit together."""
    given = options.ab_dtype, options.sf_dtype, options.sf_vec_size
    options.c_dtype = options.c_dtype or ("BFloat16" if given == FP8 else smem_planner.Blackwell().c_dtype)
    if given != FP8 and (options.sf_dtype == FP8[1] or options.sf_vec_size == FP8[2]):
        raise ValueError(
            "Float32 scales go over 128 elements of Float8E4M3FN, and no other scales do; these are "
            f"{options.sf_dtype} over {options.sf_vec_size} of {options.ab_dtype}."
        )
    tile = (options.mma_tiler_mn, options.cluster_shape_mn)
    planned = FP8_PLAN if given == FP8 else given
    options.choice = smem_planner.Blackwell(*tile, *planned, c_dtype=options.c_dtype)
    options.forms = blockscaled.PAIR
    if given != FP8:
        options.forms = (mx_formats.format_with_kernels(FORMS[given]).name,) * 2
    options.form = options.forms[0]
    require_one_of("c_dtype of a kernel that runs (smem_planner plans more)", options.c_dtype, C_DTYPES)
    if given == FP8 and options.c_dtype != "BFloat16":
        raise ValueError(f"c_dtype is {options.c_dtype}; with Float32 scales C is BFloat16.")
    if options.mnkl[2] % options.sf_vec_size:
        unit = f"a multiple of --sf_vec_size ({options.sf_vec_size})"
        raise ValueError(f"K of --mnkl is {options.mnkl[2]}; it must be {unit}.")
    options.timed = options.benchmark_mode or options.use_baseline
    if options.kernel == "naive" and options.use_baseline:
        why = "a kernel compared with itself shows the noise of the clock; leave out one of the two"
        raise ValueError(f"--kernel naive is what --use_baseline times: {why}.")
    if options.target and (options.benchmark_mode or options.skip_ref_check):
        raise ValueError("--target only compiles and plans: leave out --benchmark_mode and --skip_ref_check.")
    if options.skip_ref_check and not options.timed:
        raise ValueError(
            "with --skip_ref_check and no --benchmark_mode or --use_baseline there is nothing to do."
        )


# ---- the choice of kernels


def _describe_tile(options: cli.Options, config: str) -> str:
    """Return a sentence that says why the requested tile does not apply to a kernel of the course."""
    choice = options.choice
    tile, cluster = ("{} x {}".format(*pair) for pair in (choice.mma_tiler_mn, choice.cluster_shape_mn))
    if config.startswith("{}×{}×".format(*choice.mma_tiler_mn)):
        return f"This kernel has the tile that was asked for, without a cluster: {config}."
    return (
        f"A tile of {tile} and a cluster of {cluster} are CUTLASS's words for a tcgen05 kernel; they do not apply "
        f"to this one, whose tile is its own: {config}."
    )


def _choose_dot_scaled(options: cli.Options, kernel: str, target: str) -> tuple:
    """Return a configuration, with the requested tile if possible, a sentence about it, and why it cannot run."""
    every = native.configs(options.form, target, kernel).values()
    asked = []
    (tile_m, tile_n), (cluster_m, _) = options.choice.mma_tiler_mn, options.choice.cluster_shape_mn
    pair = tile_m == 256 and cluster_m % 2 == 0  # two CTAs share such a tile in CUTLASS
    if kernel == "native":
        tile = tile_m // 2 if pair else tile_m, tile_n
        asked = [config for config in every if (config.block_m, config.block_n) == tile]
    for config in asked or every:
        report = native.compile_config(options.form, config, target, C_DTYPES[options.c_dtype])
        if not (reason := native.rejection(report, options.form, config)):
            break
    has = (
        "what each of two CTAs has of the tile that was asked for" if pair else "the tile that was asked for"
    )
    sentence = f"Triton's kernel has {has}, without a cluster: {config}."
    return config, sentence if asked else _describe_tile(options, f"{config}"), reason


def _choose_kernels(options: cli.Options, target: str) -> tuple[list[str], tuple[str, str]]:
    """Return the kernel, followed by the baseline where one was asked for, and sentences on both choices."""
    kernel = path = blockscaled.choose_path(*options.forms, options.mnkl[:3], target)
    if options.kernel != "best":
        if path == "fp8":
            raise ValueError(f"these operands take the path fp8: leave out --kernel {options.kernel}.")
        if options.kernel == "native" and path == "emulated":
            raise device.Unsupported(blockscaled.explain_path(options.form, target, path))
        kernel = options.kernel
    missing = ""
    if options.use_baseline:
        missing = f"There is no naive kernel for {' x '.join(dict.fromkeys(options.forms))}."
        if options.form in native.FORMS:
            *_, missing = _choose_dot_scaled(options, "naive", target)
    kernels = [kernel, "naive"] if options.use_baseline and not missing else [kernel]
    why = blockscaled.explain_path(options.form, target, kernel)
    if kernel == "naive":
        why = f"The naive kernel is tl.dot_scaled on pointers; the compiler decides what becomes of it on {target}."
    elif options.kernel == "emulated":
        why = f"{options.form} is decoded to bf16 and multiplied there, as --kernel emulated asks."
    return kernels, (why, missing and f"{missing} The baseline is {PEER}.")


def _jobs(options: cli.Options, kernel: str, target: str) -> tuple[list[build.Job], str]:
    """Return the compilations of a kernel, the one that multiplies last, and a sentence on its tile."""
    mnk, c = options.mnkl[:3], C_DTYPES[options.c_dtype]
    if kernel in ("native", "naive"):
        config, sentence, _ = _choose_dot_scaled(options, kernel, target)
        return [native.job(config, target, options.form, out=c)], sentence
    if kernel == "emulated":
        jobs = emulated.jobs(options.form, target, mnk, c)
    else:
        best, *_ = fp8_gemm.find_best(*mnk, device.current().sms or device.KNOWN["H200"].sms)
        jobs = [fp8_gemm.job(best, target)]
    return jobs, _describe_tile(options, jobs[-1].name)


def _describe_rows(options: cli.Options, rows: list[dict], *sentences: str) -> list[dict]:
    """Add format, shape and a `note` of the sentences to the rows, and print the note where the output is no JSON."""
    sentences = [each.strip() for each in sentences if each.strip()]
    options.say(*sentences)
    about = {"format": " x ".join(dict.fromkeys(options.forms)), "shape": list(options.mnkl)}
    about |= {"c_dtype": options.c_dtype, "note": " ".join(sentences)}
    return [row | about for row in rows]


def _compile(options: cli.Options) -> list[dict]:
    """Return a row per compilation, and a row for the plan where the target has tensor memory."""
    target, rows = options.target, []
    kernels, (why, missing) = _choose_kernels(options, target)
    for kernel in kernels:
        for job in _jobs(options, kernel, target)[0]:
            made = build.build_one(job)
            instruction, count = native.tensor_core_instruction(made.ptx)
            for name in ("HGMMA", "QGMMA"):  # of bf16 and of fp8; CUDA C++ is counted in SASS
                if made.counts.get(name):
                    instruction, count = name, made.counts[name]
            counted = {"tmem": made.tmem, "count": count, "instruction": instruction}
            rows.append(made.row() | {"name": kernel, "config": job.name, **counted})
    planned = f"{target} has no tensor memory, so there is no stage plan: see --target sm_100a.{options.choice.remark}"
    if device.target_limits(target).has_tcgen05:
        plan = smem_planner.plan(options.choice)
        row = {"name": "plan", "config": "CUTLASS's", "target": target, "smem": plan.smem_bytes}
        row |= {"ab_stages": plan.ab_stages, "c_stages": plan.c_stages, "tmem": plan.tmem_columns}
        rows.append(row | {"status": "ok" if plan.fits else "rejected", "reason": plan.problem})
        planned = f"The plan is of CUTLASS's kernel. {plan.sentence}"
    return _describe_rows(options, rows, why, _jobs(options, kernels[0], target)[1], planned, missing)


# ---- on this GPU


def _operands(options: cli.Options, kernels: list[str]) -> dict:
    """Return random operands (a, b) for the peer and for each of the kernels."""
    m, n, k, _ = options.mnkl
    x, y = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    found = {PEER: (x, y.T)}
    for kernel in kernels:
        tiled = kernel == "native"
        a = mx_formats.quantise(x, options.form, tiled=tiled)
        if options.forms == blockscaled.PAIR:
            weight = number_formats.quantise(y, number_formats.lookup(options.forms[1]))
            found[kernel] = a, (weight.codes.view(torch.float8_e4m3fn).T, weight.scales.T)
        else:
            found[kernel] = a, mx_formats.quantise(y, options.form, tiled=tiled).T
    return found


def _prepare(options: cli.Options, kernel: str, a, b, out: torch.Tensor):
    if kernel == PEER:
        c = torch.empty_like(out, dtype=torch.bfloat16)
        return lambda: torch.mm(a, b, out=c)
    if kernel in ("native", "naive"):
        config, *_ = _choose_dot_scaled(options, kernel, device.current().target)
        return native.prepare(a, b, out=out, config=config)
    return blockscaled.prepare(a, b, out=out, path=kernel)


def _verify(options: cli.Options, kernel: str) -> dict:
    """Return {status, reason, error, tolerance} over L products into poisoned memory against float64."""
    m, n, k, count = options.mnkl
    dtype, rows = C_DTYPES[options.c_dtype], []
    for _ in range(count):
        a, b = _operands(options, [kernel])[kernel]
        out, touched = check.make_poisoned((m, n), dtype, "cuda")
        launch = _prepare(options, kernel, a, b, out)
        launch()
        rows.append(judge(out, blockscaled.spec(a, b), touched, check.TOLERANCE[dtype] + k * STEP_LOSS))
    worst = max(rows, key=lambda row: (row["status"] == "wrong", row.get("error", 0)))
    module = type(launch.config).__module__.removesuffix(".configs")
    name = f"{module} {getattr(launch.config, 'name', launch.config)}"
    return worst | ({"config": name} if kernel == "emulated" else {})


def _time(options: cli.Options, kernels: list[str]) -> dict[str, dict]:
    """Return rows by kernel: L products one after the other, interleaved with cuBLAS."""
    (m, n, k, count), dtype = options.mnkl, C_DTYPES[options.c_dtype]

    def inputs():
        empty = functools.partial(torch.empty, m, n, dtype=dtype, device="cuda")
        made = [(_operands(options, kernels), empty()) for _ in range(count)]
        # The caller counts the sizes of these tensors.
        return made + [tensor for operands, out in made for tensor in (*operands[PEER], out)]

    def candidate(kernel):
        def prepare(*made):
            launches = [_prepare(options, kernel, *operands[kernel], out) for operands, out in made[:count]]
            return lambda: [launch() for launch in launches]

        return prepare

    candidates = {name: candidate(name) for name in (PEER, *kernels)}
    found = bench.compare(candidates, inputs, PEER, flops=2 * m * n * k * count)
    return {kernel: found[kernel].row() for kernel in kernels}


def _measure(options: cli.Options) -> list[dict]:
    if not device.current().has_tma:
        options.target = "sm_90a" if options.forms == blockscaled.PAIR else "sm_100a"
        here = device.current().describe()
        options.say(f"Nothing is measured here ({here}). It is compiled for {options.target}, and planned.")
        return _compile(options)
    target = device.current().target
    kernels, (why, missing) = _choose_kernels(options, target)
    rows = {kernel: {"status": "ok", "reason": ""} for kernel in kernels}
    if not options.skip_ref_check:
        rows = {kernel: _verify(options, kernel) for kernel in kernels}
    right = [kernel for kernel, row in rows.items() if row["status"] == "ok"]
    timed = _time(options, right) if options.timed and right else {}
    jobs = {kernel: _jobs(options, kernel, target) for kernel in kernels}
    names = {kernel: {"config": jobs[kernel][0][-1].name} for kernel in kernels}
    found = [names[each] | row | timed.get(each, {}) | {"name": each} for each, row in rows.items()]
    return _describe_rows(options, found, options.choice.remark, why, jobs[kernels[0]][1], missing)


# ---- the table

USUAL = smem_planner.Blackwell()


def _option(name: str, choices: Iterable) -> cli.Option:
    """Return an option of the planner, which checks the value."""
    usual = getattr(USUAL, name)
    words = f"{', '.join(map(str, choices))} (default {usual})"
    return cli.Option(words, default=usual, type=type(usual), metavar=name.upper())


COMMAND = cli.Command(
    module="ch14.blockscaled",
    description="Check a block-scaled GEMM against float64; with --benchmark_mode or --use_baseline also time it; with "
    "--target compile it and plan its stages, without a GPU. The options are named as in CUTLASS's example for "
    "Blackwell.",
    options={
        "mnkl": cli.sizes(
            "M,N,K,L",
            (8192, 8192, 1024, 1),
            "C (M, N) = A (M, K) B (K, N), L times",
            1 << 17,
            lambda m, n, k, count: "L up to 1,024" if count > 1024 else "",
        ),
        "mma_tiler_mn": cli.sizes("M,N", USUAL.mma_tiler_mn, "for tcgen05"),
        "cluster_shape_mn": cli.sizes("M,N", USUAL.cluster_shape_mn, "for tcgen05"),
        "ab_dtype": _option("ab_dtype", smem_planner.FORMATS),
        "c_dtype": cli.Option(f"{', '.join(C_DTYPES)} (default by the scales)", metavar="C_DTYPE"),
        "sf_vec_size": _option("sf_vec_size", (16, 32, 128)),
        "sf_dtype": _option("sf_dtype", ("Float8E8M0FNU", "Float8E4M3FN", "Float32")),
        "kernel": cli.choice(
            ("best", "native", "emulated", "naive"), "best", "best (default): by formats and GPU"
        ),
        "use_baseline": cli.flag("time naive dot_scaled beside it, where that exists"),
        "skip_ref_check": cli.flag("do not compare with float64"),
        "benchmark_mode": cli.flag(f"time it against {PEER}"),
        "target": cli.choice(device.TARGETS[1:], help="compile and plan only, for this target"),
    },
    complete=_complete,
    columns="name config status error tolerance ms tflops peer_ms ratio ab_stages c_stages instruction count "
    "block_scale tma_load registers smem tmem reason",
    source=lambda: provenance.source_hash(blockscaled, *FP8_SOURCES, *EMULATED_SOURCES),
    measure=_measure,
    compile=_compile,
)
