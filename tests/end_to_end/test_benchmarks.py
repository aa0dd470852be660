"""Each benchmark runs and writes what it found; how fast anything is, is not a matter for tests."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from manyhands.lab import emulated_hosts

# Two minutes alone, and more where others use the machine: these have a command of their own (`make bench-check`).
pytestmark = [pytest.mark.timeout(600), pytest.mark.benchmark]

FOLDER = Path(__file__).parents[2] / "benchmarks"
OPTIONS = {
    "training": ["--jobs", "small-mlp", "--contenders", "ours-alone", "plain-alone"],
    "adapters": ["--jobs", "small-mlp", "--workers", "1", "--contenders", "native", "prepared", "fit"],
    "checks": [],
    "collectives": ["--processes", "2"],
    "memory": ["--workers", "1"],
    "startup": ["--workers", "1"],
    "saving": [],
    "telemetry": [],
    "diagnosis": [],
    "page": [],
    "recovery": [],
    "attacks": [],
    "extremes": [],
    "serving": [],
    "soak": [],
    "porting": [],
    "placements-equality": ["equality"],
    "placements-shards": ["shards"],
    "placements-pipeline": ["pipeline"],
    "network": ["--jobs", "small-mlp", "--contenders", "ours", "ddp"],
    "strategies-servers": ["servers", "--jobs", "small-mlp", "--contenders", "ours", "rpc"],
    "strategies-traffic": ["traffic", "--cases", "ring"],
    "strategies-hiding": ["hiding"],
    "strategies-stragglers": ["stragglers", "--workers", "2"],
    "strategies-accuracy": ["accuracy", "--strategies", "single"],
    "planning": ["--models", "mlp"],
}
AT_ONCE = 3
WHY_NO_HOSTS = emulated_hosts.available()
HAS_MPICH = shutil.which("mpiexec", path=sysconfig.get_path("scripts")) is not None


def run(name: str, out: Path) -> dict[str, Any]:
    script = FOLDER / f"{name.partition('-')[0]}.py"
    where = ["--out", "out.json", "--summaries", "summaries"]
    command = [sys.executable, str(script), "--quick", *where, *OPTIONS[name]]
    environ = {**os.environ, "TMPDIR": str(out)}  # torchrun leaves files there
    with subprocess.Popen(command, cwd=out, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=200)
        finally:
            process.terminate()
    assert process.returncode == 0, errors
    record = json.loads((out / "out.json").read_text())
    assert record["benchmark"] == name
    assert record["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert_summaries(name, out / "summaries")
    results: dict[str, Any] = record["results"]
    return results


def assert_summaries(name: str, folder: Path) -> None:
    """What goes into the tree is small and says how it was made."""
    written = list(folder.glob("*.json"))
    assert written
    for path in written:
        assert path.stem.startswith(name)
        text = path.read_text()
        assert text.count("\n") <= 60
        summary = json.loads(text)
        assert summary["benchmark"] == path.stem
        assert summary["command"].startswith(f"python benchmarks/{name.partition('-')[0]}.py --quick")
        assert "--out" not in summary["command"]
        assert "--summaries" not in summary["command"]
        assert {"processor", "cores", "memory", "kernel", "python", "torch"} <= summary["machine"].keys()
        assert summary["commit"]["hash"]
        assert summary["measured"]


Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Some at the same time: most of each is starting processes, and nothing here is about speed."""
    no_hosts = dict.fromkeys(
        ["strategies-traffic", "strategies-hiding", "attacks", "network"], WHY_NO_HOSTS is not None
    )
    left_out = {"collectives": not HAS_MPICH, **no_hosts}
    names = [name for name in OPTIONS if not left_out.get(name)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = {name: pool.submit(partial(run, name, tmp_path_factory.mktemp(name))) for name in names}
    return lambda name: runs[name].result()


def assert_ratios(ratios: list[dict[str, Any]], expected: list[str]) -> None:
    assert [entry["name"] for entry in ratios] == expected
    for entry in ratios:
        assert 0 < entry["low"] == entry["median"] == entry["high"], "one round has no spread"
        assert entry["rounds"] == [entry["median"]]


def test_training(results: Results) -> None:
    found = results("training")["small-mlp"]
    assert_ratios(found["ratios"], ["ours, 1 worker ÷ plain PyTorch, 1 thread"])
    ours, plain = found["turns"]["ours-alone"][0], found["turns"]["plain-alone"][0]
    assert [len(worker["step_s"]) for worker in ours + plain] == [2, 2]
    assert ours[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-5), "not the same job"


def test_adapters(results: Results) -> None:
    turns = results("adapters")["small-mlp"]["1"]
    native, *others = [turns[name][0][0] for name in ("native", "prepared")]
    assert len(native["step_s"]) == 2
    for other in others:
        assert other["losses"] == pytest.approx(native["losses"], rel=1e-5), "not the same job"
    assert len(turns["fit"][0][0]["step_s"]) == 2


def test_checks(results: Results) -> None:
    found = results("checks")
    (steps,) = found["steps"].values()
    assert all(seconds[0] > 0 for seconds in steps.values())
    (case,) = found["starts"].values()
    for workers in case["counted"]:
        assert len(workers) == 2
        assert all(worker["spent"]["_plain_loader"] > 0 for worker in workers)


@pytest.mark.skipif(not HAS_MPICH, reason="there is no mpiexec beside Python: pip install mpich mpi4py")
def test_collectives(results: Results) -> None:
    found = results("collectives")["2"]
    kinds = ("ours", "ours, ordinary memory")
    names = [f"{ours} ÷ {other}" for ours in kinds for other in ("gloo", "mpich") for _ in range(2)]
    assert_ratios(found["ratios"], names)
    assert [entry["of"] for entry in found["ratios"]] == ["4kB", "1MB"] * 4
    for name in ("ours", "ours-ordinary", "gloo", "mpich"):
        assert len(found["turns"][name][0]) == 2, f"{name} was not a world of 2"
        assert all(seconds[0] > 0 for seconds in found["seconds"][name].values())


def test_memory(results: Results) -> None:
    found = results("memory")
    assert all("ours ÷ DDP" in entry["name"] for entry in found["ratios"])
    for turns in found["peaks"].values():
        assert turns[0]["samples"] > 0
        assert 50e6 < turns[0]["workers_bytes"] <= turns[0]["workers_life_bytes"] < 4e9


def test_startup(results: Results) -> None:
    found = results("startup")
    assert_ratios(found["ratios"], ["manyhands launch ÷ torchrun, DDP"])
    assert all(seconds[0] > 0 for seconds in found["seconds"].values())


def test_saving(results: Results) -> None:
    found = results("saving")
    stops = "a save of ours stops training"
    beside = [f"{stops} ÷ a copy of the state into memory", f"{stops} ÷ torch.save, and the disk"]
    assert_ratios(found["ratios"], [*beside, "a step while a checkpoint is written ÷ a step"])
    assert len(found["seconds"]["meanwhile_s"]) == 2, "training goes on while a checkpoint is written"


def test_telemetry(results: Results) -> None:
    found = results("telemetry")
    assert_ratios(found["ratios"], ["with ÷ without"])
    assert found["calls"]["step"] == 1
    assert 0 < found["step_s"] == sum(found["each_s"][name] * count for name, count in found["calls"].items())
    assert all(seconds[0] > 0 for seconds in found["seconds"].values())


def test_page(results: Results) -> None:
    found = results("page")
    assert_ratios(found["ratios"], ["the page ÷ TensorBoard, opening"])
    assert 0 < found["following"][0] < 1


def test_servers(results: Results) -> None:
    found = results("strategies-servers")["small-mlp"]
    assert_ratios(found["ratios"], ["ours ÷ torch RPC server"])
    for name in ("ours", "rpc"):
        assert [len(worker["step_s"]) for worker in found["turns"][name][0]] == [2, 2], "one of three serves"


@pytest.mark.skipif(WHY_NO_HOSTS is not None, reason=str(WHY_NO_HOSTS))
def test_traffic(results: Results) -> None:
    found = results("strategies-traffic")
    assert [host["host"] for host in found["ring"]["hosts"]] == [0, 1, 2, 3]
    for host in found["ring"]["hosts"]:
        assert host["formula_bytes"] == 3_000_000
        assert host["reached"], f"{host['sent_bytes']} bytes left a host in a step of a ring"


@pytest.mark.skipif(WHY_NO_HOSTS is not None, reason=str(WHY_NO_HOSTS))
def test_hiding(results: Results) -> None:
    found = results("strategies-hiding")
    assert_ratios(found["ratios"], ["double-buffer ÷ no exchange", "ring ÷ no exchange"])


@pytest.mark.skipif(WHY_NO_HOSTS is not None, reason=str(WHY_NO_HOSTS))
def test_network(results: Results) -> None:
    (found,) = results("network").values()
    assert_ratios(found["ratios"], ["DDP (Gloo) ÷ ours"])


def test_stragglers(results: Results) -> None:
    for found in results("strategies-stragglers").values():
        assert_ratios(found["ratios"], [found["ratios"][0]["name"]])
        assert all(0 <= each[0] <= 1 for each in found["accuracy"].values())


def test_accuracy(results: Results) -> None:
    (turn,) = results("strategies-accuracy")["single"]
    assert "error" not in turn
    assert turn["optimizer"] == "sgd:lr=0.025,momentum=0.9"


def test_recovery(results: Results) -> None:
    for kills in results("recovery").values():
        assert len(kills) == 1
    (ours,) = results("recovery")["manyhands launch"]
    assert ours["resumed_s"] > 0, "ours goes on"
    assert ours["same_processes"]


@pytest.mark.skipif(WHY_NO_HOSTS is not None, reason=str(WHY_NO_HOSTS))
def test_attacks(results: Results) -> None:
    counts = results("attacks")["counts"]
    assert counts["the same processes at the end"]
    assert counts["attacker"]["garbage"] > 0


def test_extremes(results: Results) -> None:
    (turns,) = results("extremes")["turns"].values()
    assert [len(turn) for each in turns.values() for turn in each] == [16, 1]


def test_serving(results: Results) -> None:
    found = results("serving")
    assert found["counts"]["swaps"] == 2
    assert found["counts"]["failed"] == 0
    assert len(found["renamed_to_answer_s"]) == 1


def test_soak(results: Results) -> None:
    (found,) = results("soak").values()
    assert len(found["looks"]) > 5
    assert found["steps"] > 100


def test_porting(results: Results) -> None:
    found = results("porting")["quick"]
    assert found["DDP form"]["kind"] == found["all-reduce"]["kind"] == "runs"
    assert found["all-reduce"]["steps"] == 44, "22 steps of 2 workers"
    assert 0 <= found["all-reduce"]["difference"] < 1e-5
    assert found["sharded"]["kind"] == "refused"
    assert "--placement sharded divides it" in found["sharded"]["says"]


def test_equality(results: Results) -> None:
    (found,) = results("placements-equality")["small"].values()
    assert 0 <= found < 1e-5


def test_shards(results: Results) -> None:
    found = results("placements-shards")
    assert [len(turn) for turns in found.values() for turn in turns] == [4, 4] * len(found["sharded"])


def test_pipeline(results: Results) -> None:
    found = results("placements-pipeline")["small"]
    assert len(found["one worker"][0]) == 1
    assert len(found["1f1b, 2"][0]) == 2
