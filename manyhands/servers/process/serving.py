"""What a server process serves: every session that its script makes before it uses one, each in a thread."""

import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import nn

from manyhands import telemetry
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.servers.protocol import served_sessions

_LOOK_EVERY_S = 0.05


class Serving:
    """The sessions of a server process. `contexts` are its places in one generation after the other, of which all its
    sessions leave each together."""

    def __init__(self, context: ServerContext, contexts: Iterator[ServerContext]) -> None:
        self._context = context
        self._contexts = contexts
        self._index = 0
        self._at: dict[int, int] = {}  # by session: the context that it wants or is in
        self._moved = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._models: list[nn.Module] = []
        self._errors: list[BaseException] = []
        self._is_last = self.is_over = False
        next(contexts)  # the first, in which this is called

    @property
    def made(self) -> int:
        return len(self._threads)

    def add(self, serve: Callable[[], None], model: nn.Module) -> None:
        """Begin to serve one more session."""
        threads = torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(threads)
            try:
                serve()
            except BaseException as error:
                self._errors.append(error)

        self._models.append(model)
        self._threads.append(threading.Thread(target=run, name=f"session {self.made + 1}", daemon=True))
        self._threads[-1].start()
        self._tell()

    def run(self) -> NoReturn:
        """Serve until the run ends, and end with it: a server has no more of the script to run."""
        self._is_last = True
        self._tell()
        for model in self._models:
            for param in model.parameters():
                # Its values come from worker 0, and live in the flat vector; its type stays, which threads ask for.
                param.data = param.data.new_empty(0)
        while not self._errors and (alive := [thread for thread in self._threads if thread.is_alive()]):
            alive[0].join(_LOOK_EVERY_S)
        self.is_over = True
        telemetry.close()
        if self._errors:
            self._context.abandon()  # other sessions may still be served, until the process ends
            raise self._errors[0]
        raise SystemExit(0)

    def contexts(self) -> Iterator[ServerContext]:
        """The contexts of one session, from the present one on."""
        number = self.made
        with self._moved:
            self._at[number] = self._index
        try:
            while (context := self._wanted(number)) is not None:
                yield context
                with self._moved:
                    self._at[number] += 1
                    self._moved.notify_all()
        finally:
            with self._moved:
                del self._at[number]
                self._moved.notify_all()

    def _wanted(self, number: int) -> ServerContext | None:
        """The context in which a session is to be: the next one begins when all sessions are out of the present one."""
        with self._moved:
            while self._at[number] > self._index:
                if min(self._at.values()) <= self._index:
                    self._moved.wait()
                    continue
                following = next(self._contexts, None)
                if following is None:
                    return None
                self._context, self._index = following, self._index + 1
                self._tell()
                self._moved.notify_all()
            return self._context

    def _tell(self) -> None:
        served_sessions.tell(
            self.made, is_last=self._is_last, neighbours=self._context.neighbours, arena=self._context.arena
        )
