"""What families need beyond what names say: the one table of special cases."""

from typing import Any

# Arguments of configs, by model_type, which come before what names say.
_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_LAST = _RESNET | {"out_features": ["stage4"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "detr": {"backbone_config": _LAST},
    "conditional_detr": {"backbone_config": _LAST},
    "dab-detr": {"backbone_config": _LAST},
    "table-transformer": {"backbone_config": _LAST},
    "deformable_detr": {"backbone_config": _RESNET},
    "esm": {"vocab_size": 60, "pad_token_id": 1, "mask_token_id": 4},
    "autoformer": {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3]},
    "informer": {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3]},
    "time_series_transformer": {
        "prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 6},
}  # fmt: skip
# Text configs whose rotation has sections that are not among their defaults.
SECTIONS = (
    "glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text", "qwen2_vl_text",
    "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "ernie4_5_vl_moe_text",
)  # fmt: skip

# What models are called with that no other is, by model_type or class.
CALLS: dict[str, Any] = {}

# Families whose "eager" returns other weights than it uses.
OTHER_WEIGHTS = {"bridgetower": 'only "eager" returns any'} | dict.fromkeys(
    ("granite_swa", "granitemoe_swa"), 'those of "eager" are from before its sinks'
)
