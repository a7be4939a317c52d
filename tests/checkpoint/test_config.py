from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from porting.checkpoint import CheckpointError, num_labels
from porting.checkpoint.config import parse_config
from porting.export_files import config_bytes
from tests.checkpoint.hostile import refused

SHARD = save({"a": torch.arange(3.0)})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 2),
        ({"num_labels": 5}, 5),
        ({"id2label": {"0": "no", "1": "yes", "2": "maybe"}}, 3),
        ({"id2label": {"0": "no"}, "num_labels": 5}, 1),
        ({"id2label": None, "num_labels": 4}, 4),
    ],
)
def test_num_labels_agrees_with_transformers(config: dict[str, object], expected: int) -> None:
    from transformers import BertConfig

    assert num_labels(config) == expected
    given = {key: value for key, value in config.items() if value is not None}
    if len(given) < 2:  # given both, transformers checks them against each other
        assert BertConfig.from_dict(given).num_labels == expected


def test_numbers_that_json_has_no_word_for_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    from transformers import Mamba2Config

    wanted = Mamba2Config(time_step_limit=(0.5, math.inf))
    wanted.save_pretrained(tmp_path)
    raw = (tmp_path / "config.json").read_bytes()
    assert b"__float__" in raw
    found = parse_config(raw, where="config.json")
    assert found["time_step_limit"] == [0.5, math.inf]
    written = config_bytes(raw, {"state_size": 7})
    assert json.loads(written, parse_constant=pytest.fail)["state_size"] == 7  # strict JSON
    assert parse_config(written, where="config.json") == {**found, "state_size": 7}
    plain = parse_config(b'{"a": {"__float__": "1e9"}, "b": {"__float__": "NaN", "c": 1}}', where="config.json")
    assert plain == {"a": {"__float__": "1e9"}, "b": {"__float__": "NaN", "c": 1}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": ["no", "yes"]}, "id2label is not an object"),
        ({"id2label": {}}, "id2label is not an object"),
        ({"num_labels": 0}, "num_labels is 0, and at least 1 is expected"),
        ({"num_labels": "3"}, "num_labels is '3'"),
        ({"num_labels": True}, "num_labels is True"),
    ],
)
def test_field_of_the_wrong_kind(config: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        num_labels(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "the configuration cannot be read: not JSON at character 1"),
        (b"[]", "the configuration is JSON but not an object"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_hostile_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(SHARD)
    (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, message)


def test_huge_configuration_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SHARD)
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)
    refused(tmp_path, "1099511627776 bytes, where at most 16777216 can be meant")
