"""The launcher's agent in a run whose coordinator is on another host.

Several times a second it tells the coordinator that this host is there, and how its workers have ended. Where the
network to the coordinator is cut, the workers wait, and so does the agent, for a while. When the coordinator says that
the run has ended, the agent ends what is left on this host.
"""

import contextlib
import secrets
import signal
import time
from collections.abc import Callable

import zmq

from manyhands.cluster.coordinator.control import (
    LARGEST_BYTES,
    NUMBERS,
    HostHere,
    HostThere,
    Invitation,
    RunEnded,
    encode,
    to_member,
)
from manyhands.cluster.launcher.blame import RunFailure
from manyhands.cluster.launcher.child import Child
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.exits import describe_exit
from manyhands.cluster.launcher.first_host import WAIT_S, FirstHost
from manyhands.cluster.launcher.kernel_view import Silences
from manyhands.cluster.launcher.processes import WorkerProcesses
from manyhands.cluster.launcher.stuck import STALL_S
from manyhands.cluster.launchers import local
from manyhands.comm.transports.curve import introduce, watch

BEAT_S = 0.25
HANDSHAKE_S = 60.0
_LINGER_MS = 1000
_NEXT_S = 1.0  # before a dead worker's replacement is started, for each one before it


class HostAgent:
    """Speaks for the `workers` and `servers` of this host at `address`; replaces up to `replace` of those that die.

    Where nothing is heard of the first host, it waits for `wait_s` seconds.
    """

    def __init__(
        self,
        invitation: Invitation,
        *,
        address: str,
        workers: int,
        replace: int,
        servers: int = 0,
        wait_s: float = WAIT_S,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        place = invitation.endpoint.partition("://")[2]
        self._first_host = FirstHost(place, wait_s, on_event)
        self._address = address
        self._workers = workers
        self._servers = servers
        self._places = {rank: rank for rank in range(workers + servers)}  # whose place each one has
        self._replace = replace
        self._token = secrets.token_hex(16)
        self._ended: dict[int, str] = {}
        self._failed = ""
        self._has_finished = False
        self._state_holders: set[int] = set()  # members that have been in the run
        self._due: list[tuple[float, int]] = []
        self._replaced = 0
        self._silences = Silences(STALL_S)
        self.host = -1
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 8)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        watch(self._socket, invitation.endpoint)
        keys = (invitation.public_key.encode(), invitation.secret_key.encode())
        introduce(self._socket, invitation.server_key.encode(), keys)
        self._socket.connect(invitation.endpoint)
        self._beat_s = 0.0

    def __enter__(self) -> "HostAgent":
        """Returns when the coordinator has given this host a number."""
        try:
            while self.host < 0:
                self._beat()
                if self._socket.poll(round(BEAT_S * 1000)):
                    self._hear()
                self._first_host.tick_before(HANDSHAKE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()
        self._context.term()

    @property
    def first_number(self) -> int:
        return self.host * NUMBERS

    @property
    def is_in_the_run(self) -> bool:
        """Whether any of its workers has been a member of a generation."""
        return any(number // NUMBERS == self.host for number in self._state_holders)

    def see_to(self, processes: WorkerProcesses, start: Callable[[int], int]) -> None:
        """Look after these processes; `start(place)` starts one in the place of another."""
        self._processes = processes
        self._start = start

    # What a launcher asks

    def is_server(self, rank: int) -> bool:
        return self._places[rank] >= self._workers

    def note_end(self, child: Child) -> bool:
        """A process has ended; says whether the others can go on."""
        self._hear_all()  # it may have been told that the run has ended
        self._has_finished = self._has_finished or (child.code == 0 and not self.is_server(child.rank))
        is_good = child.code in local.GOOD_ENDS
        self._ended[self.first_number + child.rank] = "" if is_good else describe_exit(child.code)
        if child.code > 0 and not is_good and not self.has_finished:
            self._fail(child)
        self._beat()
        if child.code < 0 and self._replaced < self._replace:
            self._due.append((time.monotonic() + _NEXT_S * self._replaced, self._places[child.rank]))
            self._replaced += 1
        return is_good or self.has_finished or (child.code < 0 and self.goes_on())

    def _fail(self, child: Child) -> None:
        """A process ended by an error of its own, which the workers of other hosts would meet as well."""
        refusals = [line for line in child.tail if line.startswith("error: ")]
        if child.code == local.EXIT_REFUSED and refusals:
            self._failed = refusals[-1].removeprefix("error: ")[:400]
        elif child.code != local.EXIT_PEER_LOST:
            name = "server" if self.is_server(child.rank) else "worker"
            self._failed = f"{name} {self.first_number + child.rank} {child.ending}"[:400]

    def goes_on(self) -> bool:
        """Whether any worker runs or will; once one has finished, those that have not joined come too late."""
        if self.has_finished:
            workers = [one for one in self._processes.running if not self.is_server(one.rank)]
            return any(self.first_number + child.rank in self._state_holders for child in workers)
        return bool(self._processes.busy or self._due)

    @property
    def has_finished(self) -> bool:
        """Whether a worker has come to the end of its script, or the run is over."""
        return self._has_finished or self._first_host.has_ended_well

    @property
    def failed(self) -> RunFailure | None:
        """How the run has ended on the first host, if not well."""
        return self._first_host.failure

    @property
    def waits_for(self) -> str:
        return self._first_host.waits_for(is_in_the_run=self.is_in_the_run)

    def why(self, culprit: Child) -> str:
        """The run goes on without the workers of this host."""
        return ""

    def tick(self, *, is_leaving: bool) -> None:
        """Speak and listen, and start what is due."""
        self._hear_all()
        now = time.monotonic()
        if now - self._beat_s >= BEAT_S:
            self._beat()
        self._first_host.tick(is_in_the_run=self.is_in_the_run)
        for at_s, place in [entry for entry in self._due if entry[0] <= now and not is_leaving]:
            self._due.remove((at_s, place))
            self._places[self._start(place)] = place

    def finish(self) -> None:
        self._beat()

    # What is said

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        said = HostHere(
            token=self._token,
            host=self.host,
            address=self._address,
            workers=self._workers,
            servers=self._servers,
            ended=tuple(self._ended.items()),
            failed=self._failed,
        )
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(said), zmq.NOBLOCK)

    def _hear_all(self) -> None:
        while self._socket.poll(0):
            self._hear()

    def _hear(self) -> None:
        frames = self._socket.recv_multipart()
        said = to_member(frames[0]) if len(frames) == 1 else None
        if isinstance(said, HostThere | RunEnded):
            self._first_host.hear(said)
        if isinstance(said, HostThere):
            self.host = said.host
            self._state_holders |= set(said.current)
            for child in self._processes.running if said.stalled else ():
                if self.first_number + child.rank in said.stalled and self._silences.hangs(child.pid):
                    child.signal(signal.SIGKILL)
