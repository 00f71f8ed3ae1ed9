"""A panel to sweep kernels in a notebook or a lecture hall: choose a kernel, a shape and a target, then press Run.

    panel.Panel(ch14.gemm.sweep.TUNABLE_KERNEL, preset="grid of 96")

Recorded rows are shown before anything has run. `widget` holds the Panel, `rows` what it knows, `views` its texts and
plots, `style.css` its looks, and `snapshot` what stays in a saved notebook when the widgets are gone.
"""

from tilelab.panel.widget import Panel

__all__ = ["Panel"]
