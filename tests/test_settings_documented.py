"""Every setting is documented: in its help, in the command's flags, and in README.md, word for word."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.settings_field import ALL
from gateway.settings_table import Setting, table
from gateway.settings_text import markdown

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("row", table(), ids=lambda row: row.name)
def test_every_setting_has_help_and_numbers_have_a_unit(row: Setting) -> None:
    assert len(row.about.help) > 8
    assert not row.about.help.endswith(".")
    assert bool(row.about.unit) == (row.kind in (int, float)), "a number has a unit, and nothing else has"
    assert row.commands <= ALL
    assert row.commands


@pytest.mark.parametrize("row", [row for row in table() if row.about.unit], ids=lambda row: row.name)
def test_a_name_ends_with_its_unit_where_the_unit_has_a_suffix(row: Setting) -> None:
    suffixes = {
        "s": "_s",
        "ms": ("_ms", "_ms_per_1k"),
        "bytes": "_bytes",
        "bytes/s": "_bytes_per_s",
        "characters": "_chars",
    }
    assert row.name.endswith(suffixes.get(row.about.unit, ""))


def test_the_readme_has_the_table() -> None:
    found = re.search(r"<!-- settings -->\n(.*?)<!-- /settings -->", README.read_text(), re.DOTALL)
    assert found, "README.md lacks the markers"
    assert found[1].strip() == markdown().strip(), "paste the output of `python -m gateway.settings_table`"


def test_the_module_prints_the_table() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "gateway.settings_table"], capture_output=True, check=True
    )
    assert printed.stdout.decode() == markdown()
