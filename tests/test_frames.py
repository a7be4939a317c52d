"""The line of code that a message names."""

from __future__ import annotations

from pathlib import Path

import pytest

from porting import frames


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (f"{frames.HERE}/models/bert.py", True),  # a module of this library is what is proven, as a user's is
        (f"{frames.HERE}/verification/proof.py", False),
        (pytest.__file__, False),
        (str(Path(pytest.__file__).parents[4] / "bin" / "porting"), False),
        (__file__, True),
        ("<string>", False),
    ],
)
def test_whose_code_a_line_is(file: str, *, own: bool) -> None:
    code = compile("\n\ndef call(function):\n    return function()\n", file, "exec")
    names: dict[str, object] = {}
    exec(code, names)  # noqa: S102  # code of another file
    call = names["call"]
    assert callable(call)
    lines = call(frames.current_lines)
    assert (f"{file}:4" in lines) is own
