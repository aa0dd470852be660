"""Workers and servers of a run with several sessions die, in the step of one or between the steps of two: all go on, as
far as each other, and with the numbers of one process where they step together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults import harness, turns
from tests.faults.harness import Fault, Logs, Ran

SCRIPT = Path(turns.__file__)


def run(folder: Path, faults: list[Fault], **settings: Any) -> Ran:
    ran = harness.run(folder, faults, script=SCRIPT, **settings)
    assert sorted(ran.fired, key=str) == sorted(faults, key=str), "the faults fired"
    whole = {"once": settings.get("epochs", 2) * turns.LENGTH, "twice": 0, "never": 0}
    first = ran.ends[min(ran.ends)]
    for number, end in ran.ends.items():
        assert end["tally"] == whole, "every sample exactly once in each epoch"
        assert abs(end["steps"][0] - end["steps"][1]) <= 1, "no session is left behind"
        assert end["before"] == first["before"]
        assert torch.equal(ran.parameters(min(ran.ends)), ran.parameters(number)), "the same bits everywhere"
    return ran


def steps_of(ran: Ran, name: str) -> list[list[int]]:
    rows = {number: [row for row in log if row.get("of") == name] for number, log in ran.logs.items()}
    return Logs(ran.folder, rows).committed()


def alone(ran: Ran) -> Tensor:
    """One process that makes the steps of both sessions in turns."""
    models, data = turns.nets(), turns.Numbered()
    made = [turns.optimizer(model) for model in models]
    losses = turns.losses(*models)
    for both in zip(*(steps_of(ran, name) for name in turns.NAMES), strict=True):
        for model, optimizer, loss, ids in zip(models, made, losses, both, strict=True):
            optimizer.zero_grad()
            loss(model, data.batch(torch.tensor(ids), 0)).backward()
            optimizer.step()
    every = [param for model in models for param in model.parameters()]
    return nn.utils.parameters_to_vector(every).detach()


APART = ["local-sgd:period=2", "hogwild", "parameter-server:async", "downpour"]


def servers(strategy: str) -> int:
    return 2 if "server" in strategy or strategy == "downpour" else 0


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("all-reduce", "d"), ("all-reduce", "g"), ("ring", "d"), ("parameter-server:sync", "g")],
)
def test_a_worker_dies_in_the_step_of_one_session(strategy: str, kind: str, tmp_path: Path) -> None:
    ran = run(tmp_path, [Fault(1, 5, kind)], strategy=strategy, servers=servers(strategy))
    assert set(ran.ends) == {0, 2}
    assert [end["steps"] for end in ran.ends.values()] == [[len(steps_of(ran, "d"))] * 2] * 2
    torch.testing.assert_close(ran.parameters(0), alone(ran), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", APART)
def test_a_worker_dies_where_workers_step_apart(strategy: str, tmp_path: Path) -> None:
    faults = [Fault(1, 5, "g")]
    ran = run(tmp_path, faults, strategy=strategy, servers=servers(strategy))
    assert set(ran.ends) == {0, 2}


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:sync"])
def test_one_that_joins_makes_all_sessions(strategy: str, tmp_path: Path) -> None:
    """One of them is over: it gets what that one has trained. The second joins as an epoch ends: nothing is left of the
    loop of the others, and that loop is its own too."""
    before = strategy == "all-reduce"
    faults = [Fault(0, 4, "d"), Fault(2, 9, "g")]
    ran = run(
        tmp_path, faults, strategy=strategy, servers=servers(strategy), replace=2, until=3, before=before
    )
    assert len(ran.ends) == 3
    torch.testing.assert_close(ran.parameters(1), alone(ran), rtol=1e-6, atol=1e-6)


def test_a_server_dies_and_serves_all_sessions_again(tmp_path: Path) -> None:
    faults = [Fault(0, 0.2, "server")]
    ran = run(tmp_path, faults, strategy="parameter-server:sync", servers=2, replace=1, pause_s=0.03)
    assert set(ran.ends) == {0, 1, 2}
    torch.testing.assert_close(ran.parameters(0), alone(ran), rtol=1e-6, atol=1e-6)
