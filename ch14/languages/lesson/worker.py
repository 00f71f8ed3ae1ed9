"""Hold one language in a process of its own: compile, check, tune and time the kernel of a file.

    python -m ch14.languages.lesson.worker NAME [FILE]

It reads one JSON request per line from its input, {"do": FUNCTION, ...arguments}, and writes one JSON answer per line.
TILES_LANGUAGES and TILES_PEERS may name folders of unpacked wheels, where its packages are looked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import pathlib
import re
import site
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

PACKAGES = {
    "cuda": ("cuda-core",),
    "triton": ("triton",),
    "gluon": ("triton",),
    "cute": ("nvidia-cutlass-dsl",),
    "cutile": ("cuda-tile", "nvidia-cuda-tileiras"),
    "tilelang": ("tilelang",),
    "helion": ("helion", "triton"),
    "deep_gemm": ("sgl-deep-gemm",),
    "quack": ("quack-kernels", "nvidia-cutlass-dsl"),
}
MODULES = {
    "cuda": "cuda.core",
    "cute": "cutlass",
    "cutile": "cuda.tile",
    "tilelang": "tilelang",
    "helion": "helion",
    "quack": "quack",
}
OWN_FOLDER = ("cutile", "tilelang", "helion")
LIBRARIES = ("deep_gemm", "quack")  # kernels that the languages' users would take from a library
FOLDER = pathlib.Path(__file__).parent.parent / "kernels"
RAGGED = ((1000, 1000, 1000), (333, 520, 136), (4097, 4104, 4112))
# A listing of SASS shows these: loads, stores, barriers, products and registers that change hands.
INSTRUCTIONS = re.compile(r"\b(UTMA[A-Z]+|LDGSTS|HGMMA|WARPGROUP|SYNCS|USETMAXREG|STG|STSM|BAR\.SYNC)\b")
DUMP = tempfile.mkdtemp(prefix="tiles-language-")


def find_source(name: str) -> pathlib.Path:
    """Return the file of the kernel in a language."""
    return FOLDER / f"{name}_gemm.{'cu' if name == 'cuda' else 'py'}"


def find_folder(name: str) -> str | None:
    """Return the folder of a language's packages; None where they are in the environment itself."""
    own = f"{sys.prefix}/languages" if name in OWN_FOLDER else None  # where `make languages` puts them
    return os.environ.get("TILES_PEERS" if name in ("cute", *LIBRARIES) else "TILES_LANGUAGES") or own


def is_installed(name: str) -> bool:
    """Return whether a language's first package can be found, without importing it."""
    places = [*sys.path, *([find_folder(name)] if find_folder(name) else [])]
    return any(importlib.metadata.distributions(name=PACKAGES[name][0], path=places))


def set_up(name: str) -> None:
    """Prepare the environment before the language is imported."""
    folder = find_folder(name)
    if folder and name not in ("cuda", "triton", "gluon"):
        site.addsitedir(os.path.abspath(folder))
        if name in OWN_FOLDER:  # TileLang's apache-tvm-ffi goes before the newer one of CuTe DSL
            sys.path.insert(0, os.path.abspath(folder))
    if name == "cutile":  # its own ptxas must be found before the machine's, which may be older
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            os.environ.pop(variable, None)
        if folder:
            os.environ["PATH"] = f"{os.path.abspath(folder)}/nvidia/cu13/bin:{os.environ['PATH']}"
    if name == "cute":  # which is read when CuTe DSL is imported; without a GPU it would be a Blackwell
        os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    os.environ |= {"TRITON_CACHE_DIR": f"{DUMP}/triton", "TILELANG_CACHE_DIR": f"{DUMP}/tilelang"}
    os.environ |= {
        "CUTE_DSL_KEEP": "cubin",
        "CUTE_DSL_DUMP_DIR": f"{DUMP}/cute",
        "QUACK_CACHE_DIR": f"{DUMP}/quack",
    }
    os.makedirs(f"{DUMP}/cute", exist_ok=True)


def load(name: str, path: str) -> Callable:
    """Return `prepare(a, b, out, **config)` of the kernel in a file; its launches multiply a and b into out."""
    if name in LIBRARIES:
        import torch

        from tilelab.measure import peers

        peer = peers.find(name)
        if peer.reason:
            raise RuntimeError(peer.reason)
        if name == "quack":  # the configuration that it takes where nothing has been tuned
            config = importlib.import_module("quack.gemm_config").default_config(torch.device("cuda"))
            return functools.partial(peer._prepare_config, config)
        return peer.prepare_gemm
    if name == "cuda":
        from ch14.languages.kernels import cuda_host

        return functools.partial(cuda_host.prepare, path)
    spec = importlib.util.spec_from_file_location(f"{name}_gemm", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if name in ("cute", "gluon"):
        return functools.partial(
            importlib.import_module(f"ch14.languages.kernels.{name}_host").prepare, module.gemm
        )
    return module.prepare


def make_inputs(m: int, n: int, k: int):
    import torch

    a, weight = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    return a, weight.T, torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")


class Worker:
    def __init__(self, name: str, path: str, import_s: float):
        self.name, self.path, self.import_s, self.held = name, path, import_s, {}
        self.prepare = load(name, path)

    def describe(self) -> dict:
        """Return the versions of the language's packages and the seconds of its import."""
        versions = {package: find_version(package) for package in PACKAGES[self.name]}
        return {"status": "ok", "versions": versions, "import_s": self.import_s}

    def check(self, config: dict, shapes=RAGGED, epilogue: bool = False) -> dict:
        """Return the largest error against float64 over cuBLAS's own error, and the seconds of the first call.

        With `epilogue` the kernel comes from an exercise: it also takes a bias, and applies SiLU.
        """
        import torch

        worst, first_s = 0.0, None
        for shape in shapes:
            a, b, out = make_inputs(*shape)
            start = time.perf_counter()
            more = [torch.randn(shape[1], device="cuda")] if epilogue else []
            self.prepare(a, b, *more, out, **config)()
            torch.cuda.synchronize()
            first_s = first_s or time.perf_counter() - start
            exact, product = a.double() @ b.double(), a @ b
            for bias in more:
                silu = torch.nn.functional.silu
                exact, product = silu(exact + bias), silu(product + bias).bfloat16()
            error, peer = ((each.double() - exact).norm() for each in (out, product))
            worst = max(worst, float((error / peer).nan_to_num(1e9, 1e9)))
        verdict = {"status": "ok", "reason": ""}
        if worst > 1.5:
            verdict = {"status": "wrong", "reason": f"its error is {worst:.0f} times cuBLAS's"}
        return verdict | {"error_of_cublas": worst, "first_s": first_s}

    def build(self, configs: list[dict], shapes=((256, 256, 256),)) -> dict:
        """Compile and launch each configuration once per shape; return the seconds at the first one, and reasons."""
        import torch

        seconds, reasons = [], []
        for shape in shapes:
            for config in configs:
                start, reason = time.perf_counter(), ""
                try:
                    self.prepare(*make_inputs(*shape), **config)()
                    torch.cuda.synchronize()
                except torch.AcceleratorError:
                    raise
                except Exception as error:
                    reason = describe_error(error)
                seconds.append(time.perf_counter() - start)
                reasons.append(reason)
        return {"status": "ok", "build_s": seconds[: len(configs)], "reasons": reasons[: len(configs)]}

    def tune(self, shape, configs: list[dict], kept: int = 4) -> dict:
        """Time all configurations beside cuBLAS in short bursts, then the `kept` fastest in longer ones."""
        import torch

        from tilelab.measure import bench

        start, (m, n, k) = time.perf_counter(), shape
        inputs = bench.make_input_sets(lambda: make_inputs(m, n, k))

        def compare(indices, **how):
            sets = itertools.cycle(inputs)
            candidates = {
                str(index): lambda a, b, out, index=index: self.prepare(a, b, out, **configs[index])
                for index in indices
            }
            candidates["cuBLAS"] = lambda a, b, out: lambda: torch.mm(a, b, out=out)
            return bench.compare(
                candidates, lambda: next(sets), "cuBLAS", flops=2 * m * n * k, warm_s=0.0, **how
            )

        found = compare(range(len(configs)), rounds=2, burst_ms=1)
        rows = [found[str(index)].row() | {"config": config} for index, config in enumerate(configs)]
        able = sorted(
            (index for index, row in enumerate(rows) if row.get("ratio")), key=lambda at: -rows[at]["ratio"]
        )
        for name, timing in compare(able[:kept], rounds=6, burst_ms=2).items() if able else ():
            if name != "cuBLAS":
                rows[int(name)] |= timing.row()
        best = max(able[:kept], key=lambda at: rows[at]["ratio"], default=None)
        return {"status": "ok", "rows": rows, "best": best, "tune_s": time.perf_counter() - start}

    def hold(self, shape, config: dict, burst_ms: float = 4) -> dict:
        """Prepare bursts of the kernel and of cuBLAS at a shape, for `time_round`."""
        import torch

        from tilelab.measure import bench

        inputs = bench.make_input_sets(lambda: make_inputs(*shape))
        launches = [self.prepare(*tensors, **config) for tensors in inputs]
        peers = [functools.partial(torch.mm, a, b, out=out) for a, b, out in inputs]
        call_ms = bench.estimate_ms(peers)
        make = bench.capture_burst if call_ms * 1e3 < bench.GRAPH_BELOW_US else bench._make_plain_burst
        calls = bench._calls_per_burst(call_ms, burst_ms)
        self.held = {
            "calls": calls,
            "kernel": make(launches, calls),
            "cuBLAS": make(peers, calls),
            "keep": inputs,
        }
        torch.cuda.synchronize()
        return {"status": "ok", "calls": calls, "graph": make is bench.capture_burst}

    def time_round(self) -> dict:
        """Time one burst of the kernel between two of cuBLAS, in milliseconds per call."""
        import torch

        marks = []
        for name in ("cuBLAS", "kernel", "cuBLAS"):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.held[name]()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        before, ms, after = (begin.elapsed_time(end) / self.held["calls"] for begin, end in marks)
        return {"status": "ok", "ms": ms, "peer_ms": (before + after) / 2}

    def inspect(self, shape, config: dict) -> dict:
        """Return registers, spills and shared memory of the kernel, and its counts of instructions."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        from tilelab.runtime import cubin

        tensors = make_inputs(*shape)
        launch = self.prepare(*tensors, **config)
        result = launch()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            launch()
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            recorded.export_chrome_trace(file.name)
            events = json.load(open(file.name))["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        row = {"status": "ok", "kernels": len(kernels)}
        if kernels:
            given = kernels[-1]["args"]
            row |= {"grid": given["grid"], "block": given["block"], "smem": given["shared memory"]}
        code = self.find_cubin(tensors, config, result)
        if code is None:
            return row | {"reason": "the compiled kernel was not found"}
        listing = [line.strip() for line in cubin.sass(code).splitlines() if INSTRUCTIONS.search(line)]
        listing = [re.sub(r"/\*.*?\*/|;", "", line).strip() for line in listing][:40]
        return row | summarize(code) | {"listing": listing}

    def compile(self, config: dict, epilogue: bool = False) -> dict:
        """Compile the kernel for 4096 cubed and sm_90a without a GPU; return registers, spills and instructions."""
        import torch

        a, weight, out = (torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(3))
        tensors = a, weight.T, *([torch.empty(4096)] if epilogue else []), out
        code = compile_for_hopper(self, tensors, config)
        return {"status": "ok", "reason": ""} | summarize(code)

    def find_cubin(self, tensors, config: dict, result) -> bytes | None:
        """Return the compiled kernel of the launch that has just returned `result`, where it can be found."""
        if self.name == "cuda":
            from ch14.languages.kernels import cuda_host
            from tilelab.runtime import device

            return cuda_host.compile_kernel(self.path, device.current().target, **config)
        if self.name in ("triton", "gluon"):
            return result.asm["cubin"]
        if self.name == "cutile":
            return export_cutile(self.prepare, tensors, config)
        return find_newest_cubin(self.name)


def find_newest_cubin(name: str) -> bytes | None:
    """Return the cubin that CuTe DSL, Helion or TileLang has written last."""
    kinds = {"cute": "cute/**/*.cubin", "helion": "triton/**/*.cubin", "tilelang": "tilelang/**/*.cubin"}
    files = glob.glob(f"{DUMP}/{kinds.get(name, 'none')}", recursive=True)
    return pathlib.Path(max(files, key=os.path.getmtime)).read_bytes() if files else None


def summarize(code: bytes) -> dict:
    """Return registers, spills and static shared memory of a cubin, and its counts of instructions."""
    from tilelab.runtime import cubin

    return cubin.read_resources(code) | {"counts": dict(cubin.sass_counts(code))}


def describe_code(found: dict) -> str:
    """Return in words what `Worker.compile` answers."""
    counts = found["counts"]
    return (
        f"with {found['registers']} registers, {found['spills']} B spilled, {counts.get('UTMALDG', 0)} TMA loads and "
        f"{counts.get('HGMMA', 0)} wgmma"
    )


def compile_for_hopper(worker: Worker, tensors, config: dict) -> bytes:
    """Return the cubin for sm_90a of what would be launched; the tensors lie on the CPU."""
    name, prepare = worker.name, worker.prepare
    if name == "cuda":
        from ch14.languages.kernels import cuda_host

        return cuda_host.compile_kernel(worker.path, "sm_90a", **config)
    if name == "cutile":
        return export_cutile(prepare, tensors, config)
    if name == "cute":
        prepare(*tensors, **config)
        return find_newest_cubin(name)
    if name == "tilelang":
        from tilelang import tvm

        with tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}):
            prepare(*tensors, **config)
        return find_newest_cubin(name)
    from tilelab.cells import triton_cell
    from tilelab.runtime import build

    if name == "helion":  # a persistent grid asks for the number of SMs; it is no part of the kernel
        importlib.import_module("helion.runtime").get_num_sm = lambda *_, **__: 132
    job = triton_cell.job_of(
        triton_cell.record_launch(lambda *given: prepare(*given, **config), tensors), "sm_90a"
    )
    module, _, function = job.kernel.rpartition(":")  # the module that Helion wrote is known by its file
    where = getattr(sys.modules.get(module), "__file__", module)
    report = build.build_one(dataclasses.replace(job, kernel=f"{where}:{function}"))
    if not report.cubin:
        raise RuntimeError(report.reason)
    return report.cubin


def export_cutile(prepare, tensors, config: dict) -> bytes:
    """Return the cubin of a cuTile kernel, compiled again for the arguments that its launch takes."""
    import cuda.tile as ct
    import torch
    from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, export_kernel

    def describe(value):
        """Say of an argument what cuTile finds out about one on a GPU: rows of whole 16 bytes, side by side."""
        if not isinstance(value, torch.Tensor):
            return value
        *rows, last = range(value.ndim)
        return ArrayConstraint(
            getattr(ct, str(value.dtype).removeprefix("torch.")),
            value.ndim,
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=[None for _ in rows] + [1],
            stride_divisible_by=[16 for _ in rows] + [1],
            shape_divisible_by=16,
            base_addr_divisible_by=16,
        )

    seen, launch, stream = [], ct.launch, torch.cuda.current_stream
    ct.launch = lambda stream, grid, *kernel_and_arguments: seen.extend(kernel_and_arguments)
    here = tensors[0].is_cuda
    if not here:
        torch.cuda.current_stream = lambda *_: None
    try:
        prepare(*tensors, **config)()
    finally:
        ct.launch, torch.cuda.current_stream = launch, stream
    kernel, arguments = seen
    convention, file = CallingConvention.cutile_python_v1(), io.BytesIO()
    if here:
        signature = KernelSignature.from_kernel_args(kernel, arguments, convention)
    else:
        signature = KernelSignature([describe(each) for each in arguments], convention)
        signature = signature.with_mangled_symbol("gemm")
    export_kernel(kernel, [signature], file, gpu_code="sm_90", output_format="cubin")
    return file.getvalue()


def find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error, shortened."""
    return f"{type(error).__name__}: {error}".strip()[:1500]


def main() -> None:
    """Answer requests until the input ends. What a language prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, path = [*sys.argv[1:], None][:2]
    set_up(name)
    start, worker = time.perf_counter(), None
    with contextlib.suppress(Exception):  # a language that is missing is reported when it is asked for
        for module in ("torch", MODULES.get(name, "triton")):
            importlib.import_module(module)
    import_s = time.perf_counter() - start
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or Worker(name, path or str(find_source(name)), import_s)
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"status": "failed", "reason": describe_error(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
