"""A version in memory: a model that computes, and what it takes and gives. The only file of a server that runs models.

A version is what `manyhands export` wrote, or a checkpoint of a run, whose plan says the rest.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from manyhands import data, models, spec
from manyhands.checkpoint import record_file, tensor_file
from manyhands.checkpoint.publish import RECORD, TENSORS, WEIGHTS
from manyhands.data import Data, Samples, StoredSet, gather
from manyhands.data.transforms import Normalize, Scale
from manyhands.errors import UsageError
from manyhands.job.initial_weights import of_model
from manyhands.job.plan import Plan
from manyhands.serving import description, version_folder
from manyhands.serving.description import FREE, Description, PictureForm, TensorForm

SAMPLES = 256
"""Of the held-out part: enough to see a version that is much worse, few enough to try in well under a second."""
_SAMPLE_BYTES = 16 << 20
_TRIED_ROWS = 64  # at once, when the sample is tried
_TYPES = {"FP32": torch.float32, "INT64": torch.int64}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Recorded inputs and targets."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One version, ready to compute."""

    module: nn.Module
    form: Description
    sample: Sample | None

    def run(self, inputs: Tensor) -> Tensor:
        """The outputs for a batch of inputs."""
        with torch.inference_mode():
            outputs = self.module(inputs)
        if not isinstance(outputs, Tensor):
            raise UsageError(
                f"model {self.form.model!r} returned a {type(outputs).__name__}, not a tensor with a row per sample"
            )
        return outputs.to(_TYPES[self.form.output.type]).contiguous()

    def accuracy(self) -> float | None:
        """On the recorded sample; outputs that are no numbers are an error."""
        if self.sample is None:
            return None
        right = total = 0
        rows = zip(self.sample.inputs.split(_TRIED_ROWS), self.sample.targets.split(_TRIED_ROWS), strict=True)
        for inputs, targets in rows:
            outputs = self.run(inputs)
            if not torch.isfinite(outputs).all():
                raise UsageError("on the recorded sample it answers with numbers that are not finite")
            right += int((outputs.argmax(-1) == targets).sum())
            total += targets.numel()
        return right / total

    def warm_up(self, sizes: Collection[int]) -> None:
        """A first batch of each of these sizes, since first ones are slow; it must have the shape that is described."""
        for size in sizes:
            shape = [
                self.form.most_tokens or 1 if length == FREE else length for length in self.form.row_shape
            ]
            outputs = self.run(torch.zeros(size, *shape, dtype=_TYPES[self.form.input.type]))
            expected = [shape[0] if length == FREE else length for length in self.form.output.shape[1:]]
            if list(outputs.shape) != [size, *expected]:
                raise UsageError(
                    f"it gives {list(outputs.shape)} for {size} samples, and its description says {[size, *expected]}"
                )


def load(folder: Path, allowed: Collection[str] = ()) -> ServedModel:
    """The version in a folder; code that it names runs only if `allowed` has the name.

    A damaged folder is a CheckpointError, and may become whole; what is whole and cannot be served is a UsageError.
    """
    version_folder.verified(folder)
    if version_folder.is_checkpoint(folder):
        return _of_checkpoint(folder, allowed)
    form = description.read(folder)
    shape = form.row_shape if form.task == "classify" else (form.most_tokens or 1,)
    module = _module(form.model, shape, form.classes, tensor_file.decode(folder / WEIGHTS), allowed)
    sample = None
    if (folder / version_folder.SAMPLE).exists():
        found = tensor_file.decode(folder / version_folder.SAMPLE)
        sample = Sample(inputs=found["inputs"].clone(), targets=found["targets"].clone())
    return ServedModel(module=module, form=form, sample=sample)


def _of_checkpoint(folder: Path, allowed: Collection[str]) -> ServedModel:
    """What a run has saved: its plan names the model and the data, and the data says what goes in and comes out."""
    record = record_file.decode(folder / RECORD)
    try:
        plan = msgspec.convert(record.get("plan"), Plan)
    except msgspec.ValidationError:
        raise UsageError(
            "it was saved by a script, so it does not say which model it is of; serve runs of `manyhands train`"
        ) from None
    _admit("data", plan.data, data.DATASETS, allowed)
    samples = data.load(plan.data, seed=plan.train.seed, size=plan.train.size)
    tensors = of_model(tensor_file.decode(folder / TENSORS))
    module = _module(plan.model, samples.shape, samples.classes, tensors, allowed)
    sample = _recorded(samples.test)
    form = _described(plan, samples, sample, int(record.get("steps", 0)))
    found = ServedModel(module=module, form=form, sample=sample)
    return ServedModel(
        module=module, form=msgspec.structs.replace(form, accuracy=found.accuracy()), sample=sample
    )


def _admit(kind: str, text: str, known: Collection[str], allowed: Collection[str]) -> None:
    """Refuse to run code that a version names, unless the person who serves it has named it, too."""
    if spec.split(text)[0] not in known and text not in allowed:
        raise UsageError(
            f"it wants to run {text} to make its {kind}; if you trust that code, add --allow {text}"
        )


def _module(
    text: str, shape: tuple[int, ...], classes: int, tensors: Tensors, allowed: Collection[str]
) -> nn.Module:
    """The model with these weights; all names and shapes must be the same."""
    _admit("model", text, models.MODELS, allowed)
    if spec.split(text)[0] in models.MODELS:
        with torch.device("meta"):  # without values that would be replaced at once
            module = models.build(text, shape, classes)
    else:
        module = models.build(text, shape, classes)
    try:
        # Copies: a file that is changed while it is mapped would change the model, or end the process.
        module.load_state_dict({name: value.clone() for name, value in tensors.items()}, assign=True)
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise UsageError(f"its weights are not those of {text}: {said[:500]}") from None
    return module.eval().requires_grad_(False)


def _described(plan: Plan, samples: Data, sample: Sample, step: int) -> Description:
    is_text = samples.task == "next-token"
    inputs = sample.inputs
    row: tuple[int, ...] = (FREE,) if is_text else tuple(inputs.shape[1:])
    if inputs.dtype not in _NAMES:
        raise UsageError(f"its inputs are {inputs.dtype}; models on {' or '.join(_TYPES)} can be served")
    outputs = (FREE, FREE, samples.classes) if is_text else (FREE, samples.classes)
    return Description(
        model=plan.model,
        task="next-token" if is_text else "classify",
        input=TensorForm(name="input", type=_NAMES[inputs.dtype], shape=(FREE, *row)),  # type: ignore[arg-type]
        output=TensorForm(name="output", type="FP32", shape=outputs),
        classes=samples.classes,
        class_names=samples.class_names,
        picture=_picture(samples),
        most_tokens=math.prod(samples.shape) if is_text else None,
        step=step,
        plan=msgspec.to_builtins(plan),
    )


def _picture(samples: Data) -> PictureForm | None:
    """What training does to a picture, if it is known and the same for all of them."""
    if len(samples.shape) != 3 or samples.shape[0] not in (1, 3) or not isinstance(samples.test, StoredSet):
        return None
    steps = samples.test.transforms
    if not any(isinstance(step, Scale) for step in steps):
        return None
    normal = next((step for step in steps if isinstance(step, Normalize)), None)
    channels, height, width = samples.shape
    return PictureForm(
        channels=channels,  # type: ignore[arg-type]
        height=height,
        width=width,
        mean=normal.mean if normal else (),
        deviation=normal.deviation if normal else (),
    )


def _recorded(test: Samples) -> Sample:
    """Some of the held-out part, evenly from all of it."""
    first: Any = gather(test, torch.arange(1), epoch=0)
    row_bytes = first[0].numel() * first[0].element_size()
    count = max(1, min(SAMPLES, len(test), _SAMPLE_BYTES // row_bytes))
    places = torch.linspace(0, len(test) - 1, count, dtype=torch.float64).long()
    inputs, targets = gather(test, places, epoch=0)
    return Sample(inputs=inputs.contiguous(), targets=targets.contiguous())
