"""The memory of a host when things go wrong: a peer dies, memory is short, everything is killed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from manyhands.comm.transports import arena
from manyhands.comm.transports.host import Host
from manyhands.errors import MemoryShort, PeerLost

PEER = """
import os, sys
from manyhands.comm.transports.host import Host
host = Host(int(sys.argv[1]), (0, 1), 1)
print("here", flush=True)
sys.stdin.read()
"""


def start_peer(fd: int) -> "subprocess.Popen[str]":
    """A second worker of this host, which meets us and then waits."""
    return subprocess.Popen(
        [sys.executable, "-c", PEER, str(fd)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_dead_peer_is_noticed_by_whoever_waits_for_it(number: signal.Signals) -> None:
    fd = os.memfd_create("test")
    with start_peer(fd) as peer:
        host = Host(os.dup(fd), (0, 1), 0)
        assert peer.stdout is not None
        assert peer.stdout.readline() == "here\n"
        threading.Timer(0.2, peer.send_signal, [number]).start()
        with pytest.raises(PeerLost, match="worker 1 is gone while worker 0 waited"):
            host.barrier()
        assert peer.wait() == -number, "the fault fired"
        host.close()
    os.close(fd)


def test_nothing_is_left_when_everyone_is_killed() -> None:
    before = set(Path("/dev/shm").iterdir())
    script = PEER.replace("(0, 1), 1", "(0,), 0") + "; host.allocate(1 << 20, __import__('torch').float32)"
    fd = os.memfd_create("test")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as peer:
        assert peer.stdout is not None
        peer.stdout.readline()
        inode = os.fstat(fd).st_ino
        os.close(fd)
        peer.kill()
        peer.wait()
    assert set(Path("/dev/shm").iterdir()) == before
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            assert "memfd:test" not in os.readlink(link) or os.stat(link).st_ino != inode
        except OSError:
            continue  # a process that ended while we looked


def test_too_little_memory_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_bytes", lambda: 1_000_000)
    with pytest.raises(
        MemoryShort, match=r"need 0\.00 GB|need \d+\.\d\d GB on this host and 0\.00 GB are free"
    ):
        arena.require_memory(5_000_000_000, "parameters")
    arena.require_memory(10, "parameters")


def test_free_memory_is_what_the_kernel_says() -> None:
    assert 0 < arena.available_bytes() < 1 << 50


def test_regions_of_a_slow_and_a_fast_worker_agree() -> None:
    """A faster worker asks for more regions while a slower one still asks for the first."""
    fd = os.memfd_create("test")
    fast, slow = arena.Arena(os.dup(fd)), arena.Arena(os.dup(fd))
    first = fast.tensor(1000, torch.float32)
    second = fast.tensor(100_000, torch.float32)
    second.fill_(7)
    first.fill_(3)
    assert slow.tensor(1000, torch.float32).sum() == 3000
    assert slow.tensor(100_000, torch.float32).sum() == 700_000
    fast.close()
    slow.close()
    os.close(fd)
