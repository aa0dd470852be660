"""What a page is told of a run: everything at first, then what has changed.

Curves are sent from where they have changed: the page drops its points from `from` on and appends those that came. When
the pieces of a curve have become wider, that is from the beginning.
"""

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.dashboard.buckets import Buckets, Columns
from manyhands.dashboard.run_list import ASKED, read_json
from manyhands.dashboard.run_view import RunView
from manyhands.dashboard.worker_times import PARTS
from manyhands.diagnosis import Finding
from manyhands.errors import UsageError
from manyhands.telemetry.lines import number

COLUMNS = 1000
RATE = "time:samples"
MOST_ROWS = 64
"""Workers that have a row of their own on the page; of more it shows a picture."""


@dataclass(kw_only=True)
class ReadRun:
    """A run as far as it is read."""

    place: Path
    view: RunView = field(default_factory=RunView)
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: int = 0
    is_behind: bool = True
    damaged: int = 0
    findings: list[Finding] = field(default_factory=list)
    widths: dict[str, float] = field(default_factory=dict)
    """Of each curve's columns as they were told last."""
    told: int = -1
    """The version of what happened that was told last."""


def snapshot(run: ReadRun) -> dict[str, Any]:
    """Everything; the zoom of each plot is the page's to ask for."""
    return _message(run, is_whole=True)


def changes(run: ReadRun) -> dict[str, Any]:
    """Since the last time that this was asked."""
    return _message(run, is_whole=False)


def zoomed(run: ReadRun, name: str, first: float, last: float, most: int) -> dict[str, Any]:
    """A part of one curve, in about `most` columns, with the least and the greatest value of each."""
    curve = curves_of(run).get(name)
    if curve is None:
        raise UsageError(f"this run has no curve {name[:100]!r}")
    with run.lock:
        return _points(name, curve.columns(first, last, group=curve.group(first, last, most=most)))


def curves_of(run: ReadRun) -> dict[str, Buckets]:
    """All curves by the names that a page has for them."""
    view = run.view
    curves = {f"step:{name}": curve for name, curve in view.by_step.items()}
    curves |= {f"time:{name}": curve for name, curve in view.by_time.items()}
    for host, of_host in view.hosts.curves.items():
        curves |= {f"host {host}:{name}": curve for name, curve in of_host.items()}
    return curves


def _message(run: ReadRun, *, is_whole: bool) -> dict[str, Any]:
    view = run.view
    sent = {}
    for name, curve in curves_of(run).items():
        changed_from = -math.inf if is_whole else curve.take_changed()
        group = curve.group(most=COLUMNS)
        width = group * curve.width
        if not is_whole and run.widths.get(name) != width:
            run.widths[name], changed_from = width, -math.inf
        if changed_from < math.inf:
            sent[name] = _points(name, curve.columns(changed_from, group=group)) | {
                "from": _edge(curve, changed_from, width)
            }
    happened = view.happenings
    message: dict[str, Any] = {
        "type": "whole" if is_whole else "changes",
        "version": run.version,
        "head": _head(run),
        "curves": sent,
        "workers": _workers(run),
        "hosts": view.hosts.newest,
        "findings": [
            {
                "kind": one.kind,
                "text": one.text,
                "advice": one.advice,
                "share": one.share,
                "processes": one.processes,
            }
            for one in run.findings
        ],
    }
    if is_whole or happened.version != run.told:
        run.told = run.told if is_whole else happened.version
        message |= {
            "events": happened.listed(),
            "evaluations": happened.evaluations,
            "classes": happened.classes,
            "layers": happened.layers,
        }
    if view.staleness:
        message["staleness"] = sorted(view.staleness.items())[:200]
    if is_whole:
        message |= papers(run.place)
        message["predicted"] = read_json(run.place / "prediction.json")
    return message


def papers(place: Path) -> dict[str, Any]:
    """The plan of a run, as it was settled or else as it was asked for, and its summary."""
    plan = read_json(place / "plan.json") or read_json(place / ASKED)
    return {"plan": plan, "summary": read_json(place / "summary.json")}


def _edge(curve: Buckets, x: float, width: float) -> float | None:
    """Where the column begins that x lies in; None for all of the curve."""
    return curve.start + (x - curve.start) // width * width if x > -math.inf else None


def _points(name: str, columns: Columns) -> dict[str, Any]:
    """Samples of a piece of time are a rate; anything else has a mean, and the range that it is in."""
    if name == RATE:
        return {
            "width": columns.width,
            "x": columns.x.tolist(),
            "mean": (columns.total / columns.width).tolist(),
        }
    return {
        "width": columns.width,
        "x": columns.x.tolist(),
        "mean": columns.mean.tolist(),
        "low": columns.low.tolist(),
        "high": columns.high.tolist(),
    }


def _head(run: ReadRun) -> dict[str, Any]:
    """The figures of the run as it is now."""
    view, now = run.view, time.time()
    samples_per_second, _ = view.speed(now)
    facts = {name: view.facts.get(name) for name in ("model", "data", "strategy", "placement", "batch")}
    return facts | {
        "step": view.step,
        "total_steps": _whole(view.facts.get("total_steps")),
        "epoch": view.epoch,
        "epochs": _whole(view.facts.get("epochs")),
        "workers": len(view.present),
        "samples_per_second": samples_per_second,
        "left_s": view.left_s(now),
        "first_t": view.first_t if view.first_t < math.inf else None,
        "last_t": view.last_t if view.last_t > -math.inf else None,
        "now_t": now,
        "has_ended": bool(view.ended) and len(view.ended) >= len(view.present),
        "is_behind": run.is_behind,
        "damaged": run.damaged,
        "left_out": view.happenings.left_out,
    }


def _workers(run: ReadRun) -> dict[str, Any]:
    """Where the time goes: a row for each worker where they are few, and the mean of all."""
    view = run.view
    if view.times is None:
        return {"count": 0, "rows": [], "mean": None}
    recent = view.times.shares(recent=True)
    present = recent[recent.sum(axis=1) > 0]
    return {
        "count": view.times.workers,
        "parts": [*PARTS, "other"],
        "rows": list(_rows(view, recent)) if view.times.workers <= MOST_ROWS else [],
        "mean": present.mean(axis=0).round(4).tolist() if len(present) else None,
    }


def _rows(view: RunView, recent: NDArray[np.float64]) -> Iterator[dict[str, Any]]:
    assert view.times is not None
    ever, rates = view.times.shares(recent=False), view.times.rates()
    for rank in range(view.times.workers):
        usage = view.usage.get(rank, {})
        step, t, epoch = view.last_step.get(rank, (0, 0.0, 0))
        yield {
            "rank": rank,
            "step": step,
            "last_t": t,
            "epoch": epoch,
            "recent": recent[rank].round(4).tolist(),
            "ever": ever[rank].round(4).tolist(),
            "rate": float(rates[rank]),
            "is_gone": rank in view.happenings.gone,
            "cpu_percent": number(usage.get("cpu_percent")),
            "memory_bytes": number(usage.get("memory_bytes")),
        }


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else None


def run_picture(run: ReadRun, what: str, first: int) -> tuple[bytes, dict[str, str]]:
    """Workers × columns of time, a byte each, from the column `first` on; and what that picture is of."""
    times = run.view.times
    if times is None:
        return b"", {"X-Workers": "0", "X-Columns": "0", "X-First": "0", "X-Width": "1", "X-Start": "0"}
    with run.lock:
        first = min(max(first, 0), times.columns)
        shades = times.picture(what, first)
        shape = {"Workers": times.workers, "Columns": times.columns, "First": first}
        place = {"Width": times.width_s, "Start": times.start_t}
    return shades.tobytes(), {f"X-{name}": repr(value) for name, value in (shape | place).items()}
