"""The writer process: a death is always detected, and partial files are never visible."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.experience.episode import Part
from storage.shards import writer_process
from storage.shards.names import ShardError, ShardInfo, ShardName, ShardWriteError, WriterDied
from storage.shards.part_block import frames_of
from storage.shards.shard import ShardWriter, find_shard, read_shard
from storage.shards.writer_main import serve
from storage.shards.writer_process import (
    Reply,
    WriteRequest,
    WriterProcess,
    decode_reply,
    encode_reply,
    read_message,
    write_message,
)
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id
from tests.forked_writer import start_forked

OBS, ACT = Box((4,)), Discrete(2)
CANONICAL = canonical_json(OBS, ACT)
SCHEMA = schema_id(OBS, ACT)
OWNER = "0123456789ab"
STREAM = f"{OWNER}-{SCHEMA}"
HEAD = 8  # bytes ahead of a message
PATIENCE = 60  # s; a limit that only a broken build reaches


def make_part(ordinal: int, steps: int = 3) -> Part:
    random = np.random.default_rng(ordinal)
    return Part(
        episode_id=f"episode-{ordinal}",
        part=0,
        t0=0,
        steps=steps,
        schema_id=SCHEMA,
        obs=random.random((steps, 4), np.float32).tobytes(),
        actions=random.integers(0, 2, steps).tobytes(),
        rewards=random.random(steps).tobytes(),
        action_logp=np.full(steps, -0.5).tobytes(),
        policy_version=np.full(steps, 3, "<i8").tobytes(),
        source=bytes(steps),
        pass_prob=np.ones(steps).tobytes(),
        ts=np.arange(steps, dtype="<i8").tobytes(),
        received_ts=np.arange(steps, dtype="<i8").tobytes(),
        ordinal=ordinal,
        episode_ordinal=ordinal,
    )


def visible(directory: Path) -> list[Path]:
    """Shards under a final name."""
    return [p for p in directory.rglob("*") if ShardName.parse(p.name)]


def hidden(directory: Path) -> list[Path]:
    return list(directory.rglob(".*.tmp"))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WriterProcess]:
    with WriterProcess(tmp_path, owner=OWNER) as process:
        yield process


def kill(process: WriterProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


def ends(pid: int) -> bool:
    """Whether the process ends, or is gone already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], PATIENCE)[0])
    finally:
        os.close(descriptor)


# --- writing ---------------------------------------------------------------------------------


def test_the_child_writes_what_the_writer_writes(writer: WriterProcess, tmp_path: Path) -> None:
    """The process writes the same file as the writer, byte for byte."""
    parts = [make_part(i) for i in range(5)]
    info = writer.write(STREAM, CANONICAL, parts)
    here = ShardWriter(tmp_path / "here").write(STREAM, CANONICAL, parts)
    assert info.path == tmp_path / STREAM / here.path.name
    assert (info.digest, info.rows, info.parts) == (here.digest, 15, 5)
    assert len(read_shard(info.path, verify="digest")) == 15
    pid = writer.pid
    assert writer.write(STREAM, CANONICAL, [make_part(5)]).first == 5
    assert writer.pid == pid


def test_the_child_loads_no_pandas(writer: WriterProcess) -> None:
    """Arrow would import pandas where it is installed; without it a killed writer is back three
    times sooner."""
    writer.write(STREAM, CANONICAL, [make_part(0)])
    mapped = Path(f"/proc/{writer.pid}/maps").read_text()
    assert "/pyarrow/" in mapped
    assert "/pandas/" not in mapped


def test_settings_reach_the_child(tmp_path: Path) -> None:
    parts = [make_part(i) for i in range(50)]
    settings = {"compression": "lz4", "row_group_bytes": 1000}
    with WriterProcess(tmp_path, compression="lz4", row_group_bytes=1000) as process:
        info = process.write(STREAM, CANONICAL, parts)
    here = ShardWriter(tmp_path / "here", **settings).write(STREAM, CANONICAL, parts)  # type: ignore[arg-type]
    assert info.digest == here.digest


def test_bad_parts_are_refused_and_the_child_lives(writer: WriterProcess) -> None:
    pid = writer.pid
    with pytest.raises(ShardWriteError, match="SpaceError: spaces: expected canonical JSON"):
        writer.write(STREAM, "{}", [make_part(0)])
    with pytest.raises(ShardError, match="expected one or more parts"):
        writer.write(STREAM, CANONICAL, [])
    assert writer.write(STREAM, CANONICAL, [make_part(0)]).rows == 3
    assert writer.pid == pid


def test_what_the_system_says_comes_back_with_its_number(tmp_path: Path) -> None:
    (tmp_path / STREAM).write_text("a file where a folder should be")
    with (
        WriterProcess(tmp_path) as process,
        pytest.raises(ShardWriteError) as caught,
    ):
        process.write(STREAM, CANONICAL, [make_part(0)])
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_a_full_disk_is_an_error_and_not_a_death(tmp_path: Path) -> None:
    """The child survives errors of the disk, leaves no partial file, and reports them."""
    program = """
        import resource, signal, sys
        from pathlib import Path
        from tests_of_writer import CANONICAL, STREAM, make_part
        from storage.shards.names import ShardWriteError
        from storage.shards.writer_process import WriterProcess

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with WriterProcess(Path(sys.argv[1])) as process:
            try:
                process.write(STREAM, CANONICAL, [make_part(0, 5000)])
            except ShardWriteError as error:
                print(error.errno)
            print(process.write(STREAM, CANONICAL, [make_part(1, 1)]).rows)
    """
    assert run(program, tmp_path).split() == [str(errno.EFBIG), "1"]
    assert hidden(tmp_path) == []
    assert [ShardName.parse(p.name).first for p in visible(tmp_path)] == [1]  # type: ignore[union-attr]


def run(program: str, folder: Path) -> str:
    """What a Python program prints; it may import this file as `tests_of_writer`."""
    loader = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tests_of_writer', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['tests_of_writer'] = module\n"
        "spec.loader.exec_module(module)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", loader + textwrap.dedent(program), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return done.stdout


# --- deaths of the child ---------------------------------------------------------------------


def test_a_child_killed_between_writes_is_noticed_and_replaced(writer: WriterProcess) -> None:
    kill(writer)
    with pytest.raises(WriterDied, match="died by signal 9"):
        writer.write(STREAM, CANONICAL, [make_part(0)])
    assert writer.pid is None
    assert writer.write(STREAM, CANONICAL, [make_part(0)]).rows == 3


def test_a_child_killed_in_the_middle_of_a_write_leaves_no_partial_shard(
    writer: WriterProcess, tmp_path: Path
) -> None:
    """A kill that leaves a dot-file is detected; the next writer cleans up and writes."""
    parts = [make_part(i, 100_000) for i in range(3)]
    writer.write(STREAM, CANONICAL, [make_part(100)])
    (before,) = visible(tmp_path)
    killed: list[bool] = []

    def kill_at_sight() -> None:
        folder = str(before.parent)
        while not any(name.endswith(".tmp") for name in os.listdir(folder)):
            pass
        kill(writer)
        killed.append(True)

    watcher = threading.Thread(target=kill_at_sight, daemon=True)
    watcher.start()
    with pytest.raises(WriterDied, match="died by signal 9"):
        writer.write(STREAM, CANONICAL, parts)
    watcher.join(PATIENCE)
    assert killed == [True]
    assert visible(tmp_path) == [before]
    assert len(hidden(tmp_path)) == 1
    assert find_shard(tmp_path, STREAM, 0, 2) is None
    info = writer.write(STREAM, CANONICAL, parts)
    assert hidden(tmp_path) == []
    assert find_shard(tmp_path, STREAM, 0, 2) == info
    assert len(read_shard(info.path, verify="digest")) == 300_000


@pytest.mark.parametrize("moment", range(0, 40, 4))
def test_a_child_killed_at_any_moment_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """After a kill the shard is complete or absent, and is adopted or written again."""
    monkeypatch.setattr(WriterProcess, "start", start_forked)
    parts = [make_part(i, 2000) for i in range(10)]
    with WriterProcess(tmp_path, owner=OWNER) as process:
        process.write(STREAM, CANONICAL, [make_part(100)])
        timer = threading.Timer(moment / 1000, kill, [process])
        timer.start()
        try:
            process.write(STREAM, CANONICAL, parts)
        except WriterDied:
            if find_shard(tmp_path, STREAM, 0, 9) is None:
                process.write(STREAM, CANONICAL, parts)
        timer.join()
    (found,) = [p for p in visible(tmp_path) if p.name.startswith("000000000000-")]
    assert len(read_shard(found, verify="digest")) == 20_000


def test_a_child_that_cannot_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = WriterProcess(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(WriterDied, match="cannot be started"):
        process.start()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WriterDied, match="ended with status 1"):
        process.write(STREAM, CANONICAL, [make_part(0)])


def test_close_lets_the_child_leave(tmp_path: Path) -> None:
    process = WriterProcess(tmp_path)
    process.close()
    process.start()
    pid = process.pid
    assert pid is not None
    process.close()
    assert process.pid is None
    assert ends(pid)


def test_close_does_not_wait_for_a_child_that_was_never_asked(tmp_path: Path) -> None:
    """A child that was never asked may still load its modules, and has nothing to finish."""
    process = WriterProcess(tmp_path)
    process.start()
    child = process._child
    assert child is not None
    process.close()
    assert child.returncode == -signal.SIGKILL


def test_ctrl_c_in_the_terminal_does_not_reach_the_child(writer: WriterProcess) -> None:
    """SIGINT goes to the whole group, but only the parent ends its writer."""
    assert writer.write(STREAM, CANONICAL, [make_part(0)]).rows == 3
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGINT)
    assert writer.write(STREAM, CANONICAL, [make_part(1)]).rows == 3


# --- deaths of the parent --------------------------------------------------------------------


def parent_and_child(program: str, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """A process that prints its child's pid and then waits forever."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def killed(parent: subprocess.Popen[str]) -> None:
    parent.kill()
    parent.wait()
    if parent.stdout is not None:
        parent.stdout.close()


def test_the_child_of_a_killed_parent_ends(tmp_path: Path) -> None:
    program = """
        import signal, sys
        from pathlib import Path
        from storage.shards.writer_process import WriterProcess

        process = WriterProcess(Path(sys.argv[1]))
        process.start()
        print(process.pid, flush=True)
        signal.pause()
    """
    parent, child = parent_and_child(program, str(tmp_path))
    killed(parent)
    assert ends(child)


def test_the_kernel_ends_a_child_that_reads_nothing() -> None:
    """A busy child, which does not see the end of its input, ends too."""
    program = """
        import os, signal, subprocess, sys

        child = '''
        import os, signal, sys
        from storage.system.process import die_with_parent
        die_with_parent(int(sys.argv[1]))
        print("ready", flush=True)
        signal.pause()
        '''
        import textwrap
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(child), str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        print(process.pid, flush=True)
        signal.pause()
    """
    parent, child = parent_and_child(program)
    killed(parent)
    assert ends(child)


def test_a_child_whose_parent_is_gone_already_leaves(tmp_path: Path) -> None:
    """A parent that died before the child could ask the kernel is noticed by its pid."""
    command = [sys.executable, "-m", "storage", "write-shards", "--directory", str(tmp_path)]
    done = subprocess.run(
        [*command, "--parent", "1"], input="", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "the parent process is gone" in done.stderr


# --- the parent's imports --------------------------------------------------------------------


def test_the_parents_side_imports_neither_arrow_nor_pandas(tmp_path: Path) -> None:
    """The acknowledging process imports neither, even after it wrote a shard."""
    program = """
        import sys
        from pathlib import Path
        from storage.shards.writer_process import WriterProcess

        with WriterProcess(Path(sys.argv[1])) as process:
            pass
        heavy = {"pyarrow", "pandas", "torch", "multiprocessing"}
        print(sorted(heavy & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_a_folder_called_storage_where_the_user_stands_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "__init__.py").write_text("raise SystemExit('the wrong storage')")
    monkeypatch.chdir(tmp_path)
    with WriterProcess(tmp_path / "shards") as process:
        assert process.write(STREAM, CANONICAL, [make_part(0)]).rows == 3


# --- messages --------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=20), max_size=5), max_size=6), st.integers(1, 80))
def test_a_message_comes_back_and_a_cut_one_is_noticed(
    frames: list[list[bytes]], block: int
) -> None:
    """A message is read whole, in whatever pieces it arrives.

    A pipe that ends inside a message raises, wherever it ends.
    """
    pipe = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_process, "_BLOCK", block)
        write_message(pipe, frames)
    data = pipe.getvalue()
    assert read_message(io.BytesIO(data)) == [b"".join(pieces) for pieces in frames]
    assert read_message(io.BytesIO(b"")) is None
    for cut in range(1, len(data)):
        with pytest.raises(EOFError):
            read_message(io.BytesIO(data[:cut]))


def test_what_is_no_message_is_refused() -> None:
    for junk in (b"hello, world", b"HRS1\xff\xff\xff\xff"):
        with pytest.raises(ShardError, match="expected a message"):
            read_message(io.BytesIO(junk))


def test_a_reply_keeps_a_path_of_any_bytes() -> None:
    path = Path(os.fsdecode(b"/a/\xff\xfe"))
    reply = Reply(ShardInfo(path, "s", 1, 2, "d", 3, 4, 5))
    assert decode_reply(encode_reply(reply)) == reply


class Remembered(io.BytesIO):
    """Input that looks, before each message, who else holds what was read for the one before."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._given: list[bytes] = []
        self.held: list[int] = []

    def read(self, size: int | None = -1, /) -> bytes:
        if size == HEAD:
            own = [bytes(size)]
            alone = max(sys.getrefcount(frame) for frame in own)
            self.held += [sys.getrefcount(frame) - alone for frame in self._given]
            self._given = []
        given = super().read(size)
        if len(given) > HEAD:  # the smallest are shared by all
            self._given.append(given)
        return given


def test_a_writer_that_waits_holds_no_parts(tmp_path: Path) -> None:
    """Parts are as large as a shard, and a writer that kept the last ones would hold two shards at
    a time."""
    asked = io.BytesIO()
    request = msgspec.msgpack.encode(WriteRequest(STREAM, CANONICAL))
    for first in (0, 2):
        parts = [make_part(first, 500), make_part(first + 1, 500)]
        write_message(asked, [[request], *frames_of(parts)])
    requests, replies = Remembered(asked.getvalue()), io.BytesIO()
    serve(ShardWriter(tmp_path), requests, replies)
    replies.seek(0)
    for _ in range(2):
        reply = read_message(replies)
        assert reply is not None
        assert decode_reply(reply[0]).info is not None
    assert len(requests.held) > 2
    assert set(requests.held) == {0}
