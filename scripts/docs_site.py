"""What mkdocs.yml needs beside docs/: README.md and its like as pages, and plain names in the reference.

mkdocs calls :func:`on_files` and :func:`on_page_markdown`; griffe, which reads docstrings, calls :class:`Respelled`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "reporting.md",
}
"""Pages of the site that stand outside of docs/, where a repository has them."""

LINK = re.compile(r"""(?P<before>\]\(|\bsrc=")(?P<path>[^\s)#"<>:]+)(?P<anchor>#[^\s)"]*)?(?P<after>[)"])""")
SHARED = re.compile(r"^    (?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n {5,}.*)*)\n?", re.MULTILINE)
"""Arguments that share an entry: ``source, target: names and shapes``."""

ROLE = re.compile(r":[a-z]+:`~?\.?([^`]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand outside of docs/, and the files that pages link to, such as models."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=led(ROOT / name)))
    linked = {one for path in [*DOCS.glob("*.md"), *(ROOT / name for name in PAGES)] for one in outside(path)}
    for one in sorted(linked):
        files.append(File.generated(config, f"source/{one}", abs_src_path=str(ROOT / one)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links to what stands outside of docs/ lead into the site."""
    del config, files
    return markdown if page.file.generated_by else LINK.sub(lambda found: _led(found, DOCS), markdown)


def led(path: Path) -> str:
    """A page whose links lead into the site."""
    return LINK.sub(lambda found: _led(found, path.parent), path.read_text(encoding="utf-8"))


def outside(path: Path) -> Iterator[Path]:
    """The files, from the root on, that a page links to and that are no pages of the site."""
    for found in LINK.finditer(path.read_text(encoding="utf-8")):
        target = (path.parent / found["path"]).resolve()
        if target.is_file() and target.is_relative_to(ROOT) and not target.is_relative_to(DOCS):
            one = target.relative_to(ROOT)
            if str(one) not in PAGES:
                yield one


def _led(found: re.Match[str], folder: Path) -> str:
    """A link of a page in ``folder`` as one of a page of the site; all of these stand side by side."""
    target = (folder / found["path"]).resolve()
    if not target.is_relative_to(ROOT) or not target.is_file():
        return found[0]  # mkdocs says so where it leads nowhere
    if target.is_relative_to(DOCS):
        place = str(target.relative_to(DOCS))
    else:
        place = PAGES.get(str(target.relative_to(ROOT)), f"source/{target.relative_to(ROOT)}")
    return f"{found['before']}{place}{found['anchor'] or ''}{found['after']}"


class Respelled(griffe.Extension):
    """Docstrings as mkdocstrings reads them: no roles of Sphinx, doctests in fences, one entry for each argument."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Respell one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = respelled(obj.docstring.value)


def respelled(text: str) -> str:
    r"""A docstring of this library in the form that mkdocstrings reads.

    >>> respelled("Args:\n    a, b: as of :func:`load`.\n")
    'Args:\n    a: as of `load`.\n    b: as of `load`.\n'
    >>> respelled(">>> 1\n1")
    '```pycon\n>>> 1\n1\n```'
    """
    text = ROLE.sub(r"`\1`", text)
    text = SHARED.sub(
        lambda found: "".join(f"    {one}: {found['text']}\n" for one in found["names"].split(", ")), text
    )
    paragraphs = text.split("\n\n")
    return "\n\n".join(f"```pycon\n{one.rstrip()}\n```" if one.startswith(">>> ") else one for one in paragraphs)
