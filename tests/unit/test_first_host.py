"""What a host that has joined makes of the first host's silence."""

import time

import pytest

from manyhands.cluster.coordinator.control import HostThere, RunEnded
from manyhands.cluster.launcher import first_host
from manyhands.cluster.launcher.events import Event
from manyhands.cluster.launcher.first_host import FirstHost
from manyhands.errors import FirstHostLost

PLACE = "10.0.0.1:4000"


class Clock:
    """Stands in for the clock; `now_s` is what it shows."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(first_host, "time", made)
    assert time.monotonic() != made.monotonic()
    return made


def test_it_says_what_it_waits_for_and_how_long_and_gives_up(clock: Clock) -> None:
    said: list[Event] = []
    host = FirstHost(PLACE, 100.0, said.append)
    for _ in range(90):
        clock.now_s += 1.0
        host.tick(is_in_the_run=True)
    assert host.waits_for(is_in_the_run=True) == f"the first host, {PLACE}"
    assert [event.text for event in said] == [
        f"waiting for the first host, {PLACE}, of which nothing was heard for {silent} s; this host waits for it "
        f"{100 - silent} s more"
        for silent in (4, 34, 64)
    ]
    clock.now_s += 11.0
    with pytest.raises(
        FirstHostLost, match=f"nothing was heard of the first host, {PLACE}, for 100 s"
    ) as lost:
        host.tick(is_in_the_run=True)
    assert lost.value.exit_code == 69


def test_a_host_that_is_heard_again_goes_on(clock: Clock) -> None:
    said: list[Event] = []
    host = FirstHost(PLACE, 100.0, said.append)
    for is_heard in (False, True, False, True):
        clock.now_s += 50.0
        host.tick(is_in_the_run=True)
        if is_heard:
            host.hear(HostThere(host=1))
            assert not host.waits_for(is_in_the_run=True)
    again = [event.text for event in said if "is heard again after" in event.text]
    assert again == [f"the first host, {PLACE}, is heard again after 100 s"] * 2


def test_a_run_that_has_not_begun_is_waited_for_as_long_as_it_takes(clock: Clock) -> None:
    said: list[Event] = []
    host = FirstHost(PLACE, 10.0, said.append)
    for missing in (2, *[1] * 40):
        clock.now_s += 1.0
        host.hear(HostThere(host=1, missing=missing))
        host.tick(is_in_the_run=False)
    rest = f"before the run of {PLACE} begins; this host waits as long as the first one does"
    assert [event.text for event in said] == [
        f"waiting for {hosts} {rest}" for hosts in ("2 more hosts", "1 more host", "1 more host")
    ]
    assert host.waits_for(is_in_the_run=False) == "1 more host"


def test_how_a_run_has_ended_is_how_its_hosts_end(clock: Clock) -> None:
    for code, ours in ((1, 1), (2, 2), (137, 1)):
        host = FirstHost(PLACE, 10.0, lambda event: None)
        host.hear(RunEnded(text="worker 0 of 2 ended with ValueError", exit_code=code))
        assert host.failure
        assert host.failure.exit_code == ours
        assert host.failure.message == f"the run of {PLACE} has ended: worker 0 of 2 ended with ValueError"
    for code in (0, 75):
        host = FirstHost(PLACE, 10.0, lambda event: None)
        host.hear(RunEnded(text="all 2 workers finished", exit_code=code))
        assert host.has_ended_well
        assert host.failure is None
    clock.now_s += 11.0
    assert not host.waits_for(is_in_the_run=True)
    with pytest.raises(FirstHostLost, match="has ended 10 s ago"):
        host.tick(is_in_the_run=True)
