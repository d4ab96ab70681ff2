"""Hooks of mkdocs: README.md and CHANGELOG.md become pages, and files of the repository that a page links to are kept.

A page links as it stands in the repository: ``../benchmarks/results/x.json`` from docs/, ``docs/x.md`` from the README.
On the site, whatever lies outside docs/ is a plain file under files/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the two pages from the repository's root, and each file outside of docs/ that some page links to."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in [*files.documentation_pages()]:
        for path in map(_in_repository, _targets(page)):
            if path is not None and files.get_file_from_path(name := _on_site(path)) is None:
                files.append(File.generated(config, name, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links of one page, as they stand on the site."""
    here = _folder(page.file.src_uri)
    return _LINK.sub(lambda link: _rewritten(link[1], here), markdown)


def _targets(file: File) -> list[tuple[str, Path]]:
    here = _folder(file.src_uri)
    return [(link, here) for link in _LINK.findall(file.content_string)]


def _folder(name: str) -> Path:
    """Where the file of a page lies in the repository."""
    return ROOT if name in PAGES else (ROOT / "docs" / name).parent


def _in_repository(link: tuple[str, Path]) -> Path | None:
    """The linked file, relative to the repository, if it lies outside of docs/ and is none of PAGES."""
    path = (link[1] / link[0]).resolve()
    if not path.is_file() or path.is_relative_to(ROOT / "docs"):
        return None
    return None if path.name in PAGES.values() else path.relative_to(ROOT)


def _on_site(path: Path) -> str:
    """A file's name there; of Markdown as text, since its own links are of the repository."""
    return f"files/{path.as_posix()}" + (".txt" if path.suffix == ".md" else "")


def _rewritten(link: str, here: Path) -> str:
    outside = _in_repository((link, here))
    if outside is not None:
        return _on_site(outside)
    path = (here / link).resolve()
    for name, source in PAGES.items():
        if path == ROOT / source:
            return name
    return path.relative_to(ROOT / "docs").as_posix() if path.is_relative_to(ROOT / "docs") else link
