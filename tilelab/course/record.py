"""Run the notebooks on this GPU and keep their outputs and records in results/: `python -m tilelab.course.record`.

Each notebook runs in a fresh kernel with TILES_RECORD=1, so that its experiments write results/, and is written back in
place once it has run to its end. --tests also runs the tests and keeps their summary as tests.json in results/<gpu>/,
or in a folder in it such as torch-2.13 where results/<gpu>/ holds headlines or tests of another version of torch.

--side-by-side runs one notebook on each of several GPUs of one model at a time. That is faster, and the measurements
are less quiet, because their launches share the CPU.

--experiments measures experiments by name, without their notebooks. Without names it measures the headlines of
tilelab.records.headlines, in about two minutes. --to names a folder for these records; the default is results/<gpu>/,
or a folder in it where results/<gpu>/ holds headlines of another version of torch.

Only one recording runs at a time. Exit status: 0 if all ran, 1 if a notebook, an experiment or a test failed, 2 for bad
usage, no GPU, another recording, too little free memory or nowhere to write, 130 if interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import pkgutil
import re
import time
from collections.abc import Callable

import filelock

from tilelab import ROOT, cli
from tilelab.course import notebook, suite
from tilelab.records import headlines, results
from tilelab.runtime import caches, device, files, provenance

ALONE = ("09_ch14_sweep", "claims")  # the first measures on all GPUs, and the second judges all records
MAX_USED = 0.25  # share of a GPU's memory that other processes may use
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


def _find_experiments(names: list[str]) -> dict[str, Callable]:
    """Return the experiments with these names (default: the headlines). ValueError for an unknown name."""
    import_experiments()
    names = names or headlines.EXPERIMENTS
    if unknown := [name for name in names if name not in results.EXPERIMENTS]:
        raise ValueError(f"unknown experiment {', '.join(unknown)}; each file in results/ is named after one")
    return {name: results.EXPERIMENTS[name] for name in names}


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


def _record(paths: list[pathlib.Path], tests: bool, gpus: list[str]) -> int:
    """Record the notebooks, then the tests; return the exit status."""
    recorded, running, begin = [], set(), time.monotonic()
    try:
        asyncio.run(_record_all(paths, gpus, recorded, running))
        failed = len(recorded) < len(paths)
        if len(paths) > 1:
            print(f"{len(recorded)} of {len(paths)} recorded in {time.monotonic() - begin:.0f} s", flush=True)
        if tests:
            running.add("tests.json")
            summary = run_tests(recorded)
            text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
            files.write_atomically(headlines.find_folder("tests") / "tests.json", text)
            print("{passed} passed, {failed} failed, {skipped} skipped in {seconds} s".format(**summary))
            failed = failed or summary["failed"] > 0
    except KeyboardInterrupt:
        print(f"interrupted; left as before: {', '.join(sorted(running)) or 'everything'}", flush=True)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"tests: failed, tests.json left as it was: {device.first_line(error)}.", flush=True)
        return 1
    return int(failed)


def _record_experiments(experiments: dict[str, Callable], folder: pathlib.Path) -> int:
    """Measure experiments one after the other, write their records to `folder`, and return the exit status."""
    failed = []
    for name, measure in experiments.items():
        begin, outcome = time.monotonic(), "recorded"
        try:
            record = measure()
            if not record.live:
                raise RuntimeError("only its notebook measures it")
            data = results.with_environment(record.data)
            files.write_atomically(folder / results.file_name(name), results.to_json(data))
        except KeyboardInterrupt:
            names = list(experiments)
            print(f"interrupted; left as before: {', '.join(names[names.index(name) :])}")
            return 130
        except Exception as error:  # the experiment's own error: report it and go on
            failed.append(name)
            outcome = f"failed, left as it was: {type(error).__name__}: {device.first_line(error)}"
        print(f"{name}: {time.monotonic() - begin:.1f} s, {outcome}", flush=True)
    print(f"{len(experiments) - len(failed)} of {len(experiments)} recorded in {folder}")
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    what = "Run the notebooks on this GPU and keep their outputs."
    parser = cli.make_plain_parser("tilelab.course.record", what)
    add, names, flag = parser.add_argument, {"nargs": "*", "metavar": "NAME"}, {"action": "store_true"}
    add("--notebooks", help="only these; without a name none (default: all)", **names)
    add("--side-by-side", help="a notebook on each GPU of one model at a time", **flag)
    add("--tests", help="run the tests too and keep their summary", **flag)
    add("--experiments", help="only these experiments (default: headlines)", **names)
    add("--to", metavar="FOLDER", help="where the records of --experiments go")
    options = parser.parse_args(arguments)
    if options.experiments is None and options.to:
        parser.error("--to is for the records of --experiments.")
    others = options.notebooks is not None or options.side_by_side or options.tests
    if options.experiments is not None and others:
        parser.error("--experiments runs neither notebooks nor tests: the only option beside it is --to.")
    here, gpus = device.current(), device.same_model_uuids()
    with contextlib.ExitStack() as stack:
        try:
            if here.capability is None:
                raise RuntimeError(f"recording needs a GPU; this machine has {here.describe()}")
            if options.experiments is None:
                folders = [results.results_folder() / here.slug, ROOT / "notebooks"]
                folders += [headlines.find_folder("tests")] if options.tests else []
                paths, chosen = _find_notebooks(options.notebooks), gpus if options.side_by_side else [""]
                run = functools.partial(_record, paths, options.tests, chosen if len(chosen) > 1 else [""])
            else:
                folders = [pathlib.Path(options.to) if options.to else headlines.find_folder()]
                run = functools.partial(_record_experiments, _find_experiments(options.experiments), *folders)
            _check_writable(folders)
            locks = (device.user_lock_path(f"{gpu}.recording") for gpu in gpus)
            for path in (results.results_folder() / ".recording", *locks):
                stack.enter_context(filelock.FileLock(path, timeout=0))
            _check_memory(gpus)
        except filelock.Timeout:
            parser.error("another recording is running, and the two would disturb each other: wait for it.")
        except (ValueError, OSError, RuntimeError) as error:
            parser.error(f"{device.first_line(error)}.")
        return run()


if __name__ == "__main__":
    cli.run_main(main)
