"""What the engine says about itself, about nodes and about options; nothing here builds."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from xrt_tensorrt import TensorRTEngine, _cuda, _toolkit
from xrt_tensorrt.settings import Settings

from xrt_core.engine.contract import CompileOptions
from xrt_core.errors import EngineUnavailableError, OptionError
from xrt_core.ir.graph import Node, Value
from xrt_core.ir.types import TensorType

F32, I64, U8 = (np.dtype(t) for t in (np.float32, np.int64, np.uint8))
I4, F8, BF16 = (np.dtype(t) for t in (ml_dtypes.int4, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16))


def _node(
    op_type: str, *types: TensorType, version: int = 13, out: TensorType | None = None, domain: str = "",
    **attributes: Any,
) -> Node:  # fmt: skip
    inputs = [Value(f"x{i}", t) for i, t in enumerate(types)]
    return Node(op_type, inputs, [Value("y", out or types[0])], attributes, domain=domain, version=version, name="n")


def test_importing_the_engine_does_not_import_the_library() -> None:
    """Listing engines must pay neither for TensorRT nor for CUDA."""
    code = """
        import sys, xrt_tensorrt; xrt_tensorrt.TensorRTEngine()
        print([m for m in sys.modules if m.startswith(("tensorrt", "cuda", "onnx"))])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_asking_without_a_gpu_does_not_load_the_library() -> None:
    """Every module asks every engine: where there is no GPU that must not cost TensorRT's load."""
    code = """
        import sys, xrt_tensorrt
        status = xrt_tensorrt.TensorRTEngine().probe()
        print(status.available or not [m for m in sys.modules if m.startswith("tensorrt")])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_ranks() -> None:
    """First for inference, after XLA for training."""
    assert TensorRTEngine.priority == {"train": 50, "inference": 100}


@pytest.mark.skipif(not _cuda.why_unusable(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_can_build() -> None:
    """Running is impossible, and the remedy names what can be done here."""
    try:
        _toolkit.toolkit()
    except _toolkit.ToolkitError as e:
        pytest.skip(str(e))
    status = TensorRTEngine().probe()

    assert not status.available
    assert "CUDA" in status.reason
    assert "xrt compile --target" in status.remedy
    with pytest.raises(EngineUnavailableError, match="nothing can be built for cuda:0: .*sm_89"):
        TensorRTEngine().compiler("cuda", CompileOptions())


def test_a_target_that_it_does_not_build_for(engine: TensorRTEngine) -> None:
    """The message lists the targets that there are."""
    with pytest.raises(EngineUnavailableError, match="does not build for sm_90; it builds for .*sm_80"):
        engine.targeting("sm_90")
    with pytest.raises(OptionError, match="the target is 'ampere'"):
        engine.targeting("ampere")


def test_a_target_has_the_fingerprint_of_its_gpu(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built for a target has the key that a machine with such a GPU looks for."""
    monkeypatch.setattr(_cuda, "capability", lambda device=0: (8, 9))
    assert engine.fingerprint("cuda:0") == TensorRTEngine().fingerprint("cuda:0")
    assert engine.targeting("sm_80").fingerprint("cuda:0") != engine.fingerprint("cuda:0")


def test_a_gpu_that_the_flavour_is_not_made_for(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100 TensorRT-RTX refuses with the capability, and names the other flavour."""
    toolkit = _toolkit.toolkit()
    if not toolkit.is_rtx:
        pytest.skip("full TensorRT is made for every GPU")
    assert "not made for sm_90" in toolkit.why_not_for((9, 0))
    assert toolkit.why_not_for((8, 9)) == ""
    assert "cu13" in toolkit.remedy_for_other_gpus


def test_another_device(engine: TensorRTEngine) -> None:
    """Only CUDA devices are driven."""
    with pytest.raises(EngineUnavailableError, match="no device 'cpu'"):
        engine.compiler("cpu", CompileOptions())


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"level": 1}, "unknown option 'level'; it takes cuda_graph"),
        ({"optimization_level": 6}, "'optimization_level' is 6; it takes an integer from 0 to 5"),
        ({"tf32": 1}, "'tf32' is 1; it takes True or False"),
        ({"opt_batch": 0}, "'opt_batch' is 0; it takes a positive integer"),
        ({"hardware_compatibility": "all"}, "is 'all'; it takes none, ampere_plus"),
        ({"profiles": 8}, "'profiles' is 8; it takes the least, usual and largest batch"),
        ({"profiles": []}, r"'profiles' is \[\]; it takes"),
        ({"profiles": [[1, 2]]}, "'profiles' is .*; it takes the least, usual"),
        ({"profiles": [[1, True, 2]]}, "'profiles' is .*; it takes the least, usual"),
        ({"profiles": [[1, 4, 8], [8, 9, 10]]}, r"\[8, 9, 10\] after batch 8; it takes .*ascending"),
        ({"profiles": [[2, 1, 4]]}, r"\[2, 1, 4\] after batch 0"),
        ({"profiles": [[1, 1, 4]], "opt_batch": 2}, "both say what to tune for"),
    ],
)
def test_wrong_options_are_errors(engine: TensorRTEngine, extra: dict[str, Any], reason: str) -> None:
    """An option that is unknown or has a wrong value is named."""
    with pytest.raises(OptionError, match=reason):
        engine.compiler("cuda:0", CompileOptions(extra=extra))


def test_regimes_and_the_largest_batch_agree(engine: TensorRTEngine) -> None:
    """The last one says it."""
    options = CompileOptions(max_batch_size=64, extra={"profiles": [[1, 1, 4]]})
    with pytest.raises(OptionError, match="ends at batch 4, max_batch_size is 64"):
        engine.compiler("cuda:0", options)


def test_options_are_read() -> None:
    """Core options and the engine's own end up in the settings; the unfused build optimises nothing."""
    options = CompileOptions(workspace_bytes=1 << 20, max_batch_size=8, extra={"tf32": False, "opt_batch": 4})
    assert Settings.of(options) == Settings(workspace=1 << 20, max_batch=8, tf32=False, opt_batch=4)
    assert Settings.of(CompileOptions(fused=False)).optimization_level == 0
    regimes = Settings.of(CompileOptions(extra={"profiles": [[1, 1, 1], [2, 8, 32]]}))
    assert (regimes.profiles, regimes.max_batch) == (((1, 1, 1), (2, 8, 32)), 32)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (_node("Relu", TensorType(F32, ("n", 3)), version=14), "every dimension must be known"),
        (_node("Abs", TensorType(np.dtype(np.float64), (2,))), "float64, which TensorRT does not have"),
        (_node("Abs", TensorType(np.dtype(np.uint64), (2,))), "uint64, which TensorRT does not have"),
        (_node("Cast", TensorType(F32, (2,)), out=TensorType(I4, (2,)), to=22), "only as a constant"),
        (_node("Exp", TensorType(F8, (2,))), "only between QuantizeLinear and DequantizeLinear"),
        (_node("Cast", TensorType(F32, (2,)), out=TensorType(F8, (2,)), to=17, saturate=0), "saturates where it makes"),
        (_node("RandomNormalLike", TensorType(F32, (2,)), version=1), "draws random numbers"),
        (_node("Dropout", TensorType(F32, (2,)), TensorType(F32, ()), TensorType(np.dtype(np.bool_), ()), version=13),
         "draws random numbers"),
        (_node("Unique", TensorType(F32, (3,)), out=TensorType(F32, (3,)), version=11), "parser refuses Unique-11"),
        (_node("TopK", TensorType(F32, (5000,)), TensorType(I64, (1,)), out=TensorType(F32, (4000,)), version=11),
         "TopK of 4000 elements; TensorRT gives 3840 at most"),
        (_node("Det", TensorType(F32, (5, 5)), out=TensorType(F32, ()), version=22), "matrices above 4 x 4"),
        (_node("ScatterND", TensorType(I64, (1000, 1000)), TensorType(I64, (1000, 1)), TensorType(I64, (1000, 1000)),
               version=18, reduction="add"), "1000 places by 1000 updates are too many to compare"),
        (_node("Exp", TensorType(U8, (2,))), "uint8 only where tensors enter and leave"),
        (_node("QuantizeLinear", TensorType(F32, (2,)), TensorType(F32, ()), version=21, precision=7, output_dtype=2,
               out=TensorType(U8, (2,))), "divides by the scale in float32"),
        (_node("MatMulInteger", TensorType(U8, (2, 20_000)), TensorType(U8, (20_000, 2)), version=10,
               out=TensorType(np.dtype(np.int32), (2, 2))), "take more than 64 pieces that are exact"),
        (_node("CounterUniform", TensorType(np.dtype(np.int64), ()), out=TensorType(F32, (2,)), domain="xrt", version=1,
               shape=(2,), stream=0), "does not take xrt.CounterUniform"),
    ],
    ids=lambda x: x.op_type if isinstance(x, Node) else None,
)  # fmt: skip
def test_supports_refuses_with_the_reason(engine: TensorRTEngine, node: Node, reason: str) -> None:
    """The parser's own message, or what is known against the node, at the second question as well."""
    for _ in range(2):
        said = engine.supports(node, "cuda", "inference")
        assert not said
        assert reason in said.reason


@pytest.mark.parametrize(
    ("target", "node", "reason"),
    [
        ("sm_86", _node("DequantizeLinear", TensorType(F8, (4,)), TensorType(F32, ()), version=21,
                        out=TensorType(F32, (4,))), "float8_e4m3fn: it needs compute capability 8.9, this is 8.6"),
        ("sm_75", _node("Relu", TensorType(BF16, (4,)), version=14), "needs compute capability 8.0, this is 7.5"),
        ("sm_75", _node("MatMul", TensorType(F32, (4, 4)), TensorType(F32, (4, 4))), "no float32 matrices .MatMul. on"),
    ],
)  # fmt: skip
def test_what_a_gpu_lacks_is_refused_for_it(engine: TensorRTEngine, target: str, node: Node, reason: str) -> None:
    """A dtype or a product that the target's GPU does not have stays with others, and goes where there is one."""
    known = [Value.constant(np.ones(v.shape or (), v.dtype), v.name) if i and node.op_type == "DequantizeLinear" else v
             for i, v in enumerate(node.inputs)]  # fmt: skip
    node = node.replace(inputs=known)
    assert engine.supports(node, "cuda", "inference")
    assert re.search(reason, engine.targeting(target).supports(node, "cuda", "inference").reason)


def test_another_shape_than_onnx_says_is_refused(engine: TensorRTEngine) -> None:
    """What the parser takes, and makes a tensor of another shape of, is refused with both shapes."""
    t, out = TensorType(F32, (2, 3)), TensorType(F32, (3, 3))
    said = engine.supports(_node("Relu", t, out=out, version=14), "cuda", "inference")
    assert said.reason == (
        "TensorRT makes something else of Relu-14: output 'y0' is float32[2, 3], expected float32[3, 3]"
    )


def test_a_repeated_question_asks_nobody(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser is asked once for a kind of node; other sizes are another kind."""
    make = lambda n: _node("Relu", TensorType(F32, (n, 5)), version=14)  # noqa: E731
    assert engine.supports(make(4), "cuda", "inference")
    monkeypatch.setattr(_toolkit.Toolkit, "parse", lambda *args: pytest.fail("the parser was asked again"))
    assert engine.supports(make(4), "cuda", "inference")
    with pytest.raises(pytest.fail.Exception):
        engine.supports(make(40), "cuda", "inference")


def test_training(engine: TensorRTEngine) -> None:
    """Operators are for training where variables may be plain inputs: the parser's, and those of kernels."""
    t, image, vector = TensorType(F32, (2, 3)), TensorType(F32, (2, 3, 4, 4)), TensorType(F32, (3,))
    for node in (
        _node("Relu", t, version=14),
        _node("MatMul", t, TensorType(F32, (3, 2)), out=TensorType(F32, (2, 2))),
        _node("Conv", image, TensorType(F32, (3, 3, 1, 1)), version=11),
        _node("BatchNormalization", image, vector, vector, vector, vector, version=15),
        _node("Assign", t, t, domain="xrt", version=1),
    ):
        assert engine.supports(node, "cuda", "train"), node
    for node in (_node("HannWindow", t, version=17), _node("Barrier", t, domain="xrt", version=1)):
        said = engine.supports(node, "cuda", "train")
        assert said.reason == f"tensorrt does not take {node.operator} for training"


def test_operators_by_their_body(engine: TensorRTEngine) -> None:
    """An operator that the parser refuses is taken when it takes the body that the standard gives it."""
    from xrt_tensorrt.support import verdict

    t, statistics = TensorType(F32, (2, 4)), TensorType(F32, (2, 1))
    x, scale = Value("x", t), Value("s", TensorType(F32, (4,)), np.ones(4, np.float32))
    outputs = [Value("y", t), Value("mean", statistics), Value("inv", statistics)]
    normalised = Node("LayerNormalization", [x, scale], outputs, version=17)
    plain = Node("LayerNormalization", [x, scale], outputs[:1], version=17)

    assert verdict(normalised).way == "body"
    assert not verdict(normalised).reason
    assert verdict(plain).way == "parser"


def test_tf32_declares_its_tolerance() -> None:
    """With the option the guard judges products as what they are; without it as float32."""
    engine = TensorRTEngine()
    assert set(engine.tolerance_with(CompileOptions(extra={"tf32": False}))) == {"float16"}
    declared = engine.tolerance_with(CompileOptions(extra={"tf32": True}))
    assert declared["float32"].absolute == 2e-3
    assert "TF32" in declared["float32"].reason
    with pytest.raises(OptionError, match="unknown option 'tf23'"):
        engine.tolerance_with(CompileOptions(extra={"tf23": True}))
