"""A worker dies at any point of a step: the replica it shared is that of a whole step, and its state is complete."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.world import World
from manyhands.engine.session import Session
from manyhands.errors import PeerLost
from manyhands.replica.optimizer.descent import MOMENTUM, PARAMS, SCRATCH
from tests.sessions import session_of

ROOT = Path(__file__).parents[2]
WORKERS, STEPS, FATAL_STEP = 3, 4, 3


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Who dies in the fatal step, and at which point of it."""

    who: int
    when: str  # "backward", "update", one of the passes of an update, or "settle"
    span: int = 0  # of those it owns: the one in the middle of which it dies

    def __str__(self) -> str:
        return f"worker{self.who}-{self.when}{'' if self.when in ('backward', 'settle') else self.span}"


FAULTS = [
    Fault(who=1, when="backward"),
    Fault(who=0, when="update", span=0),
    Fault(who=1, when="update", span=1),
    Fault(who=2, when="update", span=1),
    Fault(who=2, when="settle"),
]


PASSES = {"momentum": MOMENTUM, "room": SCRATCH, "params": PARAMS}
FAULTS_IN_PASSES = [Fault(who=who, when=when, span=1) for who, when in enumerate(PASSES)]


@dataclass(frozen=True, kw_only=True)
class Job:
    optimizer: str = "sgd"
    clip_norm: float | None = None

    def __str__(self) -> str:
        return self.optimizer + ("-clipped" if self.clip_norm else "")


JOBS = [Job(), Job(optimizer="adam"), Job(clip_norm=0.5)]
SIMPLE_JOBS = [Job(optimizer="simple"), Job(optimizer="simple", clip_norm=0.5)]
WHOLE_JOBS = [Job(optimizer="adafactor"), Job(optimizer="adafactor", clip_norm=0.5)]
FAULTS_IN_TENSORS = [Fault(who=who, when="update") for who in range(WORKERS)]
CASES = [
    *((job, fault) for job in JOBS for fault in FAULTS),
    *((job, fault) for job in SIMPLE_JOBS for fault in FAULTS_IN_PASSES),
    *((job, fault) for job in WHOLE_JOBS for fault in FAULTS_IN_TENSORS),
]


def build(job: Job) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    # One layer whose gradients come as factors, and others whose do not.
    model = torch.nn.Sequential(
        torch.nn.Linear(600, 2400),
        torch.nn.Tanh(),
        torch.nn.Linear(2400, 200),
        torch.nn.Tanh(),
        torch.nn.Linear(200, 10),
    )
    if job.optimizer == "adam":
        return model, torch.optim.Adam(model.parameters(), lr=1e-3)
    if job.optimizer == "adafactor":  # whole tensors, and states of odd shapes
        return model, torch.optim.Adafactor(model.parameters(), lr=1e-2)
    if job.optimizer == "simple":  # enough to be made in passes, without the optimizer
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(24, 600, generator=generator)
    return inputs, torch.randint(0, 10, (24,), generator=generator)


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def worker(rank: int, fd: int, job: Job, fault: Fault | None, folder: Path) -> None:
    """Train until the fault, and save what a survivor has then; without a fault, what each worker has after a step."""
    rank_info = RankInfo(rank=rank, size=WORKERS, servers=0, launcher="test", arena_fd=fd)
    model, optimizer = build(job)
    session = session_of(model, optimizer, loss, world=World(rank_info), clip_norm=job.clip_norm, logged=True)
    assert session.engine.replica.takes_factors == (job.clip_norm is None and job.optimizer != "adafactor")
    try:
        for step in range(1, STEPS + 1):
            if fault and rank == fault.who and step == FATAL_STEP:
                arm(session, fault)
            inputs, targets = samples(step)
            session.step((inputs[rank::WORKERS], targets[rank::WORKERS]))
            if not fault:
                torch.save(contents(session, model), folder / f"worker-{rank}-step-{step}")
    except PeerLost:
        assert fault
        steps = session.engine.replica.recover({fault.who})
        torch.save({"steps": steps, **contents(session, model)}, folder / f"survivor-{rank}")


def contents(session: Session, model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters, and the optimizer state that this worker knows."""
    replica = session.engine.replica
    known = replica.updates.export()
    state = {
        f"{place.name}/{key}": replica.updates.vectors[key][place.start : place.stop].clone()
        if value is None
        else value
        for place in replica.layout.places
        for key, value in known.get(place.name, {}).items()
    }
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {"params": params, "state": state}


def arm(session: Session, fault: Fault) -> None:
    """Have this process kill itself at the point that the fault names."""
    replica: Any = session.engine.replica

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if fault.when == "backward":
        replica.part.loss = lambda model, batch: die()
    elif fault.when == "settle":
        replica.settle = die
    elif fault.when in PASSES:
        arm_pass(replica, fault, die)
    else:
        real, calls = replica.updates._step, iter(range(1000))

        def half_a_step(twin: torch.optim.Optimizer) -> None:
            before = [param.clone() for group in twin.param_groups for param in group["params"]]
            real(twin)
            if next(calls) == fault.span:
                for old, param in zip(
                    before, (p for group in twin.param_groups for p in group["params"]), strict=True
                ):
                    param[: len(param) // 2] = old[: len(param) // 2]  # not all of it is written yet
                die()

        replica.updates._step = half_a_step


def arm_pass(replica: Any, fault: Fault, die: Callable[[], None]) -> None:
    """Of the pass in which it dies, half is written; what that pass does not need any more is lost."""
    log, calls = getattr(replica.path, "inner", replica.path).log, iter(range(1000))
    note = log._note

    def half_a_pass(owner: int, span: Any, stage: int) -> None:
        note(owner, span, stage)
        if stage == PASSES[fault.when] and next(calls) == fault.span:
            descent = replica.updates.begun_descent(span)
            half = len(descent.params) // 2
            target = {
                MOMENTUM: descent.momentum,
                SCRATCH: log.scratch,
                PARAMS: descent.params,
            }
            target[stage][:half] = float("nan")
            die()

    log._note = half_a_pass


def run_all(folder: Path) -> None:
    """Every case in turn, its workers forks of this process: PyTorch is loaded once."""
    undisturbed = [(job, None) for job in dict.fromkeys(job for job, _ in CASES)]
    for job, fault in [*undisturbed, *CASES]:
        place = folder / f"{job}-{fault}"
        place.mkdir()
        fd = os.memfd_create("test")
        pids = [_fork(rank, fd, job, fault, place) for rank in range(WORKERS)]
        os.close(fd)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        (place / "codes").write_text(repr(codes))


def _fork(rank: int, fd: int, job: Job, fault: Fault | None, place: Path) -> int:
    if pid := os.fork():
        return pid
    signal.alarm(60)  # nobody waits for ever
    try:
        worker(rank, os.dup(fd), job, fault, place)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    subprocess.run([sys.executable, "-m", "tests.faults.test_undo_log", str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize(("job", "fault"), CASES, ids=str)
def test_survivors_have_a_whole_step(job: Job, fault: Fault, cases: Path) -> None:
    """To the bit what the same workers have after that step if none of them dies."""
    place = cases / f"{job}-{fault}"
    expected = [-signal.SIGKILL if rank == fault.who else 0 for rank in range(WORKERS)]
    assert (place / "codes").read_text() == repr([int(code) for code in expected]), (
        "it fired, the others live"
    )
    whole = FATAL_STEP - 1 if fault.when == "backward" else FATAL_STEP
    undisturbed = after(whole, cases / f"{job}-None")
    for rank in set(range(WORKERS)) - {fault.who}:
        survivor = torch.load(place / f"survivor-{rank}", weights_only=True)
        assert survivor["steps"] == whole
        for kind in ("params", "state"):
            assert survivor[kind].keys() == undisturbed[kind].keys()
            different = [
                name
                for name, value in undisturbed[kind].items()
                if not torch.equal(value, survivor[kind][name])
            ]
            assert not different


@pytest.mark.parametrize("job", dict.fromkeys(job for job, _ in CASES), ids=str)
def test_the_fatal_step_changes_everything(job: Job, cases: Path) -> None:
    """So that survivors of half a step, or of another one, differ."""
    before, now = (after(step, cases / f"{job}-None") for step in (FATAL_STEP - 1, FATAL_STEP))
    assert now["state"]
    for kind, known in now.items():
        assert not [name for name, value in known.items() if torch.equal(value, before[kind][name])]


def after(step: int, place: Path) -> dict[str, dict[str, torch.Tensor]]:
    """What all workers together have after so many steps."""
    found: dict[str, dict[str, torch.Tensor]] = {"params": {}, "state": {}}
    for rank in range(WORKERS):
        one = torch.load(place / f"worker-{rank}-step-{step}", weights_only=True)
        found = {kind: known | one[kind] for kind, known in found.items()}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    build(JOBS[0])  # optimizers load more of PyTorch
    run_all(Path(sys.argv[1]))
