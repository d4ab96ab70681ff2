"""Files are copied as what they are, and not as what a name leads to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from privlora import disk

LARGE = 10**6


def test_a_copy_is_for_its_owner_and_writes_over_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "one", tmp_path / "copy"
    source.write_bytes(bytes(range(256)) * 1000)
    source.chmod(0o644)
    disk.copy_plain(source, target, LARGE)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        disk.copy_plain(source, target, LARGE)


def test_a_large_file_is_not_copied_however_little_of_it_lies_on_the_disk(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(LARGE + 1)
    with pytest.raises(OSError, match="is too large"):
        disk.copy_plain(sparse, tmp_path / "copy", LARGE)
    assert not (tmp_path / "copy").exists()
    disk.copy_plain(sparse, tmp_path / "copy", LARGE + 1)


def test_links_folders_and_pipes_are_not_copied(tmp_path: Path) -> None:
    plain, linked = tmp_path / "plain", tmp_path / "linked"
    plain.write_text("a patient")
    linked.write_text("a patient")
    (tmp_path / "soft").symlink_to(plain)
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "hard").hardlink_to(linked)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("soft", "nowhere", "hard", "folder", "pipe", "none"):
        with pytest.raises(OSError, match=r"is a link, or no file|No such file"):
            disk.copy_plain(tmp_path / name, tmp_path / "copy", LARGE)
        assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("becomes", ["link", "pipe", "another file"])
def test_what_changes_places_before_it_is_opened_is_not_copied(
    becomes: str, follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a system that cannot be told to follow no link."""
    source, secret, looked = tmp_path / "one", tmp_path / "secret", os.lstat
    source.write_text("public")
    secret.write_text("a patient")

    def replaced(path: Path) -> os.stat_result:
        found = looked(path)
        source.rename(tmp_path / "gone")
        if becomes == "link":
            source.symlink_to(secret)
        elif becomes == "pipe":
            os.mkfifo(source)
        else:
            secret.rename(source)
        return found

    monkeypatch.setattr(disk.os, "lstat", replaced)
    if follows:
        monkeypatch.delattr(disk.os, "O_NOFOLLOW", raising=False)
    with pytest.raises(OSError):
        disk.copy_plain(source, tmp_path / "copy", LARGE)
    assert not (tmp_path / "copy").exists()
