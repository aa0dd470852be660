"""What all workers must have alike beside their data: the optimizer's settings, which parameters are trained, and what
the model has written into them.

A number that stands for all of it goes with every handshake. Only where the numbers differ do workers say more.
"""

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from manyhands.engine.engine import Engine
from manyhands.errors import UsageError
from manyhands.replica.optimizer.hyper_parameters import hyper_parameters, set_hyper_parameters

_NO_NUMBERS = (str, type(None))


def sign(engine: Engine, groups: list[dict[str, Any]]) -> int:
    """The number that stands for what this worker has."""
    return _digest(engine, groups) ^ engine.frozen.sign ^ engine.writes.sign


def _digest(engine: Engine, groups: list[dict[str, Any]]) -> int:
    """Of the optimizer's settings, which must be the same on all workers; they seldom change from step to step."""
    own = engine.generation.replica.own_numbers  # they change in every step, everywhere alike
    values = [
        value
        for group in groups
        for name, value in group.items()
        if name != "params" and (not own or (name == "lr" and name not in own))
    ]
    known, digest = engine.told_settings
    if values != known:
        fixed = _numbers(values)
        numbers = hyper_parameters(engine.training.optimizer) if fixed is None else fixed
        digest = zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers))
        engine.told_settings = (None if fixed is None else values), digest
    return digest


def _numbers(values: Iterable[Any]) -> list[float] | None:
    """As `hyper_parameters` finds them; None where a tensor or a list may change in place."""
    numbers: list[float] = []
    for value in values:
        kind = type(value)
        if kind is float or kind is int or kind is bool:
            numbers.append(value)
        elif kind is tuple:
            inner = _numbers(value)
            if inner is None:
                return None
            numbers += inner
        elif kind not in _NO_NUMBERS:
            return None
    return numbers


def follow(engine: Engine, signs: Sequence[float], stepping: Sequence[bool]) -> None:
    """Workers with data must agree on the optimizer's settings; a worker without data follows them,
    since it may own spans."""
    if all(one == signs[0] for one in signs):
        return
    _compare_parameters(engine, stepping)
    if True not in stepping:
        return
    optimizer, world, lead = engine.training.optimizer, engine.generation.world, stepping.index(True)
    mine = hyper_parameters(optimizer)
    form = f"{len(mine)}d"
    every = [struct.unpack(form, payload) for payload in world.gather(struct.pack(form, *mine))]
    for rank, steps in enumerate(stepping):
        if steps and every[rank] != every[lead]:
            pair = next((a, b) for a, b in zip(every[lead], every[rank], strict=True) if a != b)
            raise UsageError(
                f"the optimizer's settings differ between workers: {pair[0]:g} on worker {lead}, {pair[1]:g} on "
                f"worker {rank}; step the scheduler equally often on all, or give it to mh.session(scheduler=…)"
            )
    set_hyper_parameters(optimizer, every[lead])


def _compare_parameters(engine: Engine, stepping: Sequence[bool]) -> None:
    """A step that is made is right on all workers or refused; what differs at the end is said."""
    world = engine.generation.world
    mine = msgspec.json.encode((engine.frozen.names(), engine.writes.digests()))
    said = [msgspec.json.decode(one, type=tuple[list[str], dict[str, int]]) for one in world.gather(mine)]
    ranks = [rank for rank, steps in enumerate(stepping) if steps] or list(range(len(stepping)))
    lead = ranks[0]
    text = ""
    for rank in ranks:
        frozen, trained = set(said[rank][0]), set(said[lead][0])
        if frozen != trained:
            name = min(frozen ^ trained)
            here, there = (rank, lead) if name in frozen else (lead, rank)
            text = text or (
                f"parameter {name!r} is frozen on worker {here} (requires_grad=False) and trained on worker {there}; "
                "freeze it on every worker, before the same step"
            )
        if other := _other(said[lead][1], said[rank][1]):
            text = text or engine.writes.differs(other, lead, rank)
    engine.writes.follow({name for _, digests in said for name in digests})
    if text and True in stepping:
        raise UsageError(text)
    engine.say_once(text)


def _other(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """The first parameter of which two workers have other values."""
    return next((name for name in sorted(ours.keys() & theirs.keys()) if ours[name] != theirs[name]), None)
