"""Values of all workers: gathered, averaged, logged; and measures over all samples at once."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from manyhands import telemetry
from manyhands.cluster.worker.world import World
from manyhands.engine.class_counts import per_class
from manyhands.engine.evaluate import over_all
from manyhands.engine.plain_values import decode, encode
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from manyhands.telemetry.read import read
from tests.contracts.test_sessions import Numbered
from tests.contracts.test_strategies import loss, make_net, momentum_of
from tests.sessions import session_of
from tests.threads import in_threads

STRATEGIES = ["all-reduce", "ring", "local-sgd", "hogwild", "parameter-server", "parameter-server:async"]


def make_session(world: World, strategy: str = "all-reduce") -> Session:
    net = make_net()
    return session_of(net, momentum_of(net), loss, world=world, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_of_all_workers_come_by_rank(strategy: str) -> None:
    def work(world: World) -> list[Any]:
        with make_session(world, strategy) as session:
            session.barrier()
            return session.gather({"rank": world.rank, "rows": torch.arange(world.rank), "of": ("a", None)})

    for found in in_threads(3, work, strategy=strategy):
        assert [one["rank"] for one in found] == [0, 1, 2]
        assert [len(one["rows"]) for one in found] == [0, 1, 2]
        assert all(one["of"] == ("a", None) for one in found)


def test_plain_values_survive_the_way() -> None:
    values = [None, True, 3, -2.5, "ü", b"\0", [1, (2, [3])], {"a": {1: ()}}, math.inf]
    assert decode(encode(values)) == values
    for tensor in (
        torch.randn(3, 2).t(),
        torch.tensor(2),
        torch.empty(0),
        torch.ones(2, dtype=torch.bfloat16),
    ):
        found = decode(encode((tensor,)))[0]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    array = numpy.arange(6.0).reshape(2, 3)[:, ::2]
    assert (decode(encode(array)) == array).all()
    assert decode(encode(numpy.float64(0.5))) == 0.5
    with pytest.raises(UsageError, match="a set cannot travel"):
        encode({1, 2})


def test_means_weighted_and_not() -> None:
    def work(world: World) -> tuple[Any, ...]:
        with make_session(world) as session:
            one = float(world.rank)
            return (
                session.mean(one),
                session.mean(torch.tensor([one, 2.0]), samples=1 + 2 * world.rank),
                session.mean({"a": (one, torch.tensor(world.rank))}),
            )

    for number, vector, nested in in_threads(2, work):
        assert number == 0.5
        assert vector.tolist() == [0.75, 2.0]
        assert nested == {"a": (0.5, torch.tensor(0.5))}

    with pytest.raises(UsageError, match=r"session\.mean takes numbers"):
        in_threads(1, lambda world: make_session(world).mean("much"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_mean_loss_of_a_step_is_that_of_all_samples(strategy: str) -> None:
    """In the middle of a loop, while some workers have fewer batches than others."""
    data = Numbered(20)
    shares = [[data[0:4]], [data[4:8], data[8:12]], [data[12:16], data[16:20]]]

    def work(world: World) -> list[tuple[float, int]]:
        session = make_session(world, strategy)
        means = []
        for batch in session.batches(shares[world.rank]):
            value = session.step(batch)
            means.append((float(session.mean(value, samples=len(batch[1]))), len(session.gather(1))))
        session.close()
        return means

    results = in_threads(3, work, strategy=strategy)
    if strategy == "all-reduce":
        first = loss(make_net(), tuple(torch.cat([share[0][at] for share in shares]) for at in (0, 1)))
        assert results[0][0][0] == pytest.approx(first.item())
    assert results[1] == results[2]
    assert [how_many for _, how_many in results[1]] == [3, 2]


def auc(outputs: Tensor, targets: Tensor) -> float:
    """How often a sample of the first class scores higher for it than one of another class."""
    scores, is_first = outputs[:, 0], targets == 0
    pairs = scores[is_first][:, None] > scores[~is_first][None]
    return float(pairs.double().mean())


@pytest.mark.parametrize(
    ("workers", "placement"),
    [(1, "single"), (3, "single"), (2, "sharded"), (2, "pipeline"), (2, "tensor:ways=2")],
)
def test_a_measure_over_all_samples_sees_them_all(workers: int, placement: str) -> None:
    data = Numbered(31)

    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def work(world: World) -> dict[str, float]:
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = session_of(model, optimizer, loss, world=world, placement=placement, example=data[0:4])
        measures = {"auc": over_all(auc), "first": over_all(lambda outputs, targets: float(targets[0]))}
        found = session.evaluate(data, batch_size=4, measures=measures)
        session.close()
        return found

    with torch.no_grad():
        want = auc(net(data.inputs), data.targets)
    for found in in_threads(workers, work):
        assert found["auc"] == want
        assert found["first"] == float(data.targets[0])
        assert found["loss"] > 0


@pytest.mark.parametrize(
    ("workers", "placement"),
    [(1, "single"), (3, "single"), (2, "sharded"), (2, "pipeline"), (2, "tensor:ways=2")],
)
def test_classes_are_counted_over_all_workers(workers: int, placement: str) -> None:
    data = Numbered(31)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    names = ["ant", "bee", "cat", "dog"]

    def work(world: World) -> tuple[dict[str, float], list[dict[str, Any]], Any]:
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = session_of(model, optimizer, loss, world=world, placement=placement, example=data[0:4])
        found = session.evaluate(data, batch_size=4, measures={"classes": per_class(names)})
        report = session.engine.class_report
        session.close()
        return found, session.summary()["classes"], report.confusion

    with torch.no_grad():
        predicted = net(data.inputs).argmax(1)
    want = torch.zeros(4, 4, dtype=torch.long)
    for truth, seen in zip(data.targets.tolist(), predicted.tolist(), strict=True):
        want[truth, seen] += 1
    for found, by_class, confusion in in_threads(workers, work):
        assert found["accuracy"] == want.diagonal().sum() / 31
        assert found.keys() == {"loss", "accuracy"}  # the first five of four classes are all of them
        assert torch.tensor(confusion).equal(want)
        assert [row["name"] for row in by_class] == names
        for index, row in enumerate(by_class):
            right, there, taken = want[index, index], want[index].sum(), want[:, index].sum()
            assert row["samples"] == there
            assert row["recall"] == pytest.approx(float(right / there) if there else 0.0, abs=1e-6)
            assert row["precision"] == pytest.approx(float(right / taken) if taken else 0.0, abs=1e-6)


@pytest.mark.parametrize("classes", [8, 300])
def test_right_among_the_first_five(classes: int, tmp_path: Path) -> None:
    """With very many classes the matrix is left out, and the counts by class stay."""
    scores = torch.randn(40, classes, generator=torch.Generator().manual_seed(1))
    targets = scores.argsort(1, descending=True)[torch.arange(40), torch.arange(40) % 8]
    data = torch.utils.data.TensorDataset(scores, targets)

    def work(world: World) -> dict[str, float]:
        model = nn.Linear(classes, classes, bias=False)
        nn.init.eye_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        telemetry.open(tmp_path / "events" / "worker-0.jsonl", rank=0)
        session = session_of(model, optimizer, loss, world=world)
        found = session.evaluate(data, batch_size=7, measures={"classes": per_class()})
        session.close()
        telemetry.close()
        return found

    (found,) = in_threads(1, work)
    assert found["accuracy"] == 5 / 40
    assert found["top5"] == 25 / 40
    (record,) = [one for one in read(tmp_path) if one["kind"] == "classes"]
    assert len(record["per_class"]) == classes
    assert ("confusion" in record) == (classes == 8)


@pytest.mark.parametrize(
    ("model", "names", "said"),
    [
        (nn.Linear(16, 2), (), "targets go from 0 to 2, and the model has 2 classes"),
        (nn.Linear(16, 4), ("ant", "bee"), "2 names, and the model has 4 classes"),
        (nn.Unflatten(1, (4, 4)), (), "one score per sample and class"),
    ],
)
def test_what_is_no_classification_is_refused(model: nn.Module, names: tuple[str, ...], said: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), model).double()

    def work(world: World) -> None:
        session = session_of(model, torch.optim.SGD(model.parameters(), lr=0.1), zero, world=world)
        session.evaluate(Numbered(8), batch_size=8, measures={"classes": per_class(names)})

    def zero(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).sum() * 0.0

    with pytest.raises(UsageError, match=said):
        in_threads(1, work)


def test_a_measure_that_gives_other_rows_than_samples_is_refused() -> None:
    def work(world: World) -> None:
        measure = over_all(auc, lambda model, batch: (batch[0][:1], batch[1][:1]))
        make_session(world).evaluate(Numbered(8), batch_size=4, measures={"auc": measure})

    with pytest.raises(UsageError, match="1 rows for 4 samples"):
        in_threads(1, work)


def test_logged_values_are_recorded(tmp_path: Path) -> None:
    def work(world: World) -> None:
        session = make_session(world)
        telemetry.open(tmp_path / "events" / "worker-0.jsonl", rank=0)
        session.step(Numbered(4)[0:4])
        session.log(rate=0.5, loss=torch.tensor(2.0))
        session.close()
        telemetry.close()

    in_threads(1, work)
    lines = [json.loads(line) for line in (tmp_path / "events" / "worker-0.jsonl").read_text().splitlines()]
    (logged,) = [line for line in lines if line["kind"] == "log"]
    assert logged["step"] == 1
    assert logged["values"] == {"rate": 0.5, "loss": 2.0}
