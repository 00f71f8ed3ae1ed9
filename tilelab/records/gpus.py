"""Find an experiment's records of other GPUs, and the same row in two records.

`make record` on another GPU adds results/<gpu>/.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from tilelab.records import results

# The keys that identify a row on any GPU, and further ones for experiments such as sweeps, where these are not enough.
# The configuration is last, because each GPU may have its own best one.
KEYS = ("workload", "op", "case", "format", "what", "name", "shape", "dtype", "layout", "causal")
FURTHER_KEYS = (
    "model part tokens routing phase how loop epilogue gpus kernel config kind ingredient stages splits block_m "
    "block_n num_warps num_stages peer tool rule program fault hunt triton target rows"
).split()


def records_on_all_gpus(record: results.Record) -> list[results.Record]:
    """Return `record`, then the same experiment's record of each other GPU in results/. Raises as `results.load`."""
    left_out = (results.gpu_folder(record.data), results.NO_GPU.slug)
    paths = results.results_folder().glob(f"*/{results.file_name(record.experiment)}")
    others = sorted(path.parent.name for path in paths if path.parent.name not in left_out)
    return [record, *(results.Record(results.load(record.experiment, gpu), live=False) for gpu in others)]


def _row_key(row: dict, keys: Sequence[str]) -> tuple:
    return tuple(str(value) if isinstance(value, list | dict) else value for value in map(row.get, keys))


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
