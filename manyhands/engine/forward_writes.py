"""What the model writes into its parameters while it computes, in `forward` or in the loss.

In one process a write is made once. Here every worker makes it: where workers share the memory it is made several
times, and one may read what another has half written; a model in parts computes its batch in pieces; and some
strategies and placements give up what was written. Where each worker has a copy of its own, all copies stay the same
only if all write the same. So the first steps, and seldom a later one, look at the parameters before and after the
forward pass. A limit (`clamp_`) and a mask may be made as often as one likes: what they change becomes one of two
constants.
"""

import enum
import operator
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.engine.generation import Generation
from manyhands.engine.spot_check import Seen, SpotCheck
from manyhands.errors import UsageError
from manyhands.replica.part import Part
from manyhands.strategies import Traits

_version = operator.attrgetter("_version")
_CONSTANTS = 2  # of a limit from below and from above
_WAY_OUT = (
    "say it as a parametrization (torch.nn.utils.parametrize), or do it between two steps, on every worker "
    "(param.data = …), which all take over together"
)


class _Written(enum.Enum):
    """What becomes of it."""

    OWN = enum.auto()
    """It is this worker's own, as what else it learns."""
    REPEATED = enum.auto()
    """It is made several times in the same memory, or for pieces of the batch."""
    UNORDERED = enum.auto()
    """The same, while other workers change the parameters at any moment."""
    LOST = enum.auto()
    """The parameters become what they were."""
    COPIED = enum.auto()
    """Other workers have a copy, which must stay the same."""


class ForwardWrites:
    """What this worker's forward passes have written in a generation."""

    def __init__(self, traits: Traits, warn: Callable[[str], None]) -> None:
        self._traits, self._warn = traits, warn
        self._kinds: list[_Written] = []

    def enter(self, generation: Generation) -> None:
        """A generation begins."""
        replica = generation.replica
        trained, frozen = self._kind_in(generation), self._kind_of_frozen(generation)
        # Not those that lie in one memory.
        self._compares = generation.is_whole and self._traits.pooled
        self._compares &= generation.replicas > replica.memory.team.size
        self._names = [place.name for place in replica.layout.places]
        self._originals: list[nn.Parameter] = list(replica.part.originals(replica.parameters))
        self._kinds = [trained] * len(self._names)
        self._frozen = {} if frozen is _Written.OWN else _frozen(replica.part, replica.parameters)
        self._names += self._frozen
        self._originals += self._frozen.values()
        self._kinds += [frozen] * len(self._frozen)
        self._params = [*replica.parameters, *self._frozen.values()]
        self._spots = SpotCheck(replica) if self.is_on and self._traits.lockstep else None
        self._suspects: set[int] = set()  # what was written to in a step before: then all of it is looked at
        self._constants: dict[int, set[float]] = {}  # what they have become, of those that may be written to
        self._versions: list[int] = []
        self._seen: Seen | None = None
        self._middles: dict[str, list[int]] = {}
        self._before: dict[int, Tensor] = {}

    def _kind_in(self, generation: Generation) -> _Written:
        replica, traits = generation.replica, self._traits
        copies = replica.is_served and not generation.computes_in_place
        if generation.is_alone and not copies:
            return _Written.OWN
        if (
            (traits.one_piece and traits.pooled)
            or replica.part.gives_up_writes
            or (copies and traits.lockstep)
        ):
            return _Written.LOST
        if replica.is_shared or replica.is_served:
            if not traits.lockstep:
                return _Written.UNORDERED
            if replica.is_served or replica.memory.team.size > 1:
                return _Written.REPEATED
        if not generation.is_whole:
            return _Written.REPEATED
        return _Written.COPIED if traits.pooled else _Written.OWN

    def _kind_of_frozen(self, generation: Generation) -> _Written:
        """Of what no optimizer updates, as a copy of the model that follows its averages: a step leaves it alone."""
        memory = generation.replica.memory
        if generation.replica.part.gives_up_writes:
            return _Written.LOST
        if generation.is_alone:
            return _Written.OWN
        if memory.is_shared and not self._traits.lockstep:
            return _Written.UNORDERED
        if memory.is_shared and memory.team.size > 1:
            return _Written.REPEATED
        return _Written.OWN if generation.is_whole else _Written.REPEATED

    @property
    def is_on(self) -> bool:
        """Whether a write may be something else than in one process."""
        return any(kind is not _Written.OWN for kind in self._kinds)

    # Around a forward pass

    def begin(self) -> None:
        self._versions = self._count()
        self._seen = self._spots.look() if self._spots else None
        self._middles = self._look_at_frozen()
        self._before = {index: self._params[index].detach().clone() for index in self._suspects}

    def end(self) -> None:
        """Refuse what is something else than in one process."""
        versions = self._count()
        found = [
            at
            for at, (now, then) in enumerate(zip(versions, self._versions, strict=True))
            if now != then and self._kinds[at] is not _Written.OWN
        ]
        if self._spots is not None and self._seen is not None:
            found += [self._names.index(name) for name in self._spots.names(self._seen, self._spots.look())]
        middles = self._look_at_frozen()
        found += [self._names.index(name) for name in middles if middles[name] != self._middles[name]]
        if found and self._kinds[found[0]] is _Written.UNORDERED:
            self._warn(self._sentence(found[0]))
        elif found and self._originals[found[0]] is not self._params[found[0]]:
            raise UsageError(self._sentence(found[0]))  # what is compared below is a shard of it
        for index, before in self._before.items():
            self._judge(index, before)
        self._suspects.update(found)
        self._before = {}

    def _count(self) -> list[int]:
        """How often each parameter has been written to; one that is elsewhere need not come for that."""
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(_version, self._originals))

    def _look_at_frozen(self) -> dict[str, list[int]]:
        """The bits of one element of each: PyTorch keeps no count of what is written to `param.data`."""
        with torch._C.DisableTorchFunctionSubclass():
            middles = {
                name: param.detach().reshape(-1)[param.numel() // 2 :][:1]
                for name, param in self._frozen.items()
            }
            return {name: middle.view(torch.uint8).tolist() for name, middle in middles.items()}

    def _judge(self, index: int, before: Tensor) -> None:
        """A parameter that was written to before, as it is now."""
        now = self._params[index].detach()
        moved = (now != before) & ~(now.isnan() & before.isnan())
        if not moved.any():
            return
        constants = self._constants.setdefault(index, set())
        values = torch.view_as_real(now[moved]) if now.is_complex() else now[moved]
        constants.update(values.unique()[: _CONSTANTS + 1].tolist())
        is_limit = len(constants) <= _CONSTANTS
        kind = self._kinds[index]
        if kind is _Written.LOST or (kind is _Written.REPEATED and not is_limit):
            raise UsageError(self._sentence(index))

    def _sentence(self, index: int) -> str:
        why = (
            "and what it writes is lost, because the step changes the values from before"
            if self._kinds[index] is _Written.LOST
            else "on every worker or for every part of a batch, and what is not the same when it is done twice is not "
            "what it is in one process"
        )
        return f"parameter {self._names[index]!r} is written to while the model computes, {why}; {_WAY_OUT}"

    # Copies that must stay the same

    def digests(self) -> dict[str, int]:
        """Of what was written, by name."""
        if not self._compares:
            return {}
        return {self._names[index]: _digest(self._params[index]) for index in sorted(self._constants)}

    def follow(self, names: Collection[str]) -> None:
        """Some worker has written to these: all compare them from now on."""
        for index, name in enumerate(self._names):
            if name in names:
                self._constants.setdefault(index, set())

    def differs(self, name: str, one: int, other: int) -> str:
        """What to say of it."""
        return (
            f"parameter {name!r} is written to while the model computes, and is not the same on workers {one} and "
            f"{other} any more; {_WAY_OUT}"
        )

    @property
    def sign(self) -> int:
        """The same where all is the same; asked for before every step."""
        return zlib.crc32(repr(self.digests()).encode()) if self._constants else 0


def _frozen(part: Part, trained: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that are here and that no optimizer has, by name."""
    here = {id(param) for param in part.frozen({id(param) for param in trained})}
    return {
        name: param for name, param in part.model.named_parameters() if id(param) in here and param.numel()
    }


def _digest(tensor: Tensor) -> int:
    plain: Any = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(plain.data)
