"""Measure on this GPU, and keep records in results/ and the notebooks' outputs: `python -m tilelab.course.record`.

Each notebook runs in a fresh kernel with TILES_RECORD=1, so that its experiments write results/, and is written back in
place once it has run to its end. --tests also runs the tests and keeps their summary as tests.json in results/<gpu>/,
or in a folder in it such as torch-2.13 where results/<gpu>/ holds headlines or tests of another version of torch.

--side-by-side runs one notebook on each of several GPUs of one model at a time. That is faster, and the measurements
are less quiet, because their launches share the CPU.

--experiments measures experiments by name, without their notebooks. Without names it measures the headlines of
tilelab.records.headlines, in about two minutes. --to names a folder for these records; the default is results/<gpu>/,
or a folder in it where results/<gpu>/ holds headlines of another version of torch.

--all is one recording of everything: the experiments, those with an old record first, then the notebooks, which show
some of these records and measure the rest, then the tests. With --side-by-side each GPU takes the next notebook or
experiment; what needs several GPUs comes last. Records of what needs no GPU stay as long as their code does.

Only one recording runs at a time. Exit status: 0 if all ran, 1 if a notebook, an experiment or a test failed, 2 for bad
usage, no GPU, another recording, too little free memory or nowhere to write, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import pathlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor

import filelock

from tilelab import ROOT, cli
from tilelab.course import notebook, suite
from tilelab.records import environment, headlines, results
from tilelab.runtime import caches, device, files, provenance

ALONE = ("09_ch14_sweep", "claims")  # the first measures on all GPUs, and the second judges all records
MAX_USED = 0.25  # share of a GPU's memory that other processes may use
ELSEWHERE = "left as it was: only its notebook measures it, or this machine cannot"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def run_tests(recorded: list[str]) -> dict:
    """Run the tests and return the summary of `suite.run`, with versions and device.

    The notebooks with the stems `recorded` have just run and are left out. RuntimeError if pytest writes no report.
    """
    left_out = [f"--deselect=tests/test_notebooks.py::test_runs[{stem}.ipynb]" for stem in recorded]
    return {
        **suite.run(arguments=left_out, env=notebook.child_env()),
        "versions": provenance.versions(),
        "device": dataclasses.asdict(device.current()),
        "recorded": provenance.utc_now(),
    }


def _find_notebooks(names: list[str] | None) -> list[pathlib.Path]:
    """Return the notebooks with these names (default: all notebooks). ValueError for an unknown name."""
    found = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    stems = [pathlib.Path(name).stem for name in (found if names is None else names)]
    if unknown := [stem for stem in stems if stem not in found]:
        raise ValueError(f"unknown notebook {', '.join(unknown)}; choose from {', '.join(found) or 'none'}.")
    return [found[stem] for stem in stems]


def import_experiments() -> None:
    """Import the modules of all chapters and of claims/audits, which registers their experiments."""
    for folder in (*sorted(ROOT.glob("ch[0-9][0-9]")), ROOT / "claims" / "audits"):
        package = ".".join(folder.relative_to(ROOT).parts)
        for module in pkgutil.walk_packages([str(folder)], f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def find_left(since: str) -> list[str]:
    """Return the experiments that this GPU has no record of since a time ("2026-11-28T09:00:00Z").

    Those whose code has changed come first, then the oldest records. A record of builds, which need no GPU, counts as
    long as its code does.
    """
    import_experiments()
    folder, stale, others = results.results_folder(), [], []
    for name, run in sorted(results.EXPERIMENTS.items()):
        paths = [folder / each.slug / results.file_name(name) for each in (device.current(), results.NO_GPU)]
        path = next((path for path in paths if path.exists()), None)
        record = path and results.read(path)
        if not record or results.stale_reason(record, run.source()) or environment.find_change(record):
            stale.append(name)
        elif path == paths[0] and record["recorded"] < since:
            others.append((record["recorded"], name))
    return stale + [name for _, name in sorted(others)]


def _check_experiments(names: list[str]) -> list[str]:
    """Return the names (default: the headlines). ValueError for an unknown one."""
    import_experiments()
    names = names or list(headlines.EXPERIMENTS)
    if unknown := [name for name in names if name not in results.EXPERIMENTS]:
        raise ValueError(f"unknown experiment {', '.join(unknown)}; each file in results/ is named after one")
    return names


def _check_memory(gpus: list[str]) -> None:
    """Raise RuntimeError where other processes hold much of a GPU: experiments would fail, and be recorded so."""
    for gpu, (used, total) in device.memory_in_use_gib().items():
        if gpu in gpus and used > total * MAX_USED:
            raise RuntimeError(
                f"other processes hold {used:.0f} of the {total:.0f} GiB of {gpu}, and recording allows "
                f"{total * MAX_USED:.0f}: end them, or choose another GPU with CUDA_VISIBLE_DEVICES"
            )


def _check_writable(folders: list[pathlib.Path]) -> None:
    """Raise RuntimeError, before minutes of measuring, where the results could not be written."""
    for folder in folders:
        if reason := caches.why_not_writable(folder):
            raise RuntimeError(f"{folder} cannot be written ({reason}): nothing was recorded")


async def _record_one(path: pathlib.Path, gpu: str, recorded: list[str], running: set[str]) -> None:
    """Record a notebook on the GPU with this UUID ("": the visible ones) and print the outcome."""
    begin = time.monotonic()
    running.add(path.stem)
    try:
        chosen = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        slow = await notebook.record_notebook(path, TILES_RECORD="1", **chosen)
        outcome = "recorded" + (f"; slowest cells {slow}" if slow else "")
        recorded.append(path.stem)
    except Exception as error:  # the notebook's own error, a timeout or a dead kernel: report it and go on
        first = f": {error.ename}: {device.first_line(error.evalue)}" if hasattr(error, "ename") else ""
        outcome = f"failed, left as it was{first}\n{COLOUR.sub('', str(error)).strip()}"
    running.discard(path.stem)
    print(f"{path.stem}: {time.monotonic() - begin:.1f} s, {outcome}", flush=True)


async def _record_all(paths: list[pathlib.Path], gpus: list[str], recorded: list, running: set) -> None:
    """Record the notebooks; each GPU takes the next one that is left. Several GPUs leave ALONE to the end."""

    async def record_next(left, gpu: str) -> None:
        for path in left:
            await _record_one(path, gpu, recorded, running)

    last = sorted((path for path in paths if path.stem in ALONE), key=lambda path: ALONE.index(path.stem))
    left = iter([path for path in paths if path.stem not in ALONE])
    await asyncio.gather(*(record_next(left, gpu) for gpu in gpus))
    await record_next(last, "")


def _record_notebooks(paths: list[pathlib.Path], recorded: list[str], gpus: list[str]) -> int:
    """Record notebooks, append the stems of those that ran to `recorded`, and return the exit status."""
    running, begin = set(), time.monotonic()
    try:
        asyncio.run(_record_all(paths, gpus, recorded, running))
    except KeyboardInterrupt:
        print(f"interrupted; left as before: {', '.join(sorted(running)) or 'everything'}", flush=True)
        return 130
    if len(paths) > 1:
        count = sum(path.stem in recorded for path in paths)
        print(f"{count} of {len(paths)} recorded in {time.monotonic() - begin:.0f} s", flush=True)
    return int(any(path.stem not in recorded for path in paths))


def _record_tests(recorded: list[str]) -> int:
    """Run the tests, keep their summary, and return the exit status."""
    try:
        summary = run_tests(recorded)
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        files.write_atomically(headlines.find_folder("tests") / "tests.json", text)
    except KeyboardInterrupt:
        print("interrupted; left as before: tests.json", flush=True)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"tests: failed, tests.json left as it was: {device.first_line(error)}.", flush=True)
        return 1
    print("{passed} passed, {failed} failed, {skipped} skipped in {seconds} s".format(**summary))
    return int(summary["failed"] > 0)


def _measure(name: str, folder: pathlib.Path | None) -> str:
    """Measure an experiment, write its record to `folder` (default: results/<gpu>/), and return the outcome."""
    if name not in results.EXPERIMENTS:  # a new process
        import_experiments()
    try:
        record = results.EXPERIMENTS[name]()
        if not record.live:
            return ELSEWHERE
        data = results.with_environment(record.data)
        folder = folder or results.results_folder() / results.gpu_folder(data)
        files.write_atomically(folder / results.file_name(name), results.to_json(data))
        return "recorded"
    except Exception as error:  # the experiment's own error: report it and go on
        return f"failed, left as it was: {type(error).__name__}: {device.first_line(error)}"


def _use_gpu(gpu: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def _measure_next(
    left: Iterator[str], gpu: str, folder: pathlib.Path | None, outcomes: dict[str, str]
) -> None:
    """Measure the experiments that are left, on the GPU with this UUID ("": here, on the visible ones).

    On a GPU of its own they run in a process of its own, which ends where one fails: it may have left a CUDA error.
    """
    pool = None
    for name in left:
        begin = time.monotonic()
        try:
            if gpu and pool is None:
                pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _use_gpu, (gpu,))
            outcomes[name] = pool.submit(_measure, name, folder).result() if pool else _measure(name, folder)
        except BrokenExecutor:
            outcomes[name] = "failed, left as it was: its process died"
        print(f"{name}: {time.monotonic() - begin:.1f} s, {outcomes[name]}", flush=True)
        if pool and outcomes[name].startswith("failed"):
            pool.shutdown()
            pool = None
    if pool:
        pool.shutdown()


def _record_experiments(names: list[str], folder: pathlib.Path | None, gpus: list[str]) -> int:
    """Measure experiments, on each GPU the next one that is left, and return the exit status.

    Where several GPUs took one each, those that one GPU could not measure are tried at the end with all of them.
    """
    outcomes, left = {}, iter(names)
    try:
        if len(gpus) == 1:
            _measure_next(left, gpus[0], folder, outcomes)
        else:
            with ThreadPoolExecutor(len(gpus)) as threads:
                waiting = threads.map(lambda gpu: _measure_next(left, gpu, folder, outcomes), gpus)
                try:
                    list(waiting)
                except KeyboardInterrupt:
                    list(left)  # what has begun ends, and nothing else begins
                    raise
            again = [name for name in names if outcomes[name] == ELSEWHERE]
            _measure_next(iter(again), "", folder, outcomes)
    except KeyboardInterrupt:
        print(f"interrupted; left as before: {', '.join(name for name in names if name not in outcomes)}")
        return 130
    count = list(outcomes.values()).count("recorded")
    print(f"{count} of {len(names)} recorded in {folder or results.results_folder()}")
    return int(count < len(names))


def _plan(options: argparse.Namespace, gpus: list[str]) -> Iterator[Callable[[], int]]:
    """Yield what is to be done, step by step; each step returns its exit status. ValueError for an unknown name."""
    chosen = gpus if options.side_by_side and len(gpus) > 1 else [""]
    if options.experiments is not None:
        folder = pathlib.Path(options.to) if options.to else headlines.find_folder()
        names = _check_experiments(options.experiments)
        yield lambda: _record_experiments(names, folder, chosen)
        return
    recorded, begin = [], provenance.utc_now()
    paths = _find_notebooks(options.notebooks)
    judges = [path for path in paths if path.stem == ALONE[-1]] if options.all else []

    def measure_left() -> int:
        return _record_experiments(find_left(begin), headlines.find_folder(), chosen)

    if options.all:  # what fails here may be a notebook's, and is tried again after them
        yield lambda: 130 if measure_left() == 130 else 0
    if measuring := [path for path in paths if path not in judges]:
        yield lambda: _record_notebooks(measuring, recorded, chosen)
    if options.all:
        yield measure_left
    if judges:
        yield lambda: _record_notebooks(judges, recorded, chosen)
    if options.all or options.tests:
        yield lambda: _record_tests(recorded)


def _list_folders(options: argparse.Namespace) -> list[pathlib.Path]:
    """Return where the recording writes. ValueError where it would mix two versions of torch."""
    if options.experiments is not None:
        return [pathlib.Path(options.to) if options.to else headlines.find_folder()]
    folder = results.results_folder() / device.current().slug
    if options.all and headlines.find_folder() != folder:
        raise ValueError(f"{folder} holds records of another torch: name another folder with TILES_RESULTS")
    return [
        folder,
        ROOT / "notebooks",
        *([headlines.find_folder("tests")] if options.tests or options.all else []),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    what = "Run the notebooks on this GPU and keep their outputs."
    parser = cli.make_plain_parser("tilelab.course.record", what)
    add, names, flag = parser.add_argument, {"nargs": "*", "metavar": "NAME"}, {"action": "store_true"}
    add("--all", help="notebooks, experiments and tests", **flag)
    add("--notebooks", help="only these; without a name none (default: all)", **names)
    add("--side-by-side", help="use every GPU of one model, each for the next notebook or experiment", **flag)
    add("--tests", help="run the tests too and keep their summary", **flag)
    add("--experiments", help="only these experiments (default: headlines)", **names)
    add("--to", metavar="FOLDER", help="where the records of --experiments go")
    options = parser.parse_args(arguments)
    if options.experiments is None and options.to:
        parser.error("--to is for the records of --experiments.")
    others = options.notebooks is not None or options.all or options.tests
    if options.experiments is not None and others:
        parser.error("--experiments runs neither notebooks nor tests: it goes with --to and --side-by-side.")
    if options.all and options.notebooks is not None:
        parser.error("--all records every notebook: leave --notebooks out.")
    here, gpus = device.current(), device.same_model_uuids()
    with contextlib.ExitStack() as stack:
        try:
            if here.capability is None:
                raise RuntimeError(f"recording needs a GPU; this machine has {here.describe()}")
            steps = list(_plan(options, gpus))
            folders = _list_folders(options)
            _check_writable(folders)
            locks = (device.user_lock_path(f"{gpu}.recording") for gpu in gpus)
            for path in (results.results_folder() / ".recording", *locks):
                stack.enter_context(filelock.FileLock(path, timeout=0))
            _check_memory(gpus)
        except filelock.Timeout:
            parser.error("another recording is running, and the two would disturb each other: wait for it.")
        except (ValueError, OSError, RuntimeError) as error:
            parser.error(f"{device.first_line(error)}.")
        worst = 0
        for step in steps:
            worst = max(worst, step())
            if worst == 130:
                break
        return worst


if __name__ == "__main__":
    cli.run_main(main)
