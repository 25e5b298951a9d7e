"""A tiny model, and a prefix of which several blocks are sealed."""

from __future__ import annotations

import pytest

from fathom_eval.models import LoadedModel
from fathom_eval.prefill import Prefix, prefill
from tests.tiny import tiny_model, token_ids


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama", head_dim=16)


@pytest.fixture(scope="module")
def prefix(loaded: LoadedModel) -> Prefix:
    return prefill(loaded, token_ids(loaded, 330))
