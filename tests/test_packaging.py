"""What pyproject promises: extras under the names that errors and pages give, and no bound that nobody tries."""

import re
import tomllib
from pathlib import Path

from matrix import EXTRAS, NEEDED, lowest, requirements

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_extras_that_are_named_are_there_under_their_one_name() -> None:
    files = [ROOT / "README.md", *(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    files += (ROOT / "configs").glob("*.yaml")
    named = {name for file in files for name in re.findall(r"privlora\[(\w+)\]", file.read_text("utf-8"))}
    assert {"federated", "quant", "trl", "prv"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


def test_each_extra_is_tried_by_itself() -> None:
    assert set(EXTRAS) == PROJECT["optional-dependencies"].keys() - {"dev"}


def test_the_lowest_environment_pins_every_bound_but_torchs() -> None:
    pins = {pin.partition("==")[0] for pin in lowest()}
    named = {re.split(r"[\[<>=]", line)[0] for line in requirements()}
    assert named - pins == {"torch"}
    assert set(NEEDED) <= pins
