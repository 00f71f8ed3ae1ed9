"""The tier `trouble`: run notebooks under trouble, judge how they end, and write docs/reliability.md from its records.

`python tests/troubles.py` writes the page. Each trouble gets a copy of the repository with empty caches of its own.
"""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import time

import nbformat

from tilelab import ROOT
from tilelab.course import notebook, suite
from tilelab.records import results
from tilelab.runtime import device, files, provenance
from tilelab.sweeps.journal import Journal

PAGE = ROOT / "docs" / "reliability.md"
SWEEP = "a sweep"  # a small notebook that is made here: a sweep with a journal
RUN_LIMIT_S, LEAVE_S = 420, 20  # how long a run may take, and the processes that it leaves
ENDINGS = ("right", "one sentence", "neither")
TROUBLES = {  # what happens, the pattern that a run's sentence must hold, the notebooks if not all
    "twice": ("every notebook twice in a row", "", ()),
    "together": (
        "the same notebook in two kernels at once",
        "",
        ("00_start", "03_ch10_tile_pipeline", SWEEP),
    ),
    "killed": (
        "the kernel is killed in the middle of a recording; then the notebook runs again",
        "Kernel died",
        ("00_start", "07_ch14_descriptors", SWEEP),
    ),
    "read-only": (
        "empty caches of compiled kernels that are read-only",
        "cannot be written.*Read-only file system",
        ("00_start", "11_ch14_compiled", SWEEP),
    ),
    "full": (
        "the disk of the repository and of the caches is full during a recording",
        "cannot be written.*No space left on device",
        ("00_start", "07_ch14_descriptors", SWEEP),
    ),
    "memory": (
        "another process holds 90% of the GPU's memory",
        "too little free memory|other processes hold",
        ("00_start", "08_ch14_gemm"),
    ),
}
RECORDING = ("together", "killed", "full")  # their runs write results/
CELLS = (
    "from tilelab.sweeps import faults\nfrom tilelab.sweeps.journal import journal_for\n"
    'from tilelab.sweeps.sweep import Sweep\nspace = faults.FaultSpace(compile_for="sm_90a")\n'
    "configs = [faults.Config(2**power) for power in range(4, 12)]",
    'rows = Sweep(configs[:4], space, journal=journal_for("reliability")).finish()\n'
    'assert [row["status"] for row in rows] == ["ok"] * 4, rows',
    'rows = Sweep(configs, space, journal=journal_for("reliability")).finish()\n'
    'assert [row["status"] for row in rows] == ["ok"] * 8, rows',
)
# Kills this kernel while the next cells run; a pause at the end makes sure that it does not end before.
KILL = "import os, signal, threading\nthreading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()"
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
HOLD_MEMORY = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(max(0, int(free - 0.1 * total)), dtype=torch.uint8, device="cuda")
print(flush=True)
sys.stdin.read()
"""


def judge(error: dict | None, words: str = "", must_fail: bool = False) -> tuple[str, str]:
    """Return how a run ended and what it said: `error` holds the kind and the text of an exception, if there was one.

    A sentence is one line of at most 300 characters in which the pattern `words` is found.
    """
    if error is None:
        return ("neither", "nothing stopped it") if must_fail else ("right", "")
    lines = error["said"].strip().splitlines()
    is_clear = len(lines) == 1 and len(lines[0]) <= 300 and words and re.search(words, lines[0])
    return "one sentence" if is_clear else "neither", f"{error['kind']}: {error['said'].strip()}"


def find_changed_fact(before: dict, after: dict) -> str:
    """Return a sentence about the first cell whose output is a fact (nbval-check-output) and has changed; else ""."""
    for number, cells in enumerate(zip(before["cells"], after["cells"])):
        old, new = (
            [
                "".join(out.get("text") or out.get("data", {}).get("text/plain", "")).strip()
                for out in cell["outputs"]
            ]
            if "nbval-check-output" in cells[0]["metadata"].get("tags", ())
            else []
            for cell in cells
        )
        if old != new:
            return f"cell {number} prints {new!r:.100} instead of {old!r:.100}"
    return ""


def take_snapshot(folder: pathlib.Path) -> dict[str, bytes]:
    """Return {path: content} of every record, table of tuned shapes, journal and notebook below `folder`."""
    patterns = ("results/*/*.json", "tuned/*/*.json", "sweeps/*.jsonl", "notebooks/**/*.ipynb")
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.name[0] != "."]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def find_damage(before: dict[str, bytes], folder: pathlib.Path, may_change=()) -> list[str]:
    """Return a sentence for each file of `before` that is lost, and for each that is damaged or has changed.

    Files whose paths begin with one of `may_change` may be new or have changed. A journal may have grown.
    """
    now = take_snapshot(folder)
    found = [f"{path} is gone" for path in before if path not in now]
    for path, content in now.items():
        try:
            if path.endswith(".jsonl"):
                old = [json.loads(line).get("key") for line in before.get(path, b"").splitlines()]
                if lost := {key for key in old if key} - set(Journal(folder / path).rows()):
                    found.append(f"{path} has lost {len(lost)} rows")
            elif content != before.get(path):
                data = json.loads(content)
                if path.startswith("results/"):
                    results.check_record(data, path)
                if not path.startswith(tuple(may_change)):
                    found.append(f"{path} has changed" if path in before else f"{path} is new")
        except ValueError as error:
            found.append(f"{path} is damaged: {device.first_line(error)}")
    return found


def end_processes(folder: pathlib.Path) -> list[str]:
    """Wait until no process that was started for the copy is left; return a sentence if one stays, and kill it."""
    end, left = time.monotonic() + LEAVE_S, [0]
    while left and time.monotonic() < end:
        left = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if os.fsencode(folder) in path.read_bytes() and int(path.parent.name) != os.getpid():
                    left.append(int(path.parent.name))
        time.sleep(0.2 * bool(left))
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return [f"{len(left)} processes were left after {LEAVE_S} s"] if left else []


@contextlib.contextmanager
def mount(folder: pathlib.Path, options: str):
    """Put a file system in memory at `folder`; CalledProcessError where this user may not."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def hold_memory():
    """Let another process hold most of the GPU's memory."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD_MEMORY], **pipes) as holder:
        assert holder.stdout.readline(), "the process that should hold the GPU's memory has failed"
        yield
        holder.stdin.close()


class Copy:
    """A copy of the repository in `folder`, whose notebooks run under one trouble; `runs` says how they ended."""

    def __init__(self, trouble: str, folder: pathlib.Path):
        self.trouble, self.folder, self.runs, self.rewritten = trouble, folder, [], []
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "*.lock")
        shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
        cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=notebook.METADATA), self.path(SWEEP))
        (folder / "caches").mkdir(exist_ok=True)
        caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TILES_CUBINS", "CUDA_CACHE_PATH")
        own = ("TILES_RESULTS", "TILES_TUNED", "TILES_SWEEPS", "TILES_RECORD", "TRITON_INTERPRET", *caches)
        self.env = {name: value for name, value in os.environ.items() if name not in own}
        self.env |= {name: str(folder / "caches" / name.lower()) for name in caches}
        self.env |= {"TILES_QUICK": "1", "PYTHONPATH": str(folder)}

    def path(self, stem: str) -> pathlib.Path:
        return self.folder / "notebooks" / f"{stem}.ipynb"

    def meet(self, gpu: dict[str, str], stem: str) -> None:
        """Run a notebook as the trouble says."""
        if self.trouble == "together":
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                return list(pool.map(lambda _: self.run(gpu, stem), range(2)))
        if self.trouble in ("twice", "killed"):
            self.run(gpu, f"{stem} killed" if self.trouble == "killed" else stem)
        self.run(gpu, stem)
        if self.trouble == "memory":
            error = self.run_python(gpu, "-m", "tilelab.course.record", "--notebooks", stem)
            self.keep(f"tilelab.course.record {stem}", *judge(error, TROUBLES["memory"][1]))

    def run(self, gpu: dict[str, str], stem: str) -> None:
        """Run a notebook from top to bottom and judge its end."""
        path, variables = self.path(stem), {"TILES_RECORD": "1"} if self.trouble in RECORDING else {}
        before = json.loads(path.read_text())
        error = self.run_python(gpu, "-c", RUN, str(path), json.dumps(variables))
        ending, said = judge(error, TROUBLES[self.trouble][1], must_fail=stem.endswith(" killed"))
        if error is None:
            self.rewritten.append(str(path.relative_to(self.folder)))
            if fact := find_changed_fact(before, json.loads(path.read_text())):
                ending, said = "neither", fact
        self.keep(stem, ending, said)

    def keep(self, name: str, ending: str, said: str) -> None:
        said = " ".join(said.replace(f"{self.folder}/", "").split())[:600]
        self.runs.append({"notebook": name, "ending": ending, "said": said})
        print(f"{self.trouble}: {name}: {ending} {said}", flush=True)

    def run_python(self, gpu: dict[str, str], *arguments: str) -> dict | None:
        """Run Python in the copy and return None if all went well, else its error as `judge` takes it."""
        command = [sys.executable, *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
        try:
            done = subprocess.run(command, cwd=self.folder, env=self.env | gpu, timeout=RUN_LIMIT_S, **pipes)
        except subprocess.TimeoutExpired:
            return {"kind": "TimeoutError", "said": f"it did not end\nwithin {RUN_LIMIT_S} s"}
        answer = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode:
            return {"kind": f"status {done.returncode}", "said": done.stderr or done.stdout}
        return json.loads(answer) if answer.startswith('{"kind"') else None


def meet(trouble: str, stems: list[str], folder: pathlib.Path) -> dict:
    """Run the notebooks `stems` under a trouble, in a copy of the repository below `folder`; return a row."""
    begin, home = time.monotonic(), folder / "repository"
    with contextlib.ExitStack() as stack:
        if trouble == "full":
            stack.enter_context(mount(home, "size=300m"))
        copy = Copy(trouble, home)
        if SWEEP in stems:  # rows that may not be lost
            copy.run_python({}, "-c", "\n".join(CELLS[:2]))
            shutil.rmtree(home / "caches"), (home / "caches").mkdir()
        if trouble == "killed":
            for stem in stems:
                planted = nbformat.read(copy.path(stem), 4)
                middle = len(planted.cells) // 2
                planted.cells[middle:middle] = [nbformat.v4.new_code_cell(KILL)]
                planted.cells.append(nbformat.v4.new_code_cell("import time\ntime.sleep(60)"))
                nbformat.write(planted, copy.path(f"{stem} killed"))
        before = take_snapshot(home)
        if trouble == "full":
            with contextlib.suppress(OSError), open(home / "filler", "wb", buffering=0) as file:
                while file.write(bytes(1 << 12)):
                    pass
        if trouble == "read-only":
            stack.enter_context(mount(home / "caches", "ro"))
        gpus, places = list(suite.find_gpus()), queue.Queue()
        if trouble == "memory":
            stack.enter_context(hold_memory())
        for number in range(1 if trouble == "memory" else suite.count_processes(suite.find_gpus())):
            places.put({"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {})

        def run(stem: str) -> None:
            gpu = places.get()
            try:
                copy.meet(gpu, stem)
            finally:
                places.put(gpu)

        with concurrent.futures.ThreadPoolExecutor(places.qsize()) as pool:
            list(pool.map(run, stems))
        slugs = (device.current().slug, results.NO_GPU.slug) if trouble in RECORDING else ()
        damage = find_damage(before, home, copy.rewritten + [f"results/{slug}/" for slug in slugs])
        damage += end_processes(home)
    wrong = [f"{run['notebook']}: {run['said']}" for run in copy.runs if run["ending"] == "neither"] + damage
    endings = [run["ending"] for run in copy.runs]
    return {
        "trouble": trouble,
        "what": TROUBLES[trouble][0],
        "notebooks": list(stems),
        "runs": len(endings),
        **{ending: endings.count(ending) for ending in ENDINGS},
        "files": len(before),
        "damaged": len(damage),
        "sentences": sorted({run["said"] for run in copy.runs if run["ending"] == "one sentence"}),
        "seconds": round(time.monotonic() - begin, 1),
        "status": "wrong" if wrong else "ok",
        "reason": "; ".join(wrong)[:2000],
    }


def source() -> str:
    """Return the hash of the code that judges."""
    return provenance.source_hash(judge, find_changed_fact, find_damage)


def keep_row(row: dict) -> None:
    """Put a row into the record of this machine, beside the rows of the last hour."""
    recent = results.load_recent_record("reliability", source())
    rows = {each["trouble"]: each for each in (recent.rows if recent else [])} | {row["trouble"]: row}
    kept = [rows[name] for name in TROUBLES if name in rows]
    results.save(results.make_record("reliability", kept, source()))


results.register("reliability", lambda: results.load_record("reliability", source()), source)


def make_page() -> str:
    """Return docs/reliability.md: the introduction that it has, and a section for each GPU that has a record."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    every = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    head = ["trouble", "what happens", "notebooks", "runs", *ENDINGS, "files", "damaged"]
    for path in sorted(results.results_folder().glob("*/reliability.json")):
        record = results.Record(results.load("reliability", path.parent.name), live=False)
        lines = [head, ["---"] * len(head)]
        for row in record.rows:
            met = f"all {len(every)}" if every == set(row["notebooks"]) else ", ".join(row["notebooks"])
            lines.append([row["trouble"], row["what"], met, *(row[name] for name in head[3:])])
        no_gpu = {"memory"} if record.device["capability"] is None else set()
        missing = [name for name in TROUBLES if name not in {row["trouble"] for row in record.rows} | no_gpu]
        name, label = record.device["name"].removeprefix("NVIDIA "), record.label()
        label += f". Not recorded yet: {', '.join(missing)}" if missing else ""
        text += f"\n## {name[0].upper()}{name[1:]}\n\n{label[0].upper()}{label[1:]}.\n\n"
        text += "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)
        said = [f"- *{row['trouble']}*: {sentence}\n" for row in record.rows for sentence in row["sentences"]]
        text += f"\nThe runs that did not end right said:\n\n{''.join(said)}" if said else ""
    return text


if __name__ == "__main__":
    files.write_atomically(PAGE, make_page())
