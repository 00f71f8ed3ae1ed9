"""Draw which scale belongs to which block, and what the tensor core and the CUDA cores do at the same time."""

from __future__ import annotations

from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lanes, lighten, write

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
GROUPS = (BLUE, ORANGE, GREEN)  # the colours of warp groups

# The clocks that an SM needs for a block of 64 x 128 sums over 128 columns of K. It makes 4,096 fp8 products per clock.
# Then each sum needs one float32 multiply-add, at a rate of 128 per clock.
PRODUCT, ADDING = 64 * 128 * 128 // 4096, 64 * 128 // 128


def scales_picture(blocks: int = 5) -> plots.Picture:
    """Draw a tile of C, the blocks of A and B that it is the product of, and their scales."""
    figure, axes = canvas(
        "Tensor cores multiply blocks of 128 along K; CUDA cores scale and add",
        "fp8, scales of 1 × 128 (A) and 128 × 128 (B); a tile of 128 × 128",
        7.2,
        3.0,
    )
    side, left, top, chosen = 0.62, 0.95, 2.3, 1

    def operand(y, tone, name, each_row):
        for block in range(blocks):
            x = left + block * (side + 0.14)
            box(
                axes,
                x,
                y,
                side,
                side,
                lighten(tone, 0.8 if block == chosen else 0.25),
                "black",
                linewidth=0.5,
            )
            if each_row:  # one scale per row
                for row in range(8):
                    box(axes, x - 0.1, y + row * side / 8 + 0.012, 0.06, side / 8 - 0.024, tone)
            else:
                box(axes, x - 0.1, y + side / 2 - 0.05, 0.06, 0.1, tone)
        write(axes, left - 0.18, y + side / 2 + 0.12, name, "right", 8, fontweight="bold")
        write(
            axes,
            left - 0.18,
            y + side / 2 - 0.1,
            "128 scales\nper block" if each_row else "one scale\nper block",
            "right",
            6,
        )

    operand(top - side, BLUE, "A", True)
    operand(top - 2 * side - 0.42, ORANGE, "B", False)
    middle = left + chosen * (side + 0.14) + side / 2
    write(axes, left + 0.02, top + 0.09, "128 of K", "left", 6.5)
    write(axes, middle, top - side - 0.21, "×", size=9, fontweight="bold")
    right = left + blocks * (side + 0.14) + 0.25
    for y, tone, title, below in (
        (top - side, lighten(GREEN, 0.35), "scratch", "tensor core:\none block of 128,\nno scales"),
        (top - 2 * side - 0.42, GREEN, "C", "CUDA cores, float32:\nC += scratch ·\nscale A · scale B"),
    ):
        box(axes, right, y, side, side, tone, "black", linewidth=0.5)
        write(axes, right + side / 2, y + side / 2, title, size=7.5, fontweight="bold")
        write(axes, right + side + 0.1, y + side / 2, below, "left", 6.5)
    axes.annotate(
        "",
        (right + side / 2, top - side - 0.4),
        (right + side / 2, top - side - 0.02),
        arrowprops={"arrowstyle": "->", "linewidth": 1},
    )
    write(
        axes,
        left - 0.1,
        0.3,
        "With one scale per matrix there is no scratch: the tensor core goes on adding to C.",
        "left",
        7,
    )
    return figure.describe(
        "A and B are cut into blocks of 128 along K. Each block of A has 128 scales, and each of B "
        "has one. The product of two blocks goes to a scratch, and scratch times scales to C."
    )


def schedule(
    consumers: int, scratch: int, blocks: int = 6
) -> tuple[list[tuple[str, int, float, float]], float]:
    """Return who is busy when in a model of one SM, and the share of time in which the tensor core is busy.

    The first is a list of (unit, consumer, begin, end) in clocks. Each consumer has 64 rows and `scratch` accumulators.
    The share counts from the first product to the last. Loads and latencies take no time in the model.
    """
    free = {"tensor core": 0.0, "CUDA cores": 0.0}
    added: list[list[float]] = [[] for _ in range(consumers)]  # the times at which additions end
    spans = []

    def ready(group):  # a product needs a scratch whose sums have been added
        done = len(added[group]) - scratch
        return added[group][done] if done >= 0 else 0.0

    for _ in range(blocks * consumers):
        group = min(
            (g for g in range(consumers) if len(added[g]) < blocks),
            key=lambda g: (max(ready(g), free["tensor core"]), len(added[g])),
        )
        begin = max(free["tensor core"], ready(group))
        end = free["tensor core"] = begin + PRODUCT
        spans.append(("tensor core", group, begin, end))
        begin = max(free["CUDA cores"], end)
        free["CUDA cores"] = begin + ADDING
        spans.append(("CUDA cores", group, begin, begin + ADDING))
        added[group].append(begin + ADDING)
    busy = consumers * blocks * PRODUCT / max(end for unit, _, _, end in spans if unit == "tensor core")
    return spans, busy


def schedule_picture(blocks: int = 4) -> plots.Picture:
    """Draw `schedule` for one consumer, for one with two scratch accumulators, and for two consumers."""
    cases = (
        ("one group, one scratch", 1, 1, 2 * blocks),
        ("one group, two scratches", 1, 2, 2 * blocks),
        ("two groups, a scratch each", 2, 1, blocks),
    )
    schedules = {name: schedule(*numbers) for name, *numbers in cases}
    longest = max(end for spans, _ in schedules.values() for *_, end in spans)
    share = schedule(1, 1, 1000)[1]
    figure, axes = canvas(
        f"Adding costs {1 - share:.0%} of the tensor core's time if nothing else multiplies",
        "a model: eight blocks of 64 × 128 × 128, "
        f"{PRODUCT} clocks to multiply, {ADDING} to add; one colour per group",
        7.2,
        2.8,
    )
    scale, left = 4.4 / longest, 2.5
    for line, (name, (spans, _)) in enumerate(schedules.items()):
        lanes(axes, 2.2 - 0.68 * line, left, scale, longest, name, spans, GROUPS)
    return figure.describe(
        "Three timelines of tensor core and CUDA cores. With one group and one scratch they take "
        "turns. With two scratches, or two groups, the tensor core multiplies during the additions."
    )


def draw_sums(record) -> plots.Picture:
    """Draw the errors of one sum over K and of a sum that is promoted every 128 columns, over K."""
    figure = plots.new_figure(
        [record],
        "A sum that stays in the tensor core loses digits as K grows",
        f"elements from 0 to 1; {record.label()}",
        2.7,
    )[0]
    axes = figure.axes[0]
    sizes = [row["K"] for row in record.rows]
    for name, tone in (("one sum", ORANGE), ("promoted", BLUE)):
        axes.plot(sizes, [max(row[name], 1e-9) for row in record.rows], "o-", color=tone, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("K", fontsize=8)
    axes.set_ylabel("largest error / largest element", fontsize=8)
    axes.axhline(2**-9, color="#999999", linewidth=0.8, linestyle="--")
    axes.text(sizes[0], 2**-9 * 1.1, "half a step of bf16", fontsize=6.5, va="bottom")
    axes.legend(fontsize=7)
    ends = {name: [record.rows[index][name] for index in (0, -1)] for name in ("one sum", "promoted")}
    (one, longest), (first, last) = ends["one sum"], ends["promoted"]
    return figure.describe(
        f"The largest error over the largest element, for K from {sizes[0]:,} to {sizes[-1]:,}. The error of one sum "
        f"in the tensor core goes from {one:.2g} to {longest:.2g}. The error of a sum that is promoted to float32 "
        f"every 128 columns goes from {first:.2g} to {last:.2g}. A dashed line marks half a step of bf16, {2**-9:.2g}."
    )


def draw_split(tiles: int = 4, splits: int = 3, places: int = 12) -> plots.Picture:
    """Draw the programs of a product of few tiles, whole and split along K, on `places` places of the GPU."""
    figure, axes = canvas(
        "Few tiles leave most SMs idle; split along K, all have work",
        f"{tiles} tiles of C, room for {places} programs; the last program of a tile adds its parts",
        7.2,
        2.9,
    )
    tones = (BLUE, ORANGE, GREEN, "#882255")
    for side, (name, parts) in enumerate(
        (("one program per tile", 1), (f"{splits} programs per tile", splits))
    ):
        left, width = 0.9 + 3.3 * side, 2.1
        write(axes, left, 2.42, name, "left", 8, fontweight="bold")
        for place in range(places):
            y = 2.1 - 0.155 * place
            box(axes, left, y, 2.2, 0.12, "#f2f2f2")
            if place >= tiles * parts:
                continue
            tile, share = place // parts, width / parts
            box(axes, left, y, share, 0.12, tones[tile % 4], "white", linewidth=0.4)
            if parts > 1 and place % parts == parts - 1:
                box(axes, left + share, y, 0.18, 0.12, "black")
        write(axes, left, 0.27, "time", "left", 6.5)
        axes.annotate(
            "", (left + 1.0, 0.27), (left + 0.3, 0.27), arrowprops={"arrowstyle": "->", "linewidth": 0.8}
        )
    write(axes, 0.82, 1.25, "programs", "right", 7)
    write(axes, 5.25, 0.27, "one colour per tile; black: add the parts", "left", 6.5)
    return figure.describe(
        f"Left, {tiles} programs work for the whole time and {places - tiles} places are idle. "
        f"Right, {tiles * splits} programs work for a third of the time. The last program of each "
        "tile then adds the parts."
    )


def draw_epilogue() -> plots.Picture:
    """Draw the bytes per element of C that move through memory, in passes and fused."""
    figure, axes = canvas(
        "In passes, C crosses memory five times; fused, it is written once",
        "bytes per element of C, from the product's registers to MXFP8 in memory",
        7.2,
        2.2,
    )

    def stage(x, y, text, tone):
        box(axes, x, y, 1.15, 0.36, tone, "black", text, linewidth=0.5)

    def move(x, y, text):
        axes.annotate("", (x + 0.75, y), (x, y), arrowprops={"arrowstyle": "->", "linewidth": 1})
        write(axes, x + 0.37, y + 0.13, text, size=6.5)

    pale = lighten(BLUE, 0.25)
    for x, text in ((0.15, "product"), (3.0, "bias, SiLU"), (5.85, "quantise")):
        stage(x, 1.35, text, pale)
    for x in (1.3, 4.15):
        move(x, 1.53, "write 2")
        move(x + 0.9, 1.53, "read 2")
    write(axes, 6.42, 1.18, "write 1 + 1/32", size=6.5)
    stage(0.15, 0.45, "product", pale)
    stage(1.3, 0.45, "bias, SiLU", lighten(GREEN, 0.3))
    stage(2.45, 0.45, "quantise", lighten(GREEN, 0.3))
    move(3.65, 0.63, "write 1 + 1/32")
    write(axes, 4.55, 0.63, "bias, SiLU and quantising work on registers", "left", 7)
    return figure.describe(
        "Upper row: product, bias with SiLU, and quantiser are three kernels. Two bytes per element "
        "are written and read between them, twice. Lower row: one kernel does all three in "
        "registers and writes one byte and a thirty-second per element."
    )


def draw_decoding() -> plots.Picture:
    """Draw the bits of an e2m1 code moved into a float32."""
    figure, axes = canvas(
        "An e2m1 code becomes float32 by a shift and a product",
        "code 1101 is -3: the sign moves to bit 31, the other three bits to bits 24 to 22",
        7.2,
        1.9,
    )
    cell, left = 0.19, 0.35
    write(axes, left, 1.42, "code", "left", 7.5, fontweight="bold")
    for place, (bit, tone) in enumerate(zip("1101", (ORANGE, BLUE, BLUE, GREEN))):
        box(
            axes,
            left + 0.5 + place * cell,
            1.33,
            cell,
            0.19,
            lighten(tone, 0.45),
            "black",
            bit,
            linewidth=0.5,
        )
    write(axes, left + 1.4, 1.42, "s e e m", "left", 7)
    bits = "1" + "0" * 6 + "10" + "1" + "0" * 22
    for place, bit in enumerate(bits):
        tone = ORANGE if place == 0 else BLUE if place < 9 else GREEN
        box(axes, left + place * cell, 0.75, cell, 0.19, lighten(tone, 0.45), "black", bit, linewidth=0.4)
    for place, text in ((0.5, "31"), (7.5, "24"), (8.5, "23"), (9.5, "22")):
        write(axes, left + place * cell, 1.03, text, size=5.5)
    write(
        axes,
        left,
        0.5,
        "sign, eight exponent bits, 23 mantissa bits: the value is 3 · 2⁻¹²⁶, negative. Times "
        "2¹²⁶ · scale it is the number.",
        "left",
        7,
    )
    write(
        axes,
        left,
        0.27,
        "The code 0001, which is 0.5, becomes a subnormal number of float32, and the same product "
        "is right for it, too.",
        "left",
        7,
    )
    return figure.describe(
        "The four bits 1101 of a code: sign, two exponent bits, one mantissa bit. Below, a float32: "
        "the sign is at bit 31, the exponent bits are at 24 and 23, the mantissa bit is at 22."
    )


def draw_blackwell() -> plots.Picture:
    """Draw the way of a tile and of its scales through the memories of an SM of Blackwell."""
    figure, axes = canvas(
        "Scales travel with the tiles, and then into tensor memory",
        "one CTA on sm_100a; the sums never pass through registers until the epilogue",
        7.2,
        3.0,
    )
    pale, pink = lighten(BLUE, 0.3), "#e7b7d2"
    box(axes, 0.1, 0.6, 1.0, 1.7, "#f2f2f2", "black", linewidth=0.6)
    write(axes, 0.6, 2.13, "global", size=7, fontweight="bold")
    for y, text, tone in ((1.55, "A, B", pale), (1.0, "scales", pink), (0.66, "C", lighten(GREEN, 0.4))):
        box(axes, 0.2, y, 0.8, 0.27, tone, "black", text, linewidth=0.4)
    box(axes, 2.1, 0.6, 1.5, 1.7, "#f2f2f2", "black", linewidth=0.6)
    write(axes, 2.85, 2.13, "shared memory", size=7, fontweight="bold")
    for stage in range(3):
        box(axes, 2.18 + 0.47 * stage, 1.55, 0.42, 0.27, pale, "black", f"A B {stage}", linewidth=0.4)
        box(axes, 2.18 + 0.47 * stage, 1.0, 0.42, 0.27, pink, "black", linewidth=0.4)
    box(axes, 2.18, 0.66, 1.36, 0.27, lighten(GREEN, 0.4), "black", "stages of C", linewidth=0.4)
    box(axes, 5.2, 0.6, 1.9, 1.7, "#f2f2f2", "black", linewidth=0.6)
    write(axes, 6.15, 2.13, "tensor memory", size=7, fontweight="bold")
    box(axes, 5.28, 1.0, 0.5, 0.27, pink, "black", "scales", linewidth=0.4)
    box(axes, 5.9, 1.0, 1.1, 0.82, lighten(GREEN, 0.4), "black", "accumulator", linewidth=0.4)
    box(axes, 3.95, 1.55, 0.95, 0.27, lighten(ORANGE, 0.5), "black", "tensor core", linewidth=0.4)
    box(axes, 3.95, 0.66, 0.95, 0.27, "white", "black", "registers", linewidth=0.4)

    def arrow(x, y, to_x, to_y, text="", above=0.1, right=0.0):
        axes.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "->", "linewidth": 1})
        write(axes, (x + to_x) / 2 + right, (y + to_y) / 2 + above, text, size=6)

    arrow(1.0, 1.68, 2.16, 1.68, "TMA")
    arrow(1.0, 1.13, 2.16, 1.13, "TMA")
    arrow(3.55, 1.13, 5.27, 1.13, "tcgen05.cp")
    arrow(3.55, 1.68, 3.93, 1.68)
    arrow(5.27, 1.24, 4.7, 1.53)
    arrow(4.92, 1.68, 5.88, 1.68, "tcgen05.mma", right=0.15)
    arrow(6.3, 0.98, 4.92, 0.75, "tcgen05.ld", -0.13)
    arrow(3.93, 0.79, 3.56, 0.79)
    arrow(2.16, 0.79, 1.02, 0.79, "TMA")
    return figure.describe(
        "Tiles of A and B and their scales go by TMA from global to shared memory. The instruction "
        "tcgen05.cp copies the scales to tensor memory. The tensor core reads A and B from shared "
        "memory and the scales from tensor memory, and adds to an accumulator in tensor memory. "
        "From there C goes through registers and stages in shared memory back to global memory."
    )


def draw_in_flight(rows) -> plots.Picture:
    """Draw the latency that the stages of each plan hide, at the tensor core's rate and at that of DRAM."""
    figure, axes = plots.new_figure(
        rows,
        "How much latency the stages hide, if the tensor core runs at full rate",
        "datasheet rates of a B200; latency fitted to a sweep on an H200",
        2.4,
    )
    names = [f"{row['test']}, {row['plan']}" for row in rows]
    axes.barh(
        names,
        [row["hidden us"] for row in rows],
        color=[BLUE if row["plan"] == "greedy" else ORANGE for row in rows],
    )
    axes.axvline(rows[0]["latency us"], color="black", linestyle="--", linewidth=1)
    axes.text(rows[0]["latency us"], -0.75, "latency of a load", fontsize=6.5, ha="right")
    axes.invert_yaxis()
    axes.set_xlabel("microseconds hidden by the stages in flight", fontsize=8)
    axes.tick_params(labelsize=7)
    bars = "; ".join(f"{name}: {row['hidden us']:.2f}" for name, row in zip(names, rows))
    return figure.describe(
        f"Bars of the microseconds that the stages in flight hide: {bars}. A dashed line marks the "
        f"latency of a load, {rows[0]['latency us']:g} µs."
    )
