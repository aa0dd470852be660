"""How a step's updates are made once its gradients are summed: here at once, or by servers.

`logged.py` has the path whose updates survive the death of a worker, `clipping.py` the one that limits the gradient.
"""

from collections.abc import Callable, Collection, Iterable

from torch import Tensor

from manyhands import telemetry
from manyhands.errors import UsageError
from manyhands.replica.gradients.summing import Gradients
from manyhands.replica.layout import Span
from manyhands.replica.memory import Team
from manyhands.replica.optimizer.updates import Updates

Factor = Callable[[], Tensor | float]


def unlimited() -> float:
    """The factor of a gradient whose norm is not limited."""
    return 1.0


class Gate:
    """Where the workers of a team wait for each other in a step; the sum of their gradients is one such place.

    `gates.py` has those of replicas in parts and of several hosts.
    """

    gated = False
    """Whether no span is updated before the sums of all spans have come from the other hosts."""
    hears_from_hosts = False
    """Whether workers have heard from the other hosts, before they updated anything, which parameters are used."""

    def __init__(self, gradients: Gradients, team: Team) -> None:
        self._gradients = gradients
        self._team = team

    @property
    def begun(self) -> int:
        """How many steps all workers of the replica have brought to where updates begin."""
        return self._gradients.passed

    def open(self) -> None:
        """This worker's team has its sum: return when updates may begin."""

    def receive(self) -> None:
        """The sums of all hosts are here for the spans that this worker owns: return when every worker of this host
        has its own. Until then nothing has changed; from then on this host alone can finish the step."""

    def settle(self) -> None:
        """Return when every owner has updated its spans."""
        if self._team.size > 1:
            self._team.barrier()


class UpdatePath:
    """Updates each span when it is asked to; every other path has this interface."""

    is_logged = False
    """Whether survivors can finish an update in which a worker dies."""

    def __init__(self, updates: Updates, gradients: Gradients, gate: Gate) -> None:
        self.updates = updates
        self.skipped: frozenset[int] = frozenset()  # parameters that got no gradient on any worker
        self.gate = gate
        self._gradients = gradients

    def open(self) -> None:
        """This worker's team has its sum: return when updates may begin."""
        self.gate.open()

    def apply(self, span: Span) -> None:
        """Update one owned span."""
        self.make(span, self._gradients.take(span))

    def apply_all(self, spans: Iterable[Span]) -> None:
        """Update all owned spans, also by gradients that are not those of the last backward pass."""
        for span in spans:
            self.apply(span)

    def make(self, span: Span, gradient: Tensor) -> None:
        """Run the optimizer on a span with a gradient."""
        with telemetry.timed("update"):
            self.updates.apply(span, gradient, self.skipped)

    def limit(self, grads: Tensor) -> None:
        """Limit the norm of gradients that an optimizer with a closure is about to see."""

    def settle(self) -> None:
        """Return when every owner has updated its spans."""
        self.gate.settle()

    def recover(self, dead: Collection[int], attempt: int, factor: Factor = unlimited) -> int:
        """Finish the updates of dead workers, by gradients times `factor`; only where they are logged."""
        raise UsageError("survivors cannot finish an update without an undo log")


class RemotePath(UpdatePath):
    """Servers make the updates."""

    def make(self, span: Span, gradient: Tensor) -> None:
        raise UsageError("servers update the parameters; push the gradients to them")
