"""The launcher's side of the coordinator: starts it, tells it which members have ended, reads its reports."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from manyhands.cluster.coordinator.control import LONGEST_TEXT, Invitation, RunEnded
from manyhands.cluster.coordinator.orders import Ended, Orders, Report
from manyhands.cluster.launcher.stuck import STALL_S
from manyhands.cluster.launchers import addresses, local
from manyhands.comm.transports import peer_user
from manyhands.comm.transports.curve import make_keys

_GOODBYE_S = 2.0  # for the coordinator to tell the other hosts that the run has ended


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How a run may change while it goes on."""

    most: int
    """Workers at once; those beyond the ones that the launcher starts have to join."""
    replace: int
    """How many workers that have died are replaced before the run goes on with fewer."""
    stall_s: float = STALL_S
    """After so much silence the launcher looks whether a worker hangs, and kills one that does."""
    hosts: int = 0
    """How many hosts must have come before the run begins; 0: all workers are on this one, and no port is opened."""
    group_size: int = 1
    """How many workers have one replica among them: they come and go together."""
    replicas_equal: bool = False
    """Whether all replicas are the same after every step, so that parts of several make one."""
    parts_outlive: bool = False
    """Whether a new worker can take over the part of a dead one from the host's memory."""
    address: str = ""
    """Of this host, and after a colon the port of the coordinator, where there may be other hosts."""


def _held(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    listener = addresses.take_over(int(port))
    if listener is None:  # a run before this one has had it
        listener = addresses.take_over(addresses.hold_port(host, int(port)))
    assert listener
    listener.setblocking(False)
    return listener


def host_environ(number: int, address: str) -> dict[str, str]:
    """What a worker needs to know of its host, in a run that may have several: it comes like a new one."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # else PyTorch warns of every address without a name
    return {local.HOST: str(number), local.ADDRESS: address, local.IS_NEW: "1", **quiet}


class Coordination:
    """One coordinator process at a time; leaving the context ends it."""

    def __init__(self, members: list[int], elastic: Elastic, servers: int = 0) -> None:
        server, member = make_keys(), make_keys()
        name = f"manyhands-{secrets.token_hex(16)}"
        endpoint = f"tcp://{elastic.address}" if elastic.hosts else f"ipc://@{name}"
        self._listener = (
            _held(elastic.address) if elastic.hosts else peer_user.listen(name, socket.SOCK_STREAM)
        )
        self._orders = Orders(
            endpoint=endpoint,
            listener=self._listener.fileno(),
            keys=(server[0].decode(), server[1].decode()),
            remote_hosts=[member[0].decode()],
            members=members,
            most=elastic.most,
            stall_s=elastic.stall_s,
            hosts=elastic.hosts,
            group_size=elastic.group_size,
            replicas_equal=elastic.replicas_equal,
            parts_outlive=elastic.parts_outlive,
            servers=servers if elastic.hosts else 0,
        )
        self.elastic = elastic
        self.invitation = Invitation(
            endpoint=endpoint,
            server_key=server[0].decode(),
            public_key=member[0].decode(),
            secret_key=member[1].decode(),
        )
        self.members = tuple(members)
        self._ended: list[int] = []
        self._rest = b""

    def __enter__(self) -> "Coordination":
        self._start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.end_run(str(error) or type(error).__name__, local.EXIT_CRASHED)
        self._end()
        self._listener.close()

    def end_run(self, text: str, exit_code: int) -> None:
        """Have the coordinator tell the other hosts, if there may be any, that the run has ended, and how."""
        if not self.elastic.hosts:
            return
        how = RunEnded(text=text[:LONGEST_TEXT], exit_code=exit_code)
        self._say(Ended(members=self._ended, run=how))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_S)

    @property
    def environ(self) -> Mapping[str, str]:
        """What a worker needs in order to be a member."""
        known = {local.INVITATION: self.invitation.text(), local.MOST: str(self.elastic.most)}
        if self.elastic.hosts:
            known |= host_environ(0, self.elastic.address.rpartition(":")[0])
        return known

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when there are reports, or when the coordinator is gone."""
        assert self._process.stdout
        return self._process.stdout.fileno()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.cluster.coordinator.coordinator"],
            env={**os.environ, local.LAUNCHER_PID: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._listener.fileno()],
            bufsize=0,
            process_group=0,
        )
        self._rest = b""
        self._say(self._orders)
        self._say(Ended(members=self._ended))

    def _end(self) -> None:
        with self._process:
            self._process.kill()

    def start_again(self) -> int:
        """After a death; returns how the old one ended."""
        self._end()
        code = self._process.returncode
        self._start()
        return code

    def tell_ended(self, member: int) -> None:
        self._ended.append(member)
        self._say(Ended(members=self._ended))

    def _say(self, message: Orders | Ended) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the launcher hears of its death on the other pipe
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    def take(self) -> list[Report] | None:
        """What the coordinator has reported; None if it is gone."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [msgspec.json.decode(line, type=Report) for line in lines]
