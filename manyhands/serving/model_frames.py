"""What the server and a model process say to each other, over a socket that only these two have.

A frame is the lengths of a message and of its tensor, the message in MessagePack, and the tensor's bytes.
"""

import struct

import msgspec

from manyhands.serving.description import Description

HEAD = struct.Struct("<IQ")


class LoadVersion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load the version in a folder and call it `handle`."""

    handle: int
    place: str
    warm_up: tuple[int, ...]
    allowed: tuple[str, ...]


class UnloadVersion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    handle: int


class RunBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute; the tensor has the rows."""

    number: int
    handle: int
    rows: int
    row_shape: tuple[int, ...]


class DecodePicture(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make a row of a picture; the tensor is the file."""

    number: int
    handle: int


class VersionLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    handle: int
    form: Description
    accuracy: float | None
    took_s: float


class VersionFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`for_good`: it would fail again."""

    handle: int
    reason: str
    for_good: bool


class Computed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a batch or a picture; the tensor has it."""

    number: int
    took_s: float


class NotComputed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`is_input`: what was sent is to blame, and no other attempt will help."""

    number: int
    reason: str
    is_input: bool


ToProcess = LoadVersion | UnloadVersion | RunBatch | DecodePicture
FromProcess = VersionLoaded | VersionFailed | Computed | NotComputed

_encoder = msgspec.msgpack.Encoder()
decode_from_process = msgspec.msgpack.Decoder(FromProcess).decode
decode_to_process = msgspec.msgpack.Decoder(ToProcess).decode


def framed(message: msgspec.Struct, tensor_bytes: int = 0) -> bytes:
    """The frame up to its tensor."""
    said = _encoder.encode(message)
    return HEAD.pack(len(said), tensor_bytes) + said
