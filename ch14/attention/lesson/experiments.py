"""The measurements behind `12_ch14_attention`: checks, the ladder and other shapes against torch's SDPA.

A case is (batch, heads, key heads, queries, keys, head dimension, causal).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ch14 import attention
from ch14.attention import few_queries, hopper_kernel, job, kernels, split_hopper_kernel, split_kernels
from ch14.attention.configs import HEAD_DIMS, SPLIT_US, AttentionConfig, best_config, configs
from ch14.attention.lesson import races
from tilelab.measure import bench, check
from tilelab.records import results
from tilelab.runtime import build, device, provenance

LONG = (4, 16, 16, 8192, 8192, 128)  # the headline: batch 4, 16 heads of 128
RAGGED = [(1, 2, 1, 256, 256, 128), (2, 4, 2, 333, 333, 128), (1, 4, 1, 1000, 700, 64)]
RAGGED += [(2, 2, 2, 129, 1025, 128), (1, 3, 3, 1, 1, 64), (1, 2, 2, 65, 3, 128)]
RAGGED += [(3, 5, 1, 511, 640, 64), (1, 8, 2, 2048, 2048, 128)]
RAGGED += [(4, 16, 4, 700, 700, 128), (6, 12, 3, 391, 391, 64)]  # more tiles than an H200 has SMs
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def make_inputs(case, dtype=torch.bfloat16, where="cuda") -> list[torch.Tensor]:
    """Return random q, k, v, and memory for the output."""
    b, h, hk, s, t, d, _ = case
    shapes = ((b, h, s, d), (b, hk, t, d), (b, hk, t, d))
    q, k, v = (torch.randn(*shape, device=where).to(dtype) for shape in shapes)
    return [q, k, v, torch.empty_like(q)]


def compute_reference(q, k, v, causal: bool) -> torch.Tensor:
    """Return `attention.spec`, computed head by head if the float64 scores of all heads would take too much memory."""
    if q[..., 0].numel() * k.shape[2] < 1 << 28:
        return attention.spec(q, k, v, is_causal=causal)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k.shape[1]
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        one = (q[b, h], k[b, h // group], v[b, h // group])
        out[b, h] = attention.spec(*(tensor[None, None] for tensor in one), is_causal=causal)[0, 0]
    return out


def prepare_sdpa(name: str, causal: bool):
    """Return a candidate for `bench.compare`: one of BACKENDS."""
    return lambda q, k, v, out: functools.partial(run_backend, name, causal, q, k, v)


def prepare_eager(causal: bool):
    """Return a candidate for `bench.compare`: torch step by step, with the scores in memory."""

    def prepare(q, k, v, out):
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)

        def run():
            scores = q @ k.mT * q.shape[-1] ** -0.5
            return (scores.masked_fill(hidden, float("-inf")) if causal else scores).softmax(-1) @ v

        return run

    return prepare


def run_backend(name: str, causal: bool, q, k, v) -> torch.Tensor:
    """Run one of BACKENDS of torch's scaled_dot_product_attention."""
    with sdpa_kernel(BACKENDS[name]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def prepare_attention(config: str | AttentionConfig, causal: bool):
    """Return a candidate for `bench.compare`: this kernel in one configuration."""
    return lambda q, k, v, out: attention.prepare(q, k, v, is_causal=causal, out=out, config=config)


def verify(config: str | AttentionConfig, case, dtype=torch.bfloat16) -> dict:
    """Check one case against float64, in poisoned and guarded memory.

    Return {status, reason, error, peer_error, tolerance}. The peer is torch's SDPA (its math backend without a GPU).
    The tolerance is 1.5 times the peer's error, or 1.5 times one rounding of the largest result if that is more. (With
    a single key the peer is exact.)
    """
    where, causal = "cuda" if device.current().has_tma else "cpu", case[-1]
    q, k, v, _ = make_inputs(case, dtype, where)
    wanted = compute_reference(q, k, v, causal)
    flat, touched = check.make_poisoned((q.numel() // q.shape[-1], q.shape[-1]), dtype, where)
    attention.attention(q, k, v, is_causal=causal, out=flat.view(q.shape), config=config)
    peer = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    error, peer_error = (check.relative_error(result, wanted) for result in (flat.view(q.shape), peer))
    tolerance = 1.5 * max(peer_error, check.TOLERANCE[dtype] / 2)
    reason = touched() or (f"error {error:.1e} is above {tolerance:.1e}" if not error <= tolerance else "")
    errors = {"error": error, "peer_error": peer_error, "tolerance": tolerance}
    return {"status": "wrong" if reason else "ok", "reason": reason, **errors}


def count_flops(case) -> float:
    """Return the operations of both products; a causal mask leaves about half of the scores."""
    b, h, _, s, t, d, causal = case
    scores = sum(min(row + 1, t) for row in range(s)) if causal else s * t
    return 4.0 * b * h * d * scores


def label(case, name: str, config: AttentionConfig | None = None) -> dict:
    """Return the fields of a row that name its case."""
    names = {"name": name, "config": str(config or "")}
    return names | {"shape": list(case[:6]), "causal": case[6], "dtype": "bf16"}


def compare_with_cudnn(candidates: dict, case, **timing) -> list[dict]:
    """Time `candidates` ({name: candidate of bench.compare}) interleaved with the peer.

    Return bench.Timing.row of each. The peer is cuDNN's SDPA, or the next backend that takes the case; its row is the
    first.
    """
    peer = choose_peer(case)
    every = {peer: prepare_sdpa(peer, case[-1]), **candidates}
    found = bench.compare(every, lambda: make_inputs(case), peer, flops=count_flops(case), **timing)
    return [found[name].row() for name in every]


def choose_peer(case) -> str:
    """Run the case in each of BACKENDS until one takes it, and return its name."""
    for name in BACKENDS:
        try:
            prepare_sdpa(name, case[-1])(*make_inputs(case))()
            return name
        except torch.AcceleratorError:
            raise  # the CUDA context is lost
        except RuntimeError as error:
            reason = error
    raise reason


MEASURED = kernels, split_kernels, split_hopper_kernel, hopper_kernel, AttentionConfig, configs, best_config


def source() -> str:
    """Return the hash of what is measured: the kernels, their configurations and the choice."""
    return provenance.source_hash(*MEASURED)


experiment = functools.partial(results.experiment, source=source)


def ladder_here(d: int) -> dict[str, AttentionConfig]:
    """Return the steps that this GPU runs: without wgmma only the plain kernel, with the tiles of "best"."""
    target = device.current().target
    return configs(d) if device.target_limits(target).has_wgmma else {"plain": best_config(d, target)}


def compile_ladder(*dtypes: str) -> None:
    """Compile every step for both head dimensions, with and without a mask, on all CPUs."""
    target = device.current().target
    jobs = [
        job(config, target, d, causal, dtype)
        for dtype, d, causal in itertools.product(dtypes, HEAD_DIMS, (False, True))
        for name, config in ladder_here(d).items()
        if name != "persistent"  # only its grid differs from the step before it
    ]
    build.compile_ahead(jobs)


def choose_config(case) -> AttentionConfig:
    """Return what "best" is for a case on this GPU."""
    here = device.current()
    return best_config(case[5], here.target, case, here.sms)


def compile_choices(cases) -> None:
    """Compile what "best" is for each case, on all CPUs."""
    target, jobs = device.current().target, {}
    for case in cases:
        config, (d, causal) = choose_config(case), case[5:]
        jobs[config, d, causal] = job(config, target, d, causal)
        if config.splits > 1:
            jobs[config, d] = few_queries.merge_job(config, target, d)
    build.compile_ahead(list(jobs.values()))


def check_correctness() -> list[dict]:
    """Check the kernels on ragged shapes against float64: bf16 and fp16 on a GPU, fp16 in Triton's interpreter."""
    if device.current().has_tma:
        cases = [
            (dtype, (*shape, causal), name, config)
            for dtype in (torch.bfloat16, torch.float16)
            for causal in (False, True)
            for shape in RAGGED
            for name, config in ladder_here(shape[5]).items()
        ]
        compile_ladder("bf16", "fp16")
    else:
        tile = AttentionConfig(32, 16, 4, 2)
        cases = [
            (torch.float16, (*shape, causal), "plain", tile)
            for causal in (False, True)
            for shape in ((1, 2, 1, 40, 70, 64), (2, 2, 2, 33, 33, 64), (1, 4, 2, 50, 20, 128))
        ]
    return [
        label(case, name, config) | {"dtype": str(dtype)[6:]} | verify(config, case, dtype)
        for dtype, case, name, config in cases
    ]


def list_split_steps(d: int) -> list[AttentionConfig]:
    """Return the split kernels with one split and with three that this GPU runs."""
    tiles = [config for of_d, config in SPLIT_US if of_d == d]
    if not device.target_limits(device.current().target).has_wgmma:
        tiles = [AttentionConfig(rows, 64, 4, 2, "split") for rows in (16, 64)]
    return [dataclasses.replace(config, splits=splits) for config in tiles for splits in (1, 3)]


def check_splits() -> list[dict]:
    """Check the split kernels against float64 on a GPU: groups of heads, ragged lengths, one key, a mask."""
    shapes = [(1, 8, 2, 1, 700, 128), (2, 10, 2, 31, 333, 128), (1, 4, 4, 1, 1, 64), (2, 14, 2, 17, 1025, 64)]
    cases = [
        (dtype, (*shape, causal), config)
        for dtype, shape, causal in itertools.product((torch.bfloat16, torch.float16), shapes, (False, True))
        for config in list_split_steps(shape[5])
    ]
    target, jobs = device.current().target, []
    for d, dtype in itertools.product(HEAD_DIMS, ("bf16", "fp16")):
        steps = list_split_steps(d)
        jobs += [job(config, target, d, causal, dtype) for config in steps for causal in (False, True)]
        jobs.append(few_queries.merge_job(steps[-1], target, d, dtype))
    build.compile_ahead(jobs)
    return [
        label(case, "split", config) | {"dtype": str(dtype)[6:]} | verify(config, case, dtype)
        for dtype, case, config in cases
    ]


def prepare_right(steps: dict[str, AttentionConfig], checks: dict[str, dict], causal: bool) -> dict:
    """Return a candidate of `compare_with_cudnn` for each step whose check is ok."""
    right = {name: config for name, config in steps.items() if checks[name]["status"] == "ok"}
    return {name: prepare_attention(config, causal) for name, config in right.items()}


@experiment("ch14_attention_ladder")
def measure_ladder():
    """Check and time every step at the headline shape, with and without a mask, beside torch's backends."""
    rows = []
    compile_ladder("bf16")
    for causal in (False, True):
        case = (*LONG, causal)
        steps = ladder_here(case[5])
        checks = {name: verify(config, case) for name, config in steps.items()}
        peer, *timed = compare_with_cudnn(prepare_right(steps, checks, causal), case)
        timed = {row["name"]: row for row in timed}
        # The slow backends are timed apart: they leave the tensor core idle, so the chip cools down and raises the
        # clock for the kernel that follows them.
        slow = {name: prepare_sdpa(name, causal) for name in ("flash", "efficient")}
        slow["eager"] = prepare_eager(causal)
        others = compare_with_cudnn(slow, case, rounds=8)
        rows += [row | label(case, row["name"]) for row in (*others[:0:-1], peer)]
        rows += [label(case, name, step) | checks[name] | timed.get(name, {}) for name, step in steps.items()]
    return rows


LENGTHS = (1024, 2048, 4096, 8192, 16384)
SHAPES = [(16384 // s, 2048 // d, 2048 // d, s, s, d) for d in (64, 128) for s in LENGTHS]
OTHERS = [(4, 32, 8, 4096, 4096, 128), (1, 32, 4, 16384, 16384, 128)]
OTHERS += [(2, 16, 2, 3000, 3000, 128), (8, 16, 16, 577, 577, 64)]


@experiment("ch14_attention_shapes")
def measure_shapes():
    """Time the best configuration over lengths (16,384 tokens, 2,048 features), grouped queries and ragged lengths."""
    rows = []
    for shape, causal in itertools.product([*SHAPES, *OTHERS], (False, True)):
        case = (*shape, causal)
        config = choose_config(case)
        found = verify(config, case) if shape in OTHERS else {"status": "ok", "reason": ""}
        row = compare_with_cudnn({"best": prepare_attention(config, causal)}, case, rounds=8, warm_s=0.1)[1]
        rows.append(found | row | label(case, "best", config))
    return rows


SMALL_HEAD = [
    (*shape, causal)
    for shape in ((4, 32, 32, 4096, 4096, 64), (16, 32, 32, 1024, 1024, 64))
    for causal in (False, True)
] + [(1, 16, 16, 1024, 1024, 64, False)]  # 64 tiles of 256 queries


@experiment("ch14_attention_small_head")
def measure_small_head():
    """Check and time the kernels for a head of 64: programs of one group, of two and of four.

    `tiles` is how many tiles of queries a case has.
    """
    here, steps, rows = device.current(), ladder_here(64), []
    named = {"plain": steps["plain"]}
    if "four groups" in steps:
        named |= {"two groups": steps["persistent"], "four groups": steps["four groups"]}
    masks = (False, True)
    build.compile_ahead([job(config, here.target, 64, mask) for config in named.values() for mask in masks])
    for case in SMALL_HEAD:
        ragged = (2, 6, 3, 391, 391, 64, case[-1])
        checks = {name: verify(config, ragged) for name, config in named.items()}
        right = prepare_right(named, checks, case[-1])
        peer, *timed = compare_with_cudnn(right, case, rounds=8, warm_s=0.1)
        found = {row["name"]: row for row in timed}
        rows.append(peer | label(case, peer["name"]))
        for name, config in named.items():
            tiles = {"tiles": case[0] * case[1] * -(-case[3] // config.block_m)}
            rows.append(label(case, name, config) | checks[name] | found.get(name, {}) | tiles)
    return rows


def sanitizer_cases() -> None:
    """Run every step on small and ragged cases, for a sanitizer to watch; AssertionError if a result is wrong."""
    shapes = ((1, 2, 1, 200, 390, 128), (1, 140, 1, 130, 130, 64), (1, 10, 2, 17, 390, 128))
    for shape, causal in itertools.product(shapes, (False, True)):
        steps = ladder_here(shape[5]).values() if shape[3] > 64 else list_split_steps(shape[5])
        for config in steps:
            row = verify(config, (*shape, causal))
            assert row["status"] == "ok", f"{config} {shape}: {row['reason']}"


@results.experiment("ch14_attention_sanitizer", source, can_run=check.can_sanitize)
def run_sanitizers():
    """Run compute-sanitizer on `sanitizer_cases`, tool by tool.

    Racecheck reports reads of what the first warps of a kernel with roles hand over to the others. A row with no other
    race is right: see `races.find_shared_reads`.
    """
    return judge_races(check.sanitize("ch14.attention.lesson.experiments", "attention"))


def judge_races(rows: list[dict]) -> list[dict]:
    """Return the rows of `check.sanitize`; one whose races are all reads of what warps hand over becomes "ok".

    A race names a kernel and an offset, but not which of the kernel's builds. So all of the builds that read shared
    memory at this offset must read there what is handed over.
    """
    target, builds = device.current().target, {}
    jobs = [
        job(config, target, d, causal)
        for d, causal in itertools.product(HEAD_DIMS, (False, True))
        for config in [*ladder_here(d).values(), *list_split_steps(d)]
        if "hopper" in config.kernel
    ]
    for report in build.build(jobs):
        for offset, ordered in races.find_shared_reads(report.sass).items():
            place = f"Read access at {report.job.kernel.rpartition(':')[2]}+0x{offset:x}"
            builds[place] = builds.get(place, True) and ordered
    why = "all of roles and arguments that warps hand over between barriers of the whole block"
    for row in rows:
        if row.get("races") and all(builds.get(place) for place in row["races"]):
            row |= {"status": "ok", "reason": f"{row['reason'].rpartition(': ')[2]}, {why}"}
    return rows
