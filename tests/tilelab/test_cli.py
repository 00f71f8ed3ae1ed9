"""tilelab.cli: one line for what is wrong, the rows as a table or JSON, and a status that says how it went."""

import io
import json
import os
import subprocess
import sys

import pytest

from tilelab import cli
from tilelab.course import notebook


def answered(rows, path=None):
    return cli.run_and_report("ch99.module", ["name", "absent", "status"], "0" * 12, path, lambda: rows)


@pytest.mark.parametrize(
    "statuses, status", [(["ok", "ok"], 0), (["ok", "unsupported"], 2), (["unsupported", "wrong"], 1)]
)
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


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--json", ""], "--json takes a file or -."),
        (["--json", "."], "--json takes a file; . is a folder."),
        (["--json", "/dev/null/new/rows.json"], "--json takes a file; /dev/null is no folder."),
        (["--json", "a" * 300], f"--json takes a file; {'a' * 60} cannot be one (File name too long)."),
        (["--nix"], "unrecognized arguments: --nix"),
        (["--nix", "1" * 4301], f"unrecognized arguments: --nix {'1' * 60}…"),
        (["--nix\nnix"], "unrecognized arguments: --nix nix"),
    ],
)
def test_bad_usage_is_one_line_and_two(capsys, argv, said):
    with pytest.raises(SystemExit) as stopped:
        cli.parse_options(cli.make_parser("ch99.module", "Nothing."), argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"python -m ch99.module: {said}\n"


def test_sizes_have_a_form_and_a_limit():
    assert cli.parse_sizes("4096,64", "R,C") == (4096, 64)
    for text in (
        "",
        "4096,",
        "a,b",
        "1.5,1",
        "0,1",
        "-4,1",
        "4096",
        "9,9,9",
        "101,1",
        "²,1",
        "1," + "1" * 4301,
    ):
        with pytest.raises(ValueError, match="it must be R,C, each from 1 to 100; it is ") as caught:
            cli.parse_sizes(text, "R,C", 100)
        assert len(str(caught.value)) < 150


@pytest.mark.parametrize("shown", ["one line", "x" * 10**6], ids=["short", "long"])
def test_a_reader_that_goes_away_ends_the_process_silently(shown):
    """Standard output is flushed early for a long text, and only at the end for a short one."""
    code = f"from tilelab import cli; cli.run_main(lambda: print({shown[0]!r} * {len(shown)}))"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as closed:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
            env=notebook.child_env(),
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_status_of_main_is_that_of_the_process():
    for end in (lambda: 3, lambda: sys.exit(3)):
        with pytest.raises(SystemExit) as stopped:
            cli.run_main(end)
        assert stopped.value.code == 3


def test_a_closed_pipe_is_not_reported_as_an_error_of_the_measurement(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        answered([{"name": "one", "status": "ok"}])


def test_a_link_that_leads_to_itself_is_refused_before_the_work(capsys, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SystemExit):
        cli.parse_options(cli.make_parser("ch99.module", "Nothing."), ["--json", str(tmp_path / "loop")])
    assert "(Too many levels of symbolic links)" in capsys.readouterr().err
    (tmp_path / "dangling").symlink_to(tmp_path / "none yet")
    assert cli.unwritable_reason(str(tmp_path / "dangling")) == ""
