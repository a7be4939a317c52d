"""All the rows: docs/hostile-inputs.md has them as tables."""

from __future__ import annotations

from tests.security.distributed import DISTRIBUTED
from tests.security.files import FLAX, GGUF, INDEXES, NPZ, ONNX, SAFETENSORS, TENSORFLOW
from tests.security.network import HUB
from tests.security.pickles import PICKLES
from tests.security.proofs import PROOFS
from tests.security.rows import HubRow, Proof, Row
from tests.security.words import CONFIGS, TABLES

CONTAINERS = [*SAFETENSORS, *INDEXES, *PICKLES, *DISTRIBUTED, *NPZ, *GGUF, *FLAX, *ONNX, *TENSORFLOW]
ROWS: list[Row] = [*CONTAINERS, *CONFIGS, *TABLES]
ALL: list[Row | HubRow | Proof] = [*ROWS, *HUB, *PROOFS]
