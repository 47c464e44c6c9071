"""Prints those of the given requirements that are not met, one a line: half of `setup.py`.

    .venv/bin/python .ci/unmet.py '[]' '[cpu]' 'torch==2.13.0'

`[cpu]` stands for that extra of Headrace's, `[]` for what it always needs. Runs inside .venv, with its Python
and its pip, so that it may use what `setup.py` may not.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def unmet(wanted: list[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"[]": project["dependencies"]}
    extras.update((f"[{name}]", lines) for name, lines in project["optional-dependencies"].items())
    lines = [line for want in wanted for line in extras.get(want, [want])]
    return [line for line in lines if not is_met(Requirement(line))]


def is_met(requirement: Requirement) -> bool:
    if requirement.marker and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    sys.stdout.writelines(line + "\n" for line in unmet(sys.argv[1:]))
