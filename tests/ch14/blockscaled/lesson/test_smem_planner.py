"""The stage planner: plans known by hand and from CUTLASS's own layouts, capacities, refusals, the note, the widget."""

import dataclasses
import html
import itertools
import re

import pytest
from cases import cases
from legible import assert_legible, texts

from ch14.blockscaled.lesson import note_attempts, planner_widget, smem_planner
from ch14.blockscaled.lesson.smem_planner import Blackwell
from tilelab.records import results
from tilelab.runtime import device

TILES = [*itertools.product((128, 256), (64, 128, 192, 256))]
SCALED = [(dtype, *scale) for dtype, one in smem_planner.FORMATS.items() for scale in one.scales]


def tile(m, n, *rest, **changes):
    return Blackwell((m, n), (m // 128, 1), *rest, **changes)


E8M0, E4M3 = "Float8E8M0FNU", "Float8E4M3FN"
# Worked out by hand: A, B, SFA, SFB, bytes of a C stage, A/B and C stages, accumulators, SFA, SFB in TMEM.
BY_HAND = [
    # 128 x 256 x 4 bits; two CTAs halve B: 64 x 256 x 4 bits; 16 scales per row. (232448 - 1024 - 2 x 8192) / 28672 is
    # 7.5; what is left, 14336, is one more C.
    (tile(256, 128, "Float4E2M1FN", E8M0, 16, "Float16"), (16384, 8192, 2048, 2048, 8192, 7, 3, 256, 16, 16)),
    # SFB is whole in both CTAs: 256 x 16. 215040 / 38912 = 5.5, and 20480 are left.
    (
        tile(256, 256, "Float4E2M1FN", E8M0, 16, "Float16"),
        (16384, 16384, 2048, 4096, 8192, 5, 4, 256, 16, 32),
    ),
    # 215040 / 36864 = 5.8, and 30720 are left.
    (
        tile(128, 128, "Float4E2M1FN", E4M3, 16, "BFloat16"),
        (16384, 16384, 2048, 2048, 8192, 5, 5, 256, 16, 16),
    ),
    # 64 columns of B have scales of a whole block of 128: 8 a row. C 128 x 32 x 4. 198656 / 26624 = 7.5.
    (tile(128, 64, "Float4E2M1FN", E8M0, 32, "Float32"), (16384, 8192, 1024, 1024, 16384, 7, 2, 128, 16, 16)),
    # fp8: K 128, 4 scales per row, 192 columns have those of 256. 215040 / 30208 = 7.1.
    (tile(256, 192, "Float8E4M3FN", E8M0, 32, "Float16"), (16384, 12288, 512, 1024, 8192, 7, 2, 384, 16, 32)),
    # 198656 / 50688 = 3.9, and 46592 are left: two more of 16384.
    (tile(128, 256, "Float8E5M2", E8M0, 32, "Float32"), (16384, 32768, 512, 1024, 16384, 3, 4, 256, 16, 32)),
    # C of one byte: 128 x 32. (232448 - 1024 - 8192) / 28672 = 7.8, and 22528 are left.
    (
        tile(256, 128, "Float4E2M1FN", E8M0, 16, "Float8E4M3FN"),
        (16384, 8192, 2048, 2048, 4096, 7, 7, 256, 16, 16),
    ),
]

# A/B + C stages as nvidia-cutlass-dsl 4.8.1 gives them: the example's rule on the library's own shared memory layouts,
# for C in fp16 and in fp32, tiles in the order of TILES.
LIBRARY = {
    ("Float4E2M1FN", 16): ("7+3 6+3 5+5 5+2 4+5 4+2 3+8 3+4", "8+4 8+2 7+3 6+3 6+2 5+3 5+4 5+2"),
    ("Float4E2M1FN", 32): ("8+2 7+2 6+2 5+3 4+6 4+3 4+2 3+4", "9+3 8+3 8+2 7+2 6+5 6+2 6+2 5+3"),
    ("Float8E4M3FN", 32): ("8+3 7+3 6+3 5+3 5+2 4+3 4+3 3+4", "10+2 9+2 8+3 7+3 7+2 6+3 6+3 5+3"),
}
# And the columns that its TMEM layouts of SFA and SFB span.
PACKED = {("Float4E2M1FN", 16): 16, ("Float4E2M1FN", 32): 8, ("Float8E4M3FN", 32): 4}


@pytest.mark.parametrize("choice, known", BY_HAND, ids=str)
def test_plans_worked_out_by_hand(choice, known):
    plan = smem_planner.plan(choice)
    assert (
        *choice.stage_parts().values(),
        choice.c_stage_bytes(),
        plan.ab_stages,
        plan.c_stages,
        *choice.tmem_parts().values(),
    ) == known
    assert plan.fits and plan.stage_bytes == sum(known[:4])
    assert plan.smem_bytes == 1024 + plan.ab_stages * sum(known[:4]) + plan.c_stages * known[4] <= 232448


@pytest.mark.parametrize("dtype, size", LIBRARY)
def test_plans_as_the_library_has_them(dtype, size):
    known = " ".join(LIBRARY[dtype, size]).split()
    plans = [
        smem_planner.plan(tile(m, n, dtype, E8M0, size, c))
        for (m, n), c in itertools.product(TILES, ("Float16", "Float32"))
    ]
    assert [f"{plan.ab_stages}+{plan.c_stages}" for plan in plans] == known
    for plan in plans:
        block = PACKED[dtype, size]
        found = plan.choice.scale_columns(packed=True)
        assert found == {"SFA": block, "SFB": block * (1 + (plan.choice.n > 128))}


def every(c_dtypes=tuple(smem_planner.C_ITEMSIZE)):
    for (m, n), (dtype, sf_dtype, size), c in itertools.product(TILES, SCALED, c_dtypes):
        yield tile(m, n, dtype, sf_dtype, size, c)


def test_no_plan_is_over_capacity_nor_wastes_a_stage():
    for choice in every():
        plan = smem_planner.plan(choice)
        assert plan.fits and plan.ab_stages >= 3 and plan.c_stages >= 2, choice
        left = plan.capacity - plan.smem_bytes
        assert 0 <= left < choice.c_stage_bytes(), choice
        assert plan.tmem_columns <= smem_planner.COLUMNS
        # Each buffer begins at a multiple of 1,024 bytes: the example counts no gaps, and none makes it too large.
        end = 0
        for size in (1024, *(size for name, size in reversed(plan.smem.items()) if name != "barriers")):
            end = -(-end // 1024) * 1024 + size
        assert end <= plan.capacity, choice


def test_what_does_not_fit_says_so_whatever_is_asked():
    for choice in every(("Float32",)):
        for ab, c, sums in itertools.product((None, 1, 7, 64), (None, 4, 64), ("one", "two")):
            plan = smem_planner.plan(dataclasses.replace(choice, ab_stages=ab, c_stages=c, accumulators=sums))
            over = (
                plan.smem_bytes > plan.capacity
                or plan.tmem_columns > smem_planner.COLUMNS
                or plan.ab_stages == 0
            )
            assert plan.fits is not over, plan
            assert ab in (None, plan.ab_stages) and c in (None, plan.c_stages)


def test_more_of_one_leaves_less_of_the_other():
    for choice in every(("Float16",)):
        counts = [smem_planner.plan(dataclasses.replace(choice, c_stages=c)).ab_stages for c in range(1, 12)]
        assert counts == sorted(counts, reverse=True)
        counts = [smem_planner.plan(dataclasses.replace(choice, ab_stages=ab)).c_stages for ab in range(1, 8)]
        assert counts == sorted(counts, reverse=True)
    for size in (16, 32):
        by_n = [smem_planner.plan(tile(128, n, sf_vec_size=size)).ab_stages for n in (64, 128, 192, 256)]
        assert by_n == sorted(by_n, reverse=True), "wider tiles, fewer stages"
    deep = smem_planner.plan(tile(256, 128, tile_k=512))
    assert smem_planner.plan(tile(256, 128, tile_k=128)).ab_stages > deep.ab_stages


def test_accumulators_in_tmem():
    for dtype, sf_dtype, size in SCALED:
        for m in (128, 256):
            two = smem_planner.plan(tile(m, 256, dtype, sf_dtype, size, accumulators="two"))
            assert not two.fits and "take 512 and leave 0 to the scale factors, which take 48" in two.problem
            overlapped = smem_planner.plan(tile(m, 256, dtype, sf_dtype, size, accumulators="overlapped"))
            assert overlapped.fits and overlapped.tmem == {"accumulators": 464, "SFA": 16, "SFB": 32}
            assert smem_planner.plan(tile(m, 192, dtype, sf_dtype, size)).tmem_columns == 432
    found = "(12 if packed)"
    assert found in smem_planner.plan(tile(256, 256, "Float8E4M3FN", E8M0, 32, accumulators="two")).sentence
    assert "if packed" not in smem_planner.plan(tile(256, 256, accumulators="two")).sentence


def test_six_bits_take_a_byte_and_are_named():
    six, eight = (
        smem_planner.plan(tile(128, 128, dtype, E8M0, 32)) for dtype in ("Float6E3M2FN", "Float8E4M3FN")
    )
    assert six.smem == eight.smem
    assert "Shared memory holds six bits as a byte" in six.sentence and "Six" not in eight.sentence
    assert "neither MXFP4" in smem_planner.plan(tile(128, 128)).sentence
    assert "neither MXFP4" not in smem_planner.plan(tile(128, 128, sf_dtype=E4M3)).sentence


@cases(
    "changes, words",
    ({"mma_tiler_mn": (64, 128)}, "M is 64; choose one of 128, 256"),
    ({"mma_tiler_mn": (128, 96)}, "N is 96; choose one of 64, 128, 192, 256"),
    ({"cluster_shape_mn": (2.0, 1)}, "is 2.0; choose one of 1, 2, 4"),
    ({"cluster_shape_mn": (1, 1)}, "the cluster's M is 1; a tile of 256 rows is made by two CTAs"),
    ({"ab_dtype": "Float16"}, "ab_dtype is 'Float16'; choose one of Float4E2M1FN"),
    ({"c_dtype": "Int8"}, "c_dtype is 'Int8'; choose one of"),
    ({"ab_dtype": "Float8E4M3FN"}, "takes scales Float8E8M0FNU over 32, not Float8E8M0FNU over 16"),
    ({"tile_k": 96}, "multiple of 64 up to 1,024"),
    ({"tile_k": 64, "sf_vec_size": 32}, "multiple of 128"),
    ({"ab_stages": 0}, "ab_stages is 0; it must be None"),
    ({"accumulators": "three"}, "choose one of rule, one, two, overlapped"),
    ({"accumulators": "overlapped"}, "overlap only for N = 256; two of 128 columns fit side by side"),
)
def test_refusals_on_blackwell(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)) as said:
        Blackwell(**{"mma_tiler_mn": (256, 128), **changes})
    assert str(said.value).count(". ") == 0 and str(said.value).endswith(".")


@cases(
    "choice, words",
    (tile(256, 256, ab_stages=6), "38,912 B, 2 of C of 8,192 B and the barriers take 250,880 B"),
    (tile(256, 256, ab_stages=8, accumulators="two"), "; and TMEM has 512 columns"),
    (tile(128, 256, c_stages=40), "40 C stages of 8,192 B leave no room for an A/B stage of 55,296 B"),
    (tile(128, 256, tile_k=1024, ab_stages=2), "2 A/B stages of 221,184 B"),
)
def test_what_does_not_fit_says_why(choice, words):
    plan = smem_planner.plan(choice)
    assert not plan.fits and words in plan.sentence
    assert plan.sentence.startswith("It does not fit: ")
    assert "do not fit" in planner_widget.title(plan)


# ---- the note


def test_attempt_1_changes_one_test_of_three_and_has_no_room_there():
    verdicts = [row["verdict"] for row in note_attempts.accumulator_rows()]
    assert verdicts == ["the same kernel", "48 columns too many", "the same kernel"]
    said = [note_attempts.describe_attempt_1(case.choice()) for case in note_attempts.CASES]
    assert "changes nothing at N = 128" in said[0] and "at column 512, past the last" in said[1]
    assert said[1].endswith("464 and 48 make 512.")


def test_attempt_2_changes_one_test_of_three():
    rows = note_attempts.stage_rows()
    found = [(row["greedy"], row["attempt 2"], row["same kernel"]) for row in rows]
    assert found == [("7 + 3", "5 + 10", False), ("5 + 4", "5 + 4", True), ("5 + 5", "5 + 5", True)]
    assert [(row["steps per tile"], row["steps per CTA"]) for row in rows] == [(4, 112), (4, 56), (2, 4)]
    assert [row["note says"] for row in rows] == ["7.5% slower", "crash", "2.1% slower"]
    assert rows[2]["steps per CTA"] < 5, "test 3 never comes round its ring"
    assert "turns 7 A/B stages into 5" in note_attempts.describe_attempt_2(note_attempts.CASES[0].choice())
    assert "changes nothing here" in note_attempts.describe_attempt_2(note_attempts.CASES[1].choice())
    large = note_attempts.attempt_2(tile(128, 256))
    assert (large.ab_stages, large.c_stages) == (5, 4) and not smem_planner.plan(large).fits
    sentence = note_attempts.describe_attempt_2(tile(128, 256))
    assert sentence.startswith("Attempt 2 does not fit: 5 A/B stages of 55,296 B")


def test_littles_law():
    flights = {
        case.name: note_attempts.compute_flight(smem_planner.plan(case.choice()))
        for case in note_attempts.CASES
    }
    first = flights["test 1"]
    # 2 x 128 x 128 x 256 operations at 9 PFLOP/s over 148 SMs; six stages in flight.
    assert first.step_us == pytest.approx(8388608 / (9e9 / 148))
    assert first.hidden_us == pytest.approx(6 * first.step_us)
    assert first.in_flight == 6 * 28672 and first.memory_bytes == pytest.approx(8e6 / 148)
    assert (first.for_tensor_core, first.for_memory) == (9, 3)
    assert first.speed == pytest.approx(0.828, abs=1e-3)
    assert flights["test 2"].for_tensor_core == 5 and flights["test 2"].speed == 1
    one = note_attempts.compute_flight(smem_planner.plan(tile(256, 128, ab_stages=1)))
    assert one.hidden_us == one.in_flight == one.speed == 0


def test_floors_of_the_notes_tests():
    load = note_attempts.compute_work(note_attempts.CASES[2].choice(), note_attempts.CASES[2].mnkl)
    bytes_ = 2 * 2048 * (512 // 2 + 512 // 16) + 2048 * 2048 * 2
    assert (load.steps_per_tile, load.steps_per_cta) == (2, 4)  # 256 tiles for 148 CTAs
    assert load.memory_us == pytest.approx(bytes_ / 8e6)
    assert load.memory_us < note_attempts.CASES[2].before_us / 20
    assert load.tensor_core_us == pytest.approx(2 * 2048 * 2048 * 512 / 9e9)
    wide = note_attempts.compute_work(tile(256, 128), (256, 128, 256, 3))
    assert (wide.steps_per_tile, wide.steps_per_cta) == (1, 1)


def test_the_hopper_sweep_beside_littles_law():
    rows = results.load("ch10_gemm_sweep", "nvidia-h200")["rows"]
    told = note_attempts.hopper_rows(rows)
    assert [row["stages"] for row in told] == [2, 3, 4, 6]
    # to the peer beside each: the clock moves between two steps' times
    ratios = [row["ratio"] for row in told]
    assert ratios == sorted(ratios), "more stages, faster"
    assert all(0.75 < row["model_us"] / row["step_us"] < 1.33 for row in told)
    assert note_attempts.hopper_rows(rows, "128 × 1") == []


def test_a_sweep_is_ranked_by_what_ran_beside_each():
    tile, run = "128×128×64 · 4 stages · specialised", {"status": "ok", "shape": [4096] * 3}
    rows = [
        run | {"config": f"{tile} · {more}", "ms": ms, "ratio": ratio}
        for more, ms, ratio in (("early", 0.18, 0.9), ("groups of 4", 0.2, 1.0), ("cluster of 2", 0.18, 0.9))
    ]
    (told,) = note_attempts.hopper_rows(rows)
    assert (told["ms"], told["ratio"]) == (0.2, 1.0)


def test_gpus_are_those_of_the_table():
    assert device.KNOWN[Blackwell.gpu].sms == 148


# ---- pictures and widget


@cases(
    "choice",
    tile(256, 128, ab_stages=64),
    tile(256, 256, accumulators="overlapped"),
    tile(128, 64, tile_k=64, ab_stages=30),
    ids=str,
)
def test_pictures_of_plans(choice):
    plan = smem_planner.plan(choice)
    figure = planner_widget.draw(plan)
    assert_legible(figure)
    assert figure.get_suptitle() == planner_widget.title(plan)
    over = [patch for patch in figure.axes[0].patches if patch.get_hatch() == "/////"]
    unfit = (plan.smem_bytes > plan.capacity) + (plan.tmem_columns > smem_planner.COLUMNS)
    assert len(over) == unfit
    assert f"{plan.smem_bytes:,} of\n{plan.capacity:,} B" in texts(figure)


def test_the_picture_of_the_attempts():
    figure = planner_widget.draw_attempts()
    assert_legible(figure)
    assert "leaves 2 of the 3 tests" in figure.get_suptitle().replace("\n", " ")
    assert {"560 of\n512 columns", "512 of\n512 columns", "304 of\n512 columns"} <= set(texts(figure))


def describe(shown):
    return str(planner_widget.plan_table(shown.plan)), shown.plan.choice.k  # K is in the picture


def test_every_menu_changes_what_is_shown():
    changes = {"mma_tiler_mn": (256, 192), "cluster_shape_mn": (4, 1), "scale": (E4M3, 16)}
    changes |= {"c_dtype": "Float32", "tile_k": 128, "ab_stages": 4, "c_stages": 3, "accumulators": "one"}
    shown = planner_widget.Planner()
    assert all(menu.index is not None for menu in shown.menus.values()), "a menu that shows nothing"
    text = describe(shown)
    for name, value in changes.items():
        choice, before = shown.plan.choice, text
        shown.menus[name].value = value
        text = describe(shown)
        assert shown.plan.choice != choice, f"{name} changes nothing"
        if name not in ("cluster_shape_mn", "scale"):  # neither moves a byte
            assert text != before, f"{name} shows nothing"
        assert html.escape(shown.plan.sentence) in shown.message.value


def test_the_picture_that_stays_says_what_it_shows():
    picture, _ = planner_widget.Planner().outputs()
    _, metadata = picture._repr_mimebundle_()
    assert "stages of A/B" in metadata["image/png"]["alt"] and "It fits" in metadata["image/png"]["alt"]


def test_two_clicks():
    shown = planner_widget.Planner()
    usual = shown.plan
    shown.buttons["attempt_1"].click()
    assert shown.menus["mma_tiler_mn"].value == (256, 256) and shown.menus["accumulators"].value == "two"
    assert not shown.plan.fits and "past the last" in shown.message.value
    assert shown.message.value.count("<p") == 1, "the reason is told once"
    shown.menus["mma_tiler_mn"].value = (256, 128)
    shown.buttons["attempt_2"].click()
    assert (shown.plan.ab_stages, shown.plan.c_stages) == (5, 10)
    assert shown.menus["accumulators"].value == "rule"
    assert "turns 7 A/B stages into 5" in shown.message.value and "It fits" in shown.message.value
    shown.menus["mma_tiler_mn"].value = (128, 256)  # by hand: the attempt's words go, its stages stay
    assert "Attempt" not in shown.message.value and shown.menus["ab_stages"].value == 5
    shown.menus["mma_tiler_mn"].value = (256, 128)
    shown.buttons["rule"].click()
    assert shown.plan == usual


def test_what_cannot_be_chosen_is_told_and_nothing_is_lost():
    shown = planner_widget.Planner()
    before, kept = {name: menu.value for name, menu in shown.menus.items()}, shown.plan
    for name, value, words in (
        ("ab_dtype", E4M3, "takes scales Float8E8M0FNU over 32"),
        ("cluster_shape_mn", (1, 1), "made by two CTAs"),
        ("accumulators", "overlapped", "overlap only for N = 256"),
    ):
        shown.menus[name].value = value
        assert words in html.unescape(shown.message.value) and "last possible choice" in shown.message.value
        assert shown.plan == kept
        assert {key: menu.value for key, menu in shown.menus.items()} == {**before, name: value}
        shown.menus[name].value = before[name]
        assert shown.plan == kept and "It fits" in shown.message.value
    shown.menus["cluster_shape_mn"].value = (1, 1)
    shown.buttons["attempt_1"].click()
    assert "made by two CTAs" in html.unescape(shown.message.value)


def test_labels_are_escaped(monkeypatch):
    shown = planner_widget.Planner()
    monkeypatch.setattr(Blackwell, "describe_accumulators", lambda self: "<b>&</b>")
    shown.buttons["rule"].click()
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in shown.message.value and "<b>" not in shown.message.value
    monkeypatch.setattr(planner_widget, "title", lambda plan: "$a_1$ <b>")
    assert_legible(planner_widget.draw(shown.plan))


def test_a_notebook_keeps_a_picture_and_a_table(outputs):
    shown = planner_widget.Planner()
    shown._ipython_display_()
    widget, image, table = outputs
    assert widget["data"]["text/plain"] == "Planner(sm_100a)" and set(image["data"]) >= {"image/png"}
    assert "It fits: 7 A/B stages" in table["data"]["text/plain"]
    before = image["data"]["image/png"]
    shown.buttons["attempt_1"].click()
    image, table = outputs[-2:]
    assert image["transient"]["display_id"] == outputs[1]["transient"]["display_id"]
    assert "It does not fit" in table["data"]["text/plain"] and image["data"]["image/png"] != before
