"""What a model generates, as logits that can be compared."""

from typing import Any

import torch
from torch import Tensor

from .inputs import PADDING

NEW = 6  # tokens
_BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def is_possible(model: Any, call: dict[str, Any]) -> bool:
    return hasattr(model, "generate") and model.can_generate()


def unpadded(call: dict[str, Any]) -> dict[str, Any]:
    """The prompt of the first row in both, but for what is no text."""
    found = {k: v for k, v in call.items() if k != "decoder_input_ids"}
    if "attention_mask" in found:
        found["attention_mask"] = torch.ones_like(found["attention_mask"])
        found["input_ids"] = found["input_ids"][:1].repeat(2, 1)
        found["input_ids"][1, -1] = 5
    return found


def left_padded(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """The padding of the second row comes before the prompt, but where there is an encoder."""
    found = {k: v for k, v in call.items() if k != "decoder_input_ids"}
    if not model.config.is_encoder_decoder:
        for name in _BY_TOKEN:
            if name in found:
                second = found[name][1].roll(PADDING)
                found[name] = torch.stack([found[name][0], second])
    return found


def logits(model: Any, call: dict[str, Any], cache: str, beams: int) -> dict[str, Tensor]:
    """Those of each step and row, for as long as the tokens follow from them alone: two runs whose
    best tokens are as good as each other part here."""
    torch.manual_seed(0)
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.forced_bos_token_id = None
    if settings.pad_token_id is None:
        settings.pad_token_id = 0
    if settings.decoder_start_token_id is None and model.config.is_encoder_decoder:
        settings.decoder_start_token_id = settings.bos_token_id = 1
    found = model.generate(
        **call, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, num_beams=beams,
        return_dict_in_generate=True, output_logits=True, output_scores=True,
        cache_implementation=cache,
    )  # fmt: skip
    if beams > 1:
        return {"sequences_scores": found.sequences_scores}
    steps = {f"step {i}": x.float() for i, x in enumerate(found.logits)}
    return steps
