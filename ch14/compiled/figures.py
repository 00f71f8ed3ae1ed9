"""The picture of the notebook `ch14_compiled`: the candidates of each mode of torch.compile."""

from __future__ import annotations

from matplotlib.patches import Rectangle

from tilelab import plots

# Each candidate, how it loads its tiles, and its colour. OFFERED lists which of them a mode lets Inductor time.
CANDIDATES = (("library kernel", "closed: count what\nit executes", "cuBLAS"),
              ("Triton, pointers", "threads\ncopy tiles", "conservative"),
              ("Triton, descriptors", "the copy engine\nmoves tiles", "best"))
OFFERED = (("eager, default", (1, 0, 0)), ("max-autotune", (1, 1, 0)), ("max-autotune, TMA flag set", (1, 1, 1)),
           ("either, below 68 SMs", (1, 0, 0)), ("attention: SDPA, any mode", (1, 0, 0)),
           ("attention: flex", (0, 1, 0)), ("attention: flex, USE_TMA", (0, 0, 1)))


def candidates_picture() -> plots.Picture:
    """Draw modes by candidates: a filled cell is a candidate that the mode may choose, a white one is not offered."""
    figure, axes = plots.new_figure(OFFERED, "A mode decides who may compete; the clock decides who wins", "",
                                   height=3.0)
    for column, (name, how, tone) in enumerate(CANDIDATES):
        axes.text(column + 0.48, len(OFFERED) + 0.95, name, ha="center", fontsize=8, fontweight="bold")
        axes.text(column + 0.48, len(OFFERED) + 0.08, how, ha="center", fontsize=7, linespacing=1.1)
        for row, (_, offered) in enumerate(OFFERED):
            y = len(OFFERED) - 1 - row
            face = plots.colour(tone) if offered[column] else "white"
            axes.add_patch(Rectangle((column, y), 0.96, 0.88, facecolor=face, edgecolor=plots.GREY, linewidth=0.6))
    axes.set(xlim=(0, len(CANDIDATES)), ylim=(-0.1, len(OFFERED) + 1.5), xticks=[])
    axes.set_yticks([len(OFFERED) - 1 - row + 0.44 for row in range(len(OFFERED))], [name for name, _ in OFFERED],
                    fontsize=7.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure
