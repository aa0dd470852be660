"""What tells one host from another."""

import os
from pathlib import Path


def host_identity() -> str:
    """Equal in two processes exactly where they may share memory, and 127.0.0.1 leads both to the same place."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"
