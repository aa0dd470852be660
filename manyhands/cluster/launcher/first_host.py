"""The first host of a run, as the launcher of another host knows it: whether it is heard, and for how long to wait.

The coordinator is there. While nothing is heard of it, the workers of this host cannot go on: the launcher says so, now
and then, and gives up when it has waited long enough.
"""

import time
from collections.abc import Callable

from manyhands.cluster.coordinator.control import HostThere, RunEnded
from manyhands.cluster.coordinator.remote_hosts import SILENCE_S
from manyhands.cluster.launcher.blame import RunFailure
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.hosts_awaited import AGAIN_S, more_hosts
from manyhands.cluster.launchers import local
from manyhands.errors import FirstHostLost

WAIT_S = 600.0
_BY_SIGNAL = 128  # exit codes above it are not passed on: no signal has ended this launcher


class FirstHost:
    """The one at `place`, an address and a port; this host waits for it for up to `wait_s` seconds."""

    def __init__(self, place: str, wait_s: float, on_event: Callable[[Event], None]) -> None:
        self._place = place
        self._wait_s = wait_s
        self._on_event = on_event
        self._missing = 0  # hosts that must still come before the run begins
        self._heard_s = time.monotonic()
        self._say_at_s = self._heard_s + AGAIN_S
        self._has_said_silent = False
        self.ended: RunEnded | None = None
        """How the run has ended, once the first host has said so."""

    @property
    def has_ended_well(self) -> bool:
        return self.ended is not None and self.ended.exit_code in local.GOOD_ENDS

    @property
    def failure(self) -> RunFailure | None:
        """How the run has ended, if not well."""
        if self.ended is None or self.has_ended_well:
            return None
        code = self.ended.exit_code
        message = f"the run of {self._place} has ended: {self.ended.text}"
        return RunFailure(message, code if code < _BY_SIGNAL else local.EXIT_CRASHED)

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._heard_s

    def hear(self, said: HostThere | RunEnded) -> None:
        if self._has_said_silent:
            self._tell(f"the first host, {self._place}, is heard again after {self._silent_s:.0f} s")
            self._has_said_silent = False
        self._heard_s = time.monotonic()
        if isinstance(said, RunEnded):
            self.ended = said
            return
        if said.missing != self._missing:
            self._missing = said.missing
            self._say_at_s = 0.0 if said.missing else self._heard_s + AGAIN_S

    def waits_for(self, *, is_in_the_run: bool) -> str:
        """What keeps the workers of this host from going on, if anything does."""
        if self.ended:
            return ""
        if self._silent_s > SILENCE_S:
            return f"the first host, {self._place}"
        if self._missing:
            return more_hosts(self._missing)
        return "" if is_in_the_run else f"a place in the run of {self._place}"

    def tick_before(self, limit_s: float) -> None:
        """Before the first answer: say what this host waits for; raises when it has waited long enough."""
        if self._silent_s > min(limit_s, self._wait_s):
            raise FirstHostLost(
                f"the run of {self._place} has not answered for {self._silent_s:.0f} s; check that it goes on, "
                "that its address can be reached from here, and that its join.json is the newest"
            )
        if self._silent_s > SILENCE_S and not self._has_said_silent:
            self._has_said_silent = True
            self._tell(
                f"waiting for the run of {self._place} to answer, for {min(limit_s, self._wait_s):.0f} s"
            )

    def tick(self, *, is_in_the_run: bool) -> None:
        """Say what this host waits for, again and again; raises when it has waited long enough."""
        silent_s = self._silent_s
        if silent_s > self._wait_s:
            raise FirstHostLost(self._given_up())
        what = self.waits_for(is_in_the_run=is_in_the_run)
        is_silent = silent_s > SILENCE_S and self.ended is None
        if not what or (time.monotonic() < self._say_at_s and is_silent == self._has_said_silent):
            return
        self._has_said_silent = is_silent
        self._say_at_s = time.monotonic() + AGAIN_S
        if is_silent:
            left_s = self._wait_s - silent_s
            more = f", of which nothing was heard for {silent_s:.0f} s; this host waits for it {left_s:.0f} s more"
        elif self._missing:
            more = f" before the run of {self._place} begins; this host waits as long as the first one does"
        else:
            more = ", into which others come between two steps and as far as it has room"
        self._tell(f"waiting for {what}{more}")

    def _tell(self, text: str) -> None:
        self._on_event(Event(kind="hosts", text=text))

    def _given_up(self) -> str:
        if self.ended:
            return (
                f"the run of {self._place} has ended {self._wait_s:.0f} s ago, and this host has ended what was still "
                "at work in it"
            )
        return (
            f"nothing was heard of the first host, {self._place}, for {self._wait_s:.0f} s, and this host has waited "
            "long enough; join again when it can be reached, or start the run again from its last checkpoint "
            "(--resume, or session.resume in a script)"
        )
