"""A stand-in whose one download is a made-up graph in the form of the Cora data set."""

import contextlib
import io
import tarfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

NODES, WORDS, CLASSES, EDGES = 1700, 40, 7, 4000


@contextlib.contextmanager
def get(url: str, **settings: Any) -> Iterator[SimpleNamespace]:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in _graph().items():
            entry = tarfile.TarInfo(f"cora/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    packed.seek(0)
    yield SimpleNamespace(raw=packed)


def _graph() -> dict[str, bytes]:
    drawn = np.random.default_rng(0)
    classes = drawn.integers(CLASSES, size=NODES)
    words = (
        drawn.random((NODES, WORDS)) < 0.1 + 0.5 * (np.arange(WORDS) % CLASSES == classes[:, None])
    ).astype(int)
    pairs = np.unique(drawn.integers(NODES, size=(EDGES, 2)), axis=0)
    content = (f"{node} {' '.join(map(str, words[node]))} class{classes[node]}" for node in range(NODES))
    return {
        "cora.content": "\n".join(content).encode(),
        "cora.cites": "\n".join(f"{one} {other}" for one, other in pairs).encode(),
    }
