"""The command line before Hydra reads it: paths that need no quoting, and keys whose check is ours.

Pure text. Hydra refuses an unknown key with its own words; given as `++key` it lets it through, and `load_config`
refuses it with its path, its value and the nearest right word, together with everything else that is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PATH_KEYS = ("ckpt_path", "data.path", "cluster.profile", "cluster.file", "hydra.run.dir", "hydra.sweep.dir")
"""Keys whose values are paths, which may hold `=`, spaces and commas."""
CLUSTER_FILES = (".yaml", ".yml")
"""How the path of a cluster file ends; it may stand where the name of a shipped cluster does."""

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][\w./@]*)=(?P<value>.*)", re.DOTALL)


def is_flag(argument: str) -> bool:
    """True for Hydra's own options, such as `-m` and `--help`."""
    return argument.startswith("-")


def prepare(arguments: Iterable[str], groups: Sequence[str]) -> list[str]:
    """The arguments as Hydra shall see them; `groups` are the names of the config groups."""
    prepared: list[str] = []
    for argument in arguments:
        prepared += [argument] if is_flag(argument) else _prepare(argument, groups)
    return prepared


def _prepare(argument: str, groups: Sequence[str]) -> list[str]:
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        return [argument]
    key, value = match["key"], match["value"]
    if key == "cluster" and value.endswith(CLUSTER_FILES):
        return ["cluster=auto", f"++cluster.file={quoted(value)}"]
    if key in PATH_KEYS and not _is_list(key, value):
        value = quoted(value)
    is_ours = key not in groups and not key.startswith("hydra") and "@" not in key and "/" not in key
    return [f"++{key}={value}" if is_ours else f"{key}={value}"]


def _is_list(key: str, value: str) -> bool:
    """Whether the value is a list of paths, where a list may stand."""
    return key == "cluster.profile" and value.startswith("[") and value.endswith("]")


def quoted(value: str) -> str:
    """`value` in single quotes where Hydra's grammar would stumble over it."""
    is_plain = re.fullmatch(r"[\w./+~%-]*", value) is not None
    if is_plain or value[:1] in "'\"" or "${" in value:
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
