"""What every test of the core and of the plugins runs under."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import random
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# how fast a machine makes examples, or runs them, says nothing about the code
settings.register_profile("xrt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("xrt")

_KEPT = ("XRT_VERIFY", "XRT_VENV", "XRT_CACHE_DIR")  # the last for a pytest within a test
os.environ["XRT_VERIFY"] = "1"  # the graph is held against the IR's rules after every stage
for _name in [n for n in os.environ if n.startswith(("FLAGS_", "XRT_")) and n not in _KEPT]:
    del os.environ[_name]  # a developer's own settings must not decide what the tests see
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background: Ctrl-C is tested
    with contextlib.suppress(ValueError):  # this is not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["XRT_GUARD"] = "0"  # most tests are about what engines compute; those of the guard ask for it


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fast`: the tests of three minutes. `--shuffle SEED`: in another order, to find tests that depend on one."""
    parser.addoption("--fast", action="store_true", help="only the tests that are not marked slow, with few examples")
    parser.addoption("--modules-run", action="store_true", help="fail where no function of a module of the core ran")
    parser.addoption("--shuffle", metavar="SEED", type=int, help="run files, and tests within a file, in random order")


_BY_NIGHT = frozenset(
    [
        "tests/conformance/test_dev_models.py::test_agrees_with_onnxruntime[light_densenet121-0-xla]",
        "tests/conformance/test_dev_models.py::test_agrees_with_onnxruntime[light_inception_v2-0-xla]",
        "tests/conformance/test_dev_models.py::test_agrees_with_onnxruntime[ppocr_det-0-xla]",
        "tests/conformance/test_dev_models.py::test_agrees_with_onnxruntime[ppocr_rec-0-xla]",
        "tests/conformance/test_guard.py::test_a_model_is_right[ppocr_cls]",
        "tests/conformance/test_guard.py::test_a_model_goes_the_whole_way[silero_vad_sequence]",
        "tests/conformance/test_mixed_engines.py::test_in_every_order[light_inception_v2-xla-onnxruntime-openvino]",
        "tests/conformance/test_mixed_engines.py::test_in_every_order[light_vgg19-xla-onnxruntime-openvino]",
        "tests/examples/test_examples.py::test_digits_are_read[cnn-0.97]",
        "tests/examples/test_examples.py::test_scikit_learn_learns_the_same",
        "tests/guard/test_builder.py::test_another_engine_takes_the_cluster[HangsOnSinh-hung]",
        "tests/passes/test_mixed_precision.py::test_trained_models[minilm_int8]",
        "tests/safety/test_processes.py::test_forks[onnxruntime-isolated]",
        "tests/training/test_losses.py::test_recomputed_and_accumulated[transformer]",
        "tests/training/test_losses.py::test_xla_and_onnxruntime[transformer]",
        "tests/training/test_losses.py::test_torch[cnn]",
        "tests/training/test_losses.py::test_xla[transformer]",
        "tests/training/test_losses.py::test_xla_and_the_host[cnn]",
        "tests/training/test_losses.py::test_xla_and_the_host[transformer]",
        "tests/training/test_mixed_precision.py::test_a_hundred_steps[xla-block]",
        "tests/training/test_mixed_precision.py::test_convolutions[xla]",
        "tests/verify/test_faults.py::test_verdicts_on_integer_products[xla]",
    ]
)
"""Long cases of tests whose other cases are in the default run."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """`--fast` chooses tests of the core, and how many examples random ones try (tests/profiles.py)."""
    if config.getoption("--fast"):
        if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            config.args = ["tests"]  # engines have their tests in the full run
        config.option.markexpr = "not slow and not nightly"
        os.environ.setdefault("HYPOTHESIS_PROFILE", "fast")
    if config.getoption("--modules-run"):
        from tests.modules_run import ModulesRun

        modules_run = ModulesRun()
        modules_run.start()
        config.pluginmanager.register(modules_run, "xrt-modules-run")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """With `--fast`, a file that says `pytestmark = pytest.mark.slow` is not even imported: that takes seconds too."""
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(tryfirst=True)  # before pytest leaves marked tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs by night. Shuffle files, then the tests of each file: fixtures of a module are still made once."""
    for item in items:
        if item.nodeid in _BY_NIGHT:
            item.add_marker(pytest.mark.nightly)
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    files: dict[pathlib.Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    chance = random.Random(seed)
    groups = list(files.values())
    chance.shuffle(groups)
    for group in groups:
        chance.shuffle(group)
    items[:] = [item for group in groups for item in group]


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of this process's tests: no test reads or writes the user's own, child processes included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XRT_CACHE_DIR", str(tmp_path_factory.mktemp("xrt-cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """What was made before a file's tests is left out of garbage collections, which many tests ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_process_state(_cache_folder: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Registries, hooks, listeners, `xrt.config` and environment are restored after a test, and it fails if it left
    anything there. The marker `tiny_clusters` is for it what `prune=False` is for a module."""
    from tests.isolation import isolated

    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("tiny_clusters"):
            patch.setenv("XRT_PRUNE", "0")
        with isolated() as leaks:
            yield
    if leaks.found:
        pytest.fail(f"{request.node.nodeid} leaves the process changed: {'; '.join(leaks.found)}", pytrace=False)


@pytest.fixture
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache folder for one test, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XRT_CACHE_DIR", str(folder))
    return folder
