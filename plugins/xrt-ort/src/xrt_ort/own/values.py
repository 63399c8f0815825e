"""Values outside of sessions: OrtDevice, OrtValue over NumPy arrays, and IOBinding. The CPU is the only device."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from xrt_ort.own.kinds import NAMES, element_type


class OrtDeviceVendorId(enum.IntEnum):
    """Vendors of devices."""

    NONE = 0x0000
    AMD = 0x1002
    NVIDIA = 0x10DE
    ARM = 0x13B5
    MICROSOFT = 0x1414
    HUAWEI = 0x19E5
    QUALCOMM = 0x5143
    INTEL = 0x8086


_V: Final = OrtDeviceVendorId
_DEVICES: Final[Mapping[str, tuple[int, int]]] = {
    "cpu": (0, _V.NONE), "cuda": (1, _V.NVIDIA), "gpu": (1, _V.NONE), "npu": (3, _V.NONE), "dml": (1, _V.MICROSOFT),
    "cann": (3, _V.HUAWEI), "webgpu": (1, _V.NONE),
}  # fmt: skip
"""Names of devices -> the library's numbers of their kind and vendor."""


class OrtDevice:
    """A device by its kind, number and vendor. Only that of the CPU has memory here."""

    def __init__(self, kind: int, number: int, vendor: int) -> None:
        self._kind, self._number, self._vendor = kind, number, vendor

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: int = -1) -> OrtDevice:
        """Return a device. Raises Exception for a name that is none of the library's."""
        if ort_device_name not in _DEVICES:
            raise Exception(f"Unsupported device type: {ort_device_name}")
        kind, vendor = _DEVICES[ort_device_name]
        return OrtDevice(kind, device_id, vendor if vendor_id == -1 else vendor_id)

    def device_id(self) -> int:
        """The number."""
        return self._number

    def device_type(self) -> int:
        """The kind, 0 for the CPU."""
        return self._kind

    def device_vendor_id(self) -> int:
        """The vendor."""
        return self._vendor

    def device_mem_type(self) -> int:
        """The kind of memory, 0 for the device's own."""
        return 0


def _require_cpu(device_type: str, device_id: int) -> None:
    """Raises RuntimeError for a device without memory here."""
    if OrtDevice.make(device_type.lower(), device_id).device_type():
        raise RuntimeError(
            f"Can't allocate memory on the device {device_type}: without onnxruntime there is the CPU alone"
        )


class OrtValue:
    """A value on the CPU: an array, a list of them, or a map.

    session: to which it belongs, if to any. kind: its type in the library's words, where it is no array.
    """

    def __init__(self, value: Any, session: object | None = None, kind: str = "") -> None:
        self._value = value
        self._session = session
        self._kind = kind

    def check_session(self, session: object, action: str) -> None:
        """Raises ValueError if the value belongs to another session."""
        if self._session not in (None, session):
            raise ValueError(f"Session-scoped OrtValue must be {action} the session that created it.")

    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> Any:
        """Return a value over the memory of an array; a copy where that is not contiguous.

        Raises RuntimeError for what is no array, and for text.
        """
        if not isinstance(numpy_obj, np.ndarray) or numpy_obj.dtype.kind in "OUS":
            raise RuntimeError("Creation of OrtValues is currently only supported from non-string numpy arrays")
        _require_cpu(device_type, device_id)
        _known_type(numpy_obj.dtype)
        return cls(np.asarray(numpy_obj, order="C"))

    @classmethod
    def ortvalue_from_numpy_with_onnx_type(cls, data: np.ndarray, onnx_element_type: int) -> Any:
        """Return a value over the memory of an array, whose elements are read as another type of the same size.

        Raises RuntimeError for a type of another size, and for one that NumPy lacks.
        """
        from onnx import helper

        wanted = np.dtype(helper.tensor_dtype_to_np_dtype(onnx_element_type))
        if wanted.itemsize != data.dtype.itemsize:
            raise RuntimeError(f"elements of {data.dtype} are no elements of {wanted}: their sizes differ")
        return cls(np.asarray(data, order="C").view(wanted))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls, shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> Any:
        """Return a value of zeros. Raises RuntimeError for other types than ONNX has numbers of, and sizes below 0."""
        _require_cpu(device_type, device_id)
        if any(n < 0 for n in shape):
            raise RuntimeError(f"shape must not have sizes below 0: {list(shape)}")
        return cls(np.zeros(tuple(shape), _dtype(element_type)))

    @classmethod
    def from_dlpack(cls, data: Any, is_bool_tensor: bool = False) -> Any:
        """Return a value over the memory of an array of any library, or of a capsule of the CPU's memory."""
        made = np.from_dlpack(data if hasattr(data, "__dlpack__") else _Capsule(data))
        return cls(made.view(np.bool_) if is_bool_tensor else made)

    def __dlpack__(self, *args: Any, **named: Any) -> Any:
        return self.numpy().__dlpack__(*args, **named)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype, copy=copy)

    def numpy(self) -> np.ndarray:
        """Return the array. Raises RuntimeError for a list or a map."""
        if not isinstance(self._value, np.ndarray):
            raise RuntimeError("Only OrtValues that are Tensors are convertible to Numpy objects")
        return self._value

    def update_inplace(self, data: Any) -> None:
        """Copy an array, or the array of a value, into the value.

        Raises ValueError for a value of another session, TypeError for another kind, RuntimeError for another size.
        """
        if isinstance(data, OrtValue):
            if data._session not in (None, self._session):
                raise ValueError("Session-scoped OrtValues must originate from the same session.")
            data = data.numpy()
        if not isinstance(data, np.ndarray):
            raise TypeError("data must be a numpy.ndarray or an OrtValue.")
        np_arr = data
        if np_arr.size != self.numpy().size:
            raise RuntimeError("The input size of the array does not match the size of the OrtValue")
        self.numpy()[...] = np_arr.reshape(self.numpy().shape)

    def shape(self) -> list[int]:
        """The sizes."""
        return list(self.numpy().shape)

    def data_type(self) -> str:
        """The type in the library's words."""
        return f"tensor({NAMES[self.element_type()]})" if self.is_tensor() else self._kind

    def element_type(self) -> int:
        """The number that ONNX has for the elements."""
        return element_type(self.numpy().dtype)

    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self.numpy().ctypes.data)

    def tensor_size_in_bytes(self) -> int:
        """The bytes of the elements."""
        return int(self.numpy().nbytes)

    def device_name(self) -> str:
        """The device, "cpu"."""
        return "cpu"

    def has_value(self) -> bool:
        """Whether there is a value."""
        return self._value is not None

    def is_tensor(self) -> bool:
        """Whether the value is an array."""
        return isinstance(self._value, np.ndarray)

    def is_tensor_sequence(self) -> bool:
        """Whether the value is a list."""
        return isinstance(self._value, list)

    def is_sparse_tensor(self) -> bool:
        """Whether the value is sparse: never."""
        return False


class _Capsule:
    """A capsule as an object that gives it once."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class IOBinding:
    """Inputs and results of a session that are bound to memory of the caller's."""

    def __init__(self, session: Any) -> None:
        self._session, self._made_for = session, session._identity
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self._results: list[OrtValue] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """Bind an input to an array. Raises RuntimeError for an unknown name, and for what is no array."""
        if name not in self._session._types:
            raise RuntimeError(f"Failed to find NodeArg with name: {name} in the def list")
        if not isinstance(arr_on_cpu, np.ndarray):
            raise RuntimeError(f"Unable to create OrtValue from a {type(arr_on_cpu).__name__} for input {name!r}")
        self._inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Any, buffer_ptr: int
    ) -> None:
        """Bind an input to memory at an address."""
        _require_cpu(device_type, device_id)
        self.bind_cpu_input(name, _at(buffer_ptr, element_type, shape))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an input to a value. Raises ValueError for a value of another session."""
        ortvalue.check_session(self._made_for, "bound to")
        self.bind_cpu_input(name, ortvalue.numpy())

    def bind_output(
        self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: Any = None, shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:  # fmt: skip
        """Bind a result to memory at an address, or, without one, to memory that the run makes, on the CPU.

        Raises ValueError for an address without a type and a shape, RuntimeError for one that is not on the CPU.
        """
        OrtDevice.make(device_type.lower(), device_id)
        if buffer_ptr is None:
            self._outputs[name] = None
            return
        _require_cpu(device_type, device_id)
        if element_type is None or shape is None:
            raise ValueError("`element_type` and `shape` are to be provided if pre-allocated memory is provided")
        self._outputs[name] = _at(buffer_ptr, element_type, shape)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a result to a value. Raises ValueError for a value of another session."""
        ortvalue.check_session(self._made_for, "bound to")
        self._outputs[name] = ortvalue.numpy()

    def run(self, options: Any = None) -> None:
        """Run the session on what is bound. Raises RuntimeError for whatever does not fit or fails."""
        try:
            self._results = self._made(list(self._outputs), options)
        except Exception as e:
            raise RuntimeError(f"Error in execution: {e}") from e

    def _made(self, names: list[str], options: Any) -> list[OrtValue]:
        if not names:
            raise ValueError("At least one output should be requested.")
        values = self._session.run_with_ort_values(names, {n: OrtValue(a) for n, a in self._inputs.items()}, options)
        for name, value in zip(names, values, strict=True):
            into = self._outputs[name]
            if into is None:
                continue
            made = value.numpy()
            if into.dtype != made.dtype or into.shape != made.shape:
                raise ValueError(
                    f"result {name!r} is {made.dtype}{list(made.shape)}; it is bound to {into.dtype}{list(into.shape)}"
                )
            into[...] = made
            value._value = into
        return list(values)

    def get_outputs(self) -> list[OrtValue]:
        """The results of the last run, in the order in which they were bound."""
        return list(self._results)

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """Copies of the results of the last run."""
        return [v.numpy().copy() for v in self._results]

    def synchronize_inputs(self) -> None:
        """Wait for copies of inputs: there are none on the CPU."""

    def synchronize_outputs(self) -> None:
        """Wait for results: they are there after a run."""

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget the results."""
        self._outputs.clear()
        self._results = []


def _known_type(dtype: np.dtype[Any]) -> None:
    """Raises RuntimeError for a type that is none of a tensor of numbers."""
    if dtype.kind in "cMmOUS" or dtype.type is np.void:
        raise RuntimeError(f"{dtype} can't be converted to a type of tensors of numbers")


def _dtype(element_type: Any) -> np.dtype[Any]:
    """The type of a NumPy type, or of the number that ONNX has for it. Raises RuntimeError for others."""
    if not isinstance(element_type, int):
        made = np.dtype(element_type)
    else:
        from onnx import helper

        try:
            made = np.dtype(helper.tensor_dtype_to_np_dtype(element_type))
        except KeyError:
            raise RuntimeError(f"tensor type {element_type} is not supported") from None
    _known_type(made)
    return made


def _at(address: int, element_type: Any, shape: Sequence[int]) -> np.ndarray:
    dtype = _dtype(element_type)
    size = int(np.prod(tuple(shape), dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(tuple(shape))
