"""tilelab.cli: one line for what is wrong, the rows as a table or JSON, and a status that says how it went."""

import json

import pytest

from tilelab import cli


def answered(rows, path=None):
    return cli.run_and_report("ch99.module", ["name", "absent", "status"], "0" * 12, path, lambda: rows)


@pytest.mark.parametrize("statuses, status", [(["ok", "ok"], 0), (["ok", "unsupported"], 2),
                                              (["unsupported", "wrong"], 1)])
def test_the_status_says_how_it_went(capsys, statuses, status):
    assert answered([{"name": f"row{i}", "status": said} for i, said in enumerate(statuses)]) == status
    assert "row0" in capsys.readouterr().out


def test_columns_that_no_row_has_are_left_out(capsys):
    answered([{"name": "one", "status": "ok"}])
    assert "absent" not in capsys.readouterr().out


def test_json_goes_to_standard_output_alone_or_to_a_file_besides(capsys, tmp_path):
    rows = [{"name": "one", "status": "ok"}]
    answered(rows, "-")
    record = json.loads(capsys.readouterr().out)
    assert record["experiment"] == "ch99_module" and record["rows"] == rows
    answered(rows, str(tmp_path / "new" / "rows.json"))
    assert json.loads((tmp_path / "new" / "rows.json").read_text())["rows"] == rows
    assert "one" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ValueError, OSError, RuntimeError])
def test_what_cannot_run_is_one_line_and_two(capsys, error):
    def measure():
        raise error("No GPU.\nand a long story")

    assert cli.run_and_report("ch99.module", ["name"], "0" * 12, None, measure) == 2
    assert capsys.readouterr().err == "python -m ch99.module: No GPU.\n"


def test_ctrl_c_is_one_line(capsys):
    def measure():
        raise KeyboardInterrupt

    assert cli.run_and_report("ch99.module", ["name"], "0" * 12, None, measure) == 130
    assert capsys.readouterr().err == "python -m ch99.module: interrupted.\n"


@pytest.mark.parametrize("argv, said", [
    (["--json", ""], "--json takes a file or -."),
    (["--json", "."], "--json takes a file; . is a folder."),
    (["--json", "/dev/null/new/rows.json"], "--json takes a file; /dev/null is no folder."),
    (["--json", "a" * 300], f"--json takes a file; {'a' * 60} cannot be one (File name too long)."),
    (["--nix"], "unrecognized arguments: --nix"),
])
def test_bad_usage_is_one_line_and_two(capsys, argv, said):
    with pytest.raises(SystemExit) as stopped:
        cli.parse_options(cli.make_parser("ch99.module", "Nothing."), argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"python -m ch99.module: {said}\n"
