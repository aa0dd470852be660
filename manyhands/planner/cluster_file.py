"""Machines that are not at hand: hosts of kinds and counts, links, failures and cost, from a file in TOML.

[[hosts]]
kind = "here"                    # as measured on this machine
count = 2

[[hosts]]
kind = "c7i.2xlarge"             # never measured: scaled
count = 6
cores = 8
memory_gb = 16
gflops_per_core = 70             # the reference kernels of `manyhands probe`; as here where not given
gbytes_per_s_per_core = 9
cost_per_hour = 0.36
failures_per_hour = 0.0005

[link]                           # between any two hosts
gbit_per_s = 10
latency_us = 60
"""

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from manyhands.errors import UsageError, did_you_mean
from manyhands.foreign.regular import read_small
from manyhands.planner.facts import ClusterFacts, Estimate, HostFacts, HostsOfKind, LinkFacts
from manyhands.planner.scaled_host import scaled

HERE = "here"

MOST_HOSTS = 4096


class HostsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[hosts]]`."""

    kind: str
    count: int = 1
    cores: int | None = None
    memory_gb: float | None = None
    gflops_per_core: float | None = None
    gbytes_per_s_per_core: float | None = None
    cost_per_hour: float = 0.0
    failures_per_hour: float = 0.0
    machine: str = ""


class LinkSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[link]`, and `[[links]]` with the two kinds that it is between."""

    gbit_per_s: float
    latency_us: float = 100.0
    both_ways: float = 1.0
    cpu_ns_per_byte: float = 1.5
    shared: bool = False
    between: tuple[str, str] | None = None


class ClusterWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    hosts: tuple[HostsSection, ...]
    link: LinkSection | None = None
    links: tuple[LinkSection, ...] = ()
    recovery_s: float = 2.0


def read_cluster(path: Path, measured: HostFacts) -> ClusterFacts:
    """The cluster of a file, with this machine's measurements for what the file says nothing of."""
    return cluster_of(words_in(path), measured)


def words_in(path: Path) -> ClusterWords:
    """What a file says, as far as it can be right without any machine."""
    words = _words(path)
    _check(words, path)
    return words


def cluster_of(words: ClusterWords, measured: HostFacts) -> ClusterFacts:
    hosts = tuple(
        HostsOfKind(
            host=_host(section, measured),
            count=section.count,
            machine=section.machine,
            cost_per_hour=section.cost_per_hour,
            failures_per_hour=section.failures_per_hour,
        )
        for section in words.hosts
    )
    return ClusterFacts(
        hosts=hosts,
        link=_link(words.link) if words.link else None,
        links=tuple((*link.between, _link(link)) for link in words.links if link.between),
        recovery_s=words.recovery_s,
    )


def _words(path: Path) -> ClusterWords:
    try:
        found = tomllib.loads(read_small(path, or_pipe=True).decode())
    except OSError as error:
        raise UsageError(
            f"cannot read the cluster file {path} ({error.strerror}); give the path of a TOML file"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    _known(found, ClusterWords, path, "")
    for name, kind in (("hosts", HostsSection), ("links", LinkSection)):
        for section in found.get(name, []) if isinstance(found.get(name), list) else []:
            _known(section, kind, path, f"[[{name}]] ")
    _known(found.get("link", {}), LinkSection, path, "[link] ")
    try:
        return msgspec.convert(found, ClusterWords)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        raise UsageError(f"{path}: {where.strip('.`') or 'cluster'}: {reason}") from None


def _known(section: Any, kind: type[msgspec.Struct], path: Path, where: str) -> None:
    if not isinstance(section, dict):
        return
    known = kind.__struct_fields__
    for word in section:
        if word not in known:
            raise UsageError(
                f"{path}: {where}unknown word {word!r}; known: {', '.join(known)}{did_you_mean(word, known, {})}"
            )


def _check(words: ClusterWords, path: Path) -> None:
    if not words.hosts:
        raise UsageError(f"{path} names no hosts; write [[hosts]] with kind and count")
    kinds = [section.kind for section in words.hosts]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise UsageError(
                f"{path}: kind {kind!r} is there {kinds.count(kind)} times; give one count for all"
            )
    for section in words.hosts:
        for word in ("count", "cores", "memory_gb", "gflops_per_core", "gbytes_per_s_per_core"):
            value = getattr(section, word)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{path}: [[hosts]] {section.kind}: {word} = {value:g}: it must be above 0")
        for word in ("cost_per_hour", "failures_per_hour"):
            if not 0 <= getattr(section, word) < math.inf:
                raise UsageError(
                    f"{path}: [[hosts]] {section.kind}: {word} = {getattr(section, word):g}: it must be 0 or more"
                )
    total = sum(section.count for section in words.hosts)
    if total > MOST_HOSTS:
        raise UsageError(f"{path} has {total} hosts, and plans are for at most {MOST_HOSTS}; use fewer")
    _check_links(words, path, total)


def _check_links(words: ClusterWords, path: Path, total: int) -> None:
    kinds = {section.kind for section in words.hosts}
    for link in (*([words.link] if words.link else []), *words.links):
        if not 0 < link.gbit_per_s < math.inf:
            raise UsageError(f"{path}: [link] gbit_per_s = {link.gbit_per_s:g}: it must be above 0")
        costs = (link.latency_us, link.cpu_ns_per_byte)
        if not all(0 <= cost < math.inf for cost in costs) or not 1 <= link.both_ways <= 2:
            raise UsageError(
                f"{path}: [link] latency_us and cpu_ns_per_byte must be 0 or more, and both_ways from 1 (a direction "
                "has all of the bandwidth) to 2 (both share it)"
            )
    for link in words.links:
        unknown = [kind for kind in link.between or () if kind not in kinds]
        if unknown or not link.between:
            raise UsageError(
                f"{path}: [[links]] needs between = [kind, kind] of the hosts {', '.join(sorted(kinds))}"
                + (f"; {unknown[0]!r} is none of them" if unknown else "")
            )
    if total > 1 and words.link is None:
        raise UsageError(f"{path} has {total} hosts and no [link] between them; write [link] with gbit_per_s")


def _host(section: HostsSection, measured: HostFacts) -> HostFacts:
    given = (section.cores, section.gflops_per_core, section.gbytes_per_s_per_core)
    if section.kind == HERE and all(value is None for value in given):
        memory = section.memory_gb
        return msgspec.structs.replace(
            measured, kind=HERE, memory_bytes=int(memory * 1e9) if memory else measured.memory_bytes
        )
    return scaled(
        measured,
        section.kind,
        cores=section.cores or measured.cores,
        memory_bytes=int(section.memory_gb * 1e9) if section.memory_gb else measured.memory_bytes,
        flops_per_s=section.gflops_per_core and section.gflops_per_core * 1e9,
        bytes_per_s=section.gbytes_per_s_per_core and section.gbytes_per_s_per_core * 1e9,
    )


def _link(section: LinkSection) -> LinkFacts:
    """What a file says is a promise, and no measurement: it may be a tenth off."""
    return LinkFacts(
        latency_s=Estimate.about(section.latency_us * 1e-6, 0.3),
        s_per_byte=Estimate.about(8e-9 / section.gbit_per_s, 0.1),
        both_ways=Estimate(section.both_ways),
        cpu_s_per_byte=Estimate.about(section.cpu_ns_per_byte * 1e-9, 0.2),
        shared=section.shared,
    )
