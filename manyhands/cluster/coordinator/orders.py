"""What the launcher and its coordinator say to each other, one line of JSON each, over pipes."""

import msgspec

from manyhands.cluster.coordinator.control import RunEnded


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker of another host has ended, and when that was heard."""

    member: int
    address: str
    how: str
    at_s: float


class Vanished(msgspec.Struct, frozen=True, kw_only=True):
    """A host that has fallen silent, its workers, and when it was last heard."""

    address: str
    members: list[int]
    at_s: float


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that the launcher says."""

    endpoint: str
    listener: int
    """The descriptor of the socket that listens there. It is the launcher's, so that the place stays the run's while
    one coordinator takes over from another."""
    keys: tuple[str, str]
    remote_hosts: list[str]
    """Public keys of the processes that may speak."""
    members: list[int]
    """Of the generation that the launcher begins."""
    most: int
    stall_s: float
    hosts: int = 0
    """How many hosts must have come before the run begins; 0 where it begins on the launcher's alone."""
    group_size: int = 1
    """How many workers have one replica among them."""
    replicas_equal: bool = False
    """Whether all replicas are the same after every step."""
    parts_outlive: bool = False
    """Whether a new worker can take over the part of a dead one from the host's memory."""
    servers: int = 0
    """That the launcher begins with, where they are members."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Every other line that the launcher says: who has ended so far; the last one, how the run has ended."""

    members: list[int]
    run: RunEnded | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher is told, one line each."""

    stalled: int | None = None
    """Nothing was heard of this member for too long."""
    generation: int | None = None
    """The generation that has begun, and made its first step."""
    members: list[int] = []
    gone: list[int] = []
    left: list[int] = []
    is_mixed: bool = False
    """Whether no replica was whole, and the parts of several make one."""
    step: int = 0
    """The first step of that generation: begun anew, if a worker died in it."""
    noticed_s: float = 0.0
    """By the clock that all processes of a host share: when the first survivor had left the old generation."""
    resumed_s: float = 0.0
    ended: list[Ending] = []
    """Those among `gone` whose launchers are on other hosts, and how they ended."""
    vanished: list[Vanished] = []
    """The hosts of which nothing was heard any more."""
    hosts_here: list[str] | None = None
    """Before the first generation: the addresses of the other hosts that are here now."""
    servers: list[int] = []
    """All members that are servers, or were."""
    is_over: bool = False
    """No worker is left; `finished` says whether one of them has finished."""
    finished: bool = False
    failed: str = ""
    """Why a launcher on another host says that the run cannot go on."""
