"""Generation with anybody's module gives the tokens of transformers' own ``generate`` on the same checkpoint."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import porting
from porting.errors import PortingWarning
from porting.generating.settings import GenerationError, Settings, read_settings
from porting.opening import Folder
from tests.causes.decoder import Decoder
from tests.causes.decoders import FAMILIES
from tests.generating import checkpoints, scratch
from tests.small_checkpoint import WORDS

TEXTS = ("the river bank", "I read a book", "we play soccer at the cafe")


def build_llama() -> Decoder:
    return Decoder(replace(FAMILIES["llama"].config, vocab_size=len(WORDS)))


GPT: dict[str, Any] = {"into": scratch.build_gpt, "table": scratch.GPT_TABLE}
WHOLE: dict[str, Any] = {"into": scratch.build_whole_gpt, "table": scratch.GPT_TABLE}
LLAMA: dict[str, Any] = {"into": build_llama, "table": FAMILIES["llama"].table}
SEQ2SEQ: dict[str, Any] = {"into": scratch.build_seq2seq, "table": scratch.SEQ2SEQ_TABLE}

CASES = {
    "a decoder that returns the last position": (checkpoints.gpt2, "GPT2LMHeadModel", GPT),
    "a decoder with the vocabulary first": (checkpoints.gpt2, "GPT2LMHeadModel", WHOLE),
    "rotary positions": (checkpoints.llama, "LlamaForCausalLM", LLAMA),
    "an encoder-decoder": (checkpoints.bart, "BartForConditionalGeneration", SEQ2SEQ),
    "the shipped encoder-decoder": (checkpoints.bart, "BartForConditionalGeneration", {}),
    "the shipped translator": (checkpoints.marian, "MarianMTModel", {}),
}
BEAMS = (1, 2, 4)
RULES: list[dict[str, object]] = [
    {},
    {"no_repeat_ngram_size": 2, "min_length": 9},
    {"repetition_penalty": 1.7, "forced_eos_token_id": 7, "suppress_tokens": [5, 9]},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True, "forced_bos_token_id": 11},
    {"num_beams": 3, "length_penalty": 0.3, "early_stopping": "never", "bad_words_ids": [[5], [6, 7], [20, 21]]},
]


def expected(folder: Path, architecture: str, text: str, **options: object) -> list[int]:
    """The new tokens of transformers."""
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    ids = torch.tensor([token_ids(text)])
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)[0].tolist()
    return list(found[1:] if model.config.is_encoder_decoder else found[ids.shape[1] :])


def token_ids(text: str) -> list[int]:
    """The tokens of a text, by the tokenizer's file read without the library."""
    words = [number for word in text.lower().split() for number in [WORDS.index(word)]]
    return [WORDS.index("[CLS]"), *words, WORDS.index("[SEP]")]


# Each model meets each list of rules, and each of both meets each number of beams.
GRID = [
    pytest.param(case, beams := BEAMS[(row + column) % 3], rules, id=f"{case}, {beams} beams, rules {column}")
    for row, case in enumerate(CASES)
    for column, rules in enumerate(RULES)
]


@pytest.mark.slow
@pytest.mark.few(12)
@pytest.mark.parametrize(("case", "num_beams", "rules"), GRID)
def test_the_tokens_are_those_of_transformers(tmp_path: Path, case: str, num_beams: int, rules: dict[str, Any]) -> None:
    make, architecture, mine = CASES[case]
    folder = make(tmp_path / "c", **rules)
    for text in TEXTS:
        found = porting.generate(text, folder, max_length=18, num_beams=num_beams, **mine)
        assert list(found.ids) == expected(folder, architecture, text, max_length=18, num_beams=num_beams)
        assert len(set(found.ids)) > 3 or "no_repeat_ngram_size" not in rules


def test_what_is_sampled_is_drawn_from_the_references_softmax(tmp_path: Path) -> None:
    folder = checkpoints.gpt2(tmp_path / "c", eos_token_id=WORDS.index("##er"))
    model: Any = transformers.GPT2LMHeadModel.from_pretrained(folder)  # in eval mode
    found = porting.generate(
        TEXTS[0], folder, max_length=16, temperature=0.7, top_k=9, top_p=0.8, seed=5, top=len(WORDS), **GPT
    )
    generator, row = torch.Generator().manual_seed(5), token_ids(TEXTS[0])
    for token, step in zip(found.ids, found.steps, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0, -1].double() / 0.7
        shares = logits.softmax(-1)
        kept: list[int] = []
        best = shares.argsort(descending=True)[:9].tolist()
        for one in best:  # until they have most of what the nine have
            if shares[kept].sum() >= 0.8 * shares[best].sum():
                break
            kept.append(one)
        expected = torch.zeros_like(shares)
        expected[kept] = shares[kept] / shares[kept].sum()
        assert [guess.token for guess in step.guesses] == [WORDS[one] for one in kept]
        assert [guess.probability for guess in step.guesses] == pytest.approx(expected[kept].tolist(), rel=1e-4)
        assert token == int(torch.multinomial(expected, 1, generator=generator))
        row.append(token)
    assert len(set(found.ids)) > 3


def test_the_seed_decides(tmp_path: Path) -> None:
    folder = checkpoints.gpt2(tmp_path / "c")
    drawn = [porting.generate(TEXTS[0], folder, temperature=2.0, seed=seed, **GPT).ids for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


def test_the_next_tokens_are_the_references(tmp_path: Path) -> None:
    folder = checkpoints.gpt2(tmp_path / "c", suppress_tokens=[5, 6, 7, 8, 9, 10])
    with torch.no_grad():
        reference: Any = transformers.GPT2LMHeadModel.from_pretrained(folder)  # in eval mode
        shares = reference(torch.tensor([token_ids(TEXTS[1])])).logits[0, -1].softmax(-1)
    found = porting.next_tokens(TEXTS[1], folder, top=4, **WHOLE)
    best = shares.topk(4)
    assert [guess.token for guess in found.guesses] == [WORDS[index] for index in best.indices]
    assert [guess.probability for guess in found.guesses] == pytest.approx(best.values.tolist(), rel=1e-4)


def test_a_row_ends_at_the_last_position(tmp_path: Path) -> None:
    folder = checkpoints.gpt2(tmp_path / "c", eos_token_id=None)
    found = porting.generate(TEXTS[0], folder, **GPT)
    assert (len(found.words), found.ended) == (32, False)
    assert "max_length is 33, the model has 32 positions" in refusal(TEXTS[0], folder, max_length=33)
    assert "has 5 tokens already" in refusal(TEXTS[0], folder, max_length=5)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_rules_that_leave_no_token_are_told(tmp_path: Path, num_beams: int) -> None:
    folder = checkpoints.gpt2(tmp_path / "c", suppress_tokens=list(range(len(WORDS))))
    assert "rules out every token" in refusal(TEXTS[0], folder, num_beams=num_beams)


def test_what_ends_a_row_is_what_transformers_takes_for_it(tmp_path: Path) -> None:
    folder = checkpoints.gpt2(tmp_path / "c", eos_token_id=None)
    third = porting.generate(TEXTS[0], folder, max_length=18, **GPT).ids[2]
    config, settings = folder / "config.json", folder / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": third}))
    lengths = []
    for _ in ("the file names no end", "there is no file"):
        found = porting.generate(TEXTS[0], folder, max_length=18, **GPT)
        assert list(found.ids) == expected(folder, "GPT2LMHeadModel", TEXTS[0], max_length=18)
        lengths.append(len(found.ids))
        settings.unlink(missing_ok=True)
    assert lengths == [13, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_beams": 2, "top_k": 4}, "exclude each other"),
        ({"num_beams": 21}, "the vocabulary has 40 tokens"),
        ({"top": 0}, "top is 0"),
    ],
)
def test_options_that_no_search_can_follow(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    assert message in refusal(TEXTS[0], checkpoints.gpt2(tmp_path / "c"), **options)


def settings_of(folder: Path, **fields: object) -> Settings:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return read_settings(Folder(folder), {}, decoder=False, vocabulary=40)


def test_rules_that_are_repeated_are_read_once(tmp_path: Path) -> None:
    """A file of a megabyte has half a million of them; a row is then looked up once for each length of a beginning."""
    many = settings_of(
        tmp_path, eos_token_id=[3] * 1000, suppress_tokens=[4, 5] * 1000, bad_words_ids=[[7, 8], [9], [7, 40]] * 1000
    )
    once = settings_of(tmp_path, eos_token_id=3, suppress_tokens=[4, 5], bad_words_ids=[[7, 8], [9]])
    assert many == once
    assert (
        len(settings_of(tmp_path, bad_words_ids=[[one, other] for one in range(40) for other in range(40)]).banned)
        == 1600
    )
    banned = settings_of(
        tmp_path, bad_words_ids=[[one, other] for one in range(40) for other in range(40)]
    )._banned_after
    assert {size: len(last) for size, last in banned.items()} == {1: 40}


@pytest.mark.parametrize("seed", range(20))
def test_sequences_that_may_not_occur_do_not(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311  # of a test
    banned = tuple({tuple(draw.choices(range(4), k=draw.randint(1, 4))) for _ in range(12)})
    rows = [draw.choices(range(4), k=draw.randint(1, 6))] * 2
    settings = Settings(ends=frozenset({1}), banned=banned)
    scores = settings.ruled(torch.tensor(rows), torch.zeros(2, 4), prompt=0, longest=99)
    out = {one[-1] for one in banned if (*rows[0], one[-1])[-len(one) :] == one and one != (1,)}
    assert scores.isinf().nonzero().tolist() == [[row, token] for row in range(2) for token in sorted(out)]


@pytest.mark.parametrize("penalty", [0, -1, 1e-300])
def test_a_penalty_that_leaves_no_numbers_is_refused(tmp_path: Path, penalty: float) -> None:
    with pytest.raises(porting.PortingError, match=r"repetition_penalty is .*a number from 1e-06 to"):
        settings_of(tmp_path, repetition_penalty=penalty)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"num_beams": 2}], ids=["likeliest", "drawn", "beams"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(tmp_path: Path, value: float, options: dict[str, Any]) -> None:
    folder = checkpoints.gpt2(tmp_path / "c")
    held = load_file(folder / "model.safetensors")
    held["transformer.ln_f.bias"][:] = value
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    assert "the scores of the next token are NaN or infinite" in refusal(TEXTS[0], folder, **options)


def test_the_smallest_temperature_is_the_likeliest_token(tmp_path: Path) -> None:
    folder = checkpoints.gpt2(tmp_path / "c")
    likeliest = porting.generate(TEXTS[0], folder, **GPT).ids
    assert porting.generate(TEXTS[0], folder, temperature=1e-320, **GPT).ids == likeliest


def refusal(text: str, folder: Path, **options: Any) -> str:  # Any: as generate takes them
    with pytest.raises(porting.PortingError) as caught:
        porting.generate(text, folder, **{**GPT, **options})
    return str(caught.value)


def test_translate_is_for_an_encoder_decoder(tmp_path: Path) -> None:
    folder = checkpoints.bart(tmp_path / "c")
    assert porting.translate(TEXTS[0], folder, num_beams=3).ids == porting.generate(TEXTS[0], folder, num_beams=3).ids
    with pytest.raises(porting.PortingError, match="not an encoder-decoder"):
        porting.translate(TEXTS[0], checkpoints.gpt2(tmp_path / "g"), **GPT)


def test_what_a_checkpoint_asks_for_and_is_not_done_is_told(tmp_path: Path) -> None:
    folder = checkpoints.gpt2(tmp_path / "c", exponential_decay_length_penalty=[3, 1.5])
    with pytest.warns(PortingWarning, match="exponential_decay_length_penalty of the checkpoint"):
        porting.generate(TEXTS[0], folder, max_length=7, **GPT)


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": 99}', '{"bad_words_ids": [5]}'])
def test_a_malformed_generation_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = checkpoints.gpt2(tmp_path / "c")
    (folder / "generation_config.json").write_text(text)
    assert "generation_config.json" in refusal(TEXTS[0], folder)


@pytest.mark.parametrize(
    "text",
    [
        '{"min_length": NaN}',
        '{"min_new_tokens": Infinity}',
        '{"no_repeat_ngram_size": -Infinity}',
        '{"repetition_penalty": 1' + 30 * "0" + "}",
        '{"length_penalty": 1e308}',
        '{"length_penalty": -1e308}',
        '{"length_penalty": 1' + 30 * "0" + "}",  # a whole number: its power would be made for ever
        '{"suppress_tokens": [99], "vocab_size": 1000}',
        '{"forced_eos_token_id": 99, "vocab_size": "many"}',
        '{"bad_words_ids": [[-1000]]}',
        '{"eos_token_id": "' + 100_000 * "x" + '"}',
        '{"bad_words_ids": [' + 100_000 * '"x",' + '"x"]}',
    ],
    ids=lambda text: text[:40],
)
def test_a_number_that_means_nothing_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    folder = checkpoints.gpt2(tmp_path / "c")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(GenerationError) as caught:
        porting.generate(TEXTS[0], folder, num_beams=2, **GPT)
    assert " expected (take the file from where" in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(folder))


def test_the_page_shows_what_was_generated(tmp_path: Path) -> None:
    found = porting.generate(TEXTS[0], checkpoints.gpt2(tmp_path / "c"), max_length=12, **GPT)
    page = found.save(tmp_path / "page.html").read_text()
    assert found.result in page
    assert page.count('class="prediction"') == len(found.ids)
    assert f"{100 * found.steps[0].guesses[0].probability:.2f} %" in page
