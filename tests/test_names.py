"""What is a hub's name, what is a folder, and what of either is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from privlora.names import in_full, is_local, published_name


@pytest.mark.parametrize(
    ("name", "published"),
    [("gpt2", "gpt2"), ("acme/tiny", "acme/tiny"), ("a/b/tiny", "tiny"), ("/models/of/me/tiny", "tiny")],
)
def test_a_local_folder_is_named_without_its_place(name: str, published: str) -> None:
    assert published_name(name) == published


def test_a_folder_comes_before_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As loaders take it."""
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_local("acme/tiny")
    assert [published_name(name) for name in ("acme/tiny", "acme/tiny/", "./acme/tiny")] == ["tiny"] * 3
    monkeypatch.chdir(tmp_path / "acme" / "tiny")
    assert published_name(".") == "tiny"


def test_a_link_is_named_as_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret-client").mkdir()
    (tmp_path / "base").symlink_to(tmp_path / "secret-client")
    monkeypatch.chdir(tmp_path)
    assert published_name("base") == published_name("./base") == "base"
    assert in_full("base") == str(tmp_path / "base")
    assert in_full("acme/elsewhere") == "acme/elsewhere"
