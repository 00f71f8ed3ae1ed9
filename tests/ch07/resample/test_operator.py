"""The resampling: what the compiler makes of the ladder, how a problem is cut, the arithmetic, and results on a GPU."""

import bisect
import dataclasses
import itertools
import math
import random
import re
import types
from fractions import Fraction

import numpy
import pytest
import torch
from cases import cases
from sentences import refused

from ch07 import resample
from ch07.resample import ELEMENTS, LADDER, ResampleConfig
from ch07.resample.configs import MAX_SHARED_TIMES, fit_config
from ch07.resample.lesson import experiments
from tilelab.measure import bench, check, profiler
from tilelab.runtime import build, device, operands

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
# Each kernel for Hopper, and the wide accesses and the bulk copy for each family of targets.
BUILT = [(kernel, torch.bfloat16, "sm_90a") for kernel in LADDER]
BUILT += [("vectors", torch.float32, "sm_120a"), ("bulk_rows", torch.float32, "sm_120a")]
BUILT += [("vectors", torch.bfloat16, "sm_100a")]
OTHERS = [(kernel, torch.float32, "sm_120a") for kernel in LADDER] + [
    ("bulk_rows", torch.bfloat16, "sm_100a")
]
# Rows of 20 and 14 bytes, and more source times than shared memory holds.
ODD = [("vectors", shape) for shape in experiments.SMALL[3:6]] + [("shared_search", experiments.SMALL[4])]
# More and fewer targets than threads, rows that do not divide them, and sampled times.
VECTORS = [
    (ResampleConfig("vectors", 128, 384, 4), (1024, 1024, 2048, 48)),
    (ResampleConfig("vectors", 256, 85, 2), (1024, 1024, 2048, 192)),
    (ResampleConfig("vectors", 128, 128, 4, sample=16), (512, 4096, 8192, 128)),
]


@pytest.fixture(scope="module")
def built():
    """Reports by (kernel, dtype, target), for rows of 128 features, and by (kernel, shape) for others."""
    jobs = {(kernel, dtype, target): resample.job(kernel, target, dtype) for kernel, dtype, target in BUILT}
    jobs |= {each: resample.job(each[0], "sm_90a", torch.float16, each[1]) for each in ODD}
    jobs["bulk_rows", "dense"] = resample.job("bulk_rows", "sm_120a", shape=(512, 1024, 64, 128))
    return build_all(jobs)


def build_all(jobs):
    named = [dataclasses.replace(job, name=" ".join(map(str, key))) for key, job in jobs.items()]
    reports = {report.job.name: report for report in build.build(named)}
    return {key: reports[" ".join(map(str, key))] for key in jobs}


@pytest.mark.compile
def test_every_step_compiles_and_holds_the_instruction_it_teaches(built):
    check_instructions(BUILT, built)


@pytest.mark.trouble
def test_every_step_holds_it_in_float32_and_for_other_targets():
    jobs = {(kernel, dtype, target): resample.job(kernel, target, dtype) for kernel, dtype, target in OTHERS}
    check_instructions(OTHERS, build_all(jobs))


def check_instructions(cases, built):
    for case in cases:
        kernel, report, sass = case[0], built[case], built[case].sass
        assert report.launchable and report.spills == 0, (case, report.reason)
        found = (report.counts["UBLKCP"] > 0, report.counts["SYNCS"] > 0)
        assert found == (kernel == "bulk_rows",) * 2, case
        assert (report.counts["LDS"] > 0) == (kernel != "search_a_thread"), case
        assert not report.counts["LDGSTS"], case
        assert bool(re.search(r"\bSHFL\b", sass)) == (kernel == "lane0_search"), case
        assert bool(re.search(r"\bVOTE\b", sass)) == (kernel == "ballot_search"), case
        assert bool(re.search(r"\bATOMS\b", sass)) == (kernel == "bulk_rows"), case
        wide = kernel in ("vectors", "persistent", "bulk_rows")
        found = [bool(re.search(rf"\b{load}\.E\.128\b", sass)) for load in ("LDG", "STG")]
        assert found == [wide, wide], case


@pytest.mark.compile
def test_a_thread_of_vectors_loads_all_its_vectors_before_it_uses_the_first():
    for report in build.build(
        [
            dataclasses.replace(resample.job(config, "sm_90a", shape=shape), name=str(config))
            for config, shape in VECTORS
        ]
    ):
        assert report.launchable and not report.spills, (report.job.name, report.reason)
        wide = re.findall(r"\b(LDG|STG)\.E\.128\b", report.sass)
        loads = 2 * report.job.constants["TARGETS_IN_FLIGHT"]
        assert any(wide[i : i + loads] == ["LDG"] * loads for i in range(len(wide))), report.job.name


@pytest.mark.compile
def test_odd_shapes_compile(built):
    for kernel, shape in ODD:
        report, vector = built[kernel, shape], math.gcd(16, 2 * shape[3])
        assert report.launchable and not report.spills, report.reason
        assert report.job.constants["VECTOR_BYTES"] == vector, report.reason
        if kernel == "vectors":
            assert ("LDG.E.128" in report.sass) == (vector == 16)


def test_job_names_its_shared_memory():
    job = resample.job("bulk_rows", "sm_100a", torch.float32, (8, 1000, 2000, 64))
    assert job.smem_bytes == job.constants["ROWS"] * 64 * 4 > 0
    assert job.num_warps * 32 == job.constants["THREADS"]
    assert resample.job("vectors", "sm_100a").smem_bytes == 0


@pytest.mark.compile
def test_bulk_rows_fits_where_a_block_has_less_shared_memory(built):
    assert built["bulk_rows", "dense"].launchable, built["bulk_rows", "dense"].reason


@cases(
    "change, message",
    ({"kernel": "fast"}, "unknown kernel 'fast'; choose one of search_a_thread, "),
    ({"threads": 100}, "threads is 100; it must be 32 to 1,024 in steps of 32"),
    ({"threads": 2048}, "threads is 2048"),
    ({"targets": 0}, "targets is 0; it must be 1 to 1,024"),
    ({"targets_in_flight": 9}, "targets_in_flight is 9; it must be 1 to 8"),
    ({"sample": 12}, "sample is 12; it must be a power of two or 0"),
    ({"kernel": "bulk_rows", "sample": 2}, "sample is an option of vectors; the kernel is bulk_rows"),
)
def test_bad_configuration_is_one_sentence(change, message):
    with refused(message):
        ResampleConfig(**{"kernel": "vectors", "threads": 256, "targets": 64, **change})


@cases(
    "config, name",
    (ResampleConfig("lane0_search", 256, 64), "lane0_search · 256 threads · 64 targets"),
    (
        ResampleConfig("vectors", 128, 64, 4, sample=16),
        "vectors · 128 threads · 64 targets · 4 in flight · 1 of 16 times in shared memory",
    ),
)
def test_a_configuration_has_a_name_that_can_be_read_back(config, name):
    assert config.name == str(config) == name
    assert resample.parse(name) == resample.parse(name.replace(" · ", ", ")) == config
    with pytest.raises(ValueError, match="must have a kernel"):
        resample.parse(config.kernel)


def test_any_problem_is_cut_legally():
    chance = random.Random(7)
    for _ in range(300):
        batches, sources, targets = (
            chance.choice((1, 2, 3, 100, 4096)) * chance.randint(1, 9) for _ in range(3)
        )
        depth = chance.randint(1, 5000)
        sms = chance.choice((1, 48, 132, 188))
        dtype = chance.choice(list(ELEMENTS))
        kernel = chance.choice(list(LADDER))
        row = depth * dtype.itemsize
        shape = (batches, sources, targets, depth)
        config = fit_config(kernel, shape, dtype.itemsize, sms)
        # what a block may have without asking
        assert 32 * config.targets + 4 * (MAX_SHARED_TIMES + 1) <= 48 << 10
        if kernel in ("search_a_thread", "lane0_search", "ballot_search"):
            continue
        in_flight = config.targets_in_flight
        assert in_flight & (in_flight - 1) == 0
        assert kernel == "vectors" or config.targets & (config.targets - 1) == 0
        assert config.targets <= 32 or batches * math.ceil(targets / config.targets) >= 4 * sms
        values = config.constants(dtype, shape)
        assert row % values["VECTOR_BYTES"] == 0 and dtype.itemsize <= values["VECTOR_BYTES"] <= 16
        assert values["ROWS"] * row <= 98304 and values["ELEMENT"] == ELEMENTS[dtype]
        found = [values[name] for name in ("THREADS", "TARGETS", "TARGETS_IN_FLIGHT")]
        assert found == [config.threads, config.targets, in_flight]


def test_vectors_has_room_for_every_problem_and_targets_for_all_threads():
    chance = random.Random(8)
    for _ in range(300):
        shape = tuple(chance.choice((1, 3, 100, 4096)) * chance.randint(1, 40) for _ in range(3)) + (
            8 * chance.randint(1, 64),
        )
        config = fit_config("vectors", shape, 2, chance.choice((48, 132)))
        values = config.constants(torch.bfloat16, shape)
        assert 32 * values["TARGETS"] + 4 * values["TIMES"] < 48 << 10
        assert values["TIMES"] == 0 or values["TIMES"] * values["SAMPLE"] >= shape[1]
    large = {
        row: fit_config("vectors", (2000, 1024, 2048, row // 2), 2, 132).targets
        for row in (64, 80, 96, 256, 320)
    }
    assert large == {64: 512, 80: 512, 96: 512, 256: 128, 320: 102}
    samples = {
        sources: fit_config("vectors", (64, sources, 2048, 32), 2, 132).sample
        for sources in (2048, 4096, 4097)
    }
    assert samples == {2048: 0, 4096: 8, 4097: 16}


CONFIG = ResampleConfig("vectors", 256, 64)


@cases(
    "sample, cases",
    (0, [(1, 2, 1), (2, 2, 1), (3, 4, 1), (64, 64, 1), (65, 128, 1), (2048, 2048, 1), (2049, 0, 1)]),
    (16, [(4096, 256, 16), (4097, 512, 16), (5, 2, 16), (1 << 20, 0, 1)]),
)
def test_times_have_room_for_a_search_of_whole_powers_of_two(sample, cases):
    config = dataclasses.replace(CONFIG, sample=sample)
    for sources, times, found in cases:
        values = config.constants(torch.float16, (1, sources, 100, 8))
        assert (values["TIMES"], values["SAMPLE"]) == (times, found), sources


def test_a_thread_moves_what_divides_a_row():
    def vector(depth, dtype, given=0):
        return CONFIG.constants(dtype, (1, 10, 10, depth), given)["VECTOR_BYTES"]

    assert [vector(depth, torch.bfloat16) for depth in (1, 2, 4, 8, 12, 7, 128)] == [2, 4, 8, 16, 8, 2, 16]
    assert [vector(depth, torch.float32) for depth in (1, 2, 3, 4)] == [4, 8, 4, 16]
    assert vector(128, torch.bfloat16, 2) == 2


def by_numpy(features, source_times, target_times):
    """The same by numpy.interp, a batch and a feature at a time."""
    features, source_times, target_times = (
        t.double().numpy() for t in (features, source_times, target_times)
    )
    batches = [
        numpy.stack([numpy.interp(targets, times, column) for column in rows.T], axis=1)
        for rows, times, targets in zip(features, source_times, target_times)
    ]
    return torch.from_numpy(numpy.stack(batches))


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("sources", [1, 2, 3, 50])
def test_spec_is_numpy_s_interpolation(sources, dtype):
    torch.manual_seed(sources)
    features = torch.randn(3, sources, 5).to(dtype)
    times = torch.randn(3, sources).sort(1).values
    hits = times.gather(1, torch.randint(0, sources, (3, 60)))
    outside = torch.tensor([[-9.0, 9.0, -math.inf, math.inf]]).expand(3, -1)
    targets = torch.cat([2 * torch.randn(3, 200), hits, outside], 1)[:, torch.randperm(264)]
    found = resample.spec(features, times, targets)
    assert found.dtype == torch.float64 and found.shape == (3, 264, 5)
    assert (found - by_numpy(features, times, targets)).abs().max() <= 1e-12


@cases(
    "times, expected",
    ([0, 0, 1, 1, 1, 2], [1, 2, 2.5, 5, 5.5, 6, 6]),
    ([0, 1, 2, 2], [1, 1, 1.5, 2, 2.5, 4, 4]),
)
def test_spec_of_equal_source_times(times, expected):
    features, times = torch.arange(1.0, 1 + len(times)).view(1, -1, 1), torch.tensor([times]).float()
    targets = torch.tensor([[-1.0, 0, 0.5, 1, 1.5, 2, 3]])
    assert resample.spec(features, times, targets).flatten().tolist() == expected
    assert torch.equal(resample.spec(features, times, targets), by_numpy(features, times, targets))


def test_spec_of_nan_is_nan_there_alone():
    features, times, _ = experiments.make_inputs(2, 9, 1, 4, where="cpu")
    targets = torch.tensor([[0.1, math.nan, 0.9]] * 2)
    assert resample.spec(features, times, targets).isnan().any(2).tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize("shape", [(1, 1, 4, 3), (2, 2, 5, 8), (3, 40, 7, 10), (2, 5, 400, 1), (2, 6, 0, 4)])
def test_compulsory_bytes_counts_each_row_once(shape):
    features, times, targets = experiments.make_inputs(*shape, torch.float16, where="cpu")
    targets = 1.5 * targets - 0.25
    targets[:, :1] = times[:, -1:]

    def needed(of_times, target):
        at = bisect.bisect_right(of_times, target) - 1
        alone = at < 0 or at == len(of_times) - 1 or of_times[at] == target
        return {max(at, 0)} if alone else {at, at + 1}

    rows = sum(
        len(set().union(*(needed(of_times, target) for target in of_batch)))
        for of_times, of_batch in zip(times.tolist(), targets.tolist())
    )
    batches, sources, count, depth = shape
    expected = (rows + batches * count) * depth * 2 + 4 * batches * (sources + count)
    assert resample.compulsory_bytes(features, times, targets) == expected


def test_inputs_of_the_trials_are_odd_where_asked():
    features, times, targets = experiments.make_inputs(4, 50, 300, 3, torch.float16, odd=True, where="cpu")
    assert features.dtype == torch.float16 and (times.diff(dim=1) >= 0).all() and times.is_contiguous()
    assert (times.diff(dim=1) == 0).sum(1).min() >= 2 and (targets[0].diff() < 0).any()
    assert (targets < times[:, :1]).any() and (targets > times[:, -1:]).any()
    assert torch.isin(targets, times).float().mean() > 0.2


f32, f64 = numpy.float32, numpy.float64


def fma(a, b, c):
    """a b + c in float32, rounded once: the product is exact in float64, the sum is rounded to odd there."""
    product, c = f64(a) * f64(b), f64(c)
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    bits = total.view(numpy.int64)
    away = numpy.where((lost > 0) == (total > 0), 1, -1)
    return (bits + numpy.where((lost != 0) & (bits & 1 == 0), away, 0)).view(f64).astype(f32)


def blended(begin, end, time, left, right, dtype, slip):
    """What `weigh` and `blend` give, before it is rounded; rcp.approx is `slip` (-1, 0, 1) units off."""

    def difference(later, earlier):
        near = later - earlier
        back = near - later
        return near, (later - (near - back)) - (earlier + back)

    span = end - begin
    scale = (numpy.uint32(0x7E800000) - (span.view(numpy.uint32) & numpy.uint32(0x7F800000))).view(f32)
    u, u_rest, w, w_rest = (part * scale for part in (*difference(end, time), *difference(time, begin)))
    if dtype == torch.float32:
        inverse = 1 / ((f64(end) - begin) * scale)
        near = inverse.astype(f32)
        u, w, inverse = f64(u) + u_rest, f64(w) + w_rest, f64(near) + (inverse - near).astype(f32)
        high = f64(w.astype(f32))  # w right in two exact products; their sum has 64 bits, for an fma's
        wide = numpy.longdouble
        return (
            (wide(high * right) + wide((w - high) * right) + wide(u * left)).astype(f64) * inverse
        ).astype(f32)
    inverse = 1 / (span * scale)
    inverse = numpy.where(slip, numpy.nextafter(inverse, (inverse + slip).astype(f32)), inverse)
    product = w * right
    lost = fma(w, right, -product)
    lost = fma(u_rest, left, fma(w_rest, right, lost))
    return (fma(u, left, product) + lost) * inverse


def between_times(rng, kind, count, dtype):
    """begin < time < end, and rows of `dtype` as float32; `kind` says what is hard about them."""

    def rounded(x):
        with numpy.errstate(over="ignore"):
            kept = torch.from_numpy(numpy.asarray(x, f32)).to(dtype).float().numpy()
        return numpy.where(numpy.isfinite(kept), kept, f32(1))

    def spread(least, most, *shape):
        return rng.choice([-1, 1], shape) * rng.random(shape) * 2.0 ** rng.integers(least, most + 1, shape)

    low, high = {"uniform": (0, 0), "tiny span": (0, 0), "subnormal": (-130, -128)}.get(kind, (-40, 40))
    begin, time, end = numpy.sort(spread(low, high, 3, count).astype(f32), axis=0)
    if kind == "tiny span":
        time = numpy.nextafter(begin, f32(9))
        end = numpy.where(rng.random(count) < 0.5, numpy.nextafter(time, f32(9)), time + 8 * (time - begin))
    sizes = 0 if kind == "uniform" else 12
    left, right = (rounded(spread(-sizes, sizes, count)) for _ in range(2))
    with numpy.errstate(all="ignore"):
        if kind == "row cancels":
            right = rounded(-(f64(end) - time) * left / (f64(time) - begin))
        if kind == "time cancels":
            right = numpy.where(numpy.sign(left) == numpy.sign(right), -right, right)
            time = (begin + (f64(end) - begin) * (left / (f64(left) - right))).astype(f32)
    inside = (begin < time) & (time < end)
    return [value[inside].astype(f32) for value in (begin, end, time, left, right)]


KINDS = ("uniform", "binades", "tiny span", "subnormal", "row cancels", "time cancels")


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic_is_within_one_unit_of_the_exact_rational(kind, dtype):
    """Or, where the rows cancel almost to nothing, within what the weights' own bits allow: 2^-46 of the rows, 2^-50 of
    those in float32."""
    rng = numpy.random.default_rng(KINDS.index(kind))
    given = between_times(rng, kind, 600, dtype)
    with numpy.errstate(all="ignore"):
        result = blended(*given, dtype, rng.integers(-1, 2, len(given[0])))
    bits, least = check.FORMAT[dtype]
    result = torch.from_numpy(result).to(dtype).double().tolist()
    assert len(result) > 500
    for case, found in zip(zip(*(value.tolist() for value in given)), result):
        begin, end, time, left, right = map(Fraction, case)
        exact = ((end - time) * left + (time - begin) * right) / (end - begin)
        unit = Fraction(2) ** max(math.frexp(float(exact))[1] - bits, least)
        if "cancels" in kind:
            unit = max(unit, max(abs(left), abs(right)) / 2 ** (50 if dtype == torch.float32 else 46))
        assert abs(Fraction(found) - exact) <= unit, case


# ---- what the launcher refuses; the checks come before the GPU, so tensors of the CPU will do


def problem(batches=2, sources=4, targets=3, depth=8, dtype=torch.float16, where="cpu"):
    source_times = torch.arange(float(sources), device=where).expand(batches, -1).contiguous()
    target_times = torch.rand(batches, targets, device=where)
    features = torch.zeros(batches, sources, depth, dtype=dtype, device=where)
    made = [features, source_times, target_times]
    return made + [torch.zeros(batches, targets, depth, dtype=dtype, device=where)]


def with_time(value, batch=1, index=2):
    source_times = problem()[1]
    source_times[batch, index] = value
    return source_times


SHARED = torch.zeros(4096, dtype=torch.float16)


def prepare(features, source_times, target_times, out, config="best", **rest):
    return resample.prepare(features, source_times, target_times, out=out, config=config, **rest)


@cases(
    "change, message",
    ({0: [1.0]}, "features must be a torch.Tensor; it is a list"),
    ({0: torch.zeros(4, 8).half()}, r"features must be a tensor of 3 dimensions; its shape is \(4, 8\)"),
    ({0: torch.zeros(2, 0, 8).half(), 1: torch.zeros(2, 0)}, r"one source and one feature; .* \(2, 0, 8\)"),
    ({1: torch.zeros(2, 5)}, "source_times must be 2 x 4; it is 2 x 5"),
    ({2: torch.zeros(3, 3)}, "target_times must be 2 x 3; it is 3 x 3"),
    ({3: torch.zeros(2, 3, 7).half()}, "out must be 2 x 3 x 8; it is 2 x 3 x 7"),
    ({1: torch.zeros(2, 4).double()}, "source_times must be float32; it is float64"),
    ({0: torch.zeros(2, 4, 8)}, "out must be float32; it is float16"),
    ({0: torch.zeros(2, 4, 8).int()}, "features must be bfloat16, float16 or float32; it is int32"),
    ({0: torch.zeros(2, 8, 4).half().mT}, r"features must be contiguous; its strides are \(32, 1, 4\)"),
    ({1: SHARED[:16].view(torch.float32).view(2, 4), 3: SHARED[:48].view(2, 3, 8)}, "memory of source_times"),
    ({1: with_time(math.nan)}, r"source_times must be numbers up to 1e\+30; some are larger or NaN"),
    ({1: with_time(9.0)}, "ascend in each batch; in batch 1, time 3 is smaller than time 2: sort"),
)
def test_bad_argument_is_one_sentence(change, message):
    given = [change.get(index, tensor) for index, tensor in enumerate(problem())]
    with refused(message):
        prepare(*given)


def test_rows_that_no_bulk_copy_takes():
    for config in ("bulk_rows", ResampleConfig("bulk_rows", 256, 64)):
        says = "multiples of 16 bytes; a row takes 14 bytes, .* 0 past one: choose vec"
        with pytest.raises(ValueError, match=says):
            prepare(*problem(depth=7), config)


def test_a_batch_of_4_gib_is_refused():
    # nothing is written, so it takes no memory
    features = torch.empty(1, 1 << 20, 1 << 11, dtype=torch.float16)
    with pytest.raises(ValueError, match="a batch must take less than 4 GiB; they take 4,294,967,296 B"):
        resample.prepare(features, *problem()[1:3])


@cases(
    "sizes",
    {},
    {"sources": 1},
    {"targets": 0},
    {"batches": 0},
    {"depth": 7},
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    ids=str,
)
def test_what_is_right_wants_a_gpu(no_gpu, sizes):
    says = r"resample needs TMA .* here is no GPU .*: compile it with .*\.$"
    with pytest.raises(device.Unsupported, match=says):
        prepare(*problem(**sizes))
    with pytest.raises(device.Unsupported):
        resample.resample(*problem(**sizes)[:3])


def test_equal_times_and_unchecked_times_pass(no_gpu):
    features, times, targets, out = problem()
    with pytest.raises(device.Unsupported):
        prepare(features, torch.ones_like(times), targets, out)
    with pytest.raises(device.Unsupported):
        prepare(features, -times, targets, out, validate=False)


def test_tensors_of_the_cpu_are_refused_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: H200)
    with pytest.raises(device.Unsupported, match="resample needs its tensors on a GPU; they are on cpu"):
        resample.resample(*problem()[:3])


@pytest.fixture
def on_cpu(monkeypatch):
    """Let experiments run on the CPU; `kernel` writes its result, by default the right one, to `out`."""

    def install(kernel=lambda *given, out: out.copy_(resample.spec(*given))):
        def prepare(*given, out=None, config="best", validate=True):
            features, _, targets = given
            out = features.new_empty(*targets.shape, features.shape[2]) if out is None else out
            return operands.Launch(lambda: kernel(*given, out=out), out, config)

        monkeypatch.setattr(resample, "prepare", prepare)

    make_poisoned, make_inputs = check.make_poisoned, experiments.make_inputs
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        check, "make_poisoned", lambda shape, dtype, where: make_poisoned(shape, dtype, "cpu")
    )
    monkeypatch.setattr(experiments, "make_inputs", lambda *given: make_inputs(*given, where="cpu"))
    monkeypatch.setattr(experiments, "_compile", lambda *cases: None)
    return install


def test_the_check_covers_every_kernel_and_dtype_and_finds_what_is_wrong(on_cpu, monkeypatch):
    monkeypatch.setattr(experiments, "SMALL", ((2, 7, 5, 8), (2, 2, 5, 10)))
    monkeypatch.setattr(experiments, "LARGEST", (1, 3, 4, 8))
    on_cpu()
    rows = experiments.check_correctness.__wrapped__()
    assert len(rows) == len(LADDER) * len(ELEMENTS)
    assert all(row["status"] == "ok" and row["ulps"] <= 1 for row in rows)
    on_cpu(lambda *given, out: out[:, :-1].copy_(resample.spec(*given)[:, :-1]))
    row = experiments.verify("vectors", (2, 7, 5, 8), torch.float16)
    expected = {"status": "wrong", "reason": "elements are not finite, or were never written", "ulps": None}
    assert row == expected


def test_the_kernel_is_timed_beside_torch_in_both_precisions(on_cpu, monkeypatch):
    def compare(candidates, make_inputs, peer):
        assert peer in candidates and all(prepare(*make_inputs())().shape for prepare in candidates.values())
        return {name: bench.Timing(name, 2.0, peer, 1.0) for name in candidates}

    on_cpu()
    monkeypatch.setattr(experiments, "TORCH_SHAPES", ((2, 7, 5, 8), (1, 9, 3, 4)))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    # its import takes seconds
    monkeypatch.setitem(vars(torch), "_dynamo", types.SimpleNamespace(reset=lambda: None))
    monkeypatch.setattr(bench, "compare", compare)
    rows = experiments.compare_with_torch.__wrapped__()
    assert [row["name"] for row in rows[5:]] == [row["name"] for row in rows[:5]]
    assert rows[4]["name"] == resample.BEST
    assert all(row["ulps"] <= 1 for row in rows if "float32" not in row["name"])


def test_the_profiler_runs_one_launch_of_each_kernel_by_the_command_line(monkeypatch):
    def profile_kernels(command, kernels, metrics, report):
        assert report == "kept.ncu-rep"
        found = " ".join(command[-8:])
        assert found == "--mode single_run --kernel vectors,bulk_rows --shape 2,3,4,8 --dtype float16"
        return [{"kernel": kernel, **dict.fromkeys(metrics, 1.0)} for kernel in kernels]

    monkeypatch.setattr(profiler, "profile_kernels", profile_kernels)
    first, second = experiments.profile_kernels(
        ["vectors", "bulk_rows"], (2, 3, 4, 8), torch.float16, "kept.ncu-rep"
    )
    known = {"kernel": "vectors", "shape": [2, 3, 4, 8], "dtype": "float16", "status": "ok"}
    known |= {**dict.fromkeys(experiments.METRICS, 1.0)}
    assert first == known
    assert second["kernel"] == "bulk_rows"


SIZES = (32, 1), (1024, 1024, 8), (96, 37, 3)  # of configurations that the model never chooses
SOURCES = 1, 2, 100, 3000


@pytest.fixture(scope="module")
def compiled():
    """Build in parallel what the tests below launch, because one launch after the other builds one at a time."""
    target, dtype = device.current().target, torch.bfloat16
    cases = [
        (ResampleConfig(kernel, *sizes), (3, 100, 1100, 24))
        for kernel, sizes in itertools.product(LADDER, SIZES)
    ]
    cases += [(kernel, (2, sources, 70, 16)) for kernel, sources in itertools.product(LADDER, SOURCES)]
    build.compile_ahead([resample.job(config, target, dtype, shape) for config, shape in cases])


@pytest.mark.gpu
def test_every_kernel_is_right_on_ragged_and_odd_shapes():
    rows = experiments.check_correctness.__wrapped__()
    assert len(rows) == len(LADDER) * len(ELEMENTS)
    assert not [row for row in rows if row["status"] != "ok" or row["cases"] < len(experiments.SMALL)]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", LADDER)
def test_any_configuration(compiled, kernel):
    for sizes in SIZES:
        row = experiments.verify(ResampleConfig(kernel, *sizes), (3, 100, 1100, 24), torch.bfloat16, True)
        assert row["status"] == "ok", (sizes, row["reason"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_vectors_and_sampled_times_on_ragged_and_odd_shapes(dtype):
    for config, shape in itertools.product([config for config, _ in VECTORS], experiments.SMALL):
        row = experiments.verify(config, shape, dtype, shape[1] > 2)
        assert row["status"] == "ok", (config, shape, row["reason"])


@pytest.mark.gpu
def test_nothing_to_resample():
    for kernel, (batches, targets) in itertools.product(LADDER, ((0, 5), (2, 0))):
        given = problem(batches, 4, targets, where="cuda")
        assert resample.resample(*given[:3], config=kernel).shape == (batches, targets, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", LADDER)
def test_nan_targets_give_nan_and_leave_the_rest(compiled, kernel):
    for sources in SOURCES:
        features, times, targets = experiments.make_inputs(2, sources, 70, 16)
        targets[1, ::7] = math.nan
        out = resample.resample(features, times, targets, config=kernel)
        assert torch.equal(out.isnan(), targets.isnan()[..., None].expand_as(out)), sources
        whole = ~targets.isnan()
        assert check.ulps(out[whole], resample.spec(features, times, targets)[whole]) <= 1, sources


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_the_kernel_computes_what_is_emulated(kind, dtype):
    given = between_times(numpy.random.default_rng(2), kind, 4000, dtype)
    with numpy.errstate(all="ignore"):
        expected = torch.from_numpy(blended(*given, dtype, 0)).to(dtype).cuda()
    begin, end, time, left, right = (torch.from_numpy(value).cuda() for value in given)
    features = torch.stack([left, right], 1)[..., None].to(dtype)
    out = resample.resample(features, torch.stack([begin, end], 1), time[:, None].contiguous())[:, 0, 0]
    # rcp.approx is not emulated
    assert check.ulps(out, expected.double()) <= (0 if dtype == torch.float32 else 1)


@pytest.mark.gpu
def test_features_that_start_anywhere():
    for dtype in ELEMENTS:
        features, times, targets = experiments.make_inputs(2, 50, 70, 24, dtype)
        room = torch.empty(features.numel() + 1, dtype=dtype, device="cuda")
        moved = room[1:].view_as(features).copy_(features)
        found = check.ulps(resample.resample(moved, times, targets), resample.spec(features, times, targets))
        assert found <= 1


@pytest.mark.gpu
def test_out_is_made_or_filled():
    given = experiments.make_inputs(2, 50, 70, 24)
    out = given[0].new_zeros(2, 70, 24)
    assert resample.resample(*given, out=out) is out
    assert torch.equal(out, resample.resample(*given))


@pytest.mark.gpu
def test_cases_for_the_sanitizer_are_right():
    experiments.sanitizer_cases()
