"""The Open Inference Protocol, version 2, over HTTP: what KServe, Triton and their clients speak.

https://github.com/kserve/open-inference-protocol, with Triton's extension for binary tensors.
"""

from typing import Any

import msgspec
import numpy as np

from manyhands.serving.description import Description
from manyhands.serving.http_connection import HttpReply
from manyhands.serving.model_pool import InvalidInput
from manyhands.serving.servable import Servable
from manyhands.serving.tensor_input import InputRows, from_binary, from_flat, octets

HEADER_LENGTH = "Inference-Header-Content-Length"
EXTENSIONS = ("binary_tensor_data", "model_repository(index)")

Parameters = dict[str, Any]


class InferInput(msgspec.Struct, frozen=True):
    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters = {}
    data: msgspec.Raw = msgspec.Raw()


class InferOutput(msgspec.Struct, frozen=True):
    name: str
    parameters: Parameters = {}


class InferCall(msgspec.Struct, frozen=True):
    """The body of an `infer` request, or its first part."""

    inputs: list[InferInput]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[InferOutput] = []

    @property
    def timeout_s(self) -> float | None:
        """Clients of Triton give it in microseconds."""
        found = self.parameters.get("timeout")
        return found / 1e6 if isinstance(found, int) and found > 0 else None

    @property
    def wants_binary(self) -> bool:
        if self.outputs and "binary_data" in self.outputs[0].parameters:
            return self.outputs[0].parameters["binary_data"] is True
        return self.parameters.get("binary_data_output") is True


_decode = msgspec.json.Decoder(InferCall).decode


def parsed(form: Description, body: bytearray, header_length: str | None) -> tuple[InferCall, InputRows]:
    """The call and its rows, if they are what the model takes."""
    view = memoryview(body)
    if header_length is not None and not (header_length.isascii() and header_length.isdigit()):
        raise InvalidInput(f"{HEADER_LENGTH} is no number")
    end = len(body) if header_length is None else int(header_length[:12])
    if end > len(body):
        raise InvalidInput(f"{HEADER_LENGTH} is {end:,}, and the body has {len(body):,} bytes")
    try:
        call = _decode(view[:end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"this is no inference request ({error})") from None
    if len(call.inputs) != 1 or call.inputs[0].name != form.input.name:
        names = ", ".join(one.name for one in call.inputs[:5]) or "none"
        raise InvalidInput(f"the inputs are {names}; expected one, {form.input.text()}")
    given = call.inputs[0]
    if given.datatype != form.input.type:
        raise InvalidInput(f"{given.name} is {given.datatype[:20]}; expected {form.input.text()}")
    _check_outputs(form, call)
    size = given.parameters.get("binary_data_size")
    if size is None:
        if len(body) > end:
            raise InvalidInput(f"{given.name} has no binary_data_size, and {len(body) - end:,} bytes follow")
        return call, from_flat(form, given.shape, given.data)
    if size != len(body) - end:
        raise InvalidInput(f"{given.name} says binary_data_size {size}, and {len(body) - end:,} bytes follow")
    return call, from_binary(form, given.shape, view[end:])


def _check_outputs(form: Description, call: InferCall) -> None:
    for output in call.outputs:
        if output.name != form.output.name:
            raise InvalidInput(f"there is no output {output.name[:50]!r}; there is {form.output.text()}")
        if output.parameters.get("classification"):
            raise InvalidInput("this server classifies at /predict; leave out the parameter classification")


def reply(servable: Servable, call: InferCall, outputs: "np.ndarray[Any, Any]") -> HttpReply:
    """The answer, as JSON or with its tensor in binary, as the call wants it."""
    form = servable.form
    tensor: dict[str, Any] = {
        "name": form.output.name,
        "datatype": form.output.type,
        "shape": list(outputs.shape),
    }
    answer: dict[str, Any] = {
        "model_name": servable.version.model,
        "model_version": str(servable.version.version),
        "outputs": [tensor],
    }
    if call.id:
        answer["id"] = call.id
    if not call.wants_binary:
        tensor["data"] = outputs.reshape(-1).tolist()
        return HttpReply.json(answer)
    content = octets(outputs)
    tensor["parameters"] = {"binary_data_size": len(content)}
    head = msgspec.json.encode(answer)
    return HttpReply(
        parts=[head, content],
        content_type="application/octet-stream",
        headers=((HEADER_LENGTH, str(len(head))),),
    )


def server_metadata(version: str) -> dict[str, Any]:
    return {"name": "manyhands", "version": version, "extensions": list(EXTENSIONS)}


def model_metadata(model: str, ready: list[Servable], chosen: Servable) -> dict[str, Any]:
    """What the protocol asks for, and in `parameters` what is ours."""
    form = chosen.form
    return {
        "name": model,
        "versions": [str(one.version.version) for one in ready],
        "platform": "manyhands_pytorch",
        "inputs": [_tensor_metadata(form.input)],
        "outputs": [_tensor_metadata(form.output)],
        "parameters": {
            "version": chosen.version.version,
            "step": form.step,
            "accuracy": chosen.accuracy,
            "model": form.model,
            "classes": list(form.class_names) or form.classes,
        },
    }


def _tensor_metadata(form: Any) -> dict[str, Any]:
    return {"name": form.name, "datatype": form.type, "shape": list(form.shape)}
