"""One-dimensional bulk copies: out = x and out = a x + y, from 16-byte loads to a ring that TMA fills and empties.

The kernels are in bulk_copy.cu. Source: PTX ISA, "cp.async.bulk", "mbarrier", "Async proxy".
"""

from __future__ import annotations

import ctypes
import pathlib
from dataclasses import dataclass

import torch

from tilelab import build, cuda, device

SOURCE = pathlib.Path(__file__).with_name("bulk_copy.cu")
KERNELS = ("loads", "cp_async", "bulk", "bulk_in_order")
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
UNIT = 16  # bytes; a bulk copy takes whole ones, from and to multiples of it
BREAKS = ("nothing", "expect_tx", "phase", "wait_read", "proxy_fence")


@dataclass(frozen=True)
class BulkConfig:
    """How a kernel cuts its arrays: `chunk` bytes of each at a time, `stages` of them in a ring in shared memory.

    A CTA of `threads` takes `span` chunks that lie side by side; with `span` 0 it is persistent, `ctas` of them an SM
    stay to the end. `leaves_out` (one of BREAKS) makes a kernel that is wrong on purpose.
    """

    kernel: str
    threads: int
    chunk: int
    stages: int = 1
    span: int = 1
    ctas: int = 1
    leaves_out: str = "nothing"

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(f"the kernels are {', '.join(KERNELS)}; here it is {self.kernel!r}.")
        if self.leaves_out not in BREAKS:
            raise ValueError(f"leaves_out is one of {', '.join(BREAKS)}; here it is {self.leaves_out!r}.")
        for name, least, unit in (("threads", 32, 32), ("chunk", UNIT, UNIT), ("stages", 1, 1), ("span", 0, 1),
                                  ("ctas", 1, 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least or value % unit:
                raise ValueError(f"{name} must be a whole number from {least}, a multiple of {unit}; "
                                 f"here it is {value!r}.")
        if self.threads > 1024:
            raise ValueError(f"a block has at most 1,024 threads; here are {self.threads}.")
        if self.kernel == "loads" and (self.stages, self.span) != (1, 1):
            raise ValueError("loads has no ring: its stages and span are 1.")
        if self.kernel == "bulk_in_order" and self.span:
            raise ValueError("bulk_in_order is persistent: its span is 0.")
        if self.kernel != "bulk" and self.leaves_out != "nothing":
            raise ValueError(f"only bulk can leave something out; here {self.kernel} leaves out {self.leaves_out}.")
        if self.chunk >= 1 << 19:  # an mbarrier counts fewer than 2^20 bytes, and there are two arrays
            raise ValueError(f"a chunk has fewer than {1 << 19:,} bytes; here it has {self.chunk:,}.")

    def __str__(self):
        parts = [f"{self.kernel} {self.threads} × {self.chunk} B"]
        if self.kernel != "loads":
            parts.append(f"{self.stages} stage{'s' * (self.stages > 1)}")
            parts.append(f"span {self.span}" if self.span else f"{self.ctas} an SM")
        if self.leaves_out != "nothing":
            parts.append(f"without {self.leaves_out}")
        return ", ".join(parts)

    def smem_bytes(self, arrays: int) -> int:
        """Dynamic shared memory of a block, for a kernel that reads 1 array (copy) or 2 (a x + y)."""
        return 0 if self.kernel == "loads" else self.stages * arrays * self.chunk

    def constants(self, element: str) -> dict:
        """What bulk_copy.cu is compiled with."""
        return {"ELEMENT": element, "THREADS": self.threads, "CHUNK": self.chunk, "STAGES": self.stages,
                "SPAN": self.span, "BREAK": BREAKS.index(self.leaves_out)}


# The course's choice of each kind, for copy and for a x + y; the first of each is the fastest of those that were swept.
VARIANTS = {
    "copy": {
        "loads": BulkConfig("loads", 256, 4096),
        "cp_async": BulkConfig("cp_async", 128, 2048, stages=2, span=2),
        "bulk_single": BulkConfig("bulk", 32, 2048),
        "bulk_batch": BulkConfig("bulk", 32, 2048, stages=2, span=2),
        "bulk_ring": BulkConfig("bulk", 32, 2048, stages=4, span=8),
    },
    "axpy": {
        "bulk_batch": BulkConfig("bulk", 256, 2048, stages=2, span=2),
        "loads": BulkConfig("loads", 1024, 16384),
        "cp_async": BulkConfig("cp_async", 128, 2048, stages=2, span=2),
        "bulk_single": BulkConfig("bulk", 256, 4096),
        "bulk_ring": BulkConfig("bulk", 256, 2048, stages=3, span=6),
    },
}


def configs(op: str) -> dict[str, BulkConfig]:
    """The variants of `op`, "copy" or "axpy", by name; the fastest first."""
    if op not in VARIANTS:
        raise ValueError(f"op is copy or axpy; here it is {op!r}.")
    return VARIANTS[op]


def copy_spec(x):
    """The same bits."""
    return x.clone()


def axpy_spec(a: float, x, y):
    """a x + y in float64; `a` as the float32 that the kernel takes."""
    return ctypes.c_float(a).value * x.double() + y.double()


def job(config: BulkConfig, target: str, element: str = "u8") -> build.Job:
    """The compilation of `config` for `target`: `element` is "u8" for the copy, else one of ELEMENTS' values."""
    arrays = 1 if element == "u8" else 2
    return build.Job(f"{SOURCE}:{config.kernel}", {}, config.constants(element), target, config.threads // 32,
                     smem_bytes=config.smem_bytes(arrays), name=str(config))


def _flat(name: str, tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor; it is a {type(tensor).__name__}.")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; it is {tuple(tensor.shape)} with strides {tensor.stride()}.")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} is a view that conjugates or negates what memory holds: resolve it first.")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which a bulk copy does not give: detach it.")
    return tensor.view(-1)


def _checked(x, y, out) -> list[torch.Tensor]:
    """x, y (or None) and out, flat; ValueError says what the hardware cannot take."""
    given = {"x": x, "y": y, "out": out} if y is not None else {"x": x, "out": out}
    flat = {name: _flat(name, tensor) for name, tensor in given.items()}
    first = flat["x"]
    for name, tensor in flat.items():
        if (tensor.numel(), tensor.dtype, tensor.device) != (first.numel(), first.dtype, first.device):
            raise ValueError(f"{' and '.join(flat)} must agree in size, dtype and device; x has {first.numel()} of "
                             f"{str(first.dtype)[6:]} on {first.device}, {name} {tensor.numel()} of "
                             f"{str(tensor.dtype)[6:]} on {tensor.device}.")
        if tensor.data_ptr() % UNIT != first.data_ptr() % UNIT:
            raise ValueError(f"{' and '.join(flat)} must lie equally far from a multiple of {UNIT} bytes, which a bulk "
                             f"copy starts at; x lies {first.data_ptr() % UNIT} past one, {name} "
                             f"{tensor.data_ptr() % UNIT}.")
    if y is not None and first.dtype not in ELEMENTS:
        raise ValueError(f"a x + y takes {', '.join(str(d)[6:] for d in ELEMENTS)}; here it is {str(first.dtype)[6:]}.")
    begin, size = flat["out"].data_ptr(), first.nbytes
    for name in list(flat)[:-1]:  # chunks are stored while others are still read
        if begin < flat[name].data_ptr() + size and flat[name].data_ptr() < begin + size:
            raise ValueError(f"out lies in the memory of {name}: give it memory of its own.")
    return [first, flat.get("y"), flat["out"]]


def _chosen(config, op: str) -> BulkConfig:
    if isinstance(config, BulkConfig):
        return config
    if config == "best":
        return next(iter(configs(op).values()))
    if not isinstance(config, str) or config not in configs(op):
        raise ValueError(f"the variants of {op} are best, {', '.join(configs(op))}, or a BulkConfig; "
                         f"here it is {config!r}.")
    return configs(op)[config]


def prepare(x, out, *, y=None, a: float = 1.0, config="best"):
    """A function that launches out = x, or with `y` out = a x + y, on torch's current stream.

    x, y, out: contiguous CUDA tensors of one size and dtype (any for the copy; float32, bfloat16 or float16 with `y`,
    computed in float32), equally far from a multiple of 16 bytes, out apart from both. `config` is a variant's name,
    "best" or a BulkConfig. The function may be captured in a graph, which it must outlive; that of bulk_in_order counts
    chunks in memory of its own, so its launches must not overlap. Raises ValueError for what it cannot take and
    tilelab.device.Unsupported without TMA.
    """
    config = _chosen(config, "copy" if y is None else "axpy")
    x, y, out = _checked(x, y, out)
    if config.kernel == "bulk_in_order" and y is not None:
        raise ValueError("bulk_in_order only copies: leave out y.")
    device.require("has_tma", "a bulk copy", "compile it with ch07.bulk_copy.job and read its SASS")
    if not x.is_cuda:
        raise ValueError(f"x must be on the GPU; it is on {x.device}.")
    if not x.numel():
        return lambda: None
    element, size = ("u8", x.nbytes) if y is None else (ELEMENTS[x.dtype], x.numel())
    constants = config.constants(element)
    chunks = max(1, -(-x.nbytes // config.chunk))
    grid = -(-chunks // constants["SPAN"]) if constants["SPAN"] else min(chunks, device.current().sms * config.ctas)
    if chunks >= 1 << 31:
        raise ValueError(f"there are at most 2^31 chunks; here are {chunks:,}: take a larger one.")
    kernel = cuda.kernel(SOURCE, config.kernel, tuple(f"-D{name}={value}" for name, value in constants.items()))
    args = [x, x if y is None else y, out, ctypes.c_float(a), ctypes.c_uint64(size)]
    if config.kernel == "bulk_in_order":
        args.append(torch.zeros(2, dtype=torch.int32, device=x.device))
    return cuda.prepare_launch(kernel, grid, config.threads, args, config.smem_bytes(1 if y is None else 2))


def _like(x, out):
    return torch.empty_like(x) if out is None and isinstance(x, torch.Tensor) else out


def copy(x, out=None, config="best"):
    """A copy of x, bit for bit, in `out` or, where x starts at a multiple of 16 bytes, in new memory. Arguments and
    errors as for `prepare`."""
    out = _like(x, out)
    prepare(x, out, config=config)()
    return out


def axpy(a: float, x, y, out=None, config="best"):
    """a x + y, computed in float32 and rounded once, in `out` or, where x starts at a multiple of 16 bytes, in new
    memory. Arguments and errors as for `prepare`."""
    out = _like(x, out)
    prepare(x, out, y=y, a=a, config=config)()
    return out
