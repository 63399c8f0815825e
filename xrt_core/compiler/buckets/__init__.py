"""Buckets: one padded executable for many sizes of a graph's inputs, where padding is proven harmless.

An engine of static shapes compiles for every new signature. With buckets, a call of a new signature whose dimensions
alone differ from earlier ones is padded to a bucket that serves all smaller sizes, and its results are cut
(`passes.padding`). Sizes that the proof does not cover are compiled as they are.

Where compilation is in the background, so is all of this: until a bucket that serves a call was checked, a larger one
answers, or the host computes the call as it is, whichever takes less time.

In the order of reading: sizes.py: the symbols of a graph's inputs, and which sizes a bucket may have. bucket.py: a
bucket, and how a call runs in it. times.py: what calls and compilations took. choice.py: which bucket is worth making.
forms.py: the padded form of one. check.py: the comparison with the host. serving.py: `Buckets`, which finds the bucket
of a call, and makes and keeps them, on several threads.
"""

from __future__ import annotations

from xrt_core.compiler.buckets.bucket import Bucket, Found, Runs
from xrt_core.compiler.buckets.check import edges
from xrt_core.compiler.buckets.serving import Buckets
from xrt_core.compiler.buckets.sizes import BucketSizes, rung

__all__ = ["Bucket", "BucketSizes", "Buckets", "Found", "Runs", "edges", "rung"]
