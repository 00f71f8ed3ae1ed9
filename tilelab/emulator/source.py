"""Which text does g++ get for a CUDA C++ source? Its lines keep their numbers.

Macros of language.h take most words of CUDA away. This module changes what macros cannot: dynamic shared memory, the
places where attributes may stand, and `extern "C"`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<mark>[^()\s\\]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"""|^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*|[A-Za-z_]\w*|\d(?:[\w.]|'\w)*|\s*?\n|\s+|::|->|.""",
    re.DOTALL | re.MULTILINE,
)

CONDITIONAL = re.compile(r"\s*#\s*(if|el|endif)")


def split_tokens(source: str) -> list[str]:
    """Return the tokens of CUDA C++; white space, comments and lines of the preprocessor are tokens too."""
    return [match[0] for match in TOKEN.finditer(source)]


def is_blank(token: str) -> bool:
    """Return whether a token is white space, a comment or a line of the preprocessor."""
    return token.isspace() or token.startswith(("//", "/*")) or token.lstrip(" \t").startswith("#")


def find_closing(tokens: Sequence[str], opening: int) -> int:
    """Return the index of the bracket that closes the one at `opening`; the last index where none does.

    Each branch of an #if begins with the brackets that are open before it, and the last branch counts.
    """
    depth, closed, before = 0, opening, []
    for index in range(opening, len(tokens)):
        token = tokens[index]
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
            closed = index
        elif "#" in token and (directive := CONDITIONAL.match(token)):
            if directive[1] == "if":
                before.append(depth)
            elif before and directive[1] == "el":
                depth = before[-1]
            elif before:
                before.pop()
        if not depth and not before:
            return closed
    return len(tokens) - 1


def close_angle(tokens: Sequence[str], opening: int) -> int:
    """Return the index of the > that closes the < at `opening`."""
    depth, index = 0, opening
    while index < len(tokens):
        if tokens[index] in ("(", "[", "{"):
            index = find_closing(tokens, index)
        depth += (tokens[index] == "<") - (tokens[index] == ">")
        if not depth:
            return index
        index += 1
    return len(tokens) - 1


def split_at_commas(tokens: Sequence[str]) -> list[list[str]]:
    """Return the parts of a list between its commas, those in brackets and in <...> aside."""
    parts: list[list[str]] = [[]]
    depth = angles = 0
    for index, token in enumerate(tokens):
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
        elif not depth and token == "<" and index and re.match(r"\w", tokens[index - 1]):
            angles += 1
        elif not depth and token == ">" and angles:
            angles -= 1
        if token == "," and not depth and not angles:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _take_attributes(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the tokens of a declaration without its alignments and storage classes, and the alignments."""
    kept, alignments = [], []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        after = next((i for i in range(index + 1, len(tokens)) if not is_blank(tokens[i])), index)
        if token in ("alignas", "__align__", "__attribute__") and tokens[after] == "(":
            end = find_closing(tokens, after)
            text = "".join(tokens[after + 1 : end])
            if token == "__attribute__":
                found = re.fullmatch(r"\s*\(\s*(?:__)?aligned(?:__)?\s*\((.*)\)\s*\)\s*", text, re.DOTALL)
                text = found[1] if found else ""
            if text:  # a number or a type
                text = text.strip() if re.fullmatch(r"[\s\w:]+", text) else f"({text})"
                alignments.append(f"emulator::alignment<{text}>()")
            index = end
        elif token not in ("__shared__", "extern", "static"):
            kept.append(token)
        index += 1
    return kept, alignments


def _dynamic(tokens: Sequence[str]) -> str:
    """Return the declaration of dynamic shared memory as a reference to the memory that the engine keeps."""
    kept, alignments = _take_attributes(tokens)
    declarators = split_at_commas(kept)
    first = declarators[0]
    bracket = next((i for i, token in enumerate(first) if token == "["), len(first))
    own = max((i for i in range(bracket) if re.match(r"[A-Za-z_]", first[i])), default=0)
    kind = "".join(first[:own])
    declarators[0] = first[own:]
    alignment = "".join(f", {each}" for each in alignments[-1:])
    said = []
    for declarator in declarators:
        name, _, rest = "".join(declarator).partition("[")
        lengths = "[1 << 20]" + rest.partition("]")[2] if rest else ""
        said.append(f"{kind} (&{name}){lengths} = emulator::dynamic_array<{kind}{lengths}{alignment}>()")
    return "; ".join(said)


def _static(tokens: Sequence[str]) -> str:
    """Return the declaration of a shared variable with its alignments in front, where g++ takes them."""
    kept, alignments = _take_attributes(tokens)
    return "".join(f"__align__({each}) " for each in alignments) + "__shared__ " + "".join(kept).lstrip()


def _change_shared(tokens: list[str]) -> list[str]:
    """Return the tokens with each declaration of shared memory as g++ takes it."""
    changed: list[str] = []
    start = 0  # of the current statement, in `changed`
    index = 0
    while index < len(tokens):
        token = tokens[index]
        if token == "__shared__":
            end = index
            while end < len(tokens) and tokens[end] not in (";", "=", "{"):
                end = find_closing(tokens, end) + 1 if tokens[end] in ("(", "[") else end + 1
            while start < len(changed) and is_blank(changed[start]):
                start += 1  # a directive keeps its end of the line
            words = [*changed[start:], *tokens[index:end]]
            code = [" " if is_blank(each) else each for each in words]
            change = _dynamic if "extern" in words else _static
            changed[start:] = [" ", change(code), "\n" * "".join(words).count("\n")]
            index = end
            continue
        changed.append(token)
        if token in (";", "{", "}", ":") or token.lstrip(" \t").startswith("#"):
            start = len(changed)
        index += 1
    return changed


def _change_c_linkage(tokens: list[str]) -> list[str]:
    """Return the tokens without extern "C", whose names would clash with those of the C library."""
    for index, token in enumerate(tokens):
        if token == "extern":
            following = [i for i in range(index + 1, len(tokens)) if not is_blank(tokens[i])][:2]
            if len(following) == 2 and tokens[following[0]] == '"C"':
                tokens[index] = "inline namespace" if tokens[following[1]] == "{" else ""
                tokens[following[0]] = "names_of_c" if tokens[index] else ""
    return tokens


def find_unset_constant(source: str, kernel: str) -> tuple[str, int] | None:
    """Return the name and the line of a __constant__ variable that `kernel` may read and that no initialiser sets."""
    if "__constant__" not in source:
        return None
    code: list[tuple[str, int]] = []  # the tokens and their lines
    line = 2
    for token in split_tokens(source):
        if not is_blank(token):
            code.append((token, line))
        set_line = re.match(r"\s*#\s*line\s+(\d+)", token)
        line = (int(set_line[1]) - 1 if set_line else line) + token.count("\n")
    tokens = [token for token, _ in code]
    hidden = [False] * len(tokens)  # in another kernel
    for index, token in enumerate(tokens):
        if token == "__global__":
            opening = next((i for i in range(index, len(tokens)) if tokens[i] in ("{", ";")), index)
            if kernel not in tokens[index:opening] and tokens[opening] == "{":
                end = find_closing(tokens, opening)
                hidden[opening:end] = [True] * (end - opening)
    for index, token in enumerate(tokens):
        if token == "__constant__":
            end = next((i for i in range(index, len(tokens)) if tokens[i] in (";", "=", "{", "(")), index)
            words = tokens[index:end]
            name = words[words.index("[") - 1 if "[" in words else -1]
            if tokens[end] == ";" and any(
                each == name and not hidden[i] and not index < i < end for i, each in enumerate(tokens)
            ):
                return name, code[index][1]
    return None


def change_for_gcc(source: str) -> str:
    """Return the text of a cell for g++."""
    tokens = [
        _change_directive(token) if token.lstrip(" \t").startswith("#") else token
        for token in split_tokens(source)
    ]
    return "".join(_change_shared(_change_c_linkage(tokens)))


def _change_directive(line: str) -> str:
    """Return a #define whose body declares shared memory or extern "C", changed as in the source."""
    match = re.match(r"\s*#\s*define\s+\w+(?:\([^)]*\))?", line)
    if not match or not re.search(r'__shared__|extern\s*"C"', line):
        return line
    body = "".join(_change_shared(_change_c_linkage(split_tokens(line[match.end() :].replace("\\\n", " ")))))
    return match[0] + body.replace("\n", " ")
