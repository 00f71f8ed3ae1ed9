"""The report of a finding of `ch14.bug_hunt`: a script that shows the bug with Triton alone, and a text ready to file.

The script is the kernel with its constexpr arguments folded away, compiled for the target with no GPU. It is run under
the Triton in question before the report is written; nothing is ever sent anywhere.
"""

from __future__ import annotations

import ast
import copy
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec

from ch14 import bug_hunt
from ch14.bug_hunt import Finding, environments
from ch14.bug_hunt.hunts import KERNELS
from tilelab import build
from tilelab.build import Job

LIMIT_S = 120
FILE = "reproduce.py"


# ---- the minimal source


class _Fold(ast.NodeTransformer):
    """Names that are constants become their values, what is then known is computed, and branches not taken go."""

    def __init__(self, constants: dict):
        self.constants = constants

    def visit_Name(self, node):
        return ast.Constant(self.constants[node.id]) if node.id in self.constants else node

    def visit_Call(self, node):
        node.keywords = [each for each in node.keywords if each.arg not in self.constants]
        return self.generic_visit(node)

    def visit_If(self, node):
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def visit_BinOp(self, node):
        self.generic_visit(node)
        by_one = isinstance(node.op, ast.FloorDiv) and getattr(node.right, "value", 0) == 1
        return node.left if by_one else node

    def visit(self, node):
        node = super().visit(node)
        known = isinstance(node, (ast.BinOp, ast.BoolOp, ast.Compare)) and not any(
            isinstance(part, (ast.Name, ast.Call, ast.Attribute, ast.Subscript)) for part in ast.walk(node))
        return ast.Constant(eval(compile(ast.unparse(node), "constant", "eval"), {})) if known else node


class _Inline(ast.NodeTransformer):
    """Calls of functions that have come down to one expression become that expression."""

    def __init__(self, functions: dict[str, ast.FunctionDef]):
        self.functions = {name: each for name, each in functions.items() if len(each.body) == 1}

    def visit_Call(self, node):
        self.generic_visit(node)
        function = self.functions.get(getattr(node.func, "id", ""))
        if function is None:
            return node
        given = dict(zip([each.arg for each in function.args.args], node.args))

        class Place(ast.NodeTransformer):
            def visit_Name(self, name):
                return copy.deepcopy(given.get(name.id, name))

        return Place().visit(copy.deepcopy(function.body[0].value))


def reduced(job: Job) -> tuple[str, dict[str, str]]:
    """(source, signature) of a job's kernel and what it calls, for `job`'s constants alone: no constexpr is left, no
    branch that is not taken, and no argument that is not used."""
    tree = ast.parse(KERNELS.read_text())
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    name = job.kernel.rpartition(":")[2]
    kernel = functions.pop(name)
    for each in (kernel, *functions.values()):
        taken = {arg.arg for arg in each.args.args} & set(job.constants)
        # A helper's tile sizes differ from call to call: only the kernel's own are folded in it.
        _Fold({key: job.constants[key] for key in taken}).visit(each)
        each.args.args = [arg for arg in each.args.args if arg.arg not in taken]
    kernel = _Inline(functions).visit(kernel)
    used = {part.id for part in ast.walk(kernel) if isinstance(part, ast.Name)}
    kernel.args.args = [arg for arg in kernel.args.args if arg.arg in used]
    kept = [each for helper, each in functions.items() if helper in used]
    signature = {arg.arg: job.signature[arg.arg] for arg in kernel.args.args}
    return "\n\n\n".join(ast.unparse(ast.fix_missing_locations(each)) for each in (*kept, kernel)), signature


def script(finding: Finding) -> tuple[str, Job]:
    """(text, job): a program that compiles the trigger with nothing but its Triton, and a Job of the same kernel but
    for its file, which is to be named `reproduce.py`."""
    builds, job = finding.builds, finding.builds.hunt.job(finding.config, finding.builds.target)
    source, signature = reduced(job)
    name = job.kernel.rpartition(":")[2]
    aligned = [index for index, each in enumerate(signature) if each in job.aligned]
    capability = int(re.sub(r"\D", "", builds.target))
    text = f'''"""Compiles a kernel for {builds.target}. Needs Triton {builds.triton}, no GPU and nothing else."""

import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


{source}


if __name__ == "__main__":
    signature = {signature}
    aligned = {{(index,): [["tt.divisibility", 16]] for index in {aligned}}}
    source = ASTSource({name}, signature, {{}}, aligned)
    options = {{"num_warps": {job.num_warps}, "num_stages": {job.num_stages}}}
    ptx = triton.compile(source, target=GPUTarget("cuda", {capability}, 32), options=options).asm["ptx"]
    print("Triton", triton.__version__, "compiled it for {builds.target}")
    for what, pattern in {builds.hunt.evidence}.items():
        found = re.findall(pattern, ptx)
        print(f"{{what}}: {{len(found)}}", *sorted(set(found)), sep="\\n    ")
'''
    return text, Job(f"{FILE}:{name}", signature, {}, builds.target, job.num_warps, job.num_stages,
                     tuple(each for each in signature if each in job.aligned))


def run(text: str, triton: pathlib.Path | None) -> tuple[int, str]:
    """(exit status, what it said) of a script under a Triton, None for the installed one: in a process of its own that
    sees no other package, with an empty cache. The dump of the module is left out."""
    where = triton or pathlib.Path(find_spec("triton").origin).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, FILE)
        path.write_text(text)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTHON"))}
        env |= {"PYTHONPATH": os.fspath(where), "TRITON_CACHE_DIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run([sys.executable, "-S", FILE], cwd=folder, env=env, capture_output=True, text=True,
                                  timeout=LIMIT_S, check=False)
            status, said = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            status, said = 124, f"no answer within {LIMIT_S} s"
        return status, _telling(said.replace(f"{folder}/", "").replace(f"{where}/", ""))


def _telling(said: str) -> str:
    """The lines of a compiler's output that tell something: not the module, nor where Python was, nor warnings."""
    if said.startswith("Triton "):  # the script's own lines: it came to its end
        return "\n".join(line for line in said.splitlines() if "Warning" not in line and "warn(" not in line).rstrip()
    told = re.findall(r"^(?:.*\b(?:error|note|fatal)\s*: .*|LLVM ERROR.*|.*Assertion `.*|[\w.]+(?:Error|Exception)\b.*|"
                      r"no answer within.*)$", said, re.MULTILINE)
    return "\n".join(dict.fromkeys(line.rstrip()[:400] for line in told)) or said[-2000:]


# ---- the text


def reproduces(finding: Finding) -> bool:
    """Whether the reduced source still shows what the finding does."""
    builds = finding.builds
    text, job = script(finding)
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, FILE).write_text(text)
        named = Job(f"{folder}/{job.kernel}", *(getattr(job, name) for name in (
            "signature", "constants", "target", "num_warps", "num_stages", "aligned")))
        report = build.build_one(named, bug_hunt.LIMIT_S, cache=folder, triton=environments.ready(builds.triton))
    row = bug_hunt.row_of(builds.hunt, builds.triton, finding.config, report)
    return bug_hunt.symptom(row) == bug_hunt.symptom(finding.row)


def _table(head: Sequence[str], rows: Sequence[Sequence]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def others(finding: Finding, versions: Sequence[str]) -> list[dict]:
    """A row of the trigger with each of the other `versions`, which must be `known`."""
    builds = finding.builds
    return [bug_hunt.Builds(builds.hunt, version, builds.target).ask([finding.config])[0]
            for version in versions if version != builds.triton]


def write(finding: Finding, versions: Sequence[str] = ()) -> str:
    """The report as Markdown; RuntimeError when the reduced source does not show the bug. `versions` are tried too."""
    builds, row = finding.builds, finding.row
    if not reproduces(finding):
        raise RuntimeError("the reduced source does not show the bug, so no report is written; "
                           f"the trigger is {bug_hunt.describe(finding.config)}.")
    text, _ = script(finding)
    status, said = run(text, environments.ready(builds.triton))
    place = bug_hunt.pipeline(builds.said(finding.config))
    elsewhere = [[each["triton"], each["outcome"], each.get("stage", ""), each.get("message", "")]
                 for each in others(finding, versions)]
    right = sum(predicted == shown for _, predicted, shown in finding.probes)
    title = f"[{builds.target}] {builds.hunt.title}: " + (
        f"{row['stage']} fails" if row["outcome"] == "fails" else row["outcome"])
    varied = [[axis, ", ".join(map(str, finding.show[axis])), ", ".join(map(str, finding.without[axis])) or "none"]
              for axis in finding.config]
    return "\n\n".join(filter(None, [
        f"# {title} (Triton {builds.triton})",
        finding.sentence,
        "## Environment",
        _table(["what", "which"], [["Triton", f"{builds.triton}, the wheel from PyPI"],
                                   ["Python", platform.python_version()],
                                   ["system", f"{platform.system()}, {platform.machine()}"],
                                   ["target", f"{builds.target}, compiled for; no GPU takes part"]]),
        "## Minimal source",
        f"`{FILE}`:",
        f"```python\n{text}```",
        "## Command",
        f"```\npip install triton=={builds.triton}\npython {FILE}\n```",
        "## Expected",
        builds.hunt.expected,
        "## Actual",
        f"Exit status {status}." + (f" The pass in the dumped pipeline: `{place}`." if place else ""),
        f"```\n{said}\n```",
        "## What was varied",
        f"One axis at a time, around the smallest trigger ({bug_hunt.describe(finding.config)}). Off these axes, "
        f"{right} of {len(finding.probes)} random configurations do as the first sentence says. "
        f"{len(builds.rows)} builds in all.",
        _table(["axis", "shows it", "does not"], varied),
        "\n".join(f"- {axis} `{value}`: {what}" for axis, words in builds.hunt.words.items()
                  for value, what in words.items()),
        "## Other versions" if elsewhere else "",
        _table(["Triton", "the trigger", "where", "message"], elsewhere) if elsewhere else "",
        "Before filing: search the tracker for the message, and for the pass.",
    ])) + "\n"
