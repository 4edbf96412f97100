"""From pydantic's errors to our own: a YAML path, the value found, what is allowed, and the nearest right word.

Sections describe what a field takes in `Field(description=...)`; that text is the "allowed" part of each message.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from whale_trainer.errors import Problem

_NOUNS = {
    "int": "an integer",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "is_instance": "of the right type",
}


def nearest(word: object, allowed: Iterable[str]) -> str | None:
    """The allowed word that `word` was probably meant to be, if any; letter case and `-`, `_` do not count.

    >>> nearest("micro_batchs", ["micro_batches", "schedule"])
    'micro_batches'
    """
    plain = {_plain(a): a for a in reversed(list(allowed))}
    found = difflib.get_close_matches(_plain(str(word)), list(plain), n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "").replace(" ", "")


def did_you_mean(word: object, allowed: Sequence[str]) -> str:
    """The end of a message about a wrong word: the nearest right one, or the whole list when none is near."""
    guess = nearest(word, allowed)
    choices = ", ".join(allowed) if allowed else "nothing"
    return f"did you mean {guess}? (allowed: {choices})" if guess else f"allowed: {choices}"


def counted(number: int, noun: str) -> str:
    """`1 layer`, `3 layers`, `2 micro-batches`."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


def refusal(message: str) -> PydanticCustomError:
    """An error for validators to raise; its text reaches the user as it stands."""
    return PydanticCustomError("refused", "{text}", {"text": message})


def yaml_path(prefix: str, location: Iterable[int | str]) -> str:
    """`cluster` and ("nodes", 1, "devices") give `cluster.nodes[1].devices`."""
    path = prefix
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def problems_of(error: ValidationError, prefix: str, model: type[BaseModel]) -> list[Problem]:
    """Every error of `model.model_validate` as a problem under the YAML path `prefix`, in the order of the paths."""
    found: dict[Problem, None] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and detail["input"]:
            continue  # pydantic's echo of items that have errors of their own
        location = tuple(step for step in detail["loc"] if step != "[key]")
        path = _without_union_tags(model, location, is_unknown=detail["type"] == "extra_forbidden")
        found[Problem(yaml_path(prefix, path), _message(detail, model, location))] = None
    return list(found)


def _message(detail: ErrorDetails, model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "refused":
        return detail["msg"]
    field = _field_at(model, location)
    allowed = f"; allowed: {field.description}" if field is not None and field.description else ""
    if kind == "extra_forbidden":
        owner = _model_at(model, location[:-1])
        return f"unknown key; {did_you_mean(location[-1], tuple(owner.model_fields) if owner else ())}"
    if kind == "missing":
        return f"is missing{allowed}"
    if kind in ("literal_error", "enum"):
        return f"{value!r} is not allowed; {did_you_mean(value, _choices(field) or _expected(context))}"
    if kind == "string_pattern_mismatch":
        return f"{value!r} has another form{allowed}"
    if kind in ("too_short", "string_too_short"):
        return f"is empty{allowed}"
    if kind == "finite_number":
        return f"{value!r} is not a finite number{allowed}"
    for bound, words in (("ge", "below"), ("gt", "not above"), ("le", "above"), ("lt", "not below")):
        if bound in context:
            return f"{value!r} is {words} {context[bound]:g}{allowed}"
    for name, noun in _NOUNS.items():
        if kind.startswith(f"{name}_") and kind.endswith(("_type", "_parsing", "_from_float", "_of")):
            return f"{value!r} is not {noun}{allowed}"
    return f"{value!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}{allowed}"


def _choices(field: FieldInfo | None) -> tuple[str, ...]:
    if field is None:
        return ()
    return tuple(str(a) for t in _unfold(field.annotation) if get_origin(t) is Literal for a in get_args(t))


def _expected(context: dict[str, Any]) -> tuple[str, ...]:
    """The words in pydantic's `'a', 'b' or 'c'`, for the key of a mapping, which has no field."""
    return tuple(re.findall(r"'([^']*)'", str(context.get("expected", ""))))


def _unfold(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation: members of a union, without `Annotated` and None."""
    if get_origin(annotation) is Annotated:
        yield from _unfold(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _unfold(member)
    elif annotation is not type(None):
        yield annotation


def _step(fields: list[FieldInfo], step: int | str) -> list[FieldInfo]:
    """The fields that one step of a path may lead to."""
    found: list[FieldInfo] = []
    for field in fields:
        for alternative in _unfold(field.annotation):
            origin, arguments = get_origin(alternative), get_args(alternative)
            if isinstance(alternative, type) and issubclass(alternative, BaseModel):
                found += [alternative.model_fields[step]] if step in alternative.model_fields else []
            elif origin in (tuple, list) and isinstance(step, int):
                found.append(FieldInfo.from_annotation(arguments[0]))
            elif origin is dict:
                found.append(FieldInfo.from_annotation(arguments[1]))
    return found


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[FieldInfo]:
    fields = [FieldInfo.from_annotation(model)]
    for step in _without_union_tags(model, location):
        fields = _step(fields, step)
    return fields


def _field_at(model: type[BaseModel], location: Sequence[int | str]) -> FieldInfo | None:
    fields = _fields_at(model, location)
    return fields[0] if fields else None


def _model_at(model: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    for field in _fields_at(model, location):
        for alternative in _unfold(field.annotation):
            if isinstance(alternative, type) and issubclass(alternative, BaseModel):
                return alternative
    return None


def _without_union_tags(
    model: type[BaseModel], location: Sequence[int | str], *, is_unknown: bool = False
) -> tuple[int | str, ...]:
    """The path as it stands in YAML: pydantic adds the names of a union's members to its own.

    `is_unknown`: the last step is a key that the model does not have, and is kept.
    """
    path: list[int | str] = []
    fields = [FieldInfo.from_annotation(model)]
    for position, step in enumerate(location):
        following = _step(fields, step)
        if following or (is_unknown and position == len(location) - 1):
            is_position = any(get_origin(a) in (tuple, list) for f in fields for a in _unfold(f.annotation))
            path.append(step if is_position else str(step))
            fields = following
    return tuple(path)
