"""Which part of a .cu file runs on the GPU?

A file that people publish holds kernels, their launches with <<<...>>>, a main and the headers of the host. This module
keeps kernels, device functions, types, constants and macros, and leaves empty lines for the rest, so that NVRTC and the
emulator can compile the file as it is.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from tilelab.emulator.source import close_angle, find_closing, is_blank, split_tokens

HAS_HOST_CODE = re.compile(r"<<<|\bint\s+main\s*\(")
OF_HOST = re.compile(
    r"std::(vector|string|\w*stream|function|map|unordered_map|unique_ptr|shared_ptr|chrono|cout|cerr|thread|mutex|tuple"
    r"|random\w*|mt19937)|\b(cublas|cudnn|cusparse|cufft|nvml|nccl|torch::|at::|c10::|thrust::|cutlass::|cute::|cudaStream_t"
    r"|cudaError_t|cudaEvent_t|cudaDeviceProp|FILE|CUresult|CUcontext|PyObject|MPI_)"
)  # fmt: skip
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^">]+)[">]')
OF_DEVICE = re.compile(
    r"cuda_(fp16|bf16|fp8|pipeline|pipeline_primitives|awbarrier\w*|runtime|runtime_api)\.h|cooperative_groups(/\w+)?(\.h)?"
    r"|cuda/(?!std/chrono)[\w/]+|(math_constants|mma|vector_types|vector_functions|builtin_types|device_launch_parameters)\.h"
    r"|(ptx|tma|tma_1d|wgmma|elements)\.cuh"
)  # fmt: skip


def has_host_code(source: str) -> bool:
    """Return whether a source launches kernels or has a main."""
    return any(
        HAS_HOST_CODE.search(token) for token in [re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)]
    )


def find_launched_instances(source: str) -> dict[str, str]:
    """Return the instances of templates that a source launches with <<<...>>>, one per template.

    A template with several instances, or with arguments that only its caller knows, is left out.
    """
    device = keep_device_part(source)
    found: dict[str, set[str]] = {}
    for name, arguments in re.findall(r"\b(\w+)\s*<([^<>;{}()]+(?:<[^<>]*>)?[^<>;{}()]*)>\s*<<<", source):
        found.setdefault(name, set()).add(f"{name}<{' '.join(arguments.split())}>")
    known = set(re.findall(r"\w+", device)) | {
        "bool",
        "true",
        "false",
        "char",
        "double",
        "long",
        "short",
        "unsigned",
    }
    return {
        name: instance
        for name, (instance, *others) in found.items()
        if not others and all(word in known or word[0].isdigit() for word in re.findall(r"\w+", instance))
    }


def _empty(tokens: Sequence[str]) -> str:
    return "\n" * "".join(tokens).count("\n")


def _keeps(words: list[str], is_function: bool) -> bool:
    """Return whether a statement outside of functions is for the GPU."""
    text = re.sub(r"\s*::\s*", "::", " ".join(words))
    if "__global__" in words or "__device__" in words or "__constant__" in words or "__shared__" in words:
        return True
    if words[:1] == ["using"] and "=" not in words and words[1] not in ("namespace", "nvcuda", "cuda"):
        return False  # it names a function of the host
    if words[:1] == ["using"] or words[:1] == ["namespace"]:
        return not re.search(r"\bstd\b|\btorch\b|\bat\b|\bcute\b|\bcutlass\b", text)
    if is_function:
        return "constexpr" in words and not OF_HOST.search(text)
    kept = ("typedef", "using", "struct", "class", "union", "enum", "template", "static_assert", "extern")
    if not {*kept, "const", "constexpr", "{...}"} & set(words):
        return len(words) < 3  # a variable of the host, unless a macro without a semicolon
    return not OF_HOST.search(text) and "std" not in words[:3]


class _Reader:
    """Read a file and the headers beside it."""

    def __init__(self, folders: Sequence[pathlib.Path]):
        self.folders = folders
        self.seen: set[pathlib.Path] = set()
        self.macros: dict[str, str] = {}

    def directive(self, line: str, name: str, number: int, folder: pathlib.Path | None) -> str:
        """Return the text for a line of the preprocessor."""
        included = INCLUDE.match(line)
        if not included:
            if macro := re.match(r"\s*#\s*define\s+(\w+)", line):
                self.macros[macro[1]] = line
            return line
        folders = [folder, *self.folders] if folder and included[1] == '"' else self.folders
        own = next((each / included[2] for each in folders if (each / included[2]).is_file()), None)
        if own and not OF_DEVICE.fullmatch(included[2]):
            if own.resolve() in self.seen:
                return ""
            self.seen.add(own.resolve())
            text = self.read(own.read_text(errors="replace"), included[2], own.parent)
            return f'#line 1 "{included[2]}"\n{text}\n#line {number + 1} "{name}"'
        if included[2].startswith(("cublas", "torch/")):  # which include these numbers
            return "#include <cuda_fp8.h>"
        return line if OF_DEVICE.fullmatch(included[2]) else ""

    def read(self, source: str, name: str, folder: pathlib.Path | None, line: int = 1) -> str:
        """Return the part of a source for the GPU."""
        tokens, kept = split_tokens(source), []
        index = 0
        while index < len(tokens):
            start = index
            if is_blank(tokens[index]):
                token = tokens[index]
                if token.lstrip(" \t").startswith("#"):
                    kept.append(self.directive(token, name, line, folder))
                    if kept[-1] == "":
                        kept.append(_empty([token]))
                else:
                    kept.append(token)
                index += 1
            elif tokens[index] in ("}", ";"):
                kept.append(tokens[index])
                index += 1
            else:
                index, words, is_function, opens = self.find_end(tokens, index)
                part = tokens[start:index]
                if any("__device__" in self.macros.get(word, "") for word in words[:4]):
                    words = [*words, "__device__"]
                if opens or _keeps(words, is_function):
                    kept += part
                else:
                    kept.append(_empty(part))
            line += "".join(tokens[start:index]).count("\n")
        return "".join(kept)

    def find_end(self, tokens: list[str], index: int) -> tuple[int, list[str], bool, bool]:
        """Return the end of a statement, its words, whether it is a function, and whether it opens a namespace."""
        words: list[str] = []
        has_brackets = has_value = False
        head = 0  # where the words behind template<...> begin
        while index < len(tokens):
            token = tokens[index]
            if is_blank(token):
                index += 1
                continue
            if token == "<" and words[-1:] == ["template"]:
                index = close_angle(tokens, index) + 1
                head = len(words)
                continue
            if token == ";":
                is_function = (
                    has_brackets and not has_value and words[0] not in ("typedef", "using", "static_assert")
                )
                return index + 1, words, is_function, False
            if token == "{":
                if "namespace" in words or words[-2:] == ["extern", '"C"']:
                    return index + 1, words, False, True
                end = find_closing(tokens, index) + 1
                if (
                    has_value
                    or not has_brackets
                    or {"struct", "class", "union", "enum"} & set(words[head : head + 4])
                ):
                    words.append("{...}" if not OF_HOST.search("".join(tokens[index:end])) else "cublas")
                    index = end
                    continue
                return end, words, True, False
            if token == "}":
                return index, words, False, False
            if token in ("(", "["):
                end = find_closing(tokens, index) + 1
                if (
                    token == "(" and len(words) == 1 and words[0] in self.macros
                ):  # a macro without a semicolon
                    after = next((each for each in tokens[end:] if not is_blank(each)), "")
                    if re.match(r"[A-Za-z_#]", after):
                        is_device = re.search(r"__global__|__device__", self.macros[words[0]])
                        return end, [*words, "__device__"] if is_device else words, True, False
                has_brackets |= token == "(" and not (
                    words
                    and words[-1]
                    in ("__launch_bounds__", "alignas", "__align__", "__attribute__", "decltype")
                )
                words += [each for each in tokens[index:end] if not is_blank(each)]
                index = end
                continue
            has_value |= token == "=" and "operator" not in words[-2:]
            words.append(token)
            index += 1
        return index, words, False, False


def keep_device_part(source: str, folder: pathlib.Path | None = None, options: Sequence[str] = ()) -> str:
    """Return a .cu file without what is for the host. Headers in `folder` or an -I option are read in.

    The first line of a file is line 1, that of a cell (without a folder) is line 2.
    """
    folders = [pathlib.Path(option[2:]) for option in options if option.startswith("-I")]
    first = 1 if folder else 2
    kept = _Reader(folders).read(source, "cell", folder, first)
    header = "nvcc_std.cuh" if re.search(r"\bstd\s*::", kept) else "nvcc.cuh"
    return f'#include "{header}"\n#line {first} "cell"\n' + kept
