"""What a session refuses of what it is given, before the first step, and what it says of a hook or of a backward pass
too many."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.sessions import session_of
from tests.threads import in_threads

Given = tuple[Any, Any, Any]


def square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def sgd(*params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*params], lr=0.1)


def make_linear() -> nn.Linear:
    linear = nn.Linear(4, 2)
    with torch.no_grad():
        for param in linear.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    return linear


def function_for_a_model() -> Given:
    linear = make_linear()
    return linear.forward, sgd(*linear.parameters()), square


def optimizer_first() -> Given:
    linear = make_linear()
    return sgd(*linear.parameters()), linear, square


def class_of_an_optimizer() -> Given:
    return make_linear(), torch.optim.SGD, square


def criterion() -> Given:
    linear = make_linear()
    return linear, sgd(*linear.parameters()), nn.MSELoss()


def one_argument() -> Given:
    linear = make_linear()
    return linear, sgd(*linear.parameters()), lambda batch: linear(batch).mean()


def frozen_on_meta() -> Given:
    linear = make_linear()
    params = [*linear.parameters()]
    linear.extra = nn.Parameter(torch.zeros(3, device="meta"), requires_grad=False)
    return linear, sgd(*params), square


def in_two_groups() -> Given:
    linear = make_linear()
    optimizer = torch.optim.SGD([{"params": [linear.weight]}, {"params": [linear.bias]}], lr=0.1)
    optimizer.param_groups[1]["params"].append(linear.weight)
    return linear, optimizer, square


def tied_by_memory() -> Given:
    both = nn.ModuleList([make_linear(), make_linear()])
    both[1].weight.data = both[0].weight.data
    return both, sgd(*both.parameters()), square


def empty() -> Given:
    model = nn.Module()
    model.none = nn.Parameter(torch.zeros(0))
    return model, sgd(model.none), square


def scripted() -> Given:
    model = nn.Sequential(torch.jit.script(make_linear()), make_linear())
    return model, sgd(*model.parameters()), square


REFUSED: dict[Callable[[], Given], str] = {
    function_for_a_model: "the model is of the type method, and must be a torch.nn.Module",
    optimizer_first: "the model is of the type SGD, and must be a torch.nn.Module",
    class_of_an_optimizer: "the optimizer is the class SGD; make one of the model's parameters",
    criterion: "MSELoss compares outputs with targets, and the session calls loss(model, batch)",
    one_argument: "<lambda>(batch) cannot be called so (too many positional arguments)",
    frozen_on_meta: "'extra' is on the device meta and has no values",
    in_two_groups: "the optimizer has parameter 'weight' twice",
    tied_by_memory: "parameters '0.weight' and '1.weight' have the same memory",
    scripted: "0 is a module of torch.jit.script, in which the session cannot see what a script loads",
    empty: "none of the 1 parameters of the optimizer has an element",
}


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: given.__name__)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_session_is_given(workers: int, given: Callable[[], Given]) -> None:
    def work(world: World) -> None:
        session_of(*given(), world=world)

    with pytest.raises(UsageError, match=re.escape(REFUSED[given])):
        in_threads(workers, work)


@pytest.mark.parametrize("placement", ["single", "sharded", "pipeline:stages=2"])
def test_a_traced_module_trains_where_it_is_whole(placement: str) -> None:
    """It calls no hook, by which placements divide."""

    def work(world: World) -> None:
        model = torch.jit.trace(make_linear(), torch.ones(2, 4))
        session = session_of(model, sgd(*model.parameters()), square, world=world, placement=placement)
        session.step(torch.ones(2, 4))
        session.close()

    if placement == "single":
        in_threads(2, work)
    else:
        with pytest.raises(
            UsageError, match=rf"is a module of torch.jit.trace, which {placement} cannot divide"
        ):
            in_threads(2, work)


@pytest.mark.parametrize("retains", [True, False])
def test_a_loss_function_that_calls_backward_itself(retains: bool) -> None:
    def twice(model: nn.Module, batch: Tensor) -> Tensor:
        loss = square(model, batch)
        loss.backward(retain_graph=retains)  # type: ignore[no-untyped-call]
        return loss

    def work(world: World) -> None:
        linear = make_linear()
        session = session_of(linear, sgd(*linear.parameters()), twice, world=world)
        with pytest.raises(UsageError, match=r"the loss function has called backward\(\) itself"):
            session.step(torch.ones(2, 4))
        session.close()

    in_threads(2, work)


def test_a_parameter_that_is_tied_by_memory_later() -> None:
    def work(world: World) -> None:
        both = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        session = session_of(both, sgd(*both.parameters()), square, world=world)
        session.step(torch.ones(2, 4))
        both[1].weight.data = both[0].weight.data
        with pytest.raises(UsageError, match=r"'1.weight' was given the memory of another one"):
            session.step(torch.ones(2, 4))
        session.close()

    in_threads(1, work)


def test_a_hook_on_a_gradient_is_spoken_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    def work(world: World) -> None:
        linear = make_linear()
        linear.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        session = session_of(linear, sgd(*linear.parameters()), square, world=world)
        for _ in range(2):
            session.step(torch.ones(2, 4))
        session.close()

    in_threads(1, work)
    assert "register_hook" not in capfd.readouterr().err
    in_threads(2, work)
    assert capfd.readouterr().err.count("parameter 'weight' has a hook on its gradient (register_hook)") == 1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_complex_parameters_equal_one_process(kind: Any) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = model(batch).abs().square().mean()
        return value

    batches = [torch.complex(*torch.randn(2, 6, 4).double()) for _ in range(4)]

    def make() -> nn.Linear:
        return make_linear().to(torch.complex128)

    def work(world: World) -> list[Tensor]:
        linear = make()
        session = session_of(linear, kind(linear.parameters(), lr=0.05), loss, world=world)
        for batch in batches:
            session.step(batch[world.rank :: world.size])
        session.close()
        return [param.detach().clone() for param in linear.parameters()]

    plain = make()
    optimizer = kind(plain.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        loss(plain, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for got in in_threads(2, work):
        for one, wanted in zip(got, plain.parameters(), strict=True):
            torch.testing.assert_close(one, wanted.detach(), rtol=1e-9, atol=1e-11)


class Numbers(dict[int, Tensor]):
    """A mapping that has a sample for every number."""


class Table:
    """As in pandas: items are columns."""

    iloc = columns = None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(name)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"a": 1}, "dict"),
        (Table(), "Table"),
        ((one for one in [1]), "generator"),
        ({1, 2}, "set"),
        (5, "int"),
    ],
)
def test_data_without_samples_by_number_are_refused_before_one_is_loaded(data: Any, said: str) -> None:
    def work(world: World) -> None:
        linear = make_linear()
        session = session_of(linear, sgd(*linear.parameters()), square, world=world)
        sentence = rf"takes a data set, which has a length .*; this is of the type {said}"
        with pytest.raises(UsageError, match=sentence):
            session.batches(data, batch_size=2)
        with pytest.raises(UsageError, match=sentence):
            session.evaluate(data)
        if isinstance(data, dict):
            with pytest.raises(UsageError, match=sentence):
                session.batches(data)
        session.close()

    in_threads(2, work)


def test_a_mapping_from_numbers_is_a_data_set() -> None:
    def work(world: World) -> int:
        linear = make_linear()
        session = session_of(linear, sgd(*linear.parameters()), square, world=world)
        data = Numbers({number: torch.full((4,), float(number)) for number in range(8)})
        for batch in session.batches(data, batch_size=2):
            session.step(batch)
        assert session.evaluate(data)["loss"] > 0
        session.close()
        return session.samples

    assert in_threads(2, work) == [8, 8]


class Head(nn.Sequential):
    """Gives only the parameters that train."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self[1].parameters(recurse)


@pytest.mark.parametrize("placement", ["single", "sharded", "pipeline:stages=2", "tensor:ways=2"])
def test_a_model_that_gives_other_parameters_trains_where_it_is_whole(placement: str) -> None:
    def work(world: World) -> None:
        model = Head(make_linear(), nn.Linear(2, 2))
        session = session_of(model, sgd(*model.parameters()), square, world=world, placement=placement)
        session.step(torch.ones(2, 4))
        session.close()

    if placement == "single":
        in_threads(2, work)
        return
    with pytest.raises(UsageError, match=re.escape("Head has 4 parameters, its parameters() gives 2, and")):
        in_threads(2, work)
