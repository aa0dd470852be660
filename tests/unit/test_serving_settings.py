"""What a server is told to do: refused before anything starts, with the way out."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from manyhands.cli import build
from manyhands.cli.serve import EXAMPLES
from manyhands.errors import UsageError
from manyhands.serving.access_rules import LOCAL, read_tokens
from manyhands.serving.serve_settings import ModelWords, ServeSettings, named_sources, read_settings

GOOD = ServeSettings(models={"m": ModelWords(source=".")})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"models": {}}, "nothing to serve"),
        ({"models": {"a/b": ModelWords(source=".")}}, "use letters"),
        ({"processes": 0}, "at least 1"),
        ({"port": 65536}, "from 0"),
        ({"host": "0.0.0.0"}, "needs --tokens"),
        ({"host": "::"}, "needs --tokens"),
        ({"key": "key.pem"}, "both a certificate and a key"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        msgspec.structs.replace(GOOD, **change).check()


def test_the_example_in_help_is_a_good_file(tmp_path: Path) -> None:
    text = EXAMPLES.partition("serve.toml:\n")[2].partition("\ntokens.toml")[0]
    (tmp_path / "serve.toml").write_text(text)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    found = read_settings(tmp_path / "serve.toml")
    found.check()
    entry = found.models["digits"].entry("digits")
    assert entry.policy.latest == 2
    assert entry.shares.shares == {"stable": 0.9, "canary": 0.1}
    assert found.models["digits"].source == str(tmp_path / "runs" / "mine")


@pytest.mark.parametrize(
    "text", ["x = 1", "[models.m]", "[models.m]\nsource = 1\n[limits]\nhead = 3", "[", "models = 3"]
)
def test_files_that_are_wrong_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "serve.toml").write_text(text)
    with pytest.raises(UsageError, match=r"serve\.toml"):
        read_settings(tmp_path / "serve.toml")


def test_traffic_for_a_label_that_is_not_there_is_refused(tmp_path: Path) -> None:
    words = ModelWords(source=str(tmp_path), traffic={"canary": 1.0})
    with pytest.raises(UsageError, match="canary"):
        words.entry("m")


def test_models_are_named_by_their_folders_or_by_people() -> None:
    found = named_sources(["runs/mine", "other=runs/b"])
    assert {name: one.source for name, one in found.items()} == {"mine": "runs/mine", "other": "runs/b"}
    with pytest.raises(UsageError, match="two models are called mine"):
        named_sources(["runs/mine", "other/mine"])


def test_tokens_are_read_from_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text('[[tokens]]\ntoken = "0123456789abcdef"\nrole = "admin"\n')
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_tokens(path)
    os.chmod(path, 0o600)
    assert read_tokens(path)[0].role == "admin"
    for wrong in ('[[tokens]]\ntoken = "short"', "tokens = 3", "[", ""):
        path.write_text(wrong)
        with pytest.raises(UsageError, match="holds no tokens"):
            read_tokens(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_tokens(tmp_path / "none")


def test_without_tokens_only_names_of_this_machine_lead_here() -> None:
    assert set(GOOD.rules().names) == set(LOCAL)


def test_flags_are_words_of_the_file() -> None:
    options = vars(build().parse_args(["serve", "runs/mine", "--port", "0"]))
    words = set(ServeSettings.__struct_fields__)
    assert {"certificate", "key"} <= words  # `--tls` is both
    assert set(options) - {"verb", "run", "sources", "tls"} <= words
