"""A machine for the pickle in which ``torch.distributed.checkpoint`` describes a checkpoint; it builds no object.

The ``.metadata`` of such a checkpoint is a pickle of a few classes of ``torch.distributed.checkpoint.metadata``, and
torch unpickles it as it is, so that whoever wrote it runs code in whoever loads it.  Here it is read by the machine of
:mod:`porting.checkpoint.state_pickle`, which knows the names of those classes and of nothing else: each becomes a
:class:`Node` that holds what the pickle gives to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from porting.checkpoint.state_pickle import StateMachine
from porting.checkpoint.state_values import DTYPES, Global, describe, is_whole
from porting.errors import Code

METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = {
    (METADATA, "BytesStorageMetadata"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "Metadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"),
    (METADATA, "TensorProperties"),
    (METADATA, "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""What may be made, without arguments, and be given its fields."""

ENUM = "_MEM_FORMAT_ENCODING"

CALLED = {
    (METADATA, ENUM),
    ("builtins", "getattr"),  # how the first Pythons 3.11 write a member of an enumeration: of that one alone
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
"""What may stand where a function is called; of these only sizes, layouts and dictionaries are kept."""

LARGEST = 1 << 29
"""The most bytes: a million chunks take a fifth of it."""


@dataclass(eq=False, slots=True)
class Node:
    """An object that the pickle describes.

    Attributes:
        kind: the name of its class.
        fields: what was given to it: a dictionary by names, or a tuple; None before that.
    """

    kind: str
    fields: object = None


class MetadataMachine(StateMachine):
    """Reads a ``.metadata``; see :class:`StateMachine` for the arguments."""

    needed_by: ClassVar[str] = "distributed checkpoint"
    otherwise: ClassVar[str] = "nothing was run; save the model again with torch.distributed.checkpoint.save"
    unsafe: ClassVar[Code] = Code.DCP_UNSAFE
    damaged: ClassVar[Code] = Code.DCP_METADATA

    def _global(self, module: str, name: str) -> None:
        known = (module, name) in CLASSES or (module, name) in CALLED or (module == "torch" and name in DTYPES)
        if not known:
            raise self._uncalled(module, name)
        self._push(Global(module, name))

    def _persistent(self) -> None:
        raise self._unknown(b"Q")

    def _new(self) -> None:
        args, kind = self._pop(), self._pop()
        if not isinstance(kind, Global) or (kind.module, kind.name) not in CLASSES or args != ():
            what = f"{kind.module}.{kind.name}" if isinstance(kind, Global) else describe(kind)
            raise self.error(f"a new object of {what}", self.unsafe)
        self._push(Node(kind.name))

    def _build(self) -> None:
        fields, target = self._pop(), self._pop()
        if isinstance(target, Node) and target.fields is None and isinstance(fields, dict | tuple):
            target.fields = fields
        elif not isinstance(target, dict):  # an ordered dictionary's attributes say nothing
            raise self.error(f"attributes for {describe(target)}", self.unsafe)
        self._push(target)

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise self.error(f"a call of {describe(function)}", self.unsafe)
        if (function.module, function.name) not in CALLED:
            raise self.error(f"a call of {function.module}.{function.name}", self.unsafe)
        match function.name, args:
            case "Size", (tuple() | list() as sizes,) if is_whole(tuple(sizes)):
                self._push(tuple(sizes))
            case "_get_layout", (str() as layout,):
                self._push(layout)
            case "OrderedDict", ():
                self._push({})
            case ("_MEM_FORMAT_ENCODING", (int(),)) | ("Path" | "PosixPath" | "WindowsPath", _):
                self._push(None)  # where it was written, and how it lay in memory: of no use
            case "getattr", (Global() as kind, str()) if kind == Global(METADATA, ENUM):
                self._push(None)  # the same
            case "getattr", _:
                raise self.error("a call of builtins.getattr", self.unsafe)
            case _:
                raise self.error(f"a call of {function.module}.{function.name} with unknown arguments")

    def _set_items(self, values: list[object]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(values) % 2:
            raise self.error(f"items for {describe(target)} at byte {self.position}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, Node):
                self._require_key(key)
            if key in target:
                raise self.error(f"the key {key!a:.120} twice in a dictionary")
            target[key] = value
