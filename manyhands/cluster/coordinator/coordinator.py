"""The coordinator: a small process that keeps the member list and begins generations; it persists nothing.

The launcher starts it, tells it on standard input which members have ended, and starts it again if it dies. Members
reach it over ZeroMQ. What it knew before, the members tell it.

python -m manyhands.cluster.coordinator.coordinator
"""

import contextlib
import os
import signal
import time

import msgspec
import zmq

from manyhands.cluster.coordinator.control import (
    LARGEST_BYTES,
    Bye,
    Here,
    HostHere,
    No,
    RunEnded,
    encode,
    from_member,
)
from manyhands.cluster.coordinator.membership import Membership
from manyhands.cluster.coordinator.orders import Ended, Orders, Report
from manyhands.cluster.coordinator.remote_hosts import RemoteHosts
from manyhands.cluster.launchers.parent_death import die_with_the_launcher
from manyhands.comm.transports import peer_user
from manyhands.comm.transports.curve import Authenticator, watch

_TICK_MS = 100
_GOODBYE_MS = 500
NAME = "coordinator"


class Coordinator:
    """The membership, the socket at which members speak, and the launcher's pipe."""

    def __init__(self, orders: Orders) -> None:
        self._membership = Membership(
            [] if orders.hosts else orders.members,
            most=orders.most,
            group_size=orders.group_size,
            replicas_equal=orders.replicas_equal,
            parts_outlive=orders.parts_outlive,
        )
        self._remote_hosts = RemoteHosts(
            self._membership, hosts=orders.hosts, own_workers=len(orders.members), own_servers=orders.servers
        )
        self._stall_s = orders.stall_s
        self._context = zmq.Context()
        self._authenticator = Authenticator(self._context)
        self._authenticator.allowed = {key.encode(): "member" for key in orders.remote_hosts}
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a member that connects anew is the same member
        watch(self._socket, orders.endpoint)
        self._authenticator.guard(self._socket, (orders.keys[0].encode(), orders.keys[1].encode()))
        if orders.endpoint.startswith("ipc://"):
            peer_user.guard(self._socket)
        self._socket.setsockopt(zmq.USE_FD, orders.listener)
        self._socket.bind(orders.endpoint)
        self._addresses: dict[int, bytes] = {}
        self._heard_s: dict[int, float] = {}
        self._told: dict[int, bytes] = {}
        self._noticed_s: float | None = None
        self._seen = self._reported = 0  # generations
        self._gone: set[int] = set()  # not yet reported, as no worker has made a step since
        self._left: set[int] = set()
        self._is_mixed = False
        self._launchers: dict[int, bytes] = {}  # where those of other hosts are, by host
        self._told_hosts: list[str] = []  # those of which the launcher has heard before the run began
        self._has_finished = self._is_over = False
        os.set_blocking(0, False)
        self._pending = b""

    def run(self) -> None:
        """Until the launcher closes its end."""
        poller = zmq.Poller()
        for part in (self._socket, self._authenticator.socket, 0):
            poller.register(part, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_TICK_MS))
            self._authenticator.answer()
            if 0 in ready and not self._hear_launcher():
                return
            self._hear_members()
            self._find_stalled()
            for member in self._remote_hosts.find_vanished(time.monotonic()):
                self._heard_s.pop(member, None)
            self._tell()
            self._report_hosts()
            self._report()

    def _hear_launcher(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            said = msgspec.json.decode(line, type=Ended)
            for member in said.members:
                self._heard_s.pop(member, None)
                self._membership.end(member)
            if said.run:
                self._say_goodbye(said.run)
        return bool(data)

    def _say_goodbye(self, how: RunEnded) -> None:
        """Tell the other hosts that the run has ended: their launchers end what they have started, and a worker that
        waits for another generation waits no longer."""
        for address in self._launchers.values():
            self._socket.send_multipart([address, encode(how)])
        for member, address in self._addresses.items():
            if member not in self._membership.ended:
                self._socket.send_multipart([address, encode(No(reason="the run has ended"))])
        self._socket.close(_GOODBYE_MS)
        self._authenticator.close()
        self._context.term()
        os._exit(0)

    def _hear_members(self) -> None:
        while True:
            try:
                address, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            said = from_member(frames[0]) if len(frames) == 1 else None
            if isinstance(said, Here) and said.member not in self._membership.ended:
                self._addresses[said.member] = address
                self._heard_s[said.member] = time.monotonic()
                self._remote_hosts.note_heard(said.member)
                if said.waits and self._noticed_s is None and said.generation == self._membership.generation:
                    self._noticed_s = time.monotonic()
                self._membership.hear(said)
                if said.waits:
                    self._told.pop(said.member, None)  # it may not have heard the last time
            elif isinstance(said, Bye):
                self._has_finished = self._has_finished or said.member not in self._membership.servers
                self._heard_s.pop(said.member, None)
                self._membership.end(said.member)
            elif isinstance(said, HostHere):
                answer = self._remote_hosts.hear(said, time.monotonic())
                self._launchers[answer.host] = address
                self._socket.send_multipart([address, encode(answer)])
                if said.failed:
                    _say(Report(failed=f"{said.failed} (on the host {said.address})"))

    def _find_stalled(self) -> None:
        """Their launcher looks whether they hang and ends them: until then they may still change what they share."""
        now = time.monotonic()
        if any(here.steps for here in self._membership.heard.values()):
            for (
                member
            ) in self._membership.live:  # also those silent since before this coordinator was started again
                self._heard_s.setdefault(member, now)
        for member, heard_s in list(self._heard_s.items()):
            if now - heard_s > self._stall_s and not self._remote_hosts.see_to(member):
                self._heard_s[member] = now
                _say(Report(stalled=member))

    def _tell(self) -> None:
        for member, address in self._addresses.items():
            answer = self._membership.answer(member)
            content = encode(answer) if answer is not None else b""
            if content != self._told.get(member, b""):
                self._told[member] = content
                if content:
                    self._socket.send_multipart([address, content])

    def _report_hosts(self) -> None:
        """Before the run begins, tell the launcher which hosts are here."""
        here = self._remote_hosts.addresses()
        if self._membership.new_generation is None and here != self._told_hosts:
            self._told_hosts = here
            _say(Report(hosts_here=here))

    def _report(self) -> None:
        """Tell the launcher of a new generation, once all its members are at work."""
        membership = self._membership
        new_generation = membership.new_generation
        if new_generation and membership.servers.issuperset(membership.live) and not self._is_over:
            self._is_over = True
            _say(Report(is_over=True, finished=self._has_finished))
        if new_generation is None or self._reported >= new_generation.generation:
            return
        if new_generation.generation > self._seen:
            self._seen = new_generation.generation
            self._gone |= set(new_generation.gone)
            self._left |= set(new_generation.left)
            self._is_mixed = self._is_mixed or new_generation.is_mixed
        here = [membership.heard.get(member) for member in new_generation.members]
        steps = [
            one.steps for one in here if one and one.generation == new_generation.generation and not one.waits
        ]
        if len(steps) == len(new_generation.members) and max(steps) > new_generation.steps:
            _say(
                Report(
                    generation=new_generation.generation,
                    members=list(new_generation.members),
                    gone=sorted(self._gone),
                    left=sorted(self._left),
                    is_mixed=self._is_mixed,
                    step=new_generation.steps + 1,
                    noticed_s=self._noticed_s or 0.0,
                    resumed_s=time.monotonic(),
                    ended=self._remote_hosts.endings(self._gone),
                    vanished=self._remote_hosts.take_vanished(),
                    servers=sorted(membership.servers),
                )
            )
            self._reported = new_generation.generation
            self._gone.clear()
            self._left.clear()
            self._is_mixed = False
            self._noticed_s = None


def _say(report: Report) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, msgspec.json.encode(report) + b"\n")


def main() -> None:
    die_with_the_launcher(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the launcher
    with open(0, "rb", buffering=0, closefd=False) as launcher:
        line = launcher.readline()
    if line:
        Coordinator(msgspec.json.decode(line, type=Orders)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
