"""The model outside of a step, under every placement: whole values, or a sentence; never a part taken for the whole."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from manyhands import placement
from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import ManyhandsError, UsageError
from manyhands.placement import PLACEMENTS
from tests.contracts.test_placements import (
    batches,
    close_to,
    filled,
    make_net,
    make_session,
    momentum,
    train,
)
from tests.end_to_end.commands import manyhands
from tests.sessions import session_of
from tests.threads import in_threads

CASES = {"single": 2, "pipeline:microbatches=5": 2, "tensor": 2, "sharded": 2, "hybrid": 4}
SPREAD = [text for text in CASES if text != "single"]
GATHERED = ["tensor", "sharded"]

INPUTS = batches()[3][0]


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def averaged(model: nn.Module) -> nn.Module:
    average = AveragedModel(model)
    average.update_parameters(model)
    return average.module


def flat(values: Any) -> list[float]:
    return [number for value in values for number in value.detach().reshape(-1).tolist()]


# What people do with a model between steps.
READS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda model: [param.norm().item() for param in model.parameters()],
    "data": lambda model: flat(param.data for param in model.parameters()),
    "clone": lambda model: flat(param.detach().clone() for param in model.parameters()),
    "tolist": lambda model: np.ravel([np.ravel(p.tolist()).sum() for p in model.parameters()]).tolist(),
    "print": lambda model: [str(param) for param in model.parameters()],
    "numpy": lambda model: flat(torch.from_numpy(param.detach().numpy()) for param in model.parameters()),
    "item": lambda model: [param.view(-1)[0].item() for param in model.parameters()],
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).tolist(),
    "foreach": lambda model: flat(torch._foreach_abs([param.detach() for param in model.parameters()])),
    "state_dict": lambda model: flat(model.state_dict().values()),
    "save": lambda model: flat(saved(model).values()),
    "deepcopy": lambda model: flat(copy.deepcopy(model).parameters()),
    "average": lambda model: flat(averaged(model).parameters()),
    "pickle": lambda model: torch.save(model, io.BytesIO()) or 0.0,
}


def test_every_placement_is_tried() -> None:
    assert {type(placement.parse(text)) for text in CASES} == set(PLACEMENTS.values())


@pytest.mark.parametrize("text", CASES)
def test_what_is_read_between_steps_is_whole_or_refused(text: str) -> None:
    def work(world: World) -> dict[str, Any]:
        session = make_session(world, text)
        train(session, batches()[:3])
        found: dict[str, Any] = {}
        for use, read in READS.items():
            try:
                found[use] = read(session.model)
            except UsageError as error:
                found[use] = str(error)
        shapes = [tuple(param.shape) for param in session.model.parameters()]
        assert shapes == [tuple(param.shape) for param in net.parameters()]
        assert sum(p.numel() for p in session.model.parameters()) == sum(p.numel() for p in net.parameters())
        assert all(param.grad is None and param.requires_grad for param in session.model.parameters())
        with session.whole_model() as model:
            found["whole"] = {use: read(model) for use, read in READS.items()}
            session.world.host.barrier()  # the model is one for the workers of a host, under `single`
        train(session, batches()[3:5])
        session.close()
        close_to(session.model, alone_after(5))
        return found

    net = alone_after(3)
    expected = {use: read(net) for use, read in READS.items()}
    for found in in_threads(CASES[text], work):
        whole = found.pop("whole")
        for use, value in expected.items():
            if text in SPREAD:
                assert "test_outside.py, line" in found[use], use
                assert "session.model_state()" in found[use], use
                assert "session.whole_model()" in found[use], use
            elif use != "print":
                assert found[use] == pytest.approx(value, rel=1e-6), use
            if use != "print":
                assert whole[use] == pytest.approx(value, rel=1e-6), use


def alone_after(steps: int) -> nn.Module:
    net = make_net()
    optimizer = momentum(net)
    for batch in batches()[:steps]:
        optimizer.zero_grad()
        F.cross_entropy(net(batch[0]), batch[1]).backward()
        optimizer.step()
    return net


# Copies of the whole


@pytest.mark.parametrize("text", CASES)
def test_the_state_of_the_whole_model(text: str) -> None:
    """On every worker, or on worker 0 alone; a copy, with names that are tied still tied."""

    def work(world: World) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        session = make_session(world, text)
        train(session, batches()[:3])
        everywhere, main = session.model_state(), session.model_state(main_only=True)
        train(session, batches()[3:4])
        session.close()
        return everywhere, main

    for rank, (everywhere, main) in enumerate(in_threads(CASES[text], work)):
        found = make_net()
        found.load_state_dict(everywhere)
        close_to(found, alone_after(3))
        assert list(everywhere) == list(found.state_dict())
        assert bool(main) == (rank == 0)
        if main:
            assert all(torch.equal(main[name], value) for name, value in everywhere.items())
            assert all(value.untyped_storage().nbytes() == value.nbytes for value in main.values())


@pytest.mark.parametrize("text", CASES)
def test_one_worker_may_use_the_whole_model_alone(text: str) -> None:
    """And a copy that it makes has nothing of ours."""

    def work(world: World) -> Tensor | None:
        session = make_session(world, text)
        train(session, batches()[:3])
        seen = None
        with session.whole_model() as model:
            if session.is_main:
                with torch.no_grad():
                    seen = model.eval()(INPUTS)
                    assert torch.equal(seen, copy.deepcopy(model)(INPUTS))
                file = io.BytesIO()
                torch.save(model, file)
                file.seek(0)
                assert torch.equal(seen, torch.load(file, weights_only=False)(INPUTS))
                assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
                model.train()
        train(session, batches()[3:5])
        session.close()
        close_to(session.model, alone_after(5))
        return seen

    first, *rest = in_threads(CASES[text], work)
    assert torch.allclose(first, alone_after(3)(INPUTS), rtol=1e-9)
    assert rest == [None] * len(rest)


def clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.2, 0.2)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("text", SPREAD)
@pytest.mark.parametrize("change", [clamp, load])
def test_what_all_workers_change_alike_is_kept(text: str, change: Callable[[nn.Module], None]) -> None:
    def work(world: World) -> nn.Module:
        session = make_session(world, text)
        train(session, batches()[:2])
        with session.whole_model() as model:
            change(model)
        train(session, batches()[2:4])
        session.close()
        return session.model

    expected = make_net()
    made = momentum(expected)
    for number, batch in enumerate(batches()[:4]):
        made.zero_grad()
        F.cross_entropy(expected(batch[0]), batch[1]).backward()
        made.step()
        if number == 1:
            with torch.no_grad():
                if change is clamp:
                    clamp(expected)
                else:
                    for param in expected.parameters():
                        param.mul_(0.5)
    for found in in_threads(CASES[text], work):
        close_to(found, expected)


@pytest.mark.parametrize("text", SPREAD)
@pytest.mark.parametrize("wrong", ["alone", "replaced", "step"])
def test_what_cannot_be_kept_is_refused(text: str, wrong: str) -> None:
    words = {
        "alone": "not all in the same way",
        "replaced": "was replaced by another",
        "step": "leave the block",
    }

    def work(world: World) -> None:
        session = make_session(world, text)
        train(session, batches()[:2])
        with pytest.raises(UsageError, match=words[wrong]):
            spoil(session)

    def spoil(session: Session) -> None:
        with session.whole_model() as model:
            if wrong == "alone" and session.is_main:
                model[0].weight.data.zero_()
            elif wrong == "replaced":
                model[0].weight = nn.Parameter(model[0].weight.detach().clone())
            elif wrong == "step":
                train(session, batches()[:1])

    in_threads(CASES[text], work)


# Passes of the script


@pytest.mark.parametrize("text", SPREAD)
@pytest.mark.parametrize("grad", [True, False])
def test_a_loop_of_ones_own_evaluates_where_all_workers_run_it(text: str, grad: bool) -> None:
    """Slices and shards are put together while the model computes; stages cannot be."""

    def work(world: World) -> Any:
        session = make_session(world, text)
        train(session, batches()[:3])
        session.model.eval()
        with torch.set_grad_enabled(grad):
            try:
                found: Any = session.model(INPUTS), session.model[:4](INPUTS)
            except UsageError as error:
                return str(error)
        session.model.train()
        train(session, batches()[3:5])
        session.close()
        close_to(session.model, alone_after(5))
        return found

    net = alone_after(3)
    for found in in_threads(CASES[text], work):
        if text in GATHERED:
            assert torch.allclose(found[0], net(INPUTS), rtol=1e-9)
            assert torch.allclose(found[1], net[:4](INPUTS), rtol=1e-9)
        else:
            assert "session.whole_model()" in found


@pytest.mark.parametrize("text", GATHERED)
@pytest.mark.parametrize("meanwhile", ["step", "state", "end"])
def test_one_worker_that_calls_the_model_alone_hears_of_it_as_do_the_others(
    text: str, meanwhile: str
) -> None:
    uses: dict[str, Callable[[Session], Any]] = {
        "model": lambda session: session.model(INPUTS),
        "step": lambda session: train(session, batches()[2:3]),
        "state": lambda session: session.model_state(),
        "end": lambda session: session.finish(),
    }

    def work(world: World) -> str:
        session = make_session(world, text)
        train(session, batches()[:2])
        with pytest.raises(UsageError) as refused:
            uses[meanwhile if world.rank else "model"](session)
        return str(refused.value)

    for message in in_threads(CASES[text], work):
        assert "worker 0 used the model outside of a step" in message
        assert "session.whole_model()" in message


def test_workers_of_a_model_in_slices_call_it_with_the_same_inputs() -> None:
    def work(world: World) -> None:
        session = make_session(world, "tensor")
        with pytest.raises(UsageError, match=r"were given different samples.*session.evaluate"):
            session.model(INPUTS + world.rank)

    in_threads(2, work)


def test_one_worker_of_a_model_in_slices_that_evaluates_alone_is_told() -> None:
    data = TensorDataset(*batches()[3])

    def work(world: World) -> None:
        session = make_session(world, "tensor")
        with pytest.raises(UsageError, match=r"worker 0 called evaluate\(\), worker 1 called step\(\)"):
            session.evaluate(data) if world.rank == 0 else train(session, batches()[:1])

    in_threads(2, work)


@pytest.mark.parametrize("text", ["tensor", "pipeline", "hybrid"])
def test_workers_of_one_replica_train_on_the_same_batches(text: str) -> None:
    """Other numbers of the same shape are noticed as well."""

    def work(world: World) -> None:
        session = make_session(world, text)
        inputs, targets = batches()[0]
        with pytest.raises(UsageError, match=r"were given different samples.*session.batches"):
            session.step((inputs + world.rank, targets))

    in_threads(4 if text == "hybrid" else 2, work)


@pytest.mark.parametrize("text", GATHERED)
def test_gradients_pass_through_a_model_that_is_not_trained_in_this_step(text: str) -> None:
    """As a generator learns from a discriminator: of which no gradient is left over."""

    def work(world: World) -> nn.Module:
        judge = make_session(world, text)
        train(judge, batches()[:1])
        net = filled(nn.Linear(16, 16).double(), 7, 0.3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def pleased(model: nn.Module, batch: Any) -> Tensor:
            drawn = model(batch[0].flatten(1)).view(-1, 1, 4, 4)
            return F.cross_entropy(judge.model(drawn), batch[1])

        session = session_of(net, optimizer, pleased, world=world, placement=text)
        for batch in batches()[1:3]:
            train(session, [batch])
            train(judge, [batch])
        session.close()
        judge.close()
        close_to(judge.model, alone_after(3))
        return net

    judge = make_net()
    made = momentum(judge)
    net = filled(nn.Linear(16, 16).double(), 7, 0.3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(batches()[:3]):
        if number:
            optimizer.zero_grad()
            F.cross_entropy(judge(net(inputs.flatten(1)).view(-1, 1, 4, 4)), targets).backward()
            optimizer.step()
        made.zero_grad()
        F.cross_entropy(judge(inputs), targets).backward()
        made.step()
    for found in in_threads(2, work):
        close_to(found, net)


# Parameters in the loss


def penalised(model: nn.Module, batch: Any) -> Tensor:
    penalty = sum((param**2).sum() for param in model.parameters())
    drift = torch.cat([param.view(-1) for param in model.parameters()]).abs().mean()
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-2 * penalty + 1e-2 * drift


@pytest.mark.parametrize("text", [*CASES, "tensor:ways=3", "sharded:shards=2"])
def test_a_penalty_on_parameters_is_that_of_all(text: str) -> None:
    workers = {"tensor:ways=3": 3, "sharded:shards=2": 4}.get(text) or CASES[text]

    def work(world: World) -> Any:
        net = make_net()
        session = session_of(net, momentum(net), penalised, world=world, placement=text, example=batches()[0])
        try:
            losses = train(session, batches()[:4])
        except ManyhandsError as error:
            return str(error)
        session.close()
        return session.model, losses

    net = make_net()
    optimizer = momentum(net)
    for batch in batches()[:4]:
        optimizer.zero_grad()
        value = penalised(net, batch)
        value.backward()
        optimizer.step()
    results = in_threads(workers, work)
    for found, _ in results:
        close_to(found, net)
    assert sum(losses[-1] for _, losses in results) / workers == pytest.approx(value.item(), rel=1e-9)


# Processes: what was a segmentation fault, and what waited for ever

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import manyhands as mh

torch.manual_seed(0)
inputs = torch.randn(8, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
loss = lambda model, batch: F.mse_loss(model(batch), batch[:, :2])
session = mh.session(model, torch.optim.Adam(model.parameters()), loss, example=inputs)
session.step(inputs)
if sys.argv[1] == "read":
    print(sum(param.norm() for param in model.parameters()).item())
elif mh.rank() == 0:
    model(inputs)
session.step(inputs)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("text", "use"), [("sharded", "read"), ("sharded", "alone"), ("tensor", "alone")])
def test_a_run_ends_with_a_sentence(text: str, use: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = manyhands("launch", "--workers", "2", "--placement", text, "script.py", use, cwd=tmp_path)
    line = done.refusal()
    assert "session.whole_model()" in line
    assert ("used the model outside of a step" in line) == (use == "alone")
