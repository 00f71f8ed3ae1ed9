"""Attention beside FlashAttention-4, whose kernel for Hopper succeeds FlashAttention-3, and beside attention in steps.

FlashAttention-4 is the package flash-attn-4, installed or in a folder that the environment variable TILES_PEERS names.
Where it cannot be imported, its rows say why.
"""

from __future__ import annotations

import itertools
import os
import site
from collections.abc import Callable

import torch

from ch14.attention import experiments, hopper_kernel, kernels
from ch14.attention.configs import HEAD_DIMS, AttentionConfig, best_config, configs
from tilelab import build, check, device, results

FLASH_4 = "FlashAttention-4"
LENGTHS = (1024, 4096, 8192)  # with 16,384 tokens and 2,048 features in all


def import_flash_attention_4() -> Callable:
    """Return flash_attn_func of FlashAttention-4. Raises ImportError in one sentence where there is none."""
    folder = os.environ.get("TILES_PEERS")
    if folder:
        site.addsitedir(folder)  # also reads its .pth files, which PYTHONPATH does not
    try:
        from flash_attn.cute import flash_attn_func
    except Exception as error:  # a library that is missing beneath it, or of another version
        raise ImportError(f"it cannot be imported ({device.first_line(error)[:120]}): pip install flash-attn-4, or "
                          "name its folder in TILES_PEERS.") from error
    return flash_attn_func


def prepare_flash_attention_4(function: Callable, causal: bool) -> Callable:
    """Return a candidate for `bench.compare`: `function` on (B, S, H, D) copies, in its own layout."""
    def prepare(q, k, v, out):
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))

        def run():
            found = function(q, k, v, causal=causal)
            return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)  # it may return its sums too

        return run

    return prepare


def verify(candidate: Callable, case) -> dict:
    """Check a candidate that returns its result against float64: {status, reason, error, peer_error, tolerance}."""
    where = "cuda" if device.current().has_tma else "cpu"
    q, k, v, out = experiments.make_inputs(case, where=where)
    wanted = experiments.compute_reference(q, k, v, case[-1])
    peer = "cuDNN" if where == "cuda" else "math"
    try:
        result = candidate(q, k, v, out)()
    except torch.AcceleratorError:
        raise  # the CUDA context is lost
    except Exception as error:  # a library may refuse this GPU, or fail to compile
        return {"status": "failed", "reason": f"{type(error).__name__}: {device.first_line(error)[:200]}"}
    peer_result = experiments.run_backend(peer, case[-1], q, k, v)
    row = {"error": check.relative_error(result, wanted), "peer_error": check.relative_error(peer_result, wanted)}
    tolerance = 1.5 * max(row["peer_error"], check.TOLERANCE[q.dtype] / 2)
    reason = "" if row["error"] <= tolerance else f"error {row['error']:.1e} is above {tolerance:.1e}"
    return {"status": "wrong" if reason else "ok", "reason": reason, **row, "tolerance": tolerance}


def find_candidates(case) -> tuple[dict[str, Callable], str]:
    """Return the candidates for a case by name, and why FlashAttention-4 is not one of them, or ""."""
    best = best_config(case[5], device.current().target)
    found = {"course": experiments.prepare_attention(best, case[6])}
    try:
        found[FLASH_4] = prepare_flash_attention_4(import_flash_attention_4(), case[6])
    except ImportError as error:
        return found, str(error)
    return found, ""


CASES = [(16384 // s, 2048 // d, 2048 // d, s, s, d, causal)
         for d, causal, s in itertools.product(HEAD_DIMS, (False, True), LENGTHS)]


def source() -> str:
    """Return the hash of what is measured: the kernels, and how the peers are called."""
    return results.source_hash(kernels, hopper_kernel, AttentionConfig, configs, best_config, find_candidates,
                               prepare_flash_attention_4)


@results.experiment("ch14_attention_peers", source)
def compare_with_peers():
    """Check and time the course's best kernel and FlashAttention-4 beside cuDNN, interleaved, over lengths.

    At `experiments.LONG` without a mask FlashAttention-2 (torch's backend "flash") and attention in steps follow, timed
    apart from the fast ones because they let the chip cool down.
    """
    build.compile_ahead([experiments.job(best_config(d, device.current().target), device.current().target, d, causal)
                         for d, causal in itertools.product(HEAD_DIMS, (False, True))])
    rows = []
    for case in (*CASES, (*experiments.LONG, False)):
        candidates, missing = find_candidates(case)
        checks = {name: verify(candidate, case) for name, candidate in candidates.items()}
        right = {name: candidate for name, candidate in candidates.items() if checks[name]["status"] == "ok"}
        peer, *timed = experiments.compare_with_cudnn(right, case, rounds=12, warm_s=0.2)
        timed = {row["name"]: row for row in timed}
        rows += [peer | experiments.label(case, peer["name"])]
        rows += [experiments.label(case, name) | checks[name] | timed.get(name, {}) for name in candidates]
        if missing:
            rows.append(experiments.label(case, FLASH_4) | {"status": "failed", "reason": missing})
        if case[:6] == experiments.LONG:
            slow = {"flash": experiments.prepare_sdpa("flash", False), "eager": experiments.prepare_eager(False)}
            rows += [row | experiments.label(case, row["name"])
                     for row in experiments.compare_with_cudnn(slow, case, rounds=8)[1:]]
    return rows
