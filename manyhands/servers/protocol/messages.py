"""What workers and servers say to each other: a small header, and beside it, where it travels, one vector.

The header is MessagePack of one of these structures; anything else is not a message. Vectors are raw bytes whose number
both sides know beforehand. On one host they lie in common memory and only the header travels.
"""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from manyhands.replica.state import packing

PARAMS, GRADIENT, BEFORE = "params", "gradient", "before"  # names of vectors; the last: before the step

Serial = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Used = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
"""How far a worker has come with each stream of its data; no number of it ever falls."""


class Said(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Everything a worker says has a number, which only grows: what comes twice is dropped."""

    number: int


class Hello(Said, frozen=True):
    """The first thing a worker says: who it is, and what it means by the flat vector."""

    worker: int
    digest: int  # of the layout; servers refuse a worker that has another model
    secret: bytes = b""  # on the servers' own host: what only those who share its memory can know
    generation: int = 0  # of the workers; a later one takes the place of those before
    workers: int = 0  # that speak with the servers in it


class Push(Said, frozen=True):
    """A gradient of one group, to be answered with `Values` once applied and fresh enough to go on with."""

    group: int
    step: int
    seen: int  # the group's version on which the gradient was computed
    samples: Annotated[int, msgspec.Meta(ge=0)] = 1  # this worker's in this step; 0: nothing to add
    missing: tuple[int, ...] = ()  # parameters of the group that got no gradient
    rows: bytes | None = None  # which rows of a table the vector has (`rows.py`); None: all
    settings: list[dict[str, list[float]]] | None = None  # the optimizer's, by group, where they have changed
    used: Used = ()  # how far the worker has come with its data, this step included


class Finish(Said, frozen=True):
    """All gradients of a step are pushed."""

    step: int


class ScaleGradients(Said, frozen=True):
    """By what a team's gathered gradients are to be multiplied: from the member that has heard all norms."""

    factor: float


class Leave(Said, frozen=True):
    """Out of data: no worker need wait for this one until all have left."""


class Pull(Said, frozen=True):
    """A group of a vector as it is now: of the parameters, or of an optimizer state."""

    group: int
    vector: str = "params"
    whole: bool = True  # else, of a table of parameters, only the rows that are news to this worker


class Put(Said, frozen=True):
    """The value of a group of a vector: at the start, and after a checkpoint was read."""

    group: int
    vector: str = "params"


class BeginEvaluation(Said, frozen=True):
    """The workers evaluate the loss anew: the gradient begins at zero, and so many portions are to be taken."""

    portions: int


class TakePortion(Said, frozen=True):
    """A worker is free: which portion is next?"""


class AddGradient(Said, frozen=True):
    """A gradient of one group, to be added to that of the evaluation."""

    group: int


class Combine(Said, frozen=True):
    """A vector becomes a sum of multiples of vectors; some others are no longer needed. There is no answer."""

    vector: str
    terms: list[tuple[str, float]]
    forgotten: list[str] = []


class Measure(Said, frozen=True):
    """One number of two vectors, over the groups that this server owns: their `dot` product, the sum of the
    `magnitudes` of the first, or the `largest` of them."""

    kind: str
    one: str
    other: str


class Gain(Said, frozen=True):
    """From a server to its counterpart in another server group: what it has added to a group that is at home there."""

    group: int
    serial: Serial  # how often it has told so far


class HomeValues(Said, frozen=True):
    """The answer: what home has now."""

    group: int
    serial: Serial


class ExchangeNow(Said, frozen=True):
    """Tell home all that is not yet told; to be answered when home has answered."""


class Forward(Said, frozen=True):
    """From the owner of a group to the server that has the copy: an update to make there too."""

    group: int
    is_given: bool  # whether a gradient comes with it
    skipped: tuple[int, ...]  # parameters that got none
    settings: list[dict[str, list[float]]]  # of the owner's optimizer
    used: dict[int, Used]  # by worker whose gradients are in it: how far it has come with its data


class Forwarded(Said, frozen=True):
    """The answer: it is made."""

    group: int


class AskBackup(Said, frozen=True):
    """At the beginning of a generation: what does the server have?"""


class GoBack(Said, frozen=True):
    """Every group as it was after so many updates."""

    count: int


class Begin(Said, frozen=True):
    """All servers have what they are to have: what else one has is of no use any more."""


class AskContent(Said, frozen=True):
    """All of a group."""

    group: int


class GiveContent(Said, frozen=True):
    """The same, for a server that is to have it."""

    group: int
    content: bytes
    count: int
    used: dict[int, Used]
    used_in: int


class AskState(Said, frozen=True):
    """What the optimizer knows besides vectors, of the groups that this server owns."""


class GiveState(Said, frozen=True):
    """The same, from a checkpoint; the vectors have been put before."""

    states: bytes


class AskReport(Said, frozen=True):
    """What the server has counted."""


class AskStatus(Said, frozen=True):
    """At the beginning of a generation: how far had the one before come?"""


class Reconcile(Said, frozen=True):
    """The step that the generation before had in flight counts, or the server forgets it."""

    counts: bool
    factor: float = 1.0  # if it counts: by which gradients that wait for the norm are to be multiplied


class WorkerBye(Said, frozen=True):
    """The worker is done; a server ends when all are."""


class Values(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A group's parameters after a push, or what a pull asked for."""

    group: int
    version: int  # updates that this group has had
    rows: bytes | None = None  # which rows of a table these are, those that are news to the worker; None: all
    vector: str = "params"


class Applied(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """A group's push was applied; where workers fetch parameters when they like, none come with it."""

    group: int


class Norm(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The gathered gradients of this server's groups, put together: the square of their norm. For the first member of
    the team that took part in the step."""

    server: int
    square: float


class Portion(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The next portion of work; None: there is none left."""

    index: int | None


class Number(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """What a measure gave."""

    value: float


class Done(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The message with this number has been dealt with."""

    number: int


class Status(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """How many steps were gathered from all workers and applied; whether all of the next one has been pushed."""

    rounds: int
    is_complete: bool
    factor: float = 1.0  # by which the gradients of the last of them were multiplied


class BackedUp(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """By group that the server has, how many updates it has had; and by group and worker, how far that one had come
    with its data in the last generation that has pushed anything."""

    counts: dict[int, int]
    used: dict[int, dict[int, Used]]
    used_in: int


class Content(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    content: bytes


class OptimizerState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    states: bytes


class ServerReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """What happened on a server: updates, how stale their gradients were, and what was not a message."""

    updates: int
    staleness: dict[int, int]  # updates by others between reading and applying → how often
    leads: dict[int, int]  # steps ahead of the slowest worker → how often
    dropped: int
    bytes_sent: int
    bytes_received: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Why the server cannot go on with this worker."""

    reason: str


# From a worker, and from a server.
Request = (
    Hello
    | Push
    | Finish
    | ScaleGradients
    | Leave
    | Pull
    | Put
    | BeginEvaluation
    | TakePortion
    | AddGradient
    | Combine
    | Measure
    | Gain
    | HomeValues
    | ExchangeNow
    | Forward
    | Forwarded
    | AskBackup
    | GoBack
    | AskContent
    | GiveContent
    | Begin
    | AskState
    | GiveState
    | AskReport
    | AskStatus
    | Reconcile
    | WorkerBye
)
Answer = (
    Values
    | Applied
    | Norm
    | Portion
    | Number
    | Done
    | OptimizerState
    | Status
    | BackedUp
    | Content
    | ServerReport
    | Refusal
)

NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
decode_answer: Callable[[bytes], Any] = msgspec.msgpack.Decoder(Answer).decode
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)


class NotAMessage(Exception):
    """Bytes that no worker or server of ours would send."""


def states(content: bytes) -> packing.Values:
    """An optimizer's state that came in a message."""
    try:
        return packing.unpack(content)
    except packing.NotStates as error:
        raise NotAMessage(f"states: {error}") from None


encode: Callable[[Request | Answer], bytes] = msgspec.msgpack.Encoder().encode


def request(content: bytes) -> Request:
    said: Request = _decode(_requests, content)
    return said


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", content: Any) -> Any:
    try:
        return decoder.decode(content)
    except NOT_DECODED as error:
        raise NotAMessage(str(error)) from None
