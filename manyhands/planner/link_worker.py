"""A worker of each host, that measures what messages between hosts cost: what `manyhands probe --hosts` runs on them.

    pairs    every host meets every other one, in rounds in which all pairs of a round are at it at once (a
             1-factorisation): N − 1 rounds for an even N, N for an odd one
    one way  a message goes there and back: half of the time, at several sizes
    both     both hosts send at once: d is how much longer that takes than one way
    around   all hosts send to the next one at once: whether they share the link

It is a run of its own, over the transport and the connections that carry any other. Worker 0 writes what all found.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import manyhands as mh
from manyhands.comm.transports.transport import Transport
from manyhands.planner.links import FILE, PairFacts, SentMessage

SIZES = tuple(64 << (2 * step) for step in range(11))
"""Bytes: 64, 256, … 64 Mi: some must be larger than three token buckets of a link that has them."""
_ENOUGH_S, _LONGEST_S = 0.12, 0.6
"""Of one size, and of one message: larger ones are left out where one takes longer."""
_LEAST, _MOST = 3, 60


class PairMeasure:
    """Of this worker with one other; both call the same methods in the same order."""

    def __init__(self, transport: Transport, peer: int) -> None:
        self._transport, self._peer = transport, peer
        self._begins = transport.rank < peer

    def one_way(self) -> list[SentMessage]:
        """Messages of every size; how many, the one that begins says."""
        found: list[SentMessage] = []
        for size in SIZES:
            payload, into = torch.zeros(size // 4), torch.empty(size // 4)
            self._there_and_back(payload, into)  # opens what is opened by the first message
            first_s = self._there_and_back(payload, into)[0]
            count = self._agreed(max(_LEAST, min(_MOST, int(_ENOUGH_S / max(2 * first_s, 1e-6)))))
            found += [SentMessage(size, *self._there_and_back(payload, into)) for _ in range(count)]
            if self._agreed(int(first_s > _LONGEST_S / 4)):
                break
        return found

    def both_ways(self, size: int, count: int = 3) -> list[float]:
        """Seconds in which each has sent so many bytes to the other."""
        payload, into = torch.zeros(size // 4), torch.empty(size // 4)
        found = []
        for _ in range(count):
            began_s = time.monotonic()
            handles = [self._transport.receive(self._peer, into), self._transport.send(self._peer, payload)]
            for handle in handles:
                handle.wait()
            found.append(time.monotonic() - began_s)
        return found

    def _there_and_back(self, payload: torch.Tensor, into: torch.Tensor) -> tuple[float, float]:
        """Half of the wall seconds, and of this end's processor seconds: each sends once, receives and adds once."""
        began_s, processor_s = time.monotonic(), time.process_time()
        if self._begins:
            self._transport.send(self._peer, payload).wait()
        self._transport.receive(self._peer, into).wait()
        payload += into
        if not self._begins:
            self._transport.send(self._peer, payload).wait()
        return (time.monotonic() - began_s) / 2, (time.process_time() - processor_s) / 2

    def _agreed(self, number: int) -> int:
        """What the one that begins says."""
        told = torch.tensor([float(number)])
        if self._begins:
            self._transport.send(self._peer, told).wait()
        else:
            self._transport.receive(self._peer, told).wait()
        return int(told.item())


def rounds_of(count: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which each meets at most one other: all but the first move on by one place."""
    places = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def measure_all(session: mh.Session) -> list[PairFacts]:
    """What this worker has found with each other one."""
    transport = session.engine.world.transport()
    found = []
    for pairs in rounds_of(session.workers):
        session.barrier()
        for first, second in pairs:
            if session.rank in (first, second):
                peer = second if session.rank == first else first
                pair = PairMeasure(transport, peer)
                sent = pair.one_way()
                largest = max(message.size for message in sent)
                found.append(
                    PairFacts(
                        between=(first, second), sent=sent, size=largest, both_s=pair.both_ways(largest)
                    )
                )
    return [*found, *_around(session, transport, min(pair.size for pair in found))]


def _around(session: mh.Session, transport: Transport, size: int) -> list[PairFacts]:
    """All send to the next one at once."""
    if session.workers < 3:
        return []
    size = int(min(session.gather(size)))
    payload, into = torch.zeros(size // 4), torch.empty(size // 4)
    before, after = (session.rank - 1) % session.workers, (session.rank + 1) % session.workers
    found = []
    for _ in range(3):
        session.barrier()
        began_s = time.monotonic()
        handles = [transport.receive(before, into), transport.send(after, payload)]
        for handle in handles:
            handle.wait()
        found.append(time.monotonic() - began_s)
    return [PairFacts(between=(session.rank, after), sent=[], size=size, around_s=found)]


def main() -> None:
    model = nn.Linear(1, 1)
    session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.0), _loss)
    session.step(torch.zeros(1, 1))  # all hosts have come
    found: list[Any] = session.gather(msgspec.json.encode(measure_all(session)).decode())
    if session.is_main and session.out:
        pairs = [pair for text in found for pair in msgspec.json.decode(text, type=list[PairFacts])]
        Path(session.out / FILE).write_bytes(msgspec.json.encode(pairs))
    session.finish()


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = model(batch).sum()
    return total


if __name__ == "__main__":
    main()
