"""What a server serves and how: from the command line, or from a TOML file with more."""

import os
import tomllib
from pathlib import Path

import msgspec

from manyhands.errors import UsageError
from manyhands.foreign.regular import read_small
from manyhands.serving.access_rules import LOCAL, AccessRules, is_local, read_tokens
from manyhands.serving.core import ModelEntry
from manyhands.serving.http_connection import HttpLimits
from manyhands.serving.manager import AVAILABILITY
from manyhands.serving.source import VersionSource
from manyhands.serving.stream import TrafficShares, version_policy

PORT = 8000
_LONGEST_NAME = 100


class ModelWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[models.NAME]`."""

    source: str
    versions: str | tuple[int, ...] = "latest"
    labels: dict[str, int | str] = {}  # a version, "newest" or "previous"
    traffic: dict[str, float] = {}  # the share of each label
    most_accuracy_drop: float = 0.1  # a version that loses more on its sample is not served

    def entry(self, name: str) -> ModelEntry:
        found = ModelEntry(
            source=VersionSource(name, Path(self.source)),
            policy=version_policy(self.versions),
            labels=dict(self.labels),
            shares=TrafficShares(self.traffic),
            most_accuracy_drop=self.most_accuracy_drop,
        )
        found.check_labels()
        return found


class BatchingWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[batching]`: samples, not requests."""

    most_samples: int = 64  # in a batch
    sizes: tuple[int, ...] = ()  # where given, batches have one of these, filled up with zeros
    most_waiting_samples: int = 4096  # for each version; more get 429
    timeout_s: float = 30.0  # from the request to its answer


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server."""

    models: dict[str, ModelWords]
    host: str = "127.0.0.1"
    port: int = PORT
    processes: int = 1
    threads: int | None = None  # of each process; where not given, the other cores divided by the processes
    policy: str = AVAILABILITY
    allow: tuple[str, ...] = ()
    tokens: str | None = None
    certificate: str | None = None
    key: str | None = None
    batching: BatchingWords = BatchingWords()
    limits: HttpLimits = HttpLimits()

    def check(self) -> None:
        """Refuse before anything starts."""
        if not self.models:
            raise UsageError("there is nothing to serve; name a run, or a folder of versions")
        for name in self.models:
            if not name or len(name) > _LONGEST_NAME or not all(c.isalnum() or c in "-_." for c in name):
                raise UsageError(f"a model cannot be called {name!r}; use letters, digits, - _ .")
        least_one = {
            "processes": self.processes,
            "threads": self.threads,
            "batching.most_samples": self.batching.most_samples,
            "batching.most_waiting_samples": self.batching.most_waiting_samples,
            "limits.connections": self.limits.connections,
            "limits.body_bytes": self.limits.body_bytes,
            **{f"batching.sizes: {size}": size for size in self.batching.sizes},
        }
        for word, value in least_one.items():
            if value is not None and value < 1:
                raise UsageError(f"{word} = {value}: it must be at least 1")
        if not 0 <= self.port < 1 << 16:
            raise UsageError(f"port = {self.port}: a port is a number from 0 (any free one) to 65535")
        if not self.batching.timeout_s > 0:
            raise UsageError(f"batching.timeout_s = {self.batching.timeout_s:g}: it must be above 0")
        if (self.certificate is None) != (self.key is None):
            raise UsageError("TLS needs both a certificate and a key")
        if not is_local(self.host) and self.tokens is None:
            raise UsageError(
                f"other machines could reach a server at {self.host}, so it needs --tokens FILE; without tokens it "
                "listens at 127.0.0.1 alone"
            )

    def rules(self) -> AccessRules:
        if self.tokens is None:
            return AccessRules(names=(*LOCAL, self.host))
        names = (*LOCAL, self.host) if is_local(self.host) else ()
        return AccessRules(tokens=read_tokens(Path(self.tokens)), names=names)

    def threads_each(self) -> int:
        """One core is left to the process that speaks HTTP."""
        cores = len(os.sched_getaffinity(0))
        return self.threads or max(1, (cores - 1) // self.processes)


def read_settings(path: Path) -> ServeSettings:
    """A TOML file; its paths are relative to its folder."""
    try:
        words = tomllib.loads(read_small(path).decode())
        found = msgspec.convert(words, ServeSettings)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); give a TOML file") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}; `manyhands serve --help` has an example") from None

    def beside(text: str | None) -> str | None:
        return None if text is None else str(path.parent / text)

    models = {
        name: msgspec.structs.replace(one, source=beside(one.source)) for name, one in found.models.items()
    }
    return msgspec.structs.replace(
        found,
        models=models,
        tokens=beside(found.tokens),
        certificate=beside(found.certificate),
        key=beside(found.key),
    )


def named_sources(words: list[str]) -> dict[str, ModelWords]:
    """`runs/mine`, or `name=runs/mine`; without a name the folder's own."""
    found: dict[str, ModelWords] = {}
    for word in words:
        name, equals, source = word.partition("=")
        if not equals:
            name, source = Path(word).resolve().name, word
        if name in found:
            raise UsageError(f"two models are called {name}; name them, as in first={source}")
        found[name] = ModelWords(source=source)
    return found
