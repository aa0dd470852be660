"""What a host uses, as its launcher samples it: against what this process does to the machine."""

import os
import socket
import time
from pathlib import Path

import pytest

from manyhands import telemetry
from manyhands.cluster.launcher import host_sampler
from manyhands.cluster.launcher.host_sampler import HostSampler
from manyhands.telemetry.host_usage import HostUsage
from manyhands.telemetry.read import read

MOST_CPU_S = 0.005  # of one sample: half a percent of a core, at one a second


def burn(seconds: float) -> None:
    until_s = time.process_time() + seconds
    while time.process_time() < until_s:
        pass


def through_loopback(data: bytes) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        other, _ = server.accept()
        with other:
            left = len(data)
            client.setblocking(False)
            rest = memoryview(data)
            while left:
                if rest:
                    rest = rest[client.send(rest[: 1 << 16]) :]
                left -= len(other.recv(1 << 20))


def test_processor_time_of_a_process_and_of_the_machine_grow_by_what_it_has_burnt() -> None:
    usage, own = HostUsage(), {"worker 0": os.getpid()}
    before = usage.sample(own)
    burn(0.3)
    after = usage.sample(own)
    grown = [
        after["processes"]["worker 0"][name] - before["processes"]["worker 0"][name]
        for name in ("user_s", "system_s")
    ]  # type: ignore[index]
    assert 0.25 < sum(grown) < 0.5
    assert after["cpu_user_s"] + after["cpu_system_s"] >= 0.25  # type: ignore[operator]
    assert 0 < after["memory_bytes"] < after["memory_total_bytes"]  # type: ignore[operator]


def test_bytes_packets_and_segments_of_an_interface_are_counted() -> None:
    usage = HostUsage()
    through_loopback(bytes(1 << 20))
    sample = usage.sample({})
    loopback = sample["interfaces"]["lo"]  # type: ignore[index]
    for way in ("sent", "received"):
        assert loopback[f"bytes_{way}"] >= 1 << 20
        assert loopback[f"packets_{way}"] >= 16
        # Offloaded packets of up to 64 kB count as the segments that they would be on a wire.
        assert sample[f"segments_{way}"] >= loopback[f"packets_{way}"] - 8  # type: ignore[operator]


def test_a_process_that_has_ended_is_left_out() -> None:
    assert HostUsage().sample({"worker 0": 1 << 30})["processes"] == {}


def test_a_sample_costs_less_than_half_a_percent_of_a_core() -> None:
    usage = HostUsage()
    pids = {f"worker {number}": os.getpid() for number in range(8)}
    began_s = time.process_time()
    for _ in range(50):
        usage.sample(pids)
    assert (time.process_time() - began_s) / 50 < MOST_CPU_S


def test_nothing_is_written_before_the_run_has_recorded_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_sampler, "PERIOD_S", 0.0)
    (tmp_path / "events").mkdir()
    with HostSampler(tmp_path, 0, dict) as sampler:
        sampler.tick()
    assert not list((tmp_path / "events").iterdir())


def test_every_second_one_record_of_the_host_and_one_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_sampler, "PERIOD_S", 0.05)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "worker-0.jsonl").touch()
    began_s = time.monotonic()
    with HostSampler(tmp_path, 3, lambda: {"worker 0": os.getpid()}) as sampler:
        for _ in range(30):
            sampler.tick()
            time.sleep(0.01)
    records = list(read(tmp_path))
    assert [path.name for path in (tmp_path / "events").glob("host-*")] == ["host-3.jsonl"]
    assert 3 <= len(records) <= (time.monotonic() - began_s) / 0.05 + 1
    assert {(record["kind"], record["rank"]) for record in records} == {("usage", 3)}
    assert records[-1]["processes"].keys() == {"worker 0"}


def test_where_no_launcher_is_ours_it_is_written_beside_the_records_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_sampler, "PERIOD_S", 0.0)
    telemetry.open(tmp_path / "events" / "worker-0.jsonl", rank=0)
    telemetry.accompany(HostSampler(tmp_path, 2, lambda: {"worker 0": os.getpid()}))
    time.sleep(0.6)
    telemetry.close()
    found = [record for record in read(tmp_path) if record["kind"] == "usage"]
    assert {record["rank"] for record in found} == {2}
    assert len(found) >= 2
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    assert not [name for name in links if name.startswith(str(tmp_path))]


def test_a_directory_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_sampler, "PERIOD_S", 0.0)
    events = tmp_path / "events"
    events.mkdir()
    (events / "worker-0.jsonl").touch()
    (events / "host-0.jsonl").symlink_to(tmp_path / "elsewhere")
    with HostSampler(tmp_path, 0, dict) as sampler:
        sampler.tick()
        sampler.tick()
    assert not (tmp_path / "elsewhere").exists()
