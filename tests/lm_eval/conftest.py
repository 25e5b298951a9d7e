"""What the tests of lm-eval share: tiny models in folders, a haystack, and lm-eval's tasks loaded by any of its versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fathom_eval.models import LoadedModel, load_model
from tests.tiny import save_tiny

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

Load = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("lm-eval") / "tiny")


@pytest.fixture(scope="module")
def loaded(model: Path) -> LoadedModel:
    return load_model(str(model), dtype="float32", device="cpu", offline=True)


@pytest.fixture(scope="module")
def hf(model: Path) -> HFLM:
    """The same model as lm-eval itself runs it."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(model), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lm-eval-text") / "prose.txt"
    path.write_text("\n".join(f"The boat number {n} left the old harbour early. Nobody saw it go." for n in range(300)), encoding="utf-8")
    return str(path)


@pytest.fixture
def load() -> Load:
    """Load tasks by name, from this package's folder unless told otherwise, without indexing lm-eval's own thousands."""
    from lm_eval.tasks import TaskManager

    from fathom_eval.tasks.lm_eval import PATH

    def load(names: Sequence[str], metadata: dict[str, Any], include_path: Any = str(PATH)) -> dict[str, Any]:
        manager = TaskManager(include_path=include_path, include_defaults=False, metadata=metadata)
        if hasattr(manager, "load"):
            return dict(manager.load(list(names))["tasks"])
        return _flat(manager.load_task_or_group(list(names)))

    return load


def _flat(loaded: dict[Any, Any]) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    for name, task in loaded.items():
        tasks.update(_flat(task) if isinstance(task, dict) else {name: task})
    return tasks
