"""One version of a model out of a run, as a folder that any machine can serve."""

from collections.abc import Collection
from pathlib import Path

from manyhands.checkpoint import index, tensor_file
from manyhands.checkpoint.publish import WEIGHTS
from manyhands.errors import CheckpointError, ManyhandsError, UsageError
from manyhands.serving import served_model, version_folder
from manyhands.serving.description import DESCRIPTION, Description


def export(
    run: Path,
    out: Path,
    *,
    version: int | None = None,
    step: int | None = None,
    allowed: Collection[str] = (),
) -> tuple[Path, Description]:
    """Write the newest checkpoint of a run, or that of a step, as the next version under `out`."""
    place = _checkpoint(run, step)
    try:
        found = served_model.load(place, allowed)
        found.warm_up([1])
    except ManyhandsError as error:
        raise CheckpointError(f"{place} cannot be exported: {error}") from None
    files = {
        WEIGHTS: tensor_file.encode(found.module.state_dict()),
        DESCRIPTION: [found.form.encode()],
    }
    if found.sample is not None:
        sample = {"inputs": found.sample.inputs, "targets": found.sample.targets}
        files[version_folder.SAMPLE] = tensor_file.encode(sample)
    number = version_folder.next_version(out) if version is None else version
    return version_folder.write(out, number, found.form.step, files), found.form


def _checkpoint(run: Path, step: int | None) -> Path:
    folder = run / "checkpoints"
    if step is None:
        newest = index.latest(folder)
        if newest is None:
            raise UsageError(
                f"there is no checkpoint in {run} to export; give the directory of a run that saved"
            )
        return newest
    known = dict(index.checkpoints(folder))
    if step not in known:
        steps = ", ".join(map(str, known)) or "none at all"
        raise UsageError(f"{run} has no checkpoint of step {step}; it has {steps}")
    return known[step]
