"""Another user of this machine: a process without root's rights, which does what a piece of Python says.

It loads what it needs while it is still root, since the other user need not be able to read the project.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534
PATIENCE_S = 60

acts = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

_BEGIN = f"""
import os, pathlib, resource, socket, sys, time
{{imports}}
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
os.chdir("/")
"""


@contextmanager
def acting(code: str, *arguments: object, imports: str = "") -> Iterator["subprocess.Popen[str]"]:
    """The other user at work; what it writes to standard output can be read, and leaving the context ends it."""
    command = [sys.executable, "-c", _BEGIN.format(imports=imports) + code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(code: str, *arguments: object, imports: str = "") -> str:
    """What the other user writes until its work is done."""
    with acting(code, *arguments, imports=imports) as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
        return output.strip()


def hears(process: "subprocess.Popen[str]") -> str:
    """The next line that it writes."""
    assert process.stdout
    line = process.stdout.readline()
    assert line, "the other user's process has ended"
    return line.strip()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
