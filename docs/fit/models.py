"""Published configurations of the models on the page "Will it fit?": the values of each ``config.json`` on the hub.

Only values that decide sizes or kernels are listed; others are the defaults of transformers. The name is the source:
https://huggingface.co/NAME/blob/main/config.json.
"""

from __future__ import annotations

from typing import Any

Configuration = dict[str, Any]


def _vit(size: int, layers: int, heads: int, patch: int = 16, kind: str = "ViT", **more: Any) -> Configuration:
    sizes = {"hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads}
    image = {"intermediate_size": 4 * size, "image_size": 224, "patch_size": patch, "num_channels": 3}
    return {"architectures": [f"{kind}ForImageClassification"], "model_type": kind.lower(), **sizes, **image, **more}


def _swin(size: int, depths: list[int], heads: list[int]) -> Configuration:
    shape = {"embed_dim": size, "depths": depths, "num_heads": heads, "window_size": 7, "patch_size": 4}
    return {"architectures": ["SwinForImageClassification"], "model_type": "swin", "image_size": 224, **shape}


def _convnext(sizes: list[int], depths: list[int], kind: str = "ConvNext") -> Configuration:
    shape = {"hidden_sizes": sizes, "depths": depths, "image_size": 224}
    return {"architectures": [f"{kind}ForImageClassification"], "model_type": kind.lower(), **shape}


def _resnet(depths: list[int], sizes: list[int], layer: str = "bottleneck") -> Configuration:
    shape = {"embedding_size": 64, "hidden_sizes": sizes, "depths": depths, "layer_type": layer}
    return {"architectures": ["ResNetForImageClassification"], "model_type": "resnet", **shape}


def _bert(kind: str, name: str, size: int, layers: int, heads: int, words: int, places: int = 512) -> Configuration:
    sizes = {
        "hidden_size": size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * size,
    }
    rest = {"vocab_size": words, "max_position_embeddings": places}
    return {"architectures": [f"{name}ForMaskedLM"], "model_type": kind, **sizes, **rest}


def _gpt2(size: int, layers: int, heads: int, name: str = "GPT2LMHeadModel", **more: Any) -> Configuration:
    sizes = {"n_embd": size, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"architectures": [name], "model_type": "gpt2", **sizes, **more}


def _decoder(
    kind: str, name: str, size: int, layers: int, heads: tuple[int, int], inner: int, words: int, **more: Any
) -> Configuration:
    """Return a decoder with ``heads`` of queries, and of keys and values."""
    sizes = {"hidden_size": size, "num_hidden_layers": layers, "intermediate_size": inner, "vocab_size": words}
    attention = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    rest = {"max_position_embeddings": 8192, "tie_word_embeddings": False, **more}
    return {"architectures": [f"{name}ForCausalLM"], "model_type": kind, **sizes, **attention, **rest}


IMAGES: dict[str, Configuration] = {
    "google/vit-base-patch16-224": _vit(768, 12, 12),
    "google/vit-large-patch16-224": _vit(1024, 24, 16),
    "google/vit-huge-patch14-224-in21k": _vit(1280, 32, 16, 14),
    "facebook/deit-tiny-patch16-224": _vit(192, 12, 3),
    "facebook/deit-small-patch16-224": _vit(384, 12, 6),
    "facebook/dinov2-base": _vit(768, 12, 12, 14, "Dinov2", image_size=518, mlp_ratio=4),
    "microsoft/swin-tiny-patch4-window7-224": _swin(96, [2, 2, 6, 2], [3, 6, 12, 24]),
    "microsoft/swin-base-patch4-window7-224": _swin(128, [2, 2, 18, 2], [4, 8, 16, 32]),
    "facebook/convnext-tiny-224": _convnext([96, 192, 384, 768], [3, 3, 9, 3]),
    "facebook/convnext-base-224": _convnext([128, 256, 512, 1024], [3, 3, 27, 3]),
    "facebook/convnextv2-tiny-1k-224": _convnext([96, 192, 384, 768], [3, 3, 9, 3], "ConvNextV2"),
    "microsoft/resnet-18": _resnet([2, 2, 2, 2], [64, 128, 256, 512], "basic"),
    "microsoft/resnet-50": _resnet([3, 4, 6, 3], [256, 512, 1024, 2048]),
}
_ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1}
_MODERN = {"max_position_embeddings": 8192, "intermediate_size": 1152, "hidden_activation": "gelu"}
ENCODERS: dict[str, Configuration] = {
    "distilbert/distilbert-base-uncased": {
        "architectures": ["DistilBertForMaskedLM"],
        "model_type": "distilbert",
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "google-bert/bert-base-uncased": _bert("bert", "Bert", 768, 12, 12, 30522),
    "google-bert/bert-large-uncased": _bert("bert", "Bert", 1024, 24, 16, 30522),
    "FacebookAI/roberta-base": _bert("roberta", "Roberta", 768, 12, 12, 50265, 514) | _ROBERTA,
    "FacebookAI/roberta-large": _bert("roberta", "Roberta", 1024, 24, 16, 50265, 514) | _ROBERTA,
    "FacebookAI/xlm-roberta-base": _bert("xlm-roberta", "XLMRoberta", 768, 12, 12, 250002, 514) | _ROBERTA,
    "google/electra-base-discriminator": _bert("electra", "Electra", 768, 12, 12, 30522) | {"embedding_size": 768},
    "microsoft/deberta-v3-base": _bert("deberta-v2", "DebertaV2", 768, 12, 12, 128100)
    | {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    | {"pos_att_type": "p2c|c2p", "position_biased_input": False, "max_relative_positions": -1, "type_vocab_size": 0},
    "answerdotai/ModernBERT-base": _bert("modernbert", "ModernBert", 768, 22, 12, 50368) | _MODERN,
    "answerdotai/ModernBERT-large": _bert("modernbert", "ModernBert", 1024, 28, 16, 50368)
    | _MODERN
    | {"intermediate_size": 2624},
    "google/bigbird-roberta-base": _bert("big_bird", "BigBird", 768, 12, 12, 50358, 4096)
    | {"attention_type": "block_sparse", "block_size": 64, "num_random_blocks": 3},
}
_QWEN3 = {"head_dim": 128}
SMALL_DECODERS: dict[str, Configuration] = {
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "HuggingFaceTB/SmolLM2-135M": _decoder("llama", "Llama", 576, 30, (9, 3), 1536, 49152, tie_word_embeddings=True),
    "Qwen/Qwen2.5-0.5B": _decoder("qwen2", "Qwen2", 896, 24, (14, 2), 4864, 151936, tie_word_embeddings=True),
    "Qwen/Qwen3-0.6B": _decoder("qwen3", "Qwen3", 1024, 28, (16, 8), 3072, 151936, tie_word_embeddings=True, **_QWEN3),
    "meta-llama/Llama-3.2-1B": _decoder(
        *("llama", "Llama", 2048, 16, (32, 8), 8192, 128256), head_dim=64, tie_word_embeddings=True
    ),
    "google/gemma-3-1b-pt": _decoder(
        *("gemma3_text", "Gemma3", 1152, 26, (4, 1), 6912, 262144), head_dim=256, tie_word_embeddings=True
    ),
    "microsoft/phi-1_5": _decoder(
        *("phi", "Phi", 2048, 24, (32, 32), 8192, 51200), partial_rotary_factor=0.5, max_position_embeddings=2048
    ),
    "Qwen/Qwen2.5-1.5B": _decoder("qwen2", "Qwen2", 1536, 28, (12, 2), 8960, 151936, tie_word_embeddings=True),
}
LARGE_DECODERS: dict[str, Configuration] = {
    "meta-llama/Llama-3.2-3B": _decoder(
        *("llama", "Llama", 3072, 28, (24, 8), 8192, 128256), head_dim=128, tie_word_embeddings=True
    ),
    "google/gemma-2-2b": _decoder(
        *("gemma2", "Gemma2", 2304, 26, (8, 4), 9216, 256000), head_dim=256, tie_word_embeddings=True
    ),
    "microsoft/Phi-3-mini-4k-instruct": _decoder(
        *("phi3", "Phi3", 3072, 32, (32, 32), 8192, 32064), pad_token_id=32000, max_position_embeddings=4096
    ),
    "Qwen/Qwen3-4B": _decoder("qwen3", "Qwen3", 2560, 36, (32, 8), 9728, 151936, tie_word_embeddings=True, **_QWEN3),
    "mistralai/Mistral-7B-v0.1": _decoder("mistral", "Mistral", 4096, 32, (32, 8), 14336, 32000, sliding_window=4096),
    "meta-llama/Llama-2-7b-hf": _decoder(
        "llama", "Llama", 4096, 32, (32, 32), 11008, 32000, max_position_embeddings=4096
    ),
    "meta-llama/Llama-3.1-8B": _decoder("llama", "Llama", 4096, 32, (32, 8), 14336, 128256),
    "Qwen/Qwen3-8B": _decoder("qwen3", "Qwen3", 4096, 36, (32, 8), 12288, 151936, **_QWEN3),
}
