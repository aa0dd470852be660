"""What was measured is kept for its host, library and job, and used only while it holds."""

import stat
import time
from pathlib import Path

import msgspec
import pytest

from manyhands.errors import UsageError
from manyhands.job.plan import Plan, Train
from manyhands.planner import cache_folder, kept_probes, predictions
from manyhands.planner.facts import Estimate, HostFacts, KernelPair, ModelFacts, SplitFacts
from manyhands.planner.jobs import of_plan, of_script
from manyhands.planner.measure import HostProbe
from manyhands.planner.predictions import PredictedRun, PredictedStep

FREE = {"workers": None, "threads": None}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "manyhands"


def probe(made_at: float | None = None) -> HostProbe:
    split = SplitFacts(
        processes=1, threads=1, pass_cpu_s=Estimate(0.001, (0.001, 0.002)), sample_cpu_s=Estimate(0.0001)
    )
    return HostProbe(
        host=HostFacts(
            kind="this host",
            cores=1,
            memory_bytes=1 << 30,
            kernels=KernelPair(flops_per_s=1e11, bytes_per_s=1e10),
            splits=(split,),
        ),
        model=ModelFacts(name="m", parameters=10, span_bytes=(40,), ready=(1.0,)),
        batch=32,
        indistinct=0.01,
        chosen="1 × 1",
        verdict="there is only one",
        step_s={"1 × 1": 0.0001},
        rounds=1,
        took_s=1.0,
        made_at=time.time() if made_at is None else made_at,
    )


def unchanged() -> tuple[float, ...]:
    return (1.0, 1.0)


@pytest.fixture(autouse=True)
def quick_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_probes, "check_s", unchanged)


def test_what_was_kept_is_found_again_and_is_for_this_user_alone(cache: Path) -> None:
    known = kept_probes.known_by(of_plan(Plan()), FREE)
    path = kept_probes.keep(known, kept := probe())
    assert kept_probes.find(known).probe == kept
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "other",
    [
        Plan(model="mlp"),
        Plan(data="synthetic:1x8x8:10"),
        Plan(train=Train(batch=64)),
        Plan(train=Train(optimizer="adam:lr=0.1")),
    ],
)
def test_another_job_was_not_measured(other: Plan) -> None:
    kept_probes.keep(kept_probes.known_by(of_plan(Plan()), FREE), probe())
    assert kept_probes.find(kept_probes.known_by(of_plan(other), FREE)).probe is None


def test_how_long_and_how_distributed_does_not_matter() -> None:
    same = Plan(strategy="hogwild", train=Train(epochs=3, seed=5, optimizer="sgd:lr=3"))
    known = kept_probes.known_by(of_plan(Plan()), FREE)
    assert kept_probes.known_by(of_plan(same), FREE) == known


def test_another_host_library_or_script_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(1)")
    known = kept_probes.known_by(of_script([str(script)], "script"), FREE)
    kept_probes.keep(known, probe())
    assert kept_probes.find(known).probe
    script.write_text("print(2)")
    assert kept_probes.find(kept_probes.known_by(of_script([str(script)], "script"), FREE)).probe is None
    script.write_text("print(1)")
    monkeypatch.setattr(kept_probes, "_version", lambda package: "9.9")
    assert kept_probes.find(kept_probes.known_by(of_script([str(script)], "script"), FREE)).probe is None


def test_a_host_that_has_become_slower_is_measured_again() -> None:
    known = kept_probes.known_by(of_plan(Plan()), FREE)
    kept_probes.keep(known, probe())
    assert kept_probes.find(known, lambda: (1.3, 2.0)).probe
    found = kept_probes.find(known, lambda: (4.0, 1.0))
    assert found.probe is None
    assert "4.00 times" in found.why_not
    kept_probes.keep(known, probe(made_at=time.time() - 31 * 24 * 3600))
    assert "30 days" in kept_probes.find(known).why_not


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04}", b'{"form": 1}', b"[]", b"null"])
def test_a_damaged_file_is_as_if_it_were_not_there(content: bytes) -> None:
    known = kept_probes.known_by(of_plan(Plan()), FREE)
    path = kept_probes.keep(known, probe())
    path.write_bytes(content)
    assert kept_probes.find(known).probe is None


def test_a_directory_that_cannot_be_made_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME"):
        cache_folder.folder()


# The ledger of predictions

STEP = PredictedStep(step_s=1.0, low_s=0.9, high_s=1.1, terms_s={"compute": 0.8, "waiting": 0.2})


def ran(measured_s: float, **terms: float) -> PredictedRun:
    return PredictedRun(
        at=0.0,
        host="h",
        job="j",
        strategy="s",
        way="s, 1 × 1",
        predicted=STEP,
        measured_s=measured_s,
        measured_terms_s=terms,
    )


def test_a_run_says_whether_it_was_inside_and_which_term_was_wrong() -> None:
    assert ran(1.05).is_inside
    assert ran(1.05).wrong_term() is None
    run = ran(1.5, compute=0.82, waiting=0.68)
    assert not run.is_inside
    assert run.wrong_term() == ("waiting", 0.2, 0.68)


def test_predictions_learn_from_those_before(tmp_path: Path, cache: Path) -> None:
    assert predictions.learned("h", "j", "s").applied(STEP) == STEP
    for _ in range(10):
        predictions.record(ran(1.5), tmp_path)
    with (cache / predictions.FILE).open("ab") as file:
        file.write(b'no line\n{"at": 1}\n')
    found = predictions.learned("h", "j", "s")
    assert found.runs == 10
    assert 1.3 < found.factor < 1.5
    learned = found.applied(STEP)
    assert learned.step_s == pytest.approx(found.factor)
    assert learned.low_s < 1.5 < learned.high_s
    assert predictions.learned("h", "j", "other").runs == 0
    assert predictions.runs(tmp_path / predictions.FILE) == predictions.runs(cache / predictions.FILE)
    assert stat.S_IMODE((cache / predictions.FILE).stat().st_mode) == 0o600


def test_a_machine_that_is_always_slower_is_learned_wholly(tmp_path: Path, cache: Path) -> None:
    """Each run is held against what the runs before it have made of the price."""
    for _ in range(20):
        predicted = predictions.learned("h", "j", "s").applied(STEP)
        predictions.record(msgspec.structs.replace(ran(1.5), predicted=predicted), tmp_path)
    assert predictions.learned("h", "j", "s").factor == pytest.approx(1.5, rel=0.05)


def test_nothing_is_written_through_a_link(tmp_path: Path, cache: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    cache_folder.folder()
    (cache / predictions.FILE).symlink_to(target)
    with pytest.raises(OSError, match="link"):
        predictions.record(ran(1.0), None)
    assert target.read_text() == "mine"


def test_the_form_of_a_probe_survives_its_file() -> None:
    kept = probe()
    assert msgspec.json.decode(msgspec.json.encode(kept), type=HostProbe) == kept
