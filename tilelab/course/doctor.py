"""Check whether this machine can run the course: `python -m tilelab.course.doctor [--json] [--target sm_90a]`.

The proof is a TMA copy in Triton and one in CUDA C++. Both are compiled for the GPU's own target (for sm_90a and
sm_100a without such a GPU), and their SASS must hold TMA instructions. On a GPU with TMA they also copy random bits,
which are compared bit for bit. On a GPU, torch.compile compiles a small function, whose result is checked, too. Exit
status: 0 if nothing that should work fails, 1 if a check failed, 2 for bad usage.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from tilelab import cli, emulator
from tilelab.course import notebook
from tilelab.runtime import build, caches, cuda, device

MIN_DRIVER = 580  # CUDA 13 Toolkit Release Notes, minimum driver; NVRTC 13 builds what the course loads
NVRTC = "cuda-toolkit[nvrtc]==13.0.3"
CUDA_COPY, CHUNK_BYTES = pathlib.Path(__file__).with_name("doctor_copy.cu"), 16384
PROOF_TIMEOUT_S = 300
# The SASS instructions that load a tile and that store it.
TMA_SASS = {"triton": (r"UTMALDG", r"UTMASTG"), "cuda": (r"UBLKCP\.S\.G", r"UBLKCP\.G\.S")}
LABEL = {"triton": "Triton", "cuda": "CUDA"}
# (row, function that returns the folder, variable that names it)
CACHES = (
    ("Triton cache", caches.triton_folder, "TRITON_CACHE_DIR"),
    ("CUDA cache", cuda.named_cubin_folder, "TILES_CUBINS"),
)


@dataclass(frozen=True)
class Row:
    """The outcome of one check. `status` is ok, failed, skipped or warn; `detail` is a sentence or the evidence."""

    name: str
    status: str
    detail: str


def proof_targets(target: str | None = None) -> tuple[str, ...]:
    """Return the targets to compile for: `target`, else the GPU's own, else one Hopper and one Blackwell."""
    if target:
        if not device.target_limits(target).has_tma:
            raise ValueError(f"{target} has no TMA to prove: choose sm_90a or newer.")
        return (target,)
    here = device.current()
    return (here.target,) if here.has_tma else ("sm_90a", "sm_100a")


def _one_line(error: object) -> str:
    """Return the line that names the problem: a traceback's last, else the first with "error", else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("Traceback"):
        lines = lines[-1:]
    return next((line for line in lines if re.search(r"(?i)\berror\b", line)), lines[0])[:300]


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


# ---- the checks: each returns (status, detail)


def _check_version(found: str, package: str, oldest: str, newest: str) -> tuple[str, str]:
    """Check that the version at the start of `found` is one that the course is tested with."""
    if _major_minor(oldest) <= _major_minor(found) <= _major_minor(newest):
        return "ok", found
    return "warn", f"{found}; the course is tested with {package} {oldest} to {newest}."


def _check_python() -> tuple[str, str]:
    return _check_version(".".join(map(str, sys.version_info[:3])), "Python", "3.11", "3.12")


def _check_torch() -> tuple[str, str]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    return _check_version(f"{torch.__version__} ({build} build)", "torch", "2.11", "2.13")


def _check_triton() -> tuple[str, str]:
    import triton

    return _check_version(triton.__version__, "Triton", "3.6", "3.7")


def gpu_evidence() -> str | None:
    """Return a sentence that shows, without torch, that an NVIDIA GPU is here; None where nothing shows it."""
    try:
        for gpu in sorted(pathlib.Path("/proc/driver/nvidia/gpus").iterdir()):
            return f"/proc/driver/nvidia lists the GPU at {gpu.name}"
    except OSError:
        pass
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    listed = re.search(r"^GPU \d+: ([^(\n]+)", done.stdout, re.MULTILINE)
    return f"nvidia-smi lists {listed.group(1).strip()}" if done.returncode == 0 and listed else None


def _check_driver() -> tuple[str, str]:
    version = device.current().driver or device.driver_version()
    if version:
        if _major_minor(version)[0] < MIN_DRIVER:
            return "failed", f"{version}: CUDA 13 needs {MIN_DRIVER} or newer, so update the NVIDIA driver."
        return "ok", f"{version} (CUDA 13 needs {MIN_DRIVER} or newer)"
    if device.current().capability or gpu_evidence():
        return "warn", f"the driver's version cannot be read; CUDA 13 needs {MIN_DRIVER} or newer."
    if shutil.which("nvidia-smi"):  # nvidia-smi comes with the driver
        return "warn", "nvidia-smi is here but finds no driver that answers; compiling needs none."
    return "skipped", "no NVIDIA driver here; compiling needs none."


def _check_gpu() -> tuple[str, str]:
    here = device.current()
    if here.capability is not None:
        without = "" if here.has_tma else "; it has no TMA, so the copies are compiled, not run"
        return "ok", here.describe() + without
    if here.note.startswith("CUDA_VISIBLE_DEVICES"):
        return "skipped", f"{here.note}; kernels are compiled, not run."
    if evidence := gpu_evidence():
        fix = "check the driver and the container's GPU access"
        fix = "install the CUDA build of torch" if "build" in here.note else fix
        return "failed", f"{evidence}, but torch cannot use it ({here.note}): {fix}."
    return "skipped", f"no NVIDIA GPU ({here.note}); kernels are compiled, not run."


def _check_nvrtc(targets: tuple[str, ...]) -> tuple[str, str]:
    from cuda import pathfinder
    from cuda.bindings import nvrtc

    try:
        library = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError:  # its text is the long list of searched folders
        return "failed", f"libnvrtc is not found: install {NVRTC}."
    _, major, minor = nvrtc.nvrtcVersion()
    _, architectures = nvrtc.nvrtcGetSupportedArchs()
    if major != 13:
        return "failed", f"{major}.{minor} at {library.abs_path}: install NVRTC 13 with {NVRTC}."
    if missing := [target for target in targets if int(re.sub(r"\D", "", target)) not in architectures]:
        return "failed", f"{major}.{minor} cannot compile for {' or '.join(missing)}: install {NVRTC}."
    return "ok", f"{major}.{minor}"


def _check_folder(folder: pathlib.Path, variable: str) -> tuple[str, str]:
    """Check that compiled kernels can be kept in `folder`, the one that the environment variable `variable` names."""
    if reason := caches.why_not_writable(folder):
        instead = f"so the course keeps compiled kernels in a temporary folder: set {variable} to a folder that can."
        return "warn", f"{folder} cannot be written ({reason}), {instead}"
    return "ok", re.sub(rf"^{re.escape(os.path.expanduser('~'))}(?=/)", "~", str(folder))


def _row(name: str, check, *args) -> Row:
    """Run one check; an exception becomes a failed row."""
    try:
        return Row(name, *check(*args))
    except ImportError as error:
        return Row(name, "failed", f"{_one_line(error).rstrip('.')}: run pip install -r requirements.txt.")
    except Exception as error:
        return Row(name, "failed", _one_line(error))


# ---- the proof, in other processes: a compiler that aborts or a kernel that faults harms nothing else


def _make_job(kind: str, target: str) -> build.Job:
    """Return how one kind of copy is compiled."""
    if kind == "triton":
        tiles = dict.fromkeys(("source", "destination"), "tensordesc<bf16[64, 64]>")
        sizes = {"BLOCK_M": 64, "BLOCK_N": 64}
        return build.Job("tilelab.course.doctor_copy:copy_tma_kernel", tiles, sizes, target)
    return build.Job(f"{CUDA_COPY}:bulk_copy", {}, {"CHUNK_BYTES": CHUNK_BYTES}, target, num_warps=1)


def _run_copy(kind: str) -> tuple[str, str]:
    """Copy random bits on the GPU to a destination in which every bit is wrong before; ValueError for a wrong copy."""
    import ctypes

    import torch

    torch.seed()
    if kind == "triton":
        from tilelab.course.doctor_copy import copy_tma

        guard, what = 1, "200 x 136 bf16"  # not a multiple of the 64 x 64 tile
        source = torch.randint(-(2**15), 2**15, (200 + guard, 136), dtype=torch.int16, device="cuda")
        destination = ~source
        copy_tma(source[:-guard].view(torch.bfloat16), destination[:-guard].view(torch.bfloat16))
    else:
        size, guard = 5 * CHUNK_BYTES + 4080, 256  # the last chunk is short
        what = f"{size:,} bytes"
        source = torch.randint(0, 256, (size + guard,), dtype=torch.uint8, device="cuda")
        destination = ~source
        kernel = cuda.load_kernel(CUDA_COPY, "bulk_copy", [f"-DCHUNK_BYTES={CHUNK_BYTES}"])
        cuda.launch(kernel, -(-size // CHUNK_BYTES), 32, [source, destination, ctypes.c_uint64(size)])
    torch.cuda.synchronize()
    if wrong := int((source[:-guard] != destination[:-guard]).sum()):
        raise ValueError(f"{wrong:,} of {source[:-guard].numel():,} elements differ after the copy.")
    if not torch.equal(destination[-guard:], ~source[-guard:]):
        raise ValueError("the copy wrote past the end of its destination.")
    return "ok", f"{what} of random bits, equal bit for bit"


def tma_lines(kind: str, sass: str) -> list[str]:
    """Return the first SASS instruction that loads by TMA and the first that stores, without their encodings."""
    plain = [re.sub(r"/\*.*?\*/", "", line).strip() for line in sass.splitlines()]
    found = [next((line for line in plain if re.search(opcode, line)), "") for opcode in TMA_SASS[kind]]
    if not all(found):
        missing = [opcode.replace("\\", "") for opcode, line in zip(TMA_SASS[kind], found) if not line]
        raise ValueError(f"compiled, but no {' and no '.join(missing)} in its SASS.")
    return [" ".join(line.split(";")[0].split()) for line in found]


def _check_instructions(kind: str, target: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as cache:  # a cached kernel proves nothing
        report = build.build_one(_make_job(kind, target), PROOF_TIMEOUT_S, cache)
    if not report.cubin:
        return "failed", report.reason
    try:
        listing = report.sass
    except Exception as error:  # the cuobjdump in Triton 3.6 knows neither sm_103 nor sm_121
        return "warn", f"compiles, but this cuobjdump cannot show its SASS ({_one_line(error).rstrip('.')})."
    return "ok", " | ".join(tma_lines(kind, listing))


# (Pattern of an error of torch.compile, the sentence that helps.) The first match counts.
COMPILE_HELP = {
    r"C\+\+ compiler|CppCompileError": "Inductor finds no working C++ compiler: install g++, or set CXX to one.",
    r"C compiler|'(gcc|cc|clang)'": "Triton builds its launcher with a C compiler and finds none: install gcc, or set "
    "CC to one.",
    r"Python\.h": "Triton's launcher needs Python.h: install the headers of this Python (python3-dev).",
    r"working triton|No module named 'triton": "Inductor needs Triton on a GPU: run pip install -r requirements.txt.",
    r"GPUTooOld|too old": "Inductor's Triton kernels need compute capability 7.0 or newer, which this GPU lacks.",
    r"no kernel image|not compatible|Unsupported gpu|not defined for option 'gpu-name'": "this torch or its Triton "
    "does not support the GPU: install the torch of requirements.txt.",
}


def explain_compile_error(error: str) -> str:
    """Return the sentence that helps with an error of torch.compile, else the line that names the problem."""
    advice = (advice for pattern, advice in COMPILE_HELP.items() if re.search(pattern, error))
    return next(advice, None) or _one_line(error)


def _check_compiled() -> tuple[str, str]:
    """Compile a small function with torch.compile on the GPU, and compare its result with eager torch."""
    import torch

    def scaled_sum(x, y):
        return (x * 2 + y).relu()

    x, y = torch.randn(2, 1000, 33, device="cuda")
    try:
        error = float((torch.compile(scaled_sum)(x, y) - scaled_sum(x, y)).abs().max())
    except Exception as problem:
        return "failed", explain_compile_error(f"{type(problem).__name__}: {problem}")
    if error > 1e-5:
        raise ValueError(f"the compiled function errs by {error:.1e}.")
    return "ok", "a compiled function is right"


def _check_apart(name: str, check: str, *arguments: str) -> Row:
    """Return the row of a check, a function of this module, which runs in a process of its own."""
    run = f"doctor._row({name!r}, doctor.{check}, *{arguments!r})"
    code = f"import dataclasses, json\nfrom tilelab.course import doctor\nprint(json.dumps(dataclasses.asdict({run})))"
    env = notebook.child_env()
    env.pop("TRITON_INTERPRET", None)  # it prevents compiling
    try:
        with tempfile.TemporaryDirectory() as env["TRITON_CACHE_DIR"]:
            env |= {"TORCHINDUCTOR_CACHE_DIR": env["TRITON_CACHE_DIR"], "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            how = {"capture_output": True, "text": True, "check": False, "timeout": PROOF_TIMEOUT_S}
            done = subprocess.run([sys.executable, "-c", code], env=env, **how)
        if done.returncode == 0:
            return Row(**json.loads(done.stdout.splitlines()[-1]))
        why = f"the process ended with status {done.returncode}: {_one_line(done.stderr)}"
    except subprocess.TimeoutExpired:
        why = f"no answer within {PROOF_TIMEOUT_S} s"
    except OSError as error:  # no folder for temporary files, or no more processes
        why = f"it cannot be tried: {_one_line(error)}"
    return Row(name, "failed", why)


def _prove_compiled(skip: str) -> Row:
    """Return the row of torch.compile; `skip` says why nothing is compiled."""
    return Row("torch.compile", "skipped", skip) if skip else _check_apart("torch.compile", "_check_compiled")


def _proof(kind: str, targets: tuple[str, ...], skip_run: str) -> list[Row]:
    """Return a row for each target of a copy, and one of its run unless `skip_run` says why it does not run."""
    rows = [_row(f"{LABEL[kind]} copy, {target}", _check_instructions, kind, target) for target in targets]
    name = f"{LABEL[kind]} copy runs"
    return [*rows, Row(name, "skipped", skip_run) if skip_run else _check_apart(name, "_run_copy", kind)]


def _reason_not_to_run(gpu: Row, targets: tuple[str, ...]) -> str:
    """Return why the copies are only compiled; "" when this GPU runs them."""
    here = device.current()
    if gpu.status == "failed":
        return "torch cannot use the GPU (see GPU above)."
    if here.capability is None:
        return f"{here.describe()}."
    if not here.has_tma:
        major, minor = here.capability
        return f"TMA needs compute capability 9.0 or newer and {here.name} has {major}.{minor}."
    return "" if here.target in targets else f"compiled for {targets[0]}, and this GPU is {here.target}."


# ---- the command line


def check_environment(targets: tuple[str, ...]) -> list[Row]:
    """Return the rows of the versions and of the GPU; `targets` are those that NVRTC must compile for."""
    checks = {"Python": _check_python, "torch": _check_torch, "driver": _check_driver, "GPU": _check_gpu}
    rows = [_row(name, check) for name, check in (checks | {"Triton": _check_triton}).items()]
    return [*rows, _row("NVRTC", _check_nvrtc, targets)]


def run_checks(target: str | None = None) -> list[Row]:
    """Run all checks and return their rows in order.

    `target`, one of device.TARGETS with TMA, replaces the targets of `proof_targets`; ValueError for any other.
    """
    targets = proof_targets(target)
    rows = {row.name: row for row in check_environment(targets)}
    for name, find, variable in CACHES:
        rows[name] = _row(name, lambda find=find, variable=variable: _check_folder(find(), variable))
    if not emulator.is_available():
        rows["emulator"] = Row("emulator", "warn", "CUDA kernels cannot be emulated without g++: install it.")
    skip_run = _reason_not_to_run(rows["GPU"], targets)
    here = device.current()
    skip_compile = skip_run if rows["GPU"].status == "failed" else ""
    if not skip_compile and not here.capability:
        skip_compile = f"{here.describe()}; 11_ch14_compiled then shows what an H200 recorded."

    def prove(kind: str, needs: str) -> list[Row]:
        if rows[needs].status == "failed":
            return [Row(f"{LABEL[kind]} copy", "skipped", f"needs {needs} (see {needs} above).")]
        return _proof(kind, targets, skip_run)

    with ThreadPoolExecutor() as pool:
        compiled = pool.submit(_prove_compiled, skip_compile)
        proofs = list(pool.map(prove, ("triton", "cuda"), ("Triton", "NVRTC")))
    return [*rows.values(), *proofs[0], *proofs[1], compiled.result()]


def verdict(rows: list[Row]) -> str:
    """Return one sentence that sums up all rows."""
    failed = [row.name for row in rows if row.status == "failed"]
    if failed:
        return f"Not ready: {len(failed)} of {len(rows)} checks failed ({'; '.join(failed)})."
    if sum(row.status == "ok" for row in rows if row.name.endswith("copy runs")) == 2:
        return f"Ready: {device.current().name} runs the course live."
    if device.current().capability is None:
        how = "run in emulators" if emulator.is_available() else "those in Triton run in its interpreter"
        return f"Ready without a GPU: kernels compile, and {how}; figures come from results/."
    return f"Ready: {device.current().name} runs what it can; the TMA copies were compiled, not run."


def main(argv: list[str] | None = None) -> int:
    """Print the table (or one JSON object) and return the exit status; bad usage raises SystemExit with status 2."""
    parser = cli.make_plain_parser("tilelab.course.doctor", "Can this machine run the course?")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--target", help="compile the proof for this target, such as sm_90a")
    options = parser.parse_args(argv)
    try:
        rows = run_checks(options.target)
    except ValueError as error:
        parser.error(str(error))
    failed = any(row.status == "failed" for row in rows)
    if options.json:
        report = {"status": "failed" if failed else "ok", "verdict": verdict(rows)}
        report |= {"device": asdict(device.current()), "rows": [asdict(row) for row in rows]}
        print(json.dumps(report, indent=1))
    else:
        width = max(len(row.name) for row in rows)
        print(*(f"{row.name:{width}}  {row.status:7}  {row.detail}" for row in rows), verdict(rows), sep="\n")
    return int(failed)


if __name__ == "__main__":
    cli.run_main(main)
