"""Make a Hunt of a kernel that the reader brings along, from its file and a signature in one line."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

from ch14.bug_hunt.hunts import Hunt
from tilelab.runtime.build import Job, Report

LAUNCH = {
    "num_warps": (4, 8),
    "num_stages": (1, 3),
}  # the axes that every kernel has; the simplest value first
TYPE = re.compile(r"\*?(?:i|u|fp|bf)\d+\w*|tensordesc<.+>")


def parse_signature(text: str) -> tuple[dict[str, str], dict[str, tuple]]:
    """Return ({argument: Triton type}, {constant: values}) of "x=*bf16, n=i32, BLOCK=64|128, num_warps=4|8".

    The values of a constexpr argument, of num_warps and of num_stages are Python literals, the simplest first.
    """
    types, values = {}, dict(LAUNCH)
    for part in filter(None, map(str.strip, re.split(r",(?![^<]*>)", text))):
        name, equals, given = (word.strip() for word in part.partition("="))
        if not equals or not name.isidentifier() or not given:
            raise ValueError(
                f"takes NAME=TYPE or NAME=VALUE|VALUE, separated by commas; it has {part[:60]!r}."
            )
        if TYPE.fullmatch(given):
            types[name] = given
            continue
        try:
            values[name] = tuple(ast.literal_eval(value.strip()) for value in given.split("|"))
        except (ValueError, SyntaxError):
            raise ValueError(
                f"takes a Triton type such as *bf16 or i32, or literals such as 64|128 for {name}; it is "
                f"{given[:60]!r}."
            ) from None
    return types, values


def find_parameters(path: str, name: str) -> list[str]:
    """Return the parameters of a function of a Python file; ValueError if the file does not define it."""
    try:
        tree = ast.parse(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"takes FILE.py:NAME; {path[:80]} cannot be read ({error}).") from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        defined = ", ".join(functions) or "no function"
        raise ValueError(
            f"takes FILE.py:NAME; {path[:80]} defines {defined} at its top level, not {name[:60]!r}."
        )
    return [parameter.arg for parameter in functions[name].args.args]


def make_hunt(kernel: str, signature: str, target: str) -> Hunt:
    """Return the Hunt of "file.py:name". Its axes are the constants with several values, and it expects a build.

    ValueError if the file does not define the kernel, or the signature does not have all of its parameters.
    """
    path, _, name = kernel.rpartition(":")
    types, values = parse_signature(signature)
    parameters = find_parameters(path, name)
    given = {*types, *values} - {word for word in LAUNCH if word not in parameters}
    if wrong := sorted(given ^ set(parameters)):
        raise ValueError(
            f"must have the parameters {', '.join(parameters)} of {name}; {', '.join(wrong)} differs."
        )
    axes = {axis: choices for axis, choices in values.items() if len(choices) > 1} or LAUNCH
    fixed = {constant: choices[0] for constant, choices in values.items() if constant not in axes}
    return Hunt(
        name,
        f"the kernel {name} of {pathlib.Path(path).name}",
        axes,
        {axis: choices[0] for axis, choices in axes.items()},
        target,
        ("builds", "rejected", "fails"),
        _name_outcome,
        functools.partial(_make_job, kernel, types, fixed, tuple(parameters)),
        {},
        "The kernel compiles, as its neighbours below do.",
        {
            "products": r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*",
            "TMA": r"cp\.async\.bulk\.tensor",
        },
    )


def _make_job(kernel: str, types: dict, fixed: dict, parameters: tuple, config: dict, target: str) -> Job:
    constants = {**fixed, **config}
    launch = {word: constants.get(word) if word in parameters else constants.pop(word) for word in LAUNCH}
    pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))  # as torch allocates them
    return Job(kernel, types, constants, target, **launch, aligned=pointers)


def _name_outcome(report: Report) -> str:
    if "cannot be imported" in report.reason or "is no @triton.jit function" in report.reason:
        raise ValueError(report.reason.removeprefix("ImportError: "))
    return {"ok": "builds", "rejected": "rejected", "failed": "fails"}[report.status]
