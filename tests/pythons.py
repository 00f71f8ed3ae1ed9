"""Run Python in a process of its own, as a reader of the course would."""

import subprocess
import sys

from tilelab import ROOT
from tilelab.course import notebook


def run_python(*arguments, limit_s=300, **env):
    """Return the end of a process with these arguments and variables; it can import the course."""
    options = {"env": notebook.child_env(**env), "cwd": ROOT, "text": True, "capture_output": True}
    return subprocess.run([sys.executable, *arguments], check=False, timeout=limit_s, **options)
