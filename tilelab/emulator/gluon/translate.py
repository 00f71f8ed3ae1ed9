"""Turns a Gluon function into a Python function that runs: its names lead to stand-ins instead of to Triton.

A name of Triton that has no stand-in is refused when the kernel calls it. A test compares the parameters of every
stand-in with Triton's.
"""

from __future__ import annotations

import ast
import builtins
import textwrap
import types
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, blackwell, hopper
from triton.language import core, math, standard
from triton.language.extra.cuda import gdc
from triton.runtime.jit import JITFunction

from tilelab.emulator.gluon import instructions, memory, values
from tilelab.emulator.gluon.program import GluonError, program, refuse
from tilelab.emulator.gluon.values import Value, as_value, unwrap

# ---- the stand-ins that are neither arithmetic nor an engine


def program_id(axis):
    return Value(program().index[_axis(axis)], gl.int32)


def num_programs(axis):
    return Value(program().grid[_axis(axis)], gl.int32)


def _axis(axis: Any) -> int:
    if unwrap(axis) not in (0, 1, 2):
        raise GluonError(f"axis {unwrap(axis)} of the grid; a grid has the axes 0, 1 and 2")
    return unwrap(axis)


def num_warps():
    return program().role.num_warps


def num_ctas():
    return 1


def static_range(arg1, arg2=None, step=None):
    begin, end = (0, arg1) if arg2 is None else (arg1, arg2)
    return range(int(unwrap(begin)), int(unwrap(end)), 1 if step is None else int(unwrap(step)))


def _range(*limits, **_):
    for each in range(*(int(unwrap(limit)) for limit in limits)):
        yield Value(each, gl.int32)


def static_assert(cond, msg=""):
    if not unwrap(cond):
        raise GluonError(f"static_assert fails: {unwrap(msg)}" if unwrap(msg) else "static_assert fails")


def device_assert(cond, msg="", mask=None):
    cond = as_value(cond)
    holds = cond if mask is None else cond.__or__(~as_value(mask))
    if not (bool(holds.data.all()) if holds.is_block else bool(holds)):
        raise GluonError(f"device_assert fails in program {program().index}: {unwrap(msg)}")


def device_print(prefix, *args, hex=False):
    shown = [f"{unwrap(prefix)}", *(str(each) for each in args)]
    if unwrap(hex):
        shown[1:] = [builtins.hex(int(each)) if not as_value(each).is_block else str(each) for each in args]
    print(f"program {program().index}:", *shown)


def static_print(*values, sep=" ", end="\n", file=None, flush=False):
    print(*(unwrap(each) for each in values), sep=sep, end=end)


def _same(input, values=None):
    return input


def to_tensor(x, bitwidth=None):
    return as_value(x) if isinstance(unwrap(x), bool | int | float) else x


def assume(cond):
    device_assert(cond, "the condition of gl.assume")


def _as_given(value):
    return unwrap(value)


_LANGUAGE = {
    name: getattr(values, name)
    for name in ("load", "store", "cast", "arange", "full", "zeros", "where", "maximum", "minimum", "fma", "fdiv",
                 "div_rn", "umulhi", "cdiv", "expand_dims", "broadcast", "reshape", "permute", "join", "split",
                 "gather", "histogram", "convert_layout", "set_auto_layout", "reduce", "associative_scan")
} | values.UNARY | values.ATOMICS | {
    "add": values.operation("add"), "sub": values.operation("sub"), "mul": values.operation("mul"),
    "sum": values.sum_of, "max": values.max_of, "min": values.min_of, "dot_fma": instructions.dot_fma,
    "allocate_shared_memory": memory.allocate_shared_memory, "warp_specialize": instructions.warp_specialize,
    "barrier": instructions.barrier, "thread_barrier": instructions.barrier, "to_tensor": to_tensor,
    "constexpr": _as_given, "static_range": static_range, "program_id": program_id, "num_programs": num_programs,
    "num_warps": num_warps, "num_ctas": num_ctas, "static_assert": static_assert, "device_assert": device_assert,
    "static_print": static_print, "device_print": device_print, "assume": assume, "multiple_of": _same,
    "max_contiguous": _same, "max_constancy": _same, "tensor": Value, "shared_memory_descriptor": memory.Tile,
}  # fmt: skip
_TMA = {
    name: getattr(instructions, name)
    for name in ("async_copy_global_to_shared", "async_copy_shared_to_global", "async_gather", "async_scatter",
                 "store_wait", "make_tensor_descriptor")
} | {
    "async_load": instructions.async_copy_global_to_shared, "async_store": instructions.async_copy_shared_to_global,
    "tensor_descriptor": instructions.Descriptor,
}  # fmt: skip
_MBARRIER = {name: getattr(instructions, name) for name in ("init", "invalidate", "expect", "arrive", "wait")}
_ASYNC_COPY = {
    "async_copy_global_to_shared": instructions.async_copy_from_pointers,
    "commit_group": instructions.commit_group,
    "wait_group": instructions.wait_group,
}
_CUDA = {"gdc_wait": instructions.gdc_wait, "gdc_launch_dependents": instructions.gdc_wait}
_NVIDIA = {
    name: getattr(instructions, name)
    for name in ("fence_async_shared", "warpgroup_mma_init", "warpgroup_mma", "warpgroup_mma_wait", "mma_v2",
                 "tcgen05_mma", "tcgen05_commit", "tcgen05_copy")
} | {
    "allocate_tensor_memory": memory.allocate_tensor_memory, "tensor_memory_descriptor": memory.Tile,
    "warpgroup_mma_accumulator": instructions.Pending,
}  # fmt: skip

TABLES = {
    module: table
    for modules, table in (
        ((gl, gl._core, gl._math, gl._standard, tl, core, math, standard), _LANGUAGE),
        ((hopper, blackwell, ampere), _NVIDIA),
        ((hopper.tma, blackwell.tma), _TMA),
        ((hopper.mbarrier, ampere.mbarrier), _MBARRIER),
        ((ampere.async_copy,), _ASYNC_COPY),
        ((gdc,), _CUDA),
    )
    for module in modules
}
_OF_PYTHON = {
    "range": _range,
    "print": device_print,
    "min": lambda a, b, *more: _OF_PYTHON["min"](_least(a, b), *more) if more else _least(a, b),
    "max": lambda a, b, *more: _OF_PYTHON["max"](_most(a, b), *more) if more else _most(a, b),
}


def _least(a: Any, b: Any) -> Any:
    return values.minimum(a, b) if isinstance(a, Value) or isinstance(b, Value) else min(a, b)


def _most(a: Any, b: Any) -> Any:
    return values.maximum(a, b) if isinstance(a, Value) or isinstance(b, Value) else max(a, b)


def _short(module: types.ModuleType) -> str:
    last = module.__name__.rpartition(".")[2]
    return last if last in ("tma", "mbarrier", "async_copy", "hopper", "blackwell", "ampere") else "gl"


def _stand_ins() -> dict[int, Any]:
    """Return {id of a function or class of Triton: its stand-in}, and give each its name for errors."""
    found, named = {}, set()
    for module, table in TABLES.items():
        for name, stand_in in table.items():
            if isinstance(stand_in, types.FunctionType) and id(stand_in) not in named:
                stand_in.__qualname__ = f"{_short(module)}.{name}"
                named.add(id(stand_in))
            if hasattr(module, name):
                found.setdefault(id(getattr(module, name)), stand_in)
    return found


class _Namespace:
    """A module as a kernel sees it."""

    def __init__(self, module: types.ModuleType, translator: Translator):
        self._module, self._translator = module, translator

    def __getattr__(self, name: str) -> Any:
        table = TABLES.get(self._module, {})
        value = table[name] if name in table else getattr(self._module, name)
        value = value if name in table else self._translator.resolve(value, f"{self._module.__name__}.{name}")
        setattr(self, name, value)
        return value


class Translator:
    """Translates the functions of one launch; `replaced` are functions that kernels call instead of their own."""

    _found = _stand_ins()

    def __init__(self, replaced: dict[str, Callable]):
        self.replaced, self.known = replaced, {}

    def resolve(self, value: Any, name: str) -> Any:
        """Return what a kernel finds under a name that leads to `value`."""
        if id(value) in self._found:
            return self._found[id(value)]
        if id(value) in self.known:
            return self.known[id(value)][1]
        kind = type(value).__name__
        if isinstance(value, types.ModuleType):
            made = _Namespace(value, self)
        elif kind == "constexpr":
            made = value.value
        elif hasattr(value, "__triton_aggregate__"):
            return self._aggregate(value)
        elif isinstance(value, JITFunction):
            return self.function(value)
        elif getattr(value, "__triton_builtin__", False) and value.__module__.startswith("triton."):
            made = _refusal(name)
        elif kind in ("Autotuner", "Heuristics"):
            made = _refusal(f"the call of {name}, which is a {kind}, from a kernel")
        else:
            return value
        self.known[id(value)] = (value, made)  # the value is kept, so its id stays its own
        return made

    def function(self, jit: Any) -> Callable:
        """Return the Python function of a Gluon function."""
        if id(jit) in self.known:
            return self.known[id(jit)][1]
        original = getattr(jit, "fn", jit)
        code, names = original.__code__, {"__builtins__": original.__globals__.get("__builtins__", builtins)}
        used = _names(code)
        if "value" in used and hasattr(jit, "raw_src"):
            code, names["__value_of"] = _unwrap_values(jit), unwrap_value
        defaults = original.__defaults__ and tuple(unwrap(each) for each in original.__defaults__)
        contents = dict(zip(original.__code__.co_freevars, original.__closure__ or ()))
        cells = tuple(types.CellType() for _ in code.co_freevars)
        made = types.FunctionType(code, names, original.__name__, defaults, cells)
        made.__kwdefaults__ = original.__kwdefaults__
        self.known[id(jit)] = (jit, made)
        for cell, name in zip(cells, code.co_freevars):
            cell.cell_contents = self.resolve(contents[name].cell_contents, name)
        for name in used:
            if name in self.replaced:
                names[name] = self.resolve(self.replaced[name], name)
            elif name in original.__globals__:
                names[name] = self.resolve(original.__globals__[name], name)
            elif name in _OF_PYTHON:
                names[name] = _OF_PYTHON[name]
        return made

    def _aggregate(self, aggregate: Any) -> type:
        """Return an aggregate as a plain class, whose fields may be tiles and mbarriers of the emulator."""
        made = type(aggregate.__name__, (), {})
        self.known[id(aggregate)] = (aggregate, made)
        for method in aggregate.hash_attrs:
            setattr(made, getattr(method, "fn", method).__name__, self.function(method))
        return made


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(
        *(_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    )


def _refusal(name: str) -> Callable:
    def call(*_, **__):
        refuse(name)

    return call


def unwrap_value(value: Any) -> Any:
    """Return `value.value`; in the emulator a constexpr is what it holds."""
    return value.value if hasattr(value, "value") else value


class _Unwrap(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:  # noqa: N802
        self.generic_visit(node)
        if node.attr != "value" or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(ast.Call(ast.Name("__value_of", ast.Load()), [node.value], []), node)


def _unwrap_values(jit: Any) -> types.CodeType:
    """Return the code of a function whose text asks constexprs for their `value`."""
    tree = ast.parse(textwrap.dedent("".join(jit.raw_src)))
    ast.increment_lineno(tree, jit.starting_line_number - 1)
    definition = _Unwrap().visit(tree.body[0])
    definition.decorator_list = []
    free = [ast.arg(name) for name in jit.fn.__code__.co_freevars]
    outer = ast.parse("def outer(): pass").body[0]
    outer.args.args, outer.body = free, [definition]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = compile(module, jit.fn.__code__.co_filename, "exec")
    for scope in ("outer", definition.name):
        code = next(
            each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == scope
        )
    return code
