"""Op kernels of the Toy engine, by family; importing this package registers them."""

from xrt_toy.kernels import convolution, elementwise, linear, movement, reduction

__all__ = ["convolution", "elementwise", "linear", "movement", "reduction"]
