"""Pictures for `notebooks/00_start.ipynb`: the machine, a tile and what it needs, and waiting or overlap."""

from __future__ import annotations

import functools

from ch07.start.lesson.machine import Machine, bytes_per_operation
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write
from tilelab.runtime import device

PALE = "#eeeeee"
TILES = ((32, 32), (64, 64), (128, 128), (128, 256), (256, 256))  # of C: rows, columns
BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))


def _arrow(axes, start, end, tone=plots.GREY, **style) -> None:
    look = {"arrowstyle": "-|>", "color": tone, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=look | style)


def _sources(*labels: str) -> str:
    return "; ".join(filter(None, labels))


def draw_machine(machine: Machine) -> plots.Picture:
    """Draw the way of a tile from DRAM to the tensor core, with the figures that have a record on the edges."""
    width, height = plots.SIZE[0], 4.25
    figure, axes = canvas(
        f"The way of a tile to the tensor core ({machine.name})",
        _sources(f"copy and product: {machine.label}", machine.gemm_label),
        width,
        height,
    )
    limits = device.target_limits(machine.target)
    draw, label = functools.partial(box, axes), functools.partial(write, axes)
    draw(0.15, 3.55, 5.2, 0.32, PALE)
    label(2.75, 3.71, f"DRAM: {machine.memory_gib:.0f} GiB, outside of the chip", size=7.5)
    draw(0.15, 2.82, 5.2, 0.32, lighten(GREEN, 0.25))
    label(2.75, 2.98, f"L2 cache: {machine.l2_mib:.0f} MiB, for all {machine.sms} SMs", size=7.5)
    _arrow(axes, (1.0, 3.55), (1.0, 3.14))
    _arrow(axes, (0.85, 3.14), (0.85, 3.55))
    sheet = f" (datasheet: {machine.peak_tbps:.1f})" if machine.peak_tbps else ""
    label(1.12, 3.345, f"{machine.copy_tbps:.2f} TB/s: a copy, both directions{sheet}", "left")

    draw(0.15, 0.3, 5.2, 2.02, "white", "black", linewidth=0.9)
    label(0.4, 2.2, f"one of {machine.sms} SMs", "left", 7.5, fontweight="bold")
    draw(1.55, 1.5, 0.95, 0.45, lighten(BLUE), "white")
    label(2.02, 1.725, "TMA:\ncopy engine", linespacing=1.2)
    draw(2.95, 1.22, 0.95, 0.73, lighten(ORANGE), "white")
    label(3.425, 1.585, f"shared\nmemory\n{machine.smem_kib:.0f} KiB", linespacing=1.25)
    draw(4.3, 1.5, 0.95, 0.45, BLUE)
    label(4.775, 1.725, "tensor core", color="white")
    draw(0.3, 0.52, 2.2, 0.42, lighten(GREEN), "white")
    label(
        1.4,
        0.73,
        f"up to {limits.threads_per_sm:,} threads in warps of 32,\n"
        f"registers: {limits.regs_per_sm // 256} KiB",
        linespacing=1.25,
    )
    draw(4.43, 0.52, 0.87, 0.42, "white", plots.GREY, linestyle="--")
    label(4.865, 0.73, "tensor memory\n(Blackwell)", linespacing=1.25, color=plots.GREY)

    _arrow(axes, (2.02, 2.82), (2.02, 1.95), BLUE)
    _arrow(axes, (1.8, 1.95), (1.8, 2.82), ORANGE)
    label(1.73, 2.12, "stores", "right", color=ORANGE)
    _arrow(axes, (2.5, 1.79), (2.95, 1.79), BLUE)
    _arrow(axes, (2.95, 1.66), (2.5, 1.66), ORANGE)
    _arrow(axes, (3.9, 1.725), (4.3, 1.725), BLUE)
    if machine.l2_tbps:
        label(2.14, 2.57, f"at least {machine.l2_tbps:.1f} TB/s to all SMs in a GEMM", "left")
    if machine.load_cycles:
        said = f"32 KiB: {machine.load_cycles:,.0f} cycles\nfrom issue to arrival"
        label(2.6, 2.12, said, "left", linespacing=1.2)
    _arrow(axes, (1.4, 2.82), (1.4, 0.94))
    _arrow(axes, (0.36, 0.94), (0.36, 2.82), ORANGE)
    label(1.33, 1.45, "plain\nloads", "right", linespacing=1.2)
    label(0.43, 1.45, "plain\nstores", "left", linespacing=1.2, color=ORANGE)
    _arrow(axes, (1.9, 0.94), (1.9, 1.5), linestyle="--")
    label(1.97, 1.2, "requests", "left")
    _arrow(axes, (2.5, 0.73), (3.3, 1.22), ORANGE, connectionstyle="arc3,rad=0.15")
    _arrow(axes, (4.865, 1.5), (4.865, 0.94), linestyle="--")
    _arrow(axes, (4.38, 1.5), (2.5, 0.6), ORANGE, connectionstyle="angle,angleA=-90,angleB=0,rad=6")
    label(3.4, 0.46, "sums, on Hopper", color=plots.GREY)
    sheet = f"\n(datasheet: {machine.peak_tflops:.0f})" if machine.peak_tflops else ""
    label(5.27, 2.13, f"{machine.tflops:.0f} TFLOP/s bf16, all SMs{sheet}", "right", linespacing=1.2)
    return figure.describe(
        f"DRAM ({machine.memory_gib:.0f} GiB) above the L2 cache ({machine.l2_mib:.0f} MiB): a copy moves "
        f"{machine.copy_tbps:.2f} TB/s. Below, one of {machine.sms} SMs. Threads request a tile from TMA, the copy "
        f"engine, which brings it from L2 to shared memory ({machine.smem_kib:.0f} KiB). There the tensor core reads "
        f"it ({machine.tflops:.0f} TFLOP/s for all SMs). Plain loads go from L2 to registers. Sums go to registers on "
        "Hopper and to tensor memory on Blackwell. Results take two ways back to L2: plain stores from the registers, "
        "or through shared memory, from where TMA stores them."
    )


def draw_need(machine: Machine, tiles=TILES) -> plots.Picture:
    """Draw the bytes that must arrive per second for tiles of C, beside what DRAM and L2 deliver."""
    names = [f"{rows} × {columns}" for rows, columns in tiles]
    need = [bytes_per_operation(*tile) * machine.tflops for tile in tiles]

    def name_served(rate: float) -> str:
        served = [name for name, tbps in zip(names, need) if tbps <= rate]
        return " and ".join(served) or "none of these tiles"

    title = f"DRAM alone is fast enough for {name_served(machine.copy_tbps)}"
    title += f", and L2 is fast enough for {name_served(machine.l2_tbps)}" if machine.l2_tbps else ""
    of_l2 = f"L2: {machine.gemm_label}" if machine.l2_tbps else ""
    source = _sources(f"for {machine.tflops:.0f} TFLOP/s, {machine.label}", of_l2)
    figure, axes = plots.new_figure(tiles, title, source, 2.75)
    axes.bar(range(len(tiles)), need, 0.6, color=lighten(BLUE, 0.6))
    lines = (
        (machine.copy_tbps, "DRAM, in a copy:", ORANGE),
        (machine.l2_tbps, "L2, in a GEMM: at least", GREEN),
    )
    for value, text, tone in lines:
        if value:
            axes.axhline(value, color=tone, linewidth=1.2, label=f"{text} {value:.1f} TB/s")
    axes.set_xticks(range(len(tiles)), [f"{name}\n{tbps:.1f} TB/s" for name, tbps in zip(names, need)])
    axes.set_xlabel("tile of C, and what it needs", fontsize=8)
    axes.set_ylabel("TB/s that all SMs need", fontsize=8)
    axes.legend(fontsize=7.5, frameon=False, loc="upper right")
    bars = ", ".join(f"{name}: {tbps:.1f}" for name, tbps in zip(names, need))
    return figure.describe(
        f"{title}. The bars are the TB/s that all SMs need for a tile of C ({bars}), and the lines "
        "are the TB/s that DRAM and L2 deliver."
    )


def draw_overlap(machine: Machine, buffers: int = 3, steps: int = 6) -> plots.Picture:
    """Draw when loads and products run with one buffer and with several, at the recorded lengths."""
    load, product = machine.load_cycles or 1200, machine.product_cycles or 800
    origin = f"medians of {machine.gemm_label}" if machine.load_cycles else "not measured"
    title = f"With {buffers} buffers the tensor core waits less than with one buffer"
    source = f"a model: a load takes {load:,.0f} cycles, a product {product:,.0f}; {origin}"
    figure, axes = canvas(title, source, plots.SIZE[0], 2.05 + 0.24 * buffers)
    schedules = [_schedule(count, steps, load, product) for count in (1, buffers)]
    longest = max(end for spans in schedules for *_, end in spans)
    scale = (plots.SIZE[0] - 1.2) / longest
    findings = []
    for top, count, spans in zip((1.57 + 0.24 * buffers, 0.68 + 0.24 * buffers), (1, buffers), schedules):
        busy = steps * product / spans[-1][2]
        cycles = f"{steps} steps in {spans[-1][2]:,.0f} cycles"
        findings.append(
            f"{count} buffer{'s' * (count > 1)}: {cycles}, in {busy:.0%} of which the tensor core works"
        )
        write(axes, 0.05, top + 0.1, findings[-1], "left", 7.5, fontweight="bold")
        units = list(dict.fromkeys(unit for unit, *_ in spans))
        for lane, unit in enumerate(units):
            write(axes, 1.0, top - 0.12 - 0.24 * lane, unit, "right")
            box(axes, 1.07, top - 0.21 - 0.24 * lane, spans[-1][2] * scale, 0.19, "#f2f2f2")
        for unit, begin, end in spans:
            x, y = 1.07 + begin * scale, top - 0.21 - 0.24 * units.index(unit)
            tone = lighten(ORANGE, 0.75) if unit == "tensor core" else lighten(BLUE, 0.35)
            box(axes, x, y, (end - begin) * scale, 0.19, tone, "white", linewidth=0.6)
    return figure.describe(f"{title}. {'. '.join(findings)}.")


def _schedule(buffers: int, steps: int, load: float, product: float) -> list[tuple[str, float, float]]:
    """Return spans (unit, begin, end): a load starts when its buffer is free, a product when its load ends."""
    loads, products, free = [], [], 0.0
    for step in range(steps):
        begin = products[step - buffers][2] if step >= buffers else 0.0
        loads.append((f"buffer {step % buffers}: load", begin, begin + load))
        free = max(free, begin + load)
        products.append(("tensor core", free, free + product))
        free += product
    return loads + products
