"""From two stores of pictures to a `Data`: which transforms, in which order."""

from dataclasses import dataclass

from manyhands.data.request import Request
from manyhands.data.sets import Data, Store, StoredSet
from manyhands.data.transforms import Crop, Flip, Normalize, Resize, Scale, Transform
from manyhands.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PictureSettings:
    """How pictures of one's own are normalised; not at all where nothing is given."""

    mean: tuple[float, ...] = ()  # of each channel, on the scale on which white is 1
    deviation: tuple[float, ...] = ()

    def normalize(self, text: str, shape: tuple[int, ...]) -> Normalize | None:
        if not self.mean and not self.deviation:
            return None
        if len(shape) != 3:
            raise UsageError(f"--data {text}: mean and deviation are for pictures; leave them out")
        channels = shape[0]
        for name, values in (("mean", self.mean), ("deviation", self.deviation)):
            if len(values) != channels:
                raise UsageError(
                    f"--data {text}: {name} has {len(values)} numbers and the samples have {channels} channels; give "
                    f"mean and deviation with {channels} each, as in mean={'-'.join(['0.5'] * channels)}"
                )
        if not all(value > 0 for value in self.deviation):
            raise UsageError(f"--data {text}: a deviation must be above 0, since it is divided by")
        return Normalize(mean=self.mean, deviation=self.deviation)


def pictures(
    request: Request,
    *,
    train: Store,
    test: Store,
    shape: tuple[int, ...],
    classes: int,
    scale: Scale | None = None,
    normalize: Normalize | None = None,
    note: str = "",
    class_names: tuple[str, ...] = (),
) -> Data:
    """Both parts scaled, sized and normalised; the train part also moved and mirrored if asked for."""
    if len(shape) != 3 and (request.size or request.augment):
        raise UsageError(
            f"--data {request.text}: samples of shape {shape} are not pictures; leave out size and augment"
        )
    # Moving and mirroring come first: on stored bytes they cost a quarter of what they cost on floats.
    random: tuple[Transform, ...] = (Crop(), Flip()) if request.augment else ()
    resize = Resize(size=request.size) if request.size and shape[1:] != (request.size, request.size) else None
    fixed: tuple[Transform, ...] = tuple(step for step in (scale, resize, normalize) if step is not None)
    return Data(
        name=request.text,
        train=StoredSet(train, random + fixed, seed=request.seed),
        test=StoredSet(test, fixed, seed=request.seed),
        shape=(shape[0], request.size, request.size) if request.size else shape,
        classes=classes,
        task="classify",
        note=note,
        class_names=class_names,
    )
