"""Whether a value from YAML can be what an argument's annotation asks for. Pure: nothing is imported for it.

Only what YAML can write is judged: numbers, text, true and false, null, lists and mappings. An annotation with a type
that is not known here takes anything, since a class may be made from text or a number.
"""

from __future__ import annotations

import collections.abc
import contextlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from whale_trainer.validation import did_you_mean

LEFT_OPEN = "???"
"""What a YAML file of Hydra's holds for a value that the user has to give; told apart from wrong values."""
_ANYTHING = ""
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


def hints_of(call: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a class's or function's arguments, without those that cannot be resolved."""
    function = inspect.unwrap(getattr(call, "__init__", call) if inspect.isclass(call) else call)
    names = getattr(function, "__globals__", {})
    found: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        # one by one: a name that exists for type checkers only spoils its own argument, not the others
        with contextlib.suppress(Exception):
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            found |= typing.get_type_hints(alone, globalns=names)
    return found


def type_problem(value: object, annotation: Any) -> str | None:
    """What is wrong with `value` for an argument of that annotation, or None."""
    if isinstance(value, float) and math.isnan(value):
        return "nan is not a number that anything can be computed with"
    if value == LEFT_OPEN or (isinstance(value, Mapping) and "_target_" in value):
        return None
    allowed: list[str] = []
    for alternative in _writable(annotation):
        words = _allowed(value, alternative)
        if words is None or words == _ANYTHING:
            return None
        allowed.append(words)
    choices = [str(a) for t in _writable(annotation) if get_origin(t) is Literal for a in get_args(t)]
    if choices and isinstance(value, str):
        return f"{value!r} is not allowed; {did_you_mean(value, choices)}"
    return f"{value!r} is not {' or '.join(dict.fromkeys(allowed))}"


def _writable(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without the tensors that torch takes besides numbers and YAML cannot write."""
    found = _alternatives(annotation)
    return [a for a in found if getattr(a, "__name__", "") != "Tensor"] or [Any]


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [a for member in get_args(annotation) for a in _alternatives(member)]
    return [annotation]


def _allowed(value: object, annotation: Any) -> str | None:
    """None if `value` fits; else what would, or the empty text where that cannot be judged."""
    origin = get_origin(annotation) or annotation
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if origin in (type(None), None):
        return None if value is None else "null"
    if origin is bool:
        return None if isinstance(value, bool) else "true or false"
    if origin is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "an integer"
    if origin is float:
        return None if is_number else "a number"
    if origin is str:
        return None if isinstance(value, str) else "text"
    if origin is Literal:
        choices = get_args(annotation)
        fits = any(value == c and type(value) is type(c) for c in choices)
        return None if fits else "one of " + ", ".join(map(str, choices))
    if origin in (dict, collections.abc.Mapping):
        return None if isinstance(value, Mapping) else "a mapping"
    if origin in _SEQUENCES:
        return _allowed_list(value, origin, get_args(annotation))
    return _ANYTHING


def _allowed_list(value: object, origin: Any, arguments: tuple[Any, ...]) -> str | None:
    if isinstance(value, str):
        # text is a sequence too, though never a list or a tuple
        return "a list" if origin in (list, tuple) else _ANYTHING
    if not isinstance(value, list | tuple):
        return "a list"
    is_fixed = origin is tuple and arguments and arguments[-1] is not Ellipsis
    if is_fixed and len(value) != len(arguments):
        return f"a list of {len(arguments)}"
    members = arguments if is_fixed else (arguments[:1] or (Any,)) * len(value)
    for item, member in zip(value, members, strict=False):
        found = type_problem(item, member)
        if found is not None:
            return f"a list whose every item fits ({found})"
    return None
