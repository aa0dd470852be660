"""What workers and servers of one host have in common: parameters, gradients and optimizer state, each once.

Servers and workers are different programs and cannot ask for memory in the same order. They need not: where everything
lies is a pure function of sizes that both know, far up in the host's anonymous memory. The memory is sparse, so what
no process on this host writes (gradients of workers elsewhere, states of spans that other servers own) takes none.
"""

import os
import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.comm.transports import slots
from manyhands.comm.transports.arena import PAGE, Arena
from manyhands.comm.transports.slots import Slots

_BASE = 1 << 61  # what workers hand out among themselves, generation by generation, does not come near
_MORE = 1 << 47  # from there to what servers hand out among themselves
_SERVER_GROUP = 1 << 48  # from one server group's memory to the next
_SESSION = 1 << 55  # from one session's to the next
_ALIGN = 2 << 20  # a huge page
_SECRET_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All that decides where each vector lies; workers and servers have the same."""

    length: int  # of the flat vector
    dtype: torch.dtype
    groups: int
    places: int = 1
    states: tuple[str, ...] = ()  # optimizer states with one element per parameter
    workers: int


class HostMemory:
    """The common vectors; each is mapped when first asked for."""

    def __init__(
        self, arena: Arena, sizes: Sizes, *, server_group: int = 0, generation: int = 0, session: int = 0
    ) -> None:
        self._arena = arena
        self._sizes = sizes
        self._server_group, self._session = server_group, session
        self._generation = generation  # of elastic servers, which begin anew in each
        self._offsets: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}
        self._start = self._next = _BASE + session * _SESSION + server_group * _SERVER_GROUP
        self._more = self._start + _MORE
        groups, places, workers = sizes.groups, sizes.places, sizes.workers
        vector_bytes = sizes.length * sizes.dtype.itemsize
        self._place("secrets", os.sysconf("SC_PAGESIZE"))
        self._place("versions", groups * 8)
        # What depends on how many workers there are comes last: where that changes, the rest stays where it is.
        states = [f"state/{name}" for name in sizes.states]
        for name in ("params", *states, *(f"grads/{worker}" for worker in range(workers))):
            self._place(name, vector_bytes)
        for name, size_bytes in (("rounds", groups * 8), ("samples", groups * 8), ("missing", places)):
            self._place(f"notes/{name}", workers * size_bytes)
        for number in range(2):
            self._place(f"deferred/{number}", vector_bytes)
        self._place("deferred/serials", 2 * 8)
        self._place("deferred/words", 2 * groups * 3 * 8)
        self._place("deferred/missing", 2 * places)

    def _place(self, name: str, size_bytes: int) -> None:
        self._offsets[name] = self._next
        self._next += -(-max(size_bytes, 1) // _ALIGN) * _ALIGN

    @property
    def params(self) -> Tensor:
        return self._vector("params", self._sizes.length, self._sizes.dtype)

    def grads(self, worker: int) -> Tensor:
        """A worker's gradients, which the servers read."""
        return self._vector(f"grads/{worker}", self._sizes.length, self._sizes.dtype)

    def state(self, name: str) -> Tensor:
        """An optimizer state with one element per parameter."""
        return self._vector(f"state/{name}", self._sizes.length, self._sizes.dtype)

    def vector(self, name: str) -> Tensor:
        """A vector as messages name it: the parameters or a state."""
        return self.params if name == "params" else self.state(name)

    def versions(self, groups: int) -> Tensor:
        """How many updates each group has had; its owner writes."""
        return self._vector("versions", groups, torch.int64)

    def notes(self) -> tuple[Tensor, Tensor, Tensor]:
        """By worker and group the round and the samples of its last push; by worker and parameter what was missing."""
        workers, groups, places = self._sizes.workers, self._sizes.groups, self._sizes.places
        rounds = self._vector("notes/rounds", workers * groups, torch.int64).view(workers, groups)
        samples = self._vector("notes/samples", workers * groups, torch.int64).view(workers, groups)
        missing = self._vector("notes/missing", workers * places, torch.uint8).view(workers, places)
        return rounds, samples, missing

    @property
    def deferred(self) -> list[Tensor]:
        """Two versions of the gradients that a worker defers for its host."""
        return [
            self._vector(f"deferred/{number}", self._sizes.length, self._sizes.dtype) for number in range(2)
        ]

    def deferred_words(self) -> tuple[Tensor, Tensor, Tensor]:
        """By version its serial; by version and group three words; by version and parameter what was missing."""
        groups, places = self._sizes.groups, self._sizes.places
        serials = self._vector("deferred/serials", 2, torch.int64)
        words = self._vector("deferred/words", 2 * groups * 3, torch.int64).view(2, groups, 3)
        return serials, words, self._vector("deferred/missing", 2 * places, torch.uint8).view(2, places)

    def allocate(self, length: int, dtype: torch.dtype) -> Tensor:
        """More of it, zero-filled at first; all servers must ask, in the same order."""
        size_bytes = max(1, length) * dtype.itemsize
        region = self._arena.at(self._more, size_bytes)
        self._more += -(-size_bytes // PAGE) * PAGE
        return torch.frombuffer(region, dtype=dtype, count=max(1, length))[:length]

    def slots(self, count: int) -> Slots:
        """Places for bytes, in the same way."""
        start, self._more = self._more, self._more + slots.BYTES
        return Slots(self._arena.fd, start, count)

    def had_a_server(self, server: int) -> bool:
        """Whether there was one in this place before."""
        return any(self.secret(server))

    def make_secret(self, server: int) -> bytes:
        """A secret that only those who share this memory can know."""
        made = secrets.token_bytes(_SECRET_BYTES)
        os.pwrite(self._arena.fd, made, self._offsets["secrets"] + server * _SECRET_BYTES)
        return made

    def secret(self, server: int) -> bytes:
        return os.pread(self._arena.fd, _SECRET_BYTES, self._offsets["secrets"] + server * _SECRET_BYTES)

    def name(self) -> str:
        """The same for all who share this memory, and for no other process of this machine."""
        found = os.fstat(self._arena.fd)
        return f"{found.st_dev:x}-{found.st_ino:x}-{self._session}-{self._server_group}-{self._generation}"

    def _vector(self, name: str, length: int, dtype: torch.dtype) -> Tensor:
        made = self._tensors.get(name)
        if made is None:
            region = self._arena.at(self._offsets[name], length * dtype.itemsize)
            made = self._tensors[name] = torch.frombuffer(region, dtype=dtype, count=length)
        return made

    def give_back(self) -> None:
        """Return the memory to the kernel, once no process needs it."""
        self._tensors.clear()
        self._arena.give_back(self._start, self._next)
