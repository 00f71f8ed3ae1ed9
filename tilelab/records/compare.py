"""Compare two sets of records and list what became worse: `python -m tilelab.records.compare OLD NEW`.

OLD and NEW are folders of records: of one GPU, as results/nvidia-h200, or of several, as the results folder of another
checkout. Listed are, the worst first:

- rows whose status became worse, from ok to rejected to failed or wrong;
- claims of CLAIMS.md whose verdict changes when NEW replaces records of OLD;
- records, rows and ratios of OLD that NEW lacks;
- ratios that fell by more than their spread. A ratio is a speed relative to a peer timed in the same run, so lower is
  worse. Only the ratios of COSTS are times over the peer's, so there higher is worse.

A ratio may fall by the sum of both spreads, and by a margin. The margin is needed because a spread describes the rounds
of one run, and two runs differ by more. Each kind of measurement has its own: by how much kernels timed against
themselves in fresh processes differed (the record `itself` of the GPU), and no less than the defaults of
tilelab.records.margins, because recordings of other days and machines differ more.
--margin gives one margin for all, in per cent of the old ratio.

A time without a peer is never compared, because the clock of the GPU and the load of the CPU change it. The time of one
call was 1.8 times as long in the next recording of the same code.

--stacks compares nothing; it writes docs/stacks.md, with the headlines of the H200 under two versions of torch.
--folder prints the folder for the headlines of this GPU and this version of torch.
--environment lists the records whose measuring code, peers, shapes or tuned rows have changed since, which is status 1,
and those that were recorded before these were covered.

Exit status: 0 if nothing became worse, 1 if something did, 2 for bad usage, a folder without records, or another GPU.
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilelab import cli
from tilelab.records import environment, gpus, headlines, margins, results
from tilelab.runtime import device, files

COSTS = ("ch14_compiled_host_time",)
SEVERITY = {"ok": 0, "rejected": 1, "failed": 2, "wrong": 2}
STATUS, VERDICT, MISSING, RATIO = "status", "verdict", "missing", "ratio"
KINDS = (STATUS, VERDICT, MISSING, RATIO)  # the worst first
SHOWN, WIDTH = 20, 60  # rows of the table, and characters of a column
Records = dict[tuple[str, str], dict]  # {(folder of the GPU, experiment): record}


@dataclass(frozen=True)
class Problem:
    """A line of the table: the kind, the record, the row and both values. `size` orders the problems of a kind."""

    kind: str
    where: str
    row: str
    old: str
    new: str
    size: float = 0.0


def read_records(folder: str, only: Sequence[str] = ()) -> Records:
    """Return the records in a folder of one GPU or of several, of the experiments in `only` if it names any.

    ValueError for a folder that does not exist or holds no such record, and for a file that is not a record.
    """
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    # A folder of one GPU holds its records; the folders in it hold those of other software.
    own = [file for file in sorted(path.glob("*.json")) if file.stem != "tests"]
    every = own or [file for file in sorted(path.glob("*/*.json")) if file.stem != "tests"]
    found = [results.read(file) for file in every if not only or file.stem in only]
    if not found:
        raise ValueError(f"{folder} holds no records{' of the headlines' if only else ''}.")
    return {(results.gpu_folder(record), record["experiment"]): record for record in found}


def _require_same_gpu(old: Records, new: Records) -> None:
    """Raise ValueError where a record of OLD is missing in NEW, which has the experiment's record of another GPU."""
    for gpu, experiment in old.keys() - new.keys():
        if others := [new[key] for key in new if key not in old and key[1] == experiment]:
            raise ValueError(
                f"OLD holds {experiment} of {old[gpu, experiment]['device']['name']} and NEW of "
                f"{others[0]['device']['name']}: figures of two GPUs cannot be compared."
            )


# ---- what became worse


def list_margins(gpu: str, percent: float | None = None) -> dict[str, float]:
    """Return by how much a ratio of each kind may fall beyond its spread on a GPU; `percent` is one figure for all."""
    if percent is None:
        return margins.find_fresh_margins(gpu)
    return dict.fromkeys(margins.KINDS, percent / 100)


def find_problems(old: Records, new: Records, margin_percent: float | None = None) -> list[Problem]:
    """Return what is worse in `new`, the worst first, except for the claims."""
    allowed = {gpu: list_margins(gpu, margin_percent) for gpu in {gpu for gpu, _ in old}}
    problems, several = [], len({gpu for gpu, _ in old} - {results.NO_GPU.slug}) > 1
    for key, record in old.items():
        name = "/".join(key) if several else key[1]
        if key not in new:
            problems.append(Problem(MISSING, name, "", "recorded", "no record"))
            continue
        pairs = gpus.pair_rows(record, new[key])
        if lost := [words for words, _, row in pairs if row is None]:
            fewer = f"{len(lost)} fewer"
            problems.append(Problem(MISSING, name, "; ".join(lost), f"{len(pairs)} rows", fewer))
        for words, before, after in pairs:
            if after is not None:
                problems += _compare_rows(key[1], name, words, before, after, allowed[key[0]])
    return sort_problems(problems)


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems in the order of KINDS, and within a kind the largest first."""
    return sorted(problems, key=lambda each: (KINDS.index(each.kind), -each.size, each.where))


def _compare_rows(
    experiment: str, name: str, words: str, old: dict, new: dict, allowed: dict[str, float]
) -> list[Problem]:
    was, now = old.get("status", "ok"), new.get("status", "ok")
    if _severity(now) > _severity(was):
        why = f"{now}: {new.get('reason') or 'no reason'}"
        return [Problem(STATUS, name, words, was, why, _severity(now))]
    problems = []
    for key in [key for key in old if key == "ratio" or key.endswith("_ratio")]:
        before, after = old[key], new.get(key)
        label = ", ".join(filter(None, (words, key if key != "ratio" else "")))
        peers = old.get("peer"), new.get("peer")
        if before is None or now != "ok":
            continue
        if key == "ratio" and (after is None or peers[0] != peers[1]):
            found = "no ratio" if after is None else f"{after:.3f} x {peers[1] or 'the peer'}"
            problems.append(Problem(MISSING, name, label, f"{before:.3f} x {peers[0] or 'the peer'}", found))
        elif after is not None:
            fall, sign = (after - before, "+") if experiment in COSTS else (before - after, "-")
            most = allowed_fall(old, new, allowed, key, experiment)
            found = f"{after:.3f} ({after / before - 1:+.1%}, allowed {sign}{most / before:.1%})"
            if fall > most:
                problems.append(Problem(RATIO, name, label, f"{before:.3f}", found, fall / before))
    return problems


def _severity(status: str) -> int:
    return SEVERITY.get(status, 2)


def allowed_fall(
    old: dict, new: dict, allowed: dict[str, float], key: str = "ratio", experiment: str = ""
) -> float:
    """Return by how much the ratio of a row may fall: by both spreads, and by the margin of its kind of `allowed`."""
    spreads = [row.get(key.removesuffix("ratio") + "spread") for row in (old, new)]
    kind = margins.QUICK if None in spreads else margins.classify(old, experiment)
    return sum(filter(None, spreads)) + allowed[kind] * old[key]


# ---- claims


def find_changed_verdicts(old: Records, new: Records) -> list[Problem]:
    """Return the claims whose verdict changes when records of `new` replace records of `old`.

    Claims read records of the H200 and of builds. Records that both folders lack come from this repository.
    """
    ours = {key for key in new if key[0] in (results.PREFERRED, results.NO_GPU.slug)}
    if all(key in old and old[key]["rows"] == new[key]["rows"] for key in ours):
        return []
    kept = os.environ.get("TILES_RESULTS", "")
    own = read_records(str(results.results_folder()))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILES_RESULTS"] = folder  # rules read records from there
        try:
            before, after = (_judge_claims(pathlib.Path(folder), records) for records in (own | old, new))
        finally:
            os.environ["TILES_RESULTS"] = kept
    changed = [name for name in before if before[name] != after[name]]
    return [Problem(VERDICT, "claim", name, before[name], after[name]) for name in changed]


def _judge_claims(folder: pathlib.Path, records: Records) -> dict[str, str]:
    """Add records to a results folder, and return {name of a claim: its verdict by all records there}."""
    # Import it by name, because tilelab imports no other package of the course.
    trial = importlib.import_module("claims.trial")
    for (gpu, experiment), record in records.items():
        (folder / gpu).mkdir(exist_ok=True)
        (folder / gpu / results.file_name(experiment)).write_text(json.dumps(record), encoding="utf-8")
    verdicts = {}
    for claim in (claim for note in trial.NOTES for claim in note.claims):
        try:
            verdicts[claim.name] = claim.judge().finding.verdict
        except ValueError as error:  # a figure that the rule reads is missing
            verdicts[claim.name] = device.first_line(error)
    return verdicts


# ---- what is printed


def describe_software(records: Iterable[dict]) -> str:
    """Return the versions that records were made with: "torch 2.11.0+cu130, Triton 3.6.0"."""
    made = dict.fromkeys(
        (record["versions"].get("torch"), record["versions"].get("triton")) for record in records
    )
    return " and ".join(f"torch {torch or 'unknown'}, Triton {triton or 'unknown'}" for torch, triton in made)


def describe(old: Records, new: Records) -> str:
    """Return a line that names each GPU with both sets of software, and a line that says how much was compared."""
    both = [key for key in old if key in new]
    software = {}
    for gpu, _ in both:
        sides = ([record for (other, _), record in records.items() if other == gpu] for records in (old, new))
        software[gpu] = " -> ".join(map(describe_software, sides))
    names = {gpu: old[gpu, name]["device"]["name"] for gpu, name in both}
    changed = sum(old[key]["source"] != new[key]["source"] for key in both)
    rows = sum(len(old[key]["rows"]) for key in both)
    gpus_compared = "; ".join(f"{names[gpu]}: {versions}" for gpu, versions in software.items())
    compared = f"{len(both)} of {len(old)} records are in both, with {rows:,} rows"
    return f"{gpus_compared}.\n{compared}; the measured code of {changed or 'none'} differs."


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


def tabulate(problems: Sequence[Problem]) -> str:
    """Return the first SHOWN problems as a table, and how many more there are."""
    if not problems:
        return "Nothing became worse."
    rows = [(each.kind, each.where, each.row, f"{each.old} -> {each.new}") for each in problems[:SHOWN]]
    shown = [[_shorten(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in shown]
    counts = collections.Counter(each.kind for each in problems)
    total = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    more = [f"… and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "\n".join([f"Worse: {total}.", *lines, *more])


def list_changes(folder: pathlib.Path) -> tuple[list[str], bool]:
    """Return a line per record that is not known to be current, and one with counts; and whether any has changed.

    ValueError for a file that is not a record, or that cannot be parsed.
    """
    paths = [path for path in sorted(folder.glob("**/*.json")) if path.stem != "tests"]
    records = {path.relative_to(folder): results.read(path) for path in paths}
    changed = {
        path: clause for path, record in records.items() if (clause := environment.find_change(record))
    }
    before = [path for path, record in records.items() if "environment" not in record]
    lines = [f"{path}: {clause}" for path, clause in changed.items()]
    lines += [f"{path}: recorded before the measuring code was covered" for path in before]
    current = len(records) - len(changed) - len(before)
    counts = f"{current} current, {len(changed)} changed, {len(before)} recorded before"
    return [*lines, f"{len(records)} records: {counts}"], bool(changed)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = cli.make_plain_parser(
        "tilelab.records.compare", "List what became worse between two sets of records."
    )
    parser.add_argument("folders", nargs="*", metavar="OLD NEW", help="two folders of records")
    parser.add_argument("--headlines", action="store_true", help="compare only the headline experiments")
    parser.add_argument("--stacks", action="store_true", help="write docs/stacks.md")
    parser.add_argument("--folder", action="store_true", help="print the folder for this GPU and this torch")
    parser.add_argument("--environment", action="store_true", help="list records by what changed since")
    parser.add_argument(
        "--margin",
        type=float,
        metavar="PERCENT",
        help="how far a ratio may fall beyond its spread (default: by its kind; see tilelab.records.margins)",
    )
    options = parser.parse_args(arguments)
    if options.margin is not None and not 0 <= options.margin <= 100:
        parser.error(f"--margin must be from 0 to 100; it is {options.margin:g}.")
    only = headlines.EXPERIMENTS if options.headlines else ()
    if len(options.folders) != (0 if options.stacks or options.folder or options.environment else 2):
        parser.error("it takes two folders, OLD and NEW, or --stacks, --folder or --environment alone.")
    try:
        if options.environment:
            lines, changed = list_changes(results.results_folder())
            print(*lines, sep="\n")
            return int(changed)
        if options.folder:
            print(headlines.find_folder())
        if options.stacks:
            files.write_atomically(headlines.PAGE, headlines.make_page())
        if not options.folders:
            return 0
        old, new = (read_records(folder, only) for folder in options.folders)
        _require_same_gpu(old, new)
        problems = sort_problems([*find_problems(old, new, options.margin), *find_changed_verdicts(old, new)])
        gpu_names = sorted({gpu for gpu, _ in old} - {results.NO_GPU.slug}) or [results.NO_GPU.slug]
        of_kinds = dict.fromkeys(margins.describe_margins(list_margins(gpu)) for gpu in gpu_names)
        allowed = "; ".join(of_kinds) if options.margin is None else f"{options.margin:g} %"
    except (OSError, ValueError) as error:
        parser.error(f"{device.first_line(error).rstrip('.')}.")
    print(describe(old, new))
    print(f"A ratio may fall by both spreads and a margin: {allowed}.\n{tabulate(problems)}")
    return int(bool(problems))


if __name__ == "__main__":
    cli.run_main(main)
