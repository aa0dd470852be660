"""What a strategy keeps: a dataclass for the strategy, named tensors for checkpoints and for workers that join."""

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.replica.state.kept import StrategyState


@dataclass
class Sample:
    block_start: Tensor
    rate: float
    rounds: int = 0
    copy: Tensor | None = None
    place: tuple[float, ...] = ()


def first() -> Sample:
    return Sample(block_start=torch.zeros(3), rate=0.5)


def test_the_strategy_gets_the_same_object_until_something_is_restored() -> None:
    kept = StrategyState()
    state = kept.get_or_make(first)
    state.rounds += 1
    assert kept.get_or_make(first) is state
    kept.clear()
    assert kept.get_or_make(first).rounds == 0


def test_checkpoints_hold_what_there_is() -> None:
    kept = StrategyState()
    assert not kept
    state = kept.get_or_make(first)
    assert set(kept) == {"block start", "rate"}, "None, and what a field is by default, is not saved"
    state.rounds, state.copy, state.place = 3, torch.ones(3), (1, 4)
    saved = {name: value.clone() for name, value in kept.items()}
    assert set(saved) == {"block start", "rate", "rounds", "copy", "place"}
    assert all(saved[name].dtype == torch.float64 for name in ("rate", "rounds", "place"))
    assert kept["copy"] is state.copy, "a vector is not copied"


def test_what_was_saved_comes_back() -> None:
    """Also from a checkpoint of before there were dataclasses: the names and the tensors are the same."""
    kept = StrategyState()
    kept.update(
        {
            "block start": torch.arange(3.0),
            "rounds": torch.tensor([2.0], dtype=torch.float64),
            "place": torch.tensor([1.0, 4.0], dtype=torch.float64),
        }
    )
    assert set(kept) == {"block start", "rounds", "place"}
    state = kept.get_or_make(first)
    assert torch.equal(state.block_start, torch.arange(3.0))
    assert (state.rate, state.rounds, state.copy, state.place) == (0.5, 2, None, (1, 4))
    assert isinstance(state.rounds, int)


def test_a_step_that_is_taken_back_takes_the_state_back() -> None:
    kept = StrategyState()
    kept.get_or_make(first)
    before = {name: value.clone() for name, value in kept.items()}
    state = kept.get_or_make(first)
    state.block_start += 1
    state.rounds = 7
    kept.clear()
    kept.update(before)
    state = kept.get_or_make(first)
    assert torch.equal(state.block_start, torch.zeros(3))
    assert state.rounds == 0
