"""The documentation as a site, and every command and every YAML that a page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from promises import promise

from privlora.cli.commands import app_of
from privlora.config import settings_from
from privlora.config.groups import Settings
from privlora.lab.cli import lab

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_LINE = re.compile(r"^(?:    |\$ |    \$ )(?:.*? )??privlora (?P<words>[a-z].*)$", re.MULTILINE)
_IN_PROSE = re.compile(r"`privlora (?P<words>[a-z-]+ [^`…]+)`")
PRIVATE = promise(steps=9, batch=8, records=99, delta=1e-5, target_epsilon=3)


def commands(page: Path) -> Iterator[str]:
    """What follows the program's name in each line of a page that calls it, without its comment."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for found in (*_LINE.finditer(text), *_IN_PROSE.finditer(text)):
        yield re.split(r"\s+(?:#|\||&&|>)(?:\s|$)", found["words"])[0]


def parse(words: list[str]) -> None:
    """Raise the usage error of the program where it would; nothing is run."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    inside = words[0] == "lab"
    for each in (lab if inside else app_of(words[0])).registered_commands:
        assert each.callback is not None
        app.command()(wraps(each.callback)(lambda **_: None))
    try:
        app(words[inside:], standalone_mode=False)
    except Exception as error:
        if type(error).__name__ != "MissingParameter" or "--" in str(error):
            raise  # prose leaves out what a command works on, and nothing else


COMMANDS = sorted({(page.name, line) for page in PAGES for line in commands(page)})


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_on_a_page_is_one(page: str, line: str) -> None:
    parse(shlex.split(line))


def test_commands_are_found_and_wrong_ones_refused() -> None:
    assert len(COMMANDS) > 60
    assert {"train notes.yaml", "plan notes.yaml"} <= {line for page, line in COMMANDS if page == "README.md"}
    with pytest.raises(Exception, match=r"No such option"):
        parse(["train", "x.yaml", "--no-such-option"])


def yaml_blocks() -> list[tuple[str, int, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        found += [(page.name, number, block) for number, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("page", "number", "block"), yaml_blocks())
def test_every_yaml_on_a_page_is_settings(page: str, number: int, block: str) -> None:
    """Whole, or a part of them: the groups that are missing are filled in."""
    content = yaml.safe_load(block)
    assert isinstance(content, Mapping)
    if not set(content) & set(Settings.model_fields):
        pytest.skip("a part of a group, or of another program")
    filled: dict[str, Any] = {"model": {"name": "m"}}
    if "federation" not in content:
        filled |= {"data": {"path": "x.jsonl"}, "privacy": PRIVATE}
    groups = {*content, *filled}
    settings_from({group: {**filled.get(group, {}), **content.get(group, {})} for group in groups})


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    run = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    ended = subprocess.run(
        run,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert (ended.returncode, ended.stderr.strip()) == (0, "")
    home = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert 'href="quickstart.html"' in home
    assert 'href="changelog.html"' in home
    results = (tmp_path / "site/results.html").read_text(encoding="utf-8")
    (link,) = set(re.findall(r'href="(files/[^"]*private_methods\.jsonl)"', results))
    assert (tmp_path / "site" / link).read_bytes() == (ROOT / link.removeprefix("files/")).read_bytes()


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"- {page.name}" not in menu] == []
