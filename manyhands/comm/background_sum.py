"""A sum that goes on while its worker computes, for transports that have no such form themselves."""

import threading
from collections.abc import Callable


class Background:
    """At most one piece of work at a time, in a thread that ends with it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], None]) -> None:
        self.finish()
        # A daemon: a worker that fails meanwhile must be able to end although the others never answer.
        self._thread = threading.Thread(target=self._run, args=(work,), name="sum", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error

    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until it is done, if there is any; what went wrong in the thread is raised here."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error:
            raise error
