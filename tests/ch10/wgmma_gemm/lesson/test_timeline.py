"""The recorder of the GEMM: a build that records compiles, another has no stamps, and stamps become recordings."""

import ctypes
import os
import re

import pytest
import torch

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.lesson import experiments
from ch10.wgmma_gemm.lesson import timeline as recorder
from tilelab.measure import bench, check
from tilelab.records import results, timeline
from tilelab.runtime import build, device

WRAP = 1 << 32


def stamp(clock, kind, step=0, stage=0, phase=0):
    return clock % WRAP, kind | phase << 3 | stage << 4 | step << 8


def make_group(begin, events, end):
    """Stamps of a warp group: the timer, the clock twice, `events`, the clock, the timer. The clock runs at 2 GHz."""
    made = [(1000 + begin // 2, recorder.TIMED), stamp(begin, recorder.STARTED)]
    made += [stamp(begin + 40, recorder.STARTED), *events, stamp(end, recorder.ENDED)]
    return made + [(1000 + end // 2, recorder.TIMED)]


def make_cta(zero=0):
    """A producer and a consumer with a ring of two stages, two tiles of two steps; the clock begins at `zero`."""
    r, producer, consumer = recorder, [], []
    for tile in range(2):
        for step in range(2):
            at = zero + 100 + 8000 * tile + 1000 * step
            place = {"step": step, "stage": step, "phase": tile % 2}
            producer += [stamp(at, r.FREE, **place), stamp(at + 100, r.LOADED, **place)]
            consumer.append(stamp(at + 900, r.ARRIVED, **place))
            if step:
                consumer.append(stamp(at + 1000, r.MULTIPLIED, step - 1, 0, place["phase"]))
        consumer += [stamp(at + 1700, r.MULTIPLIED, 1, 0, tile % 2), stamp(at + 3000, r.STORED, tile)]
    return [make_group(zero, producer, zero + 20000), make_group(zero + 7, consumer, zero + 20100)]


@pytest.mark.parametrize("zero", [0, WRAP - 5000])
def test_stamps_become_events_also_where_the_clock_wraps_around(zero):
    rows, length, ghz = recorder.read_stamps(make_cta(zero), one_group=False)
    assert length == 20100 and ghz == pytest.approx(2, rel=0.01)
    loads = [row for row in rows if row["kind"] == "load"]
    found = [(row["tile"], row["step"], row["stage"], row["phase"]) for row in loads]
    assert found == [(0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 0, 1), (1, 1, 1, 1)]
    assert [(row["begin"], row["end"]) for row in loads[:2]] == [(100, 200), (1100, 1200)]
    products = [
        (row["tile"], row["step"], row["begin"], row["end"]) for row in rows if row["kind"] == "product"
    ]
    assert products == [(0, 0, 1000, 2100), (0, 1, 2000, 2800), (1, 0, 9000, 10100), (1, 1, 10000, 10800)]
    first = rows[0]
    # The wait begins when the barriers are ready, and asks an empty barrier for the phase before.
    found = [first[key] for key in ("kind", "barrier", "phase", "begin", "end")]
    assert found == ["wait", "empty", 1, 40, 100]
    assert [row["tile"] for row in rows if row["kind"] == "store"] == [0, 1]


def test_a_recording_of_stamps_shows_when_stages_are_full():
    rows, length, ghz = recorder.read_stamps(make_cta(), one_group=False)
    recording = timeline.make_recording(
        "made up", rows, stages=2, gpu="", date="", ghz=ghz, length=length, product_cycles=512
    )
    assert recording["lanes"] == ["producer", "consumer 0"] and recording["length"] == 20100
    found = [fill[:4] for fill in recording["fills"]]
    assert found == [[0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]]
    assert all(fill[4] <= fill[5] <= fill[6] <= fill[7] for fill in recording["fills"])


def test_the_clock_rate_counts_from_the_first_stamp_and_not_from_when_the_barriers_are_ready():
    # The first stamp of the CTA is cycle 0, and the barriers are ready 40 cycles later.
    _, _, ghz = recorder.read_stamps([make_group(0, [], 20000)], one_group=True)
    assert ghz == 2.0


def test_one_warp_group_loads_and_multiplies_in_one_lane():
    r = recorder
    events = [stamp(100, r.LOADED, 0, 0), stamp(900, r.ARRIVED, 0, 0), stamp(1500, r.MULTIPLIED, 0)]
    events += [stamp(1600, r.LOADED, 1, 0), stamp(2400, r.ARRIVED, 1, 0, 1), stamp(3000, r.MULTIPLIED, 1)]
    events += [stamp(3500, r.STORED)]
    rows, length, ghz = recorder.read_stamps([make_group(0, events, 3600)], one_group=True)
    assert ghz is None  # 3,600 cycles are too short for the GPU's timer
    recording = timeline.make_recording("1 stage", rows, stages=1, gpu="", date="", length=length)
    assert recording["lanes"] == ["loads and multiplies"] and recording["barriers"] == ["full"]
    found = [fill[:7] for fill in recording["fills"]]
    assert found == [[0, 0, 0, 0, 100, 900, 900], [0, 1, 1, 0, 1600, 2400, 2400]]


@pytest.mark.compile
@pytest.mark.parametrize("name", recorder.MEASURED)
def test_only_a_build_that_records_reads_the_clock_and_it_spills_nothing(name):
    config = recorder.MEASURED[name]
    plain, records = (build.build_one(wgmma_gemm.job(config, more=more)) for more in (None, recorder.RECORD))
    assert records.status == "ok", records.reason
    assert records.registers == plain.registers and not records.spills
    if name in (
        "1 stage",
        "one consumer",
    ):  # one of each kernel: to read the instructions takes as long as to build
        assert "SR_CLOCK" in records.sass and "SR_CLOCK" not in plain.sass


def test_the_events_have_the_numbers_of_the_kernels_enum():
    names = re.search(r"enum Event \{(.*?)\}", recorder.RECORDER.read_text(), re.DOTALL)[1]
    numbers = [getattr(recorder, name.strip()) for name in names.split(",")]
    assert numbers == list(range(8)) and ctypes.sizeof(recorder.Recording) == 16


@pytest.mark.parametrize("sms", [78, 132])
@pytest.mark.parametrize("shape", [recorder.SHAPE, recorder.OVERHEAD_SHAPE])
@pytest.mark.parametrize("config", {**recorder.CONFIGS, **recorder.MEASURED}.values(), ids=str)
def test_there_is_room_for_all_stamps(config, shape, sms):
    # The kernel does not check the room. Two stamps of the timer, two of the start and one of the end are always there.
    m, n, k = shape
    tiles = -(-config.tiles(m, n) // config.grid(m, n, sms))  # of the CTA that has the most
    written = 3 * config.steps(k) + 1 if config.kernel == "one_group" else tiles * (2 * config.steps(k) + 1)
    assert recorder.count_stamps(config, m, n, k, sms) >= written + 5


def test_products_take_the_cycles_of_the_full_rate():
    # 128 x 128 x 64 at 4,096 per cycle
    assert recorder.find_product_cycles(recorder.CONFIGS["1 stage"]) == 512
    # half of the rows each
    assert recorder.find_product_cycles(recorder.CONFIGS["128 × 256, persistent"]) == 512


@pytest.mark.skipif(experiments.has_wgmma(), reason="this GPU measures instead")
def test_the_records_of_cost_and_of_the_profiler_reach_the_view(monkeypatch, tmp_path):
    row = {"name": "1 stage", "status": "ok"}
    recording = timeline.make_recording(
        "1 stage",
        [{"lane": "one", "kind": "product", "begin": 0, "end": 9, "tile": 0, "step": 0}],
        stages=1,
        gpu="NVIDIA H200",
        date="2026-11-23",
    )
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    h200 = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    for experiment, rows in (
        ("ch10_timeline", [row | {"recording": recording}]),
        ("ch10_timeline_overhead", [row | {"overhead": 0.02}]),
        ("ch10_timeline_idle", [row | {"idle_profiler": 0.7}]),
    ):
        results.save(results.make_record(experiment, rows, recorder.source(), h200))
    found, label = recorder.load_recordings()
    assert found == [recording | {"overhead": 0.02, "idle_profiler": 0.7}]
    assert label.startswith("recorded on NVIDIA")


def test_the_records_show_what_the_notebook_says():
    shown, cost, idle = (
        {row["name"]: row for row in measure.load().rows}
        for measure in (recorder.measure_timeline, recorder.measure_overhead, recorder.measure_idle)
    )
    # Asked for was a difference of at most 5 points. Three recordings of one SM each gave 2.6, 5.8 and 6.0 at most.
    points = sorted(abs(row["points"]) for row in idle.values())
    assert len(points) == 6 and points[3] < 3 and points[-1] < 6.1
    for name in recorder.CONFIGS:
        # Recording one SM costs less than recording all, but for the noise. The first tiles are idle for a larger share
        # of the time, but the other record is made with an empty L2.
        assert cost[name]["overhead_one_sm"] < max(cost[name]["overhead"], 0.01)
        assert timeline.find_idle_share(shown[name]["recording"]) > idle[name]["idle"] - 0.03
    one, four = (shown[name]["recording"] for name in ("1 stage", "4 stages"))
    assert timeline.find_idle_share(one) > 0.6
    assert timeline.find_idle_share(four) < 0.6 * timeline.find_idle_share(one)
    # With four stages, most of the idle time lies before the first product and after the last.
    ends = four["tensor"][0][0] + four["length"] - four["tensor"][-1][1]
    assert ends > 0.8 * timeline.find_idle_share(four) * four["length"]


@pytest.mark.gpu
@pytest.mark.skipif(not experiments.has_wgmma(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", recorder.CONFIGS)
def test_on_a_gpu_the_kernel_with_stamps_is_right_and_records_every_step(name):
    config, shape = recorder.CONFIGS[name], (1024, 1024, 512)
    a, b, out = experiments.make_inputs(*shape)
    launch, stamps = recorder.prepare_recorder(a, b, out, config, recorder.ALL_SMS)
    launch()
    recording = recorder.record_config(name, config)[0]
    torch.testing.assert_close(out, torch.mm(a, b), atol=0.5, rtol=0.02)
    assert bool((stamps[:, 0, 0, 1] != 0).all()), "every CTA records"
    tiles = 1 + max(row["tile"] for row in timeline.as_rows(recording))
    assert len(recording["fills"]) == tiles * config.steps(recorder.SHAPE[2])
    assert all(fill[4] <= fill[5] <= fill[6] <= fill[7] for fill in recording["fills"])
    assert recording["ghz"] is None or 0.9 < recording["ghz"] < 2.2


@pytest.mark.gpu
@pytest.mark.skipif(
    not (experiments.has_wgmma() and check.can_sanitize()), reason="needs a Hopper GPU and sanitizers"
)
def test_on_a_gpu_the_sanitizers_find_nothing_in_the_kernel_with_stamps(monkeypatch, tmp_path):
    rows = check.sanitize("ch10.wgmma_gemm.lesson.timeline", shares=len(recorder.MEASURED))
    assert [row["status"] for row in rows] == ["ok"] * 3, rows
    (tmp_path / "without_room.py").write_text(
        "from ch10.wgmma_gemm.lesson import timeline\n"
        "timeline.count_stamps = lambda *sizes: 4\n"
        "sanitizer_cases = timeline.sanitizer_cases\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    )
    row = check.sanitize("without_room")[0]
    assert row["tool"] == "memcheck" and row["status"] == "wrong"
    assert "Invalid __global__ write" in row["reason"]


@pytest.fixture
def pretended_recorder(monkeypatch):
    """Launches that write the stamps of `make_cta` as the CTA 1 of three, on the SM 2."""

    def prepare(config, watched=0):
        one_group = config.kernel == "one_group"
        groups = make_cta(1000)[:1] if one_group else make_cta(1000)
        stamps = torch.zeros(3, len(groups), 200, 2, dtype=torch.int32)

        def launch():
            for number, group in enumerate(groups if watched == 2 else []):
                if one_group:  # which has one lane for what two do
                    kinds = (recorder.LOADED, recorder.ARRIVED, recorder.MULTIPLIED, recorder.STORED)
                    group = make_group(50, [*map(stamp, (100, 800, 1400, 1500), kinds)], 1600)
                pairs = torch.tensor(group, dtype=torch.int64)
                stamps[1, number, : len(group)] = ((pairs + (1 << 31)) % WRAP - (1 << 31)).to(torch.int32)

        return launch, stamps

    monkeypatch.setattr(recorder, "prepare_recorder", prepare)
    monkeypatch.setattr(recorder.experiments, "make_inputs", lambda *shape: ())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(recorder.build, "compile_ahead", lambda jobs: list(jobs))


def test_the_recorder_finds_an_sm_that_had_a_cta(pretended_recorder):
    rows = recorder.measure_timeline.__wrapped__()
    assert [row["name"] for row in rows] == list(recorder.CONFIGS)
    for row in rows:
        recording = row["recording"]
        assert recording["stages"] == recorder.CONFIGS[row["name"]].num_stages and 0 < row["idle_share"] < 1
        assert recording["ghz"] is None or recording["ghz"] == pytest.approx(2, rel=0.01)
    assert rows[-1]["recording"]["length"] == 20100
    results.to_json(results.make_record("ch10_timeline", rows, "0" * 16))  # JSON can hold them


def test_the_profilers_counts_stand_beside_the_timelines(pretended_recorder, monkeypatch):
    counts = {"busy_percent": 25.0, "active_cycles": 9e4, "ns": 5e4}
    monkeypatch.setattr(
        recorder.profiler,
        "profile_launches",
        lambda command, names, metrics: [{"name": name, **counts} for name in names],
    )
    monkeypatch.setattr(torch, "ones", lambda *size, **options: torch.zeros(1))
    rows = recorder.measure_idle.__wrapped__()
    assert [row["name"] for row in rows] == list(recorder.MEASURED)
    for row in rows:
        assert row["idle_profiler"] == 0.75 and row["points"] == pytest.approx(100 * (row["idle"] - 0.75))
        assert 0 < row["idle"] < 1 and row["ctas"] == 1


def test_the_cost_of_recording_is_a_share_of_the_plain_kernels_time(pretended_recorder, monkeypatch):
    def compare(candidates, make_inputs, peer, **timing):
        times = {"plain": 1.0, "every CTA": 1.03, "one SM": 1.01}
        assert peer == "plain" and set(candidates) == set(times)
        return {name: bench.Timing(name, times[name], peer, 1.0) for name in candidates}

    monkeypatch.setattr(recorder.bench, "compare", compare)
    rows = recorder.measure_overhead.__wrapped__()
    assert len(rows) == 6 and all(row["overhead"] == pytest.approx(0.03) for row in rows)
    assert all(row["overhead_one_sm"] == pytest.approx(0.01) and row["status"] == "ok" for row in rows)


def test_events_become_rows_with_a_handover(pretended_recorder):
    rows = recorder.measure_events.__wrapped__()
    assert {row["name"] for row in rows} == set(recorder.STEP_CONFIGS)
    tile = [(row["event"], row["begin"], row["end"]) for row in rows if row["name"] == "tile"]
    assert tile == [("wait", 40, 750), ("product", 750, 1350), ("store", 1350, 1450)]
    assert {row["role"] for row in rows if row["name"] == "persistent"} == {"producer", "consumer 0"}
    ends = (
        ("producer", "wait", 100),
        ("producer", "load", 130),
        ("consumer 0", "wait", 1130),
        ("consumer 0", "product", 2460),
    )
    rows = [
        {"name": "warp_specialized", "tile": 0, "role": role, "event": event, "step": step, "end": at + end}
        for step, at in enumerate(range(0, 4800, 600))
        for role, event, end in ends
    ]
    found = recorder.measure_handover(rows)
    assert found == {"name": "warp_specialized", "handover": 4 * 600 + 100 - 2460, "load": 1000, "step": 600}
