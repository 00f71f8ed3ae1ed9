"""Generate the program that torch.compile would run on an H200, on any machine, and read it.

Inductor writes text before it compiles anything. It asks the GPU for its properties only. A process of its own answers
these questions as an H200 does, gives Inductor tensors without data, and stops after the text is written. Nothing is
timed: of the candidates for a product, `wanted` picks one by name.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import types
from collections.abc import Callable, Sequence
from unittest import mock

from ch14.compiled.lesson import process, reading
from tilelab.cells import triton_cell
from tilelab.runtime import build, cuda, files, worker_pool

MODULE, WHAT = "ch14.compiled.lesson.generated", "the process that generates code"
SMS = 132  # of an H200
LIMIT_S = 120
# Inductor's settings for pointwise kernels and reductions that use descriptors.
DESCRIPTORS = {"triton.use_tensor_descriptor": True, "assume_aligned_inputs": True}
TEMPLATE_OPTIONS = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
_HEAD = (
    "import triton\nimport triton.language as tl\nfrom torch._inductor.runtime import triton_helpers\n"
    "from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math\n\n\n"
)


def as_keywords(options: dict) -> dict:
    """Return options of torch.compile as keyword arguments of `generate`: `__` for a dot."""
    return {name.replace(".", "__"): value for name, value in options.items()}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that Inductor wrote. `code` is its text; `candidates` are the (name, description) it could time."""

    code: str
    candidates: tuple[tuple[str, str], ...] = ()

    @property
    def calls(self) -> list[str]:
        """Return what `call` launches, in order: "library mm", or the name of a generated kernel."""
        return reading.list_calls(self.code)

    @property
    def kernels(self) -> dict[str, str]:
        """The text of each generated Triton kernel by name, from `@triton.jit` on."""
        return {
            name: "@triton.jit" + text.partition("@triton.jit")[2].rstrip()
            for name, text in _KERNEL.findall(self.code)
        }

    @property
    def descriptors(self) -> int:
        """Return how many descriptors the kernels make."""
        return sum(len(reading.DESCRIPTOR.findall(text)) for text in self.kernels.values())

    def body(self) -> str:
        """Return the statements of `call` that allocate, launch or rename, with the checks of an operator's result."""
        text = self.code[re.search(r"def (?:partition_\d+|call)\(", self.code).start() :]
        lines = text.partition("return (")[0].splitlines()[1:]
        wanted = re.compile(
            r"^(?!.*assert_alignment)(.*(empty_strided|\.run\(|extern_kernels|torch\.ops\.|# reuse)|"
            r"\s*buf\d+ = buf\d+$)"
        )
        kept = [line.strip() for line in lines if wanted.search(line)]
        return "\n".join(re.sub(r", stream=\w+", "", line) for line in kept)

    def find_lines(self, pattern: str) -> str:
        """Return the lines of the kernels that a regular expression matches."""
        lines = [line for text in self.kernels.values() for line in text.splitlines()]
        return "\n".join(line for line in lines if re.search(pattern, line))

    def find_part(self, begin: str, end: str) -> str:
        """Return the text of the first kernel from `begin` to the line before `end`."""
        text = next(iter(self.kernels.values()))
        return text[text.index(begin) : text.index(end)].rstrip()

    def describe_candidates(self) -> str:
        """Return how many candidates of each kind Inductor could time."""
        kinds = [reading.describe_choice(choice) for choice, _ in self.candidates]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

    def compile(self, name: str, num_warps: int = 4, num_stages: int = 3, **constants: int) -> build.Report:
        """Compile one of `kernels` for sm_90a with these block sizes and return the Report."""
        whole = dict(_KERNEL.findall(self.code))[name]
        signature = ast.literal_eval(re.search(r"'signature': (\{.*?\})", whole)[1])
        text = _HEAD + self.kernels[name] + "\n"
        path = cuda.cubin_folder() / f"generated_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
        if not path.exists():
            files.write_atomically(path, text)
        typed = {key: kind for key, kind in signature.items() if kind != "constexpr"}
        aligned = tuple(key for key, kind in typed.items() if kind.startswith("*"))
        job = (f"{path}:{name}", typed, constants, "sm_90a", num_warps, num_stages, aligned)
        return build.build_one(build.Job(*job, name=name))


def generate(
    function: Callable,
    *shapes: Sequence[int],
    dtype: str = "bfloat16",
    wanted: str = "",
    also: Sequence[Callable] = (),
    **options,
) -> Program:
    """Return the Program that torch.compile makes of `function` for tensors of these shapes on an H200.

    `function` is a function of a cell or of a file. All that it uses goes with it, and `also` what it does not name,
    such as the fake of an operator. `options` are those of torch.compile, with
    `__` for a dot: `triton__use_tensor_descriptor=True`. Where candidates would be timed, `wanted` is a regular
    expression that picks the first one by name or description; without it the library's is taken. ValueError says what
    Inductor said if it fails.
    """
    names = (function.__name__, *(each.__name__ for each in also))
    texts = triton_cell.collect(triton_cell.texts_of(function), *names)
    request = {"text": "\n\n\n".join(texts), "name": names[0], "dtype": dtype, "wanted": wanted}
    request["shapes"] = [list(shape) for shape in shapes]
    request["options"] = {key.replace("__", "."): value for key, value in options.items()}
    return _ask_worker(json.dumps(request))


@functools.cache
def _ask_worker(request: str) -> Program:
    """Return the Program of a request in JSON. Two cells that want the same program wait for it once."""
    env = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with worker_pool.lease_worker(MODULE, WHAT, **env) as worker:
        answer = worker.ask(json.loads(request), LIMIT_S)
    if "code" not in answer:
        raise ValueError(answer.get("reason", "the process died."))
    return Program(answer["code"], tuple(map(tuple, answer["candidates"])))


# ---- in the process


class _Written(BaseException):
    """Ends a compilation when the text is there; not an Exception, which Inductor would wrap."""


@contextlib.contextmanager
def _pretend_h200():
    """Answer what Inductor asks about the GPU as an H200 does."""
    import torch
    from torch._inductor import graph, scheduler, utils
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._subclasses import fake_tensor
    from torch.utils import _triton
    from triton import runtime
    from triton.backends.compiler import GPUTarget

    card = {"name": "NVIDIA H200", "minor": 0, "gcnArchName": "", "total_memory": 140 << 30}
    limits = {"cc": 90, "warp_size": 32, "regs_per_multiprocessor": 65536}
    both = {"major": 9, "multi_processor_count": SMS}
    card = types.SimpleNamespace(shared_memory_per_block_optin=232448, **card, **both)
    asked = DeviceProperties(type="cuda", index=0, max_threads_per_multi_processor=2048, **limits, **both)
    answers = {
        torch.cuda: {
            "get_device_properties": card,
            "get_device_capability": (9, 0),
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            **dict.fromkeys(("is_available", "is_initialized"), True),
            **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
            **dict.fromkeys(("_lazy_init", "set_device", "set_rng_state")),
            "device_count": 1,
        },
        DeviceProperties: {"create": asked},
        fake_tensor: {"init_gpu_context": None},
        _triton: {"triton_hash_with_backend": "none", "has_triton_tma_device": True, "has_triton": True},
        scheduler: {"has_triton": True},
        utils: {"has_triton": True, "is_big_gpu": True},
        # These passes trace patterns on tensors with data. None of the lesson's functions matches one.
        joint_graph: {"lazy_init": None},
        post_grad: {"lazy_init": None},
    }

    def stop_after(codegen):
        def write(lowering):
            code = codegen(lowering)[0]
            raise _Written(getattr(code, "value", code))  # torch 2.11 and 2.13 differ here

        return write

    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: "cuda",
    )
    with contextlib.ExitStack() as patches:
        # The driver tells what a kernel writes.
        patches.enter_context(mock.patch.object(runtime.driver, "_active", driver))
        for owner, values in answers.items():
            for name, value in values.items():
                if hasattr(owner, name):
                    patches.enter_context(mock.patch.object(owner, name, lambda *_, value=value, **__: value))
        stop = stop_after(graph.GraphLowering.codegen)
        patches.enter_context(mock.patch.object(graph.GraphLowering, "codegen", stop))
        yield


def _generate(text: str, name: str, shapes: list, dtype: str, wanted: str, options: dict) -> dict:
    import torch
    from torch._inductor import select_algorithm
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _triton

    candidates: list = []

    def pick(choices):
        candidates.extend((choice.name, choice.description) for choice in choices)
        named = [each for each in choices if wanted and re.search(wanted, f"{each.name} {each.description}")]
        return (named or choices)[:1]

    def backend(graph, inputs):
        with _pretend_h200():
            select_algorithm.clear_preprocessing_fns()
            select_algorithm.add_preprocessing_fn(pick)
            patches = {"fx_graph_cache": False, "compile_threads": 1, **options}
            return compile_fx(graph, inputs, config_patches=patches)

    torch._dynamo.reset()
    function = triton_cell.define(text)[name]
    with _pretend_h200(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, dtype=getattr(torch, dtype), device="cuda") for shape in shapes]
    try:
        # Dynamo asks this before it takes a launch of a Triton kernel into the graph.
        with mock.patch.object(_triton, "has_triton", lambda *_: True):
            torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    except _Written as written:
        return {"code": written.args[0], "candidates": candidates}
    return {"reason": "Inductor wrote nothing."}


if __name__ == "__main__":
    worker_pool.serve(process.answer_with(_generate))
