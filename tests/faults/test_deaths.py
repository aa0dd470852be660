"""Deaths over everything registered: under every strategy, preset, topology and placement processes are killed."""

import json
import signal
from pathlib import Path

import pytest

from manyhands import placement as placements
from manyhands import strategies
from manyhands.comm.collectives import TOPOLOGIES
from tests.end_to_end.commands import last_error, manyhands
from tests.faults import checks, harness, registered, training
from tests.faults.harness import Fault, Ran

BY_SIGNAL = 128  # is added to a signal's number in the exit code of a run that it has ended
ADAM_LR = 0.002

STRATEGIES = registered.every_strategy()
SURVIVORS = [text for text in STRATEGIES if registered.workers(text, replicas=3)]
SERVED = [text for text in SURVIVORS if registered.servers(text)]


def check(ran: Ran, faults: list[Fault], finished: set[int], *, epochs: int = checks.EPOCHS) -> None:
    assert set(ran.ends) == finished
    checks.nothing_lost(ran, ran.fired, faults, epochs=epochs)
    assert {fields["rank"] for fields in ran.fields_of("death")} == {
        fault.who for fault in faults if fault.kind == "kill"
    }


def test_what_is_registered_later_is_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    newcomer = type("Newcomer", (strategies.STRATEGIES[strategies.DEFAULT],), {})
    monkeypatch.setitem(strategies.STRATEGIES, "newcomer", newcomer)
    assert set(registered.every_strategy()) == {*STRATEGIES, "newcomer"}
    assert registered.workers("newcomer", replicas=3) == 3
    named = {strategies.parse(text) for text in STRATEGIES}
    assert {strategies.parse(text) for text in strategies.PRESETS} <= named


def pause_s(strategy: str) -> float:
    """Where workers do not wait for each other, a pause in each step keeps one of them from taking all samples."""
    return 0.0 if strategies.parse(strategy).traits.lockstep else 0.02


@pytest.mark.parametrize("strategy", SURVIVORS)
def test_all_workers_but_one_die(strategy: str, tmp_path: Path) -> None:
    """One in each epoch. The first worker, which may lead, is killed first; groups end up with one worker and none."""
    workers = registered.workers(strategy, replicas=3)
    assert workers
    others = [who for who in range(workers) if who != 1]
    faults = [Fault(who, step) for who, step in zip(others, (13, 33, *range(23, 13, -2)), strict=False)]
    optimizer = registered.optimizer(strategy)
    ran = harness.run(
        tmp_path,
        faults,
        workers=workers,
        strategy=strategy,
        servers=registered.servers(strategy),
        optimizer=optimizer,
        lr=registered.rate(strategy),
        pause_s=pause_s(strategy),
        down_to=workers if strategies.parse(strategy).traits.lockstep else 1,
    )
    check(ran, faults, {1})
    checks.learned(strategy, ran, optimizer, lr=registered.rate(strategy))


# What a strategy throws away by its own rule, death or no death.
FORGETS = {
    "tournament": "the better model goes on at both trainers, and what the other one had learned is gone"
}


@pytest.mark.parametrize("strategy", [text for text in SURVIVORS if text not in FORGETS])
def test_the_survivors_have_what_every_sample_has_taught(strategy: str, tmp_path: Path) -> None:
    """The parameters count, sample by sample, what updates have used: to be in the ledger is not enough.

    Under gossip, worker 0 of three sits out in step 13: no other worker has what it learned there. Where workers write
    into one replica without locks, as Hogwild's do, one may overwrite what another has just written, death or no death:
    here they write one at a time, so that what is missing went with a worker.
    """
    workers = registered.workers(strategy, replicas=3)
    assert workers
    faults = [Fault(0, 14), Fault(2, 18)]
    found = strategies.parse(strategy)
    traits, only = found.traits, strategies.tuning(found).only_optimizer
    ran = harness.run(
        tmp_path,
        faults,
        workers=workers,
        strategy=strategy,
        servers=registered.servers(strategy),
        optimizer=registered.optimizer(strategy) if only else "plain",
        counts=True,
        lr=1.0,
        epochs=1,
        pause_s=pause_s(strategy),
        one_at_a_time=traits.replica == "shared" and not traits.lockstep,
    )
    check(ran, faults, set(range(workers)) - {0, 2}, epochs=1)
    taught = training.counted(ran.parameters(1)).amin(dim=1)
    lost = (taught <= 0).nonzero().flatten().tolist()
    assert not lost, f"{len(lost)} samples count as used, and no parameter has anything of them: {lost}"


@pytest.mark.parametrize("strategy", SERVED)
def test_a_server_dies_and_another_goes_on_with_what_it_knew(strategy: str, tmp_path: Path) -> None:
    workers = registered.workers(strategy, replicas=3)
    assert workers
    faults = [Fault(1, 0.2, "server")]
    only = strategies.tuning(strategies.parse(strategy)).only_optimizer
    optimizer = registered.optimizer(strategy) if only else "Adam"
    lr = training.LR / 5
    ran = harness.run(
        tmp_path,
        faults,
        workers=workers,
        strategy=strategy,
        servers=registered.servers(strategy),
        replace=1,
        optimizer=optimizer,
        lr=lr,
        pause_s=0.02,
    )
    check(ran, faults, set(range(workers)))
    assert [event.text for event in ran.of("server")] == [
        "server 1 died (killed by SIGKILL): another takes over from it"
    ]
    checks.learned(strategy, ran, optimizer, lr=lr)


def shape(strategy: str, placement: str, *, replicas: int) -> list[tuple[str, str, int]]:
    """A run in which each replica is on several workers, if there is one."""
    workers = registered.workers(strategy, placement, replicas=replicas, apart=True)
    return [(strategy, placement, workers)] if workers else []


PLACEMENTS = registered.every_placement()
APART = [one for text in PLACEMENTS for one in shape(strategies.DEFAULT, text, replicas=2)]
SMALLEST = min(APART, key=lambda case: case[2])[1]
TOGETHER = {
    *APART,
    *(one for text in STRATEGIES for one in shape(text, SMALLEST, replicas=2)),
}


@pytest.mark.parametrize(
    ("strategy", "placement", "workers"), sorted(case for case in TOGETHER if registered.outlives(*case))
)
def test_a_whole_replica_goes_on_when_another_loses_a_part(
    strategy: str, placement: str, workers: int, tmp_path: Path
) -> None:
    """All placements under the strategy that is used most, all strategies under the smallest placement."""
    faults = [Fault(workers - 1, 7)]
    ran = harness.run(
        tmp_path,
        faults,
        workers=workers,
        placement=placement,
        strategy=strategy,
        optimizer="Adam",
        lr=ADAM_LR,
    )
    check(ran, faults, set(range(workers // 2)))
    checks.learned(strategy, ran, "Adam", lr=ADAM_LR)


# One replica alone: all placements. With one replica topologies have nothing to do, so one stands for all of them.
ONE = {
    *(one for text in PLACEMENTS for one in shape(strategies.DEFAULT, text, replicas=1)),
    *shape(f"{strategies.DEFAULT}:topology={min(TOPOLOGIES)}", SMALLEST, replicas=1),
}
assert all(registered.outlives(*case) for case in ONE)


@pytest.mark.parametrize(("strategy", "placement", "workers"), sorted(ONE))
def test_new_workers_take_over_the_parts_of_the_only_replica(
    strategy: str, placement: str, workers: int, tmp_path: Path
) -> None:
    """The last worker dies, and when another has its part, the first one, which leads. There is no checkpoint."""
    faults = [Fault(workers - 1, 7), Fault(0, 16)]
    ran = harness.run(
        tmp_path,
        faults,
        workers=workers,
        placement=placement,
        strategy=strategy,
        replace=2,
        optimizer="Adam",
        lr=ADAM_LR,
    )
    check(ran, faults, {*range(1, workers - 1), workers, workers + 1})
    checks.learned(strategy, ran, "Adam", lr=ADAM_LR)
    steps = [fields["step"] for fields in ran.fields_of("death")]
    assert steps == [7, 16], "no step was lost"


# Strategies for which an undo log of the optimizer's updates is not enough, each by one name, under one placement or
# another.
SMALL = [case[1] for case in sorted(ONE) if case[0] == strategies.DEFAULT and case[2] == 2]
COPIED = [
    one
    for text in strategies.STRATEGIES
    if not strategies.parse(text).traits.logs_parts
    for one in shape(text, SMALL[len(text) % len(SMALL)], replicas=1)
    if registered.outlives(*one)
]


@pytest.mark.parametrize(("strategy", "placement", "workers"), COPIED)
def test_new_workers_take_over_what_any_strategy_keeps(
    strategy: str, placement: str, workers: int, tmp_path: Path
) -> None:
    faults = [Fault(0, 12)]
    ran = harness.run(
        tmp_path,
        faults,
        workers=workers,
        placement=placement,
        strategy=strategy,
        replace=1,
        optimizer="Adam",
        lr=ADAM_LR,
        epochs=1,
    )
    check(ran, faults, {*range(1, workers), workers}, epochs=1)
    checks.one_history_under(strategy, ran, "Adam", lr=ADAM_LR)
    assert [fields["step"] for fields in ran.fields_of("death")] == [12], "no step was lost"


def test_replicas_that_differ_go_on_from_one_of_them(tmp_path: Path) -> None:
    """Both lose a part. What is left of the second one fills the first one up, from what its dead worker has left."""
    faults = [Fault(1, 13), Fault(2, 13)]
    ran = harness.run(
        tmp_path,
        faults,
        workers=4,
        placement="tensor:ways=2",
        strategy="diloco",
        optimizer="Adam",
        lr=ADAM_LR,
    )
    check(ran, faults, {0, 3})
    checks.has_learned(ran)


# Parts whose servers cannot do without a worker of theirs.
ENDING = [
    *(case for case in sorted(TOGETHER) if not registered.outlives(*case)),
    *((text, placements.DEFAULT, 1) for text in STRATEGIES if text not in SURVIVORS),
]


@pytest.mark.parametrize(("strategy", "placement", "workers"), ENDING)
def test_where_no_worker_can_go_on_the_run_ends_and_says_why(
    strategy: str, placement: str, workers: int, tmp_path: Path
) -> None:
    assert not registered.outlives(strategy, placement, workers)
    dead = workers - 1
    settings = json.dumps({"faults": [[dead, 5, "kill"]]})
    servers = registered.servers(strategy, placement)
    asked = ["--strategy", strategy, "--placement", placement, "--workers", str(workers), "--out", "run"]
    asked += ["--servers", str(servers)] if servers else []
    done = manyhands("launch", *asked, str(harness.SCRIPT), str(tmp_path), settings, cwd=tmp_path)
    assert {"kind": "fault", "step": 5, "fault": "kill"} in harness.logs_in(tmp_path)[dead], "the fault fired"
    assert done.code == BY_SIGNAL + signal.SIGKILL
    why = f"error: worker {dead} of {workers} died: killed by SIGKILL"
    if placements.parse(placement).mesh(workers).members > 1:
        why += "; its replica is not whole without it, and there is no checkpoint yet: start again"
    else:
        why += "; no worker is left that has the parameters; there is no checkpoint: start again"
    assert last_error(done.err) == why
    assert "Traceback" not in done.err
    assert not (tmp_path / "run" / "summary.json").exists()
