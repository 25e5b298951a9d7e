"""Settings of all tests: nothing touches a network. The variables must stand before anything imports a Hugging Face library."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fathom_eval.models import LoadedModel

for _variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[_variable] = "1"


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The bundled model in float32 on the CPU. Tests that use it carry the marker ``model``; without the model they are skipped."""
    from fathom_eval.errors import UserError
    from fathom_eval.models import load_model

    try:
        return load_model("smollm2", dtype="float32", device="cpu", offline=True)
    except UserError as error:
        pytest.skip(str(error))
