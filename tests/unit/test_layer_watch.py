"""Weights and gradients by layer: what is recorded is right, and looking changes nothing."""

import math
import random
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands import telemetry
from manyhands.job.layer_watch import BINS, LayerWatch
from manyhands.telemetry import lines
from manyhands.telemetry.read import read

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))


def batch() -> Batch:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(2)), torch.arange(16) % 3


def seen(folder: Path, model: nn.Module, steps: range, every: int) -> list[lines.Record]:
    telemetry.open(folder / "events" / "worker-0.jsonl", rank=0)
    watch = LayerWatch(model, loss, every)
    for step in steps:
        watch.see(step, 0, batch())
    telemetry.close()
    return [record for record in read(folder) if record["kind"] == "layers"]


def test_norms_and_histograms_are_those_of_autograd(tmp_path: Path) -> None:
    model = net()
    torch.manual_seed(3)
    (record,) = seen(tmp_path, model, range(1, 8), every=5)
    assert record["step"] == 5
    torch.manual_seed(3)  # the same dropout
    loss(model, batch()).backward()
    by_name = {layer["name"]: layer for layer in record["layers"]}
    assert by_name.keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        for what, values in (("weight", param.detach()), ("gradient", param.grad)):
            assert values is not None
            layer = by_name[name]
            assert layer[f"{what}_norm"] == pytest.approx(float(values.norm()), rel=1e-5)
            counts = layer[f"{what}_counts"]
            assert sum(counts) == values.numel()
            if len(counts) == BINS:
                low, high = layer[f"{what}_range"]
                assert (low, high) == pytest.approx((float(values.min()), float(values.max())))


def test_looking_changes_nothing(tmp_path: Path) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    versions = {name: value._version for name, value in model.state_dict(keep_vars=True).items()}
    numbers = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    seen(tmp_path, model, range(1, 3), every=1)
    assert all(before[name].equal(value) for name, value in model.state_dict().items())
    assert versions == {name: value._version for name, value in model.state_dict(keep_vars=True).items()}
    assert torch.get_rng_state().equal(numbers[0])
    assert random.getstate() == numbers[1]
    assert (numpy.random.get_state()[1] == numbers[2]).all()
    assert all(param.grad is None for param in model.parameters())


def test_what_is_no_number_and_what_has_no_gradient(tmp_path: Path) -> None:
    model = net()
    model.unused = nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        model[3].weight[0, 0] = math.nan
    (record,) = seen(tmp_path, model, range(1, 2), every=1)
    by_name = {layer["name"]: layer for layer in record["layers"]}
    assert math.isnan(by_name["3.weight"]["weight_norm"])
    assert "weight_counts" not in by_name["3.weight"]
    assert by_name["unused"].keys() == {"name", "weight_norm", "weight_range", "weight_counts"}
