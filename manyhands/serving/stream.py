"""The versions of one model as they come and go, which of them are wanted, and what people call them.

A source says what is there; a version policy says which of these are aspired to; labels name some of those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from manyhands.errors import UnknownName, UsageError

NEWEST, PREVIOUS = "newest", "previous"
"""What a label can stand for besides a number; the version before the newest that is ready."""


@dataclass(frozen=True, kw_only=True, order=True)
class ModelVersion:
    """One version of one model on the disk. A folder that takes the place of another has a higher mark."""

    model: str
    version: int
    mark: str
    place: Path

    def __str__(self) -> str:
        return f"version {self.version} of {self.model}"


@dataclass(frozen=True, kw_only=True)
class VersionPolicy:
    """Which versions are aspired to: the `latest` so many, those `given`, or all."""

    latest: int | None = 1
    given: frozenset[int] = frozenset()

    def aspired(self, found: Sequence[ModelVersion]) -> list[ModelVersion]:
        """Oldest first."""
        ordered = sorted(found)
        if self.given:
            return [one for one in ordered if one.version in self.given]
        return ordered if self.latest is None else ordered[-self.latest :]


def version_policy(text: str | Sequence[int]) -> VersionPolicy:
    """`latest`, `latest:2`, `all`, or a list of numbers, as a settings file has it.

    >>> version_policy("latest:2").latest
    2
    """
    if not isinstance(text, str):
        if not text or any(number < 1 for number in text):
            raise UsageError(f"versions = {list(text)}: numbers from 1 upwards are expected")
        return VersionPolicy(latest=None, given=frozenset(text))
    name, _, count = text.partition(":")
    if name == "all" and not count:
        return VersionPolicy(latest=None)
    if name != "latest":
        raise UnknownName("version policy", text, ["latest", "latest:N", "all", "a list of numbers"])
    if not (count or "1").isdigit() or int(count or "1") < 1:
        raise UsageError(f"versions = {text!r}: how many of the latest is a number from 1 upwards")
    return VersionPolicy(latest=int(count or "1"))


def meant(label: str | int, ready: Sequence[int]) -> int | None:
    """The version that a label stands for, among those that are ready, oldest first; None if there is none."""
    if label == NEWEST:
        return ready[-1] if ready else None
    if label == PREVIOUS:
        return ready[-2] if len(ready) > 1 else (ready[-1] if ready else None)
    return int(label) if label in ready else None


class TrafficShares:
    """Which label each of many requests gets, such that after any number of them the shares are as they should be."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        if shares and not (total > 0 and all(share >= 0 for share in shares.values())):
            raise UsageError(f"traffic = {dict(shares)}: shares are 0 or more, and one is above 0")
        self.shares = {label: share / total for label, share in shares.items()}
        self._owed = dict.fromkeys(self.shares, 0.0)

    def next(self) -> str | None:
        """The label that is owed most; None where nothing is divided."""
        if not self.shares:
            return None
        for label, share in self.shares.items():
            self._owed[label] += share
        chosen = max(self._owed, key=lambda label: self._owed[label])
        self._owed[chosen] -= 1.0
        return chosen
