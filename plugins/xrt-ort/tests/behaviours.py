"""Behaviours of onnxruntime's API that programs depend on: each is a function of the module, and returns plain data.

What raises is told by the names of the exception's classes, and, as facts, by the words in its message that are listed
with the behaviour.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from onnx import TensorProto, helper, numpy_helper

BEHAVIOURS: Final[dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]]] = {}
F: Final = np.float32
X: Final = np.arange(6, dtype=F).reshape(2, 3)


def behaviour(*facts: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add a row to the table. facts: that the message of what it raises tells."""

    def add(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        BEHAVIOURS[function.__name__] = function, facts
        return function

    return add


def outcome(function: Callable[[Any], Any], module: Any) -> tuple[Any, str]:
    """Return what a behaviour gives with a module, as plain data, and the message of what it raised."""
    try:
        return _plain(function(module)), ""
    except Exception as e:
        return ("raises", type(e).__name__), str(e)


def _plain(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        values = x.tolist() if x.dtype.kind in "OUS" else str(np.round(x.astype(np.float64), 5).tolist())
        return (type(x).__name__, str(x.dtype), x.shape, values)
    if isinstance(x, np.generic):
        return (type(x).__name__, x.item())
    if isinstance(x, dict):
        return {_plain(k): _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return x


def info(name: str, dtype: int, shape: Any) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(nodes: Any, inputs: Any, outputs: Any, weights: Any = (), **more: Any) -> bytes:
    """A model's bytes, with metadata."""
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, list(weights), doc_string="a graph")
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    made = helper.make_model(graph, opset_imports=domains, ir_version=8, producer_name="tests", doc_string="a model")
    made.model_version, made.domain = 7, "org.xrt"
    for key, value in more.items():
        entry = made.metadata_props.add()
        entry.key, entry.value = key, value
    return bytes(made.SerializeToString())


def affine() -> bytes:
    """y = x @ w + b, z = relu(y), for any number of rows."""
    w = numpy_helper.from_array(np.arange(6, dtype=F).reshape(3, 2) - 2, "w")
    b = numpy_helper.from_array(np.array([0.5, -8], F), "b")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["y"]),
        helper.make_node("Relu", ["y"], ["z"]),
    ]
    outputs = [info(n, TensorProto.FLOAT, ["n", 2]) for n in "yz"]
    return model(nodes, [info("x", TensorProto.FLOAT, ["n", 3])], outputs, [w, b], characters="a\nb", empty="")


def overridable() -> bytes:
    """y = x * s, where s is an input with a default."""
    s = numpy_helper.from_array(np.array([2], F), "s")
    node = helper.make_node("Mul", ["x", "s"], ["y"])
    inputs = [info("x", TensorProto.FLOAT, [3]), info("s", TensorProto.FLOAT, [1])]
    return model([node], inputs, [info("y", TensorProto.FLOAT, [3])], [s])


def strings() -> bytes:
    """Text, unchanged."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return model([node], [info("x", TensorProto.STRING, [None])], [info("y", TensorProto.STRING, [None])])


def sequences() -> bytes:
    """A sequence of x and -x, and x again."""
    nodes = [
        helper.make_node("Neg", ["x"], ["m"]),
        helper.make_node("SequenceConstruct", ["x", "m"], ["s"]),
        helper.make_node("Identity", ["x"], ["same"]),
    ]
    out = [helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None), info("same", TensorProto.FLOAT, ["n"])]
    return model(nodes, [info("x", TensorProto.FLOAT, ["n"])], out)


def maps() -> bytes:
    """Probabilities as a list of maps from class to number."""
    node = helper.make_node("ZipMap", ["x"], ["p"], domain="ai.onnx.ml", classlabels_int64s=[4, 5])
    value = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    out = helper.make_value_info("p", helper.make_sequence_type_proto(value))
    return model([node], [info("x", TensorProto.FLOAT, ["n", 2])], [out])


def typed() -> bytes:
    """A scalar, integers and bools through, each negated."""
    nodes = [
        helper.make_node("Neg", ["a"], ["na"]),
        helper.make_node("Neg", ["i"], ["ni"]),
        helper.make_node("Not", ["b"], ["nb"]),
    ]
    kinds = {"a": (TensorProto.DOUBLE, []), "i": (TensorProto.INT64, [2]), "b": (TensorProto.BOOL, ["k"])}
    inputs = [info(n, t, s) for n, (t, s) in kinds.items()]
    return model(nodes, inputs, [info(f"n{n}", t, s) for n, (t, s) in kinds.items()])


def session(ort: Any, made: Any = None, **given: Any) -> Any:
    return ort.InferenceSession(affine() if made is None else made, providers=["CPUExecutionProvider"], **given)


# --- models and sessions ----------------------------------------------------------------------------------------------


@behaviour()
def model_from_path_and_str(ort: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "m.onnx")
        path.write_bytes(affine())
        return [session(ort, p).run(None, {"x": X}) for p in (path, str(path))]


@behaviour("Unable to load from type", "bytearray")
def model_from_another_type(ort: Any) -> Any:
    return session(ort, bytearray(affine()))


@behaviour("nowhere.onnx")
def model_that_is_not_there(ort: Any) -> Any:
    return session(ort, "/nowhere/nowhere.onnx")


@behaviour()
def model_of_other_bytes(ort: Any) -> Any:
    return session(ort, b"this is no model")


@behaviour("NoSuchOperator")
def model_of_unknown_operator(ort: Any) -> Any:
    node = helper.make_node("NoSuchOperator", ["x"], ["y"])
    return session(ort, model([node], [info("x", 1, [1])], [info("y", 1, [1])]))


@behaviour("sequence")
def providers_as_a_set(ort: Any) -> Any:
    return ort.InferenceSession(affine(), providers={"CPUExecutionProvider"}, enable_fallback=0)


@behaviour()
def providers_with_options(ort: Any) -> Any:
    made = ort.InferenceSession(affine(), providers=[("CPUExecutionProvider", {"a": 1})])
    other = ort.InferenceSession(affine(), None, ["CPUExecutionProvider"], [{}])
    return [made.get_providers(), other.get_providers(), sorted(made.get_provider_options())]


@behaviour("same length")
def providers_of_another_length(ort: Any) -> Any:
    return ort.InferenceSession(affine(), None, ["CPUExecutionProvider"], [{}, {}], enable_fallback=0)


@behaviour()
def metadata(ort: Any) -> Any:
    m = session(ort).get_modelmeta()
    fields = ["producer_name", "graph_name", "domain", "description", "graph_description", "version"]
    return [getattr(m, f) for f in fields], dict(m.custom_metadata_map)


@behaviour()
def inputs_and_outputs(ort: Any) -> Any:
    rows = []
    for made in (affine(), overridable(), strings(), sequences(), maps(), typed()):
        s = session(ort, made)
        for args in (s.get_inputs(), s.get_outputs(), s.get_overridable_initializers()):
            rows.append([(a.name, a.type, list(a.shape)) for a in args])
    return rows


@behaviour()
def session_options(ort: Any) -> Any:
    o = ort.SessionOptions()
    names = [
        "enable_cpu_mem_arena", "enable_mem_pattern", "enable_profiling", "execution_mode", "execution_order",
        "graph_optimization_level", "inter_op_num_threads", "intra_op_num_threads", "log_severity_level",
        "log_verbosity_level", "logid", "optimized_model_filepath", "profile_file_prefix", "use_deterministic_compute",
    ]  # fmt: skip
    before = [str(getattr(o, n)) for n in names]
    o.intra_op_num_threads, o.inter_op_num_threads, o.log_severity_level, o.logid = 1, 1, 3, "me"
    o.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    o.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    o.enable_cpu_mem_arena = False
    o.add_session_config_entry("session.disable_prepacking", "1")
    o.add_free_dimension_override_by_name("n", 2)
    s = session(ort, sess_options=o)
    after = [str(getattr(o, n)) for n in names]
    return before, after, o.get_session_config_entry("session.disable_prepacking"), s.run(None, {"x": X})


@behaviour()
def session_options_of_wrong_types(ort: Any) -> Any:
    found = []
    for name, value in (("intra_op_num_threads", "two"), ("logid", 3), ("enable_profiling", "x")):
        try:
            setattr(ort.SessionOptions(), name, value)
            found.append(name)
        except TypeError:
            found.append("TypeError")
    return found


@behaviour("no.such.entry")
def session_entry_that_is_not_there(ort: Any) -> Any:
    return ort.SessionOptions().get_session_config_entry("no.such.entry")


@behaviour()
def run_options(ort: Any) -> Any:
    o = ort.RunOptions()
    before = [o.log_severity_level, o.log_verbosity_level, o.logid, o.terminate, o.only_execute_path_to_fetches]
    o.log_severity_level, o.logid = 3, "run"
    o.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return before, session(ort).run(["y"], {"x": X}, o), session(ort).run(None, {"x": X}, run_options=o)


@behaviour("terminate")
def run_that_is_terminated(ort: Any) -> Any:
    o = ort.RunOptions()
    o.terminate = True
    return session(ort).run(None, {"x": X}, o)


@behaviour()
def names_of_the_module(ort: Any) -> Any:
    names = [
        "ExecutionMode", "ExecutionOrder", "GraphOptimizationLevel", "IOBinding", "InferenceSession", "ModelMetadata",
        "NodeArg", "OrtAllocatorType", "OrtDevice", "OrtMemType", "OrtMemoryInfo", "OrtValue", "RunOptions",
        "SessionOptions", "SparseTensor", "disable_telemetry_events", "enable_telemetry_events", "get_all_providers",
        "get_available_providers", "get_build_info", "get_device", "get_version_string", "preload_dlls",
        "set_default_logger_severity",
        "set_default_logger_verbosity", "set_seed", "__version__",
    ]  # fmt: skip
    state = [n for n in STATE if hasattr(ort.capi.onnxruntime_pybind11_state, n)]
    ort.set_default_logger_severity(3)
    ort.set_default_logger_verbosity(0)
    return [n for n in names if not hasattr(ort, n)], state, ort.get_device()


STATE: Final = [
    "EPFail", "EngineError", "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "ModelLoaded", "NoModel",
    "NoSuchFile", "NotImplemented", "RuntimeException", "SessionOptions", "RunOptions", "NodeArg", "ModelMetadata",
    "InferenceSession", "GraphOptimizationLevel", "ExecutionMode", "get_available_providers",
]  # fmt: skip


@behaviour()
def enumerations(ort: Any) -> Any:
    levels = ort.GraphOptimizationLevel
    names = ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL"]
    modes = ort.ExecutionMode
    return [int(getattr(levels, n)) for n in names], [int(modes.ORT_SEQUENTIAL), int(modes.ORT_PARALLEL)]


@behaviour()
def providers_that_are_there(ort: Any) -> Any:
    return "CPUExecutionProvider" in ort.get_available_providers(), session(ort).get_providers()[-1]


# --- runs -------------------------------------------------------------------------------------------------------------


@behaviour()
def results_by_name_and_order(ort: Any) -> Any:
    s = session(ort)
    return [s.run(names, {"x": X}) for names in (None, [], ["z", "y"], ["y"], ("z",))]


@behaviour()
def results_are_plain_arrays(ort: Any) -> Any:
    s = session(ort)
    first, second = s.run(None, {"x": X}), s.run(None, {"x": X})
    first[0][...] = 9  # writable, and nobody else's
    return type(first).__name__, second, first[0].flags.c_contiguous


@behaviour("nothing")
def result_that_is_not_there(ort: Any) -> Any:
    return session(ort).run(["nothing"], {"x": X})


@behaviour("x", "missing")
def feed_that_is_missing(ort: Any) -> Any:
    return session(ort).run(None, {})


@behaviour("q")
def feed_that_is_not_there(ort: Any) -> Any:
    return session(ort).run(None, {"x": X, "q": X})


@behaviour("x", "Got: 1", "Expected: 2")
def feed_of_wrong_rank(ort: Any) -> Any:
    return session(ort).run(None, {"x": X[0]})


@behaviour("x", "Got: 4", "Expected: 3")
def feed_of_wrong_size(ort: Any) -> Any:
    return session(ort).run(None, {"x": np.zeros((2, 4), F)})


@behaviour("double", "float")
def feed_of_wrong_dtype(ort: Any) -> Any:
    return session(ort).run(None, {"x": X.astype(np.float64)})


@behaviour("int64", "float")
def feed_of_integers(ort: Any) -> Any:
    return session(ort).run(None, {"x": np.zeros((2, 3), np.int64)})


@behaviour()
def feeds_that_are_no_mapping(ort: Any) -> Any:
    return session(ort).run(None, [X])


@behaviour()
def feed_of_lists(ort: Any) -> Any:
    return session(ort).run(None, {"x": X.tolist()})


@behaviour()
def feed_of_a_ragged_list(ort: Any) -> Any:
    return session(ort).run(None, {"x": [[1.0, 2.0, 3.0], [1.0]]})


@behaviour()
def feed_of_a_list_of_wrong_values(ort: Any) -> Any:
    return session(ort).run(None, {"x": [["a", "b", "c"]]})


@behaviour()
def feed_of_none(ort: Any) -> Any:
    return session(ort).run(None, {"x": None})


@behaviour()
def feed_in_other_layouts(ort: Any) -> Any:
    s = session(ort)
    readonly = X.copy()
    readonly.flags.writeable = False
    layouts = [np.asfortranarray(X), np.arange(12, dtype=F).reshape(2, 6)[:, ::2], X[::-1], readonly]
    return [s.run(["y"], {"x": a}) for a in layouts]


@behaviour()
def feed_of_swapped_bytes(ort: Any) -> Any:
    return session(ort).run(["y"], {"x": X.astype(">f4")})


@behaviour()
def feed_of_no_rows(ort: Any) -> Any:
    return session(ort).run(None, {"x": np.zeros((0, 3), F)})


@behaviour()
def feed_of_an_ortvalue(ort: Any) -> Any:
    return session(ort).run(None, {"x": ort.OrtValue.ortvalue_from_numpy(X)})


@behaviour()
def overridable_initializer(ort: Any) -> Any:
    s = session(ort, overridable())
    x = np.arange(3, dtype=F)
    return s.run(None, {"x": x}), s.run(None, {"x": x, "s": np.array([5], F)})


@behaviour()
def texts(ort: Any) -> Any:
    s = session(ort, strings())
    return [s.run(None, {"x": x}) for x in (np.array(["Ab", "ÄÖ"]), np.array(["Cd"], object), ["Ef", "G"])]


@behaviour()
def sequence_results(ort: Any) -> Any:
    found = session(ort, sequences()).run(None, {"x": np.array([1, 2], F)})
    return type(found[0]).__name__, found


@behaviour()
def map_results(ort: Any) -> Any:
    return session(ort, maps()).run(None, {"x": np.array([[0.25, 0.75]], F)})


@behaviour()
def scalars_and_other_types(ort: Any) -> Any:
    feeds = {"a": np.array(1.5), "i": np.array([1, -2]), "b": np.array([True, False])}
    return session(ort, typed()).run(None, feeds)


@behaviour()
def several_threads(ort: Any) -> Any:
    s, found = session(ort), []

    def work(k: int) -> None:
        for _ in range(20):
            y = s.run(["y"], {"x": X * k})[0]
        found.append((k, y))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sorted((k, y.tolist()) for k, y in found)


@behaviour()
def pickled(ort: Any) -> Any:
    pickle.dump(session(ort), io.BytesIO())


@behaviour()
def run_async(ort: Any) -> Any:
    done, found = threading.Event(), []

    def callback(results: Any, data: Any, error: str) -> None:
        found.append((results, data, error))
        done.set()

    o = ort.SessionOptions()
    o.intra_op_num_threads = 2
    session(ort, sess_options=o).run_async(["y"], {"x": X}, callback, "mine")
    assert done.wait(10)
    return found


@behaviour()
def ort_values(ort: Any) -> Any:
    v = ort.OrtValue.ortvalue_from_numpy(X)
    empty = ort.OrtValue.ortvalue_from_shape_and_type([2, 2], np.int64)
    empty.update_inplace(np.ones((2, 2), np.int64))
    shared = np.from_dlpack(v)
    facts = [v.shape(), v.data_type(), v.device_name(), v.is_tensor(), v.has_value(), v.element_type()]
    results = session(ort).run_with_ort_values(["z"], {"x": v})
    return facts, v.numpy(), empty.numpy(), shared, [type(r).__name__ for r in results], results[0].numpy()


@behaviour()
def io_binding(ort: Any) -> Any:
    s = session(ort)
    b = s.io_binding()
    b.bind_cpu_input("x", X)
    b.bind_output("y")
    y = np.zeros((2, 2), F)
    b.bind_output("z", "cpu", 0, np.float32, [2, 2], y.ctypes.data)
    s.run_with_iobinding(b)
    found = [v.numpy() for v in b.get_outputs()], b.copy_outputs_to_cpu(), y.copy()
    b.clear_binding_inputs()
    b.clear_binding_outputs()
    return found


@behaviour()
def io_binding_of_values(ort: Any) -> Any:
    s = session(ort)
    b = s.io_binding()
    b.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(X))
    out = ort.OrtValue.ortvalue_from_shape_and_type([2, 2], np.float32)
    b.bind_ortvalue_output("z", out)
    s.run_with_iobinding(b)
    return out.numpy()


@behaviour()
def profile(ort: Any) -> Any:
    import json

    with tempfile.TemporaryDirectory() as folder:
        o = ort.SessionOptions()
        o.enable_profiling, o.profile_file_prefix = True, str(pathlib.Path(folder, "trace"))
        s = session(ort, sess_options=o)
        s.run(None, {"x": X})
        path = s.end_profiling()
        events = json.loads(pathlib.Path(path).read_text())
        keys = {"cat", "dur", "name", "ph", "pid", "tid", "ts"}
        names = " ".join([str(e["name"]) + str(e.get("args", {}).get("nodes", "")) for e in events])
        return path.startswith(o.profile_file_prefix), all(keys <= set(e) for e in events), "MatMul" in names


@behaviour()
def external_weights(ort: Any) -> Any:
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder, "m.onnx"))
        big = numpy_helper.from_array(np.ones((300, 300), F), "w")
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        made = model([node], [info("x", 1, [1, 300])], [info("y", 1, [1, 300])], [big])
        onnx.save(onnx.load_from_string(made), path, save_as_external_data=True, location="w.bin", size_threshold=0)
        return session(ort, path).run(None, {"x": np.ones((1, 300), F)})[0][0, :2]


@behaviour()
def added_initializer(ort: Any) -> Any:
    o = ort.SessionOptions()
    weight = ort.OrtValue.ortvalue_from_numpy(np.ones((3, 2), F))
    o.add_initializer("w", weight)
    return session(ort, sess_options=o).run(["y"], {"x": X})


@behaviour()
def other_providers_later(ort: Any) -> Any:
    s = session(ort)
    s.set_providers(["CPUExecutionProvider"])
    s.disable_fallback()
    s.enable_fallback()
    return s.get_providers(), s.run(["y"], {"x": X}), s.get_session_options().log_severity_level


@behaviour()
def subclass(ort: Any) -> Any:
    class Mine(ort.InferenceSession):  # type: ignore[misc,name-defined]
        def __init__(self, made: bytes) -> None:
            super().__init__(made, providers=["CPUExecutionProvider"])
            self.mine = 1

        def run(self, *args: Any, **named: Any) -> Any:
            return [r + self.mine for r in super().run(*args, **named)]

    return Mine(affine()).run(["y"], {"x": X}), isinstance(Mine(affine()), ort.InferenceSession)
