"""What an exception of the script has to do with being a worker, where that is not obvious."""

import os

from manyhands.cluster.launchers import local

_NO_INPUT = (
    "hint: a worker has no standard input; `manyhands launch --debug N script.py` gives worker N this terminal, for "
    "breakpoint() and input()"
)
_NO_MASTER = (
    "hint: under manyhands the session connects the workers; leave init_process_group and the like out. RANK and "
    "WORLD_SIZE are set for what reads them, and MASTER_ADDR is not; a library that takes them as an order to connect "
    "the workers needs `for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'): os.environ.pop(name, None)` before it"
)


def hint(error: BaseException) -> str:
    """One line for below the traceback; empty where there is nothing to add."""
    if local.RANK not in os.environ:
        return ""
    reads = isinstance(error, EOFError) or type(error).__name__ == "BdbQuit"
    if reads and local.TERMINAL not in os.environ:
        return _NO_INPUT
    return _NO_MASTER if "MASTER_ADDR" in str(error) else ""
