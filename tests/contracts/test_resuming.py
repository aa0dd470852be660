"""Going on from a checkpoint: with the exact next samples, on other workers, from the newest that is whole."""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from manyhands import checkpoint, strategies
from manyhands.cluster.worker.world import World
from manyhands.errors import CheckpointError
from tests.contracts.test_sessions import Numbered, make_session, numbers
from tests.contracts.test_strategies import assert_same_bits, lbfgs, loss, make_net
from tests.sessions import session_of
from tests.threads import in_threads

LENGTH = 101
EVERY_KIND = [
    "all-reduce",
    "all-reduce:topology=ring",
    "double-buffer",
    "local-sgd:period=3",
    "gossip",
    "tournament:every=2",
    "hogwild",
    "ad-psgd",
    "parameter-server:sync",
    "parameter-server:async",
    "parameter-server:stale",
]


def leg(world: World, strategy: str, directory: Path, steps: int | None) -> list[int]:
    """The samples of this worker's steps: so many, or to the end of the epoch; then a checkpoint."""
    session = make_session(world, strategy)
    session.resume(directory)
    used: list[int] = []
    batches = session.batches(Numbered(LENGTH), batch_size=4)
    # Where workers do not wait for each other, they do not come equally far.
    ahead = 0 if strategies.parse(strategy).traits.lockstep else world.rank
    for number, batch in enumerate(batches, 1):
        if number == 2:
            session.save(directory)  # with an outstanding batch
        session.step(batch)
        used += numbers(batch)
        if steps and number == steps + ahead:
            break
    batches.close()
    session.save(directory)
    session.close()
    assert session.epoch == (0 if steps else 1)
    report = session.summary()["committed"]
    assert (report["twice"], report["never"]) == (0, 0)
    assert (report["once"] == LENGTH) == (steps is None)
    return used


@pytest.mark.processes
@pytest.mark.parametrize("strategy", EVERY_KIND)
def test_an_epoch_on_three_then_two_then_four_workers_uses_every_sample_once(
    strategy: str, tmp_path: Path
) -> None:
    used: list[int] = []
    for workers, steps in ((3, 2), (2, 3), (4, None)):
        work = functools.partial(leg, strategy=strategy, directory=tmp_path, steps=steps)
        used += [number for each in in_threads(workers, work, strategy=strategy) for number in each]
    assert sorted(used) == list(range(LENGTH))


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild", "parameter-server:async"])
def test_after_an_epoch_the_next_one_is_whole(strategy: str, tmp_path: Path) -> None:
    def work(world: World) -> list[int]:
        session = make_session(world, strategy)
        resumed = session.resume(tmp_path) is not None
        used: list[int] = []
        for batch in session.batches(Numbered(LENGTH), batch_size=4):
            session.step(batch)
            used += numbers(batch)
        session.save(tmp_path)
        session.close()
        assert session.epoch == 1 + resumed
        return used

    for _ in range(2):
        used = in_threads(2, work, strategy=strategy)
        assert sorted(number for each in used for number in each) == list(range(LENGTH))


@pytest.mark.parametrize("strategy", ["hogwild", "parameter-server:async"])
def test_workers_that_leave_a_loop_at_different_points_go_on_with_their_own(strategy: str) -> None:
    def work(world: World) -> list[int]:
        session = make_session(world, strategy)
        data, used = Numbered(LENGTH), []
        for steps in (1 + world.rank, 2, None):
            batches = session.batches(data, batch_size=4)
            for number, batch in enumerate(batches, 1):
                session.step(batch)
                used += numbers(batch)
                if number == steps:
                    break
            batches.close()
        session.close()
        return used

    used = in_threads(3, work, strategy=strategy)
    assert sorted(number for each in used for number in each) == list(range(LENGTH))


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild", "parameter-server:async"])
@pytest.mark.parametrize(
    ("save_every", "expected"),
    [
        ("3 steps", [3, 6, 9, 12, 15, 18]),
        ("epoch", [9, 18]),
        ("2 epochs", [18]),
        ("never", []),
    ],
)
def test_a_session_saves_by_itself_and_at_the_end(
    save_every: str, expected: list[int], strategy: str, tmp_path: Path
) -> None:
    def work(world: World) -> None:
        session = make_session(world, strategy, save_every=save_every, keep=9, out=tmp_path)
        for _ in range(2):
            for batch in session.batches(Numbered(LENGTH), batch_size=4):
                session.step(batch)
        session.close()

    in_threads(3, work, strategy=strategy)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("checkpoints/step-*")) == expected


@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "others"), [("all-reduce", 4), ("hogwild", 9)])
def test_one_workers_clock_is_enough_for_all_to_save(strategy: str, others: int, tmp_path: Path) -> None:
    """The others notice it in the same step or, where workers do not wait for each other, at the end."""

    def work(world: World) -> int:
        session = make_session(world, strategy, save_every="1s" if world.rank == 1 else "never", out=tmp_path)
        for batch in session.batches(Numbered(LENGTH), batch_size=4):
            if world.rank == 1 and session.steps == 3:
                time.sleep(1.0)
            session.step(batch)
        saved_at = session.engine.progress.saved_steps
        session.close()
        return saved_at

    assert in_threads(3, work) == [others, 4, others]
    saved = {int(path.name[5:]) for path in tmp_path.glob("checkpoints/step-*")}
    assert saved == {others, 9}, "by the clock, and at the end"


@pytest.mark.processes
def test_the_session_goes_on_saving_where_it_was_resumed_with_what_was_there(tmp_path: Path) -> None:
    def work(world: World) -> dict[str, int] | None:
        session = make_session(world)
        session.save(tmp_path, extra={"best": 7}, wait=True)
        session.close()
        session = make_session(world, save_every="2 steps", keep=1)
        assert session.resume(tmp_path) == {"best": 7}
        for batch in session.batches(Numbered(16), batch_size=4):
            session.step(batch)
        session.close()
        return make_session(world).resume(tmp_path)

    assert in_threads(2, work) == [{"best": 7}] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000002"}


@pytest.mark.processes
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(world: World) -> int:
        session = make_session(world)
        for batch in session.batches(Numbered(24), batch_size=4):
            session.step(batch)
            session.save(tmp_path, wait=True)
        if world.rank == 0:
            os.truncate(tmp_path / "step-00000003" / "tensors.safetensors", 100)
        world.host.barrier()
        session.close()
        with make_session(world) as again:
            again.resume(tmp_path)
            return again.steps

    assert in_threads(2, work) == [2, 2]
    said = capfd.readouterr().err
    assert said.count("warning: ") == 1
    assert "step-00000003 cannot be used: tensors.safetensors has 100 bytes instead of" in said
    assert "using step-00000002 instead" in said


def rewrite(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The newest checkpoint with another record."""
    tensors, record = checkpoint.load(directory)
    change(record)
    checkpoint.save(directory, step=record.get("steps", 9), tensors=tensors, record=record)


def as_in_the_beginning(record: dict[str, Any]) -> None:
    """As the first version wrote it."""
    ((_, position),) = record["committed"]
    for name in ("committed", "checks", "apart", "groups_apart", "whole_optimizer", "plan"):
        del record[name]
    record |= {"position": position, "random": [one["torch"] for one in record["random"]]}


@pytest.mark.processes
def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    def work(world: World, until: int, resumes: bool) -> list[Tensor]:
        session = make_session(world)
        if resumes:
            assert session.resume(tmp_path) == {"note": 1}
        batches = session.batches(Numbered(LENGTH), batch_size=4)
        for batch in batches:
            session.step(batch)
            if session.steps == until:
                break
        batches.close()
        session.save(tmp_path, extra={"note": 1})
        session.close()
        return [param.detach().clone() for param in session.model.parameters()]

    in_threads(2, functools.partial(work, until=3, resumes=False))
    rewrite(tmp_path, as_in_the_beginning)
    resumed = in_threads(2, functools.partial(work, until=7, resumes=True))
    assert_same_bits([resumed[0], in_threads(2, functools.partial(work, until=7, resumes=False))[0]])


@pytest.mark.processes
@pytest.mark.parametrize("name", ["optimizer_class", "random", "steps"])
def test_a_checkpoint_that_lacks_something_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    in_threads(1, lambda world: make_session(world).save(tmp_path, wait=True))
    rewrite(tmp_path, lambda record: record.pop(name))
    with pytest.raises(
        CheckpointError, match=f"does not say {name}: it was not saved by a session, or by a version"
    ):
        in_threads(2, lambda world: make_session(world).resume(tmp_path))


@pytest.mark.processes
def test_the_history_of_lbfgs_goes_on(tmp_path: Path) -> None:
    def work(world: World, stops: list[int]) -> list[Tensor]:
        for stop in stops:
            net = make_net()
            session = session_of(net, lbfgs(net), loss, world=world)
            session.resume(tmp_path / str(stops))
            batches = session.batches(Numbered(64), batch_size=4)
            for batch in batches:
                session.step(batch)
                if session.steps == stop:
                    break
            batches.close()
            session.save(tmp_path / str(stops))
            session.close()
        return [param.detach().clone() for param in session.model.parameters()]

    parts = in_threads(2, functools.partial(work, stops=[3, 5, 8]))
    whole = in_threads(2, functools.partial(work, stops=[8]))
    assert_same_bits([parts[0], whole[0]])
