"""A control group with little memory, in which a process is killed by the kernel when it asks for more."""

import contextlib
import itertools
import os
import time
from pathlib import Path

LIMIT_BYTES = 32 << 20
_ROOT = Path("/sys/fs/cgroup")
_serial = itertools.count()


def available() -> str | None:
    """None if the kernel lets us make one, else the reason why not."""
    try:
        with MemoryGroup():
            return None
    except OSError as error:
        return f"control groups of memory are not permitted here: {error}"


class MemoryGroup:
    """Leaving the context removes it, when all processes in it have ended."""

    def __init__(self) -> None:
        is_first_version = (_ROOT / "memory").is_dir()
        self._limit = "memory.limit_in_bytes" if is_first_version else "memory.max"
        name = f"manyhands-{os.getpid()}-{next(_serial)}"
        self.path = (_ROOT / "memory" if is_first_version else _ROOT) / name

    def __enter__(self) -> "MemoryGroup":
        self.path.mkdir()
        try:
            (self.path / self._limit).write_text(str(LIMIT_BYTES))
        except OSError:
            self.path.rmdir()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        until_s = time.monotonic() + 5.0
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):  # a process that was killed is still being taken apart
                self.path.rmdir()
                return
            time.sleep(0.02)
        self.path.rmdir()
