"""What onnxruntime's own Python API tests check, as further behaviours: each row names the tests that it stands for.

The tests are those of onnxruntime/test/python/onnxruntime_test_python.py and of its siblings _iobinding, _mlops,
_nested_control_flow_op, _global_threadpool and _backend; rows and models are written anew. LEFT_OUT has the others,
with the reason.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pathlib
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx
from behaviours import F, X, affine, behaviour, info, model, session, strings
from onnx import TensorProto, helper, numpy_helper

COVERED: Final[dict[str, tuple[str, ...]]] = {
    "model_from_path_and_str": ("deserialization_from_path_object", "run_model_from_bytes"),
    "providers_that_are_there": ("get_providers",),
    "feed_in_other_layouts": ("run_model2_contiguous",),
    "several_threads": ("run_model_multiple_threads",),
    "feed_of_lists": ("list_as_input",),
    "names_of_the_module": ("run_device", "enabling_and_disabling_telemetry"),
    "inputs_and_outputs": ("run_model2", "run_model_symbolic_input"),
    "metadata": ("model_meta",),
    "session_options": ("graph_optimization_level", "session_options_add_config_entry"),
    "session_entry_that_is_not_there": ("invalid_session_options_config_entry",),
    "added_initializer": ("session_options_add_initializer",),
    "feed_of_an_ortvalue": ("ort_value",),
    "run_options": ("memory_arena_shrinkage",),
    "io_binding": ("bind_input_to_cpu_arr", "bind_input_and_preallocated_output"),
    "io_binding_of_values": ("bind_input_and_bind_output_with_ortvalues",),
}
"""Rows -> tests of the library that they stand for; rows of this file add themselves."""

LEFT_OUT: Final[dict[str, str]] = {
    "tvm_imported, set_providers, session_providers, run_model_with_cuda_copy_stream, multiple_devices, "
    "ort_value_gh_issue9799": "a provider that the library of this machine lacks",
    "webgpu_run_with_ortvaluevector_without_capture, webgpu_graph_capture_session_ortvalues, "
    "webgpu_graph_capture_across_set_providers, webgpu_raw_output_vector_keeps_session_alive": "a WebGPU provider",
    "is_webgpu_buffer_is_read_only, ortvalue_ownership_allows_matching_webgpu_context, "
    "foreign_webgpu_context_predicate, webgpu_context_id_reports_default_for_cpu_session, "
    "graph_annotation_id_run_option, reset_session_releases_captured_graphs": "private names of the library",
    "run_with_ortvaluevector_is_gated_only_on_capture": "vectors of values: the library's alone",
    "register_custom_ops_library": "a compiled library of operators; with the library its session has them",
    "sparse_tensor_coo_format, sparse_tensor_csr_format": "sparse tensors: the library's alone",
    "adater_export_read, adapter_read_modify_export, adapter_parameters_keep_alive, "
    "adapter_export_rejects_string_tensors, run_with_adapter": "adapters: the library's alone",
    "run_session_owned_output_is_zero_copy": "whether a result owns its memory is no promise of either",
}
"""Tests of the library -> why no row stands for them."""


def stands_for(*tests: str, facts: tuple[str, ...] = ()) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add a row that stands for tests of the library."""

    def add(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        COVERED[function.__name__] = tests
        return behaviour(*facts)(function)

    return add


def counts() -> tuple[int, int]:
    """How many tests of the library rows stand for, and how many are left out."""
    return sum(map(len, COVERED.values())), sum(len(names.split(", ")) for names in LEFT_OUT)


def raised(function: Callable[[], Any]) -> str:
    """The class of what a call raises."""
    try:
        function()
    except Exception as e:
        return type(e).__name__
    return "nothing"


def one(op: str, kinds: dict[str, Any], out: Any, domain: str = "", **attributes: Any) -> bytes:
    """A model of one node. kinds: types of inputs by name. out: the type of its result, or more of them by name."""
    results = out if isinstance(out, dict) else {"y": out}
    node = helper.make_node(op, list(kinds), list(results), domain=domain, **attributes)
    values = [helper.make_value_info(n, t) for n, t in kinds.items()]
    return model([node], values, [helper.make_value_info(n, t) for n, t in results.items()])


def tensor(dtype: int, shape: Any = None) -> Any:
    return helper.make_tensor_type_proto(dtype, shape)


def sequence(dtype: int) -> Any:
    return helper.make_sequence_type_proto(tensor(dtype))


# --- what the module tells --------------------------------------------------------------------------------------------


@stands_for("get_version_string", "get_build_info")
def versions(ort: Any) -> Any:
    return type(ort.get_version_string()).__name__, "Build Info" in ort.get_build_info(), ort.get_all_providers()[-1]


@stands_for("ort_device")
def devices(ort: Any) -> Any:
    made = [ort.OrtDevice.make(name, 0) for name in ("cpu", "cuda", "webgpu")]
    rows = [(d.device_id(), d.device_type(), int(d.device_vendor_id()), d.device_mem_type()) for d in made]
    return rows, int(ort.OrtDeviceVendorId.NVIDIA), raised(lambda: ort.OrtDevice.make("abacus", 0))


def _memory(m: Any) -> Any:
    return m.name, m.device_id, str(m.mem_type), str(m.allocator_type), str(m.device_mem_type), m.device_vendor_id


@stands_for("ort_memory_info", "ort_memory_info_create_v2")
def memory_infos(ort: Any) -> Any:
    arena = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    first = ort.OrtMemoryInfo("Cpu", arena, 0, ort.OrtMemType.DEFAULT)
    default = ort.OrtDeviceMemoryType.DEFAULT
    second = ort.OrtMemoryInfo.create_v2("Test", ort.OrtMemoryInfoDeviceType.CPU, 0, 0, default, 128, arena)
    return _memory(first), _memory(second)


@stands_for("create_allocator")
def arena_settings(ort: Any) -> Any:
    names = ["max_mem", "arena_extend_strategy", "initial_chunk_size_bytes", "max_dead_bytes_per_chunk"]
    names += ["initial_growth_chunk_size_bytes", "max_power_of_two_extend_bytes"]
    rows = [ort.OrtArenaCfg(8, 0, 4, 2), ort.OrtArenaCfg({n: i for i, n in enumerate(names)})]
    return [[getattr(r, n) for n in names] for r in rows], raised(lambda: ort.OrtArenaCfg({"no_such_name": 1}))


@stands_for("shared_allocator_using_create_and_register_allocator")
def shared_allocator(ort: Any) -> Any:
    kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    ort.create_and_register_allocator(ort.OrtMemoryInfo("Cpu", kind, 0, ort.OrtMemType.DEFAULT), None)
    o = ort.SessionOptions()
    o.add_session_config_entry("session.use_env_allocators", "1")
    return session(ort, sess_options=o).run(["y"], {"x": X})


@stands_for("set_default_logger_callback")
def logger_callback(ort: Any) -> Any:
    found: list[Any] = []
    try:
        ort.set_default_logger_callback(lambda *row: found.append(row), severity=0)
        s = session(ort)
        kinds = {tuple(type(v).__name__ for v in row) for row in found}
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            ort.set_default_logger_callback(lambda *row: 1 / 0, severity=0)
            session(ort)
        finally:
            sys.unraisablehook = hook
        bad = [raised(lambda n=n: ort.set_default_logger_callback(print, severity=n)) for n in (5, -1)]
        bad.append(raised(lambda: ort.set_default_logger_callback("no function")))
    finally:
        ort.set_default_logger_callback(None)
        ort.set_default_logger_severity(2)
    return sorted(kinds), bad, s.run(["y"], {"x": X})


@stands_for("check_and_normalize_provider_args")
def normalised_providers(ort: Any) -> Any:
    check = ort.capi.onnxruntime_inference_collection.check_and_normalize_provider_args
    good = [
        (None, None), (["a"], None), (["a", "b"], None), ([("a", {1: 2}), "b"], None), (["a", "b"], [{1: 2}, {}]),
        (["a", "b", "a"], [{"x": 1}, {}, {"y": 2}]), (["d"], None),
    ]  # fmt: skip
    bad = [(3, None), ([3], None), (["a"], 3), (["a"], ["no"]), (["a", "b"], [{1: 2}]), ([("a", {1: 2})], [{3: 4}])]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = [[list(x) for x in check(*args, ["a", "b", "c"])] for args in good]
    return made, len(told), [raised(lambda args=args: check(*args, ["a", "b", "c"])) for args in bad]


# --- sessions ---------------------------------------------------------------------------------------------------------


@stands_for("run_model")
def where_feeds_and_results_are(ort: Any) -> Any:
    s = session(ort)
    infos = [_memory(m)[:3] for m in (*s.get_input_memory_infos(), *s.get_output_memory_infos())]
    return infos, len(s.get_input_epdevices())


@stands_for("invalid_set_providers", facts=("Unknown Provider Type: InvalidProvider",))
def providers_that_nobody_knows(ort: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session(ort).set_providers(["InvalidProvider"])


@behaviour()
def providers_in_the_options(ort: Any) -> Any:
    o = ort.SessionOptions()
    before = o.has_providers(), raised(lambda: o.add_provider("NoSuchProvider", {}))
    o.add_provider("CPUExecutionProvider", {})
    s = ort.InferenceSession(affine(), o)
    return before, o.has_providers(), s.get_providers(), s.run(["y"], {"x": X})


@stands_for("get_and_set_tuning_results")
def tuning_results(ort: Any) -> Any:
    s = session(ort)
    unknown = {"ep": "UnknownEP", "results": {}, "validators": {}}
    s.set_tuning_results([unknown])
    s.set_tuning_results([], error_on_invalid=True)
    return s.get_tuning_results(), raised(lambda: s.set_tuning_results([unknown], error_on_invalid=True))


@stands_for("model_serialization")
def optimised_model(ort: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        o = ort.SessionOptions()
        o.optimized_model_filepath = str(pathlib.Path(folder, "optimised.onnx"))
        session(ort, sess_options=o)
        again = session(ort, o.optimized_model_filepath)
        names = [a.name for a in (*again.get_inputs(), *again.get_outputs())]
        return os.listdir(folder), names, again.run(None, {"x": X})


def _with_weights_beside(folder: str) -> tuple[str, Any]:
    """A model whose weights are in a file beside it; its path, and a feed."""
    path = str(pathlib.Path(folder, "given.onnx"))
    weight = numpy_helper.from_array(np.arange(400, dtype=F).reshape(20, 20), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    made = model([node], [info("x", 1, [1, 20])], [info("y", 1, [1, 20])], [weight])
    onnx.save(onnx.load_from_string(made), path, save_as_external_data=True, location="given.bin", size_threshold=0)
    return path, np.ones((1, 20), F)


@stands_for(
    "model_serialization_with_external_initializers", "model_serialization_with_external_initializers_to_directory",
    "model_serialization_with_original_external_initializers_to_directory",
    "model_serialization_with_original_external_initializers_to_current_directory",
)  # fmt: skip
def optimised_model_with_weights_beside_it(ort: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as given:
        path, x = _with_weights_beside(given)
        o = ort.SessionOptions()
        o.optimized_model_filepath = str(pathlib.Path(folder, "optimised.onnx"))
        o.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimised.bin")
        o.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "100")
        session(ort, path, sess_options=o)
        size = os.path.getsize(o.optimized_model_filepath)
        return sorted(os.listdir(folder)), size < 1500, session(ort, o.optimized_model_filepath).run(None, {"x": x})


@stands_for("loading_session_options_from_model")
def options_in_the_model(ort: Any) -> Any:
    wanted = {"inter_op_num_threads": 5, "intra_op_num_threads": 2, "graph_optimization_level": 99}
    given = ort.SessionOptions()
    given.intra_op_num_threads = 7
    made = model(
        [helper.make_node("Neg", ["x"], ["y"])], [info("x", 1, [2])], [info("y", 1, [2])],
        ort_config=json.dumps({"session_options": {**wanted, "enable_profiling": 1}}),
    )  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        here = os.getcwd()
        os.chdir(folder)
        try:
            for on, options in (("1", None), ("1", given), ("0", None), ("0", given)):
                os.environ["ORT_LOAD_CONFIG_FROM_MODEL"] = on
                o = (s := session(ort, made, sess_options=options)).get_session_options()
                level = str(o.graph_optimization_level)
                rows.append([o.inter_op_num_threads, o.intra_op_num_threads, level, o.enable_profiling])
                rows.append([str(o.execution_mode), bool(s.end_profiling())])
        finally:
            os.environ.pop("ORT_LOAD_CONFIG_FROM_MODEL", None)
            os.chdir(here)
    return rows


def _free() -> bytes:
    """y = |x| of sizes that have names and denotations."""
    x = info("x", 1, ["Dim1", "Dim2", 5])
    x.type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    x.type.tensor_type.shape.dim[1].denotation = "DATA_CHANNEL"
    return model([helper.make_node("Abs", ["x"], ["y"])], [x], [info("y", 1, ["Dim1", "Dim2", 5])])


@stands_for(
    "session_options_add_free_dimension_override_by_denotation", "session_options_add_free_dimension_override_by_name"
)
def free_dimensions(ort: Any) -> Any:
    rows = []
    for kind, first, second in (("name", "Dim1", "Dim2"), ("denotation", "DATA_BATCH", "DATA_CHANNEL")):
        o = ort.SessionOptions()
        add = getattr(o, f"add_free_dimension_override_by_{kind}")
        add(first, 4)
        add(second, 3)
        s = session(ort, _free(), sess_options=o)
        rows.append([a.shape for a in (*s.get_inputs(), *s.get_outputs())])
        rows.append(s.run(None, {"x": np.full((4, 3, 5), -1, F)})[0].shape)
        rows.append(raised(lambda s=s: s.run(None, {"x": np.zeros((3, 3, 5), F)})))
    return rows


@stands_for(
    "session_options_add_external_initializers", "session_options_add_external_initializers_from_files_in_memory"
)
def external_weights_from_memory(ort: Any) -> Any:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path, x = _with_weights_beside(folder)
        os.remove(pathlib.Path(folder, "given.bin"))
        made = pathlib.Path(path).read_bytes()
        weight = np.arange(400, dtype=F).reshape(20, 20)
        content = weight.tobytes()  # which the library does not keep
        o, other = ort.SessionOptions(), ort.SessionOptions()
        value = ort.OrtValue.ortvalue_from_numpy(weight)
        o.add_external_initializers(["w"], [value])
        other.add_external_initializers_from_files_in_memory(["given.bin"], [content], [len(content)])
        for given, options in ((made, o), (path, other)):
            rows.append(session(ort, given, sess_options=options).run(None, {"x": x}))
    return rows


@stands_for("ort_execution_mode")
def execution_mode(ort: Any) -> Any:
    o = ort.SessionOptions()
    before, o.execution_mode = str(o.execution_mode), ort.ExecutionMode.ORT_PARALLEL
    return before, str(o.execution_mode), session(ort, sess_options=o).run(["y"], {"x": X})


@stands_for("get_graph_provider_assignment_info")
def assigned_nodes(ort: Any) -> Any:
    o = ort.SessionOptions()
    o.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    o.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    nodes = [
        helper.make_node("Add", ["x", "x"], ["a"], name="add"),
        helper.make_node("Mul", ["a", "x"], ["y"], name="m"),
    ]
    s = session(ort, model(nodes, [info("x", 1, [2])], [info("y", 1, [2])]), sess_options=o)
    found = s.get_provider_graph_assignment_info()
    return sorted((p.ep_name, n.domain, n.op_type, n.name) for p in found for n in p.get_nodes())


@stands_for("get_graph_provider_assignment_info_not_enabled", facts=("session.record_ep_graph_assignment_info",))
def assigned_nodes_not_recorded(ort: Any) -> Any:
    return session(ort).get_provider_graph_assignment_info()


@stands_for("profiler_with_session_options", "profiler_get_start_time_ns")
def profile_by_lines(ort: Any) -> Any:
    starts, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        o = ort.SessionOptions()
        o.enable_profiling, o.profile_file_prefix = True, str(pathlib.Path(folder, "p"))
        for _ in range(2):
            s = session(ort, sess_options=o)
            starts.append(s.get_profiling_start_time_ns())
            s.run(None, {"x": X})
            lines = pathlib.Path(s.end_profiling()).read_text().splitlines()
            tags = ["pid", "dur", "ts", "ph", "X", "name", "args"]
            inside = all(tag in line for line in lines[1:-1] for tag in tags)
            rows.append([lines[0], lines[-1], inside, len(lines) > 2])
    return rows, starts == sorted(starts), starts[0] > 0


# --- runs -------------------------------------------------------------------------------------------------------------


@stands_for("run_model_with_optional_sequence_input")
def optional_sequence(ort: Any) -> Any:
    kind = helper.make_optional_type_proto(sequence(1))
    s = session(ort, one("Identity", {"x": kind}, kind))
    return [a.type for a in s.get_inputs()], s.run(["y"], {"x": [np.arange(3, dtype=F)]})


@stands_for("run_async")
def run_async_without_references(ort: Any) -> Any:
    done, going, found = threading.Event(), threading.Event(), []
    o = ort.SessionOptions()
    o.intra_op_num_threads = 2
    s, x = session(ort, sess_options=o), X.copy()
    alive = weakref.ref(x)

    def callback(results: Any, data: Any, error: str) -> None:
        going.wait(10)
        found.append((results, data, error, alive() is not None))
        done.set()

    s.run_async(["y"], {"x": x}, callback, {"mine": 1}, ort.RunOptions())
    del s, x
    gc.collect()
    going.set()
    return done.wait(10), found


@stands_for("string_list_as_input", "string_input1", "string_input2", "input_bytes", "input_object", "input_void")
def texts_of_all_kinds(ort: Any) -> Any:
    s = session(ort, one("Identity", {"x": tensor(8, [2, 2])}, tensor(8, [2, 2])))
    given = [
        np.array([["Ol\u00e1", "\u4f60\u597d"], ["a", ""]]), np.array([[b"this", b"is"], [b"longer", b""]], "S8"),
        np.array([["a", "b"], ["c", "d"]], object),
        np.array([b"must", b"have", b"same", b"size"], np.void).reshape(2, 2),
        [["a", "b"], ["c", "d"]], np.array([b"A\0A\0", b"B\0B\0", b"C\0C\0", b"D\0D\0"], np.void).reshape(2, 2),
    ]  # fmt: skip
    return [s.run([], {"x": x}) for x in given]


@stands_for("boolean_inputs")
def bools(ort: Any) -> Any:
    s = session(ort, one("And", {"second:0": tensor(9, [2]), "first:0": tensor(9, [2])}, tensor(9, [2])))
    a, b = np.array([True, True]), np.array([True, False])
    return [(i.name, i.type, i.shape) for i in s.get_inputs()], s.run(["y"], {"first:0": a, "second:0": b})


@stands_for("raise_wrong_num_inputs", facts=("Required inputs (['b']) are missing from input feed (['a'])",))
def one_feed_of_two(ort: Any) -> Any:
    kind = tensor(9, [2])
    return session(ort, one("And", {"a": kind, "b": kind}, kind)).run([], {"a": np.array([True, True])})


@stands_for("sequence_length", "sequence_construct", "sequence_insert")
def sequences_as_feeds(ort: Any) -> Any:
    x = np.arange(6, dtype=np.int64).reshape(2, 3)
    length = session(ort, one("SequenceLength", {"s": sequence(1)}, tensor(7, [])))
    made = session(ort, one("SequenceConstruct", {"a": tensor(7, [2, 3]), "b": tensor(7, [2, 3])}, sequence(7)))
    insert = session(ort, one("SequenceInsert", {"s": sequence(7), "t": tensor(7, [2, 3])}, sequence(7)))
    rows: list[Any] = [[(a.name, a.type, a.shape) for a in s.get_inputs()] for s in (length, made, insert)]
    rows += [length.run(None, {"s": [X, X]}), made.run(None, {"a": x, "b": -x})]
    return rows, [insert.run(None, {"s": s, "t": x}) for s in ([], [x], [-x, x])]


@stands_for("run_output_does_not_alias_input_passthrough")
def input_that_is_a_result(ort: Any) -> Any:
    node = helper.make_node("Add", ["x", "x"], ["twice"])
    s = session(ort, model([node], [info("x", 1, [2])], [info("twice", 1, [2]), info("x", 1, [2])]))
    given = [np.full(2, i, F) for i in range(3)]
    found = [s.run(None, {"x": x}) for x in given]
    return found, any(np.shares_memory(f[1], x) for f, x in zip(found, given, strict=True))


@stands_for("run_base_model", "testAllocationPlanWorksWithOnlyExecutePathToFetchesOption")
def path_to_fetches(ort: Any) -> Any:
    nodes = [
        helper.make_node("Add", ["a", "b"], ["c"]), helper.make_node("Sub", ["a", "b"], ["d"]),
        helper.make_node("Neg", ["c"], ["e"]), helper.make_node("Neg", ["d"], ["f"]),
    ]  # fmt: skip
    s = session(ort, model(nodes, [info(n, 1, [3]) for n in "ab"], [info(n, 1, [3]) for n in "ef"]))
    o = ort.RunOptions()
    o.only_execute_path_to_fetches = True
    return [s.run([n], {"a": np.ones(3, F), "b": np.full(3, 2, F)}, o) for n in "ef"]


def _tree(**more: Any) -> dict[str, Any]:
    return {
        "nodes_treeids": [0] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0] * 3,
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0], "nodes_missing_value_tracks_true": [0] * 3, **more,
    }  # fmt: skip


@stands_for("tree_ensemble_logistic", "run_model_tree_ensemble_aionnxml_3")
def trees(ort: Any) -> Any:
    kinds = {"label": tensor(7, [None]), "probabilities": tensor(1, [None, 2])}
    wanted = _tree(
        nodes_values=[0.5, 0.0, 0.0], class_treeids=[0, 0], class_nodeids=[1, 2], class_ids=[0, 0],
        class_weights=[0.3, -0.3], classlabels_int64s=[0, 1], post_transform="LOGISTIC", base_values=[-0.405],
    )  # fmt: skip
    logistic = session(ort, one("TreeEnsembleClassifier", {"x": tensor(1, [None, 3])}, kinds, "ai.onnx.ml", **wanted))
    threshold = helper.make_tensor("v", TensorProto.DOUBLE, [3], [1.7999999523162842, 0.0, 0.0])
    weights = helper.make_tensor("w", TensorProto.DOUBLE, [2], [0.7284910678863525, 0.9134243130683899])
    double = _tree(
        nodes_values_as_tensor=threshold, target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0],
        target_weights_as_tensor=weights, n_targets=1,
    )  # fmt: skip
    exact = session(
        ort, one("TreeEnsembleRegressor", {"x": tensor(11, [None, 1])}, tensor(1, [None, 1]), "ai.onnx.ml", **double)
    )
    near = np.array([[1.7999999523162842], [1.7999999523], [1.79999995232]])
    return logistic.run(None, {"x": np.array([[0.1, 0, 0], [0.9, 0, 0]], F)}), exact.run(None, {"x": near})


@stands_for("testZipMapStringFloat", "testZipMapInt64Float")
def class_maps(ort: Any) -> Any:
    rows = []
    for key, labels in ((8, {"classlabels_strings": ["a", "b"]}), (7, {"classlabels_int64s": [10, 20]})):
        kind = helper.make_sequence_type_proto(helper.make_map_type_proto(key, tensor(1)))
        s = session(ort, one("ZipMap", {"x": tensor(1, [None, 2])}, kind, "ai.onnx.ml", **labels))
        rows.append([s.get_outputs()[0].type, s.run(["y"], {"x": np.array([[0.25, 0.75], [1, 0]], F)})])
    return rows


@stands_for("testDictVectorizer")
def map_feeds(ort: Any) -> Any:
    kind = helper.make_map_type_proto(7, tensor(1))
    s = session(ort, one("DictVectorizer", {"x": kind}, tensor(1, [1, 3]), "ai.onnx.ml", int64_vocabulary=[0, 2, 1]))
    given = [
        {0: 25.0, 2: 0.5}, {np.int64(0): np.float32(2), np.int64(1): np.float32(3)},
        {np.int32(2): np.float64(4), np.int32(0): np.float64(1)},
    ]  # fmt: skip
    wrong = raised(lambda: s.run(None, {"x": {0: 1.0, "a": 5.6}}))
    return [(a.type, a.shape) for a in s.get_inputs()], [s.run(None, {"x": x}) for x in given], wrong


@behaviour()
def bad_collections(ort: Any) -> Any:
    x = np.array([1, 2])
    seq = session(ort, one("SequenceInsert", {"s": sequence(7), "t": tensor(7, [2])}, sequence(7)))
    lists = [[X], None, x, [x, X], (x, x), [[1, 2]], [None], [x.astype(np.int32)], "ab", {}]
    kind = helper.make_map_type_proto(7, tensor(1))
    vector = session(ort, one("DictVectorizer", {"x": kind}, tensor(1, [1, 2]), "ai.onnx.ml", int64_vocabulary=[0, 2]))
    maps = [{0: "a"}, {0: None}, {}, None, [{0: 1.0}], x, {0.5: 1.0}, {True: 1.0}]
    wrong = [raised(lambda v=v: seq.run(None, {"s": v, "t": x})) for v in lists]
    return wrong, [raised(lambda v=v: vector.run(None, {"x": v})) for v in maps]


@behaviour()
def feeds_of_other_kinds(ort: Any) -> Any:
    s, text = session(ort), session(ort, strings())
    bad = [
        np.zeros((2, 3), "M8[s]"), np.zeros((2, 3), np.complex64), np.zeros((2, 3), [("a", "f4")]),
        np.zeros((2, 3), object), np.zeros((2, 3), "U1"), np.float32(3), 5, "a", memoryview(X), (1.0, 2.0), range(3),
    ]  # fmt: skip
    bad_texts = [np.zeros(2, F), "abc", np.str_("a"), ("a", "b"), [["a"]], np.array([b"\xff"], "S2")]
    good_texts = [np.array([1.5, None, b"a", "b"], object), ["a", 1, None, b"b"]]
    return (
        [raised(lambda x=x: s.run(None, {"x": x})) for x in bad],
        [raised(lambda x=x: text.run(None, {"x": x})) for x in bad_texts],
        [text.run(None, {"x": x}) for x in good_texts],
    )


@behaviour()
def calls_of_other_kinds(ort: Any) -> Any:
    s = session(ort)
    calls: list[Callable[[], Any]] = [
        lambda: s.run("y", {"x": X}), lambda: s.run([1], {"x": X}), lambda: s.run(None, {"x": X}, "options"),
        lambda: s.run(None, None), lambda: s.run([""], {"x": X}), lambda: s.run(["y", "y"], {"x": X}),
        lambda: ort.InferenceSession(affine(), "options"), lambda: ort.InferenceSession(b""),
        lambda: ort.SessionOptions(1), lambda: ort.set_default_logger_severity("a"),
    ]  # fmt: skip
    return [raised(call) for call in calls]


@stands_for("testLabelEncoder", "run_model_mlnet")
def labels(ort: Any) -> Any:
    wanted: dict[str, Any] = {"keys_strings": ["4", "A\0A\0"], "values_int64s": [3, 1], "default_int64": -1}
    s = session(ort, one("LabelEncoder", {"x": tensor(8, [None, 1])}, tensor(7, [None, 1]), "ai.onnx.ml", **wanted))
    given = [
        np.array([["4"]]), np.array([["4"], ["5"]], object), np.array([[b"4"]], "S4"),
        np.array([b"A\0A\0", b"B\0B\0"], np.void).reshape(2, 1), np.array([b"A\0A\0\0"], np.void).reshape(1, 1),
    ]  # fmt: skip
    return [s.run(None, {"x": x}) for x in given]


@stands_for("nested_optional_greater_or_equal", "3_level_control_flow_ops_graph")
def optional_input_in_nested_branches(ort: Any) -> Any:
    y = info("y", 1, [1, 2])
    value = helper.make_graph(
        [helper.make_node("OptionalGetElement", ["o"], ["v"]), helper.make_node("Add", ["v", "b"], ["y1"])], "has", [],
        [info("y1", 1, [1, 2])],
    )  # fmt: skip
    inner = [
        helper.make_graph([helper.make_node(op, ["b", "c"], [name])], name, [], [info(name, 1, [1, 2])])
        for op, name in (("Add", "more"), ("Sub", "less"))
    ]
    zero = helper.make_tensor("zero", 1, [], [0.0])
    shape = helper.make_tensor("none", 7, [0], [])
    absent = helper.make_graph(
        [
            helper.make_node("Reshape", ["c", "none"], ["s"]), helper.make_node("Greater", ["s", "zero"], ["positive"]),
            helper.make_node("If", ["positive"], ["y2"], then_branch=inner[0], else_branch=inner[1]),
        ],
        "has not", [], [info("y2", 1, [1, 2])], [zero, shape],
    )  # fmt: skip
    nodes = [
        helper.make_node("OptionalHasElement", ["o"], ["has"]),
        helper.make_node("If", ["has"], ["y"], then_branch=value, else_branch=absent),
    ]
    kind = helper.make_optional_type_proto(tensor(1, [1, 2]))
    made = model(nodes, [helper.make_value_info("o", kind), info("b", 1, [1, 2]), info("c", 1, [1])], [y])
    s, b = session(ort, made), np.ones((1, 2), F)
    return [s.run(["y"], {"o": o, "b": b, "c": np.array([c], F)}) for o in (None, 5 * b) for c in (-1, 2)]


# --- values -----------------------------------------------------------------------------------------------------------


@stands_for("ort_value_dlpack", "ort_value_dlpack_protocol", "ort_value_from_dlpack_protocol_object")
def values_by_dlpack(ort: Any) -> Any:
    a = X.copy()
    v = ort.OrtValue.ortvalue_from_numpy(a)
    over, again = ort.OrtValue.from_dlpack(a), ort.OrtValue.from_dlpack(v)
    raw = ort.OrtValue.from_dlpack(v.__dlpack__())
    same = [x.data_ptr() == a.ctypes.data for x in (v, over, again, raw)]
    return same, v.__dlpack_device__(), [x.numpy() for x in (over, again, raw)]


@stands_for("ort_value_dlpack_zero_size")
def empty_values_by_dlpack(ort: Any) -> Any:
    shapes = [(1, 8, 0, 128), (0,), (0, 4), (4, 0)]
    values = [ort.OrtValue.ortvalue_from_numpy(np.zeros(s, F)) for s in shapes]
    return [(v.shape(), ort.OrtValue.from_dlpack(v).shape()) for v in values]


@stands_for("ort_value_from_dlpack_bool")
def bool_values_by_dlpack(ort: Any) -> Any:
    given = [np.array([True, False]), np.array([1, 2, 255], np.uint8)]
    return [ort.OrtValue.from_dlpack(ort.OrtValue.ortvalue_from_numpy(a)).numpy() for a in given]


@stands_for("ort_value_array_protocol")
def values_as_arrays(ort: Any) -> Any:
    v = ort.OrtValue.ortvalue_from_numpy(X.copy())
    shared = [np.asarray(v).ctypes.data == v.data_ptr(), np.asarray(v, dtype=F).ctypes.data == v.data_ptr()]
    rows = [np.array(v), np.asarray(v, dtype=np.float64)]
    others = [np.array([1, 2]), np.array([True, False])]
    return shared, rows, [np.asarray(ort.OrtValue.ortvalue_from_numpy(a)) for a in others]


@stands_for("session_scoped_cpu_ortvalue", "device_ortvalue_provenance_rules")
def values_of_a_session(ort: Any) -> Any:
    s, other = session(ort), session(ort)
    mine = s.create_ortvalue_from_shape_and_type([2, 3], np.float32, "cpu")
    foreign = other.create_ortvalue_from_shape_and_type([2, 3], np.float32, "cpu")
    calls: list[Callable[[], Any]] = [
        lambda: mine.update_inplace(foreign), lambda: s.run(None, {"x": foreign}),
        lambda: s.run_with_ort_values(None, {"x": foreign}),
        lambda: s.io_binding().bind_ortvalue_input("x", foreign),
        lambda: s.io_binding().bind_ortvalue_output("y", foreign), lambda: other.run_with_iobinding(s.io_binding()),
    ]  # fmt: skip
    wrong = [raised(call) for call in calls]
    free = ort.OrtValue.ortvalue_from_numpy(X.copy())
    free.update_inplace(X + 1)
    mine.update_inplace(free)
    binding = s.io_binding()
    s.set_providers(["CPUExecutionProvider"])
    wrong += [raised(lambda: s.run(None, {"x": mine})), raised(lambda: s.run_with_iobinding(binding))]
    scalar = s.create_ortvalue_from_shape_and_type([], np.float32, "cpu")
    return wrong, mine.shape(), mine.numpy(), scalar.shape(), s.run(["y"], {"x": free})


@behaviour()
def values_that_are_sequences(ort: Any) -> Any:
    s = session(ort, one("SequenceInsert", {"s": sequence(7), "t": tensor(7, [2])}, sequence(7)))
    empty = session(ort, one("SequenceEmpty", {}, sequence(7), dtype=7)).run_with_ort_values(None, {})[0]
    two = ort.OrtValue.ortvalue_from_numpy(np.array([1, 2]))
    made = s.run_with_ort_values(["y"], {"s": empty, "t": two})[0]
    facts = [[v.is_tensor(), v.is_tensor_sequence(), v.data_type(), v.has_value()] for v in (empty, made)]
    return facts, raised(made.numpy), s.run(None, {"s": made, "t": two})


@stands_for("bind_input_types")
def bindings_of_all_types(ort: Any) -> Any:
    rows = []
    for dtype in (np.float32, np.float64, np.int32, np.uint32, np.int64, np.uint64, np.int16, np.uint16, np.int8,
                  np.uint8, np.float16, np.bool_):  # fmt: skip
        x = np.arange(8).reshape(4, 2).astype(dtype)
        kind = tensor(int(helper.np_dtype_to_tensor_dtype(x.dtype)), [None, 2])
        s = session(ort, one("Identity", {"x": kind}, kind))
        b = s.io_binding()
        b.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(x))
        b.bind_output("y", "cpu")
        s.run_with_iobinding(b)
        rows.append([b.get_outputs()[0].data_type(), b.get_outputs()[0].numpy()])
    return rows


@behaviour()
def bad_values(ort: Any) -> Any:
    make, value = ort.OrtValue, ort.OrtValue.ortvalue_from_numpy(X.copy())
    s = session(ort)
    calls: list[Callable[[], Any]] = [
        lambda: make.ortvalue_from_numpy([1.0]), lambda: make.ortvalue_from_numpy(np.array(["a"])),
        lambda: make.ortvalue_from_numpy(np.zeros(2, np.complex64)), lambda: make.ortvalue_from_numpy(X, "cuda"),
        lambda: make.ortvalue_from_shape_and_type([2], object), lambda: make.ortvalue_from_shape_and_type([-1], F),
        lambda: make.ortvalue_from_shape_and_type([2], 99), lambda: value.update_inplace(np.zeros(4, F)),
        lambda: value.update_inplace([1.0]), lambda: s.run_with_ort_values(["y"], {"q": value}),
        lambda: s.run_with_ort_values(["q"], {"x": value}), lambda: s.run_with_ort_values("y", {"x": value}),
    ]  # fmt: skip
    scalar, columns = make.ortvalue_from_numpy(np.array(3.0)), make.ortvalue_from_numpy(np.asfortranarray(X))
    return [raised(call) for call in calls], scalar.shape(), columns.numpy()


@behaviour()
def bad_bindings(ort: Any) -> Any:
    s, value = session(ort), ort.OrtValue.ortvalue_from_numpy(X.copy())

    def out(shape: Any, dtype: Any = np.float32) -> Any:
        return lambda b: b.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_shape_and_type(shape, dtype))

    steps: dict[str, Callable[[Any], Any]] = {
        "x": lambda b: b.bind_cpu_input("x", X), "y": lambda b: b.bind_output("y"), "q": lambda b: b.bind_output("q"),
        "name": lambda b: b.bind_cpu_input("q", X), "value's name": lambda b: b.bind_ortvalue_input("q", value),
        "dtype": lambda b: b.bind_cpu_input("x", X.astype(np.float64)), "rank": lambda b: b.bind_cpu_input("x", X[0]),
        "size": lambda b: b.bind_cpu_input("x", np.zeros((2, 4), F)), "list": lambda b: b.bind_cpu_input("x", [1.0]),
        "shape": out([3, 2]), "larger": out([2, 3]), "integers": out([2, 2], np.int64), "fits": out([2, 2]),
        "no inputs": lambda b: b.clear_binding_inputs(), "no results": lambda b: b.clear_binding_outputs(),
        "no shape": lambda b: b.bind_output("y", "cpu", 0, None, None, 1),
    }  # fmt: skip
    orders = [
        "y", "x", "x,q", "x,name,y", "x,value's name,y", "dtype,y", "rank,y", "size,y", "list,y", "x,shape", "x,larger",
        "x,integers", "x,fits", "x,y,no inputs", "x,y,no results", "x,no shape", "x,y,y", "x,x,y",
    ]  # fmt: skip

    def run(order: str) -> Any:
        b = s.io_binding()
        for step in order.split(","):
            steps[step](b)
        s.run_with_iobinding(b)

    return {order: raised(lambda order=order: run(order)) for order in orders}


@stands_for("bind_onnx_types_supported_by_numpy", "bind_onnx_types_not_supported_by_numpy")
def bindings_by_number_of_type(ort: Any) -> Any:
    rows = []
    for number in (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16, 17, 19):
        made = onnx.load_from_string(one("Identity", {"x": tensor(number, [None])}, tensor(number, [None])))
        made.ir_version, made.opset_import[0].version = 10, 19  # which know all of these types
        s = session(ort, made.SerializeToString())
        size = np.dtype(helper.tensor_dtype_to_np_dtype(number)).itemsize
        x = (np.arange(8 * size, dtype=np.uint8) % 2).copy()  # bits of any type
        y = ort.OrtValue.ortvalue_from_shape_and_type([8], number)
        b = s.io_binding()
        b.bind_input("x", "cpu", 0, number, [8], x.ctypes.data)
        b.bind_output("y", "cpu", 0, number, [8], y.data_ptr())
        s.run_with_iobinding(b)
        got = np.ctypeslib.as_array((ctypes.c_uint8 * x.size).from_address(y.data_ptr()))
        rows.append([y.data_type(), y.element_type(), got.tolist() == x.tolist(), s.get_inputs()[0].type])
    return rows


@stands_for("bind_input_only", "bind_input_and_non_preallocated_output")
def bindings_by_address(ort: Any) -> Any:
    s, x = session(ort), X.copy()
    b = s.io_binding()
    b.bind_input("x", "cpu", 0, np.float32, [2, 3], x.ctypes.data)
    b.bind_output("y", "cpu")
    b.bind_output("z")
    rows = []
    for _ in range(2):
        b.synchronize_inputs()
        s.run_with_iobinding(b)
        b.synchronize_outputs()
        rows.append([b.copy_outputs_to_cpu(), [v.device_name() for v in b.get_outputs()]])
        x += 1
    return rows


# --- what is for a process of its own ---------------------------------------------------------------------------------

COVERED["global_threads"] = ("global_threadpool", "raise_error_if_use_per_session_threads")


def global_threads(ort: Any) -> Any:
    """Sessions share the threads of the process: for a process of its own, as nothing takes that back."""
    ort.set_global_thread_pool_sizes(2, 2)
    o = ort.SessionOptions()
    o.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    o.use_per_session_threads = False
    found = session(ort, sess_options=o).run(["y"], {"x": X})[0].tolist()
    o.use_per_session_threads = True
    return found, raised(lambda: session(ort, sess_options=o))


# --- the backend of ONNX ----------------------------------------------------------------------------------------------


@stands_for("testRunModel", "testRunModelProto", "testRunModelProtoApi", "testRunModelNonTensor")
def backend(ort: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library imports what onnx deprecates
        found = getattr(ort, "backend", None) or importlib.import_module("onnxruntime.backend")
    prepared = found.prepare(onnx.load_from_string(affine()), "CPU")
    kind = helper.make_map_type_proto(7, tensor(1))
    maps = one("DictVectorizer", {"x": kind}, tensor(1, [1, 2]), "ai.onnx.ml", int64_vocabulary=[0, 2])
    rows = [prepared.run(X), prepared.run([X]), found.run(affine(), X), found.prepare(maps).run({0: 1.5, 2: 2.5})]
    bad = raised(lambda: found.prepare(affine(), optimized_model_filepath="never.onnx"))
    return rows, bad, found.supports_device("CPU"), found.supports_device("NoSuchDevice")
