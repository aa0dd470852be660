"""Workers die, hang, leave and join, and the others go on: their processes, parameters and samples stay right.

`test_deaths.py` kills under everything registered; here are the other kinds of fault, and the instants that matter.
"""

import random
from pathlib import Path

import pytest
import torch

from manyhands.strategies.partners import pairs
from tests.faults import checks, harness, training
from tests.faults.harness import Fault, Logs, Ran


def check(ran: Ran, faults: list[Fault], finished: set[int]) -> None:
    assert set(ran.ends) == finished
    checks.nothing_lost(ran, ran.fired, faults)


def test_one_of_three_dies_in_its_forward_pass(tmp_path: Path) -> None:
    faults = [Fault(1, 7)]
    ran = harness.run(tmp_path, faults, optimizer="Adam")
    check(ran, faults, {0, 2})
    checks.one_history(ran, "Adam")
    (death,) = ran.of("death")
    assert death.text.startswith("worker 1 died (killed by SIGKILL): noticed after ")
    assert "step 7 begun again with 2 workers" in death.text
    assert death.fields["step"] == 7


def test_every_kind_of_fault_in_one_run(tmp_path: Path) -> None:
    """The last one is alone in the end, and has lost nothing."""
    faults = [
        Fault(1, 4, "segfault"),
        Fault(2, 8, "stop"),
        Fault(3, 12, "leave"),
        Fault(0, 18, "kill"),
        Fault(5, 18, "kill"),
        Fault(-1, 0.0, "coordinator"),
    ]
    ran = harness.run(tmp_path, faults, workers=6, stall_s=2.0, optimizer="momentum", pause_s=0.02)
    check(ran, faults, {4})
    checks.one_history(ran, "momentum")
    told = [event.text for event in ran.events]
    assert any("worker 1 died (segmentation fault (SIGSEGV): File " in text for text in told)
    assert any("worker 2 died (it had not been heard of for 2 s and was killed" in text for text in told)
    assert any(text.startswith("worker 3 has left: 3 workers from step ") for text in told)
    assert any(
        text.startswith("the coordinator died (killed by SIGKILL) and was started again") for text in told
    )
    assert any("worker 0 died" in text and "begun again with 1 worker," in text for text in told)


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:sync"])
def test_deaths_at_any_instant_leave_the_numbers_of_one_process(strategy: str, tmp_path: Path) -> None:
    """Also in the middle of an update: the step counts with all its samples, or is made again without the dead."""
    draw = random.Random(5)
    faults = [Fault(who, draw.uniform(0.0, 0.6)) for who in (0, 1, 3)]
    servers = 2 if "server" in strategy else 0
    ran = harness.run(
        tmp_path, faults, workers=4, strategy=strategy, servers=servers, pause_s=0.02, down_to=1
    )
    check(ran, faults, {2})
    checks.one_history(ran, "momentum")


def test_the_dead_are_replaced_and_the_new_ones_take_over(tmp_path: Path) -> None:
    faults = [Fault(0, 3), Fault(2, 3)]
    ran = harness.run(tmp_path, faults, replace=2, optimizer="Adam", until=3)
    check(ran, faults, {1, 3, 4})
    assert len(ran.of("death")) == 2
    assert {event.fields["rank"] for event in ran.of("join")} == {3, 4}
    assert ran.ends[1]["workers"] == 3


def test_groups_are_formed_anew_after_every_death(tmp_path: Path) -> None:
    """Halves of 6, 5, 4, 3 and 2 workers, then one that is left alone."""
    faults = [Fault(5, 4), Fault(1, 8), Fault(3, 12), Fault(0, 16), Fault(4, 20)]
    ran = harness.run(tmp_path, faults, workers=6, strategy="hierarchical-local-sgd:groups=2")
    check(ran, faults, {2})
    told = [event.text for event in ran.of("death")]
    assert [text.partition(" begun again with ")[2].partition(",")[0] for text in told] == [
        *[f"{workers} workers" for workers in (5, 4, 3, 2)],
        "1 worker",
    ]


def test_a_sum_under_way_is_made_again_without_the_dead_worker(tmp_path: Path) -> None:
    """What it had in the sum counts as not used; the others go on with the mean of theirs."""
    faults = [Fault(1, 7)]
    ran = harness.run(tmp_path, faults, strategy="double-buffer")
    check(ran, faults, {0, 2})
    lost = [row for row in ran.logs[1] if row.get("step") != 6]  # in the sum when it died in step 7
    steps = Logs(ran.folder, {**ran.logs, 1: lost}).used()
    pauses = {row["steps"] for row in ran.logs[0] if row["kind"] == "evaluated"}
    together = harness.alone_and_late(steps, pauses, lr=training.LR)
    torch.testing.assert_close(ran.parameters(0), together, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "workers", "dead"),
    [
        ("gossip", 3, pairs(3, 5)[-1]),  # it sat out in step 5
        ("gossip", 4, pairs(4, 5)[0]),  # they met in step 5, and no third worker has heard of them
        ("hierarchical-local-sgd:local_period=1,global_period=8,groups=2", 3, [0]),
        ("local-sgd:period=4", 3, [1]),
    ],
)
def test_the_effect_of_every_sample_survives(
    strategy: str, workers: int, dead: list[int], tmp_path: Path
) -> None:
    """Counted in the parameters themselves: what the dead alone had learned, the others learn again."""
    faults = [Fault(who, 6) for who in dead]
    settings = {"counts": True, "optimizer": "plain", "lr": 1.0, "epochs": 1}
    ran = harness.run(tmp_path, faults, workers=workers, strategy=strategy, **settings)
    assert sorted(ran.fired, key=str) == sorted(faults, key=str)
    assert set(ran.ends) == set(range(workers)) - set(dead)
    for number, end in ran.ends.items():
        assert end["tally"] == {"once": training.LENGTH, "twice": 0, "never": 0}
        counts = training.counted(ran.parameters(number))
        assert int((counts == 0).flatten(1).any(1).sum()) == 0, "samples that no replica has learned from"


def test_a_worker_dies_in_the_middle_of_an_update_by_an_optimizer_that_nobody_knows(tmp_path: Path) -> None:
    faults = [Fault(1, 4, "update"), Fault(0, 13, "update")]
    ran = harness.run(tmp_path, faults, optimizer="Own", lr=0.01)
    check(ran, faults, {2})
    checks.one_history(ran, "Own", lr=0.01)


def test_a_server_dies_in_the_middle_of_an_update_by_such_an_optimizer(tmp_path: Path) -> None:
    """And with a limit to the norm, which the servers know only together."""
    faults = [Fault(4, 7, "update")]
    settings = {"optimizer": "Own", "lr": 0.01, "clip_norm": 0.5}
    ran = harness.run(tmp_path, faults, strategy="parameter-server:sync", servers=2, replace=1, **settings)
    check(ran, faults, {0, 1, 2})
    assert len(ran.of("server")) == 1
    checks.one_history(ran, **settings)


def test_an_optimizer_that_runs_whole_survives_and_is_handed_on(tmp_path: Path) -> None:
    """What it keeps for all parameters is undone with a step, and a replacement takes it over."""
    faults = [Fault(0, 3), Fault(2, 9)]
    ran = harness.run(tmp_path, faults, replace=2, optimizer="Whole", until=3)
    check(ran, faults, {1, 3, 4})
    assert [event.fields["rank"] for event in ran.of("join")] == [3, 4]
    checks.one_history(ran, "Whole")
    torch.testing.assert_close(ran.parameters(1), ran.parameters(4), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["all-reduce", "ring"])
def test_parameters_of_several_types_survive_and_are_handed_on(strategy: str, tmp_path: Path) -> None:
    faults = [Fault(0, 3), Fault(2, 9)]
    ran = harness.run(tmp_path, faults, strategy=strategy, replace=2, optimizer="Mixed", until=3)
    check(ran, faults, {1, 3, 4})
    checks.one_history(ran, "Mixed")
    torch.testing.assert_close(ran.parameters(1), ran.parameters(4), rtol=0, atol=0)
