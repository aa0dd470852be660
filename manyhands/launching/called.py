"""What a worker of `mh.run` runs: python -m manyhands.launching.called PID CALL VALUES

The numbers are those of the process that called `mh.run` and of its two files in memory.
"""

import sys
import traceback

from manyhands.engine import worker_process
from manyhands.launching.copied import put_value, read_call, theirs


def main() -> None:
    """Make the call, finish the sessions that it has left open, and put its value where the caller looks for it."""
    pid, call, values = map(int, sys.argv[1:])
    sys.excepthook = traceback.print_exception  # which finds the lines of cells, unlike the interpreter's own
    value = read_call(theirs(pid, call))()
    worker_process.close_sessions()  # a model that the call returns is then one by itself
    rank, workers = worker_process.rank(), worker_process.workers()
    if rank < workers:  # else a server, or a worker that came after the others were done
        put_value(theirs(pid, values), rank, workers, value)


if __name__ == "__main__":
    main()
