"""Engine-independent simplifications, one pass a file."""

from xrt_core.passes.simplify.constant_folding import ConstantFold
from xrt_core.passes.simplify.cse import CommonSubexpressions
from xrt_core.passes.simplify.dead_code import DeadNodes
from xrt_core.passes.simplify.identity_elimination import IdentityNodes

__all__ = ["CommonSubexpressions", "ConstantFold", "DeadNodes", "IdentityNodes"]
