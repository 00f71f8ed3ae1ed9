"""The sweep panel, driven in process as a browser would: menus, buttons, cells. Its sweeps are real, for a target."""

import dataclasses
import os
import re
import statistics
import threading
import time

import pytest

from ch07.bulk_copy import sweep as bulk_copy_sweep
from ch10.tile_pipeline import sweep as tile_pipeline_sweep
from ch10.wgmma_gemm import sweep as wgmma_gemm_sweep
from ch14 import gemm
from ch14.descriptors import tile_copy_experiments
from ch14.gemm import sweep as gemm_sweep
from tilelab import device, faults, panel, results, sweep, tuned
from tilelab.journal import Journal
from tilelab.panel import rows as panel_rows
from tilelab.panel import views, widget
from tilelab.tunable import Roofline, TunableKernel

GEMM, COPY = gemm_sweep.TUNABLE_KERNEL, tile_copy_experiments.TUNABLE_KERNEL
KERNELS = (GEMM, COPY, bulk_copy_sweep.TUNABLE_KERNEL, tile_pipeline_sweep.TUNABLE_KERNEL,
           wgmma_gemm_sweep.TUNABLE_KERNEL)


@pytest.fixture(autouse=True)
def sweeps(tmp_path, monkeypatch):
    monkeypatch.setenv("TILES_SWEEPS", str(tmp_path))
    return tmp_path


def cells(shown):
    return [child for child in shown.grid.children if "tiles-cell" in child._dom_classes]


def texts(shown):
    return [cell.description for cell in cells(shown)]


def of_status(shown, status):
    return [cell for cell in cells(shown) if f"tiles-{status}" in cell._dom_classes]


def grid_of_96(**choice):
    return panel.Panel(GEMM, preset="grid of 96", **{"shape": "4096³", "target": "sm_90a", **choice})


def small(**choice):
    """Four configurations that build quickly, of a shape that no record knows."""
    return panel.Panel(GEMM, COPY, **{"kernel": COPY.name, "preset": "the course's 4", "target": "sm_90a",
                                      "shape": "512,512", **choice})


def run(shown):
    shown.buttons["run"].click()
    shown.wait()


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def built_rows(shown):
    """Return rows as a sweep for another target leaves them, by key."""
    return {row["key"]: {**row, "status": "ok", "registers": 168, "spills": 0, "smem": 99328, "threads": 128,
                         "programs_per_sm": 1, "counts": {}}
            for row in shown._choice.initial_rows.values() if row["status"] == "waiting"}


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
    monkeypatch.setattr(widget, "DRAW_S", 0.01)


# ---- menus


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_choice_draws(kernel):
    shown = panel.Panel(*KERNELS, kernel=kernel.name)
    for name in ("target", "dtype", "show", "x", "y", "preset"):
        menu = shown.menus[name]
        for index in reversed(range(len(menu.options))):
            menu.index = index
            assert "tiles-problem" not in shown.status.value and cells(shown)
    for shape in kernel.shapes:
        shown.menus["shape"].value = shape
        assert "tiles-problem" not in shown.status.value


def test_every_pair_of_axes_shows_every_configuration():
    shown = grid_of_96()
    rows = shown.rows()
    for x in GEMM.axes:
        for y in GEMM.axes:
            assert sum(map(len, shown._choice.group_cells(rows, x, y).values())) == 96
    shown.menus["x"].value = "kernel"
    more = [int(found.group(1)) for text in texts(shown) if (found := re.search(r"\+(\d+)$", text))]
    assert len(cells(shown)) + sum(more) == 96


def test_a_kernel_brings_its_own_menus_and_keeps_what_both_have():
    shown = panel.Panel(GEMM, COPY, x="tile", dtype="bf16")
    count = None
    for _ in range(2):
        shown.menus["kernel"].value = COPY.name
        assert shown.menus["preset"].options == tuple(COPY.presets) and shown.menus["x"].value == "tile"
        assert shown.menus["shape"].value == "1 GiB moved" and "torch" in shown.menus["show"].label
        shown.menus["kernel"].value = GEMM.name
        widgets = len(shown._cells) + len(shown._ticks)
        assert count in (None, widgets), "widgets are used again"
        count = widgets


@pytest.mark.parametrize("choice, says", [
    ({"preset": "none such"}, "unknown preset 'none such'; choose one of the field note's"),
    ({"colour": "red"}, "menus are kernel, shape"),
    ({"target": "sm_80"}, "unknown target 'sm_80'; choose one of")])
def test_a_choice_that_no_menu_has_is_refused(choice, says):
    with pytest.raises(ValueError, match=says):
        panel.Panel(GEMM, **choice)
    with pytest.raises(ValueError, match="at least one kernel"):
        panel.Panel()


def test_a_bad_shape_is_a_sentence_and_loses_nothing():
    shown = panel.Panel(GEMM, shape="4096³")
    before = texts(shown)
    for text in ("nonsense", "", "4096,4096", "0,1,1", "4096,4096,-1", "9" * 30, "1,1,99999999999", "<b>4096</b>"):
        shown.menus["sizes"].value = text
        assert "tiles-problem" in shown.status.value and "a shape is" in shown.status.value
        assert "<b>" not in shown.status.value and texts(shown) == before
        shown.buttons["run"].click()
        assert not shown.running and texts(shown) == before
    shown.menus["sizes"].value = "4096 x 4096 x 4096"
    assert "tiles-problem" not in shown.status.value and texts(shown) == before
    assert shown.menus["shape"].value == "4096³"


def test_a_shape_is_named_or_written_as_sizes():
    shown = panel.Panel(GEMM, shape="512,512,512")
    name, sizes = shown.menus["shape"], shown.menus["sizes"]
    assert (name.value, sizes.value) == (None, "512,512,512") and shown.rows()[0]["shape"] == [512] * 3
    name.value = "8192³"
    assert sizes.value == "8192,8192,8192" and shown.rows()[0]["shape"] == [8192] * 3
    sizes.value = "4096 4096 4096"
    assert (name.value, sizes.value) == ("4096³", "4096,4096,4096") and shown.rows()[0]["shape"] == [4096] * 3


def test_whatever_a_kernel_raises_is_a_sentence():
    def broken(*_):
        raise KeyError("oops")

    shown = panel.Panel(dataclasses.replace(COPY, space=broken))
    assert "KeyError" in shown.status.value
    shown = panel.Panel(dataclasses.replace(COPY, roofline=broken, load_record=broken))
    assert "KeyError" in shown.status.value


# ---- records


def test_recorded_rows_show_before_anything_runs_and_only_for_their_target():
    shown = grid_of_96()
    label = "recorded on NVIDIA H200"
    assert label in shown.title.value and "recorded" in shown.top.value and "hollow" in shown.roofline.value
    assert sum(bool(re.fullmatch(r"(★ )?\d\.\d\d", text)) for text in texts(shown)) > 50
    assert sum(text.startswith("★") for text in texts(shown)) == 1
    assert "rank correlation" in shown.status.value and "fastest, recorded" in shown.status.value
    assert "0 of 96 · " in shown.status.value and not shown.progress.value
    shown.menus["target"].value = "sm_100a"
    assert label not in shown.title.value and "★" not in "".join(texts(shown)) and "<svg" not in shown.roofline.value


def test_building_leaves_the_recorded_winner_and_its_top_ten():
    shown = grid_of_96()
    before = panel_rows.find_winner(shown.rows()), shown.top.value
    shown._session_rows |= built_rows(shown)
    shown._draw()
    after = panel_rows.find_winner(shown.rows())
    assert after["final_ms"] == before[0]["final_ms"] and after["kernel"] == before[0]["kernel"]
    names = [re.findall("<td>(.* persistent.*)</td>", text) for text in (before[1], shown.top.value)]
    assert names[0] == names[1] and len(names[0]) == 10 and "timed again" in shown.top.value
    assert sum(text.startswith("★") for text in texts(shown)) == 1
    of_status(shown, "ok")[0].click()
    assert "168 registers" in shown.detail.value and "recorded on NVIDIA H200" in shown.detail.value


def test_a_damaged_record_is_drawn_as_far_as_it_can_be():
    record = COPY.load_record()
    good = [row for row in record.rows if row["name"] == "course" and row["status"] == "ok"]
    damage = [{"error": "oops"}, {"ms": 10**400}, {"ratio": "fast"}, {"reason": 7, "status": "failed"},
              {"final_ms": [1], "tflops": {}, "counts": 3}]
    damaged = [row | change for row, change in zip(good * 2, damage)]
    for rows in [damaged, damaged[4:], [{}], [{**good[0], "status": "?"}], [{**good[0], "shape": None}]]:
        bad = results.Record({**record.data, "rows": rows}, live=False)
        shown = panel.Panel(dataclasses.replace(COPY, load_record=lambda bad=bad: bad), preset="the course's 4",
                            target=record.device["target"], shape="1 GiB moved")
        for cell in cells(shown):
            cell.click()
        assert cells(shown) and "tiles-problem" not in shown.status.value


def test_a_record_of_ceilings_without_a_row_is_a_sentence_and_a_sweep_needs_no_event_loop(monkeypatch, made_up):
    load = results.load
    monkeypatch.setattr(results, "load", lambda name, *gpu: {**load(name, *gpu), "rows": []}
                        if name == "ceilings" else load(name, *gpu))
    for kernel in KERNELS:
        shown = panel.Panel(kernel, target="sm_90a")
        assert re.search("no roofline: the record of the ceilings has no (gbps|tflops) of", shown.roofline.value)
    shown.buttons["run"].click()
    assert shown.running and shown.buttons["run"].disabled
    shown._sweep.running = False
    shown.wait()
    assert not shown.running and not shown.buttons["run"].disabled and "tiles-problem" not in shown.status.value


# ---- sweeping


def test_the_word_cancelled_comes_last(made_up):
    """JupyterLab calls widgets in a thread of its own, so the end of a sweep may come in the middle of a click."""
    shown = small()
    for _ in range(3):
        shown.buttons["run"].click()
        clicks = [threading.Thread(target=shown.buttons["cancel"].click) for _ in range(2)]
        for click in clicks:
            click.start()
        for click in clicks:
            click.join()
        shown.wait()
        assert "cancelled after" in shown.status.value and shown.buttons["cancel"].disabled and not shown.running


def test_the_last_row_is_drawn_and_an_error_is_a_sentence(made_up):
    shown = small()
    shown.buttons["run"].click()
    running, rows = shown._sweep, built_rows(shown)
    while len(rows) > 1:
        running.rows |= [rows.popitem()]
        wait_for(lambda: len(of_status(shown, "ok")) == len(running.rows))
    with shown._lock:  # the last row comes together with the end
        running.rows |= rows
        running.error, running.running = OSError("no space left on the disk"), False
    shown.wait()
    assert len(of_status(shown, "ok")) == 4 and shown.progress.value == 4
    assert "the sweep ended early: no space left on the disk" in shown.status.value


@pytest.mark.compile
def test_a_sweep_runs_to_its_end_and_can_be_resumed_and_started_over(sweeps):
    shown = small()
    assert len(of_status(shown, "waiting")) == 4 and "0 of 4" in shown.status.value
    shown.buttons["run"].click()
    assert shown.buttons["run"].disabled and not shown.buttons["cancel"].disabled
    assert shown.menus["target"].disabled and not shown.menus["show"].disabled
    shown.wait()
    assert "4 of 4" in shown.status.value and "done in" in shown.status.value and shown.progress.value == 4
    assert not shown.buttons["run"].disabled and shown.buttons["cancel"].disabled
    written = next(sweeps.glob("*.jsonl")).read_text()
    assert len(written.splitlines()) == 4

    other = small()  # as after the notebook's kernel was restarted
    assert not of_status(other, "waiting")
    run(other)
    assert "everything is kept from before; Start over builds again" in other.status.value
    assert all(row.get("resumed") for row in other.rows()) and next(sweeps.glob("*.jsonl")).read_text() == written

    run(small(shape="512,1024"))
    other.buttons["again"].click()
    assert len(of_status(other, "waiting")) == 4
    other.wait()
    assert not any(row.get("resumed") for row in other.rows())
    kept = Journal(next(sweeps.glob("*.jsonl"))).rows()
    assert len(kept) == 8 and {row["shape"][1] for row in kept.values()} == {512, 1024}

    recorded = small(shape="1 GiB moved")  # recorded times are laid over what is built here
    run(recorded)
    assert len(of_status(recorded, "ok")) == len(cells(recorded)) and "recorded on" in recorded.title.value
    recorded.menus["target"].value = "sm_100a"
    run(recorded)
    assert "recorded" not in recorded.title.value + recorded.top.value + recorded.detail.value
    assert all(re.fullmatch(r"\d+", text) for text in texts(recorded))


@pytest.mark.compile
def test_cancel_answers_at_once_and_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # what is built already would be too quick
    shown = grid_of_96(shape="640,640,640")
    shown.buttons["run"].click()
    wait_for(lambda: of_status(shown, "ok"))
    begun = time.monotonic()
    shown.buttons["cancel"].click()
    limit_s = 0.5 * max(1, os.getloadavg()[0] / os.cpu_count())  # other processes may share the machine
    assert re.search("cancelling|cancelled", shown.status.value) and time.monotonic() - begun < limit_s
    shown.wait()
    assert of_status(shown, "waiting") and "cancelled after" in shown.status.value
    built = {row["key"] for row in shown.rows() if row["status"] == "ok"}
    assert built and not of_status(shown, "failed")
    shown.buttons["run"].click()
    time.sleep(0.3)
    shown.cancel()
    shown.wait()
    assert {row["key"] for row in shown.rows() if row.get("resumed")} >= built


@pytest.mark.fault
def test_a_live_sweep_with_faults_has_a_winner(tmp_path):
    def no_record():
        raise FileNotFoundError("no record")

    kernel = TunableKernel(
        "faults", {"5,000": (5000,)}, ("fp32",),
        {"all": lambda _: faults.configs(("segfault in the compiler", "wrong result", "illegal memory access"))},
        {"block": lambda config: str(config.block), "fault": lambda config: config.fault or "none"},
        lambda shape, dtype, target: faults.FaultSpace(str(tmp_path)), no_record,
        lambda _: Roofline("block", "gbps", "GB/s", lambda config: config.block, {"roof": 1.0}), peer="torch")
    shown = panel.Panel(kernel)
    run(shown)
    assert "8 ok, 1 wrong, 2 failed" in shown.status.value and "fastest: " in shown.status.value
    assert sorted(cell.description for cell in of_status(shown, "failed")) == ["failed", "failed"]
    of_status(shown, "wrong")[0].click()
    assert "never written" in shown.detail.value
    assert sum(text.startswith("★") for text in texts(shown)) == 1 and "the fastest" in shown.top.value


def test_a_journal_that_cannot_be_is_a_sentence(sweeps):
    (sweeps / "tma-copy.jsonl").mkdir()
    shown = small()
    shown.buttons["run"].click()
    shown.wait()
    assert "tiles-problem" in shown.status.value and "tma-copy.jsonl" in shown.status.value
    assert not shown.buttons["run"].disabled


def test_a_target_switch_on_what_is_built_redraws_within_300_ms():
    shown = grid_of_96()
    took = []
    for target in ("sm_100a", "sm_90a", "sm_100a", "sm_90a"):
        begun = time.process_time()  # without the time that another process on these cores takes
        shown.menus["target"].value = target
        took.append(time.process_time() - begun)
        shown._session_rows |= built_rows(shown)
    assert statistics.median(took) < 0.3, took


# ---- cells, and what stays


def test_a_rejected_cell_says_why():
    shown = grid_of_96(target="sm_120a")
    cell = of_status(shown, "rejected")[0]
    assert cell.description == "smem" and "sm_120a has 101,376 B" in cell.tooltip
    cell.click()
    assert "sm_120a has 101,376 B" in shown.detail.value and "tiles-selected" in cell._dom_classes
    shown.menus["x"].value = "kernel"  # several configurations per cell: all are listed
    cells(shown)[0].click()
    assert shown.detail.value.count("<h3>") == 8


def test_text_from_data_is_escaped():
    row = {"kernel": "<i>k</i>", "config": "<i>", "status": "failed", "reason": "<script>", "predicted_ms": 1.0,
           "counts": {"<b>": 1}}
    text = views.details([row], "<peer>", "<source>") + views.heading("<title>", "<source>")
    assert not re.search(r"<(i|script|b|peer|source|title)>", text)


def test_words_and_shades():
    row = {"status": "rejected", "reason": "256 threads have at most 255 registers each."}
    assert panel_rows.short_status(row) == "registers"
    assert panel_rows.short_status({"status": "failed", "reason": "no answer within 60 s"}) == "failed"
    assert views.shade_class(2.0, [1.0, 2.0], "ms") == "tiles-shade0"
    assert views.shade_class(1.0, [1.0, 2.0], "ms") == views.shade_class(1.0, [0.1, 1.0], "ratio") == "tiles-shade23"
    assert views.shade_class(5, [5], "registers") == "tiles-shade23"


def test_the_winner_was_timed_again_and_is_fastest_beside_the_peer():
    rows = [{"status": "ok", "kernel": str(ms), "predicted_ms": predicted, "ms": ms, "peer_ms": ms * ratio,
             "ratio": ratio, **({"final_ms": ms, "final_ratio": final} if final else {})}
            for ms, ratio, final, predicted in (
                (1.0, 0.90, 0.89, 2), (1.1, 0.95, 0.96, 2), (1.2, 0.94, 0.955, 1), (0.9, 0.97, None, 3))]
    assert panel_rows.find_winner(rows) is rows[1]
    assert panel_rows.top_rows(rows) == panel_rows.rank_rows(rows) == [rows[1], rows[2], rows[0], rows[3]]
    fastest, near, model = views.verdict(rows, "cuBLAS")
    assert fastest == "fastest: 1.1, 1.10 ms, 0.96 × cuBLAS" and near == "within 1 %: 2 more configurations"
    assert model.endswith("predicted place 2")


def test_numbers_keep_their_zeros():
    assert [views.format_number(value) for value in (0.028, 0.0277, 25.0, 99.97, 1234.5, 168, None)] == [
        "0.0280", "0.0277", "25.0", "100", "1,234", "168", "–"]


def test_a_picture_and_a_table_stay_in_the_notebook(outputs, monkeypatch):
    monkeypatch.setattr(widget, "SNAPSHOT_S", 0.05)
    shown = grid_of_96()
    shown._ipython_display_()
    assert "application/vnd.jupyter.widget-view+json" in outputs[0]["data"]
    picture, table = (output["data"] for output in outputs[1:3])  # at once
    assert picture["image/png"]
    assert "recorded on NVIDIA H200" in table["text/plain"] and "128,256,64,8,4 persistent /2" in table["text/plain"]
    for menu, value in (("target", "sm_120a"), ("show", "registers")):
        shown.menus[menu].value = value
    shown._snapshot_timer.join()
    assert len(outputs) >= 5 and outputs[3]["update"] and outputs[3]["transient"] == outputs[1]["transient"]
    last = {output["transient"]["display_id"]: output["data"] for output in outputs[1:]}
    redrawn, table = last.values()
    assert redrawn["image/png"] != picture["image/png"] and "recorded" not in table["text/plain"]


def test_targets_are_those_with_tma():
    offered = [value for _, value in panel_rows.target_options()]
    assert [value for value in offered if value] == list(device.TARGETS[1:])
    assert ("" in offered) == device.current().has_tma


# ---- keeping the winner


@pytest.fixture
def on_h200(monkeypatch, tmp_path):
    """A GPU to which rows of the session belong; nothing is launched."""
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132))
    monkeypatch.setenv("TILES_TUNED", str(tmp_path / "tuned"))


def timed(shown, count=3):
    """Give the first configurations of the choice times, the second one the best; return its configuration."""
    keys = list(shown._choice.configs)[:count]
    for number, key in enumerate(keys):
        ms = 0.1 + 0.01 * abs(number - 1)
        shown._session_rows[key] = {**shown._choice.initial_rows[key], "status": "ok", "reason": "", "ms": ms,
                                    "ratio": 0.1 / ms, "spread": 0.01}
    shown._draw()
    return shown._choice.configs[keys[1]]


def test_keep_writes_the_winner_where_best_finds_it(on_h200):
    shown = panel.Panel(GEMM, COPY, shape="512,512,512", preset="the course's 8")
    keep = shown.buttons["keep"]
    assert keep.disabled, "nothing is timed"
    winner = timed(shown)
    assert not keep.disabled
    keep.click()
    assert f"512 × 512 × 512: {winner.name}, 100.0 µs, 1.00 × cuBLAS" in shown.status.value
    assert gemm.find_best(512, 512, 512, "bf16", True, "sm_90a", 132) == (winner, "tuned")
    assert tuned.load("gemm", "NVIDIA H200")[0]["tried"] == 3
    shown.menus["kernel"].value = COPY.name  # for which there is no table
    timed(shown)
    assert keep.disabled
    shown.menus["kernel"].value = GEMM.name
    shown.menus["target"].value = "sm_90a"  # compiled only
    assert keep.disabled


def test_keep_needs_a_time_of_this_gpu_and_of_a_dtype_with_a_table(on_h200):
    shown = panel.Panel(GEMM, shape="4096³", preset="grid of 96")
    assert "recorded on NVIDIA H200" in shown.title.value and shown.buttons["keep"].disabled
    shown = panel.Panel(GEMM, shape="512,512,512", preset="the course's 8", dtype="fp16")
    timed(shown)
    shown.buttons["keep"].click()
    assert "holds bf16 only" in shown.status.value and "tiles-problem" in shown.status.value


def test_a_damaged_table_is_said_and_left(on_h200):
    path = tuned.table_path("gemm", "NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    shown = panel.Panel(GEMM, shape="512,512,512", preset="the course's 8")
    timed(shown)
    shown.buttons["keep"].click()
    assert "mend it or delete it" in shown.status.value and path.read_text() == "{"
