"""A probe that names nothing would compare nothing, and a verdict without it would hide what it was there to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from porting.verification import VerifyError, verify


def misspelled(folder: Path, probes: str) -> Path:
    path = folder / "own.toml"
    path.write_text(f'extends = "bert"\n[probes]\n{probes}\n', encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("probes", "expected"),
    [
        ('"bert.pooler" = "bert.poolr"', "the port has no module 'bert.poolr'.*did you mean 'bert.pooler'"),
        (
            '"bert.encoder.layer.{i}.output" = "bert.layers.{i}.output_nrom"',
            r"the port has no module 'bert.layers.\{i\}.output_nrom'.*did you mean 'bert.layers.0.output_norm'",
        ),
    ],
)
def test_a_misspelled_probe_is_refused_with_the_nearest_name(
    checkpoint: Path, tmp_path: Path, probes: str, expected: str
) -> None:
    with pytest.raises(VerifyError, match=expected) as caught:
        verify(checkpoint, table=misspelled(tmp_path, probes))
    assert len(caught.value.faults) == 1


def test_a_probe_that_the_reference_does_not_have_qualifies_the_verdict(checkpoint: Path, tmp_path: Path) -> None:
    probes = '"bert.pooler" = false\n"bert.poolr" = "bert.pooler"'
    report = verify(checkpoint, table=misspelled(tmp_path, probes), trials=False)
    assert report.skipped == ("bert.pooler",)
    assert report.faithful
    assert not report.complete
    assert "not run: " in " ".join(report.details().split())
