"""Workers die, hang, leave and join, and the others go on: their processes, parameters and samples stay right."""

import random
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize(
    "strategy",
    ["all-reduce:topology=ring", "double-buffer", "local-sgd:period=4", "tournament", "hogwild", "ad-psgd"],
)
def test_a_worker_dies_under_other_strategies(strategy: str, tmp_path: Path) -> None:
    faults = [Fault(0, 13), Fault(2, 33)]
    ran = harness.run(tmp_path, faults, strategy=strategy)
    check(ran, faults, {1})
    if "ring" in strategy:
        checks.one_history(ran, "momentum")


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


KEPT_BACK = "parameter-server:sync,cache=true,every=2=3"  # by the worker that speaks for the host
SERVED = [
    "parameter-server:sync",
    "parameter-server:async",
    "parameter-server:stale,bound=1",
    "parameter-server:sync,every=2=3",
    "parameter-server:sync,cache=true",
    KEPT_BACK,
    "downpour:fetch=2,push=3",
    "worker-groups:groups=2",
    "worker-groups:groups=2,server_groups=2",
]


def check_history(strategy: str, ran: Ran, optimizer: str) -> None:
    """Where workers take every step together, one process that has made the same steps has the same parameters."""
    if strategy == KEPT_BACK:
        pauses = {row["steps"] for row in ran.logs[1] if row["kind"] == "evaluated"}
        together = harness.alone_and_kept_back(
            ran.committed(), pauses, optimizer=optimizer, layer="2", every=3
        )
        torch.testing.assert_close(ran.parameters(1), together, rtol=1e-6, atol=1e-6)
    elif "sync" in strategy and "async" not in strategy and "every" not in strategy:
        checks.one_history(ran, optimizer)


@pytest.mark.parametrize("strategy", [*SERVED, "sandblaster"])
def test_a_worker_dies_under_servers(strategy: str, tmp_path: Path) -> None:
    """In the end the groups of `worker-groups` are one worker and none, and so are the parties of server groups."""
    workers = 4 if "groups" in strategy else 3
    faults = [Fault(0, 13), Fault(2, 33), Fault(3, 23)][: workers - 1]
    optimizer = "LBFGS" if strategy == "sandblaster" else "momentum"
    ran = harness.run(tmp_path, faults, workers=workers, strategy=strategy, servers=2, optimizer=optimizer)
    check(ran, faults, {1})
    check_history(strategy, ran, optimizer)


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


@pytest.mark.parametrize(
    "strategy",
    [
        *(one for one in SERVED if "stale" not in one and one != "parameter-server:sync,every=2=3"),
        "sandblaster",
    ],
)
def test_a_server_dies_and_another_goes_on_with_what_it_knew(strategy: str, tmp_path: Path) -> None:
    workers = 4 if "groups" in strategy else 3
    faults = [Fault(1, 0.2, "server")]
    ran = harness.run(
        tmp_path,
        faults,
        workers=workers,
        strategy=strategy,
        servers=2,
        replace=1,
        optimizer="LBFGS" if strategy == "sandblaster" else "Adam",
        pause_s=0.02,
    )
    check(ran, faults, set(range(workers)))
    assert [event.text for event in ran.of("server")] == [
        "server 1 died (killed by SIGKILL): another takes over from it"
    ]
    check_history(strategy, ran, "Adam")
