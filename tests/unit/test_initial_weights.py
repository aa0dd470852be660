"""Weights from a file: all of them fit, or what does not is named; a new head is left alone."""

from pathlib import Path

import pytest
import torch
from torch import nn

from manyhands import checkpoint, models
from manyhands.errors import UsageError
from manyhands.job.initial_weights import adopt
from manyhands.job.plan import Plan, Train


def model(classes: int = 10, width: int = 4) -> nn.Module:
    return models.build(f"cnn:width={width}", (1, 8, 8), classes)


def same(one: nn.Module, other: nn.Module, but: str = "nothing") -> bool:
    theirs = other.state_dict()
    return all(
        torch.equal(value, theirs[name]) for name, value in one.state_dict().items() if but not in name
    )


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    found = model()
    checkpoint.save_weights(tmp_path / "a.safetensors", found.state_dict())
    return found, tmp_path / "a.safetensors"


def test_a_file_a_version_a_checkpoint_and_a_run_give_the_same(
    saved: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    before, path = saved
    checkpoint.save_weights(tmp_path / "versions" / "9" / "weights.safetensors", model().state_dict())
    checkpoint.save_weights(tmp_path / "versions" / "10" / "weights.safetensors", before.state_dict())
    tensors = {f"model/{name}": value for name, value in before.state_dict().items()}
    tensors["optimizer/fc5.bias/momentum"] = torch.zeros(10)
    place = checkpoint.save(tmp_path / "run" / "checkpoints", step=3, tensors=tensors, record={})
    for where in (path, tmp_path / "versions", tmp_path / "versions" / "10", tmp_path / "run", place):
        begun = model()
        assert not same(begun, before)
        assert adopt(begun, where) == []
        assert same(begun, before)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": 5}, "conv1.weight is 4×1×3×3 there and 5×1×3×3 here"),
        ({"classes": 3}, "give --head new where only the last layer \\(fc5.weight, fc5.bias\\) differs"),
    ],
)
def test_what_does_not_fit_is_named(saved: tuple[nn.Module, Path], change: dict, reason: str) -> None:
    begun = model(**change)
    before = {name: value.clone() for name, value in begun.state_dict().items()}
    with pytest.raises(UsageError, match=reason):
        adopt(begun, saved[1])
    assert all(torch.equal(before[name], value) for name, value in begun.state_dict().items())


def test_names_that_are_missing_or_unknown_are_listed(saved: tuple[nn.Module, Path]) -> None:
    with pytest.raises(
        UsageError, match=r"the file lacks fc1.weight.*the model lacks conv1.bias.* and 5 more"
    ):
        adopt(models.build("mlp", (1, 8, 8), 10), saved[1])


def test_a_new_head_begins_at_random_and_all_else_must_fit(saved: tuple[nn.Module, Path]) -> None:
    begun = model(classes=3)
    head = begun.get_parameter("fc5.weight").detach().clone()
    assert adopt(begun, saved[1], "new") == ["fc5.weight", "fc5.bias"]
    assert same(begun, saved[0], but="fc5")
    assert torch.equal(begun.get_parameter("fc5.weight"), head)
    with pytest.raises(UsageError, match="conv1"):
        adopt(model(classes=3, width=5), saved[1], "new")


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x80\x04K\x01."])
def test_other_files_are_refused_and_never_unpickled(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="is not a safetensors file"):
        adopt(model(), tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="there are none"):
        adopt(model(), tmp_path)
    with pytest.raises(UsageError, match="there are none"):
        adopt(model(), tmp_path / "nowhere")


def test_a_plan_says_where_weights_come_from() -> None:
    Plan(train=Train(weights="a", head="new")).check()
    with pytest.raises(UsageError, match="--weights"):
        Plan(train=Train(head="new")).check()
    with pytest.raises(UsageError, match="unknown head"):
        Plan(train=Train(weights="a", head="old")).check()
