"""Rewrite inline PTX as C++ that g++ understands: each instruction becomes a call of instructions.h.

`rewrite` takes a preprocessed source. An asm statement becomes a lambda that is called at once. Its operands are copied
to registers (u64 variables r0, r1, ...), each instruction is one C++ statement under its own line number, and what the
asm writes is copied back. An instruction that the emulator does not know becomes a call that g++ refuses with our
sentence, unless the code is never used.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

# The tokens at which a search for asm statements must not look inside, and the marks of the preprocessor.
TOKEN = re.compile(
    r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\])*"|\b\d(?:[\w.]|\'\w)*|\'(?:\\.|[^\'\\])*\''
    r'|\b(?P<asm>asm|__asm__|__asm)\b|^\#\ (?P<line>\d+)\ "(?P<file>[^"]*)"(?P<flags>[ \d]*)$|\n',
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "0": "\0", "\n": ""}
FLOATS = {"f16": "ptx::f16", "bf16": "ptx::bf16", "f32": "float", "f64": "double"}
ELEMENTS = {name: f"emulator::{name.upper()}" for name in ("bf16", "f16", "tf32", "e4m3", "e5m2", "s8", "u8")}
SUMS = {name: f"emulator::{name.upper()}_SUMS" for name in ("f32", "f16", "s32")}
TYPE = re.compile(r"(pred|[bsu](?:8|16|32|64)|(?:f16|bf16|f32)(?:x2)?|f64|tf32|(?:e4m3|e5m2)(?:x2)?|b128)")


class Unknown(Exception):
    """The emulator does not know this; the text says what."""


@dataclass
class Operand:
    """One operand of an asm statement in C++."""

    constraint: str
    expression: str
    name: str
    is_output: bool


@dataclass
class Statement:
    """One PTX instruction: its line, guard (a register and whether it is negated), parts of its name, and operands."""

    line: int
    guard: tuple[str, bool] | None
    name: str
    operands: list[str]
    parts: list[str] = field(init=False)

    def __post_init__(self):
        self.parts = self.name.split(".")

    def has(self, *words: str) -> bool:
        return any(word in self.parts for word in words)

    def types(self) -> list[str]:
        return [part for part in self.parts[1:] if TYPE.fullmatch(part)]


def split(text: str, separator: str = ",") -> list[str]:
    """Return the parts of a text between separators that stand outside of brackets and strings."""
    parts, depth, begin = [], 0, 0
    for token in re.finditer(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|.', text, re.DOTALL):
        character = token[0]
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            parts.append(text[begin : token.start()])
            begin = token.end()
    parts.append(text[begin:])
    return [part.strip() for part in parts] if "".join(parts).strip() or len(parts) > 1 else []


# ---- PTX


def parse_block(text: str, lines: list[int]) -> Iterator[Statement | str]:
    """Return the statements of a PTX text, with "{" and "}" of scopes. `lines` holds the line of each character."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", lambda match: " " * len(match[0]), text, flags=re.DOTALL)
    at = 0
    while match := re.compile(r"\s*([{};]|[\w$%]+\s*:(?!:))").match(text, at):
        at = match.end()
        if match[1] != ";":
            yield match[1]
    while text[at:].strip():
        end = text.find(";", at)
        end = len(text) if end < 0 else end
        words = re.match(
            r"\s*(?:@(!?)\s*([%\w$]+)\s+)?(\.\w+(?:\s*\.\w+)+|[.\w:]+)(.*)", text[at:end], re.DOTALL
        )
        line = lines[at + len(text[at:]) - len(text[at:].lstrip())]
        if not words:
            raise Unknown(f"the emulator cannot read {text[at:end].strip()!r}")
        guard = (words[2], bool(words[1])) if words[2] else None
        yield Statement(line, guard, re.sub(r"\s", "", words[3]), split(words[4].strip()))
        at = end + 1
        while match := re.compile(r"\s*([{};]|[\w$%]+\s*:(?!:))").match(text, at):
            at = match.end()
            if match[1] != ";":
                yield match[1]


class Translator:
    """Writes one asm statement as C++."""

    def __init__(self, operands: list[Operand], number: int):
        self.operands, self.number = operands, number
        self.scopes: list[dict[str, str]] = [{}]
        self.declared: list[str] = []  # C++ names of the registers of all scopes
        self.predicates: set[str] = set()
        self.kept: set[int] = set()  # operands that an instruction uses in place
        self.fresh = map("t{}".format, itertools.count())

    # operands

    def read(self, text: str, kind: str = "") -> str:
        """Return C++ for the value of an operand as a u64. `kind` is the PTX type of a number."""
        text = text.strip()
        if text.startswith("!"):
            return f"({self.read(text[1:])} ^ 1)"
        if re.fullmatch(r"%\d+|%\[\w+\]", text):
            return f"r{self.find(text)}"
        if found := self.local(text):
            return found
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return f"u64(0x{match[1] or match[2]})"
        if re.fullmatch(r"-?\d+U?", text) or re.fullmatch(r"-?0[xX][0-9a-fA-F]+U?", text):
            return f"u64({text.rstrip('U')}{'' if text.startswith('-') else 'ull'})"
        if re.fullmatch(r"-?[\d.]+(?:[eE][-+]?\d+)?", text):
            return f"ptx::bits({FLOATS.get(kind.removesuffix('x2'), 'float')}({text}))"
        if re.fullmatch(r"[-+~*/()<>|&^\s\dxXa-fA-F]+", text):
            return f"u64({text})"
        if text.startswith("%"):
            return self.special(text)
        raise Unknown(f"the emulator does not know the operand `{text}`")

    def find(self, text: str) -> int:
        if match := re.fullmatch(r"%(\d+)", text):
            number = int(match[1])
        else:
            names = [operand.name for operand in self.operands]
            number = names.index(text[2:-1]) if text[2:-1] in names else len(names)
        if number >= len(self.operands):
            raise Unknown(f"the asm statement has no operand {text}")
        return number

    def local(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), "")

    def special(self, text: str) -> str:
        name = text.lstrip("%").lower()
        vectors = {
            "tid": "threadIdx.{}",
            "ntid": "blockDim.{}",
            "ctaid": "blockIdx.{}",
            "nctaid": "gridDim.{}",
        }
        in_cluster = {
            "clusterid": ("blockIdx.{0} / emulator::cluster_size()", "blockIdx.{0}"),
            "nclusterid": ("gridDim.{0} / emulator::cluster_size()", "gridDim.{0}"),
            "cluster_ctaid": ("emulator::rank_in_cluster()", "0"),
            "cluster_nctaid": ("emulator::cluster_size()", "1"),
        }
        lane = "emulator::lane_number()"
        others = {
            "laneid": lane,
            "warpid": "(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32",
            "nwarpid": "64",
            "warp_size": "32",
            "smid": "(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) % 132",
            "nsmid": "132",
            "gridid": "1",
            "cluster_ctarank": "emulator::rank_in_cluster()",
            "cluster_nctarank": "emulator::cluster_size()",
            "is_explicit_cluster": "emulator::cluster_size() > 1",
            "lanemask_eq": f"1u << {lane}",
            "lanemask_lt": f"(1u << {lane}) - 1",
            "lanemask_le": f"(2u << {lane}) - 1",
            "lanemask_gt": f"~((2u << {lane}) - 1)",
            "lanemask_ge": f"~((1u << {lane}) - 1)",
            **dict.fromkeys(
                ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo"), "ptx::ticks()"
            ),
        }
        stem, _, axis = name.partition(".")
        if axis in ("x", "y", "z") and stem in vectors:
            return f"u64({vectors[stem].format(axis)})"
        if axis in ("x", "y", "z") and stem in in_cluster:
            return f"u64({in_cluster[stem][axis != 'x'].format(axis)})"
        if name in others:
            return f"u64({others[name]})"
        raise Unknown(f"the emulator does not know the special register `%{name}`")

    def write(self, text: str, value: str) -> str:
        """Return C++ that assigns a value to a register; "_" takes none."""
        if text == "_":
            return f"(void)({value});"
        return f"{self.register(text)} = {value};"

    def register(self, text: str) -> str:
        found = f"r{self.find(text)}" if text.startswith("%") else self.local(text)
        if not found:
            raise Unknown(f"the emulator does not know the register `{text}`")
        return found

    def address(self, text: str) -> str:
        """Return C++ for the address in "[%0 + 16]" or in "[%0, {%1, %2}]"."""
        inner = split(text.strip()[1:-1])[0] if text.strip().startswith("[") else text
        base, sign, offset = (
            re.fullmatch(r"(.+?)\s*(?:([-+])\s*(%?[\w\[\]]+))?", inner.strip(), re.DOTALL).groups()
            if not re.fullmatch(r"-?\w+", inner.strip())
            else (inner, None, None)
        )
        return f"({self.read(base)} {sign} {self.read(offset)})" if sign else self.read(base)

    def corner(self, text: str) -> list[str]:
        parts = split(text.strip()[1:-1])
        return [f"int({self.read(each)})" for each in split(parts[1].strip()[1:-1])] if len(parts) > 1 else []

    def vector(self, text: str) -> list[str]:
        return split(text.strip()[1:-1]) if text.strip().startswith("{") else [text.strip()]

    def shared(self, statement: Statement, text: str) -> str:
        """Return C++ for the 32-bit address of an operand in shared memory, which may be a pointer."""
        address = self.address(text)
        is_shared = any(part.startswith("shared") for part in statement.parts)
        return f"u32({address})" if is_shared else f"ptx::shared({address})"

    def declare(self, statement: Statement) -> None:
        kind = statement.parts[-1]
        if "reg" not in statement.parts or statement.has("v2", "v4"):
            raise Unknown(f"the emulator does not know the declaration `{statement.name}` in inline PTX")
        for name in statement.operands:
            if match := re.fullmatch(r"([\w$%]+)<(\d+)>", name):
                names = [f"{match[1]}{number}" for number in range(int(match[2]))]
            else:
                names = [name]
            for each in names:
                own = f"l{len(self.declared)}_{re.sub(r'[^0-9A-Za-z_]', '_', each)}"
                self.scopes[-1][each] = own
                self.declared.append(own)
                if kind == "pred":
                    self.predicates.add(own)

    # statements

    def translate(self, statement: Statement) -> str:
        if statement.name.startswith("."):
            self.declare(statement)
            return ""
        code = self.instruction(statement)
        if statement.guard:
            register, negated = statement.guard
            code = f"if ({'!' if negated else ''}({self.read(register)} & 1)) {{ {code} }}"
        return code

    def instruction(self, statement: Statement) -> str:
        handler = HANDLERS.get(statement.parts[0])
        code = handler(self, statement) if handler else None
        if code is None:
            raise Unknown(f"the emulator does not know the instruction `{statement.name}`")
        return code


def what(statement: Statement) -> str:
    return f'"{statement.name}"'


# ---- arithmetic

BODIES = {
    "add": "a + b",
    "sub": "a - b",
    "div": "a / b",
    "rem": "a % b",
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
    "not": "~a",
    "min": "ptx::smaller(a, b)",
    "max": "ptx::larger(a, b)",
    "abs": "a < Own(0) ? Own(-a) : a",
    "neg": "-a",
    "fma": "ptx::fused(a, b, c)",
    "mad": "a * b + c",
    "mul": "a * b",
    "ex2": "exp2f(a)",
    "lg2": "log2f(a)",
    "rcp": "1 / a",
    "rsqrt": "1 / sqrt(a)",
    "sqrt": "sqrt(a)",
    "sin": "sinf(a)",
    "cos": "cosf(a)",
    "tanh": "tanhf(a)",
    "popc": "__builtin_popcountll(a)",
    "clz": "a ? __builtin_clzll(a) - (64 - 8 * sizeof(Own)) : 8 * sizeof(Own)",
    "brev": "ptx::reverse_bits(a, 8 * sizeof(Own))",
    "cnot": "a ? 0 : 1",
    "copysign": "Own(copysign(b, a))",
}


def cpp_type(kind: str, wraps: bool = False) -> str:
    """Return the C++ type of one element. With `wraps` it is unsigned, so that sums may overflow."""
    kind = kind.removesuffix("x2")
    if kind == "pred":
        return "bool"
    name = f"{'u' if wraps or kind[0] == 'b' else kind[0]}{kind[1:]}"
    return FLOATS.get(kind) or (name if name in ("u32", "u64") else f"ptx::{name}")


def arithmetic(translator: Translator, statement: Statement) -> str | None:
    operation, kinds = statement.parts[0], statement.types()
    if not kinds or statement.has("cc", "rm", "rp", "hi") and operation not in ("mul", "mad"):
        return None
    kind = kinds[-1]
    is_float = kind.removesuffix("x2") in FLOATS
    if is_float and statement.has("rz", "rm", "rp"):
        return None
    target, *sources = statement.operands
    if operation in ("mul", "mad") and not is_float:
        return multiply_integers(translator, statement, kind)
    wraps = operation in ("add", "sub", "not", "and", "or", "xor", "popc", "clz", "brev", "cnot")
    own = cpp_type(kind, wraps)
    body = BODIES[operation]
    if is_float and operation == "mad":
        body = BODIES["fma"]
    if operation == "abs" and is_float:
        body = "Own(fabs(a))"
    if operation in ("min", "max") and statement.has("NaN"):
        body = f"a != a ? a : b != b ? b : {body}"
    if statement.has("ftz"):
        inner = re.sub(r"\b([abc])\b(?!\()", r"ptx::flush(\1)", body)
        body = f"ptx::flush({inner})"
    body = f"Own({body})"
    if statement.has("sat"):
        body = f"ptx::saturate({body})"
    if statement.has("relu"):
        body = f"ptx::larger({body}, Own(0))"
    names = ", ".join(f"Own {name}" for name in "abc"[: len(sources)])
    count = 2 if kind.endswith("x2") else 1
    if kind.startswith("f16x2") or kind.startswith("bf16x2") or kind == "f32x2":
        count = 2
    values = ", ".join(translator.read(source, kind) for source in sources)
    return (
        f"{{ typedef {own} Own; "
        + translator.write(
            target, f"ptx::apply<{count}, Own>([]({names}) -> Own {{ return {body}; }}, {values})"
        )
        + " }"
    )


def multiply_integers(translator: Translator, statement: Statement, kind: str) -> str | None:
    target, *sources = statement.operands
    a, b, *c = (translator.read(source, kind) for source in sources)
    own = cpp_type(kind)
    width = int(kind[1:])
    if statement.has("wide"):
        product = f"u64(ptx::s64(ptx::as<{own}>({a})) * ptx::s64(ptx::as<{own}>({b})))"
        width *= 2
    elif statement.has("hi"):
        product = f"ptx::high_product<{own}>(ptx::as<{own}>({a}), ptx::as<{own}>({b}))"
    else:
        product = f"({a}) * ({b})"
    total = f"{product} + ({c[0]})" if c else product
    return translator.write(target, f"u{width}({total})" if width >= 32 else f"ptx::u16({total})")


def shift(translator: Translator, statement: Statement) -> str | None:
    kind = statement.types()[-1]
    target, value, by = statement.operands
    value, by, width = translator.read(value), translator.read(by), int(kind[1:])
    if statement.parts[0] == "shl":
        return translator.write(
            target, f"ptx::as<{cpp_type(kind, True)}>(ptx::shift_left({value}, u32({by}), {width}))"
        )
    own = cpp_type(kind)
    return translator.write(
        target, f"ptx::as<{cpp_type(kind, True)}>(ptx::shift_right(ptx::as<{own}>({value}), u32({by})))"
    )


def bits(translator: Translator, statement: Statement) -> str | None:
    operation, (target, *sources) = statement.parts[0], statement.operands
    values = [translator.read(source) for source in sources]
    kind = (statement.types() or ["b32"])[-1]
    if operation == "shf":
        low, high, by = values
        left, wraps = (str(statement.has(word)).lower() for word in ("l", "wrap"))
        return translator.write(target, f"ptx::funnel(u32({low}), u32({high}), u32({by}), {left}, {wraps})")
    if operation == "lop3":
        if len(statement.operands) != 5 or "|" in target:
            return None
        return translator.write(
            target, "ptx::logic3({})".format(", ".join(f"u32({value})" for value in values))
        )
    if operation == "prmt":
        if len(statement.parts) > 2:
            return None
        return translator.write(
            target, "ptx::permute({})".format(", ".join(f"u32({value})" for value in values))
        )
    if operation == "bfe":
        value, position, length = values
        own = cpp_type(kind)
        code = f"ptx::extract_bits<{own}>(ptx::as<{own}>({value}), u32({position}), u32({length}))"
        return translator.write(target, f"ptx::as<{cpp_type(kind, True)}>({code})")
    if operation == "bfi":
        source, into, position, length = values
        return translator.write(
            target, f"ptx::insert_bits({source}, {into}, u32({position}), u32({length}), {int(kind[1:])})"
        )
    if operation in ("dp4a",):
        a_type, b_type = statement.types()[:2]
        signs = ", ".join(str(each[0] == "s").lower() for each in (a_type, b_type))
        return translator.write(target, f"ptx::dot4({', '.join(values)}, {signs})")
    return None


COMPARISONS = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}


def compare(translator: Translator, statement: Statement) -> str | None:
    kind, operation = statement.types()[-1], statement.parts[1]
    own = cpp_type(kind)
    if operation in ("num", "nan"):
        test = "a == a && b == b" if operation == "num" else "a != a || b != b"
    elif operation in COMPARISONS:
        test = f"a {COMPARISONS[operation]} b"
        if operation == "ne" and kind in FLOATS:
            test = "a < b || a > b"
    elif operation[:-1] in COMPARISONS and operation.endswith("u"):
        test = f"a != a || b != b || a {COMPARISONS[operation[:-1]]} b"
    else:
        return None
    target, first, second, *rest = statement.operands
    code = (
        f"[]({own} a, {own} b) -> u64 {{ return {test}; }}"
        f"(ptx::as<{own}>({translator.read(first, kind)}), ptx::as<{own}>({translator.read(second, kind)}))"
    )
    combine = next((word for word in ("and", "or", "xor") if word in statement.parts[2:]), "")
    sign = {"and": "&", "or": "|", "xor": "^"}.get(combine, "")
    targets = target.split("|")
    found = next(translator.fresh)
    lines = [f"const u64 {found} = {code};"]
    values = [found, f"({found} ^ 1)"]
    for each, value in zip(targets, values):
        lines.append(
            translator.write(each.strip(), f"{value} {sign} {translator.read(rest[0])}" if sign else value)
        )
    return "{ " + " ".join(lines) + " }"


def select(translator: Translator, statement: Statement) -> str:
    target, first, second, predicate = statement.operands
    kind = statement.types()[-1]
    choice = f"({translator.read(predicate)} & 1) ? {translator.read(first, kind)} : {translator.read(second, kind)}"
    return translator.write(target, choice)


def move(translator: Translator, statement: Statement) -> str | None:
    target, source = statement.operands
    kind = (statement.types() or ["b32"])[-1]
    if kind == "b128":
        return None
    width = (
        1 if kind == "pred" else int(re.search(r"(\d+)(?:x2)?$", kind)[1]) * (2 if kind.endswith("x2") else 1)
    )
    if target.startswith("{"):
        parts = translator.vector(target)
        part = width // len(parts)
        value = next(translator.fresh)
        mask = (1 << part) - 1
        lines = [f"const u64 {value} = {translator.read(source)};"]
        lines += [
            translator.write(each, f"{value} >> {index * part} & {mask:#x}ull")
            for index, each in enumerate(parts)
        ]
        return "{ " + " ".join(lines) + " }"
    if source.startswith("{"):
        parts = translator.vector(source)
        part = width // len(parts)
        mask = (1 << part) - 1
        value = " | ".join(
            f"({translator.read(each)} & {mask:#x}ull) << {i * part}" for i, each in enumerate(parts)
        )
    else:
        value = translator.read(source, kind)
    unsigned = {8: "ptx::u8", 16: "ptx::u16", 32: "u32"}.get(width, "u64")
    return translator.write(target, value if kind == "pred" else f"{unsigned}({value})")


def convert(translator: Translator, statement: Statement) -> str | None:
    target, *sources = statement.operands
    to, source = statement.types()[:2]
    rounding = next((word[1] for word in ("rn", "rz", "rm", "rp", "rna") if word in statement.parts), "n")
    if statement.has("rna"):
        rounding = "a"
    integer_rounding = next((word[1] for word in ("rni", "rzi", "rmi", "rpi") if word in statement.parts), "")
    values = [translator.read(each, source) for each in sources]
    if statement.has("pack", "rs") or "scaled" in statement.name:
        return None
    if to == "tf32":
        return translator.write(target, f"ptx::to_tf32(ptx::as<float>({values[0]}), '{rounding}')")

    def narrow(value: str) -> str | None:
        """Return C++ for one float as bits of the target's element."""
        element = to.removesuffix("x2")
        if statement.has("relu"):
            value = f"ptx::larger({value}, 0.0f)"
        if element in ("e4m3", "e5m2") and rounding == "n" and statement.has("satfinite"):
            return f"u64(emulator::float8_bits(emulator::{element.upper()}, {value}))"
        if statement.has("satfinite"):
            return None
        if element == "bf16" and rounding == "z":
            return f"ptx::bits(ptx::truncate_to_bf16({value}))"
        if element in ("f16", "bf16") and rounding == "n":
            value = f"ptx::saturate({value})" if statement.has("sat") else value
            return f"ptx::bits(ptx::{element}({value}))"
        return None

    if to.endswith("x2"):
        part = 8 if to.startswith("e") else 16
        if source == "f32" and len(values) == 2:  # the first source becomes the upper half
            halves = [narrow(f"ptx::as<float>({value})") for value in values]
        elif source in ("f16x2", "bf16x2") and to.startswith("e"):
            element = source.removesuffix("x2")
            halves = [
                narrow(f"float(ptx::as<ptx::{element}>({values[0]}{shift}))") for shift in (" >> 16", "")
            ]
        elif source in ("e4m3x2", "e5m2x2"):
            element = source.removesuffix("x2").upper()
            halves = [
                narrow(f"emulator::element_value(emulator::{element}, u32({values[0]}{shift}))")
                for shift in (" >> 8", "")
            ]
        else:
            return None
        return None in halves and None or translator.write(target, f"{halves[0]} << {part} | {halves[1]}")
    if "x2" in source or to in ("e4m3", "e5m2"):
        return None
    own, given = cpp_type(to), cpp_type(source)
    value = f"ptx::as<{given}>({values[0]})"
    to_float, from_float = to in FLOATS, source in FLOATS
    if from_float and statement.has("ftz") and source == "f32":
        value = f"ptx::flush({value})"
    if to_float and from_float:
        if integer_rounding:
            value = f"float(ptx::round_to_integer({value}, '{integer_rounding}'))"
        if to in ("f16", "bf16"):
            code = narrow(f"float({value})")
            return code and translator.write(target, code)
        if statement.has("rz", "rm", "rp"):
            return None
        value = f"{own}({value})"
        if statement.has("relu"):
            value = f"ptx::larger({value}, {own}(0))"
        return translator.write(
            target, f"ptx::bits({f'ptx::saturate({value})' if statement.has('sat') else value})"
        )
    if to_float:
        if statement.has("rz", "rm", "rp"):
            return None
        return translator.write(
            target, f"ptx::bits({own}({'float' if to in ('f16', 'bf16') else own}({value})))"
        )
    if from_float:
        if not integer_rounding:
            return None
        return translator.write(target, f"ptx::bits(ptx::to_integer<{own}>({value}, '{integer_rounding}'))")
    value = f"ptx::clamp_integer<{own}>({value})" if statement.has("sat") else f"{own}({value})"
    return translator.write(target, f"ptx::bits({value})" if to[0] != "s" else f"u64({value})")


def to_address(translator: Translator, statement: Statement) -> str | None:
    target, source = statement.operands
    value = translator.read(source)
    if any(part.startswith("shared") for part in statement.parts):
        if statement.has("to"):
            return translator.write(target, f"u64(ptx::shared({value}))")
        return translator.write(target, f'u64(emulator::find_shared(u32({value}), 1, "cvta.shared"))')
    return translator.write(target, value)  # a global address is its own generic one


# ---- memory

ACCESS = re.compile(
    r"(?:ld|ldu|st)(?:\.(?:weak|relaxed|acquire|release|volatile|mmio|sys|gpu|cta|cluster|nc|ca|cg|cs|cv|lu|wb|wt"
    r"|const|global|shared|shared::cta|shared::cluster|L1::\w+|L2::\w+|L2::cache_hint))*(?:\.v([248]))?\.([bsuf])(\d+)"
)


def access(translator: Translator, statement: Statement) -> str | None:
    match = ACCESS.fullmatch(statement.name)
    if not match:
        return None
    count, bytes = int(match[1] or 1), int(match[3]) // 8
    if bytes > 8:
        return None
    is_load = statement.parts[0] != "st"
    address, values = statement.operands[:2][:: -1 if is_load else 1]
    registers = translator.vector(values)
    if len(registers) != count:
        raise Unknown(f"`{statement.name}` names {len(registers)} registers")
    shared = str(any(part.startswith("shared") for part in statement.parts)).lower()
    array = next(translator.fresh)
    is_signal = statement.has("volatile", "relaxed", "acquire", "release", "mmio")
    name = f"{'load' if is_load else 'store'}{'_signal' if is_signal else ''}"
    orders = [statement.has("acquire" if is_load else "release"), statement.has("cta")]
    given = [str(shared).lower(), translator.address(address), array, what(statement)]
    given += [str(each).lower() for each in orders] if is_signal else []
    call = f"{name}<{count}, {bytes}>({', '.join(given)});"
    if not is_load:
        given = ", ".join(translator.read(each, f"f{8 * bytes}") for each in registers)
        return f"{{ const u64 {array}[] = {{{given}}}; ptx::{call} }}"
    extend = (
        f"u64(ptx::as<ptx::s{8 * bytes}>({array}[{{}}]))"
        if match[2] == "s" and bytes < 4
        else f"{array}[{{}}]"
    )
    writes = " ".join(translator.write(each, extend.format(i)) for i, each in enumerate(registers))
    check = ""
    if statement.has("nc"):
        place = f"reinterpret_cast<const void*>({translator.address(address)})"
        check = f"emulator::require_constant({place}, {count * bytes}); "
    return f"{{ u64 {array}[{count}]; {check}ptx::{call} {writes} }}"


UPDATES = {
    "add": "a + b",
    "min": "ptx::smaller(a, b)",
    "max": "ptx::larger(a, b)",
    "and": "a & b",
    "or": "a | b",
    "xor": "a ^ b",
    "exch": "b",
    "inc": "a >= b ? 0 : a + 1",
    "dec": "a == 0 || a > b ? b : a - 1",
    "cas": "a == b ? c : a",
}


def update(translator: Translator, statement: Statement) -> str | None:
    operation = next((word for word in UPDATES if word in statement.parts[1:]), None)
    kinds = statement.types()
    if not operation or not kinds or statement.has("v2", "v4", "v8", "async") or kinds[-1] == "b128":
        return None
    kind, operands = kinds[-1], list(statement.operands)
    target = operands.pop(0) if statement.parts[0] == "atom" else "_"
    address, *values = operands
    pairs = 2 if kind.endswith("x2") else 1
    own = cpp_type(kind, operation == "add" and kind[0] in "su")
    bytes = 4 if pairs == 2 else int(re.search(r"\d+$", kind)[0]) // 8
    names = "abc"[: 3 if operation == "cas" else 2]
    given = ", ".join(["old", *(translator.read(value, kind) for value in values[: len(names) - 1])])
    shared = str(any(part.startswith("shared") for part in statement.parts)).lower()
    body = (
        f"ptx::apply<{pairs}, Own>([]({', '.join(f'Own {name}' for name in names)}) -> Own "
        f"{{ return Own({UPDATES[operation]}); }}, {given})"
    )
    relaxes = ("relaxed", "release") if statement.parts[0] == "atom" else ()
    orders = [statement.has("release", "acq_rel"), statement.has("cta"), not statement.has(*relaxes)]
    flags = ", ".join(str(each).lower() for each in orders)
    at = f"{shared}, {translator.address(address)}, {bytes}, {what(statement)}, {flags}"
    call = f"ptx::update({at}, [&](u64 old) {{ return {body}; }})"
    return f"{{ typedef {own} Own; {translator.write(target, call)} }}"


# ---- threads and barriers


def block_barrier(translator: Translator, statement: Statement) -> str | None:
    if statement.parts[0] == "barrier" and statement.parts[1] == "cluster":
        if statement.parts[2] == "arrive":
            return f"emulator::arrive_at_cluster({str(not statement.has('relaxed')).lower()});"
        return "emulator::wait_for_cluster();" if statement.parts[2] == "wait" else None
    if statement.has("warp"):
        return f'emulator::meet("bar.warp.sync", u32({translator.read(statement.operands[0])}), 0);'
    values = [f"u32({translator.read(each)})" for each in statement.operands]
    name, count = values[0] if values else "0", values[1] if len(values) > 1 else "0"
    if statement.has("sync"):
        return f'emulator::block_barrier({name}, {count}, "in {statement.name}");'
    if statement.has("arrive"):
        return f'emulator::arrive_at_block_barrier({name}, {count}, "in {statement.name}");'
    return None


def fence(translator: Translator, statement: Statement) -> str | None:
    if statement.has("mbarrier_init"):
        return "emulator::fence_barriers();"
    if statement.has("proxy"):
        if statement.has("alias"):
            return None
        if statement.has("async::generic", "tensormap::generic"):  # no instruction here changes a tensor map
            return ""
        parts = not statement.has("global"), not statement.has("shared::cta", "shared::cluster")
        return f"emulator::fence_views({', '.join(str(each).lower() for each in parts)});"
    return (
        f"emulator::fence_memory({str(statement.has('cta')).lower()});"
        if statement.has("sc", "acq_rel", "acquire", "release", "cta", "gl", "sys")
        else None
    )


def shuffle(translator: Translator, statement: Statement) -> str | None:
    kind = next((word for word in ("idx", "up", "down", "bfly") if word in statement.parts), "")
    target, value, by, limits, mask = statement.operands
    register, _, predicate = target.partition("|")
    inside = next(translator.fresh)
    call = (
        f"ptx::shuffle('{kind[0]}', {translator.read(value)}, {translator.read(by)}, {translator.read(limits)}, "
        f"{translator.read(mask)}, {inside})"
    )
    ending = translator.write(predicate.strip(), inside) if predicate else ""
    return f"{{ u64 {inside}; {translator.write(register.strip(), call)} {ending} }}"


def vote(translator: Translator, statement: Statement) -> str | None:
    if not statement.has("sync"):
        return None
    target, value, mask = statement.operands
    mask, value = translator.read(mask), translator.read(value)
    if statement.has("ballot"):
        return translator.write(target, f"ptx::ballot({mask}, {value})")
    if statement.has("any"):
        return translator.write(target, f"ptx::ballot({mask}, {value}) != 0")
    if statement.has("all"):
        return translator.write(target, f"ptx::ballot({mask}, {value} ^ 1) == 0")
    return None


def reduce(translator: Translator, statement: Statement) -> str | None:
    operation = next(
        (word for word in ("add", "min", "max", "and", "or", "xor") if word in statement.parts), None
    )
    kind = statement.types()[-1]
    if not operation or kind[0] == "f":
        return None
    target, value, mask = statement.operands
    own = cpp_type(kind, operation == "add")
    body = f"ptx::apply<1, Own>([](Own a, Own b) -> Own {{ return Own({UPDATES[operation]}); }}, a, b)"
    call = (
        f'ptx::reduce("redux.sync", {translator.read(mask)}, {translator.read(value)}, '
        f"[](u64 a, u64 b) {{ return {body}; }})"
    )
    return f"{{ typedef {own} Own; {translator.write(target, call)} }}"


def elect(translator: Translator, statement: Statement) -> str:
    target, mask = statement.operands
    register, _, predicate = target.partition("|")
    leader = next(translator.fresh)
    call = translator.write(predicate.strip(), f"ptx::elect({translator.read(mask)}, {leader})")
    return f"{{ u64 {leader}; {call} {translator.write(register.strip(), leader)} }}"


def mbarrier(translator: Translator, statement: Statement) -> str | None:
    operation, operands = statement.parts[1], list(statement.operands)
    if operation in ("try_wait", "test_wait"):
        target, address, value, *_ = operands
        barrier, acquires = translator.shared(statement, address), str(not statement.has("relaxed")).lower()
        call = f"emulator::try_phase({barrier}, u32({translator.read(value)}) & 1, {acquires})"
        return translator.write(target.partition("|")[0].strip(), call)
    if operation in ("arrive", "arrive_drop"):
        target = operands.pop(0) if not operands[0].startswith("[") else "_"
        barrier, count = (
            translator.shared(statement, operands[0]),
            f"u32({translator.read(operands[1])})" if len(operands) > 1 else "1",
        )
        drops = str(operation == "arrive_drop").lower()
        is_announcement = statement.has("expect_tx")
        values = f"{count}, 1" if is_announcement else f"0, {count}"
        releases = str(not statement.has("relaxed")).lower()
        return translator.write(target, f"emulator::arrive({barrier}, {values}, {drops}, {releases})")
    if operation not in ("init", "inval", "expect_tx", "complete_tx"):
        return None
    barrier = translator.shared(statement, operands[0])
    value = f"u32({translator.read(operands[1])})" if len(operands) > 1 else ""
    calls = {
        "init": f"emulator::init_barrier({barrier}, {value});",
        "inval": f"emulator::invalidate_barrier({barrier});",
        "expect_tx": f"emulator::expect_bytes({barrier}, long({value}));",
        "complete_tx": f"emulator::expect_bytes({barrier}, -long({value}));",
    }
    return calls[operation]


def map_rank(translator: Translator, statement: Statement) -> str | None:
    target, address, rank = statement.operands
    if any(part.startswith("shared") for part in statement.parts):
        return translator.write(
            target,
            f"u64(emulator::cluster_address(u32({translator.read(address)}), u32({translator.read(rank)})))",
        )
    inner = (
        f"emulator::cluster_address(ptx::shared({translator.read(address)}), u32({translator.read(rank)}))"
    )
    return translator.write(target, f'u64(emulator::find_shared({inner}, 1, "mapa"))')


# ---- copies


def store_async(translator: Translator, statement: Statement) -> str | None:
    address, values, barrier, *_ = statement.operands
    registers, kind = translator.vector(values), statement.types()[-1]
    bytes = int(kind[1:]) // 8
    array = next(translator.fresh)
    unsigned = "u32" if bytes == 4 else "u64"
    given = ", ".join(f"{unsigned}({translator.read(each)})" for each in registers)
    return (
        f"{{ const {unsigned} {array}[] = {{{given}}}; "
        f"emulator::send_value(u32({translator.address(address)}), {array}, "
        f"{bytes * len(registers)}, u32({translator.address(barrier)}), {what(statement)}); }}"
    )


def store(translator: Translator, statement: Statement) -> str | None:
    return (
        store_async(translator, statement) if statement.parts[1] == "async" else access(translator, statement)
    )


def copy(translator: Translator, statement: Statement) -> str | None:
    parts, operands = statement.parts, statement.operands
    reduces = parts[0] == "cp" and parts[1] == "reduce"
    if reduces and parts[2:4] != ["async", "bulk"] or not reduces and parts[1] != "async":
        return None
    if reduces or parts[2:3] == ["bulk"]:
        return copy_bulk(translator, statement, reduces)
    if parts[2:3] == ["commit_group"]:
        return "ptx::commit_copies();"
    if parts[2:3] == ["wait_group"]:
        return f"ptx::wait_for_copies({translator.read(operands[0])});"
    if parts[2:3] == ["wait_all"]:
        return "ptx::commit_copies(); ptx::wait_for_copies(0);"
    if parts[2:3] == ["mbarrier"]:
        counted = str(statement.has("noinc")).lower()  # else it adds an expected arrival first
        return f"ptx::arrive_after_copies({translator.shared(statement, operands[0])}, {counted});"
    if parts[2] not in ("ca", "cg"):
        return None
    tile, source, size, *rest = operands
    bytes = translator.read(size)
    from_source = bytes
    if rest and not (statement.has("L2::cache_hint") and len(rest) == 1):
        value = translator.read(rest[0])
        is_predicate = value.lstrip("(").split(" ")[0] in translator.predicates
        from_source = f"(({value}) & 1 ? 0 : {bytes})" if is_predicate else value
    check = (
        f'if ({bytes} != 16) emulator::fail("cp.async.cg copies 16 bytes, not %llu", {bytes});'
        if parts[2] == "cg"
        else ""
    )
    return f"{check} ptx::copy_async({translator.address(tile)}, {translator.address(source)}, {bytes}, {from_source});"


def copy_bulk(translator: Translator, statement: Statement, reduces: bool) -> str | None:
    parts, operands = statement.parts, list(statement.operands)
    if statement.has("commit_group"):
        return "emulator::commit_stores();"
    if statement.has("wait_group"):
        wait = "wait_for_reads" if statement.has("read") else "wait_for_stores"
        return f"emulator::{wait}(u32({translator.read(operands[0])}));"
    if statement.has("prefetch"):
        if "tensor" in parts:
            return ""
        source, size = translator.address(operands[0]), translator.read(operands[1])
        return f"emulator::prefetch_bytes(reinterpret_cast<const void*>({source}), u32({size}), {what(statement)});"
    if statement.has("tile::gather4", "tile::scatter4", "cta_group::2", "cp_mask") or any(
        part.startswith("im2col") for part in parts
    ):
        return None
    from_shared = statement.has("bulk_group")
    mask = ""
    if statement.has("L2::cache_hint"):
        operands.pop()
    if statement.has("multicast::cluster"):
        mask = f"int(u32({translator.read(operands.pop())}) & 0xffff)"
    dimensions = next((int(part[0]) for part in parts if re.fullmatch(r"[1-5]d", part)), 0)
    kind, operation = "emulator::LOAD", "add"
    if reduces:
        operation = next(
            (word for word in ("add", "min", "max", "and", "or", "xor", "inc", "dec") if word in parts), ""
        )
        if not operation:
            return None
        kind = "emulator::ADD"
    elif from_shared:
        kind = "emulator::STORE"
    name = what(statement)
    if "tensor" in parts:
        tile, box = (operands[1], operands[0]) if from_shared else (operands[0], operands[1])
        corner = translator.corner(box)
        if len(corner) != dimensions:
            raise Unknown(f"`{statement.name}` takes {dimensions} coordinates; it gets {len(corner)}")
        barrier = "0" if from_shared else f"u32({translator.address(operands[2])})"
        array = next(translator.fresh)
        return (
            f"{{ const int {array}[] = {{{', '.join(corner)}}}; emulator::move_box({kind}, "
            f"reinterpret_cast<const void*>({translator.address(box)}), {dimensions}, {array}, "
            f'u32({translator.address(tile)}), {barrier}, {mask or -1}, {name}, "{operation}"); }}'
        )
    if mask and not statement.has("global"):
        return None
    size = f"u32({translator.read(operands[2])})"
    if from_shared:
        added = f', "{statement.types()[-1]}", -1, "{operation}"' if reduces else ""
        return (
            f"emulator::move_bytes({kind}, reinterpret_cast<void*>({translator.address(operands[0])}), "
            f"u32({translator.address(operands[1])}), {size}, 0, {name}{added});"
        )
    barrier = f"u32({translator.address(operands[3])})"
    if reduces:
        return None
    if statement.has("global"):
        return (
            f"emulator::move_bytes({kind}, reinterpret_cast<void*>({translator.address(operands[1])}), "
            f'u32({translator.address(operands[0])}), {size}, {barrier}, {name}, "", {mask or -1});'
        )
    return (
        f"emulator::send_bytes(u32({translator.address(operands[0])}), u32({translator.address(operands[1])}), "
        f"{size}, {barrier}, {name});"
    )


# ---- matrices


def matrices(translator: Translator, statement: Statement) -> str | None:
    count = next((int(part[1]) for part in statement.parts if part in ("x1", "x2", "x4")), 0)
    if not count or not statement.has("m8n8") or not statement.has("b16"):
        return None
    transposed = str(statement.has("trans")).lower()
    is_load = statement.parts[0] == "ldmatrix"
    values, address = statement.operands if is_load else statement.operands[::-1]
    registers = translator.vector(values)
    array = next(translator.fresh)
    where = translator.shared(statement, address)
    if is_load:
        writes = " ".join(translator.write(each, f"{array}[{i}]") for i, each in enumerate(registers))
        return f"{{ u64 {array}[{count}]; ptx::load_matrices({transposed}, {where}, {array}); {writes} }}"
    given = ", ".join(translator.read(each) for each in registers)
    return f"{{ const u64 {array}[{count}] = {{{given}}}; ptx::store_matrices({transposed}, {where}, {array}); }}"


def transpose(translator: Translator, statement: Statement) -> str | None:
    target, source = statement.operands
    return translator.write(target, f"ptx::transpose_matrix({translator.read(source)})")


MMA = re.compile(
    r"mma\.sync\.aligned\.m16n8k\d+\.row\.col(?:\.satfinite)?\.(f32|f16|s32)\.(bf16|f16|tf32|e4m3|e5m2|s8|u8)"
    r"\.(bf16|f16|tf32|e4m3|e5m2|s8|u8)\.(f32|f16|s32)"
)


def multiply_tiles(translator: Translator, statement: Statement) -> str | None:
    match = MMA.fullmatch(statement.name.replace(".kind::f8f6f4", ""))
    if not match or ".satfinite" in statement.name:
        return None
    d_type, a_type, b_type, c_type = match.groups()
    d, a, b, c = map(translator.vector, statement.operands)
    depth = int(re.search(r"k(\d+)\.", statement.name)[1])
    per_register = {"tf32": 1, "bf16": 2, "f16": 2}.get(a_type, 4)
    if len(a) != 2 * len(b) or depth != len(a) * 2 * per_register or len(d) != (2 if d_type == "f16" else 4):
        raise Unknown(f"`{statement.name}` has another number of registers than its shape needs")
    names = [next(translator.fresh) for _ in range(4)]
    arrays = [
        f"const u64 {name}[] = {{{', '.join(map(translator.read, registers))}}};"
        for name, registers in zip(names[1:], (a, b, c))
    ]
    writes = " ".join(translator.write(each, f"{names[0]}[{i}]") for i, each in enumerate(d))
    return (
        f"{{ u64 {names[0]}[{len(d)}]; {' '.join(arrays)} ptx::multiply({ELEMENTS[a_type]}, {ELEMENTS[b_type]}, "
        f"{SUMS[c_type]}, {SUMS[d_type]}, {', '.join(names[i] for i in (0, 1, 2, 3))}); {writes} }}"
    )


WGMMA = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16|s32)\.(bf16|f16|tf32|e4m3|e5m2|s8|u8)"
    r"\.(bf16|f16|tf32|e4m3|e5m2|s8|u8)"
)


def multiply_group(translator: Translator, statement: Statement) -> str | None:
    if statement.parts[1] == "fence":
        return "emulator::fence_products();"
    if statement.parts[1] == "commit_group":
        return "emulator::commit_products();"
    if statement.parts[1] == "wait_group":
        return f"emulator::wait_for_products(u32({translator.read(statement.operands[0])}));"
    match = WGMMA.fullmatch(statement.name)
    if not match:
        return None
    width, depth, sums, a_type, b_type = match.groups()
    size = {"tf32": 4, "bf16": 2, "f16": 2}.get(a_type, 1)
    if int(depth) * size != 32 or int(width) % 8 or int(width) > 256:
        raise Unknown(f"`{statement.name}` has a shape that PTX does not have")
    d, a, b, scale, *rest = statement.operands
    flags = [f"int({translator.read(each)})" for each in rest]
    a_registers = translator.vector(a) if a.startswith("{") else []
    scales, transposes = flags[:2] or ["1", "1"], flags[2:]
    if a_registers:
        transposes = ["0", *transposes]
    transposes = [f"{each} != 0" for each in (transposes + ["0", "0"])[:2]]
    places = []
    for each in translator.vector(d):
        number = translator.find(each)  # d stays in the cell's own variables
        translator.kept.add(number)
        places.append(f"v{number}")
    count = int(width) // (4 if sums == "f16" else 2)
    types = f"{ELEMENTS[a_type]}, {ELEMENTS[b_type]}, {SUMS[sums]}"
    kind = f"{{{width}, {types}, {', '.join(scales)}, {', '.join(transposes)}}}"
    array = next(translator.fresh)
    if a_registers:
        values = ", ".join(f"u32({translator.read(each)})" for each in a_registers)
        before, given, a = f"const u32 {array}[] = {{{values}}}; ", array, "0"
    else:
        before, given, a = "", "nullptr", translator.read(a)
    return (
        f"{{ {before}ptx::multiply_group<{count}>({kind}, {given}, {a}, {translator.read(b)}, "
        f"{translator.read(scale)} & 1 || ({translator.read(scale)}) != 0, {', '.join(places)}); }}"
    )


def registers(translator: Translator, statement: Statement) -> str:
    return f"emulator::change_registers(u32({translator.read(statement.operands[0])}));"


def nothing(translator: Translator, statement: Statement) -> str:
    return ""


def policy(translator: Translator, statement: Statement) -> str:
    return translator.write(statement.operands[0], "u64(0)")


def branch(translator: Translator, statement: Statement) -> str:
    return f"goto label_{re.sub(r'[^0-9A-Za-z_]', '_', statement.operands[0])};"


def trap(translator: Translator, statement: Statement) -> str:
    return 'emulator::fail("executes trap");'


HANDLERS: dict[str, Callable[[Translator, Statement], str | None]] = {
    **dict.fromkeys(BODIES, arithmetic),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("shf", "lop3", "prmt", "bfe", "bfi", "dp4a"), bits),
    "setp": compare,
    "selp": select,
    "mov": move,
    "cvt": convert,
    "cvta": to_address,
    "ld": access,
    "ldu": access,
    "st": store,
    "atom": update,
    "red": update,
    "bar": block_barrier,
    "barrier": block_barrier,
    "fence": fence,
    "membar": fence,
    "shfl": shuffle,
    "vote": vote,
    "redux": reduce,
    "elect": elect,
    "mbarrier": mbarrier,
    "mapa": map_rank,
    "cp": copy,
    "ldmatrix": matrices,
    "stmatrix": matrices,
    "movmatrix": transpose,
    "mma": multiply_tiles,
    "wgmma": multiply_group,
    "setmaxnreg": registers,
    "createpolicy": policy,
    "bra": branch,
    "trap": trap,
    **dict.fromkeys(
        ("griddepcontrol", "prefetch", "prefetchu", "applypriority", "discard", "nanosleep", "pmevent"),
        nothing,
    ),
}

# ---- C++


def parse_operands(text: str, is_output: bool) -> list[Operand]:
    found = []
    for part in split(text):
        match = re.fullmatch(r'(?:\[(\w+)\]\s*)?((?:"[^"]*"\s*)+)\((.*)\)', part, re.DOTALL)
        constraint = re.sub(r'["\s]', "", match[2])
        found.append(Operand(constraint, match[3], match[1] or "", is_output))
    return found


def read_template(text: str, line: int) -> tuple[str, list[int]]:
    """Return the PTX of adjacent string literals, and the line of each of its characters."""
    ptx, lines, at = "", [], 0
    for match in re.finditer(
        r'R"(\w*)\((.*?)\)\1"|"((?:\\.|[^"\\])*)"|^\#\ (\d+)\ "[^\n]*$',
        text,
        re.DOTALL | re.MULTILINE | re.VERBOSE,
    ):
        line += text.count("\n", at, match.start())
        at = match.start()
        if match[4]:
            line = int(match[4]) - 1
            continue
        if match[2] is not None:
            ptx += match[2]
            lines += [line + match[2].count("\n", 0, i) for i in range(len(match[2]))]
        else:
            piece = re.sub(
                r"\\(.)", lambda escape: ESCAPES.get(escape[1], escape[1]), match[3], flags=re.DOTALL
            )
            ptx += piece
            lines += [line] * len(piece)
    return ptx, lines


def translate_asm(inner: str, line: int, file: str, number: int) -> str:
    """Return C++ for what stands between the brackets of an asm statement in a line of a file."""
    template, *sections = split(inner, ":")
    sections += [""] * 2
    operands = parse_operands(sections[0], True) + parse_operands(sections[1], False)
    ptx, lines = read_template(template, line)
    if sections[0] or sections[1] or len(split(inner, ":")) > 1:
        escaped = [(m.start(), m.end()) for m in re.finditer("%%", ptx)]
        for begin, _ in reversed(escaped):
            ptx, lines = ptx[:begin] + ptx[begin + 1 :], lines[:begin] + lines[begin + 1 :]
    for match in reversed(list(re.finditer(r"%=|\$?\{:uid\}", ptx))):
        ptx = ptx[: match.start()] + str(number) + ptx[match.end() :]
        lines = lines[: match.start()] + [line] * len(str(number)) + lines[match.end() :]
    translator, code = Translator(operands, number), []
    try:
        for statement in parse_block(ptx, lines):
            if statement == "{":
                translator.scopes.append({})
            elif statement == "}":
                if len(translator.scopes) > 1:
                    translator.scopes.pop()
            elif isinstance(statement, str):
                label = re.sub(r"[^0-9A-Za-z_]", "_", statement[:-1].strip())
                code.append(f"label_{label}:;")
            else:
                line = statement.line
                code.append(f'\n# {line} "{file}"\n{translator.translate(statement)}')
    except (Unknown, ValueError, IndexError, KeyError, AttributeError) as error:
        said = (
            str(error)
            if isinstance(error, Unknown)
            else f"the emulator cannot read `{statement.name}` with these operands"
        )
        quoted = f"line {line}: {said}".replace("\\", "\\\\").replace('"', '\\"')
        return f'[] {{ extern void refused_{number}() __attribute__((error("{quoted}"))); refused_{number}(); }}()'
    parameters = ", ".join(f"auto&& v{index}" for index in range(len(operands)))
    registers = "".join(
        f"u64 r{i} = ptx::get('{operand.constraint.strip('=+&')[:1] or 'r'}', v{i});"
        for i, operand in enumerate(operands)
        if i not in translator.kept
    )
    locals_ = "".join(f"u64 {name} = 0;" for name in translator.declared)
    results = "".join(
        f"ptx::put(v{i}, r{i});"
        for i, each in enumerate(operands)
        if each.is_output and i not in translator.kept
    )
    arguments = ", ".join(f"({operand.expression})" for operand in operands)
    body = f"{registers} {locals_} {' '.join(code)} {results}"
    body = re.sub(r"(?<![\w:.])(ptx::|emulator::|u32\b|u64\b)", r"::\1", body).replace(
        "::ptx::", "::inline_ptx::"
    )
    return f"[]({parameters}) {{ {body} }}({arguments})"


def rewrite(source: str) -> str:
    """Return a preprocessed source with C++ in the place of inline PTX. Headers of the system stay as they are."""
    parts, at, line, file, is_system, number = [], 0, 1, "", False, 0
    tokens = TOKEN.finditer(source)
    for token in tokens:
        if token["line"]:
            line, file, is_system = int(token["line"]) - 1, token["file"], "3" in token["flags"]
        elif token["asm"] and not is_system and token.start() >= at:
            opening = re.compile(r"\s*(?:(?:volatile|__volatile__|__volatile|inline|goto)\b\s*)*\(").match(
                source, token.end()
            )
            if not opening:
                continue
            end = find_closing(source, opening.end())
            text = source[opening.end() : end]
            number += 1
            parts += [
                source[at : token.start()],
                translate_asm(text, line + source.count("\n", token.start(), opening.end()), file, number),
            ]
            at = end + 1
            last = line + source.count("\n", token.start(), at)
            if marks := re.findall(r'^# (\d+) "[^\n]*\n([^#]*)\Z', source[token.start() : at], re.MULTILINE):
                last = int(marks[0][0]) + marks[0][1].count("\n")
            parts.append(f'\n# {last} "{file}"\n')
        else:
            line += token[0].count("\n")
    return "".join([*parts, source[at:]])


def find_closing(source: str, at: int) -> int:
    """Return where the bracket closes that was opened before `at`."""
    depth = 1
    for token in re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|[()]', re.DOTALL).finditer(source, at):
        depth += (token[0] == "(") - (token[0] == ")")
        if depth == 0:
            return token.start()
    return len(source)
