"""Operators on lists of tensors are those of each tensor."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from xrt_torch.foreach import decompositions  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
OPERATORS = decompositions()


def made_for(argument: Any, number: int, is_matrix: bool) -> Any:
    """A value for an argument of an operator. number: of the argument."""
    kind = str(argument.type)
    generator = torch.Generator().manual_seed(number)
    shapes = [(2, 2)] * 3 if is_matrix else [(3, 4), (), (2, 1)]
    if kind == "List[Tensor]":
        return [1.5 * torch.rand(s, generator=generator) + 0.1 for s in shapes]
    if kind == "Tensor":
        return torch.tensor(0.5) if argument.name == "other" else torch.tensor([0.5, 2.0, -1.5])
    if kind == "List[number]":
        return [0.5, 2, -1.5]
    return 3 if argument.name == "ord" else 0.75


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_as_torchs_own(operator: Any) -> None:
    """For each overload: lists, numbers for all tensors or one for each, tensors of numbers."""
    is_matrix = "_mm" in str(operator)
    arguments = [a for a in operator._schema.arguments if str(a.type) not in ("Optional[int]", "bool")]
    given = [made_for(a, i, is_matrix) for i, a in enumerate(arguments) if not a.kwarg_only]
    named = {a.name: 2 for a in arguments if a.kwarg_only}
    found, expected = OPERATORS[operator](*given, **named), operator(*given, **named)
    if "zero" not in str(operator):
        assert any(e.any() for e in expected)
    torch.testing.assert_close(found, list(expected), equal_nan=True)


def test_none_is_missing() -> None:
    """But for sums of powers, which nothing in torch calls but its own norms."""
    names = {n for n in dir(torch._C._VariableFunctions) if n.startswith("_foreach_") and not n.endswith("_")}
    assert names - {str(o).split(".")[1] for o in OPERATORS} <= {"_foreach_powsum"}
