"""Builders that ask for sizes by names that say nothing: shapes tell, or the user does."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from porting.build import Bounds
from porting.errors import PortingWarning
from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.building import UnknownSizesError, build_for, fields_asked, with_fields
from porting.suggesting.subjects.config_fields import field_for
from porting.suggesting.subjects.solved_sizes import (
    better_sizes,
    better_switches,
    sizes_by_default,
    solved_sizes,
    told_apart,
    untold,
)
from porting.suggesting.subjects.twin import draw_parameters
from porting.suggesting.verdict.judgement import _unless_guessed
from porting.suggesting.verdict.suggestion import Reason
from porting.target import TargetError

FIELDS = {
    "vocab_size": 53, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "num_hidden_layers": 2,
    "max_position_embeddings": 31, "type_vocab_size": 2,
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (self.mix[i](x).unflatten(2, (self.heads, -1)).transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.mix[3](y))
        found: Tensor = self.norms[1](x + self.down(F.gelu(self.up(x))))
        return found


class Encoder(nn.Module):
    """BERT's encoder; its sizes have the names of the alphabet."""

    def __init__(self, a: int, b: int, c: int, dd: int, ee: int, ff: int, gg: int) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(rows, b) for rows in (a, c, dd))
        self.norm = nn.LayerNorm(b, eps=1e-12)
        self.layers = nn.ModuleList(Layer(b, ee, ff) for _ in range(gg))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        places = self.places.weight[: input_ids.shape[1]]
        x: Tensor = self.norm(self.words(input_ids) + places + self.kinds(token_type_ids))
        for layer in self.layers:
            x = layer(x, attention_mask[:, None, None].bool())
        return x


class Short(Encoder):
    """The same with names that are cut off."""

    def __init__(self, d: int, nseg: int, npos: int, voc: int, *, nh: int, mid: int, deep: int) -> None:
        super().__init__(voc, d, npos, nseg, nh, mid, deep)


def from_dict(config: Mapping[str, Any]) -> nn.Module:
    return Encoder(**config)


EXPECTED = {
    Encoder: dict(zip(("a", "b", "c", "dd", "ee", "ff", "gg"), (
        "vocab_size", "hidden_size", "max_position_embeddings", "type_vocab_size", "num_attention_heads",
        "intermediate_size", "num_hidden_layers",
    ), strict=True)),
    Short: {
        "d": "hidden_size", "nseg": "type_vocab_size", "npos": "max_position_embeddings", "voc": "vocab_size",
        "nh": "num_attention_heads", "mid": "intermediate_size", "deep": "num_hidden_layers",
    },
}  # fmt: skip


def reference() -> nn.Module:
    made: nn.Module = transformers.BertModel(transformers.BertConfig(**FIELDS))  # type: ignore[arg-type]  # its fields
    return made


@pytest.mark.parametrize("builder", [Encoder, Short])
def test_shapes_tell_which_size_is_meant(builder: type[nn.Module]) -> None:
    shapes = [tuple(one.shape) for one in reference().state_dict().values()]
    fields = solved_sizes(builder, list(EXPECTED[builder]), FIELDS, shapes)
    assert fields == EXPECTED[builder]
    assert build_for(with_fields(builder, fields, FIELDS), FIELDS).asked == fields


class OfPaper(Encoder):
    """Named as in BERT's paper: L, H and A are layers, hidden size and attention heads, which others call h."""

    def __init__(self, L: int, H: int, A: int, V: int, f: int, max_len: int, types: int) -> None:  # noqa: N803  # the names of the paper
        super().__init__(V, H, max_len, types, A, f, L)


def test_letters_stand_for_the_first_letters_of_usual_names() -> None:
    shapes = [tuple(one.shape) for one in reference().state_dict().values()]
    with pytest.raises(UnknownSizesError, match="'A'") as caught:
        build_for(OfPaper, FIELDS)
    assert caught.value.asked["H"] == "num_attention_heads"  # its usual meaning, until shapes tell
    fields = solved_sizes(OfPaper, caught.value.names, FIELDS, shapes, asked=caught.value.asked)
    assert fields is not None
    told = {**caught.value.asked, **fields}
    assert {name: told[name] for name in "LHAVf"} == {
        "L": "num_hidden_layers", "H": "hidden_size", "A": "num_attention_heads", "V": "vocab_size",
        "f": "intermediate_size",
    }  # fmt: skip


class OfPaperByDefault(OfPaper):
    """The same with the sizes of bert-base in the place of those that it is not given."""

    def __init__(
        self,
        max_len: int,
        types: int,
        f: int,
        L: int = 12,  # noqa: N803  # as above
        H: int = 768,  # noqa: N803
        A: int = 12,  # noqa: N803
        V: int = 30522,  # noqa: N803
    ) -> None:
        super().__init__(L, H, A, V, f, max_len, types)


def test_a_letter_stands_for_the_number_of_heads_where_no_shape_tells() -> None:
    shapes = [tuple(one.shape) for one in reference().state_dict().values()]
    given = {"max_len": "max_position_embeddings", "types": "type_vocab_size", "f": "intermediate_size"}
    builder = with_fields(OfPaperByDefault, given, FIELDS)
    first = build_for(builder, FIELDS)
    told = {**first.asked, **better_sizes(builder, first, FIELDS, shapes)}
    assert {name: told[name] for name in "LHAV"} == {
        "L": "num_hidden_layers", "H": "hidden_size", "A": "num_attention_heads", "V": "vocab_size",
    }  # fmt: skip


class Switched(nn.Module):
    """Its config says whether it has biases, a pooler and a table that the reference lacks."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.trunk = Encoder(*(config[name] for name in FIELDS_OF_THE_TRUNK))
        if not config["qkv_bias"]:
            for layer in self.trunk.layers:
                for one in layer.mix[:3]:  # type: ignore[index]  # a layer's
                    one.bias = None
        self.pooler = nn.Linear(config["hidden_size"], config["hidden_size"]) if config["with_pooler"] else None
        self.extra = nn.Embedding(7, 11) if config["use_extra_table"] else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Any:
        x = self.trunk(input_ids, attention_mask, token_type_ids)
        return x if self.pooler is None else (x, self.pooler(x[:, 0]).tanh())


FIELDS_OF_THE_TRUNK = (
    "vocab_size", "hidden_size", "max_position_embeddings", "type_vocab_size", "num_attention_heads",
    "intermediate_size", "num_hidden_layers",
)  # fmt: skip


def switched(config: Mapping[str, Any]) -> nn.Module:
    return Switched(config)


def test_shapes_tell_whether_something_is_there() -> None:
    shapes = [tuple(one.shape) for one in reference().state_dict().values()]
    off = dict.fromkeys(("qkv_bias", "with_pooler", "use_extra_table"), False)
    found = better_switches(with_fields(switched, off, FIELDS), list(off), FIELDS, shapes)
    assert found == {"qkv_bias": "true", "with_pooler": "true"}
    with pytest.raises(UnknownSizesError, match="'qkv_bias'"):
        build_for(switched, FIELDS)


@pytest.mark.slow
def test_what_is_there_stands_in_the_table_and_is_proven(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = reference()
    draw_parameters(model, 0)
    model.save_pretrained(tmp_path)
    with pytest.warns(PortingWarning, match="qkv_bias = true"):
        found = suggest(tmp_path, switched)
    assert found.verdict is Verdict.EXACT, str(found)
    assert found.table.constants == {"qkv_bias": True, "with_pooler": True, "use_extra_table": False}
    assert (
        suggest(tmp_path, switched, config={"qkv_bias": True, "with_pooler": True, "use_extra_table": False}).verdict
        is Verdict.EXACT
    )


class Neck(nn.Module):
    """Sizes that no usual name is known for: one of a field of its own, one that is the first stage's."""

    def __init__(self, hidden_size: int, out_chans: int, stem: int, convs: tuple[int, ...] = (512, 512)) -> None:
        super().__init__()
        self.neck = nn.Conv2d(hidden_size, out_chans, 1)
        self.stem = nn.Conv2d(3, stem, 4)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 2) for width in convs)


NECK: Mapping[str, object] = {
    "hidden_size": 24, "output_channels": 16, "hidden_sizes": [10, 20], "conv_dim": [6, 7, 9], "num_labels": 5,
    "image_size": 32,
}  # fmt: skip

NECK_SHAPES = [(16, 24, 1, 1), (16,), (10, 3, 4, 4), (10,)] + [shape for n in (6, 7, 9) for shape in ((n, n, 2), (n,))]


def test_shapes_tell_fields_without_a_usual_name_those_of_a_stage_and_lists() -> None:
    fields = solved_sizes(Neck, ["out_chans", "stem"], NECK, NECK_SHAPES)
    assert fields == {"out_chans": "output_channels", "stem": "hidden_sizes.0"}
    named = with_fields(Neck, fields, NECK)
    built = build_for(named, NECK)
    assert better_sizes(named, built, NECK, NECK_SHAPES) == {"convs": "conv_dim"}


class TwoWidths(Encoder):
    """Both names are usual ones of the width; beside ``dim``, ``hidden_size`` is that of the feed-forward part."""

    def __init__(self, vocab_size: int, dim: int, hidden_size: int, max_len: int, types: int, heads: int, layers: int):
        super().__init__(vocab_size, dim, max_len, types, heads, hidden_size, layers)


def test_of_two_names_for_one_field_one_may_be_another_size() -> None:
    shapes = [tuple(one.shape) for one in reference().state_dict().values()]
    named = with_fields(TwoWidths, {"types": "type_vocab_size"}, FIELDS)
    built = build_for(named, FIELDS)
    assert built.asked["dim"] == built.asked["hidden_size"] == "hidden_size"
    assert better_sizes(named, built, FIELDS, shapes) == {"hidden_size": "intermediate_size"}


class Layered(nn.Module):
    """Builds a layer after the other; it counts them."""

    most = 0

    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number in range(n):
            type(self).most = max(number, type(self).most)
            self.layers.append(nn.Linear(width, width))


class Patches(nn.Module):
    """Height and width of images and patches by themselves, and a norm over a patch's pixels, which fits nothing."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        pixels = 3 * config["patch_height"] * config["patch_width"]
        count = (config["image_height"] // config["patch_height"]) * (config["image_width"] // config["patch_width"])
        self.embed = nn.Sequential(nn.LayerNorm(pixels), nn.Linear(pixels, config["emb_dim"]))
        self.positions = nn.Parameter(torch.zeros(1, count + 1, config["emb_dim"]))


def test_the_two_sides_of_a_square_are_one_size() -> None:
    config = {"image_size": 12, "patch_size": 4, "hidden_size": 40, "num_attention_heads": 5, "num_channels": 3}
    shapes = [(40, 3, 4, 4), (40,), (1, 10, 40), (40, 40)]
    first = build_for(Patches, config)
    assert {first.asked[f"image_{side}"] for side in ("height", "width")} == {"image_size"}
    assert better_sizes(Patches, first, config, shapes) == {}


def test_what_is_built_with_a_wrong_size_is_no_larger_than_could_be_meant() -> None:
    config = {"hidden_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 10**6, "vocab_size": 10**5}
    shapes = [shape for _ in range(2) for shape in ((24, 24), (24,))]
    assert solved_sizes(Layered, ["n"], config, shapes, asked={"width": "hidden_size"}) == {"n": "num_hidden_layers"}
    assert Layered.most < 1000


class Defaults(Encoder):
    """Each size has a default, of another checkpoint."""

    def __init__(
        self, a: int = 99, b: int = 32, c: int = 17, dd: int = 3, ee: int = 4, ff: int = 64, gg: int = 5
    ) -> None:
        super().__init__(a, b, c, dd, ee, ff, gg)


class Letters(Encoder):
    """Letters that other projects use for other sizes: k is a width in one, h a number of heads in another."""

    def __init__(self, k: int, h: int, c: int = 17, dd: int = 3, d: int = 4, n: int = 64, m: int = 5) -> None:
        super().__init__(k, h, c, dd, d, n, m)


@dataclass
class Sizes:
    vocab_size: int = 99
    width: int = 32
    c: int = 17
    dd: int = 3
    heads: int = 4
    ff: int = 64
    gg: int = 5


class OfSizes(Encoder):
    def __init__(self, config: Sizes) -> None:
        super().__init__(*(getattr(config, one.name) for one in fields(config)))


class Fused(nn.Module):
    """One projection for the queries and for fewer heads of keys and values; its shape is not a tensor's."""

    def __init__(self, vocab_size: int, d: int = 64, h: int = 8, k: int = 2, multiple_of: int = 16) -> None:
        super().__init__()
        size = d // h
        inner = multiple_of * math.ceil(40 / multiple_of)
        self.words, self.qkv = nn.Embedding(vocab_size, d), nn.Linear(d, (h + 2 * k) * size)
        self.out, self.norm = nn.Linear(d, d, bias=False), nn.LayerNorm(d, bias=False)
        self.up = nn.Linear(d, inner)


GROUPED = {"vocab_size": 53, "hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 4, "layers": 2}

GROUPED_SHAPES = [(53, 24), (24, 24), (24,), (8, 24), (8,), (8, 24), (8,), (24, 24), (24,), (48, 24), (48,)]


@pytest.mark.parametrize("builder", [Defaults, Letters, OfSizes])
def test_what_was_taken_for_another_size_or_kept_its_default_is_told_by_shapes(builder: type[nn.Module]) -> None:
    shapes = [tuple(one.shape) for one in reference().state_dict().values()]
    first = build_for(builder, FIELDS)
    told = {**first.asked, **better_sizes(builder, first, FIELDS, shapes)}
    expected = dict(zip(parameters(builder), EXPECTED[Encoder].values(), strict=True))
    shown = {ours: theirs for ours, theirs in expected.items() if theirs != "num_attention_heads"}  # in no shape
    assert {ours: theirs for ours, theirs in told.items() if theirs != "num_attention_heads"} == shown
    built = build_for(with_fields(builder, told, FIELDS), FIELDS).module
    assert {tuple(one.shape) for one in built.parameters()} <= set(shapes)


def parameters(builder: type[nn.Module]) -> list[str]:
    return [one.name for one in fields(Sizes)] if builder is OfSizes else list(inspect.signature(builder).parameters)


class OfOwnWords(Encoder):
    """Its defaults are the checkpoint's sizes; ``lanes`` are its heads, which no shape shows."""

    def __init__(self, n: int = 53, wide: int = 24, longest: int = 31, kinds: int = 2, lanes: int = 3, deep: int = 2):
        super().__init__(n, wide, longest, kinds, lanes, 40, deep)


class OfTwoThrees(OfOwnWords):
    """Its windows are as long as it has heads: the name says that they are something else."""

    def __init__(self, n: int = 53, wide: int = 24, longest: int = 31, kinds: int = 2, sliding_window: int = 3):
        super().__init__(n, wide, longest, kinds, 4, 2)


class OfHeadsAndEights(OfOwnWords):
    """It is given its heads; eight of something else are not their size."""

    def __init__(
        self, n: int = 53, wide: int = 24, longest: int = 31, kinds: int = 2, n_heads: int = 3, steps: int = 8
    ):
        super().__init__(n, wide, longest, kinds, n_heads, 2)


class OfOtherSizes(Encoder):
    """It is made for another checkpoint, whose sizes are its defaults: three of anything are no heads."""

    def __init__(self, n: int = 999, wide: int = 48, longest: int = 64, kinds: int = 9, lanes: int = 3, deep: int = 7):
        super().__init__(n, wide, longest, kinds, lanes, 40, deep)


class OfFewerHeads(Encoder):
    """Its default number of heads is another one than the checkpoint's, and the number of another thing."""

    def __init__(self, n: int = 53, wide: int = 24, longest: int = 31, kinds: int = 2, n_heads: int = 2, deep: int = 2):
        super().__init__(n, wide, longest, kinds, n_heads, 40, deep)


class Swapped(nn.Module):
    """Two sizes of which shapes say only that they are two."""

    def __init__(self, vocab_size: int = 53, hidden_size: int = 24, inner: int = 40, state: int = 5, rank: int = 3):
        super().__init__()
        self.words, self.up = nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, inner)
        self.first, self.second = nn.Linear(hidden_size, state), nn.Linear(hidden_size, rank)


def test_a_default_that_is_the_checkpoint_s_tells_what_no_shape_tells() -> None:
    small = {**FIELDS, "hidden_size": 40, "num_attention_heads": 5, "vocab_size": 71, "max_position_embeddings": 19}

    small["head_dim"] = 9

    def told(into: type[nn.Module], asked: Mapping[str, str]) -> dict[str, str]:
        given = with_fields(into, asked, small)
        shapes = [one.shape for one in Encoder(71, 40, 19, 2, 5, 40, 2).parameters()]
        return sizes_by_default(given, build_for(given, small).asked, small, shapes, FIELDS | {"head_dim": 8})

    asked = {"n": "vocab_size", "wide": "hidden_size", "longest": "max_position_embeddings", "kinds": "type_vocab_size"}
    assert told(OfOwnWords, asked) == {"lanes": "num_attention_heads"}
    assert told(OfOwnWords, {**asked, "lanes": "num_attention_heads"}) == {}
    assert told(OfOtherSizes, asked) == {}
    assert told(OfTwoThrees, asked) == {}
    assert told(OfHeadsAndEights, asked | {"n_heads": "num_attention_heads"}) == {}
    heads = {"n_heads": "num_attention_heads"}
    assert told(OfFewerHeads, asked | heads) == {}
    assert told(OfFewerHeads, asked | heads | {"kinds": "num_attention_heads"}) == {"kinds": "type_vocab_size"}


class Towers(nn.Module):
    """``image_width`` is no picture's width."""

    def __init__(
        self,
        vocab_size: int = 53,
        text_width: int = 24,
        text_heads: int = 3,
        image_size: int = 16,
        image_width: int = 40,
        image_heads: int = 5,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, text_width)
        self.text, self.image = (
            nn.MultiheadAttention(text_width, text_heads),
            nn.MultiheadAttention(image_width, image_heads),
        )


def test_a_name_that_was_misunderstood_is_told_by_its_default_where_nothing_can_be_built() -> None:
    def config(words: int, width: int, heads: int, side: int, wide: int, some: int) -> dict[str, object]:
        text = {"vocab_size": words, "hidden_size": width, "num_attention_heads": heads}
        return {
            "text_config": text,
            "vision_config": {"image_size": side, "hidden_size": wide, "num_attention_heads": some},
        }

    small = config(31, 20, 5, 13, 28, 7)
    with pytest.raises(TargetError):
        build_for(Towers, small)
    shapes = [one.shape for one in Towers(31, 20, 5, 13, 28, 7).parameters()]
    found = sizes_by_default(Towers, fields_asked(Towers, small), small, shapes, config(53, 24, 3, 16, 40, 5))
    assert found == {"image_width": "vision_config.hidden_size"}


class Frames(nn.Module):
    """A builder of sounds that asks for frames, of which two are one place."""

    def __init__(self, vocab_size: int = 53, d_model: int = 24, inner: int = 40, frames: int = 30) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, inner)
        self.places = nn.Embedding(frames // 2, d_model)


def test_frames_are_two_for_each_place_of_a_sound() -> None:
    def config(words: int, width: int, inner: int, places: int) -> dict[str, object]:
        sizes = {"vocab_size": words, "d_model": width, "encoder_ffn_dim": inner, "decoder_ffn_dim": inner}
        return {**sizes, "max_source_positions": places, "num_mel_bins": 8}

    small = config(31, 20, 40, 13)
    asked = {"vocab_size": "vocab_size", "d_model": "d_model", "inner": "encoder_ffn_dim", "frames": "decoder_ffn_dim"}
    given = with_fields(Frames, asked, small)
    shapes = [one.shape for one in Frames(31, 20, 40, 26).parameters()]
    assert sizes_by_default(given, asked, small, shapes, config(53, 24, 40, 15)) == {
        "frames": "2 * max_source_positions"
    }


def test_of_two_sizes_that_were_taken_for_each_other_the_defaults_tell_which_is_which() -> None:
    usual = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 40}
    checkpoint = {**usual, "state_size": 5, "time_step_rank": 3}
    small = {**usual, "state_size": 2, "time_step_rank": 7}
    asked = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "inner": "intermediate_size"}
    asked |= {"state": "time_step_rank", "rank": "state_size"}
    given = with_fields(Swapped, asked, small)
    shapes = [one.shape for one in Swapped(53, 24, 40, 2, 7).parameters()]
    found = sizes_by_default(given, build_for(given, small).asked, small, shapes, checkpoint)
    assert found == {"state": "state_size", "rank": "time_step_rank"}
    right = with_fields(Swapped, {**asked, **found}, small)
    assert sizes_by_default(right, build_for(right, small).asked, small, shapes, checkpoint) == {}


def test_the_count_of_numbers_tells_the_sizes_of_fused_tensors_and_other_numbers_stay() -> None:
    first = build_for(Fused, GROUPED)
    told = {**first.asked, **better_sizes(Fused, first, GROUPED, GROUPED_SHAPES)}
    assert {name: told.get(name) for name in "dhk"} == {
        "d": "hidden_size", "h": "num_attention_heads", "k": "num_key_value_heads",
    }  # fmt: skip
    assert "multiple_of" not in told


def test_what_no_module_can_be_built_with_is_told_by_nothing() -> None:
    def picky(d: int) -> nn.Module:
        raise ValueError(f"{d} is not to my liking")

    assert solved_sizes(picky, ["d"], FIELDS, [(24, 24)]) is None


@pytest.mark.parametrize("builder", [Encoder, from_dict])
def test_the_message_names_what_is_asked_for_and_how_it_is_told(builder: Any) -> None:
    with pytest.raises(UnknownSizesError, match="'a', 'b', 'c', 'dd'") as caught:
        build_for(builder, FIELDS)
    assert "config={" in str(caught.value)
    assert caught.value.names[:3] == ("a", "b", "c")


def test_fields_that_are_named_come_first() -> None:
    fields = {**EXPECTED[Encoder], "dd": "num_hidden_layers"}
    assert build_for(with_fields(from_dict, fields, FIELDS), FIELDS).asked == fields


def test_a_field_that_is_not_there_and_a_module_that_is_built() -> None:
    with pytest.raises(TargetError, match="did you mean 'hidden_size'"):
        with_fields(Encoder, {"b": "hiden_size"}, FIELDS)
    with pytest.raises(TargetError, match="built already"):
        with_fields(nn.Linear(2, 2), {"b": "hidden_size"}, FIELDS)


def divided(config: Mapping[str, Any]) -> nn.Module:
    """Reads a field that no config has, and whose value changes no tensor."""
    assert config["hidden_size"] % config["heads_per_island"] == 0
    names = ("vocab_size", "hidden_size", "max_position_embeddings", "type_vocab_size", "num_attention_heads")
    return Encoder(*(config[name] for name in (*names, "intermediate_size", "num_hidden_layers")))


@pytest.mark.slow
def test_a_size_that_nothing_tells_is_said_and_the_proof_decides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = reference()
    draw_parameters(model, 0)
    model.save_pretrained(tmp_path)
    with pytest.warns(PortingWarning, match="heads_per_island = type_vocab_size: config= says otherwise"):
        found = suggest(tmp_path, divided)
    assert found.verdict in (Verdict.EXACT, Verdict.TRUNK), str(found)
    with pytest.raises(TargetError, match="building the module failed: AssertionError"):
        suggest(tmp_path, divided, config={"heads_per_island": "vocab_size"})


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, EXPECTED[Encoder]])
def test_the_table_says_what_was_meant_and_is_proven(tmp_path: Path, config: dict[str, str] | None) -> None:
    torch.manual_seed(0)
    model: Any = reference()
    draw_parameters(model, 0)
    model.save_pretrained(tmp_path)
    if config is None:
        with pytest.warns(PortingWarning, match="b = hidden_size"):
            found = suggest(tmp_path, from_dict)
    else:
        found = suggest(tmp_path, from_dict, config=config)
    assert found.verdict in (Verdict.EXACT, Verdict.TRUNK), str(found)
    assert 'hidden_size = "b"' in found.text
    assert 'num_attention_heads = "ee"' in found.text


class WithFactor(nn.Module):
    """Rounds its inner width up, as Llama's own code does, which has a factor for its largest models alone."""

    def __init__(self, dim: int = 8, multiple_of: int = 32, ffn_dim_multiplier: float | None = None) -> None:
        super().__init__()
        width = int(4 * dim * 2 / 3 * (1 if ffn_dim_multiplier is None else ffn_dim_multiplier))
        self.up = nn.Linear(dim, -(-width // multiple_of) * multiple_of)


class WithRatio(nn.Module):
    def __init__(self, dim: int = 8, mlp_ratio: int = 2) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim * mlp_ratio)


class WithFloatRatio(nn.Module):
    def __init__(self, dim: int = 8, mlp_ratio: float = 4.0, drop: float = 0.5) -> None:
        super().__init__()
        self.up = nn.Linear(dim, int(dim * mlp_ratio))
        assert drop == 0.5


def test_a_config_without_sizes_of_its_own_tells_nothing() -> None:
    nested: Mapping[str, object] = {"text_config": {"hidden_size": 24}, "model_type": "two_towers"}
    assert solved_sizes(Encoder, ["a", "b"], nested, [(24, 24)]) is None


def test_a_ratio_of_two_sizes_is_given_where_its_default_is_a_float() -> None:
    config = {"hidden_size": 24, "intermediate_size": 72}
    built = build_for(WithFloatRatio, config)
    assert "mlp_ratio" in built.kept
    ratio = {"mlp_ratio": "intermediate_size // hidden_size"}
    assert better_sizes(WithFloatRatio, built, config, [(72, 24), (72,)]) == ratio
    assert better_sizes(WithFloatRatio, built, config, [(96, 24), (96,)]) == {}


def test_a_factor_that_may_be_left_out_is_no_ratio_of_two_sizes() -> None:
    config = {"hidden_size": 24, "intermediate_size": 64}
    built = build_for(WithFactor, config)
    assert built.asked == {"dim": "hidden_size"}
    assert next(built.module.parameters()).shape == (64, 24)
    config = {"hidden_size": 24, "intermediate_size": 72}
    assert next(build_for(WithRatio, config).module.parameters()).shape == (72, 24)


class Biased(nn.Module):
    """Queries, keys and values apart, where the reference has one matrix and one bias for the three."""

    def __init__(self, hidden_size: int, num_hidden_layers: int, qkv_bias: bool = False) -> None:
        super().__init__()
        made = (nn.Linear(hidden_size, hidden_size, bias=qkv_bias) for _ in range(3 * num_hidden_layers))
        self.layers = nn.ModuleList(made)


@pytest.mark.parametrize(("biases", "found"), [([(72,), (72,)], {"qkv_bias": "true"}), ([], {})])
def test_a_bias_that_one_side_has_in_one_tensor_is_there(biases: list[tuple[int]], found: dict[str, str]) -> None:
    shapes = [(24, 72), (24, 72), *biases]
    assert better_switches(Biased, ["qkv_bias"], FIELDS, shapes) == found


class Rounded(nn.Module):
    """A feed-forward part whose width is a share of the model's, rounded up to a multiple, and fused projections."""

    def __init__(
        self, vocab_size: int, dim: int, nheads: int, kvheads: int = 0, grow: float = 4.0, multiple_of: int = 256
    ) -> None:
        super().__init__()
        inner = multiple_of * math.ceil(int(dim * grow) / multiple_of)
        self.words, self.out = nn.Embedding(vocab_size, dim), nn.Linear(dim, dim, bias=False)
        self.qkv = nn.Linear(dim, (nheads + 2 * (kvheads or nheads)) * (dim // nheads), bias=False)
        self.up, self.down = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)


class Halved(nn.Module):
    """A ratio that says how wide the gate and what it opens are together."""

    def __init__(self, vocab_size: int, dim: int, mlp_ratio: int = 8) -> None:
        super().__init__()
        inner = mlp_ratio * dim // 2
        self.words, self.qkv = nn.Embedding(vocab_size, dim), nn.Linear(dim, 2 * dim, bias=False)
        self.out, self.up = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * inner, bias=False)
        self.down = nn.Linear(inner, dim, bias=False)


class MultiQuery(nn.Module):
    """One head of keys and values, whatever the config says of them."""

    def __init__(self, vocab_size: int, dim: int, nheads: int, num_kv_heads: int = 1) -> None:
        super().__init__()
        size = dim // nheads
        self.words, self.query = nn.Embedding(vocab_size, dim), nn.Linear(dim, dim, bias=False)
        self.pair, self.out = nn.Linear(dim, 2 * num_kv_heads * size, bias=False), nn.Linear(dim, dim, bias=False)


GATED = {
    "vocab_size": 53, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 72,
}  # fmt: skip

GATED_SHAPES = [(53, 24), (24, 24), (12, 24), (12, 24), (24, 24), (72, 24), (72, 24), (24, 72)]


@pytest.mark.parametrize(
    ("builder", "config", "shapes", "expected"),
    [
        (Rounded, GATED, GATED_SHAPES, {"grow": "intermediate_size // hidden_size", "multiple_of": "1"}),
        (Halved, GATED, GATED_SHAPES, {"mlp_ratio": "2 * intermediate_size // hidden_size"}),
        (
            MultiQuery,
            {**GATED, "num_kv_heads": 6},
            [(53, 24), (32, 24), (24, 24)],  # queries of all heads, and a key and a value
            {"num_kv_heads": "1"},
        ),
    ],
)
def test_what_is_no_field_alone_is_told_by_how_many_numbers_there_are(
    builder: type[nn.Module], config: Mapping[str, object], shapes: list[tuple[int, ...]], expected: dict[str, str]
) -> None:
    first = build_for(builder, config)
    found = better_sizes(builder, first, config, shapes)
    assert found == expected
    built = build_for(with_fields(builder, found, config), config)
    assert sum(one.numel() for one in built.module.parameters()) == sum(math.prod(one) for one in shapes)
    assert field_for("kvheads", config) is not None


class Projected(nn.Module):
    def __init__(self, vocab_size: int, embed_dim: int, width: int) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, embed_dim, bias=False)


def test_two_names_for_one_field_are_told_apart_by_the_checkpoint_s_shapes() -> None:
    """The small model has both sizes alike."""
    config = {"vocab_size": 53, "hidden_size": 24, "projection_dim": 16, "num_hidden_layers": 2}
    asked = {"vocab_size": "vocab_size", "embed_dim": "hidden_size", "width": "hidden_size"}
    small = {**config, "hidden_size": 16}
    shapes = [(53, 24), (16, 24)]
    found = told_apart(Projected, asked, config, shapes, small, Bounds(parameters=100, nbytes=1 << 20))
    assert found == {"embed_dim": "projection_dim"}
    alone = {"vocab_size": "vocab_size", "embed_dim": "projection_dim", "width": "hidden_size"}
    assert told_apart(Projected, alone, config, shapes, small, Bounds(parameters=100, nbytes=1 << 20)) == {}


class Prefixed(nn.Module):
    """A tower whose config counts the layers of two."""

    def __init__(self, vit_hidden_dim: int = 8, vit_n_blocks: int = 4, lm_n_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(vit_hidden_dim, vit_hidden_dim) for _ in range(vit_n_blocks))
        self.others = lm_n_blocks


def test_a_number_of_layers_is_none_of_channels_though_the_shapes_of_one_more_are_there() -> None:
    config = {"hidden_size": 24, "num_hidden_layers": 2, "num_channels": 3}
    built = build_for(Prefixed, config)
    assert built.asked["vit_n_blocks"] == "num_hidden_layers"
    shapes = [(24, 24), (24,)] * 3  # a head has the shapes of a layer
    assert better_sizes(Prefixed, built, config, shapes) == {}
    within = Bounds(parameters=10_000, nbytes=2**20)
    assert told_apart(Prefixed, built.asked, config, shapes, config, within) == {}


def factor_of(vocab_size: int, d_model: int, strange: float, heads: int) -> nn.Module:
    """Of its sizes the last two are in no shape; that of the heads has a usual name."""
    made = nn.Sequential(nn.Embedding(vocab_size, d_model), nn.Linear(d_model, d_model))
    made.strange, made.heads = strange, heads  # type: ignore[assignment]  # numbers of its own
    return made


def test_what_no_shape_shows_is_a_guess() -> None:
    config = {"vocab_size": 97, "hidden_size": 24, "num_attention_heads": 4}
    within = Bounds(parameters=1000, nbytes=1 << 20)
    fields = {"strange": "vocab_size", "heads": "num_attention_heads", "d_model": "hidden_size"}
    assert untold(with_fields(factor_of, fields, config), fields, config, within) == ["strange"]
    assert untold(factor_of, [], config, within) == []


def test_a_number_that_is_a_guess_makes_nothing_impossible() -> None:
    """A part that is missing does, whatever the number is."""
    named = Reason(kind="positions", said="rotary scaling", shown=True, cause="rotary scaling")
    small = Reason(kind="norms", said="eps", size=1e-6, cause="LayerNorm eps")
    missing = Reason(kind="bias", said="no bias", shown=True)
    guessed = _unless_guessed([named, small], ["strange"])
    assert [one.kind for one in guessed] == ["guess", "positions", "norms"]
    assert not any(one.shown for one in guessed)
    assert _unless_guessed([named, missing], ["strange"]) == [named, missing]
    assert _unless_guessed([named], []) == [named]
    assert _unless_guessed([small], ["strange"]) == [small]


def test_a_config_is_given_as_a_dictionary_as_transformers_gives_it() -> None:
    def build(text_config: Any) -> nn.Module:
        sizes = text_config if isinstance(text_config, dict) else text_config.to_dict()
        return nn.Linear(sizes["hidden_size"], sizes["hidden_size"])

    def read(config: Any) -> nn.Module:
        return nn.Linear(config.to_dict()["hidden_size"], config.hidden_size)

    inner = {"hidden_size": 6, "num_hidden_layers": 2}
    for builder, config in ((build, {"text_config": inner}), (read, inner)):
        made = build_for(builder, config).module
        assert isinstance(made, nn.Linear)
        assert made.in_features == 6
