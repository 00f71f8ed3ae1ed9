"""Says whether this machine can run the course, and proves it: `python -m tilelab.doctor [--json] [--target sm_90a]`.

The proof is a TMA copy in Triton and one in CUDA C++, compiled for the GPU's own target (sm_90a and sm_100a without
such a GPU), their TMA instructions found in SASS and, on a GPU with TMA, run on random bits and compared bit for bit.
Exit status: 0 nothing that should work fails, 1 a check failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
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

from tilelab import device
from tilelab.cuda import cubin_folder

MIN_DRIVER = 580  # CUDA 13 Toolkit Release Notes, minimum driver; NVRTC 13 builds what the course loads
NVRTC = "cuda-toolkit[nvrtc]==13.0.3"
CHUNK_BYTES = 16384
PROOF_TIMEOUT_S = 300
# What a copy must hold: an instruction that loads a tile and one that stores it.
TMA_SASS = {"triton": (r"UTMALDG", r"UTMASTG"), "cuda": (r"UBLKCP\.S\.G", r"UBLKCP\.G\.S")}
LABEL = {"triton": "Triton", "cuda": "CUDA"}


def proof_targets(asked: str | None = None) -> tuple[str, ...]:
    """What the proof compiles for: the target asked for, else the GPU's own, else one Hopper and one Blackwell."""
    if asked:
        if not device.target_limits(asked).has_tma:
            raise ValueError(f"{asked} has no TMA to prove: choose sm_90a or newer.")
        return (asked,)
    here = device.current()
    return (here.target,) if here.has_tma else ("sm_90a", "sm_100a")


@dataclass(frozen=True)
class Row:
    """One check: `status` is ok, failed, skipped or warn; `detail` is one sentence or the evidence."""

    name: str
    status: str
    detail: str


def _one_line(error: object) -> str:
    """The line that says what went wrong: a traceback's last, else the first with the word error, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("Traceback"):
        lines = lines[-1:]
    wanted = next((line for line in lines if re.search(r"(?i)\berror\b", line)), lines[0])
    return wanted if len(wanted) <= 300 else wanted[:297] + "..."


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:2])


def gpu_evidence() -> str | None:
    """What says, without torch, that an NVIDIA GPU is here: a name or PCI address, or None."""
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


def _check_python() -> tuple[str, str]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):
        return "failed", f"{version}: the course needs Python 3.11 or 3.12."
    if sys.version_info >= (3, 13):
        return "warn", f"{version}; the course is tested with 3.11 and 3.12."
    return "ok", version


def _check_torch() -> tuple[str, str]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    found = f"{torch.__version__} ({build} build)"
    if not (2, 11) <= _release(torch.__version__) <= (2, 13):
        return "warn", f"{found}; the course is tested with 2.11 to 2.13."
    return "ok", found


def _check_driver() -> tuple[str, str]:
    version = device.current().driver or device.driver_version()
    if version is None:
        if device.current().capability is None and gpu_evidence() is None:
            if shutil.which("nvidia-smi"):  # it is of the driver's package
                return "warn", "nvidia-smi is here but finds no driver that answers; compiling needs none."
            return "skipped", "no NVIDIA driver here; compiling needs none."
        return "warn", f"the driver's version cannot be read; CUDA 13 needs {MIN_DRIVER} or newer."
    if _release(version)[0] < MIN_DRIVER:
        return "failed", f"{version}: CUDA 13 needs {MIN_DRIVER} or newer, so update the NVIDIA driver."
    return "ok", f"{version} (CUDA 13 needs {MIN_DRIVER} or newer)"


def _check_gpu() -> tuple[str, str]:
    here = device.current()
    if here.capability is not None:
        lacks = "" if here.has_tma else "; it has no TMA, so the copies are compiled, not run"
        return "ok", here.describe() + lacks
    if here.note.startswith("CUDA_VISIBLE_DEVICES"):
        return "skipped", f"{here.note}; kernels are compiled, not run."
    if evidence := gpu_evidence():
        wrong_build = "build" in here.note
        fix = "install the CUDA build of torch" if wrong_build else "check the driver and the container's GPU access"
        return "failed", f"{evidence}, but torch cannot use it ({here.note}): {fix}."
    return "skipped", f"no NVIDIA GPU ({here.note}); kernels are compiled, not run."


def _check_triton() -> tuple[str, str]:
    import triton

    if not (3, 6) <= _release(triton.__version__) <= (3, 7):
        return "warn", f"{triton.__version__}; the course is tested with 3.6 and 3.7."
    return "ok", triton.__version__


def _check_nvrtc(targets: tuple[str, ...]) -> tuple[str, str]:
    from cuda import pathfinder
    from cuda.bindings import nvrtc

    try:
        library = pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError:  # its text is a list of where it looked
        return "failed", f"libnvrtc is not found: install {NVRTC}."
    _, major, minor = nvrtc.nvrtcVersion()
    _, architectures = nvrtc.nvrtcGetSupportedArchs()
    found = f"{major}.{minor}"
    if major != 13:
        return "failed", f"{found} at {library.abs_path}: install NVRTC 13 with {NVRTC}."
    if missing := [target for target in targets if int(re.sub(r"\D", "", target)) not in architectures]:
        return "failed", f"{found} cannot compile for {' or '.join(missing)}: install {NVRTC}."
    return "ok", found


def _check_cuobjdump() -> tuple[str, str]:
    import triton

    path = triton.knobs.nvidia.cuobjdump.path
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        return "failed", f"{path} ends with status {done.returncode}: reinstall Triton."
    release = re.search(r"release ([\d.]+)", done.stdout)
    return "ok", f"{release.group(1) if release else 'version unknown'} (in Triton's wheel)"


def triton_cache() -> pathlib.Path:
    """Where Triton keeps compiled kernels: TRITON_CACHE_DIR, else .triton/cache under TRITON_HOME or home."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"


def _check_cache(folder: pathlib.Path, variable: str, otherwise: tuple[str, str]) -> tuple[str, str]:
    """Whether kernels can be kept in `folder`, which `variable` replaces; `otherwise` is the status and what it means
    when they cannot."""
    try:  # a file really written: permission bits say nothing to root or on a read-only mount
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(4096))
            file.flush()  # a full disk still lets a file be made
            return "ok", re.sub(rf"^{re.escape(os.path.expanduser('~'))}(?=/)", "~", str(folder))
    except OSError as error:
        status, meaning = otherwise
        reason = error.strerror or type(error).__name__
        return status, f"{folder} cannot be written ({reason}){meaning}: set {variable} to a folder that can."


def _row(name: str, check, *args) -> Row:
    """Run one check; whatever it raises becomes a failed row."""
    try:
        return Row(name, *check(*args))
    except ImportError as error:
        return Row(name, "failed", f"{_one_line(error).rstrip('.')}: run pip install -r requirements.txt.")
    except Exception as error:
        return Row(name, "failed", _one_line(error))


def _cuda_cubin(target: str) -> bytes:
    from tilelab.cuda import compile_file

    source = pathlib.Path(__file__).with_name("doctor_copy.cu")
    return compile_file(source, target, [f"-DCHUNK_BYTES={CHUNK_BYTES}"], cache=False)  # compiled now, not remembered


def _run_copy(kind: str, target: str) -> tuple[str, str]:
    """Copy random bits on the GPU into a destination where every bit is wrong; say what was compared, or raise."""
    import ctypes

    import torch

    torch.seed()
    if kind == "triton":
        from tilelab.doctor_copy import copy_tma

        shape, guard = (200, 136), 1  # ragged against 64 x 64 tiles
        source = torch.randint(-(2**15), 2**15, (shape[0] + guard, shape[1]), dtype=torch.int16, device="cuda")
        destination = ~source
        copy_tma(source[:-guard].view(torch.bfloat16), destination[:-guard].view(torch.bfloat16))
        what = f"{shape[0]} x {shape[1]} bf16"
    else:
        from tilelab.cuda import launch, load_cubin

        size, guard = 5 * CHUNK_BYTES + 4080, 256  # the last chunk is short
        source = torch.randint(0, 256, (size + guard,), dtype=torch.uint8, device="cuda")
        destination = ~source
        grid = -(-size // CHUNK_BYTES)
        launch(load_cubin(_cuda_cubin(target), "bulk_copy"), grid, 32, [source, destination, ctypes.c_uint64(size)])
        what = f"{size:,} bytes"
    torch.cuda.synchronize()
    wrong = int((source[:-guard] != destination[:-guard]).sum())
    if wrong:
        raise ValueError(f"{wrong:,} of {source[:-guard].numel():,} elements differ after the copy.")
    if not torch.equal(destination[-guard:], ~source[-guard:]):
        raise ValueError("the copy wrote past the end of its destination.")
    return "ok", f"{what} of random bits, equal bit for bit"


def tma_lines(kind: str, sass: str) -> list[str]:
    """The SASS instructions that prove a TMA copy, one a direction, without addresses and encodings."""
    plain = [re.sub(r"/\*.*?\*/", "", line).strip() for line in sass.splitlines()]
    found = [next((line for line in plain if re.search(opcode, line)), "") for opcode in TMA_SASS[kind]]
    if not all(found):
        missing = [opcode.replace("\\", "") for opcode, line in zip(TMA_SASS[kind], found) if not line]
        raise ValueError(f"compiled, but no {' and no '.join(missing)} in its SASS.")
    return [" ".join(line.split(";")[0].split()) for line in found]


def _prove(kind: str, targets: list[str], run: bool) -> None:
    """In a child process: compile and run one kind of copy, a JSON object a line for each step."""

    def step(name: str, check, *args) -> None:
        row = _row(name, check, *args)
        print(json.dumps({"step": name, "status": row.status, "detail": row.detail}), flush=True)

    def instructions(target: str) -> tuple[str, str]:
        from tilelab.cubin import sass

        if kind == "triton":
            from tilelab.doctor_copy import compile_copy as compiler
        else:
            compiler = _cuda_cubin
        cubin = compiler(target)
        try:
            listing = sass(cubin)
        except Exception as error:  # the cuobjdump in Triton 3.6 knows neither sm_103 nor sm_121
            return "warn", f"compiles, but this cuobjdump cannot show its SASS ({_one_line(error).rstrip('.')})."
        return "ok", " | ".join(tma_lines(kind, listing))

    for target in targets:
        step(target, instructions, target)
    if run:
        step("runs", _run_copy, kind, targets[0])


def _proof(kind: str, targets: tuple[str, ...], skip_run: str) -> list[Row]:
    """Rows for one kind of copy, compiled and (unless `skip_run` says why not) run in a child process.

    A compiler that aborts or a kernel that faults then harms no notebook, and TRITON_INTERPRET=1, under which Triton
    cannot compile, is left behind.
    """
    code = f"from tilelab.doctor import _prove; _prove({kind!r}, {list(targets)!r}, {not skip_run})"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(pathlib.Path(__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    try:
        with tempfile.TemporaryDirectory() as cache:
            env["TRITON_CACHE_DIR"] = cache  # compiled now, not remembered
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False,
                                  timeout=PROOF_TIMEOUT_S)
            out, why = done.stdout, f"the process ended with status {done.returncode}: {_one_line(done.stderr)}"
    except subprocess.TimeoutExpired as error:
        out, why = (error.stdout or b"").decode(), f"no answer within {PROOF_TIMEOUT_S} s"
    except OSError as error:  # no folder for temporary files, or no process to be had
        out, why = "", f"the copy cannot be tried: {_one_line(error)}"
    steps = {}
    for line in out.splitlines():
        if line.startswith('{"step"') and line.endswith("}"):
            record = json.loads(line)
            steps[record["step"]] = (record["status"], record["detail"])
    rows = [Row(f"{LABEL[kind]} copy, {target}", *steps.get(target, ("failed", why))) for target in targets]
    run = ("skipped", skip_run) if skip_run else steps.get("runs", ("failed", why))
    return [*rows, Row(f"{LABEL[kind]} copy runs", *run)]


def _why_not_run(gpu: Row, targets: tuple[str, ...]) -> str:
    """Why the copies are compiled only; empty when this GPU runs them."""
    here = device.current()
    if gpu.status == "failed":
        return "torch cannot use the GPU (see GPU above)."
    if here.capability is None:
        return f"{here.describe()}."
    if not here.has_tma:
        major, minor = here.capability
        return f"TMA needs compute capability 9.0 or newer and {here.name} has {major}.{minor}."
    return "" if here.target in targets else f"compiled for {targets[0]}, and this GPU is {here.target}."


def run_checks(target: str | None = None) -> list[Row]:
    """All checks as rows, in order. `target`, one of device.TARGETS with TMA, replaces the targets compiled for.

    Raises nothing but ValueError for a target that is unknown or has no TMA.
    """
    targets = proof_targets(target)
    rows = [
        _row("Python", _check_python),
        _row("torch", _check_torch),
        _row("driver", _check_driver),
        _row("GPU", _check_gpu),
        _row("Triton", _check_triton),
        _row("NVRTC", _check_nvrtc, targets),
        _row("cuobjdump", _check_cuobjdump),
        _row("Triton cache", _check_cache, triton_cache(), "TRITON_CACHE_DIR", ("failed", "")),
        _row("CUDA cache", _check_cache, cubin_folder(), "TILES_CUBINS",
             ("warn", ", so that every process compiles anew")),
    ]
    by_name = {row.name: row for row in rows}
    skip_run = _why_not_run(by_name["GPU"], targets)
    needs = {"triton": "Triton", "cuda": "NVRTC"}
    kinds = [kind for kind, need in needs.items() if by_name[need].status != "failed"]
    with ThreadPoolExecutor() as pool:
        proofs = dict(zip(kinds, pool.map(lambda kind: _proof(kind, targets, skip_run), kinds)))
    for kind, need in needs.items():
        rows += proofs.get(kind) or [Row(f"{LABEL[kind]} copy", "skipped", f"needs {need} (see {need} above).")]
    return rows


def verdict(rows: list[Row]) -> str:
    """One sentence over all rows."""
    failed = [row.name for row in rows if row.status == "failed"]
    if failed:
        return f"Not ready: {len(failed)} of {len(rows)} checks failed ({'; '.join(failed)})."
    if sum(row.status == "ok" for row in rows if row.name.endswith("copy runs")) == 2:
        return f"Ready: {device.current().name} runs the course live."
    if device.current().capability is None:
        return "Ready without a GPU: kernels compile, and run in Triton's interpreter; figures come from results/."
    return f"Ready: {device.current().name} runs what it can; the TMA copies were compiled, not run."


def main(argv: list[str] | None = None) -> int:
    """The command line; prints the table (or one JSON object) and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tilelab.doctor", description="Can this machine run the course?")
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--target", help="compile the proof for this target, such as sm_90a")
    try:
        options = parser.parse_args(argv)
        proof_targets(options.target)
    except SystemExit as stop:
        return int(stop.code or 0)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    rows = run_checks(options.target)
    failed = any(row.status == "failed" for row in rows)
    if options.json:
        record = {"status": "failed" if failed else "ok", "verdict": verdict(rows), "device": asdict(device.current())}
        print(json.dumps({**record, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        width = max(len(row.name) for row in rows)
        for row in rows:
            print(f"{row.name:{width}}  {row.status:7}  {row.detail}")
        print(verdict(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
