"""Multi-head attention: torch's layer on the operator."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv._classes import exchange, own_class
from qkv._refuse import refuse
from qkv._verbose import note_left
from qkv.nn._attend import attend, attend_documents, in_weights, packed, project
from qkv.nn._check import check_broadcast, check_dtypes, check_inputs, check_masks, check_nested
from qkv.nn._linear import is_plain, linear, projections
from qkv.nn._masks import as_bias, mask_arguments, with_columns
from qkv.spans import Spans, tensor_of

_multi_head = torch.ops.qkv._multi_head.default


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, fused, with more options.

    The constructor, `forward`, the parameters, their names and their initial values are those of
    torch's class, of which this is a subclass: checkpoints load in either class. What differs, and
    why, is listed in docs/layers.md.

    Args:
        embed_dim: E, the width of query, of the output, and of all heads together.
        num_heads: H. Each head is `embed_dim // num_heads` wide.
        dropout: the probability of dropping a weight in training, 0 to 1.
        bias: whether the four projections have one.
        add_bias_kv: one more key and value, learned, that every query sees.
        add_zero_attn: one more key and value, both 0, that every query sees.
        kdim, vdim: the widths of key and value; E if None.
        batch_first: query, key, value and the output are `[B, L, E]`, not `[L, B, E]`.
        device, dtype: of the parameters. Tensors on other devices than the CPU go to torch's
            `forward`, which has none of the options below.
        scale, softcap, window_size: as in `qkv.attention`, with E / H for D.
        alibi_slopes, sinks: as in `qkv.attention`, broadcastable to `[B, H]`. A sink has no column
            in the returned weights.

    The last five are keyword-only, and exactly defined in docs/options.md. alibi_slopes and sinks
    move with the layer (`.to`, `.half`), but are in its state dict only if they are given as
    `torch.nn.Parameter`. window_size and alibi_slopes count keys from the end, so they do not go
    with add_bias_kv and add_zero_attn.

    The projections W_Q, W_K and W_V are the rows of `in_proj_weight`, `[3 E, E]`, in this order, or
    with kdim or vdim `q_proj_weight`, `k_proj_weight` and `v_proj_weight`; their biases are
    `in_proj_bias`, `[3 E]`. W_O is `out_proj.weight`, `[E, E]`, its bias `out_proj.bias`.

    Example:
        >>> layer = qkv.nn.MultiheadAttention(512, 8, batch_first=True)
        >>> x = torch.randn(2, 100, 512)
        >>> output, weights = layer(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([2, 100, 512]), torch.Size([2, 100, 100]))

    Paper: Vaswani et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762
    """

    # Names of the options that this layer was given. In the class as well, for layers of torch's
    # class that became ones of this class (see `adopt`).
    _given: tuple[str, ...] = ()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        window_size: tuple[int, int] | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
            batch_first, device, dtype,
        )  # fmt: skip
        _keep_off_fast_path(self)
        # Said here, and not by the operator in the first call; it takes one number for both.
        if window_size is not None and (isinstance(window_size, int) or len(window_size) != 2):
            wanted = "(left, right) or None is expected"
            refuse("window_size", window_size, wanted, function="MultiheadAttention")
        self.scale, self.softcap, self.window_size = scale, softcap, window_size
        tensors = {"alibi_slopes": alibi_slopes, "sinks": sinks}
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                tensor = tensor if tensor is None else tensor.to(device)
                self.register_buffer(name, tensor, persistent=False)
        options = {"scale": scale, "softcap": softcap or None, "window_size": window_size}
        self._given = tuple(n for n, x in (options | tensors).items() if x is not None)
        if add_bias_kv or add_zero_attn:
            for name in [n for n in ("window_size", "alibi_slopes") if n in self._given]:
                wanted = "None is expected with add_bias_kv or add_zero_attn"
                wanted += ": it counts keys from the last one"
                refuse(name, "given", wanted, function="MultiheadAttention")

    def extra_repr(self) -> str:
        """The options that were given, and who multiplies by the weights where it is not torch."""
        given = {name: getattr(self, name) for name in self._given}
        if (found := projections()) != "torch":
            given["projections"] = found
        return ", ".join(f"{name}={value}" for name, value in given.items())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        attn_bias: Tensor | None = None,
        spans: Spans | Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Projects query, key and value, attends with each head, and projects the heads' outputs.

        Args:
            query: `[L, B, E]`, or `[B, L, E]` with batch_first, or `[L, E]`. Or a nested tensor
                `[B, j, E]` of either layout, see below.
            key: `[S, B, kdim]`, `[B, S, kdim]` or `[S, kdim]`.
            value: `[S, B, vdim]`, `[B, S, vdim]` or `[S, vdim]`.
            key_padding_mask: `[B, S]`, unbatched `[S]`. Bool: True hides the key, unlike in
                `qkv.attention`. Floating: added to the scores, -inf hides.
            need_weights: also return the weights. Without them a call is faster, and needs no
                memory that grows with L * S.
            attn_mask: `[L, S]` or `[B * H, L, S]`, unbatched `[H, L, S]`; bool (True hides) or
                floating, float32 or query's dtype. The two masks may be of different kinds.
            average_attn_weights: return the mean of the weights over the heads.
            is_causal: query i sees keys j <= i, also without attn_mask. An attn_mask beside it
                is taken for this very mask with need_weights=False; otherwise both apply.
            attn_bias: floating, broadcastable to `[B, H, L, S]`, float32 or query's dtype: added to
                the scores. For a learned bias `[H, L, S]` beside the masks.
            spans: as in `qkv.attention`, broadcastable to `[B, H, L, 2 n]`, beside the masks: what
                a query sees. It sees what add_bias_kv and add_zero_attn add, too.

        Returns:
            The output, laid out like query, `[..., E]`, and the weights: None without
            need_weights, `[B, L, S]`, or `[B, H, L, S]` with average_attn_weights=False;
            without B if unbatched. S counts the keys that add_bias_kv and add_zero_attn add. In
            training they are the weights after dropout. Both are differentiable. A query with
            nothing to attend to gets the output projection's bias and weights of 0.

        Raises:
            RuntimeError: shapes and dtypes that do not fit, by the argument's name.

        A nested tensor must be query, key and value at once, and has no masks; add_bias_kv and
        add_zero_attn do not go with it. The output is nested like it, the weights are padded with
        zeros to the longest item.
        """
        masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        # Not after `release`, if what has wrapped this method, as accelerate's hooks do, kept it.
        is_ours = isinstance(self, MultiheadAttention)
        if not is_ours or query.device.type not in ("cpu", "meta"):
            others = {"attn_bias": attn_bias, "spans": spans}
            MultiheadAttention._refuse_options(self, query.device, others)
            if is_ours:
                note_left("MultiheadAttention", query, "torch's layer")
            return torch.nn.MultiheadAttention.forward(
                self, query, key, value, need_weights=need_weights,
                average_attn_weights=average_attn_weights, is_causal=is_causal, **masks,
            )  # fmt: skip
        wanted = (need_weights, average_attn_weights)
        call: dict[str, Any] = {name: getattr(self, name) for name in self._given}
        call |= {"dropout_p": self.dropout if self.training else 0.0}
        call |= {"spans": tensor_of(spans), "is_causal": is_causal}
        if query.is_nested or key.is_nested or value.is_nested:
            check_nested(self, (query, key, value), **masks)
            return self._forward_nested(query, attn_bias, wanted, call)
        check_inputs(self, query, key, value)
        is_batched = query.dim() == 3
        sequence = 1 if is_batched and self.batch_first else 0  # the dimension of L and S
        batch = (query.size(1 - sequence),) if is_batched else ()
        sizes = (query.size(sequence), key.size(sequence))
        check_masks(key_padding_mask, attn_mask, batch, self.num_heads, *sizes)
        if attn_bias is not None:
            check_broadcast("attn_bias", attn_bias, [*batch, self.num_heads, *sizes])
        if is_causal and not need_weights:
            masks["attn_mask"] = None  # the hint says as much
        masks["attn_bias"] = attn_bias
        parameters = in_weights(self), self.in_proj_bias, self.out_proj.weight, self.out_proj.bias
        has_more_keys = self.bias_k is not None or self.add_zero_attn
        # One operator does all that is left, which is as long as 30 us of Python. Under autocast
        # the projections have another dtype.
        is_one = is_plain(query, key, value, *parameters[0], *parameters[1:])
        is_one = is_one and not has_more_keys and not torch.is_autocast_enabled("cpu")
        if not is_one:
            query, key, value = (x.movedim(sequence, -2) for x in project(self, query, key, value))
        check_dtypes(query.dtype, **masks)
        if has_more_keys:
            key, value = self._with_more_keys(key, value)
            masks, call = with_columns(masks, call, sizes, key)
        call |= mask_arguments(masks, query.dtype, self.num_heads, is_batched)
        if is_one:
            places = self.num_heads, *parameters, sequence, *wanted
            return _multi_head(query, key, value, *places, **call)
        output, weights = attend((query, key, value), *wanted, call)
        return self._project_output(output.movedim(-2, sequence)), weights

    def _refuse_options(self, device: torch.device, others: dict[str, Any]) -> None:
        """Raises NotImplementedError for what torch's layer has not."""
        given = [*getattr(self, "_given", ()), *(n for n, x in others.items() if x is not None)]
        if given:
            raise NotImplementedError(
                f"MultiheadAttention: query is on {device}, where torch's layer is used, "
                f"which has no {' and no '.join(given)}"
            )

    def _forward_nested(
        self, x: Tensor, attn_bias: Tensor | None, wanted: tuple[bool, bool], call: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """forward of a nested tensor, which is query, key and value."""
        values, ends, nested_like = packed(x)
        call["bias"] = attn_bias if attn_bias is None else as_bias(attn_bias)
        heads = project(self, values, values, values)
        check_dtypes(heads[0].dtype, attn_bias=attn_bias)
        output, weights = attend_documents(heads, ends, *wanted, call)
        return nested_like(self._project_output(output)), weights

    def _project_output(self, output: Tensor) -> Tensor:
        """W_O, of `[..., H, E / H]`."""
        return linear(output.flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def _with_more_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`[..., H, S + 1, D]`, or `S + 2`: with bias_k and bias_v, then with a key of zeros."""
        more = []
        for x, bias in ((key, self.bias_k), (value, self.bias_v)):
            if bias is not None:  # [1, 1, E]
                row = bias.view(self.num_heads, 1, -1).to(x.dtype)
                x = torch.cat([x, row.expand(*x.shape[:-2], 1, -1)], -2)
            more.append(F.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x)
        return tuple(more)


def adopt(layer: torch.nn.MultiheadAttention) -> None:
    """Makes a layer of torch's class one of this class, in place: parameters, hooks and whatever
    refers to it stay."""
    _keep_off_fast_path(layer)
    exchange(layer, torch.nn.MultiheadAttention, MultiheadAttention)


def release(layer: torch.nn.Module) -> None:
    """Undoes `adopt`, of a copy of the layer too. To another layer, also to one that was made as
    one of this class, it does nothing."""
    if own_class(layer) is not MultiheadAttention or "_given" in layer.__dict__:
        return
    for part in cast(MultiheadAttention, layer).out_proj.modules():  # which peft wraps in its own
        hooks = part._forward_pre_hooks
        for number in [number for number, hook in hooks.items() if hook is _never_called]:
            del hooks[number]
    exchange(layer, MultiheadAttention, torch.nn.MultiheadAttention)


def _keep_off_fast_path(layer: torch.nn.MultiheadAttention) -> None:
    """Makes torch.nn.TransformerEncoderLayer call `layer` in eval mode, too.

    Without gradients it would hand the layer's parameters to one operator of its own,
    `torch._transformer_encoder_layer_fwd`, whose attention is not fused on the CPU, and never call
    the layer. It does not if any module within it has a forward hook. out_proj is such a module,
    and since nobody calls it (its parameters are read, by torch's layer as well as by this one), a
    hook there costs nothing."""
    layer.out_proj.register_forward_pre_hook(_never_called)


def _never_called(module: torch.nn.Module, args: Any) -> None:
    """The hook of `_keep_off_fast_path`."""
