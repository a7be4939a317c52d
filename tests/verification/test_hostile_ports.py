"""Ports that fail, leak, draw random numbers or return odd things: what is said; nothing of the user's changes."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from porting.checkpoint import open_checkpoint
from porting.errors import Code
from porting.loading import load
from porting.models.bert import Bert, BertLayer, BertPooler, ScaledDotProductAttention
from porting.models.bert_heads import BertForPreTraining
from porting.notation.table import parse_table
from porting.tables import shipped
from porting.verification import Case, VerifyError, verify
from tests.small_checkpoint import CONFIG, write_checkpoint
from tests.verification.flags import FLAGS, complete_but_for_flags
from tests.verification.planted import BUGS, becomes
from tests.verification.user_bert import FUSED_TABLE, MyBert

pytestmark = pytest.mark.few(2)


def bert_table() -> str:
    (path,) = [one for one in shipped() if one.stem == "bert"]
    return path.read_text(encoding="utf-8")


def loaded(checkpoint: Path) -> BertForPreTraining:
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    return model


def mine() -> MyBert:
    return MyBert(vocabulary=CONFIG["vocab_size"])


class Settings(dict[str, int]):
    """A config whose fields are attributes, as many projects have one: any other attribute is a ``KeyError``."""

    __getattr__ = dict.__getitem__


class Refusing:
    """An object that refuses to be asked for what it does not have."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


class RefusingCall(Refusing):
    def __call__(self) -> None: ...


class WithOddObjects(MyBert):
    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary=vocabulary)
        self.settings, self.listed = Settings(width=3), [Settings(width=3), Refusing(), RefusingCall()]


class Failing(BertPooler):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.dense.weight[:, :3])  # the line that the message names


class Noisy(BertPooler):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.dropout(super().forward(hidden), 0.1)  # which is on unless it is told otherwise


class Single(ScaledDotProductAttention):
    """Attention whose softmax is always in float32."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.split_heads(query), self.split_heads(key), self.split_heads(value)
        scores = q @ k.mT * self.head_size**-0.5
        if bias is not None:
            scores = scores + bias
        shares = scores.float().softmax(-1).to(v.dtype)
        return (shares @ v).transpose(1, 2).flatten(2), None


class Broken(BertPooler):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).log()  # of negative numbers, too


def test_the_users_module_is_left_as_it_was(checkpoint: Path) -> None:
    model = mine().train()
    calls: list[str] = []
    model.ln.register_forward_hook(lambda module, args, output: calls.append("hook"))
    before = copy.deepcopy(model.state_dict())
    hooks = {path: (len(part._forward_hooks), len(part._forward_pre_hooks)) for path, part in model.named_modules()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    verify(checkpoint, model, parse_table(FUSED_TABLE), architecture="BertModel", seed=9)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(
        parameter.requires_grad and parameter.grad is None and parameter.dtype == torch.float32
        for parameter in model.parameters()
    )
    found = {path: (len(part._forward_hooks), len(part._forward_pre_hooks)) for path, part in model.named_modules()}
    assert found == hooks


@pytest.mark.slow
def test_a_loaded_module_is_left_as_it_was_too(checkpoint: Path) -> None:
    model = loaded(checkpoint).train()
    model.requires_grad_(False)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    assert complete_but_for_flags(verify(checkpoint, model, loaded=True))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_what_the_caller_has_switched_on_does_not_matter(checkpoint: Path, surroundings: Callable[[], object]) -> None:
    with surroundings():  # type: ignore[attr-defined]  # each is a context
        report = verify(checkpoint)
    assert report.faithful
    assert complete_but_for_flags(report)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, 0.5])
def test_objects_that_refuse_to_be_looked_at_are_left_alone(
    checkpoint: Path, factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As attributes or as variables of a file; also where a difference is looked for in what earlier calls left."""
    for name, one in (("settings", Settings(width=3)), ("refusing", Refusing()), ("call", RefusingCall())):
        monkeypatch.setattr(sys.modules[__name__], name, one, raising=False)
    model = WithOddObjects(vocabulary=CONFIG["vocab_size"])
    if factor is not None:
        model.ln.register_forward_hook(lambda module, args, output: output * factor)
    report = verify(
        checkpoint, model, parse_table(FUSED_TABLE), architecture="BertModel", causes=0.0, trials=factor is None
    )
    assert report.faithful is (factor is None), str(report)


def test_the_same_seed_gives_the_same_report(checkpoint: Path) -> None:
    first, second, other = (verify(checkpoint, seed=seed) for seed in (1, 1, 2))
    assert first.probes == second.probes
    assert first.probes != other.probes


def test_a_failing_forward_names_exception_inputs_and_line(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    becomes("bert.pooler", Failing)(model)
    with pytest.raises(VerifyError) as caught:
        verify(checkpoint, model, loaded=True)
    (fault,) = caught.value.faults
    assert fault.code == Code.FORWARD_FAILED
    assert fault.message.startswith(
        "the port failed on input_ids [8, 24], attention_mask [8, 24], token_type_ids [8, 24]: RuntimeError: "
    )
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n, text in enumerate(source, 1) if "the line that the message names" in text)
    assert f"at {__file__}:{line}; [inputs] says which arguments it is given" in fault.hint
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_an_argument_that_a_forward_does_not_take_is_explained(checkpoint: Path) -> None:
    table = FUSED_TABLE.replace('"segments [s b]"', '"kinds [s b]"')
    with pytest.raises(VerifyError, match=r"TypeError: .*unexpected keyword argument 'kinds'") as caught:
        verify(checkpoint, mine(), parse_table(table), architecture="BertModel")
    (fault,) = caught.value.faults
    assert re.match(r"its forward takes \(tokens, .*\) at .*user_bert\.py:\d+; \[inputs\] says which", fault.hint)
    assert fault.hint.endswith("and how a mask: -> bool, -> padding or -> additive")


@pytest.mark.slow
def test_dropout_that_is_left_on_is_recognised(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    becomes("bert.pooler", Noisy)(model)
    report = verify(checkpoint, model, loaded=True)
    assert [probe.port for probe in report.guilty] == ["bert.pooler"]
    assert report.guilty[0].random
    assert "bert.pooler draws random numbers in eval mode: is dropout left on?" in report.details()


@pytest.mark.slow
def test_float32_inside_of_a_float64_run_is_said_and_not_called_a_bug(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    becomes("bert.layers.0.attention.core", Single)(model)
    report = verify(checkpoint, model, loaded=True)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-12
    core = "bert.layers.0.attention.core"
    assert f"the port casts to less than float64 in {core} (aten._to_copy): the float64 run" in report.details()


@pytest.mark.slow
def test_a_bug_beside_float32_is_still_a_bug(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    becomes("bert.layers.0.attention.core", Single)(model)
    bug = next(bug for bug in BUGS if bug.name == "tanh GELU")
    bug.plant(model)
    assert [probe.port for probe in verify(checkpoint, model, loaded=True, causes=False).guilty] == list(bug.guilty)


@pytest.mark.slow
def test_values_that_are_no_numbers_are_a_difference(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    becomes("bert.pooler", Broken)(model)
    report = verify(checkpoint, model, loaded=True, causes=False)
    assert [probe.port for probe in report.guilty] == ["bert.pooler"]
    assert report.guilty[0].meaning.isolated == float("inf")
    assert "given the reference's own inputs some of its values are NaN or infinite" in report.details()
    assert report.guilty[0].rules
    assert all(re.fullmatch(r".*bert\.toml:\d+:\d+", where) for where in report.guilty[0].rules)
    assert f"its weights are written by {report.guilty[0].rules[0]}" in report.details()


@pytest.mark.slow
def test_a_reference_without_numbers_is_said(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "bert", values={"cls.seq_relationship.bias": torch.tensor([float("nan"), 0.0])})
    report = verify(path)
    assert report.skipped == ("nsp",)
    assert report.verdict == "unproven"
    assert report.no_numbers.endswith("; such values are in the checkpoint's cls.seq_relationship.bias")
    assert "the reference's cls.seq_relationship has NaN or infinite values, it is not compared" in report.warnings
    assert report.shown.rows["nsp.weight"] == (0,)


@pytest.mark.slow
def test_a_layer_shared_by_all_depths(tmp_path: Path) -> None:
    """One module under three names, called three times: each call is its own probe."""
    first = write_checkpoint(tmp_path / "first")
    held = open_checkpoint(first)
    stem = "bert.encoder.layer."
    same = {n: held.read(re.sub(r"layer\.\d", "layer.0", n)).clone() for n in held.tensors if n.startswith(stem)}
    path = write_checkpoint(tmp_path / "shared", values=same)
    model = loaded(path)
    model.bert.layers = nn.ModuleList([model.bert.layers[0]] * 3)
    text = bert_table()
    report = verify(path, model, parse_table(_tied(text)), loaded=True, causes=False)
    assert report.faithful, str(report)
    assert [probe.port for probe in report.probes if probe.port.endswith("attention_norm")] == [
        f"bert.layers.{depth}.attention_norm" for depth in range(3)
    ]
    model.bert.layers[0].activation = nn.GELU(approximate="tanh")
    report = verify(path, model, parse_table(_tied(text)), loaded=True, causes=False)
    assert [probe.port for probe in report.guilty] == [f"bert.layers.{depth}.activation" for depth in range(3)]


def _tied(text: str) -> str:
    """The table for a module whose layers are one: the first layer's tensors are loaded, the others equal them."""
    lines = []
    for line in text.splitlines():
        rule = re.match(r'"bert\.encoder\.layer\.\{i\}\S+" = "bert\.layers', line)
        tensor = rule and "{w:" in line and "->" not in line
        lines.append(line.replace(".{i}.", ".0.") if tensor else line)
        if line == "[drop]":
            lines += [f'"bert.encoder.layer.{depth}.{{*rest}}" = "the same as layer 0"' for depth in (1, 2)]
    ties = [f'"bert.layers.{depth}.{name}" = "bert.layers.0.{name}"' for depth in (1, 2) for name in _LAYER]
    return "\n".join([*lines, "[ties]", *ties])


_LAYER = [
    f"{part}.{kind}"
    for part in (
        *(f"attention.{one}" for one in ("query", "key", "value", "output")),
        "attention_norm", "intermediate", "output", "output_norm",
    )
    for kind in ("weight", "bias")
]  # fmt: skip


@pytest.mark.slow
def test_a_module_called_twice_is_compared_twice(checkpoint: Path) -> None:
    class Twice(Bert):
        """Runs its pooler a second time, with a mistake."""

        def forward(self, *args: Tensor, **options: bool) -> object:  # type: ignore[override]  # passed on as it is
            found = super().forward(*args, **options)  # type: ignore[arg-type]  # as above
            assert self.pooler is not None
            self.pooler(found.last_hidden_state * 1.5)
            return found

    model = loaded(checkpoint)
    becomes("bert", Twice)(model)
    report = verify(checkpoint, model, loaded=True)
    assert report.skipped == ("bert.pooler #2",)
    assert report.faithful


@pytest.mark.slow
def test_a_part_without_a_counterpart_stays_the_ports_own(checkpoint: Path) -> None:
    """The port's attention output has five numbers more than the reference's: neither compared nor replaced."""

    class Wider(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own signature
            return torch.cat([super().forward(input), input[..., :5] * 3], -1)

    model = loaded(checkpoint)
    layer = model.bert.layers[1]
    assert isinstance(layer, BertLayer)
    becomes("bert.layers.1.attention_norm", Wider)(model)
    layer.intermediate.register_forward_pre_hook(lambda module, args: (args[0][..., :24],))
    layer.output.register_forward_hook(lambda module, args, output: F.pad(output, (0, 5)))
    layer.output_norm.register_forward_pre_hook(lambda module, args: (args[0][..., :24],))
    dense = '"bert.encoder.layer.{i}.{p:intermediate,output}.dense" = "bert.layers.{i}.{p:intermediate,output}"\n'
    text = bert_table().replace(dense, "")
    old = '"bert.encoder.layer.{i}.attention.output" = "bert.layers.{i}.attention_norm"'
    assert old in text
    new = '"bert.encoder.layer.1.attention.output [b s e]" = "bert.layers.1.attention_norm [b s (e|_5)]"'
    report = verify(checkpoint, model, parse_table(text.replace(old, new)), loaded=True, causes=False)
    assert report.faithful, str(report)
    layer.attention_norm.eps = 1e-3
    report = verify(checkpoint, model, parse_table(text.replace(old, new)), loaded=True, causes=False)
    assert [probe.port for probe in report.guilty] == ["bert.layers.1.attention_norm"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"input_ids [b s]"', '"input_idz [b s]"', r"\[inputs\] takes 'input_idz', .* \(did you mean 'input_ids'\?\)"),
        (
            "-> padding",
            "-> paddding",
            r"can be given as bool, padding, additive, not as 'paddding' \(did you mean 'padding'\?\)",
        ),
    ],
)
def test_a_table_that_does_not_fit_says_where(checkpoint: Path, old: str, new: str, message: str) -> None:
    assert old in FUSED_TABLE
    with pytest.raises(VerifyError, match=message):
        verify(checkpoint, mine(), parse_table(FUSED_TABLE.replace(old, new)), architecture="BertModel")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[probes]\n", '[probes]\n"bert.pooler" = "blocks.0"\n', "'pooler' [8, 24] -> 'blocks.0' [24, 8, 24]"),
        ('= "ln [s b e]"', '= "ln [b s e]"', "'embeddings' [8, 24, 24] -> 'ln' [24, 8, 24]"),
    ],
)
def test_an_inner_probe_that_does_not_fit_is_skipped_and_reported(
    checkpoint: Path, old: str, new: str, message: str
) -> None:
    table = parse_table(FUSED_TABLE.replace(old, new))
    report = verify(checkpoint, mine(), table, architecture="BertModel", trials=False)
    assert report.faithful, str(report)
    assert any(warning.startswith("a probe was skipped: ") and message in warning for warning in report.warnings), (
        report.warnings
    )


def test_without_probes_what_is_returned_is_compared(checkpoint: Path) -> None:
    bare = FUSED_TABLE[: FUSED_TABLE.index("[probes]")]
    report = verify(checkpoint, mine(), parse_table(bare), architecture="BertModel")
    assert report.faithful
    assert [probe.reference for probe in report.probes] == [". -> last_hidden_state"]
    other = bare + '[probes]\n"bert.embeddings" = "norm"\n'
    with pytest.raises(VerifyError, match=r"the port has no module 'norm' of the probe 'bert\.embeddings = norm'"):
        verify(checkpoint, mine(), parse_table(other), architecture="BertModel")


@pytest.mark.slow
def test_the_reference_comes_from_the_config_when_the_table_names_none(tmp_path: Path, checkpoint: Path) -> None:
    assert verify(checkpoint, mine(), parse_table(FUSED_TABLE.replace('". ->', '"bert ->'))).reference == (
        "transformers.BertForPreTraining"
    )
    nameless = write_checkpoint(tmp_path / "bert", change={"architectures": None})
    held = verify(nameless, mine(), parse_table(FUSED_TABLE), causes=False)
    assert held.reference == "transformers.BertForPreTraining"  # by the tensors that it holds
    with pytest.raises(VerifyError, match=r"has no model 'BertModell' \(did you mean 'BertModel'\?\)"):
        verify(nameless, mine(), parse_table(FUSED_TABLE), architecture="BertModell")


@pytest.mark.slow
def test_a_single_file_is_what_the_reference_reads_too(tmp_path: Path) -> None:
    """Beside it lies a model.safetensors with other values, which transformers would have found by itself."""
    path = write_checkpoint(tmp_path / "bert")
    other = write_checkpoint(tmp_path / "other", values={"cls.seq_relationship.bias": torch.tensor([3.0, -3.0])})
    (other / "model.safetensors").rename(path / "mine.safetensors")
    report = verify(path / "mine.safetensors")
    assert report.faithful, str(report)


def test_loaded_takes_a_module(checkpoint: Path) -> None:
    with pytest.raises(VerifyError, match="a module that holds its weights was expected"):
        verify(checkpoint, mine, parse_table(FUSED_TABLE), loaded=True)


def _never(*args: object) -> object:
    raise TypeError("there is one of it")


def test_a_module_that_cannot_be_copied_says_so(checkpoint: Path) -> None:
    model = mine()
    model.__class__ = type("Single", (type(model),), {"__new__": _never, "__deepcopy__": _never})
    with pytest.raises(VerifyError, match=r"the module cannot be copied: TypeError: .*pass a function that builds it"):
        verify(checkpoint, model, parse_table(FUSED_TABLE), architecture="BertModel")


def test_a_function_that_builds_it_will_do(checkpoint: Path) -> None:
    assert verify(checkpoint, mine, parse_table(FUSED_TABLE), architecture="BertModel").faithful


@pytest.mark.slow
def test_a_module_cast_by_its_owner_is_compared_as_it_is(checkpoint: Path) -> None:
    model = loaded(checkpoint).to(torch.bfloat16)
    report = verify(checkpoint, model, loaded=True)
    assert report.verdict == "different"
    assert report.shown.differing == ()  # each weight is the checkpoint's, rounded
    assert report.guilty[0].port == "bert.embeddings"


def test_inputs_of_ones_own_may_leave_arguments_out(checkpoint: Path) -> None:
    case = Case("ids alone", {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])})
    report = verify(checkpoint, inputs=[case])
    assert report.faithful
    assert tuple(map(str, report.unseen)) == (
        "the attention mask (none is given)",
        "the token types (one segment only)",
        "positions 3 to 23 (rows of at most 3 tokens)",
        FLAGS.replace("arguments ", "arguments attention_mask, token_type_ids, "),
    )
    assert 0 < report.shown.activation["bert.embeddings.token_type.weight"] < 1


@pytest.mark.slow
def test_progress_is_told(checkpoint: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    verify(checkpoint, dtypes=[torch.float32, torch.bfloat16], progress=lambda *step: seen.append(step))
    assert seen == [
        ("loading", 0, 5),
        ("reference in float64", 1, 5),
        ("port in float64", 2, 5),
        ("both in float32", 3, 5),
        ("both in bfloat16", 4, 5),
        ("done", 5, 5),
    ]
