"""Names that people know from elsewhere, and names with a slip, lead to ours."""

import pytest

from manyhands import data, models, placement, spec, strategies
from manyhands.errors import UnknownName
from manyhands.job.plan import Plan, _unknown
from manyhands.strategies.known_elsewhere import KNOWN_ELSEWHERE

STRATEGY = {
    "ddp": "all-reduce",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "All-Reduce": "all-reduce",
    "horovod": "ring",
    "fsdp": "--placement sharded",
    "deepspeed": "--placement sharded",
    "ps": "parameter-server",
    "parameter_server": "parameter-server",
    "easgd": "elastic-averaging",
    "hogwild!": "hogwild",
}


@pytest.mark.parametrize(("said", "meant"), STRATEGY.items())
def test_a_strategy(said: str, meant: str) -> None:
    with pytest.raises(UnknownName, match=rf"known: .*; did you mean {meant}( or [\w-]+)?\?$"):
        strategies.parse(said)


def test_what_is_meant_is_there() -> None:
    for meant in KNOWN_ELSEWHERE.values():
        flag, _, name = meant.rpartition(" ")
        assert placement.parse(name) if flag else strategies.parse(meant)
    for meant in placement._KNOWN_ELSEWHERE.values():
        placement.parse(meant)
    for table, known in ((models._KNOWN_ELSEWHERE, models.MODELS), (data._KNOWN_ELSEWHERE, data.DATASETS)):
        for meant in table.values():
            assert {spec.split(one)[0] for one in meant.split(" or ")} <= known.keys()


def test_placements_models_data_and_settings() -> None:
    with pytest.raises(UnknownName, match=r"did you mean sharded\?$"):
        placement.parse("fsdp")
    with pytest.raises(UnknownName, match=r"did you mean resnet20 or resnet50\?$"):
        models.build("resnet18", (3, 32, 32), 10)
    with pytest.raises(UnknownName, match=r"did you mean cifar10\?$"):
        data.load("cifar", seed=0)
    with pytest.raises(UnknownName, match=r"did you mean period\?$"):
        strategies.parse("local-sgd:periods=4")
    assert _unknown("stratgey", Plan, "unknown section").endswith("did you mean strategy?")


def test_what_is_like_nothing_gets_no_guess() -> None:
    with pytest.raises(UnknownName) as raised:
        strategies.parse("qqqq")
    assert "did you mean" not in str(raised.value)
