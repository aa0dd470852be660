"""What a loop draws its batches from: how the samples that the ledger gives to a worker are loaded."""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from manyhands.data.ledger import DrawnOrder
from manyhands.data.loading import gather
from manyhands.errors import UsageError


class Stream(Protocol):
    """Samples by number that the ledger can assign, and how a script wants its batches."""

    data: Any
    """What the script has given."""
    batch: int
    """What a worker should have at a time: samples or, where batches are dealt, 1."""
    length: int
    """How many places an epoch has; of `total` samples."""
    total: int
    shuffle: bool
    is_dealt: bool
    """Whether the script's own batches are dealt to the workers, rather than samples."""
    is_drawn: bool
    """Whether the script's sampler makes the order."""
    note: str
    """What a person should know of it, in one line."""
    in_background: bool
    """Whether a thread of ours should load ahead."""

    def draw(self) -> DrawnOrder | None:
        """The order of the next epoch, where the script's sampler makes it."""
        ...

    def load(self, shares: Iterator[Tensor], epoch: int) -> Iterator[Any]:
        """A batch of the samples in every share, in turn."""
        ...


class DataSetStream:
    """A data set, loaded by a thread of ours."""

    is_dealt = is_drawn = False
    note = ""
    in_background = True

    def __init__(self, data: Any, *, batch_size: int, shuffle: bool) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}: a step needs at least 1 sample per worker")
        self.data = data
        self.batch = batch_size
        self.length = self.total = len(data)
        self.shuffle = shuffle

    def draw(self) -> None:
        return None

    def load(self, shares: Iterator[Tensor], epoch: int) -> Iterator[Any]:
        return (gather(self.data, samples, epoch) for samples in shares)
