"""Check and time a block-scaled GEMM, or compile it for another GPU and plan its stages: python -m ch14.blockscaled.

The options are the same as in CUTLASS's example, which the field note uses.
"""

from __future__ import annotations

import torch

from ch14 import blockscaled, mx_formats
from ch14.blockscaled import emulated, fp8, native, smem_planner
from ch14.blockscaled.cutlass_options import C_DTYPES, PEER, describe_tile, parse
from ch14.blockscaled.experiments import EMULATED_SOURCES, FP8_SOURCES
from ch14.blockscaled.verification import judge
from ch14.mx_formats import number_formats
from tilelab import bench, build, check, cli, device, results

STEP_LOSS = 2.0**-27  # per column of K: tensor cores truncate each sum of 16 products, which costs up to 2^-23
COLUMNS = ["name", "config", "status", "error", "tolerance", "ms", "tflops", "peer_ms", "ratio", "ab_stages",
           "c_stages", "instruction", "count", "block_scale", "tma_load", "registers", "smem", "tmem", "reason"]


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = parse(argv)
    return cli.run_and_report("ch14.blockscaled", COLUMNS, source(), options.json,
                              lambda: _compile(options) if options.target else _measure(options))


def source() -> str:
    """Return the hash of the measured code."""
    return results.source_hash(blockscaled, *FP8_SOURCES, *EMULATED_SOURCES)


def _describe_rows(options, rows: list[dict], *sentences: str) -> list[dict]:
    """Add format, shape and a `note` of the sentences to the rows, and print the note where the output is no JSON."""
    sentences = [each.strip() for each in sentences if each.strip()]
    if options.json != "-":
        print("\n".join(sentences))
    about = {"format": " x ".join(dict.fromkeys(options.forms)), "shape": list(options.mnkl),
             "c_dtype": options.c_dtype, "note": " ".join(sentences)}
    return [row | about for row in rows]


def _choose_dot_scaled(options, kernel: str, target: str) -> tuple[native.NativeConfig, str, str]:
    """Return a configuration, with the requested tile if possible, a sentence about it, and why it cannot run."""
    every = native.configs(options.form, target, kernel).values()
    asked = [config for config in every if kernel == "native" and options.choice.cluster_shape_mn == (1, 1)
             and (config.block_m, config.block_n) == options.choice.mma_tiler_mn]  # 256 rows are two CTAs' in CUTLASS
    found = []
    for config in asked or every:
        report = native.compile_config(options.form, config, target, C_DTYPES[options.c_dtype])
        found.append((native.rejection(report, options.form, config), config))
        if not found[-1][0]:
            break
    reason, config = min(found, key=lambda each: each[0] != "")
    sentence = f"Triton's kernel has the tile that was asked for: {config}."
    return config, sentence if asked else describe_tile(options, f"{config}"), reason


def _choose_kernels(options, target: str) -> tuple[str, list[str], tuple[str, str]]:
    """Return the kernel, it and the baseline where one was asked for, and sentences on both choices."""
    kernel = path = blockscaled.choose_path(*options.forms, options.mnkl[:3], target)
    reason, kernels = "", []
    if options.kernel != "best":
        if path == "fp8":
            raise ValueError(f"these operands take the path fp8: leave out --kernel {options.kernel}.")
        if options.kernel == "native" and path == "emulated":
            raise device.Unsupported(blockscaled.explain_path(options.form, target, path))
        kernel = options.kernel
    if options.use_baseline:
        reason = f"There is no naive kernel for {' x '.join(dict.fromkeys(options.forms))}."
        if options.form in native.FORMS:
            *_, reason = _choose_dot_scaled(options, "naive", target)
        kernels, reason = ([], f"{reason} The baseline is {PEER}.") if reason else (["naive"], "")
    why = blockscaled.explain_path(options.form, target, kernel)
    if kernel == "naive":
        why = f"The naive kernel is tl.dot_scaled on pointers; the compiler decides what becomes of it on {target}."
    elif options.kernel == "emulated":
        why = f"{options.form} is decoded to bf16 and multiplied there, as --kernel emulated asks."
    return kernel, [kernel, *kernels], (why, reason)


def _jobs(options, kernel: str, target: str) -> tuple[list[build.Job], str]:
    """Return the compilations of a kernel, the one that multiplies last, and a sentence on its tile."""
    mnk, c = options.mnkl[:3], C_DTYPES[options.c_dtype]
    if kernel in ("native", "naive"):
        config, sentence, _ = _choose_dot_scaled(options, kernel, target)
        return [native.job(config, target, options.form, out=c)], sentence
    jobs = emulated.jobs(options.form, target, mnk, c) if kernel == "emulated" else [
        fp8.job(fp8.best_config(*mnk, device.KNOWN["H200"].sms), target)]
    return jobs, describe_tile(options, jobs[-1].name)


def _compile(options) -> list[dict]:
    """Return a row per compilation, and a row for the plan where the target has tensor memory."""
    target, rows = options.target, []
    kernel, kernels, (why, missing) = _choose_kernels(options, target)
    for each in kernels:
        for job in _jobs(options, each, target)[0]:
            made = build.build_one(job)
            instruction, count = native.tensor_core_instruction(made.ptx)
            for name in ("HGMMA", "QGMMA"):  # of bf16 and of fp8; CUDA C++ is counted in SASS
                if made.counts.get(name):
                    instruction, count = name, made.counts[name]
            rows.append(made.row() | {"name": each, "config": job.name, "tmem": made.tmem, "instruction": instruction,
                                      "count": count})
    planned = f"{target} has no tensor memory, so there is no stage plan: see --target sm_100a.{options.choice.remark}"
    if device.target_limits(target).has_tcgen05:
        plan = smem_planner.plan(options.choice)
        rows.append({"name": "plan", "config": "CUTLASS's", "target": target, "ab_stages": plan.ab_stages,
                     "c_stages": plan.c_stages, "smem": plan.smem_bytes, "tmem": plan.tmem_columns,
                     "status": "ok" if plan.fits else "rejected", "reason": plan.problem})
        planned = f"The plan is of CUTLASS's kernel. {plan.sentence}"
    return _describe_rows(options, rows, why, _jobs(options, kernel, target)[1], planned, missing)


def _operands(options, kernels: list[str]) -> dict:
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


def _prepare(options, kernel: str, a, b, out: torch.Tensor):
    if kernel == PEER:
        c = torch.empty_like(out, dtype=torch.bfloat16)
        return lambda: torch.mm(a, b, out=c)
    if kernel in ("native", "naive"):
        config, *_ = _choose_dot_scaled(options, kernel, device.current().target)
        return native.prepare(a, b, out=out, config=config)
    return blockscaled.prepare(a, b, out=out, path=kernel)


def _verify(options, kernel: str) -> dict:
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


def _time(options, kernels: list[str]) -> dict[str, dict]:
    """Return rows by kernel: L products one after the other, interleaved with cuBLAS."""
    (m, n, k, count), dtype = options.mnkl, C_DTYPES[options.c_dtype]

    def inputs():
        made = [(_operands(options, kernels), torch.empty(m, n, dtype=dtype, device="cuda")) for _ in range(count)]
        return made + [tensor for operands, out in made for tensor in (*operands[PEER], out)]  # whose sizes are counted

    def candidate(kernel):
        def prepare(*made):
            launches = [_prepare(options, kernel, *operands[kernel], out) for operands, out in made[:count]]
            return lambda: [launch() for launch in launches]
        return prepare

    found = bench.compare({name: candidate(name) for name in (PEER, *kernels)}, inputs, PEER,
                          flops=2 * m * n * k * count)
    return {kernel: found[kernel].row() for kernel in kernels}


def _measure(options) -> list[dict]:
    device.require("has_tma", "running a block-scaled GEMM", "compile and plan it with --target sm_100a, or read the "
                   "records in results/")
    target = device.current().target
    kernel, kernels, (why, missing) = _choose_kernels(options, target)
    rows = {each: {"status": "ok", "reason": ""} if options.skip_ref_check else _verify(options, each)
            for each in kernels}
    right = [each for each, row in rows.items() if row["status"] == "ok"]
    timed = _time(options, right) if options.timed and right else {}
    jobs = {each: _jobs(options, each, target) for each in kernels}
    found = [{"config": jobs[each][0][-1].name} | row | timed.get(each, {}) | {"name": each}
             for each, row in rows.items()]
    return _describe_rows(options, found, options.choice.remark, why, jobs[kernel][1], missing)


if __name__ == "__main__":
    cli.run_main(main)
