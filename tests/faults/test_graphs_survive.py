"""A worker dies while the others hold a graph that their script has made before: they go back through it, rightly."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.end_to_end.commands import manyhands
from tests.pages import ROOT

STEPS, DEATH = 8, 3

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
import manyhands as mh
from tests.faults.test_graphs_survive import DEATH, STEPS, batch, losses_of, made

nets, optimizers = made()
sessions = [mh.session(net, optimizer, lambda model, batch: 0) for net, optimizer in zip(nets, optimizers)]
first, second = sessions
for step in range(STEPS):
    here = (first.rank, first.workers)
    noise, real = batch(step, *here)
    fake = nets[0](noise)  # its graph leads through the first session's parameters, and outlives the death
    if step == DEATH and first.workers == 2 and first.rank == 1:
        print("killed", flush=True)
        os.kill(os.getpid(), 9)
    judged, made_up = losses_of(*nets, fake, real)
    second.backward(judged(), samples=len(noise))
    second.update()
    first.backward(made_up(), samples=len(noise))
    first.update()
torch.save([param.detach().clone() for net in nets for param in net.parameters()], sys.argv[1])
"""


def made() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    shapes = ((4, 8, 2), (2, 8, 1))
    nets: list[nn.Module] = [nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)) for a, b, c in shapes]
    return nets, [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]


def batch(step: int, rank: int, workers: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    both = torch.randn(16, 6, generator=numbers)[rank::workers]
    return both[:, :4], both[:, 4:]


def losses_of(first: nn.Module, second: nn.Module, fake: Tensor, real: Tensor):  # type: ignore[no-untyped-def]
    def judged() -> Tensor:
        return functional.softplus(-second(real)).mean() + functional.softplus(second(fake.detach())).mean()

    return judged, lambda: functional.softplus(-second(fake)).mean()


def alone() -> list[Tensor]:
    """One process with the samples that the workers had: in the step of the death, those of the one that is left."""
    nets, (first, second) = made()
    for step in range(STEPS):
        noise, real = batch(step, 0, 2 if step == DEATH else 1)
        fake = nets[0](noise)
        judged, made_up = losses_of(*nets, fake, real)
        for optimizer, loss in ((second, judged), (first, made_up)):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    return [param.detach() for net in nets for param in net.parameters()]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["all-reduce", "ring", "parameter-server:sync"])
def test_a_graph_of_before_a_death_still_gives_the_gradient(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "gan.py").write_text(SCRIPT)
    left = tmp_path / "left.pt"
    servers = ["--servers", "1"] if "server" in strategy else []
    words = ["launch", "--workers", "2", *servers, "--strategy", strategy, "gan.py", str(left)]
    done = manyhands(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "worker 1 died (killed by SIGKILL)" in done.out + done.err
    for mine, other in zip(torch.load(left), alone(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
