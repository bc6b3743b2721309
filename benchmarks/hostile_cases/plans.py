"""``trainer plan`` of a configuration of somebody else (``hf:FOLDER``), and of a script."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from hostile_cases.case import ANY, CODE, ESC, RAN, REFUSED, Case, done, replaced, wrote

PLAN = ["plan", "hf:./m", "--gpu", "a100-80gb"]
SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 32, "max_position_embeddings": 16}
IMAGES: dict[str, Any] = {**SMALL, "image_size": 16, "patch_size": 8, "architectures": ["ViTForImageClassification"]}
KINDS: dict[str, dict[str, Any]] = {
    "bert": {**SMALL, "architectures": ["BertForSequenceClassification"]},
    "llama": {**SMALL, "num_key_value_heads": 1, "architectures": ["LlamaForCausalLM"]},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16, "vocab_size": 32, "architectures": ["GPT2LMHeadModel"]},
    "t5": {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "vocab_size": 32, "architectures": ["T5ForConditionalGeneration"]},
    "bart": {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 32, "max_position_embeddings": 16, "architectures": ["BartForConditionalGeneration"]},
    "vit": IMAGES,
    "swin": {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "window_size": 4, "architectures": ["SwinForImageClassification"]},
    "convnext": {"image_size": 32, "num_stages": 2, "depths": [1, 1], "hidden_sizes": [8, 8], "architectures": ["ConvNextForImageClassification"]},
    "resnet": {"depths": [1, 1], "hidden_sizes": [8, 8], "embedding_size": 8, "architectures": ["ResNetForImageClassification"]},
    "mixtral": {**SMALL, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "architectures": ["MixtralForCausalLM"]},
    "xlnet": {"d_model": 8, "n_layer": 1, "n_head": 1, "d_inner": 8, "vocab_size": 32, "architectures": ["XLNetForSequenceClassification"]},
    "funnel": {"d_model": 8, "block_sizes": [1, 1], "n_head": 1, "d_head": 8, "d_inner": 8, "vocab_size": 32, "architectures": ["FunnelForSequenceClassification"]},
    "segformer": {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 1], "mlp_ratios": [1, 1], "architectures": ["SegformerForImageClassification"]},
    "gemma3": {"text_config": {**SMALL, "num_key_value_heads": 1, "head_dim": 8}, "architectures": ["Gemma3ForCausalLM"]},
}
BIG, HUGE = 10**9, 10**18
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    *[("bert", {"num_hidden_layers": value}, REFUSED) for value in (0, -1, BIG, HUGE, "12", 1.5, [1], None, float("nan"), float("inf"), {"a": 1})],
    ("bert", {"num_hidden_layers": True}, ANY),
    *[("llama", {"num_hidden_layers": value}, REFUSED) for value in (0, -5, BIG)],
    *[("gpt2", {"n_layer": value}, REFUSED) for value in (0, -1, BIG)],
    *[("t5", {key: value}, REFUSED) for key in ("num_layers", "num_decoder_layers") for value in (-1, BIG)],
    *[("bart", {key: value}, REFUSED) for key in ("encoder_layers", "decoder_layers") for value in (-1, BIG)],
    *[("swin", {"depths": value}, REFUSED) for value in ([BIG, 1], [1, BIG], [-1, 1], [0, 0], [], "12", [[1]], [1] * 100_000)],
    *[("convnext", {"depths": value}, REFUSED) for value in ([BIG, 1], [-1, 1])],
    ("convnext", {"num_stages": BIG}, REFUSED),
    *[("resnet", {"depths": value}, REFUSED) for value in ([BIG, 1], [1, -1])],
    ("segformer", {"depths": [1, BIG]}, REFUSED),
    ("funnel", {"block_sizes": [BIG, 1]}, REFUSED),
    ("funnel", {"block_sizes": [1, 1], "num_decoder_layers": BIG}, ANY),
    ("xlnet", {"n_layer": BIG}, REFUSED),
    ("mixtral", {"num_local_experts": BIG}, REFUSED),
    ("mixtral", {"num_local_experts": -1}, REFUSED),
    ("mixtral", {"num_experts_per_tok": BIG}, ANY),
    ("gemma3", {"text_config": {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": BIG}}, REFUSED),
    ("gemma3", {"text_config": {**SMALL, "layer_types": ["full_attention"] * 1_000_000}}, REFUSED),
    ("llama", {"layer_types": ["full_attention"] * 3_000_000}, ANY),
    *[("bert", {"num_labels": value}, REFUSED) for value in (BIG, -1, "x", 1.5)],
    ("bert", {"num_labels": 0}, ANY),
    ("bert", {"id2label": {str(n): f"x{n}" for n in range(1_000_000)}}, ANY),
    ("bert", {"id2label": ["a"]}, ANY),
    ("bert", {"id2label": {"x": 1}}, ANY),
    *[("bert", {"hidden_size": value}, REFUSED) for value in (0, -8, HUGE, "8", 7.5)],
    *[("bert", {"num_attention_heads": value}, REFUSED) for value in (0, -1, 3, "x")],
    *[("bert", {"vocab_size": value}, REFUSED) for value in (0, -1, HUGE, "x")],
    ("bert", {"vocab_size": 10**12}, ANY),
    *[("bert", {"max_position_embeddings": value}, REFUSED) for value in (0, -1, "x", 1.5)],
    ("bert", {"max_position_embeddings": 10**12}, ANY),
    ("bert", {"intermediate_size": -1}, REFUSED),
    ("bert", {"type_vocab_size": -1}, REFUSED),
    ("bert", {"hidden_act": "__import__"}, REFUSED),
    ("bert", {"hidden_dropout_prob": 5}, REFUSED),
    ("bert", {"initializer_range": float("nan")}, ANY),
    ("bert", {"layer_norm_eps": "x"}, ANY),
    ("bert", {"pad_token_id": BIG}, ANY),
    ("llama", {"num_key_value_heads": 0}, REFUSED),
    ("llama", {"rope_scaling": {"type": "nonsense", "factor": -1}}, ANY),
    ("llama", {"head_dim": HUGE}, REFUSED),
    *[("vit", {"image_size": value}, REFUSED) for value in ([16, 16, 16], [], 0, -16, BIG, "x", {"height": 16})],
    *[("vit", {"patch_size": value}, REFUSED) for value in (0, -8, "x")],
    ("vit", {"patch_size": [8, 8, 8]}, ANY),  # transformers takes the first two
    *[("vit", {"num_channels": value}, REFUSED) for value in (-3, "x")],
    ("vit", {"num_channels": 10**6}, ANY),
    ("bert", {"architectures": 5}, REFUSED),
    ("bert", {"architectures": "BertForSequenceClassification"}, ANY),
    ("bert", {"architectures": [ESC]}, REFUSED),
    ("bert", {"model_type": ESC}, REFUSED),
    ("bert", {"model_type": "../../x"}, REFUSED),
    ("bert", {"model_type": ["bert"]}, REFUSED),
    ("bert", {"dtype": "os.system"}, ANY),
    ("bert", {"torch_dtype": ESC}, ANY),
    ("bert", {"attn_implementation": "kernels-community/evil", "_attn_implementation": "evil"}, ANY),
    ("bert", {"problem_type": "x"}, ANY),
    ("bert", {"pruned_heads": {"x": [1]}}, ANY),
    ("bert", {"__class__": "x", "to_dict": 5}, ANY),
]
FLAGS: list[tuple[list[str], str]] = [
    *[(["--batch", value], REFUSED) for value in ("0", "-1", "1e3", "1000000", "1" + "0" * 18, "x", "")],
    *[(["--tokens", value], REFUSED) for value in ("0", "-5", "1000000000000")],
    *[(["--lora", value], REFUSED) for value in ("-1", "1000000000", "x")],
    (["--task", f"{ESC}"], REFUSED), (["--task", "causal-lm"], ANY), (["--budget", "1"], REFUSED),
    (["--devices", "1000000000"], REFUSED), (["--devices", "1,2,x"], REFUSED), (["--lossy", "maybe"], REFUSED),
]
SCRIPTS: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", REFUSED), "a syntax error": ("import (", REFUSED), "binary": (b"\xff\0\xfe", REFUSED), "no training": ("print(1)", REFUSED),
    "exits with 0": ("import sys; sys.exit(0)", REFUSED), "leaves without a word": ("import os; os._exit(0)", REFUSED), "raises with escapes": (f"raise ValueError({ESC!r})", REFUSED),
    "raises a forged line": ("raise ValueError('a\\ntrainer: error: forged')", REFUSED), "prints escapes": (f"print({ESC!r})", REFUSED), "recurses": ("def f(): f()\nf()", REFUSED),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", REFUSED), "raises what cannot be printed": ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E", REFUSED),
    "closes its streams": ("import os; [os.close(n) for n in range(3, 50)]", ANY), "20,000 brackets": ("x = " + "(" * 20_000 + ")" * 20_000, REFUSED),
}


def _model(kind: str, changes: dict[str, Any]) -> list[str]:
    content = {"model_type": kind, **KINDS[kind], **changes}
    return wrote("m/config.json", json.dumps(content), PLAN)


def plans() -> Iterable[Case]:
    """Configurations with absurd numbers and types, flags, and scripts."""
    for kind in KINDS:
        yield Case("plan hf", f"{kind} as it is", partial(_model, kind, {}), RAN)
    for kind, changes, expect in CONFIGS:
        given = f"{kind}: " + ", ".join(f"{key}={value!r}"[:60] for key, value in changes.items())
        yield Case("plan hf", given, partial(_model, kind, changes), expect)  # that nothing fits is exit code 1
    for flags, expect in FLAGS:
        yield Case("plan hf", " ".join(flags), lambda flags=flags: [*_model("bert", {}), *flags], expect)
    path = "m/config.json"
    files: dict[str, Callable[[], Any]] = {
        "a named pipe": lambda: replaced(path, os.mkfifo), "a link to /dev/zero": lambda: replaced(path, partial(os.symlink, "/dev/zero")), "a link to itself": lambda: replaced(path, partial(os.symlink, "config.json")),
        "nested deep": lambda: wrote(path, '{"model_type": "bert", "a":' + '{"a":' * 100_000 + "1" + "}" * 100_001, []), "a list": lambda: wrote(path, "[]", []), "5,000 digits": lambda: wrote(path, '{"model_type": "bert", "vocab_size": ' + "9" * 5000 + "}", []),
        "100 MB": lambda: wrote(path, '{"model_type": "bert", "a": "' + "x" * 100_000_000 + '"}', []), "binary": lambda: wrote(path, b"\xff\0", []), "empty": lambda: wrote(path, "", []),
        "code of its own": lambda: (wrote(path, json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.M"}, "architectures": ["EvilForCausalLM"]}), []), wrote("m/evil.py", CODE, [])),
        "quantised": lambda: wrote(path, json.dumps({"model_type": "bert", "quantization_config": {"quant_method": "evil"}}), []),
    }
    for given, make in files.items():
        yield Case("plan hf", f"config.json: {given}", lambda make=make: done(lambda: (Path("m").mkdir(), make()), PLAN), REFUSED, code=2)
    for name in ("", ".", "../victim", "/dev/zero", "/proc/self", f"./{ESC}", "own.py", "x" * 5000, "a/b/c/d", "\udcff"):
        yield Case("plan hf", f"hf:{name}", partial(list, ["plan", f"hf:{name}", "--gpu", "a100-80gb"]), REFUSED, code=2)
    for given, (text, expect) in SCRIPTS.items():
        yield Case("plan script", given, partial(wrote, "s.py", text, ["plan", "--script", "s.py", "--gpu", "a100-80gb"]), expect)
