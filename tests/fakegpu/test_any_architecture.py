"""Architectures of other people take a step on the fake GPU: transformers, torchvision and timm, where it is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from torchvision.models import segmentation

from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.system.child_jobs import run_in_child

pytestmark = pytest.mark.slow

SMALL = {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
GROUPED = SMALL | IDS | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SEQ2SEQ = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")}
STAGES = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
EYES = {"image_size": 32, "patch_size": 8}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": SMALL,
    "RobertaForSequenceClassification": SMALL | IDS,
    "AlbertForSequenceClassification": SMALL | {"embedding_size": 8},
    "ElectraForTokenClassification": SMALL | {"embedding_size": 8},
    "DebertaV2ForSequenceClassification": SMALL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DistilBertForSequenceClassification": {"vocab_size": 67, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2},
    "BigBirdForSequenceClassification": SMALL | {"attention_type": "original_full"},
    "LongformerForSequenceClassification": SMALL | {"attention_window": 8, "pad_token_id": 1},
    "XLNetForSequenceClassification": {"vocab_size": 67, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    "GPT2LMHeadModel": {"vocab_size": 67, "n_embd": 16, "n_layer": 2, "n_head": 2} | IDS,
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Gemma2ForCausalLM": GROUPED,
    "MixtralForCausalLM": GROUPED | {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": GROUPED | EXPERTS,
    "PhiForCausalLM": SMALL | IDS,
    "OPTForCausalLM": SMALL | IDS | {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "BloomForCausalLM": {"vocab_size": 67, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "FalconForCausalLM": SMALL,
    "GPTNeoXForCausalLM": SMALL,
    "MambaForCausalLM": {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "T5ForConditionalGeneration": {
        "vocab_size": 67,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    | {"decoder_start_token_id": 0},
    "BartForConditionalGeneration": {"vocab_size": 67, "d_model": 16, **SEQ2SEQ, **IDS, "decoder_start_token_id": 0},
    "ViTForImageClassification": SMALL | EYES,
    "ViTMAEForPreTraining": SMALL | EYES | {"decoder_hidden_size": 16, "decoder_num_attention_heads": 2},
    "SwinForImageClassification": {
        "image_size": 32,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 4,
    },
    "ConvNextForImageClassification": STAGES,
    "ResNetForImageClassification": STAGES | {"embedding_size": 8},
    "SegformerForSemanticSegmentation": STAGES | {"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 8},
    "Wav2Vec2ForCTC": SMALL
    | {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    | {"num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2},
    "WhisperForConditionalGeneration": {"vocab_size": 67, "d_model": 16, **SEQ2SEQ, **IDS, "decoder_start_token_id": 0}
    | {"num_mel_bins": 8, "max_source_positions": 16},
}
TORCHVISION = """alexnet vgg11_bn resnet18 googlenet squeezenet1_1 shufflenet_v2_x0_5
    mobilenet_v2 mobilenet_v3_small mnasnet0_5 efficientnet_b0 regnet_y_400mf convnext_tiny swin_t""".split()  # noqa: SIM905
TIMM = """resnet10t convnextv2_atto mobilenetv4_conv_small nfnet_l0 levit_128s vit_tiny_patch16_224 xcit_nano_12_p16_224
    mambaout_femto""".split()  # noqa: SIM905


def text_or_picture(name: str) -> nn.Module:
    kind = getattr(transformers, name)
    return kind(kind.config_class(**TRANSFORMERS[name]))


def inputs_of(name: str) -> dict[str, Tensor]:
    ids, ones = torch.arange(24).view(2, 12) + 2, torch.ones(2, dtype=torch.long)
    if "Wav2Vec2" in name:
        return {"input_values": torch.randn(2, 800), "labels": ids[:, :5]}
    if "Whisper" in name:
        return {"input_features": torch.randn(2, 8, 32), "labels": ids}
    if "Image" in name or "Pre" in name:
        return {"pixel_values": torch.randn(2, 3, 32, 32)} | ({} if "Pre" in name else {"labels": ones})
    if "Segmentation" in name:
        return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.ones(2, 64, 64, dtype=torch.long)}
    mask = (torch.arange(12) < torch.tensor([[12], [8]])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ones if "Sequence" in name else ids % 2}


def step(module: nn.Module, loss_of: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.AdamW(module.parameters())
    loss = loss_of()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def written(name: str) -> None:
    module = text_or_picture(name).cuda().train()
    inputs = {key: value.cuda() for key, value in inputs_of(name).items()}
    step(module, lambda: module(**inputs).loss)


def seen(module: nn.Module, side: int) -> None:
    module = module.cuda().train()

    def loss_of() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = module(torch.randn(2, 3, side, side).cuda())
            return F.cross_entropy(out if isinstance(out, Tensor) else out[0], torch.zeros(2, dtype=torch.long).cuda())

    step(module, loss_of)


def classified(name: str) -> None:
    seen(getattr(models, name)(**({"init_weights": False} if name == "googlenet" else {})), 64)


def segmented(name: str) -> None:
    module = getattr(segmentation, name)(weights_backbone=None, num_classes=3).cuda().train()
    step(module, lambda: module(torch.randn(2, 3, 64, 64).cuda())["out"].sum())


def from_timm(name: str) -> None:
    import timm

    module = timm.create_model(name, num_classes=5)
    seen(module, module.pretrained_cfg["input_size"][-1])


def refused(take: Callable[[str], None], names: list[str]) -> dict[str, str]:
    """Those that take no step, and why."""
    found = {}
    for name in names:
        try:
            with tracing(Target(gpu_named("a100-80gb"))) as tracer:
                take(name)
            assert tracer.trace.events
        except Exception as error:  # noqa: PERF203 - all of them are wanted
            found[name] = repr(error)
    return found


@pytest.mark.parametrize(
    ("take", "names"),
    [
        (written, [*TRANSFORMERS]),
        (classified, TORCHVISION),
        (segmented, ["lraspp_mobilenet_v3_large"]),
    ],
)
def test_architectures_of_installed_libraries_take_a_step(take: Callable[[str], None], names: list[str]) -> None:
    assert run_in_child(partial(refused, take, names)) == {}


def test_architectures_of_timm_take_a_step() -> None:
    pytest.importorskip("timm")
    assert run_in_child(partial(refused, from_timm, TIMM)) == {}
