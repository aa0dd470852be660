"""Batches out of requests, under random interleavings of requests, batches, failures and deadlines."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.serving.batcher import (
    Answer,
    Batch,
    Batcher,
    DeadlinePassed,
    ModelError,
    QueuedRequest,
    QueueFull,
)


class Clients:
    """Requests whose rows are one byte each; a model doubles every byte."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.answers: dict[int, list[Answer]] = {}
        self.asked: dict[int, bytes] = {}

    def ask(self, handle: int, rows: int, deadline_s: float = math.inf) -> QueuedRequest:
        number = len(self.asked)
        content = bytes((number * 7 + row) % 100 for row in range(rows))
        self.asked[number], self.answers[number] = content, []
        work = QueuedRequest(
            handle=handle,
            rows=rows,
            row_shape=(),
            content=memoryview(content),
            deadline_s=deadline_s,
            answer=self.answers[number].append,
        )
        try:
            self.batcher.add(work)
        except QueueFull as error:
            work.refuse(error)
        return work

    def check(self) -> None:
        for number, answers in self.answers.items():
            assert len(answers) <= 1, "an answer comes once"
            for answer in answers:
                if isinstance(answer, memoryview):
                    assert bytes(answer) == doubled(self.asked[number])


def doubled(content: bytes) -> bytes:
    return bytes(2 * byte for byte in content)


def compute(batcher: Batcher, batch: Batch, took_s: float = 0.001) -> None:
    content = b"".join(batch.contents())
    assert len(content) == batch.size
    batcher.finished(batch, took_s)
    batch.complete(memoryview(doubled(content)))


EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.tuples(st.integers(0, 2), st.integers(1, 30))),
    st.tuples(st.just("take"), st.none()),
    st.tuples(st.just("compute"), st.integers(0, 5)),
    st.tuples(st.just("fail"), st.integers(0, 5)),
    st.tuples(st.just("leave"), st.integers(0, 50)),
)


@settings(max_examples=200, deadline=None)
@given(events=st.lists(EVENTS, max_size=60), most=st.integers(1, 16), sizes=st.booleans())
def test_every_request_is_answered_once_with_its_own_rows(events: list, most: int, sizes: bool) -> None:
    batcher = Batcher(most, 100, (2, 8) if sizes else ())
    clients, works, out = Clients(batcher), [], []
    for handle in range(3):
        batcher.open(handle)
    for kind, what in events:
        if kind == "ask":
            works.append(clients.ask(*what))
        elif kind == "take":
            batch = batcher.take()
            if batch is not None:
                assert batch.rows <= batcher.most_rows
                assert len({work.handle for work, _ in batch.parts}) == 1
                out.append(batch)
        elif kind == "leave" and works:
            works[what % len(works)].is_over = True
        elif out and kind in ("compute", "fail"):
            batch = out.pop(what % len(out))
            if kind == "compute":
                compute(batcher, batch)
            else:
                batcher.again(batch, ModelError("it failed"))
        clients.check()
    while out or (batch := batcher.take()) is not None:
        compute(batcher, out.pop() if out else batch)
    clients.check()
    left = {id(work.answer) for work in works if not work.is_over}
    assert not left
    assert all(batcher.waiting_rows(handle) == 0 for handle in range(3))


def test_what_queued_while_a_batch_computed_is_the_next_batch() -> None:
    batcher = Batcher(most_rows=8)
    clients = Clients(batcher)
    batcher.open(0)
    clients.ask(0, 1)
    first = batcher.take()
    assert first is not None
    assert first.rows == 1, "nothing waits for more"
    for _ in range(5):
        clients.ask(0, 1)
    second = batcher.take()
    assert second is not None
    assert second.rows == 5


def test_a_large_request_is_cut_and_others_go_between() -> None:
    batcher = Batcher(most_rows=8)
    clients = Clients(batcher)
    batcher.open(0)
    clients.ask(0, 40)
    clients.ask(0, 1)
    order = []
    while (batch := batcher.take()) is not None:
        order.append([len(rows) for _, rows in batch.parts])
        compute(batcher, batch)
    assert order[1] == [1, 7]
    assert all(clients.answers[number] for number in (0, 1))


def test_servables_share_the_time_of_processes_not_the_number_of_batches() -> None:
    batcher = Batcher(most_rows=1, most_waiting_rows=10_000)
    clients = Clients(batcher)
    for handle in (0, 1):
        batcher.open(handle)
        for _ in range(1000):
            clients.ask(handle, 1)
    spent_s: Counter[int] = Counter()
    for _ in range(550):
        batch = batcher.take()
        assert batch is not None
        took_s = 0.010 if batch.handle == 0 else 0.001
        spent_s[batch.handle] += took_s  # type: ignore[assignment]
        compute(batcher, batch, took_s)
    assert spent_s[0] == pytest.approx(spent_s[1], rel=0.05)


def test_idleness_earns_no_claim() -> None:
    batcher = Batcher(most_rows=1)
    clients = Clients(batcher)
    for handle in (0, 1):
        batcher.open(handle)
    for _ in range(100):
        clients.ask(0, 1)
        compute(batcher, batcher.take(), 1.0)  # type: ignore[arg-type]
    for _ in range(10):
        clients.ask(0, 1)
        clients.ask(1, 1)
    order = []
    for _ in range(10):
        batch = batcher.take()
        assert batch is not None
        order.append(batch.handle)
        compute(batcher, batch, 1.0)
    assert Counter(order) == {0: 5, 1: 5}


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    batcher = Batcher(most_rows=4, most_waiting_rows=10)
    clients = Clients(batcher)
    batcher.open(0)
    clients.ask(0, 4)
    batch = batcher.take()
    assert batch is not None
    batcher.finished(batch, 2.0)
    clients.ask(0, 10)
    clients.ask(0, 1)
    (refusal,) = clients.answers[2]
    assert isinstance(refusal, QueueFull)
    assert refusal.retry_after_s == pytest.approx(5.0)


def test_a_request_whose_time_has_passed_is_refused_and_computed_by_nothing() -> None:
    batcher = Batcher()
    clients = Clients(batcher)
    batcher.open(0)
    clients.ask(0, 3, deadline_s=5.0)
    batcher.expire(4.9)
    assert not clients.answers[0]
    batcher.expire(5.0)
    assert isinstance(clients.answers[0][0], DeadlinePassed)
    assert batcher.take() is None


def test_a_request_that_breaks_its_batch_is_refused_alone() -> None:
    batcher = Batcher()
    clients = Clients(batcher)
    batcher.open(0)
    for _ in range(4):
        clients.ask(0, 2)
    while (batch := batcher.take()) is not None:
        if any(work.content[0] == clients.asked[2][0] for work, _ in batch.parts):
            batcher.again(batch, ModelError("it breaks"))
        else:
            compute(batcher, batch)
    assert [type(answers[0]) for answers in clients.answers.values()] == [
        memoryview,
        memoryview,
        ModelError,
        memoryview,
    ]


def test_what_waits_for_a_version_that_goes_is_refused() -> None:
    batcher = Batcher()
    clients = Clients(batcher)
    batcher.open(0)
    clients.ask(0, 2)
    batcher.close(0)
    assert isinstance(clients.answers[0][0], ModelError)
