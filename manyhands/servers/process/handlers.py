"""The handler table of a server: for each type of message who may send it, how long its vector is, and what is done."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from manyhands.servers.protocol.messages import Answer, Request

Reply = tuple[int, Answer | Request, Tensor | None]  # to whom, what, and the vector that goes with it


class Sender(Enum):
    """Which processes may send a message."""

    WORKER = auto()
    FIRST_WORKER = auto()
    PEER = auto()  # the counterpart of this server in another server group
    BACKUP = auto()  # a server that backs up groups of this one, or the reverse


def no_vector(message: Any) -> int:
    return 0


@dataclass(frozen=True)
class Handler:
    """How a server handles one type of message."""

    reply: Callable[[int, Any, Tensor | None], Iterable[Reply]]
    """Handles a message from a process; the vector is None where it lies in the host's memory."""
    vector_bytes: Callable[[Any], int | None] = no_vector
    """The length of the vector that comes with a message; None if the message is about what the server does not own."""
    sender: Sender = Sender.WORKER


Handlers = Mapping[type, Handler]
