"""Push and pull against a plain dictionary, under random interleavings; and who owns what."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.replica.layout import Shape, lay_out
from manyhands.servers.protocol.consistency import ASYNC, SYNC, Clocks, Consistency, Due, OutOfTurn, stale
from manyhands.servers.protocol.messages import Finish, Leave, Pull, Push, Values
from manyhands.servers.protocol.ownership import share_out
from tests.dispatchers import make_dispatcher

RATE = 0.5
WORKERS = 3
LAYOUT = lay_out(
    [Shape(name=f"p{i}", shape=(4096 + 16 * i,), group=0) for i in range(3)], span_elements=4096, lanes=1
)
GROUPS = share_out(LAYOUT, 1, 8, group_bytes=1)
RULES = {"sync": SYNC, "async": ASYNC, "stale 0": stale(0), "stale 1": stale(1), "stale 3": stale(3)}


class Plain:
    """The same rules as a person would write them down: values in a dictionary, everything looked up anew."""

    def __init__(self, rule: Consistency) -> None:
        self.rule = rule
        self.values = {group.index: float(group.index) for group in GROUPS}
        self.pushed: dict[tuple[int, int], dict[int, float]] = {}  # by step and group: by worker
        self.finished = dict.fromkeys(range(WORKERS), 0)
        self.out: set[int] = set()

    def push(self, worker: int, step: int, group: int, gradient: float) -> None:
        self.pushed.setdefault((step, group), {})[worker] = gradient
        if not self.rule.gathers:
            self.values[group] -= RATE * gradient
        elif len(self.pushed[step, group]) == WORKERS:
            self.values[group] -= RATE * sum(self.pushed[step, group].values())

    def may_go_on(self, worker: int, step: int, group: int) -> bool:
        """Whether the worker should by now have heard of the group that it pushed in this step."""
        if self.rule.gathers:
            return len(self.pushed[step, group]) == WORKERS
        here = [self.finished[other] for other in range(WORKERS) if other not in self.out]
        return worker in self.out or self.rule.bound is None or min(here) >= step + 1 - self.rule.bound


class Real:
    """A shard, with what it has answered."""

    def __init__(self, rule: Consistency) -> None:
        self.params = torch.zeros(LAYOUT.length, dtype=torch.float64)
        for group in GROUPS:
            self.params[group.slice] = float(group.index)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        self.grads = {worker: torch.zeros_like(self.params) for worker in range(WORKERS)}
        self.dispatcher = make_dispatcher(
            GROUPS,
            LAYOUT,
            optimizer,
            self.params,
            Clocks(rule, range(WORKERS)),
            local_grads=self.grads.__getitem__,
        )
        self.versions = dict.fromkeys((group.index for group in GROUPS), 0)
        self.answered: dict[tuple[int, int], float] = {}  # by worker and group

    def say(self, worker: int, message: Any) -> None:
        for to, answer, vector in self.dispatcher.handle(worker, message, None):
            if isinstance(answer, Values):
                assert vector is not None
                assert bool((vector == vector[0]).all())
                self.answered[to, answer.group] = float(vector[0])
                self.versions[answer.group] = max(self.versions[answer.group], answer.version)

    def push(self, worker: int, step: int, group: int, gradient: float) -> None:
        self.grads[worker][GROUPS[group].slice] = gradient
        self.answered.pop((worker, group), None)
        self.say(worker, Push(number=1, group=group, step=step, seen=self.versions[group]))


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=25, deadline=None)
@given(choices=st.lists(st.integers(0, 10**6), min_size=20, max_size=120), data=st.data())
def test_a_shard_is_a_dictionary(name: str, choices: list[int], data: st.DataObject) -> None:
    rule = RULES[name]
    plain, real = Plain(rule), Real(rule)
    steps = dict.fromkeys(range(WORKERS), 0)
    order = {worker: list(range(len(GROUPS))) for worker in range(WORKERS)}  # what is left of the step
    quits = data.draw(st.sampled_from([None, 0, 2])) if not rule.gathers else None

    def waits(worker: int) -> bool:
        """A worker begins a step when it has heard of all groups of the last one."""
        last = steps[worker] - 1
        return last >= 0 and any((worker, group) not in real.answered for group in range(len(GROUPS)))

    for choice in choices:
        ready = [
            w for w in range(WORKERS) if w not in plain.out and (len(order[w]) < len(GROUPS) or not waits(w))
        ]
        assert ready, "all wait for each other"
        worker = ready[choice % len(ready)]
        step = steps[worker]
        if order[worker]:
            group = order[worker].pop(choice % len(order[worker]))
            gradient = float(choice % 7 - 3)
            plain.push(worker, step, group, gradient)
            real.push(worker, step, group, gradient)
        else:
            plain.finished[worker] += 1
            steps[worker] += 1
            order[worker] = list(range(len(GROUPS)))
            real.say(worker, Finish(number=1, step=step))
            if worker == quits and steps[worker] == 2:
                plain.out.add(worker)
                real.say(worker, Leave(number=1))
        for (pushed_step, group), pushes in plain.pushed.items():
            for other in pushes:
                if pushed_step == steps[other] - (group in order[other]):  # the last push of that group
                    expected = plain.may_go_on(other, pushed_step, group)
                    assert ((other, group) in real.answered) == expected
        for group in GROUPS:
            assert bool((real.params[group.slice] == plain.values[group.index]).all())
        assert (
            rule.gathers
            or rule.bound is None
            or all(
                steps[w] - min(steps[o] for o in range(WORKERS) if o not in plain.out) <= rule.bound + 1
                for w in range(WORKERS)
                if w not in plain.out
            )
        )
    real.say(0, Pull(number=1, group=1))
    assert real.answered[0, 1] == plain.values[1]


def test_in_place_nothing_is_due_before_all_have_finished() -> None:
    clocks = Clocks(SYNC, range(2), in_place=True)
    assert clocks.push(0, 0, 5) == []
    assert clocks.push(1, 0, 5) == []
    assert clocks.finish(0, 0) == []
    assert clocks.finish(1, 0) == [Due(5, (0, 1))]


def test_whoever_leaves_is_not_waited_for_and_all_come_back_together() -> None:
    clocks = Clocks(stale(1), range(2))
    for step in range(2):
        clocks.push(0, step, 0)
        clocks.finish(0, step)
    assert not clocks.may_read(2)
    clocks.leave(1)
    assert clocks.may_read(2)
    with pytest.raises(OutOfTurn):
        clocks.push(1, 0, 0)
    clocks.leave(0)
    assert clocks.floor == 0
    clocks.push(1, 0, 0)
    clocks.push(0, 0, 0)


@pytest.mark.parametrize("message", [(0, 1, 0), (0, 0, 0)])
def test_what_is_out_of_turn_is_refused(message: tuple[int, int, int]) -> None:
    clocks = Clocks(ASYNC, range(1))
    clocks.push(0, 0, 0)
    with pytest.raises(OutOfTurn):
        clocks.push(*message)
    with pytest.raises(OutOfTurn):
        clocks.finish(0, 3)


@given(
    sizes=st.lists(st.integers(1, 400_000), min_size=1, max_size=12),
    servers=st.integers(1, 6),
    whole=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_ownership_covers_everything_and_is_balanced(sizes: list[int], servers: int, whole: bool) -> None:
    shapes = [Shape(name=str(i), shape=(size,), group=0, whole=whole) for i, size in enumerate(sizes)]
    layout = lay_out(shapes, span_elements=1 << 16, lanes=servers)
    groups = share_out(layout, servers, 4)
    spans = [span for group in groups for span in group.spans]
    assert spans == list(layout.spans)
    owned = [sum(group.length for group in groups if group.server == server) for server in range(servers)]
    assert max(owned) - min(owned) <= max(group.length for group in groups)


def test_updates_leave_for_backups_before_workers_are_answered_and_peers_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, backup, peer = Real(ASYNC), WORKERS, WORKERS + 1
    shard = real.dispatcher._shard
    monkeypatch.setattr(shard, "forwards", lambda: iter([(backup, None, None)]))
    monkeypatch.setattr(shard, "peer_messages", lambda: iter([(peer, None, None)]))
    replies = real.dispatcher.handle(0, Push(number=1, group=0, step=0, seen=0), None)
    assert [to for to, _, _ in replies] == [backup, 0, peer]
