"""`manyhands doctor RUN`: at which ports the processes of a live run listen on this host, and what protects them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from manyhands.cluster.launcher import invitation as invites
from manyhands.cluster.launcher.run_processes import RunProcess, processes_of
from manyhands.comm.transports.listeners import Listener, listeners_of
from manyhands.errors import UsageError
from manyhands.telemetry.read import read

KEYS, CLOSED, NOTHING = "keys of the run", "closed since all have met", "nothing"


@dataclass(frozen=True, kw_only=True)
class RunPort:
    """One line of the table."""

    port: int
    address: str
    processes: tuple[str, ...]
    protection: str

    def cells(self) -> tuple[str, ...]:
        return str(self.port), self.address, ", ".join(self.processes), self.protection


HEADER = ("port", "address", "process", "protection")


def say_ports(run: Path) -> bool:
    """Print them; says whether any process of the run is on this host."""
    here = processes_of(run)
    if not here:
        return False
    ports = list(ports_of(run, here))
    names = ", ".join(f"{one.name} ({one.pid})" for one in here)
    print(f"processes of {run} on this host: {names}")
    if not ports:
        print("none of them listens at a TCP port")
        return True
    for line in _aligned([HEADER, *(port.cells() for port in ports)]):
        print(line)
    for sentence in _advice(ports):
        print(sentence)
    return True


def ports_of(run: Path, processes: Sequence[RunProcess]) -> Iterator[RunPort]:
    """The listening ports of these processes, a socket that several of them hold once."""
    holders: defaultdict[Listener, list[RunProcess]] = defaultdict(list)
    for process in processes:
        for listener in listeners_of(process.pid):
            holders[listener].append(process)
    keyed, meeting = _keyed(run), _coordinator(run)
    for listener, held in sorted(holders.items()):
        has_keys = f"{listener.address}:{listener.port}" == meeting or any(
            (process.pid, listener.port) in keyed for process in held
        )
        yield RunPort(
            port=listener.port,
            address=listener.address,
            processes=tuple(process.name for process in held),
            protection=KEYS if has_keys else CLOSED if listener.is_closed else NOTHING,
        )


def _keyed(run: Path) -> set[tuple[int, int]]:
    """The ports of servers, by process: a process that opens a port with keys records it."""
    return {
        (record["pid"], record["port"])
        for record in read(run)
        if record["kind"] == "listens"
        and isinstance(record.get("pid"), int)
        and isinstance(record.get("port"), int)
    }


def _coordinator(run: Path) -> str:
    """The place of the run's coordinator, if it is on this host."""
    with suppress(UsageError):
        invite = invites.read(str(run))
        if invite.is_here and invite.takes_hosts:
            return invite.invitation.endpoint.partition("://")[2]
    return ""


def _advice(ports: Sequence[RunPort]) -> Iterator[str]:
    open_ports = [port for port in ports if port.protection == NOTHING]
    if not open_ports:
        return
    numbers = ", ".join(str(port.port) for port in open_ports)
    which = f"port {numbers} has" if len(open_ports) == 1 else f"ports {numbers} have"
    addresses = {ip_address(port.address) for port in open_ports}
    if all(address.is_loopback for address in addresses):
        yield (
            f"{which} no protection: every user of this machine can read and change what goes through; use a machine "
            "or a network namespace of your own, or on one host `manyhands launch`, which opens no port"
        )
    else:
        places = (
            "any address of this host" if any(one.is_unspecified for one in addresses) else "that address"
        )
        yield (
            f"{which} no protection: every process that reaches {places} can read and change what goes through, or "
            "end the run; use a network of your own, or let a firewall admit the hosts of the run alone"
        )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
