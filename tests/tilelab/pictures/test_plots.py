import base64
import itertools
import warnings

import pytest
from matplotlib.figure import Figure

from tilelab.pictures import diagrams, plots

COMMON = {"shape": [64, 64, 64], "status": "ok", "reason": ""}
ROWS = [
    COMMON
    | {"name": "best", "config": "64,64", "ms": 0.5, "tflops": 700.0, "ratio": 1.05, "x": 64, "y": 128},
    COMMON
    | {"name": "proposed", "config": "$64$", "ms": 1.0, "tflops": 350.0, "ratio": 0.5, "x": 128, "y": 128},
    COMMON
    | {"name": "a $5$ kernel", "config": "256", "ms": 2.0, "tflops": 50.0, "ratio": 0.2, "x": 64, "y": 64},
]
REJECTED = {"name": "proposed", "config": "256,256", "status": "rejected", "x": 256, "y": 128} | {
    "reason": "it needs 9 B of shared memory",
    "shape": [64, 64, 64],
}
WRONG = {"status": "wrong", "reason": "one element differs", "x": 256, "tflops": 9999.0, "ratio": 99.0}
WRONG = ROWS[0] | WRONG
TITLES = {
    "title": "A finding: $5 a tile and $6 a stage, in a title so long that one line of it cannot hold it all",
    "source": "recorded on NVIDIA H200, 2026-11-21",
}


def words(figure):
    return " ".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


PICTURES = {
    "ratios": lambda rows: plots.ratios(rows, label="config", **TITLES),
    "heat_map": lambda rows: plots.heat_map(rows, "x", lambda row: row["y"], "ratio", y_label="y", **TITLES),
    "centred heat_map": lambda rows: plots.heat_map(rows, "x", "y", "ratio", centre=1.0, **TITLES),
}
each_picture = pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)


def assert_draws(figure):
    """A PNG comes of it without a warning (a missing glyph, a layout that failed), and everything lies inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(figure, Figure) and figure._repr_png_().startswith(b"\x89PNG")
    width, height = figure.bbox.size
    box = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    assert box.x0 > -1 and box.y0 > -1 and box.x1 < width + 1 and box.y1 < height + 1, "clipped at the edge"


@each_picture
def test_draws_without_a_warning_and_leaves_nothing_open(draw):
    import matplotlib.pyplot

    figure = draw(ROWS)
    assert_draws(figure)
    assert matplotlib.pyplot.get_fignums() == []
    assert TITLES["source"] in words(figure)
    assert "$" not in words(figure).replace(r"\$", ""), "names are text and not mathematics"
    with pytest.raises(ValueError, match="the list of rows is empty"):
        draw([])


@pytest.mark.parametrize("name, word", [("ratios", REJECTED["reason"]), ("heat_map", "x")])
def test_what_did_not_run_stays_in_the_picture_with_its_reason(name, word):
    figure = PICTURES[name]([*ROWS, REJECTED])
    assert word in [text.get_text() for text in figure.axes[0].texts]
    assert_draws(figure)


@pytest.mark.parametrize("name", ["ratios", "heat_map"])
def test_a_wrong_result_has_no_figure(name):
    figure = PICTURES[name]([*ROWS, WRONG])
    assert "99" not in words(figure) and figure.axes[0].get_xlim()[1] < 1000
    if name != "heat_map":
        assert WRONG["reason"] in words(figure)


def test_ratios_name_the_peer():
    assert {"cuBLAS", "1.05"} <= {text.get_text() for text in PICTURES["ratios"](ROWS).axes[0].texts}
    assert_draws(PICTURES["ratios"](ROWS * 7))


def test_no_ratio_is_below_zero():
    rows = [{"name": "course", "status": "ok", "reason": "", "ratio": ratio} for ratio in (0.1, 1.9)]
    axes = plots.ratios(rows, label="name", **TITLES).axes[0]
    assert min(axes.get_xticks()) >= 0 and axes.get_xlim()[0] < 0.1


def test_the_alternative_text_of_a_heat_map_says_its_range_and_where_it_ends():
    said = PICTURES["heat_map"]([*ROWS, REJECTED]).description
    assert said.startswith(TITLES["title"] + ". A heat map of 4 cells, 3 with a value")
    assert "the least is 0.20 at 64, 64, and the greatest 1.05 at 64, 128." in said
    assert PICTURES["heat_map"]([REJECTED]).description.endswith("1 cells, 0 with a value.")


def test_the_alternative_texts_of_ratios_say_each_value():
    rows = [
        {"name": f"k{index}", "ratio": 0.5 + index / 10, "gbps": 1000 * (index + 1)} for index in range(3)
    ]
    rows.append({"name": "late", "status": "failed", "reason": "no answer"})
    said = plots.ratios(rows, label="name", **TITLES).description
    assert said.startswith(TITLES["title"])
    assert said.endswith("0.50 for k0; 0.60 for k1; 0.70 for k2; none for late.")
    many = plots.ratios(rows * 5, label="name", **TITLES).description
    assert many.endswith("of 15 rows with a value, the least is 0.50 for k0, and the greatest 0.70 for k2.")


def test_the_words_of_neighbouring_cells_do_not_touch():
    rows = [
        {"x": x, "y": y, "status": "rejected" if x + y else "ok", "ratio": 0.99}
        for x in range(8)
        for y in (0, 1)
    ]
    figure = plots.heat_map(
        rows, "x", lambda row: f"{row['y']} warps, 7 stages", "ratio", mark=lambda row: "smem", **TITLES
    )
    figure.draw_without_rendering()
    boxes = [text.get_window_extent().padded(3) for text in figure.axes[0].texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_a_centred_heat_map_is_white_at_its_centre_and_has_a_key():
    figure = PICTURES["centred heat_map"](ROWS)
    shades = figure.axes[0].images[0]
    assert min(shades.cmap(shades.norm(1.0))) > 0.95 > min(shades.cmap(shades.norm(1.1)))
    assert {"0.20", "1.00", "5.00"} <= {text.get_text() for text in figure.axes[1].get_yticklabels()}


def test_heat_map_refuses_two_rows_in_one_cell():
    with pytest.raises(ValueError, match="4 rows fall in 3"):
        PICTURES["heat_map"]([*ROWS, ROWS[0]])


def test_colours_are_fixed():
    assert plots.colour("cuBLAS") == "#000000" and plots.colour("best") == plots.colour("persistent")
    assert plots.colour("never seen") == plots.colour("never seen")
    assert plots.colour("never seen") in plots.OTHERS
    assert not set(plots.OTHERS) & set(plots.COLOURS.values())


def test_a_picture_has_alternative_text():
    from IPython.core.formatters import DisplayFormatter

    figure = diagrams.canvas(TITLES["title"], "", 4, 2)[0]
    data, metadata = DisplayFormatter().format(figure)
    assert metadata["image/png"]["alt"] == TITLES["title"] and "text/plain" in data
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    _, metadata = DisplayFormatter().format(figure.describe("Two dollars."))
    assert metadata["image/png"]["alt"] == "Two dollars."
