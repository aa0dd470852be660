"""Where the workers of a step wait for each other, where their own sum is not enough."""

from manyhands import telemetry
from manyhands.replica.barrier_group import BarrierGroup
from manyhands.replica.gradients.summing import Gradients
from manyhands.replica.memory import Team
from manyhands.replica.optimizer.updates import StepGate
from manyhands.replica.state.step_copies import StepCopies


class LoneHostGate(StepGate):
    """A worker that is alone on its host: other hosts have to come as far, and no worker beside it."""

    gated = True


class HostsGate(StepGate):
    """A step is applied when every worker of the host has the sums of all hosts."""

    gated = True
    hears_from_hosts = True

    def __init__(self, gradients: Gradients, team: Team) -> None:
        super().__init__(gradients, team)
        self._received = team.progress()

    @property
    def begun(self) -> int:
        return min(self._received.values())

    def receive(self) -> None:
        self._received.publish(self._gradients.step)
        with telemetry.timed("wait"):
            self._received.wait(self._gradients.step)


class PartsGate(StepGate):
    """A step is applied when all parts of all replicas have their sums: then no part needs another any more."""

    def __init__(
        self,
        gradients: Gradients,
        team: Team,
        group: BarrierGroup,
        inner: StepGate,
        copies: StepCopies | None = None,
    ) -> None:
        super().__init__(gradients, team)
        self.gated, self.hears_from_hosts = inner.gated, inner.hears_from_hosts
        self._inner = inner
        self._copies = copies
        self._group = group
        self._counter = group.host.progress()

    @property
    def begun(self) -> int:
        return min(self._counter.values())

    def open(self) -> None:
        if self._copies:
            self._copies.make(self._gradients.step)
        self._counter.publish(self._gradients.step)
        with telemetry.timed("wait"):
            self._counter.wait(self._gradients.step)

    def receive(self) -> None:
        self._inner.receive()

    def settle(self) -> None:
        self._group.host.barrier()
