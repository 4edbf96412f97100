"""Hydra's and OmegaConf's errors told in our form: where, what was found, what to do."""

from __future__ import annotations

import re

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from whale_trainer.errors import ConfigError, Problem
from whale_trainer.validation import did_you_mean

HYDRA_ERRORS = (HydraException, OmegaConfBaseException)
"""What composing and resolving may raise for a mistake of the user."""


def as_config_error(error: Exception) -> ConfigError:
    """The `ConfigError` that says what `error` says, in a line."""
    return ConfigError([_problem(error)])


def _problem(error: BaseException) -> Problem:
    if isinstance(error, OverrideParseException):
        remedy = "write key=value; a value with spaces, commas, = or brackets stands in quotes: 'key=\"a, b\"'"
        return Problem(
            _key(error.override),
            f"{error.override.removeprefix('++')!r} cannot be read ({_first_line(error)}); {remedy}",
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = tuple(error.options or ())
        return Problem(group or "config", f"{name!r} is none of the choices; {did_you_mean(name, options)}")
    if isinstance(error, ConfigCompositionException) and error.__cause__ is not None:
        found = _problem(error.__cause__)
        return Problem(_override_key(error) or found.path, found.message)
    if isinstance(error, OmegaConfBaseException):
        key = error.full_key or "config"
        return Problem(str(key), _omegaconf_text(error))
    text = _first_line(error)
    override = re.search(r"'([^']+)'", text)
    return Problem(_key(override[1]) if override else "config", text)


def _omegaconf_text(error: OmegaConfBaseException) -> str:
    name = type(error).__name__
    text = _first_line(error)
    if name in ("MissingMandatoryValue", "InterpolationToMissingValueError"):
        missing = re.search(r"[\"'`]?([\w.]+)[\"'`]?\s*$", text)
        which = f" ({missing[1]})" if missing and "." in missing[1] else ""
        return f"a value that has to be given is missing{which}: give it on the command line, key=value"
    if name.startswith("Interpolation"):
        return f"an interpolation leads nowhere: {text}"
    return text


def _override_key(error: ConfigCompositionException) -> str | None:
    match = re.search(r"Could not override '([^']+)'", str(error))
    return match[1] if match else None


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~") or "config"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
