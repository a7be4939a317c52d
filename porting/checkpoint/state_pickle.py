"""A pickle machine for saved state dicts: it builds descriptions and runs nothing.

``torch.save`` writes the structure of a state dict as a pickle
(https://docs.python.org/3/library/pickletools.html lists the opcodes).  A pickle is a program that may call
anything, so it is not given to :mod:`pickle`: this machine knows dictionaries, sequences, numbers, strings
and the few constructors of tensors.  Whatever else a file asks for is refused by name.  The machine is a
plain loop over a stack: deep nesting costs no recursion, and the memo is a dictionary, so that a large memo
index costs nothing either.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from porting.checkpoint.errors import CheckpointError, checkpoint_error, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.layout import MAX_RANK, ElementType
from porting.errors import Code
from porting.limits import charge, reading

STORAGES = {
    "BoolStorage": ElementType.BOOL,
    "ByteStorage": ElementType.UINT8,
    "CharStorage": ElementType.INT8,
    "ShortStorage": ElementType.INT16,
    "IntStorage": ElementType.INT32,
    "LongStorage": ElementType.INT64,
    "HalfStorage": ElementType.FLOAT16,
    "BFloat16Storage": ElementType.BFLOAT16,
    "FloatStorage": ElementType.FLOAT32,
    "DoubleStorage": ElementType.FLOAT64,
    "ComplexFloatStorage": ElementType.COMPLEX64,
    "ComplexDoubleStorage": ElementType.COMPLEX128,
}

DTYPES = {str(element): element for element in ElementType}
"""The element types by the names that torch has for them."""

OTHER_TENSORS = {
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_qtensor": "a quantised tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no values",
    "_rebuild_wrapper_subclass": "a tensor of a class of its own",
    "_rebuild_device_tensor_from_numpy": "a tensor of a device that this library does not read",
}


@dataclass(frozen=True, slots=True)
class Global:
    """A function or class that a pickle names."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage, by its key in the archive.  ``element`` is None when it is untyped: then ``count`` is bytes."""

    key: str
    element: ElementType | None
    count: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the pickle describes it: a strided view of a storage, offsets and strides in elements."""

    storage: StorageRef
    element: ElementType
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    lazy: str = ""  # "conjugated" or "negated" when the elements are to be read so


LAZY = {"conj": "conjugated", "neg": "negated"}
REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")


def is_whole(sizes: Sequence[object]) -> bool:
    """Whether all values are integers."""
    return all(type(size) is int for size in sizes)


def is_shape(sizes: Sequence[object]) -> bool:
    """Whether a value is a tuple of a tensor's sizes; a long one is refused, since each call copies it."""
    return len(sizes) <= MAX_RANK and is_whole(sizes)


def is_known(module: str, name: str) -> bool:
    """Whether a state dict may name this: what builds tensors and ordered dictionaries."""
    return (
        (module == "collections" and name == "OrderedDict")
        or (module == "torch" and (name in STORAGES or name in DTYPES or name == "Size"))
        or (module == "torch.storage" and name == "UntypedStorage")
        or (module == "torch._utils" and name in REBUILD)
    )


def describe(value: object) -> str:
    """A short description of a pickle's value."""
    names: dict[type, str] = {
        dict: "a dictionary",
        list: "a list",
        tuple: "a tuple",
        str: "a string",
        bytes: "bytes",
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        TensorSpec: "a tensor",
        StorageRef: "a storage",
        Global: "a class",
        type(None): "None",
    }
    return names.get(type(value), "something unknown")


MAX_STRING = 1 << 20
"""Bytes of a string or number at most."""

SMALL = 1 << 31
"""The bound of integers that may be keys of dictionaries: their hashes differ."""

MAX_NAME = 1 << 10
"""The longest name of a module or of something in it, in bytes or characters."""

CHARGED = 1 << 12
"""Steps between two charges to the budget."""

TOGETHER = 1 << 16
"""Bytes of strings that are charged at once."""

META = "meta"
"""The device of tensors without values."""

DEVICE = re.compile(r"[a-z][a-z0-9_]{0,63}(:[0-9]{1,4})?")
"""The device of a storage, which torch ignores under ``map_location="cpu"``; a backend may register any name."""

MARK = object()
"""The mark on the stack at which a group begins."""


Action = Callable[["StateMachine"], None]


class StateMachine:
    """Runs the pickles of a file, which may follow each other.

    Args:
        start: where the first pickle begins.
        stop: where the last must have ended.
        legacy: whether storages are described as before torch 1.6: with one thing more, which is None.

    Attributes:
        needed_by: what the pickle describes, for messages.
        otherwise: what to do about a pickle that describes something else.
        damaged, unsafe: the codes of a pickle that cannot be read, and of one that asks for what could run.
        longest: the most bytes of a string or a number.
        more: opcodes that it knows besides :data:`ACTIONS`.
        dear: how many values an opcode is charged as where it makes a larger object than others do.
    """

    needed_by: ClassVar[str] = "state dict"
    otherwise: ClassVar[str] = "nothing was run; take the model's safetensors files, or save its state dict again"
    unsafe: ClassVar[Code] = Code.BIN_UNSAFE
    damaged: ClassVar[Code] = Code.BIN_PICKLE
    longest: ClassVar[int] = MAX_STRING
    more: ClassVar[Mapping[bytes, Action]] = {}
    dear: ClassVar[Mapping[bytes, int]] = {}

    def __init__(self, source: ByteSource, start: int, stop: int, *, legacy: bool = False) -> None:
        self.source = source
        self.position = start
        self._stop = stop
        self._buffer = b""
        self._buffer_start = start
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: dict[int, object] = {}
        self._version = 2
        self._view = [None] if legacy else []
        self._strings = 0
        self._storages: dict[str, StorageRef] = {}
        self._tensors: list[TensorSpec] = []

    def load(self) -> object:
        """Read the next pickle; :attr:`position` is then behind it."""
        self._stack, self._marks, self._memo, self._version = [], [], {}, 2
        steps = charged = 0
        with reading() as budget:
            while True:
                opcode = self._read(1)
                if opcode == b".":
                    budget.charge("objects", charged, self.source.where)
                    return self._pop()
                action = ACTIONS.get(opcode) or self.more.get(opcode)
                if action is None or self._version < LATER.get(opcode, 0):
                    raise self._unknown(opcode)
                action(self)
                steps += 1
                charged += self.dear.get(opcode, opcode not in FREE)
                if steps % CHARGED == 0:
                    budget.charge("objects", charged, self.source.where)
                    charged = 0

    @property
    def storages(self) -> Mapping[str, StorageRef]:
        """The described storages by their keys."""
        return self._storages

    @property
    def tensors(self) -> Iterable[TensorSpec]:
        """All described tensors, whatever holds them."""
        return self._tensors

    def require_used(self, value: object, records: Iterable[str]) -> None:
        """Require that nothing else is described or stored: torch would make that too, and may refuse it."""
        values = value.values() if isinstance(value, dict) else (value,)
        needed = {id(spec): spec for spec in values if isinstance(spec, TensorSpec)}
        if any(id(spec) not in needed for spec in self._tensors):
            raise self.error(f"a tensor that the {self.needed_by} does not hold")
        keys = {spec.storage.key for spec in needed.values()}
        for key in (*self._storages, *records) if needed else ():
            if key not in keys:
                raise self.error(f"the storage {quote(key)}, which belongs to no tensor")

    def _unknown(self, opcode: bytes) -> CheckpointError:
        at = self.position - 1
        return self.error(f"the opcode 0x{opcode[0]:02x} at byte {at}, which no {self.needed_by} needs", self.unsafe)

    def error(self, message: str, code: Code | None = None, hint: str = "") -> CheckpointError:
        """The error for a pickle that is no state dict."""
        return checkpoint_error(
            code or self.damaged, self.source.where, f"in its pickle, {message}", hint or self.otherwise
        )

    # ------------------------------------------------------------------------------------------------ reading
    # bytes

    def _read(self, count: int) -> bytes:
        begin = self.position - self._buffer_start
        if begin + count > len(self._buffer):
            if self.position + count > self._stop:
                raise self.error("it ends in the middle", hint="the file was cut short: fetch it again")
            self._buffer = self.source.pread(self.position, min(max(count, 1 << 16), self._stop - self.position))
            self._buffer_start, begin = self.position, 0
        self.position += count
        return self._buffer[begin : begin + count]

    def _frame(self) -> None:
        if self._number("<Q") > self._stop - self.position:
            raise self.error("a frame that ends behind the pickle")

    def _number(self, layout: str) -> int:
        value: int
        (value,) = struct.unpack(layout, self._read(struct.calcsize(layout)))
        return value

    def _bytes(self, layout: str) -> bytes:
        count = self._number(layout)
        if not 0 <= count <= self.longest:
            raise self.error(f"a string of {count} bytes, which no {self.needed_by} needs")
        self._hold(count)
        return self._read(count)

    def _hold(self, count: int) -> None:
        """Charge the bytes of a string, several strings at once."""
        self._strings += count
        if self._strings >= TOGETHER:
            charge("metadata", self._strings, where=self.source.where)
            self._strings = 0

    def _line(self) -> str:
        line = bytearray()
        while (byte := self._read(1)) != b"\n":
            line += byte
            if len(line) > MAX_NAME:
                raise self.error("a name without end")
        self._hold(len(line))
        return self._text(bytes(line))

    def _text(self, raw: bytes) -> str:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a string that is not UTF-8 before byte {self.position}") from error
        if not text.isascii():  # one wide character makes all of them wide
            self._hold(sys.getsizeof(text) - len(raw))
        return text

    # -----------------------------------------------------------------------------------------------------
    # the stack

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> object:
        if not self._stack or self._stack[-1] is MARK:
            raise self.error(f"too few values on the stack at byte {self.position}")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[object]:
        if not self._marks:
            raise self.error(f"a group without beginning at byte {self.position}")
        index = self._marks.pop()
        values = self._stack[index + 1 :]
        del self._stack[index:]
        return values

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        self._push(MARK)

    def _tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def _put(self, index: int) -> None:
        value = self._pop()
        self._memo[index] = value
        self._push(value)

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise self.error(f"the memo has no entry {index}")
        self._push(self._memo[index])

    def _top(self) -> object:
        value = self._pop()
        self._push(value)
        return value

    def _set_items(self, values: list[object]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(values) % 2:
            raise self.error(f"items for {describe(target)} at byte {self.position}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            self._require_key(key)
            target[key] = value

    def _require_key(self, key: object) -> None:
        """Refuse keys that cannot be hashed safely: nested tuples recurse in C, large numbers collide."""
        if not isinstance(key, str | int | bytes | None) or (isinstance(key, int) and not -SMALL <= key < SMALL):
            raise self.error(f"{describe(key)} as the key of a dictionary")

    def _extend(self, values: list[object]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise self.error(f"elements for {describe(target)} at byte {self.position}")
        target.extend(values)

    def _set_one(self) -> None:
        value = self._pop()
        key = self._pop()
        self._set_items([key, value])

    def _protocol(self) -> None:
        version = self._number("<B")
        if version > 5:
            raise self.error(f"protocol {version}, where 2 is usual and 5 the newest")
        self._version = max(version, 2)

    def _new(self) -> None:
        raise self._unknown(b"\x81")

    def _build(self) -> None:
        fields, target = self._pop(), self._pop()  # a state dict's _metadata, say: they carry no weights
        if not isinstance(target, Ordered) or not isinstance(fields, dict):
            raise self.error(f"attributes for {describe(target)}", self.unsafe)
        self._push(target)

    # --------------------------------------------------------------------------------------- names, storages,
    # tensors

    def _global(self, module: str, name: str) -> None:
        if is_known(module, name):
            self._push(Global(module, name))
        elif module == "torch._utils" and name in OTHER_TENSORS:
            raise self.error(
                f"{OTHER_TENSORS[name]} ({name})", Code.BIN_TENSOR, "save dense tensors: tensor.to_dense()"
            )
        elif module.startswith(("torch.nn.modules", "__torch__", "__main__")):
            raise self.error(
                f"the class {quote(f'{module}.{name}')}: a whole module, which runs code when loaded",
                Code.BIN_UNSAFE,
                "nothing was run; save model.state_dict() instead of the model",
            )
        else:
            raise self._uncalled(module, name)

    def _uncalled(self, module: str, name: str) -> CheckpointError:
        call = f"a call of {quote(f'{module}.{name}')}"
        return self.error(f"{call}, which no {self.needed_by} needs and which could run code", self.unsafe)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.error("a global whose name is not a string", self.unsafe)
        if max(len(name), len(module)) > MAX_NAME:  # both may come from the memo, many times
            raise self.error("a name without end")
        self._global(module, name)

    def _persistent(self) -> None:
        match self._pop():
            case ("storage", Global("torch" | "torch.storage", name), str() as key, str() as place, count, *rest) if (
                type(count) is int and (name in STORAGES or name == "UntypedStorage") and rest == self._view
            ):
                if place == META or not DEVICE.fullmatch(place):
                    raise self.error(f"a storage on the device {quote(place)}, which has no values here")
                if self._view and name not in STORAGES:
                    raise self.error("an untyped storage, which torch.load refuses in a file of this older form")
                self._push(self._storage(StorageRef(key, STORAGES.get(name), count)))
            case other:
                raise self.error(f"{describe(other)} where a storage is expected")

    def _storage(self, found: StorageRef) -> StorageRef:
        """The storage of a key: the first description counts, as for torch."""
        first = self._storages.setdefault(found.key, found)
        if first != found and (first.count or found.count):
            raise self.error(f"the storage {quote(found.key)} twice, with other elements or another number of them")
        return found

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise self.error(f"a call of {describe(function)}", self.unsafe)
        match function.name, args:
            case "OrderedDict", ():
                self._push(Ordered())
            case "Size", (tuple() | list() as sizes,) if is_shape(sizes):
                self._push(tuple(sizes))
            case "_rebuild_parameter", (TensorSpec() as spec, bool() as grad, dict() as hooks) if not hooks:
                self._require_grad(spec.element, grad)
                self._push(spec)
            case (("_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3"), _):
                self._tensors.append(spec := self._tensor(function.name, args))
                self._push(spec)
            case _:
                raise self.error(f"a call of {function.module}.{function.name} with unknown arguments")

    def _tensor(self, function: str, args: tuple[object, ...]) -> TensorSpec:
        """The arguments of ``_rebuild_tensor`` (4), ``_v2`` (6 or 7) and ``_v3`` (7 or 8, with a dtype)."""
        more: list[object] = []
        match function.removeprefix("_rebuild_tensor"), args:
            case "", (StorageRef() as storage, offset, tuple() as size, tuple() as stride):
                element, grad = storage.element, False
            case "_v2", (
                StorageRef() as storage, offset, tuple() as size, tuple() as stride, bool() as grad,
                dict() as hooks, *more
            ) if not hooks and len(more) < 2:  # fmt: skip
                element = storage.element
            case "_v3", (
                StorageRef(element=None) as storage, offset, tuple() as size, tuple() as stride, bool() as grad,
                dict() as hooks, Global("torch", name), *more
            ) if not hooks and len(more) < 2:  # fmt: skip
                element = DTYPES.get(name)
                if grad:  # torch makes the tensor first, and then cannot give it its storage
                    raise self.error("a tensor with a gradient that torch saves as it does those without one")
            case _:
                raise self.error("a tensor whose description is incomplete")
        whole = is_whole(size) and is_whole(stride) and len(size) == len(stride)
        if element is None or not whole or type(offset) is not int:
            raise self.error("a tensor without a proper dtype, size or stride")
        self._require_grad(element, grad)
        return TensorSpec(storage, element, offset, size, stride, self._lazy(more[0] if more else None))

    def _require_grad(self, element: ElementType, grad: bool) -> None:
        if grad and element.kind not in ("float", "complex"):
            raise self.error(f"a tensor of {element} with a gradient")

    def _lazy(self, metadata: object) -> str:
        """The lazy conjugation and negation that the last argument of a tensor asks for."""
        if metadata is None:
            return ""
        if not isinstance(metadata, dict) or any(
            key not in LAZY or type(metadata[key]) is not bool for key in metadata
        ):
            raise self.error("a tensor with metadata that torch does not write")
        return " and ".join(word for key, word in LAZY.items() if metadata.get(key))


class Ordered(dict[object, object]):
    """An ordered dictionary, which may have attributes."""


ACTIONS: dict[bytes, Action] = {
    b"\x80": StateMachine._protocol,
    b"\x95": lambda m: m._frame(),
    b"(": lambda m: m._mark(),
    b"}": lambda m: m._push({}),
    b"]": lambda m: m._push([]),
    b")": lambda m: m._push(()),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"K": lambda m: m._push(m._number("<B")),
    b"M": lambda m: m._push(m._number("<H")),
    b"J": lambda m: m._push(m._number("<i")),
    b"\x8a": lambda m: m._push(int.from_bytes(m._bytes("<B"), "little", signed=True)),  # LONG1
    b"G": lambda m: m._push(struct.unpack(">d", m._read(8))[0]),
    b"X": lambda m: m._push(m._text(m._bytes("<I"))),
    b"\x8c": lambda m: m._push(m._text(m._bytes("<B"))),
    b"\x8d": lambda m: m._push(m._text(m._bytes("<Q"))),
    b"U": lambda m: m._push(m._text(m._bytes("<B"))),  # a string of Python 2
    b"C": lambda m: m._push(m._bytes("<B")),
    b"B": lambda m: m._push(m._bytes("<I")),
    b"t": lambda m: m._push(tuple(m._pop_to_mark())),
    b"\x85": lambda m: m._tuple_of(1),
    b"\x86": lambda m: m._tuple_of(2),
    b"\x87": lambda m: m._tuple_of(3),
    b"q": lambda m: m._put(m._number("<B")),
    b"r": lambda m: m._put(m._number("<I")),
    b"\x94": lambda m: m._put(len(m._memo)),
    b"h": lambda m: m._get(m._number("<B")),
    b"j": lambda m: m._get(m._number("<I")),
    b"s": StateMachine._set_one,
    b"u": lambda m: m._set_items(m._pop_to_mark()),
    b"a": lambda m: m._extend([m._pop()]),
    b"e": lambda m: m._extend(m._pop_to_mark()),
    b"b": lambda m: m._build(),
    b"c": lambda m: m._global(m._line(), m._line()),
    b"\x93": StateMachine._stack_global,
    b"Q": lambda m: m._persistent(),
    b"R": lambda m: m._reduce(),
    b"\x81": lambda m: m._new(),
}

LATER = dict.fromkeys((b"C", b"B"), 3) | dict.fromkeys((b"\x8c", b"\x8d", b"\x93", b"\x94", b"\x95"), 4)
"""Opcodes of later protocols, which torch accepts if the pickle declares one."""

FREE = frozenset({b"h", b"j", b"s", b"u", b"a", b"e", b"b", b"\x80", b"\x95"})
"""Opcodes that push no value."""
