"""Contenders that are all alive from the beginning, of which one at a time has a turn of a few steps.

A turn takes a second or less. What the machine does meanwhile, or what its other users do, so meets all contenders
about alike; a turn that is a whole run, with its start, takes so long that it finds another machine than the one
before. A contender is a process that starts workers. Each worker connects to the contender's own socket, whose path it
is given, and does what it is asked: an order is one message in JSON, and so is the answer.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from manyhands.errors import ManyhandsError

END_S, HURRY_S = 30.0, 0.5
"""How long contenders may take to end by themselves; the second after an error or an interrupt."""
_LARGEST_BYTES = 1 << 17

Order = dict[str, Any]
Answer = dict[str, Any]


class ContenderLost(ManyhandsError):
    """A contender has ended, or does not answer; the others go on."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason


class ContenderProcess(Protocol):
    """What starts a contender's workers, and ends when they have; `multiprocessing.Process` is one."""

    @property
    def sentinel(self) -> int: ...  # readable once it has ended
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> object: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class TurnTaking:
    """Leaving the context ends every contender."""

    def __enter__(self) -> "TurnTaking":
        self._folder = TemporaryDirectory(prefix="manyhands-turns-", ignore_cleanup_errors=True)
        self._doors: dict[str, socket.socket] = {}
        self._processes: dict[str, ContenderProcess] = {}
        self._workers: dict[str, list[socket.socket]] = {}
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            for name in list(self._doors):
                self._hang_up(name)
            _end(list(self._processes.values()), END_S if exception[0] is None else HURRY_S)
        finally:
            self._folder.cleanup()

    def start(self, name: str, begin: Callable[[str], ContenderProcess]) -> None:
        """Start a contender; `begin` is given the path of the socket to which its workers connect."""
        path = str(Path(self._folder.name) / f"{len(self._doors)}")
        Path(self._folder.name).mkdir(mode=0o700, exist_ok=True)  # all doors so far may be shut
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._doors[name], self._workers[name] = door, []
        door.bind(path)
        door.listen()
        self._processes[name] = begin(path)

    def meet(self, name: str, workers: int, timeout_s: float | None = None) -> None:
        """Wait for the workers of a contender that was started."""
        found: dict[int, socket.socket] = {}
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while len(found) < workers:
            self._wait(name, self._doors[name], end_s)
            baton = self._doors[name].accept()[0]
            self._workers[name].append(baton)
            found[self._hear(name, baton, end_s)["rank"]] = baton
        self._workers[name] = [found[rank] for rank in sorted(found)]
        self._shut(name)

    def ask(self, name: str, order: Order, timeout_s: float | None = None) -> list[Answer]:
        """Have all workers of a contender do something; their answers, by rank."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            for baton in self._workers[name]:
                baton.send(json.dumps(order).encode())
        except OSError:
            raise ContenderLost(name, "has ended before its turn") from None
        return [self._hear(name, baton, end_s) for baton in self._workers[name]]

    def end(self, name: str, within_s: float = END_S) -> ContenderProcess:
        """End one contender; its process, which can say how it ended."""
        self._hang_up(name)
        _end([self._processes[name]], within_s)
        return self._processes[name]

    def _shut(self, name: str) -> None:
        """No more workers come to this door. Once all are shut nothing is left on the disk, however this ends."""
        door = self._doors[name]
        if door.fileno() >= 0:
            Path(door.getsockname()).unlink(missing_ok=True)
            door.close()
        with contextlib.suppress(OSError):  # other doors are open
            Path(self._folder.name).rmdir()

    def _hang_up(self, name: str) -> None:
        """That nothing more is asked is how workers hear that it is over."""
        self._shut(name)
        for baton in self._workers[name]:
            baton.close()

    def _hear(self, name: str, baton: socket.socket, end_s: float | None) -> Answer:
        self._wait(name, baton, end_s)
        try:
            said = baton.recv(_LARGEST_BYTES)
        except OSError:
            said = b""
        if not said:
            raise ContenderLost(name, "has ended in its turn")
        heard: Answer = json.loads(said)
        return heard

    def _wait(self, name: str, for_what: socket.socket, end_s: float | None) -> None:
        """Until it speaks, or the contender has ended and never will."""
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        ready = wait([for_what, self._processes[name].sentinel], left_s)
        if not ready:
            raise ContenderLost(name, "did not answer in time")
        if for_what not in ready:
            raise ContenderLost(name, "has ended before its turn")


def _end(processes: Sequence[ContenderProcess], within_s: float) -> None:
    """All at once: by themselves within so many seconds, else told to, else killed."""
    _join(processes, within_s)
    for end, patience_s in (
        ("terminate", 1.0),
        ("terminate", 1.0),
        ("kill", 5.0),
    ):  # the first may ask for a save
        left = [process for process in processes if process.is_alive()]
        for process in left:
            getattr(process, end)()
        _join(left, patience_s)


def _join(processes: Sequence[ContenderProcess], within_s: float) -> None:
    end_s = time.monotonic() + within_s
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))


# In a worker


def follow(path: str, rank: int, run: Callable[[int], Answer]) -> None:
    """Run as many steps as are asked for, again and again, until nothing is asked any more."""
    with _connected(path, rank) as baton:
        while asked := baton.recv(_LARGEST_BYTES):
            baton.send(json.dumps(run(int(json.loads(asked)["steps"]))).encode())


class Paced:
    """The same for a worker whose loop belongs to another program: told of the end of every step, it holds the loop up
    until it is this contender's turn again, and ends the process when nothing is asked any more.

    Other orders than turns are for `orders`, which has a function for each by the order's first word.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        told: Answer | None = None,
        *,
        orders: Mapping[str, Callable[[Order], Answer]] | None = None,
        counters: Callable[[], dict[str, float]] = dict,
    ) -> None:
        """`told` goes into the answer to every turn, and so does what `counters` have grown by in each step."""
        self._baton = _connected(path, rank)
        self._told = told or {}
        self._orders = orders or {}
        self._counters = counters
        self._wait()

    def _wait(self) -> None:
        while True:
            try:
                asked = self._baton.recv(_LARGEST_BYTES)
            except OSError:
                asked = b""
            if not asked:
                os._exit(0)  # in the middle of a loop that does not end
            self.order: Order = json.loads(asked)
            if "steps" in self.order:
                break
            self._answer(self._orders[next(iter(self.order))](self.order))
        self._left = int(self.order["steps"])
        self._steps: list[tuple[float, float, float | None, dict[str, float]]] = []
        self._look()

    def _look(self) -> None:
        self._counted = self._counters()
        self._processor_s = time.process_time()
        self._at_s = time.monotonic()

    def step(self, loss: float | None = None) -> None:
        """A step has ended."""
        wall_s, processor_s = time.monotonic() - self._at_s, time.process_time() - self._processor_s
        counted = self._counters()
        grown = {name: counted[name] - self._counted.get(name, 0.0) for name in counted}
        self._steps.append((wall_s, processor_s, loss, {k: v for k, v in grown.items() if v}))
        if len(self._steps) == self._left:
            self._answer(self._turn())
            self._wait()
        self._look()

    def _turn(self) -> Answer:
        return {
            **self._told,
            "step_s": [wall_s for wall_s, _, _, _ in self._steps],
            "step_processor_s": [processor_s for _, processor_s, _, _ in self._steps],
            "processor_s": sum(processor_s for _, processor_s, _, _ in self._steps),
            "losses": [loss for _, _, loss, _ in self._steps if loss is not None],
            "counted": [counted for _, _, _, counted in self._steps],
        }

    def _answer(self, answer: Answer) -> None:
        with contextlib.suppress(OSError):  # the next order never comes, then
            self._baton.send(json.dumps(answer).encode())


def _connected(path: str, rank: int) -> socket.socket:
    baton = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    baton.connect(path)
    baton.send(json.dumps({"rank": rank}).encode())
    return baton


def counted(turns: Sequence[Answer], to_warm_up: int) -> list[Answer]:
    """Turns of the workers of a contender without their first steps, which find nothing of theirs in the caches."""
    lists = ("step_s", "step_processor_s", "counted")
    return [
        {key: value[to_warm_up:] if key in lists else value for key, value in turn.items()} for turn in turns
    ]
