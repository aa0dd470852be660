"""Any optimizer under all-reduce equals one process, or is refused before the first step."""

import copy
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from manyhands.replica.optimizer.abilities import abilities_of
from manyhands.replica.optimizer.chain import one_of
from manyhands.replica.optimizer.trial import Call, Grain, try_out
from manyhands.replica.optimizer.twins import ELEMENT_WISE
from tests.optimizers import DIVIDED, WHOLE, Averaged, averaged, by_shape, muon_and_adamw
from tests.sessions import session_of
from tests.threads import in_threads

Batch = tuple[Tensor, Tensor]
Make = Callable[[nn.Module], Any]

WORKERS, STEPS = 2, 6


def make_net() -> nn.Module:
    layers = (nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 300), nn.Tanh(), nn.Linear(300, 1))
    net = nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(5)  # other threads draw from torch's own
    with torch.no_grad():
        for param in net.parameters():
            # Small enough that every optimizer converges: rounding grows without bound where one does not.
            param.copy_(
                torch.randn(param.shape, generator=generator).double() * 0.3 * param.shape[-1] ** -0.5
            )
    return net


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make_batches(count: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    inputs = [torch.randn(12, 8, generator=generator).double() for _ in range(count)]
    return [(one, one.mean(1, keepdim=True)) for one in inputs]


def share(batch: Batch, world: World) -> Batch:
    return batch[0][world.rank :: world.size], batch[1][world.rank :: world.size]


def plainly(make: Make, batches: Sequence[Batch]) -> tuple[nn.Module, Any]:
    """The definition: one process, plain PyTorch."""
    net = make_net()
    optimizer = one_of(make(net))
    call = abilities_of(optimizer).call
    for batch in batches:

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            value = loss(net, batch)
            value.backward()
            return value

        if call is not Call.CLOSURE:
            closure()
        optimizer.step(*[closure] * (call is not Call.GRADIENT))
    return net, optimizer


def trained(make: Make, batches: Sequence[Batch], world: World, **settings: Any) -> tuple[nn.Module, Any]:
    net = make_net()
    optimizer = one_of(make(net))
    session = session_of(net, optimizer, loss, world=world, **settings)
    for batch in batches:
        session.step(share(batch, world))
    session.close()
    return net, optimizer


def values(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def assert_equal_one_process(make: Make, **settings: Any) -> None:
    batches = make_batches()
    want, _ = plainly(make, batches)
    both = in_threads(WORKERS, lambda world: values(trained(make, batches, world, **settings)[0]))
    assert not all(map(torch.equal, values(want), values(make_net())))
    for got, wanted in zip(both[0], values(want), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


# Those of PyTorch

TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "maximize": {"maximize": True},
    "rate in a tensor": {"lr": "tensor"},
    "two groups": {},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True},
    "decay": {"weight_decay": 0.01},
}


def of_torch(kind: type[Optimizer], variant: str) -> Make:
    settings = {"lr": 0.01, **VARIANTS[variant]}
    if kind is torch.optim.LBFGS:
        settings["max_iter"] = 3
    if settings["lr"] == "tensor":
        settings["lr"] = torch.tensor(0.01)

    def make(net: nn.Module) -> Any:
        matrices, others = by_shape(net)
        if kind is torch.optim.Muon:
            return [kind(matrices, **settings), torch.optim.SGD(others, lr=0.1)]
        if variant == "two groups":
            return kind([{"params": others, "lr": 0.02}, {"params": list(reversed(matrices))}], **settings)
        return kind(net.parameters(), **settings)

    return make


def taken(kind: type[Optimizer]) -> list[str]:
    """The variants that a class has."""
    known = inspect.signature(kind.__init__).parameters
    one_group = kind in (torch.optim.LBFGS, torch.optim.Muon)
    return [
        name
        for name, settings in VARIANTS.items()
        if all(key in known for key in settings) and not (one_group and name in ("two groups",))
    ]


@pytest.mark.parametrize(("name", "variant"), [(n, v) for n, kind in TORCH.items() for v in taken(kind)])
def test_every_optimizer_of_torch_equals_one_process_or_fails_as_there(name: str, variant: str) -> None:
    make = of_torch(TORCH[name], variant)
    try:
        plainly(make, make_batches(1))
    except (RuntimeError, AssertionError) as error:  # it is for GPUs, or for sparse gradients
        with pytest.raises(type(error)):
            assert_equal_one_process(make)
        return
    assert_equal_one_process(make)


@pytest.mark.parametrize("name", [name for name in TORCH if name != "SparseAdam"])
def test_the_trial_finds_what_is_known_of_a_class(name: str) -> None:
    """But of one that takes no dense gradients, which are what a trial gives."""
    kind = TORCH[name]
    net = make_net()
    optimizer = kind(by_shape(net)[0], lr=0.01)
    found = try_out(optimizer)
    assert (found.grain, found.call) == (abilities_of(optimizer).grain, abilities_of(optimizer).call)
    assert (found.grain is Grain.ELEMENTS) == (kind in ELEMENT_WISE)


# Those that people write


@pytest.mark.parametrize("name", [*WHOLE, *DIVIDED])
def test_an_optimizer_of_ones_own_equals_one_process(name: str) -> None:
    assert_equal_one_process({**WHOLE, **DIVIDED}[name])


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "hooked"])
def test_a_limited_norm_as_well(name: str) -> None:
    """Before every update, and in every evaluation of the loss."""
    batches = make_batches(2)
    both = in_threads(WORKERS, lambda world: values(trained(WHOLE[name], batches, world, clip_norm=0.01)[0]))
    (alone,) = in_threads(1, lambda world: values(trained(WHOLE[name], batches, world, clip_norm=0.01)[0]))
    for one, other in zip(both[0], alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_several_optimizers_are_given_as_a_list() -> None:
    assert_equal_one_process(muon_and_adamw)
    with pytest.raises(UsageError, match="the 2 optimizers have parameters in common"):
        one_of([torch.optim.SGD(make_net().parameters(), lr=0.1)] * 2)


def test_how_finely_the_work_is_divided_is_found_by_trying() -> None:
    net = make_net()
    found = {name: abilities_of(one_of(make(net))) for name, make in {**WHOLE, **DIVIDED}.items()}
    assert {name: one.grain for name, one in found.items()} == {
        **dict.fromkeys(WHOLE, Grain.WHOLE),
        "lion": Grain.ELEMENTS,
        "lars": Grain.TENSORS,
    }
    assert found["sam"].call is found["sam without a norm"].call is Call.BOTH
    assert found["numbers in groups"].own_numbers == {"k", "longest"}
    assert all(one.reason for one in found.values() if one.grain is Grain.WHOLE)


@pytest.mark.parametrize("name", WHOLE)
def test_a_trial_leaves_no_trace(name: str) -> None:
    net = make_net()
    optimizer = one_of(WHOLE[name](net))
    before, random = values(net), torch.get_rng_state()
    told = repr([{**group, "params": None} for group in optimizer.param_groups]), len(optimizer.state)
    try_out(optimizer)
    assert told == (
        repr([{**group, "params": None} for group in optimizer.param_groups]),
        len(optimizer.state),
    )
    assert torch.equal(random, torch.get_rng_state())
    assert all(map(torch.equal, before, values(net)))
    assert getattr(optimizer, "made", 0) == 0


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("strategy", ["parameter-server:async", "local-sgd", "hogwild", "gossip"])
def test_what_cannot_be_divided_is_refused_where_it_would_be(strategy: str, name: str) -> None:
    def work(world: World) -> None:
        trained(WHOLE[name], make_batches(1), world, strategy=strategy)

    with pytest.raises(
        UsageError, match=r"must update all parameters in one call.* since .*; use --strategy"
    ):
        in_threads(WORKERS, work, strategy=strategy)


@pytest.mark.parametrize("placement", ["sharded", "tensor:ways=2", "pipeline:stages=2"])
def test_a_model_in_parts_has_no_whole_update(placement: str) -> None:
    def work(world: World) -> None:
        trained(WHOLE["global norm"], make_batches(1), world, placement=placement)

    with pytest.raises(UsageError, match=r"gives each worker a part of the parameters; use no --placement"):
        in_threads(WORKERS, work)


def test_a_hook_that_comes_too_late_is_refused() -> None:
    def work(world: World) -> None:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session = session_of(net, optimizer, loss, world=world)
        optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(UsageError, match="put it there before the session is made"):
            session.step(share(make_batches(1)[0], world))

    in_threads(1, work)


# The user's optimizer during and after a session


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "hooked"])
def test_its_state_is_in_the_users_optimizer(name: str) -> None:
    batches = make_batches()
    _, want = plainly(WHOLE[name], batches)
    _, got = in_threads(WORKERS, lambda world: trained(WHOLE[name], batches, world))[0]
    for group, wanted in zip(got.param_groups, want.param_groups, strict=True):
        assert group.keys() == wanted.keys()
        for key in group.keys() - {"params"}:
            assert group[key] == pytest.approx(wanted[key]), key
    assert len(got.state) == len(want.state)
    for state, wanted in zip(got.state.values(), want.state.values(), strict=True):
        torch.testing.assert_close(state, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.processes
@pytest.mark.parametrize("name", WHOLE)
def test_a_checkpoint_has_all_of_it(name: str, tmp_path: Path) -> None:
    """Numbers in its groups and beside them, and what the optimizers in it have."""
    batches = make_batches(8)

    def work(world: World, stop: int) -> list[Tensor]:
        if stop:
            net = make_net()
            session = session_of(net, one_of(WHOLE[name](net)), loss, world=world)
            for batch in batches[:stop]:
                session.step(share(batch, world))
            session.save(tmp_path, wait=True)
            session.close()
        net = make_net()
        session = session_of(net, one_of(WHOLE[name](net)), loss, world=world)
        if stop:
            assert session.resume(tmp_path) == {}
        for batch in batches[stop:]:
            session.step(share(batch, world))
        session.close()
        return values(net)

    whole = in_threads(WORKERS, lambda world: work(world, 0))[0]
    resumed = in_threads(WORKERS, lambda world: work(world, 5))[0]
    assert all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize("name", ["numbers in groups", "schedule-free", "hooked"])
def test_a_state_dict_made_between_steps_brings_it_back(name: str) -> None:
    """As scripts write checkpoints themselves: the numbers in its groups included."""
    batches = make_batches()

    def work(world: World) -> tuple[list[Tensor], list[Tensor]]:
        net = make_net()
        optimizer = WHOLE[name](net)
        session = session_of(net, optimizer, loss, world=world)
        for batch in batches:
            session.step(share(batch, world))
        kept = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        ends = []
        for _ in range(2):
            for batch in batches:
                session.step(share(batch, world))
            ends.append(values(net))
            net.load_state_dict(kept[0])
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
        session.close()
        return ends[0], ends[1]

    for first, again in in_threads(WORKERS, work):
        assert all(map(torch.equal, first, again))


def test_an_evaluation_is_of_the_parameters_for_evaluation() -> None:
    batches = make_batches()
    data = list(zip(*batches[0], strict=True))
    net, optimizer = plainly(averaged, batches)
    optimizer.eval()
    want = loss(net, batches[0]).item()

    def work(world: World) -> tuple[float, bool, bool]:
        net = make_net()
        optimizer = averaged(net)
        session = session_of(net, optimizer, loss, world=world)
        for batch in batches:
            session.step(share(batch, world))
        before = values(net)
        measured = session.evaluate(data)["loss"]
        is_same = all(map(torch.equal, before, values(net)))
        is_training = optimizer.param_groups[0]["train_mode"]
        optimizer.eval()
        assert session.evaluate(data)["loss"] == pytest.approx(measured, rel=1e-12)
        assert not optimizer.param_groups[0]["train_mode"]
        session.close()
        return measured, is_same, is_training

    assert issubclass(Averaged, Optimizer)
    for measured, is_same, is_training in in_threads(WORKERS, work):
        assert measured == pytest.approx(want, rel=1e-7)
        assert is_same
        assert is_training


class OfItsWorker(Optimizer):
    """Keeps a number for all parameters that is another one on each worker."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, {"lr": 0.1 * (1 + rank)})
        self.made, self.rate = 0, 0.1 * (1 + rank)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made += 1
        for param in [param for group in self.param_groups for param in group["params"]]:
            if param.grad is not None:
                param.sub_(param.grad, alpha=self.rate)


def test_an_optimizer_that_leads_the_workers_apart_is_noticed() -> None:
    def work(world: World) -> None:
        net = make_net()
        optimizer = OfItsWorker(net.parameters(), world.rank)
        optimizer.param_groups[0]["lr"] = 0.1
        session = session_of(net, optimizer, loss, world=world)
        session.step(share(make_batches(1)[0], world))
        session.evaluate(list(zip(*make_batches(1)[0], strict=True)))

    with pytest.raises(
        UsageError, match="OfItsWorker has led the workers apart: the norm of the parameters is"
    ):
        in_threads(WORKERS, work)


def test_only_synchronous_strategies_run_an_optimizer_whole() -> None:
    """All of them that have no servers; a strategy that comes is one of those, or refuses by the same sentence."""
    texts = [name for name in strategies.STRATEGIES if name != "single"]
    for text in texts:
        traits = strategies.parse(text).traits
        if traits.synchronous and traits.servers is None:
            assert_equal_one_process(WHOLE["numbers in groups"], strategy=text)


class EightColumns(Optimizer):
    """Fails on the small tensors on which it is tried."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.shape[-1] % 4:
                    raise ValueError("the last dimension must be a multiple of 4")
                param.sub_(param.grad, alpha=group["lr"])


def matrices(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.shape[-1] % 4 == 0]


@pytest.mark.parametrize("workers", [1, 2])
def test_one_that_fails_when_it_is_tried_runs_whole(workers: int) -> None:
    def make(net: nn.Module) -> Any:
        return EightColumns(matrices(net))

    batches = make_batches()
    assert (try_out(make(make_net())).grain, try_out(make(make_net())).call) == (Grain.WHOLE, Call.GRADIENT)
    wanted, _ = plainly(make, batches)

    def work(world: World) -> None:
        net, _ = trained(make, batches, world)
        for ours, theirs in zip(net.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

    in_threads(workers, work)


class NeverCalls(Optimizer):
    """Wants a closure where there are gradients of large tensors, and leaves it alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise ValueError("a closure is needed")
        if all(param.numel() < 100 for group in self.param_groups for param in group["params"]):
            closure()


def test_one_that_does_not_call_its_closure_is_refused() -> None:
    def work(world: World) -> None:
        with pytest.raises(UsageError, match=r"NeverCalls.step\(closure\) did not call its closure"):
            trained(lambda net: NeverCalls(net.parameters()), make_batches(1), world)

    in_threads(1, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sixteen_bits_equal_one_process(dtype: torch.dtype, momentum: float) -> None:
    def make(net: nn.Module) -> Any:
        return torch.optim.SGD(net.to(dtype).parameters(), lr=0.1, momentum=momentum)

    batches = [(inputs.to(dtype), targets.to(dtype)) for inputs, targets in make_batches(1)]
    wanted, _ = plainly(make, batches)
    before = list(make_net().to(dtype).parameters())

    def work(world: World) -> None:
        net, _ = trained(make, batches, world)
        for ours, theirs, first in zip(net.parameters(), wanted.parameters(), before, strict=True):
            # A gradient of two halves is rounded otherwise; one that is lost is off by the whole update.
            limit = 0.5 * (theirs - first).abs().max() + torch.finfo(dtype).eps * first.abs().max()
            assert bool((ours - theirs).abs().max() <= limit)

    in_threads(2, work)


class Equalised(nn.Linear):
    """Computes its weight, as an equalised learning rate does: there is no parameter of that name."""

    def __init__(self) -> None:
        super().__init__(300, 1, dtype=torch.float64)
        self.raw = nn.Parameter(self.weight.detach().clone())
        del self.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, 0.5 * self.raw, self.bias)


class Counts(nn.Module):
    """A parametrization that counts how often a weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * 2.0


def test_a_weight_that_is_computed_is_not_computed_by_the_session() -> None:
    def work(world: World) -> None:
        net, counts, of_table = make_net(), Counts(), Counts()
        assert isinstance(net, nn.Sequential)
        parametrize = torch.nn.utils.parametrize.register_parametrization
        parametrize(net[0], "weight", counts)
        net[4] = Equalised()
        net[1].table = nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
        parametrize(net[1].table, "weight", of_table)
        before = counts.calls, of_table.calls
        session = session_of(net, torch.optim.SGD(net.parameters(), lr=0.1), loss, world=world)
        for batch in make_batches(3):
            session.step(share(batch, world))
        assert (counts.calls - before[0], of_table.calls - before[1]) == (3, 0)
        session.close()

    in_threads(2, work)
