"""Resample trajectories: rows of features at irregular source times, interpolated linearly at target times.

The kernels are in resample.cu, a ladder of one idea a step. Source: the field note "TMA Optimization Implementation
Status", whose three phases are steps of it.
"""

from __future__ import annotations

import ctypes
import math
import pathlib
from dataclasses import dataclass

import torch

from tilelab import build, cuda, device

SOURCE = pathlib.Path(__file__).with_name("resample.cu")
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "float"}
# Each step and its idea, slowest thought first.
LADDER = {
    "search_a_thread": "a thread an element, each searches",
    "lane0_search": "a warp a target, lane 0 searches and shuffles: the note's phase 1",
    "ballot_search": "a warp a target, 32 pivots a step",
    "shared_search": "one search a target, shared by the block",
    "vectors": "16 bytes a thread, several rows in flight",
    "persistent": "the same with a grid that stays",
    "bulk_rows": "rows by one bulk copy: the note's phase 3",
}
BEST = "vectors"
MOST_TIMES = 2048  # source times that are copied to shared memory for each block; more are searched where they are
LARGEST_TIME = 2.0**100  # beyond it, differences of times leave float32


@dataclass(frozen=True)
class ResampleConfig:
    """`threads` a block, `targets` a work item; a thread loads the rows of `at_once` targets before it uses one."""

    threads: int
    targets: int
    at_once: int = 1

    def __post_init__(self):
        for name, least, most in (("threads", 32, 1024), ("targets", 1, 1024), ("at_once", 1, 8)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most or (name == "threads" and value % 32):
                raise ValueError(f"{name} must be a whole number from {least} to {most}"
                                 f"{', a multiple of 32' * (name == 'threads')}; here it is {value!r}.")

    def __str__(self):
        return f"{self.threads} threads, {self.targets} targets, {self.at_once} at once"


def choose(kernel: str, batches: int, sources: int, targets: int, depth: int, itemsize: int,
           sms: int) -> ResampleConfig:
    """The configuration for a problem (B, S, T, D) on a GPU of `sms` multiprocessors.

    A block writes about 32 KB: less, and the search weighs too much; but enough blocks to fill the chip come first.
    """
    if kernel in ("search_a_thread", "lane0_search", "ballot_search"):
        return ResampleConfig(256, 64)
    row = depth * itemsize
    each = 1 << max(4, min(9, int(math.log2(max(1, 32768 // row)))))
    while each > 32 and batches * -(-targets // each) < 4 * sms:
        each //= 2
    threads = 256 if each * row < 32768 or each == 512 or kernel == "bulk_rows" else 128
    vectors = each * max(1, row // math.gcd(16, row)) // threads  # a thread's
    most = 1 if kernel == "bulk_rows" else 2 if each == 512 else 4  # shared memory answers before a second one is sent
    return ResampleConfig(threads, each, max(1, min(most, 1 << (max(vectors, 1).bit_length() - 1))))


def spec(features, source_times, target_times):
    """Float64 interpolation: features (B, S, D), source_times (B, S) ascending, target_times (B, T) -> (B, T, D).

    Targets before the first source time or after the last take the row there; at equal source times, the last of them.
    """
    last = source_times.shape[1] - 1
    left = (torch.searchsorted(source_times, target_times, right=True) - 1).clamp(0, max(last - 1, 0))
    right = (left + 1).clamp(max=last)
    begin, end = (source_times.gather(1, index).double() for index in (left, right))
    time = target_times.double()

    def rows(index):
        return features.gather(1, index[..., None].expand(-1, -1, features.shape[2])).double()

    def of_row(value):
        return value[..., None]

    # The weights meet the rows before the division: where the two cancel, nothing has been rounded yet.
    both = (of_row(end - time) * rows(left) + of_row(time - begin) * rows(right)) / of_row(end - begin)
    return torch.where(of_row(time >= end), rows(right), torch.where(of_row(time <= begin), rows(left), both))


def compulsory_bytes(features, source_times, target_times) -> int:
    """Bytes that no kernel can avoid: the source rows that are needed, each once, the result, and all times."""
    last = source_times.shape[1] - 1
    left = (torch.searchsorted(source_times, target_times, right=True) - 1).clamp(0, max(last - 1, 0))
    right = (left + 1).clamp(max=last)
    needed = torch.zeros_like(source_times, dtype=torch.int32)
    # At a source time, or outside them all, one row alone is needed.
    begin, end = source_times.gather(1, left), source_times.gather(1, right)
    needed.scatter_add_(1, left, (target_times < end).int())
    needed.scatter_add_(1, right, ((target_times >= end) | (target_times > begin)).int())
    row = features.shape[2] * features.element_size()
    return (int((needed > 0).sum()) + target_times.numel()) * row + source_times.nbytes + target_times.nbytes


def constants(config: ResampleConfig, dtype, sources: int, targets: int, depth: int, vector: int = 0) -> dict:
    """What resample.cu is compiled with; `vector` bytes a thread moves at once (default: 16, or what divides a row)."""
    row = depth * dtype.itemsize
    times = max(2, 1 << (sources - 1).bit_length()) if sources <= MOST_TIMES else 0
    needed = -(-3 * config.targets * sources // (2 * max(targets, 1))) + 4  # half as many again as evenly spaced ones
    return {"ELEMENT": ELEMENTS[dtype], "DEPTH": depth, "VECTOR": vector or math.gcd(16, row),
            "THREADS": config.threads, "TARGETS": config.targets, "TIMES": times, "AT_ONCE": config.at_once,
            "ROWS": min(needed, 65536 // row)}  # with what is static, a block has room for them on every target


def _smem_bytes(kernel: str, values: dict) -> int:
    size = 4 if values["ELEMENT"] == "float" else 2
    return values["ROWS"] * values["DEPTH"] * size if kernel == "bulk_rows" else 0


def job(kernel: str, target: str, dtype=torch.bfloat16, shape=(512, 1024, 2048, 128)) -> build.Job:
    """The compilation of a step of the ladder for `target`, as for a problem of `shape` (B, S, T, D) on an H200."""
    config = choose(kernel, *shape, dtype.itemsize, 132)
    values = constants(config, dtype, *shape[1:])
    return build.Job(f"{SOURCE}:{kernel}", {}, values, target, config.threads // 32,
                     smem_bytes=_smem_bytes(kernel, values), name=kernel)


def _check(kernel, features, source_times, target_times, out, validate) -> None:
    named = {"features": features, "source_times": source_times, "target_times": target_times}
    if out is not None:
        named["out"] = out
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor; it is a {type(tensor).__name__}.")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, which resample does not give: detach it.")
        if tensor.device != features.device:
            raise ValueError(f"all must be on one device; features is on {features.device}, {name} on {tensor.device}.")
    shapes = [tuple(tensor.shape) for tensor in named.values()]
    if [len(shape) for shape in shapes] != [3, 2, 2, 3][:len(shapes)] or 0 in shapes[0][1:] \
            or shapes[1] != shapes[0][:2] or shapes[2][0] != shapes[0][0] \
            or shapes[3:] not in ([], [(*shapes[2], shapes[0][2])]):
        raise ValueError("the shapes must be features (B, S, D), source_times (B, S), target_times (B, T), out "
                         f"(B, T, D), S and D at least 1; here they are {', '.join(map(str, shapes))}.")
    for name in ("source_times", "target_times"):
        if named[name].dtype != torch.float32:
            raise ValueError(f"{name} must be float32; it is {str(named[name].dtype)[6:]}.")
    if features.dtype not in ELEMENTS or named.get("out", features).dtype != features.dtype:
        raise ValueError(f"features and out must be of one dtype, {', '.join(str(d)[6:] for d in ELEMENTS)}; "
                         f"they are {str(features.dtype)[6:]} and {str(named.get('out', features).dtype)[6:]}.")
    for name, tensor in named.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {tensor.stride()}.")
    if features.shape[1] * features.shape[2] * features.element_size() >= 1 << 32:
        raise ValueError("a batch's features must take less than 4 GiB; here they take "
                         f"{features.shape[1] * features.shape[2] * features.element_size():,} B.")
    for name in ("features", "source_times", "target_times"):
        begin, size = named[name].data_ptr(), named[name].nbytes
        if out is not None and out.data_ptr() < begin + size and begin < out.data_ptr() + out.nbytes:
            raise ValueError(f"out lies in the memory of {name}: give it memory of its own.")
    if kernel == "bulk_rows" and (features.shape[2] * features.element_size() % 16 or features.data_ptr() % 16):
        raise ValueError("bulk_rows copies rows that start at multiples of 16 bytes; a row is "
                         f"{features.shape[2] * features.element_size()} bytes, and the first starts "
                         f"{features.data_ptr() % 16} past one: use vectors.")
    if validate and source_times.numel():
        unsorted = source_times[:, 1:] < source_times[:, :-1]
        if not bool((source_times.abs() <= LARGEST_TIME).all()):  # NaN compares false
            raise ValueError(f"source_times must be numbers up to {LARGEST_TIME:.0e} in size; there are others.")
        if bool(unsorted.any()):
            batch, index = (int(value) for value in unsorted.nonzero()[0])
            raise ValueError(f"source_times must ascend in each batch; in batch {batch}, time {index + 1} is smaller "
                             f"than time {index}: sort them, and features alike.")


def prepare(features, source_times, target_times, out, kernel: str = "best", config: ResampleConfig | None = None,
            validate: bool = True):
    """A function that launches out = the interpolation, on torch's current stream.

    features (B, S, D) and out (B, T, D) bfloat16, float16 or float32, source_times (B, S) and target_times (B, T)
    float32, all contiguous on one GPU. Sizes are counted in 32 bits: B, S and T stay below 2^31 - 1,024, and a row
    takes at most 4 MiB. `kernel` is "best" or a step of LADDER, `config` how it is cut (default:
    `choose`). Targets need not be sorted; NaN gives NaN, and so may a row of features that holds NaN or infinity.
    `validate` looks once whether source_times ascend, which waits for the GPU. Errors are within half a unit in the
    last place, and a little, unless the two rows cancel to less than 2^-40 of themselves (float32: 2^-28). Raises
    ValueError for what it cannot take and tilelab.device.Unsupported without TMA.
    """
    if not isinstance(kernel, str) or kernel not in ("best", *LADDER):
        raise ValueError(f"the kernels are best, {', '.join(LADDER)}; here it is {kernel!r}.")
    kernel = BEST if kernel == "best" else kernel
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"out must be a torch.Tensor; it is a {type(out).__name__}.")
    _check(kernel, features, source_times, target_times, out, validate)
    device.require("has_tma", "resample", "compile it with ch07.resample.job and read its SASS, or use "
                   "ch07.resample.spec")
    if not features.is_cuda:
        raise ValueError(f"features must be on the GPU; it is on {features.device}.")
    if not out.numel():
        return lambda: None
    (batches, sources, depth), targets = features.shape, target_times.shape[1]
    sms = device.current().sms
    config = config or choose(kernel, batches, sources, targets, depth, features.element_size(), sms)
    vector = math.gcd(16, depth * features.element_size(), features.data_ptr(), out.data_ptr())
    values = constants(config, features.dtype, sources, targets, depth, vector)
    items = batches * -(-targets // config.targets)
    grid = {"search_a_thread": -(-out.numel() // config.threads), "persistent": min(items, 8 * sms),
            "lane0_search": min(items, 2 * sms), "ballot_search": min(items, 2 * sms)}.get(kernel, items)
    if max(grid, items) >= 1 << 31:
        raise ValueError("a launch has fewer than 2^31 blocks and work items; this one would have "
                         f"{max(grid, items):,}: split the batches.")
    compiled = cuda.load_kernel(SOURCE, kernel, tuple(f"-D{name}={value}" for name, value in values.items()))
    sizes = [ctypes.c_int(size) for size in (batches, sources, targets)]
    return cuda.prepare_launch(compiled, grid, config.threads, [features, source_times, target_times, out, *sizes],
                               _smem_bytes(kernel, values))


def resample(features, source_times, target_times, out=None, kernel: str = "best", validate: bool = True):
    """(B, T, D): features (B, S, D) of source_times (B, S) at target_times (B, T), in `out` or in new memory.

    Arguments and errors as for `prepare`.
    """
    if out is None:
        _check(kernel, features, source_times, target_times, None, validate=False)
        out = features.new_empty(*target_times.shape, features.shape[2])
    prepare(features, source_times, target_times, out, kernel, validate=validate)()
    return out
