"""Read what torch.compile did: the candidates that it timed, the code that it generated, and its instructions.

For a library's kernels, whose code is closed, read the instructions that Nsight Compute saw them execute.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import math
import pathlib
import re
from collections.abc import Iterator

from tilelab.runtime import build

# Instructions that move tiles (by TMA in and out, or by a thread's asynchronous copy), and the tensor core's.
OPCODES = ("UTMALDG", "UTMASTG", "LDGSTS", "HGMMA")
TEMPLATE = "@triton_heuristics.template"  # in the code of a kernel that Inductor made from a template
DESCRIPTOR = re.compile(r"make_tensor_descriptor\(|TensorDescriptor\b|tensormap_create")
# torch.cuda._sleep launches this kernel; a profiled program calls it before each call of interest.
MARK = "spin_kernel"
PER_OPCODE = "sass__inst_executed_per_opcode"  # Nsight Compute's metric


@contextlib.contextmanager
def record_decisions() -> Iterator[list[dict]]:
    """Yield a list that fills with the decisions of Inductor's autotuning: {op, operands, choice, what, ms}.

    The candidates of a decision are in the order of speed; `ms` is None for a candidate that could not run. Inductor
    calls a feedback saver after each decision (torch._inductor.select_algorithm.add_feedback_saver).
    """
    from torch._inductor import select_algorithm

    decisions: list[dict] = []

    def save(timings, op, nodes, *_):
        shapes = [[int(size) for size in node.get_size()] for node in nodes]
        for choice in sorted(timings, key=timings.__getitem__):
            ms = float(timings[choice])
            decisions.append(
                {
                    "op": op,
                    "operands": shapes,
                    "choice": choice.name,
                    "what": choice.description,
                    "ms": ms if math.isfinite(ms) else None,
                }
            )

    select_algorithm.add_feedback_saver(save)
    try:
        yield decisions
    finally:
        select_algorithm.clear_feedback_savers()


def find_winners(decisions: list[dict]) -> list[str]:
    """Return the fastest candidate of each decision, in words."""
    best = {}
    for row in decisions:
        best.setdefault((row["op"], str(row["operands"])), row["choice"])
    return [describe_choice(choice) for choice in best.values()]


def describe_choice(choice: str) -> str:
    """Return the origin of a candidate. Inductor names its Triton templates triton_NAME_NUMBER, others by operation."""
    template = re.fullmatch(r"triton_(\w+?)_\d+", choice)
    if not template:
        return f"library ({choice})"
    return {"mm": "Triton, pointers", "mm_persistent_tma": "Triton, persistent TMA"}.get(
        template[1], f"Triton, {template[1]}"
    )


def find_modules() -> tuple[list, list]:
    """Return the modules that Inductor generated since its caches were last cleared: of graphs, and of fusions.

    Inductor only times a fusion, to decide whether a GEMM kernel includes the operations that follow the GEMM.
    """
    from torch._inductor.codecache import PyCodeCache

    callable_modules = [module for module in PyCodeCache.modules if hasattr(module, "call")]
    timed = [module for module in callable_modules if hasattr(module, "benchmark_all_configs")]
    return [module for module in callable_modules if module not in timed], timed


def list_calls(code: str) -> list[str]:
    """Return what the `call` of a generated module launches, in order: "library mm", or a generated kernel's name."""
    begin = re.search(r"def (?:partition_\d+|call)\(", code)  # a CUDA graph captures a partition
    body = code[begin.start() :] if begin else ""
    found = re.findall(
        r"extern_kernels\.(\w+)\(|aten\.(_?\w+)\.\w+\(|\b((?:triton|cpp)_\w+)(?:\.run)?\(", body
    )
    return [
        f"library {extern}"
        if extern
        else f"library {aten.replace('_scaled_dot_product_', '').replace('_', ' ').strip()}"
        if aten
        else kernel
        for extern, aten, kernel in found
    ]


def list_launchers(module) -> dict:
    """Return the launcher that Inductor chose for each Triton kernel of a generated module, by name."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return {
        name: kernel.launchers[0]
        for name, kernel in vars(module).items()
        if isinstance(kernel, CachingAutotuner) and kernel.launchers
    }


def find_cubin(launcher, folder: pathlib.Path) -> pathlib.Path | None:
    """Return where the cubin of a launcher lies in `folder`, a TORCHINDUCTOR_CACHE_DIR, or None."""
    return next(folder.rglob(f"{launcher.cache_hash}/*.cubin"), None)


def read_code(modules) -> str:
    """Return the text of generated modules."""
    return "\n".join(pathlib.Path(module.__file__).read_text() for module in modules)


def read_kernels(module, folder: pathlib.Path) -> dict[str, dict]:
    """Return {registers, and each of OPCODES, counted in the SASS} of a generated module's Triton kernels, by name.

    Triton left the cubins in `folder`, the TORCHINDUCTOR_CACHE_DIR of the compilation. A kernel without one is missing.
    """
    found = {}
    for name, launcher in list_launchers(module).items():
        path = find_cubin(launcher, folder)
        if path is not None:
            counts = build.sass_counts(path.read_bytes())
            found[name] = {"registers": launcher.n_regs, **{op: counts[op] for op in OPCODES}}
    return found


def shorten_name(kernel: str) -> str:
    """Return the name of a kernel without its return type, namespaces, template arguments and parameters."""
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", kernel.removeprefix("void "))
    return re.split(r"[<(]", plain, maxsplit=1)[0].rsplit("::", 1)[-1].strip()


def split_at_marks(launches: list[dict]) -> list[list[dict]]:
    """Return the launches ({kernel, ...}, in order) that follow each MARK: one list per profiled call."""
    sections: list[list[dict]] = []
    for launch in launches:
        if launch["kernel"] == MARK:
            sections.append([])
        elif sections:
            sections[-1].append(launch)
    return sections


def parse_counters(output: str) -> list[dict]:
    """Return {kernel, instructions, and each of OPCODES} of each launch, from the CSV of ncu.

    The options are `--metrics` PER_OPCODE and `--print-metric-instances details`, with which ncu writes a launch as
    "12 (HGMMA: 8; UTMALDG: 4)". ValueError if that is missing.
    """
    csv.field_size_limit(1 << 24)  # a field may list a value for each line of the kernel
    table = [line for line in output.splitlines() if line.startswith('"')]
    heads, _, *lines = csv.reader(io.StringIO("\n".join(table))) if len(table) > 2 else ((), ())
    if PER_OPCODE not in heads:
        raise ValueError(f"ncu's answer has no column {PER_OPCODE}.")
    rows = []
    for line in lines:
        launch = dict(zip(heads, line))
        executed = collections.Counter()
        for opcode, count in re.findall(r"([A-Z][A-Z0-9_]*)[\w.]*: ([\d,]+)", launch[PER_OPCODE]):
            executed[opcode] += int(count.replace(",", ""))
        if not executed:
            raise ValueError(f"ncu gave no instances of {PER_OPCODE}: {launch[PER_OPCODE][:60]!r}.")
        rows.append(
            {
                "kernel": shorten_name(launch["Kernel Name"]),
                "instructions": sum(executed.values()),
                **{opcode: executed[opcode] for opcode in OPCODES},
            }
        )
    return rows
