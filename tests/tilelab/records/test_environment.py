"""What a record's environment notices: changes that can alter a figure, in any file, and no others."""

import json

import pytest

from tilelab import ROOT
from tilelab.records import compare, environment, results
from tilelab.runtime import device, tuned

H200 = "NVIDIA H200"
BENCH, CHECK, PEERS = (f"tilelab/measure/{name}.py" for name in ("bench", "check", "peers"))
SHAPES, GEMM = "tilelab/measure/layer_shapes.py", "ch14/gemm/lesson/experiments.py"
TABLE = "tuned/nvidia-h200/gemm_families.json"
SQUARE = [{"shape": [4096, 4096, 4096]}]


def empty_table(text):
    return json.dumps(json.loads(text) | {"shapes": [], "errors": []})


def change_all_rows(text):
    table = json.loads(text)
    return json.dumps(table | {"errors": [[1 for _ in row] for row in table["errors"]]})


# (experiment, file, the text that is replaced, by what; or a function of the whole file)
SEEN = [
    # the five that the first records did not notice
    ("ch14_gemm_square", BENCH, "math.ceil(3 * device.current().l2_bytes / size) + 1", "1"),
    ("ch14_gemm_square", BENCH, "return self.peer_ms / self.ms", "return 2 * self.peer_ms / self.ms"),
    ("ch14_gemm_held_out", SHAPES, "Yi 34B: q, k, v 9216 7168", "Yi 34B: q, k, v 9216 7424"),
    ("ch14_gemm_square", TABLE, empty_table, None),
    (
        "ch14_gemm_square",
        GEMM,
        "return lambda: torch.mm(a, b, out=out)",
        "return lambda: (torch.mm(a, b), torch.mm(a, b, out=out))",
    ),
    # the clock, the order, the median, the limits of a test
    ("ch14_attention_ladder", BENCH, "WARM_S = 0.3", "WARM_S = 0.0"),
    ("ch07_bulk_speed", BENCH, "order if rounds % 2 else order[::-1]", "order"),
    (
        "ch10_tile_speed",
        BENCH,
        "statistics.median(values) for name, values in times",
        "min(values) for name, values in times",
    ),
    ("ch14_blockscaled_fp8", BENCH, "GRAPH_BELOW_US = 100", "GRAPH_BELOW_US = 0"),
    # the peers
    (
        "ch10_gemm_peers",
        PEERS,
        "self.library.bf16_gemm_nt(a, weight, out)",
        "self.library.bf16_gemm_nt(a.clone(), weight, out)",
    ),
    (
        "ch14_attention_peers",
        "ch14/attention/lesson/experiments.py",
        "SDPBackend.CUDNN_ATTENTION",
        "SDPBackend.MATH",
    ),
    # a check that lets wrong results pass, the inputs, a table's other rows
    ("ch14_gemm_ragged", CHECK, "TOLERANCE =", "TOLERANCE = 9 *"),
    ("ch14_gemm_square", GEMM, "torch.randn(", "torch.zeros("),
    ("ch14_gemm_square", TABLE, change_all_rows, None),
    # what a notebook's cell gives to its ladder, and how a ladder times
    ("start_first_copy", "notebooks/00_start.ipynb", "lambda: out.copy_(x)", "lambda: out.copy_(x.clone())"),
    (
        "ch14_gemm_ladder",
        "tilelab/cells/lesson.py",
        "            flops=self.flops,",
        "            flops=2 * self.flops,",
    ),
]


def make_code(path, old, new):
    """Return the files of the course with one change."""
    text = (ROOT / path).read_text(encoding="utf-8")
    changed = old(text) if callable(old) else text.replace(old, new)
    assert changed != text, f"{path} holds no {old}"
    return environment.Code(changes={path: changed})


@pytest.mark.parametrize("experiment, path, old, new", SEEN)
def test_a_change_that_can_alter_the_figures_is_seen(experiment, path, old, new):
    before = environment.describe(experiment, H200, SQUARE)
    record = {"experiment": experiment, "device": {"name": H200}, "rows": SQUARE, "environment": before}
    assert environment.find_change(record) == ""
    found = environment.find_change(record, make_code(path, old, new))
    assert found.startswith("the rows of the tuned table gemm" if path == TABLE else "the code that measures")


def keep_one_row(text):
    table = json.loads(text)
    at = table["shapes"].index(SQUARE[0]["shape"])
    return json.dumps(table | {"shapes": [table["shapes"][at]], "errors": [table["errors"][at]]})


# Changes that cannot alter the figures of ch14_gemm_square: (file, the text that is replaced, by what).
UNSEEN = [
    (BENCH, "WARM_S = 0.3  # seconds that are", "WARM_S = 0.3    # these seconds are"),
    (BENCH, "    inputs = make_input_sets(make_inputs)\n", "\n    inputs = (make_input_sets(make_inputs))\n"),
    (BENCH, "make_burst", "burst_maker"),  # a local variable
    (BENCH, '"""Time every candidate against', '"""Compare every candidate with'),
    (BENCH, "timing needs a GPU; here is", "a GPU is needed; here is"),
    (
        BENCH,
        "for _ in range(5):\n        launch()",
        "for _ in range(6):\n        launch()",
    ),  # of another function
    (PEERS, "self.library.bf16_gemm_nt(a, weight, out)", "pass"),
    (SHAPES, "Llama 3 8B", "Llama 3 9B"),
    ("tuned/nvidia-h200/wgmma_gemm_families.json", empty_table, None),
    (TABLE, keep_one_row, None),
    ("tilelab/records/results.py", "def save(", "def keep("),
    ("ch14/attention/kernels.py", "tl.dot(", "tl.dot_("),
    ("notebooks/08_ch14_gemm.ipynb", "import torch", "import torch  "),
]


@pytest.mark.parametrize("path, old, new", UNSEEN)
def test_a_change_that_cannot_alter_the_figures_is_not_seen(path, old, new):
    before = environment.describe("ch14_gemm_square", H200, SQUARE)
    assert environment.describe("ch14_gemm_square", H200, SQUARE, make_code(path, old, new)) == before


def test_every_experiment_of_the_course_has_an_environment():
    for experiment in (
        "ceilings",
        "ch07_resample_searches",
        "ch10_gemm_steps",
        "ch14_moe_ladder",
        "sweep_race",
    ):
        found = environment.describe(experiment, H200, [])
        assert len(found["code"]) == 16, experiment
    assert environment.describe("made_up", H200, []) == {}
    assert environment.describe("ch14_gemm_square", "NVIDIA H20", [])["tables"] == {}


def test_a_record_notices_a_users_own_tuned_rows(monkeypatch, tmp_path):
    def tune(us, n):
        row = {"m": n, "n": n, "k": n, "dtype": "bf16", "name": "x", "config": {}}
        table = {"gpu": H200, "rows": [row | {"us": us, "ratio": 1.0, "spread": 0.0}]}
        (tmp_path / "nvidia-h200" / "gemm.json").write_text(json.dumps(table))

    def record():
        found = environment.describe("ch14_gemm_square", H200, SQUARE)
        return {
            "experiment": "ch14_gemm_square",
            "device": {"name": H200},
            "rows": SQUARE,
            "environment": found,
        }

    before = record()
    monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path)
    (tmp_path / "nvidia-h200").mkdir()
    tune(10.0, 512)
    assert record() == before, "rows of another shape were not used"
    tune(10.0, 4096)
    with_own = record()
    assert environment.find_change(with_own) == "" == environment.find_change(before)
    tune(11.5, 4096)
    assert "user's own tuned rows of gemm, which" in environment.find_change(with_own)
    (tmp_path / "nvidia-h200" / "gemm.json").write_text("damaged")
    assert record() == before
    (tmp_path / "nvidia-h200" / "gemm_families.json").write_text("{}")
    assert record() == before
    monkeypatch.setenv("TILES_TUNED", str(tmp_path))
    assert record() != before, "it takes the place of the course's table"


def test_a_record_is_saved_with_its_environment_and_also_where_that_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TILES_RECORD", "1")
    record = results.make_record("ch14_gemm_square", [{"shape": [1, 2, 3], "status": "ok"}], "0" * 16)
    kept = json.loads(results.save(record, tmp_path).read_text())
    assert kept["environment"].keys() == {"code", "tables"} and list(kept)[-1] == "rows"
    assert results.read(results.save(kept, tmp_path)) == kept and environment.find_change(kept) == ""
    assert environment.find_change(record) == "", "it was recorded before"

    def fail(*_):
        raise RecursionError("too deep")

    monkeypatch.setattr(environment, "describe", fail)
    assert "environment" not in json.loads(results.save(record, tmp_path).read_text())
    assert capsys.readouterr().out == "The environment of ch14_gemm_square is not recorded: too deep.\n"


def test_the_command_lists_what_has_changed_and_what_was_recorded_before(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    for name, found in (("square", {"code": "0" * 16, "tables": {}}), ("old", None)):
        record = results.make_record("ch14_gemm_square", SQUARE, "0" * 16, device.Device(H200))
        path = tmp_path / "nvidia-h200" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record | ({"environment": found} if found else {})))
    assert compare.main(["--environment"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "nvidia-h200/square.json: the code that measures, a peer or a shape has changed",
        "nvidia-h200/old.json: recorded before the measuring code was covered",
        "2 records: 0 current, 1 changed, 1 recorded before",
    ]


@pytest.mark.parametrize("text, message", [("{", "odd.json is not JSON"), ("{}", "odd.json is not a record")])
def test_a_file_that_is_no_record_is_named(text, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(SystemExit):
        compare.main(["--environment"])
    assert message in capsys.readouterr().err


def test_an_environment_without_its_parts_is_no_record():
    record = results.make_record("ch14_gemm_square", [], "0" * 16)
    for wrong in ("0", {"code": "0"}, None):
        with pytest.raises(ValueError, match="no valid environment"):
            results.check_record(record | {"environment": wrong}, "x.json")


@pytest.mark.parametrize(
    "path, text",
    [(GEMM, "def (  # experiment("), ("notebooks/00_start.ipynb", "{"), ("notebooks/00_start.ipynb", "{}")],
)
def test_a_file_of_the_course_that_cannot_be_parsed_is_named(path, text):
    with pytest.raises(ValueError, match=f"{path} cannot be parsed"):
        environment.describe("ch14_gemm_square", H200, SQUARE, environment.Code(changes={path: text}))


def test_an_installed_course_does_not_say_what_has_changed(tmp_path):
    with pytest.raises(ValueError, match="found in the source tree"):
        environment.describe("ch14_gemm_square", H200, SQUARE, environment.Code(tmp_path))
