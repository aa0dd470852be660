"""Messages between stages: tensors of any shape, under a key that sender and receiver know."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from manyhands import telemetry
from manyhands.cluster.worker.world import World
from manyhands.comm.transports.transport import Handle
from manyhands.errors import UsageError

HEADER = 128  # numbers: key, count, and for each tensor its type, whether it needs gradients, its shape
TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
SLOTS, SLOT_BYTES = 12, 1 << 20  # per pair: a sender goes on computing once its message is there

Key = tuple[int, int, int]  # kind, stage and microbatch
Message = list[tuple[Tensor, bool]]  # tensors, and whether each needs gradients


class StageChannel:
    """What this worker sends to the others of its replica and has got from them."""

    def __init__(self, group: World) -> None:
        self._transport = group.channel(slots=SLOTS, slot_bytes=SLOT_BYTES)
        self._local = group.host.ranks
        self._inbox: dict[tuple[int, Key], Message] = {}
        self._under_way: deque[tuple[Handle, Any]] = deque()

    def send(self, peer: int, key: Key, message: Message) -> None:
        header = torch.tensor(_header(key, message), dtype=torch.int64)
        tensors = [tensor.detach().contiguous() for tensor, _ in message]
        for tensor in [header, *tensors]:
            # Kept until it is gone: a network reads it later.
            self._under_way.append((self._transport.send(peer, _bytes(tensor)), tensor))
        sent = sum(tensor.nbytes for tensor in tensors)
        telemetry.count("shared_bytes" if peer in self._local else "bytes_sent", sent)

    def receive(self, peer: int, key: Key) -> Message:
        """The message under that key; what comes before it is kept until it is asked for."""
        with telemetry.timed("wait"):
            while (peer, key) not in self._inbox:
                header = torch.empty(HEADER, dtype=torch.int64)
                self._transport.receive(peer, header.view(torch.uint8)).wait()
                found, message = _read(header.tolist())
                handles = [self._transport.receive(peer, _bytes(tensor)) for tensor, _ in message]
                for handle in handles:
                    handle.wait()
                self._inbox[peer, found] = message
        return self._inbox.pop((peer, key))

    def flush(self) -> None:
        """Until everything that was sent is on its way."""
        while self._under_way:
            self._under_way.popleft()[0].wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _header(key: Key, message: Message) -> list[int]:
    numbers = [*key, len(message)]
    for tensor, needs in message:
        numbers += [TYPES.index(tensor.dtype), int(needs), tensor.dim(), *tensor.shape]
    if len(numbers) > HEADER:
        raise UsageError(
            f"{len(message)} tensors are too many to cross from one stage to the next; cut elsewhere"
        )
    return numbers + [0] * (HEADER - len(numbers))


def _read(numbers: list[int]) -> tuple[Key, Message]:
    kind, stage, micro, count, *rest = numbers
    message: Message = []
    for _ in range(count):
        code, needs, dims, *rest = rest
        message.append((torch.empty(rest[:dims], dtype=TYPES[code]), bool(needs)))
        rest = rest[dims:]
    return (kind, stage, micro), message
