"""Every ``next:`` line is typed as it stands, one after the other, from many states."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
import transformers

from tests.cli.conftest import Run
from tests.cli.test_next import advised
from tests.models.twins import realistic
from tests.pretraining import write_base, write_scratch

pytestmark = pytest.mark.few(1)

STEPS = 5

HEADED = '''
import torch
from torch import nn

from scratch import Tied

FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
          "max_position_embeddings", "type_vocab_size", "layer_norm_eps")


class Headed(nn.Module):
    """The encoder with a head of its own, which no checkpoint has."""

    def __init__(self, config):
        super().__init__()
        self.bert = Tied(*(config[name] for name in FIELDS))
        self.verdict = nn.Linear(config["hidden_size"], 3)

    def forward(self, input_ids, attention_mask, token_type_ids):
        bert = self.bert
        x = bert.ln(bert.tok(input_ids) + bert.seg(token_type_ids) + bert.pos(torch.arange(input_ids.shape[1])))
        for block in bert.blocks:
            x = block(x, attention_mask)
        return self.verdict(x)


def build(config):
    return Headed(config)


def filled(config):
    """By zipping parameters in order, as books have it; the decoder's matrix is the words'."""
    import porting

    port = Tied(*(config[name] for name in FIELDS))
    right = porting.load("p", Tied, "tied.toml")
    with torch.no_grad():
        for one, other in zip(port.parameters(), right.parameters(), strict=True):
            one.copy_(other)
    return port


def astray(config):
    port = filled(config)
    with torch.no_grad():
        port.blocks[0].attn.q.weight.copy_(port.blocks[0].attn.k.weight)
    return port


def broken(config):
    raise RuntimeError("no weights here")
'''

# Words; whether the walk may come by a verdict of FAITHFUL.
WALKS = [
    ("inspect p", True),
    ("check p", True),
    ("verify p", True),
    ("verify p --table tied.toml --into scratch.py:Tied", True),
    ("verify p --table tied.toml --into scratch.py:Tied --architecture BertForMaskedLM", True),
    ("verify p --table tied.toml --into scratch.py:Tied --stream --longest 9", True),
    ("verify p --table tied.toml --into headed.py:filled --loaded", True),
    ("verify p --table tied.toml --into headed.py:astray --loaded", False),
    ("verify stored --table scratch.toml --into scratch.py:Bert", True),
    ("verify p --table headed.toml --into headed.py:build --fresh", False),
    ("load p --table headed.toml --into headed.py:build --fresh", False),
    ("check p --table headed.toml --into headed.py:build --fresh", False),
    ("export p back --table headed.toml --into headed.py:build --fresh", False),
    ("convert p ported --table headed.toml --into headed.py:build --fresh", False),
    ("convert held back --reverse --table headed.toml --fresh", True),  # the checkpoint, into the shipped module
    ("convert held back --reverse --table headed.toml --fresh --like p", True),
    ("verify pegasus --table pegasus_into_classifier --fresh", False),
    ("export pegasus back --table pegasus_into_classifier --fresh", False),
    ("suggest p --into scratch.py:Tied -o s.toml", True),
    ("suggest p --into scratch.py:Bert -o s.toml", True),
    ("suggest stored --into scratch.py:Bert -o s.toml", True),
    ("suggest p --into scratch.py:Tied --architecture BertForMaskedLM -o s.toml", False),
    ("suggest p --into headed.py:build -o s.toml", False),
]

# Words that are refused, and what is advised.
REFUSED = [
    ("verify p --table scratch.toml --into scratch.py:Bert --fresh", "explain tie-mismatch"),
    ("verify p --table tied.toml --loaded", "explain bad-target"),
    ("verify p --table tied.toml --into headed.py:broken --loaded", "explain bad-target"),
    ("export p back --table headed.toml --into headed.py:build", "explain fresh-not-allowed"),
    ("convert held back --reverse --table headed.toml", "explain fresh-not-allowed"),
]


def write_headed() -> None:
    """A module with a head that no checkpoint has, and its table."""
    Path("headed.py").write_text(HEADED)
    head = Path("tied.toml").read_text().partition("[probes]")[0]
    rules = head.replace('= "', '= "bert.').replace('= "bert.equals ', '= "equals ')
    mapping, _, rules = rules.partition("[tensors]")
    rules = rules.replace('"mlm.decoder.weight" = ', '"bert.mlm.decoder.weight" = ')
    fresh = '[fresh]\n"verdict.{w:weight,bias}" = "a head of its own"\n'
    lines = '"bert.embeddings" = "bert.ln"\n"bert.encoder.layer.{i}" = "bert.blocks.{i}"\n'
    mapping = mapping.replace('"bert.', '"').replace('prefix = ""', 'prefix = "bert."')
    Path("headed.toml").write_text(f"{mapping}[tensors]{rules}\n{fresh}\n[probes]\n{lines}")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands name."""
    monkeypatch.chdir(tmp_path)
    write_base(Path("p"))
    write_base(Path("stored"), decoder=True)
    write_scratch(Path())
    write_headed()
    return Path()


def prepare(run: Run, words: str) -> None:
    """What only some walks begin with."""
    if " pegasus" in words:
        config = transformers.PegasusConfig(
            d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3, decoder_attention_heads=3,
            encoder_ffn_dim=40, decoder_ffn_dim=40, vocab_size=37, max_position_embeddings=24, pad_token_id=0,
            activation_function="relu", scale_embedding=True,
        )  # fmt: skip
        model = transformers.PegasusForConditionalGeneration(config)
        realistic(model, seed=0)
        model.save_pretrained("pegasus")
    if " held" in words:  # a port's own state, with the head that no checkpoint has
        from safetensors.torch import load_file, save_file

        run("convert", "p", "held", "--table", "headed.toml", "--into", "headed.py:build", "--fresh")
        Path("held/provenance.json").unlink()
        state = load_file("held/model.safetensors")
        state |= {"verdict.weight": torch.randn(3, 24), "verdict.bias": torch.randn(3)}
        save_file(state, "held/model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(("words", "faithful"), WALKS)
def test_every_line_works_when_it_is_typed(run: Run, bench: Path, words: str, faithful: bool) -> None:
    prepare(run, words)
    typed: list[list[str]] = []
    line = shlex.split(words)
    said = ""
    while len(typed) < STEPS:
        assert line not in typed, "the commands lead back to one that was typed"
        result = run(*line)
        assert result.exit_code != 2, f"{shlex.join(line)}: {result.stderr}"
        typed.append(line)
        said += result.stdout
        shown = result.stdout if "next: " in result.stdout else result.stderr
        if "next: " not in shown:
            break  # a page of help, or a picture
        line = advised(shown)
    assert ("FAITHFUL" in said) <= faithful, said


@pytest.mark.parametrize(
    "words",
    [
        "tables",
        "tables bert",
        "explain",
        "explain no-target",
        "explain nowhere",
        "hash p",
        "diff p p",
        "inspect ported",
    ],
)
def test_the_lines_lead_to_an_end(run: Run, bench: Path, words: str) -> None:
    run("convert", "p", "ported", "--table", "tied.toml", "--into", "scratch.py:Tied")
    typed: list[str] = []
    while words not in typed and not words.endswith("--help"):
        typed.append(words)
        result = run(*shlex.split(words))
        if "next: " not in result.output:
            return
        words = shlex.join(advised(result.stdout if "next: " in result.stdout else result.stderr))
    assert words not in typed, [*typed, words]


@pytest.mark.parametrize(("words", "advice"), REFUSED)
def test_what_is_refused_says_what_to_do(run: Run, bench: Path, words: str, advice: str) -> None:
    prepare(run, words)
    first = run(*shlex.split(words))
    assert first.exit_code == 2, first.stdout
    assert shlex.join(advised(first.stderr)) == advice
    assert run(*advised(first.stderr)).exit_code == 0
