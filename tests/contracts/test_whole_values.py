"""Under every placement a script's own code finds whole values wherever it looks into the model during a pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from manyhands.models.blocks import Branches
from manyhands.models.transformer import Attention
from tests.contracts.test_placements import Batch, batches, close_to, filled, momentum
from tests.sessions import session_of
from tests.threads import in_threads

STEPS = 5


class Looking(nn.Module):
    """`look` is how the script's code uses the layers; it returns the scores and a penalty."""

    def __init__(self, look: Callable[[Any, Tensor], tuple[Tensor, Tensor]], *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)
        self.look = look

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.look(self.net, inputs.flatten(1))


def in_a_loop(net: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    found = []
    for layer in net:
        inputs = layer(inputs)
        found.append(inputs)
    return inputs * found[1].mean(1, keepdim=True), inputs.new_zeros(())


def by_number(net: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    hidden = net[1](net[0](inputs))
    return net[2](hidden), hidden.abs().mean()


def in_slices(net: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return net[2:](F.normalize(net[:2](inputs), dim=1)), inputs.new_zeros(())


def in_both_ways(net: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return net(inputs), net[0](inputs).norm() + net[2].forward(net[1](net[0](inputs))).norm()


def in_segments(net: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return checkpoint_sequential(net, 2, inputs, use_reentrant=False), inputs.new_zeros(())


def as_it_is(net: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return net(inputs), inputs.new_zeros(())


def perceptron(look: Any) -> Looking:
    return Looking(look, nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def twice(look: Any = as_it_is) -> Looking:
    """One layer at two places of a sequence."""
    same = nn.Linear(8, 8)
    return Looking(
        look, nn.Linear(16, 8), nn.Tanh(), same, nn.Tanh(), same, nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)
    )


class Encoder(nn.Module):
    """Calls the layers inside PyTorch's own, and those of the zoo's attention, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.attention = Attention(8, 2)
        self.word = nn.Embedding(4, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        words = self.into(inputs.flatten(1))[:, None] + self.word(torch.arange(4))
        hidden = self.attention(self.layer(words))
        penalty = self.layer.linear1(hidden).norm() + self.layer.self_attn.out_proj(hidden).norm()
        penalty = penalty + self.attention.query(hidden).norm() + self.attention.out(hidden).norm()
        return self.out(hidden.mean(1)), penalty + self.word.weight[0].norm()


class LookAlike(nn.Module):
    """It has the names of the zoo's attention, and computes with all heads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head_width = 8
        self.only = ("query", "key")
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = inputs.flatten(1)
        mixed = F.normalize(self.query(inputs), dim=1) * self.key(inputs) + self.value(inputs)
        return self.last(self.out(mixed)), mixed.norm()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = Branches(one=nn.Conv2d(1, 4, 1), other=nn.Conv2d(1, 6, 3, padding=1))
        self.out = nn.Linear(10, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.out(self.both(inputs).mean((2, 3)))
        named = [self.both.get_submodule(name)(inputs) for name in self.both.only]
        return scores, sum((each.norm() for each in named), scores.new_zeros(()))


class Reading(nn.Conv2d):
    """Its pass is PyTorch's own, and calls what is not."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight / weight.norm(), bias)


class Unbatched(nn.Module):
    """A convolution over one picture at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.reading = Reading(1, 4, 3, padding=1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        single = torch.stack([self.conv(each) for each in inputs])
        return (single + self.reading(inputs)).mean((2, 3)), single.norm()


def hooked(register: Callable[[Any], object]) -> Callable[[], Looking]:
    def make() -> Looking:
        made = perceptron(as_it_is)
        register(made.net)
        return made

    return make


def normed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / (1 + output.norm() + module.weight.norm())  # type: ignore[operator]


def normed_in(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] / (1 + args[0].norm() + module.weight.norm()),)  # type: ignore[operator]


def normed_back(module: nn.Module, given: Any, taken: Any) -> Any:
    return tuple(None if each is None else each / (1 + each.norm() + taken[0].norm()) for each in given)


def patched(net: Any) -> None:
    own = net[1].forward
    net[1].forward = lambda inputs: own(inputs) / (1 + inputs.norm())


def patched_layer(net: Any) -> None:
    own = net[2].forward
    net[2].forward = lambda inputs: own(inputs / (1 + inputs.norm()))


MADE: dict[str, Callable[[], nn.Module]] = {
    **{look.__name__: lambda look=look: perceptron(look) for look in (in_a_loop, by_number, in_slices)},  # type: ignore[misc]
    **{look.__name__: lambda look=look: perceptron(look) for look in (in_both_ways, in_segments)},  # type: ignore[misc]
    "a layer twice": twice,
    "a layer twice in a loop": lambda: twice(in_a_loop),
    "layers inside of others": Encoder,
    "names of the zoo's": LookAlike,
    "branches by name": Branching,
    "one picture": Unbatched,
    "a hook after": hooked(lambda net: net[0].register_forward_hook(normed)),
    "a hook before": hooked(lambda net: net[2].register_forward_pre_hook(normed_in)),
    "a hook between": hooked(
        lambda net: net[1].register_forward_hook(lambda module, args, output: output / (1 + output.norm()))
    ),
    "a hook on the way back": hooked(lambda net: net[0].register_full_backward_hook(normed_back)),
    "a hook on the way back between": hooked(lambda net: net[1].register_full_backward_hook(normed_back)),
    "a hook on the way back after": hooked(lambda net: net[2].register_full_backward_hook(normed_back)),
    "a pass of its own": hooked(patched),
    "a pass around a layer's": hooked(patched_layer),
}


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    scores, penalty = model(batch[0])
    return F.cross_entropy(scores, batch[1]) + 0.1 * penalty


def plain(net: nn.Module) -> nn.Module:
    optimizer = momentum(net)
    for batch in batches()[:STEPS]:
        optimizer.zero_grad()
        penalised(net, batch).backward()
        optimizer.step()
    return net


def begun(net: nn.Module, world: World, text: str) -> Session:
    return session_of(net, momentum(net), penalised, world=world, placement=text, example=batches()[0])


def run(net: nn.Module, world: World, text: str) -> nn.Module:
    session = begun(net, world, text)
    for batch in batches()[:STEPS]:
        session.step(batch)
    session.close()
    return net


def made(name: str) -> nn.Module:
    return filled(MADE[name]().double(), 3, 0.3)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", MADE)
def test_code_in_a_pass_finds_whole_values(name: str) -> None:
    expected = plain(made(name))
    for found in in_threads(2, lambda world: run(made(name), world, "tensor")):
        close_to(found, expected)


@pytest.mark.parametrize("name", ["in_a_loop", "by_number", "in_slices", "a layer twice"])
def test_so_it_does_in_stages_of_slices(name: str) -> None:
    expected = plain(made(name))
    for found in in_threads(4, lambda world: run(made(name), world, "hybrid:microbatches=1")):
        close_to(found, expected)


def test_a_chain_is_still_one_exchange() -> None:
    """What is right is not bought by gathering: in its own pass a Sequential's two layers exchange one sum."""

    def work(world: World) -> list[tuple[int, ...]]:
        net = filled(perceptron(as_it_is).double(), 3, 0.3)
        session = begun(net, world, "tensor")
        given: list[tuple[int, ...]] = []
        comm = session.engine.replica.part.groups.tensor_parallel.comm  # type: ignore[attr-defined]
        sum_ = comm.sum_
        comm.sum_ = lambda value: (given.append(tuple(value.shape)), sum_(value))[1]
        session.step(batches()[0])
        comm.sum_ = sum_
        session.close()
        return given

    for given in in_threads(2, work):
        assert (12 * 4,) in given  # what the second layer gives
        assert (12 * 8,) not in given  # nothing of what the first one does


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_hook_inside_a_chain_that_comes_later_is_refused(place: int) -> None:
    def work(world: World) -> None:
        net = filled(perceptron(as_it_is).double(), 3, 0.3)
        session = begun(net, world, "tensor")
        session.step(batches()[0])
        net.net[place].register_forward_hook(lambda module, args, output: None)  # type: ignore[union-attr]
        with pytest.raises(UsageError, match=rf"net\.{place} got a hook .* before mh\.session"):
            session.step(batches()[1])

    in_threads(2, work)


def test_other_layers_in_a_chain_are_refused() -> None:
    def work(world: World) -> None:
        net = filled(perceptron(as_it_is).double(), 3, 0.3)
        session = begun(net, world, "tensor")
        net.net[1] = nn.Softmax(1)  # type: ignore[index]
        with pytest.raises(UsageError, match="the layers of net are others"):
            session.step(batches()[1])

    in_threads(2, work)


@pytest.mark.parametrize("name", ["in_a_loop", "layers inside of others"])
def test_a_hook_elsewhere_may_come_later(name: str) -> None:
    """Also on one worker alone, which looks at what all have."""
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def look(net: Any) -> nn.Module:
        found: nn.Module = net.net[0] if name == "in_a_loop" else net.layer.linear1
        return found

    def work(world: World) -> nn.Module:
        net = made(name)
        session = begun(net, world, "tensor")
        session.step(batches()[0])
        if world.rank == 0:
            look(net).register_forward_hook(lambda module, args, output: seen[0].append(output.detach()))
        for batch in batches()[1:STEPS]:
            session.step(batch)
        session.close()
        return net

    expected = plain(made(name))
    for found in in_threads(2, work):
        close_to(found, expected)
    assert len(seen[0]) >= STEPS - 1
    assert seen[0][0].shape[-1] == (8 if name == "in_a_loop" else 12)


@pytest.mark.parametrize("name", ["a hook between", "gradient"])
def test_hooks_on_one_worker_divide_the_model_alike_on_all(name: str) -> None:
    """A hook that changes nothing, on worker 0 alone, as one has that writes a log."""

    def work(world: World) -> nn.Module:
        net = filled(perceptron(as_it_is).double(), 3, 0.3)
        if world.rank == 0 and name == "gradient":
            net.net[0].weight.register_hook(lambda gradient: None)  # type: ignore[union-attr]
        elif world.rank == 0:
            net.net[1].register_forward_hook(lambda module, args, output: None)  # type: ignore[union-attr]
        return run(net, world, "tensor")

    expected = plain(filled(perceptron(as_it_is).double(), 3, 0.3))
    for found in in_threads(2, work):
        close_to(found, expected)


def test_hooks_inside_branches() -> None:
    """Where one is before the session begins, all branches are on all workers; later it is refused."""

    def work(world: World) -> list[tuple[int, ...]]:
        seen = []
        net = filled(Branching().double(), 3, 0.3)
        net.both.other.register_forward_hook(  # type: ignore[union-attr]
            lambda module, args, output: seen.append(tuple(output.shape))
        )
        run(net, world, "tensor")
        net = filled(Branching().double(), 3, 0.3)
        session = begun(net, world, "tensor")
        net.both.other.register_forward_hook(lambda module, args, output: None)  # type: ignore[union-attr]
        with pytest.raises(UsageError, match=r"both\.other got a hook"):
            session.step(batches()[0])
        return seen

    for seen in in_threads(2, work):
        assert set(seen) == {(12, 6, 4, 4)}


# Parameters that are frozen


@pytest.mark.parametrize("text", ["sharded", "tensor", "pipeline", "hybrid:microbatches=1"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_parameters_of_the_optimizer(text: str, frozen: int) -> None:
    """Frozen from the beginning, thawed in the middle, and another frozen later; the model is opened between."""

    def switch(net: Any, step: int) -> None:
        if step == 0:
            net[frozen].requires_grad_(False)
        if step == 4:
            net[frozen].requires_grad_(True)
        if step == 7:
            net[(frozen + 1) % 3].requires_grad_(False)

    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
        switch(filled(net, 3, 0.3), 0)
        return net

    def criterion(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0].flatten(1)), batch[1])

    def work(world: World) -> nn.Module:
        net = make()
        session = session_of(net, momentum(net), criterion, world=world, placement=text, example=batches()[0])
        feed, feeds = session.engine.placed.feed, session.engine.placed.mesh.feeds
        for step in range(10):
            switch(net, step)
            session.step((batches()[step][0][feed::feeds], batches()[step][1][feed::feeds]))
            if step == 1:
                with session.whole_model():
                    pass
        session.close()
        return net

    expected = make()
    optimizer = momentum(expected)
    for step in range(10):
        switch(expected, step)
        optimizer.zero_grad()
        criterion(expected, batches()[step]).backward()
        optimizer.step()
    for found in in_threads(4 if text.startswith("hybrid") else 2, work):
        close_to(found, expected)
