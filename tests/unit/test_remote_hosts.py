"""What the coordinator makes of other hosts: when a run begins, who is given up, and who may come again."""

from manyhands.cluster.coordinator.control import Here, HostHere, NewGeneration, Over
from manyhands.cluster.coordinator.membership import Membership
from manyhands.cluster.coordinator.remote_hosts import SILENCE_S, SUSPICIOUS_S, RemoteHosts


def host(token: str, *, number: int = -1, workers: int = 1, **more: object) -> HostHere:
    return HostHere(token=token, host=number, address=f"address of {token}", workers=workers, **more)  # type: ignore[arg-type]


def new(member: int) -> Here:
    return _here(member, generation=-1, waits=True)


def _here(
    member: int, *, generation: int, waits: bool = False, new_generation: NewGeneration | None = None
) -> Here:
    return Here(
        member=member,
        generation=generation,
        new_generation=new_generation,
        waits=waits,
        has_state=generation > 0,
        commits=0,
        steps=0,
        host=member // 1000,
        place=f"place of {member}",
    )


def begun() -> tuple[Membership, RemoteHosts, NewGeneration]:
    """Worker 0 here, 1000 and 1001 on one other host, 2000 on a third; all are at work."""
    membership = Membership([], most=1000)
    remote_hosts = RemoteHosts(membership, hosts=3, own_workers=1)
    assert remote_hosts.hear(host("one", workers=2), 0.0).host == 1
    assert remote_hosts.hear(host("two"), 0.0).host == 2
    for member in (0, 1000, 2000, 1001):
        assert membership.new_generation is None, "not all have come"
        membership.hear(new(member))
    new_generation = membership.answer(0)
    assert isinstance(new_generation, NewGeneration)
    for member in new_generation.members:
        membership.hear(_here(member, generation=1, new_generation=new_generation))
    return membership, remote_hosts, new_generation


def test_a_run_begins_when_all_hosts_have_come_with_all_their_workers() -> None:
    new_generation = begun()[2]
    assert new_generation.members == (0, 1000, 1001, 2000)
    assert new_generation.hosts == (0, 1, 1, 2)
    assert new_generation.state_holders == ()
    assert new_generation.place == "place of 0"


def test_a_host_that_speaks_twice_is_one_host_and_keeps_its_number() -> None:
    remote_hosts = begun()[1]
    assert remote_hosts.hear(host("one", number=1, workers=2), 0.1).host == 1
    assert remote_hosts.hear(host("three"), 0.1).host == 3


def test_a_silent_host_is_given_up_as_a_whole_and_its_workers_come_again_as_new_ones() -> None:
    membership, remote_hosts, new_generation = begun()
    remote_hosts.hear(host("two", number=2), SILENCE_S)
    assert remote_hosts.find_vanished(SILENCE_S - 0.1) == []
    assert remote_hosts.find_vanished(SILENCE_S + 0.1) == [1000, 1001]
    assert [one.members for one in remote_hosts.take_vanished()] == [[1000, 1001]]
    assert membership.answer(0) == Over(generation=1, gone=(1000, 1001))
    for member in (0, 2000):
        membership.hear(_here(member, generation=1, new_generation=new_generation, waits=True))
    second = membership.answer(0)
    assert isinstance(second, NewGeneration)
    assert second.members == (0, 2000)
    membership.hear(_here(1000, generation=1, new_generation=new_generation))
    assert membership.answer(1000) == Over(generation=1, gone=()), "they have gone on without it"
    membership.hear(_here(1000, generation=1, new_generation=new_generation, waits=True))
    for member in (0, 2000):
        membership.hear(_here(member, generation=2, new_generation=second, waits=True))
    third = membership.answer(1000)
    assert isinstance(third, NewGeneration)
    assert third.members == (0, 2000, 1000)
    assert third.state_holders == (0, 2000), "what it had learned meanwhile does not count"


def test_where_something_is_wrong_less_silence_is_enough() -> None:
    membership, remote_hosts, new_generation = begun()
    membership.hear(_here(0, generation=1, new_generation=new_generation, waits=True))
    remote_hosts.hear(host("two", number=2), SUSPICIOUS_S)
    assert remote_hosts.find_vanished(SUSPICIOUS_S + 0.1) == [1000, 1001]


def test_a_launcher_tells_how_its_workers_ended_and_is_told_which_hang() -> None:
    membership, remote_hosts, _ = begun()
    assert remote_hosts.see_to(1000)
    assert not remote_hosts.see_to(0), "the launcher of this host sees to it"
    assert remote_hosts.hear(host("one", number=1, workers=2), 1.0).stalled == (1000,)
    answer = remote_hosts.hear(host("one", number=1, workers=2, ended=((1000, "killed by SIGKILL"),)), 2.0)
    assert answer.stalled == ()
    assert membership.answer(0) == Over(generation=1, gone=(1000,))
    (ending,) = remote_hosts.endings([1000])
    assert (ending.how, ending.at_s) == ("killed by SIGKILL", 2.0)


def test_a_coordinator_that_was_started_again_learns_the_numbers() -> None:
    remote_hosts = RemoteHosts(Membership([], most=9), hosts=2, own_workers=1)
    assert remote_hosts.hear(host("two", number=2), 0.0).host == 2
    assert remote_hosts.hear(host("new"), 0.0).host == 3
    assert remote_hosts.hear(host("one", number=1), 0.0).host == 1


def test_a_host_that_leaves_before_the_run_begins_is_missing_again() -> None:
    """Its workers do not begin the run either, whether its launcher ends them or falls silent."""
    membership = Membership([], most=1000)
    remote_hosts = RemoteHosts(membership, hosts=3, own_workers=1)
    membership.hear(new(0))
    assert remote_hosts.hear(host("one"), 0.0).missing == 1
    membership.hear(new(1000))
    left = host("one", number=1, ended=((1000, "killed by SIGKILL"),))
    assert remote_hosts.hear(left, 0.1).missing == 2
    assert remote_hosts.hear(host("two"), 0.2).missing == 1
    membership.hear(new(2000))
    assert remote_hosts.find_vanished(0.3 + SILENCE_S) == [2000]
    assert remote_hosts.addresses() == []
    for number, token in enumerate(("three", "four"), start=3):
        assert remote_hosts.hear(host(token), 5.0).host == number
        assert membership.new_generation is None
        membership.hear(new(1000 * number))
    assert membership.new_generation is not None
    assert membership.new_generation.members == (0, 3000, 4000)
