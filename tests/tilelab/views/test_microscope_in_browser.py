"""The microscope of a TMA box in Chromium: it computes what the Python functions compute, and answers in time."""

import random

import pytest
import view_pages
from view_pages import evaluate, opened, photograph

from ch10.tile_pipeline.lesson import explorer, map_report, microscope_audit
from ch10.tile_pipeline.lesson.map_report import DTYPES
from tilelab.runtime import device, tensor_map

pytestmark = pytest.mark.browser
LIMIT_MS = 50  # from a change to the answer
ROOT = ".tiles-microscope"


@pytest.fixture
def page(browser, tmp_path):
    with opened(browser, tmp_path, explorer.microscope()) as shown:
        yield shown


def set_field(page, label, value):
    field = page.locator(f"{ROOT} [id$='-{label}']")
    field.select_option(value) if field.evaluate("each => each.localName") == "select" else field.fill(
        str(value)
    )


def text(page, part):
    return page.locator(f"{ROOT} .{part}").inner_text()


def load_of(made, corner, extra):
    """A map and a load of it, as the JavaScript functions take them."""
    same = {name: getattr(made, name) for name in ("shape", "strides", "box", "start", "itemsize", "fill")}
    same |= {"corner": corner, "floating": DTYPES[made.dtype].is_floating_point, "extra": extra}
    return same | {"swizzle": tensor_map.SWIZZLES[made.swizzle], "swizzleName": made.swizzle}


def test_every_sentence_of_500_random_maps_and_loads_is_python_s(page):
    source, given, expected = random.Random(1), [], []
    for made in microscope_audit.make_random_maps():
        corner = [source.randint(-600, 600) * source.choice((1, 16)) for _ in made.shape]
        extra, target = source.choice((0, 0, 16, -4)), source.choice(device.TARGETS[1:])
        # without its own checks, which refuse what has no reproducer
        load = object.__new__(map_report.BoxLoad)
        load.__dict__.update(vars(made), corner=tuple(corner), extra=extra)
        given.append([load_of(made, corner, extra), target, device.target_limits(target).smem_per_block])
        expected.append([load.broken_map_rules(), load.broken_load_rules(target)])
    found = evaluate(
        page,
        "microscope",
        "given.map(([load, target, smem]) => "
        f"[brokenMapRules(load), brokenLoadRules(load, target, smem, {map_report.ALIGNMENT})])",
        given,
    )
    assert found == expected
    assert 200 < sum(not rules for rules, _ in expected) < 400, "the maps are not all good, nor all bad"
    assert len({sentence[:30] for each in expected for rules in each for sentence in rules}) >= 11


def test_the_first_broken_rule_is_python_s(page):
    given, expected = [], []
    for made in microscope_audit.make_random_maps(200):
        arguments = {"shape": made.shape, "strides": made.strides, "itemsize": made.itemsize}
        arguments |= {"address": made.start, "box": made.box, "fill": made.fill}
        arguments |= {"floating": DTYPES[made.dtype].is_floating_point}
        given.append(arguments | {"swizzle": tensor_map.SWIZZLES[made.swizzle], "swizzleName": made.swizzle})
        try:
            expected.append(tensor_map.check_describable(**arguments, swizzle=made.swizzle))
        except ValueError as error:
            expected.append(str(error))
    assert evaluate(page, "microscope", "given.map(checkDescribable)", given) == expected
    assert evaluate(
        page,
        "microscope",
        "given.map(checkDescribable)",
        [
            {"shape": [1] * 6, "strides": [1] * 6, "itemsize": 4, "address": 0, "box": [4] * 6},
            {"shape": [64, 64], "strides": [64, 1], "itemsize": 4, "address": 0, "box": [4]},
            {"shape": [64, 64], "strides": [64, 2], "itemsize": 4, "address": 0, "box": [4, 4]},
        ],
    ) == [
        "a tensor map has 1 to 5 dimensions; this tensor has 6.",
        "box must have 2 extents, as many as the tensor; it is (4,).",
        "the last dimension must be contiguous (stride 1); the strides are (64, 2).",
    ]


def test_addresses_wavefronts_and_sentences_of_random_reads_are_python_s(page):
    reads = microscope_audit.make_random_reads(600, seed=2)
    given = [
        [
            {
                "rows": read.box[0],
                "columns": read.box[1],
                "itemsize": read.itemsize,
                "swizzle": tensor_map.SWIZZLES[read.swizzle],
            },
            read.access,
            read.lane_bytes,
            read.first,
        ]
        for read in reads
    ]
    found = evaluate(
        page,
        "microscope",
        "given.map(each => { const cost = costOfRead(...each); "
        "return [cost.addresses, cost.ways, cost.wavefronts, cost.size, cost.sentence]; })",
        given,
    )
    arguments = [(*read.layout, read.access, read.lane_bytes, read.first) for read in reads]
    assert found == [
        [
            read.addresses(),
            explorer.conflicts(*each),
            read.wavefronts(),
            read.size,
            explorer.describe_read(*each),
        ]
        for read, each in zip(reads, arguments)
    ]
    boxes = [
        (8, size // itemsize, itemsize, swizzle)
        for itemsize in (1, 2, 4, 8)
        for size in (16, 128)
        for swizzle in tensor_map.SWIZZLES
    ]
    expression = (
        "given.map(([rows, columns, itemsize, swizzle]) => Array.from({ length: rows }, (_, row) => "
        "Array.from({ length: columns }, (_, column) => "
        "addressOf({ rows, columns, itemsize, swizzle }, row, column))))"
    )
    given = [[*box[:3], tensor_map.SWIZZLES[box[3]]] for box in boxes]
    seen = evaluate(page, "microscope", expression, given)
    assert seen == [explorer.addresses(*box).tolist() for box in boxes]


def test_a_change_answers_within_50_ms(page):
    changes = {
        "arrow keys": "(root, i) => root.querySelector('.tensor').dispatchEvent(new KeyboardEvent('keydown', "
        "{ key: i % 2 ? 'ArrowLeft' : 'ArrowDown', bubbles: true }))",
        "swizzle": "(root, i) => { const menu = root.querySelector('[id$=-swizzle]'); menu.selectedIndex = i % 4; "
        "menu.dispatchEvent(new Event('change')); }",
        "read": "(root, i) => { const menu = root.querySelector('[id$=-access]'); menu.selectedIndex = i % 3; "
        "menu.dispatchEvent(new Event('change')); }",
    }
    for rows, columns, dtype in ((32, 32, "float32"), (256, 256, "float64")):  # 4 KiB, and the largest box
        set_field(page, "dtype", dtype)
        set_field(page, "boxRows", rows)
        set_field(page, "boxColumns", columns)
        for name, change in changes.items():
            median, longest = page.evaluate(view_pages.TIME_CHANGES, [ROOT, change, 21])
            print(f"{rows} × {columns} {dtype}, {name}: {median:.1f} ms, at most {longest:.1f} ms")
            assert median < view_pages.longest_answer_ms(LIMIT_MS), (
                f"{name}, a box of {rows} × {columns} {dtype}"
            )


def test_the_box_moves_with_the_mouse_and_the_arrow_keys(page):
    assert "2,560 bytes lie outside" in text(page, "facts")
    assert "4,096 bytes, the whole box" in text(page, "facts")
    corner = [page.locator(f"{ROOT} [id$='-{name}']") for name in "yx"]
    page.locator(f"{ROOT} .tensor").focus()
    for _ in range(8):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+ArrowLeft")
    assert [each.input_value() for each in corner] == ["0", "48"]
    assert "lies on the tensor" in text(page, "facts")
    box = page.locator(f"{ROOT} .tensor .box").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] - box["width"] * 1.5, box["y"] + box["height"] / 2, steps=8)
    page.mouse.up()
    row, column = (int(each.input_value()) for each in corner)
    assert row == 0 and column == pytest.approx(48 - 64, abs=4), "it moves by units of 16 bytes"
    assert column % 4 == 0, "it moves by units of 16 bytes"
    assert "keep every rule" in text(page, "rules") and "outside" in text(page, "facts")
    set_field(page, "x", -64)
    assert "All of it lies outside of the tensor and arrives as zero." in text(page, "facts")


def test_all_broken_rules_are_shown_at_once(page):
    page.locator(f"{ROOT} summary").click()
    for label, value in (("x", 79), ("start", 4), ("stride", 97), ("extra", 16), ("swizzle", "64B")):
        set_field(page, label, value)
    shown = page.locator(f"{ROOT} .rules li").all_inner_texts()
    assert [each.split()[1] for each in shown] == ["map:"] * 3 + ["load:"] * 2
    found = (
        "starts 4 past one",
        "one is 388 bytes",
        "swizzle 64B the innermost",
        "79 elements are 316 bytes",
    )
    for words in (*found, "it expects 4,112"):
        assert any(words in each for each in shown), words
    set_field(page, "boxColumns", 30)
    assert page.locator(f"{ROOT} .pictures").is_hidden() and "30 elements take 120" in text(page, "rules")
    set_field(page, "boxColumns", 16)
    assert page.locator(f"{ROOT} .pictures").is_visible()


def test_a_unit_links_its_source_its_place_and_its_banks(page):
    set_field(page, "swizzle", "128B")
    assert "32 lanes touch 8 of 32 banks, 4-way conflict: 4 wavefronts" in text(page, "cost")
    box, memory = (page.locator(f"{ROOT} .scroller").nth(index) for index in (0, 1))
    box.focus()
    for key in ["ArrowDown"] * 3 + ["ArrowRight"]:
        page.keyboard.press(key)
    page.wait_for_function(
        f"document.querySelector('{ROOT} .readout').innerText.includes('Unit 1 of box row 2')"
    )
    assert text(page, "readout") == (
        "Unit 1 of box row 2: tensor row -6, columns 84 to 87 (outside: zero) → bytes 304 to 319 of shared memory, "
        "line 2, place 3, banks 12 to 15; not read."
    )
    assert page.locator(f"{ROOT} .tensor .unit").count() == 1
    assert page.locator(f"{ROOT} th.here").all_inner_texts() == ["12", "13", "14", "15"]
    memory.focus()
    page.keyboard.press("ArrowLeft")  # the place to the left of it holds another unit of the same row
    page.wait_for_function(f"document.querySelector('{ROOT} .readout').innerText.includes('place 2')")
    assert "Unit 0 of box row 2" in text(page, "readout") and "read by lane 2" in text(page, "readout")
    page.keyboard.press("Enter")
    found = [page.locator(f"{ROOT} [id$='-{name}']").input_value() for name in ("readRow", "readColumn")]
    assert found == ["2", "0"]
    assert "30 lanes" in text(page, "cost")
    memory.hover(position={"x": 70, "y": 10})
    page.wait_for_function(
        f"document.querySelector('{ROOT} .readout').innerText.includes('Unit 0 of box row 0')"
    )


def test_ldmatrix_reads_without_conflict_where_the_box_is_swizzled(page):
    for name, value in (("dtype", "bfloat16"), ("boxColumns", 64), ("access", "matrix")):
        set_field(page, name, value)
    assert "8 lanes touch 4 of 32 banks, 8-way conflict: 8 wavefronts" in text(page, "cost")
    set_field(page, "swizzle", "128B")
    assert "no conflict: 1 wavefront." in text(page, "cost")
    set_field(page, "access", "column")
    set_field(page, "laneBytes", "16")
    assert page.locator(f"{ROOT} .banks tr").count() == 5, "four groups of eight lanes"
    assert "4 wavefronts" in text(page, "cost")


@pytest.mark.parametrize("size, scheme", zip(view_pages.SIZES, ("light", "dark")))
def test_it_fits_the_page(browser, tmp_path, size, scheme):
    with opened(browser, tmp_path, explorer.microscope(swizzle="128B"), size, scheme) as page:
        page.locator(f"{ROOT} .scroller").first.hover(position={"x": 60, "y": 50})
        page.wait_for_timeout(100)
        photograph(page, f"microscope-{size}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= view_pages.SIZES[size]["width"]
