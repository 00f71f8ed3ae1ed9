"""Run scripts in copies of a process that has imported torch, Triton and what else they begin with.

A process of its own for each script would import all of it anew, which takes longer than most scripts.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from tilelab import ROOT
from tilelab.course import notebook

SERVER = """
import gc, json, os, sys, traceback, torch, triton
{begin}
gc.freeze()
for line in sys.stdin:
    script, *files = json.loads(line)
    if not (child := os.fork()):
        for stream, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
        try:
            exec(compile(script, "script", "exec"), globals())
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class ScriptServer:
    """A process that runs the lines `begin`, and then each script in a copy of itself. It ends with this process."""

    def __init__(self, begin: str = "", **env: str):
        env = notebook.child_env(TRITON_INTERPRET="0", **env)
        env["PYTHONPATH"] += f":{ROOT / 'tests'}"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", SERVER.format(begin=begin)]
        self._process = subprocess.Popen(command, env=env, cwd=ROOT, **pipes)

    def run(self, script: str) -> str:
        """Return what a script prints; AssertionError with its last words when it fails."""
        with tempfile.TemporaryDirectory() as folder:
            files = [f"{folder}/out", f"{folder}/err"]
            print(json.dumps([script, *files]), file=self._process.stdin, flush=True)
            status = self._process.stdout.readline().strip()
            out, err = (pathlib.Path(file).read_text() for file in files)
        assert status == "0", err[-3000:]
        return out
