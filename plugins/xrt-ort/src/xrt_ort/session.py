"""InferenceSession over the genuine library: a subclass of its session that hands calls to engines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xrt_core import events
from xrt_ort.acceleration import Acceleration
from xrt_ort.genuine import library
from xrt_ort.settings import PROVIDER, log, module_options, own_options, split_providers, why_library_only

_CPU = "CPUExecutionProvider"


class SessionOptions(library.SessionOptions):  # type: ignore[misc,name-defined]
    """The library's session options, which remember what only the library can do, and XRT's provider.

    replaces_weights: weights of the model are given beside it. has_custom_operators: a library of operators is
    registered. own: options of XRT's provider, if that was added.
    """

    replaces_weights = False
    has_custom_operators = False
    own: Mapping[str, Any] | None = None

    def add_provider(self, provider: str, provider_options: Mapping[str, str]) -> None:
        """See onnxruntime. XRT's provider takes options of XRT; raises ValueError for bad ones."""
        if provider == PROVIDER:
            self.own = own_options(provider_options)
        else:
            super().add_provider(provider, provider_options)

    def has_providers(self) -> bool:
        """See onnxruntime."""
        return self.own is not None or super().has_providers()

    def add_initializer(self, name: str, value: Any) -> None:
        """See onnxruntime."""
        super().add_initializer(name, value)
        self.replaces_weights = True

    def add_external_initializers(self, names: Any, values: Any) -> None:
        """See onnxruntime."""
        super().add_external_initializers(names, values)
        self.replaces_weights = True

    def add_external_initializers_from_files_in_memory(self, *files: Any) -> None:
        """See onnxruntime."""
        super().add_external_initializers_from_files_in_memory(*files)
        self.replaces_weights = True

    def register_custom_ops_library(self, path: str) -> None:
        """See onnxruntime."""
        super().register_custom_ops_library(path)
        self.has_custom_operators = True


class InferenceSession(library.InferenceSession):  # type: ignore[misc,name-defined]
    """A session of the library, with the same arguments, methods, results and exceptions.

    `run` is answered by engines of XRT once they are compiled, agree with the library, and are faster; by the library
    otherwise. The provider XRTExecutionProvider takes options of XRT (docs/options.md); it need not be named.
    """

    _acceleration: Acceleration | None = None  # of the class, as the library makes sessions without __init__ as well
    _xrt_named = False

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        providers, provider_options, own = split_providers(providers, provider_options)
        if not providers:
            own = getattr(sess_options, "own", None)
        super().__init__(path_or_bytes, sess_options, providers, provider_options, **kwargs)
        self._accelerate(sess_options, own)

    def __getstate__(self) -> dict[str, Any]:
        """What `pickle` finds, and refuses, in a session of the library."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_acceleration", "_xrt_named")}

    def _accelerate(self, sess_options: Any, own: Mapping[str, Any] | None) -> None:
        self._xrt_named = own is not None
        actual = self._sess_options  # which a model may bring: ORT_LOAD_CONFIG_FROM_MODEL
        why = why_library_only(sess_options) or why_library_only(actual)
        if not why and own is None and self._providers[:1] != [_CPU]:
            why = f"the program chose {self._providers[0]}"
        model = self._model_path or self._model_bytes
        if why or model is None:
            log.debug("%s: onnxruntime answers every call: %s", self._model_path or "model", why)
            if own is not None:
                _told(str(self._model_path or "model"), why)
            return
        self._acceleration = Acceleration(self, _answer, model, module_options(actual, own))

    def run(self, output_names: Any, input_feed: Any, run_options: Any = None) -> list[Any]:
        """Return the results, by engines or by the library. Arguments, results and exceptions are the library's."""
        acceleration = self._acceleration
        if acceleration is None or run_options is not None:
            return super().run(output_names, input_feed, run_options)  # type: ignore[no-any-return]
        acceleration.calls += 1
        if acceleration.unwatched > 0:
            acceleration.unwatched -= 1
            return super().run(output_names, input_feed)  # type: ignore[no-any-return]
        try:
            key: Any = tuple([(n, type(a), a.shape, a.dtype) for n, a in input_feed.items()])
            if output_names:
                key = tuple(output_names), key
            if acceleration.values:
                key = key, tuple([input_feed[n].tobytes() for n in acceleration.values if n in input_feed])
            call = acceleration.live.get(key)
        except (AttributeError, TypeError):
            key = call = None
        if call is not None:
            results = call(input_feed)
            if results is not None:
                return results  # type: ignore[no-any-return]
        start = time.perf_counter()
        results = super().run(output_names, input_feed)
        acceleration.observe(key, output_names, input_feed, time.perf_counter() - start)
        return results  # type: ignore[no-any-return]

    def run_with_ort_values(self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None) -> Any:
        """Return the results as OrtValues, by engines where all values are tensors of numbers on the CPU."""
        acceleration = self._acceleration
        if acceleration is None or run_options is not None or not acceleration.live:
            return super().run_with_ort_values(output_names, input_dict_ort_values, run_options)
        try:
            feeds = {
                n: v.numpy()
                for n, v in input_dict_ort_values.items()
                if v.device_name() == "cpu" and getattr(v, "_session", None) in (None, self._sess)
            }
            key: Any = tuple([(n, np.ndarray, a.shape, a.dtype) for n, a in feeds.items()])
            call = acceleration.live.get((tuple(output_names), key) if output_names else key)
            results = call(feeds) if call is not None and len(feeds) == len(input_dict_ort_values) else None
        except Exception:  # sequences, sparse tensors, bad arguments: the library's word
            results = None
        if results is None:
            return super().run_with_ort_values(output_names, input_dict_ort_values, run_options)
        acceleration.calls += 1
        return [library.OrtValue.ortvalue_from_numpy(r) for r in results]

    def get_providers(self) -> Sequence[str]:
        """Return the providers, XRT's own first where the program named it."""
        found = super().get_providers()
        return [PROVIDER, *found] if self._xrt_named else found  # type: ignore[no-any-return]

    def get_provider_options(self) -> Any:
        """Return the options of the providers."""
        found = super().get_provider_options()
        return {PROVIDER: {}, **found} if self._xrt_named else found

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Make the session anew for other providers. What engines answered is decided anew."""
        providers, provider_options, own = split_providers(providers, provider_options)
        if self._acceleration is not None:
            self._acceleration.stop("the providers were changed")
            self._acceleration = None
        super().set_providers(providers, provider_options)
        self._accelerate(self._sess_options_initial, own)


def _answer(session: Any, names: Any, feeds: Mapping[str, Any]) -> Any:
    return library.InferenceSession.run(session, names, feeds)


def _told(model: str, why: str) -> None:
    events.process_events.fallback(cluster=model, engine="xrt", stage="plan", kind="unusable", error=why)
