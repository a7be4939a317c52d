"""What the pickle of a state dict is made of: storages, tensors, and the few names it may mention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

STORAGES = {
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*STORAGES.values(), torch.uint16, torch.uint32)}
DTYPES |= {
    name: getattr(torch, name)
    for name in (
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)  # float8_e8m0fnu came with torch 2.7
}

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
    """One of the few functions and classes that a state dict may name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage, by its key in the archive.  ``dtype`` is None when it is untyped: then ``count`` is bytes."""

    key: str
    dtype: torch.dtype | None
    count: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the pickle describes it: a strided view of a storage, offsets and strides in elements."""

    storage: StorageRef
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    lazy: str = ""  # "conjugated" or "negated" when the elements are to be read so


LAZY = {"conj": "conjugated", "neg": "negated"}
REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")


def is_whole(sizes: tuple[object, ...]) -> bool:
    """Whether all are whole numbers."""
    return all(type(size) is int for size in sizes)


def describe(value: object) -> str:
    """A value of a pickle in a few words."""
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
