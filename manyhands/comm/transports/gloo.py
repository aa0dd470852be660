"""Groups of processes that sum over the network, by Gloo; each is made for one generation and ends with it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from manyhands.comm.transports.connections import Connections, listening_ports, refuse_newcomers
from manyhands.errors import PeerLost

MEETING_S = 300.0
# A peer that died is noticed at once; this is for one that only stopped.
STEP_TIMEOUT = timedelta(seconds=1800)
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LAZY = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True, kw_only=True)
class Network:
    """How this worker reaches the others: their common store, its own address, and the connections that are made."""

    store: Any
    address: str
    connections: Connections
    patience_s: float = MEETING_S
    """How long a group waits for its members when it is made."""

    def among(self, name: str) -> "Network":
        """The same, for groups whose names must not clash with those of other groups."""
        return replace(self, store=dist.PrefixStore(name, self.store))

    def group(self, name: str, ranks: Sequence[int], rank: int) -> Any:
        """A group of these workers, of which this is one; all of them must ask."""
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        interface = os.environ.get(_INTERFACE, "").partition(",")[0]
        make = kind.create_device
        before = listening_ports()
        options._devices = [make(interface=interface) if interface else make(hostname=self.address)]
        options._timeout = timedelta(seconds=self.patience_s)
        options._threads = 2
        own = listening_ports() - before
        with self.connections.drawing(*own) as ports:
            place = dist.PrefixStore(name, self.store)
            # At which ports the members listen: other connections of this process are not the group's.
            place.set(f"ports/{rank}", " ".join(map(str, own)))
            for member in ranks:
                ports.update(map(int, place.get(f"ports/{member}").split()))
            group = kind(place, list(ranks).index(rank), len(ranks), options)
        if _LAZY not in os.environ:  # else members may connect when they first speak
            refuse_newcomers(own)
        group._set_default_timeout(STEP_TIMEOUT)
        kept = Group(group)
        self.connections.groups.append(kept)
        return kept


class Group:
    """A Gloo group, with its methods, until it is released.

    Its threads drop Python objects of finished sums. They must be gone before the interpreter is, and they go when
    the last reference to the group does: so there is one, here, and everything else refers to this.
    """

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            raise PeerLost("the generation of this group is over")
        return getattr(self._made, name)

    def release(self) -> None:
        """Wait for its threads; none of its transfers may be under way, unless their connections are cut."""
        self._made = None


def waited(work: Any) -> None:
    """Return when a transfer is complete."""
    work.wait(STEP_TIMEOUT)  # what was set for the group does not hold for single messages
