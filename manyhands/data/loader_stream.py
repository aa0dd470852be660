"""A `torch.utils.data.DataLoader` as a stream: its own machinery loads the samples that the ledger gives to a worker.

What the loader says of order and batches is kept. Its batch size is that of one worker, as under DDP.
"""

import ctypes
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from manyhands.data.ledger import DrawnOrder
from manyhands.errors import UsageError

_STOCK = ("torch", "torchdata")  # packages whose loaders and samplers do what their settings say
_MOST_DRAWN = 10_000_000  # numbers of a sampler that does not end
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """What a loader says of order and batches."""

    sampler: Any
    """Gives samples or, where `is_dealt`, batches; it is asked only where the order `is_drawn` by it."""
    batch_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    is_dealt: bool = False
    is_drawn: bool = False
    note: str = ""
    """What a person should know, in one line."""


class LoaderStream:
    """A map-style loader. `full` is how many workers' batches make a round; `feed` whose samples this worker has."""

    in_background = (
        False  # the loader's own processes load ahead; without them it loads as plain PyTorch does
    )

    def __init__(self, loader: DataLoader[Any], *, full: int, feed: int) -> None:
        self.data = loader
        self._feed = feed
        self._wanted = _Wanted(whole=loader.batch_sampler is not None)
        self._own: DataLoader[Any] | None = None
        self._plan = plan = plan_of(loader)
        self.note = plan.note
        self.batch, self.shuffle = plan.batch_size, plan.shuffle
        self.is_dealt, self.is_drawn = plan.is_dealt, plan.is_drawn
        self.total = _length(plan.sampler if plan.is_drawn else loader.dataset)
        self._round_samples = plan.batch_size * full
        self.length = self._cut(self.total) if self.total >= 0 else self.total

    def draw(self) -> DrawnOrder | None:
        """What the sampler gives for an epoch."""
        if not self.is_drawn:
            return None
        sampler = self._plan.sampler
        most = max(_MOST_DRAWN, 20 * len(self.data.dataset))  # type: ignore[arg-type]
        items = list(itertools.islice(sampler, most + 1))
        if len(items) > most:
            raise UsageError(
                f"{type(sampler).__name__} gave more than {most:,} samples and goes on: a sampler without an end has "
                "no epochs; give the loader one that ends, or shuffle=True"
            )
        items = items[: self._cut(len(items))]
        try:
            if self.data.batch_sampler is not None and self.is_dealt:
                batches = [torch.as_tensor(list(item), dtype=torch.int64) for item in items]
                ends = torch.tensor([len(batch) for batch in batches], dtype=torch.int64).cumsum(0)
                return DrawnOrder(torch.cat(batches), ends)
            return DrawnOrder(torch.tensor([int(item) for item in items], dtype=torch.int64))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"{type(sampler).__name__} gives something else than numbers of samples ({error}), and the ledger "
                "counts samples by number; let it give whole numbers"
            ) from error

    def load(self, shares: Iterator[Tensor], epoch: int) -> Iterator[Any]:
        self._wanted.shares = shares
        if self._own is None:
            self._own = _like(self.data, self._wanted, self._feed)
        yield from self._own

    def _cut(self, length: int) -> int:
        """How many of so many samples are used."""
        if not self._plan.drop_last:
            return length
        if length < self._round_samples:
            raise UsageError(
                f"drop_last=True leaves nothing of {length} samples where a step takes {self._round_samples}, which is "
                f"{self.batch} on each worker; use drop_last=False, a smaller batch_size or fewer workers"
            )
        return length // self._round_samples * self._round_samples


class _Wanted:
    """In place of a sampler: the samples that this worker is to load; as `whole` batches, or one by one."""

    def __init__(self, *, whole: bool) -> None:
        self.shares: Iterator[Tensor] = iter(())
        self._whole = whole

    def __iter__(self) -> Iterator[Any]:
        for share in self.shares:
            if self._whole:
                yield share.tolist()
            else:
                yield from share.tolist()


def plan_of(loader: DataLoader[Any]) -> LoaderPlan:
    """What this loader says; raises where it would load something else than what it is told to."""
    name = type(loader).__name__
    if type(loader).__iter__ is not DataLoader.__iter__ and not _is_stock(loader):
        raise UsageError(
            f"{name} has its own __iter__, which may load other samples than the session asks for; pass a "
            "torch.utils.data.DataLoader, or the data set and batch_size="
        )
    batches = loader.batch_sampler
    if batches is None:
        return _plan_of_sampler(loader, loader.sampler, batch_size=1, drop_last=False, is_dealt=True)
    if isinstance(batches, BatchSampler) and _is_stock(batches):
        return _plan_of_sampler(
            loader,
            batches.sampler,
            batch_size=batches.batch_size,
            drop_last=batches.drop_last,
            is_dealt=False,
        )
    _refuse_divided(batches)
    return LoaderPlan(sampler=batches, is_dealt=True, is_drawn=True)


def _plan_of_sampler(
    loader: DataLoader[Any], sampler: Any, *, batch_size: int, drop_last: bool, is_dealt: bool
) -> LoaderPlan:
    length = _length(loader.dataset)
    made = {"sampler": sampler, "batch_size": batch_size, "drop_last": drop_last, "is_dealt": is_dealt}
    if isinstance(sampler, DistributedSampler) and _is_stock(sampler):
        note = (
            f"the {type(sampler).__name__} of the loader is not used: the ledger divides its data among the workers, "
            "and again when one dies; leave sampler= out and say shuffle= instead"
        )
        return LoaderPlan(**made, shuffle=sampler.shuffle, note=note)
    if isinstance(sampler, SequentialSampler) and _is_stock(sampler) and _length(sampler) == length:
        return LoaderPlan(**made)
    if isinstance(sampler, RandomSampler) and _is_stock(sampler):
        is_permutation = not sampler.replacement and sampler.num_samples == length
        return LoaderPlan(**made, shuffle=is_permutation, is_drawn=not is_permutation)
    _refuse_divided(sampler)
    return LoaderPlan(**made, is_drawn=True)


def _is_stock(part: object) -> bool:
    return type(part).__module__.partition(".")[0] in _STOCK


def _refuse_divided(sampler: object) -> None:
    """A sampler that gives each worker another part would be divided twice."""
    if getattr(sampler, "num_replicas", 1) not in (1, None):
        raise UsageError(
            f"{type(sampler).__name__} divides the data among {sampler.num_replicas} workers already, "  # type: ignore[attr-defined]
            "and the ledger would divide that part again; give the loader the sampler inside of it, or shuffle="
        )


def _length(sized: Any) -> int:
    """-1 where it is not known."""
    try:
        return len(sized) if isinstance(sized, Sized) else -1
    except (TypeError, NotImplementedError):
        return -1


def _like(loader: DataLoader[Any], wanted: _Wanted, feed: int) -> DataLoader[Any]:
    """A loader that loads as this one does, and what is wanted."""
    more: dict[str, Any] = {"batch_sampler": wanted}
    if loader.batch_sampler is None:
        more = {"sampler": wanted, "batch_size": None}
    if loader.num_workers:
        more["multiprocessing_context"] = loader.multiprocessing_context
        more["prefetch_factor"] = loader.prefetch_factor
        more["persistent_workers"] = loader.persistent_workers
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=beginning(loader),
        generator=_own_generator(loader.generator, feed),
        **more,
    )


def _own_generator(given: torch.Generator | None, feed: int) -> torch.Generator | None:
    """From a generator that all workers have seeded alike, one for this worker: transforms must not draw the same."""
    if given is None or not feed:
        return given
    return torch.Generator().manual_seed(hash((given.initial_seed(), feed)) & 0x7FFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class _Beginning:
    """What a process of the loader does first: it ends with the worker that has started it, however that ends."""

    parent: int
    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        if os.getppid() == self.parent:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.then is not None:
            self.then(number)


def beginning(loader: DataLoader[Any]) -> Callable[[int], None]:
    return _Beginning(os.getpid(), loader.worker_init_fn)


def is_of_session(iterator: Any) -> bool:
    """Whether it is a session that goes through a loader."""
    return isinstance(iterator._index_sampler, _Wanted)


def is_map_style(loader: Any) -> bool:
    """Whether a loader takes samples by number."""
    return isinstance(loader, DataLoader) and hasattr(loader.dataset, "__getitem__") and not _streams(loader)


def _streams(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)
