"""One record, one line of JSON; and the rule for numbers that JSON does not have.

JSON has no NaN and no infinities, and a loss can be any of them. They are written as the strings "nan", "inf"
and "-inf", and a value that is exactly one of those strings is read back as the number.
"""

import math
from typing import Any, overload

import msgspec

Record = dict[str, Any]

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(record: Record) -> bytes:
    """The record as one line, newline included."""
    line = _encoder.encode(record)
    if b"null" in line:  # msgspec writes null for them, so only such lines need a second look
        line = _encoder.encode(_with_strings(record))
    return line + b"\n"


def decode(line: bytes) -> Record | None:
    """The record of a line, or None where the line is damaged."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if b'nan"' in line or b'inf"' in line:
        record = _with_numbers(record)
    return record if _is_record(record) else None


@overload
def number(value: object, otherwise: float) -> float: ...
@overload
def number(value: object) -> float | None: ...
def number(value: object, otherwise: float | None = None) -> float | None:
    """A field as a number, or `otherwise` where it is none: what comes from a file may be anything."""
    if isinstance(value, float):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return otherwise
    return otherwise


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("kind"), str)
        and math.isfinite(number(value.get("t"), math.nan))
        and isinstance(value.get("rank"), int)
    )


def _simple(value: Any) -> Any:
    """Scalars of numpy and torch become numbers, anything else that JSON does not know becomes its text."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else str(value)


def _with_strings(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_strings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_strings(item) for item in value]
    if hasattr(value, "item"):
        value = _simple(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


_encoder = msgspec.json.Encoder(enc_hook=_simple)
