"""A complete, frozen description of a run: read from a spec file and flags, written as `plan.json`, enough to repeat it."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from manyhands import strategies
from manyhands.errors import UsageError


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who computes."""

    workers: int = 2
    threads: int | None = None  # per worker; the cores divided by the workers where not given
    device: str = "cpu"


class Train(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long, with what, and from which seed."""

    epochs: int = 12
    steps: int | None = None  # stop after this many, whatever the epochs say
    batch: int = 32  # samples per worker and step
    accumulate: int = 1  # batches per step
    optimizer: str | None = None  # `sgd:lr=0.05,momentum=0.9`; what suits the model where not given
    schedule: str = "constant"  # or `cosine`, over the whole run
    clip_norm: float | None = None
    size: int | None = None  # pictures are scaled to size × size
    augment: bool = False
    seed: int = 0
    save: bool = True  # a checkpoint after every epoch


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is needed to repeat a run."""

    model: str = "cnn"
    data: str = "digits"
    strategy: str = strategies.DEFAULT
    cluster: Cluster = Cluster()
    train: Train = Train()

    def check(self) -> None:
        """Refuse before any process starts."""
        strategies.parse(self.strategy).check(self.cluster.workers)
        for name, value in (
            ("workers", self.cluster.workers),
            ("epochs", self.train.epochs),
            ("batch", self.train.batch),
            ("accumulate", self.train.accumulate),
            ("steps", 1 if self.train.steps is None else self.train.steps),
        ):
            if value < 1:
                raise UsageError(f"{name}={value}: it must be at least 1")
        if self.train.schedule not in ("constant", "cosine"):
            raise UsageError(f"unknown schedule {self.train.schedule!r}; known: constant, cosine")

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def read(path: Path) -> Plan:
    """A spec in TOML with the words of the command line, or the `plan.json` of an earlier run."""
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"cannot read the spec {path} ({error.strerror}); give the path of a TOML file") from None
    try:
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not valid {path.suffix.lstrip('.').upper() or 'TOML'}: {error}") from None
    for section in ("model", "data", "strategy"):
        if isinstance(content.get(section), Mapping):
            content[section] = _text(content[section], section, path)
    try:
        return msgspec.convert(content, Plan)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}; sections are [model] [data] [strategy] [cluster] [train]") from None


def _text(section: Mapping[str, Any], what: str, path: Path) -> str:
    """`name = "mlp"`, `hidden = [512, 512]` → `mlp:hidden=512-512`."""
    if "name" not in section:
        raise UsageError(f"{path}: [{what}] needs name = …")
    settings = [
        f"{key}={'-'.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in section.items()
        if key != "name"
    ]
    if not settings:
        return str(section["name"])
    return f"{section['name']}{',' if ':' in section['name'] else ':'}{','.join(settings)}"
