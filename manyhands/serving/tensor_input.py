"""Checks what a client has sent against what a model takes, and makes the bytes of rows from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from manyhands.serving.batcher import ModelError
from manyhands.serving.description import FREE, Description
from manyhands.serving.model_pool import InvalidInput

DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "INT64": np.dtype("<i8")}
_KINDS = {"FP32": "fiu", "INT64": "iu"}  # of numbers that JSON can have


@dataclass(frozen=True, kw_only=True)
class InputRows:
    """Samples for a model."""

    count: int
    shape: tuple[int, ...]  # of one
    content: memoryview


def from_binary(form: Description, shape: Sequence[int], content: memoryview) -> InputRows:
    """Tensors as they lie in memory."""
    _check_shape(form, shape)
    expected = math.prod(shape) * DTYPES[form.input.type].itemsize
    if len(content) != expected:
        raise InvalidInput(
            f"{form.input.name} has {len(content):,} bytes; {form.input.type} {list(shape)} has {expected:,}"
        )
    return _checked(form, np.frombuffer(content, DTYPES[form.input.type]), shape, content)


def from_flat(form: Description, shape: Sequence[int], values: bytes | msgspec.Raw) -> InputRows:
    """JSON: one list, or lists in lists, of as many numbers as the shape says."""
    _check_shape(form, shape)
    try:
        kind: Any = list[float] if form.input.type == "FP32" else list[int]
        with np.errstate(over="ignore"):
            array = np.array(msgspec.json.decode(values, type=kind), DTYPES[form.input.type])
    except msgspec.ValidationError:
        array = _array(form, _decoded(values)).reshape(-1)
    except (msgspec.DecodeError, OverflowError, ValueError) as error:
        raise InvalidInput(f"{form.input.name} is no list of numbers ({error})") from None
    if array.size != math.prod(shape):
        raise InvalidInput(
            f"{form.input.name} has {array.size:,} numbers; {list(shape)} has {math.prod(shape):,}"
        )
    return _checked(form, array, shape, octets(array))


def from_nested(form: Description, values: Any) -> InputRows:
    """Lists in lists, whose lengths are the shape."""
    array = _array(form, values)
    _check_shape(form, array.shape)
    return _checked(form, array.reshape(-1), array.shape, octets(array))


def octets(array: "np.ndarray[Any, Any]") -> memoryview:
    """The bytes of an array, where they lie."""
    return array.reshape(-1).view(np.uint8).data


def _decoded(values: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(values)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"this is not JSON that can be read ({error})") from None


def _array(form: Description, values: Any) -> "np.ndarray[Any, Any]":
    expected = f"{form.input.name} is not {form.input.text()}"
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError, RecursionError):
        raise InvalidInput(f"{expected}: its lists differ in length, or are too many") from None
    if found.dtype.kind not in _KINDS[form.input.type]:
        raise InvalidInput(f"{expected}: there is something in it that is no such number")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(found, DTYPES[form.input.type])


def _check_shape(form: Description, shape: Sequence[int]) -> None:
    wanted = form.input.shape
    fits = len(shape) == len(wanted) and all(
        length >= 1 and (want in (FREE, length)) for want, length in zip(wanted, shape, strict=True)
    )
    if not fits:
        raise InvalidInput(
            f"{form.input.name} is {list(shape)}; expected {form.input.text()}, where -1 is any length from 1 upwards"
        )
    if form.most_tokens is not None and shape[1] > form.most_tokens:
        raise InvalidInput(
            f"{form.input.name} has {shape[1]:,} tokens; this model takes at most {form.most_tokens:,}"
        )


def _checked(
    form: Description, values: "np.ndarray[Any, Any]", shape: Sequence[int], content: memoryview
) -> InputRows:
    """Refuse numbers that would spoil the answers, or end in an error that other requests in the batch would share."""
    if form.input.type == "FP32":
        if not np.isfinite(values).all():
            raise InvalidInput(
                f"{form.input.name} has numbers that are not finite, or too large for {form.input.type}"
            )
    elif form.task == "next-token" and (values.min() < 0 or values.max() >= form.classes):
        raise InvalidInput(f"{form.input.name} has tokens that are not from 0 to {form.classes - 1}")
    return InputRows(count=int(shape[0]), shape=tuple(map(int, shape[1:])), content=content)


def outputs_of(form: Description, rows: InputRows, answer: memoryview) -> "np.ndarray[Any, Any]":
    """A model's answer as a tensor; one that is not finite is none."""
    outputs = np.frombuffer(answer, DTYPES[form.output.type])
    if not np.isfinite(outputs).all():
        raise InvalidInput("the model's answer to these inputs is not finite")
    free = iter(rows.shape)
    shape = (rows.count, *(next(free, 0) if length == FREE else length for length in form.output.shape[1:]))
    if outputs.size != math.prod(shape):
        raise ModelError(
            f"the model gave {outputs.size:,} numbers for these inputs; its description says {list(shape)}"
        )
    return outputs.reshape(shape)
