"""Draw which scale belongs to which block, and what the tensor core and the CUDA cores do at the same time."""

from __future__ import annotations

from tilelab import plots
from tilelab.diagrams import box, canvas, lanes, lighten, write

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
GROUPS = (BLUE, ORANGE, GREEN)  # the colours of warp groups

# The clocks that an SM needs for a block of 64 x 128 sums over 128 columns of K. It makes 4,096 fp8 products per clock.
# Then each sum needs one float32 multiply-add, at a rate of 128 per clock.
PRODUCT, ADDING = 64 * 128 * 128 // 4096, 64 * 128 // 128


def scales_picture(blocks: int = 5) -> plots.Picture:
    """Draw a tile of C, the blocks of A and B that it is the product of, and their scales."""
    figure, axes = canvas("The tensor core sums 128 of K, float32 adds that to C, scaled",
                          "fp8, scales of 1 × 128 (A) and 128 × 128 (B); a tile of 128 × 128", 7.2, 3.0)
    side, left, top, chosen = 0.62, 0.95, 2.3, 1

    def operand(y, tone, name, each_row):
        for block in range(blocks):
            x = left + block * (side + 0.14)
            box(axes, x, y, side, side, lighten(tone, 0.8 if block == chosen else 0.25), "black", linewidth=0.5)
            if each_row:  # one scale per row
                for row in range(8):
                    box(axes, x - 0.1, y + row * side / 8 + 0.012, 0.06, side / 8 - 0.024, tone)
            else:
                box(axes, x - 0.1, y + side / 2 - 0.05, 0.06, 0.1, tone)
        write(axes, left - 0.18, y + side / 2 + 0.12, name, "right", 8, fontweight="bold")
        write(axes, left - 0.18, y + side / 2 - 0.1, "128 scales\nper block" if each_row else "one scale\nper block",
              "right", 6)

    operand(top - side, BLUE, "A", True)
    operand(top - 2 * side - 0.42, ORANGE, "B", False)
    middle = left + chosen * (side + 0.14) + side / 2
    write(axes, left + 0.02, top + 0.09, "128 of K", "left", 6.5)
    write(axes, middle, top - side - 0.21, "×", size=9, fontweight="bold")
    right = left + blocks * (side + 0.14) + 0.25
    for y, tone, title, below in (
            (top - side, lighten(GREEN, 0.35), "scratch", "tensor core:\none block of 128,\nno scales"),
            (top - 2 * side - 0.42, GREEN, "C", "CUDA cores, float32:\nC += scratch ·\nscale A · scale B")):
        box(axes, right, y, side, side, tone, "black", linewidth=0.5)
        write(axes, right + side / 2, y + side / 2, title, size=7.5, fontweight="bold")
        write(axes, right + side + 0.1, y + side / 2, below, "left", 6.5)
    axes.annotate("", (right + side / 2, top - side - 0.4), (right + side / 2, top - side - 0.02),
                  arrowprops={"arrowstyle": "->", "linewidth": 1})
    write(axes, left - 0.1, 0.3, "With one scale per matrix there is no scratch: the tensor core goes on adding to C.",
          "left", 7)
    return figure


def schedule(consumers: int, scratch: int, blocks: int = 6) -> tuple[list[tuple[str, int, float, float]], float]:
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
        group = min((g for g in range(consumers) if len(added[g]) < blocks),
                    key=lambda g: (max(ready(g), free["tensor core"]), len(added[g])))
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
    cases = (("one group, one scratch", 1, 1, 2 * blocks), ("one group, two scratches", 1, 2, 2 * blocks),
             ("two groups, a scratch each", 2, 1, blocks))
    schedules = {name: schedule(*numbers) for name, *numbers in cases}
    longest = max(end for spans, _ in schedules.values() for *_, end in spans)
    share = schedule(1, 1, 1000)[1]
    figure, axes = canvas(f"Adding costs {1 - share:.0%} of the tensor core's time if nothing else multiplies",
                          "a model: eight blocks of 64 × 128 × 128, "
                          f"{PRODUCT} clocks to multiply, {ADDING} to add; one colour per group", 7.2, 2.8)
    scale, left = 4.4 / longest, 2.5
    for line, (name, (spans, _)) in enumerate(schedules.items()):
        lanes(axes, 2.2 - 0.68 * line, left, scale, longest, name, spans, GROUPS)
    return figure
