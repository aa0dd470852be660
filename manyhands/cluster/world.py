"""All workers of a run: who shares a host with whom, and how everybody meets.

Which workers share a host is found out by trying: whoever can open a peer's anonymous memory and read the secret in it
is on the same host. A network namespace of its own makes a host of its own, which is how hosts are emulated in tests.
"""

import contextlib
import fcntl
import itertools
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands.cluster.seat import Seat, own_seat
from manyhands.comm.between import BetweenHosts, lane_count
from manyhands.comm.comm import Comm
from manyhands.comm.scheduled import ScheduledComm
from manyhands.comm.shared import SharedComm
from manyhands.comm.transports.c10d import C10dTransport
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.mailbox import MailboxTransport
from manyhands.comm.transports.routed import RoutedTransport
from manyhands.comm.transports.transport import Transport
from manyhands.errors import UsageError

MEETING_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 1800.0  # a peer that died is noticed at once; this is for one that stopped without dying


class World:
    """Worker `rank` of `size`, on one of `hosts` (each a tuple of ranks)."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.rank = seat.rank
        self.size = seat.size
        self._between: BetweenHosts | None = None
        self._owns_group = False
        self._store: Any = None
        if seat.store is None:
            self.hosts: tuple[tuple[int, ...], ...] = (tuple(range(seat.size)),)
            fd = _anonymous_memory() if seat.arena_fd is None else os.dup(seat.arena_fd)
            self.host = Host(fd, self.hosts[0], seat.rank)
        else:
            # torchrun starts everyone again after a failure and keeps its store: each time gets keys of its own.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = dist.PrefixStore(f"manyhands/{attempt}", _meeting_place(seat))
            self.hosts, self.host = _find_hosts(self._store, seat)
        if len(self.hosts) > 1:
            self._connect()
            self._between = BetweenHosts(self.hosts, self.rank)
        self._transport: Transport | None = None
        self.comm: Comm = SharedComm(self.host, self.rank, self.size, self._between, self.transport)

    @property
    def lanes(self) -> int:
        return lane_count(self.hosts)

    def between_hosts(self) -> Comm:
        """The comm of replicas that are shared by the workers of a host."""
        return self._between or Comm()

    def scheduled(self, topology: str) -> Comm:
        """The comm of replicas that each worker has for itself, with a named topology."""
        return ScheduledComm(self.transport(), topology, self.hosts, self.comm)

    def transport(self) -> Transport:
        """Messages between any two workers; made when it is first asked for, by all workers together."""
        if self._transport is None:
            far = C10dTransport(None) if len(self.hosts) > 1 else None
            near = MailboxTransport(self.host)
            self._transport = RoutedTransport(self.rank, self.size, self.host.ranks, near, far)
        return self._transport

    def between_devices(self) -> Comm:
        """The comm of replicas that live on GPUs, one per worker: NCCL, also inside a host."""
        self._connect()
        return BetweenHosts([[rank] for rank in range(self.size)], self.rank, device_groups=True)

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Everyone's few numbers, by rank."""
        return self.start_exchange(row)()

    def start_exchange(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Begin an exchange; calling what it returns waits for the other hosts (the own host is waited for at once)."""
        near = self.host.exchange(row)
        if self._between is None:
            return lambda: near
        table = torch.zeros(self.size, len(row), dtype=torch.float64)
        for rank, values in zip(self.host.ranks, near, strict=True):
            table[rank] = torch.tensor(values, dtype=torch.float64)
        wait = self._between.start_quick(table)

        def result() -> list[list[float]]:
            wait()
            return [[float(value) for value in line] for line in table.tolist()]

        return result

    def gather(self, payload: bytes) -> list[bytes]:
        """Everyone's bytes, by rank."""
        sizes = [int(row[0]) for row in self.exchange([float(len(payload))])]
        start = sum(sizes[: self.rank])
        everything = torch.zeros(sum(sizes), dtype=torch.uint8)
        if payload:
            everything[start : start + len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self.comm.sum_(everything)
        blob = everything.numpy().tobytes()
        edges = [sum(sizes[:rank]) for rank in range(self.size + 1)]
        return [blob[begin:end] for begin, end in itertools.pairwise(edges)]

    def _connect(self) -> None:
        """torch.distributed among all workers, on the network interface that leads to the meeting place."""
        if dist.is_initialized():
            return  # the script made one already; ours are groups of it
        store = self._store
        if store is None:
            # One host: whoever wants to listen in would have to be on it.
            store = (
                dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                if self.rank == 0
                else None
            )
            port = int(self.exchange([float(store.port if store else 0)])[0][0])
            store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
            self._store = store
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif self.seat.store:
            name = _interface_to(self.seat.store.rpartition(":")[0])
            if name:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=STEP_TIMEOUT_S),
        )
        self._owns_group = True

    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            # Gloo's threads drop Python objects of finished sums and need the interpreter for it, while taking
            # a group down holds the interpreter and waits for those threads: let them finish first.
            time.sleep(0.05)
            dist.destroy_process_group()
        self.host.close()


def join() -> World:
    """Take the seat that the launcher left for this process."""
    return World(own_seat())


def _anonymous_memory() -> int:
    if not hasattr(os, "memfd_create"):
        raise UsageError("manyhands needs anonymous shared memory (memfd_create), which only Linux has")
    return os.memfd_create("manyhands", os.MFD_CLOEXEC)


def _meeting_place(seat: Seat) -> Any:
    assert seat.store is not None
    address, _, port = seat.store.rpartition(":")
    try:
        return dist.TCPStore(
            address,
            int(port),
            seat.size,
            is_master=seat.serves,
            timeout=timedelta(seconds=MEETING_TIMEOUT_S),
            wait_for_workers=False,
        )
    except (RuntimeError, dist.DistError) as error:
        raise UsageError(
            f"worker {seat.rank} of {seat.size} cannot reach the meeting place {seat.store} "
            f"({str(error).splitlines()[0]}); check that worker 0 runs and that the port is open between the hosts"
        ) from error


def _find_hosts(store: Any, seat: Seat) -> tuple[tuple[tuple[int, ...], ...], Host]:
    """Group the ranks by host. Candidates are equal in boot and network; proof is opening the first one's memory."""
    store.set(f"host/{seat.rank}", _host_name())
    names = [store.get(f"host/{rank}").decode() for rank in range(seat.size)]
    first = names.index(names[seat.rank])
    if first == seat.rank:
        fd = _anonymous_memory()
        secret = secrets.token_bytes(16)
        os.write(fd, secret)
        store.set(f"arena/{first}", f"{os.getpid()} {fd} {secret.hex()}")
        joined = True
    else:
        found = _open_memory(store.get(f"arena/{first}").decode())
        joined = found is not None
        fd = _anonymous_memory() if found is None else found
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
    mine = next(ranks for ranks in hosts if seat.rank in ranks)
    return hosts, Host(fd, mine, mine.index(seat.rank))


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


def _interface_to(address: str) -> str | None:
    """The name of the interface whose address this host would use to reach another."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # no packet is sent: the kernel only chooses the route
        local = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(reply[20:24]) == local:
                    return name
    return None
