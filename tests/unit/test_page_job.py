"""What a person does on the page: choosing, starting, and being refused in the words of the command line."""

import json
import time
from pathlib import Path

import pytest

from manyhands.dashboard.choices import choices, plan_of, preview
from manyhands.errors import UsageError
from manyhands.strategies import PRESETS, STRATEGIES
from tests.page_server import Browser, serving, write_run


def test_everything_registered_can_be_chosen() -> None:
    found = choices()
    assert {one["name"] for one in found["strategies"]} == set(STRATEGIES)
    assert {one["name"] for one in found["presets"]} == set(PRESETS)
    assert all(one["about"].startswith(one["line"]) for one in found["strategies"])
    for one in (*found["strategies"], *found["presets"]):
        asked = {"strategy": one["name"], "cluster": {"workers": 4, "servers": 1}}
        try:
            plan = plan_of(asked, allow_code=False)
        except UsageError as error:
            assert str(error)  # noqa: PT017  (a refusal in words: servers it does not have, or workers it cannot use)
        else:
            assert plan.strategy == one["name"]
    json.dumps(found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model": "vgg99"}, "unknown model 'vgg99'"),
        ({"strategy": "all-reduse"}, "did you mean all-reduce"),
        ({"cluster": {"workers": 0}}, "workers=0: it must be at least 1"),
        ({"cluster": {"workers": "many"}}, "cluster.workers: Expected `int`"),
        ({"train": {"optimizer": "sdg:lr=1"}}, "unknown optimizer 'sdg'"),
        ({"train": {"epoch": 3}}, "unknown field `epoch`"),
        ({"model": "my.module:build"}, "start it with --allow-code"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_as_the_command_line_does(
    words: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        plan_of(words, allow_code=False)
    assert said in str(refused.value)


def test_code_of_ones_own_is_allowed_where_the_page_was_told_so() -> None:
    assert plan_of({"model": "my.module:build"}, allow_code=True).model == "my.module:build"


def test_the_learning_rate_is_that_of_the_rule() -> None:
    plan = plan_of(
        {"cluster": {"workers": 2}, "train": {"epochs": 4, "schedule": "cosine"}}, allow_code=False
    )
    found = preview(plan, 1437)
    assert found["optimizer"] == "sgd:lr=0.05,momentum=0.9"
    assert (found["steps_per_epoch"], found["total_steps"]) == (23, 92)
    rate = dict(zip(found["step"], found["rate"], strict=True))
    assert rate[0] == pytest.approx(0.05 / 23, rel=0.01)
    assert rate[91] < 0.001 < rate[46] < rate[24] <= 0.05


@pytest.mark.processes
def test_a_run_that_fails_says_what_the_command_line_says(tmp_path: Path) -> None:
    write_run(tmp_path / "live")
    with serving(tmp_path) as page:
        browser = Browser(page).sign_in()
        plan = {"data": "npz:no-such-file.npz", "train": {"epochs": 1}}
        body = json.dumps({"plan": plan, "name": "failing"}).encode()
        assert browser.ask("POST", "/runs", body).json() == {"name": "failing"}
        assert "already; choose another name" in browser.ask("POST", "/runs", body).json()["error"]
        assert (
            "is going on; stop it first"
            in browser.ask("DELETE", "/runs/live", b'{"confirm": "live"}').json()["error"]
        )
        assert "was not started by this page" in browser.ask("POST", "/runs/live/stop", b"{}").json()["error"]
        until_s = time.monotonic() + 60
        while (row := page.answers.own.row("failing"))["state"] == "live":
            assert time.monotonic() < until_s
            time.sleep(0.1)
        assert row["state"] == "failed"
        assert row["error"].startswith("error: ")
        assert "no-such-file.npz" in row["error"]
        shown = browser.ask("GET", "/runs/failing/terminal").body.decode()
        assert shown.startswith("$ manyhands train")
        assert row["error"].splitlines()[0] in " ".join(shown.splitlines())
        assert "has no checkpoint" in browser.ask("POST", "/runs/failing/resume", b"{}").json()["error"]
        assert "confirm must be 'failing'" in browser.ask("DELETE", "/runs/failing", b"{}").json()["error"]
        assert browser.ask("DELETE", "/runs/failing", b'{"confirm": "failing"}').status == 200
        assert [path.name for path in tmp_path.iterdir()] == ["live"]
