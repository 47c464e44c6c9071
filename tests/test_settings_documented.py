"""Every setting is documented: in its help, in the command's flags, and in README.md, word for word."""

import re
import subprocess
import sys
from pathlib import Path

from gateway.settings_field import ALL
from gateway.settings_table import table
from gateway.settings_text import markdown

README = Path(__file__).parents[1] / "README.md"


def test_every_setting_has_help_and_numbers_have_a_unit() -> None:
    for row in table():
        assert len(row.about.help) > 8, row.name
        assert not row.about.help.endswith("."), row.name
        is_number = row.kind in (int, float)
        assert bool(row.about.unit) == is_number, f"{row.name}: a number has a unit, and nothing else has"
        assert row.commands, row.name
        assert row.commands <= ALL, row.name


def test_a_name_ends_with_its_unit_where_the_unit_has_a_suffix() -> None:
    suffixes = {
        "s": "_s",
        "ms": ("_ms", "_ms_per_1k"),
        "bytes": "_bytes",
        "bytes/s": "_bytes_per_s",
        "characters": "_chars",
    }
    assert [
        row.name for row in table() if not row.name.endswith(suffixes.get(row.about.unit or "", ""))
    ] == []


def test_the_readme_has_the_table() -> None:
    found = re.search(r"<!-- settings -->\n(.*?)<!-- /settings -->", README.read_text(), re.DOTALL)
    assert found, "README.md lacks the markers"
    assert found[1].strip() == markdown().strip(), "paste the output of `python -m gateway.settings_table`"


def test_the_module_prints_the_table() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "gateway.settings_table"], capture_output=True, check=True
    )
    assert printed.stdout.decode() == markdown()
