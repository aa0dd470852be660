"""What the runs of `harness.py` train: says what it does before it does it, and does what it is told to itself."""

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import manyhands as mh
from manyhands import data as data_sets
from manyhands import models
from manyhands.engine import step as stepping
from manyhands.engine.step_input import StepInput
from manyhands.replica.replica import Replica

LENGTH = 600
BATCH = 8
LR = 0.05
UNSEEN = -1.0  # in place of a limit: between the halves of a step the script does not look at the gradients
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segfault": signal.SIGSEGV,
    "leave": signal.SIGUSR1,
}


class Digits:
    """The digits of the package; parts of them are enough to see whether something was lost."""

    def __init__(self) -> None:
        found = data_sets.load("digits", seed=0)
        self.train, self.test = found.train, found.test
        self.model = lambda: models.build("mlp:hidden=64", found.shape, found.classes)


class Own(torch.optim.Adafactor):
    """A class that nobody knows: it gets whole tensors, and its states have odd shapes. May be told to kill its process
    in the middle of an update."""

    calls = 0
    deaths: Mapping[int, Callable[[], None]] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        super().step(closure)
        if not is_tried():
            Own.calls += 1
            if die := Own.deaths.get(Own.calls):
                for param, old in zip(params, before, strict=True):
                    param[: len(param) // 2] = old[: len(param) // 2]  # not all of it is written yet
                die()


def is_tried() -> bool:
    """Whether the optimizer is being tried on small tensors."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(("optimizer/trial.py", "optimizer/abilities.py")):
            return True
        frame = frame.f_back
    return False


class Whole(torch.optim.Optimizer):
    """Cannot be divided: it looks at all gradients, keeps a number in its groups, and has another one make the step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.inside = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] = LR * (1 + 1 / group["k"])
        if grads:
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.div_(1 + norm)
        self.inside.step()


class Numbered:
    """Samples that know their number."""

    def __init__(self, length: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, 8, generator=generator).to(dtype)
        self.targets = self.inputs @ torch.randn(8, 4, generator=generator).to(dtype)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("taken by the batch")

    def batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs[indices], self.targets[indices], indices


def precision(optimizer: str) -> torch.dtype:
    """In which the runs with this optimizer train.

    With its ordinary `eps` of 1e-8, Adam makes a step of what is only rounding, where a gradient is nearly 0. In 150
    runs of 50 steps, the order in which 32-bit numbers are added changed single parameters by up to 5e-5, and there
    is no bound but the learning rate. With 64-bit numbers it changed them by 4e-15, so that every parameter can be
    compared; a sample that is lost changes half of them by more than 2e-5.
    """
    return torch.float64 if optimizer == "Adam" else torch.float32


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    return made.to(dtype)


def wide() -> nn.Module:
    """Has a layer so large that its gradients are kept, and travel between hosts, as factors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 736), nn.Tanh(), nn.Linear(736, 736), nn.Tanh(), nn.Linear(736, 4))


class Cast(nn.Module):
    """To another type, between layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype)


def net_of(optimizer: str) -> nn.Module:
    """What the runs with this optimizer train."""
    if optimizer == "Wide":
        return wide()
    made = net(precision(optimizer))
    if optimizer != "Mixed":
        return made
    *body, head = made.children()
    return nn.Sequential(*body, Cast(torch.float64), head.double(), Cast(torch.float32))


def net_with_norms(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same with batch norm: what it makes of a sample depends on all samples of the step."""
    first, bent, second, *rest = net(dtype).children()
    norms = (nn.BatchNorm1d(64).to(dtype) for _ in range(2))
    return nn.Sequential(first, next(norms), bent, second, next(norms), *rest)


def values(model: nn.Module) -> Tensor:
    """Its parameters and its running statistics."""
    buffers = [one.detach().reshape(-1) for one in model.buffers() if one.is_floating_point()]
    return torch.cat([nn.utils.parameters_to_vector(model.parameters()).detach(), *buffers])


def optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name in ("momentum", "Mixed", "Wide"):
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if name == "plain":
        return torch.optim.SGD(model.parameters(), lr=lr)
    if name == "LBFGS":
        # Without a line search even plain PyTorch diverges, in one of ten orders of samples; what only counts falls for
        # ever along a line.
        search = None if isinstance(model, Counts) else "strong_wolfe"
        return torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=4, line_search_fn=search)
    if name == "Whole":
        return Whole(model.parameters(), lr=lr)
    if name == "Own":
        return Own(model.parameters(), lr=lr)
    assert name == "Adam", name
    return torch.optim.Adam(model.parameters(), lr=lr)


class Counted:
    """A schedule that changes nothing, and knows how far it is."""

    last_epoch = 0

    def step(self) -> None:
        self.last_epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]


class Counts(nn.Module):
    """Counts, in each of its parameters and in every part of them, how often updates have used each sample."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("0", "2"):  # the layers of the other net, which settings may name
            self.register_parameter(name, nn.Parameter(torch.zeros(LENGTH, 8)))

    def forward(self, indices: Tensor) -> Tensor:
        return -torch.stack([counts[indices].sum() for counts in self.parameters()]).sum()


def counted(parameters: Tensor) -> Tensor:
    """What `Counts` has counted: a row for each sample."""
    return parameters.view(2, LENGTH, -1).transpose(0, 1).flatten(1)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    if isinstance(model, Counts):
        used: Tensor = model(batch[2])
        return used
    inputs, targets = batch[:2]
    if targets.dtype == torch.int64:
        return nn.functional.cross_entropy(model(inputs), targets)
    return nn.functional.mse_loss(model(inputs), targets)


def update_one_at_a_time(lock: IO[str]) -> None:
    """No two workers write into the host's parameters at once; the death of a worker ends its lock."""
    real = Replica.apply

    def apply(replica: Replica, *spans: Any) -> None:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            real(replica, *spans)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    Replica.apply = apply  # type: ignore[method-assign]


def exhaust_memory(group: Path) -> None:
    """Enter this control group and ask for memory until the kernel has had enough."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(os.urandom(1 << 20))


def watch_commits() -> list[int]:
    """Of the steps that this worker commits from here on, how many samples of its own they have used."""
    committed: list[int] = []
    real = stepping.commit

    def commit(engine: Any, work: StepInput, *rest: Any) -> None:
        committed.append(work.samples)
        real(engine, work, *rest)

    stepping.commit = commit
    return committed


class Singly(Dataset[tuple[Tensor, Tensor, int]]):
    """The same samples one by one, as a DataLoader wants them."""

    def __init__(self, data: Numbered) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.data.inputs[index], self.data.targets[index], index


def loops(data: Any, settings: Mapping[str, Any]) -> Callable[[Any], Iterator[Any]]:
    """How a session loops over the data: by itself, by a loader's processes, or zipped with more of it."""
    if "loader" in settings:
        processes = settings["loader"]
        loader = DataLoader(
            Singly(data), BATCH, shuffle=True, num_workers=processes, persistent_workers=processes > 0
        )
        return lambda session: session.batches(loader)
    if not settings.get("zipped"):
        return lambda session: session.batches(data, batch_size=BATCH)
    more = Numbered(LENGTH, data.inputs.dtype)

    def zipped(session: Any) -> Iterator[Any]:
        both = [session.batches(one, batch_size=BATCH) for one in (data, more)]
        for one, other in zip(*both, strict=False):
            numbers = torch.cat([one[2], other[2] + LENGTH])
            yield torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]]), numbers

    return zipped


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    number = int(os.environ.get("MANYHANDS_NUMBER") or os.environ["MANYHANDS_RANK"])
    path = folder / f"log-{number}.jsonl"
    is_first = not path.exists()  # else a server that takes over from one that died
    log = path.open("a", buffering=1)

    def note(**row: Any) -> None:
        log.write(json.dumps(row) + "\n")

    note(kind="start", pid=os.getpid())
    if settings.get("one_at_a_time"):
        update_one_at_a_time((folder / "lock").open("w"))
    session: Any = None
    committed = watch_commits()
    todo = [(when, kind) for who, when, kind in settings["faults"] if who == number and is_first]

    def watched(called: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        try:
            return loss(called, batch)
        finally:  # the first stage of a pipeline leaves the loss as soon as it knows the inputs
            disturb()

    def disturb() -> None:
        if session is None:
            return  # the placement measures the model before the first step
        # For workers that are loading PyTorch; and, before it is too late for that, for those that are to die.
        is_waiting = session.workers < settings.get("until", 0)
        is_early = session.epoch > 0 and session.workers > settings.get("down_to", session.workers)
        is_enough = (folder / "enough").exists()  # all that was to happen has happened
        pause_s = 0.0 if is_enough else settings.get("pause_s", 0.0)
        time.sleep(1.0 if is_waiting else 0.3 if is_early else pause_s)
        for when, kind in list(todo):
            if (
                kind not in ("update", "between", "mean", "forward", "backward")
                and model.training
                and session.steps + 1 >= when  # where workers do not step together, it may pass over some
            ):
                do(when, kind)

    def step_in_halves(batch: tuple[Tensor, ...]) -> None:
        session.backward(batch)
        for when, kind in list(todo):
            if kind == "between" and session.steps + 1 == when:
                do(when, kind)
        if settings["halves"] != UNSEEN:
            nn.utils.clip_grad_norm_(model.parameters(), settings["halves"])
        session.update()

    def take_the_mean() -> None:
        for when, kind in list(todo):
            if kind == "mean" and session.steps == when:
                do(when, kind)
        note(kind="mean", step=session.steps, value=session.mean(float(session.steps)))

    def disturb_pass(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        """Between the two norms, on the way there or back."""
        if session is None or not model.training:
            return
        for when, kind in list(todo):
            if kind == "forward" and session.steps + 1 == when:
                do(when, kind)
            elif kind == "backward" and session.steps + 1 == when:
                output.register_hook(lambda gradient, fault=(when, kind): do(*fault))

    def do(when: int, kind: str) -> None:
        todo.remove((when, kind))
        note(kind="fault", step=when, fault=kind)
        if kind == "memory":
            exhaust_memory(Path(settings["memory_group"]))
        os.kill(os.getpid(), SIGNALS.get(kind, signal.SIGKILL))

    Own.deaths = {when: partial(do, when, kind) for when, kind in todo if kind == "update"}

    torch.set_num_threads(1)
    torch.manual_seed(settings.get("seed", 0))
    digits = Digits() if settings.get("digits") else None
    name = settings.get("optimizer", "momentum")
    dtype = precision(name)
    model = digits.model() if digits else Counts() if settings.get("counts") else net_of(name)
    if settings.get("norms"):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(net_with_norms(dtype))
        model[2].register_forward_hook(disturb_pass)
    made = optimizer(name, model, settings.get("lr", LR))
    data: Any = digits.train if digits else Numbered(LENGTH, dtype)
    schedule: Any = Counted()
    if "cosine" in settings:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, settings["cosine"])
    session = mh.session(
        model,
        made,
        watched,
        scheduler=schedule,
        clip_norm=settings.get("clip_norm"),
        seed=settings.get("seed", 0),
        example=None if digits else data.batch(torch.arange(BATCH), 0),
        save_every=settings.get("save_every", "never"),
        codec=settings.get("codec"),
    )
    if settings.get("saves"):
        session.resume(settings["saves"])  # from here on it saves there
    loop = loops(data, settings)
    for _ in range(settings.get("epochs", 2)):
        for batch in loop(session):
            note(kind="step", step=session.steps + 1, ids=[] if digits else batch[2].tolist())
            takeovers = session.engine.progress.takeovers
            committed.clear()
            if settings.get("halves"):
                step_in_halves(batch)
            else:
                session.step(batch)
            if settings.get("means"):
                take_the_mean()
            # Else the others have gone on without this worker's batch.
            if any(committed) or session.engine.progress.takeovers == takeovers:
                note(kind="made", step=session.steps, samples=session.samples, epoch=session.epoch)
        if not digits:
            loss_of_all = session.evaluate(data)["loss"]
            note(kind="evaluated", loss=loss_of_all, epoch=session.epoch, steps=session.steps)
    accuracy = (
        session.evaluate(digits.test, measures={"accuracy": mh.accuracy})["accuracy"] if digits else None
    )
    session.close()
    torch.save(values(model), folder / f"params-{number}.pt")
    note(
        kind="end",
        pid=os.getpid(),
        steps=session.steps,
        samples=session.samples,
        scheduled=schedule.last_epoch,
        rate=made.param_groups[0]["lr"],
        first_workers=session.engine.progress.full,
        epoch=session.epoch,
        tally=dict(session.engine.feeds.tally),
        workers=session.workers,
        accuracy=accuracy,
    )


if __name__ == "__main__":
    main()
