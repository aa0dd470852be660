"""Parts of a model that a placement spreads: called by a script, and trained by a second session."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.contracts.test_placements import (
    batches,
    close_to,
    filled,
    loss,
    make_net,
    make_session,
    momentum,
    train,
)
from tests.sessions import session_of
from tests.threads import in_threads

INPUTS = batches()[3][0]


class InTwo(nn.Module):
    """Linear layers of which the first hands slices on to the second, inside of a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)), nn.Linear(16, 4)]
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.parts[1](self.parts[0](inputs.flatten(1)))


@pytest.mark.parametrize("text", ["tensor", "sharded"])
def test_a_part_of_the_model_may_be_called(text: str) -> None:
    def work(world: World) -> tuple[Tensor, Tensor]:
        net = filled(InTwo().double(), 5, 0.3)
        session = session_of(net, momentum(net), loss, world=world, placement=text)
        found = net.parts[0](INPUTS.flatten(1)), net(INPUTS)
        train(session, batches()[:1])
        session.close()
        return found

    net = filled(InTwo().double(), 5, 0.3)
    for part, whole in in_threads(2, work):
        assert torch.allclose(part, net.parts[0](INPUTS.flatten(1)), rtol=1e-9)
        assert torch.allclose(whole, net(INPUTS), rtol=1e-9)


@pytest.mark.parametrize("text", ["tensor", "sharded", "pipeline:microbatches=5"])
def test_a_model_in_parts_has_one_session(text: str) -> None:
    def work(world: World) -> None:
        session = make_session(world, text)
        train(session, batches()[:1])
        head = session.model[-1]
        for model in (session.model, head):
            with pytest.raises(UsageError, match="session 1 has laid this model over workers"):
                session_of(model, momentum(model), loss, world=world, placement=text)
        session.close()
        again = session_of(session.model, momentum(session.model), loss, world=world, placement=text)
        train(again, batches()[1:2])
        again.close()
        net = make_net()
        for batch in batches()[:2]:
            optimizer = momentum(net)
            loss(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        close_to(session.model, net)

    in_threads(2, work)


# Other tensors in the place of the model's own


def shifted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """All parameters, a little further on."""
    moved = {name: value + 0.1 * value.detach().sign() for name, value in model.named_parameters()}
    return nn.functional.cross_entropy(functional_call(model, moved, (batch[0],)), batch[1])


def partly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One end of a chain of layers, and of another layer the bias alone."""
    moved = {"parts.0.0.weight": 1.1 * model.parts[0][0].weight, "parts.1.bias": 2.0 * model.parts[1].bias}
    return nn.functional.cross_entropy(functional_call(model, moved, (batch[0],)), batch[1])


class Attentive(InTwo):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1).unflatten(1, (4, 4))
        return super().forward(self.attention(rows, rows, rows)[0])


@pytest.mark.parametrize("text", ["tensor", "sharded"])
@pytest.mark.parametrize(("make", "value"), [(InTwo, shifted), (InTwo, partly), (Attentive, shifted)])
def test_tensors_in_the_place_of_parameters_are_whole(
    text: str, make: type[nn.Module], value: Callable[..., Tensor]
) -> None:
    """As `torch.func.functional_call` puts them there: a layer in slices computes with them as they are."""

    def work(world: World) -> None:
        net = filled(make().double(), 5, 0.3)
        session = session_of(net, momentum(net), value, world=world, placement=text)
        train(session, batches()[:3])
        session.close()
        plain = filled(make().double(), 5, 0.3)
        optimizer = momentum(plain)
        for batch in batches()[:3]:
            optimizer.zero_grad()
            value(plain, batch).backward()
            optimizer.step()
        close_to(net, plain)

    in_threads(2, work)


@pytest.mark.parametrize("text", ["tensor", "sharded", "pipeline:microbatches=5"])
@pytest.mark.parametrize("where", ["model", "loss"])
def test_a_compiled_model_runs_as_it_was_before_it_was_compiled(text: str, where: str) -> None:
    """Compiled code does not ask for what is on other workers."""

    def work(world: World) -> None:
        net = filled(InTwo().double(), 5, 0.3)
        compiled = torch.compile(net, backend="eager")
        session = session_of(
            compiled if where == "model" else net,
            momentum(net),
            lambda model, batch: loss(compiled, batch),
            world=world,
            placement=text,
        )
        train(session, batches()[:2])
        session.close()
        plain = filled(InTwo().double(), 5, 0.3)
        optimizer = momentum(plain)
        for batch in batches()[:2]:
            optimizer.zero_grad()
            loss(plain, batch).backward()
            optimizer.step()
        close_to(net, plain)

    in_threads(2, work)


class OfOne(InTwo):
    """Takes a single sample as well."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.parts[1](self.parts[0](inputs.reshape(*inputs.shape[: inputs.dim() - 3], -1)))


def by_sample(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss(lambda inputs: torch.func.vmap(model)(inputs), batch)


def by_direction(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ones = torch.ones_like(batch[0])
    return loss(model, batch) + torch.func.jvp(model, (batch[0],), (ones,))[1].square().mean()


class InFunc(InTwo):
    """Uses a transform inside, of a function without parameters."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.parts[1](torch.func.vmap(torch.sin)(self.parts[0](inputs.flatten(1))))


@pytest.mark.parametrize("with_loss", [by_sample, by_direction])
@pytest.mark.parametrize("text", ["tensor", "sharded", "pipeline:microbatches=5"])
def test_transforms_of_functions_around_a_model_in_parts_are_refused(
    text: str, with_loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
) -> None:
    """Before the first step."""

    def work(world: World) -> None:
        net = filled(OfOne().double(), 5, 0.3)
        session = session_of(net, momentum(net), with_loss, world=world, placement=text)
        try:
            train(session, batches()[:1])
        finally:
            assert session.steps == 0

    with pytest.raises(UsageError, match=r"inside of torch.func .* has divided it"):
        in_threads(2, work)


@pytest.mark.parametrize("text", ["tensor", "sharded"])
def test_transforms_inside_of_the_model_are_right(text: str) -> None:
    def work(world: World) -> dict[str, Tensor]:
        net = filled(InFunc().double(), 5, 0.3)
        session = session_of(net, momentum(net), loss, world=world, placement=text)
        train(session, batches()[:2])
        return session.model_state()

    plain = filled(InFunc().double(), 5, 0.3)
    optimizer = momentum(plain)
    for batch in batches()[:2]:
        optimizer.zero_grad()
        loss(plain, batch).backward()
        optimizer.step()
    for state in in_threads(2, work):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value)
