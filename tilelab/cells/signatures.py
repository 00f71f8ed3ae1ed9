"""Which kernels does a CUDA C++ source declare, and what do they take?

The source is read as a compiler reads it: macros are expanded, branches of #if that are not taken are left out, and
namespaces, templates and `extern "C"` are followed. Types that the text does not tell are asked of NVRTC.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

from tilelab.emulator.source import close_angle, find_closing, is_blank, split_at_commas, split_tokens
from tilelab.runtime import cuda

WITH_BRACKETS = {
    "__launch_bounds__", "__maxnreg__", "__cluster_dims__", "__block_size__", "__attribute__", "__align__",
    "alignas", "decltype", "__declspec",
}  # fmt: skip
QUALIFIERS = {
    "const", "volatile", "__restrict__", "__restrict", "__grid_constant__", "register", "struct", "enum", "typename",
    "union", "class",
}  # fmt: skip
WORDS_OF_TYPES = {
    "void", "bool", "char", "short", "int", "long", "unsigned", "signed", "float", "double", "auto",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A kernel of a source. `expression` names it in C++; `template` lists its template's parameters."""

    name: str
    expression: str
    parameters: tuple[tuple[str, str], ...]
    is_c: bool
    template: str | None
    cluster: int
    line: int


def name_types(template: Declaration, expression: str) -> tuple[tuple[str, str], ...]:
    """Return the parameters of a template's instance, such as "gemm<half, 64>", with its types for typename T."""
    given = split_at_commas(split_tokens(expression.partition("<")[2].rpartition(">")[0]))
    types = {}
    for declared, value in zip(split_at_commas(split_tokens(template.template or "")), given):
        words = [each for each in declared if each.strip()]
        if words[:1] in (["typename"], ["class"]) and len(words) > 1:
            types[words[1]] = "".join(value).strip()
    return tuple(
        (re.sub(r"\w+", lambda word: types.get(word[0], word[0]), kind), name)
        for kind, name in template.parameters
    )


def _evaluate(condition: str, macros: dict[str, tuple]) -> bool | None:
    """Return whether the condition of an #if holds; None where it says more than this reader knows."""
    text = re.sub(
        r"defined\s*(?:\(\s*(\w+)\s*\)|(\w+))", lambda m: str(int((m[1] or m[2]) in macros)), condition
    )
    text = "".join(_expand(split_tokens(text), macros))
    text = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)[uUlL]+\b", r"\1", text)
    text = re.sub(r"\b(?!0x)[A-Za-z_]\w*\b", "0", text)  # the preprocessor takes unknown names for 0
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text)
    if not re.fullmatch(r"[\s\d()<>=!+*/%&|x-]*(?:(?:and|or|not)[\s\d()<>=!+*/%&|xa-fA-F-]*)*", text):
        return None
    try:
        return bool(eval(text.strip(), {"__builtins__": {}}))
    except Exception:
        return None


def _expand(
    tokens: Sequence[str], macros: dict[str, tuple], hidden: frozenset[str] = frozenset()
) -> list[str]:
    """Return tokens with the macros replaced; those of `hidden` are being replaced already."""
    expanded: list[str] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        index += 1
        if token not in macros or token in hidden:
            expanded.append(token)
            continue
        names, body = macros[token]
        given: list[list[str]] = []
        if names is not None:
            opening = next((i for i in range(index, len(tokens)) if not is_blank(tokens[i])), len(tokens))
            if opening == len(tokens) or tokens[opening] != "(":
                expanded.append(token)
                continue
            closing = find_closing(tokens, opening)
            inside = list(tokens[opening + 1 : closing])
            given = split_at_commas(inside) if len(names) != 1 or names[0] == "..." else [inside]
            index = closing + 1
        values = dict(zip(names or (), given))
        if names and names[-1] == "...":
            rest = given[len(names) - 1 :]
            values["__VA_ARGS__"] = [each for part in rest for each in [",", *part]][1:]
        replaced = [part for each in split_tokens(body) for part in values.get(each, [each])]
        joined = re.sub(r"\s*##\s*", "", "".join(replaced))
        expanded += _expand(split_tokens(joined), macros, hidden | {token})
    return expanded


def preprocess(source: str, constants: Sequence[str] = (), arch: int = 900) -> list[str]:
    """Return the tokens of a source without its directives, with its macros replaced."""
    macros: dict[str, tuple] = {"__CUDACC__": (None, "1"), "__CUDACC_RTC__": (None, "1")}
    macros["__CUDA_ARCH__"] = (None, str(arch))
    for option in constants:
        if option.startswith("-D"):
            name, _, value = option[2:].partition("=")
            macros[name] = (None, value or "1")
    kept: list[str] = []
    waiting: list[str] = []  # tokens between directives
    taken: list[list[bool]] = []  # per #if: [this branch, an earlier branch]
    for token in split_tokens(source):
        directive = re.match(r"\s*#\s*(\w+)\s*(.*)", token.replace("\\\n", " "), re.DOTALL)
        if not directive:
            if all(branch for branch, _ in taken):
                waiting.append(token)
            else:
                waiting += ["\n"] * token.count("\n")
            continue
        kept += _expand(waiting, macros)
        waiting = ["\n"] * token.count("\n")
        word, rest = directive[1], re.sub(r"//.*|/\*.*?\*/", " ", directive[2], flags=re.DOTALL).strip()
        if word in ("if", "ifdef", "ifndef"):
            holds = _evaluate(rest, macros) if word == "if" else (rest in macros) == (word == "ifdef")
            taken.append([holds is not False, holds is True])
        elif word in ("elif", "else") and taken:
            holds = word == "else" or _evaluate(rest, macros) is not False
            taken[-1] = [holds and not taken[-1][1], taken[-1][1] or (holds and word == "elif")]
        elif word == "endif" and taken:
            taken.pop()
        elif all(branch for branch, _ in taken):
            defined = re.match(r"(\w+)(?:\(([^)]*)\))?\s*(.*)", rest, re.DOTALL)
            if word == "define" and defined:
                is_function = re.match(r"\w+\(", rest)
                names = [each.strip() for each in (defined[2] or "").split(",")] if is_function else None
                macros[defined[1]] = names, (defined[3] if is_function else rest[len(defined[1]) :].strip())
            elif word == "undef":
                macros.pop(rest, None)
    return kept + _expand(waiting, macros)


def _join(tokens: Sequence[str]) -> str:
    """Return the text of a type, with a space only between words."""
    text = re.sub(r"\s+", " ", " ".join(tokens))
    return re.sub(r"\s*(::|[*&<>\[\](),])\s*", r"\1", text).replace(",", ", ").strip()


def _read_parameter(tokens: list[str], number: int) -> tuple[str, str]:
    """Return the type and the name of a parameter."""
    kept: list[str] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        if token == "=":
            break
        if token in WITH_BRACKETS and token != "decltype" and tokens[index + 1 : index + 2] == ["("]:
            index = find_closing(tokens, index + 1)
        elif token == "[" and tokens[index + 1 : index + 2] == ["["]:
            index = find_closing(tokens, index)
        elif token not in QUALIFIERS:
            kept.append(token)
        index += 1
    star = ""
    if "(" in kept and "decltype" not in kept:  # int (*x)[4], void (*f)(int)
        opening = kept.index("(")
        inner = kept[opening + 1 : find_closing(kept, opening)]
        names = [each for each in inner if re.match(r"[A-Za-z_]", each)]
        return _join(kept[:opening]) + "*", names[-1] if names else f"argument {number}"
    if "[" in kept:
        kept, star = kept[: kept.index("[")], "*"
    has_name = (
        len(kept) > 1
        and re.match(r"[A-Za-z_]", kept[-1])
        and kept[-1] not in WORDS_OF_TYPES
        and kept[-2] != "::"
    )
    name = kept.pop() if has_name else f"argument {number}"
    return _join(kept) + star, name


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 1


def _read_declaration(tokens: list[str], scopes: list[str], is_c: bool, line: int) -> Declaration | None:
    """Return the kernel that a statement declares, up to its body or semicolon."""
    template, index, cluster = None, 0, 1
    while index < len(tokens):
        token = tokens[index]
        following = tokens[index + 1] if index + 1 < len(tokens) else ""
        if token == "template" and following == "<":
            end = close_angle(tokens, index + 1)
            template = _join(tokens[index + 2 : end])
            index = end
        elif token in WITH_BRACKETS and following == "(":
            end = find_closing(tokens, index + 1)
            if token == "__cluster_dims__":
                cluster = _number(_join(tokens[index + 2 : end]).split(",")[0])
            index = end
        elif re.match(r"[A-Za-z_]", token) and following in ("(", "<"):
            arguments, opening = "", index + 1
            if following == "<":
                end = close_angle(tokens, index + 1)
                arguments, opening = _join(tokens[index + 1 : end + 1]), end + 1
            if tokens[opening : opening + 1] != ["("] or token == "void":
                index = opening
                continue
            inside = tokens[opening + 1 : find_closing(tokens, opening)]
            parts = [part for part in split_at_commas(inside) if part and part != ["void"]]
            parameters = tuple(_read_parameter(part, i + 1) for i, part in enumerate(parts))
            expression = "::".join([*filter(None, scopes), token]) + arguments
            if arguments:
                template = None
            return Declaration(token, expression, parameters, is_c, template, cluster, line)
        index += 1
    return None


def find_declarations(source: str, constants: Sequence[str] = (), arch: int = 900) -> Iterator[Declaration]:
    """Return the kernels of a source in their order. A kernel that is declared before its definition comes twice."""
    line = 1
    tokens, lines = [], []
    for token in preprocess(source, constants, arch):
        if not is_blank(token):
            tokens.append(token)
            lines.append(line)
        line += token.count("\n")
    scopes: list[tuple[str, bool]] = []  # (name, extern "C") per open bracket
    start = index = 0
    while index < len(tokens):
        token = tokens[index]
        if token == "(":
            index = find_closing(tokens, index)
        elif token in ("{", ";", "}"):
            statement = tokens[start:index]
            is_c = any(c for _, c in scopes) or '"C"' in statement
            if "__global__" in statement and token != "}":
                names = [name for name, _ in scopes]
                first = start + statement.index("__global__")
                if found := _read_declaration(statement, names, is_c, lines[first]):
                    yield found
            if token == "{":
                if "namespace" in statement and "=" not in statement:
                    path = [
                        each
                        for each in statement[statement.index("namespace") + 1 :]
                        if re.match(r"\w|::", each)
                    ]
                    scopes.append(("".join(path), False))
                elif statement[-2:] == ["extern", '"C"']:
                    scopes.append(("", True))
                else:
                    index = find_closing(tokens, index)
            elif token == "}" and scopes:
                scopes.pop()
            start = index + 1
        index += 1


PROBE = """
namespace tiles_probe {
template <class T> struct Kind { static constexpr unsigned code = __is_enum(T) ? 3 : 0; };
template <class T> struct Kind<T*> { static constexpr unsigned code = 5; };
template <class T> struct Kind<T&> { static constexpr unsigned code = 6; };
#define TILES_KIND(T, CODE) template <> struct Kind<T> { static constexpr unsigned code = CODE; };
TILES_KIND(char, 1) TILES_KIND(signed char, 1) TILES_KIND(short, 1) TILES_KIND(int, 1) TILES_KIND(long, 1)
TILES_KIND(long long, 1) TILES_KIND(unsigned char, 2) TILES_KIND(unsigned short, 2) TILES_KIND(unsigned, 2)
TILES_KIND(unsigned long, 2) TILES_KIND(unsigned long long, 2) TILES_KIND(bool, 2) TILES_KIND(float, 4)
TILES_KIND(double, 4) TILES_KIND(wchar_t, 1) TILES_KIND(char16_t, 2) TILES_KIND(char32_t, 2)
template <class F> struct Signature;
template <class... P> struct Signature<void (*)(P...)> {
    unsigned data[2 * sizeof...(P) + 1] = {unsigned(sizeof...(P)), (unsigned(sizeof(P)) << 3 | Kind<P>::code)...};
};
}
extern "C" __device__ tiles_probe::Signature<decltype(&%s)> tiles_signature = {};
"""
KINDS = ("struct", "signed", "unsigned", "enum", "float", "pointer", "reference")


@functools.lru_cache(256)
def ask_types(source: str, expression: str, target: str, options: tuple[str, ...]) -> list[tuple[int, str]]:
    """Return the size in bytes and the kind (see KINDS) of each parameter of a kernel, as NVRTC sees them.

    Raises cuda.CompileError.
    """
    ptx = cuda.compile_ptx(f"\n{source}\n{PROBE % expression}", target, "cell", options)
    found = re.search(r"\.b(8|32) tiles_signature(?:\[\d+\])? *= *\{?([\d, ]+)", ptx)
    if not found:
        return []
    numbers = [int(each) for each in found[2].split(",")]
    if found[1] == "8":
        numbers += [0] * (-len(numbers) % 4)
        numbers = [int.from_bytes(numbers[i : i + 4], "little") for i in range(0, len(numbers), 4)]
    return [(word >> 3, KINDS[word & 7]) for word in numbers[1 : 1 + numbers[0]]]
