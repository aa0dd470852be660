"""SGD in passes: what PyTorch's SGD does, whichever way it is made and wherever it is taken up again."""

import itertools

import pytest
import torch

from manyhands.replica.optimizer.descent import MOMENTUM, PARAMS, SCRATCH, Descent, is_simple

SETTINGS = list(itertools.product([0.0, 0.9], [0.0, 0.01]))


def descent(keep: float, decay: float) -> tuple[Descent, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    params, momentum, gradient = torch.randn(3, 1003, generator=generator).unbind()
    return Descent(
        params=params, momentum=momentum if keep else None, rate=0.1, keep=keep, decay=decay
    ), gradient


@pytest.mark.parametrize(("keep", "decay"), SETTINGS)
def test_it_is_the_optimizers_step(keep: float, decay: float) -> None:
    ours, gradient = descent(keep, decay)
    param = torch.nn.Parameter(ours.params.clone())
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=keep, weight_decay=decay)
    if ours.momentum is not None:
        optimizer.state[param]["momentum_buffer"] = ours.momentum.clone()
    param.grad = gradient.clone()
    optimizer.step()
    ours.make(gradient, torch.empty(1003), lambda stage: None)
    torch.testing.assert_close(ours.params, param.detach(), rtol=1e-6, atol=1e-6)
    if ours.momentum is not None:
        torch.testing.assert_close(
            ours.momentum, optimizer.state[param]["momentum_buffer"], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(("keep", "decay"), SETTINGS)
def test_in_place_gives_the_same_bits(keep: float, decay: float) -> None:
    protected, gradient = descent(keep, decay)
    given = gradient.clone()
    protected.make(gradient, torch.empty(1003), lambda stage: None)
    assert torch.equal(gradient, given)
    in_its_room, room = descent(keep, decay)
    in_its_room.make(room, room, lambda stage: None)
    assert torch.equal(protected.params, in_its_room.params)
    in_place, gradient = descent(keep, decay)
    in_place.make_in_place(gradient)
    assert torch.equal(protected.params, in_place.params)
    assert keep == 0 or torch.equal(protected.momentum, in_place.momentum)


@pytest.mark.parametrize("stage", [MOMENTUM, SCRATCH, PARAMS])
def test_whoever_takes_it_up_again_comes_to_the_same(stage: int) -> None:
    whole, gradient = descent(0.9, 0.01)
    whole.make(gradient, torch.empty(1003), lambda stage: None)
    torn, gradient = descent(0.9, 0.01)
    room = torch.empty(1003)

    class Death(Exception):
        pass

    def die_within(noted: int) -> None:
        if noted == stage:
            {MOMENTUM: torn.momentum, SCRATCH: room, PARAMS: torn.params}[stage][:500] = float("nan")
            raise Death

    with pytest.raises(Death):
        torn.make(gradient, room, die_within)
    torn.go_on(stage, room, lambda stage: None)
    assert torch.equal(torn.params, whole.params)
    assert torch.equal(torn.momentum, whole.momentum)


def test_what_is_more_than_rate_momentum_and_decay_is_left_to_the_optimizer() -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=0.1)
    assert is_simple(plain.param_groups[0])
    for more in ({"nesterov": True}, {"dampening": 0.1}, {"maximize": True}, {"fused": True}):
        other = torch.optim.SGD([param], **{"lr": 0.1, "momentum": 0.9, **more})
        assert not is_simple(other.param_groups[0]), more
    assert not is_simple(torch.optim.SGD([param], lr=torch.tensor(0.1)).param_groups[0])
