"""The views of the number formats in Chromium: they compute what the Python functions compute, and answer in time."""

import math
import random

import pytest
import torch
import view_pages
from view_pages import evaluate, opened, photograph

from ch14.mx_formats import number_formats, packing
from ch14.mx_formats.lesson import errors, explorer, figures
from ch14.mx_formats.number_formats import ELEMENTS, FORMATS

pytestmark = pytest.mark.browser
LIMIT_MS = 50
ROOT = ".tiles-formats"
GIVEN = explorer._elements()


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """Return one number line, whose functions several tests call; one test changes what it shows."""
    with opened(browser, tmp_path_factory.mktemp("page"), explorer.number_line()) as shown:
        yield shown


def field(page, name):
    return page.locator(f"{ROOT} [id$='-{name}']")


def test_every_code_of_every_element_is_described_as_in_python(page):
    codes = [[name, code] for name, element in ELEMENTS.items() for code in range(2**element.bits)]
    found = evaluate(
        page, "formats", "given[1].map(([name, code]) => describeCode(given[0][name], code))", [GIVEN, codes]
    )
    assert found == [figures.describe(ELEMENTS[name], code) for name, code in codes]
    scales = evaluate(page, "formats", "given.map(decodeE8m0)", list(range(255)))
    assert list(map(float, scales)) == number_formats.decode_e8m0(torch.arange(255)).tolist()


def test_numbers_and_midpoints_round_to_the_codes_of_python(page):
    source, cases = random.Random(3), []
    for name, element in ELEMENTS.items():
        numbers = number_formats.magnitudes(element).double()
        middles = ((numbers[1:] + numbers[:-1]) / 2).tolist()
        values = [*numbers.tolist(), *middles, *(math.nextafter(each, 0) for each in middles), 1e30]
        values += [*(source.gauss(0, 1) * 2 ** source.randint(-20, 20) for _ in range(200))]
        cases += [[name, sign * value] for value in values for sign in (1, -1)]
    found = evaluate(
        page, "formats", "given[1].map(([name, value]) => encode(given[0][name], value))", [GIVEN, cases]
    )
    assert found == [int(number_formats.encode(torch.tensor(value), ELEMENTS[name])) for name, value in cases]
    assert evaluate(
        page, "formats", "given.map(formatG)", [0.1, 1e6, 123456, 1e-5, 0.0001, 57344, -1.5258789e-05]
    ) == [f"{value:g}" for value in (0.1, 1e6, 123456, 1e-5, 0.0001, 57344, -1.5258789e-05)]


def test_blocks_have_the_scales_and_codes_of_python(page):
    one_row = {name: each for name, each in FORMATS.items() if each.block[0] == 1}
    formats = {name: {"element": each.element.name, "scale": each.scale} for name, each in one_row.items()}
    cases, expected = [], []
    for name, format in one_row.items():
        blocks = [
            explorer.make_block(kind, format, seed) for kind in (*errors.DATA, "ramp") for seed in range(4)
        ]
        blocks += [torch.zeros_like(blocks[0]), blocks[0] * 2.0**-130, blocks[0] * 2.0**100, blocks[1] * 1e-3]
        for rule in number_formats.RULES if format.scale == "e8m0" else ("floor",):
            for x in blocks:
                quantised = number_formats.quantise(x, format, rule)
                cases.append([x[0].tolist(), name, rule])
                expected.append(
                    [
                        None if format.scale == "fp32" else int(quantised.scales),
                        quantised.codes[0].tolist(),
                        number_formats.dequantise(quantised)[0].tolist(),
                    ]
                )
    found = evaluate(
        page,
        "formats",
        "given[2].map(([numbers, name, rule]) => { const made = quantiseBlock(numbers, "
        "given[1][name], given[0], rule); return [made.scaleCode, made.codes, made.back]; })",
        [GIVEN, formats, cases],
    )
    assert len(cases) > 200
    wrong = [
        (case[1:], one[:1], other[:1]) for case, one, other in zip(cases, found, expected) if one != other
    ]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("rows, columns", [(130, 9), (1, 6)])
def test_scales_lie_where_python_puts_them(page, rows, columns):
    numbers = torch.arange(1, rows * columns + 1).view(rows, columns)
    low, high = (packing.tile_scales(part.to(torch.uint8)).long() for part in (numbers % 251, numbers // 251))
    bytes_of_number = high * 251 + low
    places = evaluate(
        page,
        "microscope",
        "Array.from({ length: given[0] }, (_, row) => Array.from("
        "{ length: given[1] }, (_, column) => byteOfScale(row, column, given[1])))",
        [rows, columns],
    )
    assert (bytes_of_number[torch.tensor(places)] == numbers).all()
    back = evaluate(
        page,
        "microscope",
        "given[0].map(byte => scaleAtByte(byte, given[1]))",
        [[place for line in places for place in line], columns],
    )
    assert back == [[row, column] for row in range(rows) for column in range(columns)]


def test_bits_line_and_typed_numbers_answer(page):
    sentence, rounding = page.locator(f"{ROOT} .sentence"), page.locator(f"{ROOT} .rounding")
    found = sentence.inner_text()
    assert (
        found == "code 5 of e2m1, 0 10 1, is 3 (normal, exponent 1); magnitudes beside it: 2 and 4, step 1."
    )
    page.locator(f"{ROOT} .bit").nth(3).click()
    assert (
        "code 4 of e2m1, 0 10 0, is 2" in sentence.inner_text() and field(page, "typed").input_value() == "2"
    )
    page.locator(f"{ROOT} .line").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "is 4 (normal" in sentence.inner_text()
    page.keyboard.press("Home")
    assert "is -6 (normal" in sentence.inner_text()
    field(page, "typed").fill("5")
    found = rounding.inner_text()
    assert found == "5 rounds to 4: it lies between 4 and 6, exactly in the middle, and the even code wins."
    field(page, "typed").fill("1e9")
    assert "it saturates" in rounding.inner_text() and "is 6" in sentence.inner_text()
    field(page, "element").select_option("e4m3")
    assert "is 448" in sentence.inner_text() and page.locator(f"{ROOT} .bit").count() == 8
    field(page, "code").fill("127")
    assert sentence.inner_text() == "code 127 of e4m3, 0 1111 111, is nan."
    field(page, "element").select_option("e8m0")
    field(page, "typed").fill("7")
    assert (
        sentence.inner_text() == "code 129 of e8m0, 10000001, is 4."
        and "at or below 7: 4" in rounding.inner_text()
    )
    line = page.locator(f"{ROOT} .line").bounding_box()
    page.mouse.click(line["x"] + line["width"] - 25, line["y"] + 70)
    assert "code 254 of e8m0, 11111110, is 1.70141e+38." == sentence.inner_text()


def test_an_element_of_a_block_can_be_changed(browser, tmp_path):
    with opened(browser, tmp_path, explorer.block("mxfp4", "ramp")) as page:
        sentence, readout = page.locator(f"{ROOT} .sentence"), page.locator(f"{ROOT} .readout")
        assert "mxfp4: scale 1 (code 127), error " in sentence.inner_text()
        page.locator(f"{ROOT} .bars").focus()
        page.keyboard.press("End")
        assert "Element 31: 7 / 1 = 7 → code 0111 (6) → 6." == readout.inner_text()
        field(page, "rule").select_option("ceil")
        assert "scale 2 (code 128)" in sentence.inner_text() and "(4) → 8." in readout.inner_text()
        field(page, "value").fill("100")
        assert "scale 32 (code 132)" in sentence.inner_text()
        field(page, "format").select_option("nvfp4")
        assert field(page, "rule").is_disabled() and page.locator(f"{ROOT} circle").count() == 16


def test_axes_have_labels(browser, tmp_path):
    def labels(page):
        return page.locator(f"{ROOT} .label").all_text_contents()

    with opened(browser, tmp_path, explorer.number_line()) as page:
        assert {"value of the code", "-6", "0", "1.5"} <= {*labels(page)}
        field(page, "element").select_option("e4m3")
        assert {"value of the code, on a logarithmic axis", "0", "2^−8", "2^8"} <= {*labels(page)}
    with opened(browser, tmp_path, explorer.block("mxfp4", "ramp")) as page:
        assert {"element of the block; upwards its value", "6", "4", "0", "-6", "31"} <= {*labels(page)}
        field(page, "format").select_option("nvfp4")
        assert all(len(label.strip("-")) <= 5 for label in labels(page) if label[-1].isdigit())


def test_a_line_of_16_bytes_fits(browser, tmp_path):
    with opened(browser, tmp_path, explorer.scale_layout()) as page:
        for width in (830, 1280):  # of a cell's output in JupyterLab on a projector, and of a page
            page.set_viewport_size({"width": width, "height": 720})
            page.wait_for_function("""[...document.querySelectorAll('.tiles-scales .scroller')].every(
                box => box.scrollWidth === box.clientWidth)""")


def test_scales_answer_to_the_mouse_and_the_keys(browser, tmp_path):
    with opened(browser, tmp_path, explorer.scale_layout()) as page:
        readout = page.locator(".tiles-scales .readout")
        assert readout.inner_text() == (
            "Scale 2 of row 33 belongs to the block of elements 64 to 95 of row 33. It lies at byte 22: tile 0, line "
            "1, byte 6 of the line = 1 · 4 + 2. Its line also holds rows 1, 65, 97."
        )
        matrix, tiles = (page.locator(".tiles-scales .scroller").nth(index) for index in (0, 1))
        tiles.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        says = "document.querySelector('.tiles-scales .readout').innerText"
        page.wait_for_function(f"{says}.startsWith('Scale 0 of row 65')")
        matrix.focus()
        page.keyboard.press("ArrowUp")
        page.wait_for_function(f"{says}.includes('of row 64')")
        assert "byte 8:" in readout.inner_text()
        tiles.hover(position={"x": 60, "y": 30})
        page.wait_for_function(f"{says}.startsWith('Scale 0 of row 1 ')")


CHANGES = {
    "code": "(root, i) => root.querySelectorAll('.bit')[i % 4].click()",
    "block": "(root, i) => root.querySelector('.bars').dispatchEvent(new KeyboardEvent('keydown', "
    "{ key: i % 2 ? 'ArrowLeft' : 'End', bubbles: true }))",
    "scales": "(root, i) => { const rows = root.querySelector('[id$=-rows]'); rows.value = 200 + i; "
    "rows.dispatchEvent(new Event('input')); }",
}


@pytest.mark.parametrize("size, scheme", zip(view_pages.SIZES, ("light", "dark")))
@pytest.mark.parametrize(
    "name, make",
    [("code", explorer.number_line), ("block", explorer.block), ("scales", explorer.scale_layout)],
)
def test_it_fits_the_page_and_answers_within_50_ms(browser, tmp_path, name, make, size, scheme):
    view = make()
    with opened(browser, tmp_path, view, size, scheme) as page:
        photograph(page, f"{name}-{view.data['start'].get('element', '')}-{size}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= view_pages.SIZES[size]["width"]
        median, longest = page.evaluate(view_pages.TIME_CHANGES, [".tiles-view", CHANGES[name], 21])
        print(f"{name}: {median:.1f} ms, at most {longest:.1f} ms")
        assert median < view_pages.longest_answer_ms(LIMIT_MS)
