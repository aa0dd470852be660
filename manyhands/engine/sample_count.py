"""How many samples a batch of the script has: by them batches are weighted, and samples are counted.

That is its first dimension, unless the script's `samples=` says otherwise. Sequences may have time there, or lie end to
end. Where the session has made the batch, it knows of how many samples; elsewhere the first steps show it, and a
warning says so once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from manyhands.data.structure import may_have, parts_of, samples_in, samples_of, tensors_in
from manyhands.engine.engine import Engine
from manyhands.errors import UsageError

_LENGTHS = 3  # different ones, before the first dimension of all tensors is taken for time


def count(engine: Engine, batch: Any, made_of: int | None = None) -> int:
    """The samples of a batch, which was perhaps made of so many."""
    own = engine.settings.samples
    if own is not None:
        return 0 if _is_empty(batch) else _told(own(batch), batch)
    found = samples_in(batch)
    if made_of is not None:
        return samples_of(batch, made_of)
    for feed in engine.feeds.open:
        if found == feed.audit.given:
            return found
    if not engine.feeds.open or not found:
        return found
    known = [made for feed in engine.feeds.open if (made := feed.audit.samples_of(batch)) is not None]
    made_of = samples_of(batch, known[0]) if known else found
    if made_of != found and engine.placed.mesh.stages > 1:
        raise UsageError(
            f"a pipeline cuts batches along their first dimension, and this one has {found} there and its {made_of} "
            "samples in the second; give batches with the samples first, or use another placement"
        )
    return made_of


def parts(engine: Engine, batches: Sequence[Any], limit: int | None) -> tuple[list[tuple[Any, int]], int]:
    """What a step computes one after the other, each with its samples, and the samples in all."""
    if engine.progress.is_early:
        for batch in batches:
            _look(engine, batch)
    return parts_of(batches, limit, engine.generation.device, partial(count, engine))


def _look(engine: Engine, batch: Any) -> None:
    """One of the first steps begins with this batch: speak of a first dimension that is not its samples."""
    lengths = engine.first_steps.lengths
    if engine.settings.samples is not None or engine.placed.mesh.feeds == 1 or lengths is None:
        return
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    if not tensors:
        return
    first, *others = tensors
    given = [feed.audit.given for feed in engine.feeds.open]
    samples = given[0] if len(given) == 1 else _samples_beside(first, others)
    if samples in (1, len(first)) or not may_have(batch, samples):
        return
    if given:
        is_other = count(engine, batch) == len(first)
    else:
        lengths.add((len(first), samples))
        is_other = _varies(lengths, agree=all(len(other) == len(first) for other in others))
    if is_other:
        engine.first_steps.lengths = None
        engine.warn(_sentence(first, samples))


def _samples_beside(first: Tensor, others: Sequence[Tensor]) -> int:
    """How many samples a batch of the script's own may have, if its first tensor has something else for rows."""
    rows = {len(other) for other in others}
    if len(rows) == 1 and len(first) not in rows:
        return rows.pop()
    return int(first.shape[1]) if first.dim() > 1 else 1


def _varies(seen: set[tuple[int, int]], *, agree: bool) -> bool:
    """Whether the first dimension has had several lengths, and the samples one number. Batches of samples may differ in
    number as well, but then a tensor of targets does so with that of inputs: they `agree`."""
    lengths, others = (len({pair[which] for pair in seen}) for which in range(2))
    return others == 1 and lengths >= (_LENGTHS if agree else 2)


def _sentence(tensor: Tensor, samples: int) -> str:
    return (
        f"a batch whose first tensor has the shape {tuple(tensor.shape)} counts as {len(tensor)} samples; if it has "
        f"{samples}, as where time comes first, or sequences lie end to end, batches are weighted by their length: say "
        "mh.session(…, samples=lambda batch: …), which gives the number of samples of a batch"
    )


def _is_empty(batch: Any) -> bool:
    try:
        return samples_in(batch) == 0
    except UsageError:  # only the script can tell
        return False


def _told(found: Any, batch: Any) -> int:
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int | float) or found != int(found) or found < 0:
        raise UsageError(
            f"samples= gave {found!r} for a batch of type {type(batch).__name__}; let it give the number of samples, a "
            "whole number"
        )
    return int(found)
