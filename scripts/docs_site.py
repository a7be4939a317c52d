"""What mkdocs.yml needs beside docs/: README.md and its like and each cause as pages, plain names in the reference.

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

CAUSES = "causes.md"
ENTRY = re.compile(
    r"^- \*\*(?P<name>[^*]+)\*\*: (?P<what>.*?)\.(?: \*Looks:\* (?P<looks>.*?)\.)? \*Fix:\* (?P<fix>.*)$", re.MULTILINE
)
"""An entry of the catalogue in docs/causes.md."""

LINK = re.compile(r"""(?P<before>\]\(|\bsrc=")(?P<path>[^\s)#"<>:]+)(?P<anchor>#[^\s)"]*)?(?P<after>[)"])""")
SHARED = re.compile(r"^    (?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n {5,}.*)*)\n?", re.MULTILINE)
"""Arguments that share an entry: ``source, target: names and shapes``."""

ROLE = re.compile(r":[a-z]+:`~?\.?([^`]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand outside of docs/, and the files that pages link to, such as models."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=led(ROOT / name)))
    for place, text in cause_pages((DOCS / CAUSES).read_text(encoding="utf-8")).items():
        files.append(File.generated(config, place, content=text))
    linked = {file for path in [*DOCS.glob("*.md"), *(ROOT / name for name in PAGES)] for file in outside(path)}
    for file in sorted(linked):
        files.append(File.generated(config, f"source/{file}", abs_src_path=str(ROOT / file)))
    return files


def cause_pages(catalogue: str) -> dict[str, str]:
    """A page for each entry of the catalogue: where it stands in the site, and its text.

    Args:
        catalogue: the text of docs/causes.md.
    """
    pages = {}
    for theme in re.split(r"^### ", catalogue, flags=re.MULTILINE)[1:]:
        title = theme.partition("\n")[0]
        for entry in ENTRY.finditer(theme):
            parts = [f"# {entry['name']}"]
            for label, text in (("What", entry["what"]), ("How it looks", entry["looks"]), ("Fix", entry["fix"])):
                if text:
                    parts.append(
                        f"**{label}.** {text}" if label == "Fix" else f"**{label}.** {text[:1].upper()}{text[1:]}."
                    )
            parts.append(
                "`porting verify` names this cause if the reference, computed with this mistake, gives your model's "
                f"numbers. It is one of the causes under [{title}](../{CAUSES}#{slug(title)})."
            )
            pages[cause_place(entry["name"])] = "\n\n".join(parts) + "\n"
    return pages


def cause_place(name: str) -> str:
    """Where the page of a cause stands.

    >>> cause_place("LayerNorm with Bessel's correction")
    'causes/layernorm-with-bessels-correction.md'
    """
    return f"causes/{slug(name)}.md"


def slug(title: str) -> str:
    """A title as the anchor of its heading."""
    return re.sub(r"[^\w]+", "-", title.lower().replace("'", "")).strip("-")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links to what stands outside of docs/ lead into the site, and the catalogue's entries to their pages."""
    del config, files
    if page.file.generated_by:
        return markdown
    if page.file.src_uri == CAUSES:
        markdown = ENTRY.sub(lambda entry: entry[0].replace(*_linked(entry["name"]), 1), markdown)
    return LINK.sub(lambda found: _led(found, DOCS), markdown)


def _linked(name: str) -> tuple[str, str]:
    """The name of an entry as it stands in the catalogue, and as a link to its page."""
    return f"**{name}**", f"**[{name}]({cause_place(name)})**"


def led(path: Path) -> str:
    """A page whose links lead into the site."""
    return LINK.sub(lambda found: _led(found, path.parent), path.read_text(encoding="utf-8"))


def outside(path: Path) -> Iterator[Path]:
    """The files, from the root on, that a page links to and that are not pages of the site."""
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
        lambda found: "".join(f"    {word}: {found['text']}\n" for word in found["names"].split(", ")), text
    )
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"```pycon\n{paragraph.rstrip()}\n```" if paragraph.startswith(">>> ") else paragraph
        for paragraph in paragraphs
    )
