"""Finding the library: what is missing is said with the cure, and versions that do not fit are refused."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
from standin import Severity
from xrt_tensorrt._toolkit import Toolkit, choose
from xrt_tensorrt.finding import FULL, RTX, System, ToolkitError, find, order, why_not_installed
from xrt_tensorrt.settings import Settings

from xrt_core.errors import CompileError

RTX_LIBRARIES = ("libtensorrt_rtx.so.1.7.1", "libtensorrt_onnxparser_rtx.so.1.7.1")


class _World:
    """A machine: packages with their folders, libraries that load, modules that import."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.packages: dict[str, pathlib.Path] = {}
        self.modules: dict[str, Any] = {}
        self.environ: dict[str, str] = {}
        self.loaded: list[str] = []
        self.version = 10701
        self.broken: set[str] = set()
        self.on_system: set[str] = set()

    def package(self, name: str, *files: str, version: str = "") -> None:
        folder = self.packages[name] = self.root / name
        folder.mkdir(exist_ok=True)
        for f in files:
            (folder / f).touch()
        if version:
            self.modules[name] = SimpleNamespace(__name__=name, __version__=version)

    @property
    def system(self) -> System:
        return System(self.environ, self._import, self._load, self.packages.get)

    def _import(self, name: str) -> Any:
        found = self.modules[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _load(self, path: str) -> Any:
        name = pathlib.Path(path).name
        if name in self.broken or (name == path and path not in self.on_system):
            raise OSError(f"{path}: cannot open shared object file")
        self.loaded.append(path)
        return SimpleNamespace(getInferLibVersion=lambda: self.version)


@pytest.fixture
def world(tmp_path: pathlib.Path) -> _World:
    """A machine on which nothing is installed."""
    return _World(tmp_path)


def test_rtx_from_the_provider_package(world: _World) -> None:
    """The libraries inside ONNX Runtime's provider are loaded, the parser after what it needs, then the bindings."""
    world.package("tensorrt_rtx_bindings", version="1.7.1.116")
    world.package("onnxruntime_ep_nv_tensorrt_rtx", *RTX_LIBRARIES, "libtensorrt_rtx_extra.so")

    assert find(RTX, world.system).__version__ == "1.7.1.116"
    assert [pathlib.Path(p).name for p in world.loaded[:2]] == list(RTX_LIBRARIES)


def test_nothing_installed(world: _World) -> None:
    """The message names the module that is missing and the pip command that brings it."""
    with pytest.raises(ToolkitError) as e:
        find(RTX, world.system)
    assert e.value.reason == "TensorRT-RTX is not installed (no module tensorrt_rtx_bindings)"
    assert e.value.remedy.startswith("pip install 'xrt-tensorrt[rtx-cu13]'")
    with pytest.raises(ToolkitError, match=r"no module tensorrt\).*xrt-tensorrt\[cu13\]"):
        find(FULL, world.system)


def test_whether_anything_is_installed(world: _World) -> None:
    """Asked without loading: bindings of either flavour will do."""
    missing = why_not_installed(world.system)
    assert missing is not None
    assert missing.remedy.startswith("pip install")
    world.package("tensorrt")
    assert why_not_installed(world.system) is None
    assert world.loaded == []


def test_bindings_without_libraries(world: _World) -> None:
    """Bindings alone: the library that is missing is named, and where it was looked for."""
    world.package("tensorrt_rtx_bindings", version="1.7.1.116")
    world.modules["tensorrt_rtx_bindings"] = ImportError("libtensorrt_rtx.so.1: cannot open shared object file")
    with pytest.raises(ToolkitError, match="libtensorrt_rtx.so is in none of the known packages nor on the system"):
        find(RTX, world.system)


def test_a_library_that_does_not_load(world: _World) -> None:
    """The loader's own message reaches the user."""
    world.package("tensorrt_rtx_bindings", version="1.7.1.116")
    world.package("onnxruntime_ep_nv_tensorrt_rtx", *RTX_LIBRARIES)
    world.broken.add(RTX_LIBRARIES[0])
    world.modules["tensorrt_rtx_bindings"] = ImportError("undefined symbol")
    with pytest.raises(ToolkitError, match=r"libtensorrt_rtx.so.1.7.1: .*cannot open shared object"):
        find(RTX, world.system)


def test_broken_bindings(world: _World) -> None:
    """An import that fails with the libraries in place is told as it is."""
    world.package("tensorrt", version="10.9.0.34")
    world.on_system |= {"libnvinfer.so", "libnvonnxparser.so"}
    world.modules["tensorrt"] = RuntimeError("numpy is too new")
    with pytest.raises(ToolkitError, match="tensorrt does not import: RuntimeError: numpy is too new"):
        find(FULL, world.system)


def test_version_skew(world: _World) -> None:
    """Bindings of one minor version with a library of another are refused, and both are named."""
    world.package("tensorrt_rtx_bindings", version="1.6.0.1")
    world.package("onnxruntime_ep_nv_tensorrt_rtx", *RTX_LIBRARIES)
    with pytest.raises(ToolkitError, match=r"are 1.6.0.1, the library of TensorRT-RTX that was loaded is 1.7.1"):
        find(RTX, world.system)


def test_tensorrt_home_comes_first(world: _World) -> None:
    """`$TENSORRT_HOME` wins over packages; the newest of several versions in a folder is loaded."""
    world.package("tensorrt", version="10.9.0.34")
    world.package("tensorrt_libs", "libnvinfer.so.10.1", "libnvonnxparser.so.10.1")
    home = world.root / "home"
    (home / "lib").mkdir(parents=True)
    for name in ("libnvinfer.so.10.9.0", "libnvinfer.so.10", "libnvonnxparser.so.10"):
        (home / "lib" / name).touch()
    world.environ["TENSORRT_HOME"] = str(home)
    world.version = 100900
    find(FULL, world.system)

    assert world.loaded[0] == str(home / "lib" / "libnvinfer.so.10.9.0")


def test_which_flavour_first() -> None:
    """Full TensorRT on data-centre GPUs, TensorRT-RTX elsewhere and without a GPU; the environment wins."""
    assert order("", (9, 0)) == order("", (8, 0)) == (FULL, RTX)
    assert order("", (8, 9)) == order("", None) == (RTX, FULL)
    assert order("tensorrt", None) == (FULL,)
    assert order("tensorrt_rtx", (9, 0)) == (RTX,)
    with pytest.raises(ToolkitError, match="XRT_TENSORRT is 'trt'"):
        order("trt", None)


class _Logger:
    """ILogger of a module without a library."""

    Severity = Severity


def _module(**names: Any) -> Any:
    return SimpleNamespace(__version__="10.9.0.34", ILogger=_Logger, **names)


@pytest.mark.parametrize(
    ("capability", "flavour"),
    [((8, 0), FULL), ((9, 0), FULL), ((10, 0), FULL), ((8, 6), RTX), ((12, 0), RTX), (None, RTX), ((8, 7), FULL)],
)
def test_which_of_two_that_are_installed(world: _World, capability: tuple[int, int] | None, flavour: str) -> None:
    """Data-centre GPUs and those that TensorRT-RTX is not made for get full TensorRT; alone, it says what it is for."""
    world.package("tensorrt_rtx_bindings", version="1.7.1.116")
    world.package("onnxruntime_ep_nv_tensorrt_rtx", *RTX_LIBRARIES)
    kinds = SimpleNamespace(__members__=dict.fromkeys(("NONE", "SM80", "SM86", "SM89", "SM120")))
    rtx = world.modules["tensorrt_rtx_bindings"]
    rtx.ILogger, rtx.ComputeCapability = _Logger, kinds
    assert choose(world.system, capability).flavour == RTX
    world.package("tensorrt", version="1.7.0")  # as old as the stand-in for both libraries says
    world.package("tensorrt_libs", "libnvinfer.so.10", "libnvonnxparser.so.10")
    world.modules["tensorrt"].ILogger = _Logger
    assert choose(world.system, capability).flavour == flavour
    world.environ["XRT_TENSORRT"] = "tensorrt_rtx"
    assert choose(world.system, capability).flavour == RTX


def test_full_tensorrt_without_a_gpu() -> None:
    """A builder that cannot be made, which the binding tells as a TypeError, is an error with the library's words."""

    def builder(logger: Any) -> Any:
        logger.log(Severity.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    toolkit = Toolkit(_module(Builder=builder), FULL)
    assert toolkit.targets == ()
    with pytest.raises(ToolkitError, match="makes no builder: CUDA initialization failure.*needs an NVIDIA GPU"):
        toolkit._builder()


def test_full_tensorrt_is_configured_by_its_own_names() -> None:
    """Hardware compatibility is set, a target is not asked for, and a flag that a version lacks is an error."""
    set_flags: list[str] = []
    config = SimpleNamespace(
        set_flag=set_flags.append, clear_flag=lambda f: None, set_memory_pool_limit=lambda *a: None
    )
    builder = SimpleNamespace(create_builder_config=lambda: config)
    levels = SimpleNamespace(AMPERE_PLUS="ampere")
    flags = SimpleNamespace(TF32="tf32", VERSION_COMPATIBLE="vc", STRIP_PLAN="strip")
    toolkit = Toolkit(_module(HardwareCompatibilityLevel=levels, BuilderFlag=flags), FULL)
    toolkit.configure(builder, Settings(hardware_compatibility="ampere_plus", version_compatible=True))

    assert config.hardware_compatibility_level == "ampere"
    assert set_flags == ["vc"]
    toolkit.configure(builder, Settings(tf32=True))
    assert set_flags == ["vc", "tf32"]
    with pytest.raises(CompileError, match="TensorRT 10.9.0.34 has no STRICT_NANS"):
        toolkit.configure(builder, Settings(strict_nans=True))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('(dilations[i] == 1) && "This version of TensorRT does not support dilations other than 1."',
         "This version of TensorRT does not support dilations other than 1."),
        ('creator && "Plugin not found, are the plugin name, version, and namespace correct?"',
         "it does not know the operator"),
        ("false", "it gives no reason"),
        ("Assertion failed: a  negative\n size", "a negative size"),
    ],
)  # fmt: skip
def test_the_parsers_words(said: str, words: str) -> None:
    """Assertions of its source are told without their code."""
    from xrt_tensorrt.messages import in_words

    assert in_words(said) == words
