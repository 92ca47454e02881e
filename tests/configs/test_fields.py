"""What is read off a configuration dataclass."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, Optional

import pytest
from omegaconf import OmegaConf

from fp4zoo.configs.fields import build, describe, keys, leaves, mutable_twin
from fp4zoo.errors import UserError


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
      power: in kilowatts,
        at the wheel.
      fuel: what it burns.
    """

    power: float
    fuel: Literal["petrol", "diesel"] = "petrol"

    def __post_init__(self):
        if self.power <= 0:
            raise ValueError(f"engine.power={self.power} must be\npositive")


@dataclass(frozen=True)
class Car:
    """A car.

    wheels, doors: how many.

    Raises:
      ValueError: never.
    """

    engine: Engine = field(default_factory=lambda: Engine(50.0))
    wheels: int = 4
    doors: Optional[int] = None  # noqa: UP045 (both spellings have to work)
    spare: Engine | None = None
    tags: tuple[str, ...] = ()


def test_descriptions_come_from_the_docstring_in_either_style():
    assert describe(Engine) == {"power": "in kilowatts, at the wheel.", "fuel": "what it burns."}
    assert describe(Car) == {"wheels": "how many.", "doors": "how many."}


def test_keys_have_path_type_default_and_group():
    known = keys(Car)
    assert list(known) == [
        *("engine", "engine.power", "engine.fuel", "wheels", "doors"),
        *("spare", "spare.power", "spare.fuel", "tags"),
    ]
    assert known["engine"].group is Engine and not known["engine"].optional
    assert known["spare"].group is Engine and known["spare"].optional
    assert known["engine.power"].default is dataclasses.MISSING
    assert known["engine.fuel"].choices == ("petrol", "diesel")
    assert known["doors"].expected == "an integer or null"
    assert known["tags"].expected == "a list, each text"
    assert set(leaves(Car)) == set(known) - {"engine", "spare"}


def test_twin_takes_values_that_the_frozen_class_would_not():
    node = OmegaConf.structured(mutable_twin(Car))
    node = OmegaConf.merge(node, {"spare": {"power": 3}, "tags": ["a"]})
    node.spare.fuel = "diesel"
    car = build(Car, OmegaConf.to_container(node))  # pyright: ignore[reportArgumentType]
    assert car == Car(spare=Engine(3.0, "diesel"), tags=("a",))


@pytest.mark.parametrize(
    "path, right, wrong",
    [
        ("engine.power", [1, 0.5, "${wheels}"], [None, True, "x", [1.0]]),
        ("engine.fuel", ["petrol", 3], [None, ["petrol"], {}]),
        ("wheels", [3], [None, True, 3.0, "3"]),
        ("doors", [None, 3], [3.0]),
        ("engine", [{"power": 1}], [None, 3]),
        ("spare", [{"power": 1}, None], ["x"]),
        ("tags", [["a"], []], [None, "a"]),
    ],
)
def test_values_are_accepted_by_type(path: str, right: list, wrong: list):
    key = keys(Car)[path]
    assert [key.accepts(value) for value in right] == [True] * len(right)
    assert [key.accepts(value) for value in wrong] == [False] * len(wrong)


def test_build_says_what_is_wrong_in_one_line():
    values = {"engine": {"power": 1.0, "fuel": "petrl"}, "wheels": 4, "doors": 2, "tags": []}
    with pytest.raises(
        UserError, match=r"^engine.fuel=petrl: unknown choice: did you mean 'petrol'\?$"
    ):
        build(Car, values | {"spare": None})
    values["engine"] = {"power": -1.0, "fuel": "petrol"}
    with pytest.raises(UserError, match=r"^engine.power=-1.0 must be positive$"):
        build(Car, values | {"spare": None})
