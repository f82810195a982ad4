"""transformers' models with latent attention, small: each width another number, so that none passes
for another."""

import pytest

transformers = pytest.importorskip("transformers")

LATENT = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
INDEXED = LATENT | {"index_topk": 5, "index_n_heads": 2, "index_head_dim": 8}
SHARED = INDEXED | {"indexer_types": ["full", "shared"]}
HYBRID = {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 4}
LINEAR = {"linear_head_dim": 8, "linear_num_heads": 2}
UNLIKE = ("num_hidden_layers", "intermediate_size", "moe_intermediate_size")  # Longcat's names
IMAGE = {"hidden_size": 16, "intermediate_size": 16}

# By family: the class, and its config.
MODELS = {
    "axk1": ("AXK1ForCausalLM", LATENT),
    "axk2": ("AXK2ForCausalLM", INDEXED | {
        "gated_norm_rank": 4, "n_group": None, "topk_group": None,
    }),
    "bailing_hybrid": ("BailingHybridForCausalLM", LATENT | HYBRID | {"head_dim": 8}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "deepseek_v32": ("DeepseekV32ForCausalLM", INDEXED),
    "dots3_note": ("Dots3NoteForCausalLM", INDEXED | {
        "layer_types": ["indexed_attention", "sliding_attention"], "sliding_window_size": 6,
        "shared_experts_intermediate_size": 16, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4, "swa_q_lora_rank": 12, "swa_kv_lora_rank": 20,
        "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 6,
    }),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", LATENT),
    "glm5_next": ("Glm5NextForConditionalGeneration", {
        "text_config": INDEXED | LINEAR | {
            "layer_types": ["indexed_attention", "linear_attention"], "qk_rope_head_dim": 0,
            "index_topk": 4, "index_kpool": 2,
        },
        "vision_config": IMAGE | {
            "depth": 1, "num_heads": 2, "out_hidden_size": 32, "projection_intermediate_size": 16,
        },
    }),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", SHARED),
    "hy_v4": ("HYV4ForCausalLM", SHARED),
    "kimi_linear": ("KimiLinearForCausalLM", LATENT | HYBRID | LINEAR),
    "longcat_flash": ("LongcatFlashForCausalLM", {
        **{name: value for name, value in LATENT.items() if name not in UNLIKE},
        "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2,
        "zero_expert_num": 2, "head_dim": 4,
    }),
    "minicpm3": ("MiniCPM3ForCausalLM", LATENT),
    "mistral4": ("Mistral4ForCausalLM", LATENT),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", {
        "text_config": INDEXED | {"no_rope_layers": [1, 0]},
        "vision_config": IMAGE | {
            "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 16,
        },
    }),
    "youtu": ("YoutuForCausalLM", LATENT),
}  # fmt: skip
# Of those that this version of transformers has.
MODELS = {name: x for name, x in MODELS.items() if hasattr(transformers, x[0])}
CHOOSING = [name for name in (
    "axk2", "deepseek_v32", "dots3_note", "glm5_next", "glm_moe_dsa", "hy_v4", "mistral_large4",
) if name in MODELS]  # fmt: skip
