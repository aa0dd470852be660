"""Which server owns which part of the flat vector: a pure function, the same on workers and servers.

Spans that follow each other form a **group**: what one message carries. A group is a few megabytes, so that a
backward pass makes few messages and the first leave early. All groups are about equally long, and as many as give every
server the same number. Each goes to the server that has the fewest elements so far, so all servers have work from the
beginning of the backward pass to its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from manyhands.replica.layout import Layout, Place, Span

GROUP_BYTES = 4 << 20
LOTS = 12  # elastic servers: groups are cut for so many servers, however many there are


@dataclass(frozen=True, kw_only=True)
class Table:
    """A block of the rows of a parameter of which a step has gradients of some rows only: just those travel."""

    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class SpanGroup:
    """Consecutive spans with one owner."""

    index: int
    server: int
    spans: tuple[Span, ...]
    table: Table | None = None
    every: int = 1
    """Steps from one push to the next."""
    copy: int | None = None
    """The server on another host that has a copy, if there is one."""

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def stop(self) -> int:
        return self.spans[-1].stop

    @cached_property
    def slice(self) -> slice:
        return slice(self.start, self.stop)

    @cached_property
    def places(self) -> frozenset[int]:
        """The parameters of which the group has something."""
        return frozenset(place for span in self.spans for place in span.places)

    @property
    def length(self) -> int:
        return self.stop - self.start


def share_out(
    layout: Layout, servers: int, itemsize: int, group_bytes: int = GROUP_BYTES
) -> tuple[SpanGroup, ...]:
    """Cut the spans into groups and give each an owner."""
    per_server = -(-layout.length * itemsize // (servers * group_bytes))
    owned = [0] * servers
    groups: list[SpanGroup] = []
    for spans in _runs(layout, servers * per_server):
        server = owned.index(min(owned))
        group = SpanGroup(
            index=len(groups),
            server=server,
            spans=tuple(spans),
            table=_table(layout, spans[0]),
            every=_first(layout, spans[0]).every,
        )
        owned[server] += group.length
        groups.append(group)
    return tuple(groups)


def assign(groups: Sequence[SpanGroup], hosts: Sequence[int], copies: int) -> tuple[SpanGroup, ...]:
    """The same groups with the servers that are there now, each on its host, as owners, and with copies elsewhere."""
    owned, copied = [0] * len(hosts), [0] * len(hosts)
    assigned = []
    for group in groups:
        owner = owned.index(min(owned))
        owned[owner] += group.length
        others = [server for server, host in enumerate(hosts) if host != hosts[owner]] if copies else []
        copy = min(others, key=copied.__getitem__, default=None)
        if copy is not None:
            copied[copy] += group.length
        assigned.append(replace(group, server=owner, copy=copy))
    return tuple(assigned)


def _first(layout: Layout, span: Span) -> Place:
    """A parameter that is like all others of its span."""
    return layout.places[span.places[0]]


def _table(layout: Layout, span: Span) -> Table | None:
    place = _first(layout, span)
    if not place.rows:
        return None
    columns = prod(place.shape[1:])
    return Table(rows=(min(span.stop, place.stop) - span.start) // columns, columns=columns)


def _runs(layout: Layout, pieces: int) -> list[list[Span]]:
    """About so many runs of spans that are pushed equally often; a table's span is a run of its own."""
    runs: list[list[Span]] = []
    piece = -1
    for span in layout.spans:
        before, place = _first(layout, runs[-1][0] if runs else span), _first(layout, span)
        alike = before.every == place.every and not (before.rows or place.rows)
        middle = (span.start + span.stop) * pieces // (2 * layout.length)  # the piece that it lies in
        if runs and alike and middle == piece:
            runs[-1].append(span)
        else:
            runs.append([span])
        piece = middle
    return runs
