"""Where golden curves are kept: one file for each kind, one line for each case. Python writes floats to the bit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden.cases import Case

Curve = dict[str, Any]
KINDS = ("strategies", "placements")


def key(case: Case) -> tuple[str, str]:
    return case.kind, str(case)


def read() -> dict[tuple[str, str], Curve]:
    files = {kind: _file(kind) for kind in KINDS}
    return {
        (kind, name): curve
        for kind, file in files.items()
        if file.exists()
        for name, curve in json.loads(file.read_text()).items()
    }


def write(curves: Mapping[Case, Curve]) -> None:
    for kind in KINDS:
        lines = [
            f"{json.dumps(str(case))}: {json.dumps(curve)}"
            for case, curve in curves.items()
            if case.kind == kind
        ]
        _file(kind).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _file(kind: str) -> Path:
    return Path(__file__).parent / f"{kind}.json"
