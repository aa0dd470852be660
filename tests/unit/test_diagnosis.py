"""What is wrong with a run, told from made-up records of its processes: the culprit, the part and the numbers."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.run_findings import worth_saying
from manyhands.diagnosis import KINDS, Diagnosis, Finding, diagnose
from manyhands.telemetry import lines
from manyhands.telemetry.read import read_ends

STEPS = 60
T0 = 1_000_000.0


def start(rank: int = 0, **more: Any) -> lines.Record:
    return {"kind": "start", "t": T0, "rank": rank, "lockstep": True, "rate": 0.1, "late": 0, **more}


def steps(rank: int, *, wall: float = 0.1, count: int = STEPS, **seconds: float) -> Iterator[lines.Record]:
    """A worker's step lines: how long a step takes, and where its time goes; the rest of it is waited for."""
    parts = {"forward": 0.01, "compute": 0.03, "update": 0.001, "input": 0.0005} | seconds
    wait_s = max(0.0, wall - parts["compute"] - parts["update"] - parts["input"] - parts.pop("outside", 0.0))
    wait_s += parts.get("held", 0.0)
    for step in range(1, count + 1):
        yield {
            "kind": "step",
            "t": T0 + step * wall,
            "rank": rank,
            "step": step,
            "epoch": 0,
            "loss": 2.0 / step + 0.5,
            "samples": 8,
            "wait_s": wait_s,
            **{f"{name}_s": value * (1 + 0.02 * math.sin(7 * step + rank)) for name, value in parts.items()},
        }


def found(*records: Any) -> list[Finding]:
    diagnosis = Diagnosis()
    every = [record for some in records for record in ([some] if isinstance(some, dict) else some)]
    diagnosis.add(sorted(every, key=lambda record: record["t"]))
    return diagnosis.findings()


def only(*records: Any) -> Finding:
    (finding,) = found(*records)
    assert finding.kind in KINDS
    assert not finding.text.endswith(".")
    assert not finding.advice.endswith(".")
    return finding


def test_nothing_is_wrong_with_workers_that_are_alike() -> None:
    assert not found(start(), *(steps(rank, wall=0.033) for rank in range(4)))


def test_nothing_is_said_before_there_are_enough_steps() -> None:
    slow = steps(1, wall=0.2, count=6, compute=0.19)
    assert not found(start(), steps(0, wall=0.2, count=6), slow)


@pytest.mark.parametrize(
    ("part", "seconds", "said"),
    [
        ("backward", {"compute": 0.098}, "slow in its backward pass"),
        ("forward", {"forward": 0.078, "compute": 0.098}, "slow in its forward pass"),
        ("update", {"update": 0.069}, "slow in its updates"),
        ("outside", {"outside": 0.068}, "between its steps"),
    ],
)
def test_the_worker_that_others_wait_for_is_named_with_what_it_is_slow_in(
    part: str, seconds: dict[str, float], said: str
) -> None:
    finding = only(start(), steps(0), steps(1), steps(3), steps(2, **seconds))
    assert finding.kind == "slow-worker"
    assert finding.processes == ("worker 2",)
    assert said in finding.text
    assert "the others wait for it 68 % of the time" in finding.text
    assert finding.share == pytest.approx(0.68, abs=0.02)


def test_a_little_slower_is_told_in_percent() -> None:
    slow = steps(3, wall=0.04, compute=0.0386, forward=0.01)
    finding = only(start(), *(steps(rank, wall=0.04) for rank in range(3)), slow)
    assert "worker 3 is slow in its backward pass (+43 %, 29 ms a step, the others 20 ms)" in finding.text


def test_time_that_a_pass_is_held_up_by_others_is_not_its_own() -> None:
    """Where workers add to one sum in turns, those that wait for the slow one do it inside of their passes."""
    held = [steps(rank, compute=0.098, held=0.068) for rank in (0, 2)]
    finding = only(start(), *held, steps(1, compute=0.098))
    assert finding.processes == ("worker 1",)
    assert "backward" in finding.text


def test_a_slow_worker_for_which_no_other_waits_is_told_so() -> None:
    fast = (steps(rank, wall=0.033) for rank in (0, 2))
    finding = only(start(lockstep=False), *fast, steps(1, wall=0.1, compute=0.098))
    assert "need not wait for it" in finding.text
    assert "do not wait for each other" not in finding.advice


def test_one_worker_waits_for_its_data() -> None:
    finding = only(start(), steps(0), steps(1, input=0.069))
    assert (finding.kind, finding.processes) == ("input-bound", ("worker 1",))
    assert "the other waits for it" in finding.text


def test_all_workers_wait_for_their_data() -> None:
    finding = only(start(), *(steps(rank, input=0.068) for rank in range(2)))
    assert finding.kind == "input-bound"
    assert "68 % of the time (68 ms a step)" in finding.text


def test_a_lone_worker_can_be_bound_by_its_optimizer() -> None:
    finding = only(start(), steps(0, update=0.068))
    assert (finding.kind, finding.numbers["update_s"]) == ("update-bound", pytest.approx(0.068, rel=0.05))


def test_short_steps_are_told_as_such_and_blame_nothing_else() -> None:
    each = {"compute": 0.0003, "forward": 0.0001, "update": 0.0, "input": 0.0002, "outside": 0.0004}
    finding = only(start(), *(steps(rank, wall=0.001, **each) for rank in range(2)))
    assert finding.kind == "short-steps"
    assert "a step takes 1 ms, of which 30 % is computation" in finding.text


def serving(busy: float, server: int) -> Iterator[lines.Record]:
    yield {"kind": "serves", "t": T0, "rank": 2 + server, "server": server}
    for half in range(1, 12):
        waited = half * 0.5 * (1 - busy)
        record = {"t": T0 + half * 0.5, "rank": 2 + server, "wait_s": waited, "update_s": half * 0.1}
        yield {"kind": "serving", **record}


def test_the_busy_server_is_named() -> None:
    finding = only(start(), steps(0), steps(1), serving(0.1, 0), serving(0.9, 1))
    assert (finding.kind, finding.processes) == ("server-bound", ("server 1",))
    assert "server 1 is busy 90 % of it, the others 10 %" in finding.text


def test_where_servers_are_idle_and_bytes_go_out_it_is_the_network() -> None:
    workers = (steps(rank, bytes_sent=0.0) for rank in range(2))
    sending = [{**record, "bytes_sent": 500_000} for some in workers for record in some]
    finding = only(start(), sending, serving(0.1, 0))
    assert finding.kind == "network-bound"
    assert "5 MB/s (40 Mbit/s)" in finding.text


def usage(host: int, *workers: int, others: float = 0.0, machine: str = "") -> Iterator[lines.Record]:
    """Two cores that are busy; of them the workers use what `others` leave."""
    for second in range(8):
        used = 2.0 * second
        each = used * (1 - others) / max(len(workers), 1)
        yield {
            "kind": "usage",
            "t": T0 + second,
            "rank": host,
            "cores": 2,
            **({"machine": machine} if machine else {}),
            "cpu_user_s": used,
            "cpu_system_s": 0.0,
            "cpu_steal_s": 0.0,
            "cpu_idle_s": 0.0,
            "processes": {f"worker {rank}": {"user_s": each, "system_s": 0.0} for rank in workers},
        }


def test_a_host_whose_workers_are_all_slower_is_one_finding() -> None:
    slow = (steps(rank, forward=0.03, compute=0.09) for rank in (2, 3))
    finding = only(start(), steps(0), steps(1), *slow, usage(0, 0, 1), usage(1, 2, 3))
    assert (finding.kind, finding.processes) == ("uneven-hosts", ("host 1",))
    assert "the workers of host 1 need" in finding.text


def test_processes_that_are_not_of_the_run_are_noticed() -> None:
    finding = only(start(), steps(0, wall=0.033), usage(0, 0, others=0.4))
    assert (finding.kind, finding.processes) == ("busy-host", ("host 0",))
    assert "40 %" in finding.text


def test_emulated_hosts_of_one_machine_do_not_blame_each_other() -> None:
    each = (usage(host, host, others=0.5, machine="same") for host in range(2))
    assert not found(start(), steps(0, wall=0.033), steps(1, wall=0.033), *each)


def test_deaths_that_cost_time_are_told() -> None:
    deaths = [
        {"kind": "death", "t": T0 + at, "rank": rank, "how": "SIGKILL", "stood_s": 0.6}
        for at, rank in ((1, 0), (3, 4))
    ]
    finding = only(start(), steps(0), deaths)
    assert (finding.kind, finding.processes) == ("dying-worker", ("worker 0", "worker 4"))
    assert "2 processes died" in finding.text
    assert "20 % of the time" in finding.text


def losses(values: list[float], **more: Any) -> Iterator[lines.Record]:
    for step, loss in enumerate(values, start=1):
        record = {"t": T0 + 0.03 * step, "rank": 0, "step": step, "epoch": 0, "samples": 8, "loss": loss}
        yield {"kind": "step", **record, "compute_s": 0.029, "forward_s": 0.01, **more}


def test_a_loss_that_is_no_number_is_told_with_the_rate() -> None:
    finding = only(start(), losses([*(1.0 for _ in range(40)), 7.5, math.nan, math.nan]))
    assert finding.kind == "rate-too-high"
    assert "the loss of worker 0 is nan in step 42, after 7.5, at the learning rate 0.1" in finding.text
    assert "0.01" in finding.advice


def test_a_rising_loss_is_told() -> None:
    falling = [2.5 - 0.01 * step for step in range(200)]
    rising = [0.5 + 0.02 * step for step in range(200)]
    finding = only(start(), losses(falling + rising))
    assert finding.kind == "diverging-loss"
    assert not found(start(), losses(falling))


def test_a_loss_that_jumps_at_first_and_stays_is_the_rate() -> None:
    finding = only(start(), losses([*(2.3 for _ in range(32)), *(400.0 for _ in range(96))]))
    assert finding.kind in ("rate-too-high", "diverging-loss")
    assert "0.01" in finding.advice


def updates(*counts: tuple[int, int]) -> lines.Record:
    staleness = {str(late): times for late, times in counts}
    return {"kind": "updates", "t": T0 + 1, "rank": 2, "staleness": staleness}


def test_gradients_much_older_than_the_rate_is_for_are_told() -> None:
    finding = only(start(late=1), steps(0, wall=0.033), updates((0, 10), (8, 90)))
    assert finding.kind == "stale"
    assert "7.2 updates old" in finding.text
    assert "at most 8" in finding.text
    assert "the rate 0.024" in finding.advice  # 0.1 · (1 + 1) ÷ (1 + 7.2)
    assert not found(start(late=1), steps(0, wall=0.033), updates((1, 50), (2, 20)))


def test_pauses_are_no_steps() -> None:
    """An evaluation of one worker between two steps, and the wait of the others for it, count nowhere."""
    records = list(steps(0, wall=0.033)) + list(steps(1, wall=0.033))
    for record in records:
        if record["step"] > 30:
            record["t"] += 60.0
    pauses = [{"kind": "evaluate", "t": T0 + 30.5 * 0.033, "rank": rank, "step": 30} for rank in (0, 1)]
    assert not found(start(), records, pauses)


def test_thinned_records_tell_the_same() -> None:
    slow, fast = (list(steps(rank, compute=value)) for rank, value in ((0, 0.098), (1, 0.03)))
    thinned = [one for some in (slow, fast) for one in some if one["step"] > 30 or one["step"] % 8 == 0]
    assert only(start(), thinned).processes == ("worker 0",)


def test_the_recent_steps_alone_where_a_person_watches() -> None:
    """A worker that was slow once is no longer told of."""
    diagnosis = Diagnosis(recent=True)
    slow = [*steps(0, compute=0.098), *steps(1)]
    diagnosis.add([start(), *sorted(slow, key=lambda record: record["t"])])
    assert diagnosis.findings()
    later = [*steps(0, wall=0.033, count=400), *steps(1, wall=0.033, count=400)]
    for record in later:
        record["t"] += 100.0
        record["step"] += STEPS
    diagnosis.add(sorted(later, key=lambda record: record["t"]))
    assert not diagnosis.findings()


def test_hostile_records_do_no_harm() -> None:
    odd: list[Any] = [None, "x", -1, 1e300, math.inf, math.nan, [], {}, True, "9" * 400]
    fields = (
        "step",
        "epoch",
        "loss",
        "samples",
        "compute_s",
        "wait_s",
        "staleness",
        "processes",
        "cores",
        "rate",
    )
    kinds = ("step", "start", "serving", "serves", "updates", "usage", "death", "server", "evaluate")
    records = [
        {
            "kind": kind,
            "t": T0 + number,
            "rank": 0,
            **dict.fromkeys(fields, value),
            "how": value,
            "stood_s": value,
        }
        for number, (kind, value) in enumerate((kind, value) for kind in kinds for value in odd)
    ]
    for finding in found(records, steps(0), records):
        assert finding.sentence


def test_the_directory_of_a_run_is_read_and_a_long_one_in_part(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    assert diagnose(tmp_path) == []
    for rank in (0, 1):
        records = [start(rank), *steps(rank, count=3000, compute=0.098 if rank else 0.03)]
        written = b"".join(map(lines.encode, records))
        (tmp_path / "events" / f"worker-{rank}.jsonl").write_bytes(written)
    (whole,) = diagnose(tmp_path)
    (said,) = worth_saying(tmp_path)
    assert whole.processes == said.processes == ("worker 1",)
    some = list(read_ends(tmp_path, 1 << 17))
    assert [record["kind"] for record in some[:2]] == ["start", "start"]
    assert {record["step"] for record in some[2:]} > {1, 2, 3, 2999, 3000}
    assert len(some) < 2000
