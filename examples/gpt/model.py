"""A byte-level GPT: pre-norm, rotary positions, and the attention function as an argument."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkv

VOCAB_SIZE = 256  # a token is a byte
# Rotary positions: from one byte to the next, a head's pairs of features turn by angles between 1
# and about 1 / ROPE_BASE. The usual 10,000 is for longer contexts: a third of the 16 pairs of a
# head would turn by less than a radian in 512 bytes.
ROPE_BASE = 500.0


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 2
    heads: int = 8
    head_dim: int = 32
    context: int = 512  # the longest distance, in bytes, that attention spans
    dropout: float = 0.0  # of attention's weights, in training

    def __post_init__(self):
        for name in ("layers", "heads", "head_dim", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected 0 or more and less than 1, got {self.dropout}")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def load_attention(name: str):
    """The attention function "qkv" or "torch". Both have the same arguments, with the same
    meaning."""
    if name == "torch":
        return F.scaled_dot_product_attention
    if name == "qkv":
        return torch.ops.qkv.attention
    raise ValueError(f"attention: expected 'qkv' or 'torch', got {name!r}")


def rotary_table(start: int, length: int, head_dim: int) -> Tensor:
    """exp(i * position * frequency), for `length` positions from `start` on: [length, 1, D/2]."""
    frequency = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(start, start + length, dtype=torch.float64), frequency)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)[:, None, :]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary position embedding of x [B, L, H, D]: neighbours turn as one complex number."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(-2)


class KeyValueCache:
    """The keys and values of one layer's last `context` positions, for generating byte by byte, in
    memory that is taken once. A subclass says which attention reads them."""

    def __init__(self, config: ModelConfig):
        self.context = config.context
        self.keys, self.values = torch.empty(
            2, 1, config.heads, 2 * config.context, config.head_dim
        ).unbind()
        self.length = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Appends keys and values [1, H, L, D] and attends to what is kept. L is 1, or at first at
        most `context`."""
        added = key.size(-2)
        if self.length + added > self.keys.size(-2):
            self._forget()
        output = self._append_and_attend(query, key, value)
        self.length += added
        return output

    def _append_and_attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError

    def _memory(self) -> tuple[Tensor, ...]:
        """All that has a row for each position, [1, H, positions, numbers of one]."""
        return self.keys, self.values

    def _forget(self) -> None:
        """Forgets all positions but those that the next one looks back to. This happens once in
        `context` positions."""
        kept = slice(self.length - self.context + 1, self.length)
        for x in self._memory():
            x[..., : self.context - 1, :] = x[..., kept, :].clone()
        self.length = self.context - 1


class QkvCache(KeyValueCache):
    def _append_and_attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return qkv.attention_with_kvcache(
            query, self.keys, self.values, key, value,
            cache_seqlens=self.length, causal=True, window_size=(self.context - 1, 0),
        )  # fmt: skip


class Int8Cache(KeyValueCache):
    """Each number in one byte, and a scale for each position of each head."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.keys, self.values = self.keys.to(torch.int8), self.values.to(torch.int8)
        self.scales = [torch.empty(1, config.heads, 2 * config.context, 1) for _ in range(2)]

    def _memory(self) -> tuple[Tensor, ...]:
        return self.keys, self.values, *self.scales

    def _append_and_attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k_scale, v_scale = (x.squeeze(-1) for x in self.scales)
        return qkv.attention_with_kvcache(
            query, self.keys, self.values, key, value, k_scale=k_scale, v_scale=v_scale,
            cache_seqlens=self.length, causal=True, window_size=(self.context - 1, 0),
        )  # fmt: skip


class TorchCache(KeyValueCache):
    """torch's attention knows no cache: it is written to, and the part that counts is cut out."""

    def _append_and_attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = self.length + key.size(-2)
        self.keys[..., self.length : end, :] = key
        self.values[..., self.length : end, :] = value
        seen = slice(max(0, end - self.context), end)
        return F.scaled_dot_product_attention(
            query, self.keys[..., seen, :], self.values[..., seen, :],
            is_causal=query.size(-2) > 1,  # several queries are the first, and see no others
        )  # fmt: skip


CACHES = {"qkv": QkvCache, "torch": TorchCache}  # by the name of the attention that reads them


class SelfAttention(qkv.nn.SelfAttention):
    """qkv's layer, around any attention."""

    def __init__(self, config: ModelConfig, attention):
        rotary = qkv.nn.Rotary(config.head_dim, ROPE_BASE, interleaved=True)
        super().__init__(config.width, config.heads, rotary=rotary, dropout=config.dropout)
        self.attention = attention

    def forward(self, x: Tensor, table: Tensor, attend=None) -> Tensor:
        """`attend`, a function of query, key and value, replaces causal attention within x."""
        query, key, value = self.heads_of(x, table)
        if attend is None:
            dropout = self.dropout if self.training else 0.0
            output = self.attention(query, key, value, dropout_p=dropout, is_causal=True)
        else:
            output = attend(query, key, value)
        return self.joined(output.transpose(1, 2).flatten(-2))

    def heads_of(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [B, H, L, D], of x [B, L, width]."""
        table = table.squeeze(-2)
        return self.project(x, rotary=(table.real, table.imag))[:3]

    def joined(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads)


class TorchSelfAttention(SelfAttention):
    """The same layer of torch's operators alone."""

    def heads_of(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = F.linear(x, self.qkv_proj.weight).unflatten(-1, (-1, self.head_dim))
        query_key, value = projected.split((2 * self.num_heads, self.num_heads), dim=-2)
        query, key = rotate(query_key, table).chunk(2, dim=-2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def joined(self, heads: Tensor) -> Tensor:
        return F.linear(heads, self.o_proj.weight)


def layer_around(attention) -> type[SelfAttention]:
    """torch's attention, timed or not (gpt.timer), stands in a layer that is torch's throughout."""
    is_torch = getattr(attention, "attention", attention) is F.scaled_dot_product_attention
    return TorchSelfAttention if is_torch else SelfAttention


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = layer_around(attention)(config, attention)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor, table: Tensor, attend=None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table, attend)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes [B, L] in, logits [B, L, 256] for the byte that follows each.

    `attention(query, key, value, dropout_p=..., is_causal=...)` and the layer around it are all
    that differs between a model on qkv and a model on torch.
    """

    def __init__(self, config: ModelConfig, attention):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCAB_SIZE, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.to_logits = nn.Linear(config.width, VOCAB_SIZE, bias=False)
        self.to_logits.weight = self.embedding.weight  # one table reads bytes and writes them
        table = rotary_table(0, config.context, config.head_dim)
        self.register_buffer("rotary", table, persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, Block):  # visited after its children; starts as the identity
            nn.init.zeros_(module.attention.o_proj.weight)
            nn.init.zeros_(module.mlp[-1].weight)

    def forward(self, tokens: Tensor, table: Tensor | None = None, attends=None) -> Tensor:
        """`attends` has one function for each layer, which is the `attend` of its SelfAttention."""
        if table is None:
            if tokens.size(1) > self.config.context:
                raise ValueError(
                    f"tokens: expected {self.config.context} or fewer, got {tokens.size(1)}"
                )
            table = self.rotary[: tokens.size(1)]
        x = self.embedding(tokens)
        for block, attend in zip(self.blocks, attends or [None] * len(self.blocks), strict=True):
            x = block(x, table, attend)
        return self.to_logits(self.norm(x))

    def stepper(self, cache: type[KeyValueCache] = QkvCache):
        """A function that takes the next byte, [1, 1], or at first several, [1, L], and returns the
        logits, [256], of the byte after. Each layer remembers its last `context` positions."""
        attends = [cache(self.config).attend for _ in self.blocks]
        position = 0

        @torch.no_grad()
        def step(tokens: Tensor) -> Tensor:
            nonlocal position
            if position and tokens.size(1) != 1:
                raise ValueError(f"tokens: expected 1 after the first call, got {tokens.size(1)}")
            table = rotary_table(position, tokens.size(1), self.config.head_dim)
            position += tokens.size(1)
            return self(tokens, table, attends)[0, -1]

        return step
