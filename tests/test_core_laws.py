"""The stored laws are what sympy derives, and say what they should of well-known functions."""

import importlib.util
from pathlib import Path

import pytest

from spmdtypes.core.scalar import SCALARS, laws, power_laws

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_is_what_sympy_derives():
    spec = importlib.util.spec_from_file_location("derive_laws", ROOT / "tools" / "derive_laws.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.table() == generator.TABLE.read_text()


def args(*ks):
    return frozenset(ks)


@pytest.mark.parametrize(
    ("name", "where", "op", "result"),
    [
        ("add", args(0, 1), "sum", "sum"),
        ("mul", args(0), "sum", "sum"),
        ("div", args(0), "sum", "sum"),
        ("neg", args(0), "max", "min"),
        ("exp", args(0), "max", "max"),
        ("exp", args(0), "sum", "prod"),
        ("where", args(1, 2), "sum", "sum"),
        ("max", args(0, 1), "max", "max"),
        ("not", args(0), "max", "min"),
        ("conj", args(0), "sum", "sum"),
    ],
)
def test_holds(name, where, op, result):
    assert laws(name).hom[where, op] == result


@pytest.mark.parametrize(
    ("name", "where", "op"),
    [
        ("add", args(0), "sum"),  # a bias would be added once per rank
        ("mul", args(0, 1), "sum"),
        ("div", args(1), "sum"),
        ("gelu", args(0), "sum"),
        ("relu", args(0), "sum"),
        ("trunc", args(0), "sum"),  # casts to integers do not add up
        ("floordiv", args(0), "sum"),
        ("sqrt", args(0), "max"),  # a term may be negative where the maximum is not
        ("log", args(0), "max"),
        ("where", args(1), "sum"),
    ],
)
def test_does_not_hold(name, where, op):
    assert (where, op) not in laws(name).hom


def test_degrees():
    assert laws("mul").degree == {args(0): 1, args(1): 1, args(0, 1): 2}
    assert laws("div").degree[args(1)] == -1
    assert laws("relu").degree[args(0)] == 1
    assert args(0) not in laws("gelu").degree
    assert power_laws(3.0).degree[args(0)] == 3


def test_an_unknown_function_is_opaque():
    assert "frobnicate" not in SCALARS
    assert not laws("frobnicate").hom
