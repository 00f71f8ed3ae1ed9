"""How does the interpreter run the Python text of a kernel, and what do reductions, scans and launches do?

Triton's compiler reads some statements in another way than Python does. `a and b` of two blocks works on each element,
the index of a loop has 32 bits, and a condition has one element. `_Reader` rewrites the text of a kernel accordingly.
"""

import ast
import inspect
import textwrap
import threading
import types

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, TensorHandle

from tilelab.runtime.interpreter import formats
from tilelab.runtime.interpreter.builder import BUILDER, SEMANTIC

HELPERS = "__tilelab_interpreter"  # the name by which rewritten kernels find this module

# Launches of several threads take turns, because the builder and triton.language hold what belongs to one launch.
_TURN = threading.RLock()


class StaticAssertionError(AssertionError):
    """A tl.static_assert that is false: this configuration does not compile."""


# ---- what the text of a kernel means


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


class _Reader(ast.NodeTransformer):
    def __init__(self, names):
        self.names = names  # what the function finds outside of itself

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
    function.__globals__[HELPERS] = _helpers
    found = {}
    exec(compile(tree, function.__code__.co_filename, "exec"), function.__globals__, found)
    made = found["around"](**free) if free else found[definition.name]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    made.__annotations__ = function.__annotations__
    return made


# ---- reductions and scans


def _tensor(data, dtype):
    shape = data.shape
    return tl.tensor(
        TensorHandle(data if shape else data.reshape(1), dtype),
        tl.block_type(dtype, list(shape)) if shape else dtype,
    )


def _combine(function, left, right, dtypes):
    """Return the arrays that a function of Triton makes of two tuples of arrays."""
    given = [_tensor(data, dtype) for data, dtype in zip((*left, *right), (*dtypes, *dtypes))]
    found = function(*given)
    found = found if isinstance(found, (tuple, list, tl.tuple)) else (found,)
    shape = left[0].shape
    made = (SEMANTIC.cast(SEMANTIC.to_tensor(each), dtype).handle.data for each, dtype in zip(found, dtypes))
    return tuple(
        np.broadcast_to(data.reshape(shape) if data.size == np.prod(shape) else data, shape) for data in made
    )


def _fast(function, dtype):
    """Return numpy's function for a known combination, where it rounds as the combination does."""
    if dtype in formats.HELD_IN_FLOAT32 or dtype == tl.float16:
        return None
    floating = dtype.is_floating()
    return {
        tl.standard._sum_combine: np.add,
        tl.standard._elementwise_max: np.fmax if floating else np.maximum,
        tl.standard._elementwise_min: np.fmin if floating else np.minimum,
    }.get(function)


def reduce(input, axis, combine_fn, keep_dims=False, **ignored):
    """Combine neighbours, then neighbouring results, and so on: as a GPU does, in an order of this kind."""
    many = isinstance(input, (tuple, list, tl.tuple))
    inputs = tuple(input) if many else (input,)
    dtypes, whole = [each.dtype for each in inputs], inputs[0].handle.data.shape
    axis, keep_dims = tl.core._unwrap_if_constexpr(axis), tl.core._unwrap_if_constexpr(keep_dims)
    data = [each.handle.data for each in inputs]
    if not inputs[0].type.is_block():
        raise ValueError("a reduction needs a block.")
    if axis is None:
        data = [each.reshape(-1) for each in data]
    elif not -len(whole) <= axis < len(whole):
        raise ValueError(f"a block of shape {list(whole)} has no axis {axis}.")
    at = 0 if axis is None else axis % len(whole)
    function = _fast(combine_fn, dtypes[0])
    argument = {
        tl.standard._argmax_combine_tie_break_left: (np.max, np.argmax),
        tl.standard._argmin_combine_tie_break_left: (np.min, np.argmin),
    }.get(combine_fn)
    if argument and len(data) == 2 and not (dtypes[0].is_floating() and np.isnan(data[0]).any()):
        index = np.expand_dims(argument[1](data[0], at), at)
        data = [np.take_along_axis(each, index, at).squeeze(at) for each in data]
    elif function:
        data = [function.reduce(data[0], at, dtype=data[0].dtype)]
    else:
        data = [np.moveaxis(each, at, 0) for each in data]
        while len(data[0]) > 1:
            data = list(
                _combine(combine_fn, [each[0::2] for each in data], [each[1::2] for each in data], dtypes)
            )
        data = [each[0] for each in data]
    if keep_dims:
        shape = [1 if axis is None or each == at else size for each, size in enumerate(whole)]
        data = [np.reshape(each, shape) for each in data]
    found = tuple(_tensor(np.asarray(each), dtype) for each, dtype in zip(data, dtypes))
    return found if many else found[0]


def _scan(data, function, dtypes):
    if len(data[0]) == 1:
        return data
    pairs = _scan(
        _combine(function, [each[0::2] for each in data], [each[1::2] for each in data], dtypes),
        function,
        dtypes,
    )
    before = [np.concatenate([each[:1], pair[:-1]]) for each, pair in zip(data, pairs)]
    even = _combine(function, before, [each[0::2] for each in data], dtypes)
    found = []
    for each, pair, rest in zip(data, pairs, even):
        out = np.empty_like(each)
        out[0::2], out[1::2], out[0] = rest, pair, each[0]
        found.append(out)
    return found


def associative_scan(input, axis, combine_fn, reverse=False, **ignored):
    many = isinstance(input, (tuple, list, tl.tuple))
    inputs = tuple(input) if many else (input,)
    dtypes = [each.dtype for each in inputs]
    axis, reverse = tl.core._unwrap_if_constexpr(axis), tl.core._unwrap_if_constexpr(reverse)
    rank = len(inputs[0].shape)
    if not -rank <= axis < rank:
        raise ValueError(f"a block of rank {rank} has no axis {axis}.")
    data = [np.moveaxis(each.handle.data, axis, 0) for each in inputs]
    data = [each[::-1] for each in data] if reverse else data
    known = {tl.standard._sum_combine: np.add, tl.standard._prod_combine: np.multiply}.get(combine_fn)
    if known and dtypes[0] not in formats.HELD_IN_FLOAT32:
        data = [known.accumulate(data[0], 0, dtype=data[0].dtype)]
    else:
        data = _scan(data, combine_fn, dtypes)
    data = [each[::-1] for each in data] if reverse else data
    found = tuple(
        _tensor(np.ascontiguousarray(np.moveaxis(each, 0, axis)), dtype) for each, dtype in zip(data, dtypes)
    )
    return found if many else found[0]


def map_elementwise(scalar_fn, *args, pack=1, **ignored):
    """Call a function of scalars for `pack` elements at a time."""
    args = SEMANTIC.broadcast_tensors(*map(SEMANTIC.to_tensor, args))
    flat = [each.handle.data.reshape(-1) for each in args]
    rows = []
    for first in range(0, flat[0].size, pack):
        given = [
            _tensor(data[at], each.dtype)
            for data, each in zip(flat, args)
            for at in range(first, first + pack)
        ]
        found = scalar_fn(*given)
        rows.append([SEMANTIC.to_tensor(each) for each in (found if isinstance(found, tuple) else (found,))])
    count = len(rows[0]) // pack
    shape, found = flat[0].size and args[0].handle.data.shape, []
    for at in range(count):
        parts = [row[at * pack + each].handle.data for row in rows for each in range(pack)]
        found.append(_tensor(np.concatenate(parts).reshape(shape), rows[0][at * pack].dtype))
    return tuple(found) if count > 1 else found[0]


# ---- what a launch changes in triton.language


def _static_assert(condition, message="", **ignored):
    if not condition:
        raise StaticAssertionError(f"static_assert failed: {message}" if message else "static_assert failed.")


def bind(function):
    """Return a function of the language that needs no compiler."""

    def call(*args, **options):
        options.pop("_semantic", None)
        return function(*args, **options, _semantic=SEMANTIC)

    return call


_changes = []  # (object, name, value) of each attribute that a launch sets
bound = {}  # what a launch puts in the place of a function of the language
named = {}
_depth = 0


def _find_changes():
    """Note once what the interpreter sets in triton.language."""
    probe = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(probe)
    done = {}
    for owner, name, _ in scope._changes:
        done[id(owner), name] = (
            owner,
            name,
            getattr(owner, name) if not isinstance(owner, type) else vars(owner)[name],
        )
    scope.restore()
    for owner in (tl, tl.core):
        own = {
            "range": loop,
            "static_assert": _static_assert,
            "reduce": reduce,
            "associative_scan": associative_scan,
            "map_elementwise": map_elementwise,
        }
        for name, value in own.items():
            if hasattr(owner, name):
                done[id(owner), name] = owner, name, value
    done[id(tl.tensor), "__index__"] = tl.tensor, "__index__", lambda number: int(number.handle.data.item())
    _changes.extend(done.values())
    for owner, name, value in _changes:
        original = getattr(owner, name, None)
        if inspect.isfunction(original) and inspect.ismodule(owner):
            bound[original] = value
            named[_name_of(original)] = value


class Launch:
    """Sets the functions of triton.language while a kernel runs."""

    def __enter__(self):
        global _depth
        self.kept = []
        if not _depth:
            for owner, name, value in _changes:
                self.kept.append((owner, name, vars(owner).get(name, _changes)))
                setattr(owner, name, value)
        _depth += 1

    def __exit__(self, *error):
        global _depth
        _depth -= 1
        for owner, name, value in reversed(self.kept):
            delattr(owner, name) if value is _changes else setattr(owner, name, value)


def _describe(error, function):
    """Return one sentence about an error in a kernel: where, and what."""
    while isinstance(error, InterpreterError) and error.__cause__:
        error = error.__cause__
    line, step = None, error.__traceback__
    while step:
        if step.tb_frame.f_code.co_filename == function.__code__.co_filename:
            line = step.tb_lineno
        step = step.tb_next
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (KeyError, RecursionError, MemoryError)):
        text = f"{type(error).__name__}: {text}"
    return f"{function.__name__}{f', line {line}' if line else ''}: {text}"


def convert_argument(value, annotation=None):
    """Return what a kernel gets for an argument: a number becomes a tensor of the type that a GPU would get."""
    if isinstance(value, (bool, float)):
        dtype = tl.int1 if isinstance(value, bool) else tl.float32
        data = np.array([value], formats.numpy_type(dtype))
        value = tl.tensor(TensorHandle(data, dtype), dtype)
    elif isinstance(value, tuple):
        return interpreter._tuple_create(value, map(convert_argument, value))
    else:
        value = _implicit_cvt(value)
    if annotation is not None and isinstance(value, tl.tensor) and not value.dtype.is_ptr():
        kind = getattr(tl, {"u1": "int1"}.get(annotation, _TYPE_NAMES.get(annotation, annotation)), None)
        if isinstance(kind, tl.dtype):
            value = SEMANTIC.cast(value, kind)
    return value


_implicit_cvt = interpreter._implicit_cvt
_TYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_TYPE_NAMES |= {
    f"{sign}{bits}": f"{name}{bits}"
    for sign, name in (("i", "int"), ("u", "uint"))
    for bits in (8, 16, 32, 64)
}


def _launch(self, *given, **options):
    from triton.runtime.jit import _normalize_ty

    options = {name: value for name, value in options.items() if name in self.arg_names}
    args, options_here = self._init_args_hst(given, options)
    for hook in self.pre_run_hooks:
        hook(*args, **options_here)
    values = inspect.getcallargs(self.fn, *args, **options_here)
    grid = self.grid(dict(values)) if callable(self.grid) else self.grid
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    if len(grid) > 3:
        raise ValueError(f"a grid has at most 3 dimensions, not {len(grid)}.")
    nx, ny, nz = (*map(int, grid), 1, 1)[:3] if len(grid) < 3 else map(int, grid)
    kinds = {name: _normalize_ty(kind) for name, kind in self.fn.__annotations__.items()}
    with np.errstate(all="ignore"), Launch():
        try:
            values = {
                name: value
                if "constexpr" in kinds.get(name, "")
                else convert_argument(value, kinds.get(name))
                for name, value in values.items()
            }
            BUILDER.set_grid_dim(nx, ny, nz)
            for x in range(nx):
                for y in range(ny):
                    for z in range(nz):
                        BUILDER.set_grid_idx(x, y, z)
                        self.fn(**values)
        except StaticAssertionError:
            raise
        except Exception as error:
            if triton.knobs.compilation.front_end_debugging:
                raise
            raise InterpreterError(_describe(error, self.fn)) from error
    self._restore_args_dev(given, args, options, options_here)


def _run(self, *args, grid, warmup, **options):
    if warmup:
        return
    debug = bool(options.get("debug") or self.kwargs.get("debug") or triton.knobs.runtime.debug)
    plain = vars(interpreter.InterpreterOptions()) | {"debug": debug, "sanitize_overflow": debug}
    with _TURN:
        BUILDER.options = types.SimpleNamespace(**plain, num_warps=options.get("num_warps", 4))
        GridExecutor(self.rewrite(), self.arg_names, grid, self.pre_run_hooks)(*args, **options)


def _call(self, *args, **options):
    return self.rewrite()(*args, **options)


def is_interpreted(function):
    """Return whether a function below decorators such as @triton.autotune runs in the interpreter."""
    while not isinstance(function, InterpretedFunction) and hasattr(function, "fn"):
        function = function.fn
    return isinstance(function, InterpretedFunction)


def _take_first_configuration(self, *args, **options):
    """Run an autotuned kernel with the first configuration that fits; there are no times to choose by."""
    if not is_interpreted(self.fn):
        return _tune(self, *args, **options)
    self.nargs = dict(zip(self.arg_names, args))
    configs = self.configs
    if self.early_config_prune:
        configs = self.early_config_prune(configs, self.nargs, **options)
    values = {**self.nargs, **options}
    kept = {
        name: value.clone()
        for name, value in values.items()
        if len(configs) > 1 and isinstance(value, torch.Tensor)
    }
    seen = tuple(str(values.get(name)) for name in self.keys) + tuple(
        str(each.dtype) for each in kept.values()
    )
    if len(configs) > 1 and seen not in self.cache:
        self.cache[seen] = None
        self.pre_hook(dict(values), reset_only=True)
    for config in configs:
        chosen = config.all_kwargs()
        if clash := options.keys() & config.kwargs.keys():
            raise ValueError(f"{', '.join(clash)}: autotune sets what the launch passes too.")
        try:
            if config.pre_hook is not None:
                config.pre_hook({**values, **chosen})
            self.fn.run(*args, **options, **chosen)
        except StaticAssertionError as error:
            failed = error
            for name, value in kept.items():
                values[name].copy_(value)
            continue
        self.best_config, self.nargs = config, None
        return
    raise failed


def mend() -> None:
    global _tune, _helpers
    from triton.language.extra import libdevice as generic
    from triton.language.extra.cuda import libdevice
    from triton.runtime.autotuner import Autotuner

    from tilelab.runtime.interpreter import builder, language

    _helpers, _tune = language, Autotuner.run
    interpreter._get_np_dtype = formats.numpy_type
    interpreter._validate_np_data_size = lambda data, dtype: (
        isinstance(dtype, tl.pointer_type) or data.itemsize <= formats.numpy_type(dtype).itemsize
    )
    TensorHandle.get_element_ty = lambda handle: handle.dtype.scalar.element_ty
    interpreter.InterpreterBuilder = builder.Builder
    interpreter.interpreter_builder, interpreter.interpreter_semantic = BUILDER, SEMANTIC
    interpreter._patch_attr = lambda owner, name, member, _, scope: scope.set_attr(owner, name, bind(member))
    for name, member in list(vars(libdevice).items()):
        if tl.core.is_builtin(member):
            setattr(libdevice, name, bind(member))
            if hasattr(generic, name):
                setattr(generic, name, bind(member))
    _find_changes()
    interpreter.FunctionRewriter.rewrite_ast = rewrite
    GridExecutor.__call__ = _launch
    InterpretedFunction.run, InterpretedFunction.__call__ = _run, _call
    Autotuner.run = _take_first_configuration
