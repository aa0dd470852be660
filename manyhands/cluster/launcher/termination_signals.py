"""The signals that end a run, noted instead of obeyed."""

import signal
from types import FrameType
from typing import Any


class TerminationSignals:
    """Notes SIGINT, SIGTERM and SIGHUP while the context lasts; the main thread must enter it.

    With `leaves_interrupts` a terminal's Ctrl-C is for a worker that has the same terminal.
    """

    def __init__(self, *, leaves_interrupts: bool = False) -> None:
        self._leaves_interrupts = leaves_interrupts
        self.number: int | None = None
        """The first that came."""
        self.count = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "TerminationSignals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup a closed terminal stays ignored. An ignored SIGINT only means that a script's shell
            # started the launcher in the background: a person who sends it all the same wants the run to end.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._leaves_interrupts and number == signal.SIGINT:
            return
        self.number = self.number or number
        self.count += 1
