"""Contenders that are all there from the beginning, of which one at a time has a turn of a few steps.

A turn takes seconds. What the machine does meanwhile, or what its other guests do, so meets all contenders about
alike; a turn that is a whole run, with its start, takes so long that it finds another machine than the one before.
"""

import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import interleave, say

Turn = list[dict[str, Any]]  # of each worker: `batch`, `step_s` and `losses`
Start = Callable[[list[str]], object]

END_S = 30.0
_LARGEST_BYTES = 1 << 16


def in_turns(
    contenders: Mapping[str, tuple[Start, int]], label: str, *, rounds: int, steps: int, warm_up: int
) -> dict[str, list[Turn]]:
    """What each contender, given how it is started and its number of workers, made of its turns of so many steps."""
    with Turns() as turns:
        for name, (start, workers) in contenders.items():
            say(f"{label}: {name} starts")
            turns.enter(name, start, workers)
            turns.take(name, 0, to_warm_up=warm_up)
        return interleave({name: partial(turns.take, name, steps) for name in contenders}, rounds, label)


class Turns:
    """Leaving the context ends everyone."""

    def __enter__(self) -> "Turns":
        self._folder = TemporaryDirectory()
        self._path = str(Path(self._folder.name) / "baton")
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(self._path)
        self._door.listen()
        self._processes: dict[str, BaseProcess] = {}
        self._workers: dict[str, list[socket.socket]] = {}
        return self

    def __exit__(self, *exception: object) -> None:
        self._door.close()
        for baton in [baton for batons in self._workers.values() for baton in batons]:
            baton.close()  # which is how workers hear that it is over
        for process in self._processes.values():
            process.join(END_S)
            if process.is_alive():
                process.terminate()
                process.join()
        self._folder.cleanup()

    def enter(self, name: str, start: Start, workers: int) -> None:
        """Start a contender: `start` is given what its workers are to be told, and runs until they have ended."""
        process = multiprocessing.get_context("fork").Process(target=start, args=(["--baton", self._path],))
        process.start()
        self._processes[name] = process
        found: dict[int, socket.socket] = {}
        while len(found) < workers:
            self._wait(name, self._door)
            baton = self._door.accept()[0]
            self._workers.setdefault(name, []).append(baton)
            found[self._hear(name, baton)["rank"]] = baton
        self._workers[name] = [found[rank] for rank in sorted(found)]

    def take(self, name: str, steps: int, *, to_warm_up: int = 1) -> Turn:
        """A turn of one contender. Its first steps do not count: they find nothing of theirs in the caches."""
        for baton in self._workers[name]:
            baton.send(str(to_warm_up + steps).encode())
        turn = [self._hear(name, baton) for baton in self._workers[name]]
        return [{**worker, "step_s": worker["step_s"][to_warm_up:]} for worker in turn]

    def _hear(self, name: str, baton: socket.socket) -> dict[str, Any]:
        self._wait(name, baton)
        said = baton.recv(_LARGEST_BYTES)
        if not said:
            self._fail(name)
        heard: dict[str, Any] = json.loads(said)
        return heard

    def _wait(self, name: str, for_what: socket.socket) -> None:
        """Until it speaks, or the contender has ended and never will."""
        process = self._processes[name]
        if for_what not in wait([for_what, process.sentinel]):
            self._fail(name)

    def _fail(self, name: str) -> None:
        raise SystemExit(f"{name} has ended before its turn; what it said is above")


def follow(path: str, rank: int, run: Callable[[int], dict[str, Any]]) -> None:
    """Called in a worker: run as many steps as are asked for, again and again, until nobody asks any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as baton:
        baton.connect(path)
        baton.send(json.dumps({"rank": rank}).encode())
        while steps := baton.recv(_LARGEST_BYTES):
            baton.send(json.dumps(run(int(steps))).encode())


class Paced:
    """The same for a worker whose loop belongs to somebody else: told of the end of every step, it holds the loop up
    until it is this contender's turn again, and ends the process when nobody asks any more."""

    def __init__(self, path: str, rank: int, batch: int) -> None:
        self._baton = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._baton.connect(path)
        self._baton.send(json.dumps({"rank": rank}).encode())
        self._batch = batch
        self._wait()

    def _wait(self) -> None:
        asked = self._baton.recv(_LARGEST_BYTES)
        if not asked:
            os._exit(0)  # in the middle of a loop that does not end
        self._left = int(asked)
        self._step_s: list[float] = []
        self._losses: list[float] = []
        self._processor_s = time.process_time()
        self._at_s = time.monotonic()

    def step(self, loss: float) -> None:
        """A step has ended."""
        now_s = time.monotonic()
        self._step_s.append(now_s - self._at_s)
        self._losses.append(loss)
        self._at_s = now_s
        if len(self._step_s) == self._left:
            said = {
                "batch": self._batch,
                "step_s": self._step_s,
                "losses": self._losses,
                "processor_s": time.process_time() - self._processor_s,
            }
            self._baton.send(json.dumps(said).encode())
            self._wait()
