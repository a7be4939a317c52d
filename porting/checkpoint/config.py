"""A checkpoint's config, as it stands on disk in JSON or YAML, and the conventions by which its fields are read."""

from __future__ import annotations

import os
from collections.abc import Mapping

from porting.checkpoint.errors import CheckpointError, checkpoint_error
from porting.checkpoint.names import CONFIG_NAMES, YAML
from porting.checkpoint.strict_json import JsonError, parse
from porting.checkpoint.strict_yaml import YamlError, parse_yaml
from porting.errors import Code
from porting.opening import Folder

CONFIG_NAME = CONFIG_NAMES[0]
MAX_CONFIG = 16 << 20
"""Bytes; the largest configurations (label names of image classifiers) are far smaller."""


def read_config(folder: Folder, *more: str) -> tuple[str, dict[str, object]]:
    """Read the first of :data:`CONFIG_NAMES` that a directory has.

    Returns:
        Its name and its content; an empty name and ``{}`` when there is none.
    """
    name = next((name for name in (*CONFIG_NAMES, *more) if folder.kind(name)), "")
    if not name:
        return "", {}
    return name, parse_config(folder.read(name, limit=MAX_CONFIG), where=str(folder.path / name))


def parse_config(raw: bytes, *, where: str) -> dict[str, object]:
    """Parse the text of a config: YAML if the file's name ends so, else JSON."""
    in_yaml = where.endswith(YAML)
    value: object
    try:
        # Python writes infinities into real configurations
        value = parse_yaml(raw, where=where) if in_yaml else parse(raw, where=where, allow_nan=True)
    except (JsonError, YamlError) as error:
        raise _invalid(where, f"the configuration cannot be read: {error}") from error
    if not isinstance(value, dict):
        what = "YAML but not a mapping" if in_yaml else "JSON but not an object"
        raise _invalid(where, f"the configuration is {what}")
    return dict(value)


def num_labels(config: Mapping[str, object]) -> int:
    """The number of classes of a classification head, by transformers' convention.

    The names in ``id2label`` count; without them ``num_labels``; without that, 2.

    >>> num_labels({"id2label": {"0": "no", "1": "yes", "2": "maybe"}, "num_labels": 2})
    3
    """
    labels = config.get("id2label")
    if labels is not None:
        if not isinstance(labels, Mapping) or not labels:
            raise _invalid(CONFIG_NAME, "id2label is not an object that maps numbers to names")
        return len(labels)
    number = config.get("num_labels", 2)
    if type(number) is not int or number < 1:
        raise _invalid(CONFIG_NAME, f"num_labels is {number!r}, and at least 1 is expected")
    return number


def _invalid(where: str, message: str) -> CheckpointError:
    hint = f"take {os.path.basename(where)} from where the checkpoint came from"
    return checkpoint_error(Code.CONFIG_INVALID, where, message, hint)
