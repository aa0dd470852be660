"""What a step returns: what the loss function returned, without gradients; and what is no loss is refused."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.errors import Diverged, UsageError
from tests.contracts.test_strategies import loss, make_net, make_steps, momentum_of
from tests.sessions import session_of
from tests.threads import in_threads


@dataclasses.dataclass
class Output(OrderedDict[str, Any]):
    """As the outputs of Hugging Face's models are: a dataclass and a dict at once."""

    loss: Tensor
    logits: Tensor
    hidden: Any = None

    def __post_init__(self) -> None:
        self.update(loss=self.loss, logits=self.logits)


class Pair(NamedTuple):
    accuracy: Tensor
    loss: Tensor


def value_of(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs, batch[1]), outputs


def stepped(returned: Callable[[nn.Module, Any], Any], *batches: Any) -> Any:
    """What a step of one worker returns with this loss function."""

    def work(world: World) -> Any:
        net = make_net()
        session = session_of(net, momentum_of(net), returned, world=world)
        try:
            return session.step(*batches)
        finally:
            session.close()

    return in_threads(1, work)[0]


BATCH, OTHER = make_steps(1, lambda step, rank: [6, 2])[0][0]
LOSS, OUTPUTS = (value.detach() for value in value_of(make_net(), BATCH))


def test_a_loss_is_a_tensor_that_behaves_like_a_number() -> None:
    value = stepped(loss, BATCH)
    assert isinstance(value, Tensor)
    assert not value.requires_grad
    assert torch.equal(value, LOSS)
    assert f"{value:.3f}" == f"{LOSS.item():.3f}"
    assert float(value) == value.item() == LOSS.item()
    total = 0.0
    total += value
    assert total == LOSS.item()


def test_what_else_the_loss_function_returns_comes_back_as_it_is() -> None:
    found = stepped(value_of, BATCH)
    assert isinstance(found, tuple)
    assert torch.equal(found[0], LOSS)
    assert torch.equal(found[1], OUTPUTS)
    assert not found[1].requires_grad

    found = stepped(
        lambda model, batch: dict(zip(("loss", "more"), value_of(model, batch), strict=True)), BATCH
    )
    assert torch.equal(found["loss"], LOSS)
    assert torch.equal(found["more"], OUTPUTS)

    found = stepped(lambda model, batch: Output(*value_of(model, batch)), BATCH)
    assert isinstance(found, Output)
    assert torch.equal(found.loss, LOSS)
    assert torch.equal(found["logits"], OUTPUTS)
    assert found.hidden is None

    found = stepped(lambda model, batch: Pair(torch.tensor(0.5), value_of(model, batch)[0]), BATCH)
    assert isinstance(found, Pair)
    assert torch.equal(found.loss, LOSS)

    found = stepped(lambda model, batch: {"nll": value_of(model, batch)[0], "name": "first"}, BATCH)
    assert torch.equal(found["nll"], LOSS)
    assert found["name"] == "first"


def test_of_several_batches_numbers_are_means_and_rows_are_joined() -> None:
    def returned(model: nn.Module, batch: Any) -> dict[str, Any]:
        value, outputs = value_of(model, batch)
        return {"loss": value, "outputs": outputs, "size": float(len(outputs)), "names": ["a"] * len(outputs)}

    found = stepped(returned, BATCH, OTHER)
    losses = [loss(make_net(), batch) for batch in (BATCH, OTHER)]
    assert found["loss"].item() == pytest.approx((6 * losses[0].item() + 2 * losses[1].item()) / 8)
    assert found["outputs"].shape == (8, 4)
    assert found["size"] == (6 * 6 + 2 * 2) / 8
    assert found["names"] == [["a"] * 6, ["a"] * 2]


def test_a_worker_without_data_gets_the_last_result_again() -> None:
    def work(world: World) -> list[float]:
        net = make_net()
        session = session_of(net, momentum_of(net), loss, world=world)
        first = session.step(BATCH)
        again = session.step(*([BATCH] if world.rank else []))
        session.close()
        return [float(first), float(again)]

    idle, busy = in_threads(2, work)
    assert idle[0] == idle[1]
    assert busy[0] != busy[1]


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a float": (lambda value, outputs: value.item(), r"a float without a gradient; return the tensor itself"),
    "nothing": (lambda value, outputs: None, "returned nothing; end it with `return loss`"),
    "an empty tuple": (lambda value, outputs: (), "returned nothing"),
    "a vector": (lambda value, outputs: outputs.sum(1), r"the shape \(6,\).*`return loss.mean\(\)`"),
    "a whole number": (lambda value, outputs: outputs.argmax().clone(), "a whole number .*without argmax"),
    "a detached loss": (lambda value, outputs: value.detach(), r"no gradient; .*without .detach\(\)"),
    "a tuple of floats": (lambda value, outputs: (value.item(), outputs), "a float without a gradient"),
    "a word": (lambda value, outputs: "loss", "a str without a gradient"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_loss_is_refused_with_the_line_to_change(kind: str) -> None:
    change, sentence = REFUSED[kind]
    with pytest.raises(UsageError, match=sentence):
        stepped(lambda model, batch: change(*value_of(model, batch)), BATCH)


def test_a_loss_that_is_not_a_number_ends_the_run_at_the_first_step() -> None:
    with pytest.raises(Diverged, match="the very first loss is nan"):
        stepped(lambda model, batch: (value_of(model, batch)[0] * float("nan"), 1), BATCH)


def test_a_lazy_module_is_refused_before_the_first_step() -> None:
    def work(world: World) -> None:
        net = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 2))
        session_of(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, world=world)

    with pytest.raises(UsageError, match=r"0.weight.*call the model once on a batch before mh.session"):
        in_threads(1, work)


def test_the_evaluated_loss_may_have_company() -> None:
    def work(world: World) -> dict[str, float]:
        net = make_net()
        session = session_of(net, momentum_of(net), value_of, world=world)
        found = session.evaluate(torch.utils.data.TensorDataset(*BATCH), batch_size=2)
        session.close()
        return found

    for found in in_threads(2, work):
        assert found["loss"] == pytest.approx(LOSS.item())
