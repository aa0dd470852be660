"""Which workers belong to a run, generation after generation: the coordinator's decisions, without sockets and clocks.

A generation is over when one of its members is gone, or when its members leave it together because a worker wants to
join or to leave. The next one begins when every living member has left it: members that have the state come first, in
the order of their ranks, and then the members that take the state over (but see `_filled`).

Servers that may be on several hosts are members like workers, but have no rank among them: every server that is there
belongs to the next generation. The coordinator does not know which parameters a server has.

Where several workers form one replica (a model-parallel group), such groups come and go as a whole: the rest of a group
waits, as new workers do, until there are enough for another group.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.cluster.coordinator.control import Change, Here, NewGeneration, No, Over, ToMember


@dataclass(frozen=True)
class _Core:
    """The first members of a generation, whose replicas are whole; `holders` are those of them that have the state."""

    members: Sequence[int] = ()
    holders: Sequence[int] = ()
    is_mixed: bool = False
    """Whether no replica was whole, and the parts of several make one."""
    waits: bool = False
    """Whether the holders need other members first."""


class Membership:
    """`most` is how many may be members at once; `heard` is what each one said last.

    `group_size` workers form one replica. With `replicas_equal` after every step, parts of several replicas make one.
    Where `parts_outlive` their workers, new workers take the places of dead ones.
    """

    def __init__(
        self,
        members: Iterable[int],
        *,
        most: int,
        group_size: int = 1,
        replicas_equal: bool = False,
        parts_outlive: bool = False,
    ) -> None:
        self.generation = 0
        self.current = tuple(members)
        self.heard: dict[int, Here] = {}
        self.gone: set[int] = set()
        self.ended: set[int] = set()  # of those, the ones that cannot come again
        self._most = most
        self._group_size = group_size
        self._replicas_equal, self._parts_outlive = replicas_equal, parts_outlive
        self.new_generation: NewGeneration | None = None
        self.servers: set[int] = set()  # all that were ever heard
        self._has_begun = (
            False  # whether a current member was heard; else the members may know more than this
        )
        self._is_lost = False  # whether no member has the state any more
        # Where the members come one by one: how many will come, once it is known.
        self.expected: int | None = None
        self.expected_servers = 0

    def hear(self, here: Here) -> None:
        """What a member says of itself; one that was given up and speaks again is new."""
        if here.member in self.ended:
            return  # said before it died, and heard after
        if (
            here.generation > self.generation and here.new_generation
        ):  # we were started in the middle of a run
            self.generation, self.new_generation = here.generation, here.new_generation
            self.current = (*here.new_generation.members, *here.new_generation.servers)
            self.servers |= set(here.new_generation.servers)
        self.heard[here.member] = here
        if here.serves:
            self.servers.add(here.member)
        self._has_begun = self._has_begun or here.generation >= 0
        # A loss is only believed of members of the generation in which it was seen.
        if here.generation == self.generation:
            self.gone |= set(here.lost) & set(self.current)
        self._decide()

    def lose(self, member: int) -> None:
        """Nothing was heard of a member for too long; should it speak again, it is new."""
        self.lose_all([member])

    def lose_all(self, members: Iterable[int]) -> None:
        """The same for members that are gone together: no generation begins with some of them."""
        for member in members:
            self.gone.add(member)
            self.heard.pop(member, None)
        self._decide()

    def end(self, member: int) -> None:
        """A member's process has ended."""
        self.ended.add(member)
        self.lose(member)

    def answer(self, member: int) -> ToMember | None:
        """What this member has to be told now; nothing if it may go on as it is."""
        here = self.heard.get(member)
        if here is None:
            return None
        if here.waits:
            is_concerned = member in self.current or here.leaving
            if self.new_generation and is_concerned and here.generation < self.generation:
                return self.new_generation
            if self._is_lost:
                return No(reason="no worker is left from which a new one could take the parameters over")
            return None
        if here.generation < self.generation:
            return Over(generation=here.generation, gone=())  # it was given up: it may come again
        missing = tuple(one for one in self.current if one in self.gone)
        if missing or self.is_left:
            return Over(generation=self.generation, gone=missing)
        return Change(generation=self.generation) if self._wants_change() else None

    @property
    def is_left(self) -> bool:
        """Whether a member has left this generation: members that wait for it now wait in vain."""
        here = [self.heard[member] for member in self.live if member in self.heard]
        return any(one.waits and one.generation == self.generation for one in here)

    @property
    def live(self) -> list[int]:
        """The members of this generation that are not known to be gone."""
        return [member for member in self.current if member not in self.gone]

    def _new(self) -> list[int]:
        """The members that wait for the next generation, as far as there is room."""
        live = self._workers(self.live)
        staying = [m for m in live if m not in self.heard or not self._leaves(self.heard[m])]
        return [*self._admitted(self._waiting(), len(staying)), *self._waiting(serving=True)]

    def _waiting(self, *, serving: bool = False) -> list[int]:
        return sorted(
            member
            for member, here in self.heard.items()
            if here.waits and not here.leaving and (member not in self.current or member in self.gone)
            if (member in self.servers) == serving
        )

    def _workers(self, members: Iterable[int]) -> list[int]:
        return [member for member in members if member not in self.servers]

    def _admitted(self, members: Sequence[int], taken: int) -> list[int]:
        """Of the workers that want to join, those that can: complete groups, as far as there is room."""
        room = min(len(members), max(0, self._most - taken))
        return list(members[: room // self._group_size * self._group_size])

    def _leaves(self, here: Here) -> bool:
        """Whether a member wants to be left out; one that others need for their replica cannot."""
        return here.leaving and self._group_size == 1

    def _wants_change(self) -> bool:
        live = self._workers(self.live)
        leaving = [one for one in live if one in self.heard and self._leaves(self.heard[one])]
        return 0 < len(leaving) < len(live) or bool(self._new())  # the last one cannot leave

    def _core(self, having: Iterable[int]) -> "_Core":
        """Of the members that have the state, those that go on with it: the complete groups, or one that is made of
        what is left."""
        known, current = set(having), self._workers(self.current)
        groups = [current[at : at + self._group_size] for at in range(0, len(current), self._group_size)]
        whole = list(itertools.chain(*(group for group in groups if known.issuperset(group))))
        if whole:
            return _Core(whole, whole)
        if self._replicas_equal:
            by_part = [
                [one for one in current[part :: self._group_size] if one in known]
                for part in range(self._group_size)
            ]
            made = list(itertools.chain(*zip(*by_part, strict=False)))  # as many as the rarest part has
            if made:
                return _Core(made, made, is_mixed=True)
        return self._filled(groups, known) if self._parts_outlive else _Core()

    def _filled(self, groups: Sequence[Sequence[int]], known: set[int]) -> "_Core":
        """The group of which most are left, with new members in the places of the dead. As long as there are too few,
        those that are left wait."""
        group = max(groups, key=lambda group: len(known.intersection(group)), default=())
        holders = [member for member in group if member in known]
        new = iter([*sorted(known.difference(group)), *self._waiting()])
        members = [member if member in known else next(new, None) for member in group]
        complete = [member for member in members if member is not None]
        is_complete = bool(holders) and len(complete) == len(members)
        return _Core(complete if is_complete else [], holders, waits=bool(holders) and not is_complete)

    def _decide(self) -> None:
        if not self.current and not self._has_begun:
            self._begin()
            return
        live = self.live
        here = [self.heard.get(member) for member in live]
        left = [one for one in here if one is not None and one.waits and one.generation == self.generation]
        reports = [one for one in left if one.member not in self.servers]
        staying = [one for one in reports if not self._leaves(one)]
        if not any(one.has_state for one in staying):
            staying = reports  # one has to go on
        core = self._core(one.member for one in staying if one.has_state)
        had_state = any(one.has_state for one in reports) or bool(
            self.new_generation and self.new_generation.state_holders
        )
        self._is_lost = self._has_begun and (
            not self._workers(live)
            or (had_state and len(left) == len(live) and not core.members and not core.waits)
        )
        if not live or len(left) < len(live) or self._is_lost or core.waits:
            return
        state_holders = [one for one in staying if one.member in core.holders]
        others = [*(one.member for one in staying), *self._waiting()]
        new = [member for member in others if member not in core.members]
        members = (*core.members, *self._admitted(new, len(core.members)))
        if not members:
            return
        servers = [one.member for one in left if one.member in self.servers]
        self._begin_generation(
            members,
            servers=(*servers, *self._waiting(serving=True)),
            state_holders=tuple(core.holders),
            last_commits=max(one.commits for one in state_holders or staying),
            steps=max(one.steps for one in reports),
            gone=tuple(member for member in self.current if member in self.gone),
            left=tuple(one.member for one in reports if self._leaves(one) and one.member not in members),
            is_mixed=core.is_mixed,
            in_step=tuple(
                host
                for host in sorted({one.host for one in state_holders})
                if all(one.in_step for one in state_holders if one.host == host)
            ),
        )

    def _begin(self) -> None:
        """The first generation of a run whose members come one by one."""
        waiting, servers = self._workers(self._new()), self._waiting(serving=True)
        if (
            waiting
            and self.expected is not None
            and len(waiting) >= min(self.expected, self._most)
            and len(servers) >= self.expected_servers
        ):
            self._has_begun = True
            self._begin_generation(
                tuple(waiting),
                servers=tuple(servers),
                state_holders=(),
                last_commits=0,
                steps=0,
                gone=(),
                left=(),
            )

    def _begin_generation(self, members: tuple[int, ...], servers: tuple[int, ...], **more: Any) -> None:
        self.current = (*members, *servers)
        self.gone -= set(self.current)
        self.generation += 1
        self.new_generation = NewGeneration(
            generation=self.generation,
            members=members,
            servers=servers,
            hosts=tuple(self.heard[member].host for member in self.current),
            place=self.heard[members[0]].place,
            **more,
        )
