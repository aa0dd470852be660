"""Servers on emulated hosts: beside workers, among them, or on hosts of their own; the result is that of one host."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from manyhands.lab import emulated_hosts
from tests.end_to_end.commands import BIN, assert_close, on_one_host, parameters, run
from tests.end_to_end.on_hosts import run_on_hosts
from tests.end_to_end.test_hosts import PARAMETER_BYTES, TRAIN

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

STEPS = 8


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run on emulated hosts."""

    out: Path
    summary: dict[str, Any]
    sent_bytes: list[int]
    """By host, as its network interface counted them."""


def train(
    folder: Path, workers: list[int], servers: list[int], strategy: str, words: list[str] = TRAIN
) -> Ended:
    """Each worker and each server on the host of that number."""
    folder.mkdir(exist_ok=True)
    asked = ["--strategy", strategy, "--servers", str(len(servers)), "--json", "--out", "run"]
    ended = run_on_hosts([*words, *asked], [*workers, *servers], folder, servers=len(servers))
    return Ended(out=folder / "run", summary=json.loads(ended.said[0]), sent_bytes=ended.sent_bytes)


@pytest.mark.parametrize(
    ("workers", "servers", "strategy"),
    [
        ([0, 0, 1], [0, 2], "parameter-server"),
        ([0, 0], [1, 2], "parameter-server"),
        ([0, 0, 1], [1], "parameter-server:cache=true"),
    ],
    ids=["beside some", "on their own", "one push per host"],
)
def test_sync_gives_the_result_of_one_host(
    workers: list[int], servers: list[int], strategy: str, tmp_path: Path
) -> None:
    ended = train(tmp_path / "hosts", workers, servers, strategy)
    assert_close(parameters(ended.out), on_one_host(*TRAIN, workers=len(workers))[0])
    assert ended.summary["staleness"]["max"] == 0
    assert ended.summary["servers"] == len(servers)
    assert ended.summary["samples"] == STEPS * 16 * len(workers)


def test_parts_of_a_replica_may_have_their_servers_on_other_hosts(tmp_path: Path) -> None:
    """A pipeline on each host; the servers of the first stage are on the second host, and the other way round."""
    words = [*TRAIN, "--placement", "pipeline:microbatches=2"]
    ended = train(tmp_path / "hosts", [0, 0, 1, 1], [1, 0], "parameter-server", words)
    assert_close(parameters(ended.out), on_one_host(*TRAIN, workers=2)[0])
    assert ended.summary["servers"] == 2


def test_with_a_cache_the_bytes_do_not_grow_with_the_workers_of_a_host(tmp_path: Path) -> None:
    ended = train(tmp_path / "hosts", [0, 0], [1], "two-level")
    state = 2 * PARAMETER_BYTES  # at the start and for the checkpoint, momentum included
    assert STEPS * PARAMETER_BYTES < ended.sent_bytes[0] < 1.2 * STEPS * PARAMETER_BYTES + state
    assert ended.summary["steps"] == STEPS
    assert ended.summary["samples"] == STEPS * 16 * 2


def test_async_over_the_network_sends_what_it_says(tmp_path: Path) -> None:
    ended = train(tmp_path / "hosts", [0, 1], [2], "parameter-server:async")
    assert ended.summary["steps"] == STEPS
    assert sum(ended.summary["staleness"]["histogram"].values()) == 2 * STEPS * 2  # workers × steps × groups
    assert ended.summary["bytes_sent"] == pytest.approx(sum(ended.sent_bytes), rel=0.15)
    for worker in (0, 1):
        assert ended.sent_bytes[worker] > STEPS * PARAMETER_BYTES, "every step's gradients have left"


def test_server_groups_beside_their_workers_send_each_other_a_fraction_of_what_is_pushed(
    tmp_path: Path,
) -> None:
    strategy = "worker-groups:groups=2,server_groups=2,exchange_every=4"
    ended = train(tmp_path / "hosts", [0, 0, 1, 1], [0, 1], strategy)
    assert ended.summary["samples"] == STEPS * 16 * 4
    assert sum(ended.summary["staleness"]["histogram"].values()) == 4 * STEPS * 2  # workers × steps × groups
    # They exchange twice on the way and twice at the end, and worker 0's first parameters go to all; pushes are 16.
    for sent in ended.sent_bytes:
        assert 4 * PARAMETER_BYTES < sent < 7 * PARAMETER_BYTES


WORDS = """
import torch
from torch import nn

ROWS, COLUMNS = 50_000, 32

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, COLUMNS, sparse=True)
        self.out = nn.Linear(COLUMNS, 4)

    def forward(self, tokens):
        return self.out(torch.tanh(self.table(tokens).mean(1)))

def data():
    tokens = torch.randint(0, ROWS, (600, 5), generator=torch.Generator().manual_seed(2))
    return torch.utils.data.TensorDataset(tokens, tokens.sum(1) % 4)
"""
TABLE_BYTES = 4 * 50_000 * 32
TRAIN_WORDS = [
    *("train", "--model", "words:Model", "--data", "words:data", "--optimizer", "adagrad:lr=0.1"),
    *("--steps", str(STEPS), "--batch", "16"),
]


@pytest.fixture(scope="module")
def whole_table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What two workers of one host make of an ordinary table, with ordinary gradients."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "words.py").write_text(WORDS.replace("sparse=True", "sparse=False"))
    done = run(
        [str(BIN / "manyhands"), *TRAIN_WORDS, "--workers", "2", "--threads", "1", "--out", "run"], folder
    )
    assert done.code == 0, done.err
    return parameters(folder / "run")


@pytest.mark.parametrize(
    ("workers", "servers", "strategy"),
    [([0, 1], [0, 1], "parameter-server"), ([0, 0], [1], "parameter-server:cache=true")],
    ids=["among all", "one push per host"],
)
def test_rows_between_hosts_give_the_result_of_whole_tables_on_one(
    workers: list[int],
    servers: list[int],
    strategy: str,
    whole_table: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    (tmp_path / "words.py").write_text(WORDS)
    ended = train(tmp_path, workers, servers, strategy, TRAIN_WORDS)
    assert_close(parameters(ended.out), whole_table)
    # Servers get what they own from worker 0 at the start, and give it to the other host at pauses. A step moves
    # at most 160 of the 50,000 rows.
    pauses = 3 * TABLE_BYTES if 0 in servers else 0
    assert 0.4 * TABLE_BYTES < ended.sent_bytes[0] < 1.5 * TABLE_BYTES + pauses
    assert 1.5 * TABLE_BYTES + pauses < 0.6 * STEPS * TABLE_BYTES, "whole tables would not be noticed"
