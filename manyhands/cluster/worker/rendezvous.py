"""Which processes of a run share a host, and the memory and the meeting place that they share.

Processes find out by trying whether they share a host: one that can open a peer's anonymous memory and read the secret
in it is on the same host. Processes of different network namespaces are on different hosts; tests emulate hosts so.
"""

import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands.cluster.launchers import addresses
from manyhands.cluster.launchers.host_identity import host_identity
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.comm.transports import peer_user
from manyhands.comm.transports.connections import port_of, refuse_newcomers
from manyhands.errors import PeerLost, UsageError

MEETING_TIMEOUT_S = 300.0
REGROUPING_S = 30.0  # all were heard of a moment ago: a worker that has not come by then will not come


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """All processes by host, workers and servers, and what those of this host have in common."""

    hosts: tuple[tuple[int, ...], ...]
    memory_fd: int
    store: Any = None
    """Where all processes meet; None where one launcher started them on one host."""

    def workers(self, rank_info: RankInfo) -> tuple[tuple[int, ...], ...]:
        """The hosts that have workers, and those workers."""
        found = (tuple(rank for rank in ranks if rank < rank_info.workers) for ranks in self.hosts)
        return tuple(ranks for ranks in found if ranks)

    def beside(self, rank: int) -> tuple[int, ...]:
        """All processes on the host of this one."""
        return next(ranks for ranks in self.hosts if rank in ranks)


def find_neighbours(rank_info: RankInfo, store: Any = None) -> Neighbourhood:
    """Find the hosts of all processes, which must all ask. `store` is the meeting place, if it is open already."""
    if len(set(rank_info.hosts)) > 1:  # each launcher has the memory of its host
        if rank_info.arena_fd is None:
            raise UsageError(
                f"{rank_info.name} has no memory to share with its host; start all workers with `manyhands launch`"
            )
        groups = [
            tuple(r for r, host in enumerate(rank_info.hosts) if host == one) for one in set(rank_info.hosts)
        ]
        place = store or _meeting_place(rank_info, REGROUPING_S)
        place.set(f"met/{rank_info.rank}", "yes")
        if rank_info.rank == 0:
            place.wait([f"met/{rank}" for rank in range(rank_info.size)])
            _close(rank_info)
        return Neighbourhood(hosts=tuple(sorted(groups)), memory_fd=os.dup(rank_info.arena_fd), store=place)
    if rank_info.store is None or rank_info.hosts:
        fd = anonymous_memory() if rank_info.arena_fd is None else os.dup(rank_info.arena_fd)
        return Neighbourhood(hosts=(tuple(range(rank_info.size)),), memory_fd=fd)
    # torchrun starts all workers again after a failure and keeps its store: each time gets keys of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"manyhands/{attempt}", _meeting_place(rank_info))
    hosts, fd = _find_hosts(store, rank_info)
    if rank_info.serves:
        _close(rank_info)
    return Neighbourhood(hosts=hosts, memory_fd=fd, store=store)


def anonymous_memory() -> int:
    if not hasattr(os, "memfd_create"):
        raise UsageError("manyhands needs anonymous shared memory (memfd_create), which only Linux has")
    return os.memfd_create("manyhands", os.MFD_CLOEXEC)


def open_meeting_place(address: str) -> Any:
    """A store for the members of the next generation, on a port of its own, which only this address has."""
    listener = addresses.listen(address)  # PyTorch would listen at all addresses of this host
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=REGROUPING_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def store_in_memory(pid: int, fd: int) -> Any:
    """A store in anonymous memory of that process, for processes of one user on one host; it opens no port."""
    return dist.FileStore(f"/proc/{pid}/fd/{fd}")


def _meeting_place(rank_info: RankInfo, timeout_s: float = MEETING_TIMEOUT_S) -> Any:
    if rank_info.store is None:
        raise UsageError(
            f"{rank_info.name} was not told where workers meet; start all workers with one launcher"
        )
    address, _, port = rank_info.store.rpartition(":")
    held = addresses.take_over(int(port)) if rank_info.serves else None
    try:
        return dist.TCPStore(
            address,
            int(port),
            rank_info.size,
            is_master=rank_info.serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=held.detach() if held else None,
        )
    except (RuntimeError, dist.DistError) as error:
        if rank_info.hosts:
            raise PeerLost(f"the worker at {rank_info.store} is gone") from error
        raise UsageError(
            f"{rank_info.name} cannot reach the meeting place {rank_info.store} "
            f"({str(error).splitlines()[0]}); check that worker 0 runs and that the port is open between the hosts"
        ) from error


def _close(rank_info: RankInfo) -> None:
    """All processes of the world are connected to the store that this one serves, so no other needs to connect."""
    if not torch.cuda.is_available():  # NCCL has connections of its own
        refuse_newcomers(port_of(rank_info.store))


def _find_hosts(store: Any, rank_info: RankInfo) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Group the ranks by host. Candidates are equal in boot and network; proof is opening the first one's memory."""
    store.set(f"host/{rank_info.rank}", f"{socket.gethostname()} {host_identity()}")
    names = [store.get(f"host/{rank}").decode() for rank in range(rank_info.size)]
    first = names.index(names[rank_info.rank])
    if first == rank_info.rank:
        fd = anonymous_memory()
        secret = secrets.token_bytes(16)
        os.write(fd, secret)
        store.set(f"arena/{first}", f"{os.getpid()} {fd} {secret.hex()}")
        joined = True
    else:
        found = _open_memory(store.get(f"arena/{first}").decode())
        joined = found is not None
        fd = anonymous_memory() if found is None else found
    store.set(f"joined/{rank_info.rank}", "yes" if joined else "no")
    shares = [store.get(f"joined/{rank}") == b"yes" for rank in range(rank_info.size)]
    if first == rank_info.rank:
        os.ftruncate(fd, 0)  # the secret has served; the memory starts as zeros
    store.set(f"ready/{rank_info.rank}", "yes")
    store.wait([f"ready/{rank}" for rank in range(rank_info.size)])
    groups: dict[tuple[str, int], list[int]] = {}
    for rank in range(rank_info.size):
        groups.setdefault((names[rank], -1 if shares[rank] else rank), []).append(rank)
    hosts = tuple(sorted(tuple(ranks) for ranks in groups.values()))
    return hosts, fd


def _open_memory(address: str) -> int | None:
    """The peer's memory through /proc, if that pid is here, may be opened, and holds the secret."""
    pid, fd, secret = address.split()
    try:
        found = peer_user.opened(Path(f"/proc/{pid}/fd/{fd}"), os.O_RDWR)
    except OSError:
        return None
    try:
        if os.pread(found, 16, 0) == bytes.fromhex(secret):
            return found
    except OSError:
        pass
    os.close(found)
    return None
