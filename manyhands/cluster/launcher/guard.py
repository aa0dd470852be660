"""A shell that kills what the workers have started, should the launcher be killed.

The kernel kills the workers themselves when the launcher ends (`parent_death.py`), but not their children. The shell
reads the workers' process groups from its standard input; when the launcher's end of it closes, it becomes the program
that kills them.
"""

import contextlib
import subprocess
import sys

from manyhands.cluster.launcher import killed_groups

_SCRIPT = 'while read -r pid; do groups="$groups $pid"; done; exec "$@" $groups'


class Guard:
    """The shell, while the context lasts; leaving it ends the shell without harm to the groups."""

    def __enter__(self) -> "Guard":
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sh", sys.executable, "-I", "-S", killed_groups.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            process_group=0,
            cwd="/",
        )
        return self

    def __exit__(self, *exception: object) -> None:
        with self._shell as shell:
            shell.kill()

    def watch(self, pid: int) -> None:
        """Kill the process group of this worker, too."""
        assert self._shell.stdin
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(f"{pid}\n".encode())
