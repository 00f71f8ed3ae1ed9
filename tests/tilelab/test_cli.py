"""tilelab.cli: one line for what is wrong, the rows as a table or JSON, and a status that says how it went.

tests/test_commands.py tries the topics' own commands.
"""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
from cases import cases

from tilelab import ROOT, cli
from tilelab.course import notebook
from tilelab.runtime import build, device


def make(measure=lambda options: [], **fields):
    """A command with one option of each kind, whose measurement is `measure`."""
    options = {"size": cli.sizes("R,C", (4, 8), largest=100), "count": cli.number(2, range(1, 4), "1 to 3")}
    options |= {"kind": cli.named({"one": 1, "two": 2}, "one")}
    options |= {"variant": cli.configs(lambda options: {"first": 1, "second": 2}, "all", "which")}
    options |= {"target": cli.target(), "loud": cli.flag("say more"), "tune": cli.tune()}
    given = {
        "module": "ch99.module",
        "description": "Nothing.",
        "options": options,
        "source": lambda: "0" * 12,
    }
    return cli.Command(**given | {"measure": measure, "columns": "name absent status"} | fields)


def test_without_a_gpu_it_compiles(capsys, no_gpu):
    rows = [{"name": "one", "status": "ok", "target": "sm_90a"}]
    measured = lambda options: rows if options.target == "sm_90a" else []  # noqa: E731
    assert make(measured, compile=measured).main([]) == 0
    assert "It is compiled for sm_90a." in capsys.readouterr().out


def answer(rows, *arguments, **fields):
    return make(lambda options: rows, **fields).main(arguments)


@cases(
    "statuses, status, partial_status",
    (["ok", "ok"], 0, 0),
    (["ok", "unsupported"], 2, 0),
    (["unsupported", "failed"], 2, 2),
    (["unsupported", "wrong"], 1, 1),
    (["ok", "wrong"], 1, 1),
)
def test_the_status_says_how_it_went(capsys, statuses, status, partial_status):
    rows = [{"name": f"row{i}", "status": said} for i, said in enumerate(statuses)]
    assert (answer(rows), answer(rows, partial=True)) == (status, partial_status)
    out = capsys.readouterr().out
    assert "row0" in out and "absent" not in out  # a column that no row has


def test_json_goes_to_standard_output_alone_or_to_a_file_besides(capsys, tmp_path):
    rows = [{"name": "one", "status": "ok"}]
    answer(rows, "--json", "-")
    record = json.loads(capsys.readouterr().out)
    assert record["experiment"] == "ch99_module" and record["rows"] == rows
    answer(rows, "--json", str(tmp_path / "new" / "rows.json"))
    assert json.loads((tmp_path / "new" / "rows.json").read_text())["rows"] == rows
    assert "one" in capsys.readouterr().out


@cases(
    "error, arguments, status, said",
    (ValueError("No GPU.\nand a long story"), [], 2, "No GPU."),
    (OSError("No GPU."), [], 2, "No GPU."),
    (RuntimeError("No GPU."), [], 2, "No GPU."),
    (KeyboardInterrupt(), [], 130, "cancelled."),
    (KeyboardInterrupt(), ["--tune", "x"], 130, "cancelled; the shapes that were printed are kept."),
)
def test_what_ends_early_is_one_line(capsys, error, arguments, status, said):
    def measure(options):
        raise error

    assert make(measure).main(arguments) == status
    assert capsys.readouterr().err == f"python -m ch99.module: {said}\n"


@cases(
    "argv, said",
    (["--json", ""], "--json takes a file; it is empty."),
    (["--json", "."], "--json takes a file; . is a folder."),
    (["--json", "/dev/null/new/rows.json"], "--json takes a file; /dev/null is no folder."),
    (["--json", "a" * 300], f"--json takes a file; {'a' * 60} cannot be one (File name too long)."),
    (["--nix"], "unrecognized arguments: --nix"),
    (["--nix", "1" * 4301], f"unrecognized arguments: --nix {'1' * 60}…"),
    (["--nix\nnix"], "unrecognized arguments: --nix nix"),
    (["--count", "4"], "--count must be 1 to 3; it is 4."),
    (["--size", "1,101"], "--size must be R,C, each from 1 to 100; it is 1,101."),
    (["--variant", "third"], "--variant must be one of first, second, best, all; it is 'third'."),
    (["--tune", "x", "--loud"], "--tune stands alone; --loud was given too."),
    (["--loud", "--count", "3"], "--loud goes with --json only; --count was given too."),
    (["--size", "7,7"], "seven is no size."),
)
def test_bad_usage_is_one_line_and_two(capsys, argv, said):
    def complete(options):
        if options.size == (7, 7):
            raise ValueError("seven is no size.")

    with pytest.raises(SystemExit) as stopped:
        make(complete=complete, alone={"tune": (), "loud": ("json",)}).main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"python -m ch99.module: {said}\n"


def test_options_are_converted():
    options = make().parse(["--size", "100,1", "--kind", "two", "--target", "sm_90a"])
    assert (options.size, options.count, options.kind, options.target) == ((100, 1), 2, 2, "sm_90a")
    assert options.given == {"size", "kind", "target"} and options.configs == {"first": 1, "second": 2}
    found = [make().parse(["--variant", name]).configs for name in ("best", "second")]
    assert found == [{"first": 1}, {"second": 2}]
    for text in ("", "4096,", "a,b", "1.5,1", "0,1", "-4,1", "4096", "9,9,9", "²,1", "1," + "1" * 4301):
        with pytest.raises(ValueError, match="must be R,C, each from 1 to 100; it is ") as caught:
            cli.parse_sizes(text, "R,C", 100)
        assert len(str(caught.value)) < 150


def test_an_option_that_is_set_chooses_what_runs():
    command = make(actions={"tune": lambda options: 5, "loud": lambda options: 6}, compile=lambda options: 7)
    chosen = [
        command.main(each.split()) for each in ("--tune x", "--loud", "--target sm_90a", "--loud --tune x")
    ]
    assert chosen == [5, 6, 7, 5]


def test_only_what_is_right_is_timed_and_what_cannot_run_is_a_row(capsys, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("H200", (9, 0), "sm_90a"))
    command = make(
        None,
        verify=lambda options, config: {"status": "ok" if config == 1 else "wrong", "reason": ""},
        compare=lambda options, right: [{"name": name, "ms": 1.0} for name in (*right, "peer")],
        reject=lambda options, config, target: (
            f"not on {target}" if options.count == 3 and config == 2 else ""
        ),
    )
    assert command.main(["--json", "-"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = [(row["name"], row["config"], row["status"], row.get("ms")) for row in rows]
    assert found == [("first", "1", "ok", 1.0), ("second", "2", "wrong", None)]
    assert command.main(["--count", "3", "--json", "-"]) == 2
    (_, row) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["status"], row["reason"]) == ("unsupported", "not on sm_90a")


def test_configurations_are_compiled_in_parallel_and_come_in_order(capsys, monkeypatch):
    def build_all(jobs):
        return [build.Report(job, "ok") for job in reversed(list(jobs))]

    monkeypatch.setattr(build, "build", build_all)
    command = make(
        job=lambda options, config: build.Job("kernel", {}, {}, options.target, name=str(config)),
        describe=lambda report: {"said": report.job.name},
    )
    assert command.main(["--target", "sm_100a", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = [(row["name"], row["said"], row["target"]) for row in rows]
    assert found == [("first", "1", "sm_100a"), ("second", "2", "sm_100a")]


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


def run_main(body, **options):
    """Run a command line whose main is the lambda `body` in a process of its own."""
    code = f"import sys; from tilelab import cli; cli.run_main(lambda: {body})"
    env = notebook.child_env() | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, check=False, env=env, text=True, **options
    )


def test_an_output_with_few_characters_gets_question_marks():
    for env in (
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ):
        done = run_main(f"print({ascii('4 × 5 µs ≥ 1 … 漢')})", stdout=subprocess.PIPE, env=env)
        assert (done.returncode, done.stdout, done.stderr) == (0, "4 ? 5 ?s ? 1 ? ?\n", "")


def test_an_output_that_is_closed_from_the_start_is_quiet():
    done = run_main("print('one', flush=True)", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_one_sentence_also_while_a_command_imports(tmp_path):
    done = run_main("(_ for _ in ()).throw(KeyboardInterrupt)", stdout=subprocess.PIPE)
    assert done.returncode == 130 and done.stderr.count("\n") == 1 and "cancelled." in done.stderr
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "__init__.py").write_text("import time, tilelab; print('begun', flush=True); time.sleep(600)")
    (package / "__main__.py").write_text("")
    env = notebook.child_env() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "slow_package"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert (process.returncode, said) == (130, "python -m slow_package: cancelled.\n")


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
        answer([{"name": "one", "status": "ok"}])


def test_a_link_that_leads_to_itself_is_refused_before_the_work(capsys, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SystemExit):
        answer([], "--json", str(tmp_path / "loop"))
    assert "(Too many levels of symbolic links)" in capsys.readouterr().err
    (tmp_path / "dangling").symlink_to(tmp_path / "none yet")
    assert cli.unwritable_reason(str(tmp_path / "dangling")) == ""
