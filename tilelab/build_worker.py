"""The process that compiles: `python -m tilelab.build_worker`, asked by tilelab.build."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import os
import pathlib
import re
import struct
import sys
import tempfile
import time

from tilelab import worker_pool, cuda
from tilelab.cubin import OPCODES, entries, resources, sass_counts


def _kernel(name: str):
    module, _, attribute = name.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"file_{pathlib.Path(module).stem}", module)
            loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up
            # Compiled here: a bytecode cache cannot tell apart two edits within one second.
            exec(compile(pathlib.Path(module).read_text(), module, "exec"), loaded.__dict__)
        else:
            loaded = importlib.import_module(module)
        kernel = getattr(loaded, attribute)
    except Exception as error:
        raise ImportError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    while not hasattr(kernel, "arg_names") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    if not hasattr(kernel, "arg_names"):
        raise TypeError(f"{name} is no @triton.jit function")
    return kernel


def _compile(job: dict) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = _kernel(job["kernel"])
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    names = kernel.arg_names
    unknown = ((set(job["signature"]) | set(job["constants"])) ^ set(names)) | (set(job["aligned"]) - set(names))
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: given but not taken by the kernel, or the reverse")
    signature = {name: job["signature"].get(name, "constexpr") for name in names}
    # As a launch gives them, so that it finds this build in the cache: in order, and empty for what is not aligned.
    of_text = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)  # 3.6 takes a constant's text for a type
    named = {name for name in names if signature[name].startswith(("*", "i", "u"))
             or signature[name] == "constexpr" and (not of_text or isinstance(job["constants"][name], str))}
    attributes = {(index,): [["tt.divisibility", 16]] if name in job["aligned"] else []
                  for index, name in enumerate(names)
                  if name in named and not kernel.params[index].do_not_specialize}
    capability = int(re.sub(r"\D", "", job["target"]))
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"], **job["options"]}

    def built() -> dict:
        source = source_type(kernel, signature, job["constants"], attributes)
        begun = time.perf_counter()
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        seconds = time.perf_counter() - begun
        ptx, cubin = binary.asm["ptx"], binary.asm["cubin"]
        if not ptx.rstrip().endswith("}"):
            raise ValueError("the PTX is not complete")
        warps = getattr(binary.metadata, "total_num_warps", None) or binary.metadata.num_warps
        return {"smem": binary.metadata.shared, "tmem": getattr(binary.metadata, "tmem_size", None),
                "threads": 32 * warps, "seconds": seconds, "ptx": ptx,
                "cubin": base64.b64encode(cubin).decode(), **resources(cubin)}

    try:
        return built()
    except (KeyError, OSError, ValueError, struct.error):  # what a damaged or unwritable cache raises
        with tempfile.TemporaryDirectory() as os.environ["TRITON_CACHE_DIR"]:
            return built()


def _compile_cu(job: dict) -> dict:
    path, _, name = job["kernel"].rpartition(":")
    file = os.path.basename(path)
    if job["signature"] or job["aligned"]:
        raise ValueError(f"{file} is CUDA C++: its job takes no signature and no aligned")
    options = [f"-D{key}={int(value) if isinstance(value, bool) else value}" for key, value in job["constants"].items()]
    options += [f"--{key}" if value is True else f"--{key}={value}" for key, value in job["options"].items()]
    begun = time.perf_counter()
    try:
        cubin = cuda.compile_file(path, job["target"], options)
    except cuda.CompileError as error:
        return {"reason": _first_error(str(error))}
    seconds = time.perf_counter() - begun
    kernels = entries(cubin).values()
    if name not in kernels:
        hint = ' (extern "C" leaves a name as it is written)' if any(each.startswith("_Z") for each in kernels) else ""
        return {"reason": f"{file} defines no kernel {name}; it defines {', '.join(kernels) or 'none'}{hint}"}
    try:
        counts = dict.fromkeys(OPCODES, 0) | sass_counts(cubin, name)
    except (RuntimeError, OSError):  # a cuobjdump may be older than the target
        counts = {}
    return {"smem": job["smem_bytes"], "threads": 32 * job["num_warps"], "seconds": seconds, "ptx": "",
            "counts": counts, "cubin": base64.b64encode(cubin).decode(), **resources(cubin, name)}


def _first_error(said: str) -> str:
    """The first error in what `tilelab.cuda` says, in one line: with file and line where it is NVRTC's, while ptxas
    knows only lines of the PTX."""
    if found := re.search(r"^.+\(\d+\): (?:catastrophic )?error.*", said, re.MULTILINE):
        return found[0].strip()
    first, *rest = said.splitlines()
    if found := re.search(r"^ptxas.*?\b(?:error|fatal)\s*: (.+)", "\n".join(rest), re.MULTILINE):
        return f"{first} ptxas: {found[1].strip()}"
    return " ".join([first, *rest[:1]])


def _why(error: BaseException, said: str) -> str:
    """One sentence from an exception and what the compiler wrote to stderr while it was raised."""
    text = f"{error}\n{said}"
    if found := re.search(r"ptxas (?:\S+, line \d+; )?(?:fatal|error)\s*:\s*(?:\(C\d+\) )?(.+)", text):
        return f"ptxas: {found[1].strip()}"
    if found := re.search(r"executing \[?`(\w+)`", text):
        detail = re.search(r"error: (?!Failures have been detected)(.+)|(Assertion `.+?') failed", said)
        return f"the compiler pass {found[1]} failed" + (f": {(detail[1] or detail[2]).strip()}" if detail else "")
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:300]


def _answer(request: dict) -> dict:
    os.lseek(2, 0, os.SEEK_SET)  # or what the compiler says would lie behind a hole as long as the last job's
    os.environ.pop("TRITON_CACHE_DIR", None)  # the last job's
    if request["cache"]:
        os.environ["TRITON_CACHE_DIR"] = request["cache"]
    os.environ["TILES_CUBINS"] = request["cubins"]
    try:
        return _compile_cu(request) if ".cu:" in request["kernel"] else _compile(request)
    except Exception as error:
        sys.stderr.flush()
        said = os.pread(2, 1 << 20, 0).decode(errors="replace")  # what the compiler wrote, whole kernels too
        # What LLVM calls fatal leaves a process behind in which later builds were seen to hang and to abort.
        return {"reason": _why(error, said), "said": f"{type(error).__name__}: {error}\n{said}",
                "leaving": bool(re.search("LLVM ERROR|Assertion `", said))}


if __name__ == "__main__":
    if another := os.environ.get("TILES_TRITON"):
        sys.path.insert(0, another)
        importlib.import_module("triton")  # now, for each request brings the path of its caller
    worker_pool.serve(_answer)
