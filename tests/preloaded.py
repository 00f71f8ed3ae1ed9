"""Run a notebook in copies of a process that has imported torch, whose import takes longer than most notebooks' cells.

The copies come from `multiprocessing`'s fork server. It has imported this file and what kernels import, but nothing of
the course, and not Triton: a notebook itself must choose between GPU and interpreter before that import.
"""

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing import forkserver

gc.disable()  # imports leave hardly any garbage

# A kernel sets this as well, but here matplotlib has already read it by then.
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"

import ipykernel.kernelapp  # noqa: E402
import keep_outputs  # noqa: E402, F401
import matplotlib.backends.backend_agg  # noqa: E402, F401
import matplotlib.figure  # noqa: E402, F401
import nbval.plugin  # noqa: E402, F401
import pandas  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402, F401
from jupyter_client.provisioning import local_provisioner  # noqa: E402

gc.collect()
gc.freeze()  # the copies need not look through all this for garbage: that takes part of a second each time
gc.enable()


def run_nbval(arguments, env, folder, log, timeout_s):
    """Run `pytest` with nbval's `arguments` for one notebook; return its exit status, None after `timeout_s`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    path = os.environ.get("PYTHONPATH", "")
    # the server finds this file by it
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), path])
    try:
        forkserver.ensure_running()
    finally:
        os.environ["PYTHONPATH"] = path
    process = context.Process(target=_run_pytest, args=(arguments, env, os.fspath(folder), os.fspath(log)))
    process.start()
    process.join(timeout_s)
    status = process.exitcode
    process.kill()  # its kernel ends itself
    return status


def _run_pytest(arguments, env, folder, log):
    os.setsid()
    _enter(env, folder)
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    local_provisioner.launch_kernel = _Kernel().launch
    sys.exit(pytest.main(arguments))


def _enter(env, folder):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)


class _Kernel:
    """The process of a kernel, forked before this one has threads and sockets; like a subprocess.Popen once launched.

    It ends itself when the process that has forked it is gone.
    """

    stdin = stdout = stderr = returncode = None

    def __init__(self):
        request, self._request = multiprocessing.Pipe(duplex=False)
        parent, self.pid = os.getpid(), os.fork()
        if self.pid == 0:
            self._request.close()
            try:
                _run_kernel(*request.recv(), parent)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.setpgid(self.pid, self.pid)  # nbval interrupts the whole process group of a kernel

    def launch(self, command, env, cwd=None, **_):
        self._request.send((command, env, cwd or os.getcwd()))
        return self

    def poll(self):
        return self.wait(os.WNOHANG)

    def wait(self, options=0):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _run_kernel(command, env, folder, parent):
    _enter(env, folder)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [*command[command.index("ipykernel_launcher") :], f"--IPKernelApp.parent_handle={parent}"]
    ipykernel.kernelapp.launch_new_instance(argv=sys.argv[1:])
