"""How does the interpreter read the Python text of a kernel?

Triton's compiler reads some statements in another way than Python does. `a and b` of two blocks works on each element,
the index of a loop has 32 bits, and a condition has one element. `rewrite` changes the text of a kernel accordingly.
"""

import ast
import inspect
import sys
import textwrap

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tilelab.runtime.interpreter import formats
from tilelab.runtime.interpreter.builder import SEMANTIC

HELPERS = "__tilelab_interpreter"  # the name by which rewritten kernels find this module
bound = {}  # what the interpreter calls in the place of a function of the language
named = {}  # the same by the names of the functions


def assign(value):
    """Return what Triton assigns: a number becomes a tensor."""
    if type(value) is tuple:
        return tuple(map(assign, value))
    return SEMANTIC.to_tensor(value, False)


def _is_block(value):
    return isinstance(value, tl.tensor) and value.type.is_block() and value.handle.data.size > 1


def truth(condition):
    """Return a condition; ValueError where it is a block."""
    if _is_block(condition):
        raise ValueError("a condition has one element, not a block: use tl.where, or reduce it first.")
    return condition


def negate(value):
    return SEMANTIC.not_(SEMANTIC.cast(value, tl.int1)) if isinstance(value, tl.tensor) else not value


def combine(is_and, *parts):
    """Return `a and b` or `a or b` as Triton reads them: constants decide at once, tensors are combined."""
    found = None
    for part in parts:
        value = part()
        if not isinstance(value, tl.tensor):
            if bool(value) != is_and:
                return value
            constant = value
        elif found is None:
            found = value
        else:
            found, value = SEMANTIC.broadcast_impl_value(found, value)
            found = (SEMANTIC.logical_and if is_and else SEMANTIC.logical_or)(found, value)
    return constant if found is None else found


def loop(*bounds, start=None, stop=None, end=None, step=None, arg1=None, arg2=None, **options):
    """Yield the index of range() or tl.range() as tensors."""
    bounds = [
        each
        for each in (*bounds, arg1 if start is None else start, arg2 if stop is None else stop)
        if each is not None
    ]
    bounds += [each for each in (end, step) if each is not None] if len(bounds) > 1 else []
    bounds = [SEMANTIC.to_tensor(each) for each in bounds]
    dtype = bounds[0].dtype
    for each in bounds:
        if not each.dtype.is_int():
            raise TypeError(f"the bounds of a loop are integers, not {each.dtype}.")
        dtype = SEMANTIC.integer_promote_impl(dtype, each.dtype)
    for index in range(*(int(each.handle.data.item()) for each in bounds)):
        yield tl.tensor(TensorHandle(np.array([index], formats.numpy_type(dtype)), dtype), dtype)


def extreme(is_minimum, *values, **options):
    """Return min() or max() of numbers or tensors."""
    if not any(isinstance(value, tl.tensor) for value in values):
        return (min if is_minimum else max)(*values)
    first, *rest = values
    for each in rest:
        first = (tl.minimum if is_minimum else tl.maximum)(first, each, **options)
    return first


# What Python has and Triton's compiler does not read.
REFUSED = {
    ast.Break: "break", ast.Continue: "continue", ast.Try: "try", ast.Raise: "raise", ast.Delete: "del",
    ast.Lambda: "lambda", ast.FunctionDef: "def in a kernel", ast.ClassDef: "class", ast.NamedExpr: ":=",
    ast.Dict: "a dictionary", ast.Set: "a set", ast.Global: "global", ast.Import: "import", ast.Yield: "yield",
}  # fmt: skip


class _Reader(ast.NodeTransformer):
    def __init__(self, names):
        self.names = names  # what the function finds outside of itself

    def visit(self, node):
        if word := REFUSED.get(type(node)):
            raise ValueError(f"Triton does not compile {word}: write the kernel without it.")
        return super().visit(node)

    def _helper(self, name):
        return ast.Attribute(ast.Name(HELPERS, ast.Load()), name, ast.Load())

    def _call(self, function, *arguments):
        return ast.Call(self._helper(function), list(arguments), [])

    def visit_Assign(self, node):
        self.generic_visit(node)
        if len(node.targets) > 1:
            raise ValueError("Triton does not compile a = b = …: assign one after the other.")
        node.value = self._call("assign", node.value)
        return node

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], self._call("assign", value))

    def visit_Compare(self, node):
        self.generic_visit(node)
        if len(node.ops) > 1:
            raise ValueError("Triton does not compile a chain of comparisons: write (a <= x) & (x < b).")
        return node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        no_arguments = ast.arguments([], [], None, [], [], None, [])
        parts = (ast.Lambda(no_arguments, each) for each in node.values)
        return self._call("combine", ast.Constant(isinstance(node.op, ast.And)), *parts)

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        return self._call("negate", node.operand) if isinstance(node.op, ast.Not) else node

    def _visit_condition(self, node):
        self.generic_visit(node)
        node.test = self._call("truth", node.test)
        return node

    visit_If = visit_While = visit_IfExp = _visit_condition

    def visit_For(self, node):
        self.generic_visit(node)
        call = node.iter
        if (
            isinstance(call, ast.Call)
            and getattr(call.func, "id", None) == "range"
            and "range" not in self.names
        ):
            call.func = self._helper("loop")
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, "id", None)
        if name in ("min", "max") and name not in self.names:
            options = node.keywords
            node = self._call("extreme", ast.Constant(name == "min"), *node.args)
            node.keywords = options
        return node

    def visit_Name(self, node):
        # A function of the language that was imported by name, as in `from triton.language import load`.
        value = self.names.get(node.id)
        if isinstance(node.ctx, ast.Load) and inspect.isfunction(value) and value in bound:
            return ast.Subscript(self._helper("named"), ast.Constant(_name_of(value)), ast.Load())
        return node


def _name_of(function):
    return f"{function.__module__}.{function.__name__}"


def rewrite(self):
    """Return the function that the interpreter runs in the place of a kernel, or the kernel where it has no source."""
    function = self.fn
    try:
        source = textwrap.dedent("".join(inspect.getsourcelines(function)[0]))
    except (OSError, TypeError):
        return function
    tree = ast.parse(source)
    (definition,) = tree.body
    free = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    names = {**function.__globals__, **free}
    arguments = definition.args
    for each in (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ):
        if each is not None:
            each.annotation = None
    local = {each.arg for each in arguments.args}
    local |= {
        node.id
        for node in ast.walk(definition)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    definition.decorator_list, definition.returns = [], None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
    definition.body = [
        _Reader({name: names[name] for name in names if name not in local}).visit(each)
        for each in definition.body
    ]
    if free:  # the variables of the function around it
        outer = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
        result = ast.Return(ast.Name(definition.name, ast.Load()))
        tree.body = [
            ast.FunctionDef(
                name="around", args=outer, body=[definition, result], decorator_list=[], type_params=[]
            )
        ]
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    function.__globals__[HELPERS] = sys.modules[__name__]
    found = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), function.__globals__, found)
    made = found["around"](**free) if free else found[definition.name]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    return made
