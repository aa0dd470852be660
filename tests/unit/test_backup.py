"""What servers have of each other's groups: who has what, and that it is the same bits on both."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from manyhands.replica.optimizer.updates import Updates
from manyhands.servers.process.backup import Backup
from manyhands.servers.protocol.ownership import LOTS, SpanGroup, assign
from manyhands.servers.protocol.scheme import Scheme, describe

USED = {0: 7}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))


def adam(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(of.parameters(), lr=0.1)


def scheme() -> Scheme:
    made = model()
    return describe(made, adam(made), LOTS)


def server(*, goes_back: bool = True) -> Backup:
    """One that has been given all groups, with the same values."""
    made, known = model(), scheme()
    vectors = {name: torch.zeros(known.layout.length) for name in ("params", *known.states)}
    for place, param in zip(known.layout.places, reversed(list(made.parameters())), strict=True):
        vectors["params"][place.start : place.stop] = param.detach().view(-1)
    optimizer = adam(made)
    updates = Updates(optimizer, known.layout, vectors["params"], allocate=vectors.__getitem__, exact=False)
    backup = Backup(known.groups, optimizer, updates, vectors["params"], goes_back=goes_back)
    backup.begin_generation(1)
    for group in known.groups:
        backup.begin(group.index)
    return backup


def gradient(group: SpanGroup, step: int) -> Tensor:
    return torch.randn(group.length, generator=torch.Generator().manual_seed(100 * step + group.index))


def update(backup: Backup, groups: Sequence[SpanGroup], step: int) -> None:
    for group in groups:
        backup.apply(group.index, gradient(group, step), frozenset(), USED)


def alike(one: Backup, other: Backup) -> bool:
    return all(torch.equal(one.vectors[name], other.vectors[name]) for name in one.vectors)


def test_what_is_taken_over_goes_on_to_the_bit() -> None:
    one, other, groups = server(), server(), scheme().groups
    assert len(groups) > 2
    for step in range(3):
        update(one, groups, step)
    for group in groups:
        other.take(group.index, one.content(group.index), one.counts[group.index], USED, 1)
    assert alike(one, other)
    assert other.counts == one.counts
    assert other.used == one.used
    for backup in (one, other):
        update(backup, groups, 3)
    assert alike(one, other), "the optimizer's count of steps has come along"


def test_a_step_that_some_groups_have_is_taken_back() -> None:
    one, other, groups = server(), server(), scheme().groups
    for step in range(2):
        for backup in (one, other):
            update(backup, groups, step)
    update(one, groups[:2], 2)
    assert not alike(one, other)
    one.go_back(2)
    assert alike(one, other)
    assert set(one.counts.values()) == {2}
    for backup in (one, other):
        update(backup, groups, 3)
    assert alike(one, other), "the optimizer's count of steps has gone back as well"


def test_a_group_that_came_as_it_is_cannot_go_back_and_is_of_no_use() -> None:
    one, other, groups = server(), server(), scheme().groups
    update(one, groups, 0)
    other.take(0, one.content(0), 1, {}, 1)
    other.go_back(0)
    assert 0 not in other.counts
    assert other.counts[1] == 0


def test_a_copy_is_made_with_the_settings_of_the_owner() -> None:
    one, other, groups = server(), server(), scheme().groups
    settings = [{"lr": [0.5], "betas": [0.9, 0.999], "eps": [1e-8], "weight_decay": [0.0]}]
    one.apply_as(settings, 0, gradient(groups[0], 0), frozenset(), USED)
    other.apply(0, gradient(groups[0], 0), frozenset(), USED)
    assert not alike(one, other)
    update(one, groups[1:], 0)
    update(other, groups[1:], 0)
    for name in one.vectors:
        rest = slice(groups[1].start, None)
        assert torch.equal(one.vectors[name][rest], other.vectors[name][rest]), "its own are what they were"


def test_whoever_was_left_out_of_a_generation_has_nothing() -> None:
    backup = server()
    backup.begin_generation(2)
    assert backup.counts
    backup.begin_generation(4, follows=False)
    assert not backup.counts


def test_how_far_workers_had_come_is_known_until_those_of_a_later_generation_push() -> None:
    backup, groups = server(), scheme().groups
    update(backup, groups, 0)
    backup.begin_generation(2)
    assert (backup.used_in, backup.used[0]) == (1, USED)
    backup.apply(0, None, frozenset(), {1: 3})
    assert (backup.used_in, dict(backup.used)) == (2, {0: {1: 3}})


@pytest.mark.parametrize("hosts", [(0,), (0, 1), (0, 0, 1), (0, 1, 2), (0, 0, 1, 1, 2)])
def test_copies_are_on_other_hosts_and_everyone_has_a_share(hosts: tuple[int, ...]) -> None:
    known = scheme().groups
    for group in assign(known, hosts, copies=0):
        assert group.copy is None
    groups = assign(known, hosts, copies=1)
    assert [(one.start, one.stop) for one in groups] == [(one.start, one.stop) for one in known]
    assert {group.server for group in groups} == set(range(min(len(hosts), len(known))))
    for group in groups:
        if len(set(hosts)) == 1:
            assert group.copy is None
        else:
            assert group.copy is not None
            assert hosts[group.copy] != hosts[group.server]
