"""The page's helper with torch: what models and data there are, what data look like, and what a trained model says.

A process of its own, so that the page never loads torch and a model that goes wrong does not end the page. It reads one
request a line and answers with one line; it ends when the page closes its input.
"""

import base64
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands import data, models
from manyhands.checkpoint import index, manifest, store
from manyhands.checkpoint.weights import save_weights
from manyhands.dashboard.choices import refuse_code
from manyhands.data.randomness import Randomness
from manyhands.data.sets import Data, StoredSet
from manyhands.data.transforms import Scale
from manyhands.errors import ManyhandsError, UsageError
from manyhands.job import declared
from manyhands.job import plan as plans
from manyhands.job.known_names import DATA, MODELS
from manyhands.spec import text

MODEL = "model/"
"""How the names of a model's tensors begin in a checkpoint."""
SHOWN = 24
COUNTED = 20_000
AT_ONCE = 256
TOP = 5


def catalogue(request: dict[str, Any]) -> dict[str, Any]:
    """Models with their settings, and data sets."""
    found = []
    for name, builder in models.MODELS.items():
        settings = [
            {"name": key, "default": text(one.default), "type": str(one.annotation)}
            for key, one in inspect.signature(builder).parameters.items()
            if one.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        about = inspect.getdoc(builder) or ""
        found.append({"name": name, "line": about.splitlines()[0], "about": about, "settings": settings})
    sets = [
        {"name": name, "form": source.form, "line": source.description}
        for name, source in data.DATASETS.items()
    ]
    return {"models": found, "data": sets}


def data_preview(request: dict[str, Any]) -> dict[str, Any]:
    """How many samples of which shape, how many of each class, and a few of them as pictures."""
    refuse_code("data", request["data"], DATA, allow_code=request["allow_code"])
    samples = data.load(request["data"], size=request.get("size"))
    found: dict[str, Any] = {
        "train": len(samples.train),
        "test": len(samples.test),
        "shape": list(samples.shape),
        "classes": samples.classes,
        "task": samples.task,
        "note": samples.note,
    }
    if samples.task == "classify" and isinstance(samples.train, StoredSet):
        first = torch.arange(min(len(samples.train), COUNTED))
        _, targets = samples.train.store.read(first[:1])
        targets = torch.cat([samples.train.store.read(part)[1] for part in first.split(1000)])
        found["counts"] = torch.bincount(targets.flatten(), minlength=samples.classes).tolist()
        found["counted"] = len(first)
        inputs, labels = _plain(samples.train, first[:: max(1, len(first) // SHOWN)][:SHOWN])
        if len(samples.shape) == 3:
            found["pictures"] = [
                {"label": int(label), "pixels": _pixels(one)}
                for one, label in zip(inputs, labels, strict=True)
            ]
    return found


def predict(request: dict[str, Any]) -> dict[str, Any]:
    """The classes that a trained model finds most likely for a drawing, or for a row of numbers."""
    plan, samples, model, step = _trained(request)
    if samples.task != "classify":
        raise UsageError(f"{plan.data} is text: trying a model here is for pictures and rows of numbers")
    inputs = (
        _drawn(samples, request["drawing"]) if request.get("drawing") else _row(samples, request["numbers"])
    )
    model.eval()
    with torch.no_grad():
        likely = functional.softmax(model(inputs).flatten(), 0)
    best = likely.topk(min(TOP, len(likely)))
    answer = {
        "step": step,
        "top": [
            {"class": int(name), "probability": float(value)}
            for value, name in zip(best.values, best.indices, strict=True)
        ],
    }
    return answer | ({"seen": _pixels(inputs[0])} if len(samples.shape) == 3 else {})


def shape_of(request: dict[str, Any]) -> dict[str, Any]:
    """What a trained model takes."""
    _, samples, _, step = _trained(request)
    return {"shape": list(samples.shape), "classes": samples.classes, "task": samples.task, "step": step}


def taken(request: dict[str, Any]) -> dict[str, Any]:
    """Held-out pictures of one class that the trained model takes for a certain class."""
    plan, samples, model, step = _trained(request)
    held_out, found = samples.test, list[Tensor]()
    if len(samples.shape) != 3 or not isinstance(held_out, StoredSet):
        raise UsageError(f"the samples of {plan.data} are no pictures")
    model.eval()
    for indices in torch.arange(len(held_out)).split(AT_ONCE):
        inputs, targets = held_out.batch(indices, epoch=0)
        with torch.no_grad():
            said = model(inputs).argmax(1)
        found.append(indices[(targets == request["truth"]) & (said == request["taken"])])
        if sum(map(len, found)) >= SHOWN:
            break
    places = torch.cat(found)[:SHOWN]
    pictures, _ = _plain(held_out, places) if len(places) else (torch.zeros(0), None)
    shown = [
        {"label": int(place), "pixels": _pixels(one)} for place, one in zip(places, pictures, strict=True)
    ]
    return {"step": step, "pictures": shown}


def weights(request: dict[str, Any]) -> dict[str, Any]:
    """The newest checkpoint's weights alone, in one safetensors file."""
    tensors, record = store.load(Path(request["run"]) / "checkpoints")
    ours = {name.removeprefix(MODEL): one for name, one in tensors.items() if name.startswith(MODEL)}
    save_weights(Path(request["to"]), ours)
    return {"step": record.get("steps"), "tensors": len(ours)}


REQUESTS = {
    "catalogue": catalogue,
    "data": data_preview,
    "predict": predict,
    "shape": shape_of,
    "taken": taken,
    "weights": weights,
}

_newest: dict[tuple[bytes, str], tuple[plans.Plan, Data, nn.Module, int]] = {}


def _trained(request: dict[str, Any]) -> tuple[plans.Plan, Data, nn.Module, int]:
    """The plan, data and model of a run with its newest checkpoint; the last one stays loaded."""
    run = Path(request["run"])
    plan = plans.read(run / "plan.json")
    refuse_code("model", plan.model, MODELS, allow_code=request["allow_code"])
    refuse_code("data", plan.data, DATA, allow_code=request["allow_code"])
    # By the plan and the save itself: another run of that name can have come to the same step.
    key = (plan.encode(), _save(run / "checkpoints"))
    if key not in _newest:
        tensors, record = store.load(run / "checkpoints")
        samples, model = declared.load(plan)
        ours = {name.removeprefix(MODEL): one for name, one in tensors.items() if name.startswith(MODEL)}
        model.load_state_dict(ours)
        _newest.clear()
        _newest[key] = (plan, samples, model, int(record.get("steps", 0)))
    return _newest[key]


def _save(checkpoints: Path) -> str:
    """What no other save has."""
    place = index.latest(checkpoints)
    try:
        found = (place / manifest.MANIFEST).stat() if place else None
    except OSError:
        found = None
    return f"{place} {found and (found.st_ino, found.st_mtime_ns)}"


def _plain(samples: StoredSet, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Samples with their stored values scaled to 0 … 1, and nothing else done to them."""
    inputs, targets = samples.store.read(indices)
    scale = next((one for one in samples.transforms if isinstance(one, Scale)), None)
    return inputs.to(torch.float32) / (scale.full if scale else 1), targets.flatten()


def _drawn(samples: Data, drawing: dict[str, Any]) -> Tensor:
    """A drawing as a sample: its ink is cut out, made as large as the data's pictures are, and put in the middle."""
    if len(samples.shape) != 3:
        raise UsageError(f"the samples of {samples.name} are no pictures; type a row of numbers instead")
    ink = (
        torch.tensor(drawing["ink"], dtype=torch.float32)
        .view(drawing["height"], drawing["width"])
        .clamp(0, 1)
    )
    if not ink.any():
        raise UsageError("there is nothing drawn yet")
    channels, height, width = samples.shape
    rows, columns = ink.amax(1).nonzero().flatten(), ink.amax(0).nonzero().flatten()
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    tall = max(1, round(height * (1.0 if height < 16 else 0.72)))
    wide = min(width, max(1, round(tall * ink.shape[1] / ink.shape[0])))
    small = functional.adaptive_avg_pool2d(ink[None, None], (tall, wide))[0, 0]
    small = (small / small.max()).clamp(0, 1)
    page = torch.zeros(height, width)
    top, left = (height - tall) // 2, (width - wide) // 2
    page[top : top + tall, left : left + wide] = small
    return _transformed(samples, page.expand(1, channels, height, width).clone())


def _row(samples: Data, numbers: list[float]) -> Tensor:
    needed = 1
    for length in samples.shape:
        needed *= length
    if len(numbers) != needed:
        raise UsageError(f"{len(numbers)} numbers were given; a sample of {samples.name} has {needed}")
    return torch.tensor(numbers, dtype=torch.float32).view(1, *samples.shape)


def _transformed(samples: Data, inputs: Tensor) -> Tensor:
    """As the test part's pictures are, once they are scaled."""
    found = samples.test.transforms if isinstance(samples.test, StoredSet) else ()
    randomness = Randomness(seed=0, epoch=0, indices=torch.zeros(1, dtype=torch.long))
    for transform in found:
        inputs = inputs if isinstance(transform, Scale) else transform(inputs, randomness)
    return inputs


def _pixels(picture: Tensor) -> dict[str, Any]:
    """Bytes for a canvas."""
    channels, height, width = picture.shape
    shades = (picture.clamp(0, 1) * 255).to(torch.uint8)
    return {
        "channels": channels,
        "height": height,
        "width": width,
        "data": base64.b64encode(shades.permute(1, 2, 0).contiguous().numpy().tobytes()).decode(),
    }


def main() -> None:
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a model prints is no answer
    torch.set_num_threads(1)
    for line in sys.stdin.buffer:
        try:
            request = msgspec.json.decode(line)
            if request["allow_code"] and os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())  # last: nothing there takes the place of a library
            answer = REQUESTS[request["what"]](request)
        except ManyhandsError as error:
            answer = {"error": str(error)}
        except Exception as error:  # a model or a file of the person's own
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
