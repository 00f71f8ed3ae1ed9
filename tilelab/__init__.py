"""The bench that the chapters share, in rooms.

Start with `runtime`: what an operator needs when it runs, the only room that the product half of a topic imports, with
the CUDA headers in `include`. The other rooms serve the course: `measure` times and checks, `sweeps` searches
configurations, `records` keeps results, `cells` runs kernels of notebook cells, `emulator` runs them without a GPU,
`pictures` and `views` show, and `course` holds the commands.
"""

import pathlib

ROOT = pathlib.Path(__file__).parents[1]  # the repository
