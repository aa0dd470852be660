"""Before the first step: what the first batch gives in microbatches, against what it gives whole."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.data.structure import samples_in
from manyhands.errors import UsageError
from manyhands.placement.pipeline.microbatches import copied, microbatches
from manyhands.placement.pipeline.rehearsal import alike
from manyhands.placement.pipeline.tracer import unchanged
from manyhands.replica.part import Loss
from manyhands.replica.returned import loss_of
from manyhands.replica.state.buffers import dense


@contextmanager
def takes_microbatches(model: nn.Module, loss: Loss, example: Any, micro: int) -> Iterator[None]:
    """While the first of several microbatches runs: refuse a model that takes the whole batch only."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        samples = samples_in(example)
        try:
            with unchanged(model), torch.no_grad():
                loss(model, copied(example))
        except Exception:  # then microbatches are not what it fails by
            raise error from None
        raise UsageError(
            f"the model takes the first batch of {samples} samples, and not a microbatch of {micro} "
            f"({type(error).__name__}: {error}); use microbatches=1, or another placement"
        ) from error


def check_microbatches(model: nn.Module, loss: Loss, example: Any, samples: int, micros: int) -> None:
    """Refuse a loss that is no mean over samples, which in microbatches would be another one; and say where modules
    see each microbatch by itself, as batch norm does in every published pipeline."""
    parts = microbatches(example, samples, micros)
    if len(parts) < 2:
        return
    found = _both(model, loss, example, parts, trains=False)
    if found and not alike(found[1][0], found[0][0]):
        whole, divided = (float(values[0]) for values in found)
        raise UsageError(
            f"the loss of the first batch is {whole:.6g}, and the mean of its {len(parts)} microbatches' losses is "
            f"{divided:.6g}, so it is no mean over samples (it compares samples, leaves some targets out, or the "
            "first dimension of the batch is not its samples); use microbatches=1, another loss, or another placement"
        )
    found = _both(model, loss, example, parts, trains=True)
    if found and not all(map(alike, found[1], found[0])):
        print(
            "pipeline: modules that keep numbers from pass to pass (batch norm, spectral norm, counters) see each of "
            f"the {len(parts)} microbatches by itself; with microbatches=1 they compute what they do in one process",
            file=sys.stderr,
            flush=True,
        )


def _both(
    model: nn.Module, loss: Loss, example: Any, parts: Sequence[tuple[Any, int]], *, trains: bool
) -> list[list[Tensor]] | None:
    """The loss, and the buffers afterwards: of the whole batch, and of its microbatches one after the other. None where
    random numbers differ between the two, or the model takes no such batch."""
    samples = sum(count for _, count in parts)
    state = torch.get_rng_state()
    found = []
    try:
        for these in ([(example, samples)], parts):
            with unchanged(model), torch.no_grad():
                if not trains:
                    model.eval()
                values = [loss_of(loss(model, copied(batch))) * (count / samples) for batch, count in these]
                total = torch.stack([value.reshape(()) for value in values]).sum()
                found.append([total, *(part.clone() for part in dense(model.buffers()))])
                if not torch.equal(state, torch.get_rng_state()):
                    return None
    except Exception:  # whatever the user's code does with a model that evaluates
        return None
    return found
