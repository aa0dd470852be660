"""What the coordinator and the members say to each other, and how a member finds the coordinator.

Every message tells a state, not a change: what is lost or comes twice does no harm, and a coordinator that was started
again knows everything as soon as every member has spoken once.
"""

from typing import Annotated

import msgspec

from manyhands.errors import UsageError

Number = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Members = Annotated[tuple[Number, ...], msgspec.Meta(max_length=4096)]
Place = Annotated[str, msgspec.Meta(max_length=256)]
LONGEST_TEXT = 512
Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp://[^\s\x00]{1,256}:[0-9]{1,5}|ipc://[^\x00]{1,256})$")]
Key = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{40}$")]  # as ZeroMQ writes keys

LARGEST_BYTES = 1 << 20
NUMBERS = 1000  # of members that a host may have in the course of a run: those of host 2 begin with 2000


class NewGeneration(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To a member that waits: the next generation."""

    generation: Number
    members: Members  # in the order of their ranks
    state_holders: Members  # those of them that have the state; the others take it over
    last_commits: Number  # what the one of them that has come furthest has committed
    steps: Number  # and how many steps that were
    gone: Members  # since the generation before
    left: Members  # of their own accord
    in_step: Members = ()  # the hosts on which all who have the state were in the same step
    hosts: Members = ()  # of the members and then of the servers, in the order of their ranks
    place: Place = ""  # where they meet, if they are on several hosts
    is_mixed: bool = False  # whether no replica was whole, and the parts of several make one
    servers: Members = ()  # where they may be on several hosts, and so are members as well


class Here(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From a member, several times a second: where it is."""

    member: Number
    generation: Number  # the one it is in, or was in last; -1: it is new
    new_generation: NewGeneration | None  # how that generation began; None for one that the launcher began
    waits: bool  # whether it has left that generation and wants the next
    has_state: bool  # whether it has the parameters, as far as they have come
    commits: Number  # of what all do together: steps, and agreements of replicas
    steps: Number
    in_step: bool = (
        False  # whether it was in a step that changes what it shares with others, and has not settled it
    )
    leaving: bool = False  # whether it wants to be left out of the next
    lost: Members = ()  # members that it has seen to be gone
    host: Number = 0  # on which it is
    place: Place = ""  # where the next generation can meet, if this member is the first of it
    serves: bool = False  # whether it is a server


class Bye(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From a member that has finished."""

    member: Number


class HostHere(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """From the launcher of another host, several times a second."""

    token: Text  # made by that launcher: a message that comes twice is not two hosts
    host: Number  # the number that it was given; -1: none yet
    address: Place  # by which the other hosts reach it
    workers: Number  # that it begins with
    ended: tuple[tuple[Number, Text], ...] = ()  # its members that have ended, and how
    failed: Text = ""  # why the run cannot go on, if it cannot
    servers: Number = 0  # that it begins with; their numbers follow those of its first workers


class HostThere(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the launcher of another host: which number it has, which of its members hang and must be ended, which are in
    the present generation, and how many hosts are still to come before the first one begins."""

    host: Number
    stalled: Members = ()
    current: Members = ()
    missing: Number = 0


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To the launchers of other hosts: how the run has ended, and with which exit code its first launcher ends."""

    text: Text
    exit_code: Number


class Over(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To a member at work: its generation has ended, these are gone."""

    generation: int
    gone: tuple[int, ...]


class Change(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To a member at work: a worker wants to join or to leave, so end this generation between two steps."""

    generation: int


class No(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """To a process that cannot be a member."""

    reason: str


FromMember = Here | Bye | HostHere
ToMember = NewGeneration | Over | Change | No | HostThere | RunEnded

_NOT_A_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

encode = msgspec.msgpack.Encoder().encode
_from_member: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)
_to_member: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)


def from_member(content: bytes) -> FromMember | None:
    """What a member said; None if that is no message."""
    try:
        return _from_member.decode(content)
    except _NOT_A_MESSAGE:
        return None


def to_member(content: bytes) -> ToMember | None:
    try:
        return _to_member.decode(content)
    except _NOT_A_MESSAGE:
        return None


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the coordinator: where it is, its public key, and the key by which it knows its members."""

    endpoint: Endpoint
    """As ZeroMQ writes it; where it begins with `tcp://`, members may be on other hosts."""
    server_key: Key
    public_key: Key
    secret_key: Key

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def invitation(text: str) -> Invitation:
    try:
        return msgspec.json.decode(text, type=Invitation)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise UsageError("this is no invitation of a run; give the file that the launcher wrote") from None
