"""The whole job in a real browser, by a person who types no command."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.end_to_end.commands import clean_environment

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MS = 60_000

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Processes that it has started, and what those have started, with their names."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(") ")
        except OSError:
            continue
        if int(after.split()[1]) == pid:
            child = int(path.parent.name)
            yield child, before.partition("(")[2]
            yield from descendants(child)


@pytest.fixture
def dash(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "manyhands", "dash", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment())
    yield process
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.fixture
def page(dash: "subprocess.Popen[str]") -> Iterator["playwright.Page"]:
    assert dash.stdout is not None
    dash.stdout.readline()
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("request", lambda asked: wrong.append(asked.url) if "//127.0.0.1:" not in asked.url else None)
        page.goto(dash.stdout.readline().strip())
        yield page
        browser.close()
    assert wrong == [], "errors in the browser, or requests to other hosts"


def start(page: "playwright.Page", name: str, epochs: int) -> None:
    page.get_by_label("Name", exact=True).fill(name)
    page.locator("#epochs").fill(str(epochs))
    page.get_by_text("an epoch").wait_for()  # the learning rate is drawn, with the steps of these data
    page.locator("#start").click()
    page.get_by_role("heading", name=name).wait_for()


def test_a_person_trains_without_typing_a_command(
    page: "playwright.Page", dash: "subprocess.Popen[str]"
) -> None:
    page.get_by_role("link", name="New run").first.click()
    page.locator("#model").select_option("mlp")
    start(page, "first", 200)

    page.locator(".pill.live").wait_for()
    page.locator(".tile dd", has_text="%").wait_for()  # an accuracy
    page.locator("canvas").first.wait_for()
    page.locator(".workers .label", has_text="worker 1").wait_for()

    victim = next(pid for pid, name in descendants(dash.pid) if name == "worker 1")
    os.kill(victim, signal.SIGKILL)
    page.locator(".events .kind", has_text="death").wait_for()
    page.locator(".events li", has_text="killed by SIGKILL").first.wait_for()
    page.locator(".events .kind", has_text="join").wait_for()

    page.locator("#stop").click()
    page.locator(".pill.stopped").wait_for()
    page.locator("#try").click()
    box = page.locator("#drawing").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 112, box["y"] + 25)
    page.mouse.down()
    page.mouse.move(box["x"] + 112, box["y"] + 195, steps=4)
    page.mouse.up()
    page.locator("#answer .best", has_text="1").wait_for()

    page.locator(".confusion td[role=button]").first.click()
    page.locator(".panel .pictures canvas").first.wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Weights").click()
    assert {"fc1.weight", "output.bias"} < load_file(download.value.path()).keys()

    before = int(
        page.locator(".tile", has_text="Progress")
        .locator("dd")
        .inner_text()
        .partition("of")[0]
        .replace(",", "")
    )
    page.locator("#resume").click()
    page.locator(".pill.live").wait_for()
    page.wait_for_function(
        "before => parseInt([...document.querySelectorAll('.tile')].find(tile => tile.textContent"
        ".startsWith('Progress')).querySelector('dd').textContent.replaceAll(',', '')) > before",
        arg=before,
    )
    page.locator("#stop").click()
    page.locator(".pill.stopped").wait_for()

    page.get_by_role("link", name="Clone").click()
    start(page, "second", 1)
    page.locator(".pill.finished").wait_for()
    page.get_by_role("link", name="Runs").click()
    for name in ("first", "second"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Compare", exact=True).click()
    page.get_by_role("heading", name="2 runs side by side").wait_for()
    differing = page.get_by_label("Settings that differ").locator("tbody tr")
    differing.first.wait_for()
    assert [row.inner_text().split() for row in differing.all()] == [["epochs", "200", "1"]]

    page.get_by_role("link", name="Runs").click()
    page.get_by_role("link", name="second").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete the run").click()
    page.get_by_text("1 run, 0 live").wait_for()
