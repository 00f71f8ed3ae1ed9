"""The report of a finding of `ch14.bug_hunt`: a script that shows the bug with Triton alone, and a text ready to file.

The script holds the kernel without its constexpr arguments and compiles it for the target, without a GPU. It is run
under the Triton in question before the report is written. Nothing is ever sent anywhere.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
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
from ch14.bug_hunt import Builds, Finding, environments
from ch14.bug_hunt.outcomes import locate_failing_pass, make_row
from tilelab.records import report
from tilelab.runtime import build
from tilelab.runtime.build import Job

LIMIT_S = 120
FILE = "reproduce.py"


class _Fold(ast.NodeTransformer):
    """Replace names by their values, compute what is then known, and drop the branches that are not taken."""

    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node):
        return copy.deepcopy(self.values.get(node.id, node))

    def visit_Call(self, node):
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in self.values]
        return self.generic_visit(node)

    def visit_If(self, node):
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def visit_BinOp(self, node):  # k // 1 is k
        self.generic_visit(node)
        divides_by_one = isinstance(node.op, ast.FloorDiv) and getattr(node.right, "value", 0) == 1
        return node.left if divides_by_one else node

    def visit(self, node):
        node = super().visit(node)
        known = isinstance(node, (ast.BinOp, ast.BoolOp, ast.Compare)) and not any(
            isinstance(part, (ast.Name, ast.Call, ast.Attribute, ast.Subscript)) for part in ast.walk(node)
        )
        return ast.Constant(eval(compile(ast.unparse(node), "constant", "eval"), {})) if known else node


class _Inline(ast.NodeTransformer):
    """Replace calls of functions that consist of one expression by that expression."""

    def __init__(self, functions: dict[str, ast.FunctionDef]):
        self.functions = {name: function for name, function in functions.items() if len(function.body) == 1}

    def visit_Call(self, node):
        self.generic_visit(node)
        function = self.functions.get(getattr(node.func, "id", ""))
        if function is None:
            return node
        arguments = dict(zip([parameter.arg for parameter in function.args.args], node.args))
        return _Fold(arguments).visit(copy.deepcopy(function.body[0].value))


def _read_definitions(job: Job) -> dict[str, ast.stmt]:
    """Return what the file of a job's kernel defines, by name. The hunt's own job says where this file is."""
    place = job.kernel.rpartition(":")[0]
    path = place if place.endswith(".py") else find_spec(place).origin
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(pathlib.Path(path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:  # of Triton's other modules; the script has no other package
                bound = alias.asname or alias.name
                if (getattr(node, "module", None) or alias.name).startswith("triton") and bound not in (
                    "triton",
                    "tl",
                ):
                    found[bound.partition(".")[0]] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):  # a constant of the kernel
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = node
    return found


def _list_names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def reduce_source(job: Job, folded: bool = True) -> tuple[str, dict[str, str]]:
    """Return (source, signature) of a job's kernel, and of what it needs of its file, for the constants of that job.

    Where it is `folded`, no constexpr argument is left, no branch that is not taken, and no argument that is not used.
    """
    definitions = _read_definitions(job)
    kernel = definitions.pop(job.kernel.rpartition(":")[2])
    functions = {name: node for name, node in definitions.items() if isinstance(node, ast.FunctionDef)}
    # Triton's compiler takes no tuned function.
    kernel.decorator_list = [each for each in kernel.decorator_list if "jit" in ast.unparse(each)]
    if not folded:
        functions = {}
        job = dataclasses.replace(
            job, signature=job.signature | dict.fromkeys(job.constants, "constexpr"), constants={}
        )
    for function in (kernel, *functions.values()):
        folded = {parameter.arg for parameter in function.args.args} & set(job.constants)
        # A helper has other names for its tile sizes, because they differ from call to call, so those are not folded.
        _Fold({name: ast.Constant(job.constants[name]) for name in folded}).visit(function)
        function.args.args = [parameter for parameter in function.args.args if parameter.arg not in folded]
    kernel = _Inline(functions).visit(kernel)
    used = _list_names(kernel)
    if folded:
        kernel.args.args = [parameter for parameter in kernel.args.args if parameter.arg in used]
    needed, size = used & set(definitions), -1
    while len(needed) > size:  # a helper may need another one
        size = len(needed)
        needed |= {name for each in needed for name in _list_names(definitions[each]) & set(definitions)}
    parts = [*{id(node): node for name, node in definitions.items() if name in needed}.values(), kernel]
    signature = {parameter.arg: job.signature[parameter.arg] for parameter in kernel.args.args}
    return "\n\n\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in parts), signature


def make_script(finding: Finding, folded: bool = True) -> tuple[str, Job]:
    """Return a program that compiles the trigger with nothing but Triton, and the Job of the kernel in that program.

    The program must be saved as `reproduce.py`. `folded` as for `reduce_source`.
    """
    builds, job = finding.builds, finding.builds.hunt.job(finding.config, finding.builds.target)
    source, signature = reduce_source(job, folded)
    constants = {} if folded else job.constants
    name = job.kernel.rpartition(":")[2]
    aligned = [index for index, argument in enumerate(signature) if argument in job.aligned]
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
    source = ASTSource({name}, signature, {constants}, aligned)
    options = {{"num_warps": {job.num_warps}, "num_stages": {job.num_stages}}}
    ptx = triton.compile(source, target=GPUTarget("cuda", {capability}, 32), options=options).asm["ptx"]
    print("Triton", triton.__version__, "compiled it for {builds.target}")
    for what, pattern in {builds.hunt.evidence}.items():
        found = re.findall(pattern, ptx)
        print(f"{{what}}: {{len(found)}}", *sorted(set(found)), sep="\\n    ")
'''
    return text, dataclasses.replace(
        job,
        kernel=f"{FILE}:{name}",
        signature={argument: kind for argument, kind in signature.items() if kind != "constexpr"},
        constants=constants,
        aligned=tuple(argument for argument in signature if argument in job.aligned),
    )


def run_script(text: str, triton: pathlib.Path | None) -> tuple[int, str]:
    """Run a script under a Triton (None: the installed one) and return (exit status, its messages).

    The process sees no other package and an empty cache.
    """
    where = triton or pathlib.Path(find_spec("triton").origin).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, FILE).write_text(text)
        env = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTHON"))}
        env |= {"PYTHONPATH": os.fspath(where), "TRITON_CACHE_DIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
            process = run([sys.executable, "-S", FILE], cwd=folder, env=env, timeout=LIMIT_S)
            status, output = process.returncode, process.stdout + process.stderr
        except subprocess.TimeoutExpired:
            status, output = 124, f"no answer within {LIMIT_S} s"
        return status, _keep_messages(output.replace(f"{folder}/", "").replace(f"{where}/", ""))


def _keep_messages(output: str) -> str:
    """Return the messages in the output of a compiler, without the dumped module, the traceback and warnings."""
    if output.startswith("Triton "):  # the script came to its end
        lines = [line for line in output.splitlines() if "Warning" not in line and "warn(" not in line]
        return "\n".join(lines).rstrip()
    messages = re.findall(
        r"^(?:.*\b(?:error|note|fatal)\s*: .*|LLVM ERROR.*|.*Assertion `.*|"
        r"[\w.]+(?:Error|Exception)\b.*|no answer within.*)$",
        output,
        re.MULTILINE,
    )
    return "\n".join(dict.fromkeys(line.rstrip()[:400] for line in messages)) or output[-2000:]


def reproduces(finding: Finding, folded: bool = True) -> bool:
    """Return whether the reduced source still shows the symptom of the finding."""
    builds = finding.builds
    try:
        text, job = make_script(finding, folded)
    except Exception:  # to fold is to compute what the kernel would, in any code of any reader
        return False
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, FILE).write_text(text)
        job = dataclasses.replace(job, kernel=f"{folder}/{job.kernel}")
        built = build.build_one(job, bug_hunt.LIMIT_S, cache=folder, triton=builds.other_triton)
    row = make_row(builds.hunt, builds.triton, finding.config, built)
    return bug_hunt.symptom(row) == bug_hunt.symptom(finding.row)


def write_report(finding: Finding, versions: Sequence[str] = ()) -> str:
    """Return the report as Markdown. The trigger is built with the other `versions`, which must be available, too.

    Raise RuntimeError if the reduced source does not show the bug.
    """
    builds, row, trigger = finding.builds, finding.row, bug_hunt.describe(finding.config)
    folded = reproduces(finding)
    if not folded and not reproduces(finding, folded=False):
        raise RuntimeError(
            f"the reduced source does not show the bug, so no report is written; the trigger is {trigger}."
        )
    text, _ = make_script(finding, folded)
    status, output = run_script(text, environments.locate(builds.triton))
    failing_pass = locate_failing_pass(builds.compiler_output(finding.config))
    others = [
        Builds(builds.hunt, version, builds.target).ask([finding.config])[0]
        for version in versions
        if version != builds.triton
    ]
    what = f"{row['stage']} fails" if row["outcome"] == "fails" else row["outcome"]
    environment = [
        ("Triton", f"{builds.triton}, the wheel from PyPI"),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()}, {platform.machine()}"),
        ("target", f"{builds.target}, compiled for it without a GPU"),
    ]
    axes = [
        (axis, ", ".join(map(str, values)), ", ".join(map(str, finding.harmless[axis])) or "none")
        for axis, values in finding.triggers.items()
    ]
    sections = {
        "Expected": [builds.hunt.expected],
        "Observed": [
            f"Exit status {status}."
            + (f" The pass in the dumped pipeline: `{failing_pass}`." if failing_pass else ""),
            report.fence(output),
        ],
        "What was varied": [
            f"One axis at a time was varied around the smallest trigger ({trigger}). Of {len(finding.probes)} "
            f"random configurations that differ from it on several axes, {finding.correct_probes} behave as the first "
            f"sentence says. There were {len(builds.rows)} builds.",
            report.make_table(["axis", "shows it", "does not"], axes),
            "\n".join(
                f"- {axis} `{value}`: {meaning}"
                for axis, words in builds.hunt.words.items()
                for value, meaning in words.items()
            ),
        ],
    }
    if others:
        rows = [
            (each["triton"], each["outcome"], each.get("stage", ""), each.get("message", ""))
            for each in others
        ]
        sections["Other versions"] = [report.make_table(["Triton", "the trigger", "where", "message"], rows)]
    return report.write(
        f"[{builds.target}] {builds.hunt.title}: {what} (Triton {builds.triton})",
        finding.sentence,
        environment,
        sections,
        report.Script(FILE, "python", text, f"pip install triton=={builds.triton}\npython {FILE}"),
        "the tracker for the message, and for the pass",
    )
