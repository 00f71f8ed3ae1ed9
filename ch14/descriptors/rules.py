"""What each rule of a descriptor is for: a tile that keeps them all, and the same with one broken, past every check.

`said` gives the sentences of the course's launcher and of Triton's class, on any machine; `attempt` runs the tile on a
GPU, and `broken` has it run in processes that may fault: `python -m ch14.descriptors.rules RULE WAY...`. Source: CUDA
driver API, `cuTensorMapEncodeTiled`; PTX ISA, "tensormap.replace"; Triton's descriptor API.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import descriptors
from ch14.descriptors.configs import TileConfig
from tilelab import build, cuda, device, results, worker_pool

ROWS, WIDE = 8, 64  # of int16: a row is 128 bytes
CANARY = -7
WAYS = ("host", "device")
LIMIT_S = 120
# What differs from a tile that keeps every rule: 8 x 64 of int16, at the start of a matrix with rows of 128 bytes.
RULES = {
    "none is broken": {},
    "start at 16 bytes": {"offset": 1},
    "rows 16 bytes apart": {"stride": 65},
    "last stride 1": {"last": 2, "stride": 128},
    "tile 16 bytes wide": {"block": (8, 4)},
    "powers of two": {"block": (8, 48)},
    "at most 1,048,576": {"block": (2048, 1024)},
    "tiles start at 16 bytes": {"shift": 1},
    "rows end at 16 bytes": {"columns": 63},
    "an allocator is set": {"allocator": False},
    "a context in the thread": {"context": False},
}
WHY = {
    "none is broken": "",
    "start at 16 bytes": "TMA moves units of 16 bytes: a map's address is a multiple of them.",
    "rows 16 bytes apart": "So is its stride: each row starts with a whole unit.",
    "last stride 1": "A map has no stride for the innermost dimension: its elements are neighbours.",
    "tile 16 bytes wide": "A row of a box is at least one unit, and whole units.",
    "powers of two": "Triton's own: blocks of it are powers of two. The hardware's boxes need not be.",
    "at most 1,048,576": "Triton's own: no block of it has more elements.",
    "tiles start at 16 bytes": "A box, too, starts with a whole unit of its row.",
    "rows end at 16 bytes": "A store writes whole units, also where the tensor ends within one.",
    "an allocator is set": "A map that a program makes lies in global memory, which the launch has to provide.",
    "a context in the thread": "The driver encodes a map only in a thread with a CUDA context; Triton asks later.",
}


@triton.jit
def one_host_kernel(x, out, SHIFT: tl.constexpr):
    out.store([0, 0], x.load([0, SHIFT]))


@triton.jit
def one_device_kernel(x, out, rows, columns, stride_x, stride_out, LAST: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, SHIFT: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x, [rows, columns], [stride_x, LAST], [BLOCK_M, BLOCK_N])
    out_desc = tl.make_tensor_descriptor(out, [rows, columns], [stride_out, 1], [BLOCK_M, BLOCK_N])
    out_desc.store([0, 0], x_desc.load([0, SHIFT]))


def _case(where, offset=0, stride=WIDE, last=1, columns=WIDE):
    """(all memory of x, x, all of out, out): x random, out full of CANARY."""
    memory = torch.randint(0, 1 << 14, (4 * ROWS * WIDE,), dtype=torch.int16, device=where)
    room = torch.full((ROWS, WIDE), CANARY, dtype=torch.int16, device=where)
    return memory, memory.as_strided((ROWS, columns), (stride, last), offset), room, room[:, :columns]


def said(rule: str) -> dict:
    """{rule, launcher, triton}: what `descriptors.prepare` and TensorDescriptor say, "" where they let it pass."""
    change = dict(RULES[rule])
    block = change.pop("block", (ROWS, WIDE))
    shapes = {key: change[key] for key in ("offset", "stride", "last", "columns") if key in change}
    _, x, _, out = _case("cpu", **shapes)

    def sentence(call):
        try:
            call()
        except (ValueError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        except device.Unsupported:
            pass  # past the checks: it only wants a GPU
        return ""

    return {"rule": rule,
            "launcher": sentence(lambda: descriptors._checked("copy", x, out, None, None, TileConfig("host", *block))),
            "triton": sentence(lambda: TensorDescriptor.from_tensor(x, list(block)))}


def attempt(way: str, rule: str) -> str:
    """What comes of one tile with `rule` broken, described by `way`, on the GPU and with no check but those of compiler
    and driver. Errors are theirs; a fault loses the CUDA context."""
    change = dict(RULES[rule])
    block, shift = change.pop("block", (ROWS, WIDE)), change.pop("shift", 0)
    allocator, context = change.pop("allocator", True), change.pop("context", True)
    memory, x, room, out = _case("cuda", **change)
    constants = {"SHIFT": shift, "num_warps": 1}

    def described(tensor):
        good = TensorDescriptor(memory, [ROWS, WIDE], [WIDE, 1], [ROWS, WIDE])
        good.base, good.shape, good.strides = _at(tensor), list(tensor.shape), list(tensor.stride())
        good.block_shape = list(block)
        return good

    def launch(context):
        if context:
            cuda.current_device()
        if way == "host":
            one_host_kernel[(1,)](described(x), described(out), **constants)
            return
        if allocator:
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
        one_device_kernel[(1,)](_at(x), _at(out), *x.shape, x.stride(0), out.stride(0), LAST=x.stride(1),
                                BLOCK_M=block[0], BLOCK_N=block[1], **constants)

    # A thread of its own: allocator and context belong to a thread, and this one may have them.
    if not context:  # Triton gives a thread a context when it loads a kernel there: have it loaded elsewhere
        _in_thread(launch, True)
        torch.cuda.synchronize()
        room.fill_(CANARY)
    _in_thread(launch, context)
    torch.cuda.synchronize()
    columns = min(block[1], x.shape[1] - shift)
    wrong = out[:, :columns] != x[:, shift:shift + columns]
    beyond = int((room[:, x.shape[1]:] != CANARY).sum())
    found = f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, in {int(wrong.any(1).sum())} of {ROWS} rows" \
        if wrong.any() else "right"
    return found + (f", and {beyond} elements behind its rows are overwritten" if beyond else "")


def _at(tensor):
    """Where it starts, as a kernel takes it: a flat tensor from there on."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset())


def _in_thread(call, *arguments) -> None:
    caught = []

    def run():
        try:
            call(*arguments)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


def sentence(error: Exception) -> str:
    """The line of an exception that says what is wrong: its first, but the compiler's last, and of an assertion without
    words the assertion."""
    lines = str(error).strip().splitlines() or [traceback.extract_tb(error.__traceback__)[-1].line]
    return f"{type(error).__name__}: {lines[-1 if type(error).__name__ == 'CompilationError' else 0]}"


def answer(rule: str, ways) -> None:
    """Print a JSON line for each way in turn, until one loses the CUDA context."""
    for way in ways:
        lost = False
        try:
            found = attempt(way, rule)
        except Exception as error:
            found, lost = sentence(error), isinstance(error, torch.AcceleratorError)
        print(json.dumps(found), flush=True)
        if lost:
            break


def _asked(rule: str) -> dict:
    """The row of one rule. What one process did not come to is asked of another."""
    found = []
    while len(found) < len(WAYS):
        command = [sys.executable, "-m", "ch14.descriptors.rules", rule, *WAYS[len(found):]]
        try:
            done = subprocess.run(command, text=True, capture_output=True, cwd=worker_pool.ROOT, timeout=LIMIT_S, check=False)
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            said = [json.loads(line) for line in done.stdout.splitlines()]
            found += said or [f"its process ended with status {done.returncode}: {last}"]
        except subprocess.TimeoutExpired:
            found.append(f"no answer within {LIMIT_S} s, then killed")
    return {"rule": rule, **dict(zip(WAYS, found)), "status": "ok"}


def source() -> str:
    """Hash of what is tried."""
    return results.source_hash(one_host_kernel, one_device_kernel, attempt, _case, sentence)


@results.experiment("ch14_descriptors_rules", source)
def broken():
    """Each rule, broken once by each way past the checks: what the compiler, the driver or the hardware makes of it."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_asked, RULES))


# ---- what lies outside


def edge(padding: str) -> list[float]:
    """A row of 12 float32, loaded by a tile of 16 with that padding, on the GPU or in the interpreter."""
    where = "cuda" if device.current().capability else "cpu"
    x, out = torch.arange(1.0, 13.0, device=where).view(1, 12), torch.full((1, 16), float(CANARY), device=where)
    one_host_kernel[(1,)](TensorDescriptor(x, [1, 12], [12, 1], [1, 16], padding),
                          TensorDescriptor(out, [1, 16], [16, 1], [1, 16]), SHIFT=0, num_warps=1)
    return out[0].tolist()


# ---- a descriptor that is written into the loop


@triton.jit
def in_loop_kernel(x, out, rows, columns, tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        x_desc = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BLOCK_M, BLOCK_N])
        out_desc = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [BLOCK_M, BLOCK_N])
        out_desc.store([tile * BLOCK_M, 0], x_desc.load([tile * BLOCK_M, 0]))


def hoisted(target: str) -> bool:
    """Whether the compiler makes the descriptors of `in_loop_kernel` before its loop, by the PTX for `target`."""
    numbers = dict.fromkeys(("rows", "columns", "tiles"), "i32")
    ptx = build.build_one(build.job_for(in_loop_kernel, {"x": "*i16", "out": "*i16", **numbers},
                                        {"BLOCK_M": 4, "BLOCK_N": 256}, target, num_warps=1)).ptx
    return ptx.rindex("tensormap.replace") < ptx.index("Loop Header")


if __name__ == "__main__":
    answer(sys.argv[1], sys.argv[2:])
