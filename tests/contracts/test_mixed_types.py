"""A model whose trained parameters are of several types equals one process, or is refused before the first step."""

import copy
import functools
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
from manyhands.engine.session import Session
from manyhands.errors import Diverged, UsageError
from manyhands.replica.optimizer.abilities import abilities_of
from manyhands.replica.optimizer.chain import one_of
from manyhands.replica.optimizer.trial import Grain
from manyhands.replica.parameters import common_type
from tests.sessions import session_of
from tests.threads import in_threads

Batch = tuple[Tensor, Tensor]
Make = Callable[[nn.Module], Optimizer]

STEPS = 6
SAMPLES = 12


class Mixed(nn.Module):
    """A body of one type and a head of another, as a person writes them: a cast between the two."""

    def __init__(self, body: torch.dtype, head: torch.dtype, seed: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 33), nn.Tanh()).to(body)  # an odd number of elements
        self.norm = nn.LayerNorm(33).to(torch.promote_types(head, torch.float32))
        self.head = nn.Linear(33, 1).to(head)
        self.unused = nn.Parameter(torch.ones(3, dtype=body))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator).double() * 0.4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs.to(self.body[0].weight.dtype))
        found: Tensor = self.head(self.norm(hidden.to(self.norm.weight.dtype)).to(self.head.weight.dtype))
        return found


class Waves(nn.Module):
    """Complex weights beside real ones, as in Fourier neural operators."""

    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.modes = nn.Parameter(0.3 * torch.randn(5, 4, dtype=dtype, generator=generator))
        self.linear = nn.Linear(4, 1, dtype=dtype.to_real())
        with torch.no_grad():
            for param in self.linear.parameters():
                param.copy_(torch.randn(param.shape, generator=generator).double() * 0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        modes = torch.fft.rfft(inputs.to(self.linear.weight.dtype))
        found: Tensor = self.linear((modes @ self.modes).abs())
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "float32 and float64": lambda: Mixed(torch.float32, torch.float64),
    "bfloat16 and float32": lambda: Mixed(torch.bfloat16, torch.float32),
    "float32 and bfloat16": lambda: Mixed(torch.float32, torch.bfloat16),
    "float16 and bfloat16": lambda: Mixed(torch.float16, torch.bfloat16),
    "complex128 and float64": Waves,
    "complex64 and float32": lambda: Waves(torch.complex64),
}
EXACT = ("float32 and float64", "complex128 and float64", "complex64 and float32")
MAKES: dict[str, Make] = {
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
    # A large eps: where a gradient is nothing but rounding, Adam would make a whole step of it.
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-2),
}
WAYS = ("step", "halves", "looked at")
ALL = ("all-reduce", "all-reduce:topology=ring")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]).double(), batch[1])


def make_batches(count: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    inputs = [torch.randn(SAMPLES, 8, generator=generator) for _ in range(count)]
    return [(one, one.double().mean(1, keepdim=True)) for one in inputs]


def share(batch: Batch, world: World) -> Batch:
    return batch[0][world.rank :: world.size], batch[1][world.rank :: world.size]


def values(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


@functools.cache
def plainly(model: str, make: str, clip_norm: float | None = None) -> tuple[nn.Module, Optimizer]:
    """The definition: one process, plain PyTorch."""
    net = MODELS[model]()
    optimizer = MAKES[make](net)
    for batch in make_batches():
        optimizer.zero_grad()
        loss(net, batch).backward()  # type: ignore[no-untyped-call]
        if clip_norm:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
    return net, optimizer


def step(session: Session, batch: Any, way: str) -> None:
    if way == "step":
        session.step(batch)
        return
    session.backward(batch)
    if way == "looked at":
        for param in session.engine.replica.parameters:
            assert param.grad is None or param.grad.dtype == param.dtype
    session.update()


def begin(model: str, make: str, world: World, **settings: Any) -> tuple[nn.Module, Optimizer, Session]:
    net = MODELS[model]()
    optimizer = MAKES[make](net)
    return net, optimizer, session_of(net, optimizer, loss, world=world, **settings)


def trained(model: str, make: str, world: World, way: str = "step", **settings: Any) -> list[Tensor]:
    net, _, session = begin(model, make, world, **settings)
    for batch in make_batches():
        step(session, share(batch, world), way)
    session.close()
    return values(net)


def assert_close(model: str, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Within the rounding of each parameter's own type, of which several steps add up."""
    first = values(MODELS[model]())
    assert not all(map(torch.equal, wanted, first))
    for one, other, before in zip(got, wanted, first, strict=True):
        assert one.dtype == other.dtype == before.dtype
        if model in EXACT:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
            continue
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)
        # A sum that was wrong would lead elsewhere.
        apart, moved = ((other - start).double().norm() for start in (one, before))
        assert apart <= 0.1 * moved + 1e-3, (apart, moved)


# Equal to one process


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("way", WAYS)
def test_one_worker_has_the_bits_of_plain_pytorch(model: str, make: str, way: str) -> None:
    wanted = values(plainly(model, make)[0])
    (got,) = in_threads(1, lambda world: trained(model, make, world, way))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(("workers", "strategy"), [(2, ALL[0]), (3, ALL[0]), (3, ALL[1])])
def test_workers_equal_one_process(model: str, make: str, workers: int, strategy: str) -> None:
    for way in WAYS:
        every = in_threads(
            workers, lambda world, way=way: trained(model, make, world, way, strategy=strategy)
        )
        assert_close(model, every[0], values(plainly(model, make)[0]))
        for others in every[1:]:
            assert all(map(torch.equal, every[0], others))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_limited_gradient_is_that_of_one_process(model: str, workers: int) -> None:
    every = in_threads(workers, lambda world: trained(model, "momentum", world, clip_norm=0.1))
    assert_close(model, every[0], values(plainly(model, "momentum", 0.1)[0]))
    assert all(map(torch.equal, every[0], every[-1]))


def test_steps_that_evaluate_the_loss_again_equal_one_process() -> None:
    def make(net: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def work(world: World) -> list[Tensor]:
        net = MODELS["float32 and float64"]()
        session = session_of(net, make(net), loss, world=world)
        for batch in make_batches(3):
            session.step(share(batch, world))
        session.close()
        return values(net)

    plain = MODELS["float32 and float64"]()
    optimizer = make(plain)
    for batch in make_batches(3):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            value = loss(plain, batch)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(closure)  # type: ignore[arg-type]
    for got in in_threads(2, work):
        assert_close("float32 and float64", got, values(plain))


def test_two_optimizers_each_with_a_type_equal_one_process() -> None:
    def make(net: nn.Module) -> list[Optimizer]:
        narrow = [param for param in net.parameters() if param.dtype == torch.float32]
        wide = [param for param in net.parameters() if param.dtype == torch.float64]
        return [torch.optim.SGD(narrow, lr=0.02, momentum=0.9), torch.optim.AdamW(wide, lr=0.01)]

    def work(world: World) -> list[Tensor]:
        net = MODELS["float32 and float64"]()
        session = session_of(net, one_of(make(net)), loss, world=world)
        for batch in make_batches():
            session.step(share(batch, world))
        session.close()
        return values(net)

    plain = MODELS["float32 and float64"]()
    optimizers = make(plain)
    for batch in make_batches():
        plain.zero_grad()
        loss(plain, batch).backward()  # type: ignore[no-untyped-call]
        for one in optimizers:
            one.step()
    for got in in_threads(2, work):
        assert_close("float32 and float64", got, values(plain))


class Far(nn.Module):
    """Half of the narrow parameter's gradient fits its type."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.float16))
        self.wide = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_that_a_narrow_type_cannot_hold_is_not_finite_as_in_one_process(way: str) -> None:
    def far(net: Any, inputs: Tensor) -> Tensor:
        value: Tensor = (net.narrow.float().sum() + net.wide.sum()) * inputs.mean()
        return value

    def work(world: World) -> list[Tensor]:
        net = Far()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
        session = session_of(net, optimizer, far, world=world, skip_nonfinite=1)
        for value in (100.0, 8e4):
            step(session, torch.full((4,), value), way)
        session.close()
        return values(net)

    for got in in_threads(2, work):
        for param in got:
            torch.testing.assert_close(param, torch.full_like(param, 0.999))


# What the script reads and puts in


def test_the_state_of_the_optimizer_is_that_of_plain_pytorch() -> None:
    _, optimizer = plainly("bfloat16 and float32", "AdamW")
    wanted = optimizer.state_dict()

    def work(world: World) -> tuple[Any, Any]:
        _, made, session = begin("bfloat16 and float32", "AdamW", world)
        for batch in make_batches():
            session.step(share(batch, world))
        during, asked = made.state_dict(), session.optimizer_state()
        session.close()
        return during, asked

    for states in in_threads(2, work):
        for found in states:
            assert found["state"].keys() == wanted["state"].keys()
            for number, state in wanted["state"].items():
                for name, value in state.items():
                    got = found["state"][number][name]
                    assert got.dtype == value.dtype
                    torch.testing.assert_close(got, value, rtol=0.1, atol=0.05)


def test_parameters_and_state_that_a_script_loads_are_gone_on_from() -> None:
    """In the middle of a session, as plain PyTorch does it."""
    net, _ = plainly("float32 and float64", "AdamW")
    halfway = MODELS["float32 and float64"]()
    made = MAKES["AdamW"](halfway)
    for batch in make_batches()[: STEPS // 2]:
        made.zero_grad()
        loss(halfway, batch).backward()  # type: ignore[no-untyped-call]
        made.step()

    def work(world: World) -> list[Tensor]:
        own, own_optimizer, session = begin("float32 and float64", "AdamW", world)
        session.step(share(make_batches(1)[0], world))
        own.load_state_dict(halfway.state_dict())
        own_optimizer.load_state_dict(copy.deepcopy(made.state_dict()))
        for batch in make_batches()[STEPS // 2 :]:
            session.step(share(batch, world))
        session.close()
        return values(own)

    for got in in_threads(2, work):
        assert_close("float32 and float64", got, values(net))


def test_a_script_reads_and_sets_parameters_between_steps() -> None:
    def work(world: World) -> list[Tensor]:
        net: Any
        net, _, session = begin("bfloat16 and float32", "momentum", world)
        for batch in make_batches(2):
            session.step(share(batch, world))
            state = session.model_state()
            for name, param in net.named_parameters():
                assert torch.equal(state[name], param)
                assert state[name].dtype == param.dtype
        net.body[0].bias.data = torch.full_like(net.body[0].bias, 0.5)
        session.evaluate(list(zip(*make_batches(1)[0], strict=True)))
        for batch in make_batches(1):
            session.step(share(batch, world))
        session.close()
        bias = net.body[0].bias.detach()
        assert 0.4 < float(bias.min()) < float(bias.max()) < 0.6
        return values(net)

    one, other = in_threads(2, work)
    assert all(map(torch.equal, one, other))


def test_another_type_for_a_parameter_is_refused() -> None:
    def work(world: World) -> None:
        net, _, session = begin("bfloat16 and float32", "momentum", world)
        net.float()
        session.step(share(make_batches(1)[0], world))

    with pytest.raises(UsageError, match=r"has another type \(torch.float32\)"):
        in_threads(1, work)


def test_what_a_script_writes_into_shared_places_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    """One element of each parameter is looked at between steps, also of those that fill a part of their place."""

    def work(world: World) -> None:
        net: Any
        net, _, session = begin("bfloat16 and float32", "momentum", world)
        session.step(share(make_batches(1)[0], world))
        session.step(share(make_batches(1)[0], world))
        net.body[0].weight.data.mul_(0.5)
        session.step(share(make_batches(1)[0], world))
        session.close()

    in_threads(2, work)
    assert "body.0.weight" in capfd.readouterr().err


# Checkpoints


@pytest.mark.processes
@pytest.mark.parametrize("model", ["float32 and float64", "bfloat16 and float32", "complex64 and float32"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    model: str, workers: int, tmp_path: Path
) -> None:
    def saved(world: World) -> list[Tensor]:
        net, _, session = begin(model, "AdamW", world)
        for batch in make_batches()[: STEPS // 2]:
            session.step(share(batch, world))
        session.save(tmp_path)
        for batch in make_batches()[STEPS // 2 :]:
            session.step(share(batch, world))
        session.close()
        return values(net)

    def resumed(world: World) -> list[Tensor]:
        net, _, session = begin(model, "AdamW", world)
        session.resume(tmp_path)
        for batch in make_batches()[STEPS // 2 :]:
            session.step(share(batch, world))
        session.close()
        return values(net)

    first, second = in_threads(workers, saved), in_threads(workers, resumed)
    for one, other in zip(first, second, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_checkpoint_of_parameters_that_are_not_finite_is_not_written(tmp_path: Path) -> None:
    """In the vector's type, the first of two narrow numbers is the lower half of one, which may be anything."""

    def work(world: World) -> None:
        net: Any
        net, _, session = begin("bfloat16 and float32", "momentum", world)
        session.step(share(make_batches(1)[0], world))
        with torch.no_grad():
            net.unused[0] = torch.nan
        session.save(tmp_path)

    with pytest.raises(Diverged, match="are not finite after step 1"):
        in_threads(1, work)


def test_the_parameters_of_workers_are_compared_by_their_own_values(tmp_path: Path) -> None:
    def work(world: World) -> None:
        net: Any
        net, _, session = begin("bfloat16 and float32", "momentum", world)
        session.step(share(make_batches(1)[0], world))
        with torch.no_grad():
            net.body[0].bias.data.add_(world.rank)
        session.evaluate(list(zip(*make_batches(1)[0], strict=True)))

    with pytest.raises(UsageError, match="led the workers apart"):
        in_threads(2, work)


# What is refused


def strategies_by_kind(whole: bool) -> list[str]:
    found = []
    for text in strategies.STRATEGIES:
        traits = strategies.parse(text).traits
        if text != "single" and (traits.synchronous and traits.servers is None) == whole:
            found.append(text)
    return found


@pytest.mark.parametrize("strategy", strategies_by_kind(whole=True))
def test_strategies_without_servers_that_step_together_have_mixed_types(strategy: str) -> None:
    every = in_threads(2, lambda world: trained("float32 and float64", "momentum", world, strategy=strategy))
    assert_close("float32 and float64", every[0], values(plainly("float32 and float64", "momentum")[0]))


@pytest.mark.parametrize("strategy", strategies_by_kind(whole=False))
def test_other_strategies_are_refused_with_the_way_out(strategy: str) -> None:
    def make(net: nn.Module) -> Optimizer:
        return (
            torch.optim.LBFGS(net.parameters())
            if strategies.tuning(strategies.parse(strategy)).only_optimizer == "lbfgs"
            else torch.optim.SGD(net.parameters(), lr=0.1)
        )

    def work(world: World) -> None:
        net = MODELS["bfloat16 and float32"]()
        session = session_of(net, make(net), loss, world=world, strategy=strategy)
        session.step(share(make_batches(1)[0], world))

    with pytest.raises(
        UsageError,
        match=r"of 2 types \(bfloat16, float32\).*; use --strategy all-reduce, or convert the model",
    ):
        in_threads(2, work, strategy=strategy)


@pytest.mark.parametrize("placement", ["pipeline:stages=2", "sharded", "tensor"])
def test_placements_are_refused_with_the_way_out(placement: str) -> None:
    def work(world: World) -> None:
        layers = [nn.Linear(8, 8), nn.Linear(8, 8).double()]
        net = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        session_of(net, optimizer, loss, world=world, placement=placement, example=make_batches(1)[0])

    with pytest.raises(
        UsageError, match=r"of 2 types \(float32, float64\).*; use no --placement, or convert"
    ):
        in_threads(2, work)


def test_several_devices_are_refused() -> None:
    params = [torch.zeros(2), torch.zeros(2, device="meta")]
    with pytest.raises(UsageError, match=r"on 2 devices \(cpu, meta\).*model.to"):
        common_type(params)


def test_the_type_of_a_vector_holds_every_parameter() -> None:
    def of(*types: torch.dtype) -> torch.dtype:
        return common_type([torch.zeros(2, dtype=one) for one in types])[1]

    assert of(torch.bfloat16) == torch.bfloat16
    assert of(torch.bfloat16, torch.float16) == torch.float32
    assert of(torch.float32, torch.int64) == torch.float64  # as wide as a number that no gradient changes
    with pytest.raises(UsageError, match=r"float32, float8_e4m3fn.*leave"):
        of(torch.float32, torch.float8_e4m3fn)


def test_types_are_looked_at_whenever_it_is_asked() -> None:
    """A script may convert the model between two sessions."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert abilities_of(optimizer).grain is Grain.ELEMENTS
    net[0].double()
    assert abilities_of(optimizer).grain is Grain.WHOLE
    net[1].double()
    assert abilities_of(optimizer).grain is Grain.ELEMENTS
