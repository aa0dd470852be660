"""Which versions are loaded and unloaded, under random interleavings of sources, loads, failures and time."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import UnknownName
from manyhands.serving.manager import (
    AVAILABILITY,
    FIRST_RETRY_S,
    LAST_RETRY_S,
    POLICIES,
    RESOURCE,
    VersionManager,
    VersionPhase,
)
from manyhands.serving.stream import ModelVersion, TrafficShares, meant, version_policy

MODEL = "digits"


def version(number: int, mark: str = "") -> ModelVersion:
    return ModelVersion(model=MODEL, version=number, mark=mark, place=Path(f"/versions/{number}"))


class World:
    """What a manager is told, and what it has asked for; checks after every event what must always hold."""

    def __init__(self, policy: str) -> None:
        self.manager = VersionManager(policy)
        self.policy = policy
        self.now_s = 0.0
        self.under_way: list[tuple[bool, ModelVersion]] = []
        self.failed_at_s: dict[ModelVersion, float] = {}
        self.rejected: set[ModelVersion] = set()
        self.aspired: list[ModelVersion] = []
        self.was_ready = False
        self.most_aspired = 0

    def aspire(self, versions: list[ModelVersion]) -> None:
        self.aspired = sorted(set(versions))
        self.most_aspired = max(self.most_aspired, len(self.aspired))
        self.rejected &= set(self.aspired)
        self.failed_at_s = {one: at for one, at in self.failed_at_s.items() if one in self.aspired}
        self.manager.aspire(MODEL, self.aspired)

    def decide(self) -> None:
        in_memory = {one for one, state in self.manager.states(MODEL) if state.is_in_memory}
        for todo in self.manager.due(self.now_s):
            assert (todo.load, todo.version) not in self.under_way
            if todo.load:
                assert todo.version in self.aspired
                assert todo.version not in in_memory
                assert todo.version not in self.rejected
                if todo.version in self.failed_at_s:
                    assert self.now_s >= self.failed_at_s[todo.version] + FIRST_RETRY_S
                if self.policy == RESOURCE:
                    assert in_memory <= set(self.aspired)
            self.under_way.append((todo.load, todo.version))
        assert Counter(self.under_way).most_common(1)[0][1] == 1 if self.under_way else True

    def end(self, index: int, how: str) -> None:
        """One of the things under way ends."""
        if not self.under_way:
            return
        is_load, one = self.under_way.pop(index % len(self.under_way))
        if not is_load:
            self.manager.unloaded(one)
        elif how == "ok":
            self.manager.loaded(one)
            self.failed_at_s.pop(one, None)
        else:
            self.manager.failed(one, how, self.now_s, for_good=how == "rejected")
            if how == "rejected" and one in self.aspired:
                self.rejected.add(one)
            elif one in self.aspired:
                self.failed_at_s[one] = self.now_s
        self.check()

    def check(self) -> None:
        ready = self.manager.ready(MODEL)
        in_memory = [one for one, state in self.manager.states(MODEL) if state.is_in_memory]
        if self.policy == AVAILABILITY and self.was_ready:
            assert ready, "a model that has answered goes on to answer"
        if self.policy == RESOURCE:
            assert len(in_memory) <= max(self.most_aspired, 1)
        self.was_ready = bool(ready)

    def settle(self) -> None:
        """All that is asked for goes well from now on."""
        for _ in range(50):
            self.now_s += LAST_RETRY_S
            self.decide()
            while self.under_way:
                self.end(0, "ok")


EVENTS = st.one_of(
    st.tuples(st.just("aspire"), st.lists(st.integers(1, 5), max_size=3)),
    st.tuples(st.just("decide"), st.none()),
    st.tuples(
        st.just("end"), st.tuples(st.integers(0, 5), st.sampled_from(["ok", "ok", "fails", "rejected"]))
    ),
    st.tuples(st.just("wait"), st.floats(0.0, 5.0)),
    st.tuples(st.just("withdraw"), st.integers(0, 4)),
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=150, deadline=None)
@given(events=st.lists(EVENTS, max_size=40))
def test_any_order_of_events_keeps_what_a_policy_promises(policy: str, events: list) -> None:
    world = World(policy)
    for kind, what in events:
        if kind == "aspire":
            world.aspire([version(number) for number in what])
        elif kind == "decide":
            world.decide()
        elif kind == "end":
            world.end(*what)
        elif kind == "wait":
            world.now_s += what
        elif ready := world.manager.ready(MODEL):
            sent = ready[what % len(ready)]
            if world.manager.withdraw(sent, "fails"):
                world.rejected.add(sent)
        world.check()
    if world.aspired:
        world.settle()
        expected = [one for one in world.aspired if one not in world.rejected]
        ready = world.manager.ready(MODEL)
        assert set(expected) <= set(ready)
        if expected:
            assert ready == expected
        assert not world.under_way


def load(manager: VersionManager, now_s: float = 0.0) -> None:
    for todo in manager.due(now_s):
        (manager.loaded if todo.load else manager.unloaded)(todo.version)


def test_a_rejected_version_never_replaces_the_one_that_answers() -> None:
    manager = VersionManager()
    manager.aspire(MODEL, [version(1)])
    load(manager)
    manager.aspire(MODEL, [version(2)])
    (todo,) = manager.due(0.0)
    assert todo.version == version(2)
    manager.failed(version(2), "accuracy 10 %", 0.0, for_good=True)
    assert manager.due(1e6) == []
    assert manager.ready(MODEL) == [version(1)]
    assert dict(manager.states(MODEL))[version(2)].phase is VersionPhase.REJECTED
    manager.aspire(MODEL, [version(3)])
    load(manager)
    load(manager)
    assert manager.ready(MODEL) == [version(3)]


def test_a_failed_load_is_retried_later_and_later() -> None:
    manager, now_s, pauses_s = VersionManager(), 0.0, []
    manager.aspire(MODEL, [version(1)])
    for _ in range(10):
        begun_s = now_s
        while not manager.due(now_s):
            now_s += FIRST_RETRY_S / 2
        pauses_s.append(now_s - begun_s)
        manager.failed(version(1), "half written", now_s)
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[1] == FIRST_RETRY_S
    assert pauses_s[-1] == LAST_RETRY_S


def test_a_folder_that_is_another_one_under_the_same_number_is_loaded_anew() -> None:
    manager = VersionManager()
    manager.aspire(MODEL, [version(1, "a")])
    load(manager)
    manager.aspire(MODEL, [version(1, "b")])
    load(manager)
    load(manager)
    assert manager.ready(MODEL) == [version(1, "b")]


def test_a_version_is_withdrawn_only_if_another_one_is_ready() -> None:
    manager = VersionManager()
    manager.aspire(MODEL, [version(1)])
    load(manager)
    assert not manager.withdraw(version(1), "fails")
    manager.aspire(MODEL, [version(1), version(2)])
    load(manager)
    assert manager.withdraw(version(2), "fails")
    assert manager.ready(MODEL) == [version(1)]
    load(manager)
    assert manager.due(1e6) == [], "and does not come back"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UnknownName, match="availability-preserving"):
        VersionManager("best-effort")


@pytest.mark.parametrize(
    ("text", "expected"), [("latest", [5]), ("latest:2", [4, 5]), ("all", [1, 2, 4, 5]), ((2, 9), [2])]
)
def test_version_policies(text: str | tuple[int, ...], expected: list[int]) -> None:
    found = [version(number) for number in (4, 1, 5, 2)]
    assert [one.version for one in version_policy(text).aspired(found)] == expected


@pytest.mark.parametrize("text", ["latest:0", "latest:x", "all:2", "newest", (), (0,)])
def test_other_version_policies_are_refused(text: str | tuple[int, ...]) -> None:
    with pytest.raises(Exception, match="version"):
        version_policy(text)


def test_labels_stand_for_what_is_ready() -> None:
    assert [meant(label, [3, 4]) for label in ("newest", "previous", 3, 5)] == [4, 3, 3, None]
    assert [meant(label, [3]) for label in ("newest", "previous")] == [3, 3]
    assert meant("newest", []) is None


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any), st.integers(1, 300))
def test_shares_of_traffic_are_kept_after_any_number_of_requests(weights: list[int], count: int) -> None:
    shares = TrafficShares({str(index): weight for index, weight in enumerate(weights)})
    seen = Counter(shares.next() for _ in range(count))
    for index, weight in enumerate(weights):
        assert abs(seen[str(index)] - count * weight / sum(weights)) < len(weights)
