"""What families need beyond what names say: the one table of special cases."""

from typing import Any

import torch

# Arguments of configs, by model_type, which come before what names say.
_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_LAST = _RESNET | {"out_features": ["stage4"]}
_RT_DETR = {
    "backbone_config": _RESNET | {"model_type": "rt_detr_resnet", "layer_type": "basic"},
    "encoder_in_channels": [32, 64, 128], "decoder_in_channels": [64, 64, 64],
}  # fmt: skip
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 16}
_TWO = {"num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": _TWO | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32},
    "jamba": _TWO | {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": _TWO | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4},
    "mamba2": {"num_heads": 8},
    "dots1": {
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "ministral": {"head_dim": 16},
    "swin": {"window_size": 2},
    "donut-swin": {"window_size": 2},
    "esmc": {"num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4, "index_kpool": 2},
    "lfm2_moe": _TWO | {"layer_types": ["conv", "full_attention"]},
    "ernie4_5_vl_moe_text": {"moe_num_experts": 4, "moe_k": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [32, 32]},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "xmod": {"default_language": "en_XX"},
    "gemma4_text": {"hidden_size_per_layer_input": 16, "num_experts": 4},
    "t5gemma2_encoder": {"dropout_rate": 0.0},
    "hunyuan_v1_dense": _PLAIN, "hunyuan_v1_moe": _PLAIN, "hunyuan_vl_text": _PLAIN,
    "chameleon": {"vocabulary_map": {"<image>": 90}}, "emu3": {"vocabulary_map": {"<image>": 90}},
    "clap_audio_model": {
        "hidden_size": 16, "num_mel_bins": 16, "spec_size": 64, "patch_size": 4,
        "patch_stride": [4, 4], "patch_embeds_hidden_size": 8, "depths": [1, 1],
        "num_attention_heads": [2, 2], "window_size": 4,
    },
    "rt_detr": _RT_DETR, "rt_detr_v2": _RT_DETR,
    "depth_anything": {
        "backbone_config": {
            "model_type": "dinov2", "hidden_size": 32, "num_hidden_layers": 4,
            "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
            "reshape_hidden_states": False,
        },
        "reassemble_hidden_size": 32, "neck_hidden_sizes": [16, 16, 16, 16], "patch_size": 14,
    },
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "blip-2": {"image_token_index": 90}, "instructblip": {"image_token_index": 90},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "llama4_vision_model": {"intermediate_size": 256},
    "sam2_hiera_det_model": {"hidden_size": 96},
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
_OF_QWEN, _OF_GLM = [16, 24, 24], [8, 12, 12]
SECTIONS = dict.fromkeys(
    ("glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text"), _OF_GLM
)
SECTIONS |= dict.fromkeys(
    (
        "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text",
        "qwen2_5_omni_text", "qwen2_5_omni_talker", "paddleocr_vl_text",
    ), _OF_QWEN,
) | {"ernie4_5_vl_moe_text": [22, 22, 20]}  # fmt: skip


# What models are called with that no other is, by model_type or class.
def _lxmert(config: Any) -> dict[str, Any]:
    return {
        "input_ids": torch.randint(3, 60, (2, 13)), "visual_pos": torch.rand(2, 5, 4),
        "visual_feats": torch.randn(2, 5, config.visual_feat_dim),
    }  # fmt: skip


CALLS: dict[str, Any] = {"lxmert": _lxmert}

# Families whose "eager" returns other weights than it uses.
OTHER_WEIGHTS = {"bridgetower": 'only "eager" returns any'} | dict.fromkeys(
    ("granite_swa", "granitemoe_swa"), 'those of "eager" are from before its sinks'
)
