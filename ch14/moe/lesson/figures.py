"""Say in lines of a notebook what the records of the grouped products hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from tilelab.records import results


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def show(describe: Callable[..., str], load: Callable[[], results.Record], *keys) -> None:
    """Print what `describe` says of the record that `load` returns, or that there is none."""
    try:
        print(describe(load(), *keys))
    except FileNotFoundError as error:
        print(re.sub(r"no record of (\w+).*", r"\1 is not recorded", str(error)))


def summarise(record: results.Record, *keys: str) -> str:
    """Return a line for each value of `keys`: the geometric mean and the lowest ratio, and how many cases there are.

    Where several peers are timed and `keys` does not tell them apart, a case counts beside its better peer.
    """
    cases: dict[tuple, dict[tuple, float]] = {}
    names = ("set", "model", "part", "tokens", "routing", "dtype", "kernel")
    missing = 0
    for row in record.rows:
        if not row.get("ratio"):
            missing += 1
            continue
        group = tuple(row[key] for key in keys)
        case = tuple(row.get(name) for name in names)
        found = cases.setdefault(group, {})
        found[case] = min(row["ratio"], found.get(case, math.inf))
    lines = []
    for group, found in cases.items():
        ratios = list(found.values())
        many = f", lowest {min(ratios):.2f}, {len(ratios)} cases" if len(ratios) > 1 else ""
        lines.append(f"{', '.join(map(str, group))}: {results.geometric_mean(ratios):.2f}{many}")
    lines += [f"{missing} rows have no ratio: {reason}" for reason in _find_reasons(record)]
    return "\n".join([*lines, record.label()])


def _find_reasons(record: results.Record) -> list[str]:
    reasons = sorted({row["reason"] for row in record.rows if not row.get("ratio") and row.get("reason")})
    return [f"{reasons[0]}{f' and {len(reasons) - 1} others' if len(reasons) > 1 else ''}"] if reasons else []


def describe_checks(record: results.Record) -> str:
    """Return a line for each dtype, layout and kernel."""
    lines = [
        f"{row['dtype']}, {row['layout']}, {row['kernel']}: {_count(row['configurations'], 'configuration')} × "
        f"{_count(row['routings'], 'routing')}, " + (row["reason"] or f"largest error {row['error']:.1e}")
        for row in record.rows
    ]
    return "\n".join([*lines, record.label()])


def describe_skew(record: results.Record) -> str:
    """Return a line for each routing, with its time and its tiles as multiples of equal shares'."""
    lines, equal = [], {}
    for row in record.rows:
        key = tuple(row[name] for name in ("model", "part", "dtype"))
        equal[key] = row if row["routing"] == "equal" else equal[key]
        of = equal[key]
        lines.append(
            f"{', '.join(key)}, {row['routing']}: {_count(row['experts'], 'expert')} with tokens, "
            f"{row['tiles']:,} tiles ({row['tiles'] / of['tiles']:.2f} × equal), {row['waves']} waves, "
            f"{row['ms'] * 1e3:.0f} µs ({row['ms'] / of['ms']:.2f} × equal)"
        )
    return "\n".join([*lines, record.label()])


def describe_layer(record: results.Record) -> str:
    """Return a line for each number of tokens and kernel: its speed beside each peer."""
    cases: dict[tuple, list[str]] = {}
    for row in record.rows:
        ratio = f"{row['ratio']:.2f} × {row['peer']}" if row.get("ratio") else f"– × {row['peer']}"
        cases.setdefault((row["model"], row["tokens"], row["kernel"]), []).append(ratio)
    lines = [
        f"{model}, {_count(tokens, 'token')}, {kernel}: {', '.join(ratios)}"
        for (model, tokens, kernel), ratios in cases.items()
    ]
    return "\n".join([*lines, record.label()])


def describe_model(record: results.Record) -> str:
    """Return a line for each phase and variant: its speed beside Hugging Face's two, and its cosine."""
    lines, compiled = [], {}
    for row in record.rows:
        what = f"{row['phase']} of {row['sequences']} × {row['tokens']:,} tokens, {row['name']}: "
        if not row.get("ms"):
            lines.append(what + row["reason"])
            continue
        compiled |= {row["phase"]: row["ms"]} if row["name"] == "compiled" else {}
        of_compiled = (
            f", {compiled[row['phase']] / row['ms']:.2f} × compiled" if row["phase"] in compiled else ""
        )
        graphs = f", in CUDA graphs {row['graph_ratio']:.2f} × compiled" if row.get("graph_ratio") else ""
        graphs += f", graphs of torch.compile: {row['graphs']}" if row["graphs"] else ""
        lines.append(f"{what}{row['ratio']:.2f} × eager{of_compiled}{graphs}, cosine {row['cosine']:.4f}")
    return "\n".join([*lines, record.label()])


def describe_parallel(record: results.Record) -> str:
    """Return a line for each model and number of tokens: the speed beside one GPU, and the time of the exchanges."""
    lines = [
        f"{row['model']}, {row['tokens']:,} tokens on each of {row['gpus']} GPUs: {row['ratio']:.2f} × one GPU with "
        f"all tokens; both exchanges take {row['exchange_ms'] / row['ms']:.0%} of the time"
        for row in record.rows
    ]
    return "\n".join([*lines, record.label()])


def describe_padding(record: results.Record) -> str:
    """Return a line for each number of rows per expert: the speed of tiles of 128 rows beside tiles of 64."""
    lines = [
        f"{row['rows']:3} rows per expert: tiles of 128 rows run at {row['ratio']:.2f} × the speed of tiles of 64"
        for row in record.rows
    ]
    return "\n".join([*lines, record.label()])
