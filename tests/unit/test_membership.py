"""The coordinator's decisions, without sockets: who is in which generation."""

from manyhands.cluster.coordinator.control import Change, Here, NewGeneration, No, Over
from manyhands.cluster.coordinator.membership import Membership


def here(member: int, generation: int = 0, *, waits: bool = False, commits: int = 5, **more: object) -> Here:
    new_generation = more.pop("new_generation", None)
    has_state = bool(more.pop("has_state", generation >= 0))
    return Here(
        member=member,
        generation=generation,
        new_generation=new_generation,  # type: ignore[arg-type]
        waits=waits,
        has_state=has_state,
        commits=commits,
        steps=commits,
        **more,  # type: ignore[arg-type]
    )


def at_work(size: int, *, most: int | None = None) -> Membership:
    membership = Membership(range(size), most=most or size)
    for member in range(size):
        membership.hear(here(member))
    return membership


def test_nobody_is_told_anything_while_all_is_well() -> None:
    membership = at_work(3)
    assert [membership.answer(member) for member in range(3)] == [None] * 3


def test_a_death_ends_the_generation_and_the_next_begins_when_all_have_left() -> None:
    membership = at_work(3)
    membership.lose(1)
    assert membership.answer(0) == Over(generation=0, gone=(1,))
    membership.hear(here(0, waits=True, commits=5))
    assert membership.answer(0) is None, "worker 2 has not left yet"
    membership.hear(here(2, waits=True, commits=6))
    new_generation = NewGeneration(
        generation=1,
        members=(0, 2),
        state_holders=(0, 2),
        last_commits=6,
        steps=6,
        gone=(1,),
        left=(),
        hosts=(0, 0),
    )
    assert membership.answer(0) == membership.answer(2) == new_generation


def test_one_more_death_before_the_next_generation_has_begun() -> None:
    membership = at_work(3)
    membership.lose(1)
    membership.hear(here(0, waits=True))
    membership.lose(2)
    new_generation = membership.answer(0)
    assert isinstance(new_generation, NewGeneration)
    assert new_generation.members == (0,)
    assert new_generation.gone == (1, 2)


def test_a_loss_that_a_member_has_seen_is_believed() -> None:
    membership = at_work(2)
    membership.hear(here(0, waits=True, lost=(1,)))
    assert isinstance(membership.answer(0), NewGeneration)


def test_who_wants_to_join_waits_for_the_others_to_leave_and_comes_last() -> None:
    membership = at_work(2, most=3)
    membership.hear(here(7, -1, waits=True, commits=0))
    assert membership.answer(7) is None
    assert membership.answer(0) == Change(generation=0)
    for member in (0, 1):
        membership.hear(here(member, waits=True))
    new_generation = membership.answer(7)
    assert isinstance(new_generation, NewGeneration)
    assert (new_generation.members, new_generation.state_holders) == ((0, 1, 7), (0, 1))
    assert new_generation.last_commits == 5


def test_there_is_no_room_for_more_than_asked_for() -> None:
    membership = at_work(2)
    membership.hear(here(7, -1, waits=True))
    assert membership.answer(0) is None


def test_who_leaves_is_told_that_the_others_go_on() -> None:
    membership = at_work(3)
    membership.hear(here(1, leaving=True))
    assert membership.answer(0) == Change(generation=0)
    for member in range(3):
        membership.hear(here(member, waits=True, leaving=member == 1))
    new_generation = membership.answer(1)
    assert isinstance(new_generation, NewGeneration)
    assert (new_generation.members, new_generation.left) == ((0, 2), (1,))


def test_nobody_is_left_to_take_over_from() -> None:
    membership = at_work(1, most=2)
    membership.lose(0)
    membership.hear(here(7, -1, waits=True))
    assert isinstance(membership.answer(7), No)


def test_nobody_is_refused_before_any_of_those_who_are_seated_was_heard() -> None:
    """A coordinator that was started again knows the first members only, and they may have been replaced."""
    membership = Membership(range(2), most=3)
    membership.end(0)
    membership.end(1)
    membership.hear(here(7, -1, waits=True))
    assert membership.answer(7) is None
    new_generation = NewGeneration(
        generation=4, members=(5, 6), state_holders=(5, 6), last_commits=9, steps=9, gone=(), left=()
    )
    membership.hear(here(5, 4, new_generation=new_generation))
    assert membership.answer(5) == Change(generation=4)


def test_a_new_one_does_not_begin_anew_what_only_the_dead_knew() -> None:
    membership = at_work(1, most=2)
    membership.hear(here(7, -1, waits=True))
    membership.hear(here(0, waits=True))
    assert isinstance(membership.answer(7), NewGeneration)
    membership.hear(here(7, 1, new_generation=membership.new_generation, waits=False))
    membership.end(0)
    membership.hear(here(7, 1, new_generation=membership.new_generation, waits=True, has_state=False))
    assert isinstance(membership.answer(7), No)


def test_what_the_dead_have_said_is_not_heard() -> None:
    membership = at_work(3)
    membership.hear(here(1, waits=True))
    membership.end(1)
    membership.hear(here(1, waits=True))
    for member in (0, 2):
        membership.hear(here(member, waits=True))
    new_generation = membership.answer(0)
    assert isinstance(new_generation, NewGeneration)
    assert new_generation.members == (0, 2)


def test_a_worker_that_waits_for_one_that_has_left_is_told() -> None:
    """Where workers do not wait at a step, some leave for a new one while another waits at the end of its data."""
    membership = at_work(2, most=3)
    membership.hear(here(7, -1, waits=True))
    membership.hear(here(0, waits=True))
    assert membership.answer(1) == Over(generation=0, gone=())


def test_the_last_one_cannot_leave() -> None:
    membership = at_work(2)
    for member in range(2):
        membership.hear(here(member, leaving=True))
    assert membership.answer(0) is None
    membership.end(1)
    membership.hear(here(0, waits=True, leaving=True))
    new_generation = membership.answer(0)
    assert isinstance(new_generation, NewGeneration)
    assert (new_generation.members, new_generation.left) == ((0,), ())


def test_a_coordinator_that_was_started_again_learns_from_the_members() -> None:
    """Also where the one before had told only some of a new generation."""
    new_generation = NewGeneration(
        generation=4, members=(0, 2, 5), state_holders=(0, 2, 5), last_commits=9, steps=9, gone=(1,), left=()
    )
    membership = Membership(range(3), most=3)
    membership.lose(1)
    membership.hear(here(2, 3, waits=True))
    membership.hear(here(0, 4, new_generation=new_generation))
    assert (membership.generation, membership.current) == (4, (0, 2, 5))
    assert membership.answer(2) == new_generation
    assert membership.answer(0) is None


def test_who_was_given_up_and_speaks_again_comes_as_a_new_one() -> None:
    membership = at_work(3)
    membership.lose(2)
    for member in (0, 1):
        membership.hear(here(member, waits=True))
    for member in (0, 1):
        membership.hear(here(member, 1, new_generation=membership.new_generation))
    membership.hear(here(2, 0))
    assert membership.answer(2) == Over(generation=0, gone=())
    membership.hear(here(2, 0, waits=True))
    assert membership.answer(0) == Change(generation=1)
    for member in (0, 1):
        membership.hear(here(member, 1, waits=True))
    new_generation = membership.answer(2)
    assert isinstance(new_generation, NewGeneration)
    assert (new_generation.members, new_generation.state_holders) == ((0, 1, 2), (0, 1))


# Replicas of several workers


def in_crews(size: int, crew: int, *, replicas_equal: bool = True, outlive: bool = False) -> Membership:
    membership = Membership(
        range(size), most=size, group_size=crew, replicas_equal=replicas_equal, parts_outlive=outlive
    )
    for member in range(size):
        membership.hear(here(member))
    return membership


def leave(membership: Membership, *members: int) -> NewGeneration:
    for member in members:
        membership.hear(
            here(member, membership.generation, new_generation=membership.new_generation, waits=True)
        )
    assert isinstance(membership.new_generation, NewGeneration)
    return membership.new_generation


def test_a_crew_that_is_not_whole_waits_until_another_makes_it_so() -> None:
    membership = in_crews(6, 2)
    membership.end(3)
    new_generation = leave(membership, 0, 1, 2, 4, 5)
    assert (
        new_generation.members,
        new_generation.state_holders,
        new_generation.left,
        new_generation.is_mixed,
    ) == ((0, 1, 4, 5), (0, 1, 4, 5), (), False)
    for member in new_generation.members:
        membership.hear(here(member, 1, new_generation=new_generation))
    assert membership.answer(2) is None, "it waits"
    assert membership.answer(0) is None, "the others go on"
    membership.hear(here(6, -1, waits=True))
    assert membership.answer(0) == Change(generation=1)
    new_generation = leave(membership, 0, 1, 4, 5)
    assert (new_generation.members, new_generation.state_holders) == ((0, 1, 4, 5, 2, 6), (0, 1, 4, 5))
    assert membership.answer(2) == membership.answer(6) == new_generation


def test_a_new_worker_takes_the_place_of_a_dead_one_whose_part_outlives_it() -> None:
    membership = in_crews(3, 3, outlive=True)
    membership.end(1)
    for member in (0, 2):
        membership.hear(here(member, waits=True, commits=7))
    assert [membership.answer(member) for member in (0, 2)] == [None, None], "they wait for another"
    membership.hear(here(3, -1, waits=True, commits=0))
    new_generation = membership.answer(3)
    assert isinstance(new_generation, NewGeneration)
    assert (new_generation.members, new_generation.state_holders) == ((0, 3, 2), (0, 2))
    assert (new_generation.last_commits, new_generation.is_mixed) == (7, False)


def test_a_second_death_while_the_others_wait_for_a_replacement() -> None:
    membership = in_crews(3, 3, outlive=True)
    membership.end(1)
    for member in (0, 2):
        membership.hear(here(member, waits=True))
    membership.end(0)
    membership.hear(here(3, -1, waits=True))
    assert membership.answer(3) is None
    membership.hear(here(4, -1, waits=True))
    new_generation = membership.answer(4)
    assert isinstance(new_generation, NewGeneration)
    assert (new_generation.members, new_generation.state_holders) == ((3, 4, 2), (2,))


def test_where_all_that_have_a_part_are_dead_a_worker_of_another_crew_takes_it_over() -> None:
    membership = in_crews(4, 2, outlive=True)
    membership.end(1)
    membership.end(3)
    new_generation = leave(membership, 0, 2)
    assert (new_generation.members, new_generation.state_holders) == ((0, 2), (0,))


def test_where_no_worker_is_left_the_parts_are_lost() -> None:
    membership = in_crews(2, 2, outlive=True)
    membership.end(0)
    membership.end(1)
    membership.hear(here(2, -1, waits=True))
    assert isinstance(membership.answer(2), No)


def test_where_no_crew_is_whole_parts_of_several_make_one() -> None:
    membership = in_crews(4, 2)
    membership.end(0)
    membership.end(3)
    new_generation = leave(membership, 1, 2)
    assert (new_generation.members, new_generation.state_holders, new_generation.is_mixed) == (
        (2, 1),
        (2, 1),
        True,
    )


def test_where_replicas_differ_parts_of_several_do_not_make_one() -> None:
    membership = in_crews(4, 2, replicas_equal=False)
    for member in (0, 3):
        membership.end(member)
    for member in (1, 2):
        membership.hear(here(member, waits=True))
    assert isinstance(membership.answer(1), No)


def test_where_a_part_is_lost_nobody_waits_for_ever() -> None:
    membership = in_crews(4, 2)
    for member in (0, 2):
        membership.end(member)
    for member in (1, 3):
        membership.hear(here(member, waits=True))
    assert isinstance(membership.answer(1), No)
    assert isinstance(membership.answer(3), No)


def test_one_that_others_need_for_their_replica_cannot_leave() -> None:
    membership = in_crews(4, 2)
    membership.hear(here(1, leaving=True))
    assert membership.answer(0) is None


def with_servers() -> Membership:
    """Workers 0 and 1000 on two hosts, and a server beside each; all are at work."""
    membership = Membership([], most=1000)
    membership.expected, membership.expected_servers = 2, 2
    for member in (0, 1, 1000, 1001):
        assert membership.new_generation is None, "not all have come"
        membership.hear(new_on(member))
    new_generation = membership.answer(0)
    assert isinstance(new_generation, NewGeneration)
    for member in membership.current:
        membership.hear(
            here(member, 1, new_generation=new_generation, host=member // 1000, serves=member % 1000 == 1)
        )
    return membership


def new_on(member: int) -> Here:
    return here(member, -1, waits=True, host=member // 1000, serves=member % 1000 == 1, commits=0)


def test_servers_that_are_members_have_seats_after_the_workers() -> None:
    membership = with_servers()
    assert membership.new_generation is not None
    assert membership.new_generation.members == (0, 1000)
    assert membership.new_generation.servers == (1, 1001)
    assert membership.new_generation.hosts == (0, 1, 0, 1)


def test_a_server_that_dies_ends_the_generation_and_a_new_one_begins_another() -> None:
    membership = with_servers()
    membership.end(1001)
    assert membership.answer(1) == Over(generation=1, gone=(1001,))
    for member in (0, 1000):
        membership.hear(
            here(member, 1, waits=True, host=member // 1000, new_generation=membership.new_generation)
        )
        assert membership.answer(member) is None, "the other server has not left yet"
    membership.hear(here(1, 1, waits=True, serves=True, new_generation=membership.new_generation))
    new_generation = membership.answer(1)
    assert isinstance(new_generation, NewGeneration)
    assert (new_generation.members, new_generation.servers, new_generation.state_holders) == (
        (0, 1000),
        (1,),
        (0, 1000),
    )
    for member in membership.current:
        membership.hear(
            here(member, 2, new_generation=new_generation, host=member // 1000, serves=member == 1)
        )
    membership.hear(here(1002, -1, waits=True, host=1, serves=True))
    assert membership.answer(0) == Change(generation=2)


def test_without_a_worker_servers_have_nobody_to_wait_for() -> None:
    membership = with_servers()
    for member in (0, 1000):
        membership.end(member)
    membership.hear(here(1, 1, waits=True, serves=True, new_generation=membership.new_generation))
    assert isinstance(membership.answer(1), No)


def test_a_coordinator_that_was_started_again_learns_who_serves() -> None:
    before = with_servers()
    membership = Membership([], most=1000)
    membership.hear(here(0, 1, new_generation=before.new_generation))
    assert membership.current == before.current
    assert membership.servers == {1, 1001}
