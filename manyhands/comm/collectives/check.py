"""Proof that a schedule is an all-reduce, by running it on names instead of numbers."""

from collections import Counter
from dataclasses import dataclass

from manyhands.comm.collectives.schedule import Round, Schedule


@dataclass(frozen=True)
class SymbolicSum:
    """Whose contributions a part holds, and the order in which they were added."""

    ranks: frozenset[int]
    order: str

    def plus(self, other: "SymbolicSum") -> "SymbolicSum":
        twice = self.ranks & other.ranks
        if twice:
            raise ValueError(f"the contribution of rank {min(twice)} is added twice")
        # a + b and b + a are the same number to the last bit, so both get the same name.
        first, second = sorted((self.order, other.order))
        return SymbolicSum(self.ranks | other.ranks, f"({first}+{second})")


def check(schedule: Schedule) -> None:
    """Raise `ValueError` unless the rules of `schedule` are kept and all ranks end with the same full sum."""
    own = [SymbolicSum(frozenset([rank]), str(rank)) for rank in range(schedule.size)]
    held = {(rank, part): own[rank] for rank in range(schedule.size) for part in range(schedule.parts)}
    for number, transfers in enumerate(schedule.rounds, start=1):
        try:
            _check_rules(transfers, schedule)
            _run(transfers, held)
        except ValueError as error:
            raise ValueError(f"round {number}: {error}") from None
    for (rank, part), total in held.items():
        missing = set(range(schedule.size)) - total.ranks
        if missing:
            raise ValueError(
                f"rank {rank} ends without the contribution of rank {min(missing)} in part {part}"
            )
        if total != held[0, part]:
            raise ValueError(
                f"rank {rank} added part {part} as {total.order}, rank 0 as {held[0, part].order}; "
                "rounding would make them differ"
            )


def _check_rules(transfers: Round, schedule: Schedule) -> None:
    for who, ranks in (
        ("sends", [transfer.source for transfer in transfers]),
        ("receives", [transfer.target for transfer in transfers]),
    ):
        if repeated := [rank for rank, times in Counter(ranks).items() if times > 1]:
            raise ValueError(f"rank {min(repeated)} {who} more than one message")
        if unknown := set(ranks) - set(range(schedule.size)):
            raise ValueError(f"rank {min(unknown)} is not one of {schedule.size}")
    for transfer in transfers:
        if not transfer.parts or not set(transfer.parts) <= set(range(schedule.parts)):
            raise ValueError(f"parts {transfer.parts} are not among the {schedule.parts} parts")
    sent = {(transfer.source, part) for transfer in transfers for part in transfer.parts}
    received = {(transfer.target, part) for transfer in transfers for part in transfer.parts}
    if both := sent & received:
        rank, part = min(both)
        raise ValueError(f"rank {rank} sends part {part} while it receives it")


def _run(transfers: Round, held: dict[tuple[int, int], SymbolicSum]) -> None:
    """No rank sends and receives the same part in a round, so the order within it does not matter."""
    for transfer in transfers:
        for part in transfer.parts:
            sent = held[transfer.source, part]
            before = held[transfer.target, part]
            held[transfer.target, part] = before.plus(sent) if transfer.reduce else sent
