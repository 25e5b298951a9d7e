"""``--model_args`` of the model: which method at which k, without any argument that is silently ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fathom_eval.branches import Branch
from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.methods import MethodSpec, parse_method, registry
from fathom_eval.models import ModelFacts
from fathom_eval.selection import Policy


def method_spec(method: str, options: Mapping[str, Any], arguments: Iterable[str]) -> MethodSpec:
    """The method with its options, of which each may stand in ``method`` or as an argument of its own.

    Args:
        method: ``fathom`` or ``fathom:budget=48``.
        options: Arguments that are none of the model's own.
        arguments: Names of the model's own arguments, for suggestions.

    Raises:
        UserError: The method or an option is unknown, or a value is unusable.
    """
    name = method.split(":")[0].strip()
    methods = registry(name)
    if name not in methods:
        raise UserError(f"unknown method '{name}' in model_args; {did_you_mean(name, methods)}")
    known = {field.name for part in (methods[name], Policy) for field in dataclasses.fields(part)}
    for option in options:
        if option not in known:
            raise UserError(f"unknown argument '{option}' in model_args for method '{name}'; {did_you_mean(option, {*known, *arguments})}")
    return parse_method(":".join([method, *(f"{option}={_written(value)}" for option, value in options.items())]))


def _written(value: Any) -> str:
    """A value that lm-eval has parsed, as a method's text form has it."""
    return "+".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def branch_of(spec: MethodSpec, k: Any, facts: ModelFacts) -> Branch:
    """The method at its k.

    Raises:
        UserError: A k is missing, unusable, or given to a method that selects nothing; or an option cannot work with the model.
    """
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise UserError(f"k={k} in model_args is not a whole number of at least 1")
    if spec.method.store(facts) is None:
        if k is not None:
            raise UserError(f"method '{spec.method.name}' attends to everything, so k={k} in model_args does nothing: leave it out")
        spec.check(facts, [])
        return Branch(spec, None)
    if k is None:
        raise UserError(f"method '{spec.method.name}' selects k keys a query head: give k in model_args, for example k=512")
    spec.check(facts, [k])
    return Branch(spec, k)


def batch_size_of(batch_size: int | str, max_batch_size: int | None) -> int:
    """The batch size of loglikelihood requests; generations are decoded one by one. Raises UserError for ``auto`` and its maximum."""
    if max_batch_size is not None or not str(batch_size).isdecimal() or int(batch_size) < 1:
        given = f"max_batch_size {max_batch_size}" if max_batch_size is not None else f"batch_size '{batch_size}'"
        raise UserError(f"{given}: the model searches for no batch size, every prompt has a prefill of its own; give a number or nothing")
    return int(batch_size)


def device_of(device: str | None) -> str:
    """The device as :func:`fathom_eval.models.load_model` takes it.

    lm-eval's command line names ``cuda:0`` where the user names nothing: without a GPU that is the CPU, as for ``hf``.
    """
    import torch

    return "auto" if device is None or (device == "cuda:0" and not torch.cuda.is_available()) else device
