"""What this process uses of the machine."""

import os
import resource
import sys
import threading
import time


class Usage:
    """CPU since the last sample, memory and threads now."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._wall_s = time.monotonic()

    def sample(self) -> dict[str, float]:
        cpu_s, wall_s = time.process_time(), time.monotonic()
        elapsed_s = max(wall_s - self._wall_s, 1e-3)
        percent = 100 * (cpu_s - self._cpu_s) / elapsed_s
        self._cpu_s, self._wall_s = cpu_s, wall_s
        return {"cpu_percent": round(percent, 1), "memory_bytes": _resident_bytes(), "threads": _threads()}


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the peak is the nearest thing to be had without another dependency
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()
