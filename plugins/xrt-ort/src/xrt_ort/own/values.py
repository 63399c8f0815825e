"""Values outside of sessions: OrtDevice, OrtValue over NumPy arrays, and IOBinding. The CPU is the only device."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from xrt_ort.own.kinds import NAMES, element_type


class OrtDeviceVendorId(enum.IntEnum):
    """Vendors of devices."""

    NONE = 0


class OrtDevice:
    """A device by its kind and number."""

    def __init__(self, kind: str, number: int) -> None:
        self._kind, self._number = kind, number

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: int = -1) -> OrtDevice:
        """Return a device. Raises RuntimeError for any but the CPU."""
        if ort_device_name.lower() != "cpu":
            raise RuntimeError(
                f"Unsupported device type: {ort_device_name}; without onnxruntime there is the CPU alone"
            )
        return OrtDevice("cpu", device_id)

    def device_id(self) -> int:
        """The number."""
        return self._number

    def device_type(self) -> int:
        """The kind, 0 for the CPU."""
        return 0


class OrtValue:
    """A value on the CPU: an array, a list of them, or a map."""

    def __init__(self, value: Any) -> None:
        self._value = value

    @classmethod
    def ortvalue_from_numpy(
        cls, numpy_obj: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> Any:
        """Return a value over the memory of an array; a copy where that is not contiguous."""
        OrtDevice.make(device_type, device_id)
        return cls(np.ascontiguousarray(numpy_obj))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls, shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> Any:
        """Return a value of zeros."""
        OrtDevice.make(device_type, device_id)
        if isinstance(element_type, int):
            from onnx import helper

            element_type = helper.tensor_dtype_to_np_dtype(element_type)
        return cls(np.zeros(tuple(shape), element_type))

    @classmethod
    def from_dlpack(cls, data: Any, is_bool_tensor: bool = False) -> Any:
        """Return a value over the memory of an array of any library."""
        made = np.from_dlpack(data)
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

    def update_inplace(self, np_arr: np.ndarray) -> None:
        """Copy an array into the value. Raises RuntimeError for another size."""
        if np_arr.size != self.numpy().size:
            raise RuntimeError("The input size of the array does not match the size of the OrtValue")
        self.numpy()[...] = np_arr.reshape(self.numpy().shape)

    def shape(self) -> list[int]:
        """The sizes."""
        return list(self.numpy().shape)

    def data_type(self) -> str:
        """The type in the library's words."""
        return f"tensor({NAMES[self.element_type()]})" if self.is_tensor() else "seq(tensor(float))"

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


class IOBinding:
    """Inputs and results of a session that are bound to memory of the caller's."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self._results: list[OrtValue] = []

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        """Bind an input to an array."""
        self._session._check_name(name)
        self._inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Any, buffer_ptr: int
    ) -> None:
        """Bind an input to memory at an address."""
        OrtDevice.make(device_type, device_id)
        self.bind_cpu_input(name, _at(buffer_ptr, element_type, shape))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Bind an input to a value."""
        self.bind_cpu_input(name, ortvalue.numpy())

    def bind_output(
        self, name: str, device_type: str = "cpu", device_id: int = 0, element_type: Any = None, shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:  # fmt: skip
        """Bind a result to memory at an address, or, without one, to memory that the run makes.

        Raises ValueError for an address without a type and a shape.
        """
        OrtDevice.make(device_type, device_id)
        if buffer_ptr is not None and (element_type is None or shape is None):
            raise ValueError("`element_type` and `shape` are to be provided if pre-allocated memory is provided")
        self._session._output_index(name)
        self._outputs[name] = None if buffer_ptr is None else _at(buffer_ptr, element_type, shape)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Bind a result to a value."""
        self._session._output_index(name)
        self._outputs[name] = ortvalue.numpy()

    def run(self) -> None:
        """Run the session on what is bound."""
        names = list(self._outputs)
        found = self._session.run(names, self._inputs) if names else []
        self._results = []
        for name, made in zip(names, found, strict=True):
            into = self._outputs[name]
            if into is not None:
                if into.shape != made.shape:
                    raise ValueError(f"result {name!r} has the shape {made.shape}; it is bound to one of {into.shape}")
                into[...] = made
            self._results.append(OrtValue(made if into is None else into))

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


def _at(address: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    if isinstance(dtype, int):
        from onnx import helper

        dtype = helper.tensor_dtype_to_np_dtype(dtype)
    size = int(np.prod(tuple(shape), dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(tuple(shape))
