"""What one version of a model takes and gives: written beside its weights, checked against every request."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from manyhands.errors import CheckpointError
from manyhands.foreign.regular import read_small

DESCRIPTION = "description.json"
FORMAT = 1
FREE = -1
"""A length that requests choose: that of the batch, or of a text up to `most_tokens`."""

SIZE_BYTES = {"FP32": 4, "INT64": 8}
"""The types that models take and give, as the Open Inference Protocol calls them."""

Length = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]


class TensorForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor's name, type and shape; its first length is that of the batch."""

    name: str
    type: Literal["FP32", "INT64"]
    shape: Annotated[tuple[Length, ...], msgspec.Meta(min_length=1, max_length=8)]

    def text(self) -> str:
        return f"{self.name}: {self.type} [{', '.join(map(str, self.shape))}]"


class PictureForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How training made numbers of a picture: white is 1, then minus `mean`, divided by `deviation`."""

    channels: Literal[1, 3]
    height: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
    width: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()


class Description(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of a model."""

    format: int = FORMAT
    model: str  # by name, or `package.module:callable`
    task: Literal["classify", "next-token"]
    input: TensorForm
    output: TensorForm
    classes: int
    class_names: tuple[str, ...] = ()
    picture: PictureForm | None = None  # None: this model takes no pictures, or how is not known
    most_tokens: int | None = None
    step: int = 0
    accuracy: float | None = None  # on the recorded sample beside the weights
    plan: dict[str, Any] = {}

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of one sample of the input; may have a free length."""
        return self.input.shape[1:]

    @property
    def output_row_bytes(self) -> int:
        """Of one sample of the output, where no length is free."""
        return math.prod(self.output.shape[1:]) * SIZE_BYTES[self.output.type]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"


def decode(content: bytes) -> Description:
    """What `Description.encode` gave, or a sentence about why not."""
    try:
        found = msgspec.json.decode(content, type=Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{DESCRIPTION} describes no model ({error})") from None
    if found.format != FORMAT:
        raise CheckpointError(
            f"{DESCRIPTION} says format {found.format}, this version of manyhands reads {FORMAT}"
        )
    return found


def read(folder: Path) -> Description:
    """The description in a version's folder."""
    try:
        return decode(read_small(folder / DESCRIPTION))
    except OSError as error:
        raise CheckpointError(f"{DESCRIPTION} cannot be read ({error.strerror})") from None
