"""The process that compiles: `python -m tilelab.runtime.build_worker`, asked by tilelab.runtime.build."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import struct
import sys
import tempfile
import time

from tilelab import ROOT
from tilelab.runtime import cuda, worker_pool
from tilelab.runtime.cubin import kernel_names, read_resources


def _postpone_packages(module: str) -> None:
    """Run the course's packages that hold the module only when their names are asked for: they import torch."""
    for dot in re.finditer(r"\.", module):
        name = module[: dot.start()]
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if not spec or not spec.origin or not pathlib.Path(spec.origin).is_relative_to(ROOT):
            continue
        package = sys.modules[name] = importlib.util.module_from_spec(spec)

        def run(attribute, package=package):
            del package.__getattr__
            package.__loader__.exec_module(package)
            return getattr(package, attribute)

        package.__getattr__ = run


def _load_kernel(name: str, first_lines: dict[str, int]):
    """Return the Triton kernel "module:name" or "file.py:name"; `first_lines` are those of build.Job."""
    module, _, attribute = name.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"file_{pathlib.Path(module).stem}", module)
            loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
            # Compiled here, because a bytecode cache cannot tell apart two edits within one second.
            exec(compile(pathlib.Path(module).read_text(), module, "exec"), loaded.__dict__)
            for function, line in first_lines.items():
                if hasattr(loaded.__dict__.get(function), "starting_line_number"):
                    loaded.__dict__[function].starting_line_number = line
        else:
            _postpone_packages(module)
            loaded = importlib.import_module(module)
        kernel = getattr(loaded, attribute)
    except Exception as error:
        raise ImportError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    while not hasattr(kernel, "is_gluon") and hasattr(kernel, "fn"):  # autotuned, or with heuristics
        kernel = kernel.fn
    if not hasattr(kernel, "arg_names"):
        raise TypeError(f"{name} is no @triton.jit function")
    return kernel


def _compile_triton(job: dict) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = _load_kernel(job["kernel"], job["first_lines"])
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    names = kernel.arg_names
    unknown = ((set(job["signature"]) | set(job["constants"])) ^ set(names)) | (
        set(job["aligned"]) - set(names)
    )
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: given but not taken by the kernel, or the reverse")
    signature = {name: job["signature"].get(name, "constexpr") for name in names}
    # A launch finds this build in the cache only if the attributes are the same: in order, with an empty entry for what
    # is not aligned. Triton 3.6 also makes an entry for a constant whose value is a string.
    is_old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    specialized = {
        name
        for name in names
        if signature[name].startswith(("*", "i", "u"))
        or signature[name] == "constexpr"
        and (not is_old or isinstance(job["constants"][name], str))
    }
    attributes = {
        (index,): [["tt.divisibility", 16]] if name in job["aligned"] else []
        for index, name in enumerate(names)
        if name in specialized and not kernel.params[index].do_not_specialize
    }
    source = source_type(kernel, signature, job["constants"], attributes)
    target = GPUTarget("cuda", int(re.sub(r"\D", "", job["target"])), 32)
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"], **job["options"]}
    try:
        return _read_binary(triton, source, target, options)
    except (
        KeyError,
        OSError,
        ValueError,
        struct.error,
    ):  # the cache is damaged or cannot be written: use another
        with tempfile.TemporaryDirectory() as os.environ["TRITON_CACHE_DIR"]:
            return _read_binary(
                triton, source_type(kernel, signature, job["constants"], attributes), target, options
            )


def _read_binary(triton, source, target, options: dict) -> dict:
    begin = time.perf_counter()
    binary = triton.compile(source, target=target, options=options)
    seconds = time.perf_counter() - begin
    ptx, cubin = binary.asm["ptx"], binary.asm["cubin"]
    if not ptx.rstrip().endswith("}"):
        raise ValueError("the PTX is not complete")
    warps = getattr(binary.metadata, "total_num_warps", None) or binary.metadata.num_warps
    return {
        "smem": binary.metadata.shared,
        "tmem": getattr(binary.metadata, "tmem_size", None),
        "threads": 32 * warps,
        "seconds": seconds,
        "ptx": ptx,
        "cubin": cubin,
        **read_resources(cubin),
    }


def _compile_cu(job: dict) -> dict:
    path, _, name = job["kernel"].rpartition(":")
    file = os.path.basename(path)
    options = [
        f"-D{key}={int(value) if isinstance(value, bool) else value}"
        for key, value in job["constants"].items()
    ]
    begin = time.perf_counter()
    try:
        cubin = cuda.compile_file(path, job["target"], options)
    except cuda.CompileError as error:
        return {"reason": _find_first_error(str(error))}
    seconds = time.perf_counter() - begin
    kernels = kernel_names(cubin).values()
    if name not in kernels:
        hint = (
            ' (extern "C" leaves a name as it is written)'
            if any(each.startswith("_Z") for each in kernels)
            else ""
        )
        return {"reason": f"{file} defines no kernel {name}; it defines {', '.join(kernels) or 'none'}{hint}"}
    ptx = cuda.compile_file_to_ptx(path, job["target"], options) if job.get("keep_ptx") else ""
    return {
        "smem": job["smem_bytes"],
        "threads": 32 * job["num_warps"],
        "seconds": seconds,
        "ptx": ptx,
        "cubin": cubin,
        **read_resources(cubin, name),
    }


def _find_first_error(text: str) -> str:
    """Return the first error of NVRTC with its file and line, or the first error of ptxas."""
    if found := re.search(r"^.+\(\d+\): (?:catastrophic )?error.*", text, re.MULTILINE):
        return found[0].strip()
    first, *others = text.splitlines()
    found = re.search(r"^ptxas.*?\b(?:error|fatal)\s*: (.+)", text, re.MULTILINE)
    return f"{first} ptxas: {found[1].strip()}" if found else " ".join([first, *others[:1]])


def _describe_error(error: BaseException, log: str) -> str:
    """Return one sentence from an exception and from what the compiler wrote to stderr before it was raised."""
    if found := re.search(
        r"ptxas (?:\S+, line \d+; )?(?:fatal|error)\s*:\s*(?:\(C\d+\) )?(.+)", f"{error}\n{log}"
    ):
        return f"ptxas: {found[1].strip()}"
    if found := re.search(r"executing \[?`(\w+)`", f"{error}\n{log}"):
        detail = re.search(r"error: (?!Failures have been detected)(.+)|(Assertion `.+?') failed", log)
        return f"the compiler pass {found[1]} failed" + (
            f": {(detail[1] or detail[2]).strip()}" if detail else ""
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:300]


def _answer(request: dict) -> dict:
    if request.get("warm_up"):
        if ".cu:" not in request["kernel"]:
            with contextlib.suppress(Exception):  # the job's answer will say why
                importlib.import_module("triton.compiler")
        return {}
    os.environ.pop("TRITON_CACHE_DIR", None)  # the folder of the previous job
    if request["cache"]:
        os.environ["TRITON_CACHE_DIR"] = request["cache"]
    os.environ["TILES_CUBINS"] = request["cubins"]
    try:
        return _compile_cu(request) if ".cu:" in request["kernel"] else _compile_triton(request)
    except Exception as error:
        sys.stderr.flush()
        log = os.pread(2, 1 << 20, 0).decode(errors="replace")
        # After what LLVM calls a fatal error, later builds in the same process were seen to hang and to abort.
        return {
            "reason": _describe_error(error, log),
            "compiler_output": f"{type(error).__name__}: {error}\n{log}",
            "retire": bool(re.search("LLVM ERROR|Assertion `", log)),
        }


def _import_other_triton(version: str, folder: str) -> str:
    """Import the Triton in `folder`; return "", or a sentence if that is not the `version` that was asked for."""
    sys.path.insert(0, folder)
    try:
        found = importlib.import_module("triton").__version__
    except Exception as error:
        found = f"one that cannot be imported ({type(error).__name__}: {error})"
    return "" if found == version else f"{folder} must hold Triton {version}, but Python imports {found}."


if __name__ == "__main__":
    problem = ""
    # Insert it now, because each request brings its caller's import path.
    if other_triton := os.environ.get("TILES_TRITON"):
        problem = _import_other_triton(os.environ["TILES_TRITON_VERSION"], other_triton)
    worker_pool.serve((lambda request: {"unsupported": problem}) if problem else _answer)
