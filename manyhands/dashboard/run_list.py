"""Which runs a directory holds and how each of them stands, without reading a run."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec

from manyhands.foreign.regular import open_regular, read_small
from manyhands.telemetry.lines import Record, decode, number

NAME = re.compile(r"[^/\x00]{1,255}")
LIVE_S = 6.0
"""A run that has written nothing for so long is not live: every process writes about once a second."""
SUMMED = (
    "samples_per_second",
    "loss",
    "accuracy",
    "steps",
    "samples",
    "workers",
    "hosts",
    "wall_s",
    "bytes_sent",
)
TERMINAL = "terminal.log"
"""What `manyhands train` said where the page has started it."""
ASKED = "asked.json"
"""The plan that the page has started it with."""
_TAIL_BYTES = 1 << 15


class RunList:
    """The runs under a directory, or the one that the directory itself is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._known: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}

    def place(self, name: str) -> Path | None:
        """Where the run of that name is. A name that leads anywhere but to a folder right here is no run's."""
        if name == self.directory.name and _is_run(self.directory):
            return self.directory
        if not NAME.fullmatch(name) or name.startswith("."):
            return None
        place = self.directory / name
        return place if not place.is_symlink() and place.is_dir() and _is_run(place) else None

    def names(self) -> list[str]:
        if _is_run(self.directory):
            return [self.directory.name]
        try:
            with os.scandir(self.directory) as entries:
                found = [
                    entry.name
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False)
                    and not entry.name.startswith(".")
                    and _is_text(entry.name)
                ]
        except OSError:
            return []
        return [name for name in found if _is_run(self.directory / name)]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each run, live ones first, then the newest first."""
        names = self.names()
        self._known = {name: known for name, known in self._known.items() if name in names}
        rows = [self.row(name) for name in names]
        return sorted(rows, key=lambda row: (row["state"] != "live", -row["changed_t"]))

    def row(self, name: str) -> dict[str, Any]:
        """How a run stands; looked at again only when one of its files has changed."""
        run = self.place(name) or self.directory / name
        stamps = tuple(
            _stamp(run / path) for path in ("summary.json", "plan.json", "events/worker-0.jsonl", TERMINAL)
        )
        newest_t = max(_newest_t(run), *(stamp / 1e9 for stamp in stamps))
        known = self._known.get(name)
        if known is None or known[0] != stamps:
            known = self._known[name] = (stamps, _facts(run))
        row = {"name": name, "changed_t": newest_t, **known[1]}
        row["state"] = _state(row, time.time() - newest_t < LIVE_S)
        return row


def _is_run(place: Path) -> bool:
    return any((place / name).exists() for name in ("plan.json", "events", "summary.json", ASKED))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stamp(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _newest_t(run: Path) -> float:
    """When a process of the run has last written; of very many files, those of the first few tell."""
    names = ("worker-0", "worker-1", "worker-2", "launcher", "host-0", "host-1", "server-0")
    return max(_stamp(run / "events" / f"{name}.jsonl") for name in names) / 1e9


def _state(row: dict[str, Any], is_fresh: bool) -> str:
    if row["is_done"]:
        return "finished"
    if is_fresh and not row["has_ended"]:
        return "live"
    return "failed" if row["error"] else "stopped" if row["steps"] else "empty"


def _facts(run: Path) -> dict[str, Any]:
    plan = read_json(run / "plan.json") or read_json(run / ASKED) or {}
    summary = read_json(run / "summary.json")
    facts: dict[str, Any] = dict.fromkeys(SUMMED) | _last_of(run)
    if summary is not None:
        facts |= {name: number(summary.get(name)) for name in SUMMED}
    for name in ("model", "data", "strategy", "placement"):
        value = plan.get(name) or (summary or {}).get(name) or facts.get(name)
        facts[name] = str(value)[:200] if value else ""
    cluster = plan.get("cluster")
    if facts["workers"] is None and isinstance(cluster, dict):
        facts["workers"] = number(cluster.get("workers"))
    return facts | {"is_done": summary is not None, "error": "" if summary else _error(run)}


def _last_of(run: Path) -> dict[str, Any]:
    """What the last lines of worker 0 say, of a run that has no summary."""
    facts: dict[str, Any] = {"has_ended": False}
    for record in _edges(run / "events" / "worker-0.jsonl"):
        if record["kind"] == "start":
            facts |= {name: record[name] for name in ("model", "data", "strategy") if name in record}
            facts["has_ended"] = False
        elif record["kind"] == "step":
            facts |= {"steps": number(record.get("step")), "loss": number(record.get("loss"))}
        elif record["kind"] == "evaluate":
            facts["accuracy"] = number(record.get("accuracy"))
        facts["has_ended"] = record["kind"] == "end" or (facts["has_ended"] and record["kind"] == "process")
    return facts


def _edges(path: Path) -> list[Record]:
    """The records of the first and of the last few kilobytes of a file."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            lines = file.read(_TAIL_BYTES).split(b"\n")
            if size > 2 * _TAIL_BYTES:
                file.seek(size - _TAIL_BYTES)
            lines += file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    return [record for line in lines if line and (record := decode(line)) is not None]


def _error(run: Path) -> str:
    """The last error that the command line has shown."""
    lines = terminal(run).splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return " ".join(lines[errors[-1] :])[:2000] if errors else ""


def terminal(run: Path, most: int = 1 << 16) -> str:
    """The end of what the command line has shown of a run that the page has started."""
    try:
        with open_regular(run / TERMINAL) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


def read_json(path: Path) -> dict[str, Any] | None:
    """An object in a small file; None where there is none."""
    try:
        found = json.loads(read_small(path))
        # A page cannot be told half a surrogate, nor of the other runs beside it.
        msgspec.json.encode(found)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
