"""One experiment on several GPUs: its record here beside those that others have added to results/.

`make record` on another GPU adds results/<gpu>/; `table(record, "ratio")` and `picture(record, "ratio", title=...)`
then have one more column, or one more kind of points. Ratios to a peer travel best: each GPU has its own clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilelab import plots, results

# What tells rows of an experiment apart on any GPU; and what else where that is not enough, as in a sweep. A
# configuration comes last: each GPU may have its own best.
APART = ("workload", "op", "format", "what", "name", "shape", "dtype", "layout", "causal")
FURTHER = ("how", "loop", "gpus", "kernel", "config")
MARKS = (("o", "#0072B2"), ("s", "#D55E00"), ("^", "#009E73"), ("D", "#CC79A7"), ("v", "#E69F00"), ("P", "#56B4E9"))


def records_on_all_gpus(record: results.Record) -> list[results.Record]:
    """`record`, then that of the same experiment from each other GPU in results/. Errors are those of results.load."""
    own, experiment = results.gpu_folder(record.data), record.experiment
    found = sorted(path.parent.name for path in results.results_folder().glob(f"*/{experiment}.json"))
    return [record, *(results.Record(results.load(experiment, gpu), live=False) for gpu in found
                      if gpu not in (own, results.NO_GPU.slug))]


def _names(records: Sequence[results.Record]) -> list[str]:
    return [record.device["name"].removeprefix("NVIDIA ") for record in records]


def _key(row: dict, keys: Sequence[str]) -> tuple:
    return tuple(tuple(value) if isinstance(value, list) else value for value in map(row.get, keys))


def _keys(records: Sequence[results.Record]) -> list[str]:
    """The first of APART, then of FURTHER, that tell the rows of each record apart; all of them where none do."""
    every = {key for record in records for row in record.rows for key in row}
    keys = [key for key in APART if key in every]
    for further in (key for key in FURTHER if key in every):
        if all(len({_key(row, keys) for row in record.rows}) == len(record.rows) for record in records):
            break
        keys.append(further)
    return keys


def _matched(records: Sequence[results.Record], value: str,
             by: Sequence[str] | None) -> tuple[list[str], dict[tuple, list]]:
    """The keys, and for their values, in the order of the first record, the row of each GPU or None."""
    if not any(row.get(value) is not None for record in records for row in record.rows):
        raise ValueError(f"no row of {records[0].experiment} has {value!r:.40}: choose of "
                         f"{', '.join(sorted({key for record in records for row in record.rows for key in row}))}.")
    keys, found = list(by or _keys(records)), {}
    for place, record in enumerate(records):
        for row in record.rows:
            rows = found.setdefault(_key(row, keys), [None] * len(records))
            if rows[place] is not None:
                raise ValueError(f"rows of {record.experiment} on {record.device['name']} are not told apart by "
                                 f"{', '.join(keys) or 'their keys'}: choose `by` of {', '.join(row)}.")
            rows[place] = row
    return keys, found


def _source(records: Sequence[results.Record]) -> str:
    """Where the columns come from, and which are of other code than the first."""
    first, *others = records
    return "; ".join([first.label(), *(f"{name}, {each.data['recorded'][:10]}"
                                       + ", of other code" * (each.data["source"] != first.data["source"])
                                       for name, each in zip(_names(others), others))])


def _missing(row: dict | None) -> str:
    """One word for what is not measured: nothing where a GPU has no such row."""
    return "" if row is None else row.get("status", "ok") if row.get("status", "ok") != "ok" else "not measured"


def table(record: results.Record, value: str, by: Sequence[str] | None = None) -> results.Table:
    """`value` ("ratio", "gbps") of the record's rows, a column a GPU; a row that did not run there shows its status.

    `by` are the keys that tell rows apart (default: of APART and FURTHER what is needed); ValueError when they do not,
    or when no row has `value`.
    """
    records = records_on_all_gpus(record)
    keys, found = _matched(records, value, by)
    rows = [dict(zip(keys, key)) | {name: row[value] if row and row.get(value) is not None else _missing(row)
                                    for name, row in zip(_names(records), rows)} for key, rows in found.items()]
    return results.table(rows, f"{record.experiment}, {value}: {_source(records)}")


def picture(record: results.Record, value: str, *, title: str, by: Sequence[str] | None = None) -> plots.Picture:
    """`value` of the record's rows, a line each, with a point a GPU; a row that did not run somewhere says so.

    `by` and ValueError as for `table`.
    """
    records = records_on_all_gpus(record)
    keys, found = _matched(records, value, by)
    figure, axes = plots.new_figure(list(found), title, _source(records), height=1.5 + 0.21 * len(found))
    varied = [key for at, key in enumerate(keys) if len({values[at] for values in found}) > 1] or keys
    words = results.table([dict(zip(keys, values)) for values in found], "", varied).frame.to_numpy()
    labels = [{"label": ", ".join(filter(None, row))} for row in words]
    for place, (name, (mark, tone)) in enumerate(zip(_names(records), MARKS * len(records))):
        points = [(row[place][value], len(found) - 1 - y) for y, row in enumerate(found.values())
                  if row[place] and row[place].get(value) is not None]
        axes.plot(*zip(*points) if points else ([], []), mark, color=tone, markersize=5, alpha=0.85, label=name)
    absent = ["; ".join(f"{name}: {_missing(row)}" for name, row in zip(_names(records), rows)
                        if row and row.get(value) is None) for rows in found.values()]
    for y, text in enumerate(absent):
        axes.text(0.01, len(found) - 1 - y, plots.escape_math(text), transform=axes.get_yaxis_transform(), va="center",
                  fontsize=7, color=plots.GREY)
    if value == "ratio":
        axes.axvline(1, color="black", linewidth=1, zorder=1)
        axes.plot([0.9, 1.1], [0, 0], alpha=0)  # a per cent is not to look like much
    low, high = axes.get_xlim()
    share = min(0.7, 0.0125 * max(map(len, absent)))  # of the axes: what is said stands left of every point
    axes.set_xlim(high - (high - low) / (1 - share))
    plots.label_lines(axes, labels, "label")
    peers = {row.get("peer") for each in records for row in each.rows} - {None}
    unit = f"speed, × {peers.pop() if len(peers) == 1 else 'the peer'}" if value == "ratio" else value
    axes.set_xlabel(plots.escape_math(plots.UNITS.get(value, unit)), fontsize=8)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, ncols=4, fontsize=7.5, frameon=False)
    return figure
