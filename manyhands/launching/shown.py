"""What a person sees of a run besides its progress: what the processes print, and what happens to them."""

import time
from contextlib import suppress
from pathlib import Path

from manyhands.cluster.launcher.events import Event
from manyhands.foreign.regular import not_through_links
from manyhands.launching import words
from manyhands.launching.display import Display
from manyhands.telemetry import lines


class Shown:
    """Shows a person what the processes of a run print and what happens to them; keeps the events with the run."""

    def __init__(
        self,
        display: Display,
        run: Path,
        workers: int,
        servers: int,
        *,
        has_hosts: bool,
        is_debugged: bool,
    ) -> None:
        self._display = display
        self._is_debugged = is_debugged
        self._records = run / "events" / "launcher.jsonl"
        self._workers = workers
        self._servers = servers
        self._has_hosts = has_hosts

    def line(self, rank: int, line: str) -> None:
        self._display.print_line(self._signed(rank, line))

    def output(self, rank: int, line: str) -> None:
        if not self._is_debugged:
            print(self._signed(rank, line), flush=True)

    def say(self, text: str) -> None:
        """Not from a worker."""
        if self._is_debugged:
            words.say(text)
        else:
            self._display.print_line(text)

    def event(self, event: Event) -> None:
        self.say(event.text)
        with suppress(OSError), open(self._records, "ab", opener=not_through_links) as file:
            file.write(lines.encode({"kind": event.kind, "t": time.time(), "rank": -1, **event.fields}))

    def _signed(self, rank: int, line: str) -> str:
        if self._workers <= rank < self._workers + self._servers:
            name = rank if self._has_hosts else rank - self._workers
            return f"[server {name}] {line}"
        return f"[worker {rank}] {line}" if self._workers > 1 else line
