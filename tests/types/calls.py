"""What a type checker makes of calls of qkv: `make lint` has pyright read it, and nothing runs it.
A call that must be refused carries an ignore, which is itself an error where it is not needed."""

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest
from typing_extensions import assert_type

import qkv
from qkv.distributed import ring_attention, shard, unshard

Pair = tuple[Tensor, Tensor]


def attention(x: Tensor, lse: bool) -> None:
    assert_type(qkv.attention(x, x, x), Tensor)
    assert_type(qkv.attention(x, x, x, None, 0.1, True, return_lse=False, softcap=2.0), Tensor)
    assert_type(qkv.attention(x, x, x, x, return_lse=True, bias=x, window_size=(3, 0)), Pair)
    assert_type(qkv.attention(x, x, x, return_lse=lse), Tensor | Pair)
    qkv.attention(x, x, x, sofcap=2.0)  # pyright: ignore[reportCallIssue]
    qkv.attention(x, x, x, softcap="2")  # pyright: ignore[reportArgumentType]
    qkv.attention(x, x)  # pyright: ignore[reportCallIssue]


def others(x: Tensor) -> None:
    assert_type(qkv.attention_weights(x, x, reduce="heads", sinks=x), Tensor)
    assert_type(qkv.attention_with_weights(x, x, x, reduce="heads"), tuple[Tensor, Tensor])
    qkv.attention_weights(x, x, reduce="keys")  # pyright: ignore[reportArgumentType]
    assert_type(qkv.hard_attention(x, x, x, straight_through=True), Tensor)
    assert_type(qkv.hard_attention(x, x, x, return_index=True, scale=0.5), Pair)
    qkv.hard_attention(x, x, x, sinks=x)  # pyright: ignore[reportCallIssue]
    assert_type(qkv.varlen_attn(x, x, x, x, None, 8, 8, window_size=(-1, 0)), Tensor)
    assert_type(
        qkv.varlen_attn(x, x, x, x, x, 8, 8, return_aux=AuxRequest(lse=True)), Tensor | Pair
    )
    assert_type(qkv.attention_with_kvcache(x, x, x, x, x, cache_seqlens=3, causal=True), Tensor)
    assert_type(qkv.attention_with_kvcache(x, x, x, return_softmax_lse=True), Pair)
    assert_type(
        qkv.attention_jvp(x, x, x, is_causal=True, bias=x, query_tangent=x, bias_tangent=None),
        tuple[Tensor, Tensor, Tensor, Tensor],
    )
    qkv.attention_jvp(x, x, x, tangents=x)  # pyright: ignore[reportCallIssue]
    assert_type(qkv.merge([x, x], [x, x]), Pair)
    assert_type(qkv.rotate(x, x, x, x, query_weight=x, interleaved=True), Pair)


def latent(x: Tensor, lse: bool) -> None:
    assert_type(qkv.latent_attention(x, x, x, None, x, x, is_causal=True, absorb=True), Tensor)
    assert_type(qkv.latent_attention(x, x, x, x, x, x, x, sinks=x, return_lse=True), Pair)
    assert_type(qkv.latent_attention(x, x, x, x, x, x, return_lse=lse), Tensor | Pair)
    qkv.latent_attention(x, x, x, x, x, x, enable_gqa=True)  # pyright: ignore[reportCallIssue]
    cached = qkv.latent_attention_with_kvcache
    assert_type(cached(x, x, x, x, x, x, cache_seqlens=3, cache_scale=x, causal=True), Tensor)
    assert_type(cached(x, x, x, x, x, x, x, return_softmax_lse=True), Pair)
    cached(x, x, x, x, x, scale=2.0)  # pyright: ignore[reportCallIssue]


def module(x: Tensor) -> torch.Tensor:
    return torch.nn.functional.relu(qkv.attention(x, x, x))


def distributed(x: Tensor, lse: bool) -> None:
    assert_type(ring_attention(x, x, x, is_causal=True, seqlen=3, sinks=x), Tensor)
    assert_type(ring_attention(x, x, x, method="heads", return_lse=True), Pair)
    assert_type(ring_attention(x, x, x, return_lse=lse), Tensor | Pair)
    ring_attention(x, x, x, method="tree")  # pyright: ignore[reportArgumentType]
    assert_type(unshard(shard(x, -2, value=-1), -2, seqlen=3), Tensor)
