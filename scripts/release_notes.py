"""Check that a tag, the version and the changelog agree, and write the notes of the release: the changelog's section.

python -m scripts.release_notes v1.2.3 --output build/release-notes.md
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ReleaseError(Exception):
    """What has to be mended before the tag can be released."""


def main() -> None:
    """Write the notes, or say what disagrees."""
    parser = argparse.ArgumentParser(description="Write the notes of a release.")
    parser.add_argument("tag", help="the tag, v1.2.3")
    parser.add_argument("--output", type=Path, required=True, help="the file to be made")
    arguments = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    try:
        text = notes(
            arguments.tag,
            version=version,
            changelog=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
            citation=(ROOT / "CITATION.cff").read_text(encoding="utf-8"),
        )
    except ReleaseError as error:
        sys.exit(str(error))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(text, encoding="utf-8")


def notes(tag: str, *, version: str, changelog: str, citation: str) -> str:
    """The changelog's section on the version that a tag names.

    Args:
        tag: the tag, ``v`` and the version.
        version: the version in pyproject.toml.
        changelog: the text of CHANGELOG.md.
        citation: the text of CITATION.cff.

    Raises:
        ReleaseError: one of them has another version, or there is something that no section of a version has.
    """
    if tag != f"v{version}":
        raise ReleaseError(
            f"the tag is {tag!r}, and pyproject.toml has version {version}: the tag has to be 'v{version}'"
        )
    if not re.search(rf"^version: [\"']?{re.escape(version)}[\"']?$", citation, re.MULTILINE):
        raise ReleaseError(f"CITATION.cff has another version than {version}")
    parts = re.split(r"^## \[(.+?)\].*\n", changelog, flags=re.MULTILINE)
    sections = {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}
    if sections.get("Unreleased"):
        raise ReleaseError(
            f"CHANGELOG.md has lines under 'Unreleased': they belong under '## [{version}] - YYYY-MM-DD'"
        )
    if not sections.get(version):
        raise ReleaseError(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD', or an empty one")
    return sections[version] + "\n"


if __name__ == "__main__":
    main()
