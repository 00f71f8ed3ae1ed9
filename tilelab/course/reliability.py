"""Run notebooks under trouble and say how they end: `python -m tilelab.course.reliability`.

Each trouble of TROUBLES gets a copy of the repository in a temporary folder, with empty caches of its own, so this
checkout is never touched. Its notebooks run there with short experiments (TILES_QUICK). A run ends well if it ends
right, or with one clear sentence that names the trouble. Afterwards no process may be left, and no file of results/,
tuned/, notebooks/ and no journal of a sweep may be lost or damaged.

With TILES_RECORD=1 the table is kept as results/<gpu>/reliability.json; --only adds to a table of the last hour.
--write writes docs/reliability.md from these records and runs nothing. Exit status: 0 if all ended well, 1 if not, 2
for bad usage, 130 if interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence

from tilelab import ROOT, cli
from tilelab.course import notebook, suite
from tilelab.records import results
from tilelab.runtime import device, files, provenance
from tilelab.sweeps.journal import Journal

PAGE = ROOT / "docs" / "reliability.md"
COPIED = ("ch07", "ch10", "ch14", "claims", "docs", "notebooks", "results", "tests", "tilelab", "tuned")
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TILES_CUBINS": "cubins",
    "CUDA_CACHE_PATH": "cuda",
}
AT_ONCE = 16  # at most so many notebooks run at a time
RUN_LIMIT_S = 420
LONGEST_SENTENCE = 300
HELD = 0.9  # share of the GPU's memory that the trouble "memory" takes
SWEEP = "a sweep"  # a small notebook that is made here: a sweep with a journal
LEAVE_S = 20  # how long processes may need to end with the kernel that they work for
ENDINGS = ("right", "one sentence", "neither")
COLUMNS = ("trouble", "runs", *ENDINGS, "files", "damaged", "seconds")
LONGEST = (
    "ch14_sweep",
    "ch14_compiled",
    "ch14_blockscaled",
    "ch14_attention",
    "ch10_wgmma_gemm",
    "ch07_resample",
    "ch14_gemm",
)  # they begin first
INTRODUCTION = """# Reliability

This page is written by `python -m tilelab.course.reliability --write` from the records `reliability`. The same command
without `--write` makes them if `TILES_RECORD` is 1. For each trouble the program copies the repository into a
temporary folder and runs notebooks there, with short experiments. A run ends *right* if the notebook reaches its end
and prints the facts that it printed before. It may also end with *one sentence* that names the trouble; *neither*
counts all other runs. Under *memory* each notebook also meets the command `python -m tilelab.course.record`. Afterwards every
record, table of tuned shapes, notebook and journal of a sweep must be whole, the same as before where nothing was
meant to change, and no process may be left. *Damaged* counts what is not. The read-only and the full disk are
pretended by a library that is loaded into every process (`tilelab/refuse_writes.c`).
"""


@dataclasses.dataclass(frozen=True)
class Trouble:
    """`words` is a pattern that a run's sentence must hold; "" where every run must end right.

    `notebooks` are the usual ones, none for all. With `records` the runs write results/, as a recording does.
    """

    what: str
    words: str = ""
    notebooks: tuple[str, ...] = ()
    records: bool = False


FULL, READ_ONLY = "No space left on device", "Read-only file system"
TROUBLES = {
    "twice": Trouble("every notebook twice in a row"),
    "together": Trouble(
        "the same notebook in two kernels at once",
        "",
        ("00_start", "ch10_tile_pipeline", SWEEP),
        records=True,
    ),
    "killed": Trouble(
        "the kernel is killed in the middle of a recording; then the notebook runs again",
        "Kernel died",
        ("00_start", "ch14_descriptors", SWEEP),
        records=True,
    ),
    "read-only": Trouble(
        "empty caches of compiled kernels that are read-only",
        f"cannot be written.*{READ_ONLY}",
        ("00_start", "ch14_compiled", SWEEP),
    ),
    "full": Trouble(
        "the disk of the repository and of the caches is full during a recording",
        f"cannot be written.*{FULL}",
        ("00_start", "ch14_descriptors", SWEEP),
        records=True,
    ),
    "memory": Trouble(
        f"another process holds {HELD:.0%} of the GPU's memory",
        "too little free memory|other processes hold",
        ("00_start", "ch14_gemm"),
    ),
}
SWEEP_CELLS = (
    "from tilelab.sweeps import faults\nfrom tilelab.sweeps.journal import journal_for\nfrom tilelab.sweeps.sweep import Sweep",
    'journal = journal_for("reliability")\nconfigs = [faults.Config(2**power) for power in range(4, 12)]',
    'rows = Sweep(configs[:4], faults.FaultSpace(compile_for="sm_90a"), journal=journal).finish()\n'
    'assert [row["status"] for row in rows] == ["ok"] * 4, rows',
    'rows = Sweep(configs, faults.FaultSpace(compile_for="sm_90a"), journal=journal).finish()\n'
    'assert [row["status"] for row in rows] == ["ok"] * 8, rows',
)
BEGIN_SWEEP = (
    "\n".join(SWEEP_CELLS[:2])
    + """
Sweep(configs[:2], faults.FaultSpace(compile_for="sm_90a"), journal=journal).finish()"""
)  # rows that may not be lost
# Kills this kernel while the next cells run; the pause at the end makes sure that it does not end before.
KILL = "import os, signal, threading\nthreading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()"
PAUSE = "import time\ntime.sleep(60)"
# A run is a process of its own, so that also the writing of the executed notebook meets the trouble.
RUN = """
import asyncio, json, pathlib, sys
from tilelab.course import notebook
try:
    asyncio.run(notebook.record_notebook(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2])))
except Exception as error:
    print(json.dumps({"kind": getattr(error, "ename", type(error).__name__),
                      "said": str(getattr(error, "evalue", error))}))
"""
HOLD_MEMORY = f"""
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(max(0, int(free - {1 - HELD} * total)), dtype=torch.uint8, device="cuda")
print(flush=True)
sys.stdin.read()
"""


# ---- judging


def judge(error: dict | None, words: str = "", must_fail: bool = False) -> tuple[str, str]:
    """Return how a run ended ("right", "one sentence" or "neither") and what it said.

    `error` holds the `kind` and the text (`said`) of an exception, None where the run reached its end. A sentence is
    one line that is not too long and in which the pattern `words` is found.
    """
    if error is None:
        return ("neither", "nothing stopped it") if must_fail else ("right", "")
    said = " ".join(filter(None, (f"{error['kind']}:", error["said"].strip())))
    lines = error["said"].strip().splitlines()
    is_clear = len(lines) == 1 and len(lines[0]) <= LONGEST_SENTENCE and words and re.search(words, lines[0])
    return "one sentence" if is_clear else "neither", said


def find_changed_fact(before: dict, after: dict) -> str:
    """Return a sentence about the first cell whose output is a fact (nbval-check-output) and has changed; else ""."""

    def read(cell: dict) -> list[str]:
        texts = [
            output.get("text") or output.get("data", {}).get("text/plain", "")
            for output in cell["outputs"]
            if output.get("name") != "stderr"
        ]
        return ["".join(text).strip() for text in texts]

    for number, (old, new) in enumerate(zip(before["cells"], after["cells"])):
        if "nbval-check-output" in old["metadata"].get("tags", ()) and read(old) != read(new):
            return f"cell {number} prints {read(new)!r:.100} instead of {read(old)!r:.100}"
    return ""


def take_snapshot(folder: pathlib.Path) -> dict[str, bytes]:
    """Return {path: content} of every record, table of tuned shapes, journal and notebook below `folder`."""
    patterns = ("results/*/*.json", "tuned/*/*.json", "sweeps/*.jsonl", "notebooks/**/*.ipynb")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
        if not path.name.startswith(".")
    }


def find_damage(
    before: dict[str, bytes], folder: pathlib.Path, may_change: Collection[str] = ()
) -> list[str]:
    """Return a sentence for each file of `before` that is lost, and for each that is damaged or has changed.

    Files whose paths begin with one of `may_change` may be new or have changed, but must be whole. A journal may have
    grown, but must hold every row that it had.
    """
    now, found = take_snapshot(folder), [f"{path} is gone" for path in before if not (folder / path).exists()]
    with tempfile.TemporaryDirectory() as scratch:
        for path, content in now.items():
            try:
                if path.endswith(".jsonl"):
                    old = pathlib.Path(scratch, "journal")
                    old.write_bytes(before.get(path, b""))
                    kept, rows = Journal(old).rows(), Journal(folder / path).rows()
                    if lost := [key for key in kept if key not in rows]:
                        found.append(f"{path} has lost {len(lost)} of {len(kept)} rows")
                elif content != before.get(path):
                    data = json.loads(content)
                    if path.startswith("results/"):
                        results.check_record(data, path)
                    if not path.startswith(tuple(may_change)):
                        found.append(f"{path} has changed" if path in before else f"{path} is new")
            except ValueError as error:
                found.append(f"{path} is damaged: {device.first_line(error)}")
    return found


def find_processes(folder: pathlib.Path) -> list[int]:
    """Return the processes that were started for the copy in `folder`, whose environment names it."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


# ---- running


def copy_repository(to: pathlib.Path) -> pathlib.Path:
    """Copy what notebooks need of the repository, and add the notebook SWEEP. Return the folder."""
    import nbformat

    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.lock")
            )
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, to)
    cells = [nbformat.v4.new_code_cell(text) for text in SWEEP_CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=notebook.METADATA), _find_path(to, SWEEP))
    return to


def _find_path(folder: pathlib.Path, stem: str) -> pathlib.Path:
    return folder / "notebooks" / f"{stem}.ipynb"


def _planted_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.stem} killed.ipynb")


def _plant_kill(path: pathlib.Path) -> None:
    """Write a copy of a notebook whose kernel is killed in the middle."""
    import nbformat

    planted = nbformat.read(path, 4)
    code = [number for number, cell in enumerate(planted.cells) if cell.cell_type == "code"]
    planted.cells.insert(code[len(code) // 2], nbformat.v4.new_code_cell(KILL))
    planted.cells.append(nbformat.v4.new_code_cell(PAUSE))
    nbformat.write(planted, _planted_path(path))


def _choose_gpu(gpu: str | None) -> dict[str, str]:
    """Return the variable that lets a process use one GPU only; none for None."""
    return {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}


class Runner:
    """Run notebooks in the copy of the repository in `folder`.

    `runs` holds how each run ended, and `rewritten` the notebooks that reached their end and were written back.
    """

    def __init__(self, name: str, folder: pathlib.Path):
        self.name, self.trouble, self.folder = name, TROUBLES[name], folder
        self.runs, self.rewritten = [], []
        others = [
            os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
        ]
        own = ("TILES_RESULTS", "TILES_TUNED", "TILES_SWEEPS", "TILES_RECORD", "TRITON_INTERPRET")
        self.env = {
            **{variable: value for variable, value in os.environ.items() if variable not in own},
            **{variable: str(folder / "caches" / cache) for variable, cache in CACHES.items()},
            "TILES_QUICK": "1",
            "PYTHONPATH": os.pathsep.join([str(folder), *others]),
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // AT_ONCE)),
        }
        if self.env.pop(
            "PYTHONDONTWRITEBYTECODE", ""
        ):  # else every process would compile torch's source files anew
            self.env["PYTHONPYCACHEPREFIX"] = str(folder.parents[1] / "bytecode")

    def on_gpu(self, gpu: str | None) -> Runner:
        """Return this runner with its processes on the GPU with this UUID; None: without a GPU."""
        other = copy.copy(self)  # the lists `runs` and `rewritten` stay shared
        other.env = self.env | _choose_gpu(gpu)
        return other

    async def run(self, path: pathlib.Path, must_fail: bool = False) -> None:
        """Run a notebook from top to bottom and judge its end."""
        before, begin = json.loads(path.read_text(encoding="utf-8")), time.monotonic()
        variables = {"TILES_RECORD": "1"} if self.trouble.records else {}
        error = await self.run_python("-c", RUN, str(path), json.dumps(variables))
        ending, said = judge(error, self.trouble.words, must_fail)
        if error is None:
            self.rewritten.append(str(path.relative_to(self.folder)))
        if ending == "right" and (
            fact := find_changed_fact(before, json.loads(path.read_text(encoding="utf-8")))
        ):
            ending, said = "neither", fact
        self._keep(path.stem, ending, said, begin)

    async def record(self, path: pathlib.Path) -> None:
        """Run the command that records a notebook and judge its end."""
        begin = time.monotonic()
        error = await self.run_python("-m", "tilelab.course.record", "--notebooks", path.stem)
        self._keep(f"tilelab.course.record {path.stem}", *judge(error, self.trouble.words), begin)

    def _keep(self, name: str, ending: str, said: str, begin: float) -> None:
        seconds, said = time.monotonic() - begin, " ".join(said.replace(f"{self.folder}/", "").split())[:600]
        self.runs.append({"notebook": name, "ending": ending, "said": said})
        print(
            f"{self.name}: {name}: {ending} after {seconds:.0f} s" + (f": {said}" if said else ""), flush=True
        )

    async def run_python(self, *arguments: str) -> dict | None:
        """Run Python in the copy and return None if all went well, else its error as `judge` takes it."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                await asyncio.wait_for(process.wait(), RUN_LIMIT_S)
            except TimeoutError:
                return {"kind": "TimeoutError", "said": f"it did not end\nwithin {RUN_LIMIT_S} s"}
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            said, complaint = (
                os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace") for file in (out, err)
            )
        answer = said.strip().splitlines()[-1:]
        if process.returncode == 0:
            return json.loads(answer[0]) if answer and answer[0].startswith('{"kind"') else None
        return {"kind": f"status {process.returncode}", "said": complaint or said}


def make_refusing_env(folder: pathlib.Path, refusal: str, refused: pathlib.Path) -> dict[str, str]:
    """Return variables with which a process finds the folder `refused` "read-only" or "full" (refuse_writes.c).

    The library is built in `folder` by the C compiler cc. CalledProcessError if that fails.
    """
    library = folder / "refuse_writes.so"
    subprocess.run(
        [
            "cc",
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            library,
            ROOT / "tilelab" / "course" / "refuse_writes.c",
            "-ldl",
        ],
        check=True,
    )
    loaded = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": loaded, "TILES_REFUSAL": refusal, "TILES_REFUSED": str(refused)}


@contextlib.contextmanager
def hold_memory(gpu: str | None) -> Iterator[None]:
    """Let another process hold HELD of the memory of a GPU (None: the first). RuntimeError where it cannot."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_MEMORY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | _choose_gpu(gpu),
    ) as holder:
        if not holder.stdout.readline():
            raise RuntimeError("the process that should hold the GPU's memory has failed")
        yield
        holder.stdin.close()


async def _run_twice(runner: Runner, path: pathlib.Path) -> None:
    await runner.run(path)
    await runner.run(path)


async def _run_two_together(runner: Runner, path: pathlib.Path) -> None:
    await asyncio.gather(runner.run(path), runner.run(path))


async def _run_killed(runner: Runner, path: pathlib.Path) -> None:
    await runner.run(_planted_path(path), must_fail=True)
    await runner.run(path)


async def _run_beside_full_memory(runner: Runner, path: pathlib.Path) -> None:
    await runner.run(path)
    await runner.record(path)


RUN_UNDER = {
    "twice": _run_twice,
    "together": _run_two_together,
    "killed": _run_killed,
    "memory": _run_beside_full_memory,
}


def make_slots(count: int, free_gib: dict[str, float]) -> asyncio.Queue:
    """Return a queue of at most `count` places in which a notebook may run.

    A place is the UUID of a GPU, or None without GPUs. Each GPU gets in turn as many as its free memory (GiB) holds.
    """
    places = {gpu: max(1, int(free / suite.GIB_PER_PROCESS)) for gpu, free in free_gib.items()} or {
        None: count
    }
    in_order = [
        gpu for number in range(max(places.values())) for gpu, held in places.items() if number < held
    ]
    slots = asyncio.Queue()
    for gpu in in_order[:count]:
        slots.put_nowait(gpu)
    return slots


async def meet(name: str, stems: Sequence[str], folder: pathlib.Path, slots: asyncio.Queue) -> dict:
    """Run the notebooks `stems` under the trouble `name`, in a copy of the repository below `folder`; return a row.

    The trouble "memory" holds the memory of one GPU, so `slots` has one place then.
    """
    begin, run_under = time.monotonic(), RUN_UNDER.get(name, Runner.run)

    async def run(path: pathlib.Path) -> None:
        gpu = await slots.get()
        try:
            await run_under(runner.on_gpu(gpu), path)
        finally:
            slots.put_nowait(gpu)

    with contextlib.ExitStack() as stack:
        home = copy_repository(folder / "repository")
        runner, paths = Runner(name, home), [_find_path(home, stem) for stem in stems]
        if SWEEP in stems:
            await runner.run_python("-c", BEGIN_SWEEP)
            shutil.rmtree(home / "caches")
        (home / "caches").mkdir()
        if name == "killed":
            for path in paths:
                _plant_kill(path)
        before = take_snapshot(home)
        if name in ("read-only", "full"):
            runner.env |= make_refusing_env(folder, name, home / "caches" if name == "read-only" else home)
        if name == "memory":
            gpu = slots.get_nowait()
            stack.enter_context(hold_memory(gpu))
            slots.put_nowait(gpu)
        await asyncio.gather(*map(run, paths))
        may_change = runner.rewritten
        if runner.trouble.records:
            may_change += [f"results/{slug}/" for slug in (device.current().slug, results.NO_GPU.slug)]
        damage = find_damage(before, home, may_change) + await _end_processes(home)
    return _make_row(name, stems, runner.runs, len(before), damage, time.monotonic() - begin)


async def _end_processes(folder: pathlib.Path) -> list[str]:
    """Wait until no process of the copy in `folder` is left; return a sentence if one stays, which is then killed."""
    end = time.monotonic() + LEAVE_S
    while (left := find_processes(folder)) and time.monotonic() < end:
        await asyncio.sleep(0.2)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return [f"{len(left)} processes were left after {LEAVE_S} s"] if left else []


def _make_row(
    name: str, stems: Sequence[str], runs: list[dict], files: int, damage: list[str], seconds: float
) -> dict:
    endings = [run["ending"] for run in runs]
    wrong = [f"{run['notebook']}: {run['said']}" for run in runs if run["ending"] == "neither"] + damage
    for each in damage:
        print(f"{name}: {each}", flush=True)
    return {
        "trouble": name,
        "what": TROUBLES[name].what,
        "notebooks": list(stems),
        "runs": len(runs),
        **{ending: endings.count(ending) for ending in ENDINGS},
        "files": files,
        "damaged": len(damage),
        "sentences": sorted({run["said"] for run in runs if run["ending"] == "one sentence"}),
        "seconds": round(seconds, 1),
        "status": "wrong" if wrong else "ok",
        "reason": "; ".join(wrong)[:2000],
    }


async def _meet_all(chosen: dict[str, Sequence[str]]) -> list[dict]:
    """Meet the troubles {name: notebooks} at the same time, and then "memory", whose notebooks run one by one."""
    memory, uuids = device.memory_in_use_gib(), device.same_model_uuids()  # records name one model
    free = {gpu: total - used for gpu, (used, total) in memory.items() if gpu in uuids}
    slots, one = make_slots(min(AT_ONCE, suite.count_processes(free)), free), make_slots(1, free)
    with tempfile.TemporaryDirectory(prefix="tiles-reliability-", ignore_cleanup_errors=True) as folder:
        folder = pathlib.Path(folder).resolve()

        async def try_to_meet(name: str) -> dict:
            try:
                return await meet(name, chosen[name], folder / name, one if name == "memory" else slots)
            except (
                OSError,
                RuntimeError,
                subprocess.CalledProcessError,
            ) as error:  # the other rows still count
                return _make_row(
                    name, chosen[name], [], 0, [f"it could not be tried: {device.first_line(error)}"], 0
                )

        rows = await asyncio.gather(*(try_to_meet(name) for name in chosen if name != "memory"))
        return [*rows, *([await try_to_meet("memory")] if "memory" in chosen else [])]


# ---- the record and the page


def source() -> str:
    """Return the hash of the code that judges."""
    return provenance.source_hash(judge, find_changed_fact, find_damage)


def run_troubles(chosen: dict[str, Sequence[str]]) -> results.Record:
    """Return the Record of the troubles {name: notebooks}, a row for each; with TILES_RECORD=1 keep it in results/.

    The record keeps its rows of other troubles that this machine met in the last hour.
    """

    def measure() -> list[dict]:
        rows = {row["trouble"]: row for row in asyncio.run(_meet_all(chosen))}
        recent = (
            results.load_recent_record("reliability", source())
            if os.environ.get("TILES_RECORD") == "1"
            else None
        )
        kept = {row["trouble"]: row for row in recent.rows} if recent else {}
        return [(kept | rows)[name] for name in TROUBLES if name in kept | rows]

    return results.live_or_recorded("reliability", measure, source(), can_run=True)


results.register("reliability", run_troubles, source)


def _list_notebooks(row: dict) -> str:
    """Return the notebooks of a row in words: their number where the trouble met every one."""
    every = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    return f"all {len(every)}" if every == set(row["notebooks"]) else ", ".join(row["notebooks"])


def make_page() -> str:
    """Return docs/reliability.md: a section for each GPU that has a record."""
    text = INTRODUCTION
    for path in sorted(results.results_folder().glob("*/reliability.json")):
        record = results.Record(results.load("reliability", path.parent.name), live=False)
        lines = [
            [
                row["trouble"],
                row["what"],
                _list_notebooks(row),
                row["runs"],
                *(row[ending] for ending in ENDINGS),
                row["files"],
                row["damaged"],
            ]
            for row in record.rows
        ]
        head = ["trouble", "what happens", "notebooks", "runs", *ENDINGS, "files", "damaged"]
        table = [f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *lines)]
        sentences = [
            f"- *{row['trouble']}*: {sentence}" for row in record.rows for sentence in row["sentences"]
        ]
        name, label = record.device["name"].removeprefix("NVIDIA "), record.label()
        met = {row["trouble"] for row in record.rows} | (
            {"memory"} if record.device["capability"] is None else set()
        )
        missing = [trouble for trouble in TROUBLES if trouble not in met]
        label += f". Not recorded yet: {', '.join(missing)}" if missing else ""
        text += "\n".join(
            [f"\n## {name[0].upper() + name[1:]}\n", f"{label[0].upper()}{label[1:]}.\n", *table, ""]
        )
        if sentences:
            text += "\n".join(["\nThe runs that did not end right said:\n", *sentences, ""])
    return text


# ---- the command line


def choose(names: Sequence[str] | None, only: Sequence[str] | None) -> dict[str, Sequence[str]]:
    """Return {trouble: notebooks} for the options. ValueError, in one sentence, for an unknown name."""
    every = [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    for kind, given, known in (("notebook", names, [*every, SWEEP]), ("trouble", only, TROUBLES)):
        if unknown := sorted(set(given or ()) - set(known)):
            raise ValueError(f"unknown {kind} {', '.join(unknown)}; choose from {', '.join(known)}")
    every.sort(key=lambda stem: LONGEST.index(stem) if stem in LONGEST else len(LONGEST))
    return {
        name: list(names or trouble.notebooks or every)
        for name, trouble in TROUBLES.items()
        if name in (only or TROUBLES)
    }


def find_missing(trouble: str) -> str:
    """Return what this machine lacks for a trouble, as a clause; "" where it lacks nothing."""
    if trouble == "memory" and device.current().capability is None:
        return f"it needs a GPU; here is {device.current().describe()}"
    if trouble in ("read-only", "full") and not shutil.which("cc"):
        return "it needs a C compiler called cc"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = cli.make_plain_parser(
        "tilelab.course.reliability", "Run notebooks under trouble and say how they end."
    )
    parser.add_argument(
        "--notebooks", nargs="+", metavar="NAME", help="run these (default: those of the trouble)"
    )
    parser.add_argument("--only", nargs="+", metavar="TROUBLE", help=f"choose from {', '.join(TROUBLES)}")
    parser.add_argument(
        "--write", action="store_true", help="run nothing; write docs/reliability.md from the records"
    )
    options = parser.parse_args(arguments)
    try:
        if options.write:
            files.write_atomically(PAGE, make_page())
            return 0
        chosen = choose(options.notebooks, options.only)
        for name in list(chosen):
            if missing := find_missing(name):
                print(f"{name}: left out, because {missing}", flush=True)
                del chosen[name]
        record = run_troubles(chosen)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        parser.error(f"{device.first_line(error)}.")
    print(record.show(COLUMNS))
    return int(any(row["status"] != "ok" for row in record.rows))


if __name__ == "__main__":
    cli.run_main(main)
