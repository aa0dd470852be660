"""A worker as a member of the run: says where it is, hears when its generation is over, and waits for the next.

A thread does the speaking, so that a worker is heard of however long its step takes; one that is stopped is silent.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from manyhands.cluster.coordinator.control import (
    LARGEST_BYTES,
    Bye,
    Change,
    Here,
    Invitation,
    NewGeneration,
    No,
    Over,
    encode,
    to_member,
)
from manyhands.comm.transports.curve import introduce, watch
from manyhands.errors import PeerLost

BEAT_S = 0.25
_LINGER_MS = 500


class Regroup(Exception):
    """All members leave their generation between two steps: a worker joins or leaves."""


@dataclass(frozen=True, kw_only=True)
class _ToldState:
    """What is said with every beat."""

    generation: int
    new_generation: NewGeneration | None
    waits: bool
    has_state: bool = False
    commits: int = 0
    in_step: bool = False
    lost: tuple[int, ...] = ()
    place: str = ""


class Member:
    """Number `number` of the run; `is_new` where the launcher has begun without it."""

    def __init__(
        self, invitation: Invitation, number: int, *, is_new: bool, host: int = 0, serves: bool = False
    ) -> None:
        self.number = number
        self.serves = serves
        self._host = host
        self.on_over: Callable[[], None] = lambda: None  # called by the thread when this generation has ended
        self.new_generation: NewGeneration | None = None
        self._state = _ToldState(generation=-1 if is_new else 0, new_generation=None, waits=False)
        self._is_leaving = False
        self.is_over = False  # whether this generation has ended
        self._gone: tuple[int, ...] = ()  # the members that it has lost
        self.steps = 0  # last committed, by whichever session of this process; every beat says it
        self.wants_change = False  # whether this generation should end between two steps
        self._next: NewGeneration | None = None
        self._refusal = ""
        self._news = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._invitation = invitation
        self._thread = threading.Thread(target=self._speak, name="member", daemon=True)
        self._thread.start()

    @property
    def coordinator(self) -> tuple[str, int] | None:
        """The address and port at which the coordinator listens, where it does."""
        kind, _, place = self._invitation.endpoint.partition("://")
        address, _, port = place.rpartition(":")
        return (address, int(port)) if kind == "tcp" else None

    # What the worker asks

    def check(self) -> None:
        """While the worker waits for others: whether that is still of use."""
        if self.is_over:
            names = ", ".join(f"worker {member} is gone" for member in self._gone) or "others have left"
            raise PeerLost(f"worker {self.number} cannot go on: {names}")

    def ask_to_leave(self) -> None:
        """Between two steps, when the coordinator says so; the others go on."""
        self._is_leaving = True  # of its own: a signal may come in the middle of a change of state
        os.eventfd_write(self._wake, 1)

    def next(
        self,
        *,
        has_state: bool = False,
        commits: int = 0,
        steps: int = 0,
        in_step: bool = False,
        lost: tuple[int, ...] = (),
        place: str = "",
    ) -> NewGeneration:
        """Leave this generation, having committed so much; returns the next one when it begins."""
        with self._news:
            self._next, self.steps = None, steps
            self._say(
                waits=True,
                has_state=has_state,
                commits=commits,
                in_step=in_step,
                lost=lost,
                place=place,
            )
            while self._next is None:
                if self._refusal:
                    raise PeerLost(f"this worker cannot join: {self._refusal}")
                self._news.wait()
            self.new_generation = new_generation = self._next
            self.is_over = self.wants_change = False
            # From here on it is in that generation: if it fails to get into it, it wants the one after.
            self._say(
                generation=new_generation.generation,
                new_generation=new_generation,
                waits=False,
                in_step=False,
                lost=(),
            )
            return new_generation

    def enter(self, *, commits: int, steps: int) -> None:
        """At work in the generation that `next` gave, with everything taken over."""
        self.steps = steps
        self._say(commits=commits)

    def tell(self) -> None:
        """Say at once what the next beat would say."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Say goodbye."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(2.0)

    # The thread

    def _say(self, **news: object) -> None:
        self._state = _ToldState(**{**vars(self._state), **news})
        os.eventfd_write(self._wake, 1)

    def _speak(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"member-{self.number}".encode())
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BYTES)
        socket.setsockopt(zmq.SNDHWM, 8)  # old beats are of no use to a coordinator that comes back
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        invitation = self._invitation
        watch(socket, invitation.endpoint)
        keys = (invitation.public_key.encode(), invitation.secret_key.encode())
        introduce(socket, invitation.server_key.encode(), keys)
        socket.connect(invitation.endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beat_at = 0.0
        while not self._is_closing:
            now = time.monotonic()
            ready = dict(poller.poll(max(0, round((beat_at - now) * 1000))))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if socket in ready:
                self._hear(socket.recv_multipart())
            if self._wake in ready or time.monotonic() >= beat_at:
                self._send(socket, encode(self._here()))
                beat_at = time.monotonic() + BEAT_S
        self._send(socket, encode(Bye(member=self.number)))
        socket.close()
        context.term()

    def _here(self) -> Here:
        return Here(
            member=self.number,
            host=self._host,
            leaving=self._is_leaving,
            serves=self.serves,
            steps=self.steps,
            **vars(self._state),
        )

    def _send(self, socket: "zmq.Socket[bytes]", content: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the coordinator is away; the next beat says the same
            socket.send(content, zmq.NOBLOCK)

    def _hear(self, frames: list[bytes]) -> None:
        said = to_member(frames[0]) if len(frames) == 1 else None
        with self._news:
            state = self._state
            if isinstance(said, NewGeneration) and state.waits and said.generation > state.generation:
                self._next = said
            elif isinstance(said, Over) and said.generation == state.generation and not state.waits:
                self._gone, self.is_over = said.gone, True
                self.on_over()
            elif isinstance(said, Change) and said.generation == state.generation:
                self.wants_change = True
            elif isinstance(said, No):
                self._refusal = said.reason
            self._news.notify_all()
