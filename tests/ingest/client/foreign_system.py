"""A client on a system that lacks the modules that only Linux and macOS have.

python foreign_system.py ADDRESS TOKEN STORE_ROOT DIGEST

Modules and attributes that Windows lacks are removed before Headrace is imported. Third-party
packages that need them (numpy, requests, ...) are imported first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import requests
import safetensors.numpy
import urllib3

THEIRS = (msgspec, requests, safetensors.numpy, subprocess, tempfile, urllib3)
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "syslog", "readline")
OS = (
    "fork", "forkpty", "register_at_fork", "wait3", "wait4", "WNOHANG", "setsid", "killpg",
    "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_PATH", "O_NONBLOCK", "pread", "pwrite", "sendfile",
    "fdatasync", "posix_fallocate", "fchmod", "fchown", "chown", "mkfifo", "statvfs",
    "getuid", "geteuid", "getgid", "getegid", "getpgid", "getloadavg", "uname",
    "sched_getaffinity", "sched_yield", "sysconf",
)  # fmt: skip
SIGNAL = ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGCHLD", "pthread_sigmask", "SIG_UNBLOCK")
CLIENTS = (
    "PolicyClient", "Publisher", "WeightStore", "PolicyDeclaration", "PolicySpec", "ModuleSpec",
    "Box", "Dict", "Discrete", "MultiBinary", "MultiDiscrete", "Text", "Tuple", "parse_space",
    "Episode", "SampleBatch", "MultiAgentBatch", "BufferFull", "ClientError",
    "CollectorUnavailable", "IngestError", "Refusal", "StorageError", "WeightsDamaged",
)  # fmt: skip


def take_away() -> None:
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    for module, names in ((os, OS), (signal, SIGNAL)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


def main(address: str, token: str, root: str, digest: str) -> None:
    import headrace  # noqa: PLC0415 - once all is taken away

    for name in CLIENTS:
        getattr(headrace, name)
    with headrace.Publisher(address, token=token) as publisher:
        publisher.publish_candidate(headrace.WeightStore(root, "default"), digest)
    for mode in ("remote", "local"):
        with headrace.PolicyClient(address, mode, token=token) as client:
            episode = client.start_episode()
            client.log_action(episode, np.zeros(4), 1, action_prob=0.5)
            client.log_returns(episode, 1.0)
            client.get_action(episode, np.zeros(4))
            client.end_episode(episode)
            client.flush()
    from storage.system.files import FileLock  # noqa: PLC0415 - once all is taken away

    try:
        FileLock(Path(root) / "lock").acquire()
    except OSError as error:
        print(error)


if __name__ == "__main__":
    take_away()
    main(*sys.argv[1:])
