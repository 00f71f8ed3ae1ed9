"""Run the notebooks on this GPU and keep what they show: `python -m tilelab.record`, [--notebooks NAME...], [--tests],
[--side-by-side].

Each notebook runs in a fresh kernel with TILES_RECORD=1, so that its experiments rewrite results/, and is written back
in place once it has run to its end. --tests runs the tests too and keeps their summary in results/<gpu>/tests.json.
--side-by-side gives each of several GPUs of one model the next notebook: that much faster, and less quiet, for their
launches share the CPU. What measures on all GPUs, or judges by what the others record, comes after those, alone.
One recording runs at a time. Exit status: 0 all ran, 1 a notebook or a test failed, 2 bad usage, no GPU, another
recording, too little free memory or nowhere to write, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml

import filelock

from tilelab import device, notebook, results

ROOT = pathlib.Path(__file__).parents[1]
ALONE = ("01_sweep", "01_claims")  # after the rest, in this order: it measures on all GPUs; it judges by all records
OTHERS = 0.25  # of a GPU's memory that other processes may hold: a screen, a reader's notebook
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def run_tests(ran: list[str]) -> dict:
    """Run pytest and return its summary: counts, skips by reason, seconds, versions and device. Notebooks that `ran`
    just now, by their stems, are not run again. RuntimeError when it ends without a report."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}",
                   *(f"--deselect=tests/test_notebooks.py::test_runs[{stem}.ipynb]" for stem in ran)]
        status = subprocess.run(command, cwd=ROOT, env=notebook.child_env(), check=False).returncode
        seconds = round(time.monotonic() - begun, 1)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {status} and no report")
        cases = list(xml.parse(report).iter("testcase"))
    skips = collections.Counter(skip.get("message") for case in cases for skip in case.iter("skipped"))
    failed = sum(1 for case in cases if case.find("failure") is not None or case.find("error") is not None)
    skipped = sum(skips.values())
    return {"passed": len(cases) - failed - skipped, "failed": failed or int(status != 0), "skipped": skipped,
            "skips": sorted(skips.items()), "seconds": seconds,
            "versions": results.versions(), "device": dataclasses.asdict(device.current()), "recorded": results.utc_now()}


def _chosen(names: list[str] | None) -> list[pathlib.Path]:
    """The notebooks to run, all by default; ValueError for a name that is none."""
    found = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    stems = [pathlib.Path(name).stem for name in (found if names is None else names)]
    unknown = [stem for stem in stems if stem not in found]
    if unknown:
        raise ValueError(f"no notebook {', '.join(unknown)}: there is {', '.join(found) or 'none yet'}.")
    return [found[stem] for stem in stems]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tilelab.record", description="Run the notebooks on this GPU and "
                                     "keep their outputs and results/.")
    parser.add_argument("--notebooks", nargs="*", metavar="NAME", help="only these, or none (default: every one)")
    parser.add_argument("--side-by-side", action="store_true", help="a notebook on each GPU of one model at a time")
    parser.add_argument("--tests", action="store_true", help="run the tests too and keep their summary")
    asked = parser.parse_args(arguments)
    try:
        paths = _chosen(asked.notebooks)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    here = device.current()
    if here.capability is None:
        print(f"Recording needs a GPU; here is {here.describe()}.", file=sys.stderr)
        return 2
    if reason := _nowhere(here):
        print(reason, file=sys.stderr)
        return 2
    gpus = device.same_model_uuids()
    locks = [results.results_folder() / ".recording",
             *(pathlib.Path(tempfile.gettempdir(), f"tiles-in-flight-{os.getuid()}-{gpu}.recording") for gpu in gpus)]
    with contextlib.ExitStack() as held:
        try:
            for path in locks:
                held.enter_context(filelock.FileLock(path, timeout=0))
        except filelock.Timeout:
            print("Another recording is running, and the two would disturb each other: wait for its end.",
                  file=sys.stderr)
            return 2
        if reason := _crowded(gpus):
            print(reason, file=sys.stderr)
            return 2
        return _record(paths, asked.tests, gpus if asked.side_by_side and len(gpus) > 1 else [""], here)


def _crowded(gpus: list[str]) -> str:
    """Why what wants memory would fail, and be recorded so; empty when the GPUs are next to free."""
    for gpu, (held, whole) in device.memory_in_use_gib().items():
        if gpu in gpus and held > whole * OTHERS:
            return (f"Other processes hold {held:.0f} of the {whole:.0f} GiB of {gpu}; recording wants all but "
                    f"{whole * OTHERS:.0f}: end them, or choose another GPU with CUDA_VISIBLE_DEVICES.")
    return ""


def _nowhere(here: device.Device) -> str:
    """Why what is recorded could not be written, before minutes of measuring; empty when it can."""
    for folder in (results.results_folder() / here.slug, ROOT / "notebooks"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            results.write_atomically(folder / "writable", "x" * 4096)  # a full disk still lets a file be made
            (folder / "writable").unlink()
        except OSError as error:
            return f"{folder} cannot be written ({error.strerror}): nothing was recorded."
    return ""


async def _each(paths: list[pathlib.Path], gpus: list[str], ran: list[str], now: set[str]) -> None:
    """Record the notebooks, each GPU, by its UUID ("": whichever are visible), the next of those that are left; ALONE
    after all others. What ran to its end goes to `ran`; what is at work is in `now`."""
    async def every_second(left, gpu: str, starting: asyncio.Lock, running: asyncio.Lock) -> bool:
        """Record the next notebook; while one runs, the other's kernel starts. Returns whether there was one."""
        path, begun = None, time.monotonic()
        try:
            async with contextlib.AsyncExitStack() as held:
                async with starting:
                    if (path := next(left, None)) is None:
                        return False
                    chosen = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
                    client = await held.enter_async_context(notebook.start_kernel(path, TILES_RECORD="1", **chosen))
                    await held.enter_async_context(running)
                begun = time.monotonic()
                now.add(path.stem)
                slow = await notebook.record_notebook(path, client)
            outcome = "recorded" + (f"; slowest cells {slow}" if slow else "")
            ran.append(path.stem)
        except Exception as error:  # its own error, a timeout or a dead kernel: say which, and go on to the next
            first = f": {error.ename}: {device.first_line(error.evalue)}" if hasattr(error, "ename") else ""
            outcome = f"failed, left as it was{first}\n{COLOUR.sub('', str(error)).strip()}"
        now.discard(path.stem)
        print(f"{path.stem}: {time.monotonic() - begun:.1f} s, {outcome}", flush=True)
        return True

    async def turns(*lane) -> None:
        while await every_second(*lane):
            pass

    async def on(gpus: list[str], paths: list[pathlib.Path]) -> None:
        left = iter(paths)
        lanes = [(left, gpu, asyncio.Lock(), asyncio.Lock()) for gpu in gpus]
        await asyncio.gather(*(turns(*lane) for lane in lanes for _ in range(2)))

    last = sorted((path for path in paths if path.stem in ALONE), key=lambda path: ALONE.index(path.stem))
    others = [path for path in paths if path.stem not in ALONE]
    for where, which in [(gpus, others + last)] if len(gpus) == 1 else [(gpus, others), ([""], last)]:
        await on(where, which)


def _record(paths: list[pathlib.Path], tests: bool, gpus: list[str], here: device.Device) -> int:
    """Record the notebooks, then the tests; the exit status."""
    ran, now = [], set()
    begun, failed = time.monotonic(), False
    try:
        asyncio.run(_each(paths, gpus, ran, now))
        failed = len(ran) < len(paths)
        if len(paths) > 1:
            print(f"{len(ran)} of {len(paths)} recorded in {time.monotonic() - begun:.0f} s", flush=True)
        if tests:
            now.add("tests.json")
            summary = run_tests(ran)
            results.write_atomically(results.results_folder() / here.slug / "tests.json",
                                     json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
            print("{passed} passed, {failed} failed, {skipped} skipped in {seconds} s".format(**summary))
            failed = failed or summary["failed"] > 0
    except KeyboardInterrupt:
        print(f"interrupted; left as before: {', '.join(sorted(now)) or 'everything'}", flush=True)
        return 130
    except (OSError, RuntimeError) as error:
        print(f"tests: failed, tests.json left as it was: {device.first_line(error)}.", flush=True)
        return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
