"""How does a launch run in the interpreter: what it sets in triton.language, its arguments, errors and autotuning?"""

import inspect
import threading
import types

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, TensorHandle
from triton.runtime.jit import mangle_type

from tilelab.runtime.interpreter import formats, reading, reductions
from tilelab.runtime.interpreter.builder import BUILDER, SEMANTIC, Builder

# Launches of several threads take turns, because the builder and triton.language hold what belongs to one launch.
_TURN = threading.RLock()


class StaticAssertionError(InterpreterError):
    """A tl.static_assert that is false: this configuration does not compile."""


def _static_assert(condition, message="", **ignored):
    if not condition:
        raise StaticAssertionError(f"static_assert failed: {message}" if message else "static_assert failed.")


def bind(function):
    """Return a function of the language that needs no compiler."""

    def call(*args, **options):
        options.pop("_semantic", None)
        return function(*args, **options, _semantic=SEMANTIC)

    return call


def _bind_library(name, function):
    """Do the same for a function of libdevice, and name the types that it does not take."""
    bound = bind(function)

    def call(*args, **options):
        try:
            return bound(*args, **options)
        except KeyError as error:
            kinds = ", ".join(map(str, error.args[0]))
            raise TypeError(
                f"libdevice has no {name} of {kinds}: convert the values to float32 first."
            ) from None

    return call


_changes = []  # (object, name, value) of each attribute that a launch sets
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
            "range": reading.loop,
            "static_assert": _static_assert,
            "reduce": reductions.reduce,
            "associative_scan": reductions.associative_scan,
            "map_elementwise": reductions.map_elementwise,
        }
        for name, value in own.items():
            if hasattr(owner, name):
                done[id(owner), name] = owner, name, value
    done[id(tl.dtype), "to_ir"] = tl.dtype, "to_ir", lambda dtype, builder: dtype
    done[id(tl.tensor), "__index__"] = tl.tensor, "__index__", lambda number: int(number.handle.data.item())
    _changes.extend(done.values())
    for owner, name, value in _changes:
        original = getattr(owner, name, None)
        if inspect.isfunction(original) and inspect.ismodule(owner):
            reading.bound[original] = value
            reading.named[reading._name_of(original)] = value


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
    if isinstance(value, np.generic) and not isinstance(value, float):
        raise TypeError(f"a kernel takes no {type(value).__name__} of numpy: pass value.item().")
    if isinstance(value, (bool, int, float)):
        dtype = tl.str_to_ty(mangle_type(value), None)
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
    if not isinstance(grid, (tuple, list)):
        raise TypeError(f"a grid is a tuple, such as (4,), not {grid!r}.")
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
        except StaticAssertionError as error:
            raise StaticAssertionError(_describe(error, self.fn)) from None
        except Exception as error:
            if triton.knobs.compilation.front_end_debugging:
                raise
            raise InterpreterError(_describe(error, self.fn)) from error
    self._restore_args_dev(given, args, options, options_here)


def _run(self, *args, grid, warmup, **options):
    if warmup:
        return
    if unknown := options.keys() - {*self.arg_names, *CUDAOptions.__dataclass_fields__}:
        raise KeyError(f"{self.fn.__name__} has no parameter {', '.join(sorted(unknown))}.")
    if (code := self.fn.__code__).co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
        raise InterpreterError(
            f"{self.fn.__name__} takes *{name}, which Triton does not compile: pass a tuple."
        )
    debug = bool(options.get("debug") or self.kwargs.get("debug") or triton.knobs.runtime.debug)
    plain = vars(interpreter.InterpreterOptions()) | {"debug": debug, "sanitize_overflow": debug}
    plain["allowed_dot_input_precisions"] = CUDAOptions.allowed_dot_input_precisions
    try:
        function = self.rewrite()
    except ValueError as error:
        raise InterpreterError(f"{self.fn.__name__}: {error}") from None
    with _TURN:
        BUILDER.options = types.SimpleNamespace(**plain, num_warps=options.get("num_warps", 4))
        GridExecutor(function, self.arg_names, grid, self.pre_run_hooks)(*args, **options)


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
    configs = self.prune_configs(options)
    values = {**self.nargs, **options}
    seen = tuple(str(values.get(name)) for name in self.keys) + tuple(
        str(each.dtype) for each in values.values() if isinstance(each, torch.Tensor)
    )
    if len(self.configs) > 1 and seen not in self.cache:
        self.cache[seen] = None
        self.pre_hook(dict(values), reset_only=True)
    kept = {
        name: value.clone()
        for name, value in values.items()
        if len(configs) > 1 and isinstance(value, torch.Tensor)
    }
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
    global _tune
    from triton.language.extra import libdevice as generic
    from triton.language.extra.cuda import libdevice
    from triton.runtime.autotuner import Autotuner

    _tune = Autotuner.run
    interpreter._get_np_dtype = formats.numpy_type
    interpreter._validate_np_data_size = lambda data, dtype: (
        isinstance(dtype, tl.pointer_type) or data.itemsize <= formats.numpy_type(dtype).itemsize
    )
    TensorHandle.get_element_ty = lambda handle: handle.dtype.scalar.element_ty
    interpreter.InterpreterBuilder = Builder
    interpreter.interpreter_builder, interpreter.interpreter_semantic = BUILDER, SEMANTIC
    interpreter._patch_attr = lambda owner, name, member, _, scope: scope.set_attr(owner, name, bind(member))
    for name, member in list(vars(libdevice).items()):
        if tl.core.is_builtin(member):
            bound = _bind_library(name, member)
            setattr(libdevice, name, bound)
            if hasattr(generic, name):
                setattr(generic, name, bound)
    _find_changes()
    interpreter.FunctionRewriter.rewrite_ast = reading.rewrite
    GridExecutor.__call__ = _launch
    InterpretedFunction.run, InterpretedFunction.__call__ = _run, _call
    Autotuner.run = _take_first_configuration
