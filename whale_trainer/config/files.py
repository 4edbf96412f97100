"""Files that the cluster section names: a cluster of the user's (`file`), and measured profiles (`profile`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from whale_trainer.errors import ConfigError, Problem
from whale_trainer.planning.simulation.profile import PATH as PROFILE
from whale_trainer.planning.simulation.profile import Profile, load_profile, merge_profiles
from whale_trainer.validation import did_you_mean, nearest

FILE = "cluster.file"
PROFILE_NAME = "profile.yaml"
"""Looked for where a folder is given."""
_KEYS = ("nodes", "network", "kinds", "profile", "file")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def with_file(section: Mapping[Any, Any]) -> dict[Any, Any]:
    """The cluster section with what `file` holds in its place; a profile that the file names is beside it.

    Raises `ConfigError` for a file that cannot be read, and for nodes that are declared twice.
    """
    for key in section:
        if key not in _KEYS and nearest(key, _KEYS) in ("profile", "file"):
            raise ConfigError([Problem(f"cluster.{key}", f"unknown key; {did_you_mean(key, _KEYS)}")])
    given = {key: value for key, value in section.items() if key != "file"}
    name = section.get("file")
    if name is None:
        return given
    if not isinstance(name, str):
        raise ConfigError([Problem(FILE, f"{name!r} is not text; allowed: the path of a cluster file, or null")])
    if given.pop("nodes", "auto") != "auto":
        message = "the nodes are declared both in this file and in cluster.nodes; give the file as cluster=PATH"
        raise ConfigError([Problem(FILE, message)])
    content = read_yaml(Path(name), FILE)
    if not isinstance(content, Mapping):
        raise ConfigError([Problem(FILE, f"{name} is no cluster file: it has no mapping {{nodes, network, kinds}}")])
    beside = content.get("profile")
    if isinstance(beside, str):
        content = {**content, "profile": str(Path(name).parent / beside)}
    return {**content, **given}


def profile_of(section: Mapping[Any, Any]) -> Profile | None:
    """The profiles that the cluster section names, merged; None where it names none. Raises `ConfigError`."""
    value = section.get("profile")
    if value is None:
        return None
    names = value if isinstance(value, list | tuple) else [value]
    problems: list[Problem] = []
    profiles: list[Profile] = []
    for index, name in enumerate(names):
        path = f"{PROFILE}[{index}]" if isinstance(value, list | tuple) else PROFILE
        if not isinstance(name, str) or not name:
            text = f"{name!r} is not text; allowed: the path of a profile.yaml, a list of them, or null"
            problems.append(Problem(path, text))
            continue
        try:
            profiles.append(_read_profile(Path(name), path))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return merge_profiles(profiles)


def _read_profile(file: Path, path: str) -> Profile:
    file = file / PROFILE_NAME if file.is_dir() else file
    content = read_yaml(file, path)
    try:
        return load_profile(content, path)
    except ConfigError as error:
        raise ConfigError(Problem(p.path, f"{p.message} ({file})") for p in error.problems) from None


def read_yaml(file: Path, path: str) -> Any:
    """What a YAML file holds. Raises `ConfigError` under `path` for one that cannot be read."""
    try:
        with file.open(encoding="utf-8") as stream:
            return yaml.load(stream, Loader=_Loader)
    except OSError as error:
        raise ConfigError([Problem(path, f"{file} cannot be read: {error.strerror}")]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(path, f"{file} is no YAML: {' '.join(str(error).split())[:200]}")]) from error
