"""Where executables come from: this process's memory, a model file, the disk, or the compiler, in this order.

`ExecutableStore` looks for one, `Compilation` has the engines, devices and options of a module.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from xrt_core.cache.disk import NOT_STORED, NOTHING, SUFFIX, DiskCache, FileDigests, Hit, Miss, shared_store
from xrt_core.cache.key import CacheKey, cache_key
from xrt_core.cache.model_file import ModelFile, StoredExecutable
from xrt_core.engine.boundary import loads
from xrt_core.engine.contract import CompileOptions, Engine, Executable, GraphCompiler, Tolerance
from xrt_core.engine.device_kinds import same_device
from xrt_core.engine.forking import in_forked_process
from xrt_core.engine.op_kernels import op_kernels
from xrt_core.errors import CacheError, CompileError, EngineError, RegistrationError, UnsupportedError
from xrt_core.events import EventLog, logger
from xrt_core.ir.function import Function, function_lines, place_fingerprint, remembering
from xrt_core.ir.graph import engine_and_device
from xrt_core.ir.schema import DIALECT
from xrt_core.plugins import plugins

WAIT_SECONDS: Final = 120.0
"""How long to wait for another process that compiles the same thing, before compiling it here as well."""

BYTES_A_SECOND: Final = 500e6
"""How fast an entry is read, checked and loaded. One that takes longer than its compilation is not worth storing; it
holds the weights, in a form of its engine's own."""

Differs = Callable[[Function, Executable, Executable], str]
"""(function, one executable, another) -> what is wrong with the first, "" for nothing: `verify.evaluate.difference`."""


def is_on_mesh(function: Function) -> bool:
    """Whether it runs on several devices. Such an executable belongs to its process, and may need that other processes
    compile it at the same time: none of them can wait for a lock."""
    return any(n.op_type == "Boxing" and n.domain == DIALECT for n in function.body.nodes)


def _not_compared(function: Function, one: Executable, other: Executable) -> str:
    return "this store compares no results"


_memory: weakref.WeakValueDictionary[str, Executable] = weakref.WeakValueDictionary()
_origins: weakref.WeakKeyDictionary[Executable, str] = weakref.WeakKeyDictionary()
COMPILED: Final = "compiled in this process"
FROM_DISK: Final = "loaded from the cache on disk"
FROM_FILE: Final = "loaded from the model's file"
ON_DISK: Final = "in the cache on disk, not loaded"
_said: set[str] = set()


def forget_all() -> None:
    """Forget the executables of this process's memory and which complaints were made; what plans hold stays alive."""
    _memory.clear()
    _said.clear()


in_forked_process(forget_all)  # their engines' threads are not there


class ExecutableStore:
    """Gives executables by what they are made from; equal Functions are compiled once, by any process.

    disk: None keeps executables in memory only. In its mode "read" nothing is stored; in "verify" what the disk has is
    compiled again and both must give the same results on the same random inputs, or the stored one is replaced.
    Nothing that goes wrong with the disk reaches the caller: it is a miss, with its reason in an event.
    saved: the file that the model was loaded from, if it was. While `sealed` is set nothing is compiled that this file
    should hold: `obtain` raises CacheError with the reason, which is kept in `missed` too.
    shares: whether misses are looked for in the shared caches of plugins, and what is stored is offered to them.
    """

    def __init__(
        self,
        disk: DiskCache | None,
        events: EventLog,
        saved: ModelFile | None = None,
        differs: Differs = _not_compared,
        shares: bool = True,
    ) -> None:
        self._differs = differs
        self.sealed = False
        self.missed: list[str] = []
        self._saved = saved
        self._obtained: weakref.WeakKeyDictionary[Executable, tuple[CacheKey, Function]] = weakref.WeakKeyDictionary()
        self._disk = disk
        self._events = events
        found = () if disk is None or not shares else plugins.contributions("xrt_shared_caches", "xrt.caches")
        self._shared = [c.value for c in found]
        if disk is not None and disk.shared and shares:
            self._shared.append(shared_store(disk.shared))
        self._digests = None if disk is None else FileDigests(disk.folder, disk.mode != "read")

    def obtain(
        self,
        function: Function,
        engine: Engine,
        device: str,
        options: CompileOptions,
        compiler: Callable[[], GraphCompiler],
        compile: Callable[[GraphCompiler], Executable],
    ) -> Executable:
        """The executable of `function`. compiler, compile: make what is needed only where it is."""
        disk = self._usable()
        key = self._key(function, engine, device, options, disk)
        made = _memory.get(key.digest)
        if made is not None:
            self._events.emit("compile.cached", engine=engine.name, cluster=function.name)
        else:
            graph_compiler = compiler()
            made = None if self._saved is None else self._from_saved(self._saved, key, function, graph_compiler)
            if made is None and (disk is None or not loads(graph_compiler) or is_on_mesh(function)):
                made = compile(graph_compiler)
            elif made is None:
                assert disk is not None
                made = self._through_disk(disk, key, function, graph_compiler, compile)
            _memory[key.digest] = made
            _origins.setdefault(made, COMPILED)
        self._obtained[made] = key, function
        return made

    def origin(self, function: Function, engine: Engine, device: str, options: CompileOptions) -> str:
        """Where the executable of `function` came from: COMPILED, FROM_DISK, FROM_FILE; ON_DISK where this process has
        none and the disk does; "" where there is none."""
        disk = self._usable()
        key = self._key(function, engine, device, options, disk)
        made = _memory.get(key.digest)
        if made is not None:
            return _origins.get(made, "")
        return ON_DISK if disk is not None and disk.path_of(key).exists() else ""

    def load(
        self,
        function: Function,
        engine: Engine,
        device: str,
        options: CompileOptions,
        compiler: Callable[[], GraphCompiler],
    ) -> Executable | None:
        """What the disk holds for `function`, loaded anew; None where there is nothing that loads. `obtain` returns it
        from then on."""
        disk = self._usable()
        if disk is None or not loads(graph_compiler := compiler()):
            return None
        key = self._key(function, engine, device, options, disk)
        text = "\n".join(function_lines(function)).encode("utf-8", "surrogatepass")
        found = self._load(disk, key, text, function, graph_compiler)
        if isinstance(found, Miss):
            return None
        _memory[key.digest] = found
        return found

    def stored(self) -> list[StoredExecutable]:
        """Every executable that came from here and is in use, serialised.

        Raises UnsupportedError, naming engine and cluster, where one cannot be.
        """
        found = []
        for executable, (key, function) in list(self._obtained.items()):
            whole = False
            try:
                try:
                    blob = executable.serialize_code()
                except UnsupportedError:
                    blob, whole = executable.serialize(), True
            except UnsupportedError as e:
                raise UnsupportedError(
                    f"{function.name} on engine {key.row('engine')!r} cannot be saved: {e}; leave the engine out, or "
                    "save the model alone (xrt_core.frontends.onnx_export.save)"
                ) from e
            key = key.of_function(function)
            found.append(StoredExecutable(key, whole, function.name, len(function.body.nodes), blob))
        return found

    def _from_saved(
        self, saved: ModelFile, key: CacheKey, function: Function, compiler: GraphCompiler
    ) -> Executable | None:
        """The executable of the model file; None where it has none that can be used."""
        start = time.perf_counter()
        try:
            stored = saved.executable(key)
            if stored is None:
                reason = saved.why_missing(key, function.name)
            else:
                load = compiler.load if stored.whole else lambda blob: compiler.load_code(blob, function)
                executable = load(stored.blob)
                seconds = time.perf_counter() - start
                _origins[executable] = FROM_FILE
                self._events.emit("saved.loaded", seconds=seconds, engine=key.row("engine"), cluster=function.name)
                return executable
        except Exception as e:  # whatever an engine raises about bytes that it does not take
            reason = f"{saved.path}: the executable of {function.name} does not load: {e}"
        self.missed.append(reason)
        self._events.emit("saved.missed", cluster=function.name, reason=reason)
        if self.sealed:
            raise CacheError(reason)
        return None

    def key(self, function: Function, engine: Engine, device: str, options: CompileOptions) -> CacheKey:
        """The key of an executable; weights that were hashed by any process are not hashed again."""
        disk = self._usable()
        if disk is None:
            return cache_key(function, engine, device, options)
        return self._key(function, engine, device, options, disk)

    def unhashed_bytes(self, function: Function) -> int:
        """Bytes of constants that `key` would have to hash, because no process has done it."""
        arrays = [v.data for v in function.body.constants if v.data is not None]
        memory = self._digests
        return sum(a.nbytes for a in arrays if memory is None or memory.get(a) is None)

    def _usable(self) -> DiskCache | None:
        """The disk, if its folder may be used; where not, the reason is said once in this process."""
        if self._disk is None:
            return None
        try:
            self._disk.prepare()
        except CacheError as e:
            if str(e) not in _said:
                _said.add(str(e))
                self._events.emit("cache.refused", level=logging.WARNING, reason=str(e))
            return None
        return self._disk

    def _key(
        self, function: Function, engine: Engine, device: str, options: CompileOptions, disk: DiskCache | None
    ) -> CacheKey:
        if disk is None or self._digests is None:
            by_content = self._saved is not None  # whose keys are compared with those of another process
            return cache_key(function, engine, device, options, "" if by_content else place_fingerprint(function))
        with remembering(self._digests):
            key = cache_key(function, engine, device, options)
        self._digests.flush()
        return key

    def _through_disk(
        self,
        disk: DiskCache,
        key: CacheKey,
        function: Function,
        compiler: GraphCompiler,
        compile: Callable[[GraphCompiler], Executable],
    ) -> Executable:
        text = "\n".join(function_lines(function)).encode("utf-8", "surrogatepass")
        found = self._load(disk, key, text, function, compiler)
        if isinstance(found, Miss) and found.final:
            return compile(compiler)
        if isinstance(found, Miss):
            def wait() -> None:
                reason = "another process compiles the same"
                self._events.progress("wait", cluster=function.name, engine=key.row("engine"), reason=reason)

            with disk.making(key, WAIT_SECONDS, wait) as waited:
                # whoever held the lock may have stored it, or a thread of this process put it into memory
                known = _memory.get(key.digest)
                again = self._load(disk, key, text, function, compiler) if waited and known is None else known
                if isinstance(again, Executable):
                    return again
                return self._make(disk, key, text, function, compiler, compile)
        if disk.mode == "verify":
            return self._verified(disk, key, text, function, compiler, compile, found)
        return found

    def _load(
        self, disk: DiskCache, key: CacheKey, text: bytes, function: Function, compiler: GraphCompiler
    ) -> Executable | Miss:
        start = time.perf_counter()
        found = disk.read(key, text)
        if isinstance(found, Miss) and found.reason == NOTHING and self._fetched(disk, key, function.name):
            found = disk.read(key, text)
        reason = found.reason if isinstance(found, Miss) else ""
        if isinstance(found, Hit):
            self._events.progress("load", cluster=function.name, engine=key.row("engine"))
            try:
                executable = compiler.load_code(found.blob, function)
                if isinstance(executable, Executable):
                    _origins[executable] = FROM_DISK
                    self._events.emit(
                        "cache.hit",
                        seconds=time.perf_counter() - start,
                        engine=key.row("engine"),
                        cluster=function.name,
                        entry=key.digest[:12],
                    )
                    return executable
                reason = f"the engine loaded a {type(executable).__name__}, not an Executable; a bug of its package"
            except Exception as e:  # an entry that its engine does not take is a miss like any other
                reason = f"the engine does not load it: {type(e).__name__}: {e}"
        stored = isinstance(found, Hit) or found.stored
        if reason == NOTHING and logger.isEnabledFor(logging.DEBUG):
            reason += self._nearest(disk, key)
        self._events.emit(
            "cache.miss",
            level=logging.INFO if stored else logging.DEBUG,
            engine=key.row("engine"),
            cluster=function.name,
            entry=key.digest[:12],
            reason=reason,
        )
        return Miss(reason, stored, isinstance(found, Miss) and found.final)

    def _fetched(self, disk: DiskCache, key: CacheKey, cluster: str) -> bool:
        """Whether a cache that machines share has the entry, which then lies on the disk."""
        if disk.mode == "read":
            return False
        name = f"{key.digest}{SUFFIX}"
        for shared in self._shared:
            self._events.progress("fetch", cluster=cluster, engine=key.row("engine"))
            try:
                content = shared.fetch(name)
                reason = "" if content is None else disk.receive(key, bytes(content))
            except Exception as e:  # whatever a store raises, the executable can be compiled
                content, reason = None, f"{type(e).__name__}: {e}"
            if reason:
                self._events.emit("cache.shared_failed", level=self._once(reason), entry=name[:12], reason=reason)
            elif content is not None:
                self._events.emit("cache.fetched", entry=name[:12], bytes=len(content))
                return True
        return False

    def _offer(self, disk: DiskCache, key: CacheKey) -> None:
        """Tell the caches that machines share of an entry that was stored."""
        path = disk.path_of(key)
        for shared in self._shared:
            try:
                shared.offer(path.name, path.read_bytes())
            except Exception as e:
                reason = f"{type(e).__name__}: {e}"
                self._events.emit("cache.shared_failed", level=self._once(reason), entry=path.name[:12], reason=reason)

    @staticmethod
    def _nearest(disk: DiskCache, key: CacheKey) -> str:
        near = disk.nearest(key)
        if near is None:
            return "; the cache is empty"
        return f"; the nearest entry {near[0].digest[:12]} differs in {'; '.join(near[1])}"

    def _make(
        self,
        disk: DiskCache,
        key: CacheKey,
        text: bytes,
        function: Function,
        compiler: GraphCompiler,
        compile: Callable[[GraphCompiler], Executable],
    ) -> Executable:
        start = time.perf_counter()
        made = compile(compiler)
        took = time.perf_counter() - start
        if disk.mode == "read":
            return made
        start = time.perf_counter()
        try:
            blob = made.serialize_code()
            info = {
                "cluster": function.name,
                "nodes": len(function.body.nodes),
                "created": round(time.time(), 3),
                "compile_seconds": round(took, 4),
            }
            if len(blob) > BYTES_A_SECOND * took:
                reason = f"reading its {len(blob)} bytes would take longer than compiling it again"
                disk.write(key, {**info, NOT_STORED: reason}, text, None)
            else:
                reason = disk.write(key, info, text, blob)
        except UnsupportedError as e:  # this one cannot be, others of the engine can
            reason = str(e)
        except Exception as e:  # what was compiled is good, whatever became of its copy
            reason = f"it does not serialise: {type(e).__name__}: {e}"
        if not reason:
            self._offer(disk, key)
            seconds = time.perf_counter() - start
            self._events.emit(
                "cache.stored", seconds=seconds, cluster=function.name, entry=key.digest[:12], bytes=len(blob)
            )
        else:
            self._events.emit("cache.not_stored", level=self._once(reason), cluster=function.name, reason=reason)
        return made

    @staticmethod
    def _once(reason: str) -> int:
        """INFO for the first complaint of its kind in this process, DEBUG for the others."""
        if reason in _said:
            return logging.DEBUG
        _said.add(reason)
        return logging.INFO

    def _verified(
        self,
        disk: DiskCache,
        key: CacheKey,
        text: bytes,
        function: Function,
        compiler: GraphCompiler,
        compile: Callable[[GraphCompiler], Executable],
        stored: Executable,
    ) -> Executable:
        """The stored executable if a new one gives the same results; else the new one, which takes its place."""
        fresh = compile(compiler)
        try:
            reason = self._differs(function, stored, fresh)
        except Exception as e:
            reason = f"it does not run: {type(e).__name__}: {e}"
        entry = key.digest[:12]
        if not reason:
            self._events.emit("cache.verified", level=logging.INFO, cluster=function.name, entry=entry)
            return stored
        self._events.emit("cache.wrong", level=logging.WARNING, cluster=function.name, entry=entry, reason=reason)
        disk.remove(disk.path_of(key))
        return self._make(disk, key, text, function, compiler, lambda _: fresh)


class Compilation:
    """Compiles Functions for a fixed set of engines, each on one device. Safe to use from many threads.

    engines: with their devices, in the order in which they are tried. options: for all of them; their `extra` has the
    options of single engines, by the engine's name. store: where executables are looked for before they are compiled.
    Compilers are made at first use and kept.
    """

    def __init__(
        self,
        engines: Sequence[tuple[Engine, str]],
        options: CompileOptions,
        store: ExecutableStore,
        events: EventLog,
    ) -> None:
        self.engines = {engine.name: (engine, device) for engine, device in engines}
        self.options = options
        self.events = events
        self._store = store
        self._compilers: dict[tuple[str, bool, bool], GraphCompiler] = {}

    def without(self, names: Collection[str]) -> Compilation:
        """The same with fewer engines; compilers are shared."""
        kept = [e for name, e in self.engines.items() if name not in names]
        other = Compilation(kept, self.options, self._store, self.events)
        other._compilers = self._compilers
        return other

    def through(self, store: ExecutableStore) -> Compilation:
        """The same engines and options with another store; compilers are shared."""
        other = Compilation(tuple(self.engines.values()), self.options, store, self.events)
        other._compilers = self._compilers
        return other

    def sharing(self) -> Compilation:
        """The same for executables all of which share the cores with others (see `CompileOptions.shared`)."""
        other = Compilation(tuple(self.engines.values()), replace(self.options, shared=True), self._store, self.events)
        other._compilers = self._compilers
        return other

    def on(self, name: str) -> tuple[Engine, str]:
        """An engine and the device it compiles for; `name` may be one on another device (`engine_at`)."""
        engine, device = engine_and_device(name)
        owner, own = self.engines[engine]
        return owner, device or own

    def executable(self, function: Function, engine: str, fused: bool = True, shared: bool = False) -> Executable:
        """The executable of `function` on an engine. fused: False for the engine's build without fusions. shared: see
        `CompileOptions`.

        Raises CompileError where the engine broke its contract, and whatever else the engine raises.
        """
        owner, device = self.on(engine)
        options = self.options_for(engine, fused, shared)

        def compile(compiler: GraphCompiler) -> Executable:
            nodes = len(function.body.nodes)
            with self.events.span("compile", engine=engine, cluster=function.name, nodes=nodes):
                return compiler.compile(function, function.params, function.returns, function.aliases)

        made = self._store.obtain(
            function, owner, device, options, lambda: self._compiler(engine, fused, shared), compile
        )
        told = made.devices() if engine_and_device(engine)[1] else ()
        if told and not any(same_device(device, d) for d in told):
            raise CompileError(f"{function.name} is placed on {device}, and {owner.name} made it for {', '.join(told)}")
        return made

    def stored(self, function: Function, engine: str, fused: bool = True, shared: bool = False) -> Executable | None:
        """What the disk holds for `executable`, loaded once more; None where there is nothing that loads."""
        owner, device = self.on(engine)
        options = self.options_for(engine, fused, shared)
        return self._store.load(function, owner, device, options, lambda: self._compiler(engine, fused, shared))

    def stages(self, engine: str) -> Mapping[str, str]:
        """The forms of a Function that an engine shows: name -> what it is. Raises what the engine raises."""
        return dict(self._compiler(engine, self.options.fused).stages)

    def as_text(self, function: Function, engine: str, stage: str, fused: bool = True) -> str:
        """What an engine makes of a Function up to a stage; it is compiled for this. Raises as the compiler does."""
        compiler = self._compiler(engine, fused and self.options.fused)
        return compiler.as_text(function, function.params, function.returns, function.aliases, stage)

    def origin(self, function: Function, engine: str, fused: bool = True) -> str:
        """Where the executable of `function` on an engine came from; see `ExecutableStore.origin`."""
        owner, device = self.on(engine)
        ways = (self.options_for(engine, fused, shared) for shared in (False, True))
        found = [self._store.origin(function, owner, device, options) for options in ways]
        return next((x for x in found if x not in ("", ON_DISK)), next(filter(None, found), ""))

    def key(self, function: Function, engine: str) -> CacheKey:
        """The key of `executable`."""
        owner, device = self.on(engine)
        return self._store.key(function, owner, device, self.options_for(engine))

    def unhashed_bytes(self, function: Function) -> int:
        """Bytes of constants that `key` would have to hash, because no process has done it."""
        return self._store.unhashed_bytes(function)

    def check_options(self) -> None:
        """Raises OptionError where an engine does not take an option of its own that it was given."""
        for name in self.options.extra:
            if name in self.engines:
                with contextlib.suppress(EngineError):  # its other errors are reported when it compiles
                    self._compiler(name, self.options.fused)

    def options_for(self, engine: str, fused: bool = True, shared: bool = False) -> CompileOptions:
        """What one engine's compiler gets."""
        shared = shared or self.options.shared
        extra = self.options.extra
        if not extra and (fused, shared) == (self.options.fused, self.options.shared):
            return self.options
        own = extra.get(engine_and_device(engine)[0], {})
        return replace(self.options, fused=fused, shared=shared, extra=own)

    def tolerance(self, engine: str) -> Mapping[str, Tolerance]:
        """What one engine declares for its options."""
        return self.on(engine)[0].tolerance_with(self.options_for(engine))

    def _compiler(self, engine: str, fused: bool, shared: bool = False) -> GraphCompiler:
        shared = shared or self.options.shared
        made = self._compilers.get((engine, fused, shared))
        if made is None:  # without a lock: one that hangs in its engine must not block the others
            new = self._new_compiler(*self.on(engine), fused, shared)
            made = self._compilers[engine, fused, shared] = new
        return made

    def _new_compiler(self, engine: Engine, device: str, fused: bool, shared: bool) -> GraphCompiler:
        compiler = engine.compiler(device, self.options_for(engine.name, fused, shared))
        try:
            op_kernels.validate(engine.name)
        except RegistrationError as e:  # a kernel of an unknown operator, never used: a bug of its package
            self.events.emit("kernels.invalid", level=logging.WARNING, engine=engine.name, error=str(e))
        return compiler
