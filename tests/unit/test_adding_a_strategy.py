"""The page on adding a strategy is true: its code, registered as it says, trains."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands import strategies
from manyhands.cli import main
from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from tests.pages import DOCS, blocks
from tests.sessions import session_of
from tests.threads import in_threads

NAME = "averaging"
PAGE = DOCS / "adding-a-strategy.md"
STEPS = 6


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file and one line in the table."""
    file, line = (block.text for block in blocks(PAGE) if block.language in ("python", "diff"))
    assert f'+    "{NAME}": Averaging,' in line
    path = tmp_path / "averaging.py"
    path.write_text(file)
    found = importlib.util.spec_from_file_location("own_averaging", path)
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "own_averaging", module)
    found.loader.exec_module(module)
    monkeypatch.setitem(strategies.STRATEGIES, NAME, module.Averaging)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(
    strategy: str, workers: int = 2, look: Callable[[Session], Any] = lambda session: None
) -> list[tuple[list[Tensor], list[Any]]]:
    """Per worker: the parameters it ends with, and what `look` saw after every step."""

    def work(world: World) -> tuple[list[Tensor], list[Any]]:
        generator = torch.Generator().manual_seed(world.rank)
        net = nn.Sequential(nn.Linear(8, 16, dtype=torch.float64), nn.Tanh(), nn.Linear(16, 3).double())
        with torch.no_grad():
            for param in net.parameters():
                param.copy_(torch.linspace(-0.5, 0.5, param.numel()).view(param.shape))
        seen = []
        with session_of(
            net, torch.optim.SGD(net.parameters(), lr=0.1), loss, world=world, strategy=strategy
        ) as session:
            inputs = torch.randn(20, 8, generator=generator, dtype=torch.float64)
            batch = inputs, (inputs[:, 0] > 0).long()
            for _ in range(STEPS):
                session.step(batch)
                seen.append(look(session))
        return [param.detach().clone() for param in net.parameters()], seen

    return in_threads(workers, work)


def test_replicas_part_between_averages_and_meet_at_each() -> None:
    def look(session: Session) -> Tensor:
        return session.engine.replica.params.clone()

    (_, one), (_, two) = trained(f"{NAME}:period=3", look=look)
    meet = [torch.equal(a, b) for a, b in zip(one, two, strict=True)]
    assert meet == [False, False, True, False, False, True]


def test_it_learns() -> None:
    def look(session: Session) -> float:
        return session.engine.progress.last_loss

    for _, losses in trained(f"{NAME}:period=2", look=look):
        assert losses[-1] < losses[0]


def test_averaging_in_every_step_is_synchronous_training() -> None:
    """With plain SGD and equal batches: the mean of the updated parameters is the update by the mean gradient."""
    ours, want = trained(f"{NAME}:period=1")[0][0], trained(strategies.DEFAULT)[0][0]
    for got, param in zip(ours, want, strict=True):
        torch.testing.assert_close(got, param, rtol=1e-9, atol=1e-12)


def test_a_worker_without_data_does_not_hold_up_the_others() -> None:
    def work(world: World) -> int:
        net = nn.Linear(4, 2)
        session = session_of(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            loss,
            world=world,
            strategy=f"{NAME}:period=2",
        )
        mine = [(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))] * (2 + 3 * world.rank)
        for batch in session.batches(mine):
            session.step(batch)
        session.close()
        return session.steps

    assert in_threads(2, work) == [5, 5]


def test_the_command_line_finds_it(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = strategies.parse(f"{NAME}:period=4")
    assert strategies.describe(strategy) == f"{NAME}:period=4"
    assert main(["list", "strategies"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{NAME} ")]
    assert line.endswith("  settings: period=8")
    with pytest.raises(UsageError, match="period=0: it must be at least 1"):
        strategies.parse(f"{NAME}:period=0")
