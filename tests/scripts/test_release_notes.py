"""The notes of a release: the changelog's section, where tag, version and changelog agree."""

from __future__ import annotations

import pytest

from scripts.release_notes import ReleaseError, notes

CHANGELOG = """\
# Changelog

## [Unreleased]

## [1.2.0] - 2027-01-02

### Added

- **This.** It is [new](docs/new.md).

## [1.1.0] - 2026-12-01

- Old.
"""
CITATION = "cff-version: 1.2.0\nversion: 1.2.0\n"


def test_the_section_of_the_version_is_the_notes() -> None:
    text = notes("v1.2.0", version="1.2.0", changelog=CHANGELOG, citation=CITATION)
    assert text == "### Added\n\n- **This.** It is [new](docs/new.md).\n"


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "citation", "said"),
    [
        ("1.2.0", "1.2.0", CHANGELOG, CITATION, "the tag has to be 'v1.2.0'"),
        ("v1.2.0", "1.2.1", CHANGELOG, CITATION, "has version 1.2.1"),
        ("v1.2.0", "1.2.0", CHANGELOG, "version: 1.2.0rc1\n", "CITATION.cff has another version than 1.2.0"),
        ("v1.2.0", "1.2.0", CHANGELOG.replace("[1.2.0]", "[1.2.1]"), CITATION, "no section"),
        ("v1.2.0", "1.2.0", CHANGELOG.replace("ased]\n", "ased]\n\n- More.\n"), CITATION, "lines under 'Unreleased'"),
        ("v1.2.0", "1.2.0", "", CITATION, "no section"),
    ],
)
def test_what_disagrees_is_named(tag: str, version: str, changelog: str, citation: str, said: str) -> None:
    with pytest.raises(ReleaseError, match=said):
        notes(tag, version=version, changelog=changelog, citation=citation)
