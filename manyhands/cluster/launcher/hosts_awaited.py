"""What the launcher of a run with several hosts says until they have come: which are missing, and how they join."""

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.launch_plan import LaunchPlan

AGAIN_S = 30.0


class HostsAwaited:
    """`hosts` must come before the run begins, this one at `address` included."""

    def __init__(self, plan: LaunchPlan, hosts: int, address: str, on_event: Callable[[Event], None]) -> None:
        self._plan = plan
        self._missing = hosts - 1
        self._address = address.rpartition(":")[0]
        self._here: list[str] = []
        self._on_event = on_event
        self._said_s = float("-inf")

    def note(self, here: Sequence[str]) -> None:
        """The coordinator has heard of these hosts besides this one."""
        came = [address for address in here if address not in self._here]
        if not came:
            return
        self._missing -= len(came)
        self._here += came
        self._said_s = float("-inf")
        if self._missing <= 0:
            self._on_event(Event(kind="hosts", text=f"all {len(self._here) + 1} hosts are here"))

    def tick(self) -> None:
        """Say what is missing, again and again."""
        now_s = time.monotonic()
        if self._missing <= 0 or now_s - self._said_s < AGAIN_S:
            return
        self._said_s = now_s
        hosts = "1 more host" if self._missing == 1 else f"{self._missing} more hosts"
        here = f" ({', '.join(self._here)} has come)" if self._here else ""
        text = f"waiting for {hosts}{here}; there, in a directory with the script:\n  {self.command()}"
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
