"""Check a reader's own kernel without a GPU: `python -m tilelab.emulator kernel.cu --launch launch.py`.

launch.py defines `launch(kernel)`, which makes CPU tensors, calls `kernel[grid, block, smem_bytes, cluster](...)`, and
returns the result and what is expected: two tensors, two lists of tensors, or True or False. A launch of several
kernels names them as its parameters. The command runs it under each timing of the emulator's engines. It says that the
kernel is right, or which rule is broken in which line, and compiles the kernel for a GPU.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tilelab import cli, emulator
from tilelab.cells import cuda_magic
from tilelab.runtime import cuda, device, files

MODULE = "tilelab.emulator"
SEED_NAMES = ("slow engines", "fast engines", "fast copies and slow products")


def find_difference(found: Any) -> str:
    """Return how the result that a launch returned differs from what it expected; "" where it does not."""
    import torch

    if found is None or isinstance(found, bool):
        return "" if found is not False else "launch() returned False"
    result, expected = found
    if isinstance(result, (list, tuple)):
        parts = [find_difference(pair) for pair in zip(result, expected, strict=True)]
        return next((f"result {index}: {part}" for index, part in enumerate(parts) if part), "")
    if result.shape != expected.shape:
        return f"the result has the shape {tuple(result.shape)}, not {tuple(expected.shape)}"
    wrong = ~torch.isclose(
        result.to(expected.dtype), expected, *_tolerance(result.dtype), equal_nan=True
    ).reshape(-1)
    if not wrong.any():
        return ""
    first = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum()):,} of {wrong.numel():,} elements are wrong; element {first:,} is "
        f"{result.reshape(-1)[first].item():g} instead of {expected.reshape(-1)[first].item():g}"
    )


def _tolerance(dtype: Any) -> tuple[float, float]:
    """Return the relative and the absolute difference that rounding in a sum may cause."""
    if not dtype.is_floating_point:
        return 0.0, 0.0
    return {2: (0.02, 0.02), 1: (0.13, 0.13)}.get(dtype.itemsize, (1e-3, 1e-3))


def check(call: Callable[[], Any], seeds: Sequence[int]) -> list[dict]:
    """Return what is wrong with a launch under the timings `seeds`, each fault once: `seed`, `line` and `said`."""
    import torch

    faults: dict[str, dict] = {}
    for seed in seeds:
        torch.manual_seed(seed)
        try:
            with emulator.with_seed(seed), emulator.collect_hints() as find_hint:
                said = find_difference(call())
            if said and (hint := find_hint()):
                said = f"{hint}; {said}"
        except emulator.EmulationError as error:
            said = str(error)
        if said:
            line = re.match(r"line (\d+)", said)
            key = re.sub(r"\d+", "", said.partition(": ")[2]) if line else "different"
            faults.setdefault(key, {"seed": seed, "line": int(line[1]) if line else None, "said": said})
    return list(faults.values())


def _describe_seed(seed: int) -> str:
    return f"seed {seed}, {SEED_NAMES[seed] if seed < len(SEED_NAMES) else 'random timings'}"


def load_launch(path: pathlib.Path) -> Callable:
    """Return the function `launch` of a file; ValueError says why there is none."""
    sys.path.insert(0, str(path.absolute().parent))
    try:
        launch = runpy.run_path(str(path)).get("launch")
    except Exception as error:
        raise ValueError(f"{path.name} cannot be run: {_explain(error, path)}") from error
    if not callable(launch):
        raise ValueError(f"{path.name} defines no function launch(kernel).")
    return launch


def _explain(error: Exception, path: pathlib.Path) -> str:
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {device.first_line(error)}"


def choose_kernels(launch: Callable, kernels: dict, name: str | None) -> list:
    """Return the kernels for the parameters of a launch."""
    parameters = list(inspect.signature(launch).parameters)
    if len(parameters) > 1:
        if unknown := [each for each in parameters if each not in kernels]:
            raise ValueError(
                f"launch() names the kernel {unknown[0]}; the file declares {', '.join(kernels)}."
            )
        return [kernels[each] for each in parameters]
    if name is None and len(kernels) > 1:
        name = parameters[0] if parameters and parameters[0] in kernels else None
        if name is None:
            raise ValueError(f"the file declares {', '.join(kernels)}; choose one with --kernel.")
    if name is not None and name not in kernels:
        raise ValueError(f"the file declares no kernel {name!r}; it declares {', '.join(kernels)}.")
    return [kernels[name or next(iter(kernels))]]


def compile_kernel(kernel: Any) -> dict:
    """Return what `cuda_magic.read_build` finds about a kernel, or why it does not compile."""
    try:
        return cuda_magic.read_build(kernel)
    except cuda.CompileError as error:
        return {"target": kernel.target, "reason": str(error).strip()}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = cli.make_plain_parser(MODULE, "Check a kernel without a GPU.")
    parser.add_argument("file", metavar="kernel.cu", type=pathlib.Path)
    parser.add_argument(
        "--launch", required=True, type=pathlib.Path, metavar="launch.py", help="a file with launch(kernel)"
    )
    parser.add_argument("--kernel", metavar="NAME", help="which of several kernels of the file")
    parser.add_argument(
        "--instance",
        action="append",
        default=[],
        dest="instances",
        help='an instance of a template, as "gemm<128>"',
    )
    parser.add_argument("-D", action="append", default=[], dest="constants", metavar="NAME=VALUE")
    parser.add_argument(
        "-I", action="append", default=[], dest="folders", metavar="FOLDER", help="holds headers"
    )
    parser.add_argument("--target", default="sm_90a", help="compile for this target (default sm_90a)")
    parser.add_argument("--seeds", type=int, default=len(emulator.SEEDS), help="how many timings are tried")
    parser.add_argument("--json", metavar="PATH", help="write one JSON object to PATH, - for standard output")
    options = parser.parse_args(argv)
    for path in (options.file, options.launch):
        if not path.is_file():
            parser.error(f"there is no file {path}.")
    if options.seeds < 1:
        parser.error(f"--seeds must be 1 or more; it is {options.seeds}.")
    if options.json and options.json != "-" and (reason := cli.unwritable_reason(options.json)):
        parser.error(f"--json takes a file; {reason}.")
    try:
        device.target_limits(options.target)
    except ValueError as error:
        parser.error(f"--target must name a target: {error}")
    return options


def _check_file(options: argparse.Namespace) -> dict:
    """Return the report about the kernel of a file."""
    folder = options.file.absolute().parent
    constants = [f"-D{each}" for each in options.constants] + [
        f"-I{each}" for each in (folder, *options.folders)
    ]
    source = options.file.read_text(errors="replace")
    kernels = cuda_magic.find_kernels(source, constants, options.target, options.instances, folder)
    if not kernels:
        raise ValueError(
            f"{options.file.name} declares no kernel, or only templates: name one with --instance."
        )
    launch = load_launch(options.launch)
    chosen = choose_kernels(launch, kernels, options.kernel)
    try:
        with emulator.collect_advice() as advice:
            faults = check(lambda: launch(*chosen), range(options.seeds))
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError) as error:
        raise ValueError(f"{options.launch.name}, {_explain(error, options.launch)}") from error
    report = {
        "file": options.file.name,
        "kernel": ", ".join(kernel.name for kernel in chosen),
        "status": "wrong" if faults else "ok",
        "seeds": options.seeds,
        "faults": faults,
        "advice": list(dict.fromkeys(advice)),
        "compiled": {kernel.name: compile_kernel(kernel) for kernel in chosen},
    }
    return report


def _describe(report: dict) -> str:
    which = f"{report['kernel']} in {report['file']}"
    if not report["faults"]:
        count = report["seeds"]
        lines = [
            f"{which} is right under {count} timing{'s' if count > 1 else ''} of what runs asynchronously."
        ]
    else:
        lines = [f"{which} is wrong."]
        for fault in report["faults"]:
            lines.append(f"  {fault['said']} ({_describe_seed(fault['seed'])}).")
    lines += [f"Advice: {said}." for said in report["advice"]]
    for name, row in report["compiled"].items():
        if "reason" in row:
            reason = next((each for each in row["reason"].splitlines() if "error" in each), row["reason"])
            lines.append(f"{name} was not compiled for {row['target']}: {reason}")
            continue
        lines.append(cuda_magic.describe(name, row))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. Bad usage ends in SystemExit, with status 2."""
    options = _parse(argv)
    try:
        report = _check_file(options)
    except (ValueError, OSError, RuntimeError) as error:
        # NotEmulated, Unsupported and CompileError are RuntimeErrors.
        report = {"file": options.file.name, "status": "unsupported", "reason": str(error).strip()}
        print(f"python -m {MODULE}: {report['reason']}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"python -m {MODULE}: cancelled.", file=sys.stderr)
        return 130
    if options.json != "-" and "kernel" in report:
        print(_describe(report))
    text = json.dumps(report) + "\n"
    if options.json == "-":
        print(text, end="")
    elif options.json:
        files.write_atomically(pathlib.Path(options.json), text)
    return {"ok": 0, "wrong": 1}.get(report["status"], 2)
