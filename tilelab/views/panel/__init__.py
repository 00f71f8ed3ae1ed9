"""A panel to sweep kernels in a notebook or a lecture hall: choose a kernel, a shape and a target, then press Run.

    panel.Panel(ch14.gemm.lesson.sweep.GemmSpace, preset="grid of 96")

Recorded rows are shown before anything has run. `widget` holds the Panel, `rows` what it knows, `sentences` what it
says, `words` what the words of a name mean, and `snapshot` what stays in a saved notebook. The view
`tilelab/views/panel.js` draws it in the browser.
"""

from tilelab.views.panel.widget import Panel

__all__ = ["Panel"]
