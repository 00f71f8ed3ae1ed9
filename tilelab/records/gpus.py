"""Show one experiment on several GPUs: its record here beside the records that others have added to results/.

`make record` on another GPU adds results/<gpu>/; `table(record, "ratio")` then has one more column, and
`picture(record, "ratio", title=...)` one more kind of points. Ratios to a peer compare best, since each GPU has its own
clock.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from tilelab.pictures import plots
from tilelab.records import results

# The keys that identify a row on any GPU, and further ones for experiments such as sweeps, where these are not enough.
# The configuration is last, because each GPU may have its own best one.
KEYS = ("workload", "op", "case", "format", "what", "name", "shape", "dtype", "layout", "causal")
FURTHER_KEYS = (
    "how loop epilogue gpus kernel config kind ingredient stages splits block_m block_n num_warps num_stages peer tool "
    "rule program fault hunt triton target"
).split()
MARKS = tuple(zip("os^DvP", "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9".split()))


def records_on_all_gpus(record: results.Record) -> list[results.Record]:
    """Return `record`, then the same experiment's record of each other GPU in results/. Raises as `results.load`."""
    left_out = (results.gpu_folder(record.data), results.NO_GPU.slug)
    paths = results.results_folder().glob(f"*/{results.file_name(record.experiment)}")
    others = sorted(path.parent.name for path in paths if path.parent.name not in left_out)
    return [record, *(results.Record(results.load(record.experiment, gpu), live=False) for gpu in others)]


def _gpu_names(records: Sequence[results.Record]) -> list[str]:
    return [record.device["name"].removeprefix("NVIDIA ") for record in records]


def _row_key(row: dict, keys: Sequence[str]) -> tuple:
    return tuple(tuple(value) if isinstance(value, list) else value for value in map(row.get, keys))


def _identifying_keys(records: Sequence[results.Record]) -> list[str]:
    """Return the KEYS in use, and as many of FURTHER_KEYS as are needed to identify each row."""
    used = {key for record in records for row in record.rows for key in row}
    keys = [key for key in KEYS if key in used]
    for further in (key for key in FURTHER_KEYS if key in used):
        if all(len({_row_key(row, keys) for row in record.rows}) == len(record.rows) for record in records):
            break
        keys.append(further)
    return keys


def _number_rows(rows: Sequence[dict], keys: Sequence[str]) -> dict[tuple, dict]:
    """Return {(values of the keys, how many rows before have the same ones): row}."""
    counts, numbered = collections.Counter(), {}
    for row in rows:
        key = _row_key(row, keys)
        numbered[key, counts[key]] = row
        counts[key] += 1
    return numbered


def pair_rows(old: dict, new: dict) -> list[tuple[str, dict, dict | None]]:
    """Return for each row of the record `old` its name, the row, and the same row of the record `new`, or None.

    Rows with the same keys are the same row. Where the keys do not identify a row, the order of the rows does. The name
    holds the keys that vary.
    """
    keys = _identifying_keys([results.Record(record, live=False) for record in (old, new)])
    old_rows, new_rows = (_number_rows(record["rows"], keys) for record in (old, new))
    varied = [key for key in keys if len({_row_key(row, [key]) for row in old["rows"]}) > 1]
    return [
        (
            ", ".join(filter(None, (results.format_cell(row.get(name)) for name in varied))),
            row,
            new_rows.get(key),
        )
        for key, row in old_rows.items()
    ]


def _match_rows(
    records: Sequence[results.Record], value: str, by: Sequence[str] | None
) -> tuple[list[str], dict[tuple, list]]:
    """Return the keys, and {values of the keys: the row of each GPU, or None}."""
    if not any(row.get(value) is not None for record in records for row in record.rows):
        raise ValueError(
            f"no row of {records[0].experiment} has {value!r:.40}; choose one of "
            f"{', '.join(sorted({key for record in records for row in record.rows for key in row}))}."
        )
    keys, matched = list(by or _identifying_keys(records)), {}
    for index, record in enumerate(records):
        for row in record.rows:
            rows = matched.setdefault(_row_key(row, keys), [None] * len(records))
            if rows[index] is not None:
                raise ValueError(
                    f"several rows of {record.experiment} on {record.device['name']} have the same "
                    f"{', '.join(keys) or 'keys'}: choose other keys for `by` from {', '.join(row)}."
                )
            rows[index] = row
    return keys, matched


def _source(records: Sequence[results.Record]) -> str:
    """Return the label of the first record, and for each other one its GPU, its date and whether its code differs."""
    first, *others = records
    labels = [first.label()]
    for name, other in zip(_gpu_names(others), others):
        differs = other.data["source"] != first.data["source"]
        labels.append(f"{name}, {other.data['recorded'][:10]}" + ", of other code" * differs)
    return "; ".join(labels)


def _missing(row: dict | None) -> str:
    """Return the status of a row without a value; "" for a GPU without this row."""
    status = "" if row is None else row.get("status", "ok")
    return "not measured" if status == "ok" else status


def table(record: results.Record, value: str, by: Sequence[str] | None = None) -> results.Table:
    """Return a Table of `value` ("ratio", "gbps") with one column per GPU; a row that did not run shows its status.

    `by` are the keys that identify a row; the default takes as many as needed. ValueError when they do not suffice, or
    when no row has `value`.
    """
    records = records_on_all_gpus(record)
    keys, matched = _match_rows(records, value, by)
    lines = []
    for key, rows in matched.items():
        cells = [row[value] if row and row.get(value) is not None else _missing(row) for row in rows]
        lines.append(dict(zip(keys, key)) | dict(zip(_gpu_names(records), cells)))
    return results.table(lines, f"{record.experiment}, {value}: {_source(records)}")


def picture(
    record: results.Record, value: str, *, title: str, by: Sequence[str] | None = None
) -> plots.Picture:
    """Return a chart of `value` with one line per row and one point per GPU. `by` and ValueError as for `table`."""
    records = records_on_all_gpus(record)
    keys, matched = _match_rows(records, value, by)
    figure, axes = plots.new_figure(list(matched), title, _source(records), height=1.5 + 0.21 * len(matched))
    varied = [key for at, key in enumerate(keys) if len({values[at] for values in matched}) > 1] or keys
    words = results.table([dict(zip(keys, values)) for values in matched], "", varied).frame.to_numpy()
    for index, (name, (mark, tone)) in enumerate(zip(_gpu_names(records), MARKS * len(records))):
        points = [
            (row[index][value], len(matched) - 1 - y)
            for y, row in enumerate(matched.values())
            if row[index] and row[index].get(value) is not None
        ]
        axes.plot(
            *zip(*points) if points else ([], []), mark, color=tone, markersize=5, alpha=0.85, label=name
        )
    absent = []
    for rows in matched.values():
        named = zip(_gpu_names(records), rows)
        absent.append(
            "; ".join(f"{gpu}: {_missing(row)}" for gpu, row in named if row and row.get(value) is None)
        )
    for y, text in zip(range(len(matched))[::-1], absent):
        plots.write_note(axes, 0.01, y, text, transform=axes.get_yaxis_transform())
    if value == "ratio":
        axes.axvline(1, color="black", linewidth=1, zorder=1)
        axes.plot([0.9, 1.1], [0, 0], alpha=0)  # widens the axis, so that one per cent does not look large
    low, high = axes.get_xlim()
    # The share of the axis for the texts, which stand on the left of every point.
    share = min(0.7, 0.0125 * max(map(len, absent)))
    axes.set_xlim(high - (high - low) / (1 - share))
    plots.label_lines(axes, [{"label": ", ".join(filter(None, row))} for row in words], "label")
    peers = {row.get("peer") for record in records for row in record.rows} - {None}
    unit = f"speed, × {peers.pop() if len(peers) == 1 else 'the peer'}" if value == "ratio" else value
    axes.set_xlabel(plots.escape_math(plots.UNITS.get(value, unit)), fontsize=8)
    plots.legend_above(axes)
    return figure
