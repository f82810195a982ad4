"""The operators that have a translation to ONNX."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from onnxscript import evaluator
from torch._ops import OpOverload

from qkv.integrations.onnx._attention import TRANSLATED_BY_HEAD, Attention
from qkv.options import BY_HEAD, MASKS, defaults

OPSET = 23  # the first that has Attention

# What the exporter makes of qkv.attention and the other functions before it asks for a translation.
# Translations of the functions themselves would not be found inside of torch.func.vmap.
_OPERATORS = (
    torch.ops.qkv.attention_forward.default,
    torch.ops.qkv.with_weights_forward.default,
    torch.ops.qkv.weights_forward.default,
    torch.ops.aten.scaled_dot_product_attention.default,
)
# Arguments that not every one of them has.
_ABSENT = dict.fromkeys(
    (*MASKS, *BY_HEAD, "window_size", "reduce", "cu_seq_q", "cu_seq_k", "seqused_k")
) | {"softcap": 0.0, "score_program": ""}


def table() -> dict[OpOverload, Callable]:
    translations = {operator: _translation(operator) for operator in _OPERATORS}
    return translations | {torch.ops.qkv.dropout_seed.default: _refuse_dropout}


def _translation(operator: OpOverload) -> Callable:
    """What the exporter calls for each call of the operator, with its arguments."""
    names = [argument.name for argument in operator._schema.arguments]
    fixed = _ABSENT | defaults(operator)
    results = [result.name or "output" for result in operator._schema.returns]

    def translate(*args: Any, **kwargs: Any) -> Any:
        arguments = fixed | dict(zip(names, args, strict=False)) | kwargs
        arguments.setdefault("value", arguments["key"])  # of weights alone
        _check(arguments)
        found = Attention(arguments, results).results()
        return found[0] if len(found) == 1 else found

    return translate


def _check(arguments: dict[str, Any]) -> None:
    """Raises NotImplementedError for what ONNX has nothing for."""
    opset = getattr(getattr(evaluator.default(), "opset", None), "version", OPSET)
    if opset < OPSET:
        _refuse(
            f"opset_version is {opset}, expected at least {OPSET}, the first with an Attention "
            f"operator: torch.onnx.export(..., opset_version={OPSET})"
        )
    if arguments["dropout_p"] != 0:
        _refuse_dropout(dropout_p=arguments["dropout_p"])
    unknown = dict.fromkeys(
        {"spans", *BY_HEAD} - set(TRANSLATED_BY_HEAD), "has no translation; pass an attn_mask"
    )
    unknown["score_program"] = "Attention knows no score functions"
    packed = ("cu_seq_q", "cu_seq_k", "seqused_k")
    unknown |= dict.fromkeys(packed, "Attention knows no packed documents")
    for name, why in unknown.items():
        if arguments[name] not in (None, ""):
            _refuse(f"{name} is given, but {why}")


def _refuse_dropout(*_: Any, dropout_p: float | None = None) -> NoReturn:
    """Also what stands for the operator that draws a seed where dropout_p is above 0."""
    _refuse(
        f"dropout_p is {dropout_p or 'above 0'}, expected 0, since Attention drops no weights: "
        "export the model in eval mode"
    )


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"qkv.attention to ONNX: {what}")
