"""What a kernel of a reader does to memory: copies of its arguments between guards, and each access in the interpreter.

memory = LaunchMemory([x, out])
with memory.watch():
    prepare(*memory.tensors)()
fault = memory.find_fault(memory.tensors[-1] != spec(*memory.given))
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch

from tilelab.runtime.operands import address_range

# the least memory on either side of a tensor; beside a large tensor it is as large as the tensor
GUARD_BYTES = 1 << 18
# bytes beside an output; bytes in an output, and beside an input: NaN if floating
OUTSIDE, UNWRITTEN = (0x5A, 0xFF)


class AccessError(RuntimeError):
    """A kernel reads or writes memory that none of its tensors holds, or two programs disagree about an element."""


class _Guarded:
    """A tensor of the same layout inside of a larger buffer, which shows what else was written."""

    def __init__(self, tensor: torch.Tensor, is_output: bool, keep: bool):
        begin, end = address_range(tensor)
        self.outside, self.nbytes = OUTSIDE if is_output else UNWRITTEN, end - begin
        margin = GUARD_BYTES + -(-self.nbytes // 128) * 128
        if tensor.is_cpu:  # numpy uses one thread, which is quicker here
            memory = numpy.full(2 * margin + self.nbytes + 128, self.outside, dtype=numpy.uint8)
            memory = torch.from_numpy(memory[-memory.ctypes.data % 128 :][: 2 * margin + self.nbytes])
        else:
            memory = torch.full(
                (2 * margin + self.nbytes,), self.outside, dtype=torch.uint8, device=tensor.device
            )
        self.front, self.inside, self.behind = memory.split([margin, self.nbytes, margin])
        self.inside.fill_(UNWRITTEN)
        self.tensor = self.inside.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        if keep:
            self.tensor.copy_(tensor)
        self.is_output, self.has_gaps = is_output, self.nbytes > tensor.nbytes
        self.before = None if is_output and not self.has_gaps else self.inside.clone()

    def find_damage(self, name: str) -> str:
        for part, place in ((self.behind, 0), (self.front, -len(self.front))):
            if not _is_full(part, self.outside):
                first = int((part != self.outside).nonzero()[0]) + place
                where = (
                    f"{first:,} bytes past its end"
                    if first >= 0
                    else f"from {-first:,} bytes before its begin on"
                )
                return f"memory outside of {name} was overwritten, {where}"
        if self.before is None:
            return ""
        now = self.inside
        if self.is_output:
            now = now.clone()
            shape, strides, dtype = self.tensor.shape, self.tensor.stride(), self.tensor.dtype
            old, new = (each.view(dtype).as_strided(shape, strides) for each in (self.before, now))
            new.copy_(old)
        if torch.equal(now, self.before):
            return ""
        between = f"memory outside of {name} was overwritten, between its rows"
        return between if self.is_output else f"{name} was overwritten"


def _is_full(memory: torch.Tensor, value: int) -> bool:
    if not memory.is_cpu:
        return not bool((memory != value).any())
    whole = len(memory) // 8 * 8
    words = memory.numpy()[:whole].view(numpy.uint64)
    return bool((words == value * 0x0101010101010101).all() and (memory.numpy()[whole:] == value).all())


class LaunchMemory:
    """Copies of the arguments of a launch, each far from other memory. A kernel may write the last `outputs` of them.

    `tensors` are the arguments for the launch. `given` are copies of the others, from which the right result follows
    whatever the kernel does. Without `keep` the outputs hold NaN (or -1) instead of the values that were passed.
    """

    def __init__(self, arguments: Sequence[Any], outputs: int = 1, keep: bool = True):
        first = len(arguments) - outputs
        self.names = [f"input {place + 1}" for place in range(first)]
        self.names += ["out"] if outputs == 1 else [f"output {place + 1}" for place in range(outputs)]
        self.given = [
            value.clone() if isinstance(value, torch.Tensor) else value for value in arguments[:first]
        ]
        self.outputs, self._guarded = outputs, {}
        self.tensors = list(arguments)
        for place, value in enumerate(arguments):
            if isinstance(value, torch.Tensor) and value.numel():
                self._guarded[place] = _Guarded(value, place >= first, keep or place < first)
                self.tensors[place] = self._guarded[place].tensor
        self.writers: list[torch.Tensor] = []

    def find_damage(self) -> str:
        """Return "" or what was overwritten beside the outputs: an input, or memory outside of a tensor."""
        damage = (guarded.find_damage(self.names[place]) for place, guarded in self._guarded.items())
        return next(filter(None, damage), "")

    def find_fault(self, *wrong: torch.Tensor) -> str:
        """Return "" or what is wrong: elements of the outputs, as each of `wrong` marks them, or overwritten memory."""
        for marks in wrong:
            if count := int(marks.sum()):
                first = int(marks.flatten().nonzero()[0])
                return f"{count:,} of {marks.numel():,} elements are wrong, the first at index {first:,}"
        return self.find_damage()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Check each access of kernels that Triton's interpreter runs in this block.

        AccessError for one outside of the tensors of the launch, instead of the end of the process, and for two
        programs that write different values to one element of an output. Afterwards `writers[number]` holds for each
        element of an output the number of the program that wrote it in the last launch: -1 for none, -2 for several.
        """
        from triton.runtime import interpreter

        first = len(self.tensors) - self.outputs
        outputs = {
            name: self.tensors[place]
            for place, name in enumerate(self.names)
            if place >= first and place in self._guarded
        }
        memory, executor = _Watched(interpreter, outputs), interpreter.GridExecutor
        for place in self._guarded:
            memory.add_tensor(self.names[place], self.tensors[place])
        prepare_arguments = executor._init_args_hst

        def start(launched, arguments, options):
            found = prepare_arguments(launched, arguments, options)
            memory.start_launch(dict(zip(launched.arg_names, found[0])) | found[1])
            return found

        interpreter._interpreter, executor._init_args_hst = memory, start
        try:
            yield
        finally:
            interpreter._interpreter, executor._init_args_hst = memory.memory, prepare_arguments
            self.writers = [
                torch.from_numpy(memory.owners[name]).as_strided(tensor.shape, tensor.stride())
                for name, tensor in outputs.items()
            ]


class _Watched:
    """The memory of Triton's interpreter, which looks at each address before it uses it."""

    undefined = OUTSIDE  # in each byte that a mask leaves out of a load without `other`

    def __init__(self, interpreter, outputs: dict[str, torch.Tensor]):
        self.memory, self.builder, self.outputs = (
            interpreter._interpreter,
            interpreter.interpreter_builder,
            outputs,
        )
        self.ranges: dict[tuple[int, int], str] = {}
        self.start_launch({})

    def __getattr__(self, name: str):
        return getattr(self.memory, name)

    def add_tensor(self, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.is_cpu:
            self.ranges[address_range(tensor)] = name

    def start_launch(self, arguments: dict[str, Any]) -> None:
        for name, value in arguments.items():
            for each in value if isinstance(value, tuple) else [value]:
                self.add_tensor(name, getattr(each, "base", each))
        self.owners = {}
        for name, tensor in self.outputs.items():
            begin, end = address_range(tensor)
            self.owners[name] = numpy.full((end - begin) // tensor.itemsize, -1, dtype=numpy.int32)

    def load(self, addresses, mask, other, kind):
        self._require_inside("reads", addresses, mask, numpy.dtype(kind).itemsize)
        return self.memory.load(addresses, mask, other, kind)

    def store(self, addresses, values, mask):
        self._require_inside("writes", addresses, mask, values.itemsize)
        self._note_writer(addresses, values, mask)
        return self.memory.store(addresses, values, mask)

    def update(self, addresses, values, mask):
        """Store a part of an atomic operation, in which programs may take turns."""
        self._require_inside("changes", addresses, mask, values.itemsize)
        return self.memory.store(addresses, values, mask)

    def atomic_rmw(self, operation, addresses, values, mask, order):
        self._require_inside("changes", addresses, mask, values.itemsize)
        return self.memory.atomic_rmw(operation, addresses, values, mask, order)

    def atomic_cas(self, addresses, expected, values, order):
        self._require_inside("changes", addresses, numpy.ones(addresses.shape, bool), values.itemsize)
        return self.memory.atomic_cas(addresses, expected, values, order)

    def _require_inside(self, what: str, addresses, mask, itemsize: int) -> None:
        used = addresses[numpy.broadcast_to(mask, addresses.shape)].astype(numpy.int64)
        if not used.size:
            return
        low, high = int(used.min()), int(used.max()) + itemsize
        if any(begin <= low and high <= end for begin, end in self.ranges):
            return
        inside = numpy.zeros(used.shape, bool)
        for begin, end in self.ranges:
            inside |= (used >= begin) & (used + itemsize <= end)
        if inside.all():
            return
        wrong = int(used[~inside].min())
        (begin, end), name = min(
            self.ranges.items(), key=lambda item: max(item[0][0] - wrong, wrong + itemsize - item[0][1])
        )
        distance = (
            f"{begin - wrong:,} bytes before the begin"
            if wrong < begin
            else f"{wrong - end:,} bytes past the end"
        )
        count = int((~inside).sum())
        raise AccessError(
            f"program {self._describe_program()} {what} {count:,} element{'s' * (count > 1)} outside of its "
            f"tensors, the first of them {distance} of {name}: is a mask missing?"
        )

    def _describe_program(self) -> str:
        index, extents = self.builder.grid_idx, self.builder.grid_dim
        used = max((axis + 1 for axis in range(3) if extents[axis] > 1), default=1)
        return str(index[0]) if used == 1 else str(tuple(index[:used]))

    def _note_writer(self, addresses, values, mask) -> None:
        (x, y, z), (_, height, depth) = self.builder.grid_idx, self.builder.grid_dim
        program = (x * height + y) * depth + z
        mask = numpy.broadcast_to(mask, addresses.shape)
        for name, owner in self.owners.items():
            (begin, end), itemsize = address_range(self.outputs[name]), self.outputs[name].itemsize
            chosen = mask & (addresses >= begin) & (addresses < end)
            if not chosen.any():
                continue
            index = (addresses[chosen].astype(numpy.int64) - begin) // itemsize
            before = owner[index]
            others = (before != -1) & (before != program)
            if others.any() and values.itemsize == itemsize:
                bits = numpy.dtype(f"u{itemsize}")
                new = numpy.ascontiguousarray(numpy.broadcast_to(values, addresses.shape)[chosen]).view(bits)
                nothing = numpy.zeros(index.shape, bits)
                held = self.memory.load(addresses[chosen], numpy.ones(index.shape, bool), nothing, bits)
                if (differ := others & (held != new)).any():
                    raise AccessError(
                        f"programs {int(before[differ][0])} and {program} write different values to one element "
                        f"of {name}"
                    )
            owner[index] = numpy.where(others, -2, program)
