"""Pictures that are uploaded, as a file or as a form, and the classes that a model sees in them."""

import re
from typing import Any

import numpy as np

from manyhands.serving.http_connection import HttpReply
from manyhands.serving.model_pool import InvalidInput
from manyhands.serving.servable import Servable

TOP = 5
_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})"?')


def file_in(body: bytearray, content_type: str) -> bytes:
    """The file in the body: the body itself, or the first part of a form that has a file name."""
    if not content_type.lower().startswith("multipart/form-data"):
        return bytes(body)
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise InvalidInput("this form does not say what its boundary is")
    edge = b"--" + match[1].encode("latin-1")
    for part in bytes(body).split(edge)[1:]:
        head, found, content = part.partition(b"\r\n\r\n")
        if found and b"filename=" in head:
            return content.removesuffix(b"\r\n")
    raise InvalidInput("this form has no file; send one as curl -F file=@picture.png does")


def top_of(asked: str | None) -> int:
    """How many classes a client wants to see."""
    if asked is None:
        return TOP
    if not (asked.isascii() and asked.isdigit() and 1 <= len(asked) <= 4 and int(asked) > 0):
        raise InvalidInput(f"top={asked[:20]!r}: a number from 1 to 9999 is expected")
    return int(asked)


def refuse_pictureless(servable: Servable) -> None:
    if servable.form.picture is None:
        raise InvalidInput(
            f"{servable.version.model} takes no pictures, but {servable.form.input.text()}; "
            f"send tensors to /v2/models/{servable.version.model}/infer"
        )


def reply(servable: Servable, outputs: "np.ndarray[Any, Any]", top: int) -> HttpReply:
    """The most probable classes, by the softmax of what the model gave."""
    scores = outputs[0].astype(np.float64)
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    names = servable.form.class_names
    order = np.argsort(-shares, kind="stable")[:top]
    return HttpReply.json(
        {
            "model": servable.version.model,
            "version": servable.version.version,
            "classes": [
                {
                    "class": names[index] if index < len(names) else str(index),
                    "probability": float(shares[index]),
                }
                for index in order.tolist()
            ],
        }
    )
