"""A shell that kills what the workers have started, should the launcher be killed.

The kernel kills the workers themselves when the launcher ends (`parent_death.py`), but not their children. The shell
reads the workers' process groups from its standard input, and kills them when the launcher's end of it closes.
"""

import contextlib
import subprocess

_SCRIPT = 'while read -r pid; do groups="$groups -$pid"; done; kill -s KILL -- $groups'


class Guard:
    """The shell, while the context lasts; leaving it ends the shell without harm to the groups."""

    def __enter__(self) -> "Guard":
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
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
