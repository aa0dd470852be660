"""Where workers and servers of different hosts find each other: addresses and public keys in the run's store.

A server publishes its address and its public key, a worker its public key. Secret keys stay in the process that made
them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manyhands.errors import PeerLost


def read(store: Any, key: str) -> bytes:
    """A value that another process publishes, now or later."""
    with _meeting():
        found: bytes = store.get(key)
    return found


def write(store: Any, key: str, value: str) -> None:
    with _meeting():
        store.set(key, value)


def publish_server(store: Any, server: int, endpoint: str, public_key: bytes) -> None:
    write(store, f"server/{server}", json.dumps([endpoint, public_key.decode()]))


def find_server(store: Any, server: int) -> tuple[str, bytes]:
    """A server's endpoint and public key."""
    endpoint, key = json.loads(read(store, f"server/{server}"))
    return endpoint, key.encode()


def worker_key(rank: int) -> str:
    """Under which name a process publishes its public key."""
    return f"worker-key/{rank}"


@contextmanager
def _meeting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the run's store is gone ({str(error).splitlines()[0]})") from error
