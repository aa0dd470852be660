"""Strategies that do not wait, or meet in pairs, over emulated hosts and with uneven data: nobody hangs, all agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.lab import emulated_hosts
from tests.end_to_end.on_hosts import places, run_on_hosts

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

LAYOUT = (2, 1)  # workers by host

# Every strategy in turn, in one world; worker 1 has no data at all and the other host has much more than the first.
SCRIPT = """
import json, torch, manyhands as mh
from manyhands.comm.shared import SharedComm
from manyhands.strategies.hogwild import Hogwild

torch.set_num_threads(1)
rounds = 0
begin = Hogwild._begin_round

def counted(*arguments):
    global rounds
    rounds += 1
    begin(*arguments)

Hogwild._begin_round = counted
meetings = []
start_swap = SharedComm.start_swap

def noted(comm, peer, vector):
    meetings.append(peer)
    start_swap(comm, peer, vector)

SharedComm.start_swap = noted

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

def train(strategy):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    session = mh.session(net, torch.optim.SGD(net.parameters(), lr=0.02), loss, strategy=strategy)
    rank = session.rank
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    batch = inputs, inputs.sum(1, keepdim=True)
    seen = [session.evaluate(list(zip(*batch)))["loss"]]
    for _ in range(2):
        for part in session.batches([batch] * [5, 0, 43][rank]):
            session.step(part)
        seen.append(session.evaluate(list(zip(*batch)))["loss"])
    session.close()
    params = torch.cat([param.detach().flatten() for param in net.parameters()])
    return {"params": params.numpy().tobytes().hex(), "loss": seen, "samples": session.samples}

said = {}
for strategy in STRATEGIES:
    said[strategy] = train(strategy)
said["rounds"] = rounds
said["meetings"] = meetings
print(json.dumps(said))
"""
STRATEGIES = ["hogwild", "hogwild:average_every=2", "gossip:every=2", "tournament:every=3", "ad-psgd"]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every worker said, by rank."""
    script = Path(tmp_path_factory.mktemp("hosts")) / "script.py"
    script.write_text(f"STRATEGIES = {STRATEGIES}\n{SCRIPT}")
    ended = run_on_hosts([str(script)], places(LAYOUT), script.parent)
    return [json.loads(said) for said in ended.said]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_end_alike_and_have_learned(said: list[dict[str, Any]], strategy: str) -> None:
    results = [worker[strategy] for worker in said]
    assert len({result["params"] for result in results}) == 1
    assert {result["samples"] for result in results} == {2 * (5 + 0 + 43) * 8}
    first, *_, last = results[0]["loss"]
    assert last < first / 3


def test_hosts_average_now_and_then(said: list[dict[str, Any]]) -> None:
    """The first host's leader takes 5 steps in an epoch and begins a round every 2; a pause completes the last one."""
    rounds = [worker["rounds"] for worker in said]
    assert rounds[1] == 0, "only the first worker of a host speaks for it"
    assert rounds[0] == rounds[2] >= 2


def test_those_who_do_not_wait_meet_between_hosts_too(said: list[dict[str, Any]]) -> None:
    """Worker 2 is alone on its host; worker 1, which has no data, is met at pauses. Both sides know of a meeting."""
    first, second, other = (worker["meetings"] for worker in said)
    assert set(first) == set(second) == {2}
    assert sorted(other) == [0] * len(first) + [1] * len(second)
