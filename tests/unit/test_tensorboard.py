"""What we write is read back by the real TensorBoard."""

import io
import math
from pathlib import Path

import pytest
from PIL import Image

from manyhands.errors import UsageError
from manyhands.telemetry import lines
from manyhands.telemetry.event_file import EventWriter, _crc32c
from manyhands.telemetry.read import Tail
from manyhands.telemetry.tensorboard import Scalars, export

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")


def curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = event_accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags}


def write_run(run: Path, records: list[lines.Record]) -> None:
    for record in records:
        path = run / "events" / f"worker-{record['rank']}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(lines.encode(record))


def two_workers() -> list[lines.Record]:
    start = {"kind": "start", "workers": 2, "total_steps": 2, "epochs": 1}
    records = [{**start, "t": 100.0, "rank": rank} for rank in range(2)]
    for step in (1, 2):
        for rank in range(2):
            record = {"kind": "step", "t": 100.0 + step, "rank": rank, "step": step, "epoch": 0}
            record |= {"loss": step + rank, "samples": 32, "compute_s": 0.25, "bytes_sent": 1000}
            records.append(record)
    evaluation = {"kind": "evaluate", "t": 103.0, "step": 2, "accuracy": 0.75, "loss": 0.5}
    return records + [{**evaluation, "rank": rank} for rank in range(2)]


def test_checksum_is_crc32c() -> None:
    assert _crc32c(b"123456789") == 0xE3069283


def test_points_come_back(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.test"
    with EventWriter(path) as writer:
        writer.scalar("loss", 2.5, 0, 10.0)
        writer.scalar("loss", math.nan, 300, 11.0)
        writer.scalar("loss", 1e300, 1 << 40, 12.0)
        writer.scalar("accuracy/held out äö", -0.5, 7, 13.5)
    found = curves(path)
    assert found["accuracy/held out äö"] == [(7, -0.5)]
    assert [step for step, _ in found["loss"]] == [0, 300, 1 << 40]
    assert found["loss"][0][1] == 2.5
    assert math.isnan(found["loss"][1][1])
    assert found["loss"][2][1] == math.inf


def test_layers_come_back_as_norms_and_histograms_and_classes_as_a_picture(tmp_path: Path) -> None:
    layer = {"name": "fc.weight", "weight_norm": 3.0, "weight_range": [-1.0, 2.0], "weight_counts": [5, 0, 4]}
    layer |= {"gradient_norm": math.nan}
    layers = {
        "kind": "layers",
        "t": 11.0,
        "rank": 0,
        "step": 7,
        "layers": [layer, {"name": "bias"}, "no layer"],
    }
    odd = {"kind": "layers", "t": 11.5, "rank": 0, "step": 8, "layers": [{**layer, "weight_range": ["x", 1]}]}
    classes = {"kind": "classes", "t": 12.0, "rank": 0, "step": 7, "confusion": [[3, 1], [0, 4]]}
    torn = {"kind": "classes", "t": 13.0, "rank": 0, "step": 9, "confusion": [[3, 1], [0]]}
    write_run(tmp_path, [layers, odd, classes, torn])
    accumulator = event_accumulator.EventAccumulator(str(export(tmp_path)))
    accumulator.Reload()
    assert curves(tmp_path / "tensorboard")["weight norms/fc.weight"] == [(7, 3.0), (8, 3.0)]
    (point,) = accumulator.Histograms("weights/fc.weight")
    found = point.histogram_value
    assert (found.min, found.max, found.num, found.sum_squares) == (-1.0, 2.0, 9.0, 9.0)
    assert list(found.bucket) == [5.0, 0.0, 4.0]
    assert list(found.bucket_limit) == [0.0, 1.0, 2.0]
    (picture,) = accumulator.Images("evaluate/confusion")
    assert (picture.step, picture.width, picture.height) == (7, 320, 320)
    with Image.open(io.BytesIO(picture.encoded_image_string)) as image:
        always, half, never = (image.getpixel(place) for place in ((200, 200), (10, 10), (10, 200)))
    assert always == (8, 48, 107)
    assert never == (255, 255, 255)
    assert always < half < never


def test_a_reader_that_is_watching_sees_points_after_flush(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.test"
    with EventWriter(path) as writer:
        writer.scalar("loss", 1.0, 1, 1.0)
        writer.flush()
        loader = event_file_loader.EventFileLoader(str(path))
        first = list(loader.Load())
        writer.scalar("loss", 0.5, 2, 2.0)
        writer.flush()
        second = list(loader.Load())
    assert [event.step for event in first if event.HasField("summary")] == [1]
    assert [(event.step, event.wall_time) for event in second] == [(2, 2.0)]
    assert first[0].file_version == "brain.Event:2"


def test_export_joins_the_workers(tmp_path: Path) -> None:
    write_run(tmp_path, two_workers())
    path = export(tmp_path)
    assert path.parent == tmp_path / "tensorboard"
    assert curves(path) == {
        "loss": [(1, 1.5), (2, 2.5)],
        "samples": [(1, 64.0), (2, 64.0)],
        "samples_per_second": [(1, 64.0), (2, 64.0)],
        "seconds/compute": [(1, 0.25), (2, 0.25)],
        "bytes/sent": [(1, 2000.0), (2, 2000.0)],
        "epoch": [(1, 0.0), (2, 0.0)],
        "evaluate/accuracy": [(2, 0.75)],
        "evaluate/loss": [(2, 0.5)],
    }


def test_what_scripts_log_and_measure_are_curves_too(tmp_path: Path) -> None:
    """The mean over the workers that log; of all that was measured."""
    log = {"kind": "log", "t": 101.5, "step": 1}
    logged = [
        {**log, "rank": 0, "values": {"rate": 0.5, "norm": 2.0}},
        {**log, "rank": 1, "values": {"rate": 1.5}},
    ]
    measured = {"kind": "evaluate", "t": 104.0, "step": 3, "rank": 0, "auc": 0.75, "epoch": 1}
    write_run(tmp_path, [*two_workers(), *logged, {**logged[0], "t": 103.5, "step": 30}, measured])
    found = curves(export(tmp_path))
    assert found["rate"] == [(1, 1.0), (30, 0.5)]
    assert found["norm"] == [(1, 2.0), (30, 2.0)]
    assert found["evaluate/auc"] == [(3, 0.75)]


def test_exporting_again_replaces_the_file(tmp_path: Path) -> None:
    write_run(tmp_path, two_workers())
    assert export(tmp_path) == export(tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert len(curves(tmp_path / "tensorboard")["loss"]) == 2


def test_a_worker_that_died_does_not_hide_the_steps_of_the_others(tmp_path: Path) -> None:
    write_run(
        tmp_path, [record for record in two_workers() if not (record["rank"] and record.get("step") == 2)]
    )
    assert curves(export(tmp_path))["loss"] == [(1, 1.5), (2, 2.0)]


def test_a_live_run_gives_the_same_curves_as_the_export(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    live = tmp_path / "events.out.tfevents.1.live"
    with EventWriter(live) as writer:
        scalars = Scalars(writer)
        for record in two_workers():
            write_run(tmp_path, [record])
            for new in tail.poll():
                scalars.add(new)
        scalars.finish()
    assert curves(live) == curves(export(tmp_path))


def test_loss_is_the_mean_over_samples_and_a_worker_without_any_does_not_count(tmp_path: Path) -> None:
    records = two_workers()[:4]
    records[2] |= {"loss": 1.0, "samples": 30}
    records[3] |= {"loss": 4.0, "samples": 10}
    write_run(tmp_path / "uneven", records)
    assert curves(export(tmp_path / "uneven"))["loss"] == [(1, 1.75)]
    records[3] |= {"loss": math.nan, "samples": 0}
    write_run(tmp_path / "none", records)
    assert curves(export(tmp_path / "none"))["loss"] == [(1, 1.0)]


def test_odd_records_do_not_stop_the_export(tmp_path: Path) -> None:
    odd = {"kind": "step", "t": 101.0, "rank": 0, "step": 1, "loss": "high", "samples": 8, "nested": [1]}
    start = {"kind": "start", "t": 100.0, "rank": 0, "workers": "many"}
    write_run(
        tmp_path,
        [start, odd, {**odd, "samples": None}, {**odd, "step": "x"}, {**odd, "step": 2, "loss": 3.0}],
    )
    assert curves(export(tmp_path))["loss"] == [(2, 3.0)]


def test_a_directory_without_records_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no records"):
        export(tmp_path)
    assert not (tmp_path / "tensorboard").exists()
