from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from porting.checkpoint import open_checkpoint
from tests.checkpoint.hostile import index, refused

INDEX = "model.safetensors.index.json"

SHARD = save({"a": torch.arange(3.0)})
OTHER = save({"b": torch.arange(2.0)})
HOSTILE_INDEX: list[tuple[str, bytes, str]] = [
    ("not JSON", b"{", "the index cannot be read: not JSON"),
    ("HTML", b"<html>", "the index cannot be read: not JSON"),
    ("twice", b'{"weight_map": {"a": "s0.safetensors", "a": "s1.safetensors"}}', "the key 'a' stands twice"),
    ("no weight_map", b"{}", "without a weight_map object"),
    ("weight_map a list", b'{"weight_map": []}', "without a weight_map object"),
    ("names nothing", b'{"weight_map": {}}', "the weight_map names no tensor"),
    ("shard a number", index({"a": 3}), "tensor 'a': its shard is not a string"),
    ("shard missing", index({"a": "gone.safetensors"}), "gone.safetensors: no such file"),
    ("absolute", index({"a": "/etc/x.safetensors"}), "the shard '/etc/x.safetensors' holds a path separator"),
    ("climbs out", index({"a": "../x.safetensors"}), "the shard '../x.safetensors' holds a path separator"),
    ("dots", index({"a": ".."}), "the shard '..' names a directory"),
    ("drive letter", index({"a": "C:x.safetensors"}), "begins with a drive letter"),
    ("backslash", index({"a": "..\\x.safetensors"}), "holds a path separator"),
    ("URL", index({"a": "https://x.org/a.safetensors"}), "is a URL"),
    ("NUL", index({"a": "a\0.safetensors"}), "control characters"),
    ("other ending", index({"a": "s0.txt"}), "do not all end in .safetensors or all in .bin"),
    ("mixed", index({"a": "s0.safetensors", "b": "s1.bin"}), "do not all end in .safetensors or all in .bin"),
    ("FIFO", index({"a": "fifo.safetensors"}), "fifo.safetensors: found a named pipe"),
    ("shard lacks it", index({"a": "s0.safetensors", "c": "s0.safetensors"}),
     "tensor 'c': the shard 's0.safetensors' does not hold it"),
    ("in another shard", index({"a": "s1.safetensors", "b": "s0.safetensors"}), "it is in s0.safetensors"),
    ("not listed", index({"a": "s0.safetensors", "b": "both.safetensors"}),
     "tensor 'a': it stands in 's0.safetensors' and in 'both.safetensors', with equal bytes"),
    ("different values", index({"a": "s0.safetensors", "b": "changed.safetensors"}),
     "tensor 'a': it stands in 's0.safetensors' and in 'changed.safetensors', with different values"),
    ("unlisted", index({"b": "both.safetensors"}),
     "tensor 'a': the shard 'both.safetensors' holds it, and the index does not list it"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"), [row[1:] for row in HOSTILE_INDEX], ids=[row[0] for row in HOSTILE_INDEX]
)
def test_hostile_index(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / INDEX).write_bytes(content)
    (tmp_path / "s0.safetensors").write_bytes(SHARD)
    (tmp_path / "s1.safetensors").write_bytes(OTHER)
    (tmp_path / "both.safetensors").write_bytes(save({"a": torch.arange(3.0), "b": torch.arange(2.0)}))
    (tmp_path / "changed.safetensors").write_bytes(save({"a": torch.ones(3), "b": torch.arange(2.0)}))
    os.mkfifo(tmp_path / "fifo.safetensors")
    refused(tmp_path, message)


def test_all_missing_shards_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(index({"a": "x.safetensors", "b": "y.safetensors"}))
    refused(tmp_path, "x.safetensors: no such file", "y.safetensors: no such file")


def test_shard_that_is_a_link_to_outside(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    (tmp_path / "w.safetensors").write_bytes(SHARD)
    (root / "s0.safetensors").symlink_to(tmp_path / "w.safetensors")
    (root / INDEX).write_bytes(index({"a": "s0.safetensors"}))
    refused(root, "outside the checkpoint")
    refused(root / INDEX, "outside the checkpoint")


def test_wrong_total_size_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "s0.safetensors").write_bytes(SHARD)
    (tmp_path / INDEX).write_bytes(index({"a": "s0.safetensors"}, 13))
    (warning,) = open_checkpoint(tmp_path).warnings
    assert "total_size is 13, and the shards' tensors have 12 bytes" in str(warning)
    for huge, told in ((1e308, "1e+308"), (10**299, "a whole number of 994 bits"), (-1e308, "-1e+308"), (1e19, 10**19)):
        (tmp_path / INDEX).write_bytes(index({"a": "s0.safetensors"}, huge))
        (warning,) = open_checkpoint(tmp_path).warnings
        assert f"total_size is {told}, and the shards' tensors have 12 bytes" in str(warning)
    for right in (12, 12.0, None, "much"):
        (tmp_path / INDEX).write_bytes(index({"a": "s0.safetensors"}, right))
        assert open_checkpoint(tmp_path).warnings == ()
