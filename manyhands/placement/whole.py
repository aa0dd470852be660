"""The whole model on every worker."""

from dataclasses import dataclass

from manyhands.placement.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Whole(Placement):
    """Every replica is whole on its worker: data parallelism alone (Li et al. 2020)."""
