"""From pydantic's errors to messages with a YAML path, the value found and the nearest right word."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from whale_trainer.validation import counted, did_you_mean, nearest, problems_of, refusal, yaml_path


def even(value: int) -> int:
    if value % 2:
        raise refusal(f"{value} is odd; allowed: even numbers")
    return value


class Inner(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: Annotated[int, AfterValidator(even)] = Field(default=2, description="an even number")
    word: Literal["left", "right"] = "left"


class Outer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    one: Inner | None = None
    either: int | Inner | None = None
    many: list[Inner] = Field(default_factory=list)
    named: dict[str, Inner] = Field(default_factory=dict)
    path: str | None = Field(default=None, max_length=3)
    flag: bool = False


def problems(data: object) -> dict[str, str]:
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(data)
    return {p.path: p.message for p in problems_of(error.value, "outer", Outer)}


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        ({"one": {"size": 3}}, "outer.one.size", "3 is odd; allowed: even numbers"),
        ({"one": {"size": "2"}}, "outer.one.size", "'2' is not an integer; allowed: an even number"),
        ({"one": {"sise": 2}}, "outer.one.sise", "unknown key; did you mean size? (allowed: size, word)"),
        ({"one": 3}, "outer.one", "3 is not a mapping"),
        (
            {"many": [{}, {"word": "lefft"}]},
            "outer.many[1].word",
            "'lefft' is not allowed; did you mean left? (allowed: left, right)",
        ),
        ({"many": 3}, "outer.many", "3 is not a list"),
        ({"named": {"a b": {"size": 1}}}, "outer.named.a b.size", "1 is odd; allowed: even numbers"),
        ({"path": "long"}, "outer.path", "'long': string should have at most 3 characters"),
        ({"flag": "false"}, "outer.flag", "'false' is not true or false"),
        (
            {"flga": True},
            "outer.flga",
            "unknown key; did you mean flag? (allowed: one, either, many, named, path, flag)",
        ),
    ],
)
def test_messages(data: dict[str, object], path: str, message: str) -> None:
    assert problems(data) == {path: message}


def test_union_members_do_not_show_in_the_path() -> None:
    assert list(problems({"either": {"sise": 2}})) == ["outer.either", "outer.either.sise"]


def test_paths() -> None:
    assert yaml_path("cluster", ("nodes", 1, "devices")) == "cluster.nodes[1].devices"
    assert yaml_path("", ("seed",)) == "seed"


def test_nearest_words() -> None:
    assert nearest("V100_sxm2_32gb", ["V100-SXM2-16GB", "V100-SXM2-32GB"]) == "V100-SXM2-32GB"
    assert nearest("abacus", ["left", "right"]) is None
    assert nearest("b", ["a", "b", "B"]) == "b"
    assert did_you_mean("x", ()) == "allowed: nothing"


def test_counted() -> None:
    assert [counted(1, "layer"), counted(0, "layer"), counted(2, "micro-batch")] == [
        "1 layer",
        "0 layers",
        "2 micro-batches",
    ]
