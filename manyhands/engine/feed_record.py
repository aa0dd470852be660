"""What other workers, and checkpoints, are told of one stream of data."""

import msgspec

from manyhands.data.ledger import DrawnOrder, Ledger, Ranges
from manyhands.errors import CheckpointError

UNKNOWN = -1  # how long an epoch is, in checkpoints that do not say it


class FeedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that joins, or a run that resumes, must know of the data."""

    committed: Ranges
    length: int
    total: int
    epoch: int
    drawn: str = ""
    """The order that a sampler has drawn."""
    shuffle: bool = True
    batch: int = 1
    round_samples: int = 1
    is_dealt: bool = False
    is_in_loop: bool = False
    is_over: bool = False
    is_main: bool = True
    """Whether its loops are the script's own, not loops inside of others."""
    is_abandoned: bool = False
    pace: tuple[int, int] = (0, 0)
    """Rounds that the schedule has counted, and of those the last ones that make no whole step yet."""


class Outstanding(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has drawn and not committed when the workers change."""

    rounds: list[Ranges] = []
    used: int = 0  # of those, the ones that are in its steps
    # All places whose effect its replica has; None where all replicas have that of what is committed.
    effect: Ranges | None = None
    epoch: int = 0  # of that effect


def ledger_of(record: FeedRecord, seed: int, drawn: DrawnOrder | None = None) -> Ledger:
    """The ledger of the epoch that a record describes. Loops inside of others have orders of their own."""
    drawn = DrawnOrder.decode(record.drawn) if record.drawn else drawn
    places = record.total if drawn is None else drawn.length
    if not 0 <= record.length <= places:
        raise CheckpointError(f"an epoch of {record.length} places is said to be cut out of {places}")
    ledger = Ledger(
        record.length,
        seed=seed if record.is_main else ~seed,
        epoch=record.epoch,
        shuffle=record.shuffle,
        total=record.total,
        drawn=drawn,
    )
    ledger.committed = record.committed
    return ledger
