"""Several sessions in one script, as a GAN has them: they step in turns on the batches of one loop, under every
strategy, and train what one process with plain PyTorch would."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands import strategies
from manyhands.cluster.worker.world import World
from manyhands.errors import UsageError
from tests.contracts.test_strategies import DIFFERENT, TOGETHER, assert_close
from tests.sessions import session_of
from tests.threads import in_threads

SAMPLES, BATCH, EPOCHS = 24, 3, 2
Sample = tuple[Tensor, Tensor]


class Pairs:
    """Real samples, each with the noise from which the generator makes one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.real = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64) * 0.3 + 1.0
        self.noise = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, index: int) -> Sample:
        return self.real[index], self.noise[index]


def nets() -> tuple[nn.Module, nn.Module]:
    drawn = torch.Generator().manual_seed(2)  # workers are threads, which have the global one in common
    generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6)).double()
    discriminator = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    with torch.no_grad():
        for param in (*generator.parameters(), *discriminator.parameters()):
            param.copy_(torch.randn(param.shape, generator=drawn, dtype=torch.float64) * 0.4)
    return generator, discriminator


def losses(
    generator: nn.Module, discriminator: nn.Module
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def of_discriminator(model: nn.Module, batch: Sample) -> Tensor:
        real, noise = batch
        fake = generator(noise).detach()
        ones, zeros = torch.ones(len(real), 1).double(), torch.zeros(len(real), 1).double()
        return F.binary_cross_entropy_with_logits(model(real), ones) + F.binary_cross_entropy_with_logits(
            model(fake), zeros
        )

    def of_generator(model: nn.Module, batch: Sample) -> Tensor:
        score = discriminator(model(batch[1]))
        return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))

    return of_generator, of_discriminator


def make(model: nn.Module, strategy: str = "all-reduce") -> torch.optim.Optimizer:
    only = strategies.tuning(strategies.parse(strategy)).only_optimizer
    if only:
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def gan(world: World, strategy: str, **settings: Any) -> dict[str, Any]:
    generator, discriminator = nets()
    of_generator, of_discriminator = losses(generator, discriminator)
    g = session_of(
        generator, make(generator, strategy), of_generator, world=world, strategy=strategy, **settings
    )
    d = session_of(
        discriminator,
        make(discriminator, strategy),
        of_discriminator,
        world=world,
        strategy=strategy,
        **settings,
    )
    data, seen = Pairs(), []
    for _ in range(EPOCHS):
        for batch in d.batches(data, batch_size=BATCH):
            seen.append([real for real, _ in zip(*batch, strict=True)])
            d.step(batch)
            g.step(batch)
    found = d.evaluate(data)["loss"], g.evaluate(data)["loss"]
    tally, samples = d.engine.feeds.tally, (d.samples, g.samples)
    d.close()
    g.close()
    every = [*generator.parameters(), *discriminator.parameters()]
    return {
        "params": [param.detach().clone() for param in every],
        "loss": found,
        "tally": tally,
        "samples": samples,
        "seen": [torch.stack(one) if one else torch.zeros(0, 6) for one in seen],
        "steps": (d.steps, g.steps),
    }


def plainly(batches: Sequence[Sample], strategy: str) -> nn.Module:
    """The same in one process: `zero_grad` before each pass drops what came by the other's."""
    generator, discriminator = nets()
    of_generator, of_discriminator = losses(generator, discriminator)
    turns = [
        (discriminator, make(discriminator, strategy), of_discriminator),
        (generator, make(generator, strategy), of_generator),
    ]
    for batch in batches:
        for model, optimizer, loss in turns:

            def closure(
                model: nn.Module = model, optimizer: Any = optimizer, loss: Any = loss, batch: Sample = batch
            ) -> Tensor:
                optimizer.zero_grad()
                value = loss(model, batch)
                value.backward()
                return value

            optimizer.step(closure)
    return nn.ModuleList([generator, discriminator])


def steps_of(found: Sequence[dict[str, Any]]) -> Iterator[Sample]:
    """The batches of all workers together, step by step."""
    data = Pairs()
    for rows in zip(*(one["seen"] for one in found), strict=True):
        real = torch.cat(list(rows))
        places = [int((data.real == one).all(1).nonzero()) for one in real]
        yield real, data.noise[places]


@pytest.mark.parametrize("strategy", TOGETHER)
def test_a_gan_on_two_workers_equals_one_process(strategy: str) -> None:
    found = in_threads(2, lambda world: gan(world, strategy), strategy=strategy)
    want = plainly(list(steps_of(found)), strategy)
    for one in found:
        assert_close(one["params"], want)


@pytest.mark.parametrize("strategy", DIFFERENT)
def test_a_gan_trains_under_every_strategy(strategy: str) -> None:
    workers = 1 if strategy == "single" else 2
    found = in_threads(workers, lambda world: gan(world, strategy), strategy=strategy)
    for one in found:
        assert one["tally"] == {"once": EPOCHS * SAMPLES, "twice": 0, "never": 0}
        assert one["samples"] == (EPOCHS * SAMPLES,) * 2
        assert all(torch.isfinite(param).all() for param in one["params"])
        for first, second in zip(found[0]["params"], one["params"], strict=True):
            torch.testing.assert_close(first, second)


def part_of_gan(world: World, out: Path, stops: Sequence[int], **settings: Any) -> dict[str, Any]:
    """Train up to each of these rounds in sessions of their own, which resume both from the run's directory."""
    kept: dict[str, Any] = {}
    for stop in stops:
        generator, discriminator = nets()
        of_generator, of_discriminator = losses(generator, discriminator)
        d = session_of(discriminator, make(discriminator), of_discriminator, world=world, out=out, **settings)
        g = session_of(generator, make(generator), of_generator, world=world, out=out, **settings)
        d.resume()
        g.resume()
        while d.steps < stop:
            for batch in d.batches(Pairs(), batch_size=BATCH):
                d.step(batch)
                g.step(batch)
                if d.steps == stop:
                    break
        if stop != stops[-1]:
            d.save()
            g.save()
        d.close()
        g.close()
        every = [*generator.parameters(), *discriminator.parameters()]
        kept = {"params": [param.detach().clone() for param in every], "steps": (d.steps, g.steps)}
    return kept


@pytest.mark.processes
def test_both_sessions_are_saved_and_go_on_together(tmp_path: Path) -> None:
    straight, resumed = (
        in_threads(2, lambda world, name=name, stops=stops: part_of_gan(world, tmp_path / name, stops))
        for name, stops in (("straight", [6]), ("resumed", [3, 6]))
    )
    assert resumed[0]["steps"] == (6, 6)
    for one, other in zip(straight[0]["params"], resumed[0]["params"], strict=True):
        assert torch.equal(one, other)
    assert {path.name for path in (tmp_path / "resumed").glob("*[st]*") if path.name != "events"} >= {
        "checkpoints",
        "checkpoints-2",
        "summary.json",
        "summary-2.json",
    }


def test_two_sessions_never_save_in_one_directory(tmp_path: Path) -> None:
    def work(world: World) -> None:
        generator, discriminator = nets()
        of_generator, of_discriminator = losses(generator, discriminator)
        d = session_of(discriminator, make(discriminator), of_discriminator, world=world)
        g = session_of(generator, make(generator), of_generator, world=world)
        d.resume(tmp_path)  # from here on it saves there
        g.save(tmp_path)

    with pytest.raises(UsageError, match="directory of its own"):
        in_threads(1, work)


@pytest.mark.processes
def test_what_saves_by_itself_saves_all_sessions_after_the_same_round(tmp_path: Path) -> None:
    in_threads(2, lambda world: part_of_gan(world, tmp_path, [5], save_every="2 steps"))
    found = [
        sorted(path.name for path in (tmp_path / name).glob("step-*"))
        for name in ("checkpoints", "checkpoints-2")
    ]
    assert found[0] == found[1]
    assert len(found[0]) >= 2


def test_sessions_may_train_parts_of_one_model() -> None:
    """Each optimizer has some of its parameters; what a step gives to the others' is dropped."""

    def net() -> nn.Sequential:
        drawn = torch.Generator().manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=drawn, dtype=torch.float64) * 0.4)
        return model

    def loss(model: nn.Module, batch: Sample) -> Tensor:
        return (model(batch[0]) - batch[1][:, :2]).square().mean()

    data = Pairs()

    def work(world: World) -> list[Tensor]:
        model = net()
        parts = [
            session_of(model, make(part), loss, world=world)  # the body, and the head
            for part in (model[0], model[2])
        ]
        for number in range(4):
            places = torch.arange(number * 6 + world.rank * 3, number * 6 + world.rank * 3 + 3)
            for session in parts:
                session.step((data.real[places], data.noise[places]))
        for session in parts:
            session.close()
        return [param.detach().clone() for param in model.parameters()]

    model = net()
    optimizers = [make(model[0]), make(model[2])]
    for number in range(4):
        places = torch.arange(number * 6, number * 6 + 6)
        for optimizer in optimizers:
            model.zero_grad()
            loss(model, (data.real[places], data.noise[places])).backward()
            optimizer.step()
    for ours in in_threads(2, work):
        assert_close(ours, model)


@pytest.mark.parametrize("placement", ["sharded", "tensor:ways=2"])
def test_a_gan_in_parts_equals_one_process(placement: str) -> None:
    found = in_threads(2, lambda world: gan(world, "all-reduce", placement=placement))
    apart = found if placement == "sharded" else found[:1]  # else both work on the same samples
    for one in found:
        assert_close(one["params"], plainly(list(steps_of(apart)), "all-reduce"))
