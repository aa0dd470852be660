"""What the coordinator makes of other hosts: when a run begins, who is given up, and who may come again."""

from manyhands.cluster.control import Here, HostHere, Over, Turn
from manyhands.cluster.guests import SILENCE_S, SUSPICIOUS_S, Guests
from manyhands.cluster.roster import Roster


def host(token: str, *, number: int = -1, workers: int = 1, **more: object) -> HostHere:
    return HostHere(token=token, host=number, address=f"address of {token}", workers=workers, **more)  # type: ignore[arg-type]


def new(member: int) -> Here:
    return _here(member, generation=-1, waits=True)


def _here(member: int, *, generation: int, waits: bool = False, turn: Turn | None = None) -> Here:
    return Here(
        member=member,
        generation=generation,
        turn=turn,
        waits=waits,
        has_state=generation > 0,
        commits=0,
        steps=0,
        host=member // 1000,
        place=f"place of {member}",
    )


def begun() -> tuple[Roster, Guests, Turn]:
    """Worker 0 here, 1000 and 1001 on one other host, 2000 on a third; all are at work."""
    roster = Roster([], most=1000)
    guests = Guests(roster, hosts=3, own_workers=1)
    assert guests.hear(host("one", workers=2), 0.0).host == 1
    assert guests.hear(host("two"), 0.0).host == 2
    for member in (0, 1000, 2000, 1001):
        assert roster.turn is None, "not all have come"
        roster.hear(new(member))
    turn = roster.answer(0)
    assert isinstance(turn, Turn)
    for member in turn.members:
        roster.hear(_here(member, generation=1, turn=turn))
    return roster, guests, turn


def test_a_run_begins_when_all_hosts_have_come_with_all_their_workers() -> None:
    turn = begun()[2]
    assert turn.members == (0, 1000, 1001, 2000)
    assert turn.hosts == (0, 1, 1, 2)
    assert turn.heirs == 0
    assert turn.place == "place of 0"


def test_a_host_that_speaks_twice_is_one_host_and_keeps_its_number() -> None:
    guests = begun()[1]
    assert guests.hear(host("one", number=1, workers=2), 0.1).host == 1
    assert guests.hear(host("three"), 0.1).host == 3


def test_a_silent_host_is_given_up_as_a_whole_and_its_workers_come_again_as_new_ones() -> None:
    roster, guests, turn = begun()
    guests.hear(host("two", number=2), SILENCE_S)
    assert guests.find_vanished(SILENCE_S - 0.1) == []
    assert guests.find_vanished(SILENCE_S + 0.1) == [1000, 1001]
    assert [one.members for one in guests.take_vanished()] == [[1000, 1001]]
    assert roster.answer(0) == Over(generation=1, gone=(1000, 1001))
    for member in (0, 2000):
        roster.hear(_here(member, generation=1, turn=turn, waits=True))
    second = roster.answer(0)
    assert isinstance(second, Turn)
    assert second.members == (0, 2000)
    roster.hear(_here(1000, generation=1, turn=turn))
    assert roster.answer(1000) == Over(generation=1, gone=()), "they have gone on without it"
    roster.hear(_here(1000, generation=1, turn=turn, waits=True))
    for member in (0, 2000):
        roster.hear(_here(member, generation=2, turn=second, waits=True))
    third = roster.answer(1000)
    assert isinstance(third, Turn)
    assert third.members == (0, 2000, 1000)
    assert third.heirs == 2, "what it had learned meanwhile does not count"


def test_where_something_is_wrong_less_silence_is_enough() -> None:
    roster, guests, turn = begun()
    roster.hear(_here(0, generation=1, turn=turn, waits=True))
    guests.hear(host("two", number=2), SUSPICIOUS_S)
    assert guests.find_vanished(SUSPICIOUS_S + 0.1) == [1000, 1001]


def test_a_launcher_tells_how_its_workers_ended_and_is_told_which_hang() -> None:
    roster, guests, _ = begun()
    assert guests.see_to(1000)
    assert not guests.see_to(0), "the launcher of this host sees to it"
    assert guests.hear(host("one", number=1, workers=2), 1.0).stalled == (1000,)
    answer = guests.hear(host("one", number=1, workers=2, ended=((1000, "killed by SIGKILL"),)), 2.0)
    assert answer.stalled == ()
    assert roster.answer(0) == Over(generation=1, gone=(1000,))
    (ending,) = guests.endings([1000])
    assert (ending.how, ending.at_s) == ("killed by SIGKILL", 2.0)


def test_a_coordinator_that_was_started_again_learns_the_numbers() -> None:
    guests = Guests(Roster([], most=9), hosts=2, own_workers=1)
    assert guests.hear(host("two", number=2), 0.0).host == 2
    assert guests.hear(host("new"), 0.0).host == 3
    assert guests.hear(host("one", number=1), 0.0).host == 1
