"""Network namespaces behave like hosts: apart, as slow as asked for, and gone afterwards."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cluster.launcher import cores, supervisor
from manyhands.cluster.launcher.launch_plan import LaunchPlan
from manyhands.errors import ManyhandsError, UsageError
from manyhands.lab import emulated_hosts

WHY_NOT = emulated_hosts.available()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

TRANSFER_BYTES = 4_000_000

# Listens, says on which port, and then how fast the bytes came: from the first one received to the last.
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    link, _ = server.accept()
    with link:
        count = len(link.recv(1))
        begin = time.monotonic()
        while data := link.recv(1 << 20):
            count += len(data)
        print(count, time.monotonic() - begin)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as link:
    link.sendall(bytes(int(sys.argv[3])))
"""
LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""
HEAR = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
    ear.bind((sys.argv[1], 0))
    ear.settimeout(0.6)
    print(ear.getsockname()[1], flush=True)
    try:
        print(ear.recv(100).decode())
    except TimeoutError:
        print("nothing")
"""
SAY = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
    mouth.sendto(b"a word", (sys.argv[1], int(sys.argv[2])))
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
except OSError as error:
    sys.exit(type(error).__name__)
"""


def _namespaces() -> set[str]:
    folder = Path("/run/netns")
    return (
        {name for name in os.listdir(folder) if name.startswith(f"mh-{os.getpid()}-")}
        if folder.exists()
        else set()
    )


def _transfer(net: emulated_hosts.EmulatedHosts, source: int, target: int) -> float:
    """Mbit/s of one real TCP transfer."""
    receive = [*net.command_prefix(target), sys.executable, "-c", RECEIVE, net.address(target)]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout
        port = receiver.stdout.readline().strip()
        send = [*net.command_prefix(source), sys.executable, "-c", SEND, net.address(target), port]
        subprocess.run([*send, str(TRANSFER_BYTES)], check=True, timeout=60)
        count, seconds = receiver.stdout.read().split()
    assert int(count) == TRANSFER_BYTES
    return TRANSFER_BYTES * 8 / 1e6 / float(seconds)


@needs_hosts
def test_a_link_is_as_slow_as_asked_for_in_both_directions() -> None:
    with emulated_hosts.EmulatedHosts(2) as net:
        free_mbit = _transfer(net, 0, 1)
    with emulated_hosts.EmulatedHosts(2, bandwidth_mbit=50) as net:
        there_mbit, back_mbit = _transfer(net, 0, 1), _transfer(net, 1, 0)
    assert there_mbit < 50 * 1.1
    assert back_mbit < 50 * 1.1
    assert free_mbit > 2 * max(there_mbit, back_mbit)  # the limit, not the machine, was the limit
    assert _namespaces() == set()


@needs_hosts
def test_a_cut_link_carries_nothing_until_it_is_healed() -> None:
    with emulated_hosts.EmulatedHosts(3) as net:
        command = [
            *net.command_prefix(1),
            sys.executable,
            "-c",
            LISTEN,
            net.address(1),
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            port = server.stdout.readline().strip()

            def reaches(source: int, timeout_s: float) -> bool:
                connect = [sys.executable, "-c", CONNECT, net.address(1), port, str(timeout_s)]
                return (
                    subprocess.run(
                        [*net.command_prefix(source), *connect], stderr=subprocess.DEVNULL
                    ).returncode
                    == 0
                )

            assert reaches(0, 20)
            net.cut(0)
            assert not reaches(0, 0.5)
            assert reaches(2, 20)  # only that host's cable was pulled
            net.heal(0)
            assert reaches(0, 20)
            server.communicate()
    assert _namespaces() == set()


@needs_hosts
def test_a_cut_in_one_direction_leaves_the_other() -> None:
    with emulated_hosts.EmulatedHosts(2) as net:

        def hears(source: int, target: int) -> bool:
            hear = [*net.command_prefix(target), sys.executable, "-c", HEAR, net.address(target)]
            with subprocess.Popen(hear, stdout=subprocess.PIPE, text=True) as ear:
                assert ear.stdout
                say = [sys.executable, "-c", SAY, net.address(target), ear.stdout.readline().strip()]
                subprocess.run([*net.command_prefix(source), *say], check=True)
                return ear.stdout.read() == "a word\n"

        def ways() -> tuple[bool, bool]:
            return hears(0, 1), hears(1, 0)

        assert ways() == (True, True)
        net.deafen(1)
        assert ways() == (False, True)
        net.heal(1)
        net.mute(1)
        assert ways() == (True, False)
        net.heal(1)
        assert ways() == (True, True)


@needs_hosts
def test_a_link_becomes_slow_and_what_it_was() -> None:
    with emulated_hosts.EmulatedHosts(2) as net:
        net.slow(1, 50)
        slow_mbit = _transfer(net, 0, 1)
        net.heal(1)
        assert slow_mbit < 50 * 1.1 < _transfer(net, 0, 1)


@needs_hosts
def test_hosts_are_apart_and_workers_run_on_them(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text(
        "import os, socket\n"
        "print(os.readlink('/proc/self/ns/net'), ','.join(name for _, name in socket.if_nameindex()))\n"
    )
    said: list[tuple[int, str]] = []
    with emulated_hosts.EmulatedHosts(2) as net:
        outcome = supervisor.run(
            LaunchPlan(
                command=[str(script)],
                workers=2,
                layout=cores.layout(2),
                environ={},
                run_dir=None,
                prefix=net.command_prefix,
            ),
            on_tick=lambda: None,
            on_line=lambda rank, line: said.append((rank, line)),
        )
        interfaces = {net.interface(0), "lo"}
    assert outcome.ok, outcome
    networks = {line.split()[0] for _, line in said} | {os.readlink("/proc/self/ns/net")}
    assert len(networks) == 3
    for _, line in said:
        assert set(line.split()[1].split(",")) == interfaces


@needs_hosts
def test_an_error_inside_or_while_building_leaves_nothing() -> None:
    with contextlib.suppress(ZeroDivisionError), emulated_hosts.EmulatedHosts(2):
        assert len(_namespaces()) == 3
        raise ZeroDivisionError
    assert _namespaces() == set()
    net = emulated_hosts.EmulatedHosts(2)
    taken = net.command_prefix(1)[-1]
    subprocess.run(["ip", "netns", "add", taken], check=True)
    try:
        with pytest.raises(ManyhandsError, match="File exists"), net:
            pass
        assert _namespaces() == {taken}  # what somebody else made is not ours to remove
    finally:
        subprocess.run(["ip", "netns", "delete", taken], check=True)


@pytest.mark.parametrize(("count", "mbit"), [(0, None), (251, None), (2, 0.0), (2, -1.0)])
def test_nonsense_is_refused(count: int, mbit: float | None) -> None:
    with pytest.raises(UsageError):
        emulated_hosts.EmulatedHosts(count, bandwidth_mbit=mbit)
