"""The hooks of XRT: everything that a package can bring, carried by pluggy.

    import xrt_core as xrt

    @xrt.hookimpl
    def xrt_engines():
        return [AcmeEngine]

A *plugin* is a module, or an object, with such functions. Entry points find it: each group below names the moment at
which packages are imported, and the hooks say what they bring, so one module may stand in several groups. Listing
entry points imports nothing.

    group            name of the entry point      imported when                                hook
    xrt.engines      the engine's name            the engine takes part or is listed           xrt_engines
    xrt.engines      any                          option `custom_op_libraries` is given        xrt_open_operators
    xrt.operators    the domain of the operators  a model has an operator of the domain        xrt_operators
    xrt.devices      the kind of device           that kind is asked for                       xrt_device_kinds
    xrt.frontends    any                          a model is given that XRT does not know      xrt_import_model
    xrt.passes       any                          the first module is made                     xrt_passes
    xrt.converters   any                          the first converter is looked up             xrt_converters
    xrt.commands     any                          `xrt` is called with no command of the core  xrt_commands
    xrt.observers    any                          the first module is made                     xrt_event
    xrt.observers    any                          the first module is made                     xrt_write_checkpoint
    xrt.observers    any                          a module's option `rollout` is given         xrt_rollout
    xrt.caches       any                          the first module is made                     xrt_shared_caches
    xrt.caches       any                          a module's option `cache` is a URL           xrt_open_cache
    any of these     the options' section         an option of the section is given            xrt_options

Short forms: an entry point of `xrt.engines` may name a subclass of `Engine` itself, and one of `xrt.passes` a pass. An
engine's object is a plugin too: `xrt_passes`, `xrt_converters` and `xrt_event` may be its methods.

An implementation names only the arguments that it wants, so it goes on working when a later core passes more. All hooks
are optional. Wrappers are refused: each implementation is called by itself, so that one that fails stops no other.

What goes wrong belongs to its plugin. Whatever an implementation raises, `SystemExit` included and Ctrl-C excluded, and
a result of another form than the hook asks for, is a `PluginError` in the list of problems, which `xrt doctor` prints
with the package; the plugin's other hooks and all other plugins work as before. Names are taken once: the second
owner's row is left out, and the problem names both owners.

Before you add a hook: it needs a caller in the core, and every plugin may rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import pluggy

from xrt_core import events

PROJECT: Final = "xrt"
hookspec: Final = pluggy.HookspecMarker(PROJECT)
hookimpl: Final = pluggy.HookimplMarker(PROJECT)


class Specification:
    """Every hook there is."""

    @hookspec
    def xrt_engines(self) -> Iterable[type]:  # type: ignore[empty-body]
        """Engines: subclasses of `xrt_core.engine.Engine`, which declare their priority, switch and devices.

        Called once, when an engine of the plugin is first needed: it is asked for by name, takes part because nobody
        named one, or is listed by `xrt engines`; and when a switch such as `use_<name>` is given, whose owner must be
        found. It must not import the engine's library.

        The result is the classes, each under an entry point of `xrt.engines` of its `name`; classes of other names are
        left out. A class that breaks the contract, an exception, or no class of the entry point's name, makes that
        engine "broken" in `xrt engines`, and a PluginError for who asks for it by name.
        """

    @hookspec
    def xrt_operators(self) -> Iterable[Any]:  # type: ignore[empty-body]
        """Operator sets: `xrt_core.ir.operator_set.OperatorSet`, operators of a domain of the package's own.

        Called once, when the first operator of the domain is met: in a model that is read, or by name.

        The result is the sets. Each operator has a schema, by which models are read, verified and typed; and may have a
        kernel for the host, a lowering to operators of ONNX, a gradient rule, traits, and kernels of engines. Without a
        kernel it is replaced by its lowering. Sets of another domain than the entry point's name are left out. An
        exception, or a set that breaks these rules, leaves the domain unknown; the error about a model that uses it
        says why.
        """

    @hookspec
    def xrt_open_operators(self, library: str, operators: Collection[tuple[str, str]]) -> Iterable[Any] | None:
        """The operators of a library that the program names by its path.

        :param library: the path, of a file that is there, as the option `custom_op_libraries` says.
        :param operators: domain and name of the model's operators that are not of ONNX.

        Called for each such library and model, plugin after plugin in the order of their names, until one knows it.

        The result is an `OperatorSet` for each domain of these in which the library has operators, whose `find` knows
        those that it has and no others; or None for a library of another kind. They stay known in the process. An
        XRTError goes to the user, any other exception as a PluginError.
        """

    @hookspec
    def xrt_device_kinds(self) -> Iterable[Any]:  # type: ignore[empty-body]
        """Kinds of devices: `xrt_core.engine.device_kinds.DeviceKind`, beside "cpu", "cuda" and "tpu".

        Called once, when a device of the kind is asked for that the core does not know, or kinds are listed.

        The result is the kinds, each with its name, its availability with a reason, and how arrays get there and back.
        An exception, or a kind whose name is taken, leaves the kind unknown; asking for the device says why.
        """

    @hookspec
    def xrt_passes(self) -> Iterable[Any]:  # type: ignore[empty-body]
        """Passes over graphs: functions Graph -> Graph, or classes of `xrt_core.passes.pass_base.Pass`.

        Called once, before the first module that is made after the plugin was loaded.

        Attributes of a pass say where it stands (`name`, `stage`, `before`, `after`, `requires`, `reason`, as for
        `xrt.register_pass`). The passes run in every module made from then on. An exception, a name that is taken, or a
        place that cannot be, leaves the pass out with a warning, and in `xrt passes`; a pass that fails when it runs is
        left out of that run.
        """

    @hookspec
    def xrt_converters(self) -> Iterable[tuple[str, str, Any]]:  # type: ignore[empty-body]
        """Converters of arrays: rows (source, target, function), see `xrt_core.engine.converters.Converter`.

        Called once: of an engine's object when the engine is loaded, of a plugin of the group `xrt.converters` before
        the first look-up of a converter.

        A row says how an array of the source ("host", or an engine's name) becomes one of the target; None for the
        function says that it is one. An exception or a bad row registers nothing of the plugin: a warning for a
        package of the group, "broken" for an engine.
        """

    @hookspec
    def xrt_import_model(self, model: object, example: object) -> Any:
        """A frontend: the graph of a model that XRT does not know by itself.

        :param model: what the user gave to `XRTModule`, `TrainModule` or `xrt.import_model`. It is no path, no bytes,
            no ONNX model, no graph, and no function or `xrt.Graph` to trace.
        :param example: what the user gave as `example`, None for nothing: arguments that show what the model takes.

        Called for each such object, frontend after frontend in the order of their names, until one knows it.

        The result is an `xrt_core.ir.graph.Graph`, or None for an object that the frontend does not know. An XRTError
        is the frontend's word about a model that it knows, and goes to the user. Any other exception, or a result of
        another type, is the frontend's problem: the next one is asked, and where none knows the model the error lists
        what failed.
        """

    @hookspec
    def xrt_commands(self) -> Iterable[tuple[Any, ...]]:  # type: ignore[empty-body]
        """Commands of the command line: rows (name, app) or (name, "module:attribute", help).

        Called once, when `xrt` is started with a command that the core does not have, or prints its help.

        app: a `typer.Typer`, which becomes `xrt NAME SUBCOMMAND ...`, or a function with typer's annotations, which
        becomes `xrt NAME ...`; its attribute `context_settings`, if any, is click's. Named by its module and attribute,
        it is imported when the command is called, and `xrt --help` shows the line `help`. An exception, or a name that
        the core or another plugin has, leaves the command out, with a line on stderr when help is printed.
        """

    @hookspec
    def xrt_options(self) -> Iterable[Any]:  # type: ignore[empty-body]
        """Options of the package: rows `xrt_core.options.PluginOption`, in a section of the entry point's name.

        Called once, when an option of the section is given (`engine_options={"acme": {"depth": 3}}`, or the variable
        `XRT_ACME_DEPTH`), and when options are listed (`xrt doctor`, `python -m xrt_core.options`).

        Declared options are checked like those of the core: a name that the section does not have, and a value that
        its kind does not take, is an OptionError that says where it came from. An engine reads them in
        `CompileOptions.extra`, everybody else by `Options.section("acme")`. An exception or a bad row leaves the row
        out. Sections of packages that declare nothing are the engine's own to check.
        """

    @hookspec
    def xrt_shared_caches(self) -> Iterable[Any]:  # type: ignore[empty-body]
        """Caches behind that on the disk, which machines share.

        Called once, when the first module with a cache on disk is made.

        The result is the caches, objects with two methods. `fetch(name)` returns the bytes of the entry of a name, or
        None; `offer(name, content)` is told of an entry that was just stored on the disk. Both are called in the thread
        that compiles, so they must bound their time. What `fetch` returns is checked like a file of the disk cache; its
        entries are code, and the cache vouches for who wrote them. An exception is a miss, with the event
        `cache.shared_failed`.
        """

    @hookspec
    def xrt_open_cache(self, url: str) -> Any:
        """The cache that machines share at a URL.

        :param url: what the option `cache` says, such as "s3://bucket/xrt".

        Called for each module with such an option, plugin after plugin in the order of their names, until one knows it.

        The result is a cache as `xrt_shared_caches` gives them, or None for a URL that the plugin does not know. An
        XRTError goes to the user, and so does any other exception, as a PluginError.
        """

    @hookspec
    def xrt_write_checkpoint(self, path: str, write: Callable[[], None]) -> bool | None:
        """Who writes a checkpoint, in a program of several processes.

        :param path: of the file.
        :param write: writes it; raises CheckpointError.

        Called in every process by `TrainModule.save`, plugin after plugin in the order of their names, until one says
        that it is done.

        The result is True where the plugin saw to it, by a call of `write` in one of the processes; None or False
        leaves it to the next one, and at last to the process itself. An XRTError goes to the user; any other
        exception is the plugin's problem, and the process writes by itself.
        """

    @hookspec
    def xrt_rollout(self, rollout: Any, events: events.EventLog) -> Any:
        """Whether a new engine takes part in this job, and in which of its calls.

        :param rollout: `xrt_core.options.rollout.Rollout`: the share, and the engine with the version that is here.
        :param events: the module's log, for what is decided and found.

        Called for each module and training with the option `rollout`, plugin after plugin in the order of their names,
        until one decides.

        The result is an `xrt_core.engine.rollout.Decision`, or None for a rollout that the plugin does not decide.
        Where it does not act, the module is made without the engine; where it does, a module for inference is asked
        through what `answering` returns. An XRTError goes to the user, any other exception as a PluginError.
        """

    @hookspec
    def xrt_event(self, event: events.Event) -> None:
        """An observer: something happened. An engine was loaded, a signature specialised, a cluster compiled, ...

        :param event: see `xrt_core.events.Event`.

        Called for every event from the plugin's loading on, in the thread in which it happened; should be quick. The
        result is ignored. An exception is logged, kept as a problem, and changes nothing.
        """
