"""The ``config.json`` of an export: the followed checkpoint's, changed where the module differs, or a new one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor, nn

from porting.errors import Code, Fault, Message, Wording
from porting.export_files import config_bytes, config_of, labels, main_dtype, new_config
from porting.frames import users_attribute
from porting.notation.field import held, value_of, with_field
from porting.notation.table import Table
from porting.origin import Origin
from porting.plan.config import effective, original
from porting.target import TargetError


def exported_config(
    module: nn.Module, origin: Origin, config: object, architecture: str | None, tensors: Mapping[str, Tensor]
) -> bytes:
    """The bytes of the export's ``config.json``."""
    raw = config_of(origin.checkpoint) if origin.checkpoint is not None else None
    dtype = main_dtype(tensors)
    named = {"architectures": [origin.architecture]} if origin.architecture else {}
    if isinstance(config, Mapping) or raw is None or origin.checkpoint is None:
        fields = {**whole_config(module, origin.plan.table, config), "dtype": dtype}
        return new_config({**named, **fields})
    changes = _changed_fields(module, origin, config)
    sources = origin.checkpoint.tensors
    if any(name in sources and tensor.dtype != sources[name].dtype for name, tensor in tensors.items()):
        changes |= {field: dtype for field in ("dtype", "torch_dtype") if field in origin.checkpoint.config}
    if origin.changed or architecture is not None:
        changes |= named
    return config_bytes(raw, changes)


def _changed_fields(module: nn.Module, origin: Origin, config: object) -> dict[str, object]:
    """The fields of the checkpoint's config that differ in the module's config."""
    table = origin.plan.table
    module_config = config if config is not None else _config_object(module)
    if module_config is None or origin.checkpoint is None:
        return {}
    before = effective(table, origin.checkpoint.config)
    defaults = (
        {field.name: field.default for field in dataclasses.fields(module_config)}
        if dataclasses.is_dataclass(module_config)
        else {}
    )
    changed = {
        field: value
        for field, value in original(table, module_config).items()
        if value != (value_of(before, field) if held(before, field) else defaults.get(table.config[field], value))
    }
    if "num_labels" in changed:
        changed |= labels(int(str(changed.pop("num_labels"))))
    return changed


_PASS_CONFIG = Message(
    Wording(
        python="pass config=, the target's config or the content of config.json as a dictionary",
        command="let the module keep its config as `config`",
    )
)


def whole_config(module: nn.Module, table: Table, config: object) -> dict[str, object]:
    """A complete config: the passed one, or the target's, translated through the table.

    Args:
        config: the config that the user passed: a mapping, an object, or None.
    """
    if isinstance(config, Mapping):
        return dict(config)
    module_config = config if config is not None else _config_object(module)
    name = type(module).__qualname__
    if module_config is None:
        message = f"nothing says the config of this {name}: neither it nor a part of it has one"
        hint = _PASS_CONFIG
        raise TargetError(Fault(code=Code.CONFIG_UNKNOWN, message=message, hint=hint))
    found = original(table, module_config)
    lacking = [f"{attribute!r}" for field, attribute in table.config.items() if field not in found]
    faults = [
        Fault(
            code=Code.CONFIG_REFUSED,
            where=table.where,
            message=f"this {name} has {attribute} = {getattr(module_config, attribute)!r}, "
            f"and every checkpoint of '{table.name}' {value!r}",
            hint="it would come out as another function: use the table of a family that it is",
        )
        for attribute, value in table.constants.items()
        if getattr(module_config, attribute, value) != value
    ]
    if lacking:
        message = (
            f"the {type(module_config).__qualname__} of this {name} has no {', '.join(lacking)}, which [config] names"
        )
        hint = _PASS_CONFIG
        faults.append(Fault(code=Code.CONFIG_UNKNOWN, where=table.where, message=message, hint=hint))
    if not table.model_types:
        message = "the table names no model_types, and config.json must have one"
        faults.append(Fault(code=Code.CONFIG_UNKNOWN, where=table.where, message=message, hint="add it to [mapping]"))
    if faults:
        raise TargetError(faults)
    demanded = {field: values[0] for field, values in table.require.items() if len(values) == 1}
    count = found.pop("num_labels", 2)
    named = labels(int(str(count))) if count != 2 else {}
    fields: dict[str, object] = {}
    for field, value in {**demanded, **found}.items():
        fields = with_field(fields, field, value)
    return {**fields, **named, "model_type": table.model_types[0]}


def _config_object(module: nn.Module) -> object:
    """The attribute ``config`` of the module, or of its first part that has one."""
    return next((part.config for part in module.modules() if users_attribute(part, "config") is not None), None)
