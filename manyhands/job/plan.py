"""A complete, frozen description of a run: read from a spec file and flags, written as `plan.json`, enough to
repeat it.
"""

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from manyhands import placement as placements
from manyhands import spec, strategies
from manyhands.checkpoint.publish import KEEP
from manyhands.cluster.launchers.addresses import parse_hosts
from manyhands.comm import codecs
from manyhands.engine import intervals
from manyhands.errors import UnknownName, UsageError, did_you_mean
from manyhands.foreign.regular import not_through_links, read_small
from manyhands.job import learning_rate

DEVICES = ("cpu", "cuda")
HEADS = ("new",)
SCHEDULES = ("constant", "cosine")
DEFAULT_EPOCHS = 12
LARGEST_SEED = 2**63 - 1
AUTO = "auto"
AUTO_WORDS = ("strategy", "workers", "threads")


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who computes."""

    workers: int = 2
    hosts: str | None = None  # `2`, or `2@10.0.0.1`: begin when so many have come, with `workers` on this one
    most_workers: int | None = None  # where more may join; as many as `workers` where not given
    replace: int | None = None  # how many workers that die are replaced; 3 where not given
    servers: int = 0  # processes that own parameters, for the strategies that have them
    threads: int | None = None  # per worker; the cores divided by the workers where not given
    device: str = "cpu"


class Train(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long, with what, and from which seed."""

    epochs: int | None = None  # 12 where neither epochs nor steps are given
    steps: int | None = None  # where both are given, whichever comes first
    batch: int | None = None  # samples per worker and step; 32 where not given, or what the strategy wants
    accumulate: int = 1  # batches per step
    optimizer: str | None = (
        None  # `sgd:lr=0.05,momentum=0.9`; where not given, by the rule of `learning_rate.py`
    )
    warm_up: float | None = None  # epochs in which the rate grows from nothing; none, or by the same rule
    schedule: str = "constant"  # or `cosine`, over the whole run
    clip_norm: float | None = None
    size: int | None = None  # pictures are scaled to size × size
    augment: bool = False
    weights: str | None = None  # where the model's weights come from, if not from chance
    head: str | None = None  # `new`: the last layer's do not
    seed: int = 0
    save_every: str = "epoch"  # or `500 steps`, `10 min`, `never`; and at the end, unless never
    keep: int = KEEP  # checkpoints that remain
    watch_layers: int | None = None  # after every so many steps, record weights and gradients by layer

    @property
    def last_epoch(self) -> int | None:
        """How many epochs to make; None where steps alone say how long."""
        return DEFAULT_EPOCHS if self.epochs is None and self.steps is None else self.epochs

    def is_over(self, *, steps: int, epochs: int = 0) -> bool:
        """After so much. Epochs are counted as such: how many steps they take changes with the workers."""
        return (self.steps is not None and steps >= self.steps) or (
            self.last_epoch is not None and epochs >= self.last_epoch
        )

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many steps the whole run takes, if all of it is made by the same workers."""
        return self.steps_left(steps_per_epoch)

    def steps_left(self, steps_per_epoch: int, *, steps: int = 0, of_epochs: int = 0) -> int:
        """After so many `steps`; the present workers would have come as far as this with `of_epochs`."""
        limits = [] if self.steps is None else [self.steps - steps]
        if self.last_epoch is not None:
            limits.append(self.last_epoch * steps_per_epoch - of_epochs)
        return max(0, min(limits))


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that is needed to repeat a run."""

    model: str = "cnn"
    data: str = "digits"
    strategy: str = strategies.DEFAULT
    placement: str = placements.DEFAULT
    codec: str = codecs.DEFAULT
    cluster: Cluster = Cluster()
    train: Train = Train()
    auto: list[str] = []
    """The words that are left to the planner: `strategy`, `workers`, `threads`."""

    def check(self) -> None:
        """Refuse before any process starts."""
        self._check_numbers()
        train = self.train
        for kind, name, known in (
            ("device", self.cluster.device, DEVICES),
            ("schedule", train.schedule, SCHEDULES),
            ("head", HEADS[0] if train.head is None else train.head, HEADS),
        ):
            if name not in known:
                raise UnknownName(kind, name, known)
        for word in self.auto:
            if word not in AUTO_WORDS:
                raise UnknownName("word for the planner to choose", word, AUTO_WORDS)
        if train.head is not None and train.weights is None:
            raise UsageError(f"head={train.head}: it says what --weights leaves alone, so give --weights too")
        intervals.parse(train.save_every)
        if self.cluster.hosts is not None:
            parse_hosts(self.cluster.hosts)
        optimizer = spec.split(train.optimizer)[0] if train.optimizer else None
        mesh = self.mesh()
        strategy = strategies.parse(self.strategy)
        asked = strategies.Asked(workers=mesh.replicas, servers=self.cluster.servers, optimizer=optimizer)
        if train.watch_layers is not None and mesh.members > 1:
            raise UsageError(
                f"watch_layers={train.watch_layers}: it needs a whole model on a worker, and the placement "
                f"{self.placement} divides it; leave one of them out"
            )
        placements.admit(placements.parse(self.placement), mesh, strategy, asked)
        strategies.admit(strategy, asked)
        self._check_codec(strategy, mesh)

    def _check_numbers(self) -> None:
        train = self.train
        for name, value in (
            ("workers", self.cluster.workers),
            ("most_workers", self.cluster.most_workers),
            ("threads", self.cluster.threads),
            ("epochs", train.epochs),
            ("steps", train.steps),
            ("batch", train.batch),
            ("accumulate", train.accumulate),
            ("size", train.size),
            ("keep", train.keep),
            ("watch_layers", train.watch_layers),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: it must be at least 1")
        replace, most = self.cluster.replace, self.cluster.most_workers
        if replace is not None and replace < 0:
            raise UsageError(f"replace={replace}: it must be 0 or more")
        if most is not None and most < self.cluster.workers:
            raise UsageError(f"most_workers={most} is below workers={self.cluster.workers}; leave it out")
        if train.clip_norm is not None and not train.clip_norm > 0:
            raise UsageError(
                f"clip_norm={train.clip_norm:g}: it must be above 0; leave it out to clip nothing"
            )
        if train.warm_up is not None and not 0 <= train.warm_up < math.inf:
            raise UsageError(f"warm_up={train.warm_up:g}: it must be a number of epochs, 0 or more")
        if not 0 <= train.seed <= LARGEST_SEED:
            raise UsageError(f"seed={train.seed}: it must be from 0 to {LARGEST_SEED}")

    def _check_codec(self, strategy: strategies.Strategy, mesh: placements.Mesh) -> None:
        codec = codecs.parse(self.codec)
        name = strategies.describe(strategy)
        strategies.admit_codec(codec, strategy, name, members=mesh.members, device=self.cluster.device)
        if codec.is_sparse:
            text = self.on_fair_terms()[0].train.optimizer or ""
            optimizer, _, settings = spec.split(text)
            has_momentum = optimizer != "sgd" or float(settings.get("momentum", 0)) != 0
            strategies.admit_momentum(codec, optimizer, "momentum" if has_momentum else "")

    @property
    def batch(self) -> int:
        """Samples per worker and step."""
        return self.train.batch or strategies.tuning(strategies.parse(self.strategy)).batch

    def mesh(self) -> placements.Mesh:
        """The shape that the workers form."""
        return placements.parse(self.placement).mesh(self.cluster.workers)

    def on_fair_terms(self, hosts: int = 1) -> tuple["Plan", str]:
        """The plan with a batch, and with an optimizer by the rule of `learning_rate.py` and why that; what it names
        itself stays as it is."""
        strategy = strategies.parse(self.strategy)
        train = msgspec.structs.replace(self.train, batch=self.batch)
        if train.optimizer is not None:
            return msgspec.structs.replace(self, train=train), ""
        mesh = self.mesh()
        terms = learning_rate.terms(
            self.model, strategy, mesh.replicas, hosts=hosts, accumulate=train.accumulate * mesh.shards
        )
        warm_up = terms.warm_up_epochs if train.warm_up is None else train.warm_up
        train = msgspec.structs.replace(train, optimizer=terms.optimizer, warm_up=warm_up)
        return msgspec.structs.replace(self, train=train), terms.why

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def write(self, path: Path) -> None:
        with open(path, "wb", opener=not_through_links) as file:
            file.write(msgspec.json.format(self.encode()) + b"\n")


def decode(content: bytes | str) -> Plan:
    """What `Plan.encode` gave."""
    return msgspec.json.decode(content, type=Plan)


def read(path: Path) -> Plan:
    """A spec in TOML with the words of the command line, or the `plan.json` of an earlier run."""
    words = words_in(path)
    _modernise(words)
    _leave_open(words)
    for word in words:
        if word not in Plan.__struct_fields__:
            raise UsageError(_unknown(word, Plan, f"{path}: unknown section"))
    for section, kind in _SECTIONS.items():
        if section in words:
            _check_section(words[section], kind, f"{path}: [{section}]")
    for section in ("model", "data", "strategy", "placement", "codec"):
        if isinstance(words.get(section), Mapping):
            words[section] = _text(words[section], f"{path}: [{section}]")
        elif not isinstance(words.get(section, ""), str):
            raise UsageError(
                f'{path}: {section} = {_written(words[section])}: a name is expected, as in {section} = "…"'
            )
    try:
        plan = msgspec.convert(words, Plan)
        plan.encode()  # which finds texts that are none
        return plan
    except (UnicodeEncodeError, OverflowError) as error:
        raise UsageError(f"{path} holds a text or a number that no plan can have: {error}") from None
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        raise UsageError(f"{path}: {where.rstrip('`') or 'plan'}: {reason}") from None


def words_in(path: Path) -> dict[str, Any]:
    """What a spec file says, before anything of it is understood."""
    try:
        content = read_small(path, or_pipe=True)
    except OSError as error:
        raise UsageError(
            f"cannot read the spec {path} ({error.strerror}); give the path of a TOML file"
        ) from None
    form = "JSON" if path.suffix == ".json" else "TOML"
    try:
        words = json.loads(content) if form == "JSON" else tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid {form}: {error}") from None
    if not isinstance(words, dict):
        raise UsageError(f"{path} holds no plan: expected the sections {', '.join(Plan.__struct_fields__)}")
    return words


def _modernise(words: dict[str, Any]) -> None:
    """Plans of runs that began when `save` was yes or no go on."""
    train = words.get("train")
    if isinstance(train, dict) and isinstance(train.get("save"), bool):
        train["save_every"] = "epoch" if train.pop("save") else intervals.NEVER


def _leave_open(words: dict[str, Any]) -> None:
    """What says `auto` is for the planner to choose."""
    found = []
    if AUTO in (words.get("strategy"), _get(words.get("strategy"), "name")):
        del words["strategy"]
        found.append("strategy")
    cluster = words.get("cluster")
    for word in ("workers", "threads"):
        if _get(cluster, word) == AUTO:
            words["cluster"] = cluster = {key: value for key, value in cluster.items() if key != word}  # type: ignore[union-attr]
            found.append(word)
    if found:
        words["auto"] = found


def _get(section: Any, word: str) -> Any:
    return section.get(word) if isinstance(section, Mapping) else None


_SECTIONS: dict[str, type[msgspec.Struct]] = {"cluster": Cluster, "train": Train}

_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}


def _unknown(word: str, kind: type[msgspec.Struct], complaint: str) -> str:
    known = kind.__struct_fields__
    homes = [section for section, other in _SECTIONS.items() if word in other.__struct_fields__]
    if homes:
        return f"{complaint} {word!r}; it belongs under [{homes[0]}]"
    return f"{complaint} {word!r}; known: {', '.join(known)}{did_you_mean(word, known, {})}"


def _check_section(section: Any, kind: type[msgspec.Struct], where: str) -> None:
    """Refuse words that are not known, and values of another type than the word has."""
    if not isinstance(section, Mapping):
        raise UsageError(f"{where} is {_written(section)}: a section with words of its own is expected")
    hints = get_type_hints(kind)
    for word, value in section.items():
        if word not in hints:
            raise UsageError(_unknown(word, kind, f"{where.replace('[', 'unknown key in [')}"))
        try:
            msgspec.convert(value, hints[word])
        except (
            msgspec.ValidationError,
            UnicodeEncodeError,
        ):  # the second of half a character, which JSON may have
            choices = get_args(hints[word]) or (hints[word],)
            raise UsageError(
                f"{where} {word} = {_written(value)}: {_EXPECTED[choices[0]]} is expected"
            ) from None


def _written(value: Any) -> str:
    """As the file has it, in characters that can be printed."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace").decode()


def _text(section: Mapping[str, Any], where: str) -> str:
    """`name = "mlp"`, `hidden = [512, 512]` → `mlp:hidden=512-512`."""
    name = section.get("name")
    if not isinstance(name, str):
        slip = next((key for key in section if did_you_mean(key, ["name"], {})), "")
        hint = f"; did you mean name where it says {slip}?" if slip and slip != "name" else ""
        raise UsageError(f'{where} needs a name, as in name = "…"{hint}')
    settings = []
    for key, value in section.items():
        if isinstance(value, Mapping):
            raise UsageError(
                f"{where} {key} is a section of its own; settings are numbers, texts or lists of them"
            )
        if key != "name":
            settings.append(f"{key}={spec.text(value)}")
    if not settings:
        return name
    return f"{name}{',' if ':' in name else ':'}{','.join(settings)}"
