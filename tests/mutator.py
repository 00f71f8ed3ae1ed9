"""Change the solutions of the notebooks, one small fault at a time: each exercise's check must reject each mutant.

    python tests/mutator.py 01_ch07_bulk_copy [--sample N]

A mutant drops a synchronising call, flips a parity, moves a comparison by one, drops a mask, a condition or one half of
it, or exchanges two neighbouring statements that depend on each other. That covers CUDA C++ cells, and the functions of
Python cells: Triton, Gluon and plain answers. A changed cell runs in a process of its own, with the names of the cells
before it. mutants.toml lists the mutants that are as right as the solution, and those that no check finds yet.
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import resource
import select
import signal
import time
import tomllib

# before torch: a fork has one thread
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TILES_QUICK="1")

from tilelab.runtime import device  # isort: split

device.interpret_without_gpu()

from ch14.languages.lesson import cells as language_cells  # noqa: E402
from tilelab import ROOT, emulator  # noqa: E402
from tilelab.cells import cuda_magic, triton_cell  # noqa: E402

_LISTS = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))
LISTED = _LISTS["equivalent"] + _LISTS.get("open", [])
SOLVED = ": solved."

# Calls of which a thread, a copy engine or a tensor core depends. A call that only returns a value is none of them.
SYNCHRONISING = re.compile(
    r"\b(?:__sync\w+|mbarrier_\w+|fence_\w+|bulk_(?:commit|wait)\w*|wgmma_(?:fence|commit|wait)|cluster_(?:arrive|wait)"
    r"|cp_async_(?:commit|wait)|named_barrier_\w+|\w*mbarrier\.\w+|fence_async_shared|\w*tma\.store_wait"
    r"|warpgroup_mma_wait|gl\.barrier|tl\.debug_barrier)\b"
)
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a cell: `what` says it, with the line it changes; `source` is the whole changed cell."""

    what: str
    source: str


def _replaced(source, begin, end, text, what):
    line = source.count("\n", 0, begin)
    shown = " ".join(source.splitlines()[line].split("//")[0].split())
    return Mutant(f"{what} in `{shown}`", source[:begin] + text + source[end:])


def _closing(text, at):
    """The place after the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if not depth:
            return place + 1
    return len(text)


def _blanked(source):
    """The source with comments, strings and preprocessor lines as spaces, so that places stay the same."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\n])*"|^[ \t]*#[^\n]*|^%%[^\n]*'
    return re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), source, flags=re.S | re.M)


def _statements(text):
    """Lists of (begin, end) of the simple statements that stand beside each other in one block."""
    groups, open_blocks, begin, at = [], [[]], 0, 0
    while at < len(text):
        if text[at] == "(":
            at = _closing(text, at)
            continue
        if text[at] == "{":
            open_blocks.append([])
            begin = at + 1
        elif text[at] == "}":
            groups.append(open_blocks.pop())
            if open_blocks:
                open_blocks[-1].append(None)  # a compound statement
            begin = at + 1
        elif text[at] == ";":
            begin += len(text[begin:at]) - len(text[begin:at].lstrip())
            open_blocks[-1].append((begin, at + 1))
            begin = at + 1
        at += 1
    return groups


def _cuda_mutants(source):
    text = _blanked(source)
    for call in SYNCHRONISING.finditer(text):
        opening = re.compile(r"\s*(?:<[^;()]*>)?\s*\(").match(text, call.end())
        end = _closing(text, opening.end() - 1) if opening else 0
        if opening and text[end : end + 1] == ";":
            yield _replaced(source, call.start(), end, "(void)0", f"drop {call[0]}()")
            if call[0] == "mbarrier_wait":
                yield _replaced(source, end - 1, end, " ^ 1)", "flip the parity")
    for found in re.finditer(r"(?<=[\w)\]]) (<=|>=|==|!=|<|>) (?=[\w(\-])", text):
        yield _replaced(
            source, *found.span(1), COMPARISONS[found[1]], f"{found[1]} becomes {COMPARISONS[found[1]]}"
        )
    for found in re.finditer(r"\bif \(", text):
        end = _closing(text, found.end() - 1)
        yield _replaced(source, found.end(), end - 1, "true", "drop the condition")
    for found in re.finditer(r"[^&\s][^&(;]*? && ", text):
        yield _replaced(source, found.end() - 4, found.end(), " || ", "&& becomes ||")
    for found in re.finditer(r"\? ([^:;?]+) : ([^;?]+?)(?=[;,)])", text):
        yield _replaced(source, *found.span(2), source[slice(*found.span(1))], "drop the choice")
    for group in _statements(text):
        for first, second in zip(group, group[1:]):
            if first and second and _may_swap(text[slice(*first)], text[slice(*second)]):
                swapped = source[slice(*second)] + source[first[1] : second[0]] + source[slice(*first)]
                yield _replaced(source, first[0], second[1], swapped, "exchange with the next statement")


def _may_swap(first, second):
    """Whether two statements do anything to each other: share a name, or act on what is not in their text."""
    declared = re.match(r"\s*(?:const\s+)?[\w:<>]+[\s*&]+(\w+)\s*(?:\[.*\])?\s*(?:=|;|,|\()", first)
    if re.match(r"\s*(return|break|continue|using|extern|__shared__)", first) or "return" in second:
        return False
    if all(re.match(r"\s*\w*(?:_load|_init)\w*\(", each) for each in (first, second)):
        return False  # two loads or two barriers: in any order
    if declared and re.search(rf"\b{declared[1]}\b", second):
        return False  # it would not compile
    acts = [
        bool(SYNCHRONISING.search(each) or re.search(r"\b(bulk|tma|wgmma|cp_async)_", each))
        for each in (first, second)
    ]
    return (
        all(acts)
        or (any(acts) and _stores(first) | _stores(second))
        or bool(_changes(first, second) | _changes(second, first))
    )


def _stores(statement):
    return bool(re.search(r"\w\[.*\] *[-+*/|&^]?= ", statement))


def _changes(first, second):
    """Whether the first statement assigns a name that the second uses."""
    assigned = re.findall(r"\b(\w+)(?:\[[^\]]*\]|\.\w+)* *[-+*/|&^]?= ", first) + re.findall(
        r"(?:\+\+|--)(\w+)", first
    )
    return any(re.search(rf"\b{name}\b", second) for name in assigned)


def _python_mutants(source):
    tree = ast.parse(source)
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    data = source.encode()

    def span(node):
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def replaced(begin, end, text, what):
        line = data[:begin].count(b"\n")
        shown = " ".join(source.splitlines()[line].split("# ")[0].split())
        return Mutant(f"{what} in `{shown}`", (data[:begin] + text.encode() + data[end:]).decode())

    def text_of(node):
        return data[slice(*span(node))].decode()

    for function in tree.body:
        if not isinstance(function, (ast.FunctionDef, ast.ClassDef)) or function.name.startswith("test"):
            continue
        bound = [
            each.id
            for each in ast.walk(function)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        ]
        for node in ast.walk(function):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                name = ast.unparse(node.value.func)
                if SYNCHRONISING.search(name):
                    yield replaced(*span(node), "pass", f"drop {name}()")
                if name == "mbarrier.wait" and len(node.value.args) > 1:
                    parity = node.value.args[1]
                    yield replaced(*span(parity), f"1 - ({text_of(parity)})", "flip the parity")
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                before, after = span(node.left)[1], span(node.comparators[0])[0]
                operator = data[before:after].decode().strip(" ()\n")
                if operator in COMPARISONS:
                    begin = data.index(operator.encode(), before)
                    yield replaced(
                        begin,
                        begin + len(operator),
                        COMPARISONS[operator],
                        f"{operator} becomes {COMPARISONS[operator]}",
                    )
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg == "mask":
                        mask = text_of(keyword.value)  # without one, Triton would refuse `other`
                        yield replaced(*span(keyword.value), f"({mask}) == ({mask})", "drop the mask")
                if ast.unparse(node.func) in ("tl.where", "gl.where", "torch.where") and len(node.args) == 3:
                    yield replaced(*span(node), text_of(node.args[1]), "drop the mask of where")
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
                for kept in (node.left, node.right):
                    yield replaced(*span(node), text_of(kept), f"keep only {text_of(kept)}")
            if isinstance(node, ast.BoolOp):
                for dropped in node.values:
                    rest = [text_of(each) for each in node.values if each is not dropped]
                    joint = " and " if isinstance(node.op, ast.And) else " or "
                    yield replaced(
                        *span(node),
                        f"({joint.join(f'({each})' for each in rest)})",
                        f"drop {text_of(dropped)}",
                    )
            if isinstance(node, (ast.If, ast.IfExp)):
                yield replaced(*span(node.test), "True", "drop the condition")
            for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
                for first, second in zip(block, block[1:]) if isinstance(block, list) else ():
                    if _may_swap_python(first, second, bound):
                        middle = data[span(first)[1] : span(second)[0]].decode()
                        if "\n" in middle:
                            yield replaced(
                                span(first)[0],
                                span(second)[1],
                                text_of(second) + middle + text_of(first),
                                "exchange with the next statement",
                            )


def _may_swap_python(first, second, bound):
    """Whether a statement stores a name that the other uses, or one may wait for what the other does to memory.

    Not where the second would use a name that is bound by the first alone: Python refuses that without a check.
    `bound` lists the names that the function binds, as often as it does.
    """
    if not all(isinstance(each, (ast.Assign, ast.AugAssign, ast.Expr)) for each in (first, second)):
        return False

    def names(node, *contexts):
        kinds = contexts or (ast.Load, ast.Store)
        return {
            each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, kinds)
        }

    if any(bound.count(name) == 1 for name in names(first, ast.Store) & names(second, ast.Load)):
        return False
    texts = [ast.unparse(first), ast.unparse(second)]
    waits = r"\.(?:wait|arrive|expect|append|async_\w+|atomic_\w+)\(|fence_|store_wait"
    kinds = [{word for word in (waits, r"\.store\(", r"\.load\(") if re.search(word, text)} for text in texts]
    return bool(
        names(first, ast.Store) & names(second)
        or names(second, ast.Store) & names(first)
        or all(kinds)
        and (waits in kinds[0] | kinds[1] or kinds[0] != kinds[1])
    )


def mutants(source):
    """The mutants of a cell's text, each once and each with a name of its own."""
    head, text = "", source
    if source.startswith("%%language"):
        head, text = source.split("\n", 1)
        head += "\n"
    is_cuda = source.startswith(("%%cuda", "%%language cuda"))
    seen, times = {source}, {}
    for mutant in _cuda_mutants(text) if is_cuda else _python_mutants(text):
        mutant = dataclasses.replace(mutant, source=head + mutant.source)
        if mutant.source not in seen:
            seen.add(mutant.source)
            count = times[mutant.what] = times.get(mutant.what, 0) + 1
            yield dataclasses.replace(mutant, what=f"{mutant.what} ({count})" if count > 1 else mutant.what)


def run_cell(source, names):
    """Run a cell as the notebook does, bind its names in `names`, and return what it prints.

    The first Python cell, which imports, stands before each later one, as its compiler finds it in the notebook.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if source.startswith("%%cuda"):
            line, _, body = source.partition("\n")
            cuda_magic.run_cell(line.removeprefix("%%cuda"), body, names)
        elif source.startswith("%%language"):
            line, _, body = source.partition("\n")
            language_cells.run_cell(line.removeprefix("%%language"), body)
        else:
            text = re.sub(r"^%[^\n]*", "", source, flags=re.M)
            imports = names.setdefault("imports of the notebook", text)
            names.update(triton_cell.define(text if imports is text else f"{imports}\n\n{text}", names))
    return printed.getvalue()


def judge(source, names, limit_s):
    """Run a changed cell in a process of its own: "solved", "rejected: …", "crashed by signal …" or "hung"."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))  # whatever else runs on this machine
        try:
            text = run_cell(source, dict(names))
            said = "solved" if SOLVED in text else f"rejected: {text.strip()[-300:]}"
        except BaseException as error:
            said = f"rejected: {type(error).__name__}: {str(error)[:300]}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    answered, _, _ = select.select([reader], [], [], 10 * limit_s)
    said = os.read(reader, 4096).decode(errors="replace") if answered else "hung"
    os.close(reader)
    if not answered:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    ended_by = os.WTERMSIG(status)
    return said or (
        "hung" if status and ended_by in (signal.SIGXCPU, signal.SIGKILL) else f"crashed by signal {ended_by}"
    )


def judge_solutions(stem, sample=None):
    """Yield (exercise's cell, mutant, what its check said) of a notebook.

    `sample` counts the mutants of each of two cells. Then the solutions are not checked first, which takes most time.
    """
    path = ROOT / "notebooks" / "solutions" / f"{stem}.ipynb"
    names, cells = {}, []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        last = source.splitlines()[0 if source[0] == "%" else -1]
        is_exercise = re.search(r"\bcheck\w*\(|%%language (?:cuda|triton|gluon) --check", last)
        cells.append((number, source, is_exercise, list(mutants(source)) if is_exercise else []))

    def by_hash(text):  # the same ones each time, but no pattern in their order
        return hashlib.sha256(text.encode()).digest()

    if sample is not None:
        kept = [source for _, source, _, changed in cells if changed and "fake" not in source]
        kept = sorted(kept, key=by_hash)[:2]  # the check of an operator, which has a fake, compiles for 10 s
        for _, source, _, changed in cells:
            changed.sort(key=lambda mutant: by_hash(mutant.source))
            del changed[sample if source in kept else 0 :]
    for number, source, is_exercise, changed in cells:
        if names and is_exercise and not changed:
            continue
        before, begin = dict(names), time.process_time()
        printed = run_cell(_without_check(source) if sample and is_exercise else source, names)
        if changed and not sample:
            assert SOLVED in printed, f"the solution in cell {number} of {stem} is not right: {printed}"
        limit_s = round(60 + 20 * (time.process_time() - begin))
        for mutant in changed:
            yield number, mutant.what, judge(mutant.source, before, limit_s)


def _without_check(source):
    """The text of an exercise's cell without the line that checks it."""
    first, _, rest = source.partition("\n")
    if first.startswith("%%cuda"):
        return re.sub(r" --then (\"[^\"]*\"|'[^']*')", "", first) + "\n" + rest
    return source.rpartition("\n")[0]


def find_reason(stem, cell, what):
    """Why a mutant may be accepted, from mutants.toml; "" for one that must be rejected."""
    for entry in LISTED:
        named = stem in entry["notebooks"] and entry.get("cell", cell) == cell
        if named and any(part in what for part in entry["mutants"]):
            return entry["why"]
    return ""


if __name__ == "__main__":
    cuda_magic.read_build = cuda_magic.describe = lambda *_: ""  # the check counts, not what a compiler says
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stems", nargs="+", metavar="STEM", help="a notebook with solutions")
    parser.add_argument("--sample", type=int, help="so many mutants of each of two cells; default: all")
    parser.add_argument("--json", action="store_true", help="print every verdict, one per line")
    options = parser.parse_args()
    if emulator.is_available():
        emulator._prepare_engine()  # once, and not within the limit of a mutant
    for stem in options.stems:
        if child := os.fork():  # each notebook starts from the same process
            assert not os.waitpid(child, 0)[1], f"the solutions of {stem} could not be judged"
            continue
        count = 0
        for number, what, said in judge_solutions(stem, options.sample):
            count += 1
            if options.json:
                print(json.dumps([stem, number, what, said]), flush=True)
            elif not said.startswith("rejected"):
                print(f"{stem}, cell {number}: {said}: {what}  {find_reason(stem, number, what)}", flush=True)
        if not options.json:
            print(f"{stem}: {count} mutants", flush=True)
        os._exit(0)
