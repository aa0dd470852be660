"""What holds for all tests: one thread per worker, and a test leaves the machine as it found it."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Sums of several threads round otherwise, and workers as threads of one process share the setting.
torch.set_num_threads(1)

PATIENCE_S = 5.0


def _left_behind(children: set[str], segments: set[str]) -> set[str]:
    return (_children() - children) | (_segments() - segments)


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= set((task / "children").read_text().split())
        except OSError:
            continue  # a thread that ended while we looked
    return found


def _segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """No child process and no shared-memory segment outlives its test."""
    children, segments = _children(), _segments()
    environment = dict(os.environ)
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := _left_behind(children, segments)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes or segments left behind: {sorted(left)}"
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name)
    }
    assert not changed - {"PYTEST_CURRENT_TEST"}, f"variables changed: {sorted(changed)}"
