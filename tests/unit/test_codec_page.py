"""The page on codecs names every codec and setting, with the bits that they have."""

import dataclasses

from manyhands.comm.codecs import CODECS
from tests.pages import DOCS, rows

PAGE = DOCS / "codecs.md"


def test_the_page_names_every_codec_with_its_bits() -> None:
    found = {cells[0].strip("`"): cells[1] for cells in rows(PAGE, "# Codecs")[: len(CODECS)]}
    assert list(found) == list(CODECS)
    for name, kind in CODECS.items():
        bits = kind().size_bytes(1 << 20) * 8 / (1 << 20)
        assert abs(float(found[name].split()[-1]) - bits) < 0.05, name


def test_the_page_names_every_setting() -> None:
    text = PAGE.read_text()
    for kind in CODECS.values():
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text
