"""Reading what torch.compile did: the candidates that it timed, the code that it wrote, the instructions in that code,
and, for a library's kernels, the instructions that Nsight Compute saw them execute."""

from __future__ import annotations

import collections
import contextlib
import csv
import io
import math
import pathlib
import re
from collections.abc import Iterator

from tilelab import build

# How tiles arrive and leave: by the copy engine, or by threads that copy to shared memory; and the tensor core.
OPCODES = ("UTMALDG", "UTMASTG", "LDGSTS", "HGMMA")
DESCRIPTOR = re.compile(r"make_tensor_descriptor\(|TensorDescriptor\b|tensormap_create")


@contextlib.contextmanager
def listening() -> Iterator[list[dict]]:
    """A list that fills with what Inductor's autotuning decides meanwhile: rows {op, shape, choice, ms, what}, in the
    order of speed. `ms` is None for a candidate that could not run.

    Inductor calls a feedback saver after each decision (torch._inductor.select_algorithm.add_feedback_saver), so this
    is what it decided by, not what it printed.
    """
    from torch._inductor import select_algorithm

    decided: list[dict] = []

    def saver(timings, op, nodes, *_):
        shapes = [[int(size) for size in node.get_size()] for node in nodes]
        for choice in sorted(timings, key=timings.__getitem__):
            ms = float(timings[choice])
            decided.append({"op": op, "operands": shapes, "choice": choice.name, "what": choice.description,
                            "ms": ms if math.isfinite(ms) else None})

    select_algorithm.add_feedback_saver(saver)
    try:
        yield decided
    finally:
        select_algorithm.clear_feedback_savers()


def winners(decided: list[dict]) -> list[str]:
    """The fastest candidate of each decision, in words; `decided` as `listening` fills it."""
    best = {}
    for row in decided:
        best.setdefault((row["op"], str(row["operands"])), row["choice"])
    return [in_words(choice) for choice in best.values()]


def in_words(choice: str) -> str:
    """Whose kernel a candidate is: Inductor calls its Triton templates triton_NAME_NUMBER, a library's product by the
    name of the operation."""
    template = re.fullmatch(r"triton_(\w+?)_\d+", choice)
    if not template:
        return f"library ({choice})"
    return {"mm": "Triton, pointers", "mm_persistent_tma": "Triton, persistent TMA"}.get(template[1],
                                                                                       f"Triton, {template[1]}")


# ---- the generated code


def modules() -> tuple[list, list]:
    """The modules with a `call` that Inductor wrote since its caches were last cleared: of graphs, and of fusions that
    it only timed, to decide whether a product takes what follows it into its kernel."""
    from torch._inductor.codecache import PyCodeCache

    made = [module for module in PyCodeCache.modules if hasattr(module, "call")]
    timed = [module for module in made if hasattr(module, "benchmark_all_configs")]
    return [module for module in made if module not in timed], timed


def is_product(code: str) -> bool:
    """Whether a generated kernel is made from a template, of a product or of attention."""
    return "@triton_heuristics.template" in code


def calls(code: str) -> list[str]:
    """What the `call` of a generated module launches, in order: "library mm", "library flash attention", or the name of
    a generated kernel."""
    begin = re.search(r"def (?:partition_\d+|call)\(", code)  # a partition is what a CUDA graph captures
    body = code[begin.start():] if begin else ""
    found = re.findall(r"extern_kernels\.(\w+)\(|aten\.(_?\w+)\.\w+\(|\b((?:triton|cpp)_\w+)(?:\.run)?\(", body)
    return [f"library {extern}" if extern else
            f"library {aten.replace('_scaled_dot_product_', '').replace('_', ' ').strip()}" if aten else kernel
            for extern, aten, kernel in found]


def descriptors(code: str) -> int:
    """How often a source makes or takes a tensor descriptor."""
    return len(DESCRIPTOR.findall(code))


def kernels(module, folder: pathlib.Path) -> dict[str, dict]:
    """What the Triton kernels of a generated module became: OPCODES counted in their SASS, registers, and `code`.

    `folder` is TORCHINDUCTOR_CACHE_DIR of that compilation: Triton left the cubins there. A kernel whose cubin is not
    found is missing from the answer.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found = {}
    for name, kernel in vars(module).items():
        if isinstance(kernel, CachingAutotuner) and kernel.launchers:
            path = next(folder.rglob(f"{kernel.launchers[0].cache_hash}/*.cubin"), None)
            if path is not None:
                counts = build.sass_counts(path.read_bytes())
                found[name] = {"registers": kernel.launchers[0].n_regs, **{code: counts[code] for code in OPCODES}}
    return found


def short(kernel: str) -> str:
    """The name of a kernel without return type, name spaces, template and function arguments."""
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", kernel.removeprefix("void "))
    return re.split(r"[<(]", plain, maxsplit=1)[0].rsplit("::", 1)[-1].strip()


MARK = "spin_kernel"  # what torch.cuda._sleep launches: a program being profiled puts it before each call


def between_marks(launches: list[dict]) -> list[list[dict]]:
    """Launches ({kernel, ...}, in order) by the call that made them: a list for each MARK."""
    sections: list[list[dict]] = []
    for launch in launches:
        if launch["kernel"] == MARK:
            sections.append([])
        elif sections:
            sections[-1].append(launch)
    return sections


# ---- Nsight Compute

PER_OPCODE = "sass__inst_executed_per_opcode"


def counters(said: str) -> list[dict]:
    """Rows {kernel, instructions, and each of OPCODES} of launches, from `ncu --csv --page raw` with PER_OPCODE and
    --print-metric-instances details, which writes a launch as "12 (HGMMA: 8; UTMALDG: 4)". ValueError when it is
    missing."""
    csv.field_size_limit(1 << 24)  # a field may list a value a line of the kernel
    table = [line for line in said.splitlines() if line.startswith('"')]
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
        rows.append({"kernel": short(launch["Kernel Name"]), "instructions": sum(executed.values()),
                     **{opcode: executed[opcode] for opcode in OPCODES}})
    return rows
