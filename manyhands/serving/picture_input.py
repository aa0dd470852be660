"""A picture that a client has sent, as a row of a model's input: what training did to its own pictures."""

import io

from torch import Tensor

from manyhands.data.images import FORMATS, fitted, refuse_large
from manyhands.data.randomness import Randomness
from manyhands.data.transforms import Normalize, Scale
from manyhands.errors import DataError, UsageError
from manyhands.serving.description import PictureForm


def row_of(content: bytes, form: PictureForm | None) -> Tensor:
    """[1, channels, height, width]; runs where a decoder that crashes takes no port with it."""
    from PIL import Image

    if form is None:
        raise UsageError("this model takes no pictures")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            refuse_large(image)
            pixels = fitted(image, channels=form.channels, height=form.height, width=form.width)
    except Exception as error:  # a damaged picture can fail in any way
        reason = (
            str(error) if isinstance(error, ValueError) else f"it is none of {', '.join(FORMATS)}, or damaged"
        )
        raise DataError(f"this is not a picture that can be read: {reason}") from None
    nothing: Randomness = None  # type: ignore[assignment]  # neither of these draws
    row = Scale()(pixels.unsqueeze(0), nothing)
    if form.mean and form.deviation:
        row = Normalize(mean=form.mean, deviation=form.deviation)(row, nothing)
    return row.contiguous()
