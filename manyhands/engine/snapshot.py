"""What the next step depends on besides the replica: counters, data, optimizer settings, schedule.

A worker that joins gets a snapshot of another worker, a run that resumes one from a checkpoint. Both
adopt it here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from manyhands.engine import feeds
from manyhands.engine.engine import Engine
from manyhands.engine.feeds import FeedsRecord
from manyhands.errors import CheckpointError

PAIRS = "pairs"

# How this process computes, on its own device: not taken over.
_HERE = ("params", "foreach", "fused", "capturable", "differentiable")

SAVED = ("steps", "epoch", "samples", "seed")
"""The counters that a checkpoint holds. The others begin again: a script that resumes makes its calls anew."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A session at one moment, as plain values."""

    progress: dict[str, Any]
    groups: list[Any]
    """The settings of the optimizer's parameter groups."""
    scheduler: Any
    feeds: FeedsRecord


def capture(engine: Engine) -> Snapshot:
    scheduler = engine.training.scheduler
    return Snapshot(
        progress=engine.progress.encode(),
        groups=[plain(group) for group in engine.training.optimizer.param_groups],
        scheduler=plain(scheduler.state_dict()) if scheduler is not None else None,
        feeds=engine.feeds.record(),
    )


def to_record(engine: Engine) -> dict[str, Any]:
    """What the record of a checkpoint says of the session. It leaves out a loop that is over: a run that resumes begins
    the epoch after it."""
    snapshot = capture(engine)
    return {
        **{name: snapshot.progress[name] for name in SAVED},
        "pace": snapshot.progress["pace"],
        **engine.feeds.to_record(),
        "groups": snapshot.groups,
        "scheduler": snapshot.scheduler,
    }


def from_record(record: Mapping[str, Any], groups: list[Any]) -> Snapshot:
    """The session that a checkpoint's record describes, with the optimizer settings of one worker."""
    position = sum(last - first for first, last in record["committed"])
    return Snapshot(
        progress={
            **{name: record[name] for name in SAVED},
            "pace": record.get("pace", record["steps"]),  # earlier versions counted steps
            "position": position,
        },
        groups=groups,
        scheduler=record["scheduler"],
        feeds=feeds.from_record(record),
    )


def adopt(engine: Engine, snapshot: Snapshot, *, keeps: bool = False) -> None:
    """Go on from a snapshot. A worker that `keeps` its replica has the effect of its own steps still."""
    progress = engine.progress
    progress.adopt(snapshot.progress)
    follows = progress.calls == progress.caught_up_at
    engine.feeds.adopt(snapshot.feeds, progress.seed, follows=follows, keeps=keeps)
    adopt_settings(engine, snapshot.groups, snapshot.scheduler)


def adopt_settings(engine: Engine, groups: Sequence[Any], schedule: Any) -> None:
    training = engine.training
    try:
        for group, saved in zip(training.optimizer.param_groups, groups, strict=True):
            group.update(
                {key: like(value, group.get(key)) for key, value in saved.items() if key not in _HERE}
            )
        if training.scheduler is not None and schedule is not None:
            now = training.scheduler.state_dict()
            training.scheduler.load_state_dict(
                {key: like(value, now.get(key)) for key, value in schedule.items()}
            )
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the settings of {type(training.optimizer).__name__} or of the schedule cannot be taken over ({error})"
        ) from None


def plain(value: Any) -> Any:
    """Settings of an optimizer or a scheduler as JSON can hold them."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        items = {key: plain(item) for key, item in value.items() if key != "params"}
        # JSON has text for keys only: MultiStepLR counts its milestones by number.
        return (
            items
            if all(isinstance(key, str) for key in items)
            else {PAIRS: [[k, v] for k, v in items.items()]}
        )
    return value


def like(value: Any, example: Any) -> Any:
    """What JSON made of a setting, back in the type that the optimizer or the scheduler has."""
    if isinstance(example, (int, float)) and not isinstance(value, (int, float, type(None))):
        raise ValueError(f"it was {example} and would be a {type(value).__name__}")
    if isinstance(value, dict) and PAIRS in value:
        return type(example)(dict(value[PAIRS]))
    if isinstance(example, tuple):
        return tuple(like(item, other) for item, other in zip(value, example, strict=True))
    if isinstance(example, Tensor):
        return torch.full_like(example, value)
    if isinstance(example, list) and len(example) == len(value):
        return [like(item, other) for item, other in zip(value, example, strict=True)]
    if isinstance(value, dict) and isinstance(example, Mapping):
        return {key: like(item, example.get(key)) for key, item in value.items()}
    return value
