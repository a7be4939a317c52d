"""``porting suggest`` on public scratch models: whoever runs this fetches them, they are no part of the repository.

    git clone https://github.com/karpathy/minGPT models/minGPT      # and so on, all into one folder
    python -m scripts.suggest_public models                         # every model that is there
    python -m scripts.suggest_public models minGPT nanoGPT          # some

Each gets a small checkpoint of the architecture that it says it is, with every parameter drawn.  A recipe is what a
user would write to hand the model over: a function that builds it from a config, and nothing about its tensors.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import MagicMock

import torch
import transformers
import typer
from torch import Tensor, nn

from porting.errors import PortingError
from porting.suggesting import Suggestion, Verdict, suggest
from porting.suggesting.twin import draw

GPT2 = {"vocab_size": 113, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 40}
BERT = {
    "vocab_size": 113,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 40,
}
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "intermediate_size": 256,
    "image_size": 24,
    "patch_size": 8,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A public model and what is right to say of it.

    Attributes:
        folder: of its clone.
        make: gives the builder, with the clone on the path.
        architecture, fields: of the checkpoint.
        verdict: the right verdict.
        reason: a part of the right reason; empty where there is none.
    """

    folder: str
    make: Callable[[], Callable[..., nn.Module]]
    architecture: str
    fields: Mapping[str, object]
    verdict: Verdict
    reason: str = ""


def without(*names: str) -> None:
    """Stand-ins for what a clone imports and what its model does not need."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = MagicMock(__spec__=None, __path__=[])


def min_gpt() -> Callable[..., nn.Module]:
    """GPT-2 with nn.Linear in the place of Conv1D, and a head of its own."""
    model = importlib.import_module("mingpt.model")

    def build(config: Any) -> nn.Module:  # a config with GPT-2's fields
        mine = model.GPT.get_default_config()
        mine.model_type, mine.vocab_size, mine.block_size = None, config.vocab_size, config.n_positions
        mine.n_layer, mine.n_head, mine.n_embd = config.n_layer, config.n_head, config.n_embd
        made: nn.Module = model.GPT(mine)
        return made

    return build


def nano_gpt() -> Callable[..., nn.Module]:
    """GPT-2 with a tied head; it has the exact GELU where GPT-2 has the tanh approximation."""
    model = importlib.import_module("model")

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, block_size: int) -> nn.Module:
        mine = model.GPTConfig(
            block_size=block_size, vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=0.0
        )
        made: nn.Module = model.GPT(mine)
        return made

    return build


def graykode() -> Callable[..., nn.Module]:
    """GPT-2 as in the days of pytorch-pretrained-BERT."""
    model, config = (importlib.import_module(f"GPT2.{name}") for name in ("model", "config"))

    def build(vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> nn.Module:
        mine = config.GPT2Config(vocab_size, n_positions, n_positions, n_embd, n_layer, n_head)
        made: nn.Module = model.GPT2LMHeadModel(mine)
        made.set_tied()  # type: ignore[operator]  # as its main.py does
        return made

    return build


def former() -> Callable[..., nn.Module]:
    """A post-norm language model without biases in its attention."""
    without("torch.utils.tensorboard")
    made: Callable[..., nn.Module] = importlib.import_module("former").GTransformer
    return made


def simple_bert() -> Callable[..., nn.Module]:
    """BERT."""
    models = importlib.import_module("simple_bert_pytorch.models.bert")

    def build(vocab_size: int, dim: int, num_heads: int, num_layers: int, intermediate_size: int) -> nn.Module:
        made: nn.Module = models.Bert(
            vocab_size=vocab_size,
            dim=dim,
            num_heads=num_heads,
            num_layers=num_layers,
            intermediate_size=intermediate_size,
        )
        return made

    return build


def clip_vision() -> Callable[..., nn.Module]:
    """CLIP's image tower."""
    without("torchvision", "torchvision.transforms", "ftfy", "regex")
    model = importlib.import_module("clip.model")

    def build(config: Any) -> nn.Module:  # a config with CLIP's fields
        made: nn.Module = model.VisionTransformer(
            config.image_size, config.patch_size, config.hidden_size, config.num_hidden_layers,
            config.num_attention_heads, config.projection_dim,
        )  # fmt: skip
        return made

    return build


def clip_text() -> Callable[..., nn.Module]:
    """CLIP's text tower, whose forward is a method of another name."""
    without("torchvision", "torchvision.transforms", "ftfy", "regex")
    model = importlib.import_module("clip.model")

    class Text(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            whole = model.CLIP(
                config.projection_dim, 32, 1, 64, 8, config.max_position_embeddings, config.vocab_size,
                config.hidden_size, config.num_attention_heads, config.num_hidden_layers,
            )  # fmt: skip
            self.transformer, self.token_embedding, self.ln_final = (
                whole.transformer, whole.token_embedding, whole.ln_final,
            )  # fmt: skip
            self.positional_embedding, self.text_projection = whole.positional_embedding, whole.text_projection

        def forward(self, text: Tensor) -> Tensor:
            x = (self.token_embedding(text) + self.positional_embedding[: text.shape[1]]).permute(1, 0, 2)
            mask = torch.full((text.shape[1], text.shape[1]), float("-inf")).triu_(1)
            for block in self.transformer.resblocks:
                block.attn_mask = mask
            x = self.ln_final(self.transformer(x).permute(1, 0, 2))
            found: Tensor = x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection
            return found

    return Text


def vit() -> Callable[..., nn.Module]:
    """A vision transformer that norms its patches, before and behind the projection."""
    without("torchvision")
    model = importlib.import_module("vit_pytorch.vit")

    def build(
        image_size: int, patch_size: int, dim: int, depth: int, heads: int, mlp_dim: int, num_labels: int
    ) -> nn.Module:
        made: nn.Module = model.ViT(
            image_size=image_size, patch_size=patch_size, num_classes=num_labels, dim=dim, depth=depth, heads=heads,
            mlp_dim=mlp_dim, dim_head=dim // heads,
        )  # fmt: skip
        return made

    return build


def annotated() -> Callable[..., nn.Module]:
    """The annotated transformer's encoder-decoder, with one word table for both sides, as its last part has it."""
    without("pandas", "altair", "spacy", "GPUtil", "torchtext")
    without(*(f"torchtext.{part}" for part in ("data", "data.functional", "datasets", "vocab")))
    model = importlib.import_module("the_annotated_transformer")

    def build(config: Any) -> nn.Module:
        made: nn.Module = model.make_model(
            config.vocab_size, config.vocab_size, config.encoder_layers, config.d_model, config.encoder_ffn_dim,
            config.encoder_attention_heads, 0.0,
        )  # fmt: skip
        made.tgt_embed[0].lut.weight = made.src_embed[0].lut.weight  # type: ignore[index,union-attr]  # its own parts
        return made

    return build


def curated() -> Callable[..., nn.Module]:
    """BERT of curated-transformers; its mask is an object, so it is handed over in a module of three lines."""
    without("catalogue", "curated_tokenizers", "fsspec", "requests")
    models = importlib.import_module("curated_transformers.models")
    layers = importlib.import_module("curated_transformers.layers")

    class Encoder(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.encoder = models.BERTEncoder(
                models.BERTConfig(
                    embedding_width=config.hidden_size, hidden_width=config.hidden_size,
                    intermediate_width=config.intermediate_size, n_attention_heads=config.num_attention_heads,
                    n_hidden_layers=config.num_hidden_layers, n_pieces=config.vocab_size,
                    n_positions=config.max_position_embeddings, model_max_length=config.max_position_embeddings,
                )
            )  # fmt: skip

        def forward(self, piece_ids: Tensor, mask: Tensor, type_ids: Tensor) -> Tensor:
            found = self.encoder(piece_ids, layers.AttentionMask(mask.bool()), type_ids=type_ids)
            last: Tensor = found.last_hidden_layer_state
            return last

    return Encoder


SEQ2SEQ = {
    "vocab_size": 113, "d_model": 48, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 40,
}  # fmt: skip
CLIP_TEXT = {**BERT, "projection_dim": 36, "eos_token_id": 112, "bos_token_id": 111}

RECIPES: Mapping[str, Recipe] = {
    "minGPT": Recipe(
        folder="minGPT", make=min_gpt, architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.TRUNK,
        reason="lm_head.weight",
    ),
    "nanoGPT": Recipe(
        folder="nanoGPT", make=nano_gpt, architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.APPROXIMATE,
        reason="tanh",
    ),
    "gpt-2-Pytorch": Recipe(
        folder="gpt-2-Pytorch", make=graykode, architecture="GPT2LMHeadModel", fields=GPT2, verdict=Verdict.EXACT
    ),
    "former": Recipe(
        folder="former", make=former, architecture="OpenAIGPTLMHeadModel",
        fields={**GPT2}, verdict=Verdict.IMPOSSIBLE, reason="bias",
    ),
    "simple-bert-pytorch": Recipe(
        folder="simple-bert-pytorch", make=simple_bert, architecture="BertForMaskedLM", fields=BERT,
        verdict=Verdict.TRUNK,
    ),
    "CLIP-visual": Recipe(
        folder="CLIP", make=clip_vision, architecture="CLIPVisionModelWithProjection",
        fields={**VISION, "projection_dim": 36, "num_attention_heads": 4}, verdict=Verdict.EXACT,
    ),
    "CLIP-text": Recipe(
        folder="CLIP", make=clip_text, architecture="CLIPTextModelWithProjection", fields=CLIP_TEXT,
        verdict=Verdict.EXACT,
    ),
    "vit-pytorch": Recipe(
        folder="vit-pytorch", make=vit, architecture="ViTForImageClassification",
        fields={**VISION, "num_attention_heads": 4, "num_labels": 7}, verdict=Verdict.IMPOSSIBLE,
        reason="to_patch_embedding",
    ),
    "annotated-transformer": Recipe(
        folder="annotated-transformer", make=annotated, architecture="PegasusForConditionalGeneration",
        fields={**SEQ2SEQ, "activation_function": "relu"}, verdict=Verdict.APPROXIMATE, reason="unbiased",
    ),
    "curated-transformers": Recipe(
        folder="curated-transformers", make=curated, architecture="BertModel", fields=BERT, verdict=Verdict.TRUNK,
    ),
}  # fmt: skip


def checkpoint(architecture: str, fields: Mapping[str, object], folder: Path) -> Path:
    """A small checkpoint of that architecture, every parameter drawn."""
    kind: Any = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**fields))
    draw(model, 0)
    model.save_pretrained(folder)
    return folder


@contextmanager
def importing(folder: Path) -> Iterator[None]:
    """With the clone's modules importable, and forgotten afterwards."""
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


def tried(recipe: Recipe, clones: Path) -> tuple[Suggestion | PortingError, float]:
    """What comes of it, and in how many seconds."""
    with importing(clones / recipe.folder), tempfile.TemporaryDirectory() as place:
        source = checkpoint(recipe.architecture, recipe.fields, Path(place))
        builder = recipe.make()
        begun = time.monotonic()
        try:
            return suggest(source, builder), time.monotonic() - begun
        except PortingError as error:
            return error, time.monotonic() - begun


def main(
    clones: Annotated[Path, typer.Argument(help="the folder with the clones")],
    names: Annotated[list[str] | None, typer.Argument(help="models; all that are there when none is named")] = None,
    show: Annotated[bool, typer.Option("--show", help="print the tables")] = False,
) -> None:
    """Try every model and print what came of it."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not type it
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # as above
    torch.set_num_threads(1)
    for name in names or [one for one, recipe in RECIPES.items() if (clones / recipe.folder).is_dir()]:
        recipe = RECIPES[name]
        found, seconds = tried(recipe, clones.resolve())
        if isinstance(found, PortingError):
            print(f"{name}: refused in {seconds:.1f} s: {found}")
            continue
        if show:
            print(found.text)
        said = " | ".join([*(one.said for one in found.reasons), *found.missing, *(one.name for one in found.unmapped)])
        right = found.verdict is recipe.verdict
        reason = not recipe.reason or recipe.reason in said
        written = sum(len(one.rpartition(" = ")[2]) > 0 for one in found.text.splitlines())
        print(
            f"{name}: {found.verdict} ({'right' if right else f'expected {recipe.verdict}'}), reason "
            f"{'right' if reason else 'wrong'}, {found.shown[0]} of {found.shown[1]} tensors, {found.trials} trials, "
            f"{seconds:.1f} s, {written} lines"
        )
        print(f"    {said}")


if __name__ == "__main__":
    typer.run(main)
