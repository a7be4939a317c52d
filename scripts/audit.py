"""Look the pinned versions up in PyPI's data on known vulnerabilities, with pip-audit.

python -m scripts.audit

Where that data cannot be reached (no network, or a mirror that carries packages and not their data), the audit is
skipped with the reason, and the exit status is 0.  It is 1 if a version has a known vulnerability.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.setup_environment import HASHES

# A version with published vulnerabilities.  pip-audit finds nothing wrong with a package that the server does not
# know, so a mirror without the data would pass everything.
CONTROL = "jinja2==3.1.2"


def main() -> None:
    """Audit, or say why not."""
    lines, status = audit(HASHES)
    print("\n".join(lines))
    sys.exit(status)


def audit(requirements: Path, *service: str) -> tuple[list[str], int]:
    """What pip-audit finds of these versions.

    Args:
        requirements: a list of requirements with hashes.
        service: options of pip-audit that name another source of data than PyPI.

    Returns:
        The lines to print, and the exit status.
    """
    with tempfile.TemporaryDirectory() as folder:
        control = Path(folder) / "control.txt"
        control.write_text(f"{CONTROL} --hash=sha256:{'0' * 64}\n", encoding="utf-8")
        known = looked_up(control, *service)
    if isinstance(known, str):
        return [f"The audit is skipped: {known}"], 0
    if not any(found.get("vulns") for found in known):
        return [f"The audit is skipped: the server lists no vulnerability of {CONTROL}, which has some."], 0

    packages = looked_up(requirements, *service)
    if isinstance(packages, str):
        return [f"The audit is skipped: {packages}"], 0
    skipped = [f"not looked up: {found['skip_reason']}" for found in packages if "skip_reason" in found]
    vulnerable = [
        f"{found['name']} {found['version']}: {fault['id']}, fixed in {' '.join(fault['fix_versions']) or 'no version'}"
        for found in packages
        for fault in found.get("vulns", ())
    ]
    number = len(packages) - len(skipped)
    last = f"{number} of {len(packages)} versions were looked up: {len(vulnerable)} known vulnerabilities."
    return [*skipped, *vulnerable, last], 1 if vulnerable else 0


def looked_up(requirements: Path, *service: str) -> list[dict[str, Any]] | str:
    """pip-audit's entry of each package, or why it has none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "audit.json"
        options = ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--timeout", "10", *service]
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(requirements), *options]
        command += ["--format", "json", "--output", str(report)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if report.exists():
            entries: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["dependencies"]
            return entries
    last = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
    return f"pip-audit ended with status {done.returncode}: {last}"


if __name__ == "__main__":
    main()
