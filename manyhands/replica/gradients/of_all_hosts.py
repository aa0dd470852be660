"""The sum over all hosts, where some gradients travel as factors and the others as matrices."""

from torch import Tensor

from manyhands import telemetry
from manyhands.replica.gradients.factors_between import FactorsBetween
from manyhands.replica.gradients.hooks import for_none
from manyhands.replica.gradients.summing import Gradients
from manyhands.replica.layout import Span


class GradientsOfHosts(Gradients):
    """One step's gradients, whose factors other hosts may have as well."""

    @property
    def _between(self) -> FactorsBetween | None:
        """Where factors may go to other hosts in this step."""
        factors, announced = self._factors, self._on_ready
        if not isinstance(factors, FactorsBetween) or factors.is_over or announced in (None, for_none):
            return None
        return factors

    def exchange_factors(self) -> list[Span]:
        """After `finish`, on all workers: hear from the other hosts how much there is, and send the rest of it. Returns
        the owned spans whose gradients must travel as matrices after all; their sum over this host is complete."""
        if (between := self._between) is None:
            return []
        with telemetry.timed("exchange"):
            between.tell()
            dense = between.hear()
            spans = [span for span in self.owned if span.places[0] in dense]
            for span in spans:
                self.complete(span)
            self._factored = {index: one for index, one in self._factored.items() if index not in dense}
            between.send_rest()
        return spans

    @property
    def factored(self) -> list[Span]:
        """The owned spans whose sum over all hosts is made of factors."""
        return [span for span in self.owned if span.places[0] in self._factored]

    def await_factors(self, *, meet: bool) -> None:
        """Return when this worker's part of the other hosts' factors is here; to `meet`: when all of them are."""
        if (between := self._between) is not None:
            with telemetry.timed("exchange"):
                between.wait()
                if meet and self._progress:
                    between.meet()

    def whole(self) -> Tensor:
        """The sum over all hosts of a step that is complete here, for a worker that has only its own spans."""
        if not self._factored:
            return self.total
        found = self.total.clone()
        for span in self.spans:
            if (factors := self._factored.get(span.places[0])) is not None:
                factors.sum_of(span, found[span.slice])
        return found
