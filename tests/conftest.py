"""What holds for all tests: one thread per worker, and a test leaves the machine as it found it."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Sums of several threads round otherwise. Set before torch is imported, it holds for all threads of this process.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Hundreds of processes load the same modules; compiling ours each time would be a tenth of their start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

PATIENCE_S = 60.0  # tests that run beside this one may have segments of their own for a while


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """No child process and no shared-memory segment outlives its test."""
    before = _children() | _segments()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := (_children() | _segments()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes or segments left behind: {sorted(left)}"


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that ended while we looked
            found |= set((task / "children").read_text().split())
    return {pid for pid in found if not _is_resource_tracker(pid)}


def _is_resource_tracker(pid: str) -> bool:
    """Python's own helper of `multiprocessing`, which stays as long as the process that needed it."""
    with suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _segments() -> set[str]:
    return set(os.listdir("/dev/shm"))
