"""Find the strongest public kernels for the course's work, and time the course beside them.

DeepGEMM, quack and FlashAttention-4 are optional. `pip install -e .[peers]` installs them for the torch of
requirements.txt, and `.[peers-torch-2-11]` for torch 2.11. The environment variable TILES_PEERS may name a folder with
their wheels unpacked instead. A peer is imported when `find` is asked for it. Where it cannot be imported or does not
know the GPU, its `reason` says so, and the rows of an experiment give this reason in place of figures.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import site
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar

import torch

from tilelab.measure import bench
from tilelab.runtime import device


@dataclass(frozen=True, eq=False)
class Peer:
    """Hold a peer's name, its version, and the reason why it cannot run here ("" where it can).

    A method `prepare_…` of a subclass is a candidate of `bench.compare`, or returns one: it takes the operands and
    returns a launch, which returns the result. Operands lie in the course's layout. What a peer wants in another layout
    is copied in the preparation, which is not timed.
    """

    name: str
    version: str | None = None
    reason: str = ""
    library: Any = field(default=None, repr=False)


class DeepGemm(Peer):
    """DeepGEMM (https://github.com/deepseek-ai/DeepGEMM), in the packaging of SGLang: sgl-deep-gemm.

    It compiles a kernel when a shape asks for it, with the nvcc of CUDA_HOME.
    """

    NAME: ClassVar = "DeepGEMM"
    PACKAGE: ClassVar = "sgl-deep-gemm"
    MODULE: ClassVar = "deep_gemm"
    GENERATIONS: ClassVar = (9, 10)

    def prepare_gemm(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        """Multiply a (M, K) and b (K, N), whose columns are contiguous, into out (M, N), all in bfloat16."""
        weight = b.T

        def run():
            self.library.bf16_gemm_nt(a, weight, out)
            return out

        return run

    def prepare_fp8(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out: torch.Tensor,
    ) -> Callable[[], Any]:
        """Multiply operands of `ch14.fp8_gemm.prepare`: float8_e4m3fn with scales of 1 x 128 and 128 x 128.

        DeepGEMM wants the scales of A column by column, each column at a multiple of 16 bytes. It wants b as a weight
        (N, K) and its scales as (N / 128 rounded up, K / 128), both contiguous.
        """
        columns, weight, weight_scales = align_columns(scale_a), b.T, scale_b.T.contiguous()

        def run():
            self.library.fp8_gemm_nt((a, columns), (weight, weight_scales), out)
            return out

        return run


@dataclass(frozen=True, eq=False)
class Quack(Peer):
    """quack (https://github.com/Dao-AILab/quack), written in CuTe DSL: quack-kernels.

    All of its configurations for this GPU are timed once per shape, as quack's own autotuner does. Compiling them takes
    about a minute on one core; the folder that QUACK_CACHE_DIR names keeps them.
    """

    NAME: ClassVar = "quack"
    PACKAGE: ClassVar = "quack-kernels"
    MODULE: ClassVar = "quack.gemm_interface"
    GENERATIONS: ClassVar = (8, 9, 10, 11, 12)
    chosen: dict = field(default_factory=dict, repr=False)  # {(M, N, K): configuration}

    def prepare_gemm(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
        """Multiply a (M, K) and b (K, N), whose columns are contiguous, into out (M, N), all in bfloat16."""
        shape = (*out.shape, a.shape[1])
        if shape not in self.chosen:
            self.chosen[shape] = self.choose_config(a, b, out)
        return self._prepare_config(self.chosen[shape], a, b, out)

    def _prepare_config(self, config, a, b, out):
        multiply = self.library.gemm_tuned.fn  # the function that quack's autotuner times

        def run():
            multiply(a, b, out, config=config)
            return out

        return run

    def choose_config(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
        """Return the fastest of quack's configurations for these operands.

        All are timed in short bursts, and the six fastest again in longer ones.
        """

        def copy_operands():
            # clone keeps columns contiguous only of b.T
            return (a.clone(), b.T.clone().T, torch.empty_like(out))

        known = importlib.import_module("quack.gemm_config")
        default = known.default_config(a.device)
        configs = {
            str(config): config
            for config in (default, *known.get_all_configs())
            if config.device_capacity == default.device_capacity
        }
        for kept, timing in ((6, dict(rounds=2, burst_ms=0.5)), (1, dict(rounds=8, burst_ms=2))):
            candidates = {
                name: functools.partial(self._prepare_config, config) for name, config in configs.items()
            }
            found = bench.compare(candidates, copy_operands, str(default), warm_s=0, **timing)
            fastest = sorted((each for each in found.values() if each.ms), key=lambda each: each.ms)[:kept]
            configs = {name: configs[name] for name in (str(default), *(each.name for each in fastest))}
        return configs[fastest[0].name]


class FlashAttention4(Peer):
    """FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, flash_attn/cute): flash-attn-4.

    Its kernel for Hopper succeeds FlashAttention-3.
    """

    NAME: ClassVar = "FlashAttention-4"
    PACKAGE: ClassVar = "flash-attn-4"
    MODULE: ClassVar = "flash_attn.cute"
    GENERATIONS: ClassVar = (8, 9, 10, 11, 12)

    def prepare_attention(self, causal: bool) -> Callable:
        """Return a candidate on q (B, H, S, D), k and v (B, Hk, T, D) and out, of which it takes (B, S, H, D) copies.

        H is a multiple of Hk. With `causal`, the course compares only equally many queries and keys.
        """

        def prepare(q, k, v, out):
            q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))

            def run():
                found = self.library.flash_attn_func(q, k, v, causal=causal)
                # The peer may return its sums too.
                return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

            return run

        return prepare


KINDS: dict[str, type[Peer]] = {"deep_gemm": DeepGemm, "quack": Quack, "flash_attention_4": FlashAttention4}


def find(name: str) -> Peer:
    """Import a peer, one of KINDS, and return it; never raises for a peer that is missing or does not fit.

    ValueError for a name that is not in KINDS.
    """
    if name not in KINDS:
        raise ValueError(f"unknown peer {name!r:.40}; choose one of {', '.join(KINDS)}.")
    kind, here = KINDS[name], device.current()
    if here.capability is None or here.capability[0] not in kind.GENERATIONS:
        known = ", ".join(f"{major}.x" for major in kind.GENERATIONS)
        return kind(
            kind.NAME,
            reason=f"{kind.NAME} runs on GPUs of compute capability {known}; here is {here.describe()}.",
        )
    folder = os.environ.get("TILES_PEERS")
    if folder and os.path.abspath(folder) not in sys.path:
        site.addsitedir(os.path.abspath(folder))  # also reads its .pth files, which PYTHONPATH does not
    try:
        library = importlib.import_module(kind.MODULE)
    except Exception as error:
        # A library may be missing beneath it, or be of another version or another torch.
        return kind(
            kind.NAME,
            reason=f"{kind.NAME} cannot be imported ({_describe(error)}): pip install -e .[peers], "
            "or name a folder that holds it in TILES_PEERS.",
        )
    try:
        version = metadata.version(kind.PACKAGE)
    except metadata.PackageNotFoundError:
        version = getattr(library, "__version__", None)
    return kind(kind.NAME, version, library=library)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {device.first_line(error)[:200]}"


def align_columns(scales: torch.Tensor) -> torch.Tensor:
    """Return float32 scales (M, K / 128) column by column, each column at a multiple of 16 bytes, copied if need be."""
    m, blocks = scales.shape
    pitch = math.ceil(m / 4) * 4
    if scales.stride() == (1, pitch) and scales.data_ptr() % 16 == 0:
        return scales
    return torch.empty(blocks, pitch, device=scales.device)[:, :m].copy_(scales.T).T


# ---- comparisons


def compare(
    course: Callable,
    rivals: dict[Peer, Callable],
    make_inputs: Callable[[], Sequence],
    find_fault: Callable[[Callable], str],
    checked: dict,
    **timing: float,
) -> list[dict]:
    """Time the course's kernel beside each peer, all interleaved, and return one row per peer.

    `course` and the values of `rivals` are candidates of `bench.compare`, which also takes `make_inputs` and `timing`.
    `checked` is the row of the course's own check; a wrong kernel is not timed. `find_fault(candidate)` runs a
    candidate and returns what is wrong with its result, or "". A row is {name: "course", ms, peer, peer_version,
    peer_ms, ratio, spread, status, reason} and what `checked` holds, with `tflops` and `gbps` of the course where
    `timing` gives operations and bytes. `ratio` is peer_ms / ms: above 1 the course is faster. A peer that is missing,
    wrong, or cannot be timed gives a row of status "failed" with a reason and without a ratio. Without any peer nothing
    is timed.
    """
    if checked["status"] != "ok":
        return [
            checked | {"name": "course", "peer": peer.name, "peer_version": peer.version} for peer in rivals
        ]
    reasons = {peer: peer.reason or _find_reason(find_fault, peer, make) for peer, make in rivals.items()}
    able = {peer.name: prepare for peer, prepare in rivals.items() if not reasons[peer]}
    found = bench.compare({"course": course, **able}, make_inputs, "course", **timing) if able else {}
    rows = []
    for peer in rivals:
        timed = peer.name in found
        row = relate(found["course"], found[peer.name], peer) if timed else fail(peer, reasons[peer])
        rows.append(checked | row)
    return rows


def _find_reason(find_fault: Callable, peer: Peer, prepare: Callable) -> str:
    try:
        fault = find_fault(prepare)
    except torch.AcceleratorError:
        raise  # the CUDA context is lost, and with it everything that follows
    except Exception as error:  # a library may refuse the operands, or fail to compile
        return f"{peer.name} fails: {_describe(error)}."
    return fault and f"the result of {peer.name} is wrong: {fault}."


def fail(peer: Peer, reason: str) -> dict:
    """Return the row of a peer with which the course could not be compared."""
    who = {"name": "course", "peer": peer.name, "peer_version": peer.version}
    return who | {"status": "failed", "reason": reason}


def relate(course: bench.Timing, rival: bench.Timing, peer: Peer) -> dict:
    """Return the row of two timings of one run of `bench.compare`; `ratio` is the rival's time over the course's.

    `spread` is half of the distance between the quartiles of this ratio, taken in each round.
    """
    for name, timing in (("the course's kernel", course), (peer.name, rival)):
        if not timing.ms:
            return fail(peer, f"{name} cannot be timed: {timing.reason}.")
    of_course, of_rival = (
        timing.ratios if timing.name != timing.peer else itertools.repeat(1.0) for timing in (course, rival)
    )
    rounds = [mine / theirs for mine, theirs in zip(of_course, of_rival)]
    rates = {name: rate for name in ("tflops", "gbps") if (rate := getattr(course, name))}
    row = {"name": "course", "ms": course.ms, **rates, "peer": peer.name, "peer_version": peer.version}
    row |= {"peer_ms": rival.ms, "ratio": rival.ms / course.ms}
    row |= {"spread": bench.find_spread(rounds)} if len(rounds) > 1 else {}
    return row | {"status": "ok", "reason": ""}
