"""Small models of transformers whose layers write attention out, a builder for each family."""

import torch
import transformers

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = {"vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
BERT = SIZES | TEXT
IMAGE = {"image_size": 32, "patch_size": 8}
XLM = {
    "vocab_size": 61, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64,
    "pad_index": 0,
}  # fmt: skip
PYRAMID = {
    "image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32],
    "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
}  # fmt: skip


def tokens(length=9):
    """Two rows, of which the second is shorter."""
    seen = torch.ones(2, length, dtype=torch.int64)
    seen[1, length - 3 :] = 0
    return {"input_ids": torch.randint(3, 61, (2, length)), "attention_mask": seen}


def image(size=32):
    return {"pixel_values": torch.randn(2, 3, size, size)}


def seq2seq(**more):
    return tokens() | {"decoder_input_ids": torch.randint(3, 61, (2, 7))} | more


def boxes(**more):
    corners = torch.randint(0, 500, (2, 9, 2))
    return tokens() | {"bbox": torch.cat([corners, corners + 20], -1)} | more


GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4]}
STAGES = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
    "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "patch_sizes": [7, 3], "strides": [4, 2],
}  # fmt: skip

# The model and its config, without those words; what the config gets; and what the model is called
# with.
FAMILIES = {
    "bark": (
        "BarkSemantic",
        {
            "block_size": 64,
            "input_vocab_size": 61,
            "output_vocab_size": 61,
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": 32,
        },
        tokens,
    ),
    "big_bird": ("BigBird", BERT | {"attention_type": "original_full"}, tokens),
    "blip": ("BlipVision", SIZES | IMAGE, image),
    "bloom": ("Bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}, tokens),
    "bros": ("Bros", BERT | {"dim_bbox": 4}, lambda: boxes(bbox=torch.rand(2, 9, 4))),
    "canine": (
        "Canine",
        BERT
        | {
            "max_position_embeddings": 64,
            "num_hash_buckets": 32,
            "local_transformer_stride": 8,
            "downsampling_rate": 2,
        },
        lambda: tokens(16),
    ),
    "clap": (
        "ClapAudio",
        {
            "hidden_size": 16,
            "num_mel_bins": 16,
            "spec_size": 64,
            "patch_size": 4,
            "patch_stride": [4, 4],
            "patch_embeds_hidden_size": 8,
            "depths": [2, 1],
            "num_attention_heads": [2, 2],
            "window_size": 4,
        },
        lambda: {
            "input_features": torch.randn(2, 1, 256, 16),
            "is_longer": torch.zeros(2, 1).bool(),
        },
    ),
    "codegen": ("CodeGen", GPT | {"rotary_dim": 4}, tokens),
    "convbert": (
        "ConvBert",
        BERT | {"head_ratio": 2, "conv_kernel_size": 3, "embedding_size": 32},
        tokens,
    ),
    "cpmant": (
        "CpmAnt",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "dim_head": 8,
            "dim_ff": 48,
            "num_hidden_layers": 2,
            "prompt_length": 4,
            "prompt_types": 4,
            "segment_types": 4,
            "position_bias_num_buckets": 16,
            "position_bias_max_distance": 32,
        },
        lambda: {"input_ids": tokens()["input_ids"]},
    ),
    "cvt": (
        "Cvt",
        {
            "patch_sizes": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [2, 1],
            "embed_dim": [16, 32],
            "num_heads": [1, 4],
            "depth": [1, 2],
            "mlp_ratio": [2.0, 2.0],
            "attention_drop_rate": [0.0, 0.0],
            "drop_rate": [0.0, 0.0],
            "drop_path_rate": [0.0, 0.0],
            "qkv_bias": [True, True],
            "cls_token": [False, True],
            "qkv_projection_method": ["dw_bn", "dw_bn"],
            "kernel_qkv": [3, 3],
            "padding_kv": [1, 1],
            "stride_kv": [2, 2],
            "padding_q": [1, 1],
            "stride_q": [1, 1],
        },
        image,
    ),
    "data2vec_vision": (
        "Data2VecVision",
        SIZES | IMAGE | {"use_relative_position_bias": True},
        image,
    ),
    "deberta": (
        "Deberta",
        BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        tokens,
    ),
    "deberta_v2": (
        "DebertaV2",
        BERT
        | {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 16,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
        },
        tokens,
    ),
    "donut": ("DonutSwin", SWIN | {"window_size": 4}, image),
    "falcon": (
        "Falcon",
        {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        tokens,
    ),
    "falcon_alibi": (
        "Falcon",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
        },
        tokens,
    ),
    "fastspeech2": (
        "FastSpeech2Conformer",
        {
            "hidden_size": 32,
            "vocab_size": 61,
            "num_mel_bins": 8,
            "encoder_num_attention_heads": 4,
            "encoder_layers": 1,
            "encoder_linear_units": 48,
            "decoder_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_linear_units": 48,
            "speech_decoder_postnet_layers": 1,
            "speech_decoder_postnet_units": 16,
            "duration_predictor_channels": 16,
            "energy_predictor_channels": 16,
            "pitch_predictor_channels": 16,
        },
        tokens,
    ),
    "flaubert": (
        "Flaubert",
        XLM,
        tokens,
    ),
    "flava_text": ("FlavaText", BERT, tokens),
    "fsmt": (
        "FSMT",
        DECODER
        | {
            "src_vocab_size": 61,
            "tgt_vocab_size": 61,
            "langs": ["en", "de"],
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        seq2seq,
    ),
    "funnel": (
        "Funnel",
        {
            "vocab_size": 61,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
        },
        tokens,
    ),
    "git": ("Git", BERT | {"vision_config": SIZES | IMAGE}, lambda: tokens() | image()),
    "glpn": ("GLPN", STAGES, image),
    "gpt_neo": (
        "GPTNeo",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        tokens,
    ),
    "gpt_neox_japanese": (
        "GPTNeoXJapanese",
        {k: v for k, v in BERT.items() if k != "pad_token_id"}
        | {"intermediate_multiple_size": 2, "rotary_pct": 0.5},
        tokens,
    ),
    "gptj": ("GPTJ", GPT | {"rotary_dim": 4}, tokens),
    "groupvit_text": ("GroupViTText", BERT, tokens),
    "groupvit_vision": (
        "GroupViTVision",
        SIZES | IMAGE | {"depths": [2, 1], "num_group_tokens": [8, 4], "num_output_groups": [8, 4]},
        image,
    ),
    "hiera": (
        "Hiera",
        {
            "embed_dim": 16,
            "image_size": [32, 32],
            "depths": [1, 1, 1],
            "num_heads": [1, 2, 4],
            "query_stride": [2, 2],
            "masked_unit_size": [4, 4],
            "num_query_pool": 2,
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
        },
        image,
    ),
    "ibert": ("IBert", BERT, tokens),
    "imagegpt": ("ImageGPT", GPT, lambda: {"input_ids": tokens()["input_ids"]}),
    "layoutlmv3": (
        "LayoutLMv3",
        BERT
        | {
            "input_size": 32,
            "coordinate_size": 5,
            "shape_size": 6,
            "has_relative_attention_bias": True,
            "has_spatial_attention_bias": True,
        },
        boxes,
    ),
    "led": (
        "LED",
        DECODER
        | {
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
            "attention_window": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        seq2seq,
    ),
    "levit": (
        "Levit",
        {
            "image_size": 64,
            "hidden_sizes": [16, 32],
            "num_attention_heads": [2, 4],
            "depths": [1, 1],
            "key_dim": [8, 8],
            "drop_path_rate": 0,
            "mlp_ratio": [2, 2],
            "attention_ratio": [2, 2],
            "down_ops": [["Subsample", 8, 2, 4, 2, 2], [""]],
        },
        lambda: image(64),
    ),
    "lilt": (
        "Lilt",
        BERT | {"hidden_size": 48, "channel_shrink_ratio": 2, "max_2d_position_embeddings": 600},
        boxes,
    ),
    "longformer": ("Longformer", BERT | {"attention_window": 4}, tokens),
    "luke": ("Luke", BERT | {"entity_vocab_size": 11, "entity_emb_size": 16}, tokens),
    "lxmert": (
        "Lxmert",
        BERT | {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16},
        lambda: (
            tokens() | {"visual_feats": torch.randn(2, 5, 16), "visual_pos": torch.rand(2, 5, 4)}
        ),
    ),
    "maskformer_swin": ("MaskFormerSwin", SWIN | {"window_size": 4}, image),
    "megatron_bert": ("MegatronBert", BERT, tokens),
    "mpnet": ("MPNet", BERT, tokens),
    "mpt": (
        "Mpt",
        {"vocab_size": 61, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        tokens,
    ),
    "mvp": ("Mvp", DECODER | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, seq2seq),
    "nystromformer": (
        "Nystromformer",
        BERT | {"segment_means_seq_len": 16, "num_landmarks": 16},
        lambda: tokens(16),
    ),
    "openai": ("OpenAIGPT", GPT, tokens),
    "perceiver": (
        "Perceiver",
        {
            "num_latents": 6,
            "d_latents": 32,
            "d_model": 24,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
        },
        lambda: {"inputs": torch.randn(2, 9, 24)},
    ),
    "prophetnet": (
        "ProphetNet",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 64,
            "ngram": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        seq2seq,
    ),
    "pvt": (
        "Pvt",
        PYRAMID | {"sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2]},
        image,
    ),
    "pvt_v2": (
        "PvtV2",
        PYRAMID | {"sr_ratios": [2, 1], "patch_sizes": [7, 3]},
        image,
    ),
    "rembert": (
        "RemBert",
        BERT | {"input_embedding_size": 16, "output_embedding_size": 16},
        tokens,
    ),
    "roformer": ("RoFormer", BERT, tokens),
    "sam": (
        "SamVision",
        {
            "hidden_size": 16,
            "mlp_dim": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "output_channels": 4,
            "window_size": 2,
            "global_attn_indexes": [1],
        },
        lambda: image(16),
    ),
    "seggpt": (
        "SegGpt",
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": [32, 16],
            "patch_size": 4,
            "pretrain_image_size": 16,
            "mlp_dim": 48,
            "merge_index": 1,
            "intermediate_hidden_state_indices": [1, 2, 3],
            "decoder_hidden_size": 8,
        },
        lambda: {
            "pixel_values": torch.randn(2, 3, 16, 16),
            "prompt_pixel_values": torch.randn(2, 3, 16, 16),
            "prompt_masks": torch.randn(2, 3, 16, 16),
        },
    ),
    "speecht5": (
        "SpeechT5",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_layers": 1,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
        },
        lambda: {
            "input_values": torch.randn(2, 9, 32),
            "decoder_input_values": torch.randn(2, 7, 32),
        },
    ),
    "squeezebert": (
        "SqueezeBert",
        BERT
        | {
            "embedding_size": 32,
            "q_groups": 1,
            "k_groups": 1,
            "v_groups": 1,
            "post_attention_groups": 1,
            "intermediate_groups": 1,
            "output_groups": 1,
        },
        tokens,
    ),
    "swin2sr": (
        "Swin2SR",
        SWIN | {"image_size": 16, "patch_size": 1, "window_size": 4, "embed_dim": 16},
        lambda: image(16),
    ),
    "swinv2": ("Swinv2", SWIN | {"window_size": 4}, image),
    "tapas": ("Tapas", BERT | {"type_vocab_sizes": [3, 4, 4, 2, 4, 4, 4]}, tokens),
    "timesformer": (
        "Timesformer",
        SIZES | IMAGE | {"num_frames": 2},
        lambda: {"pixel_values": torch.randn(2, 2, 3, 32, 32)},
    ),
    "trocr": (
        "TrOCR",
        {
            "vocab_size": 61,
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        tokens,
    ),
    "vilt": ("Vilt", BERT | IMAGE, lambda: tokens() | image()),
    "visual_bert": (
        "VisualBert",
        BERT | {"visual_embedding_dim": 16},
        lambda: tokens() | {"visual_embeds": torch.randn(2, 4, 16)},
    ),
    "vitdet": (
        "VitDet",
        SIZES
        | {
            "image_size": 32,
            "patch_size": 4,
            "use_relative_position_embeddings": True,
            "window_block_indices": [0],
            "window_size": 4,
        },
        image,
    ),
    "vits": (
        "Vits",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "flow_size": 32,
            "spectrogram_bins": 9,
            "upsample_initial_channel": 16,
            "upsample_rates": [2, 2],
            "upsample_kernel_sizes": [4, 4],
            "prior_encoder_num_wavenet_layers": 1,
            "posterior_encoder_num_wavenet_layers": 1,
            "use_stochastic_duration_prediction": False,
            "duration_predictor_filter_channels": 16,
        },
        tokens,
    ),
    "xglm": (
        "XGLM",
        {
            "vocab_size": 61,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        tokens,
    ),
    "xlm": (
        "XLM",
        XLM,
        tokens,
    ),
    "xlnet": (
        "XLNet",
        {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        tokens,
    ),
}


def build(name):
    """A model in evaluation and what it is called with."""
    torch.manual_seed(0)
    family, sizes, inputs = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    found = getattr(transformers, f"{family}Model", None) or getattr(
        transformers, f"{family}ForCausalLM"
    )
    model = found(config).train(name == "levit")  # which keeps a graph of its own in evaluation
    with torch.no_grad():  # of the size that trained ones have, so that mistakes show
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model, inputs()
