"""What a server of the Open Inference Protocol answers, as data: the same cases run against ours and against others.

    python -m tests.serving_conformance http://127.0.0.1:8000

The server has one model, `digits`, with an input FP32 [-1, 1, 8, 8] and an output FP32 [-1, 10].
"""

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

MODEL = "/v2/models/digits"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request, and what must hold of its answer."""

    name: str
    path: str
    body: Any = None
    binary: bytes = b""  # behind the JSON
    status: tuple[int, ...] = (200,)
    holds: Callable[[httpx.Response], bool] = lambda answer: True


def infer(count: int = 1, **changes: Any) -> dict[str, Any]:
    data = [0.25] * (64 * count)
    given = {"name": "input", "shape": [count, 1, 8, 8], "datatype": "FP32", "data": data} | changes
    return {"inputs": [{key: value for key, value in given.items() if value is not None}]}


def first(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["outputs"][0]
    return found


def is_error(answer: httpx.Response) -> bool:
    return isinstance(answer.json()["error"], str)


def is_binary_answer(answer: httpx.Response) -> bool:
    length = int(answer.headers["inference-header-content-length"])
    head = json.loads(answer.content[:length])["outputs"][0]
    size = head["parameters"]["binary_data_size"]
    return "data" not in head and len(answer.content) == length + size == length + 40


BINARY_IN = infer(data=None, parameters={"binary_data_size": 256})
BINARY_OUT = {"parameters": {"binary_data_output": True}}
REFUSED = (400, 404)

CASES = [
    Case(name="live", path="/v2/health/live"),
    Case(name="ready", path="/v2/health/ready"),
    Case(name="server", path="/v2", holds=lambda a: {"name", "version", "extensions"} <= set(a.json())),
    Case(
        name="binary is announced", path="/v2", holds=lambda a: "binary_tensor_data" in a.json()["extensions"]
    ),
    Case(name="model is ready", path=f"{MODEL}/ready"),
    Case(name="version is ready", path=f"{MODEL}/versions/1/ready"),
    Case(name="model", path=MODEL, holds=lambda a: a.json()["name"] == "digits"),
    Case(name="versions", path=MODEL, holds=lambda a: a.json()["versions"] == ["1"]),
    Case(
        name="inputs",
        path=MODEL,
        holds=lambda a: a.json()["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 8, 8]}],
    ),
    Case(
        name="outputs",
        path=MODEL,
        holds=lambda a: a.json()["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}],
    ),
    Case(name="version", path=f"{MODEL}/versions/1", holds=lambda a: a.json()["name"] == "digits"),
    Case(name="infer", path=f"{MODEL}/infer", body=infer(), holds=lambda a: first(a)["shape"] == [1, 10]),
    Case(
        name="names in the answer",
        path=f"{MODEL}/versions/1/infer",
        body=infer(),
        holds=lambda a: (a.json()["model_name"], a.json()["model_version"]) == ("digits", "1"),
    ),
    Case(name="numbers", path=f"{MODEL}/infer", body=infer(3), holds=lambda a: len(first(a)["data"]) == 30),
    Case(
        name="id", path=f"{MODEL}/infer", body={"id": "x7", **infer()}, holds=lambda a: a.json()["id"] == "x7"
    ),
    Case(
        name="output by name",
        path=f"{MODEL}/infer",
        body={**infer(), "outputs": [{"name": "output"}]},
        holds=lambda a: first(a)["name"] == "output",
    ),
    Case(
        name="nested lists",
        path=f"{MODEL}/infer",
        body=infer(data=[[[[0.25] * 8] * 8]]),
        holds=lambda a: first(a)["shape"] == [1, 10],
    ),
    Case(
        name="binary in",
        path=f"{MODEL}/infer",
        body=BINARY_IN,
        binary=struct.pack("<64f", *[0.25] * 64),
        holds=lambda a: first(a)["shape"] == [1, 10],
    ),
    Case(name="binary out", path=f"{MODEL}/infer", body={**infer(), **BINARY_OUT}, holds=is_binary_answer),
    Case(
        name="binary out by output",
        path=f"{MODEL}/infer",
        body={**infer(), "outputs": [{"name": "output", "parameters": {"binary_data": True}}]},
        holds=is_binary_answer,
    ),
    Case(
        name="another shape", path=f"{MODEL}/infer", body=infer(shape=[1, 64]), status=REFUSED, holds=is_error
    ),
    Case(
        name="another type",
        path=f"{MODEL}/infer",
        body=infer(datatype="INT64"),
        status=REFUSED,
        holds=is_error,
    ),
    Case(name="another name", path=f"{MODEL}/infer", body=infer(name="x"), status=REFUSED, holds=is_error),
    Case(name="too few numbers", path=f"{MODEL}/infer", body=infer(data=[1]), status=REFUSED, holds=is_error),
    Case(name="no inputs", path=f"{MODEL}/infer", body={"inputs": []}, status=REFUSED, holds=is_error),
    Case(
        name="no such output",
        path=f"{MODEL}/infer",
        body={**infer(), "outputs": [{"name": "x"}]},
        status=REFUSED,
        holds=is_error,
    ),
    Case(
        name="too few bytes",
        path=f"{MODEL}/infer",
        body=BINARY_IN,
        binary=b"1234",
        status=REFUSED,
        holds=is_error,
    ),
    Case(name="no such model", path="/v2/models/other", status=REFUSED),
    Case(name="no such version", path=f"{MODEL}/versions/99", status=REFUSED),
    Case(
        name="infer of no model", path="/v2/models/other/infer", body=infer(), status=REFUSED, holds=is_error
    ),
    Case(name="ready of no model", path="/v2/models/other/ready", status=(400, 404, 503)),
]


def differences(case: Case, address: str) -> list[str]:
    """What is not as it should be."""
    headers = {}
    content = None
    if case.body is not None:
        head = json.dumps(case.body).encode()
        content = head + case.binary
        if case.binary:
            headers["Inference-Header-Content-Length"] = str(len(head))
    method = "GET" if content is None else "POST"
    answer = httpx.request(method, address + case.path, content=content, headers=headers, timeout=60)
    if answer.status_code not in case.status:
        return [f"{case.name}: status {answer.status_code}, not {case.status}: {answer.content[:200]!r}"]
    try:
        holds = case.holds(answer)
    except (ValueError, KeyError, TypeError) as error:
        return [f"{case.name}: {type(error).__name__} {error}: {answer.content[:200]!r}"]
    return [] if holds else [f"{case.name}: {answer.content[:200]!r}"]


if __name__ == "__main__":
    wrong = [line for case in CASES for line in differences(case, sys.argv[1])]
    print(*wrong, f"{len(CASES) - len(wrong)} of {len(CASES)} answers are as the protocol says", sep="\n")
    sys.exit(bool(wrong))
