"""A shard that writes down in the host's memory what it is about to do: another process can take over from it."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from manyhands.replica.layout import Span
from manyhands.replica.optimizer.hyper_parameters import NamedNumbers
from manyhands.servers.process.group_update import GradientReader, GroupUpdate
from manyhands.servers.process.shard import PlainShard, WrappedShard
from manyhands.servers.process.vectors import Vectors
from manyhands.servers.process.write_ahead_log import WriteAheadLog
from manyhands.servers.protocol.consistency import Clocks, Consistency
from manyhands.servers.protocol.messages import BEFORE
from manyhands.servers.protocol.push_notes import round_key


class LoggedShard(WrappedShard):
    """A plain shard with a write-ahead log."""

    def __init__(
        self, plain: PlainShard, log: WriteAheadLog, reader: GradientReader, rule: Consistency
    ) -> None:
        super().__init__(plain)
        self._plain = plain
        self._log = log
        self._reader = reader
        self._rule = rule
        # Without gathering, workers read spans while they change: a half of an update is nothing new to them.
        self._write = self._write_reversibly if rule.gathers else self._write_once

    def make(self, updates: Sequence[GroupUpdate], factor: float, rounds: int) -> None:
        self._plain.set_factor(factor)
        if not updates:
            self._log.pass_over(rounds)
            return
        group = -1 if self._rule.gathers else updates[0].group.index
        self._log.plan(rounds=rounds, workers=updates[0].workers, group=group, factor=factor)
        self._make_planned(updates, factor, rounds)

    def _make_planned(self, updates: Iterable[GroupUpdate], factor: float, rounds: int) -> None:
        for update in updates:
            if update.given:
                # A server that died may have made the update of some spans.
                spans = [span for span in update.group.spans if not self._log.has(span)]
                self._plain.write(update, spans, factor, self._write)
        self._log.finish(rounds)

    def _write_reversibly(self, span: Span, gradient: Tensor, skipped: frozenset[int]) -> None:
        self._log.update(self._plain.updates, span, gradient, skipped)

    def _write_once(self, span: Span, gradient: Tensor, skipped: frozenset[int]) -> None:
        self._log.note(span)
        self._plain.updates.apply(span, gradient, skipped)

    def set_optimizer(self, settings: NamedNumbers) -> None:
        super().set_optimizer(settings)
        self._log.note_settings()

    def regroup(self, generation: int) -> None:
        self._log.generation = generation

    def noted(self, rounds: int, clocks: Clocks) -> list[GroupUpdate]:
        key, groups = round_key(clocks.generation, rounds), self._plain.groups.by_index.values()
        found = [(group, list(self._log.notes.pushes(group, key))) for group in groups]
        return [self._reader.local_update(group, pushes, clocks) for group, pushes in found if pushes]

    def take_over(self, clocks: Clocks) -> Sequence[GroupUpdate]:
        """Repair the span that the dead server was changing, and finish the updates that it had begun."""
        log, plain = self._log, self._plain
        log.take_over(plain.updates)
        plain.updates.take_from_others(plain.groups.spans)
        plain.set_factor(log.factor)
        clocks.rounds, clocks.generation = log.rounds, log.generation
        planned = log.planned
        if planned is None:
            return ()
        rounds, index, workers = planned
        if index < 0 and not self._rule.weighs:
            updates = self.noted(rounds, clocks)
        else:  # none of them has pushed anything since
            groups = plain.groups.by_index
            updates = [
                self._reader.local_update(
                    group, [(worker, log.notes.last(worker, group)) for worker in workers], clocks
                )
                for group in ([groups[index]] if index >= 0 else groups.values())
            ]
        self._make_planned(updates, log.factor, rounds)
        clocks.rounds = rounds
        return updates


class LoggedVectors(Vectors):
    """Vectors for an optimizer that runs elsewhere; the parameters before a step outlive this server."""

    def __init__(
        self, params: Mapping[int, Tensor], before: Mapping[int, Tensor], log: WriteAheadLog
    ) -> None:
        super().__init__(params, before)
        self._log = log
        if log.keeps_before:
            self.recall(BEFORE)

    def combine(self, name: str, terms: Sequence[tuple[str, float]]) -> None:
        super().combine(name, terms)
        if name == BEFORE:
            self._log.note_before()
