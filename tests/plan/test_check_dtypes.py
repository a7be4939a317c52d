"""Every change of dtype is declared."""

from __future__ import annotations

import torch

from tests.plan.shapes import Headers, Info, headers, module, put
from tests.plan.toy import CONFIG, checkpoint, plan, refused, target


def with_dtype(dtype: torch.dtype, *names: str) -> Headers:
    tensors = dict(headers(checkpoint(), CONFIG).tensors)
    for name in names or tuple(tensors):
        tensors[name] = Info(shape=tensors[name].shape, dtype=dtype)
    return Headers(tensors=tensors, config=CONFIG)


def test_an_integer_is_never_cast_to_a_float() -> None:
    for dtype in (None, torch.float32):
        assert refused(with_dtype(torch.int8, "trunk.emb.weight"), dtype=dtype) == [
            (
                "toy.toml:12:1: 'trunk.emb.weight' -> 'emb.weight': int8 would become float32; integers and floats are "
                "never cast into each other (a quantised tensor needs its scales; a mask or a table of positions is "
                "not a weight: drop it) [dtype-change]"
            )
        ]


def test_a_float_is_never_cast_to_an_integer() -> None:
    into = module(target(l__0__norm__weight=None))
    put(into, "l.0.norm.weight", torch.zeros(4, dtype=torch.int64, device="meta"))
    (fault,) = refused(None, into)
    assert "'trunk.l.0.norm.weight' -> 'l.0.norm.weight': float32 would become int64; integers and floats" in fault


def test_an_integer_keeps_its_width() -> None:
    into = module(target(l__0__norm__weight=None))
    put(into, "l.0.norm.weight", torch.zeros(4, dtype=torch.int64, device="meta"))
    (fault,) = refused(with_dtype(torch.int32, "trunk.l.0.norm.weight"), into)
    assert "'trunk.l.0.norm.weight' -> 'l.0.norm.weight': the checkpoint has int32, the module int64" in fault


def test_a_module_on_the_meta_device_takes_the_checkpoints_dtype() -> None:
    plan(with_dtype(torch.bfloat16))


def test_a_module_with_values_keeps_its_dtype_unless_a_cast_is_declared() -> None:
    into = module(target(), device="cpu")
    faults = refused(with_dtype(torch.bfloat16), into)
    assert faults[0] == (
        "toy.toml:12:1: 'trunk.emb.weight' -> 'emb.weight': the checkpoint has bfloat16, the module float32 "
        "(declare the cast: dtype=torch.float32, or cast the module first) [dtype-change]"
    )
    assert faults[1].startswith("toy.toml:13:1: 'trunk.l.0.q.weight' -> 'l.0.qkv': ")
    assert "(and 2 more like it; declare" in faults[1]
    assert plan(with_dtype(torch.bfloat16), into, dtype=torch.float32).dtype == torch.float32


def test_sources_of_two_dtypes_need_a_declared_one() -> None:
    mixed = with_dtype(torch.float16, "trunk.l.0.k.weight")
    assert refused(mixed) == [
        (
            "toy.toml:13:1: 'trunk.l.0.q.weight' -> 'l.0.qkv': the sources are float16 and float32, and one tensor has "
            "one dtype (say which: dtype=) [dtype-change]"
        )
    ]
    plan(mixed, dtype=torch.float32)
