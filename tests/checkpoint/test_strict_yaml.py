"""YAML of a config: what is read, what is refused, and that what is written is read the same by every reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

import porting
from porting.checkpoint.strict_yaml import LARGEST, YamlError, parse_yaml, yaml_of

PLAIN = {
    "eps": 1e-05, "large": 1e22, "whole": -7, "flag": False, "nothing": None, "text": "a: b # c", "yes": "no",
    "number": "1e5", "empty": "", "of": [1, [2.5, {"x": None}], []], "inside": {"é": {}, "line": "a\nb"},
    "date": "2020-01-01",
}  # fmt: skip


def test_what_is_written_is_read_the_same() -> None:
    raw = yaml_of(PLAIN)
    assert parse_yaml(raw, where="c") == yaml.safe_load(raw) == PLAIN
    shared = [1, 2]
    assert b"&" not in yaml_of({"a": shared, "b": shared})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", "an anchor or alias at line 1"),
        ("a: *x", "an anchor or alias at line 1"),
        (
            "\na: !!python/object/apply:os.system [ls]",
            "the tag 'tag:yaml.org,2002:python/object/apply:os.system' at line 2",
        ),
        ("a: 2020-01-01", "'2020-01-01' at line 1 is not text, number, true, false or null"),
        ("<<: {a: 1}", "'<<' at line 1"),
        ("a: 1\nb: 2\na: 3", "the key 'a' stands twice in one mapping, again at line 3"),
        ("1: 2", "a key at line 1 that is not text"),
        ("a: 1\n---\nb: 2", "more than one document"),
        ("a: [", "not YAML at line 1"),
        ("a: \x01", "not YAML: special characters are not allowed"),
        ("[" * 5000, "nested too deeply"),
        ("a: 0x_", "'0x_' at line 1 is not a number"),
        ("a: " + "1" * 400, "a whole number of 400 digits; at most 300 are read"),
        ("#" * (LARGEST + 1), f"it has {LARGEST + 1} bytes; at most {LARGEST} are read"),
    ],
    ids=range(14),
)
def test_what_json_could_not_say_is_refused(text: str, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text.encode(), where="c")
    assert message in str(caught.value)


def test_no_text_in_utf_8_is_refused() -> None:
    with pytest.raises(YamlError, match="not UTF-8 at byte 3"):
        parse_yaml(b"a: \xff", where="c")


def test_a_config_in_yaml_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "lit_model.pth")
    (tmp_path / "model_config.yaml").write_text("n_head: 4\nnorm_eps: 1.0e-05\nrope_adjustments: null\n")
    opened = porting.open_checkpoint(tmp_path)
    assert opened.config == {"n_head": 4, "norm_eps": 1e-05, "rope_adjustments": None}
    assert opened.config_name == "model_config.yaml"
    (tmp_path / "model_config.yaml").write_text("- 1")
    with pytest.raises(porting.PortingError) as caught:
        porting.open_checkpoint(tmp_path)
    (fault,) = caught.value.faults
    assert fault.message == "the configuration is YAML but not a mapping"
    assert fault.hint == "take model_config.yaml from where the checkpoint came from"
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 5}))
    assert porting.open_checkpoint(tmp_path).config == {"n_head": 5}
