"""score_program, score_tables and score_indices of the operators: a program as text, against the
same formula by torch. tests/csrc/test_score_program.cpp has each instruction."""

import threading

import pytest
import torch
from common import dtypes_of
from torch.autograd import gradcheck, gradgradcheck

ops = torch.ops.qkv
# score * (1 + sigmoid(table[head, query - key + 5])) + row[query], of 2 heads.
TEXT = """@float 0 2 12
@float 24 4
score
head
query
key
sub 2 3
int 5
add 4 5
load 0 1 6
sigmoid 7
float 1
add 8 9
mul 0 10
load 1 2
add 11 12
"""


def formula(query, key, value, tables):
    """[..., H, L, Dv] and the weights, of the same dtype."""
    L, S = query.size(-2), key.size(-2)
    scores = query @ key.mT / query.size(-1) ** 0.5
    table, row = tables[:24].view(2, 12), tables[24:28]
    distances = torch.arange(L)[:, None] - torch.arange(S) + 5
    scores = scores * (1 + table[:, distances].sigmoid()) + row[:L, None]
    weights = scores.softmax(-1)
    return weights @ value, weights


def inputs(dtype=torch.float64, requires_grad=True):
    shapes = (2, 2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2), (28,)
    compute_type = torch.float64 if dtype == torch.float64 else torch.float32
    dtypes = dtype, dtype, dtype, compute_type
    pairs = zip(shapes, dtypes, strict=True)
    return [torch.randn(x, dtype=y, requires_grad=requires_grad) for x, y in pairs]


def attend(query, key, value, tables):
    return ops.attention(query, key, value, score_program=TEXT, score_tables=tables)


@dtypes_of("f32", "f64", "bf16", "f16")
def test_output_and_gradients(isa, dtype):
    given = inputs(dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    output, (expected, _) = attend(*given), formula(*exact)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 3e-2)
    assert (output - expected).abs().max() < tolerance * expected.abs().max()
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, given, grad)
    for x, y in zip(found, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert (x - y).abs().max() < tolerance * y.abs().max()


def test_first_and_second_derivatives(isa):
    given = inputs()
    assert gradcheck(attend, given, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(attend, given, check_fwd_over_rev=True)


def test_third_derivatives():
    """By torch's operators."""

    def second(*given):
        found = torch.autograd.grad(attend(*given).square().sum(), given, create_graph=True)
        found = torch.autograd.grad(sum(x.sin().sum() for x in found), given, create_graph=True)
        return found

    assert gradcheck(second, inputs())


def test_weights():
    query, key, value, tables = inputs()

    def weights(query, key, tables):
        return ops.attention_weights(query, key, score_program=TEXT, score_tables=tables)

    expected = formula(query, key, value, tables)[1]
    torch.testing.assert_close(weights(query, key, tables), expected)
    given = (query, key, tables)
    assert gradcheck(weights, given, check_forward_ad=True) and gradgradcheck(weights, given)


def test_packed_documents():
    """A document is a batch item, and its positions begin with 0."""
    ends = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    text = "@float 0 3 4\nscore\nbatch\nquery\nload 0 1 2\nkey\nto_float 4\nmul 3 5\nadd 0 6\n"
    query, key, value = torch.randn(3, 9, 2, 3, dtype=torch.float64, requires_grad=True)
    tables = torch.randn(12, dtype=torch.float64, requires_grad=True)

    def packed(query, key, value, tables):
        call = (query, key, value, ends, None, 4, 4)
        return ops.varlen_attention(*call, score_program=text, score_tables=tables)[0]

    output = packed(query, key, value, tables)
    for n in range(3):
        rows = slice(ends[n], ends[n + 1])
        one, keys, values = (x[rows].transpose(0, 1) for x in (query, key, value))
        more = tables.view(3, 4)[n, : one.size(1), None] * torch.arange(one.size(1))
        weights = (one @ keys.mT / 3**0.5 + more).softmax(-1)
        torch.testing.assert_close(output[rows].transpose(0, 1), weights @ values)
    given = (query.detach().requires_grad_(), key.detach(), value.detach(), tables)
    assert gradcheck(packed, given, check_forward_ad=True)


def test_documents_of_different_sizes_share_a_bias_and_a_large_table():
    """Planes of the second document would have one sum together for so large a table, those of the
    first one each their own."""
    sizes, heads, elements = ((8, 8), (8, 512)), 4, 1 << 20
    ends_q, ends_k = (torch.tensor([0, *ends], dtype=torch.int32) for ends in ((8, 16), (8, 520)))
    text = f"@float 0 {elements}\nscore\nkey\nload 0 1\nadd 0 2\n"
    rows = (16, heads, 8), (520, heads, 8), (520, heads, 8), (heads, 8, 512), (elements,)
    given = [torch.randn(shape, requires_grad=True) for shape in rows]
    query, key, value, bias, tables = given
    output = ops.varlen_attention(
        query,
        key,
        value,
        ends_q,
        ends_k,
        8,
        512,
        bias=bias,
        score_program=text,
        score_tables=tables,
    )[0]
    expected = []
    for n, (L, S) in enumerate(sizes):
        own, keys = slice(ends_q[n], ends_q[n + 1]), slice(ends_k[n], ends_k[n + 1])
        one, k, v = (x.transpose(0, 1) for x in (query[own], key[keys], value[keys]))
        scores = one @ k.mT / 8**0.5 + tables[:S] + bias[:, :L, :S]
        expected.append((scores.softmax(-1) @ v).transpose(0, 1))
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, given, grad)
    torch.testing.assert_close(found, torch.autograd.grad(torch.cat(expected), given, grad))


def test_long_programs_need_no_large_stack():
    """Second derivatives of 500 instructions keep more results than a stack of 1 MiB holds."""
    text = "score\n" + "".join(f"sin {n}\n" for n in range(500))
    found = []

    def differentiate():
        query = torch.randn(1, 1, 32, 8, requires_grad=True)
        output = ops.attention(query, query, query, score_program=text)
        (grad,) = torch.autograd.grad(output.sum(), query, create_graph=True)
        found.extend(torch.autograd.grad(grad.square().sum(), query))

    before = threading.stack_size(1 << 20)
    thread = threading.Thread(target=differentiate)
    thread.start()
    threading.stack_size(before)
    thread.join()
    assert found[0].isfinite().all()


def test_the_smallest_numbers_are_numbers():
    """And they change nothing that they are added to."""
    query, key, value = torch.randn(3, 1, 1, 4, 8, dtype=torch.float64)
    text = "score\nfloat 5e-324\nadd 0 1\n"
    output = ops.attention(query, key, value, score_program=text)
    assert torch.equal(output, ops.attention(query, key, value))


def test_caches_count_queries_from_the_last_key():
    caches, lengths = torch.randn(2, 2, 4, 20, 8), torch.tensor([13, 20])
    query, tables = torch.randn(2, 4, 3, 8), torch.randn(40)
    text = "@float 0 40\nscore\nquery\nkey\nsub 1 2\nint 19\nadd 3 4\nload 0 5\nadd 0 6\n"
    output, _ = ops.attention_with_kvcache(
        query, *caches, cache_seqlens=lengths, score_program=text, score_tables=tables
    )
    for b, S in enumerate(lengths.tolist()):
        scores = query[b] @ caches[0, b, :, :S].mT / 8**0.5
        distances = torch.arange(S - 3, S)[:, None] - torch.arange(S)
        expected = (scores + tables[distances + 19]).softmax(-1) @ caches[1, b, :, :S]
        torch.testing.assert_close(output[b], expected)


@pytest.mark.parametrize("size", [4, 70000])  # whose sums are in double, and in float32
def test_gradients_of_tables_have_the_same_bits_on_any_number_of_threads(size):
    query, key, value = torch.randn(3, 2, 2, 300, 16)
    tables = torch.randn(size, requires_grad=True)
    text = f"@float 0 {size}\nscore\nquery\nkey\nadd 1 2\nint {size}\nrem 3 4\nload 0 5\nadd 0 6\n"
    threads, found = torch.get_num_threads(), []
    for n in (1, 2, 3, 7):
        torch.set_num_threads(n)
        output = ops.attention(query, key, value, score_program=text, score_tables=tables)
        found += torch.autograd.grad(output.sin().sum(), tables)
    torch.set_num_threads(threads)
    assert all(x.equal(found[0]) for x in found)
    scores = query.double() @ key.double().mT / 4
    scores += tables.double()[(torch.arange(300)[:, None] + torch.arange(300)) % size]
    expected = (scores.softmax(-1) @ value.double()).sin().sum()
    (expected,) = torch.autograd.grad(expected, tables)
    assert (found[0] - expected).abs().max() < 2e-5 * expected.abs().max()


@dtypes_of("f32", "f64")
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("L", [1, 5, 16, 37])
def test_tables_have_nothing_of_lanes_without_a_row(isa, dtype, order, L):
    """Their scores are those of a query of zeros: without a logarithm, and, with what is added
    here, so large that their exponentials are infinite."""
    query, key, value = (torch.randn(1, 1, n, 8, dtype=dtype) for n in (L, 37, 37))
    large = 88.9 if dtype == torch.float32 else 709.9
    log = "score\nabs 0\nlog 1\nkey\nload 0 3\nmul 2 4\nadd 0 5\n"
    add = f"score\nkey\nload 0 1\nfloat {large}\nadd 2 3\nadd 0 4\n"
    scores = query.double() @ key.double().mT / 8**0.5
    for text, function in (log, lambda t: scores.abs().log() * t), (add, lambda t: t + large):
        tables = torch.randn(37, dtype=dtype, requires_grad=True)
        text = "@float 0 37\n" + text
        found = ops.attention(query, key, value, score_program=text, score_tables=tables)
        true = (scores + function(tables.double())).softmax(-1) @ value.double()
        for _ in range(order):
            found, true = (
                torch.autograd.grad(x.sin().sum(), tables, create_graph=True)[0]
                for x in (found, true)
            )
        assert (found - true).abs().max() < 3e-4 * true.abs().max()


def test_gradient_lies_like_its_table():
    """As the Meta kernel says, which torch.compile holds the CPU kernel to."""
    query, key, value, _ = inputs(torch.float32)
    tables = torch.randn(28, 2).t().requires_grad_()
    output = attend(query, key, value, tables)
    (found,) = torch.autograd.grad(output.sum(), tables)
    dense = tables.detach().contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(attend(query, key, value, dense).sum(), dense)
    assert found.stride() == tables.stride() and torch.equal(found, expected)


WRONG = {
    "attention: score program, line 2 .'erf 0'.: there is no instruction 'erf'":
        {"score_program": "score\nerf 0"},
    "attention: score_tables is given, but there is no score_program":
        {"score_tables": torch.zeros(3)},
    "attention: score_tables is None, but score_program reads 28 elements of it":
        {"score_program": TEXT},
    r"attention: score_tables has the shape \[7\], but score_program reads 28 elements":
        {"score_program": TEXT, "score_tables": torch.zeros(7)},
    r"attention: score_tables has the shape \[32\], but score_program reads 28 elements":
        {"score_program": TEXT, "score_tables": torch.zeros(32)},
    r"attention: score_tables has the shape \[3, 28\], but one row is expected, or R for R equal "
    "parts of the 2 batch items": {"score_program": TEXT, "score_tables": torch.zeros(3, 28)},
    "attention: score_tables is float64, but float32 is expected":
        {"score_program": TEXT, "score_tables": torch.zeros(28).double()},
    "attention: score_indices is int64, but int32 is expected":
        {"score_program": "score", "score_indices": torch.zeros(3).long()},
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_errors_name_the_argument(what):
    query, key, value, _ = inputs(torch.float32)
    with pytest.raises((RuntimeError, ValueError), match=what):
        ops.attention(query, key, value, **WRONG[what])
