"""Installing by hash: real pip and real wheels in a folder; the network is not used."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import setup_environment
from scripts.setup_environment import (
    CONSTRAINTS,
    HASHES,
    RefusedError,
    check_torch,
    entry,
    lowest,
    pip,
    pip_install,
    requirements,
)

PYTHON = Path(sys.executable)
PIN = "porting-demo==1.0"


def wheel(folder: Path, code: str, *, name: str = "porting_demo", version: str = "1.0") -> Path:
    """A wheel of one module, with a valid RECORD: what somebody makes who changes a package on the way."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{file},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
        for file, text in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is pip's only index, and the hash of the wheel in it as the only pin."""
    folder = tmp_path / "index"
    good = wheel(folder, "value = 1\n")
    hashes = tmp_path / "constraints-with-hashes.txt"
    hashes.write_text(f"{PIN} \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{sha256(good)}\n")
    monkeypatch.setattr(setup_environment, "ROOT", tmp_path)
    monkeypatch.setattr(setup_environment, "HASHES", hashes)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_pinned_file_is_installed(pinned: Path, tmp_path: Path) -> None:
    del pinned
    pip_install(PYTHON, "--target", str(tmp_path / "site"), "porting-demo>=1", hashes=True)
    assert (tmp_path / "site" / "porting_demo.py").read_text() == "value = 1\n"


def test_a_tampered_file_is_refused(pinned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel(pinned, "value = 2\n")
    with pytest.raises(RefusedError, match=r"whose SHA-256 is not in(?s:.)*add HASHES=no"):
        pip_install(PYTHON, "--target", str(tmp_path / "site"), "porting-demo>=1", hashes=True)
    assert not (tmp_path / "site").exists()
    assert "porting-demo" in capsys.readouterr().err.replace("_", "-")  # pip names the package


def test_a_package_without_a_hash_is_refused(pinned: Path, tmp_path: Path) -> None:
    wheel(pinned, "", name="porting_other")
    with pytest.raises(RefusedError):
        pip_install(PYTHON, "--target", str(tmp_path / "site"), "porting-other", hashes=True)


def test_pips_own_file_is_checked_by_any_pip(pinned: Path, tmp_path: Path) -> None:
    """pip itself is installed from a list of requirements, which older versions check too."""
    listed = tmp_path / "tools.txt"
    listed.write_text(entry("porting-demo"))
    install = ("install", "--require-hashes", "--target", str(tmp_path / "site"), "--requirement", str(listed))
    pip(PYTHON, *install)
    wheel(pinned, "value = 2\n")
    with pytest.raises(RefusedError):
        pip(PYTHON, *install, "--force-reinstall")


def test_only_a_local_build_of_torch_goes_unchecked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = wheel(tmp_path / "a", "", name="torch", version="2.13.0")
    pin = f"torch==2.13.0 --hash=sha256:{sha256(good)}\n"
    check_torch(good, pin)
    assert capsys.readouterr().out == ""

    check_torch(wheel(tmp_path / "b", "", name="torch", version="2.13.0+cpu"), pin)
    assert "torch 2.13.0+cpu is a local build" in capsys.readouterr().out

    changed = wheel(tmp_path / "c", "value = 2\n", name="torch", version="2.13.0")
    with pytest.raises(RefusedError, match=sha256(changed)):
        check_torch(changed, pin)


def test_the_list_with_hashes_has_the_versions_of_the_constraints() -> None:
    """All of them, and besides only what other platforms need."""
    pins = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#"))
    listed = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)( ;[^\\]*)? \\$", HASHES.read_text(), flags=re.MULTILINE)
    versions = {name: version for name, version, _ in listed}
    expected = {canonical(name): version for name, version in pins.items()}
    assert {name: version for name, version in versions.items() if name in expected} == expected
    assert [name for name, _, marker in listed if name not in expected and not marker] == []
    assert all("--hash=sha256:" in entry(name) for name in versions)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lowest_versions_are_those_of_the_peers_that_are_stated() -> None:
    asked = requirements("dev")
    changed = {one: other for one, other in zip(asked, lowest(asked), strict=True) if one != other}
    assert changed == {
        f"{name}>={least}": f"{name}=={least}.*" for name, least in (("torch", "2.6"), ("transformers", "5.0"))
    }
