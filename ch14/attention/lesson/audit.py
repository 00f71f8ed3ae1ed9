"""Attention beside FlashAttention-4, whose kernel for Hopper succeeds FlashAttention-3, and beside attention in steps.

tilelab.measure.peers finds FlashAttention-4. Where it cannot run, its rows say why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from ch14.attention.configs import HEAD_DIMS
from ch14.attention.lesson import experiments
from tilelab.measure import bench, check, peers
from tilelab.records import results
from tilelab.runtime import device, provenance

LENGTHS = (1024, 4096, 8192)  # with 16,384 tokens and 2,048 features in all
# Groups of queries share a key head, as in models with 8 and with 4 key heads.
GROUPED = [(4, 32, 8, 4096, 4096, 128, True), (1, 32, 4, 16384, 16384, 128, True)]
GROUPED += [(4, 64, 8, 4096, 4096, 64, True)]


def verify(candidate: Callable, case, peer: str) -> dict:
    """Check a candidate that returns its result against float64: {status, reason, error, peer_error, tolerance}.

    The tolerance is 1.5 times the error of `peer`, one of `experiments.BACKENDS`, or 1.5 times one rounding if that is
    more.
    """
    where = "cuda" if device.current().has_tma else "cpu"
    q, k, v, out = experiments.make_inputs(case, where=where)
    wanted = experiments.compute_reference(q, k, v, case[-1])
    try:
        result = candidate(q, k, v, out)()
    except torch.AcceleratorError:
        raise  # the CUDA context is lost
    except Exception as error:  # a library may refuse this GPU, or fail to compile
        return {"status": "failed", "reason": f"{type(error).__name__}: {device.first_line(error)[:200]}"}
    peer_result = experiments.run_backend(peer, case[-1], q, k, v)
    row = {"error": check.relative_error(result, wanted)}
    row["peer_error"] = check.relative_error(peer_result, wanted)
    tolerance = 1.5 * max(row["peer_error"], check.TOLERANCE[q.dtype] / 2)
    reason = "" if row["error"] <= tolerance else f"error {row['error']:.1e} is above {tolerance:.1e}"
    return {"status": "wrong" if reason else "ok", "reason": reason, **row, "tolerance": tolerance}


CASES = [
    (16384 // s, 2048 // d, 2048 // d, s, s, d, causal)
    for d, causal, s in itertools.product(HEAD_DIMS, (False, True), LENGTHS)
] + GROUPED


def source() -> str:
    """Return the hash of what is measured: the kernels, and how the peers are called."""
    return provenance.source_hash(*experiments.MEASURED, compare_case, peers.FlashAttention4)


def cudnn_version() -> str | None:
    """Return cuDNN's version as torch reports it, such as "91900", or None without it."""
    found = torch.backends.cudnn.version()
    return str(found) if found else None


def compare_case(case, flash_4: peers.Peer, **timing) -> list[dict]:
    """Check and time the course's best kernel beside torch's fastest backend (cuDNN) and FlashAttention-4, interleaved.

    The first rows have the names of the peers and hold ratios to cuDNN. A row "course" for each peer follows: those of
    tilelab.measure.peers.compare.
    """
    peer = experiments.choose_peer(case)
    config = experiments.choose_config(case)
    others = {"course": experiments.prepare_attention(config, case[6])}
    if not flash_4.reason:
        others[flash_4.name] = flash_4.prepare_attention(case[6])
    checks = {name: verify(candidate, case, peer) for name, candidate in others.items()}
    right = {name: candidate for name, candidate in others.items() if checks[name]["status"] == "ok"}
    found = bench.compare(
        {peer: experiments.prepare_sdpa(peer, case[6]), **right},
        lambda: experiments.make_inputs(case),
        peer,
        flops=experiments.count_flops(case),
        **timing,
    )
    torchs = peers.Peer(peer, cudnn_version() if peer == "cuDNN" else torch.__version__)
    rows = [found[peer].row() | {"version": torchs.version} | experiments.label(case, peer)]
    if flash_4.name in found:
        rows.append(
            experiments.label(case, flash_4.name)
            | checks[flash_4.name]
            | found[flash_4.name].row()
            | {"version": flash_4.version}
        )
    for each in (torchs, flash_4):
        row = experiments.label(case, "course") | checks["course"]
        if "course" not in found:
            rows.append(row | {"peer": each.name, "peer_version": each.version})
        elif each.name in found:
            rows.append(row | peers.relate(found["course"], found[each.name], each))
        else:
            rows.append(row | peers.fail(each, each.reason or f"{each.name}: {checks[each.name]['reason']}."))
    return rows


@results.experiment("ch14_attention_peers", source)
def compare_with_peers():
    """Check and time the course's best kernel beside cuDNN and FlashAttention-4, over lengths and groups of queries.

    At `experiments.LONG` without a mask FlashAttention-2 (torch's backend "flash") and attention in steps follow, timed
    apart from the fast ones because they let the chip cool down.
    """
    cases = *CASES, (*experiments.LONG, False)
    experiments.compile_choices(cases)
    flash_4, rows = peers.find("flash_attention_4"), []
    for case in cases:
        rows += compare_case(case, flash_4, rounds=12, warm_s=0.2)
    slow = {"flash": experiments.prepare_sdpa("flash", False), "eager": experiments.prepare_eager(False)}
    timed = experiments.compare_with_cudnn(slow, case, rounds=8)[1:]
    return rows + [row | experiments.label(case, row["name"]) for row in timed]
