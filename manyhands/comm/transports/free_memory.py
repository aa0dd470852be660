"""How much memory this host, or the control group that the process is in, can still give."""

from pathlib import Path

RESERVE = 0.05  # of the host's memory: what the operating system and the page cache should keep


def available_bytes() -> int:
    """What can still be allocated here: the smaller of the host's and the container's free memory."""
    free = int(_field("/proc/meminfo", "MemAvailable:")) * 1024
    total = int(_field("/proc/meminfo", "MemTotal:")) * 1024
    limit = _number("/sys/fs/cgroup/memory.max")
    if limit is not None:
        total = min(total, limit)
        # The page cache counts as used there, but the kernel gives it up when asked.
        cache = sum(
            int(_field("/sys/fs/cgroup/memory.stat", f"{kind}_file ")) for kind in ("active", "inactive")
        )
        free = min(free, limit - (_number("/sys/fs/cgroup/memory.current") or 0) + cache)
    return max(0, free - int(RESERVE * total))


def _field(path: str, name: str) -> str:
    if not Path(path).exists():
        return "0"
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split()[1]
    return "0"


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
