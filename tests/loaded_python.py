"""A Python interpreter with the large libraries loaded, for programs that are short without them.

Loading torch, pandas and Arrow takes most of the time of a `headrace train` on a small log. This
loads them once, in one process for all workers of a run, and forks for each program. No module of
ours is loaded before: a program imports these itself, as in an interpreter of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

_MOST_BYTES = 200_000  # of a job
_READY = "ready"
_COMMAND = """\
#!{python} -IS
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
job = [[*{words!r}, *sys.argv[1:]], os.getcwd(), dict(os.environ)]
socket.send_fds(link, [json.dumps(job).encode()], [0, 1, 2])
sys.exit(int(link.recv(16)))
"""


def loaded_python(folder: Path, python: str, user: int) -> Path:
    """A folder with the commands `python` and `headrace`, which a shell or a scheduler can start.

    If one is killed, so is its program. Made under `folder` by the first caller; the process ends
    with the process `user`.
    """
    bins = folder / "loaded"
    bins.mkdir(exist_ok=True)
    with (bins / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (bins / "python").exists():
            _start(bins, python, user)
    return bins


def _start(bins: Path, python: str, user: int) -> None:
    address = str(bins / "link")
    process = subprocess.Popen(
        [python, "-m", __name__, address, str(user)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a terminal's SIGINT is for the tests
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process.stdout or contextlib.nullcontext() as output:
        if output is None or output.readline() != f"{_READY}\n":
            raise RuntimeError(f"it ended with {process.wait()}; its error is on stderr")
    process.returncode = 0  # it outlives this process, which does not wait for it
    for name, words in {"headrace": ["-m", "headrace"], "python": []}.items():
        path = bins / name
        path.write_text(_COMMAND.format(python=python, address=address, words=words))
        path.chmod(0o755)


def main(address: str, user: int) -> None:
    """Load, and fork for each connection, until the process `user` has ended."""
    _load()
    asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked.bind(address)
    asked.listen(64)
    signal.signal(signal.SIGCHLD, _reap)
    ready = select.poll()
    ready.register(over := os.pidfd_open(user), select.POLLIN)
    ready.register(asked, select.POLLIN)
    print(_READY, flush=True)
    os.dup2(0, 1)
    while over not in (found := {file for file, _ in ready.poll()}):
        if asked.fileno() in found:
            link, _ = asked.accept()
            if os.fork() == 0:
                asked.close()
                _follow(link, over)
            link.close()


def _load() -> None:
    """Import what a training and a judgement import, and torch's compiler as its optimizer does."""
    import gymnasium  # noqa: F401, PLC0415 - only this process is to load them
    import pandas  # noqa: F401, PLC0415
    import pyarrow.dataset  # noqa: F401, PLC0415
    import safetensors.torch  # noqa: F401, PLC0415
    import scipy.optimize  # noqa: F401, PLC0415
    import torch  # noqa: PLC0415
    import typer  # noqa: F401, PLC0415
    import urllib3  # noqa: F401, PLC0415

    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    gc.freeze()


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _follow(link: socket.socket, over: int) -> None:
    """Run a job in a child and tell its exit status; kill it if nobody waits for that.

    `over` is readable once the process has ended whose commands these are.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job, files, _, _ = socket.recv_fds(link, _MOST_BYTES, 3)
    if (pid := os.fork()) == 0:
        link.close()
        _run(job, files)
    for file in files:
        os.close(file)
    ended = select.poll()
    ended.register(os.pidfd_open(pid), select.POLLIN)
    ended.register(link, select.POLLIN)
    ended.register(over, select.POLLIN)
    if {link.fileno(), over} & {file for file, _ in ended.poll()}:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        link.send(str(status if status >= 0 else 128 - status).encode())
    os._exit(0)


def _run(job: bytes, files: list[int]) -> None:
    """Run a job to its end, with the files as its standard ones."""
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    words, folder, environment = json.loads(job)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.pop("HEADRACE_PARENT", None)  # it is a child of this process, and is killed above
    code: object = 1
    try:
        _program(words, environment.get("PYTHONPATH", ""))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as the interpreter would
        traceback.print_exc()
    # What the interpreter does at its end; it would also take apart each module, which takes long.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def _program(words: list[str], search: str) -> None:
    """`python FILE ...`, `python -m MODULE ...` or `python -c CODE ...`."""
    own = "" if words[0] in ("-m", "-c") else str(Path(words[0]).parent)
    sys.path[:1] = [own, *filter(None, search.split(":"))]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
