"""Rows of tables: what is written, what is told to whom, and how a table is divided."""

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.errors import UsageError
from manyhands.replica.gradients.tables import Tables
from manyhands.replica.layout import LARGEST_BLOCK, Layout, Shape, lay_out
from manyhands.replica.optimizer.abilities import keeps_to_rows
from manyhands.replica.optimizer.updates import Updates
from manyhands.servers.process.handlers import Reply
from manyhands.servers.protocol.consistency import ASYNC, SYNC, Clocks, Consistency, stale
from manyhands.servers.protocol.messages import Finish, Gain, NotAMessage, Pull, Push, Put, Values
from manyhands.servers.protocol.ownership import Table, share_out
from manyhands.servers.protocol.rows import as_table, gradient_of, pack, pays, touched, unpack
from tests.dispatchers import make_dispatcher

ROWS, COLUMNS = 700, 12


def layout_of(*shapes: tuple[int, int], servers: int = 1, rows: bool = True, whole: bool = False) -> Layout:
    given = [
        Shape(name=f"p{number}", shape=shape, group=0, rows=rows, whole=whole)
        for number, shape in enumerate(shapes)
    ]
    linear = Shape(name="linear", shape=(50, 7), group=0)
    return lay_out([linear, *given, linear], span_elements=4096, lanes=servers)


def some(numbers: list[int], rows: int, value: float = 1.0) -> Tensor:
    """A gradient of some rows as autograd gives it."""
    values = torch.full((len(numbers), COLUMNS), value)
    indices = torch.tensor([numbers], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, values, (rows, COLUMNS), check_invariants=True).coalesce()


# How a table is divided


@given(
    shapes=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 70)), min_size=1, max_size=3),
    servers=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_table_is_cut_between_rows_and_balanced(shapes: list[tuple[int, int]], servers: int) -> None:
    layout = layout_of(*shapes, servers=servers)
    groups = share_out(layout, servers, 4)
    assert [span for group in groups for span in group.spans] == list(layout.spans)
    for number, shape in enumerate(shapes):
        (index,) = [i for i, place in enumerate(layout.places) if place.name == f"p{number}"]
        blocks = [group for group in groups if index in group.spans[0].places]
        assert all(len(group.spans) == 1 and group.spans[0].places == (index,) for group in blocks)
        assert sum(group.table.rows for group in blocks if group.table) == shape[0]
        assert all((group.start - layout.places[index].start) % shape[1] == 0 for group in blocks)
    owned = [sum(group.length for group in groups if group.server == server) for server in range(servers)]
    assert max(owned) - min(owned) <= max(group.length for group in groups)
    largest = max(map(prod, shapes))
    assert max(group.length for group in groups) <= max(2 * 4096, -(-largest // servers)) + 70 + 16


def test_no_block_is_too_large_for_a_message() -> None:
    (place,) = lay_out(
        [Shape(name="words", shape=(9 * LARGEST_BLOCK // 64, 64), group=0, rows=True)],
        span_elements=1 << 18,
        lanes=1,
    ).spans[:1]
    assert LARGEST_BLOCK / 2 < place.stop - place.start <= LARGEST_BLOCK


def test_a_table_whose_update_needs_all_of_it_stays_whole() -> None:
    layout = layout_of((5000, 60), servers=4, whole=True)
    (span,) = [span for span in layout.spans if layout.places[span.places[0]].rows]
    assert span.stop - span.start == 5000 * 60


# What is written


_numbers = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=30).map(sorted)


@given(steps=st.lists(st.one_of(st.none(), st.just("all"), st.just("elsewhere"), _numbers), max_size=12))
@settings(max_examples=60, deadline=None)
def test_the_vector_is_the_whole_gradient_whatever_came_before(steps: list[Any]) -> None:
    layout = layout_of((ROWS, COLUMNS), servers=3)
    total = torch.zeros(layout.length)
    tables = Tables(layout, total)
    (place,) = [place for place in layout.places if place.rows]
    spans = [span for span in layout.spans if span.index in tables]
    assert len(spans) == 2, "one block would show less"
    for number, step in enumerate(steps, start=1):
        if step == "elsewhere":
            total[place.start : place.stop] = float(number)
            tables.forget()
            continue
        gradient = (
            None
            if step is None
            else torch.full((ROWS * COLUMNS,), float(number))
            if step == "all"
            else some(step, ROWS, float(number))
        )
        for span in spans:
            tables.write(span.index, gradient)
        want = torch.zeros(ROWS, COLUMNS)
        if gradient is not None:
            want = gradient.to_dense().view(ROWS, COLUMNS)
        assert torch.equal(total[place.start : place.stop].view(ROWS, COLUMNS), want)
        known = [tables.touched(span) for span in spans]
        assert step == "all" or sum(len(rows) for rows in known if rows is not None) == len(step or ())


# Numbers of rows as bytes


@given(numbers=_numbers)
def test_numbers_come_out_as_they_went_in(numbers: list[int]) -> None:
    table = Table(rows=ROWS, columns=COLUMNS)
    assert unpack(pack(torch.tensor(numbers, dtype=torch.int64)), table).tolist() == numbers


@given(content=st.binary(max_size=40))
def test_bytes_are_rows_of_the_table_or_refused(content: bytes) -> None:
    table = Table(rows=300, columns=1)
    try:
        numbers = unpack(content, table).tolist()
    except NotAMessage:
        return
    assert numbers == sorted(set(numbers))
    assert all(0 <= number < 300 for number in numbers)


def test_only_rows_that_are_less_than_the_whole_go_alone() -> None:
    table = Table(rows=10, columns=4)
    assert pays(torch.arange(7), table)
    assert not pays(torch.arange(8), table)  # 8 × (4 + 1) is what the whole has
    vector = torch.zeros(48)
    vector[5] = 1.0
    assert touched(vector, table).tolist() == [1]
    assert as_table(vector, table).shape == (10, 4)
    assert gradient_of(torch.tensor([1]), torch.ones(1, 4), table).to_dense().sum() == 4


# Push and answer against a plain dictionary of rows, under random interleavings


RULES = {"sync": SYNC, "async": ASYNC, "stale": stale(1)}
WORKERS = 3


class Told:
    """A shard with a table, and the copies that workers make of it from the answers alone."""

    def __init__(self, rule: Consistency, exchange: Any = None) -> None:
        self.layout = layout_of((ROWS, COLUMNS))
        (self.group,) = [group for group in share_out(self.layout, 1, 4) if group.table]
        assert self.group.table is not None
        self.table = self.group.table
        self.params = torch.zeros(self.layout.length)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self.dispatcher = make_dispatcher(
            [self.group],
            self.layout,
            optimizer,
            self.params,
            Clocks(rule, range(WORKERS)),
            local_grads=dict[int, Tensor]().__getitem__,
            copies=range(WORKERS),
            exchange=exchange,
        )
        self.copies = [torch.zeros(ROWS, COLUMNS) for _ in range(WORKERS)]
        self.answers = [0] * WORKERS
        self.told_rows = 0

    def now(self) -> Tensor:
        return as_table(self.params[self.group.slice], self.table)

    def say(self, worker: int, message: Any, payload: Tensor | None = None) -> None:
        for to, answer, vector in self.dispatcher.handle(worker, message, payload):
            if isinstance(answer, Values):
                assert vector is not None
                if answer.rows is None:
                    self.copies[to] = as_table(vector, self.table).clone()
                else:
                    numbers = unpack(answer.rows, self.table)
                    self.copies[to][numbers] = vector.view(-1, COLUMNS).clone()
                    self.told_rows += len(numbers)
                assert torch.equal(self.copies[to], self.now()), "the worker has missed something"
                self.answers[to] += 1


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=30, deadline=None)
@given(choices=st.lists(st.tuples(st.integers(0, WORKERS - 1), _numbers), min_size=5, max_size=60))
def test_a_table_is_a_dictionary_of_rows(name: str, choices: list[tuple[int, list[int]]]) -> None:
    rule = RULES[name]
    told = Told(rule)
    plain: dict[int, float] = {}
    waiting: dict[int, dict[int, list[int]]] = {}  # by step: what each worker has pushed in it
    steps = [0] * WORKERS
    for worker in range(WORKERS):
        told.say(worker, Pull(number=1, group=told.group.index))
    for worker, numbers in choices:
        if told.answers[worker] <= steps[worker]:
            continue  # it waits for the answer to its last push
        step = steps[worker]
        values = torch.ones(len(numbers) * COLUMNS)
        rows = pack(torch.tensor(numbers, dtype=torch.int64))
        told.say(worker, Push(number=1, group=told.group.index, step=step, seen=0, rows=rows), values)
        told.say(worker, Finish(number=1, step=step))
        steps[worker] += 1
        waiting.setdefault(step, {})[worker] = numbers
        if not rule.gathers or len(waiting[step]) == WORKERS:
            for touched_rows in waiting.pop(step).values():
                for number in touched_rows:
                    plain[number] = plain.get(number, 0.0) - 1.0
        want = torch.zeros(ROWS)
        want[list(plain)] = torch.tensor(list(plain.values()))
        assert torch.equal(told.now(), want[:, None].expand(-1, COLUMNS))
    told.say(0, Pull(number=1, group=told.group.index, whole=False))
    assert torch.equal(told.copies[0], told.now())


def test_rows_of_a_team_are_weighted_by_samples() -> None:
    told = Told(Consistency(gathers=True, teams=2))  # workers 0 and 1, and 2 by itself
    for worker, (numbers, samples) in enumerate([([1, 5], 1), ([5, 7], 3)]):
        rows = pack(torch.tensor(numbers, dtype=torch.int64))
        push = Push(number=1, group=told.group.index, step=0, seen=0, samples=samples, rows=rows)
        told.say(worker, push, torch.ones(len(numbers) * COLUMNS))
    assert told.now()[[0, 1, 5, 7], 0].tolist() == [0.0, -0.25, -1.0, -0.75]


def test_what_was_put_is_news_to_all() -> None:
    told = Told(ASYNC)
    for worker in range(WORKERS):
        told.say(worker, Pull(number=1, group=told.group.index))
    told.say(0, Put(number=1, group=told.group.index), torch.arange(float(told.group.length)))
    told.say(1, Pull(number=1, group=told.group.index, whole=False))
    told.say(
        2,
        Push(number=1, group=told.group.index, step=0, seen=0, rows=pack(torch.tensor([3]))),
        torch.ones(COLUMNS),
    )
    assert told.told_rows == 0, "rows alone would not do"


def test_what_another_server_group_has_added_is_news_to_all() -> None:
    class Adding:
        """An exchange in which all that comes is added here."""

        def gain(self, sender: int, message: Gain, payload: Tensor) -> Iterator[Reply]:
            told.params[told.group.slice].add_(payload)
            yield from ()

        def meet(self) -> None: ...

    told = Told(ASYNC, Adding())
    for worker in range(WORKERS):
        told.say(worker, Pull(number=1, group=told.group.index))
    told.say(
        WORKERS, Gain(number=1, group=told.group.index, serial=1), torch.arange(float(told.group.length))
    )
    told.say(1, Pull(number=1, group=told.group.index, whole=False))
    assert torch.equal(told.copies[1], told.now())
    assert told.told_rows == 0, "rows alone would not do"


# What optimizers do with rows


@pytest.mark.parametrize(
    ("optimizer", "settings_of_it", "keeps"),
    [
        (torch.optim.SGD, {}, True),
        (torch.optim.SGD, {"momentum": 0.5}, False),
        (torch.optim.SGD, {"lr": 0.0, "momentum": 0.5}, False),
        (torch.optim.Adagrad, {}, True),
        (torch.optim.SparseAdam, {}, True),
    ],
)
def test_which_optimizers_leave_other_rows_alone(optimizer: Any, settings_of_it: Any, keeps: bool) -> None:
    made = optimizer([torch.nn.Parameter(torch.zeros(1))], **settings_of_it)
    assert keeps_to_rows(made, made.param_groups[0]) == keeps


@pytest.mark.parametrize(
    ("optimizer", "settings_of_it"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.SGD, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {"weight_decay": 0.1}),
    ],
)
def test_which_optimizers_take_no_rows(optimizer: Any, settings_of_it: Any) -> None:
    made = optimizer([torch.nn.Parameter(torch.zeros(1))], **settings_of_it)
    with pytest.raises(UsageError, match=f"{optimizer.__name__} does not take"):
        keeps_to_rows(made, made.param_groups[0])


def test_momentum_that_begins_later_is_noticed() -> None:
    layout = layout_of((ROWS, COLUMNS))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    updates = Updates(optimizer, layout, torch.zeros(layout.length), allocate=torch.zeros)
    assert updates.keeps_to_rows(0)
    optimizer.param_groups[0]["momentum"] = 0.9
    assert not updates.keeps_to_rows(0)
