"""Which processes of a run share a host, and the memory and the meeting place that they share.

Who shares a host is found out by trying: whoever can open a peer's anonymous memory and read the secret in it is on the
same host. A network namespace of its own makes a host of its own, which is how hosts are emulated in tests.
"""

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from manyhands.cluster.seat import Seat
from manyhands.errors import PeerLost, UsageError

MEETING_TIMEOUT_S = 300.0
REGROUPING_S = 30.0  # all were heard of a moment ago: whoever has not come by then will not


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """All processes by host, workers and servers, and what those of this host have in common."""

    hosts: tuple[tuple[int, ...], ...]
    memory_fd: int
    store: Any = None
    """Where all processes meet; None where one launcher started them on one host."""

    def workers(self, seat: Seat) -> tuple[tuple[int, ...], ...]:
        """The hosts that have workers, and those workers."""
        found = (tuple(rank for rank in ranks if rank < seat.workers) for ranks in self.hosts)
        return tuple(ranks for ranks in found if ranks)

    def beside(self, rank: int) -> tuple[int, ...]:
        """All processes on the host of this one."""
        return next(ranks for ranks in self.hosts if rank in ranks)


def find_neighbours(seat: Seat, store: Any = None) -> Neighbourhood:
    """Meet everyone; all processes of the run must ask. `store` is the meeting place, if this process has opened it."""
    if len(set(seat.hosts)) > 1:  # each launcher has the memory of its host
        assert seat.arena_fd is not None
        groups = [tuple(r for r, host in enumerate(seat.hosts) if host == one) for one in set(seat.hosts)]
        place = store or _meeting_place(seat, REGROUPING_S)
        return Neighbourhood(hosts=tuple(sorted(groups)), memory_fd=os.dup(seat.arena_fd), store=place)
    if seat.store is None or seat.hosts:
        fd = anonymous_memory() if seat.arena_fd is None else os.dup(seat.arena_fd)
        return Neighbourhood(hosts=(tuple(range(seat.size)),), memory_fd=fd)
    # torchrun starts everyone again after a failure and keeps its store: each time gets keys of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"manyhands/{attempt}", _meeting_place(seat))
    hosts, fd = _find_hosts(store, seat)
    return Neighbourhood(hosts=hosts, memory_fd=fd, store=store)


def anonymous_memory() -> int:
    if not hasattr(os, "memfd_create"):
        raise UsageError("manyhands needs anonymous shared memory (memfd_create), which only Linux has")
    return os.memfd_create("manyhands", os.MFD_CLOEXEC)


def open_meeting_place(address: str) -> Any:
    """A store for those who may become the next generation, on a port of its own."""
    return dist.TCPStore(
        address, 0, is_master=True, timeout=timedelta(seconds=REGROUPING_S), wait_for_workers=False
    )


def _meeting_place(seat: Seat, timeout_s: float = MEETING_TIMEOUT_S) -> Any:
    assert seat.store is not None
    address, _, port = seat.store.rpartition(":")
    try:
        return dist.TCPStore(
            address,
            int(port),
            seat.size,
            is_master=seat.serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, dist.DistError) as error:
        if seat.hosts:
            raise PeerLost(f"the worker at {seat.store} is gone") from error
        raise UsageError(
            f"{seat.name} cannot reach the meeting place {seat.store} "
            f"({str(error).splitlines()[0]}); check that worker 0 runs and that the port is open between the hosts"
        ) from error


def _find_hosts(store: Any, seat: Seat) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Group the ranks by host. Candidates are equal in boot and network; proof is opening the first one's memory."""
    store.set(f"host/{seat.rank}", _host_name())
    names = [store.get(f"host/{rank}").decode() for rank in range(seat.size)]
    first = names.index(names[seat.rank])
    if first == seat.rank:
        fd = anonymous_memory()
        secret = secrets.token_bytes(16)
        os.write(fd, secret)
        store.set(f"arena/{first}", f"{os.getpid()} {fd} {secret.hex()}")
        joined = True
    else:
        found = _open_memory(store.get(f"arena/{first}").decode())
        joined = found is not None
        fd = anonymous_memory() if found is None else found
    store.set(f"joined/{seat.rank}", "yes" if joined else "no")
    shares = [store.get(f"joined/{rank}") == b"yes" for rank in range(seat.size)]
    if first == seat.rank:
        os.ftruncate(fd, 0)  # the secret has served; the memory starts as zeros
    store.set(f"ready/{seat.rank}", "yes")
    store.wait([f"ready/{rank}" for rank in range(seat.size)])
    groups: dict[tuple[str, int], list[int]] = {}
    for rank in range(seat.size):
        groups.setdefault((names[rank], -1 if shares[rank] else rank), []).append(rank)
    hosts = tuple(sorted(tuple(ranks) for ranks in groups.values()))
    return hosts, fd


def _host_name() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/net')}"


def _open_memory(address: str) -> int | None:
    """The peer's memory through /proc, if that pid is here, may be opened, and holds the secret."""
    pid, fd, secret = address.split()
    try:
        # In another container the same numbers may be anything: do not wait for it, do not take it as a terminal.
        found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        if os.pread(found, 16, 0) == bytes.fromhex(secret):
            return found
    except OSError:
        pass
    os.close(found)
    return None
