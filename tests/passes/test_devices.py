"""Placement of nodes on devices: rules become annotations, a device is an engine's or the host's, or an error."""

from __future__ import annotations

import numpy as np
import pytest

from xrt_core.errors import DeviceNotFoundError, GraphError, OptionError
from xrt_core.ir.graph import Graph, Node, Support, Value, engine_at
from xrt_core.ir.types import TensorType
from xrt_core.passes.partitioning import HOST, Candidate, MarkRule, apply_placement, devices_of, place, resolve_devices


def chain() -> Graph:
    """Relu, named head/0, then Exp, named tail/0."""
    x, y, z = (Value(n, TensorType(np.dtype(np.float32), (2,))) for n in "xyz")
    nodes = [Node("Relu", [x], [y], version=14, name="head/0"), Node("Exp", [y], [z], version=13, name="tail/0")]
    return Graph([x], [z], nodes, opsets={"": 21}, name="chain")


def rule(pattern: str, device: str) -> MarkRule:
    return MarkRule(pattern, device, "placement")


def takes(engine: str, device: str, *op_types: str) -> Candidate:
    return Candidate(
        engine_at(engine, device), lambda n: Support.yes() if n.op_type in op_types else Support.no("it has no kernel")
    )


def test_rules_place_nodes() -> None:
    """The nodes that a rule matches; one without a match, and two that disagree, are errors that name them."""
    placed = apply_placement(chain(), [rule("name:head/*", "cpu:1")])
    assert [n.annotations.device for n in placed.nodes] == ["cpu:1", None]
    assert devices_of(placed) == ("cpu:1",)
    with pytest.raises(OptionError, match=r"placement={'name:haed/\*': 'cpu:1'} matches no node name.*head/0"):
        apply_placement(chain(), [rule("name:haed/*", "cpu:1")])
    with pytest.raises(GraphError, match="'head/0'.*several devices"):
        apply_placement(chain(), [rule("name:head/*", "cpu:1"), rule("op:Relu", "cpu:2")])


def test_devices_are_resolved() -> None:
    """A device has another name, is the engines' own, or is not there: an error, or given up with the reason."""
    placed = apply_placement(chain(), [rule("op:Relu", "cuda"), rule("op:Exp", "cpu")])
    found = resolve_devices(placed, {"cuda": "cuda:0", "cpu": None}.get, None)
    assert [n.annotations.device for n in found.nodes] == ["cuda:0", None]

    def absent(device: str) -> str:
        raise DeviceNotFoundError("there are cpu, cpu:1")

    with pytest.raises(DeviceNotFoundError, match="'head/0', operator Relu.*'cuda': there are cpu, cpu:1"):
        resolve_devices(placed, absent, None)
    given_up: list[tuple[str, str, str]] = []
    left = resolve_devices(placed, absent, lambda *row: given_up.append(row))
    assert not devices_of(left)
    assert given_up[0] == ("head/0", "cuda", "there are cpu, cpu:1")


def test_each_device_has_its_engine() -> None:
    """The first engine on the device that takes the node, or the host where it computes there; else an error."""
    placed = apply_placement(chain(), [rule("op:Relu", "cpu:1"), rule("op:Exp", "cpu")])
    candidates = [takes("a", "cpu:1", "Exp"), takes("b", "cpu:1", "Relu"), takes("b", "cpu:2", "Exp")]
    found, chosen = place(placed, candidates, "cpu", None)
    assert chosen == {0: engine_at("b", "cpu:1"), 1: HOST}
    assert found is placed
    with pytest.raises(GraphError, match="'head/0'.*nothing takes it: a: it has no kernel"):
        place(placed, candidates[:1], "cpu", None)
    given_up: list[tuple[str, str, str]] = []
    left, chosen = place(placed, candidates[:1], "cpu", lambda *row: given_up.append(row))
    assert [n.annotations.device for n in left.nodes] == [None, "cpu"]
    assert chosen == {1: HOST}
    assert given_up == [("head/0", "cpu:1", "a: it has no kernel")]
