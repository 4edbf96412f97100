"""Imports go one way: the contracts of pyproject.toml, what they cannot say, and what a command must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "whale_trainer"
TALKERS = ("runtime", "checkpoint", "strategy", "launch")
"""The only parts that may use torch.distributed."""

NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "lightning", "pytorch_lightning", "hydra", "omegaconf"}:
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Refuse())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def imports_of(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout
    assert " 0 broken" in result.stdout


def test_planning_works_where_torch_cannot_be_imported() -> None:
    modules = [f"whale_trainer.planning.{path.stem}" for path in (PACKAGE / "planning").glob("*.py")]
    assert "whale_trainer.planning.planner" in modules
    result = python(f"{NO_TORCH}\nimport whale_trainer.cluster, {', '.join(modules)}")
    assert result.returncode == 0, result.stderr
    refused = python(f"{NO_TORCH}\nimport whale_trainer.describe")
    assert "ImportError: torch must not be imported" in refused.stderr  # the refusal itself works


def test_planning_a_run_loads_neither_lightning_nor_wandb() -> None:
    names = ["api", "config", "describe", "launch", "planning.planner", "planning.show", "report"]
    modules = ", ".join(f"whale_trainer.{name}" for name in names)
    result = python(f"import sys, {modules}\nprint(*sys.modules)")
    assert result.returncode == 0, result.stderr
    assert not {"pytorch_lightning", "lightning_fabric", "wandb"} & set(result.stdout.split())


def test_torch_distributed_is_used_by_four_parts_only() -> None:
    users = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in PACKAGE.rglob("*.py")
        if any(is_within(module, "torch.distributed") for module in imports_of(path))
    }
    assert users <= set(TALKERS)
    assert {"runtime", "launch"} <= users


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.name)
def test_models_are_plain(path: Path) -> None:
    """A shipped model imports torch and its neighbours, as a user's would."""
    own = {m for m in imports_of(path) if is_within(m, "whale_trainer") and not is_within(m, "whale_trainer.models")}
    assert own == set()
