"""The charts and tables of the notebook `19_ch14_languages`."""

from __future__ import annotations

import dataclasses
import re
import statistics
import textwrap

from ch14.languages import TITLES
from ch14.languages.lesson import mistakes, worker
from ch14.languages.lesson.experiments import LAYERS, LIBRARIES, SQUARE, find_row
from tilelab.pictures import plots
from tilelab.records import results

# One colour per language, from the palette that can be told apart with any colour vision.
COLOURS = dict(zip(TITLES, ("#000000", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9")))
COLOURS |= dict.fromkeys(LIBRARIES, plots.GREY)
# Words of each language in a kernel: what its author has to know.
WORDS = {
    "cuda": r"\b(?:(?:wgmma|tma|mbarrier|fence|warpgroup|named_barrier|bulk|__)\w+|make_barriers|multiply|stage_sums|"
    r"Ring|TensorMap|PRODUCER_REGISTERS|consumer_registers|(?:threadIdx|blockIdx|gridDim))\b",
    "cute": r"\b(?:cutlass|cute|pipeline|warpgroup|warp|mma|ring|producer)\.[\w.]+|\bpartition\b|\bSmemAllocator\b",
    "gluon": r"\b(?:gluon|gl|hopper|mbarrier|tma)\.\w+",
    "triton": r"\b(?:triton|tl)\.\w+|TensorDescriptor",
    "tilelang": r"\b(?:tilelang|T)\.\w+",
    "cutile": r"\bct\.[\w.]+",
    "helion": r"\b(?:helion|hl|torch)\.\w+",
}


def count_lines(name: str) -> tuple[int, int]:
    """Return the lines of code of a language's kernel file and of its host file, without comments and blank lines."""
    files = [worker.find_source(name), worker.FOLDER / f"{name}_host.py"]
    texts = [re.sub(r'(?s)""".*?"""', "", each.read_text()) if each.exists() else "" for each in files]
    mark = "//" if name == "cuda" else "#"
    lines = [[line.strip() for line in text.splitlines()] for text in texts]
    skipped = ("import ", "from ", mark)
    kernel, host = (sum(bool(line) and not line.startswith(skipped) for line in each) for each in lines)
    return kernel, host


def count_words(name: str) -> int:
    """Return the number of different words of the language in its kernel file."""
    return len(set(re.findall(WORDS[name], worker.find_source(name).read_text())))


def name_shape(shape) -> str:
    """Return M × N × K as a person says it."""
    m, n, k = shape
    part = dict(zip(LAYERS, ("q, k, v", "gate, up", "down"))).get((n, k), "layer")
    return f"{m}³" if m == n == k else f"{m} tokens, {part}\n{n} × {k}"


def name_tile(config: dict) -> str:
    """Return rows × columns × depth of a configuration's tile."""
    tile = config.get("tile") or config.get("block_sizes")
    tile = tile or [size for name, size in config.items() if name.lower().startswith("block_")]
    return " × ".join(map(str, tile if len(tile) == 3 else [*tile, 64]))  # CUDA C++ has no other depth


def draw_speed(record: results.Record) -> plots.Picture:
    """Draw the speed of each language at each shape, with the spread, beside cuBLAS."""
    rows = [row for row in record.rows if row["kind"] == "speed" and row.get("ratio")]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    title = "The best of 24 configurations at each shape"
    figure, axes = plots.new_figure(rows, title, record.label(), 0.9 + 0.5 * len(shapes))
    named = {**TITLES, **LIBRARIES}
    for place, name in enumerate(named):
        mine = [row for row in rows if row["language"] == name]
        heights = [len(shapes) - shapes.index(tuple(row["shape"])) + 0.32 - 0.08 * place for row in mine]
        values, spreads = [row["ratio"] for row in mine], [row["spread"] for row in mine]
        mark = "D" if name in LIBRARIES else "o"
        look = {"fmt": mark, "ms": 2.5, "capsize": 2.5, "color": COLOURS[name], "label": named[name]}
        if mine:
            axes.errorbar(values, heights, xerr=spreads, mfc="none" if name == "quack" else None, **look)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(shapes), 0, -1), [name_shape(shape) for shape in shapes], fontsize=7.5)
    axes.set_xlabel("speed × cuBLAS; bars: half the distance of the quartiles", fontsize=7.5)
    axes.grid(axis="x", color="#eeeeee")
    for place in range(1, len(shapes)):
        axes.axhline(place + 0.5, color="#eeeeee", linewidth=0.8)
    axes.legend(fontsize=6.5, frameon=False, ncol=5, loc="lower center", bbox_to_anchor=(0.4, 1))
    said = ["A group of dots for each shape: the speed of each language over cuBLAS."]
    for shape in shapes:
        mine = [f"{row['name']} {row['ratio']:.2f}" for row in rows if tuple(row["shape"]) == shape]
        said.append(f"{name_shape(shape)}: {', '.join(mine)}.".replace("\n", ", "))
    return figure.describe(" ".join(said))


def tabulate_speed(record: results.Record) -> results.Table:
    """Return a folded table: the speed of each language over cuBLAS and its tile, a row for each shape."""
    rows: dict[str, dict] = {}
    for name, title in ({**TITLES, **LIBRARIES}).items():
        for row in record.rows:
            if row["kind"] == "speed" and row["language"] == name and row.get("ratio"):
                shape = name_shape(row["shape"]).replace("\n", ", ")
                tile = f" ({name_tile(row['config'])})" if row["config"] else ""
                rows.setdefault(shape, {"× cuBLAS (tile)": shape})[title] = f"{row['ratio']:.2f}{tile}"
    table = results.table(list(rows.values()), f"the speeds of the picture, with the tile; {record.label()}")
    return dataclasses.replace(table, folded=len(rows))


def draw_tuning(record: results.Record, shape=SQUARE) -> plots.Picture:
    """Draw all 24 configurations of each language at one shape, and how many did not run."""
    rows = [row for row in record.rows if row["kind"] == "tuning" and tuple(row["shape"]) == tuple(shape)]
    rows = [row for row in rows if row["language"] in TITLES]
    title = f"What 24 configurations bring at {name_shape(shape)}: each dot is one of them"
    figure, axes = plots.new_figure(rows, title, record.label(), 2.8)
    said = []
    for place, (name, named) in enumerate(TITLES.items()):
        mine = [row for row in rows if row["language"] == name]
        ratios = sorted(row["ratio"] for row in mine if row.get("ratio"))
        height = len(TITLES) - place
        axes.plot(ratios, [height] * len(ratios), "o", ms=4, alpha=0.5, color=COLOURS[name])
        failed = len(mine) - len(ratios)
        if failed:
            plots.write_note(axes, 1.08, height, f"{failed} did not run")
        if ratios:
            said.append(f"{named} {statistics.median(ratios):.2f} to {ratios[-1]:.2f}")
    axes.set_yticks(range(len(TITLES), 0, -1), TITLES.values(), fontsize=7.5)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 1.35)
    axes.set_xlabel("speed × cuBLAS", fontsize=7.5)
    return figure.describe(f"A line of dots for each language. Median to best: {'; '.join(said)}.")


def tabulate_effort(record: results.Record) -> results.Table:
    """Return a table of what a kernel costs its author: lines, words, seconds, and luck."""
    rows = []
    for name, title in TITLES.items():
        row = find_row(record, "language", name)
        kernel, host = count_lines(name)
        built = row.get("build_s") or []
        tried = [each for each in record.rows if each["kind"] == "tuning" and each["language"] == name]
        ratios = sorted(each["ratio"] for each in tried if each.get("ratio"))
        best = find_row(record, "speed", name, SQUARE).get("ratio")
        rows.append(
            {
                "language": title,
                "lines of the kernel": kernel,
                "lines of the host": host or "in the kernel's",
                "words to know": count_words(name),
                "seconds to import": f"{row['import_s']:.1f}" if row.get("import_s") else None,
                "seconds to compile one": f"{statistics.median(built):.2f}" if built else None,
                "seconds to build all 24": f"{sum(built):.0f}" if built else None,
                "of 24, ran": len(ratios) if tried else None,
                "slowest × cuBLAS": f"{ratios[0]:.2f}" if ratios else None,
                "median × cuBLAS": f"{statistics.median(ratios):.2f}" if ratios else None,
                "best × cuBLAS at 4096³": f"{best:.2f}" if best else None,
            }
        )
    return results.table(rows, record.label())


def tabulate_code(record: results.Record) -> results.Table:
    """Return a table of what the tuned kernels became: threads, registers, memory and instructions."""
    rows = []
    for row in (row for row in record.rows if row["kind"] == "code"):
        counts = row.get("counts", {})
        spills = ", with four warps" if row.get("spills") else ""
        rows.append(
            {
                "language": row["name"] + spills,
                "tile": name_tile(row["config"]),
                "blocks × threads": f"{row['grid'][0] * row['grid'][1]} × {row['block'][0]}"
                if "grid" in row
                else None,
                "registers": row.get("registers"),
                "spilled bytes": row.get("spills"),
                "shared KiB": round(row["smem"] / 1024) if "smem" in row else None,
                "TMA loads": counts.get("UTMALDG", 0),
                "TMA stores": counts.get("UTMASTG", 0),
                "wgmma": counts.get("HGMMA", 0),
            }
        )
    return results.table(rows, f"instructions in the text of the kernel, not executions; {record.label()}")


def say(row: dict) -> str:
    """Return in a few words what a toolchain said about a planted mistake."""
    if row["status"] == "ok":
        return f"nothing: the result is right, {row['first_s']:.1f} s after the call"
    if row["status"] == "wrong":
        return "silent: a wrong result"
    text = re.sub(r"\x1b\[[0-9;]*m|/\S*/", "", row["reason"]).strip()
    kind, _, first = text.partition("\n")[0].partition(": ")
    if kind == "CompilationError":  # its last line says what is wrong, after the whole kernel
        first = text.splitlines()[-1]
    return textwrap.shorten(f"{kind}: {first.strip() or text.partition(': ')[2]}", 150, placeholder=" …")


def tabulate_mistakes(record: results.Record) -> results.Table:
    """Return a table of what each toolchain says about each planted mistake."""
    rows = []
    for name, title in TITLES.items():
        found = {row["mistake"]: say(row) for row in record.rows if row["language"] == name}
        rows.append({"language": title, **{each: found.get(each) for each in mistakes.MISTAKES}})
    return results.table(rows, record.label())
