"""The page docs/contrib-operators.md: `python -m xrt_contrib.coverage > docs/contrib-operators.md`."""

from __future__ import annotations

from typing import Final

from xrt_contrib.kernels import KERNELS
from xrt_contrib.lowering import LOWERINGS
from xrt_contrib.native import NATIVE
from xrt_contrib.operators import operator_sets
from xrt_contrib.schemas import DOMAIN, definitions, table

_LAYOUT: Final = "its weights or states are in a layout of one vendor's kernels"
_RUNTIME: Final = "a state machine of one inference server, on buffers that it owns"
_ELSEWHERE: Final = "holds a program that another library compiled"
_FUSED: Final = "a fusion that ONNX Runtime makes itself while it loads a model for a GPU; models hold its parts"
_NO_KERNEL: Final = "no kernel in ONNX Runtime's packages for CPUs, and seen in no model"
ABSENT: Final = {
    **dict.fromkeys(
        ("QOrderedAttention", "QOrderedGelu", "QOrderedLayerNormalization", "QOrderedLongformerAttention",
         "QOrderedMatMul", "QuantizeWithOrder", "DequantizeWithOrder", "QuantizeBFP", "DequantizeBFP", "MatMulPacked",
         "MoEPacked", "MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight"), _LAYOUT),
    **dict.fromkeys(
        ("SparsePagedAttention", "SparseAttentionIndexer", "PackedSparseAttentionIndexer",
         "PackedSparseAttentionIndexerMerge", "DynamicSparseAttention", "ConvStateReplay", "GatedDeltaNetStateReplay",
         "SpeculativePrefixCommit", "Mamba2Verify"), _RUNTIME),
    **dict.fromkeys(("EPContext", "Snpe"), _ELSEWHERE),
    **dict.fromkeys(
        ("MatMulNBitsMlp", "MatMulNBitsQkv", "MatMulNBitsQLoRA", "RMSNormRotary", "RouterGateUpProj",
         "HyperConnectionLowRankMix", "DecoderMaskedSelfAttention"), _FUSED),
    **dict.fromkeys(("DecoderAttention", "LongformerAttention"), _NO_KERNEL),
}  # fmt: skip
"""Operators that are not here -> the reason."""
_WINDOW: Final = "state_window as the schema's text has it; ONNX Runtime's kernel for CPUs refuses it"
_MIXER: Final = "not use_sparse_mixer, which ONNX Runtime's kernel for CPUs ignores"
LIMITS: Final = {
    "CausalConvWithState": _WINDOW,
    "LinearAttention": _WINDOW,
    "MoE": _MIXER,
    "QMoE": _MIXER,
    "GroupQueryAttention": "not output_qk beside sliding_window_cache; ONNX Runtime's kernel for CPUs refuses it too",
    "PagedAttention": "caches of floats, each its own; with quantised or latent ones there is nothing to compare: "
    "ONNX Runtime has no kernel for CPUs",
}
"""Lowered operators -> what of their attributes is not, or is compared with nothing."""


def page() -> str:
    """The page."""
    operator_sets()
    rows, counts = [], dict.fromkeys(("lowered", "host kernel", "native only", "absent"), 0)
    for name, d in definitions().items():
        key = (DOMAIN, name)
        if key in LOWERINGS:
            kind, note = "lowered", LIMITS.get(name, "")
        elif key in KERNELS:
            kind, note = "host kernel", KERNELS[key].dynamic or ""
        elif name in NATIVE:
            kind, note = "native only", "in a session of ONNX Runtime, where that is installed"
        else:
            kind, note = "absent", ABSENT[name]
        counts[kind] += 1
        rows.append(f"| {name} | {'yes' if d.cpu else ''} | {kind} | {note} |")
    said = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return _TEXT.format(version=table()["onnxruntime"], count=len(rows), said=said, rows="\n".join(rows))


_TEXT: Final = """# ONNX Runtime's operators

`xrt-contrib` (`pip install xrt-contrib`; part of the extras `onnxruntime` and `all` of `xrt-core`) has the operators of
the domain `com.microsoft`, which ONNX Runtime's optimiser, its quantisation tools, `onnxruntime.transformers` and
`onnxruntime_genai` put into models, and `SimplifiedLayerNormalization`, which they put into the standard's domain.

An operator that is *lowered* is replaced by operators of the standard for the shapes and constants of a signature, so
that every engine, gradients and precision apply to it; where sizes are symbols the lowering holds for all of them
(GroupQueryAttention, whose `total_sequence_length` must be known, has one for each signature). The ONNX Runtime
engine takes attention and products with packed weights as they are. A *host kernel* runs on the host: text, hashes,
loops that depend on data. *Native only* runs in a session of ONNX Runtime of its own. A node whose attributes or
inputs a lowering leaves out is an error that names the node and the attribute.

Deviations from ONNX Runtime's kernels: DynamicQuantizeLSTM does not quantise the inputs of each step; what ONNX Runtime
calculates in int8 because of `accuracy_level = 4` is calculated in the model's precision; integer products do not
saturate in 16 bits, as ONNX Runtime's do on processors with AVX2 alone; training_mode of dropouts is refused; with
sliding_window_cache the `seqlens_k` of a first prompt is not checked.

Of the {count} schemas of ONNX Runtime {version}: {said}. This table is made by `python -m xrt_contrib.coverage`.

| operator | kernel for CPUs in ONNX Runtime | here | |
|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    print(page(), end="")
