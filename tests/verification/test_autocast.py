"""Under torch.autocast: both sides with float32 weights, each measured against the float64 reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from porting import verify
from porting.verification import VerifyError
from tests.verification.test_train_mode import Fused, Reference


class Straight(Reference):
    """The same layer 30 times, on a residual stream of float32."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(input_ids)
        for _ in range(30):
            x = x + self.out(self.attend(x)) / 256
        return x


class HalfResidual(Reference):
    """The stream has the dtype that the linear layer gives: under autocast each sum is rounded to 8 bits."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(input_ids)
        for _ in range(30):
            out: Tensor = self.out(self.attend(x))
            x = x.to(out.dtype) + out / 256
        return x


class Otherwise(Reference):
    """Takes another way under autocast, and a wrong one."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = super().forward(input_ids)
        return 1.5 * x if torch.is_autocast_enabled("cpu") else x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_rewrite_is_faithful_under_autocast(dtype: torch.dtype) -> None:
    """The scope names it, and it is gone from what was not run."""
    report = verify(None, Fused(), reference=Reference(), longest=8, autocast=dtype)
    assert report.verdict == "faithful", str(report)
    name = f"autocast {str(dtype).removeprefix('torch.')}"
    assert report.scope.dtypes == ("float64", "float32", name)
    assert report.noise[name] > 1e-4  # linear layers ran in half precision
    assert "gradients and training mode" in report.details()
    assert "training mode and autocast" not in report.details()


@pytest.mark.parametrize(("port", "reference"), [(HalfResidual, Straight), (Otherwise, Reference)])
def test_what_rounds_more_than_the_reference_under_autocast_is_imprecise(
    port: type[Reference], reference: type[Reference]
) -> None:
    """Both are faithful without autocast."""
    assert verify(None, port(), reference=reference(), longest=8, trials=False).faithful
    report = verify(None, port(), reference=reference(), longest=8, autocast=torch.bfloat16, trials=False)
    assert report.verdict == "imprecise", str(report)


def test_a_handwritten_model_is_faithful_under_autocast(checkpoint: Path) -> None:
    """The BERT of this package, against the one of transformers."""
    report = verify(checkpoint, longest=16, trials=False, autocast=torch.bfloat16)
    assert report.verdict == "faithful", str(report)
    assert "autocast bfloat16" in report.noise


def test_a_function_has_no_run_under_autocast() -> None:
    """It is refused before anything is run."""
    with pytest.raises(VerifyError, match=r"autocast needs a reference that is a torch\.nn\.Module"):
        verify(None, Reference(), reference=lambda input_ids: input_ids, autocast=torch.bfloat16)
