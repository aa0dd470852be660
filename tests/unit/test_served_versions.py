"""Versions in memory: which code may run, what is refused for good, and what a language model takes."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from manyhands import checkpoint, models
from manyhands.checkpoint import tensor_file
from manyhands.errors import CheckpointError, UsageError
from manyhands.job.plan import Plan
from manyhands.serving import version_folder
from manyhands.serving.description import Description, TensorForm
from manyhands.serving.exporting import export
from manyhands.serving.served_model import load

OWN = "tests.unit.test_served_versions:own"
made = []


def own(shape: tuple[int, ...], classes: int) -> nn.Module:
    made.append(classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, classes))


def described(model: str, classes: int = 2) -> Description:
    return Description(
        model=model,
        task="classify",
        input=TensorForm(name="input", type="FP32", shape=(-1, 1, 2, 2)),
        output=TensorForm(name="output", type="FP32", shape=(-1, classes)),
        classes=classes,
    )


def written(folder: Path, form: Description, module: nn.Module) -> Path:
    files = {
        "weights.safetensors": tensor_file.encode(module.state_dict()),
        "description.json": [form.encode()],
    }
    return version_folder.write(folder, 1, 0, files)


def test_code_that_a_version_names_runs_only_if_it_is_allowed_by_name(tmp_path: Path) -> None:
    place = written(tmp_path, described(OWN), own((1, 2, 2), 2))
    made.clear()
    for allowed in ((), ("tests.unit.test_served_versions:other",), ("tests.unit.test_served_versions",)):
        with pytest.raises(UsageError, match=f"add --allow {OWN}"):
            load(place, allowed)
    assert made == []
    found = load(place, (OWN,))
    found.warm_up([1, 3])
    assert made == [2]
    assert found.run(torch.ones(3, 1, 2, 2)).shape == (3, 2)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    place = written(tmp_path, described("mlp"), models.build("mlp", (1, 2, 2), 3))
    with pytest.raises(UsageError, match="its weights are not those of mlp"):
        load(place)


def test_a_version_that_gives_another_shape_or_no_numbers_is_refused(tmp_path: Path) -> None:
    module = models.build("mlp", (1, 2, 2), 2)
    form = msgspec.structs.replace(
        described("mlp"), output=TensorForm(name="output", type="FP32", shape=(-1, 5))
    )
    with pytest.raises(UsageError, match=r"it gives \[1, 2\] for 1 samples"):
        load(written(tmp_path / "a", form, module)).warm_up([1])
    module.get_parameter("output.bias").data.fill_(float("nan"))
    place = written(tmp_path / "b", described("mlp"), module)
    sample = {"inputs": torch.ones(2, 1, 2, 2), "targets": torch.zeros(2, dtype=torch.int64)}
    checkpoint.save_weights(place / "sample.safetensors", sample)
    with pytest.raises(UsageError, match="not finite"):
        load(place).accuracy()


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    place = written(tmp_path, described("mlp"), models.build("mlp", (1, 2, 2), 2))
    for name in ("weights.safetensors", "description.json", "manifest.json"):
        content = (place / name).read_bytes()
        (place / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        with pytest.raises(CheckpointError):
            load(place)
        (place / name).write_bytes(content)
    load(place)


def test_a_language_model_takes_texts_up_to_the_length_it_was_trained_on(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 40)
    plan = Plan(model="transformer:layers=1,width=16,heads=2", data=f"text:{tmp_path / 'text'},length=8")
    module = models.build(plan.model, (8,), 256)
    tensors = {f"model/{name}": value for name, value in module.state_dict().items()}
    record = {"plan": msgspec.to_builtins(plan), "steps": 7}
    checkpoint.save(tmp_path / "run" / "checkpoints", step=7, tensors=tensors, record=record)
    place, form = export(tmp_path / "run", tmp_path / "models")
    assert (form.input.shape, form.output.shape) == ((-1, -1), (-1, -1, 256))
    assert (form.input.type, form.most_tokens, form.picture, form.step) == ("INT64", 8, None, 7)
    found = load(place)
    tokens = torch.randint(256, (2, 5))
    assert torch.equal(found.run(tokens), module.eval()(tokens))
    assert found.accuracy() == form.accuracy


def test_a_checkpoint_that_a_script_saved_does_not_say_what_it_is(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoints", step=1, tensors={}, record={"plan": None})
    with pytest.raises(CheckpointError, match="serve runs of `manyhands train`"):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
