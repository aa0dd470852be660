"""Messages between stages: tensors of any shape, under a key that sender and receiver know."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.cluster.worker.world import World
from manyhands.comm.transports.transport import Handle

# Numbers: how many there are, key, notes and their count, and for each tensor its type, whether it needs gradients, its
# shape. What does not fit follows.
HEADER = 128
TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
SLOTS, SLOT_BYTES = 12, 1 << 20  # per pair: a sender goes on computing once its message is there

Key = tuple[int, int, int]  # kind, stage and microbatch
Message = list[tuple[Tensor, bool]]  # tensors, and whether each needs gradients
Notes = Sequence[int]  # that go with a message


class StageChannel:
    """What this worker sends to the others of its replica and has got from them."""

    def __init__(self, group: World) -> None:
        self._transport = group.channel(slots=SLOTS, slot_bytes=SLOT_BYTES)
        self._local = group.host.ranks
        self._inbox: dict[tuple[int, Key], tuple[Message, Notes]] = {}
        self._under_way: deque[tuple[Handle, Any]] = deque()

    def send(self, peer: int, key: Key, message: Message, notes: Notes = ()) -> None:
        numbers = torch.tensor(_header(key, message, notes), dtype=torch.int64)
        tensors = [tensor.detach().contiguous() for tensor, _ in message]
        for tensor in [numbers[:HEADER], numbers[HEADER:], *tensors]:
            # Kept until it is gone: a network reads it later.
            if tensor.numel():
                self._under_way.append((self._transport.send(peer, _bytes(tensor)), tensor))
        sent = sum(tensor.nbytes for tensor in tensors)
        telemetry.count("shared_bytes" if peer in self._local else "bytes_sent", sent)

    def receive(self, peer: int, key: Key) -> tuple[Message, Notes]:
        """The message under that key; what comes before it is kept until it is asked for."""
        with telemetry.timed("wait"):
            while (peer, key) not in self._inbox:
                header = self._read(peer, torch.empty(HEADER, dtype=torch.int64))
                numbers = header.tolist()
                if numbers[0] > HEADER:
                    numbers += self._read(peer, torch.empty(numbers[0] - HEADER, dtype=torch.int64)).tolist()
                found, message, notes = _parsed(numbers)
                for tensor, _ in message:
                    if tensor.numel():
                        self._read(peer, tensor)
                self._inbox[peer, found] = message, notes
        return self._inbox.pop((peer, key))

    def _read(self, peer: int, into: Tensor) -> Tensor:
        self._transport.receive(peer, _bytes(into)).wait()
        return into

    def flush(self) -> None:
        """Until everything that was sent is on its way."""
        while self._under_way:
            self._under_way.popleft()[0].wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _header(key: Key, message: Message, notes: Notes) -> list[int]:
    numbers = [*key, len(notes), *notes, len(message)]
    for tensor, needs in message:
        numbers += [TYPES.index(tensor.dtype), int(needs), tensor.dim(), *tensor.shape]
    numbers.insert(0, len(numbers) + 1)
    return numbers + [0] * (HEADER - len(numbers))


def _parsed(numbers: list[int]) -> tuple[Key, Message, Notes]:
    _, kind, stage, micro, noted, *rest = numbers
    notes, (count, *rest) = rest[:noted], rest[noted:]
    message: Message = []
    for _ in range(count):
        code, needs, dims, *rest = rest
        message.append((torch.empty(rest[:dims], dtype=TYPES[code]), bool(needs)))
        rest = rest[dims:]
    return (kind, stage, micro), message, notes
