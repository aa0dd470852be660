"""What a server is doing at the moment: for its page, for `manyhands dash`, and as Prometheus's gauges."""

from typing import Any

from manyhands.serving.core import ServingCore
from manyhands.serving.model_pool import ModelPool
from manyhands.serving.stream import meant


def status(core: ServingCore, pool: ModelPool) -> dict[str, Any]:
    """Every model with its versions, and the processes."""
    return {
        "models": [_model(core, name) for name in core.models],
        "processes": {"living": pool.living, "crashes": pool.crashes, "threads": pool.threads},
    }


def gauges(core: ServingCore, pool: ModelPool) -> dict[str, dict[str, float]]:
    """By name and labels."""
    ready = [one for name in core.models for one in core.ready(name)]
    labels = {one.handle: f'model="{one.version.model}",version="{one.version.version}"' for one in ready}
    return {
        "version_step": {labels[one.handle]: float(one.form.step) for one in ready},
        "version_accuracy": {labels[one.handle]: one.accuracy for one in ready if one.accuracy is not None},
        "requests_in_flight": {labels[one.handle]: float(one.in_flight) for one in ready},
        "samples_waiting": {
            labels[one.handle]: float(pool.batcher.waiting_rows(one.handle)) for one in ready
        },
        "model_processes": {"": float(len(pool.living))},
        "model_process_crashes": {"": float(pool.crashes)},
        "batches": {"": float(pool.batches)},
    }


def _model(core: ServingCore, name: str) -> dict[str, Any]:
    entry = core.models[name]
    ready = {one.version: one for one in core.ready(name)}
    numbers = [version.version for version in ready]
    stands_for = {label: meant(value, numbers) for label, value in entry.labels.items()}
    versions = []
    for version, state in reversed(core.manager.states(name)):
        servable = ready.get(version)
        histogram = core.metrics.latencies.get((name, version.version))
        versions.append(
            {
                "version": version.version,
                "state": state.phase.value,
                "reason": state.reason,
                "step": servable.form.step if servable else None,
                "accuracy": servable.accuracy if servable else None,
                "labels": [label for label, number in stands_for.items() if number == version.version],
                "traffic": _traffic(entry.shares.shares, stands_for, version.version, numbers),
                "requests": core.metrics.requests[name, version.version, "ok"],
                "p50_s": histogram.quantile_s(0.5) if histogram else None,
                "p99_s": histogram.quantile_s(0.99) if histogram else None,
            }
        )
    newest = next(reversed(ready.values()), None)
    return {
        "name": name,
        "takes": newest.form.input.text() if newest else None,
        "gives": newest.form.output.text() if newest else None,
        "takes_pictures": bool(newest and newest.form.picture),
        "versions": versions,
    }


def _traffic(
    shares: dict[str, float], stands_for: dict[str, int | None], version: int, ready: list[int]
) -> float:
    """The share of requests that name no version."""
    if not ready:
        return 0.0
    if not shares:
        return float(version == ready[-1])
    return sum(share for label, share in shares.items() if (stands_for.get(label) or ready[-1]) == version)
