"""The sweep engine: rows, resuming, cancelling, turns on a GPU; and, marked `fault`, its worker processes."""

import asyncio
import dataclasses
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import filelock
import pytest
import torch
from odd_space import OddSpace, build_nothing, call_here
from waiting import is_alive, wait_for

from tilelab import ROOT
from tilelab.course import notebook
from tilelab.runtime import device, provenance, worker_pool
from tilelab.sweeps import faults, sweep
from tilelab.sweeps.faults import Config, FaultSpace
from tilelab.sweeps.journal import Journal
from tilelab.sweeps.sweep import Sweep

CALL_IN_GPU_WORKER = sweep.call_in_gpu_worker
RIGHT = [Config(256), Config(512), Config(1024)]


@pytest.fixture(autouse=True)
def workers(request, monkeypatch):
    """Build nothing, and measure in threads of this process; a test that is marked `fault` measures in workers.

    What the tests say of an order is true of one GPU.
    """
    if "alike" not in request.keywords:
        monkeypatch.setattr(device, "same_model_uuids", lambda: [])
    if "compile" not in request.keywords:
        monkeypatch.setattr(sweep, "build_configuration", build_nothing)
    if "fault" not in request.keywords:
        monkeypatch.setattr(sweep, "call_in_gpu_worker", call_here)
    if device.current().capability is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # then a worker need not import torch


@pytest.fixture
def space(tmp_path):
    return OddSpace(folder=str(tmp_path))


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "journal.jsonl")


def log(space, what="begin"):
    """Return (process, time, kernel) of each event `what` of a measurement: begin, end or finals."""
    try:
        lines = pathlib.Path(space.folder, "log").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line.split(",")[1:] for line in lines if line.startswith(what)]


def open_gate(space):
    pathlib.Path(space.folder, "gate").touch()


def test_a_second_sweep_measures_nothing(space, journal):
    configs = [*RIGHT, Config(64, "wrong")]
    first = Sweep(configs, space, journal=journal)
    rows = first.finish()
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["wrong"] and first.winner["block"] == 256
    second = Sweep(configs, space, journal=journal)
    again = second.finish()
    assert all(row["resumed"] for row in again) and len(log(space)) == 4 and len(log(space, "finals")) == 1
    found = [row.get("final_ms") for row in rows]
    assert [row.get("final_ms") for row in again] == found == [256, 512, 1024, None]
    assert second.winner["key"] == first.winner["key"]


def test_a_row_of_other_code_shape_or_versions_is_not_taken(space, tmp_path, monkeypatch):
    known = set(sweep.config_keys(RIGHT, space))
    assert known == set(sweep.config_keys(RIGHT, space)) and len(known) == 3
    others = [OddSpace(folder=str(tmp_path / "else")), dataclasses.replace(space, compile_for="sm_90a")]
    assert not any(known & set(sweep.config_keys(RIGHT, other)) for other in others)
    monkeypatch.setattr(FaultSpace, "source", classmethod(lambda _: "changed"))
    assert not known & set(sweep.config_keys(RIGHT, space))
    monkeypatch.undo()
    monkeypatch.setattr(provenance, "versions", lambda: {"triton": "99"})
    assert not known & set(sweep.config_keys(RIGHT, space))


def test_equal_configurations_are_one_and_rejected_ones_are_never_built(space, monkeypatch):
    built = []
    monkeypatch.setattr(
        sweep, "build_configuration", lambda _, config, *__: built.append(config) or build_nothing()
    )
    running = Sweep([Config(256), Config(256), Config(64, "rejected")], space)
    assert [row["status"] for row in running.finish()] == ["ok", "rejected"] and running.total == 2
    assert built == [Config(256)] and running.counts == {"ok": 1, "rejected": 1}


def test_speed_beside_the_peer_counts_and_finals_before_it():
    def row(kernel, **figures):
        return {"kernel": kernel, "status": "ok", **figures}

    # the peer took 2.2, then 1.35
    warm, cool = (row("warm", ms=2.0, ratio=1.1), row("cool", ms=1.5, ratio=0.9))
    final = row("final", ms=9.0, ratio=0.1, final_ms=2.0, final_ratio=0.8)
    rows = [cool, row("built"), warm, {**warm, "status": "wrong"}]
    assert [found["kernel"] for found in sweep.sort_by_speed(rows)] == ["warm", "cool"]
    assert sweep.sort_by_speed([*rows, final])[0] is final
    assert sweep.sort_by_speed([row("slow", ms=2.0), row("quick", ms=1.0)])[0]["kernel"] == "quick"


ODD = {"ratio": "NaN or infinity", "infinite": "NaN or infinity", "huge": "ms must be a finite number"}
ODD |= {"no status": "None", "text": "'fast'", "list": "TypeError", "set": "no attribute 'item'"}
ODD |= {"surrogate": "\udc80", "long": "xxx", "raises": "the true reason", "label": "no label"}
ODD |= {"reject": "ZeroDivisionError", "predicted text": "it is 'soon'", "predicted NaN": "it is nan"}


def test_an_odd_answer_is_one_row_that_failed(space, journal):
    """Whatever a configuration gives, the others' rows are right and the journal can be read."""
    odd = [Config(64, fault) for fault in ODD]
    rows = Sweep([*odd, *RIGHT], space, journal=journal).finish()
    for row, words in zip(rows, ODD.values()):
        assert row["status"] == "failed" and words in row["reason"] and len(row["reason"]) <= 400, row
    assert [row["status"] for row in rows[len(ODD) :]] == ["ok"] * 3
    assert set(journal.rows()) >= {row["key"] for row in rows}


def test_a_measurement_does_not_change_the_label(space, journal):
    rows = Sweep([Config(64, "own key"), *RIGHT], space, journal=journal).finish()
    assert rows[0]["kernel"] == "64 own key" and set(journal.rows()) >= {row["key"] for row in rows}


@pytest.mark.parametrize("own", ["huge finals", "no finals"])
def test_finals_that_are_none_leave_the_first_ranking(tmp_path, journal, own):
    running = Sweep(RIGHT, OddSpace(folder=str(tmp_path), own=own), journal=journal)
    assert all("final_ms" not in row for row in running.finish()) and running.winner["block"] == 256
    assert len(journal.rows()) == 3


def test_an_executor_that_fails_is_a_row(space):
    class Broken(ThreadPoolExecutor):
        def submit(self, task, *arguments):
            return super().submit(lambda: 1 / 0)

    rows = Sweep(RIGHT, space, builders=Broken(1)).finish()
    found = [(row["status"], row["reason"]) for row in rows]
    assert found == [("failed", "ZeroDivisionError: division by zero")] * 3


def test_bad_arguments_are_one_sentence(space):
    for limit_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="limit_s must be a positive number of seconds; it is"):
            Sweep(RIGHT, space, limit_s=limit_s)
    with pytest.raises(ValueError, match="measurers must name at least one executor"):
        Sweep(RIGHT, space, measurers=[])


def test_a_space_from_a_notebook_is_refused(space):
    local = type("Local", (FaultSpace,), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="Local from __main__: define it in a module"):
        Sweep(RIGHT, local(folder=space.folder))
    # only its job leaves the notebook
    rows = Sweep(RIGHT[:1], local(folder=space.folder, compile_for="sm_90a")).finish()
    assert len(rows) == 1


def test_a_journal_that_cannot_be_written_ends_the_sweep(space, tmp_path):
    journal = Journal(tmp_path / "folder" / "journal.jsonl")
    tmp_path.joinpath("folder").write_text("")
    with pytest.raises(OSError):
        Sweep(RIGHT, space, journal=journal).finish()


@pytest.mark.alike
def test_only_gpus_of_one_model_share_a_sweep(monkeypatch):
    here = device.Device("NVIDIA H200", (9, 0), "sm_90a")
    properties = [
        type("P", (), {"name": name, "uuid": index})()
        for index, name in enumerate(["NVIDIA H200", "NVIDIA L4", "NVIDIA H200"])
    ]
    monkeypatch.setattr(device, "current", lambda: here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    assert device.same_model_uuids() == ["GPU-0", "GPU-2"]


def test_cancel_keeps_rows_and_the_next_sweep_goes_on(space, journal):
    configs = [Config(16), Config(64, "gate"), *RIGHT]  # in the order of their blocks
    running = Sweep(configs, space, journal=journal)
    wait_for(lambda: len(log(space)) == 2 and journal.rows())
    running.cancel()
    rows = running.finish()
    assert not running.running and running.cancelled and running.winner is None
    assert [row["block"] for row in rows] == [16] and set(journal.rows()) == {rows[0]["key"]}
    open_gate(space)
    rows = Sweep(configs, space, journal=journal).finish()
    assert [(row["status"], row.get("resumed")) for row in rows] == [("ok", True)] + [("ok", None)] * 4


def test_leaving_the_loop_cancels(space):
    running = Sweep([Config(16), Config(64, "gate"), *RIGHT], space)
    for _ in running:
        break
    wait_for(lambda: not running.running)
    assert running.cancelled
    open_gate(space)


def test_an_event_loop_goes_on_meanwhile(space):
    async def tick():
        while not log(space):
            await asyncio.sleep(0.01)
        open_gate(space)  # only a loop that goes on while it waits for rows comes here

    async def main():
        ticking = asyncio.create_task(tick())
        rows = [row async for row in Sweep([Config(64, "gate"), *RIGHT], space)]
        await ticking
        return rows

    assert len({row["key"] for row in asyncio.run(main())}) == 4


@pytest.fixture
def late_measurers(space):
    """Two measurers, of which the second is ready only when the final comparison has begun."""

    class Late(ThreadPoolExecutor):
        def submit(self, *_):
            return super().submit(lambda: wait_for(lambda: log(space, "finals")) or {"value": {}})

    with ThreadPoolExecutor(1) as prompt, Late(1) as late:
        yield [prompt, late]


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_that_starts_late_does_not_stand_for_the_finals(space, late_measurers, count):
    running = Sweep(RIGHT[:count], space, measurers=late_measurers)
    assert all(row["final_ms"] == row["block"] for row in running.finish())


def test_cancel_answers_during_the_finals(tmp_path, late_measurers):
    gated = OddSpace(folder=str(tmp_path), own="gate")
    running = Sweep(RIGHT, gated, measurers=late_measurers)
    wait_for(lambda: log(gated, "finals"))
    running.cancel()
    assert [row["status"] for row in running.finish()] == ["ok"] * 3 and running.winner is None
    open_gate(gated)


def test_cancel_answers_while_the_space_is_still_asked(tmp_path):
    running = Sweep(
        [Config(2**power) for power in range(4, 1004)], OddSpace(folder=str(tmp_path), own="slow")
    )
    running.cancel()
    begun = time.monotonic()
    running.finish()
    assert time.monotonic() - begun < 20  # asking all takes 50 s


@pytest.fixture
def own_locks(tmp_path, monkeypatch):
    """Keep the locks of GPUs in a folder of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_turns_on_a_gpu_alternate(own_locks):
    """Who has had a turn is not first again while another waits."""
    order = []

    def take_turn(name):
        with sweep._take_turn("GPU-x", name):
            order.append(name)

    with sweep._take_turn("GPU-x", "first"):
        waiter = threading.Thread(target=take_turn, args=("waiter",))
        waiter.start()
        wait_for(lambda: "waiter" in sweep._waiting_tokens)
        again = threading.Thread(target=take_turn, args=("again",))
        again.start()
        wait_for(lambda: "again" in sweep._waiting_tokens)
        assert not order
    waiter.join()
    again.join()
    assert order == ["waiter", "again"] and not sweep._waiting_tokens


def test_a_sweep_that_waits_for_its_turn_says_so_and_can_be_cancelled(space, own_locks, monkeypatch, caplog):
    monkeypatch.setattr(sweep, "call_in_gpu_worker", CALL_IN_GPU_WORKER)
    monkeypatch.setattr(sweep, "NOTICE_S", 0.05)
    following, turn = (
        filelock.FileLock(device.user_lock_path(f"{device.current_uuid() or 'cpu'}.{which}"))
        for which in ("next", "turn")
    )
    with turn:
        running = Sweep(RIGHT, space)
        looping = threading.Thread(target=running.finish)
        looping.start()
        wait_for(lambda: "waits for its turn" in caplog.text and running.waits_for_gpu)
        running.cancel()
        looping.join(30)
        assert not looping.is_alive() and not running.rows
        following.acquire(timeout=30)  # its place in the queue is free again
        following.release()
        assert not running.waits_for_gpu and not worker_pool._pool.busy


@pytest.mark.compile
@pytest.mark.fault
def test_faults_of_every_kind_in_one_sweep(tmp_path, journal):
    """A killed parent, a torn line, then the rest of a sweep with faults. A hang is in the next test."""
    space = FaultSpace(folder=str(tmp_path))
    parent = run_script(tmp_path, PARENT, space.folder, journal.path)
    wait_for(lambda: sum(row["status"] == "ok" for row in journal.rows().values()) >= 3, 180)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    workers = {int(process) for process, *_ in log(space)}
    wait_for(lambda: not any(map(is_alive, workers)))  # with its parent gone, a worker goes too

    before = journal.rows()
    with open(journal.path, "ab") as file:
        file.write(b'{"key": "torn", "status": "o')
    ended = len(log(space, "end"))

    resumed = Sweep(FAULTY, space, journal=journal, limit_s=LIMIT_S)
    rows = {(row["block"], row["fault"]): row for row in resumed.finish()}
    assert set(rows) == {(config.block, config.fault) for config in FAULTY}
    for (_, fault), row in rows.items():
        if fault:
            words = faults.FAULTS[fault][device.current().capability is None]
            assert row["status"] == ("wrong" if fault == "wrong result" else "failed")
            assert words in row["reason"]
            assert row["reason"].count("\n") == 0
        else:
            assert row["status"] == "ok" and row["ms"] > 0, row
    assert {row["key"] for row in rows.values() if row.get("resumed")} == set(before)
    again = [kernel for *_, kernel in log(space, "end")[ended:]]
    # the finalists are timed again
    again = again[: len(again) - sum("final_ms" in row for row in rows.values())]
    assert not set(again) & {row["kernel"] for row in before.values()}, (
        "a row that was kept was measured again"
    )
    assert len(again) == len(set(again)), "something was measured twice"
    gone = [row["fault"] for row in rows.values() if not row.get("resumed")]
    assert resumed.restarts == gone.count("illegal memory access")
    assert len([key for key in journal.rows() if key in resumed.configs]) == len(FAULTY)
    assert resumed.winner["fault"] == ""


LIMIT_S, HANG_S = 12, 5
# Each of them that ends a process costs the start of another one, which imports torch.
FAULTY = faults.configs(
    tuple(fault for fault in faults.FAULTS if fault not in ("abort in the compiler", "hang"))
)
PARENT = f"""
import sys
from tilelab.sweeps import faults
from tilelab.sweeps.faults import Config
from tilelab.sweeps.journal import Journal
from tilelab.sweeps.sweep import Sweep
if __name__ == "__main__":
    space = faults.FaultSpace(folder=sys.argv[1])
    Sweep({FAULTY}, space, journal=Journal(sys.argv[2]), limit_s={LIMIT_S}).finish()
"""


def run_script(folder, code, *arguments, **options):
    """Start a script in a folder, in which the course and the modules of the tests can be imported."""
    (folder / "script.py").write_text(code)
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, folder / "script.py", *arguments],
        env=notebook.child_env(PYTHONPATH=f"{ROOT}{os.pathsep}{path}"),
        **options,
    )


ODD_PROCESS = {"exit": "exit status 0", "leaves a process": "SIGABRT", "hang": "no answer within", "fork": ""}
ODD_PROCESS |= {"closes": ""}


@pytest.mark.fault
def test_a_worker_that_dies_hangs_or_forks_is_one_row(tmp_path):
    class Local(Config):
        """A worker cannot import it."""

    odd = [Config(64, fault) for fault in ODD_PROCESS]
    space = OddSpace(folder=str(tmp_path), own="finals die")
    running = Sweep([*odd, Local(64), *RIGHT], space, limit_s=HANG_S)
    rows = running.finish()
    for row, words in zip(rows, ODD_PROCESS.values()):
        assert row["status"] == ("failed" if words else "ok") and words in row["reason"], row
    assert rows[len(odd)]["status"] == "failed" and "Local" in rows[len(odd)]["reason"]
    assert [row["status"] for row in rows[-3:]] == ["ok"] * 3 and all("final_ms" not in row for row in rows)
    assert running.restarts == 4 and running.winner["block"] == 64
    left = int((tmp_path / "left").read_text())
    wait_for(lambda: not is_alive(left))


@pytest.mark.fault
def test_cancel_at_any_moment_leaves_nothing_running(space):
    """Cancelling races with the start of a process; nothing may run on for the rest of its time limit."""
    for pause_ms in (0, 1, 4, 16, 200):
        running = Sweep([Config(64, "hang")], space)
        time.sleep(pause_ms / 1e3)
        running.cancel()
        running.finish()
        wait_for(lambda: not worker_pool._pool.busy)


SCRIPT = """
import atexit, sys, time
# Registered before tilelab's own, so called after it.
atexit.register(lambda: print(*(worker.process for idle in worker_pool._pool.idle.values() for worker in idle)))
from beside import Beside
from tilelab.runtime import worker_pool
from tilelab.sweeps.faults import Config
from tilelab.sweeps.journal import Journal
from tilelab.sweeps.sweep import Sweep
if __name__ == "__main__":
    running = Sweep([Config(16), Config(64, "hang")], Beside(folder=sys.argv[1]), journal=Journal(sys.argv[2]))
    while running.counts.get("ok", 0) < 1:
        time.sleep(0.05)
    raise KeyboardInterrupt
"""


@pytest.mark.compile
@pytest.mark.fault
def test_a_script_that_ends_leaves_no_process_and_waits_for_no_hang(space, journal, tmp_path):
    """Its space is defined in a module beside it. What the end of the script interrupts did not fail."""
    (tmp_path / "beside.py").write_text(
        "from odd_space import OddSpace, build_nothing, call_here\nclass Beside(OddSpace): pass\n"
    )
    pipes = {"stdout": subprocess.PIPE, "text": True, "stderr": subprocess.DEVNULL}
    script = run_script(tmp_path, SCRIPT, space.folder, str(journal.path), **pipes)
    said, _ = script.communicate(timeout=250)  # the hang sleeps for 300 s
    assert set(said.split()) <= {"None"}
    assert [row["status"] for row in journal.rows().values()] == ["ok"]
    wait_for(lambda: not any(is_alive(int(process)) for process, *_ in log(space)))


@pytest.mark.compile
@pytest.mark.fault
def test_a_pool_of_processes_carries_it_too(space):
    device.current_uuid()  # kept from here on: CUDA answers no forked process
    with ProcessPoolExecutor(1) as pool:
        rows = Sweep([*RIGHT, Config(64, "wrong")], space, builders=pool, measurers=[pool]).finish()
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["wrong"]


@pytest.mark.compile
@pytest.mark.fault
def test_dask_carries_it_further(space):
    distributed = pytest.importorskip("distributed", reason="the extra 'cluster' is not installed")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        executor = client.get_executor()
        running = Sweep([*RIGHT, Config(64, "exit")], space, builders=executor, measurers=[executor] * 2)
        rows = running.finish()
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["failed"] and running.restarts == 1
    assert {int(process) for process, *_ in log(space)}.isdisjoint({os.getpid()})
    assert all(row["device"] == device.current().name and row["host"] for row in rows[:3])


@pytest.mark.compile
def test_a_build_leaves_figures_and_no_binaries(tmp_path):
    row = sweep.build_configuration(FaultSpace(folder=str(tmp_path)), Config(256), 60, None)
    assert row["status"] == "ok" and row["registers"] and row["programs_per_sm"] >= 1
    assert len(pickle.dumps(row)) < 2000


@pytest.mark.timing  # it runs alone: a test process that runs beside others sees one GPU only
@pytest.mark.gpu
@pytest.mark.fault
@pytest.mark.alike
def test_every_gpu_of_a_model_takes_its_share(tmp_path):
    rows = Sweep(
        [Config(block, "") for block in (64, 128, 256, 512) * 3], FaultSpace(folder=str(tmp_path))
    ).finish()
    assert all(row["status"] == "ok" and row["device"] == device.current().name for row in rows)
    assert {row["gpu"] for row in rows} <= set(device.same_model_uuids())
