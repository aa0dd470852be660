"""A plan is the same whether it comes from flags, from a TOML file or from the plan.json of an earlier run."""

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from manyhands.cli import build
from manyhands.cli.planned import planned
from manyhands.cluster.launchers.rank_info import SERVERS, RankInfo
from manyhands.engine import intervals
from manyhands.engine.intervals import Interval
from manyhands.engine.progress import Progress
from manyhands.errors import UsageError
from manyhands.job import plan as plans
from manyhands.job.plan import Cluster, Plan, Train

ALONE = RankInfo(rank=0, size=1, launcher="alone")

SPEC = """
[model]
name = "mlp"
hidden = [512, 256]

[data]
name = "synthetic:3x32x32:10"
samples = 128

[strategy]
name = "parameter-server"
consistency = "async"

[placement]
name = "pipeline"
stages = 1

[codec]
name = "top-k"
density = 0.001

[cluster]
workers = 4
hosts = "2@10.0.0.1:29400"
most_workers = 6
replace = 1
servers = 2
threads = 1
device = "cpu"

[train]
epochs = 3
steps = 7
batch = 16
accumulate = 2
optimizer = "adamw:lr=0.001"
warm_up = 0.5
schedule = "cosine"
clip_norm = 1.5
size = 64
augment = true
weights = "runs/first"
head = "new"
seed = 11
save_every = "500 steps"
keep = 5
watch_layers = 50
"""

PLAN = Plan(
    model="mlp:hidden=512-256",
    data="synthetic:3x32x32:10,samples=128",
    strategy="parameter-server:consistency=async",
    placement="pipeline:stages=1",
    codec="top-k:density=0.001",
    cluster=Cluster(
        workers=4, hosts="2@10.0.0.1:29400", most_workers=6, replace=1, servers=2, threads=1, device="cpu"
    ),
    train=Train(
        epochs=3,
        steps=7,
        batch=16,
        accumulate=2,
        optimizer="adamw:lr=0.001",
        warm_up=0.5,
        schedule="cosine",
        clip_norm=1.5,
        size=64,
        augment=True,
        weights="runs/first",
        head="new",
        seed=11,
        save_every="500 steps",
        keep=5,
        watch_layers=50,
    ),
)


def write(folder: Path, text: str, name: str = "job.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def from_flags(*arguments: str, rank_info: RankInfo = ALONE) -> Plan:
    return planned(build().parse_args(["train", *arguments]), rank_info)


def test_a_spec_names_everything_that_a_plan_holds(tmp_path: Path) -> None:
    assert plans.read(write(tmp_path, SPEC)) == PLAN
    defaults = Plan()
    for section, default in (
        (PLAN, defaults),
        (PLAN.cluster, defaults.cluster),
        (PLAN.train, defaults.train),
    ):
        for field in section.__struct_fields__:
            # There is only one device to test on; what is left to the planner has a test of its own.
            if field not in ("device", "auto"):
                assert getattr(section, field) != getattr(default, field), f"{field} was not tried"


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    for plan in (PLAN, Plan()):
        plan.write(tmp_path / "plan.json")
        assert plans.read(tmp_path / "plan.json") == plan
        assert plans.decode(plan.encode()) == plan


def test_a_file_that_says_nothing_is_the_default_job(tmp_path: Path) -> None:
    assert plans.read(write(tmp_path, "")) == Plan() == from_flags()


def test_a_file_and_flags_leave_words_to_the_planner(tmp_path: Path) -> None:
    spec = write(tmp_path, 'strategy = "auto"\n[cluster]\nworkers = "auto"\nservers = 0\n')
    plan = plans.read(spec)
    assert plan.auto == ["strategy", "workers"]
    assert plan.strategy == Plan().strategy
    assert plans.read(write(tmp_path, '[strategy]\nname = "auto"\n')).auto == ["strategy"]
    spec.write_text('strategy = "auto"\n[cluster]\nworkers = "auto"\n')
    plan = from_flags(str(spec), "--workers", "3", "--threads", "auto")
    assert plan.auto == ["strategy", "threads"]
    assert plan.cluster.workers == 3


def test_flags_say_the_same_as_a_file(tmp_path: Path) -> None:
    flags = from_flags(
        *("--model", "mlp:hidden=512-256", "--data", "synthetic:3x32x32:10,samples=128"),
        *("--placement", "pipeline:stages=1", "--codec", "top-k:density=0.001"),
        *("--strategy", "parameter-server:consistency=async", "--workers", "4:6", "--servers", "2"),
        *("--hosts", "2@10.0.0.1:29400", "--threads", "1", "--device", "cpu"),
        *("--epochs", "3", "--steps", "7", "--batch", "16", "--optimizer", "adamw:lr=0.001", "--seed", "11"),
        *("--save-every", "500 steps", "--keep", "5", "--weights", "runs/first", "--head", "new"),
    )
    only_in_files = {
        field: getattr(PLAN.train, field)
        for field in ("accumulate", "warm_up", "schedule", "clip_norm", "size", "augment", "watch_layers")
    }
    cluster = msgspec.structs.replace(flags.cluster, replace=PLAN.cluster.replace)
    train = msgspec.structs.replace(flags.train, **only_in_files)
    assert msgspec.structs.replace(flags, cluster=cluster, train=train) == PLAN


def test_flags_override_the_file_and_leave_the_rest(tmp_path: Path) -> None:
    path = str(write(tmp_path, SPEC))
    plan = from_flags(path, "--model", "lenet", "--workers", "2", "--batch", "8", "--seed", "5")
    expected = msgspec.structs.replace(
        PLAN,
        model="lenet",
        cluster=msgspec.structs.replace(PLAN.cluster, workers=2, most_workers=2),
        train=msgspec.structs.replace(PLAN.train, batch=8, seed=5),
    )
    assert plan == expected


@pytest.mark.parametrize(
    ("flags", "epochs", "steps"),
    [
        ((), 3, 7),
        (("--epochs", "5"), 5, None),
        (("--steps", "9"), None, 9),
        (("--epochs", "5", "--steps", "9"), 5, 9),
    ],
)
def test_a_length_given_by_flag_replaces_the_length_in_the_file(
    tmp_path: Path, flags: tuple[str, ...], epochs: int | None, steps: int | None
) -> None:
    train = from_flags(str(write(tmp_path, SPEC)), *flags).train
    assert (train.epochs, train.steps) == (epochs, steps)


@pytest.mark.parametrize(
    ("epochs", "steps", "total"),
    [(None, None, 12 * 23), (2, None, 46), (None, 5, 5), (None, 5000, 5000), (2, 30, 30), (2, 50, 46)],
)
def test_how_many_steps_a_run_takes(epochs: int | None, steps: int | None, total: int) -> None:
    assert Train(epochs=epochs, steps=steps).total_steps(23) == total


def test_a_run_is_over_after_its_epochs_however_many_steps_they_took() -> None:
    train = Train(epochs=4)
    assert not train.is_over(steps=69, epochs=3)
    assert train.is_over(steps=10, epochs=4)
    # After three epochs of 23 steps, workers who need 12 for one have 12 left of the four, and are at step 36 of 48.
    assert train.steps_left(12, steps=69, of_epochs=36) == 12
    assert Train(epochs=4, steps=75).steps_left(12, steps=69, of_epochs=36) == 6
    assert Train(epochs=3).steps_left(12, steps=69, of_epochs=36) == 0


def test_where_steps_alone_say_how_long_epochs_do_not_count() -> None:
    assert not Train(steps=100).is_over(steps=99, epochs=1000)
    assert Train(steps=100).is_over(steps=100, epochs=1)
    assert Train().is_over(steps=1, epochs=12)


def test_a_resumed_run_goes_on_with_its_own_plan(tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.json")
    assert from_flags("--resume", "--out", str(tmp_path)) == PLAN
    assert from_flags("--out", str(tmp_path)) == Plan()
    assert from_flags("--resume", "--out", str(tmp_path), "--batch", "2").train.batch == 2
    other = str(write(tmp_path, "[model]\nname = 'lenet'"))
    assert from_flags(other, "--resume", "--out", str(tmp_path)) == Plan(model="lenet")


def test_a_world_that_someone_else_started_says_how_many_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVERS, "")  # whatever is written there is gone after this test
    rank_info = dataclasses.replace(ALONE, size=3, launcher="torchrun")
    assert from_flags(str(write(tmp_path, SPEC)), rank_info=rank_info).cluster == Cluster(
        workers=1, servers=2, threads=1
    )
    assert from_flags("--workers", "3", rank_info=rank_info).cluster.workers == 3
    with pytest.raises(UsageError, match="--workers 2 but torchrun started 3"):
        from_flags("--workers", "2", rank_info=rank_info)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[modle]\nname = 'mlp'",
            "unknown section 'modle'; known: model, data, strategy, placement, codec, cluster, train",
        ),
        ("[train]\nbatchsize = 3", r"unknown key in \[train\] 'batchsize'; known: epochs, steps, batch"),
        (
            "[cluster]\ngpus = 3",
            r"unknown key in \[cluster\] 'gpus'; known: workers, hosts, most_workers, replace, ",
        ),
        ("[model]\nhidden = 3", r"\[model\] needs a name"),
        ("[model]\nname = 3", r"\[model\] needs a name"),
        ("[model]\nname = 'mlp'\n[model.hidden]\na = 1", r"\[model\] hidden is a section of its own"),
        ("[model]\nnam = 'mlp'", r"\[model\] needs a name.*; did you mean name where it says nam\?"),
        ("model = 3", 'model = 3: a name is expected, as in model = "…"'),
        ("train = 3", r"\[train\] is 3: a section with words of its own is expected"),
        ("epochs = 3", r"'epochs'; it belongs under \[train\]"),
        ("[train]\nworkers = 3", r"\[train\] 'workers'; it belongs under \[cluster\]"),
        ("[train]\nepochs = 'three'", r'\[train\] epochs = "three": a whole number is expected'),
        ("[train]\naccumulate = 1.5", r"\[train\] accumulate = 1.5: a whole number is expected"),
        ("[train]\naugment = 1", r"\[train\] augment = 1: true or false is expected"),
        ("[train]\nclip_norm = 'x'", r'\[train\] clip_norm = "x": a number is expected'),
        ("[cluster]\nhosts = 2", r"\[cluster\] hosts = 2: a text in quotes is expected"),
        ("[train", "not valid TOML"),
        ("batch", "not valid TOML"),
    ],
)
def test_what_a_file_gets_wrong_is_said_with_the_file_and_the_place(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        plans.read(write(tmp_path, text))
    assert "job.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"train": {"accumulate": null}}', '{"run": 1}'])
def test_a_json_file_that_is_no_plan(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"plan\.json"):
        plans.read(write(tmp_path, text, "plan.json"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        plans.read(tmp_path / "absent.toml")
    with pytest.raises(UsageError, match="directory"):
        plans.read(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[model]\nname = '\xff'")
    with pytest.raises(UsageError, match="not valid TOML"):
        plans.read(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"cluster": {"workers": 0}}, "workers=0: it must be at least 1"),
        ({"cluster": {"workers": -2}}, "workers=-2"),
        ({"cluster": {"threads": 0}}, "threads=0"),
        ({"cluster": {"device": "tpu"}}, "unknown device 'tpu'; known: cpu, cuda"),
        ({"train": {"epochs": 0}}, "epochs=0"),
        ({"train": {"steps": 0}}, "steps=0"),
        ({"train": {"batch": 0}}, "batch=0"),
        ({"train": {"accumulate": 0}}, "accumulate=0"),
        ({"train": {"size": 0}}, "size=0"),
        ({"train": {"clip_norm": 0}}, "clip_norm=0: it must be above 0"),
        ({"train": {"clip_norm": -1.5}}, "clip_norm=-1.5"),
        ({"train": {"watch_layers": 0}}, "watch_layers=0: it must be at least 1"),
        (
            {"placement": "pipeline", "train": {"watch_layers": 9}},
            "watch_layers=9: it needs a whole model on a worker, and the placement pipeline divides it",
        ),
        ({"train": {"seed": -1}}, "seed=-1: it must be from 0"),
        ({"train": {"seed": 2**63}}, f"seed={2**63}"),
        ({"train": {"warm_up": -1.0}}, "warm_up=-1: it must be a number of epochs, 0 or more"),
        ({"train": {"schedule": "sometimes"}}, "unknown schedule 'sometimes'; known: constant, cosine"),
        ({"strategy": "nope"}, "unknown strategy 'nope'; known: "),
        ({"strategy": "all-reduce:topology=star"}, "unknown topology 'star'; known: "),
        (
            {"strategy": "all-reduce:speed=3"},
            "unknown setting of strategy all-reduce 'speed'; known: topology",
        ),
        ({"strategy": "single"}, "strategy single runs on 1 worker, not 2"),
    ],
)
def test_plans_that_cannot_run_are_refused(tmp_path: Path, words: dict[str, object], message: str) -> None:
    plan = plans.read(write(tmp_path, json.dumps(words), "plan.json"))
    with pytest.raises(UsageError) as refusal:
        plan.check()
    assert message in str(refusal.value)


def test_plans_that_can_run_are_not_refused() -> None:
    msgspec.structs.replace(PLAN, codec="none").check()
    Plan().check()
    Plan(strategy="single", cluster=Cluster(workers=1)).check()


@pytest.mark.parametrize(("save", "save_every"), [("true", "epoch"), ("false", "never")])
def test_plans_from_when_save_was_yes_or_no_are_understood(
    save: str, save_every: str, tmp_path: Path
) -> None:
    path = write(tmp_path, f'{{"train": {{"save": {save}}}}}', "plan.json")
    assert plans.read(path).train.save_every == save_every


@pytest.mark.parametrize(
    ("text", "every", "measure"),
    [
        ("epoch", 1, "epochs"),
        ("2 epochs", 2, "epochs"),
        ("500steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("30s", 30, "seconds"),
        ("10 min", 600, "seconds"),
        ("2h", 7200, "seconds"),
    ],
)
def test_how_often_to_save_is_said_in_words(text: str, every: int, measure: str) -> None:
    assert intervals.parse(text) == Interval(every=every, measure=measure)
    assert intervals.parse("never") is None


@pytest.mark.parametrize(
    "text", ["", "5", "0 steps", "steps 5", "5 weeks", "-1 epochs", "1.5 epochs", "5 5 s"]
)
def test_what_cannot_be_an_interval_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="write how often to save as epoch, 2 epochs, 500 steps, 30s"):
        Plan(train=Train(save_every=text)).check()


def test_a_multiple_that_was_passed_is_due() -> None:
    interval = intervals.parse("100 steps")
    assert interval is not None
    progress = Progress(seed=0, full=1, steps=130, epoch=1)  # went on from there
    progress.mark_saved()
    assert next(step for step in range(131, 350) if interval.is_due(progress, steps=step)) == 200
    progress.steps = 203
    progress.mark_saved()
    assert not interval.is_due(progress, steps=299)
    assert interval.is_due(progress, steps=300)
    progress.epoch = 9
    assert not interval.is_due_after_epoch(progress), "epochs are not what was asked for"
