"""The coordinator's decisions, without sockets: who is in which generation."""

from manyhands.cluster.control import Change, Here, No, Over, Turn
from manyhands.cluster.roster import Roster


def here(member: int, generation: int = 0, *, waits: bool = False, commits: int = 5, **more: object) -> Here:
    turn = more.pop("turn", None)
    has_state = bool(more.pop("has_state", generation >= 0))
    return Here(
        member=member,
        generation=generation,
        turn=turn,  # type: ignore[arg-type]
        waits=waits,
        has_state=has_state,
        commits=commits,
        steps=commits,
        **more,  # type: ignore[arg-type]
    )


def at_work(size: int, *, most: int | None = None) -> Roster:
    roster = Roster(range(size), most=most or size)
    for member in range(size):
        roster.hear(here(member))
    return roster


def test_nobody_is_told_anything_while_all_is_well() -> None:
    roster = at_work(3)
    assert [roster.answer(member) for member in range(3)] == [None] * 3


def test_a_death_ends_the_generation_and_the_next_begins_when_all_have_left() -> None:
    roster = at_work(3)
    roster.lose(1)
    assert roster.answer(0) == Over(generation=0, gone=(1,))
    roster.hear(here(0, waits=True, commits=5))
    assert roster.answer(0) is None, "worker 2 has not left yet"
    roster.hear(here(2, waits=True, commits=6))
    turn = Turn(
        generation=1, members=(0, 2), heirs=2, last_commits=6, steps=6, gone=(1,), left=(), hosts=(0, 0)
    )
    assert roster.answer(0) == roster.answer(2) == turn


def test_one_more_death_before_the_next_generation_has_begun() -> None:
    roster = at_work(3)
    roster.lose(1)
    roster.hear(here(0, waits=True))
    roster.lose(2)
    turn = roster.answer(0)
    assert isinstance(turn, Turn)
    assert turn.members == (0,)
    assert turn.gone == (1, 2)


def test_a_loss_that_a_member_has_seen_is_believed() -> None:
    roster = at_work(2)
    roster.hear(here(0, waits=True, lost=(1,)))
    assert isinstance(roster.answer(0), Turn)


def test_who_wants_to_join_waits_for_the_others_to_leave_and_comes_last() -> None:
    roster = at_work(2, most=3)
    roster.hear(here(7, -1, waits=True, commits=0))
    assert roster.answer(7) is None
    assert roster.answer(0) == Change(generation=0)
    for member in (0, 1):
        roster.hear(here(member, waits=True))
    turn = roster.answer(7)
    assert isinstance(turn, Turn)
    assert (turn.members, turn.heirs) == ((0, 1, 7), 2)
    assert turn.last_commits == 5


def test_there_is_no_room_for_more_than_asked_for() -> None:
    roster = at_work(2)
    roster.hear(here(7, -1, waits=True))
    assert roster.answer(0) is None


def test_who_leaves_is_told_that_the_others_go_on() -> None:
    roster = at_work(3)
    roster.hear(here(1, leaving=True))
    assert roster.answer(0) == Change(generation=0)
    for member in range(3):
        roster.hear(here(member, waits=True, leaving=member == 1))
    turn = roster.answer(1)
    assert isinstance(turn, Turn)
    assert (turn.members, turn.left) == ((0, 2), (1,))


def test_nobody_is_left_to_take_over_from() -> None:
    roster = at_work(1, most=2)
    roster.lose(0)
    roster.hear(here(7, -1, waits=True))
    assert isinstance(roster.answer(7), No)


def test_nobody_is_refused_before_any_of_those_who_are_seated_was_heard() -> None:
    """A coordinator that was started again knows the first members only, and they may have been replaced."""
    roster = Roster(range(2), most=3)
    roster.end(0)
    roster.end(1)
    roster.hear(here(7, -1, waits=True))
    assert roster.answer(7) is None
    turn = Turn(generation=4, members=(5, 6), heirs=2, last_commits=9, steps=9, gone=(), left=())
    roster.hear(here(5, 4, turn=turn))
    assert roster.answer(5) == Change(generation=4)


def test_a_new_one_does_not_begin_anew_what_only_the_dead_knew() -> None:
    roster = at_work(1, most=2)
    roster.hear(here(7, -1, waits=True))
    roster.hear(here(0, waits=True))
    assert isinstance(roster.answer(7), Turn)
    roster.hear(here(7, 1, turn=roster.turn, waits=False))
    roster.end(0)
    roster.hear(here(7, 1, turn=roster.turn, waits=True, has_state=False))
    assert isinstance(roster.answer(7), No)


def test_what_the_dead_have_said_is_not_heard() -> None:
    roster = at_work(3)
    roster.hear(here(1, waits=True))
    roster.end(1)
    roster.hear(here(1, waits=True))
    for member in (0, 2):
        roster.hear(here(member, waits=True))
    turn = roster.answer(0)
    assert isinstance(turn, Turn)
    assert turn.members == (0, 2)


def test_whoever_waits_for_one_that_has_left_is_told() -> None:
    """Where nobody waits for anybody at a step, some leave for a new one while another waits at the end of its data."""
    roster = at_work(2, most=3)
    roster.hear(here(7, -1, waits=True))
    roster.hear(here(0, waits=True))
    assert roster.answer(1) == Over(generation=0, gone=())


def test_the_last_one_cannot_leave() -> None:
    roster = at_work(2)
    for member in range(2):
        roster.hear(here(member, leaving=True))
    assert roster.answer(0) is None
    roster.end(1)
    roster.hear(here(0, waits=True, leaving=True))
    turn = roster.answer(0)
    assert isinstance(turn, Turn)
    assert (turn.members, turn.left) == ((0,), ())


def test_a_coordinator_that_was_started_again_learns_from_the_members() -> None:
    """Also where the one before had told only some of a new generation."""
    turn = Turn(generation=4, members=(0, 2, 5), heirs=3, last_commits=9, steps=9, gone=(1,), left=())
    roster = Roster(range(3), most=3)
    roster.lose(1)
    roster.hear(here(2, 3, waits=True))
    roster.hear(here(0, 4, turn=turn))
    assert (roster.generation, roster.seated) == (4, (0, 2, 5))
    assert roster.answer(2) == turn
    assert roster.answer(0) is None


def test_who_was_given_up_and_speaks_again_comes_as_a_new_one() -> None:
    roster = at_work(3)
    roster.lose(2)
    for member in (0, 1):
        roster.hear(here(member, waits=True))
    for member in (0, 1):
        roster.hear(here(member, 1, turn=roster.turn))
    roster.hear(here(2, 0))
    assert roster.answer(2) == Over(generation=0, gone=())
    roster.hear(here(2, 0, waits=True))
    assert roster.answer(0) == Change(generation=1)
    for member in (0, 1):
        roster.hear(here(member, 1, waits=True))
    turn = roster.answer(2)
    assert isinstance(turn, Turn)
    assert (turn.members, turn.heirs) == ((0, 1, 2), 2)


# Replicas of several workers


def in_crews(size: int, crew: int, *, alike: bool = True) -> Roster:
    roster = Roster(range(size), most=size, crew=crew, alike=alike)
    for member in range(size):
        roster.hear(here(member))
    return roster


def leave(roster: Roster, *members: int) -> Turn:
    for member in members:
        roster.hear(here(member, roster.generation, turn=roster.turn, waits=True))
    assert isinstance(roster.turn, Turn)
    return roster.turn


def test_a_crew_that_is_not_whole_waits_until_another_makes_it_so() -> None:
    roster = in_crews(6, 2)
    roster.end(3)
    turn = leave(roster, 0, 1, 2, 4, 5)
    assert (turn.members, turn.heirs, turn.left, turn.is_mixed) == ((0, 1, 4, 5), 4, (), False)
    for member in turn.members:
        roster.hear(here(member, 1, turn=turn))
    assert roster.answer(2) is None, "it waits"
    assert roster.answer(0) is None, "the others go on"
    roster.hear(here(6, -1, waits=True))
    assert roster.answer(0) == Change(generation=1)
    turn = leave(roster, 0, 1, 4, 5)
    assert (turn.members, turn.heirs) == ((0, 1, 4, 5, 2, 6), 4)
    assert roster.answer(2) == roster.answer(6) == turn


def test_where_no_crew_is_whole_parts_of_several_make_one() -> None:
    roster = in_crews(4, 2)
    roster.end(0)
    roster.end(3)
    turn = leave(roster, 1, 2)
    assert (turn.members, turn.heirs, turn.is_mixed) == ((2, 1), 2, True)


def test_where_replicas_differ_parts_of_several_do_not_make_one() -> None:
    roster = in_crews(4, 2, alike=False)
    for member in (0, 3):
        roster.end(member)
    for member in (1, 2):
        roster.hear(here(member, waits=True))
    assert isinstance(roster.answer(1), No)


def test_where_a_part_is_lost_nobody_waits_for_ever() -> None:
    roster = in_crews(4, 2)
    for member in (0, 2):
        roster.end(member)
    for member in (1, 3):
        roster.hear(here(member, waits=True))
    assert isinstance(roster.answer(1), No)
    assert isinstance(roster.answer(3), No)


def test_one_that_others_need_for_their_replica_cannot_leave() -> None:
    roster = in_crews(4, 2)
    roster.hear(here(1, leaving=True))
    assert roster.answer(0) is None


def with_servers() -> Roster:
    """Workers 0 and 1000 on two hosts, and a server beside each; all are at work."""
    roster = Roster([], most=1000)
    roster.expected, roster.expected_servers = 2, 2
    for member in (0, 1, 1000, 1001):
        assert roster.turn is None, "not all have come"
        roster.hear(new_on(member))
    turn = roster.answer(0)
    assert isinstance(turn, Turn)
    for member in roster.seated:
        roster.hear(here(member, 1, turn=turn, host=member // 1000, serves=member % 1000 == 1))
    return roster


def new_on(member: int) -> Here:
    return here(member, -1, waits=True, host=member // 1000, serves=member % 1000 == 1, commits=0)


def test_servers_that_are_members_have_seats_after_the_workers() -> None:
    roster = with_servers()
    assert roster.turn is not None
    assert roster.turn.members == (0, 1000)
    assert roster.turn.servers == (1, 1001)
    assert roster.turn.hosts == (0, 1, 0, 1)


def test_a_server_that_dies_ends_the_generation_and_a_new_one_begins_another() -> None:
    roster = with_servers()
    roster.end(1001)
    assert roster.answer(1) == Over(generation=1, gone=(1001,))
    for member in (0, 1000):
        roster.hear(here(member, 1, waits=True, host=member // 1000, turn=roster.turn))
        assert roster.answer(member) is None, "the other server has not left yet"
    roster.hear(here(1, 1, waits=True, serves=True, turn=roster.turn))
    turn = roster.answer(1)
    assert isinstance(turn, Turn)
    assert (turn.members, turn.servers, turn.heirs) == ((0, 1000), (1,), 2)
    for member in roster.seated:
        roster.hear(here(member, 2, turn=turn, host=member // 1000, serves=member == 1))
    roster.hear(here(1002, -1, waits=True, host=1, serves=True))
    assert roster.answer(0) == Change(generation=2)


def test_without_a_worker_servers_have_nobody_to_wait_for() -> None:
    roster = with_servers()
    for member in (0, 1000):
        roster.end(member)
    roster.hear(here(1, 1, waits=True, serves=True, turn=roster.turn))
    assert isinstance(roster.answer(1), No)


def test_a_coordinator_that_was_started_again_learns_who_serves() -> None:
    before = with_servers()
    roster = Roster([], most=1000)
    roster.hear(here(0, 1, turn=before.turn))
    assert roster.seated == before.seated
    assert roster.servers == {1, 1001}
