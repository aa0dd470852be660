"""What a run did, as `summary.json` has it."""

from pathlib import Path
from typing import Any

import msgspec

from manyhands import placement, telemetry
from manyhands.comm import codecs
from manyhands.engine.engine import Engine, Totals


def summarize(engine: Engine) -> dict[str, Any]:
    progress, world = engine.progress, engine.world
    totals = engine.totals or Totals(*own_bytes(), None)
    more = {"servers": world.servers, "staleness": totals.staleness} if engine.served else {}
    classes = {"classes": engine.class_report.by_class()} if engine.class_report is not None else {}
    coded = {} if engine.settings.codec == codecs.DEFAULT else {"codec": engine.settings.codec}
    return {
        "samples_per_second": round(engine.clock.rate(), 2),
        "loss": progress.measured.get("loss", progress.last_loss),
        "accuracy": progress.measured.get("accuracy"),
        **{name: progress.measured[name] for name in ("top5",) if name in progress.measured},
        "steps": progress.steps,
        "samples": progress.samples,
        "epochs": progress.epoch,
        "workers": world.size,
        "hosts": len(world.hosts),
        "strategy": engine.settings.strategy,
        "placement": placement.describe(engine.placed.placement),
        **coded,
        "bytes_sent": int(totals.bytes_sent),
        "shared_bytes": int(totals.shared_bytes),
        "wall_s": round(engine.clock.wall_s(), 3),
        "committed": engine.feeds.report,
        **more,
        **classes,
    }


def write_summary(out: Path, summary: dict[str, Any], name: str = "summary") -> None:
    temporary = out / f".{name}.json"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(summary)))
    temporary.replace(out / f"{name}.json")


def own_bytes() -> tuple[float, float]:
    """What this process has sent, and has passed through the memory of its host."""
    totals = telemetry.totals()
    return float(totals.get("bytes_sent", 0)), float(totals.get("shared_bytes", 0))
