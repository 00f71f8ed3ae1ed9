"""What do reductions, scans and map_elementwise of Triton return in the interpreter?"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tilelab.runtime.interpreter import formats
from tilelab.runtime.interpreter.builder import SEMANTIC


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
