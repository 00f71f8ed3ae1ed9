"""The sweep engine: real faults, cancel, resume, turns on a GPU, executors. It runs with a GPU or without."""

import asyncio
import dataclasses
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch
from odd_space import OddSpace

from ch14.gemm import experiments
from ch14.gemm.sweep import grid
from tilelab import device, faults, results, sweep, worker_pool
from tilelab.faults import Config, FaultSpace
from tilelab.journal import Journal
from tilelab.sweep import Sweep

RIGHT = [Config(256), Config(512), Config(1024)]


@pytest.fixture(autouse=True)
def one_gpu(request, monkeypatch):
    """What is said of order and of turns is said of one GPU."""
    if "alike" not in request.keywords:
        monkeypatch.setattr(device, "same_model_uuids", lambda: [])


@pytest.fixture
def space(tmp_path):
    return FaultSpace(str(tmp_path))


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal.jsonl")


def log(space, what="begin"):
    """(process, time, kernel) of each measurement that began, or ended."""
    try:
        lines = pathlib.Path(space.folder, "log").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line.split(",")[1:] for line in lines if line.startswith(what)]


def wait_for(condition, limit_s=60):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < limit_s, "it never happened"
        time.sleep(0.02)


PARENT = """
import sys
from tilelab import faults
from tilelab.journal import Journal
from tilelab.sweep import Sweep
if __name__ == "__main__":
    Sweep(faults.configs(), faults.FaultSpace(sys.argv[1]), journal=Journal(sys.argv[2]), limit_s=12).finish()
"""


def test_every_fault_in_one_sweep(space, journal, tmp_path):
    """A killed parent, a torn line, then the rest of a sweep with every fault."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    path = os.pathsep.join([str(worker_pool.ROOT), *filter(None, sys.path)])
    parent = subprocess.Popen([sys.executable, script, space.folder, journal.path], start_new_session=True,
                              env={**os.environ, "PYTHONPATH": path})
    wait_for(lambda: sum(row["status"] == "ok" for row in journal.rows().values()) >= 3)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    workers = {int(process) for process, *_ in log(space)}
    wait_for(lambda: not any(alive(process) for process in workers), 30)  # with its parent gone, a worker goes too

    before = journal.rows()
    with open(journal.path, "ab") as file:
        file.write(b'{"key": "torn", "status": "o')
    ended = len(log(space, "end"))

    resumed = Sweep(faults.configs(), space, journal=journal, limit_s=12)  # interpreted, some take 3 s
    rows = {(row["block"], row["fault"]): row for row in resumed.finish()}
    assert set(rows) == {(config.block, config.fault) for config in faults.configs()}
    for (_, fault), row in rows.items():
        if fault:
            words = faults.FAULTS[fault][device.current().capability is None]
            assert row["status"] == ("wrong" if fault == "wrong result" else "failed") and words in row["reason"]
            assert row["reason"].count("\n") == 0
        else:
            assert row["status"] == "ok" and row["ms"] > 0, row
    assert {row["key"] for row in rows.values() if row.get("resumed")} == set(before)
    again = [kernel for *_, kernel in log(space, "end")[ended:]]
    assert not set(again) & {row["kernel"] for row in before.values()}, "a row that was kept was measured again"
    assert len(again) == len(set(again)), "something was measured twice"
    gone = [row["fault"] for row in rows.values() if not row.get("resumed")]
    assert resumed.restarts == sum(fault in ("illegal memory access", "hang") for fault in gone)
    assert len([key for key in journal.rows() if key in resumed.configs]) == len(faults.configs())
    assert resumed.winner["fault"] == ""


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_second_sweep_measures_nothing(space, journal):
    first = Sweep(RIGHT, space, journal=journal).finish()
    assert [row["status"] for row in first] == ["ok"] * 3
    second = Sweep(RIGHT, space, journal=journal)
    rows = second.finish()
    assert all(row["resumed"] for row in rows) and len(log(space, "end")) == 3
    assert [row["ms"] for row in rows] == [row["ms"] for row in first]


def test_a_row_of_other_code_shape_or_versions_is_not_taken(space, journal, tmp_path, monkeypatch):
    known = set(sweep.config_keys(RIGHT, space))
    assert known == set(sweep.config_keys(RIGHT, space)) and len(known) == 3
    others = [FaultSpace(str(tmp_path / "else")), dataclasses.replace(space, can_measure=False)]
    assert not any(known & set(sweep.config_keys(RIGHT, other)) for other in others)
    monkeypatch.setattr(FaultSpace, "source", lambda self: "changed")
    assert not known & set(sweep.config_keys(RIGHT, space))
    monkeypatch.undo()
    monkeypatch.setattr(results, "versions", lambda: {"triton": "99"})
    assert not known & set(sweep.config_keys(RIGHT, space))


def test_wrong_rows_are_resumed_too(space, journal):
    bad = [Config(64, "wrong result")]
    Sweep(bad, space, journal=journal).finish()
    assert Sweep(bad, space, journal=journal).finish()[0]["resumed"]
    assert len(log(space)) == 1


@pytest.mark.parametrize("fault", ["hang", ""])
def test_cancel_answers_at_once_and_keeps_rows(space, journal, fault):
    configs = [Config(16), Config(64, fault), *RIGHT]  # in the order of their blocks
    running = Sweep(configs, space, journal=journal)
    wait_for(lambda: len(log(space)) >= 2)
    begun = time.monotonic()
    running.cancel()
    rows = running.finish()
    assert time.monotonic() - begun < 0.5
    assert not running.running and running.cancelled and running.winner is None
    assert set(journal.rows()) == {row["key"] for row in rows} and len(rows) >= 1
    if not fault:
        kept = set(journal.rows())
        rows = Sweep(configs, space, journal=journal).finish()
        assert [row["status"] for row in rows] == ["ok"] * 5
        assert {row["key"] for row in rows if row.get("resumed")} == kept


def test_leaving_the_loop_cancels(space):
    running = Sweep([Config(16), Config(64, "hang"), *RIGHT], space)
    for _ in running:
        break
    wait_for(lambda: not running.running, 10)  # the hang's limit is 60 s
    assert running.cancelled


def test_an_event_loop_goes_on_meanwhile(space):
    async def main():
        gaps, last, rows = [], time.monotonic(), []

        async def tick():
            nonlocal last
            while True:
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        ticking = asyncio.create_task(tick())
        async for row in Sweep(RIGHT, space):
            rows.append(row)
        ticking.cancel()
        return gaps, rows

    gaps, rows = asyncio.run(main())
    assert len({row["key"] for row in rows}) == 3 and max(gaps) < 0.25


def test_two_sweeps_take_turns(space, tmp_path):
    other = FaultSpace(str(tmp_path / "other"))
    os.mkdir(other.folder)
    both = [Sweep([Config(2**power) for power in range(5, 10)], one) for one in (space, other)]
    assert all(row["status"] == "ok" for one in both for row in one.finish())
    spans = sorted((float(begin[1]), float(end[1]), one.folder) for one in (space, other)
                   for begin, end in zip(log(one), log(one, "end")))
    assert all(earlier[1] <= later[0] for earlier, later in zip(spans, spans[1:])), "two measured at one time"
    owners = [folder for *_, folder in spans]
    assert sum(a != b for a, b in zip(owners, owners[1:])) >= 2, "one of them waited for all of the other"


def test_equal_configurations_are_one_and_rejected_ones_are_never_built(space):
    one = Sweep([Config(256), Config(256)], space)
    assert len(one.finish()) == one.total == 1
    configs = grid()
    compiled = Sweep(configs, experiments.GemmSpace(4096, 4096, 4096, compile_for="sm_90a"))
    rows = compiled.finish()
    assert len(rows) == len(configs) == 96 and compiled.counts == {"ok": 67, "rejected": 29}
    for row in rows:
        assert (row["status"] == "ok") == (not row["reason"]) and row["predicted_ms"] > 0
        assert row["status"] == "rejected" or (row["registers"] and row["programs_per_sm"] >= 1)


def test_a_space_from_a_notebook_is_refused(space):
    local = type("Local", (FaultSpace,), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="Local from __main__: define it in a module"):
        Sweep(RIGHT, local(space.folder))
    rows = Sweep(RIGHT[:1], local(space.folder, can_measure=False)).finish()  # only its job leaves the notebook
    assert len(rows) == 1


def test_speed_beside_the_peer_counts_and_finals_before_it():
    def row(kernel, **figures):
        return {"kernel": kernel, "status": "ok", **figures}

    warm, cool = row("warm", ms=2.0, ratio=1.1), row("cool", ms=1.5, ratio=0.9)  # the peer took 2.2, then 1.35
    final = row("final", ms=9.0, ratio=0.1, final_ms=2.0, final_ratio=0.8)
    rows = [cool, row("built"), warm, {**warm, "status": "wrong"}]
    assert [found["kernel"] for found in sweep.sort_by_speed(rows)] == ["warm", "cool"]
    assert sweep.sort_by_speed([*rows, final])[0] is final
    assert sweep.sort_by_speed([row("slow", ms=2.0), row("quick", ms=1.0)])[0]["kernel"] == "quick"


ODD = {"ratio": "NaN or infinity", "infinite": "NaN or infinity", "no status": "this one has None",
       "text": "has 'ok', 'fast'",
       "list": "TypeError", "set": "no attribute 'item'", "surrogate": "\udc80", "long": "xxx",
       "exit": "exit status 0", "leaves a process": "SIGABRT", "raises": "the true reason"}


def test_an_odd_answer_is_one_row_that_failed(tmp_path, journal):
    """Whatever measuring a configuration gives, the others' rows are right and the journal can be read."""
    odd = [Config(64, fault) for fault in ODD]
    rows = Sweep([*odd, *RIGHT], OddSpace(str(tmp_path)), journal=journal).finish()
    for row, words in zip(rows, ODD.values()):
        assert row["status"] == "failed" and words in row["reason"] and len(row["reason"]) <= 400, row
    assert [row["status"] for row in rows[len(ODD):]] == ["ok"] * 3
    assert len(journal.rows()) >= len(ODD)
    left = int((tmp_path / "left").read_text())
    wait_for(lambda: not alive(left), 5)


@pytest.mark.parametrize("fault", ["own key", "fork", "closes"])
def test_what_is_odd_and_harmless(tmp_path, journal, fault):
    odd = Config(64, fault)
    rows = Sweep([odd, *RIGHT], OddSpace(str(tmp_path)), journal=journal).finish()
    assert [(row["status"], row["ms"]) for row in rows] == [("ok", float(c.block)) for c in (odd, *RIGHT)]
    assert rows[0]["kernel"] == f"64 {fault}" and set(journal.rows()) >= {row["key"] for row in rows}


@pytest.mark.parametrize("fault", ["label", "reject", "predicted text"])
def test_a_space_that_raises_for_one_configuration_fails_that_row(tmp_path, fault):
    rows = Sweep([Config(64, fault), *RIGHT], OddSpace(str(tmp_path))).finish()
    assert [row["status"] for row in rows] == ["failed", "ok", "ok", "ok"] and "Error" in rows[0]["reason"]


def test_odd_lines_of_a_journal_are_passed_over(tmp_path, journal):
    first = {row["key"]: row for row in Sweep(RIGHT, OddSpace(str(tmp_path)), journal=journal).finish()}
    comparison = next(row for row in journal.rows().values() if "finals" in row)
    with open(journal.path, "a") as file:
        for odd in ({"key": [1], "status": "ok"}, {**comparison, "finals": None}, {**comparison, "of": ["x"]}):
            file.write(json.dumps(odd) + "\n")
        file.write("[" * 200_000 + "\n")
        file.write(json.dumps({**first[next(iter(first))], "ms": "12"}) + "\n")
    rows = Sweep(RIGHT, OddSpace(str(tmp_path)), journal=journal).finish()
    assert [row["ms"] for row in rows] == [float(config.block) for config in RIGHT]
    assert sum(bool(row.get("resumed")) for row in rows) == len(RIGHT) - 1


def test_a_configuration_that_cannot_be_sent_is_one_row_that_failed(tmp_path):
    class Local(Config):
        pass

    rows = Sweep([Local(64), *RIGHT], OddSpace(str(tmp_path))).finish()
    assert rows[0]["status"] == "failed" and "Local" in rows[0]["reason"]
    assert [row["status"] for row in rows[1:]] == ["ok"] * 3


@pytest.mark.parametrize("own", ["finals die", "finals hang"])
def test_finals_that_are_none_leave_the_first_ranking(tmp_path, own):
    running = Sweep(RIGHT, OddSpace(str(tmp_path), own=own), limit_s=4)
    assert all("final_ms" not in row for row in running.finish()) and running.winner["block"] == 256
    assert running.restarts == 1


@pytest.fixture
def late_measurers(tmp_path):
    """Two measurers, of which the second is ready only when the final comparison has begun."""
    class Late(ThreadPoolExecutor):
        def submit(self, *_):
            return super().submit(lambda: wait_for((tmp_path / "finals").exists, 60) or {"value": {}})

    with ThreadPoolExecutor(1) as prompt, Late(1) as late:
        yield [prompt, late]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_worker_that_starts_late_does_not_stand_for_the_finals(tmp_path, late_measurers, count):
    running = Sweep(RIGHT[:count], OddSpace(str(tmp_path), own="slow finals"), measurers=late_measurers)
    assert all(row["final_ms"] == row["block"] for row in running.finish())


def test_cancel_answers_during_the_finals(tmp_path, late_measurers):
    running = Sweep(RIGHT, OddSpace(str(tmp_path), own="slow finals"), measurers=late_measurers)
    wait_for((tmp_path / "finals").exists)
    begun = time.monotonic()
    running.cancel()
    rows = running.finish()
    assert time.monotonic() - begun < 0.5
    assert [row["status"] for row in rows] == ["ok"] * 3 and running.winner is None


def test_bad_arguments_are_one_sentence(space):
    for limit_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="limit_s must be a positive number of seconds; it is"):
            Sweep(RIGHT, space, limit_s=limit_s)
    with pytest.raises(ValueError, match="measurers must name at least one executor"):
        Sweep(RIGHT, space, measurers=[])


def test_cancel_answers_while_the_space_is_still_asked(tmp_path):
    running = Sweep([Config(2**power) for power in range(4, 104)], OddSpace(str(tmp_path), own="slow"))
    time.sleep(0.2)
    begun = time.monotonic()
    running.cancel()
    running.finish()
    assert time.monotonic() - begun < 0.5


def test_cancel_at_any_moment_leaves_nothing_running(space):
    """Cancelling races with the start of a process; nothing may run on for the rest of its time limit."""
    for pause_ms in (0, 1, 2, 4, 8, 16, 200):
        running = Sweep([Config(64, "hang")], space)
        time.sleep(pause_ms / 1e3)
        running.cancel()
        running.finish()
        wait_for(lambda: not worker_pool._pool.busy, 10)


LEAVES = """
import sys, time
from tilelab import faults
from tilelab.sweep import Sweep
if __name__ == "__main__":
    running = Sweep([faults.Config(16), faults.Config(64, "hang")], faults.FaultSpace(sys.argv[1]))
    while running.counts.get("ok", 0) < 1:
        time.sleep(0.05)
    time.sleep(0.5)
    HOW
"""


@pytest.mark.parametrize("how", ["pass", "raise KeyboardInterrupt", "iter(running)"])
def test_a_script_that_ends_does_not_wait_for_a_hang(space, tmp_path, how):
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES.replace("HOW", how))
    begun = time.monotonic()
    subprocess.run([sys.executable, script, space.folder], timeout=30, stderr=subprocess.DEVNULL, check=False,
                   env={**os.environ, "PYTHONPATH": os.pathsep.join([str(worker_pool.ROOT), *filter(None, sys.path)])})
    assert time.monotonic() - begun < 20  # the hang's limit is 60 s
    wait_for(lambda: not any(alive(int(process)) for process, *_ in log(space)), 5)


def test_a_space_of_a_module_beside_the_notebook(space, tmp_path):
    tmp_path.joinpath("beside.py").write_text("from tilelab import faults\nclass Beside(faults.FaultSpace): pass\n")
    code = ("import sys\n"
            "from beside import Beside\nfrom tilelab import faults\nfrom tilelab.sweep import Sweep\n"
            "print(*Sweep([faults.Config(16)], Beside(sys.argv[1])).finish())")
    said = subprocess.run([sys.executable, "-c", code, space.folder], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(worker_pool.ROOT)}, timeout=100, check=True).stdout
    assert "'status': 'ok'" in said, said


ENDS = """
import atexit, sys, time
# Registered before tilelab's own, so called after it.
atexit.register(lambda: print(time.monotonic() - ended, *(
    worker.process for idle in worker_pool._pool.idle.values() for worker in idle)))
from tilelab import worker_pool, faults
from tilelab.sweep import Sweep
if __name__ == "__main__":
    Sweep([faults.Config(16)], faults.FaultSpace(sys.argv[1])).finish()
    ended = time.monotonic()
"""


def test_children_are_reaped_when_a_script_ends(space, tmp_path):
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    path = os.pathsep.join([str(worker_pool.ROOT), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-X", "dev", script, space.folder], env={**os.environ, "PYTHONPATH": path},
                          timeout=60, capture_output=True, text=True, check=True)
    seconds, *left = done.stdout.split()
    assert left == ["None"] * 2 and float(seconds) < 2 and "ResourceWarning" not in done.stderr


def test_a_pool_of_processes_carries_it_too(space):
    with ProcessPoolExecutor(2) as pool:
        rows = Sweep([*RIGHT, Config(64, "wrong result")], space, builders=pool, measurers=[pool]).finish()
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["wrong"]


def test_an_executor_that_fails_is_a_row(space):
    class Broken(ThreadPoolExecutor):
        def submit(self, task, *arguments):
            return super().submit(lambda: 1 / 0)

    rows = Sweep(RIGHT, space, builders=Broken(1)).finish()
    assert [(row["status"], row["reason"]) for row in rows] == [("failed", "ZeroDivisionError: division by zero")] * 3


def test_a_journal_that_cannot_be_written_ends_the_sweep(space, tmp_path):
    tmp_path.joinpath("file").write_text("")
    with pytest.raises(OSError):
        Sweep(RIGHT, space, journal=Journal(tmp_path / "file" / "journal.jsonl")).finish()


def test_journal_takes_what_is_left_of_a_damaged_file(journal):
    lines = [b'{"key": "a", "n": 1}', b"[1]", b'"x"', b"\xff\xfe", b"null", b'{"n": 2}', b'{"key": "a", "n": 3}',
             b'{"key": "t']
    journal.path.write_bytes(b"\n".join(lines))
    assert journal.rows() == {"a": {"key": "a", "n": 3}}
    journal.append({"key": "b"})
    assert set(journal.rows()) == {"a", "b"}
    journal.append({"key": "c", "reason": "\udc80"})
    journal.append({"key": "finals", "of": ["b", "c"]})
    journal.forget(["b"])
    assert set(journal.rows()) == {"a", "c"} and journal.rows()["c"]["reason"] == "\udc80"
    assert Journal(journal.path.with_name("none")).rows() == {}


def test_rows_of_a_journal_that_are_none_are_measured_again(space, journal):
    first, second, third = sweep.config_keys(RIGHT, space)
    for row in ({"key": first}, {"key": second, "status": None}, {"key": third, "status": "fine"}):
        journal.append(row)
    rows = Sweep(RIGHT, space, journal=journal).finish()
    assert [row["status"] for row in rows] == ["ok"] * 3 and not any("resumed" in row for row in rows)


def test_dask_carries_it_further(space):
    distributed = pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, \
            distributed.Client(cluster) as client:
        executor = client.get_executor()
        running = Sweep([*RIGHT, Config(64, "illegal memory access")], space, builders=executor,
                        measurers=[executor] * 2)
        rows = running.finish()
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["failed"] and running.restarts == 1
    assert {int(process) for process, *_ in log(space)}.isdisjoint({os.getpid()})
    assert all(row["device"] == device.current().name and row["host"] for row in rows[:3])


@pytest.mark.gpu
@pytest.mark.alike
def test_every_gpu_of_a_model_takes_its_share(space):
    rows = Sweep([Config(block, "") for block in (64, 128, 256, 512) * 3], space).finish()
    assert all(row["status"] == "ok" and row["device"] == device.current().name for row in rows)
    assert {row["gpu"] for row in rows} <= set(device.same_model_uuids())


@pytest.mark.alike
def test_only_gpus_of_one_model_share_a_sweep(monkeypatch):
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    properties = [type("P", (), {"name": name, "uuid": index})() for index, name in
                  enumerate(["NVIDIA H200", "NVIDIA L4", "NVIDIA H200"])]
    monkeypatch.setattr(device, "current", lambda: here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    assert device.same_model_uuids() == ["GPU-0", "GPU-2"]


def test_the_parent_keeps_rows_and_no_binaries():
    def grown():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def sweep_grid(side):  # every report reaches the parent anew, though the compiler caches all from the first side on
        Sweep(grid(), experiments.GemmSpace(side, side, side, compile_for="sm_90a")).finish()

    sweep_grid(4096)
    before = grown()
    for side in (2048, 8192, 1024):
        sweep_grid(side)
    assert grown() - before < 8 << 20


EDITED = """
import dataclasses
from tilelab.faults import FaultSpace


@dataclasses.dataclass(frozen=True)
class EditedSpace(FaultSpace):
    def measure(self, config):
        return {"status": "ok", "reason": "", "ms": NUMBER}

    def measure_finalists(self, configs):
        return []
"""


def test_a_worker_never_runs_what_a_file_held_before(tmp_path, monkeypatch):
    """Workers outlive a sweep; a kernel that was edited in between must not be measured as it was."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_space.py"
    for number in (1.0, 22.0):  # of unlike length, for a bytecode cache tells edits apart by second and size
        module.write_text(EDITED.replace("NUMBER", str(number)))
        monkeypatch.delitem(sys.modules, "edited_space", raising=False)
        rows = Sweep(RIGHT[:1], importlib.import_module("edited_space").EditedSpace(str(tmp_path))).finish()
        assert rows[0]["ms"] == number
        importlib.invalidate_caches()
