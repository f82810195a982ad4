"""What hypothesis draws: one attention call, as a readable recipe that builds its tensors."""

import dataclasses
import math

import torch
from hypothesis import settings
from hypothesis import strategies as st

NAN = float("nan")


def one_example_in(n):
    """How many examples a property gets that is dear: an nth of what others get. The first one that
    hypothesis draws is the simplest that there is, so there are at least three."""
    return max(3, settings().max_examples // n)


LAYOUTS = ["contiguous", "transposed", "column_major", "sliced", "column_strided", "unaligned"]


def lay_out(x, layout):
    """A tensor with x's values and other strides. What lies between them in memory is NaN."""
    if x.dim() < 2:
        return x
    if layout == "transposed" and x.dim() >= 3:  # [..., L, H, D] in memory, seen as [..., H, L, D]
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "column_major":
        return x.mT.contiguous().mT
    if layout == "sliced":  # every other row of a wider tensor
        base = x.new_full((*x.shape[:-2], 2 * x.size(-2) + 1, x.size(-1) + 3), _junk(x))
        return base[..., 1::2, 2 : 2 + x.size(-1)].copy_(x)
    if layout == "column_strided":
        base = x.new_full((*x.shape[:-1], 3 * x.size(-1)), _junk(x))
        return base[..., ::3].copy_(x)
    if layout == "unaligned":  # not on the boundary of any vector
        return x.new_full((x.numel() + 1,), _junk(x))[1:].view(x.shape).copy_(x)
    return x.contiguous()


def _junk(x):
    return NAN if x.is_floating_point() else True


@dataclasses.dataclass
class Case:
    """shapes: of query, key, value and, unless None, the mask. head_shapes: of alibi_slopes and
    sinks, unless None, in head_dtype. bias_shape: of bias, unless None, laid out as the key is, and
    so are spans. The rest are the operator's arguments."""

    shapes: tuple
    layouts: tuple
    zero_stride_dims: tuple  # of each tensor: dimensions along which it repeats one slice
    mask_kind: str | None
    bias_shape: tuple | None
    spans_shape: tuple | None  # [..., L or 1, n], of n spans
    head_shapes: tuple
    head_dtype: torch.dtype
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    window_size: tuple | None
    softcap: float
    dropout_p: float
    spread: float  # standard deviation of query, key and a floating mask
    seed: int

    def tensors(self, dtype):
        """(query, key, value), and the options of the call as keywords."""
        generator = torch.Generator().manual_seed(self.seed)
        built = []
        for n, shape in enumerate(self.shapes):
            if shape is None:
                built.append(None)
                continue
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            x = (
                self._mask(x, dtype, self.mask_kind)
                if n == 3
                else x.mul(self.spread if n < 2 else 1).to(dtype)
            )
            x = lay_out(x, self.layouts[n])
            for dim in self.zero_stride_dims[n]:
                if dim >= -x.dim() and x.size(dim) > 1:
                    x = x.narrow(dim, 0, 1).expand(x.shape)
            built.append(x)
        *inputs, mask = built
        options = {
            "attn_mask": mask,
            "is_causal": self.is_causal,
            "scale": self.scale,
            "enable_gqa": self.enable_gqa,
        }
        return inputs, options | self._more_options(generator, dtype)

    def _mask(self, x, dtype, kind):
        if kind == "bool":
            return x > -0.5
        mask = (x * self.spread).masked_fill(x < -1, -math.inf)
        return mask.to(dtype if kind == "same" else torch.float32)

    def _more_options(self, generator, dtype):
        """The options in use that torch's own attention does not have, as keywords."""
        more = {}
        if self.window_size is not None:
            more["window_size"] = self.window_size
        if self.softcap:
            more["softcap"] = self.softcap
        for name, shape in zip(("alibi_slopes", "sinks"), self.head_shapes, strict=True):
            if shape is not None:
                x = torch.randn(shape, generator=generator, dtype=torch.float64)
                if name == "sinks":
                    x = (2 * x).masked_fill(x < -1, -math.inf)
                more[name] = lay_out(x.to(self.head_dtype), self.layouts[0])
        if self.bias_shape is not None:
            x = torch.randn(self.bias_shape, generator=generator, dtype=torch.float64)
            kind = "same" if self.seed % 2 else "f32"
            more["bias"] = lay_out(self._mask(x, dtype, kind), self.layouts[1])
        if self.spans_shape is not None:
            shape, keys = (*self.spans_shape, 2), self.shapes[1][-2]
            x = torch.randint(keys + 1, shape, generator=generator, dtype=torch.int32)
            x = lay_out(x.sort(-1).values.flatten(-2), self.layouts[1])
            more["spans"] = x
        if self.dropout_p > 0:
            seed = self.seed * 0x9E3779B97F4A7C15 % 2**64 - 2**63  # may be any int64
            more |= {"dropout_p": self.dropout_p, "dropout_seed": seed}
        return more


SIZES = st.one_of(
    st.sampled_from([1, 2, 3, 5, 7, 8, 0, 15, 16, 17, 31, 33, 64, 65, 127, 197, 260]),
    st.integers(1, 48),
)
SCALES = st.sampled_from([None, None, None, 0.25, -0.7, 0.0, 1e-6, 20.0])


@st.composite
def _broadcast_shape(draw, shape):
    """A shape that broadcasts to `shape`: fewer leading dimensions, some of size 1."""
    shape = shape[draw(st.integers(0, len(shape))) if draw(st.booleans()) else 0 :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else n for n in shape)


@st.composite
def cases(draw, max_work=1_500_000):
    """max_work bounds batch * H * L * S * D."""
    batch = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 2, 3, 2, 0]), max_size=3)))
    enable_gqa = draw(st.booleans())
    groups = (draw(st.integers(1, 5)), draw(st.integers(1, 3))) if enable_gqa else (1, 1)
    H = draw(st.integers(1, 3)) * groups[0] * groups[1]
    L, S, D = draw(SIZES), draw(SIZES), max(1, draw(SIZES))
    Dv = D if draw(st.booleans()) else max(1, draw(SIZES))
    while math.prod(max(n, 1) for n in batch) * H * L * S * max(D, Dv) > max_work:
        if batch:
            batch = batch[1:]
        else:
            L, S = max(1, L // 2), max(1, S // 2)
    if enable_gqa:  # key and value may share heads differently
        key_group = groups[0] * groups[1]
        value_group = draw(st.sampled_from([key_group, key_group, groups[0]]))
        batches = [draw(_broadcast_shape(batch)) for _ in range(3)]
        leads = [b + (H // g,) for b, g in zip(batches, (1, key_group, value_group), strict=True)]
        lead = (*torch.broadcast_shapes(*batches), H)
    else:
        leads = [draw(_broadcast_shape((*batch, H))) for _ in range(3)]
        lead = torch.broadcast_shapes(*leads)
    mask_kind = draw(st.sampled_from([None, "bool", "same", "f32", "bool"]))
    mask_shape = None
    if mask_kind:
        mask_shape = draw(_broadcast_shape((*lead, L, S)))
        mask_shape = (1,) * (2 - len(mask_shape)) + mask_shape
    shapes = (*(a + b for a, b in zip(leads, [(L, D), (S, D), (S, Dv)], strict=True)), mask_shape)
    bias_shape = None
    if draw(st.integers(0, 3)) == 0:
        bias_shape = draw(_broadcast_shape((*lead, L, S)))
        bias_shape = (1,) * (2 - len(bias_shape)) + bias_shape
    spans_shape = None
    if draw(st.integers(0, 4)) == 0:
        spans_shape = (*(draw(_broadcast_shape((*lead, L))) or (1,)), draw(st.integers(1, 3)))
    sides = st.sampled_from([-1, 0, 1, 2, 5, S // 2, L // 2, L + S, 2**40])
    return Case(
        shapes=shapes,
        layouts=tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(4)),
        # Not along D for both query and key: in sums of one number repeated, roundings add up.
        zero_stride_dims=tuple(
            tuple(d for d in (-4, -3, -2, -1)[: 3 if n == 1 else 4] if draw(st.integers(0, 7)) == 0)
            for n in range(4)
        ),
        mask_kind=mask_kind,
        bias_shape=bias_shape,
        spans_shape=spans_shape,
        head_shapes=tuple(
            draw(_broadcast_shape(lead)) if draw(st.integers(0, 3)) == 0 else None for _ in range(2)
        ),
        head_dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        is_causal=draw(st.booleans()),
        scale=draw(SCALES),
        enable_gqa=enable_gqa,
        window_size=draw(st.one_of(st.none(), st.none(), st.tuples(sides, sides))),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.5, 3.0, 50.0])),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 1.0])),
        spread=draw(st.sampled_from([1.0, 1.0, 0.01, 6.0])),
        seed=draw(st.integers(0, 2**16)),
    )
