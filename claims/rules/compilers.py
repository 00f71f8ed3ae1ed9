"""Rules about what a compiler makes or refuses, and about the files of packages. No GPU takes part.

The records hold 864 builds of Triton 3.5.0 for sm_100a, and twelve loops per Triton and target.
"""

from __future__ import annotations

import collections
import itertools

from claims import builds
from claims.judge import Evidence, Ruling, decide, rule

LOOP, MATRIX, PTXAS = "ch14_bug_hunt_loop", "ch14_bug_hunt_matrix", "ch14_bug_hunt_ptxas"


def find_failures(rows: list[dict]) -> list[dict]:
    """Return the builds that failed."""
    return [row for row in rows if row["outcome"] == "fails"]


def find_carrying(rows: list[dict]) -> list[dict]:
    """Return the builds of a loop that carries a tile from one iteration to the next, unlike the loop of the note."""
    return [row for row in rows if row["LOOP"].startswith("carry")]


def list_outcomes(rows: list[dict]) -> list[str]:
    """Return the outcome of each build."""
    return [row["outcome"] for row in rows]


@rule
def fails_in_pass(evidence: Evidence, stage: str) -> Ruling:
    """Judge whether every build that fails does so in one pass."""
    rows = evidence(LOOP)
    failures = find_failures(rows)
    named = [row for row in failures if row["stage"] == stage]
    return decide(failures and named == failures, named=len(named), failures=len(failures), builds=len(rows))


@rule
def fails_only_on(evidence: Evidence, targets: str, stage: str) -> Ruling:
    """Judge whether the pass fails for targets that begin with `targets`, and for no other."""
    failing = sorted({row["target"] for row in evidence(MATRIX, stage=stage)})
    others = sorted({row["target"] for row in evidence(MATRIX)} - set(failing))
    holds = failing and all(target.startswith(targets) for target in failing)
    return decide(holds, failing=failing, others=others)


@rule
def loops_build(evidence: Evidence, build: dict, config: str) -> Ruling:
    """Judge whether all loops of a Triton for a target build (4 stages, 8 warps, BLOCK_K = 64), and a tile fits."""
    outcomes = list_outcomes(evidence(MATRIX, hunt="loop", **build))
    tile = evidence("ch14_gemm_claim", name="proposed", config=config)[0]
    build_all = set(outcomes) == {"builds"}
    return decide(
        build_all and tile["status"] == "ok",
        build_all,
        building=outcomes.count("builds"),
        builds=len(outcomes),
        tile=tile,
    )


@rule
def build_fails(evidence: Evidence, build: dict) -> Ruling:
    """Judge whether one build fails."""
    (row,) = evidence(LOOP, **build)
    alike = list_outcomes(evidence(LOOP, LOOP=build["LOOP"]))
    return decide(
        row["outcome"] == "fails", outcome=row["outcome"], building=alike.count("builds"), builds=len(alike)
    )


@rule
def all_build(evidence: Evidence, at_most: dict) -> Ruling:
    """Judge whether no build fails whose axes are at most so large; or those that fail carry a tile."""
    rows = [row for row in evidence(LOOP) if all(row[axis] <= largest for axis, largest in at_most.items())]
    failures = find_failures(rows)
    carried = len(find_carrying(failures))
    return decide(
        not failures, carried == len(failures), failures=len(failures), builds=len(rows), carried=carried
    )


@rule
def all_fail(evidence: Evidence, at_least: dict) -> Ruling:
    """Judge whether every build fails whose axes are at least so large; or every one that carries a tile."""
    rows = [row for row in evidence(LOOP) if all(row[axis] >= least for axis, least in at_least.items())]
    carrying = find_carrying(rows)
    failures, failing_carrying = len(find_failures(rows)), len(find_failures(carrying))
    return decide(
        failures == len(rows),
        failing_carrying == len(carrying),
        failures=failures,
        builds=len(rows),
        failing_carrying=failing_carrying,
        carrying=len(carrying),
    )


@rule
def descriptors_needed(evidence: Evidence) -> Ruling:
    """Judge whether no build that loads by pointers fails."""
    counts = collections.Counter(row["LOADS"] for row in find_failures(evidence(LOOP)))
    loads = {name: counts[name] for name in ("pointers", "device", "host")}
    return decide(not loads["pointers"], **loads)


@rule
def fails_more_often(evidence: Evidence, axes: list[str]) -> Ruling:
    """Judge whether more builds fail, the larger each of the axes is."""
    rows = evidence(LOOP)
    failures = find_failures(rows)
    counts = {
        axis: {
            value: sum(row[axis] == value for row in failures)
            for value in sorted({row[axis] for row in rows})
        }
        for axis in axes
    }
    return decide(
        all(few < more for found in counts.values() for few, more in itertools.pairwise(found.values())),
        counts={
            axis: ", ".join(f"{value}: {count}" for value, count in found.items())
            for axis, found in counts.items()
        },
        carried=len(find_carrying(failures)),
        failures=len(failures),
    )


@rule
def uses_instruction(evidence: Evidence, new: str, old: str, num_warps: int) -> Ruling:
    """Judge whether all builds with so many warps use the new instruction."""
    rows = evidence(LOOP, num_warps=num_warps, outcome="builds")
    counts = {name: sum(name in row for row in rows) for name in (new, old)}
    return decide(counts[new] == len(rows), counts=counts, builds=len(rows))


@rule
def fixed_in(evidence: Evidence, version: str, stage: str) -> Ruling:
    """Judge whether no build with this version of Triton fails in the pass."""
    failed = sorted({row["triton"] for row in evidence(MATRIX, stage=stage)})
    rows = [row for row in evidence(LOOP) if row["triton"].startswith(version)]
    failures = find_failures(rows)
    carried = len(find_carrying(failures))
    return decide(
        not any(each.startswith(version) for each in failed),
        failed=failed or ["none"],
        failures=len(failures),
        builds=len(rows),
        carried=carried,
        plain=sum(row["LOOP"] == "plain" for row in failures),
    )


@rule
def fails_with_newer_ptxas(evidence: Evidence, build: dict) -> Ruling:
    """Judge whether loops fail although a ptxas that knows the target is named."""
    rows = evidence(PTXAS)
    unknown = [row for row in evidence(MATRIX, **build) if "gpu-name" in row.get("message", "")]
    failures = find_failures(rows)
    return decide(failures, failures=len(failures), builds=len(rows), unknown=len(unknown))


@rule
def builds_as_installed(evidence: Evidence, build: dict) -> Ruling:
    """Judge whether all loops of a build build as pip installs Triton, or with a newer ptxas."""
    own = list_outcomes(evidence(MATRIX, **build))
    loads = {axis: value for axis, value in build.items() if axis == "LOADS"}
    newer = list_outcomes(evidence(PTXAS, **loads))
    return decide(
        set(own) == {"builds"},
        set(newer) == {"builds"},
        own=own.count("builds"),
        builds=len(own),
        newer=newer.count("builds"),
        newer_builds=len(newer),
    )


# ---- listings of the notes, and packages


@rule
def fit_and_start(evidence: Evidence) -> Ruling:
    """Judge whether all proposed configurations can be launched on a B200 and on an H200."""
    rows = evidence("ch14_gemm_claim", name="proposed")
    started = {row["config"] for row in rows if row["status"] == "ok"}
    reasons = builds.proposed_on_b200()
    return decide(
        not any(reasons.values()) and len(started) == len(reasons),
        on_b200=sum(not reason for reason in reasons.values()),
        proposed=len(reasons),
        on_h200=len(started),
        tried=len({row["config"] for row in rows}),
    )


@rule
def ptxas_accepts(evidence: Evidence, listing: str, target: str) -> Ruling:
    """Judge whether ptxas accepts the listing."""
    error = builds.ptxas_error(listing, target)
    return decide(not error, error=error)


@rule
def holds_tma(evidence: Evidence, listing: str, target: str) -> Ruling:
    """Judge whether the listing's machine code holds an instruction of TMA."""
    counts = builds.count_copies(listing, target)
    return decide(counts["TMA"] > 0, counts=counts)


@rule
def compiles_and_announces(evidence: Evidence, listing: str, target: str) -> Ruling:
    """Judge whether the listing compiles, and announces the bytes that its barrier waits for."""
    error = builds.nvrtc_error(listing, target)
    return decide(not error and "arrive_tx" in listing, case="" if error else "compiles", error=error)


@rule
def survives_faults(evidence: Evidence) -> Ruling:
    """Judge whether the autotuner survives every planted fault, or those of the kinds that it catches."""
    faults, caught = evidence("sweep_autotune_faults"), builds.autotuner_catches()
    survived = sum("the right one" in row["autotune"] for row in faults)
    # Triton raises OutOfResources for shared memory, and ptxas refuses a kernel with too few registers.
    own = {
        row["config"]: "OutOfResources" if "shared memory" in row["reason"] else "PTXASError"
        for row in evidence("ch14_gemm_claim", name="proposed", status="rejected")
    }
    own_caught = sum(kind in caught for kind in own.values())
    return decide(
        survived == len(faults),
        own_caught == len(own),
        caught=caught,
        own_caught=own_caught,
        own=len(own),
        planted=len(faults),
        faults=[row["fault"] for row in faults],
        survived=survived,
    )


@rule
def runs_as_printed(evidence: Evidence) -> Ruling:
    """Judge whether a kernel that makes a descriptor runs without an allocator."""
    outcome = evidence("ch14_descriptors_rules", rule="an allocator is set")[0]["device"]
    if outcome.startswith("right"):
        return decide(True)
    return decide(False, True, error=outcome.split(": ", 1)[1].split(",")[0])


@rule
def variables_are_read(evidence: Evidence, variables: list[str]) -> Ruling:
    """Judge whether Triton or torch reads each of these environment variables."""
    found = builds.variables_read(*variables)
    readers = [variable for variable, packages in found.items() if packages]
    return decide(len(readers) == len(found), readers=len(readers), names=len(found))


@rule
def variables_have_effect(evidence: Evidence, read: str, default: str) -> Ruling:
    """Judge whether the first variable is read, and 0 is not the default of the second."""
    is_read = bool(builds.variables_read(read, default)[read])
    return decide(is_read and builds.always_compiles(), reads="reads" if is_read else "no longer reads")
