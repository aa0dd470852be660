"""Runs whose loss leaves the numbers end with one sentence, and leave the checkpoint that they had."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands.cluster.worker.world import World
from manyhands.errors import Diverged
from tests.end_to_end.commands import manyhands, parameters
from tests.sessions import session_of
from tests.threads import in_threads

ONE_WORKER = """
import torch
import manyhands as mh

model = torch.nn.Linear(1, 1)
session = mh.session(
    model, torch.optim.SGD(model.parameters(), lr=0.5), lambda model, batch: (model(batch) * batch).mean()
)
for step in range(1, 1000):
    bad = step == 7 and session.rank == 1
    session.step(torch.full((4, 1), float("inf") if bad else 1e-3))
    if step % 5 == 0:
        session.save(wait=True)
"""


def test_a_huge_rate_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    done = manyhands(
        *("train", "--steps", "200", "--optimizer", "sgd:lr=100000", "--out", "run", "--json"), cwd=tmp_path
    )
    refusal = done.refusal()
    assert "the loss is" in refusal
    assert "learning rate 100000 is too high" in refusal


def test_one_worker_alone_ends_the_run_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ONE_WORKER)
    done = manyhands("launch", "--workers", "2", "--out", "run", "script.py", cwd=tmp_path)
    assert "step 7 on worker 1: the loss is" in done.refusal()
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000005"]
    assert all(torch.isfinite(value).all() for value in parameters(tmp_path / "run").values())


def test_where_nobody_counts_updates_the_strategy_knows_how_late_gradients_are() -> None:
    def work(world: World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        measure = lambda model, batch: (model(batch) * batch).mean()  # noqa: E731
        session = session_of(model, optimizer, measure, world=world, strategy="hogwild")
        session.step(torch.ones(2, 1))
        world.host.barrier()
        with pytest.raises(Diverged, match=r"about 2\.0 updates old .* rate 0\.5; .* try the rate 0\.17"):
            session.step(torch.full((2, 1), float("inf")))
        world.host.barrier()
        session.close()

    in_threads(3, work)


def test_a_rising_loss_is_told_once_and_recorded(tmp_path: Path) -> None:
    def work(world: World) -> None:
        model = nn.Linear(1, 1)
        grown = iter(torch.arange(1.0, 1000.0))
        session = session_of(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            lambda model, batch: next(grown) + 0 * model(batch).sum(),
            world=world,
            out=tmp_path,
        )
        for _ in range(320):
            session.step(torch.ones(2, 1))
        session.close()

    in_threads(1, work)
    records = [json.loads(line) for line in (tmp_path / "events/worker-0.jsonl").read_text().splitlines()]
    warned = [record for record in records if record["kind"] == "warning"]
    assert len(warned) == 1
    assert "rising" in warned[0]["text"]


def test_parameters_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    def work(world: World) -> None:
        model = nn.Linear(1, 1)
        with session_of(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            lambda model, batch: model(batch).mean(),
            world=world,
        ) as session:
            session.save(tmp_path, wait=True)
            with torch.no_grad():
                model.weight.fill_(float("nan"))
            session.save(tmp_path)

    with pytest.raises(Diverged, match="not finite after step 0, and are not saved"):
        in_threads(2, work)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000000"]


@pytest.mark.parametrize(
    ("strategy", "cause"),
    [
        ("local-sgd:period=4", "replicas agree only every 4 steps"),
        # These meet in groups, or each worker at its own pace: to meet more often makes no replicas agree.
        ("tournament", "the learning rate 0.5 is too high"),
        ("gossip:every=4", "the learning rate 0.5 is too high"),
        ("ad-psgd:every=4", "the learning rate 0.5 is too high"),
        ("hierarchical-local-sgd", "the learning rate 0.5 is too high"),
    ],
)
def test_only_replicas_that_agree_now_and_then_are_to_agree_more_often(strategy: str, cause: str) -> None:
    def work(world: World) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        measure = lambda model, batch: (model(batch) * batch).mean()  # noqa: E731
        session = session_of(model, optimizer, measure, world=world, strategy=strategy)
        session.step(torch.ones(2, 1))
        with pytest.raises(Diverged, match=cause):
            session.engine.loss_watch.see(2, float("inf"))
        session.close()

    in_threads(1, work)
