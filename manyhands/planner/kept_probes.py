"""Probes that were made before, and whether one still holds: by host, PyTorch, job and what was held fixed.

A check of a fraction of a second decides: two small kernels take what they took when the probe was made, on the
processor's own clock. A host whose cores, control group or library is another one has another key.
"""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from manyhands.cluster.launcher import cores
from manyhands.planner import cache_folder
from manyhands.planner.measure import HostProbe, ProbedJob

FORM = 1
"""Of the files: others are not read."""
OLDEST_S = 30 * 24 * 3600.0
TOLERANCE = 3.0
"""How many times faster or slower a kernel of the check may be: a neighbour on the other half of a core alone doubles
what it takes, also at its least."""

_CHECK_S = 0.12


class KeptProbe(msgspec.Struct, frozen=True, kw_only=True):
    form: int
    known_by: dict[str, Any]
    check_s: tuple[float, ...]
    probe: HostProbe


@dataclass(frozen=True, kw_only=True)
class ProbeLookup:
    """A probe that was kept, or why there is none to use."""

    probe: HostProbe | None
    why_not: str = ""


def known_by(job: ProbedJob, fixed: Mapping[str, int | None]) -> dict[str, Any]:
    """All that a probe depends on."""
    return {"host": host(), "torch": _version("torch"), "job": dict(job.known_by), "fixed": dict(fixed)}


def host() -> dict[str, Any]:
    """What tells this host from others, and from what it was before."""
    return {
        "machine": _text("/etc/machine-id") or platform.node(),
        "processor": _processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "quota": cores.quota_cores(),
    }


def find(known: Mapping[str, Any], check: Callable[[], tuple[float, ...]] | None = None) -> ProbeLookup:
    """The probe that was kept for this, if it holds."""
    kept = cache_folder.get(_path(known), KeptProbe)
    if kept is None or kept.form != FORM or kept.known_by != _plain(known):
        return ProbeLookup(probe=None, why_not="it was not measured before")
    if time.time() - kept.probe.made_at > OLDEST_S:
        return ProbeLookup(probe=None, why_not="it was measured more than 30 days ago")
    for before_s, now_s in zip(kept.check_s, (check or check_s)(), strict=False):
        if not 1 / TOLERANCE < now_s / before_s < TOLERANCE:
            return ProbeLookup(
                probe=None,
                why_not=f"the host now takes {now_s / before_s:.2f} times what it took when it was measured",
            )
    return ProbeLookup(probe=kept.probe)


def keep(known: Mapping[str, Any], probe: HostProbe) -> Path:
    path = _path(known)
    cache_folder.put(path, KeptProbe(form=FORM, known_by=_plain(known), check_s=check_s(), probe=probe))
    return path


def check_s() -> tuple[float, float]:
    """Processor seconds of two kernels of one thread, at their least: one computes in the cache, one goes through
    memory."""
    small, large = np.linspace(0.0, 1.0, 1 << 13), np.ones(1 << 22, dtype=np.float32)
    return _least_s(lambda: np.exp(small)), _least_s(lambda: np.add(large, 1.0, out=large))


def _least_s(call: Callable[[], object]) -> float:
    found: list[float] = []
    end_s = time.process_time() + _CHECK_S
    while time.process_time() < end_s or len(found) < 8:
        began_s = time.process_time()
        call()
        found.append(time.process_time() - began_s)
    return min(found)


def _path(known: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(_plain(known), order="deterministic")).hexdigest()
    return cache_folder.folder() / "probes" / f"{digest[:32]}.json"


def _plain(known: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(known))
    return plain


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    lines = (line for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model name"))
    return next(lines, platform.machine()).partition(":")[2].strip() or platform.machine()


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
