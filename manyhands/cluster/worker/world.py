"""All workers of a run: which of them share a host, and how they meet."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from manyhands.cluster.launchers import open_between_hosts
from manyhands.cluster.launchers.addresses import address_towards
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.rendezvous import (
    REGROUPING_S,
    anonymous_memory,
    find_neighbours,
    store_in_memory,
)
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.comm.between import BetweenHosts, lane_count, lane_ranks
from manyhands.comm.codecs.codec import Codec, NoCodec
from manyhands.comm.coded import SHOTS, CodedHosts
from manyhands.comm.comm import Comm
from manyhands.comm.row_links import RowLinks
from manyhands.comm.row_table import RowTable
from manyhands.comm.scheduled import ScheduledComm
from manyhands.comm.shared import SharedComm
from manyhands.comm.transports.c10d import C10dTransport
from manyhands.comm.transports.connections import Connections, port_of
from manyhands.comm.transports.gloo import MEETING_S, STEP_TIMEOUT, Network
from manyhands.comm.transports.host import Host
from manyhands.comm.transports.mailbox import SLOT_BYTES, SLOTS, MailboxTransport
from manyhands.comm.transports.routed import RoutedTransport
from manyhands.comm.transports.transport import Transport
from manyhands.comm.two_shots import CodedLane

CHANNELS = 2  # of a schedule over a network
CODED = 1 << 20  # the first channel of coded sums, far from those of rows, of which each layer has two
GENERATION_BYTES = 1 << 47  # of a host's memory, which is sparse: what generations hand out does not meet


class World:
    """All workers of a generation, as one of them sees them: it is worker `rank` of `size`, on one of `hosts` (each a
    tuple of ranks), and `rank_info.launcher` has started it."""

    _store_fd: int | None = None  # of a store that this world has made

    def __init__(
        self,
        rank_info: RankInfo,
        check: Callable[[], None] = lambda: None,
        connections: Connections | None = None,
        store: Any = None,
    ) -> None:
        """`check` is called now and then while this worker waits for others of its host, and may raise. Waiting for
        other hosts ends when the `connections` are cut. `store` is the meeting place, if this worker has opened it."""
        self.rank_info = rank_info
        self.rank = rank_info.rank
        self.size = rank_info.workers
        self.servers = rank_info.servers
        self.members = tuple(range(self.size))  # what messages to people call the ranks
        self.check = check
        self._between: BetweenHosts | None = None
        self._remote_group: Any = None
        self._owns_group = False
        self.divisions: dict[tuple[tuple[int, ...], ...], World] = {}  # by their groups (`division.py`)
        self.twins: dict[int, World] = {}  # of sessions after the first (`twin.py`)
        self.siblings: Any = None  # the sessions themselves, which only the engine knows
        self._connections = connections or Connections()
        with (
            self._connections.drawing(*port_of(rank_info.store))
            if rank_info.store
            else contextlib.nullcontext()
        ):
            self.neighbours = find_neighbours(rank_info, store)
        self._store: Any = self.neighbours.store
        self.hosts: tuple[tuple[int, ...], ...] = self.neighbours.workers(rank_info)
        mine = next(ranks for ranks in self.hosts if self.rank in ranks)
        self.host = Host(
            self.neighbours.memory_fd,
            mine,
            mine.index(self.rank),
            start=rank_info.generation * GENERATION_BYTES,
            check=check,
        )
        if len(self.hosts) > 1:
            network = self.network()
            self._remote_group = network.group("workers", range(self.size), self.rank)
            self._between = BetweenHosts(self.hosts, self.rank, network)
        self._transport: Transport | None = None
        self.comm: Comm = SharedComm(
            self.host, self.rank, self.size, self._between, self.transport, self._remote
        )

    @property
    def lanes(self) -> int:
        return lane_count(self.hosts)

    def between_hosts(self) -> Comm:
        """The comm of replicas that are shared by the workers of a host."""
        return self._between or Comm()

    def scheduled(self, topology: str) -> Comm:
        """The comm of replicas that each worker has for itself, with a named topology."""
        # Over a network the kernel moves the bytes; in host memory a second channel would take cores from computing.
        others = range(1, CHANNELS if len(self.hosts) > 1 else 1)
        channels = [self.transport(), *(self.channel(number) for number in others)]
        return ScheduledComm(channels, topology, self.hosts, self.comm)

    def transport(self) -> Transport:
        """Messages between any two workers; made when it is first asked for, by all workers together."""
        if self._transport is None:
            self._transport = self.channel(0)
        return self._transport

    def channel(self, number: int = 0, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> Transport:
        """Messages that take host memory where they can, and the network under this number; all workers must ask, in
        the same order."""
        local = MailboxTransport(self.host, slots=slots, slot_bytes=slot_bytes)
        if self._remote_group is None:
            return local  # one host: its workers have their ranks of the world
        return RoutedTransport(self.host.ranks, local, self._remote(number))

    def _remote(self, number: int = CHANNELS) -> Transport:
        """Messages to workers of other hosts alone: each worker makes it when it needs it, without the others."""
        return C10dTransport(self._remote_group, tag=number, names=self.members)

    def row_table(self, width: int) -> RowTable:
        """Rows of so many numbers that some workers show each other in a step; all must ask, in the same order."""
        remote = self._remote(CHANNELS + 1) if self._remote_group is not None else None
        return RowTable(self.host, self.hosts, self.rank, width, remote)

    def row_links(self) -> RowLinks | None:
        """Rows of matrices to the other hosts, if there are any."""
        if self._between is None:
            return None
        return RowLinks(
            self.hosts, self.rank, self._between, lambda number: self._remote(CHANNELS + 2 + number)
        )

    def coded(self, codec: Codec) -> Comm:
        """The comm of replicas that are shared by the workers of a host, with gradients between hosts coded."""
        if self._between is None or isinstance(codec, NoCodec):
            return self.between_hosts()
        lanes = {}
        for lane in self._between.mine():
            shots = [self._remote(CODED + len(SHOTS) * lane + shot) for shot in SHOTS]
            lanes[lane] = CodedLane(lane_ranks(self.hosts, lane), self._between.rank, shots)
        return CodedHosts(self._between, codec, lanes)

    def between_devices(self) -> Comm:
        """The comm of replicas that live on GPUs, one per worker: NCCL, also inside a host."""
        network = self.network()
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", store=network.store, rank=self.rank, world_size=self.size, timeout=STEP_TIMEOUT
            )
            self._owns_group = True
        devices = dist.new_group(range(self.size), backend="nccl")
        return BetweenHosts([[rank] for rank in range(self.size)], self.rank, network, devices=devices)

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """A few numbers of every worker, by rank."""
        return self.start_exchange(row)()

    def start_exchange(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Begin an exchange; calling what it returns waits for the other hosts (the own host is waited for at once)."""
        local = self.host.exchange(row)
        if self._between is None:
            return lambda: local
        # One number more than asked for: Gloo does not even meet for a sum of nothing.
        table = torch.zeros(self.size, len(row) + 1, dtype=torch.float64)
        for rank, values in zip(self.host.ranks, local, strict=True):
            table[rank, :-1] = torch.tensor(values, dtype=torch.float64)
        wait = self._between.start_quick(table)

        def result() -> list[list[float]]:
            wait()
            return [[float(value) for value in line[:-1]] for line in table.tolist()]

        return result

    def gather(self, payload: bytes) -> list[bytes]:
        """Bytes of every worker, by rank."""
        return self.comm.gather(payload)

    def network(self) -> Network:
        """How this worker reaches the others, from the address that leads to the meeting place."""
        if self._store is None:
            memory = self._store_fd = anonymous_memory()  # one host: that of its first worker serves
            pid, fd = map(int, self.exchange([os.getpid(), memory])[0])
            self._store = store_in_memory(pid, fd)
        towards = self.rank_info.store.rpartition(":")[0] if self.rank_info.store else "127.0.0.1"
        return Network(
            store=self._store,
            address=self.rank_info.address or address_towards(towards),
            connections=self._connections,
            patience_s=REGROUPING_S if self.rank_info.address else MEETING_S,
        )

    def close(self) -> None:
        for part in (*self.twins.values(), *self.divisions.values()):
            part.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._between = self._transport = self._remote_group = None
        self._connections.release()
        self._close_store()
        self.host.close()

    def _close_store(self) -> None:
        if self._store_fd is not None:
            os.close(self._store_fd)
            self._store = self._store_fd = None


def join() -> World | ServerContext:
    """The place in the run that the launcher gave to this process."""
    rank_info = own_rank_info()
    if rank_info.server is not None:
        return ServerContext(rank_info)
    world = World(rank_info)
    if len(world.neighbours.hosts) > 1 and rank_info.rank == 0 and rank_info.store:
        print(open_between_hosts.sentence(rank_info.store), file=sys.stderr, flush=True)
    return world
