"""Worlds for tests: each starts `size` ranks and runs one function in all of them.

Threads for numerics, real processes for transports and faults. A new transport is one more entry in `WORLDS`.
"""

import contextlib
import datetime
import importlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.comm.transports.c10d import C10dTransport
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.mailbox import MailboxTransport
from manyhands.comm.transports.transport import Transport

TIMEOUT_S = 60


@dataclass(frozen=True)
class Died:
    """In place of the result of a rank whose process was killed."""

    signal: int


@dataclass(frozen=True)
class World:
    """`run(size, function, *arguments)` gives the results of `function(transport, *arguments)` by rank.

    In worlds of processes the function belongs to a module; arguments and results are plain data or tensors.
    """

    name: str
    run: Callable[..., list[Any]]
    processes: bool

    def __str__(self) -> str:
        return self.name


# Threads


@dataclass
class _Message:
    vector: Tensor
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        if not self.done.wait(TIMEOUT_S):
            raise TimeoutError("the other rank never posted its side of this message")


class _Channel:
    """Messages from one rank to another; the rank that posts the second side copies.

    A send is not complete before its receive, as strictly as a transport may be.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sends: deque[_Message] = deque()
        self.receives: deque[_Message] = deque()

    def post(self, side: deque[_Message], vector: Tensor) -> _Message:
        message = _Message(vector)
        with self.lock:
            side.append(message)
            if self.sends and self.receives:
                send, receive = self.sends.popleft(), self.receives.popleft()
                receive.vector.copy_(send.vector)
                send.done.set()
                receive.done.set()
        return message


class ThreadTransport:
    """Messages between the threads of one process."""

    def __init__(self, rank: int, channels: list[list[_Channel]]) -> None:
        self.rank = rank
        self.size = len(channels)
        self._channels = channels

    def send(self, peer: int, vector: Tensor) -> _Message:
        channel = self._channels[self.rank][peer]
        return channel.post(channel.sends, vector)

    def receive(self, peer: int, into: Tensor) -> _Message:
        channel = self._channels[peer][self.rank]
        return channel.post(channel.receives, into)


def run_threads(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    channels = [[_Channel() for _ in range(size)] for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(function, ThreadTransport(rank, channels), *arguments) for rank in range(size)]
        return [rank.result() for rank in ranks]


# Processes


def run_processes(
    join: Callable[[int, int, Path], Transport], size: int, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Start `size` interpreters; `join(rank, size, folder)` makes the transport inside each of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(list(arguments), folder / "arguments")
        steps = [f"{step.__module__}:{step.__qualname__}" for step in (join, function)]
        command = [sys.executable, "-m", "tests.worlds", str(folder), str(size), *steps]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parent.parent
        children = [
            subprocess.Popen([*command, str(rank)], env=environment, cwd=root) for rank in range(size)
        ]
        try:
            deadline = time.monotonic() + TIMEOUT_S
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(deadline - time.monotonic())
            exit_codes = [child.poll() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        errors = [file.read_text() for file in sorted(folder.glob("error-*"))]
        assert not errors, "\n".join(errors)
        assert None not in exit_codes, f"some ranks did not end in {TIMEOUT_S} s; exit codes {exit_codes}"
        return [_result(folder, rank, child.returncode) for rank, child in enumerate(children)]


def _result(folder: Path, rank: int, exit_code: int) -> Any:
    if exit_code < 0:
        return Died(signal=-exit_code)
    return torch.load(folder / f"result-{rank}", weights_only=True)


def _child(folder: Path, size: int, join: str, function: str, rank: int) -> None:
    try:
        transport = _named(join)(rank, size, folder)
        arguments = torch.load(folder / "arguments", weights_only=True)
        torch.save(_named(function)(transport, *arguments), folder / f"result-{rank}")
    except Exception:
        (folder / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        sys.exit(1)


def _named(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def join_gloo(rank: int, size: int, folder: Path) -> C10dTransport:
    store = dist.FileStore(str(folder / "store"), size)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    return C10dTransport(dist.group.WORLD)


def run_gloo(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return run_processes(join_gloo, size, function, *arguments)


def join_mailbox(rank: int, size: int, folder: Path) -> MailboxTransport:
    # A plain file serves as the common memory here: these processes have no parent that could hand one down.
    fd = os.open(folder / "arena", os.O_RDWR | os.O_CREAT, 0o600)
    return MailboxTransport(Host(fd, range(size), rank))


def run_mailbox(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return run_processes(join_mailbox, size, function, *arguments)


THREADS = World("threads", run_threads, processes=False)
GLOO = World("gloo", run_gloo, processes=True)
MAILBOX = World("mailbox", run_mailbox, processes=True)

WORLDS = [THREADS, GLOO, MAILBOX]
"""Every transport, for the contract tests."""


if __name__ == "__main__":
    _, folder, size, join, function, rank = sys.argv
    _child(Path(folder), int(size), join, function, int(rank))
