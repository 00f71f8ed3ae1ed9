"""The measurements behind `ch14_attention`: checks against float64, the ladder, other shapes, a sweep, beside cuDNN.

A case is (batch, heads, key heads, queries, keys, head dimension, causal).
"""

from __future__ import annotations

import functools
import itertools
import re

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ch14 import attention
from ch14.attention import hopper_kernel
from ch14.attention.configs import HEAD_DIMS, AttentionConfig, best, configs
from ch14.attention.configs import job as attention_job
from tilelab import bench, build, check, device, results

LONG = (4, 16, 16, 8192, 8192, 128)  # the headline: batch 4, 16 heads of 128
RAGGED = [(1, 2, 1, 256, 256, 128), (2, 4, 2, 333, 333, 128), (1, 4, 1, 1000, 700, 64), (2, 2, 2, 129, 1025, 128),
          (1, 3, 3, 1, 1, 64), (1, 2, 2, 65, 3, 128), (3, 5, 1, 511, 640, 64), (1, 8, 2, 2048, 2048, 128),
          (4, 16, 4, 700, 700, 128), (6, 12, 3, 391, 391, 64)]  # the last two have more tiles than an H200 has SMs
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}


def inputs(case, dtype=torch.bfloat16, where="cuda") -> list[torch.Tensor]:
    """Random q, k, v and room for the output."""
    b, h, hk, s, t, d, _ = case
    made = [torch.randn(b, heads, length, d, device=where).to(dtype) for heads, length in ((h, s), (hk, t), (hk, t))]
    return [*made, torch.empty_like(made[0])]


def reference(q, k, v, causal: bool) -> torch.Tensor:
    """`attention.spec`, a head at a time where the float64 scores of all would be too many."""
    if q[..., 0].numel() * k.shape[2] < 1 << 28:
        return attention.spec(q, k, v, causal)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    share = q.shape[1] // k.shape[1]
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        kv = h // share
        out[b, h] = attention.spec(q[b:b + 1, h:h + 1], k[b:b + 1, kv:kv + 1], v[b:b + 1, kv:kv + 1], causal)[0, 0]
    return out


def library(name: str, causal: bool):
    """A candidate for `bench.compare`: one backend of torch's SDPA, or `eager`, its steps with the scores in memory."""
    def eager(q, k, v, hidden):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ v

    def prepared(q, k, v, out):
        if name == "eager":
            hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            return lambda: eager(q, k, v, hidden)

        def launch():
            with sdpa_kernel(BACKENDS[name]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

        return launch

    return prepared


def ours(config: AttentionConfig | None, causal: bool):
    """A candidate for `bench.compare`: None stands for the configuration that `attention` takes."""
    return lambda q, k, v, out: attention.prepare(q, k, v, causal, out=out, config=config)


def verify(config: AttentionConfig | None, case, dtype=torch.bfloat16) -> dict:
    """Check against float64 in poisoned, guarded memory: {status, reason, error, peer_error, tolerance}.

    The peer is torch's SDPA, its math backend without a GPU; the tolerance 1.5 times its error, or 1.5 times one
    rounding of the largest result where that is more: by luck a peer errs less, and of one key not at all.
    """
    where, causal = "cuda" if device.current().has_tma else "cpu", case[-1]
    q, k, v, _ = inputs(case, dtype, where)
    wanted = reference(q, k, v, causal)
    flat, touched = check.make_poisoned((q.numel() // q.shape[-1], q.shape[-1]), dtype, where)
    attention.attention(q, k, v, causal, out=flat.view(q.shape), config=config)
    peer = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    error, peer_error = (check.relative_error(result, wanted) for result in (flat.view(q.shape), peer))
    tolerance = 1.5 * max(peer_error, check.TOLERANCE[dtype] / 2)
    reason = touched() or (f"error {error:.1e} is above {tolerance:.1e}" if not error <= tolerance else "")
    return {"status": "wrong" if reason else "ok", "reason": reason, "error": error, "peer_error": peer_error,
            "tolerance": tolerance}


def flops(case) -> float:
    """Of both products; a causal mask leaves about half of the scores."""
    b, h, _, s, t, d, causal = case
    scores = sum(min(row + 1, t) for row in range(s)) if causal else s * t
    return 4.0 * b * h * d * scores


def label(case, name: str, config: AttentionConfig | None = None) -> dict:
    """The fields that say what a row is about."""
    return {"name": name, "config": str(config or ""), "shape": list(case[:6]), "causal": case[6], "dtype": "bf16"}


def against_cudnn(candidates: dict, case, **timing) -> list[dict]:
    """Rows of `candidates` ({name: as for bench.compare}), interleaved with cuDNN's SDPA, whose own row is first; with
    flash's where cuDNN does not take the case."""
    peer = peer_of(case)
    every = {peer: library(peer, case[-1]), **candidates}
    found = bench.compare(every, lambda: inputs(case), peer, flops=flops(case), **timing)
    return [{**found[name].row(), **label(case, name)} for name in every]


def peer_of(case) -> str:
    """The first of BACKENDS that takes a case, which it has then run once."""
    return next(name for name in BACKENDS if _takes(name, case))


def _takes(name: str, case) -> bool:
    try:
        library(name, case[-1])(*inputs(case))()
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError):
            raise
        return False
    return True


def chosen(case) -> AttentionConfig:
    """What `attention` takes for a case on the GPU here."""
    return best(case[5], device.current().target)


def source() -> str:
    """Hash of what is measured: the kernels, their configurations and the choice."""
    return results.source_hash(attention.attend_blocks, attention.attention_plain_kernel, hopper_kernel,
                               AttentionConfig, configs, best)


experiment = functools.partial(results.experiment, source=source)


def warm(*dtypes: str) -> None:
    """Compile every step that runs here, with and without a mask, all CPUs at work."""
    target, every = device.current().target, itertools.product(dtypes, HEAD_DIMS, (False, True))
    build.compile_ahead([attention_job(config, target, d, causal, dtype)
                for dtype, d, causal in every for config in _ladder(d).values()
                if not config.persistent])  # it differs from the step before it by its grid alone


def checked() -> list[dict]:
    """Kernels on ragged shapes against float64, here and now: bf16 and fp16 on a GPU, fp16 in the interpreter."""
    if device.current().has_tma:
        cases = [(dtype, (*shape, causal), name, config) for dtype in (torch.bfloat16, torch.float16)
                 for causal in (False, True) for shape in RAGGED for name, config in _ladder(shape[5]).items()]
        warm("bf16", "fp16")
    else:
        tile = AttentionConfig(32, 16, 4, 2)
        cases = [(torch.float16, (*shape, causal), "plain", tile) for causal in (False, True)
                 for shape in ((1, 2, 1, 40, 70, 64), (2, 2, 2, 33, 33, 64), (1, 4, 2, 50, 20, 128))]
    return [label(case, name, config) | {"dtype": str(dtype)[6:]} | verify(config, case, dtype)
            for dtype, case, name, config in cases]


def _ladder(d: int) -> dict[str, AttentionConfig]:
    """Steps that run here: without wgmma the plain kernel, with the tiles that `attention` takes."""
    target = device.current().target
    return configs(d) if device.target_limits(target).has_wgmma else {"plain": best(d, target)}


@experiment("ch14_attention_ladder")
def ladder():
    """Every step at the headline shape, with and without a mask, beside torch's backends; checked there too."""
    rows = []
    warm("bf16")  # of both head dimensions: in each process of a sanitizer they would be compiled one by one
    for causal in (False, True):
        case = (*LONG, causal)
        steps = _ladder(case[5])
        checks = {name: verify(config, case) for name, config in steps.items()}
        right = {name: ours(config, causal) for name, config in steps.items() if checks[name]["status"] == "ok"}
        peer, *timed = against_cudnn(right, case)
        timed = {row["name"]: row for row in timed}
        # Apart: what comes after a kernel that leaves the tensor core idle runs on a cooler chip, at a higher clock.
        others = against_cudnn({name: library(name, causal) for name in ("flash", "efficient", "eager")}, case,
                               rounds=8)
        rows += [*others[:0:-1], peer]
        rows += [label(case, name, config) | checks[name] | timed.get(name, {}) | {"config": str(config)}
                 for name, config in steps.items()]
    return rows


SHAPES = [(16384 // s, 2048 // d, 2048 // d, s, s, d) for d in (64, 128) for s in (1024, 2048, 4096, 8192, 16384)]
OTHERS = [(4, 32, 8, 4096, 4096, 128), (1, 32, 4, 16384, 16384, 128), (2, 16, 2, 3000, 3000, 128),
          (8, 16, 16, 577, 577, 64)]


@experiment("ch14_attention_shapes")
def shapes():
    """The configuration that `attention` takes over lengths (16,384 tokens in all, 2,048 features), then with grouped
    queries and ragged lengths."""
    rows = []
    for shape, causal in itertools.product([*SHAPES, *OTHERS], (False, True)):
        case = (*shape, causal)
        config = chosen(case)
        found = verify(config, case) if shape in OTHERS else {"status": "ok", "reason": ""}
        row = against_cudnn({"best": ours(config, causal)}, case, rounds=8, warm_s=0.1)[1]
        rows.append(found | row | label(case, "best", config))
    return rows


def sanitizer_cases() -> None:
    """Every step on small and ragged cases, for a sanitizer to watch; AssertionError when one is wrong."""
    wrong = []
    for shape, causal in itertools.product(((1, 2, 1, 200, 390, 128), (1, 140, 1, 130, 130, 64)), (False, True)):
        for name, config in _ladder(shape[5]).items():
            row = verify(config, (*shape, causal))
            wrong += [f"{name} {shape}: {row['reason']}"] if row["status"] != "ok" else []
    if wrong:
        raise AssertionError("; ".join(wrong))


@results.experiment("ch14_attention_sanitizer", source, can_run=check.can_sanitize)
def sanitized():
    """What compute-sanitizer finds in `sanitizer_cases`, tool by tool. Where warps have roles racecheck reports the
    byte from which Triton's dispatch reads them: barriers of the whole block order it, but each role waits at another
    place in the code. A row with no other race is right."""
    rows = check.sanitize("ch14.attention.experiments", "attention")
    known = {f"Read access at attention_hopper_kernel+{offset}" for offset in _dispatches()}
    for row in rows:
        if row.get("races") and set(row["races"]) <= known:
            row |= {"status": "ok", "reason": f"{row['reason'].rpartition(': ')[2]}, all of the byte that tells a warp "
                                              "its role, which barriers of the whole block order"}
    return rows


def _dispatches() -> set[str]:
    """Where kernels with roles read them: a byte loaded after a barrier of all warps, by which they branch."""
    target = device.current().target
    jobs = [attention_job(config, target, d, causal) for d in HEAD_DIMS
            for causal in (False, True) for config in _ladder(d).values() if config.kernel == "hopper"]
    pattern = r"BAR\.SYNC\S* 0x1 ;(?:(?!BAR\.)[\s\S]){0,900}?/\*(\w+)\*/\s+LDS\.U8 (?:(?!EXIT)[\s\S]){0,2400}? BRX "
    found = {offset for report in build.build(jobs) for offset in re.findall(pattern, report.sass)}
    return {f"0x{int(offset, 16):x}" for offset in found}


def built(targets=device.TARGETS[1:], d: int = 128) -> list[dict]:
    """The ladder compiled for Hopper and the choice for every other target: runs anywhere, no GPU needed."""
    order = [(name, target, config) for target in targets for name, config in (
        configs(d) if target == "sm_90a" else {"best": best(d, target)}).items()]
    jobs = [attention_job(config, target, d) for _, target, config in order]
    reports = {id(report.job): report for report in build.build(jobs)}
    return [{**reports[id(job)].row(), "name": name, "config": str(config)}
            for job, (name, _, config) in zip(jobs, order)]
