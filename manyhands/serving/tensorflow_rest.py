"""The REST form of TensorFlow Serving: `:predict` in rows or columns, and the state of versions.

https://www.tensorflow.org/tfx/serving/api_rest
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from manyhands.serving.description import Description
from manyhands.serving.http_connection import HttpReply
from manyhands.serving.manager import VersionPhase, VersionState
from manyhands.serving.model_pool import InvalidInput
from manyhands.serving.stream import ModelVersion
from manyhands.serving.tensor_input import InputRows, from_nested

SIGNATURE = "serving_default"

_STATES = {
    VersionPhase.WAITING: "START",
    VersionPhase.LOADING: "LOADING",
    VersionPhase.READY: "AVAILABLE",
    VersionPhase.UNLOADING: "UNLOADING",
    VersionPhase.FAILED: "END",
    VersionPhase.REJECTED: "END",
}


class PredictCall(msgspec.Struct, frozen=True):
    """Rows (`instances`), or one tensor (`inputs`)."""

    instances: list[Any] | None = None
    inputs: Any = None
    signature_name: str = SIGNATURE


_decode = msgspec.json.Decoder(PredictCall).decode


def parsed(form: Description, body: bytearray) -> tuple[PredictCall, InputRows]:
    try:
        call = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"this is no predict request ({error})") from None
    if call.signature_name != SIGNATURE:
        raise InvalidInput(f"there is no signature {call.signature_name[:50]!r}; there is {SIGNATURE}")
    if (call.instances is None) == (call.inputs is None):
        raise InvalidInput('write either "instances": [...], a list of samples, or "inputs": [...], a tensor')
    values = call.inputs if call.instances is None else [_unnamed(form, one) for one in call.instances]
    return call, from_nested(form, _unnamed(form, values))


def reply(call: PredictCall, outputs: "np.ndarray[Any, Any]") -> HttpReply:
    return HttpReply.json({"predictions" if call.inputs is None else "outputs": outputs.tolist()})


def status(versions: Iterable[tuple[ModelVersion, VersionState]]) -> dict[str, Any]:
    """The states of all versions, the newest first."""
    return {
        "model_version_status": [
            {
                "version": str(version.version),
                "state": _STATES[state.phase],
                "status": {"error_code": "UNKNOWN" if state.reason else "OK", "error_message": state.reason},
            }
            for version, state in reversed(list(versions))
        ]
    }


def metadata(model: str, version: int, form: Description) -> dict[str, Any]:
    def tensor(one: Any) -> dict[str, Any]:
        dims = [{"size": str(length), "name": ""} for length in one.shape]
        kind = {"FP32": "DT_FLOAT", "INT64": "DT_INT64"}[one.type]
        return {one.name: {"dtype": kind, "tensor_shape": {"dim": dims}, "name": one.name}}

    signature = {
        "inputs": tensor(form.input),
        "outputs": tensor(form.output),
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": model, "signature_name": "", "version": str(version)},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE: signature}}},
    }


def _unnamed(form: Description, value: Any) -> Any:
    """`{"input": x}` is x."""
    if not isinstance(value, dict):
        return value
    if list(value) != [form.input.name]:
        raise InvalidInput(f"the inputs are {', '.join(map(str, value))[:100]}; expected {form.input.text()}")
    return value[form.input.name]
