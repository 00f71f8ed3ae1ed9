"""The sweep panel, driven in process by the messages of its view in the browser. Its sweeps are real, for a target."""

import collections
import itertools
import json
import re
import statistics
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from cases import cases
from odd_space import OddPanelSpace, build_nothing, call_here
from waiting import wait_for

from ch07.bulk_copy.lesson import sweep as bulk_copy_sweep
from ch10.tile_pipeline.lesson import sweep as tile_pipeline_sweep
from ch10.wgmma_gemm.lesson import sweep as wgmma_gemm_sweep
from ch14.attention.lesson import sweep as attention_sweep
from ch14.descriptors.lesson import tile_copy_experiments
from ch14.gemm.lesson import sweep as gemm_sweep
from tilelab import views
from tilelab.pictures import plots
from tilelab.records import results
from tilelab.runtime import device
from tilelab.sweeps import running_sweeps, sweep
from tilelab.sweeps.journal import Journal
from tilelab.views import listing, panel
from tilelab.views.panel import rows as panel_rows
from tilelab.views.panel import sentences, snapshot, widget, words

GEMM, COPY = gemm_sweep.GemmSpace, tile_copy_experiments.CopySpace
KERNELS = (GEMM, COPY, bulk_copy_sweep.BulkSpace, tile_pipeline_sweep.TileSpace, wgmma_gemm_sweep.WgmmaSpace)
KERNELS += (attention_sweep.AttentionSpace,)


@pytest.fixture(autouse=True)
def sweeps(tmp_path, monkeypatch):
    monkeypatch.setenv("TILES_SWEEPS", str(tmp_path))
    return tmp_path


class Screen:
    """A browser that gets the panel's messages: it holds the data of the choice, with the rows that changed since."""

    def __init__(self, shown, monkeypatch):
        self.data, self.messages = shown.box.data, []
        monkeypatch.setattr(shown.box, "send", self.receive)

    def receive(self, message):
        json.dumps(message, allow_nan=False).encode()  # a message that no browser could read fails here
        self.messages.append(message)
        if message["type"] == "data":
            self.data = message["data"]
        elif message["type"] == "rows":
            rows = [message["rows"].get(index, row) for index, row in enumerate(self.data["rows"])]
            self.data = {**self.data, "rows": rows, "state": message["state"]}

    @property
    def said(self):
        state = self.data["state"]
        return "\n".join([state["problem"], state["status"], *state["winner"]])

    def of_status(self, status):
        return [row for row in self.data["rows"] if row["status"] == status]

    def best(self):
        return self.data["rows"][self.data["state"]["best"]]


@pytest.fixture
def screen(monkeypatch):
    return lambda shown: Screen(shown, monkeypatch)


def click(shown, type, **more):
    shown._receive(shown.box, {"type": type, **more}, [])


def choose(shown, **values):
    click(shown, "choose", values=values)


def grid_of_96(**choice):
    return panel.Panel(GEMM, preset="grid of 96", **{"shape": "4096³", "target": "sm_90a", **choice})


def small(**choice):
    """Four configurations that build quickly, of a shape that no record knows."""
    usual = {"kernel": COPY.title, "preset": "the course's 4", "target": "sm_90a", "shape": "512,512"}
    return panel.Panel(GEMM, COPY, **usual | choice)


def run(shown):
    click(shown, "run")
    shown.wait()


def built_rows(shown):
    """Return rows as a sweep for another target leaves them, by key."""
    built = {"status": "ok", "registers": 168, "spills": 0, "smem": 99328, "threads": 128}
    built |= {"programs_per_sm": 1}
    rows = shown._choice.initial_rows.values()
    return {row["key"]: row | built | {"counts": {}} for row in rows if row["status"] == "waiting"}


class MadeUpSweep:
    """A sweep that ends when the test says so, or when it is cancelled."""

    waits_for_gpu, elapsed_s, left_s, error = False, 1.0, None, None

    def __init__(self, configs, space, journal):
        self.space, self.rows, self.running, self.cancelled = space, {}, True, False

    def cancel(self):
        if self.running:
            self.cancelled, self.running = True, False
            time.sleep(0.1)  # the panel's other thread notices the end meanwhile

    def finish(self):
        if self.error:
            raise self.error


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(sweep, "Sweep", MadeUpSweep)
    monkeypatch.setattr(running_sweeps, "DRAW_S", 0.01)


# ---- menus


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.title)
def test_every_choice_draws(kernel, screen):
    shown = panel.Panel(*KERNELS, kernel=kernel.title)
    seen = screen(shown)
    offered = {**shown._options(kernel), "shape": list(kernel.shapes)}
    for name in ("target", "dtype", "show", "x", "y", "preset", "shape"):
        for value in reversed(offered[name]):
            choose(shown, **{name: value})
            assert not seen.data["state"]["problem"] and seen.data["rows"] and shown.values[name] == value
            found = len(seen.data["choice"]["keys"])
            assert len(seen.data["rows"]) == found == len(seen.data["choice"]["reprs"])
    assert len(json.dumps(shown.stored_data())) < 300_000


def test_every_pair_of_axes_shows_every_configuration():
    shown = grid_of_96()
    rows, axes = shown.rows(), shown.box.data["choice"]["axes"]
    for x in GEMM.axes:
        for y in GEMM.axes:
            cells = snapshot.group_cells(axes, rows, x, y)
            assert sum(map(len, cells.values())) == 96
            named = {
                (axes[x]["labels"][i], axes[y]["labels"][j]): len(inside) for (i, j), inside in cells.items()
            }
            labels = [
                (GEMM.axes[x](config), GEMM.axes[y](config)) for config in shown._choice.configs.values()
            ]
            assert named == {place: labels.count(place) for place in labels}
            assert axes["tile"]["labels"][:4] == ["64×64", "64×128", "64×256", "128×64"]


def test_a_kernel_brings_its_own_menus_keeps_what_both_have_and_gets_its_choices_back(screen):
    shown = panel.Panel(GEMM, COPY, x="stages", y="tile", dtype="bf16", shape="512,512,512", target="sm_100a")
    seen = screen(shown)
    for _ in range(2):
        choose(shown, kernel=COPY.title)
        menus = seen.data["kernels"][COPY.title]
        assert menus["preset"] == list(COPY.presets) and shown.values["preset"] in menus["preset"]
        assert shown.values["shape"] == "1 GiB moved" and shown.values["y"] == "tile"
        assert shown.values["target"] == "sm_100a" and seen.data["choice"]["peer"] == "torch"
        choose(shown, kernel=GEMM.title)
        assert (shown.values["x"], shown.values["shape"]) == ("stages", "512,512,512")
    assert seen.data["state"]["values"] == shown.values


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.title)
def test_a_kernel_opens_at_a_shape_of_its_record(kernel):
    shown = panel.Panel(kernel, target="sm_90a", preset=list(kernel.presets)[-1])
    assert any(row["status"] == "ok" and row.get("from_record") for row in shown.rows())
    shown = panel.Panel(kernel, target="sm_90a")
    known = [row for row in shown.rows() if row.get("from_record") or row["status"] == "rejected"]
    assert len(known) == len(shown.rows()), "it opens with configurations of which no record is"


def test_options_that_the_record_does_not_fill_stand_apart():
    def unrecorded(**choice):
        return grid_of_96(**choice).stored_data()["choice"]["unrecorded"]

    apart = ["64 × 6144 × 4096", "512 × 6144 × 4096", "4096 × 28672 × 4096"]
    assert unrecorded() == {"shape": apart, "dtype": ["fp16", "fp8"], "preset": []}
    elsewhere = unrecorded(dtype="fp8")
    assert len(elsewhere["shape"]) == len(GEMM.shapes) and len(elsewhere["preset"]) == len(GEMM.presets)
    assert unrecorded(target="sm_100a") == {}


@pytest.mark.parametrize("kernel", [GEMM, *KERNELS[2:]], ids=lambda kernel: kernel.title)
def test_a_recording_fills_every_preset(kernel, monkeypatch):
    """The experiment that makes a kernel's record sweeps all configurations of its presets at the first shape."""
    swept = collections.defaultdict(set)

    def note(configs, space):
        swept[space.shape, space.dtype] |= {space.label(config)["kernel"] for config in configs}
        return []

    module = sys.modules[kernel.__module__]
    monkeypatch.delenv("TILES_QUICK", raising=False)
    monkeypatch.setattr(results, "live_or_recorded", lambda name, measure, *_: measure())
    monkeypatch.setattr(module, "record_rows", note, raising=False)
    in_place_of_sweep = lambda configs, space: SimpleNamespace(finish=lambda: note(configs, space))  # noqa: E731
    monkeypatch.setattr(module, "Sweep", in_place_of_sweep, raising=False)
    results.EXPERIMENTS[kernel.record]()
    shape = next(iter(kernel.shapes.values()))
    assert swept
    for dtype in {dtype for _, dtype in swept}:
        space = kernel(shape, dtype, "sm_90a")
        for preset, configs in kernel.presets.items():
            if "field note" not in preset:  # those sets have a record of their own
                names = {space.label(config)["kernel"] for config in configs(dtype)}
                assert names <= swept[shape, dtype], preset


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.title)
def test_every_preset_is_full_where_the_record_has_its_shape(kernel):
    """A record that is older than its code may lack what a new recording measures: see the test above."""
    record = kernel.load_record()
    for shape, dtype in itertools.product(kernel.shapes.values(), kernel.dtypes):
        space = kernel(shape, dtype, "sm_90a")
        recorded = panel_rows._load_recorded(space)[0]
        for preset, configs in kernel.presets.items() if recorded else ():
            runnable = (config for config in configs(dtype) if not space.reject(config))
            missing = {space.label(config)["kernel"] for config in runnable} - {*recorded}
            assert not missing or record.stale, (preset, shape, dtype, missing)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.title)
def test_every_word_of_a_name_is_explained(kernel):
    shape = next(iter(kernel.shapes.values()))
    for dtype in kernel.dtypes:
        space = kernel(shape, dtype, "sm_90a")
        names = {
            space.label(config)["kernel"] for preset in kernel.presets.values() for config in preset(dtype)
        }
        meanings = words.explain_words(names, kernel.peer, kernel.words)
        assert all(0 < len(meaning) <= 66 for meaning in meanings.values()), meanings
        assert meanings[f"× {kernel.peer}"] != f"times as fast as {kernel.peer}"


@cases(
    "choice, says",
    ({"preset": "none such"}, "unknown preset 'none such'; choose one of the field note's"),
    ({"colour": "red"}, "choose one of kernel, shape"),
    (
        {"x": "size"},
        "unknown x 'size'; choose one of tile; warps, stages; stages; warps; tile, warps; K step; kernel.",
    ),
    (
        {"y": "size"},
        "unknown y 'size'; choose one of warps, stages; tile; stages; warps; tile, warps; K step; kernel.",
    ),
    ({"target": "sm_80"}, "unknown target 'sm_80'; choose one of"),
)
def test_a_choice_that_no_menu_has_is_refused(choice, says, screen):
    with pytest.raises(ValueError, match=says):
        panel.Panel(GEMM, **choice)
    with pytest.raises(ValueError, match="at least one kernel"):
        panel.Panel()
    shown = panel.Panel(GEMM)
    seen = screen(shown)
    choose(shown, **choice)  # the address of the page may hold anything
    assert re.search(says, seen.data["state"]["problem"]) and seen.data["rows"]
    choose(shown, show="ms")
    assert not seen.data["state"]["problem"]


def test_a_bad_shape_is_a_sentence_and_loses_nothing(screen):
    shown = panel.Panel(GEMM, shape="4096³")
    seen = screen(shown)
    before = seen.data["rows"]
    wrong = ("nonsense", "", "4096,4096", "0,1,1", "4096,4096,-1", "9" * 30, "1,1,99999999999")
    for text in (*wrong, "<b>4096</b>"):
        choose(shown, shape=text)
        assert "a shape is" in seen.data["state"]["problem"] and seen.data["rows"] == before
        assert seen.data["state"]["values"]["shape"] == text or "," in text
        click(shown, "run")
        assert not shown.running and seen.data["rows"] == before
    choose(shown, shape="4096 x 4096 x 4096")
    assert not seen.data["state"]["problem"] and seen.data["rows"] == before
    assert shown.values["shape"] == "4096³"


def test_a_shape_is_named_or_written_as_sizes(screen):
    shown = panel.Panel(GEMM, shape="512,512,512")
    assert shown.values["shape"] == "512,512,512" and shown.rows()[0]["shape"] == [512] * 3
    choose(shown, shape="8192³")
    assert shown.box.data["kernels"][GEMM.title]["shapes"]["8192³"] == "8192,8192,8192"
    assert shown.rows()[0]["shape"] == [8192] * 3
    choose(shown, shape="4096 4096 4096")
    assert shown.values["shape"] == "4096³" and shown.rows()[0]["shape"] == [4096] * 3
    seen = screen(shown)
    choose(shown, shape="4096,4096,4096")
    assert [one["type"] for one in seen.messages] == ["rows"], "the view waits for an answer"


def altered(kernel, **changes):
    """Return a kernel that differs in some attributes of its class."""
    return type(kernel.__name__, (kernel,), changes)


def test_whatever_a_kernel_raises_is_a_sentence():
    def broken(*_):
        raise KeyError("oops")

    shown = panel.Panel(altered(COPY, check_shape=broken))
    assert "KeyError" in shown.state()["problem"] and shown.box.data["choice"] is None
    shown = panel.Panel(altered(COPY, roofline=broken, load_record=broken))
    assert "KeyError" in shown.state()["problem"]
    shown = panel.Panel(altered(COPY, axes={"bad": broken}))
    assert "KeyError" in shown.state()["problem"] and shown.box.data["choice"] is None
    shown._ipython_display_()


def test_a_message_that_no_view_sends_is_a_sentence(screen):
    shown = small()
    seen = screen(shown)
    for message in ({"type": "none"}, {"type": "choose"}, {}):
        shown._receive(shown.box, message, [])
        assert seen.data["state"]["problem"]


# ---- records


def test_recorded_rows_show_before_anything_runs_and_only_for_their_target(screen):
    shown = grid_of_96()
    seen = screen(shown)
    label = "recorded on NVIDIA H200"
    assert label in seen.data["choice"]["source"] and seen.data["choice"]["roofline"]["flat"]
    assert sum("ratio" in row for row in seen.of_status("ok")) > 50
    assert all(row["from_record"] for row in seen.of_status("ok"))
    assert "rank correlation" in seen.said and "Why: " in seen.data["state"]["cause"]
    assert "fastest, recorded" in seen.said
    timed = len(seen.of_status("ok"))
    found = f"{timed} of 96 have a recorded time · 28 of 96 cannot run · press Run to build the other 68"
    assert found in seen.said
    assert not seen.data["state"]["done"]
    choose(shown, target="sm_100a")
    assert label not in str(seen.data["choice"]) and seen.data["state"]["best"] is None
    assert "nothing is timed on sm_100a" in seen.data["choice"]["roofline"]["problem"]
    assert not any("ms" in row for row in seen.data["rows"])


def test_building_leaves_the_recorded_winner_and_its_ranks(screen):
    shown = grid_of_96()
    seen = screen(shown)
    before, order = seen.best(), seen.data["state"]["order"]
    timed = seen.of_status("ok")
    built = built_rows(shown)
    shown._session_rows |= dict([*built.items()][: len(built) // 2])  # as a cancelled sweep leaves them
    shown._send_rows()
    assert [row["kernel"] for row in seen.of_status("ok")] == [row["kernel"] for row in timed]
    assert sum(row.get("here", False) for row in seen.data["rows"]) == len(built) // 2
    shown._session_rows |= built
    shown._send_rows()
    after = seen.best()
    assert (after["ms"], after["kernel"]) == (before["ms"], before["kernel"]) and after["again"]
    assert seen.data["state"]["order"][:10] == order[:10]
    for row, recorded in zip(seen.of_status("ok"), timed):  # two compilers do not mix
        assert row["built"]["registers"] == 168 and row["registers"] == recorded["registers"]
    assert seen.data["choice"]["compilers"]["record"].startswith("Triton 3.6")
    assert "recorded on NVIDIA H200" in seen.data["choice"]["source"]
    caption = snapshot.make_table(shown._choice, shown.rows()).caption
    assert "timed again" in caption and "ranked by the ratio of timings paired with cuBLAS" in caption


def test_the_note_s_proposed_six_show_their_recorded_results():
    shown = panel.Panel(GEMM, preset="the field note's proposed 6", shape="4096³", target="sm_90a")
    claim = results.load("ch14_gemm_claim")["rows"]
    ratios = {
        row["kernel"]: row.get("final_ratio") or row["ratio"]
        for row in claim
        if row["name"] == "proposed" and row["shape"] == [4096] * 3 and row["status"] == "ok"
    }
    rows = {row["kernel"]: row for row in shown.box.data["rows"] if "ratio" in row}
    assert {name: row["ratio"] for name, row in rows.items()} == pytest.approx(ratios, rel=1e-4)
    assert len(rows) == 2
    assert all("row by row" in row["note"] for row in rows.values())
    assert sum(row["status"] == "rejected" for row in shown.rows()) == 4


def test_a_damaged_record_is_drawn_as_far_as_it_can_be(screen):
    record = COPY.load_record()
    good = [row for row in record.rows if row["name"] == "course" and row["status"] == "ok"]
    damage = [{"error": "oops"}, {"ms": 10**400}, {"ratio": "fast"}, {"reason": 7, "status": "failed"}]
    damage += [{"final_ms": [1], "tflops": {}, "counts": 3}]
    damage += [{"reason": "half \ud800 of a pair", "status": "wrong"}]
    damage += [{"counts": {"x": float("nan"), 3: "y"}, "registers": float("nan")}]
    damaged = [row | change for row, change in zip(good * 2, damage)]
    for rows in [damaged, damaged[4:], [{}], [{**good[0], "status": "?"}], [{**good[0], "shape": None}]]:
        bad = results.Record({**record.data, "rows": rows}, live=False)
        shown = panel.Panel(
            altered(COPY, load_record=lambda *_, bad=bad: bad),
            preset="the course's 4",
            target=record.device["target"],
            shape="1 GiB moved",
        )
        seen = screen(shown)
        click(shown, "open")
        shown._send_data()
        assert len(seen.data["rows"]) == 4 and not seen.data["state"]["problem"]


def test_a_record_of_ceilings_without_a_row_is_a_sentence_and_a_sweep_needs_no_event_loop(
    monkeypatch, made_up
):
    load = results.load
    monkeypatch.setattr(
        results,
        "load",
        lambda name, *gpu: {**load(name, *gpu), "rows": []} if name == "ceilings" else load(name, *gpu),
    )
    for kernel in KERNELS:
        shown = panel.Panel(kernel, target="sm_90a")
        assert re.search(
            "no roofline: the record of the ceilings has no (gbps|tflops) of",
            shown.box.data["choice"]["roofline"]["problem"],
        )
    click(shown, "run")
    assert shown.running and shown.state()["running"]
    shown._owner.sweep.running = False
    shown.wait()
    assert not shown.running and not shown.state()["running"] and not shown.state()["problem"]


# ---- sweeping


def test_the_word_cancelled_comes_last(made_up, screen):
    """JupyterLab calls widgets in a thread of its own, so the end of a sweep may come in the middle of a click."""
    shown = small()
    seen = screen(shown)
    for _ in range(3):
        click(shown, "run")
        clicks = [threading.Thread(target=click, args=(shown, "cancel")) for _ in range(2)]
        for one in clicks:
            one.start()
        for one in clicks:
            one.join()
        shown.wait()
        assert "cancelled after" in seen.said and not seen.data["state"]["running"] and not shown.running


def test_the_last_row_is_drawn_and_an_error_is_a_sentence(made_up, screen):
    shown = small()
    seen = screen(shown)
    click(shown, "run")
    running, rows = shown._owner.sweep, built_rows(shown)
    while len(rows) > 1:
        running.rows |= [rows.popitem()]
        wait_for(lambda: len(seen.of_status("ok")) == len(running.rows))
    with shown._lock:  # the last row comes together with the end
        running.rows |= rows
        running.error, running.running = OSError("no space left on the disk"), False
    shown.wait()
    assert len(seen.of_status("ok")) == 4 and seen.data["state"]["done"] == 4
    assert "the sweep ended early: no space left on the disk" in seen.said


def test_a_row_is_sent_once_and_a_page_that_opens_late_gets_all(made_up, screen):
    shown = small()
    opened_first = shown.box.data
    seen = screen(shown)
    click(shown, "open")
    assert not seen.messages, "the view was made with the newest data"
    click(shown, "run")
    running, (key, row) = shown._owner.sweep, built_rows(shown).popitem()
    running.rows |= {key: row}
    wait_for(lambda: len([one for one in seen.messages if one["type"] == "rows"]) > 4)
    with shown._lock:
        sent = [index for one in seen.messages if one["type"] == "rows" for index in one["rows"]]
        assert len(sent) == 1, "a row that has not changed is not sent again"
        late = Screen.__new__(Screen)
        late.data, late.messages = opened_first, []
        shown.box.send = late.receive
        click(shown, "open")
    assert late.data["rows"] == seen.data["rows"] and late.of_status("ok") and late.data["state"]["running"]
    shown.cancel()
    shown.wait()


def test_while_a_sweep_runs_only_the_picture_changes(made_up, screen):
    shown = small()
    seen = screen(shown)
    click(shown, "run")
    before = dict(shown.values)
    choose(shown, target="sm_100a", show="registers")
    assert shown.values == {**before, "show": "registers"} and shown.running
    for name in ("run", "again"):
        click(shown, name)
    assert sum(one["type"] == "data" for one in seen.messages) == 1
    click(shown, "cancel")
    shown.wait()


@pytest.mark.compile
def test_a_sweep_runs_to_its_end_and_can_be_resumed_and_started_over(sweeps, screen):
    shown = small()
    seen = screen(shown)
    assert len(seen.of_status("waiting")) == 4 and seen.said.strip() == "press Run to build them here"
    click(shown, "run")
    assert seen.data["state"]["running"]
    shown.wait()
    assert "4 of 4" in seen.said and "done in" in seen.said and seen.data["state"]["done"] == 4
    assert not seen.data["state"]["running"]
    written = next(sweeps.glob("*.jsonl")).read_text()
    assert len(written.splitlines()) == 4

    other = small()  # as after the notebook's kernel was restarted
    seen = screen(other)
    assert not seen.of_status("waiting")
    run(other)
    assert "everything is kept from before; Start over builds again" in seen.said
    assert all(row.get("resumed") for row in other.rows())
    assert next(sweeps.glob("*.jsonl")).read_text() == written

    run(small(shape="512,1024"))
    click(other, "again")
    assert len(seen.of_status("waiting")) == 4
    other.wait()
    assert not any(row.get("resumed") for row in other.rows())
    kept = Journal(next(sweeps.glob("*.jsonl"))).rows()
    assert len(kept) == 8 and {row["shape"][1] for row in kept.values()} == {512, 1024}

    recorded = small(shape="1 GiB moved")  # recorded times are laid over what is built here
    seen = screen(recorded)
    run(recorded)
    assert len(seen.of_status("ok")) == len(seen.data["rows"])
    assert "recorded on" in seen.data["choice"]["source"]
    assert all(row["from_record"] and row["here"] for row in seen.data["rows"])
    choose(recorded, target="sm_100a")
    run(recorded)
    assert "recorded on" not in str(seen.data["choice"])
    assert not any("from_record" in row for row in seen.data["rows"])
    assert all(row["registers"] for row in seen.data["rows"])


@pytest.mark.compile
def test_cancel_answers_at_once_and_run_goes_on(tmp_path, monkeypatch, screen):
    # what is built already would be too quick
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    shown = grid_of_96(shape="640,640,640")
    seen = screen(shown)
    click(shown, "run")
    wait_for(lambda: seen.of_status("ok"))
    begun = time.monotonic()
    click(shown, "cancel")
    # Other processes may share the machine; to wait for the builds would take longer still.
    assert re.search("cancelling|cancelled", seen.said) and time.monotonic() - begun < 8
    shown.wait()
    assert seen.of_status("waiting") and "cancelled after" in seen.said
    built = {row["key"] for row in shown.rows() if row["status"] == "ok"}
    assert built and not seen.of_status("failed")
    click(shown, "run")
    time.sleep(0.3)
    shown.cancel()
    shown.wait()
    assert {row["key"] for row in shown.rows() if row.get("resumed")} >= built


def test_a_live_sweep_with_faults_has_a_winner(tmp_path, screen, monkeypatch):
    """Nothing is built, and the rows are made in this process: test_sweep.py has the workers."""
    monkeypatch.setenv("ODD_FOLDER", str(tmp_path))
    monkeypatch.setattr(sweep, "build_configuration", build_nothing)
    monkeypatch.setattr(sweep, "call_in_gpu_worker", call_here)
    shown = panel.Panel(OddPanelSpace)
    seen = screen(shown)
    run(shown)
    assert "8 timed, 1 wrong, 2 failed" in seen.said and "fastest: " in seen.said
    assert [row["word"] for row in seen.of_status("failed")] == ["failed", "failed"]
    assert "an element is wrong" in seen.of_status("wrong")[0]["reason"]
    assert seen.best()["status"] == "ok"
    assert "the fastest" in snapshot.make_table(shown._choice, shown.rows()).caption


def test_a_journal_that_cannot_be_is_a_sentence(sweeps, screen):
    (sweeps / "tma-copy.jsonl").mkdir()
    shown = small()
    seen = screen(shown)
    run(shown)
    assert "tma-copy.jsonl" in seen.data["state"]["problem"] and not seen.data["state"]["running"]


def test_a_target_switch_on_what_is_built_is_sent_within_100_ms():
    shown = grid_of_96()
    took = []
    for target in ("sm_100a", "sm_90a", "sm_100a", "sm_90a"):
        begun = time.process_time()  # without the time that another process on these cores takes
        choose(shown, target=target)
        took.append(time.process_time() - begun)
        shown._session_rows |= built_rows(shown)
    assert statistics.median(took) < 0.1, took


# ---- cells, and what stays


def test_a_rejected_row_says_why(screen):
    seen = screen(grid_of_96(target="sm_120a"))
    row = seen.of_status("rejected")[0]
    assert row["word"] == "over shared memory" and "sm_120a has 101,376 B" in row["reason"]


def test_what_is_drawn_is_known_and_predictions_come_before_registers():
    shown = grid_of_96()
    choice, rows = shown._choice, shown.rows()
    assert choice.choose_field(rows, "ratio") == "ratio" and choice.choose_field(rows, "smem") == "smem"
    built = [{**row, "ms": None, "ratio": None, "final_ms": None, "final_ratio": None} for row in rows]
    assert choice.choose_field(built, "ratio") == "predicted_ms"
    assert choice.choose_field(built, "registers") == "registers"
    unpredicted = [{**row, "predicted_ms": None} for row in built]
    assert choice.choose_field(unpredicted, "ms") == "registers"
    assert choice.choose_field([], "ratio") == "registers", "nothing can be timed on this machine"
    told = snapshot.make_outputs(choice, built, "tile", "stages", "ratio")[0].description
    assert "predicted time, ms" in told and "speed" not in told
    told = snapshot.make_outputs(choice, rows, "tile", "stages", "ratio")[0].description
    assert re.search(
        r"recorded: \S+ · .* · persistent · C in 2 parts, \d\.\d\d × cuBLAS, .* each tile and stages, "
        r"from \d\.\d\d to \d\.\d\d\.",
        told,
    )


def test_words_and_shades():
    row = {"status": "rejected", "reason": "256 threads have at most 255 registers each."}
    assert panel_rows.short_status(row) == "too many registers"
    assert panel_rows.short_status({"status": "failed", "reason": "no answer within 60 s"}) == "failed"
    assert panel_rows.shade(2.0, [1.0, 2.0], "ms") == 0
    assert panel_rows.shade(1.0, [1.0, 2.0], "ms") == panel_rows.shade(5, [5], "registers") == 1
    ratios = [0.01, *[0.8] * 9, 1.0, 1.25]  # the outlier does not take the range
    found = [panel_rows.shade(ratio, ratios, "ratio") for ratio in (0.01, 0.8, 1.0, 1.25)]
    assert found == pytest.approx([0, 0, 0.5, 1])


def test_the_winner_was_timed_again_and_is_fastest_beside_the_peer():
    timed = ((1.0, 0.90, 0.89, 2), (1.1, 0.95, 0.96, 2), (1.2, 0.94, 0.955, 1), (0.9, 0.97, None, 3))
    rows = [
        {"status": "ok", "kernel": str(ms), "predicted_ms": predicted, "ms": ms}
        | {"peer_ms": ms * ratio, "ratio": ratio, **({"final_ms": ms, "final_ratio": final} if final else {})}
        for ms, ratio, final, predicted in timed
    ]
    assert panel_rows.find_winner(rows) is rows[1]
    assert panel_rows.top_rows(rows) == panel_rows.rank_rows(rows) == [rows[1], rows[2], rows[0], rows[3]]
    fastest, why, twice, near, model = sentences.describe_winner(rows, "cuBLAS")
    assert fastest == "fastest: 1.1, 0.96 × cuBLAS, 1.10 ms" and near.startswith("2 more configurations are")
    assert why == (
        "Speeds beside cuBLAS rank, not times, because the clock changes during a sweep: the shortest time is "
        "0.900 ms, of another configuration."
    )
    assert "side by side" in twice
    rows[3]["ms"] = 1.15
    rows[0]["final_ms"] = 1.1
    assert not any("shortest" in said for said in sentences.describe_winner(rows, "cuBLAS"))
    assert "in place 2 of 4" in model


def test_numbers_keep_their_zeros():
    found = [sentences.format_number(value) for value in (0.028, 0.0277, 25.0, 99.97, 1234.5, 168, None)]
    assert found == ["0.0280", "0.0277", "25.0", "100", "1,234", "168", "–"]


def test_a_picture_a_table_and_the_data_stay_in_the_notebook(outputs, monkeypatch):
    monkeypatch.setattr(widget, "SNAPSHOT_S", 0.05)
    shown = grid_of_96()
    shown._ipython_display_()
    assert "application/vnd.jupyter.widget-view+json" in outputs[0]["data"]
    name, data = views.read_stored(outputs[0]["data"][views.MIME])
    assert name == "panel" and len(data["rows"]) == 96
    part = views.make_page_part("panel", data, with_code=False)
    assert "</script" not in part.removesuffix("</script></div>")
    picture, table = (output["data"] for output in outputs[1:3])  # at once
    assert picture["image/png"]
    assert "recorded on NVIDIA H200" in table["text/plain"]
    assert "128×256×64 · 8 warps · 4 stages · persistent · C in 2 parts" in table["text/plain"]
    for menu, value in (("target", "sm_120a"), ("show", "registers")):
        choose(shown, **{menu: value})
    shown._snapshot_timer.join()
    assert len(outputs) >= 5 and outputs[3]["update"] and outputs[3]["transient"] == outputs[1]["transient"]
    last = {output["transient"]["display_id"]: output["data"] for output in outputs[1:]}
    redrawn, table = last.values()
    assert redrawn["image/png"] != picture["image/png"] and "recorded" not in table["text/plain"]


def test_words_in_the_cells_of_the_picture_do_not_touch(monkeypatch):
    figures, draw = [], plots.heat_map
    monkeypatch.setattr(
        plots, "heat_map", lambda *args, **more: figures.append(draw(*args, **more)) or figures[-1]
    )
    for kernel, target in itertools.product((GEMM, bulk_copy_sweep.BulkSpace), ("sm_90a", "sm_120a")):
        shown = panel.Panel(kernel, target=target, preset=list(kernel.presets)[-1])
        axes = shown.box.data["choice"]["axes"]
        x = max(axes, key=lambda name: len(axes[name]["labels"]))
        snapshot.draw_heat_map(shown._choice, shown.rows(), x, shown.values["y"], "ratio")
        boxes = [text.get_window_extent() for text in figures[-1].axes[0].texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2)), (kernel.title, target, x)


def test_targets_are_those_with_tma_and_name_their_gpus():
    offered = panel.Panel(GEMM).targets
    assert [value for value in offered if value] == list(device.TARGETS[1:])
    assert ("" in offered) == device.current().has_tma and offered["sm_100a"] == "sm_100a, B200"


def test_the_code_of_two_configurations_is_sent_or_a_sentence(screen, monkeypatch):
    monkeypatch.setattr(listing, "load_code", lambda job: {"name": job.name, "ptx": []})
    shown = grid_of_96()
    seen, keys = screen(shown), shown.box.data["choice"]["keys"][:2]
    for asked in (keys, ["no such key"]):
        seen.messages.clear()
        click(shown, "code", keys=asked)
        wait_for(lambda: seen.messages)
        (answer,) = seen.messages
        assert answer["type"] == "code" and answer["keys"] == asked
        assert len(answer["sides"]) == 2 if asked is keys else "no such key" in answer["problem"]
