"""Engine-independent simplifications, one pass a file."""

from xrt_core.passes.simplify.common_subexpressions import CommonSubexpressions
from xrt_core.passes.simplify.constant_fold import ConstantFold
from xrt_core.passes.simplify.dead_nodes import DeadNodes
from xrt_core.passes.simplify.identity import IdentityNodes

__all__ = ["CommonSubexpressions", "ConstantFold", "DeadNodes", "IdentityNodes"]
