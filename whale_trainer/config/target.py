"""What a config names by `_target_`: found, held against its signature, and called.

A target is imported only to be looked at; nothing is called before `Target.build`. Neither torch nor Lightning is
imported here, only what a target's module imports itself.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, ConfigDict

from whale_trainer.config.argument_types import hints_of, type_problem
from whale_trainer.errors import ConfigError, Problem, WhaleError
from whale_trainer.validation import did_you_mean, nearest, yaml_path

_SPECIAL = ("_target_", "_partial_")
_MADE_AT_ONCE = ("model", "data.train", "data.validation", "data.test", "optimizer", "scheduler")
"""Places where a function that waits for more arguments would be of no use."""


class Target(BaseModel):
    """A class or function by its dotted name, and the arguments that the config gives it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str
    """Where it stands in the YAML, for messages."""
    target: str
    arguments: dict[str, Any] = {}
    """Plain data; mappings with a `_target_` among them are built first."""
    is_partial: bool = False

    def locate(self) -> Callable[..., Any]:
        """The class or function itself. Raises `ConfigError` that says which part of the name is wrong."""
        return locate(self.target, self.path)

    def build(self, *given: Any, **more: Any) -> Any:
        """Call the target with `given` first, and by name the config's arguments and `more`.

        With `_partial_` the result is a function that waits for the rest. Whatever the target raises comes out as a
        `ConfigError` with its place; errors of this package pass.
        """
        call = self.locate()
        try:
            arguments = {name: _built(value, f"{self.path}.{name}") for name, value in self.arguments.items()}
            bound = functools.partial(call, *given, **arguments, **more)
            return bound if self.is_partial else bound()
        except WhaleError:
            raise
        except Exception as error:
            raise ConfigError([Problem(self.path, f"{self.target} cannot be made: {_told(error)}")]) from error

    def build_with(self, *given: Any, offered: Mapping[str, Any]) -> Any:
        """As `build`, with those of `offered` that the target takes and the config does not set."""
        taken = {k: v for k, v in offered.items() if k not in self.arguments and accepts(self.locate(), k)}
        return self.build(*given, **taken)


def read_target(
    value: object, path: str, *, given: int = 0, offered: Iterable[str] = ()
) -> tuple[Target, list[Problem]]:
    """`value` as a Target, with all that is wrong about it; the names in it are not looked up.

    Arguments that stand in for it are the caller's: `given` positional ones, and those called `offered`.
    """
    if not isinstance(value, Mapping):
        found = f"{value!r} is not a mapping; allowed: {{_target_: package.module.Name, argument: value, ...}}"
        return Target(path=path, target=""), [Problem(path, found)]
    problems = [Problem(yaml_path(path, [key]), text) for key, text in _form_problems(value)]
    name = value.get("_target_")
    arguments = {str(key): item for key, item in value.items() if key not in _SPECIAL}
    target = Target(
        path=path,
        target=name if isinstance(name, str) else "",
        arguments=arguments,
        is_partial=value.get("_partial_") is True,
    )
    return target, problems


def _form_problems(value: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    name = value.get("_target_")
    if "_target_" not in value:
        guess = next((key for key in value if nearest(key, ["_target_"]) is not None), None)
        instead = f"; did you write {guess} for it?" if guess is not None else ""
        yield "_target_", f"is missing{instead}; allowed: a dotted name such as package.module.Name"
    elif not isinstance(name, str) or not name.strip():
        yield "_target_", f"{name!r} is not a dotted name; allowed: text such as package.module.Name"
    if not isinstance(value.get("_partial_", False), bool):
        yield "_partial_", f"{value['_partial_']!r} is not true or false"
    for key in value:
        if not isinstance(key, str):
            yield str(key), f"the key {key!r} is not text; allowed: the names of arguments"
        elif key.startswith("_") and key.endswith("_") and key not in _SPECIAL:
            yield key, f"is not known here; give arguments by their names (allowed: {', '.join(_SPECIAL)})"


def check_target(target: Target, *, given: int = 0, offered: Iterable[str] = ()) -> list[Problem]:
    """All that is wrong with the name and the arguments, nested targets included. Imports the target's module.

    The caller itself gives the first `given` arguments, and those named `offered`.
    """
    try:
        call = target.locate()
    except ConfigError as error:
        return list(error.problems)
    problems = list(_argument_problems(target, call, given, tuple(offered)))
    if target.is_partial and (target.path in _MADE_AT_ONCE or target.path.startswith("callbacks.")):
        problems.append(Problem(f"{target.path}._partial_", "true: this is made at once; leave it out"))
    for name, value in target.arguments.items():
        problems += _nested_problems(value, f"{target.path}.{name}")
    return problems


def _nested_problems(value: object, path: str) -> list[Problem]:
    if isinstance(value, list):
        return [p for i, item in enumerate(value) for p in _nested_problems(item, f"{path}[{i}]")]
    if not isinstance(value, Mapping):
        return []
    if "_target_" in value:
        target, problems = read_target(value, path)
        return problems or check_target(target)
    return [p for key, item in value.items() for p in _nested_problems(item, f"{path}.{key}")]


def _argument_problems(
    target: Target, call: Callable[..., Any], given: int, offered: tuple[str, ...]
) -> Iterator[Problem]:
    parameters = parameters_of(call)
    if parameters is None:
        return
    kinds = inspect.Parameter
    positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    taken = set(positional[:given])
    if len(positional) < given and not any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        text = f"{target.target} takes {len(positional)} arguments by position, and is called with {given}"
        yield Problem(f"{target.path}._target_", text)
        return
    named = {p.name: p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    allowed = tuple(name for name in named if name not in taken and name not in offered)
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    hints = hints_of(call)
    for name, value in target.arguments.items():
        path = f"{target.path}.{name}"
        if name in taken or name in offered:
            yield Problem(path, f"{value!r}: {name} is given to {target.target} by the program itself; leave it out")
        elif name not in named and not takes_any:
            words = did_you_mean(name, allowed)
            yield Problem(path, f"{value!r}: {target.target} has no such argument; {words}")
        elif name in named and (found := type_problem(value, hints.get(name, Any))) is not None:
            yield Problem(path, found)
    if target.is_partial:
        return
    for name, parameter in named.items():
        is_set = name in taken or name in offered or name in target.arguments
        if parameter.default is kinds.empty and not is_set:
            remedy = "give it" if target.path in _MADE_AT_ONCE else "give it, or _partial_: true where it comes later"
            yield Problem(f"{target.path}.{name}", f"is missing: {target.target} needs it; {remedy}")


def parameters_of(call: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a class or function without `self`; None where Python cannot tell."""
    try:
        return list(inspect.signature(call).parameters.values())
    except (ValueError, TypeError):
        return None


def accepts(call: Callable[..., Any], name: str) -> bool:
    """Whether `call` takes an argument of that name."""
    parameters = parameters_of(call) or []
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def locate(name: str, path: str) -> Callable[..., Any]:
    """The class or function called `name`. Raises `ConfigError` that says which part cannot be found."""
    where = f"{path}._target_"
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        text = f"{name!r} is not a dotted name; allowed: package.module.Name"
        raise ConfigError([Problem(where, text)])
    found, rest = _import_longest(parts, name, where)
    for index, part in enumerate(rest):
        if not hasattr(found, part):
            owner = ".".join(parts[: len(parts) - len(rest) + index])
            raise ConfigError([Problem(where, f"{name!r}: {owner} has no {part!r}{_near(found, part)}")])
        found = getattr(found, part)
    if not callable(found):
        text = f"{name!r} is {type(found).__name__}, not a class or a function that can be called"
        raise ConfigError([Problem(where, text)])
    return found


def _import_longest(parts: list[str], name: str, where: str) -> tuple[Any, list[str]]:
    """The longest beginning of the name that is a module, imported, and the parts after it."""
    module: Any = None
    for length, part in enumerate(parts):
        prefix = ".".join(parts[: length + 1])
        is_attribute = hasattr(module, part) and not inspect.ismodule(getattr(module, part))
        if module is not None and (is_attribute or not hasattr(module, "__path__")):
            return module, parts[length:]
        try:
            if prefix not in sys.modules and find_spec(prefix) is None:
                return _not_a_module(module, parts, length, where)
            module = import_module(prefix)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            # a module runs what its author wrote: whatever it raises, the config names a module that cannot be used
            text = f"{name!r}: {prefix} cannot be imported: {_told(error)}"
            raise ConfigError([Problem(where, text)]) from error
    return module, []


def _not_a_module(owner: Any, parts: list[str], length: int, where: str) -> tuple[Any, list[str]]:
    if owner is not None:
        return owner, parts[length:]
    guess = nearest(parts[0], [module.name for module in pkgutil.iter_modules()])
    remedy = f"did you mean {guess}?" if guess else "is it installed, or on PYTHONPATH?"
    text = f"{'.'.join(parts)!r}: there is no module {parts[0]!r}; {remedy}"
    raise ConfigError([Problem(where, text)])


def _near(owner: Any, name: str) -> str:
    modules = [module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", []))]
    public = [n for n in (*dir(owner), *modules) if not n.startswith("_")]
    guess = nearest(name, public)
    return f"; did you mean {guess}?" if guess else ""


def _built(value: Any, path: str) -> Any:
    """`value` with nested targets built; containers are copied, so that no one keeps a piece of the config."""
    if isinstance(value, list):
        return [_built(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {key: _built(item, f"{path}.{key}") for key, item in value.items()}
    target, problems = read_target(value, path)
    if problems:
        raise ConfigError(problems)
    return target.build()


def _told(error: BaseException) -> str:
    """The error in one line, with the place in the code that raised it."""
    text = " ".join(str(error).split()) or "no message"
    frames = traceback.extract_tb(error.__traceback__)
    inner = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<frozen")]
    place = f" ({inner[-1].filename}:{inner[-1].lineno})" if inner else ""
    return f"{type(error).__name__}: {text}{place}"
