"""``generate``, ``translate``, ``classify``, and the commands on text with a module of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import porting
from porting.seeing.classification import labels_of
from tests.cli.conftest import Run
from tests.generating import checkpoints, scratch
from tests.trials.test_logits import BERT

GPT = ("--source", "gpt", "--table", "gpt.toml", "--into", "mine.py:build_gpt")
CLASSIFIER = ("--source", "cls", "--table", "cls.toml", "--into", "mine.py:build_classifier")
OWN_BERT = ("--source", "c", "--table", "bert.toml", "--into", "mine.py:build_bert")
SEQ2SEQ = ("--source", "bart", "--table", "seq.toml", "--into", "mine.py:build_seq2seq")
TEXT = "the river bank"

WRONG = """

def rotate(x, cos, sin):
    return x * cos + x * sin

def indirect(config):
    return build_gpt(**config)

SIZES = {"dim": 4}
"""


@pytest.fixture
def workbench(checkpoint: Path) -> Path:
    """A folder with checkpoints, and the modules and tables that a user wrote for them."""
    checkpoints.gpt2(Path("gpt"))
    checkpoints.bart(Path("bart"))
    checkpoints.classifier(Path("cls"))
    Path("mine.py").write_text(Path(scratch.__file__).read_text())
    head = '"classifier.{w:weight,bias}" = "classes.{w:weight,bias}"\n\n[inputs]'
    tables = {"gpt": scratch.GPT_TABLE, "seq": scratch.SEQ2SEQ_TABLE, "bert": BERT}
    tables["cls"] = scratch.BERT_TABLE.replace("[inputs]", head)
    for name, text in tables.items():
        Path(f"{name}.toml").write_text(text)
    return Path()


def test_generate_writes_what_python_generates(run: Run, workbench: Path) -> None:
    expected = porting.generate(TEXT, "gpt", table="gpt.toml", into=scratch.build_gpt)
    result = run("generate", TEXT, *GPT)
    assert result.exit_code == 0, result.stderr
    text, said, last = result.stdout.splitlines()
    assert text == expected.result
    assert text.startswith(f"{TEXT} ")
    assert said.startswith(f"{len(expected.ids)} new tokens, cut at the maximum length; log-probability ")
    assert last == "next: porting verify gpt --table gpt.toml --into mine.py:build_gpt"
    found = json.loads(run("generate", TEXT, *GPT, "--json").stdout)
    assert tuple(found["ids"]) == expected.ids
    assert [token["token"] for token in found["tokens"]] == [word.text for word in expected.words[-len(expected.ids) :]]


def test_generate_samples_and_searches(run: Run, workbench: Path) -> None:
    drawn = run(
        "generate", TEXT, *GPT, "--temperature", "2", "--top-k", "20", "--top-p", "0.9", "--seed", "4", "--json"
    )
    expected = porting.generate(
        TEXT, "gpt", temperature=2.0, top_k=20, top_p=0.9, seed=4, table="gpt.toml", into=scratch.build_gpt
    )
    assert tuple(json.loads(drawn.stdout)["ids"]) == expected.ids
    beams = run("generate", TEXT, *GPT, "--num-beams", "3", "--max-length", "9", "--top", "2")
    rows = beams.stdout.splitlines()
    assert rows[2].split() == ["token", "likeliest"]
    assert len(rows) == 3 + 4 + 1


def test_the_table_of_next_tokens(run: Run, workbench: Path) -> None:
    expected = porting.next_tokens(TEXT, "gpt", top=3, table="gpt.toml", into=scratch.build_gpt)
    result = run("generate", TEXT, *GPT, "--next", "--top", "3", "--html", "next.html")
    shown = [line.split() for line in result.stdout.splitlines()]
    assert shown[:3] == [[f"{guess.probability:.2%}", guess.token] for guess in expected.guesses]
    assert shown[3] == ["written:", "next.html"]
    assert expected.guesses[0].token in Path("next.html").read_text()


def test_translate_with_ones_own_module_is_the_shipped_ones(run: Run, workbench: Path) -> None:
    options = ("--num-beams", "3", "--max-length", "12")
    shipped = run("translate", TEXT, "--source", "bart", *options)
    own = run("translate", TEXT, *SEQ2SEQ, *options, "--html", "t.html")
    assert own.exit_code == shipped.exit_code == 0, own.stderr
    assert own.stdout.splitlines()[:2] == shipped.stdout.splitlines()[:2]
    assert "Generated text" in Path("t.html").read_text()


def test_classify_with_ones_own_module_is_the_shipped_ones(run: Run, workbench: Path) -> None:
    shipped = run("classify", "I read the book.", "--source", "cls", "--top", "2")
    own = run("classify", "I read the book.", *CLASSIFIER, "--top", "2", "--html", "c.html")
    assert own.stdout.splitlines()[:2] == shipped.stdout.splitlines()[:2]
    assert shipped.stdout.splitlines()[-1] == "next: porting classify 'I read the book.' --source cls --html class.html"
    page = Path("c.html").read_text()
    label = shipped.stdout.splitlines()[0].partition("%")[2].strip()
    assert f"<h1>Class: {label}</h1>" in page
    assert 'id="large"' in page
    found = json.loads(run("classify", "I read the book.", *CLASSIFIER, "--json").stdout)
    assert found["label"] == label
    assert len(found["labels"]) == 3


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({"id2label": None, "num_labels": 10**9}, "LABEL_"),
        ({"id2label": {"0": "a", "9" * 5000: "b", "²": "c"}}, ""),
        ({"id2label": [1, 2, 3]}, ""),
        ({"id2label": None, "num_labels": 10**200}, ""),
        ({"id2label": None, "num_labels": True}, ""),
    ],
    ids=["many", "digits", "a list", "most", "a boolean"],
)
def test_labels_are_named_for_the_classes_that_the_module_has(
    run: Run, workbench: Path, change: dict[str, object], label: str
) -> None:
    """A list of as many names as a config asks for would take gigabytes."""
    place = Path("cls/config.json")
    kept = place.read_text()
    try:
        place.write_text(json.dumps({**json.loads(kept), **change}))
        result = run("classify", "I read the book.", *CLASSIFIER, "--json")
    finally:
        place.write_text(kept)
    assert result.exit_code in (0, 2)
    assert "Traceback" not in result.stderr
    names = labels_of({**json.loads(kept), **change}, 3)
    assert len(names) == 3
    assert all(name.startswith(label) for name in names)


@pytest.mark.parametrize("words", [["fill-mask", "the [MASK] of"], ["next-sentence", "I read.", "the bank"]])
def test_ones_own_encoder_says_what_the_shipped_one_says(run: Run, workbench: Path, words: list[str]) -> None:
    own = run(*words, *OWN_BERT, "--html", "page.html")
    assert own.exit_code == 0, own.stderr
    assert own.stdout.splitlines()[:-2] == run(*words, "--source", "c").stdout.splitlines()[:-1]
    assert own.stdout.splitlines()[-1] == "next: porting verify c --table bert.toml --into mine.py:build_bert"
    assert "%" in Path("page.html").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["generate", TEXT, *GPT],
        ["generate", TEXT, *GPT, "--next"],
        ["translate", TEXT, *SEQ2SEQ],
        ["classify", TEXT, *CLASSIFIER],
        ["fill-mask", "[MASK]", *OWN_BERT],
        ["fill-mask", "[MASK] the [MASK]", *OWN_BERT],
        ["fill-mask", "[MASK] " * 15, *OWN_BERT],
    ],
)
def test_ten_lines_are_enough_and_the_last_is_a_command(run: Run, workbench: Path, words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) <= 10
    assert result.stdout.splitlines()[-1].startswith("next: porting ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", TEXT], "table 'bert' has no model for this"),
        (["classify", TEXT, "--source", "c"], "no BertForSequenceClassification head"),
        (["translate", TEXT, *GPT], "not an encoder-decoder"),
        (["generate", TEXT, *GPT, "--max-length", "99"], "max_length is 99, the model has 32 positions (ask for 32)"),
        (["generate", TEXT, *GPT, "--top-k", "3", "--num-beams", "2"], "leave --num-beams out"),
        (["fill-mask", "[MASK]", *GPT[:-1], "mine.py:build_gpt"], "none of it can be the logits"),
    ],
)
def test_what_cannot_be_done_is_said_with_what_to_type(
    run: Run, workbench: Path, words: list[str], message: str
) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error", "next"]


def test_a_module_of_one_s_own_without_a_table_leads_to_suggest(run: Run, workbench: Path) -> None:
    for words in (["fill-mask", "[MASK] it."], ["attention", TEXT], ["generate", TEXT]):
        result = run(*words, "--source", "c", "--into", "mine.py:build_bert")
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == "next: porting suggest c --into mine.py:build_bert"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("rotate", "a function that builds none of the file's modules"),
        ("SIZES", "a dict that"),
        ("Bret", "not in this"),
    ],
)
@pytest.mark.parametrize("words", [["check", "gpt", *GPT[2:4]], ["suggest", "gpt"], ["generate", TEXT, *GPT[:4]]])
def test_what_builds_no_module_is_answered_with_the_file_s_modules(
    run: Run, workbench: Path, words: list[str], name: str, what: str
) -> None:
    Path("mine.py").write_text(Path("mine.py").read_text() + WRONG)
    result = run(*words, "--into", f"mine.py:{name}")
    assert result.exit_code == 2
    line = next(one for one in result.stderr.splitlines() if "the file has " in one)
    assert line.startswith(f"error: mine.py: '{name}' is {what}")
    listed = line.partition("the file has ")[2].partition(" (")[0].split(", ")
    assert {"build_gpt", "build_bert", "indirect"} <= {*listed}
    assert name not in listed


def test_a_builder_that_fails_is_not_called_another_thing(run: Run, workbench: Path) -> None:
    Path("mine.py").write_text(Path("mine.py").read_text() + WRONG)
    for name in ("indirect", "build_bert"):
        result = run("check", "gpt", *GPT[2:4], "--into", f"mine.py:{name}")
        assert "[bad-target]" in result.stderr or "[no-target]" in result.stderr
        assert "the file has" not in result.stderr
