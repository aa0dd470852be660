"""`manyhands train` over emulated hosts: the same result as on one host, and the bytes it says it sends."""

import json
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.lab import emulated_hosts
from tests.end_to_end.commands import (
    BIN,
    TIMEOUT_S,
    assert_close,
    clean_environment,
    manyhands,
    on_one_host,
    parameters,
)
from tests.end_to_end.on_hosts import places, run_on_hosts

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# 1.5 million parameters, 5.9 MB: small enough to be quick, large enough for the gradients to be most of the bytes.
TRAIN = ["train", "--model", "mlp:hidden=1280-1024", "--steps", "8", "--batch", "16"]
PARAMETER_BYTES = 4 * (64 * 1280 + 1280 + 1280 * 1024 + 1024 + 1024 * 10 + 10)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on emulated hosts, one of the layouts below."""

    out: Path
    workers: int
    summary: dict[str, Any]
    sent_bytes: list[int]
    """By host, as its network interface counted them."""


@pytest.fixture(scope="module", params=[(3, 1), (1, 1)], ids=["3+1", "1+1"])
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return on_hosts(request.param, TRAIN, tmp_path_factory.mktemp("hosts"))


def on_hosts(layout: tuple[int, ...], words: list[str], folder: Path) -> Run:
    """`manyhands` with these words, training, in every worker of emulated hosts, so many workers on each."""
    ended = run_on_hosts([*words, "--json", "--out", "run"], places(layout), folder)
    said = ended.said
    assert [out != "" for out in said] == [rank == 0 for rank in range(len(said))]
    summary = json.loads(said[0])
    return Run(out=folder / "run", workers=len(said), summary=summary, sent_bytes=ended.sent_bytes)


def test_hosts_are_found(emulated: Run) -> None:
    assert emulated.summary["hosts"] == 2
    assert emulated.summary["workers"] == emulated.workers
    assert emulated.summary["steps"] == 8
    assert emulated.summary["samples"] == 8 * 16 * emulated.workers


def test_the_result_is_that_of_one_host(emulated: Run) -> None:
    theirs, alone = on_one_host(*TRAIN, workers=emulated.workers)
    assert emulated.summary["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert alone["hosts"] == 1
    assert alone["bytes_sent"] == 0
    assert_close(parameters(emulated.out), theirs)


def test_the_bytes_are_those_of_the_network_interface(emulated: Run) -> None:
    assert emulated.summary["bytes_sent"] == pytest.approx(sum(emulated.sent_bytes), rel=0.15)
    for sent in emulated.sent_bytes:
        in_steps = sent - PARAMETER_BYTES  # before the first one, all parameters
        assert in_steps < 8 * PARAMETER_BYTES / 5, "the largest layer's gradients leave as factors"
        assert in_steps > 8 * (PARAMETER_BYTES - 4 * 1280 * 1024), "and all others as they are"


def test_train_with_a_launcher_on_each_host_is_the_same(tmp_path: Path) -> None:
    """Who comes later settles with the others how high the rate is: it is that of four workers."""
    out = tmp_path / "run"
    with ExitStack() as stack:
        net = stack.enter_context(emulated_hosts.EmulatedHosts(2))

        def start(host: int, *words: str) -> subprocess.Popen[str]:
            command = [*net.command_prefix(host), str(BIN / "manyhands"), *words]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            one = subprocess.Popen(command, env=clean_environment(), text=True, **pipes)  # type: ignore[call-overload]
            stack.callback(one.communicate)
            stack.callback(one.kill)
            return one

        first = start(0, *TRAIN, "--hosts", f"2@{net.address(0)}", *f"--workers 3 --json --out {out}".split())
        while first.poll() is None and not (out / "join.json").exists():
            time.sleep(0.02)
        other = start(1, "launch", "--join", str(out), "--workers", "1")
        said, errors = first.communicate(timeout=TIMEOUT_S)
        assert (first.returncode, other.wait(20)) == (0, 0), errors
    theirs, alone = on_one_host(*TRAIN, workers=4)
    assert_close(parameters(out), theirs)
    summary = json.loads(said)
    assert (summary["hosts"], summary["workers"], summary["samples"]) == (2, 4, alone["samples"])
    assert "learning rate 0.1: 4 times the 0.025 of one worker" in errors
    assert json.loads((out / "plan.json").read_text())["cluster"]["workers"] == 3, (
        "of this host: to do it again"
    )


SKIPPING = """
import random, sys, torch
from torch import nn
import manyhands as mh

class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 2500), nn.Linear(2500, 2)
        self.middle = nn.ModuleList(nn.Linear(2500, 2500, bias=False) for _ in range(3))

    def forward(self, inputs):
        hidden = self.first(inputs)
        for layer in self.middle[:2]:  # the third is never used by anyone
            if chance.random() < 0.4:
                hidden = torch.tanh(layer(hidden))
        return self.last(hidden)

torch.manual_seed(0)
model = Skipping()
session = mh.session(
    model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lambda m, b: m(b).square().mean(), clip_norm=0.05
)
chance = random.Random(session.rank)
for step in range(6):
    generator = torch.Generator().manual_seed(10 * step + session.rank)
    session.step(torch.randn(4 + session.rank, 8, generator=generator))
session.close()
if session.rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
"""


def test_layers_skipped_at_random_and_clipping_give_the_same_on_3_and_1_workers_of_two_hosts(
    tmp_path: Path,
) -> None:
    (tmp_path / "skipping.py").write_text(SKIPPING)
    run_on_hosts(["launch", "skipping.py", "hosts.pt"], places((3, 1)), tmp_path)
    done = manyhands("launch", "--workers", "4", "skipping.py", "alone.pt", cwd=tmp_path)
    assert done.code == 0, done.err
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("hosts.pt", "alone.pt"))
    assert_close(ours, theirs)


NORMS = """
import sys
import torch
from torch import nn
import manyhands as mh
from manyhands.errors import PeerLost, UsageError

torch.manual_seed(0)
layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6)
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers)).double()
differs = int(sys.argv[2])

def loss(model, batch):
    found = model(batch)
    if mh.rank() == differs and session.steps == 1:
        found = found + model[1](model[0](batch)).sum()
    return (found - batch.cumsum(1)[:, -1:]).square().mean()

session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
try:
    for step in range(8):
        generator = torch.Generator().manual_seed(10 * step + session.rank)
        samples = (step + session.rank) % 4  # at times none
        session.step(torch.randn(samples, 4, generator=generator, dtype=torch.float64))
except UsageError as error:
    print(error)
except PeerLost:  # another worker has ended by it first
    print("lost")
session.close()
if session.rank == 0:
    torch.save({name: value.double() for name, value in model.state_dict().items()}, sys.argv[1])
"""


def test_batch_norm_goes_by_the_samples_of_all_hosts(tmp_path: Path) -> None:
    (tmp_path / "norms.py").write_text(NORMS)
    run_on_hosts(["norms.py", "hosts.pt", "-1"], places((2, 1, 2)), tmp_path)
    done = manyhands("launch", "--workers", "5", "norms.py", "alone.pt", "-1", cwd=tmp_path)
    assert done.code == 0, done.err
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("hosts.pt", "alone.pt"))
    assert_close(ours, theirs)


def test_hosts_that_call_layers_differently_end_with_their_names(tmp_path: Path) -> None:
    """The worker is the second of its host, where another one speaks for it."""
    (tmp_path / "norms.py").write_text(NORMS)
    ended = run_on_hosts(["norms.py", "hosts.pt", "1"], places((2, 1)), tmp_path)
    reasons = [said for said in ended.said if said.strip() != "lost"]
    assert reasons
    for said in reasons:
        assert "workers disagree: worker 0 was in the " in said
        assert "while worker 1 was in the " in said


@pytest.mark.parametrize(
    ("layout", "strategy", "the_same_on_one_host"),
    [
        (
            (2, 2),
            "hierarchical-local-sgd:local_period=1,global_period=4",
            "hierarchical-local-sgd:local_period=1,global_period=4,groups=2",
        ),
        ((2, 1), "double-buffer", "double-buffer"),
    ],
)
def test_strategies_with_replicas_of_their_own(
    layout: tuple[int, ...], strategy: str, the_same_on_one_host: str, tmp_path: Path
) -> None:
    """Hosts are groups, and sums go on in the background between hosts as well."""
    words = ["train", "--model", "mlp:hidden=64", "--steps", "7", "--batch", "16", "--strategy"]
    ended = run_on_hosts([*words, strategy, "--json", "--out", "run"], places(layout), tmp_path)
    assert json.loads(ended.said[0])["hosts"] == 2
    theirs, _ = on_one_host(*words, the_same_on_one_host, workers=sum(layout))
    assert_close(parameters(tmp_path / "run"), theirs)
