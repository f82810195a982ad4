"""Models exported to ONNX, run by onnxruntime, against float64."""

import contextlib
import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from common import attend, compute_type, dtypes_of
from forks import run_forked
from torch.testing import assert_close

import qkv
from qkv import testing

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime", minversion="1.28")  # with masks in float64

import qkv.integrations.onnx  # noqa: E402

B, H, L, S, D, DV = 2, 4, 5, 7, 8, 6
AUTO = torch.export.Dim.AUTO
# Of torch.export, about itself.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Calls(torch.nn.Module):
    """A model that makes several calls, of tensors of its own each, since an export takes seconds
    however small the model is. cases: (names of the tensors, what else the call is told) each.
    Query, key and value are cast to dtype, and results to one that numpy has."""

    def __init__(self, function, cases, dtype=torch.float32):
        super().__init__()
        self.function, self.cases, self.dtype = function, cases, dtype

    def forward(self, *tensors):
        given, results = iter(tensors), []
        for names, constants in self.cases:
            call = {name: next(given) for name in names}
            call |= {x: call[x].to(self.dtype) for x in ("query", "key", "value") if x in call}
            found = self.function(**call, **constants)
            results += found if isinstance(found, tuple) else (found,)
        return tuple(x.to(compute_type(x.dtype)) for x in results)


def export(model, args, **options):
    """What torch.onnx.export returns, which onnx finds valid."""
    program = torch.onnx.export(
        model.eval(),
        args,
        dynamo=True,
        verbose=False,
        custom_translation_table=qkv.integrations.onnx.translations(),
        **({"opset_version": 23} | options),
    )
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program


def export_calls(cases, function=qkv.attention, dtype=torch.float32, **options):
    """cases: (tensors by name, what else the call is told) for each name."""
    model = Calls(function, [([*tensors], told) for tensors, told in cases.values()], dtype)
    return export(model, flat(cases), **options)


def flat(cases):
    return tuple(x for tensors, _ in cases.values() for x in tensors.values())


def nodes(program):
    return [node.op_type for node in program.model.graph]


def run(program, tensors):
    """The results of the model in onnxruntime. tensors: its inputs, in their order."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    names = [x.name for x in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, tensors, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, given)]


def check_calls(program, cases, dtype=torch.float32):
    """No error against float64 is larger than torch's."""
    found = iter(run(program, flat(cases)))
    for name, (tensors, told) in cases.items():
        given = {
            n: x.to(dtype) if n in ("query", "key", "value") else x for n, x in tensors.items()
        }
        told = {"return_lse": False} | told
        results = 1 + told.pop("return_lse")
        truth = testing.attention(**given, **told, return_lse=True)[:results]
        torchs = attend(**given, **told)[:results]
        outputs = [next(found).to(x.dtype) for x in torchs]
        testing.assert_close(outputs, truth, torchs, name=name)
    assert not [*found]


def check(cases, dtype=torch.float32, **options):
    """Exports qkv.attention of these, runs it, and returns the names of the nodes."""
    program = export_calls(cases, dtype=dtype, **options)
    check_calls(program, cases, dtype)
    return nodes(program)


def inputs(*leading, L=L, S=S, H=H, Hkv=None):
    leading, Hkv = leading or (B,), H if Hkv is None else Hkv
    return {
        "query": torch.randn(*leading, H, L, D),
        "key": torch.randn(*leading, Hkv, S, D),
        "value": torch.randn(*leading, Hkv, S, DV),
    }


def visible(*leading, L=L, S=S):
    """A boolean mask in which the second query sees nothing."""
    mask = torch.rand(*leading, L, S) < 0.6
    mask[..., 1, :] = False
    return mask


def added(*leading):
    """A floating mask in which the third query sees nothing."""
    mask = torch.randn(*leading, L, S)
    mask[..., 2, :] = float("-inf")
    return mask


def fused():
    """What ONNX's Attention computes."""
    return {
        "nothing": ({}, {}),
        "causal": ({}, {"is_causal": True}),
        "bool": ({"attn_mask": visible()}, {}),
        "float": ({"attn_mask": added(B, 1)}, {}),
        "of keys": ({"attn_mask": torch.rand(B, 1, 1, S) < 0.6}, {}),
        "of queries": ({"bias": torch.randn(H, L, 1)}, {}),
        "least number": ({"attn_mask": torch.full((L, S), torch.finfo(torch.float).min)}, {}),
        "all masks": (
            {"attn_mask": visible(B, 1), "bias": added(H)},
            {"is_causal": True, "window_size": (3, 1)},
        ),
        "two floats": ({"attn_mask": added(), "bias": added(1, H)}, {}),
        "window": ({}, {"window_size": (2, 0)}),
        "open window": ({}, {"window_size": (-1, 1)}),
        "scale": ({}, {"scale": 2.0}),
        "no scale": ({}, {"scale": 0.0}),
        "negative scale": ({}, {"scale": -0.3}),
        "softcap": ({}, {"softcap": 0.7}),
        "ALiBi": ({"alibi_slopes": torch.rand(B, H)}, {}),
        "sinks": ({"sinks": torch.randn(H)}, {}),
        "sinks and masks": (
            {"sinks": torch.randn(B, H), "attn_mask": visible(), "alibi_slopes": torch.rand(H)},
            {"is_causal": True},
        ),
    }


def composed():
    """What takes other nodes."""
    return {
        "softcap, causal": ({}, {"softcap": 0.7, "is_causal": True}),
        "softcap, bool": ({"attn_mask": visible()}, {"softcap": 0.7}),
        "everything": (
            {
                "attn_mask": visible(B, 1),
                "bias": added(H),
                "alibi_slopes": torch.rand(H),
                "sinks": torch.randn(H),
            },
            {"softcap": 0.7, "window_size": (4, 2), "is_causal": True, "scale": -0.5},
        ),
    }


def each(cases):
    """With query, key and value."""
    return {name: (inputs() | tensors, told) for name, (tensors, told) in cases().items()}


def test_options():
    cases = each(fused) | each(composed)
    cases = {
        name: (tensors, told | {"return_lse": True}) for name, (tensors, told) in cases.items()
    }
    assert check(cases).count("Attention") == len(fused())


@pytest.mark.long
def test_output_alone():
    cases = each(lambda: fused() | composed())
    assert "ReduceLogSumExp" not in check(cases)


def test_one_node_where_one_will_do():
    square = inputs(L=S)
    assert check({"causal": (square, {"is_causal": True})}) == ["Attention"]
    grouped = inputs(Hkv=2)
    assert check({"grouped": (grouped, {"enable_gqa": True})}) == ["Attention"]


def test_causal_is_aligned_top_left_and_windows_bottom_right():
    check(
        {
            f"{L} queries, {S} keys, {told}": (inputs(L=L, S=S), told)
            for L, S in ((4, 9), (9, 4), (6, 6))
            for told in ({"is_causal": True}, {"window_size": (1, 1)})
        }
    )


@pytest.mark.long
def test_what_sees_nothing_is_zero():
    """Exactly, whatever the runtime makes of it."""
    names = ("bool", "float", "all masks", "softcap, bool")
    cases = each(lambda: {name: (fused() | composed())[name] for name in names})
    for name, output in zip(names, run(export_calls(cases), flat(cases)), strict=True):
        nothing = {"float": [2], "all masks": [1, 2]}.get(name, [1])
        assert (output[:, :, nothing] == 0).all() and output[:, :, 0].any()


def heads(Hk, Hv):
    tensors = inputs()
    return tensors | {
        "key": tensors["key"][:, :Hk].clone(),
        "value": tensors["value"][:, :Hv].clone(),
    }


def test_heads():
    grouped = {"enable_gqa": True}
    check(
        {
            "grouped": (heads(2, 2), grouped),
            "unlike": (heads(2, 1), grouped),
            "softcap": (heads(2, 1), grouped | {"softcap": 0.7, "is_causal": True}),
            "one": (heads(1, 1), {}),
            "one value": (heads(H, 1), {}),
            "one query": (inputs() | {"query": torch.randn(1, L, D)}, {}),
            "no batch": (of_rank(3), {"is_causal": True}),
            "batches of one": (inputs(2, 3) | heads_of_one_batch(), {}),
        }
    )


def heads_of_one_batch():
    return {name: torch.randn(1, 1, H, S, d) for name, d in (("key", D), ("value", DV))}


def of_rank(rank):
    """Tensors of which each has some of the leading dimensions, and only the values have all."""
    leading = (3, 1, B, H)[6 - rank :]
    heads = leading[-1:]
    return {
        "query": torch.randn(*leading[1:], L, D),
        "key": torch.randn(*heads, S, D),
        "value": torch.randn(*leading, S, DV),
        "attn_mask": visible(*leading[:1], *(1,) * (rank - 3)),
        "bias": added(),
        "alibi_slopes": torch.rand(heads),
        "sinks": torch.randn(leading[-2:]),
    }


@pytest.mark.long
def test_leading_dimensions():
    told = {"is_causal": True, "return_lse": True}
    check({f"rank {rank}": (of_rank(rank), told) for rank in (2, 3, 4, 5, 6)})


@pytest.mark.one_in(9)
@dtypes_of("f64", "f16", "bf16")
def test_dtypes(dtype):
    """Half precision is rounded once, at the end, and a float32 mask not at all."""
    check(each(lambda: fused() | composed()), dtype)


def dynamic(L, S, B):
    """Cases of these sizes, and which of their dimensions those are."""
    square = inputs(B, L=L, S=L)
    masks = {
        "attn_mask": visible(B, 1, L=L, S=S),
        "bias": torch.randn(H, L, S),
        "alibi_slopes": torch.rand(B, H),
        "sinks": torch.randn(H),
    }
    of_masks = ({0: AUTO, 2: AUTO, 3: AUTO}, {1: AUTO, 2: AUTO}, {0: AUTO}, {})
    ranks = inputs(B, 3, L=L, S=S) | {"attn_mask": visible(B, 1, 1, L=L, S=S)}
    of_ranks = ({0: AUTO, 3: AUTO},) * 3 + ({0: AUTO, 3: AUTO, 4: AUTO},)
    of_inputs = ({0: AUTO, 2: AUTO},) * 3
    grouped = {"enable_gqa": True, "softcap": 2.0, "is_causal": True}
    cases = {
        "nothing": (inputs(B, L=L, S=S), {}, of_inputs),
        "causal": (inputs(B, L=L, S=S), {"is_causal": True, "return_lse": True}, of_inputs),
        "square": (square, {"is_causal": True}, of_inputs),
        "window": (inputs(B, L=L, S=S), {"window_size": (2, 1)}, of_inputs),
        "of keys": (
            inputs(B, L=L, S=S) | {"attn_mask": torch.rand(B, 1, 1, S) < 0.6},
            {},
            (*of_inputs, {0: AUTO, 3: AUTO}),
        ),
        "masks": (
            inputs(B, L=L, S=S) | masks,
            {"is_causal": True, "return_lse": True},
            (*of_inputs, *of_masks),
        ),
        "grouped": (inputs(B, L=L, S=S, Hkv=2), grouped, of_inputs),
        "rank 5": (ranks | {"alibi_slopes": torch.rand(3, H)}, {}, (*of_ranks, {})),
    }
    shapes = tuple(shape for _, _, shapes in cases.values() for shape in shapes)
    return {name: case[:2] for name, case in cases.items()}, shapes


def test_dynamic_shapes():
    """One export, in which B, L and S are unknown, and runs of several sizes."""
    cases, shapes = dynamic(L, S, B)
    program = export_calls(cases, dynamic_shapes=(shapes,))
    for sizes in ((L, S, B), (9, 3, 5), (4, 4, 1)):
        check_calls(program, dynamic(*sizes)[0])


@pytest.mark.long
def test_a_window_that_is_computed():
    """From the size of an input; it may be open, too."""

    def call(query, key, value):
        return qkv.attention(query, key, value, window_size=(query.shape[2] - 4, query.shape[2]))

    tensors = inputs(L=6, S=9)
    program = export_calls({"": (tensors, {})}, call, dynamic_shapes=(({2: AUTO},) * 3,))
    for L in (6, 4, 3):
        check_calls(program, {"": (inputs(L=L, S=9), {"window_size": (L - 4, L)})})


@pytest.mark.long
def test_layers():
    """Smoothing has a window that follows from a tensor, and scores in float64."""
    smoothing = qkv.nn.GaussianSmoothing(1.0)
    check_model(smoothing, lambda B, L: (torch.randn(B, L, 3),))
    additive = qkv.nn.AdditiveAttention(D, D, 4)
    check_model(additive, lambda B, L: (*torch.randn(2, B, L, D), torch.randn(B, L, DV)))
    dictionary = qkv.nn.SoftDictionary(torch.randn(S, D), torch.randn(S, DV))
    check_model(dictionary, lambda B, L: (torch.randn(B, L, D),))


def test_weights():
    cases = {
        reduce: (inputs() | {"attn_mask": visible(), "sinks": torch.randn(H)}, {"reduce": reduce})
        for reduce in (None, "heads", "queries")
    }
    program = export_calls(cases, qkv.attention_with_weights)
    assert nodes(program).count("Attention") == len(cases)
    found = run(program, flat(cases))
    for i, (tensors, _) in enumerate(cases.values()):
        testing.assert_close(found[2 * i], testing.attention(**tensors), attend(**tensors)[0])
        del tensors["value"]
    alone = run(export_calls(cases, qkv.attention_weights), flat(cases))
    for i, (tensors, told) in enumerate(cases.values()):
        truth = testing.attention_weights(**tensors, **told)
        torchs = testing.attention_weights(**tensors, **told, dtype=torch.float32)
        testing.assert_close([found[2 * i + 1], alone[i]], [truth] * 2, [torchs] * 2)


@pytest.mark.long
def test_later_opsets_and_no_optimizer():
    cases = each(fused)
    for options in ({"opset_version": 24}, {"opset_version": 25}, {"optimize": False}):
        program = export_calls(cases, **options)
        assert program.model.opset_imports[""] == options.get("opset_version", 23)
        check_calls(program, cases)


@pytest.mark.long
def test_the_operator_itself():
    cases = {"": (inputs(), {})}
    check_calls(export_calls(cases, torch.ops.qkv.attention), cases)


@pytest.mark.long
def test_a_decomposed_program():
    cases = {"": (inputs() | {"bias": added()}, {})}
    model = Calls(qkv.attention, [([*tensors], told) for tensors, told in cases.values()]).eval()
    decomposed = torch.export.export(model, flat(cases)).run_decompositions()
    table = qkv.integrations.onnx.translations()
    program = torch.onnx.export(
        decomposed, opset_version=23, custom_translation_table=table, verbose=False
    )
    check_calls(program, cases)


@pytest.mark.long
def test_vmap():
    def mapped(query, key, value):
        attend = torch.func.vmap(lambda *x: qkv.attention(*x, is_causal=True))
        return attend(query, key, value)

    tensors = inputs()
    program = export_calls({"": (tensors, {})}, mapped)
    check_calls(program, {"": (tensors, {"is_causal": True})})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("replaced", [False, True])
def test_sdpa(replaced):
    """Of any rank, with any mask; and, if it is replaced, with a mask beside is_causal."""
    tensors = {"query": torch.randn(H, L, D), "key": torch.randn(1, H, S, D)}
    tensors |= {"value": torch.randn(H, S, DV), "attn_mask": visible()}
    cases = {"": (tensors, {"is_causal": replaced})}
    with qkv.replace_sdpa() if replaced else contextlib.nullcontext():
        program = export_calls(cases, F.scaled_dot_product_attention)
    check_calls(program, cases)


class SelfAttention(torch.nn.Module):
    def __init__(self, need_weights, **options):
        super().__init__()
        self.layer = qkv.nn.MultiheadAttention(32, 4, batch_first=True, **options)
        self.need_weights = need_weights

    def forward(self, x, padding):
        results = self.layer(
            x, x, x, key_padding_mask=padding, need_weights=self.need_weights
        )  # fmt: skip
        return results if self.need_weights else results[0]


def check_model(model, make, dynamic_shapes=None, attentions=1, **options):
    """make(B, L): inputs. The exported model returns what the model does."""
    program = export(model, make(2, 6), dynamic_shapes=dynamic_shapes, **options)
    assert nodes(program).count("Attention") == attentions
    for sizes in ((5, 9), (2, 6)) if dynamic_shapes else ((2, 6),):
        args = make(*sizes)
        with torch.no_grad():
            expected = model(*args)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert_close(tuple(run(program, args)), expected, atol=1e-5, rtol=1e-5)


def padded(B, L):
    """A batch, and which of its last positions are padding; of the last item all are."""
    padding = torch.arange(L) >= torch.linspace(L, 0, B).long().unsqueeze(1)
    return torch.randn(B, L, 32), padding


@pytest.mark.one_in(2)
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights):
    check_model(SelfAttention(need_weights), padded, ({0: AUTO, 1: AUTO},) * 2)


@pytest.mark.long
def test_encoder_under_replace_sdpa():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with qkv.replace_sdpa():
        check_model(encoder, lambda B, L: padded(B, L)[:1], ({0: AUTO, 1: AUTO},), attentions=2)


@pytest.mark.long
def test_converted_encoder():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    qkv.convert(encoder)
    check_model(encoder, lambda B, L: padded(B, L)[:1], ({0: AUTO, 1: AUTO},), attentions=2)


@pytest.mark.long
def test_timm():
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)
    with qkv.replace_sdpa():
        check_model(model, lambda B, L: (torch.randn(B, 3, 32, 32),), attentions=2)


TRANSFORMER = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "attn_implementation": "qkv",
}  # fmt: skip


class Transformer(torch.nn.Module):
    def __init__(self, model, **call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, **self.call)[0]


def tokens(B, L):
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, -3:] = 0
    return torch.randint(0, 50, (B, L)), mask


@pytest.mark.long
@pytest.mark.parametrize("name", ["Bert", "Llama", "Gemma2"])
def test_transformers(name):
    """BERT and Llama with unknown sizes. Gemma 2 caps scores and masks them. What rotates is not
    optimized by the exporter, which fuses it into an operator that fails for more than one item."""
    transformers = pytest.importorskip("transformers")
    importlib.import_module("qkv.integrations.transformers").register()
    more = {} if name == "Bert" else {"num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**TRANSFORMER, **more)
    model = Transformer(
        getattr(transformers, f"{name}Model")(config),
        **({} if name == "Bert" else {"use_cache": False}),
    )
    dynamic = None if name == "Gemma2" else ({0: AUTO, 1: AUTO},) * 2
    attentions = 0 if name == "Gemma2" else 2
    check_model(model, tokens, dynamic, attentions, optimize=name == "Bert")


def assert_refused(message, call, tensors=None, **options):
    cases = {"": (tensors or inputs(L=S), {})}
    with pytest.raises(torch.onnx.OnnxExporterError, match=message):
        export_calls(cases, call, **options)


def test_refuses_dropout():
    for call in (qkv.attention, F.scaled_dot_product_attention):
        assert_refused(
            "qkv.attention to ONNX: dropout_p is (0.5|above 0), expected 0",
            lambda call=call, **x: call(**x, dropout_p=0.5),
        )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("opset", [18, 22])
def test_refuses_opsets_without_attention(opset):
    assert_refused(
        f"opset_version is {opset}, expected at least 23", qkv.attention, opset_version=opset
    )


def test_refuses_packed_documents():
    tensors = {n: torch.randn(6, H, D) for n in ("query", "key", "value")}

    def packed(query, key, value):
        ends = torch.tensor([0, 2, 6], dtype=torch.int32)
        return qkv.varlen_attn(query, key, value, ends, ends, 4, 4)

    assert_refused("cu_seq_q is given, but Attention knows no packed documents", packed, tensors)


def test_refuses_score_functions():
    assert_refused(
        "score_program is given, but Attention knows no score functions",
        functools.partial(qkv.flex_attention, score_mod=lambda s, b, h, i, j: s + 0.1 * h),
    )


def test_refuses_other_operators():
    assert_refused("No ONNX function found for .*qkv.hard_forward", qkv.hard_attention)
    layer = qkv.nn.SelfAttention(8, 2, rotary=10_000.0).eval()
    with pytest.raises(torch.onnx.OnnxExporterError, match="No ONNX function found for .*rotate"):
        export(layer, (torch.randn(1, 3, 8),))


def test_onnxscript_is_imported_when_it_is_used():
    code = "import sys, qkv, qkv.integrations.onnx; print('onnxscript' in sys.modules)"
    assert run_forked(code).strip() == "False"


def test_without_onnxscript(monkeypatch):
    monkeypatch.setattr(qkv.integrations.onnx, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs onnxscript.*pip install 'qkv\[onnx\]'"):
        qkv.integrations.onnx.translations()
