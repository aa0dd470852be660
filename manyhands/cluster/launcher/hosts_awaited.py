"""What the launcher of a run with several hosts says until they have come: which are missing, and how they join."""

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.launch_plan import LaunchPlan

AGAIN_S = 30.0


def more_hosts(count: int) -> str:
    return "1 more host" if count == 1 else f"{count} more hosts"


class HostsAwaited:
    """`hosts` must come before the run begins, this one at `address` included."""

    def __init__(self, plan: LaunchPlan, hosts: int, address: str, on_event: Callable[[Event], None]) -> None:
        self._plan = plan
        self._hosts = hosts
        self._address = address.rpartition(":")[0]
        self._here: list[str] = []
        self._on_event = on_event
        self._said_s = float("-inf")

    def note(self, here: Sequence[str]) -> None:
        """These hosts are here besides this one; one that was may have left."""
        if here == self._here:
            return
        self._here = [*here]
        self._said_s = float("-inf")
        if not self.missing:
            self._on_event(Event(kind="hosts", text=f"all {len(self._here) + 1} hosts are here"))

    @property
    def missing(self) -> str:
        """What the run waits for before it begins, if anything."""
        missing = self._hosts - 1 - len(self._here)
        return more_hosts(missing) if missing > 0 else ""

    def tick(self) -> None:
        """Say what is missing, again and again."""
        now_s = time.monotonic()
        if not self.missing or now_s - self._said_s < AGAIN_S:
            return
        self._said_s = now_s
        verb = "has" if len(self._here) == 1 else "have"
        here = f" ({', '.join(self._here)} {verb} come)" if self._here else ""
        text = f"waiting for {self.missing}{here}; there, in a directory with the script:\n  {self.command()}"
        self._on_event(Event(kind="hosts", text=text))

    def command(self) -> str:
        """What to type on another host."""
        plan = self._plan
        run = plan.run_dir or Path("run")
        name = shlex.quote(run.name)
        source = shlex.quote(f"{self._address}:{run / 'join.json'}")
        servers = f" --servers {plan.servers}" if plan.servers else ""
        join = f"manyhands launch --join {name} --workers {plan.workers}{servers}"
        return f"mkdir -pm 700 {name} && scp {source} {name}/ && {join}"
