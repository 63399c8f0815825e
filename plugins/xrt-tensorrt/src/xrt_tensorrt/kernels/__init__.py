"""Op kernels on TensorRT's network API, by family; importing this package registers them."""

from xrt_tensorrt.kernels import integers, maps, pooling, quantization, scatter, training

__all__ = ["integers", "maps", "pooling", "quantization", "scatter", "training"]
