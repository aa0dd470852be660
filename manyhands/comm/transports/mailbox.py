"""Point-to-point messages through the memory of a host: one small ring of slots for each ordered pair of workers.

A worker never waits for one transfer alone: while it waits it moves all its posted transfers as far as they go, and
sleeps on its doorbell when none can move. A worker that fills or empties a slot rings the other's.
"""

import os
import time
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from manyhands.comm.transports.host import Host

SLOTS = 4
SLOT_BYTES = 1 << 18
TRIES_BEFORE_SLEEP = 50


class _MailboxTransfer:
    """A message under way: its bytes, and how many of them have moved."""

    def __init__(self, transport: "MailboxTransport", vector: Tensor) -> None:
        self._transport = transport
        self.bytes = vector.view(-1).view(torch.uint8)
        self.moved = 0

    @property
    def done(self) -> bool:
        return self.moved == self.bytes.numel()

    def wait(self) -> None:
        self._transport.until(self)


class _Channel:
    """What one worker of an ordered pair sees of it: the slots, and how often each of the two has used them."""

    def __init__(self, slots: Tensor, filled: int, emptied: int, sending: bool, doorbell: int) -> None:
        self.slots = slots
        self.filled, self.emptied = filled, emptied
        self.sending = sending
        self.doorbell = doorbell  # the other worker's
        self.waiting: deque[_MailboxTransfer] = deque()


class MailboxTransport:
    """Messages among the workers of a host; ranks are local indices."""

    def __init__(self, host: Host, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self.rank = host.index
        self.size = size = host.size
        self._slots, self._slot_bytes = slots, slot_bytes
        # Pairs that never write to each other take no memory.
        rings = host.allocate(size * size * slots * slot_bytes, torch.uint8).view(
            size, size, slots, slot_bytes
        )
        # Per ordered pair: how many slots were filled, how many emptied. Then one doorbell per worker.
        self._counters = host.counters(2 * size * size + size)
        self._bells = 2 * size * size

        def channel(source: int, target: int) -> _Channel:
            pair = source * size + target
            sending = source == self.rank
            bell = self._bells + (target if sending else source)
            return _Channel(rings[source, target], 2 * pair, 2 * pair + 1, sending, bell)

        self._out = [channel(self.rank, peer) for peer in range(size)]
        self._in = [channel(peer, self.rank) for peer in range(size)]

    def send(self, peer: int, vector: Tensor) -> _MailboxTransfer:
        return self._post(self._out[peer], vector)

    def receive(self, peer: int, into: Tensor) -> _MailboxTransfer:
        return self._post(self._in[peer], into)

    def _post(self, channel: _Channel, vector: Tensor) -> _MailboxTransfer:
        transfer = _MailboxTransfer(self, vector)
        if not transfer.done:
            channel.waiting.append(transfer)
            self._move(channel)
        return transfer

    def until(self, transfer: _MailboxTransfer) -> None:
        """Move everything that was posted until this one is complete."""
        tries = 0
        while not transfer.done:
            bell = self._bells + self.rank
            seen = self._counters.read(bell)
            if self._move_all(channel for channel in (*self._out, *self._in) if channel.waiting):
                tries = 0
            elif (tries := tries + 1) < TRIES_BEFORE_SLEEP:
                os.sched_yield()
            else:
                self._counters.sleep(bell, seen)

    def _move_all(self, channels: Iterable[_Channel]) -> bool:
        return sum(self._move(channel) for channel in channels) > 0

    def _move(self, channel: _Channel) -> bool:
        """Fill or empty as many slots as possible; whether there were any."""
        counters = self._counters
        moved = False
        while channel.waiting:
            filled, emptied = counters.read(channel.filled), counters.read(channel.emptied)
            if (filled - emptied == self._slots) if channel.sending else (filled == emptied):
                break
            transfer = channel.waiting[0]
            piece = transfer.bytes[transfer.moved : transfer.moved + self._slot_bytes]
            if channel.sending:
                channel.slots[filled % self._slots, : piece.numel()].copy_(piece)
                counters.publish(channel.filled, filled + 1)
            else:
                piece.copy_(channel.slots[emptied % self._slots, : piece.numel()])
                counters.publish(channel.emptied, emptied + 1)
            # Several peers ring the same bell: a time is a value that none of them writes twice.
            counters.publish(channel.doorbell, time.monotonic_ns())
            transfer.moved += piece.numel()
            moved = True
            if transfer.done:
                channel.waiting.popleft()
        return moved
