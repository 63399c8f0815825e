"""Random programs of torch through `torch.compile(backend="xrt")`, against eager.

    python scripts/fuzz_torch.py --programs 1000 --engine onnxruntime

A program is a function of a few tensors, of several types and layouts in memory: up to 14 lines of operators, views,
writes in place, random numbers and sizes, each of which eager has run. It is compiled with static or symbolic sizes,
for inference or training, and called four times. Compared with eager are types, values, which results and inputs
share memory, gradients, what was written into inputs, and the state of the random numbers. What differs with torch's
"aot_eager" too, with or without decompositions, is torch's own, and no finding. A graph that falls back is told with
its reason: its numbers are eager's.

With `--export` programs without random numbers are exported, and run on an engine without the guard.

The same number makes the same program. `--only 17 --show` runs one, and prints it.
"""

from __future__ import annotations

import argparse
import gc
import linecache
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xrt_torch
from xrt_torch.backend import xrt as backend

import xrt_core as xrt

NAMES = {"torch": torch, "F": torch.nn.functional}
TOLERANCE = {"bfloat16": 1e-1, "half": 2e-2, "": 1e-3}  # of the largest element, by the shortest floats of a program
CONTROLS = ("aot_eager", "aot_eager_decomp_partition")
MOST_ELEMENTS = 4000
MOST_LINES = 14
CALLS = 4

# Kind -> (share of the lines, what x is, expressions). x: an operand of that type; y: another, or a number; w: another;
# d, e: dimensions of x; p: its dimensions in another order; k: whether a reduction keeps them; j: indices into its
# first dimension.
EXPRESSIONS: dict[str, tuple[int, str, str]] = {
    "function": (2, "float", """
        torch.relu({x}); F.gelu({x}); F.gelu({x}, approximate='tanh'); torch.sigmoid({x}); torch.tanh({x})
        torch.exp({x}.clamp(-5, 5)); {x}.abs(); -{x}; ({x}.abs() + 1).sqrt(); ({x}.abs() + 0.5).rsqrt()
        torch.log1p({x}.abs()); torch.erf({x}); torch.sin({x}); torch.cos({x}); F.silu({x}); F.softplus({x}); F.elu({x})
        F.leaky_relu({x}, 0.1); F.hardswish({x}); {x}.square(); {x}.sign(); ({x} * 4).floor(); ({x} * 4).round()
        ({x} * 4).trunc(); {x}.reciprocal().clamp(-9, 9); F.mish({x}); torch.expm1({x}.clamp(-5, 5)); torch.atan({x})
        F.hardsigmoid({x}); F.celu({x}); F.selu({x}); F.logsigmoid({x}); F.relu6({x}); F.hardtanh({x}); {x}.frac()
        torch.nan_to_num({x} / 0); torch.sinc({x}); torch.asinh({x}); torch.tan({x}.clamp(-1, 1))
        {x}.log2().nan_to_num(0, 1, -1); torch.logit({x}.sigmoid(), 1e-3); {x} ** 2; {x}.abs() ** 0.5
        2 ** {x}.clamp(-3, 3); 1 / ({x}.abs() + 1)"""),
    "of two": (3, "any", """
        {x} + {y}; {x} - {y}; {x} * {y}; {y} - {x}; torch.add({x}, {y}, alpha=2)
        torch.maximum({x}, torch.as_tensor({y})); {x} / ({y} * {y} + 1); torch.where({x} > {y}, {x}, {y})
        torch.lerp({x}, {y}, 0.3); torch.addcmul({x}, {x}, {y}, value=0.5); torch.rsub({x}, {y})
        torch.atan2({x}, {y} * {y} + 1); torch.fmod({x}, 3) + {y}; torch.remainder({x}, 3) - {y}
        ({x}.abs() + 0.1) ** {y}; torch.hypot({x}, {y}); torch.minimum({x}, {y}); torch.fmax({x}, {y})
        torch.copysign({x}, {y}); torch.logaddexp({x}, {y}); F.smooth_l1_loss({x}, {y}, reduction='none')
        torch.floor_divide({x}, 2) + {y}; {x} * {w}.size(0); {x}.mul({y}).add(1)
        torch.div({x}, 3, rounding_mode='trunc') + {y}; torch.xlogy({x}, {w}.abs() + 1); torch.dist({x}, {y})
        F.mse_loss({x}, {y}); F.huber_loss({x}, {y})"""),
    "view": (3, "any", """
        {x}.flatten(); {x}.reshape(-1); {x}.unsqueeze(0); {x}.unsqueeze(-1); {x}.clone(); {x}.detach(); {x}.contiguous()
        {x}[None]; {x}[...]; {x}.view({x}.shape); {x}.squeeze(); {x}.view_as({x}); {x}.expand(2, *{x}.shape)
        {x}.transpose({d}, {e}); {x}.permute({p}); {x}.mT; {x}[..., 1:]; {x}[..., ::2]; {x}[..., :-1]; {x}[0]; {x}[-1]
        {x}[:, 0]; {x}[:, None]; {x}.narrow({d}, 0, 1); {x}.select({d}, 0); {x}.chunk(2, {d})[0]; {x}.chunk(2, {d})[-1]
        {x}.split(2, {d})[0]; {x}.unbind({d})[-1]; {x}.flip({d}); {x}.roll(1, {d}); {x}.tile(2)
        {x}.repeat_interleave(2, {d}); {x}.movedim({d}, 0); {x}.swapaxes({d}, {e}); {x}.squeeze({d})
        {x}.diagonal(dim1=-2, dim2=-1); {x}.unfold({d}, 2, 1); {x}.repeat(2, *[1] * {x}.dim())
        {x}.reshape({x}.shape[0], -1); {x}.tril(); {x}.triu(1); torch.diag_embed({x}); {x}.reshape(-1, {x}.shape[-1])
        F.pad({x}, (1, 2)); F.pad({x}, (1, -1), value=2.0); {x}.unflatten(-1, (2, -1)); {x}.as_strided((2, 2), (1, 1))
        {x}.expand_as({w}); {x}.broadcast_to(torch.broadcast_shapes({x}.shape, {w}.shape)); {x}.flatten(0, 1)
        {x}.index_select({d}, torch.tensor([0, 0])); torch.rot90({x}.reshape(-1, {x}.shape[-1]))
        F.pixel_shuffle({x}, 2); {x}.to(memory_format=torch.channels_last); F.pad({x}, (1, 1), mode='circular')
        F.pad({x}, (1, 1, 1, 1), mode='reflect')"""),
    "reduction": (2, "any", """
        {x}.sum(); {x}.sum({d}{k}); {x}.float().mean({d}{k}); {x}.mean(({d},){k}); {x}.amax({d}{k}); {x}.amin({d}{k})
        {x}.max({d}{k})[0]; {x}.std({d}{k}); {x}.var({d}, unbiased=False{k}); {x}.prod({d}{k}); {x}.norm(dim={d}{k})
        {x}.argmax({d}{k}); {x}.any({d}{k}); {x}.all({d}{k}); {x}.logsumexp({d}{k}); torch.softmax({x}, {d})
        torch.log_softmax({x}, {d}); {x}.cumsum({d}); {x}.cumprod({d}); {x}.count_nonzero({d}); {x}.max(); {x}.mean()
        {x}.var(); F.normalize({x}, dim={d}); torch.linalg.vector_norm({x}, 1, {d}{k}); torch.var_mean({x}, {d})[1]
        {x}.cummax({d})[0]; torch.aminmax({x}, dim={d})[0]; {x}.nansum({d}); F.softmin({x}, {d})
        {x}.softmax({d}, dtype=torch.float64); {x}.sum(dtype=torch.float32); F.glu({x}, {d})
        torch.trapezoid({x}, dim={d}); {x}.diff(dim={d}); F.cosine_similarity({x}, {x}.flip({d}) + 1, {d})
        torch.median({x}, {d})[0]; {x}.logcumsumexp({d}); torch.cumulative_trapezoid({x}, dim={d})"""),
    "write": (3, "any", """
        {x}.add_({w}); {x}.mul_(2); {x}.copy_({w}); {x}.zero_(); {x}.fill_(3); {x}.clamp_(-1, 1); {x}[0] = 1
        {x}[..., 0] = {w}; {x}[..., -1] += 1; {x}[{x} > 0] = 0; {x}.masked_fill_({x} < 0, 2); {x}.sub_(1).mul_(0.5)
        {x}.t_(); {x}.unsqueeze_(0); {x}.relu_(); {x}.sigmoid_(); {x}[..., ::2].mul_(3); {x}.transpose(0, -1).add_(1)
        {x}.view(-1)[0] = 7; {x} += {w}; {x} *= 2; {x}.index_fill_(0, torch.tensor([0]), 5); {x}.squeeze_(); {x}.div_(2)
        {x}.neg_(); {x}[:, 0] = {w}[:, -1]; {x}.diagonal(dim1=-2, dim2=-1).fill_(0); {x}.addcmul_({w}, {w}); {x}.tanh_()
        {x}.cumsum_(-1); torch.add({x}, {w}, out={x}); {x}.index_add_(0, torch.tensor([0]), {w}[:1])
        {x}.scatter_(-1, torch.zeros_like({x}, dtype=torch.long), 2); {x}.lerp_({w}, 0.5); {x}.unbind(0)[0].add_(1)
        {x}.chunk(2, -1)[0].mul_(2); {x}.bitwise_or_(1); {x}.logical_not_(); {x}.pow_(2); {x}.transpose_(0, 1)
        {x}.index_put_((torch.tensor([0, 0]),), torch.tensor(1.0), accumulate=True)"""),
    "index": (2, "any", """
        {x}[{j}]; torch.take({x}, {j}.abs()); torch.take_along_dim({x}, {x}.argmax(-1, keepdim=True), -1)
        {x}[..., {j} % {x}.shape[-1]]; {x}.gather(-1, torch.zeros_like({x}, dtype=torch.long))
        {x}.index_add(0, torch.tensor([0, 0]), {x}[:2]); {x}.masked_fill({x} > 0, 0)
        {x}.scatter_add(-1, torch.zeros_like({x}, dtype=torch.long), {x})
        {x}.scatter(-1, torch.zeros_like({x}, dtype=torch.long)[..., :1], 1); {x}[{x} > 0]; F.one_hot({j}.abs(), 9)
        {x}.index_copy(0, torch.tensor([0]), {x}[:1] + 1); torch.where({x} > 0, {x}, 0); {x}[:, {j}.abs() % 2]
        F.embedding({j}.abs(), {x}.reshape({x}.shape[0], -1)); {x}.select_scatter({x}[0] * 2, 0, 0); {x}[[0]]
        {x}.scatter_reduce(-1, torch.zeros_like({x}, dtype=torch.long), {x}, 'amax')
        {x}.slice_scatter({x}[:1] + 1, 0, 0, 1); {x}[..., [0, 1]]
        torch.index_put({x}, (torch.tensor([0]),), torch.tensor(2, dtype={x}.dtype)); {x}[None, :, None]
        {x}[torch.tensor(0)]; {x}.put(torch.tensor([0]), torch.ones(1, dtype={x}.dtype))
        torch.searchsorted(torch.arange(5.0), {x}); torch.bucketize({x}, torch.arange(5.0))
        {x}[:, torch.tensor([[0, 1], [1, 0]])]; torch.masked_fill({x}, {x}.isnan(), 0)
        {x}.index_reduce(0, torch.tensor([0]), {x}[:1], 'prod')"""),
    "cast": (2, "any", """
        {x}.float(); {x}.double(); {x}.half().float(); {x}.bfloat16(); {x}.half(); {x}.int(); {x}.long(); {x}.bool()
        {x}.to({w}.dtype); {x}.type_as({w}); {x}.to(torch.uint8); {x}.to(torch.int8); {x}.to(torch.int16)
        {x}.to(torch.float32, copy=True)"""),
    "layer": (2, "float", """
        F.layer_norm({x}, {x}.shape[-1:]); F.rms_norm({x}, {x}.shape[-1:]); F.group_norm({x}, 1); F.instance_norm({x})
        F.batch_norm({x}, None, None, training=True); F.conv1d({x}, torch.ones(2, {x}.shape[1], 2, dtype={x}.dtype))
        F.conv2d({x}, torch.ones(2, {x}.shape[1], 3, 3, dtype={x}.dtype), padding=1); F.max_pool2d({x}, 2)
        F.avg_pool2d({x}, 2, 1, 1); F.adaptive_avg_pool2d({x}, 2); F.interpolate({x}, scale_factor=2)
        F.interpolate({x}, size=(5, 7), mode='bilinear'); F.unfold({x}, 2)
        F.scaled_dot_product_attention({x}, {x}, {x}); F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)
        F.avg_pool1d({x}, 2); F.linear({x}, torch.full((3, {x}.shape[-1]), 0.1, dtype={x}.dtype))
        F.max_pool1d({x}, 2, 1, return_indices=True)[0]
        F.conv_transpose1d({x}, torch.ones({x}.shape[1], 2, 2, dtype={x}.dtype))
        F.prelu({x}, torch.tensor(0.2, dtype={x}.dtype))
        F.conv2d({x}, torch.ones({x}.shape[1], 1, 2, 2, dtype={x}.dtype), groups={x}.shape[1])
        F.local_response_norm({x}, 2); F.interpolate({x}, scale_factor=2, mode='linear')
        F.cross_entropy({x}, torch.zeros({x}.shape[0], dtype=torch.long))
        F.nll_loss({x}.log_softmax(-1), torch.zeros({x}.shape[0], dtype=torch.long)); F.adaptive_max_pool1d({x}, 2)
        F.lp_pool1d({x}, 2, 2); F.kl_div({x}.log_softmax(-1), {x}.softmax(-1), reduction='batchmean')
        F.binary_cross_entropy_with_logits({x}, {x}.sigmoid())
        F.grid_sample({x}, torch.zeros({x}.shape[0], 2, 2, 2, dtype={x}.dtype)); F.channel_shuffle({x}, 2)
        F.interpolate({x}, scale_factor=2, mode='bicubic')"""),
    "constant": (1, "any", """
        torch.zeros_like({x}); torch.ones({x}.shape); torch.arange(5); torch.arange({x}.numel()).reshape({x}.shape)
        torch.full_like({x}, 2); torch.eye(3); torch.linspace(0, 1, 5); torch.tensor([1.0, 2.0]); {x}.new_zeros(2, 3)
        torch.tensor(3); torch.scalar_tensor(2.5); torch.empty({x}.shape).fill_(1); {x}.new_full((2,), 4)
        torch.ones_like({x}, dtype=torch.bool); torch.arange(0, 1, 0.25); torch.tril_indices(3, 3)
        torch.meshgrid(torch.arange(2), torch.arange(3), indexing='ij')[1]"""),
    "integers": (1, "integer", """
        {x} // 2; {x} % 3; {x} & {w}; {x} | 3; {x} ^ {w}; {x} << 1; {x} >> 1; ~{x}; {x} * {w}; {x}.abs()
        {x}.float() / 2; {x} / 2; torch.gcd({x}, {x}); {x}.clamp(0, 3); {x} ** 2
        torch.div({x}, 2, rounding_mode='floor'); {x} - {w}; -{x}; {x}.sum(); {x}.cumsum(0); {x}.prod(); {x} % 5 - 2
        torch.floor_divide({x}, -3); {x} + True; torch.remainder({x}, -3); {x}.bitwise_and(1); {x}.sign(); {x} * 0.5
        {x}.to(torch.uint8) - 200"""),
    "comparison": (1, "any", """
        {x} > {y}; {x} == {y}; {x} != {y}; {x} <= {y}; ~({x} > 0); ({x} > 0) & ({y} < {x})
        torch.logical_xor({x}, {x} > 0); torch.isnan({x}); torch.isfinite({x}); ({x} > 0).sum(); ({x} > 0).float() * {y}
        ({x} > 0).any(); torch.isclose({x}, {x}); torch.signbit({x}); ({x} > 0) * {x}
        torch.isin({x}, torch.tensor([1, 2])); torch.eq({x}, {w}); ({x} > 0).cumsum(0)"""),
    "join": (1, "any", """
        torch.cat([{x}, {w}], -1); torch.stack([{x}, {w}]); torch.cat([{x}, {x}], 0); torch.stack([{x}, {x} * 2], -1)
        torch.hstack([{x}, {w}]); torch.outer({x}.flatten()[:5], {w}.flatten()[:4])
        torch.broadcast_tensors({x}, {w})[0]; torch.cdist({x}, {x} + 1)
        torch.cartesian_prod({x}.flatten()[:3], {w}.flatten()[:2])
        torch.block_diag({x}.reshape(1, -1), {w}.reshape(1, -1)); torch.kron({x}.flatten()[:3], {w}.flatten()[:2])"""),
    "order": (1, "any", """
        {x}.sort({d})[0]; {x}.sort({d}, descending=True)[0]; torch.topk({x}, 1, {d})[0]; {x}.argsort({d}, stable=True)
        torch.msort({x}); torch.kthvalue({x}, 1, {d})[0]; torch.topk({x}, 2, {d}, largest=False)[0]
        torch.sort({x}, stable=True, dim={d}, descending=True)[1]"""),
    "product": (2, "any", """
        {x} @ {x}.mT; {x}.mT @ {w}; torch.einsum('...i,...j->...ij', {x}, {w}); {x} @ {w}
        torch.matmul({x}, {x}.mT) * 0.1; torch.einsum('...i,...i->...', {x}, {x}); torch.bmm({x}, {x}.mT)
        torch.addmm({w}, {x}, {x}.mT); torch.tensordot({x}, {x}, 1); torch.baddbmm({w}, {x}, {x}.mT, beta=0.5)
        torch.mv({x}, {x}[0]); torch.dot({x}.flatten(), {x}.flatten()); torch.inner({x}, {w})
        torch.linalg.det({x} + torch.eye({x}.shape[-1])); torch.trace({x})"""),
    "random": (1, "float", """
        F.dropout({x}, 0.3); torch.rand_like({x}); torch.randn({x}.shape) + {x}; torch.bernoulli({x}.sigmoid())
        torch.randint(0, 5, (3,)); F.dropout({x}, 0.5, training=False); torch.randperm(5); {x}.clone().uniform_()
        F.alpha_dropout({x}, 0.2, training=True); F.gumbel_softmax({x}); torch.multinomial({x}.abs().flatten() + 0.1, 2)
        {x}.clone().exponential_()"""),
    "size": (1, "any", """
        {x} * {x}.shape[0]; {x} + {x}.numel(); {x}.reshape({x}.shape[0], -1).sum(1); torch.arange({x}.shape[-1]) + {x}
        {x}[-2:]; {x} / {x}.shape[-1] ** 0.5; {x}.view(-1, {x}.size(-1)).mean(0)
        torch.ones({x}.shape[0], {x}.shape[0]).tril(); {x}[: {x}.shape[0] // 2]; {x}.new_ones({x}.shape[0] + 1)
        {x}.expand(3, *{x}.shape).sum(0); F.pad({x}, (0, 10 - {x}.shape[-1])); {x}.split({x}.shape[0] // 2 + 1)[0]
        torch.arange({x}.shape[0], dtype=torch.float32)[:, None] * {x}.flatten()[:3]"""),
    "other": (1, "any", """
        torch.fft.rfft({x}).abs(); torch.view_as_real(torch.fft.fft({x})); torch.complex({x}, {x}).abs()
        torch.histc({x}, 4); {x}.cross({x} + 1, dim=-1); torch.cov({x}); torch.linalg.norm({x})
        torch.quantile({x}, 0.3); torch.special.entr({x}.abs()); torch.clamp({x}, max=0.5)
        torch.clamp({x}, {x} - 1, {x} + 1); torch.heaviside({x}, {x}); torch.polar({x}.abs(), {x}).real
        torch.vander({x}.flatten()[:3]); torch.renorm({x}, 2, 0, 1); torch.func.vmap(lambda a: a * 2 + a.sum())({x})
        torch.cummin({x}, 0)[1]; torch.utils.checkpoint.checkpoint(lambda a: a.sin() * 2, {x}, use_reentrant=False)
        torch.mode({x})[0]; torch.logdet({x} @ {x}.mT + torch.eye({x}.shape[-2]))"""),
}  # fmt: skip
TEMPLATES = {
    kind: [e.strip() for e in text.replace("\n", ";").split(";") if e.strip()]
    for kind, (_, _, text) in EXPRESSIONS.items()
}
ACCEPTS: dict[str, Callable[[torch.Tensor], bool]] = {
    "any": lambda x: True,
    "float": lambda x: x.is_floating_point(),
    "integer": lambda x: not x.is_floating_point() and x.dtype is not torch.bool,
}


@dataclass(frozen=True)
class Program:
    """A function, as text, what it is called with, and how it is compiled."""

    number: int
    text: str
    inputs: list[torch.Tensor]
    trains: bool
    dynamic: bool

    @property
    def tolerance(self) -> float:
        """How far results may be from eager's, relative to the largest element."""
        types = self.text + " ".join(str(x.dtype).replace("torch.float16", "half") for x in self.inputs)
        return next(limit for kind, limit in TOLERANCE.items() if kind in types)

    def function(self) -> Any:
        """The function, made anew, as TorchDynamo keeps what it compiled with the code."""
        name = f"<program {self.number}>"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(True), name)
        scope: dict[str, Any] = dict(NAMES)
        exec(compile(self.text, name, "exec"), scope)
        return scope["f"]


def _inputs(r: random.Random, draws: torch.Generator) -> Iterator[torch.Tensor]:
    b, s, d = r.choice([1, 2, 3, 5]), r.choice([2, 3, 4, 7]), r.choice([4, 6, 8])
    shapes = [(b, s, d), (b, d), (d,), (d, d), (b, s), (), (b, 1, s, d), (1,), (b, 4, 6, 6)]
    for i in range(r.randint(1, 4)):
        shape = r.choice(shapes)
        kind = r.choice(["float32"] * 4 + ["float64", "half", "int64", "int32", "uint8", "bool"]) if i else "float32"
        if kind in ("float32", "float64"):
            x = torch.randn(shape, generator=draws, dtype=getattr(torch, kind))
        elif kind == "half":
            x = torch.randn(shape, generator=draws).to(r.choice([torch.float16, torch.bfloat16]))
        elif kind == "bool":
            x = torch.rand(shape, generator=draws) > 0.5
        else:
            low, high = (0, 200) if kind == "uint8" else (-9, 10)
            x = torch.randint(low, high, shape, generator=draws, dtype=getattr(torch, kind))
        layout = r.random()
        if layout < 0.15 and x.dim() > 1:
            x = x.mT.contiguous().mT
        elif layout > 0.9 and x.dim() > 0:
            x = torch.stack([x, x], -1).flatten(-2)[..., ::2]
        yield x


class _Writer:
    """Writes a program line by line, and runs each."""

    def __init__(self, r: random.Random, inputs: list[torch.Tensor]) -> None:
        self.random = r
        self.scope: dict[str, Any] = {**NAMES, **{f"x{i}": _copy(x) for i, x in enumerate(inputs)}}
        self.tensors = [f"x{i}" for i in range(len(inputs))]
        self.lines: list[str] = []
        for _ in range(r.randint(2, MOST_LINES)):
            any(self._add() for _ in range(20))

    def _operand(self, accepts: Callable[[torch.Tensor], bool] = ACCEPTS["any"]) -> str:
        fitting = [name for name in self.tensors if accepts(self.scope[name])]
        recent = self.random.random() < 0.6
        return self.random.choice(fitting[-4:] if recent else fitting) if fitting else ""

    def _line(self) -> tuple[str, bool]:
        r = self.random
        kinds = list(EXPRESSIONS)
        kind = r.choices(kinds, [EXPRESSIONS[k][0] for k in kinds])[0]
        name = self._operand(ACCEPTS[EXPRESSIONS[kind][1]])
        if not name:
            return "", False
        x = self.scope[name]
        axes = list(range(x.dim())) or [0]
        index = self._operand(ACCEPTS["integer"]) if r.random() < 0.5 else ""
        text = r.choice(TEMPLATES[kind]).format(
            x=name,
            y=self._operand() if r.random() < 0.7 else r.choice(["2", "-1", "0.5", "3", "1.5", "-0.25", "1", "True"]),
            w=self._operand(),
            d=r.choice([*axes, *(-1 - a for a in axes)]),
            e=r.choice(axes),
            p=", ".join(map(str, r.sample(axes, len(axes)))),
            k=r.choice(["", ", keepdim=True"]),
            j=f"({index} % {name}.shape[0]).long()" if index else "torch.tensor([0, -1, 0])",
        )
        return text, kind == "write"

    def _add(self) -> bool:
        text, writes = self._line()
        if not text:
            return False
        made = f"v{len(self.lines)}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(text if writes else f"{made} = {text}", self.scope)
        except Exception:  # what torch refuses; a write that was begun counts for nothing: the program is run anew
            return False
        if not writes:
            if not _is_fit(self.scope[made]):
                return False
            self.tensors.append(made)
        self.lines.append(text if writes else f"{made} = {text}")
        return True


def _is_fit(x: Any) -> bool:
    if not isinstance(x, torch.Tensor) or not 0 < x.numel() <= MOST_ELEMENTS or x.is_complex():
        return False
    return not x.is_floating_point() or bool((x.detach().abs() <= 1e6).all())


def program(number: int, mode: str = "") -> Program | None:
    """The program of a number; None where no line was found that torch runs. mode: "train", "inference", or either."""
    r = random.Random(f"torch {number}")
    inputs = list(_inputs(r, torch.Generator().manual_seed(number)))
    torch.manual_seed(number)
    writer = _Writer(r, inputs)
    if not writer.lines:
        return None
    results = {r.choice(writer.tensors): None for _ in range(r.randint(1, 3))} | {writer.tensors[-1]: None}
    given = ", ".join(f"x{i}" for i in range(len(inputs)))
    form = r.choice(["({},)", "[{},]"]).format(", ".join(results))
    text = f"def f({given}):\n" + "".join(f"    {line}\n" for line in writer.lines) + f"    return {form}\n"
    trains = r.random() < 0.5 if not mode else mode == "train"
    return Program(number, text, inputs, trains, dynamic=r.random() < 0.25)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


@dataclass(frozen=True)
class Outcome:
    """What a caller can see of a call."""

    results: list[torch.Tensor]
    written: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    shared: list[list[bool]]
    needs_gradient: list[bool]
    kind: type
    drawn: torch.Tensor

    def difference(self, other: Outcome, limit: float) -> str:
        """How the outcome of a compiled function differs from that of eager; "" where it does not."""
        if self.kind is not other.kind:
            return f"{self.kind} instead of {other.kind}"
        for what in ("results", "written", "gradients"):
            for i, (a, b) in enumerate(zip(getattr(self, what), getattr(other, what), strict=True)):
                if wrong := _difference(a, b, limit):
                    return f"{what}[{i}]: {wrong}"
        for what in ("needs_gradient", "shared"):
            if getattr(self, what) != getattr(other, what):
                return f"{what}: {getattr(self, what)} instead of {getattr(other, what)}"
        return "" if torch.equal(self.drawn, other.drawn) else "another state of the random numbers"


def _difference(a: torch.Tensor | None, b: torch.Tensor | None, limit: float) -> str:
    if a is None or b is None:
        return "" if a is b else f"{'none' if a is None else 'one'}, where eager has {'none' if b is None else 'one'}"
    if a.dtype is not b.dtype or a.shape != b.shape:
        return f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    if not a.dtype.is_floating_point:
        return "" if torch.equal(a, b) else f"{int((a != b).sum())} of {a.numel()} elements differ"
    scale = float(b.double().abs().nan_to_num(0, 0, 0).amax()) if b.numel() else 0.0
    a, b = a.double(), b.double()
    if torch.allclose(a, b, rtol=limit, atol=limit * max(scale, 1e-3), equal_nan=True):
        return ""
    return f"differs by up to {float((a - b).abs().nan_to_num(torch.inf).max()):.3g}, where the largest is {scale:.3g}"


def call(function: Any, p: Program, seed: int) -> Outcome:
    """Call it with copies of the inputs, which are no leaves of autograd, so that it may write into them."""
    leaves = [_copy(x).requires_grad_(p.trains and x.is_floating_point()) for x in p.inputs]
    given = [x * 1 if x.requires_grad else x for x in leaves]
    torch.manual_seed(seed)
    made = function(*given)
    drawn = torch.get_rng_state()
    results: list[torch.Tensor] = list(made)
    places = [x.untyped_storage()._cdata for x in (*given, *results)]
    followed = [x for x in results if x.requires_grad]
    gradients: list[torch.Tensor | None] = []
    if followed:
        sum((x.double() * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() for x in followed).backward()
        gradients = [x.grad for x in leaves]
    return Outcome(
        [x.detach().clone() for x in results], [x.detach().clone() for x in given], gradients,
        [[a == b for b in places] for a in places], [x.requires_grad for x in results], type(made), drawn,
    )  # fmt: skip


def attempt(p: Program, expected: list[Outcome], wait: bool = False, **compilation: Any) -> str:
    """What a compiled function does otherwise than eager; "" for nothing. wait: after two calls, for compilation."""
    torch._dynamo.reset()
    try:
        compiled = torch.compile(p.function(), dynamic=True if p.dynamic else None, **compilation)
        for i, want in enumerate(expected):
            if wrong := call(compiled, p, p.number + i).difference(want, p.tolerance):
                return f"call {i}: {wrong}"
            if wait and i == 1:
                xrt_torch.wait(60)
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:500]}"
    return ""


def run(p: Program, options: dict[str, Any], seen: set[str], counts: Counter[str]) -> str:
    """Run a program; return the finding, "" for none. seen: names of the graphs of earlier programs."""
    try:
        expected = [call(p.function(), p, p.number + i) for i in range(CALLS)]
    except Exception:
        counts["programs that eager refuses"] += 1
        return ""
    reasons: list[str] = []
    undo = xrt.subscribe(
        lambda e: reasons.append(f"{e.fields['stage']}: {e.fields['error']}") if e.name == "fallback" else None
    )
    wrong = attempt(p, expected, bool(options["background"]), backend=backend, options=options)
    undo()
    graphs = [g for g in xrt_torch.graphs() if g.name not in seen]
    seen.update(g.name for g in graphs)
    counts["programs"] += 1
    counts["graphs"] += len(graphs)
    for reason in dict.fromkeys(reasons):
        counts["graphs that fell back"] += 1
        print(f"program {p.number} fell back: {reason[:300]}", flush=True)
    if wrong and any(attempt(p, expected, backend=control) for control in CONTROLS):
        counts["of torch's own"] += 1
        return ""
    return wrong


def run_exported(p: Program, engine: str, counts: Counter[str]) -> str:
    """Export a program, and run that on an engine without guard; return the finding, "" for none."""

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    function = p.function()
    before = torch.get_rng_state()
    try:
        expected = function(*map(_copy, p.inputs))
        if not torch.equal(torch.get_rng_state(), before):
            return ""  # the numbers are random ones
        program = torch.export.export(Module(), tuple(map(_copy, p.inputs)), strict=False)
        program.run_decompositions({})  # which tells of writes that torch does not take out
    except Exception:
        counts["programs that torch does not export"] += 1
        return ""
    counts["programs"] += 1
    try:
        found = xrt.XRTModule(program, engine=engine, guard=False, cache=False)(*map(_copy, p.inputs))
    except xrt.ModelLoadError as e:
        counts["programs that are refused"] += 1
        print(f"program {p.number} is refused: {str(e)[:300]}", flush=True)
        return ""
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:300]}"
    for i, (a, b) in enumerate(zip(found if isinstance(found, tuple) else (found,), expected, strict=True)):
        if wrong := _difference(torch.as_tensor(a), b.detach(), p.tolerance):
            return f"results[{i}]: {wrong}"
    return ""


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--only", help="numbers of programs")
    parser.add_argument("--engine", default="host")
    parser.add_argument("--background", action="store_true", help="compile in the background, the backend's default")
    parser.add_argument("--mode", choices=["train", "inference"], default="")
    parser.add_argument("--export", action="store_true", help="export the programs, in the place of torch.compile")
    parser.add_argument("--show", action="store_true", help="print the programs")
    args = parser.parse_args()
    if args.export and (args.background or args.mode == "train"):
        parser.error("--export is for inference, and compiles at once: leave out --background and --mode train")
    warnings.simplefilter("ignore")
    numbers = [int(n) for n in args.only.split(",")] if args.only else range(args.first, args.first + args.programs)
    options = {"engine": args.engine, "background": args.background}
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    findings, start = 0, time.monotonic()
    for number in numbers:
        if (p := program(number, "inference" if args.export else args.mode)) is None:
            continue
        if args.show:
            print(p.text, [(list(x.shape), x.dtype, x.stride()) for x in p.inputs])
        if found := run_exported(p, args.engine, counts) if args.export else run(p, options, seen, counts):
            findings += 1
            kind = f"{'training' if p.trains else 'inference'}{', symbolic sizes' if p.dynamic else ''}"
            print(f"finding: program {number} ({kind}): {found}", flush=True)
        gc.collect()
    told = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
    print(f"{told}; {findings or 'no'} findings in {time.monotonic() - start:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
