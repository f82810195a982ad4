"""A call or two of every operator of the package, for what has to hold for each of them.

`calls(name)` are the arguments of qkv::<name>, by their names. A new operator needs a line in
`_CALLS`: test_opcheck.py fails without.
"""

import torch

ops = torch.ops.qkv
H, HKV, L, S, D, DV = 4, 2, 5, 6, 8, 3

# score + table[head, query - key + 8] * sigmoid(score) where kinds[batch] is 0, else the score.
PROGRAM = """@float 0 4 20
@int 0 3
score
head
query
key
sub 2 3
int 8
add 4 5
load 0 1 6
sigmoid 0
mul 7 8
add 0 9
batch
load 1 11
int 0
eq 12 13
where 14 10 0
"""
SCORES = {
    "is_causal": True, "scale": 0.4, "enable_gqa": True, "window_size": (4, 2), "softcap": 2.0,
}  # fmt: skip
NONE = {
    "is_causal": False, "scale": None, "enable_gqa": True, "window_size": None, "softcap": 0.0,
}  # fmt: skip
PACKED = ("cu_seq_q", "cu_seq_k", "seqused_k")
GRADS = ("grad_query", "grad_key", "grad_value")
INPUTS = ("query", "key", "value")
OPTIONS = ("attn_mask", "bias", "spans", "alibi_slopes", "sinks", "score_tables")


def names():
    """Of all operators but the private ones, which take no tensors."""
    everything = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(name for space, _, name in everything if space == "qkv" and name[0] != "_")


def operator(name):
    return getattr(ops, name).default


def arguments(name):
    """The names of the operator's arguments."""
    return [argument.name for argument in operator(name)._schema.arguments]


def results(name, call):
    """What the operator returns for a call, by the names of its schema."""
    found = operator(name)(**call)
    found = (found,) if isinstance(found, torch.Tensor) else found
    return dict(zip((r.name for r in operator(name)._schema.returns), found, strict=True))


def inputs(dtype):
    """Of two batch items, whose heads share keys and values."""
    shapes = {"query": (2, H, L, D), "key": (2, HKV, S, D), "value": (2, HKV, S, DV)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def options(dtype):
    """Every tensor that acts on scores, each of another rank."""
    return {
        "attn_mask": torch.randn(L, S, dtype=dtype), "bias": torch.randn(H, 1, S, dtype=dtype),
        "alibi_slopes": torch.rand(H).double(), "sinks": torch.randn(2, H).double(),
    }  # fmt: skip


def _program(dtype):
    """PROGRAM, and what it reads."""
    compute_type = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "score_program": PROGRAM, "score_tables": torch.randn(80, dtype=compute_type),
        "score_indices": torch.tensor([0, 1, 0], dtype=torch.int32),
    }  # fmt: skip


def only(name, call):
    """Those of the arguments that the operator takes; None for the tensors that it wants to be
    given and that are not there."""
    schema = operator(name)._schema.arguments
    required = {
        a.name: None for a in schema if a.default_value is None and not a.has_default_value()
    }
    return {n: x for n, x in (required | call).items() if n in arguments(name)}


def _user(name, dtype, **more):
    whole = inputs(dtype) | options(dtype) | SCORES | _program(dtype) | {"dropout_p": 0.3} | more
    plain = inputs(dtype) | {"enable_gqa": True} | more
    return [only(name, call) for call in (whole, plain)]


def _low_level(name, dtype, **more):
    seed = {"dropout_p": 0.3, "dropout_seed": torch.tensor([7])}
    whole = inputs(dtype) | options(dtype) | SCORES | _program(dtype) | seed | more
    plain = inputs(dtype) | NONE | {"dropout_p": 0.0} | more
    return [only(name, call) for call in (whole, plain)]


def documents(dtype):
    """Three documents, with rows that are in none of them at both ends."""
    return {
        "query": torch.randn(20, H, D, dtype=dtype), "key": torch.randn(13, HKV, D, dtype=dtype),
        "value": torch.randn(13, HKV, DV, dtype=dtype), "cu_seq_q": torch.tensor([1, 4, 4, 10]),
        "cu_seq_k": torch.tensor([0, 5, 6, 12], dtype=torch.int32),
        "seqused_k": torch.tensor([3, 1, 6]),
    }  # fmt: skip


def _document_options(dtype):
    return {
        "bias": torch.randn(H, 6, 6, dtype=dtype), "alibi_slopes": torch.rand(H).double(),
        "sinks": torch.randn(3, H).double(),
    }  # fmt: skip


def _packed(name, dtype):
    seed = {"dropout_p": 0.3, "dropout_seed": torch.tensor([7])}
    whole = documents(dtype) | _document_options(dtype) | SCORES | _program(dtype) | seed
    plain = documents(dtype) | NONE | {"dropout_p": 0.0, "seqused_k": None, "cu_seq_k": None}
    plain["key"], plain["value"] = plain["key"][:11], plain["value"][:11]
    lengths = {"max_q": 6, "max_k": 6}
    return [only(name, call | lengths) for call in (whole, plain)]


def _backward(name, forward, call):
    """The call of a backward operator for a call of the forward one, every gradient wanted. What
    flows in has other strides than the results."""
    found = results(forward, call)
    grads = {
        f"grad_{n}": torch.randn_like(x.movedim(-1, 0).contiguous()).movedim(0, -1)
        for n, x in found.items() if x.is_floating_point()
    }  # fmt: skip
    wanted = [True] * len(operator(name)._schema.returns)
    return only(name, call | found | grads | {"output_mask": wanted})


def _tangents(call):
    """Of everything that has one."""
    floating = {n: x for n in (*INPUTS, *OPTIONS) if (x := call.get(n)) is not None}
    return {f"{name}_tangent": torch.randn_like(x) for name, x in floating.items()}


def _jvp(dtype):
    name = "attention_forward_jvp"
    return [x | _tangents(x) for x in (*_low_level(name, dtype), *_packed(name, dtype))]


def _double_backward(dtype):
    """The first of the dense calls, and of the packed ones, has what pass 1 returns; the others
    make it themselves."""
    name, found = "attention_double_backward", []
    for number, call in enumerate(calls("attention_backward", dtype)):
        call = (
            call | _tangents(call) | {"output_mask": [True] * len(operator(name)._schema.returns)}
        )
        if number % 2 == 0:
            forward = only("attention_forward_jvp", call)
            call |= results("attention_forward_jvp", forward)
        found.append(only(name, call))
    return found


def _varlen(dtype):
    pages = torch.randn(7, 4, HKV, D, dtype=dtype), torch.randn(7, 4, HKV, DV, dtype=dtype)
    packed = documents(dtype)
    packed |= {"key": pages[0], "value": pages[1], "cu_seq_k": None}
    packed["block_table"] = torch.tensor([[3, 0], [6, 2], [1, 5]])
    whole = packed | _document_options(dtype) | SCORES | _program(dtype)
    return whole, packed | {"enable_gqa": True}


def _cache(dtype):
    tensors = {
        "query": torch.randn(2, H, L, D, dtype=dtype),
        "key": torch.randn(2, HKV, 2, D, dtype=dtype),
        "value": torch.randn(2, HKV, 2, DV, dtype=dtype),
        "cache_seqlens": torch.tensor([4, 2], dtype=torch.int32),
        "bias": torch.randn(2, H, 1, 9, dtype=dtype), "alibi_slopes": torch.rand(H).double(),
        "sinks": torch.randn(2, H).double(), "causal": True, "window_size": (4, -1), "softcap": 2.0,
    } | _program(dtype)  # fmt: skip
    rows = {
        "k_cache": torch.randn(3, HKV, 9, D, dtype=dtype),
        "v_cache": torch.randn(3, HKV, 9, DV, dtype=dtype),
    }
    blocks = {
        "k_cache": torch.randn(7, HKV, 3, D, dtype=dtype),
        "v_cache": torch.randn(7, HKV, 3, DV, dtype=dtype),
        "block_table": torch.tensor([[3, 0, 4], [6, 2, 5]]),
    }
    reading = {
        "query": tensors["query"],
        "k_cache": rows["k_cache"][:2].clone(),
        "v_cache": rows["v_cache"][:2].clone(),
    }
    for kind in (rows, blocks):
        kind |= {
            "rotary_cos": torch.randn(9, 1).to(dtype),
            "rotary_sin": torch.randn(9, 1).to(dtype),
        }
    indexed = {"cache_batch_idx": torch.tensor([2, 0]), "cache_leftpad": torch.tensor([1, 0])}
    return [tensors | rows | indexed, tensors | blocks, reading]


def _indices():
    """Of keys, for each query: one of them twice, and some that are none."""
    return torch.tensor([[0, 2, 2], [5, 1, -1], [3, 4, 0], [-1, -1, 2], [1, 3, 5]]).expand(
        2, -1, -1
    )


def _latent(dtype):
    """With every option and rotated keys apart; in rows, by the other way."""
    C, R = 7, 4
    tensors = {
        "query_nope": torch.randn(2, H, L, D, dtype=dtype),
        "query_rope": torch.randn(2, H, L, R, dtype=dtype),
        "latents": torch.randn(2, 1, S, C, dtype=dtype),
        "rope_keys": torch.randn(2, 1, S, R, dtype=dtype),
        "key_weight": torch.randn(H, D, C, dtype=dtype),
        "value_weight": torch.randn(H, DV, C, dtype=dtype),
    }
    name = "latent_attention"
    whole = tensors | options(dtype) | SCORES | _program(dtype) | {"dropout_p": 0.3}
    rows = {"latents": torch.randn(2, 1, S, C + R, dtype=dtype), "rope_keys": None}
    return [only(name, whole | {"absorb": True}), only(name, tensors | rows | {"absorb": False})]


def _latent_cache(dtype):
    """Rows, blocks, and a cache that is only read."""
    latent = _latent(dtype)[0]
    shared = {n: latent[n] for n in ("query_nope", "query_rope", "key_weight", "value_weight")}
    width = sum(latent[n].size(-1) for n in ("latents", "rope_keys"))
    new = {n: latent[n][:, :, :2] for n in ("latents", "rope_keys")}
    found = []
    for call, absorb in zip(_cache(dtype), (True, False, None), strict=True):
        call["cache"] = torch.randn(*call["k_cache"].shape[:1], 1, call["k_cache"].size(2), width)
        call["cache"] = call["cache"].to(dtype)
        more = new if call.get("key") is not None else {}
        call = call | shared | more | {"absorb": absorb}
        found.append(only("latent_attention_with_kvcache", call))
    return found


def _merge(dtype):
    parts = [[torch.randn(2, H, L, *d, dtype=dtype) for _ in range(3)] for d in ((DV,), ())]
    return [dict(zip(("outputs", "lses"), parts, strict=True))]


def _rotate(dtype):
    """Of pairs, with weights, and of halves."""
    whole = {
        "query": torch.randn(2, H, L, D, dtype=dtype),
        "key": torch.randn(2, HKV, L, D, dtype=dtype),
        "cos": torch.randn(L, 3), "sin": torch.randn(L, 3),
        "query_weight": torch.randn(D, dtype=dtype), "key_weight": torch.randn(D),
        "eps": 1e-6, "interleaved": True,
    }  # fmt: skip
    if dtype == torch.float64:
        whole = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in whole.items()}
    plain = whole | {"query_weight": None, "key_weight": None, "interleaved": False}
    return [whole, plain]


_CALLS = {
    "attention": lambda dtype: _user("attention", dtype),
    "attention_with_lse": lambda dtype: _user("attention_with_lse", dtype),
    "attention_weights": lambda dtype: _user("attention_weights", dtype, reduce="heads"),
    "attention_with_weights": lambda dtype: _user("attention_with_weights", dtype),
    "hard_attention": lambda dtype: _user("hard_attention", dtype, straight_through=True),
    "varlen_attention": lambda dtype: [
        *_packed("varlen_attention", dtype),
        *(only("varlen_attention", x | {"max_q": 6, "max_k": 6}) for x in _varlen(dtype)),
    ],
    "varlen_attention_paged": lambda dtype: [
        only("varlen_attention_paged", x) for x in _varlen(dtype)
    ],
    "attention_with_kvcache": _cache,
    "attention_jvp": lambda dtype: [x | _tangents(x) for x in _user("attention_jvp", dtype)],
    "indexed_attention": lambda dtype: _user("indexed_attention", dtype, indices=_indices()),
    "latent_attention": _latent,
    "latent_attention_with_kvcache": _latent_cache,
    "merge": _merge,
    "rotate": _rotate,
    "dropout_seed": lambda dtype: [{"query": inputs(dtype)["query"]}],
    "attention_forward": lambda dtype: [
        *_low_level("attention_forward", dtype),
        *_packed("attention_forward", dtype),
    ],
    "attention_forward_jvp": _jvp,
    "attention_double_backward": _double_backward,
    "weights_forward": lambda dtype: _low_level("weights_forward", dtype, reduce="queries"),
    "with_weights_forward": lambda dtype: _low_level("with_weights_forward", dtype, reduce=None),
    "hard_forward": lambda dtype: _low_level("hard_forward", dtype, straight_through=True),
}
# What the gradients are of, by the operator that makes them.
_BACKWARD = {
    f"{name.removesuffix('_forward')}_backward": name
    for name in (
        "attention_forward", "weights_forward", "with_weights_forward", "hard_forward",
        "attention_forward_jvp", "rotate",
    )
}  # fmt: skip


def calls(name, dtype=torch.float64):
    """Calls of an operator: with every option, with none, packed and paged where there is that."""
    if name in _CALLS:
        return _CALLS[name](dtype)
    forward = _BACKWARD[name]
    return [_backward(name, forward, call) for call in calls(forward, dtype)]


def missing():
    """The operators that have no call here."""
    return [name for name in names() if name not in _CALLS and name not in _BACKWARD]
