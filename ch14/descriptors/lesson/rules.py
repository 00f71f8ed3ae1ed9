"""Rules of a descriptor and their reasons: run one tile that keeps all rules, and the same tile with one rule broken.

`quote_checks` returns the sentences of the course's launcher and of Triton's class, on any machine. `attempt` runs the
tile on a GPU, and `run_broken_rules` does so in processes that may fault. Source: CUDA driver API,
`cuTensorMapEncodeTiled`; PTX ISA, "tensormap.replace"; Triton's descriptor API.
"""

from __future__ import annotations

import json
import os
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14 import descriptors
from ch14.descriptors.configs import TileConfig
from tilelab.measure import check
from tilelab.records import results
from tilelab.runtime import cuda, device, provenance

ROWS, WIDE = 8, 64  # of int16: a row is 128 bytes
CANARY = -7
WAYS = ("host", "device")
LIMIT_S = 120
REASONS = {
    "none is broken": "",
    "start at 16 bytes": "TMA moves units of 16 bytes: a map's address is a multiple of them.",
    "rows 16 bytes apart": "The stride of a map is a multiple of 16 bytes as well: each row starts with a whole unit.",
    "last stride 1": "A map has no stride for the innermost dimension: its elements are neighbours.",
    "tile 16 bytes wide": "A row of a box consists of whole units, at least one.",
    "powers of two": "This rule is Triton's: each side of a block is a power of two. A box may have other sides.",
    "at most 1,048,576": "This rule is Triton's, too: a block has at most 2^20 elements.",
    "tiles start at 16 bytes": "A box, too, starts with a whole unit of its row.",
    "rows end at 16 bytes": "A store writes whole units, also where the tensor ends within one.",
    "an allocator is set": "A map that a program makes lies in global memory, which the launch has to provide.",
    "a context in the thread": "The driver encodes a map only in a thread with a CUDA context. Triton asks for a "
    "context only later.",
}
# What breaks each rule in a tile that keeps it: 8 x 64 of int16, at the start of a matrix with rows of 128 bytes.
CHANGES = {"start at 16 bytes": {"offset": 1}, "rows 16 bytes apart": {"stride": 65}}
CHANGES |= {"last stride 1": {"last": 2, "stride": 128}, "tile 16 bytes wide": {"block": (8, 4)}}
CHANGES |= {"powers of two": {"block": (8, 48)}, "at most 1,048,576": {"block": (2048, 1024)}}
CHANGES |= {"tiles start at 16 bytes": {"shift": 1}, "rows end at 16 bytes": {"columns": 63}}
CHANGES |= {"an allocator is set": {"allocator": False}, "a context in the thread": {"context": False}}
RULES = {rule: (reason, CHANGES.get(rule, {})) for rule, reason in REASONS.items()}


@triton.jit
def one_host_kernel(x, out, SHIFT: tl.constexpr):
    out.store([0, 0], x.load([0, SHIFT]))


@triton.jit
def one_device_kernel(
    x,
    out,
    rows,
    columns,
    stride_x,
    stride_out,
    LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHIFT: tl.constexpr,
):
    x_desc = tl.make_tensor_descriptor(x, [rows, columns], [stride_x, LAST], [BLOCK_M, BLOCK_N])
    out_desc = tl.make_tensor_descriptor(out, [rows, columns], [stride_out, 1], [BLOCK_M, BLOCK_N])
    out_desc.store([0, 0], x_desc.load([0, SHIFT]))


def _make_case(where, offset=0, stride=WIDE, last=1, columns=WIDE, **_):
    """Return (all memory of x, x, all of out, out): x random, out full of CANARY."""
    memory = torch.randint(0, 1 << 14, (4 * ROWS * WIDE,), dtype=torch.int16, device=where)
    room = torch.full((ROWS, WIDE), CANARY, dtype=torch.int16, device=where)
    return memory, memory.as_strided((ROWS, columns), (stride, last), offset), room, room[:, :columns]


def quote_checks(rule: str) -> dict:
    """Return what `descriptors.prepare` and TensorDescriptor say of a broken rule, "" where they let it pass."""
    _, change = RULES[rule]
    block = change.get("block", (ROWS, WIDE))
    _, x, _, out = _make_case("cpu", **change)

    def quote(call):
        try:
            call()
        except (ValueError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def check_operands():
        descriptors._check_operands("copy", x, None, None, out, TileConfig("host", *block))

    return {
        "rule": rule,
        "launcher": quote(check_operands),
        "triton": quote(lambda: TensorDescriptor.from_tensor(x, list(block))),
    }


def attempt(way: str, rule: str) -> str:
    """Run one tile with `rule` broken on the GPU, past the launcher's checks; return what came out.

    `way` says where the descriptors are made. Compiler, driver and hardware raise; a fault loses the CUDA context.
    """
    _, change = RULES[rule]
    block, shift = change.get("block", (ROWS, WIDE)), change.get("shift", 0)
    memory, x, room, out = _make_case("cuda", **change)
    constants = {"SHIFT": shift, "num_warps": 1}

    def describe_unchecked(tensor):
        descriptor = TensorDescriptor(memory, [ROWS, WIDE], [WIDE, 1], [ROWS, WIDE])
        descriptor.base, descriptor.block_shape = _start(tensor), list(block)
        descriptor.shape, descriptor.strides = list(tensor.shape), list(tensor.stride())
        return descriptor

    def launch(context):
        if context:
            cuda.current_device()
        if way == "host":
            one_host_kernel[(1,)](describe_unchecked(x), describe_unchecked(out), **constants)
            return
        if change.get("allocator", True):
            triton.set_allocator(
                lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
            )
        one_device_kernel[(1,)](
            _start(x),
            _start(out),
            *x.shape,
            x.stride(0),
            out.stride(0),
            LAST=x.stride(1),
            BLOCK_M=block[0],
            BLOCK_N=block[1],
            **constants,
        )

    # Allocator and context belong to a thread, and this one may have them: launch in a new one. Triton gives a thread
    # a context when it loads a kernel there, so without a context the kernel is first loaded in another thread.
    for context in (True,) if change.get("context", True) else (True, False):
        room.fill_(CANARY)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(launch, context).result()
        torch.cuda.synchronize()
    columns = min(block[1], x.shape[1] - shift)
    wrong = out[:, :columns] != x[:, shift : shift + columns]
    beyond = int((room[:, x.shape[1] :] != CANARY).sum())
    outcome = (
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, in {int(wrong.any(1).sum())} of {ROWS} rows"
        if wrong.any()
        else "right"
    )
    return outcome + (f", and {beyond} elements behind its rows are overwritten" if beyond else "")


def _start(tensor):
    """Return a tensor's start as a kernel takes it: a flat tensor from there on."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset())


def describe_error(error: Exception) -> str:
    """Return the line of an exception that says what is wrong: its first, or the last of a compiler's.

    Of an assertion without words it is the assertion itself.
    """
    lines = str(error).strip().splitlines() or [traceback.extract_tb(error.__traceback__)[-1].line]
    return f"{type(error).__name__}: {lines[-1 if type(error).__name__ == 'CompilationError' else 0]}"


def print_attempts(rule: str, ways) -> None:
    """Print a JSON line for each way in turn, until one loses the CUDA context; an empty line comes first."""
    torch.cuda.init()
    print(flush=True)
    for way in ways:
        lost = False
        try:
            outcome = attempt(way, rule)
        except Exception as error:
            outcome, lost = describe_error(error), isinstance(error, torch.AcceleratorError)
        print(json.dumps(outcome), flush=True)
        if lost:
            break


def _run_rule(rule: str) -> dict:
    """Return the row of one rule. A new process does what the one before it did not reach."""
    outcomes = []
    while len(outcomes) < len(WAYS):
        status, output, errors = check.run_snippet(
            "from ch14.descriptors.lesson import rules; "
            f"rules.print_attempts({rule!r}, {WAYS[len(outcomes) :]})",
            LIMIT_S,
        )
        last = (errors.strip().splitlines() or ["no word"])[-1]
        failed = (
            f"its process ended with status {status}: {last}"
            if status is not None
            else f"no answer within {LIMIT_S} s, then killed"
        )
        outcomes += [json.loads(line) for line in output.splitlines()] or [failed]
    return {"rule": rule, **dict(zip(WAYS, outcomes)), "status": "ok"}


def source() -> str:
    """Return the hash of what is tried."""
    return provenance.source_hash(one_host_kernel, one_device_kernel, attempt, _make_case, describe_error)


@results.experiment("ch14_descriptors_rules", source)
def run_broken_rules():
    """Break each rule once in each way, past the checks, and record how compiler, driver or hardware react."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_run_rule, RULES))


# A part of an outcome that `attempt` returns, and the outcome in a few words.
IN_SHORT = {
    "overwritten": "overwrites memory",
    "are wrong": "wrong, no error",
    "map descriptor": "driver refuses",
    "CompilationError": "compiler refuses",
    "illegal instruction": "illegal instruction",
    "misaligned address": "misaligned address",
    "no allocator": "launch fails",
    "Error: ": "Triton refuses",
}


def tabulate_outcomes(rows: list[dict]) -> list[dict]:
    """Return a table of who notices each broken rule: the checks, and past them what each way of launching does."""
    table = []
    for row in rows:
        said = quote_checks(row["rule"])
        checks = {
            "the course": said["launcher"] and "refuses",
            "TensorDescriptor": said["triton"] and "refuses",
        }
        past = {
            way: next((short for mark, short in IN_SHORT.items() if mark in row[way]), row[way])
            for way in WAYS
        }
        table.append({"broken rule": row["rule"], **checks, **past})
    return table


# ---- elements past the edge


def load_past_edge(padding: str) -> list[float]:
    """Return a row of 12 float32, loaded by a tile of 16 with that padding, on the GPU or in the interpreter."""
    where = "cuda" if device.current().capability else "cpu"
    x, out = (
        torch.arange(1.0, 13.0, device=where).view(1, 12),
        torch.full((1, 16), float(CANARY), device=where),
    )
    one_host_kernel[(1,)](
        TensorDescriptor(x, [1, 12], [12, 1], [1, 16], padding),
        TensorDescriptor(out, [1, 16], [16, 1], [1, 16]),
        SHIFT=0,
        num_warps=1,
    )
    return out[0].tolist()
