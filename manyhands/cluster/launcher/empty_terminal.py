"""A terminal for workers to ask for its size, and on which nothing is ever typed.

Scripts ask the terminal of their standard input how wide it is (`stty size`) and fail where it is none. So workers get
one: it is as large as the launcher's, and every line that a worker wants to read from it is the end of the input.
"""

import contextlib
import fcntl
import os
import struct
import sys
import termios
from collections.abc import Iterator

_USUAL = (24, 80)
_ENDS = b"\x04" * 2048  # each ends one read, as Ctrl-D does; more than a terminal holds is of no use


@contextlib.contextmanager
def empty_terminal() -> Iterator[int]:
    """Its descriptor; that of the null device where the system has no terminal left."""
    try:
        ours, theirs = os.openpty()
    except OSError:
        ours, theirs = os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDONLY)
    else:
        mode = termios.tcgetattr(theirs)
        mode[3] = (mode[3] | termios.ICANON) & ~(termios.ECHO | termios.ISIG)
        termios.tcsetattr(theirs, termios.TCSANOW, mode)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", *(size() or _USUAL), 0, 0))
        os.set_blocking(ours, False)
        with contextlib.suppress(BlockingIOError):
            os.write(ours, _ENDS)
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def size() -> tuple[int, int] | None:
    """Lines and columns of the launcher's own terminal, if it has one."""
    for stream in (sys.__stderr__, sys.__stdout__, sys.__stdin__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found = os.get_terminal_size(stream.fileno())  # type: ignore[union-attr]
            if found.lines and found.columns:
                return found.lines, found.columns
    return None
