"""Methods that installed packages give, through entry points of the group ``fathom_eval.methods``."""

from __future__ import annotations

from collections.abc import Container, Iterable
from importlib.metadata import EntryPoint, entry_points

from fathom_eval.errors import METHOD_ERRORS, UserError
from fathom_eval.gguf_models import one_line
from fathom_eval.methods.base import Method

GROUP = "fathom_eval.methods"


def installed_methods(taken: Iterable[str]) -> tuple[dict[str, type[Method]], dict[str, UserError]]:
    """The methods by name, and by the name of its entry point what is wrong with each that gives none.

    Args:
        taken: Names that they cannot have.
    """
    names, methods, broken = set(taken), dict[str, type[Method]](), dict[str, UserError]()
    for entry in entry_points(group=GROUP):
        try:
            method = _loaded(entry, names)
        except UserError as error:
            broken[entry.name] = error
            continue
        methods[method.name] = method
        names.add(method.name)
    return methods, broken


def _loaded(entry: EntryPoint, taken: Container[str]) -> type[Method]:
    try:
        method = entry.load()
    except METHOD_ERRORS as error:
        raise UserError(f"the method plug-in '{entry.name}' ({entry.value}) cannot be loaded: {one_line(error)}") from error
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UserError(f"the entry point '{entry.name}' of group {GROUP} is not a subclass of Method")
    if (name := getattr(method, "name", None)) is None:
        raise UserError(f"the entry point '{entry.name}' of group {GROUP} is a method without a name")
    if not (isinstance(name, str) and name and not set(name) & set(":,= \t\n")):
        raise UserError(f"the entry point '{entry.name}' names a method {name!r}, which a list of methods cannot name")
    if name in taken:
        raise UserError(f"the entry point '{entry.name}' names a method '{name}', which exists already")
    return method
