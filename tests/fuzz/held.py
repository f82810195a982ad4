"""What a call has returned, and the gradients that autograd finds, held against the f64 reference.

The bounds are looser than those of tests/python, which judge accuracy: here a wrong element, a
wrong stride or a wrong option has to stand out, in any dtype, at any number of calls.
"""

import warnings
from functools import partial

import torch
from common import attend, compute_type, reference
from gradients import LEAVES, gradients, is_float
from rounding import Magnitude, largest, magnitudes, score_sizes
from torch.nn.attention.varlen import AuxRequest

from qkv import testing
from qkv.testing._functional import look_up
from qkv.testing._scores import leading, repeat_heads

with warnings.catch_warnings():  # a call must not warn, and torch does when it loads this
    warnings.simplefilter("ignore")
    from torch._decomp import decompositions_for_jvp  # noqa: F401

INF = float("inf")
SOFT = (
    "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "window_size", "softcap",
    "alibi_slopes", "bias", "spans", "sinks", "dropout_seed",
)  # fmt: skip
INPUTS = ("query", "key", "value")


class NotJudged(Exception):
    """There is no reference for this call: its shapes and dtypes are all that was checked."""


def as_tuple(results):
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def plain(call):
    """(query, key, value), options: what attend() takes, detached and with the seed as a number."""
    if call.get("shard") not in (None, (0,) * 7):
        raise NotJudged("a part of a larger call")
    inputs = [call[n].detach() for n in INPUTS if n in call]
    options = {n: call[n] for n in SOFT if call.get(n) is not None}
    if "spans" in options:  # a Spans or a BlockMask has it (operators.in_any_form)
        options["spans"] = getattr(options["spans"], "tensor", options["spans"])
    options = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    if not options.get("alibi_slopes", torch.zeros(())).double().isfinite().all():
        raise NotJudged("an infinite slope times a distance of 0")
    if call.get("dropout_p", 0) > 0:
        from operators import drawn_seed

        seed = call.get("dropout_seed")
        options["dropout_seed"] = drawn_seed() if seed is None else int(seed)
    else:
        options.pop("dropout_seed", None)
    if options.get("enable_gqa") and min(x.dim() for x in inputs) < 3:
        if any(x.dim() > 2 and x.size(-3) > 1 for x in inputs[1:]):
            raise NotJudged("some tensors have heads and some have none")
        options["enable_gqa"] = False  # all query heads share one
    if max(x.dim() for x in inputs) == 2 and options.keys() & {"alibi_slopes", "sinks"}:
        raise NotJudged("slopes or sinks, [1], of no heads: the formula makes a head of them")
    return inputs, options


def widen(options):
    return {n: x.double() if is_float(x) else x for n, x in options.items()}


def close(name, x, truth, size, dtype):
    """Whether x is within a few roundings of `size`, which has the sums behind x and how far
    rounding moves a weight. `dtype` is query's; x may be in another."""
    assert x.shape == truth.shape, f"{name} has the shape {[*x.shape]}, not {[*truth.shape]}"
    if not truth.numel():
        return
    coarsest = max((x.dtype, dtype), key=lambda t: torch.finfo(t).eps)
    x, truth = x.detach().double(), truth.detach().double()
    eps, fine = torch.finfo(coarsest).eps, torch.finfo(compute_type(dtype)).eps
    bound = (8 * eps + 32 * fine * size.top) * size.terms + torch.finfo(coarsest).smallest_normal
    same = (x == truth) | (x.isnan() & truth.isnan())
    error = (x - truth).abs().nan_to_num(nan=INF).masked_fill(same, 0).max().item()
    assert error == 0 or error <= bound, f"{name} is off by {error:.3g}, {bound:.3g} is allowed"


def found_gradients(call, results, grads):
    """{name: gradient} of every argument that requires a gradient, through all results that require
    one."""
    leaves = {n: call[n] for n in LEAVES if is_float(call.get(n)) and call[n].requires_grad}
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if y.requires_grad]
    if not leaves or not pairs:
        return {}
    outputs, seeds = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves.values(), seeds, allow_unused=True)
    for (name, x), g in zip(leaves.items(), found, strict=True):
        assert g is None or (g.shape, g.dtype) == (x.shape, x.dtype), f"gradient of {name}"
    return {
        n: torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(leaves.items(), found, strict=True)
    }


def random_like(results):
    torch.manual_seed(0)
    return [torch.randn(x.shape).to(x.dtype) for x in results]


def true_gradients(f, inputs, options, grads, names):
    """The gradients of f in f64. A gradient of -inf that flows into a row's lse is left out:
    nothing depends on such an lse."""
    grads = [None if g is None else g.double() for g in grads]
    return gradients(f, [x.double() for x in inputs], widen(options), grads, names)


def attention(call, results):
    """Holds the output, or output and lse, and their gradients."""
    inputs, options = plain(call)
    dtype, results = inputs[0].dtype, as_tuple(results)
    grads = random_like(results)
    truths = reference(*inputs, **options)
    found = found_gradients(call, results, grads)
    grads = tuple([*grads, None][:2])
    sizes = magnitudes(*inputs, **options, grads=grads)
    for name, x, truth in zip(("output", "lse"), results, truths, strict=False):
        assert x.dtype == (dtype if name == "output" else compute_type(dtype)), name
        close(name, x, truth, sizes[name], dtype)
    expected = true_gradients(attend, inputs, options, grads, list(found))
    for name, x in found.items():
        close(f"the gradient of {name}", x, expected[name], sizes[name], dtype)


def forward_again(operator, call, names):
    """What the forward operator returns. It must be what the gradient operator was given under
    these names: there is no truth for what it makes of others."""
    arguments = {a.name for a in operator.default._schema.arguments}
    again = operator(**{n: x for n, x in call.items() if n in arguments})
    for name, x in zip(names, again, strict=True):
        if name is not None and not torch.equal(call[name], x):
            raise NotJudged(f"{name} is not what the forward operator returns")
    return again


def gradient_names(operator):
    """The argument that each result of a backward operator is the gradient of."""
    return [x.name.removeprefix("grad_") for x in operator.default._schema.returns]


def returned(operator, results):
    """{argument: gradient} of the gradients that came back."""
    pairs = zip(gradient_names(operator), results, strict=True)
    return {n: x for n, x in pairs if x is not None}


def attention_backward(call, results):
    inputs, options = plain(call)
    forward_again(torch.ops.qkv.attention_forward, call, ("output", "logsumexp"))
    grads = call["grad_output"], call["grad_logsumexp"]
    if grads == (None, None):
        assert all(x is None for x in results), "a gradient of nothing"
        return
    wanted = returned(torch.ops.qkv.attention_backward, results)
    names = gradient_names(torch.ops.qkv.attention_backward)
    for n, asked in zip(names, call["output_mask"], strict=True):
        assert (n in wanted) == (asked and is_float(call.get(n))), f"output_mask and {n}"
    sizes = magnitudes(*inputs, **options, grads=grads)
    expected = true_gradients(attend, inputs, options, grads, list(wanted))
    for name, x in wanted.items():
        close(f"the gradient of {name}", x, expected[name], sizes[name], inputs[0].dtype)


def tangents_of(call):
    return {n: call[f"{n}_tangent"] for n in LEAVES if call.get(f"{n}_tangent") is not None}


def largest_score_tangent(inputs, options, tangents):
    """What the sums behind the tangent of a score, or of a sink, come to with every term
    positive."""
    query, key, _ = (x.double().abs() for x in inputs)
    given = {n: t.double().abs() for n, t in tangents.items()}
    scale = options.get("scale")
    scale = abs(query.size(-1) ** -0.5 if scale is None else scale)
    most = lambda x: x.max().item() if x.numel() else 0.0  # noqa: E731
    far = query.size(-2) + key.size(-2)
    sizes = {
        "query": lambda t: scale * most(t) * most(key.sum(-1)),
        "key": lambda t: scale * most(t) * most(query.sum(-1)),
        "alibi_slopes": lambda t: far * most(t),
    }
    return sum(sizes.get(n, most)(t) for n, t in given.items() if n != "value")


def attention_forward_jvp(call, results):
    """Holds the results and their tangents. A row with nothing to attend to stands still."""
    inputs, options = plain(call)
    tangents, dtype = tangents_of(call), inputs[0].dtype
    for n in LEAVES:
        if not is_float(call.get(n)) or n not in tangents:
            continue
        x, t = call[n], tangents[n]
        assert (x.shape, x.dtype) == (t.shape, t.dtype), f"a tangent that does not fit: {n}"
    wide = dict(zip(INPUTS, (x.double() for x in inputs), strict=True)) | widen(options)

    def truth_of(moved):
        return attend(**wide | moved)

    # No dual number may have elements that share memory, or a sign that its tangent has not.
    primals = {n: wide[n].resolve_neg().contiguous() for n in tangents}
    directions = {n: t.double().contiguous() for n, t in tangents.items()}
    if tangents:
        truths, moved = torch.func.jvp(truth_of, (primals,), (directions,))
    else:
        truths = truth_of({})
        moved = tuple(map(torch.zeros_like, truths))
    dead = truths[1] == -INF
    moved = moved[0].masked_fill(dead[..., None], 0), moved[1].masked_fill(dead, 0)
    sizes = magnitudes(*inputs, **options, grads=(None, None))
    names = ("output", "lse", "output", "lse")
    of_scores = largest_score_tangent(inputs, options, tangents)
    of_value = tangents.get("value")
    more = of_value.double().abs().max().item() if of_value is not None and of_value.numel() else 0
    for n, (name, x, truth) in enumerate(zip(names, results, (*truths, *moved), strict=True)):
        assert x.dtype == (dtype if name == "output" else compute_type(dtype)), name
        size = sizes[name]
        if n == 2:
            kept = 1 / max(1 - call["dropout_p"], 1e-3)
            terms = 2 * of_scores * size.terms + more * kept * inputs[1].size(-2)
            size = size._replace(terms=terms)
        elif n == 3:
            size = size._replace(terms=of_scores)
        close(name if n < 2 else f"the tangent of {name}", x, truth, size, dtype)


def attention_double_backward(call, results):
    """Holds the gradients of <tangents, first gradients>. Sums behind them may cancel; the bound
    leaves room for that and none for a wrong element."""
    inputs, options = plain(call)
    forward_again(torch.ops.qkv.attention_forward, call, ("output", "logsumexp"))
    known = [n if call[n] is not None else None for n in ("output_tangent", "logsumexp_tangent")]
    forward_again(torch.ops.qkv.attention_forward_jvp, call, (None, None, *known))
    tangents, grads = tangents_of(call), (call["grad_output"], call["grad_logsumexp"])
    if grads == (None, None) or not tangents:
        assert all(x is None for x in results), "a derivative of nothing"
        return
    given = dict(zip(INPUTS, inputs, strict=True)) | options
    wide = {n: x.detach().double().contiguous().requires_grad_() if is_float(x) else x
            for n, x in given.items()}  # fmt: skip
    leaves = {n: wide[n] for n in LEAVES if is_float(wide.get(n))}
    seeds = [None if g is None else g.double().requires_grad_() for g in grads]
    output, lse = testing.attention(**wide, return_lse=True)
    results_and_seeds = zip((output, lse.masked_fill(lse == -INF, 0)), seeds, strict=True)
    used, seeded = zip(*[(y, g) for y, g in results_and_seeds if g is not None], strict=True)
    grad = partial(torch.autograd.grad, materialize_grads=True)
    first = grad(used, [*leaves.values()], seeded, create_graph=True)
    first = dict(zip(leaves, first, strict=True))
    change = sum((first[n] * t.double()).sum() for n, t in tangents.items())
    leaves |= {
        n: g for n, g in zip(("grad_output", "grad_logsumexp"), seeds, strict=True) if g is not None
    }
    truths = dict(zip(leaves, grad(change, [*leaves.values()]), strict=True))
    if not all(x.isfinite().all() for x in (*inputs, *truths.values())):
        raise NotJudged("a derivative at infinity")
    names = gradient_names(torch.ops.qkv.attention_double_backward)
    size = max(1, *map(largest, truths.values()))
    for name, asked, x in zip(names, call["output_mask"], results, strict=True):
        assert (x is not None) == (asked and name in truths), f"output_mask and {name}"
        if x is not None:
            assert (x.shape, x.dtype) == (call[name].shape, call[name].dtype), name
            coarsest = max((x.dtype, inputs[0].dtype), key=lambda t: torch.finfo(t).eps)
            bound = {torch.float64: 1e-9, torch.float32: 1e-3}.get(coarsest, 2e-2) * size
            error = largest(x.double() - truths[name])
            assert error <= bound, f"{name} is off by {error:.3g}, {bound:.3g} is allowed"


# --- weights ------------------------------------------------------------------------------------


def whole_weights(x, query, S, reduce):
    """The gradient of all weights from that of the reduced ones."""
    if reduce == "heads" and query.dim() > 2:
        x = (x / query.size(-3))[..., None, :, :]
    elif reduce == "queries":
        x = x[..., None, :]
    return x.expand(*query.shape[:-1], S)


def all_dimensions(query, key, options):
    """The leading dimensions that query would have if it had all that key and options have."""
    return torch.broadcast_shapes(
        leading(query, key, options.get("enable_gqa", False)),
        *(options[n].shape[:-2] for n in ("attn_mask", "bias", "spans") if n in options),
    )


def expect_heads(call, lead):
    if call.get("reduce") == "heads" and lead and lead[-1] == 0:
        raise NotJudged("the mean over no heads: the operator's is 0, torch's is NaN")


def weights_parts(call):
    """The arguments of attention_weights, and those of an attention that gives the same numbers:
    query in full, and values that tell the keys apart."""
    (query, key), options = plain(call)
    lead = all_dimensions(query, key, options)
    expect_heads(call, lead)
    eye = torch.eye(key.size(-2), dtype=query.dtype).expand(*key.shape[:-1], -1)
    return query, key, options, query.expand(*lead, *query.shape[-2:]), eye


def weights(call, results):
    query, key, options, whole, eye = weights_parts(call)
    reduce, (x, *_) = call.get("reduce"), as_tuple(results)
    truth = testing.attention_weights(whole, key, reduce=reduce, **options)
    g = random_like([x])[0]
    found = found_gradients(call, (x,), (g,))
    grad = whole_weights(g, whole, key.size(-2), reduce)
    sizes = magnitudes(whole, key, eye, **options, grads=(grad, None))
    terms = sizes["output"].terms * (query.size(-2) if reduce == "queries" else 1)
    close("the weights", x, truth, sizes["output"]._replace(terms=terms), query.dtype)

    expected = true_weights_gradients(whole, key, eye, options, g, reduce, list(found))
    for name, y in found.items():
        truth = expected[name].sum_to_size(y.shape) if name == "query" else expected[name]
        size = times(sizes[name], whole.numel() / max(1, query.numel()) if name == "query" else 1)
        close(f"the gradient of {name}", y, truth, size, query.dtype)


def times(size, factor):
    return size._replace(terms=size.terms * factor)


def true_weights_gradients(whole, key, eye, options, g, reduce, names):
    def f(query, key, value, **more):
        return (testing.attention_weights(query, key, reduce=reduce, **more),)

    return true_gradients(f, (whole, key, eye), options, [g], names)


def weights_backward(call, results):
    query, key, options, whole, eye = weights_parts(call)
    forward_again(torch.ops.qkv.weights_forward, call, (None, "logsumexp"))
    wanted = returned(torch.ops.qkv.weights_backward, results)
    g, reduce = call["grad_weights"], call["reduce"]
    grad = whole_weights(g, whole, key.size(-2), reduce)
    sizes = magnitudes(whole, key, eye, **options, grads=(grad, None))
    expected = true_weights_gradients(whole, key, eye, options, g, reduce, list(wanted))
    for name, y in wanted.items():
        truth = expected[name].sum_to_size(y.shape) if name == "query" else expected[name]
        size = times(sizes[name], whole.numel() / max(1, query.numel()) if name == "query" else 1)
        close(f"the gradient of {name}", y, truth, size, query.dtype)


def plain_with_weights(call):
    """As plain(), of a call whose query has all leading dimensions, as they are drawn."""
    (query, key, value), options = plain(call)
    if any(all_dimensions(query, x, options) != query.shape[:-2] for x in (key, value)):
        raise NotJudged("a changed call, whose query has fewer leading dimensions than others have")
    expect_heads(call, query.shape[:-2])
    return (query, key, value), options


def output_and_weights(call):
    """A function of query, key, value and options that returns both, as the operator does."""

    def f(query, key, value, **options):
        plain = {n: x for n, x in options.items() if n != "dtype"}
        weights = testing.attention_weights(query, key, reduce=call["reduce"], **plain)
        return reference(query, key, value, **plain)[0], weights

    return f


def hold_gradients_of_both(call, found, grads):
    """Holds {name: gradient} of attention_with_weights."""
    inputs, options = plain_with_weights(call)
    query, key, _ = inputs
    eye = torch.eye(key.size(-2), dtype=query.dtype).expand(*key.shape[:-1], -1)
    whole = whole_weights(grads[1], query, key.size(-2), call["reduce"])
    sizes = magnitudes(*inputs, **options, grads=(grads[0], None))
    more = magnitudes(query, key, eye, **options, grads=(whole, None))
    expected = true_gradients(output_and_weights(call), inputs, options, grads, list(found))
    for name, x in found.items():
        size = sizes[name]
        if name != "value":
            size = size._replace(
                terms=size.terms + more[name].terms, top=max(size.top, more[name].top)
            )
        close(f"the gradient of {name}", x, expected[name], size, query.dtype)


def with_weights(call, results):
    inputs, options = plain_with_weights(call)
    dtype, results = inputs[0].dtype, results[:2]
    sizes = magnitudes(*inputs, **options, grads=(None, None))
    terms = inputs[0].size(-2) if call["reduce"] == "queries" else 1
    truths = output_and_weights(call)(*(x.double() for x in inputs), **widen(options))
    close("the output", results[0], truths[0], sizes["output"], dtype)
    weights_size = sizes["output"]._replace(terms=terms * max(1, inputs[1].size(-2)))
    close("the weights", results[1], truths[1], weights_size, dtype)
    grads = random_like(results)
    hold_gradients_of_both(call, found_gradients(call, results, grads), grads)


def with_weights_backward(call, results):
    again = forward_again(torch.ops.qkv.with_weights_forward, call, ("output", None, "logsumexp"))
    given = call["grad_output"], call["grad_weights"]
    if given == (None, None):
        assert all(x is None for x in results), "a gradient of nothing"
        return
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(given, again, strict=False)]
    wanted = returned(torch.ops.qkv.with_weights_backward, results)
    hold_gradients_of_both(call, wanted, grads)


# --- the best key -------------------------------------------------------------------------------


def change_size(inputs, tangents, options):
    """The largest change of a score, with every term positive, of all keys, hidden or not."""
    query, key, _ = (x.double() for x in inputs)
    dots = [(tangents.get("query"), key), (query, tangents.get("key"))]
    sizes = [
        score_sizes(
            a.double(), b.double(), scale=options.get("scale"),
            enable_gqa=options.get("enable_gqa", False),
        )
        for a, b in dots if a is not None and b is not None
    ]  # fmt: skip
    farthest = {"alibi_slopes": query.size(-2) + key.size(-2)}
    added = [tangents[n].double() * farthest.get(n, 1) for n in LEAVES[3:] if n in tangents]
    return sum(map(largest, (*sizes, *added)))


def attention_jvp(call, results):
    """Holds output, lse and their tangents, but no gradients."""
    inputs, options = plain(call)
    dtype, results = inputs[0].dtype, [x.detach() for x in results]
    attention(call, results[:2])
    tangents = {n: call.get(f"{n}_tangent") for n in LEAVES}
    tangents = {n: x.detach() for n, x in tangents.items() if x is not None}
    given = dict(zip(INPUTS, inputs, strict=True)) | options
    if not all(x.isfinite().all() for x in (*inputs, *tangents.values())):
        raise NotJudged("a derivative at infinity")
    if any(n in tangents and (given[n] == INF).any() for n in LEAVES[3:]):
        raise NotJudged("a derivative at infinity")
    given, moving = widen(given), widen({"query": torch.zeros_like(inputs[0])} | tangents)
    _, truths = torch.func.jvp(
        lambda *x: testing.attention(**given | dict(zip(moving, x, strict=True)), return_lse=True),
        tuple(given[n].clone() for n in moving),
        tuple(moving.values()),
    )
    top = magnitudes(*inputs, **options)["output"].top
    change, p = change_size(inputs, tangents, options), options.get("dropout_p", 0.0)
    values = largest(tangents.get("value", torch.zeros(()))) + 2 * change * largest(inputs[2])
    sizes = Magnitude(values / (1 - p) if p < 1 else 0, top), Magnitude(2 * change, top)
    for name, x, truth, size in zip(("output", "lse"), results[2:], truths, sizes, strict=True):
        assert x.dtype == (dtype if name == "output" else compute_type(dtype)), name
        close(f"the tangent of {name}", x, truth, size, dtype)


def chosen(value, index):
    """The value at the index: as if its score were the largest."""
    scores = torch.arange(value.size(-2)) == index[..., None]
    return look_up(value, scores.double(), scores)[0]


def hard(call, results):
    """Holds that the index is that of the largest score but for rounding, and the output that key's
    value."""
    inputs, options = plain(call)
    output, index = results
    truth, best = testing.hard_attention(*inputs, **options, return_index=True)
    assert output.shape == truth.shape and output.dtype == inputs[0].dtype
    assert index.shape == best.shape and index.dtype == torch.int64
    assert torch.equal(index < 0, best < 0), "rows with nothing to attend to"
    query, key, value = inputs
    S = key.size(-2)
    if S == 0 or not index.numel():
        assert not output.any()
        return
    assert int(index.max()) < S
    repeated = value
    if options.pop("enable_gqa", False):
        key, repeated = (repeat_heads(x, query) for x in (key, value))
    assert torch.equal(output, chosen(repeated, index)), "the output is not the value at the index"
    weights = testing.attention_weights(query, key, **options).expand(*index.shape, S)
    found, most = (weights.gather(-1, i.clamp(min=0)[..., None]) for i in (index, best))
    top = magnitudes(query, key, repeated[..., :1], **options)["lse"].top
    slack = 64 * torch.finfo(compute_type(query.dtype)).eps * top
    assert (found >= most * (1 - slack)).all(), "a better key than the one that was chosen"
    if not call["straight_through"]:
        hold_hard_gradients(call, results, repeated)


def hold_hard_gradients(call, results, repeated):
    """Holds the gradient of the value: its rows are sums over the rows that chose them."""
    output, index = results
    g = random_like([output])[0]
    found = found_gradients(call, (output,), (g,))
    for name, x in found.items():
        if name != "value":
            assert not x.any(), f"{name} has a gradient"
            continue
        hold_chosen_gradient(x, call, index, g)


def hold_chosen_gradient(x, call, index, g):
    leaf = call["value"].detach().double().requires_grad_()
    grouped = call.get("enable_gqa") and call["query"].dim() > 2
    heads = repeat_heads(leaf, call["query"]) if grouped else leaf
    (truth,) = torch.autograd.grad(chosen(heads, index), leaf, g.double())
    (size,) = torch.autograd.grad(chosen(heads, index), leaf, g.double().abs())
    eps = torch.finfo(x.dtype).eps
    assert ((x.double() - truth).abs() <= 8 * eps * (size + 1)).all(), "the gradient of value"


def hard_backward(call, results):
    wanted = returned(torch.ops.qkv.hard_backward, results)
    value = wanted.pop("value", None)
    assert (value is not None) == call["output_mask"][2]
    if value is not None and call["key"].size(-2) and call["index"].numel():
        hold_chosen_gradient(value, call, call["index"], call["grad_output"])
    if not call["straight_through"]:
        return
    inputs, options = plain(call)
    grads = call["grad_output"], None
    sizes = magnitudes(*inputs, **options, grads=grads)
    expected = true_gradients(attend, inputs, options, grads, list(wanted))
    for name, x in wanted.items():
        close(f"the gradient of {name}", x, expected[name], sizes[name], inputs[0].dtype)


# --- packed documents, caches -------------------------------------------------------------------


def roughly(name, x, truth, dtype):
    """Holds x where nobody has counted the sums behind it: relative to the largest element, which
    is such a sum."""
    assert x.shape == truth.shape, f"{name} has the shape {[*x.shape]}, not {[*truth.shape]}"
    if not truth.numel():
        return
    coarsest = max((x.dtype, dtype), key=lambda t: torch.finfo(t).eps)
    x, truth = x.detach().double(), truth.detach().double()
    finite = truth.masked_fill(truth.isinf(), 0)
    bound = 16 * torch.finfo(coarsest).eps + 1024 * torch.finfo(compute_type(dtype)).eps
    bound *= 1 + finite.abs().max().item()
    error = (x - truth).abs().nan_to_num(nan=INF).masked_fill(x == truth, 0).max().item()
    assert error <= bound, f"{name} is off by {error:.3g}, where {bound:.3g} is allowed"


def packed(call, results):
    """Holds packed documents."""
    results = as_tuple(results)
    if call["cu_seq_q"] is None:
        raise NotJudged("no documents any more: another operator's call")
    if not call.get("enable_gqa") and len({call[n].size(1) for n in INPUTS}) > 1:
        raise NotJudged("one head for all, which the formula by documents does not broadcast")
    (query, key, value), options = plain(call)
    dtype = query.dtype
    wide = {"query": query, "key": key, "value": value}
    wide |= {n: options.pop(n) for n in LEAVES[3:] if is_float(options.get(n))}
    wide = {n: x.double().requires_grad_(call[n].requires_grad) for n, x in wide.items()}
    truths = testing.varlen_attn(
        **wide, cu_seq_q=call["cu_seq_q"], cu_seq_k=call["cu_seq_k"], **options,
        seqused_k=call.get("seqused_k"), block_table=call.get("block_table"),
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if any(x.isnan().any() for x in truths):
        raise NotJudged("another block: what is in no document is NaN")
    for name, x, truth in zip(("output", "lse"), results, truths, strict=True):
        roughly(name, x, truth, dtype)
    grads = random_like(results)
    found = found_gradients(call, results, grads)
    pairs = [(y, g.double()) for y, g in zip(truths, grads, strict=True) if y.requires_grad]
    if not pairs or not found:
        assert all(not x.any() for x in found.values())
        return
    outputs, seeds = zip(*pairs, strict=True)
    expected = torch.autograd.grad(outputs, [wide[n] for n in found], seeds, allow_unused=True)
    for (name, x), truth in zip(found.items(), expected, strict=True):
        truth = torch.zeros_like(wide[name]) if truth is None else truth
        roughly(f"the gradient of {name}", x, truth, dtype)


def dense_results(call, results, truths):
    """Holds output and lse of attention_with_kvcache; `truths` has them and the caches after the
    call."""
    dtype = call["query"].dtype
    for name, x, truth in zip(("output", "lse"), results, truths, strict=False):
        roughly(name, x, truth, dtype)
    for name, x, truth in zip(("k_cache", "v_cache"), results[2:], truths[2:], strict=True):
        same = torch.equal(x.double().nan_to_num(), truth.nan_to_num())
        assert same and torch.equal(x.isnan(), truth.isnan()), f"{name} after the call"
