"""The report of a CUDA program that moves a box by TMA and fails: whose error it is, and a reproducer to file.

The reproducer is one .cu file that nvcc builds without the course. It encodes the map, loads one box and compares it.
Nothing is ever sent anywhere. Sources: CUDA driver API, "Tensor Map Object Management"; PTX ISA, "Tensors".
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import math
import pathlib
import re
import shutil
import subprocess

import torch

from tilelab.course import doctor
from tilelab.measure import check
from tilelab.records import report
from tilelab.runtime import cuda, device, tensor_map

DTYPES = {str(dtype)[6:]: dtype for dtype in tensor_map.DTYPES}
FILE = "reproduce.cu"
TEMPLATE = pathlib.Path(__file__).with_name("reproduce.cu.in")  # its @NAMES@ are filled in for a load
LIMIT_S = 30
ALIGNMENT = 1024  # of the box in shared memory
MOST_BYTES = 1 << 30  # of the tensor that the reproducer allocates
REFUSED = "CUDA_ERROR_INVALID_VALUE"
YOURS = """\
- [ ] The program compares the result of every driver call with `CUDA_SUCCESS`. An ignored error of the encoding \
leaves a map that was never made.
- [ ] The kernel takes the map as a `const __grid_constant__ CUtensorMap` parameter, and the tensor is still allocated \
when the kernel runs.
- [ ] The box starts at a multiple of 128 bytes of shared memory, and of 1,024 bytes with a swizzle.
- [ ] One thread initialises the mbarrier and fences it before the load. Every thread that reads the box has waited \
for the right parity.
- [ ] A store by TMA writes whole units of 16 bytes, so the last unit of a row may hold nothing else."""


@dataclasses.dataclass(frozen=True)
class TiledMap:
    """The arguments of a tiled tensor map. Extents and strides are in elements, innermost last; `strides` () means
    contiguous. `start` counts the bytes from an aligned address to the tensor."""

    dtype: str = "float32"
    shape: tuple[int, ...] = (65536,)
    strides: tuple[int, ...] = ()
    box: tuple[int, ...] = (1024,)
    swizzle: str = "none"
    l2_promotion: str = "none"
    fill: str = "zero"
    start: int = 0

    def __post_init__(self):
        for name, allowed in (
            ("dtype", DTYPES),
            ("swizzle", tensor_map.SWIZZLES),
            ("fill", tensor_map.FILLS),
            ("l2_promotion", tensor_map.PROMOTIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"this tool takes {name}={'|'.join(allowed)}; not {getattr(self, name)[:40]!r}"
                )
        rank = len(self.shape)
        if not 1 <= rank <= 5 or min(self.shape) < 1:
            raise ValueError(f"shape must have 1 to 5 extents from 1; it is {self.shape}")
        dense = tuple(math.prod(self.shape[index + 1 :]) for index in range(rank))
        object.__setattr__(self, "strides", self.strides or dense)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def box_bytes(self) -> int:
        return math.prod(self.box) * self.itemsize

    def fields(self) -> dict:
        """Return the arguments of cuTensorMapEncodeTiled, whose lists begin with the innermost dimension."""

        def name(prefix: str, choice: str, none: str = "none") -> str:
            return f"CU_TENSOR_MAP_{prefix}_{'NONE' if choice == none else choice}"

        return {
            "tensorDataType": name("DATA_TYPE", tensor_map.DTYPES[DTYPES[self.dtype]]),
            "tensorRank": len(self.shape),
            "globalAddress": self.start,
            "globalDim": list(self.shape[::-1]),
            "globalStrides": [stride * self.itemsize for stride in self.strides[-2::-1]],
            "boxDim": list(self.box[::-1]),
            "elementStrides": [1] * len(self.shape),
            "interleave": "CU_TENSOR_MAP_INTERLEAVE_NONE",
            "swizzle": name("SWIZZLE", self.swizzle),
            "l2Promotion": name("L2_PROMOTION", f"L2_{self.l2_promotion}", "L2_none"),
            "oobFill": name(
                "FLOAT_OOB_FILL", "NAN_REQUEST_ZERO_FMA" if self.fill == "nan" else "zero", "zero"
            ),
        }

    def broken_map_rules(self) -> list[str]:
        """Return a sentence for each rule of the map that does not hold; the driver refuses every such map."""
        rank = len(self.shape)
        good = {
            "shape": (64,) * rank,
            "strides": tuple(64 ** (rank - 1 - index) for index in range(rank)),
            "address": 0,
            "box": (1,) * (rank - 1) + (max(1, 16 // self.itemsize),),
        }
        # The driver checks the stride of a dimension with one element, too.
        row = (1,) * (rank - 1) + self.box[-1:]
        wider = tuple(max(2, extent) for extent in self.shape)
        found = []
        # One rule at a time: the other fields are good ones, because the check stops at the first broken rule.
        for mine in (
            {"shape": self.shape},
            {"address": self.start},
            {"shape": wider, "strides": self.strides},
            {"box": self.box},
            {"box": row if row[-1] <= 256 else self.box, "swizzle": self.swizzle},
            {"fill": self.fill, "floating": DTYPES[self.dtype].is_floating_point},
        ):
            try:
                tensor_map.check_describable(**good | mine, itemsize=self.itemsize)
            except ValueError as error:
                found.append(str(error))
        return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class BoxLoad(TiledMap):
    """One load by tensor map. `corner` is in elements, and may lie outside of the tensor. `extra` counts the bytes that
    the barrier expects in addition to the box."""

    corner: tuple[int, ...] = ()
    extra: int = 0

    def __post_init__(self):
        super().__post_init__()
        rank = len(self.shape)
        object.__setattr__(self, "corner", self.corner or (0,) * rank)
        for name in ("strides", "box", "corner"):
            if len(getattr(self, name)) != rank:
                raise ValueError(
                    f"{name} must have {rank} numbers, as many as shape; it is {getattr(self, name)}"
                )
        if min(*self.box, *self.strides) < 1 or max(map(abs, self.corner)) >= 1 << 31 or self.start < 0:
            raise ValueError(
                "box and strides must be 1 or more, corner must fit in 32 bits, start must be 0 or more"
            )
        if self.strides[-1] != 1:
            raise ValueError(
                f"the last stride must be 1, because a map has no field for it; it is {self.strides[-1]}"
            )
        if self.box_bytes + self.extra < 0:
            raise ValueError(f"the barrier cannot expect {self.box_bytes + self.extra} bytes")
        width = tensor_map.SWIZZLES[self.swizzle]
        narrow = self.box[-1] * self.itemsize < width  # such a box has gaps
        if narrow and not self.broken_map_rules():
            raise ValueError(
                f"the map is legal, but outside of this tool: it takes boxes whose rows fill the swizzle of {width} "
                f"bytes, and a row of this box takes {self.box[-1] * self.itemsize}"
            )
        if self.tensor_bytes > MOST_BYTES:
            raise ValueError(
                f"the tensor takes {self.tensor_bytes:,} bytes; the reproducer takes up to {MOST_BYTES:,}"
            )

    @property
    def tensor_bytes(self) -> int:
        """The bytes from the start of the allocation to the last element."""
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides))
        return self.start + (last + 1) * self.itemsize

    def broken_load_rules(self, target: str) -> list[str]:
        """Return a sentence for each rule of the load that does not hold on `target`; only a run shows these."""
        found, column = [], self.corner[-1] * self.itemsize
        needed, available = self.box_bytes + ALIGNMENT + 8, device.target_limits(target).smem_per_block
        if column % 16:
            found.append(
                f"the innermost coordinate of a box must be a multiple of 16 bytes, or the load is an illegal "
                f"instruction; {self.corner[-1]} elements are {column} bytes."
            )
        if self.extra:
            found.append(
                f"the barrier must expect the {self.box_bytes:,} bytes of the whole box, fill included, or "
                f"the wait ends too early or never; it expects {self.box_bytes + self.extra:,}."
            )
        if needed > available:
            found.append(
                f"the box, its alignment and its barrier must fit in shared memory; they take {needed:,} "
                f"bytes and a block on {target} has {available:,}."
            )
        return found


def parse_load(text: str) -> BoxLoad:
    """Return the load of "shape=100x64,box=16x32,corner=0x-4"; ValueError for another form or value."""
    kinds = {field.name: field.default for field in dataclasses.fields(BoxLoad)}
    given = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds or not value:
            raise ValueError(f"each part is FIELD=VALUE with one of {', '.join(kinds)}; it is {part[:60]!r}")
        numbers = value.split("x")
        if isinstance(kinds[name], str):
            given[name] = value
        elif not all(re.fullmatch(r"-?\d{1,18}", number) for number in numbers) or (
            isinstance(kinds[name], int) and len(numbers) > 1
        ):
            raise ValueError(f"{name} takes whole numbers such as 100x64; it is {value[:60]!r}")
        else:
            given[name] = tuple(map(int, numbers)) if isinstance(kinds[name], tuple) else int(value)
    return BoxLoad(**given)


# ---- the reproducer


def make_reproducer(load: BoxLoad, target: str) -> str:
    """Return the CUDA C++ of the reproducer, complete with its main; NVRTC compiles its kernel alone."""

    def listed(values) -> str:
        return ", ".join(map(str, values))

    fields, width = load.fields(), tensor_map.SWIZZLES[load.swizzle]
    values = {
        "TARGET": target,
        "BOX_BYTES": load.box_bytes,
        "EXPECTED": load.box_bytes + load.extra,
        "RANK": len(load.shape),
        "COORDINATES": listed(load.corner[::-1]),
        "CORNER": listed(load.corner[::-1]),
        "ITEM": load.itemsize,
        "TENSOR_BYTES": load.tensor_bytes,
        "START": load.start,
        "SHAPE": listed(fields["globalDim"]),
        "STRIDES": listed(fields["globalStrides"] or [0]),
        "BOX": listed(fields["boxDim"]),
        "STEPS": listed(fields["elementStrides"]),
        "TYPE": fields["tensorDataType"],
        "SWIZZLE": fields["swizzle"],
        "L2": fields["l2Promotion"],
        "FILL": fields["oobFill"],
        "NAN_FILL": str(load.fill == "nan").lower(),
        "MASK": width // 16 - 1 if width else 0,
    }
    return re.sub(r"@(\w+)@", lambda mark: str(values[mark[1]]), TEMPLATE.read_text(encoding="utf-8"))


# ---- what happens on this GPU


def encode(load: TiledMap, address: int) -> tuple[str, ctypes.Array, int]:
    """Return (the driver's answer, memory, address of the map in it) for a map of the tensor at `address`.

    The driver is called without a wrapper, which would check the arguments or choose where the map lies.
    """
    from cuda.bindings import driver

    fields = load.fields() | {"globalAddress": ctypes.c_void_p(address + load.start)}
    lists = {
        "globalDim": ctypes.c_uint64,
        "globalStrides": ctypes.c_uint64,
        "boxDim": ctypes.c_uint32,
        "elementStrides": ctypes.c_uint32,
    }
    enums = {
        "tensorDataType": driver.CUtensorMapDataType,
        "interleave": driver.CUtensorMapInterleave,
        "swizzle": driver.CUtensorMapSwizzle,
        "l2Promotion": driver.CUtensorMapL2promotion,
        "oobFill": driver.CUtensorMapFloatOOBfill,
    }
    # A map of one dimension has no stride, but needs an array.
    fields["globalStrides"] = fields["globalStrides"] or [16]
    arguments = [
        (lists[name] * len(value))(*value)
        if name in lists
        else int(getattr(enums[name], value))
        if name in enums
        else value
        for name, value in fields.items()
    ]
    memory = (ctypes.c_byte * (128 + 64))()
    place = -(-ctypes.addressof(memory) // 64) * 64  # a map starts at a multiple of 64 bytes
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(ctypes.c_void_p(place), *arguments)
    return driver.CUresult(status).name, memory, place


def load_here(text: str) -> str:
    """Encode the map of a load, load the box on this GPU, and return what happens: the reproducer's steps in Python."""
    from cuda.bindings import driver

    load = parse_load(text)
    data = torch.randint(0, 256, (load.tensor_bytes,), dtype=torch.uint8, device="cuda")
    error, memory, place = encode(load, data.data_ptr())  # `memory` keeps the map alive
    if error != "CUDA_SUCCESS":
        return f"cuTensorMapEncodeTiled: {error}"
    target, smem_bytes = device.current().target, load.box_bytes + ALIGNMENT
    kernel = cuda.load_cubin(cuda.compile_cubin(make_reproducer(load, target), target, FILE), "load_box")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, smem_bytes, kernel.handle, torch.cuda.current_device())
    if status.name != "CUDA_SUCCESS":
        return f"cuKernelSetAttribute: {status.name}"
    found = torch.full((load.box_bytes,), 0xEE, dtype=torch.uint8, device="cuda")
    answered = torch.zeros(1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (found, answered)]
    arguments = (ctypes.c_void_p * 3)(place, *map(ctypes.addressof, pointers))
    (status,) = driver.cuLaunchKernel(
        driver.CUfunction(int(kernel.handle)),
        1,
        1,
        1,
        128,
        1,
        1,
        smem_bytes,
        0,
        ctypes.addressof(arguments),
        0,
    )
    if status.name != "CUDA_SUCCESS":
        return f"load_box: {status.name}"
    torch.cuda.synchronize()
    if not answered.item():
        return "load_box: the barrier's phase did not end within 2 s"
    return f"{count_wrong(load, data.cpu(), found.cpu())} of {load.box_bytes} bytes of the box are wrong"


def count_wrong(load: BoxLoad, data: torch.Tensor, found: torch.Tensor) -> int:
    """Return how many bytes of a box as it lies in shared memory are wrong; `data` are the bytes of the tensor."""
    dtype = DTYPES[load.dtype]
    tensor = data[load.start :].clone().view(dtype).as_strided(load.shape, load.strides)
    right, inside = torch.zeros(load.box, dtype=dtype), torch.zeros(load.box, dtype=torch.bool)
    ranges = [
        (max(first, 0), min(first + extent, size))
        for first, extent, size in zip(load.corner, load.box, load.shape)
    ]
    if all(low < high for low, high in ranges):
        there = tuple(slice(low - first, high - first) for first, (low, high) in zip(load.corner, ranges))
        right[there] = tensor[tuple(slice(low, high) for low, high in ranges)]
        inside[there] = True
    found = found[tensor_map.swizzle_offset(torch.arange(load.box_bytes), load.swizzle)]
    differ = (found != right.flatten().view(torch.uint8)).view(-1, load.itemsize)
    if load.fill == "nan":
        differ[~inside.flatten()] = ~found.view(dtype).isnan()[~inside.flatten()][:, None]
    return int(differ.sum())


def observe(text: str) -> str:
    """Return what `load_here` prints in a process of its own, which may fault; without a GPU, why it did not run."""
    try:
        device.require("has_tma", "the load", "build the reproducer and run it on such a GPU")
    except device.Unsupported as reason:
        return f"not run: {reason}"
    said = check.try_snippet(
        "import torch; from ch10.tile_pipeline.lesson import map_report; torch.zeros(1, device='cuda'); "
        f"print('begun', flush=True); print(map_report.load_here({text!r}))",
        LIMIT_S,
    )
    return f"load_box: {said}" if said.startswith(("CUDA error", "no answer")) else said


# ---- the text


@functools.cache
def _nvcc_release() -> str:
    if not shutil.which("nvcc"):
        return "not installed"
    shown = subprocess.run(
        ["nvcc", "--version"], capture_output=True, text=True, check=False, timeout=60
    ).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", shown)
    return found[1] if found else "its version cannot be read"


def _course_version() -> str:
    try:
        return importlib.metadata.version("tiles-in-flight")
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def judge(load: BoxLoad, observed: str, target: str) -> tuple[str, bool]:
    """Return the sentence that says whose error it is, and whether it may be a bug of the driver or the compiler."""
    not_run, may_be_bug = observed.startswith("not run"), False
    if load.broken_map_rules() and (not_run or REFUSED in observed):
        verdict = "This is an error of the program: the map breaks a rule, and the driver refuses such a map."
    elif load.broken_map_rules():
        verdict = (
            "The map breaks a rule, and the driver did not refuse it as documented. Mend the program first."
        )
    elif load.broken_load_rules(target):
        verdict = "This is an error of the program: the load breaks a rule that only a run shows."
    elif not_run:
        verdict = (
            "Every rule that can be checked here holds. Whether the load fails is not known before a run."
        )
    elif observed.startswith("0 of"):
        verdict = (
            "Nothing fails here: the map is accepted and the box is right. The error is in another part of the "
            "program."
        )
    else:
        may_be_bug = True
        verdict = (
            "Every rule that can be checked here holds, and the load still fails. If the points below hold too, this "
            "may be a bug of the driver, the compiler or the GPU."
        )
    return verdict, may_be_bug


def write_report(text: str, target: str) -> tuple[str, str, bool]:
    """Return (the report as Markdown, its verdict, whether it may be a bug) of a load as `parse_load` takes it.

    The kernel of the reproducer is compiled for `target`; tilelab.runtime.cuda.CompileError if that fails.
    """
    load = parse_load(text)
    source = make_reproducer(load, target)
    cuda.compile_cubin(source, target, FILE)
    observed = observe(text)
    verdict, may_be_bug = judge(load, observed, target)
    broken_map, broken_load = load.broken_map_rules(), load.broken_load_rules(target)
    right, ran = f"0 of {load.box_bytes} bytes of the box are wrong", not observed.startswith("not run")
    call, _, error = (
        observed.partition(": ") if ran else ("cuTensorMapEncodeTiled", "", REFUSED if broken_map else "")
    )
    if broken_map:
        title = "the map breaks a rule"
        expected = f"`cuTensorMapEncodeTiled: {REFUSED}`, because of a broken rule."
    elif broken_load:
        title, expected = "the load breaks a rule", f"Nothing is promised. With every rule kept: `{right}`."
    else:
        title, expected = observed if ran else "not run yet", f"`{right}`"
    failed = "No call failed." if ran else "Not known before a run."
    if error:
        failed = f"`{call}`: `{error}`" + ("" if ran else ", by its documentation.")
    marks = [f"- [ ] broken: {sentence}" for sentence in (*broken_map, *broken_load)]
    if not broken_map:
        marks.append("- [x] The map keeps every rule of a tiled tensor map.")
    if not broken_load:
        marks.append("- [x] The corner of the box and the bytes that the barrier expects keep their rules.")
    environment = [(row.name, row.detail) for row in doctor.check_environment((target,))]
    environment += [("nvcc", _nvcc_release()), ("course", _course_version())]
    fields = load.fields()
    fields["globalAddress"] = f"an aligned address + {load.start}"
    sections = {
        "Whose error is it?": [
            "Checked for this report:",
            "\n".join(marks),
            "To be checked in your program:",
            YOURS,
            "File a report only if every point holds. A driver or compiler bug is then shown by the reproducer below, "
            "which has no other code.",
        ],
        "The arguments of cuTensorMapEncodeTiled": [
            report.make_table(["field", "value"], fields.items()),
            f"The load asks for the box at {load.corner[::-1]}, innermost coordinate first. The barrier expects "
            f"{load.box_bytes + load.extra:,} bytes.",
        ],
        "The call that failed": [failed],
        "Expected": [expected],
        "Observed": [f"`{observed}`"],
    }
    commands = f"nvcc -std=c++17 -arch={target} {FILE} -lcuda -o reproduce && ./reproduce"
    script = report.Script(FILE, "cuda", source, commands, f", whose kernel compiles for {target} with NVRTC")
    search = "the release notes and the forum for the call and its error"
    title = f"A load by tensor map: {title}"
    return report.write(title, verdict, environment, sections, script, search), verdict, may_be_bug
