"""Where `--weights` says: a model that begins with what was trained before, instead of at random."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from manyhands.checkpoint import index, manifest, tensor_file
from manyhands.checkpoint.publish import TENSORS, WEIGHTS
from manyhands.errors import CheckpointError, UsageError

_MOST_NAMED = 5
_OF_THE_MODEL = "model/"  # so a checkpoint calls them, beside those of the optimizer


def adopt(model: nn.Module, path: Path, head: str | None = None) -> list[str]:
    """Give the model the weights in `path`: a safetensors file, an exported version, a checkpoint or a run.

    Every name and shape must fit. With `head="new"` the last layer keeps the values that it begins with, so that it
    may have another number of classes. Returns the names that were left as they were.
    """
    found, place = _read(path)
    left = _of_last_layer(model) if head == "new" else []
    wanted = {name: value for name, value in _state(model).items() if name not in left}
    given = {name: value for name, value in found.items() if name not in left}
    if wrong := _differences(wanted, given):
        way_out = (
            "train the model that these are the weights of"
            if head == "new"
            else f"name the model that these are the weights of, or give --head new where only the last layer "
            f"({', '.join(_of_last_layer(model))}) differs"
        )
        raise UsageError(f"the weights in {place} do not fit this model: {'; '.join(wrong)}; {way_out}")
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(given[name])
    return left


def of_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own tensors among those of a checkpoint; in other files all are."""
    own = {
        name.removeprefix(_OF_THE_MODEL): value
        for name, value in tensors.items()
        if name.startswith(_OF_THE_MODEL)
    }
    return own or dict(tensors)


def _read(path: Path) -> tuple[dict[str, Tensor], Path]:
    place = _file(path)
    try:
        if (place.parent / manifest.MANIFEST).exists():
            manifest.verify(place.parent, manifest.read(place.parent), needed=(place.name,))
        return of_model(tensor_file.decode(place)), place
    except (CheckpointError, OSError) as error:
        raise UsageError(f"the weights in {place} cannot be read: {error}") from None


def _file(path: Path) -> Path:
    """The file of weights that a path leads to."""
    if path.is_file():
        return path
    newest = index.latest(path / "checkpoints")
    versions = [place for place in path.iterdir() if place.name.isdigit()] if path.is_dir() else []
    newest_version = max(versions, key=lambda place: int(place.name), default=None)
    for place in filter(None, (path, newest, newest_version)):
        for name in (WEIGHTS, TENSORS):
            if (place / name).is_file():
                return place / name
    raise UsageError(
        f"--weights {path}: there are none; give a .safetensors file, what `manyhands export` wrote, or a run with "
        "checkpoints"
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _of_last_layer(model: nn.Module) -> list[str]:
    """What belongs to the last module that has parameters of its own."""
    layers = [name for name, layer in model.named_modules() if any(True for _ in layer.parameters(False))]
    return [name for name in _state(model) if layers and name.rpartition(".")[0] == layers[-1]]


def _differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """What does not fit, in a few words each."""
    missing = [name for name in wanted if name not in given]
    unknown = [name for name in given if name not in wanted]
    other = [
        f"{name} is {_shape(given[name])} there and {_shape(wanted[name])} here"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    ]
    said = []
    for what, names in (("the file lacks", missing), ("the model lacks", unknown), ("", other)):
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            said.append(f"{what} {', '.join(names[:_MOST_NAMED])}{more}".strip())
    return said


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "one number"
