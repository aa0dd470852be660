"""A checkpoint that another process writes: started, looked after and waited for by the worker that has copied it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from manyhands.checkpoint import index
from manyhands.checkpoint.disk import REAL_DISK, remove_leftovers
from manyhands.checkpoint.publish import failure
from manyhands.checkpoint.writer import Job, Result

_ROOT = str(Path(__file__).parents[2])
# Not `-m`, which would look for modules in whatever directory the script has gone to.
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from manyhands.checkpoint.writer import main; main()"
)

_running: "list[Writing]" = []


class Writing:
    """One checkpoint on its way to the disk."""

    def __init__(self, job: Job, directory: Path) -> None:
        self.step = job.step
        self.directory = directory
        self.result: Result | None = None
        self.took_s = 0.0
        self._began_s = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, _ROOT, msgspec.json.encode(job).decode(), str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[job.fd],
        )
        _running.append(self)

    def is_over(self) -> bool:
        """Whether the process has ended, without waiting for it."""
        return self.result is not None or self._process.poll() is not None

    def wait(self) -> Result:
        """What became of it, when it is over; also if the process was killed."""
        if self.result is None:
            said, _ = self._process.communicate()
            self.took_s = time.monotonic() - self._began_s
            _running.remove(self)
            code = self._process.returncode
            if code == 0:
                self.result = msgspec.json.decode(said, type=Result)
            else:
                ended = (
                    f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                )
                why = failure(self.directory, self.step, f"the process that wrote it {ended}")
                self.result = Result(error=str(why))
        return self.result

    def abandon(self) -> None:
        """End the process, and remove what it had not finished; also in the middle of a wait for it."""
        self._process.send_signal(signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(self._process.pid, 0)  # not the object's own wait, in which a signal may have found us
        with contextlib.suppress(OSError):
            remove_leftovers(REAL_DISK, self.directory, index.OURS)


def wait_for(directory: Path) -> None:
    """Until nothing that this process saves there is on its way any more."""
    for writing in [one for one in _running if one.directory.absolute() == directory.absolute()]:
        writing.wait()


def abandon_all() -> None:
    """For a process that must end at once."""
    for writing in _running:
        writing.abandon()
