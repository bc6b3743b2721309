"""The comparison of losses over architectures: no sum is refused, every mean is, and weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from helpers.problems import make_fabric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from trainer.contract import Model
from trainer.engine.forward import Forward
from trainer.engine.loss_check import LossCheck
from trainer.engine.window import MicroBatch, Window
from trainer.errors import RecipeError
from trainer.values import Loss

SIZES = {
    32: "hidden_size d_model dim n_embd emb_dim embedding_size word_embed_proj_dim image_size",
    48: "intermediate_size hidden_dim ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner",
    2: "num_hidden_layers num_layers n_layers n_layer encoder_layers decoder_layers num_decoder_layers "
    "num_attention_heads n_heads n_head num_heads encoder_attention_heads decoder_attention_heads num_key_value_heads "
    "num_experts_per_tok type_vocab_size eos_token_id",
    16: "d_kv head_dim moe_intermediate_size shared_expert_intermediate_size",
    64: "max_position_embeddings n_positions n_ctx",
    99: "vocab_size",
    0: "pad_token_id",
    1: "bos_token_id",
    4: "num_local_experts num_experts window_size",
    8: "patch_size",
    3: "num_labels",
}
CLASSIFIERS = (
    "albert bert big_bird camembert canine convbert distilbert electra ernie esm flaubert fnet funnel ibert layoutlm "
    "longformer megatron-bert mobilebert modernbert mpnet mra nystromformer rembert roberta roberta-prelayernorm "
    "roc_bert roformer squeezebert tapas xlm xlm-roberta xlnet yoso"
)
DECODERS = (
    "gpt2 gpt_neo gpt_neox llama qwen2 qwen3 gemma gemma2 gemma3_text mistral mixtral phi phi3 opt bloom falcon mpt "
    "mamba biogpt xglm stablelm starcoder2 olmo olmo2 olmoe granite cohere qwen2_moe qwen3_moe gpt_bigcode persimmon "
    "nemotron"
)
BOTH = "t5 bart pegasus marian mbart blenderbot longt5 mt5 switch_transformers led"
VISION = (
    "vit beit resnet regnet mobilenet_v1 mobilenet_v2 mobilevit poolformer segformer cvt dinov2 pvt bit focalnet "
    "data2vec-vision vit_msn"
)
TORCHVISION = (
    "resnet18 mobilenet_v3_small efficientnet_b0 densenet121 shufflenet_v2_x0_5 squeezenet1_1 convnext_tiny swin_t "
    "mnasnet0_5 regnet_y_400mf googlenet"
)
TIMM = (
    "resnet10t convnext_atto mixer_s32_224 vit_tiny_patch16_224 efficientnet_lite0 mobilenetv3_small_050 "
    "edgenext_xx_small gmlp_ti16_224 pit_ti_224 resmlp_12_224 skresnet18 ghostnet_050"
)
SOME = ("bert", "modernbert", "gpt2", "mixtral", "t5", "vit", "resnet10t")


def tiny(kind: str) -> Any:
    config = AutoConfig.for_model(kind)
    for size, names in SIZES.items():
        for name in names.split():
            if type(getattr(config, name, "")) in (int, type(None)) and hasattr(config, name):
                with suppress(NotImplementedError, AttributeError):  # of a setting that follows from others
                    setattr(config, name, size)
    return config


def of_timm(name: str) -> nn.Module:
    sized = {} if name.startswith(("resnet", "convnext", "eff", "mobile", "edge", "sk", "ghost")) else {"img_size": 32}
    return timm.create_model(name, num_classes=3, **sized)


def of_transformers(auto: str) -> Callable[[str], nn.Module]:
    return lambda name: getattr(transformers, auto).from_config(tiny(name))


GROUPS: list[tuple[str, str, Callable[[str], nn.Module]]] = [
    ("texts", CLASSIFIERS, of_transformers("AutoModelForSequenceClassification")),
    ("words", DECODERS, of_transformers("AutoModelForCausalLM")),
    ("pairs", BOTH, of_transformers("AutoModelForSeq2SeqLM")),
    ("images", VISION, of_transformers("AutoModelForImageClassification")),
    ("images", TORCHVISION, lambda name: getattr(torchvision.models, name)(num_classes=3)),
    ("images", TIMM, of_timm),
]
EVERY = {name: (kind, build) for kind, names, build in GROUPS for name in names.split()}


class Summed(Model):
    """The sum of the cross entropy, or its mean."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def losses(self, module: nn.Module, batch: Any) -> Any:
        inputs = [batch["pixel_values"]] if "pixel_values" in batch else []
        named = {key: value for key, value in batch.items() if key not in ("labels", "pixel_values")}
        out = module(*inputs, **named)
        logits, labels = out if isinstance(out, Tensor) else getattr(out, "logits", out), batch["labels"].flatten()
        total = cross_entropy(logits.flatten(0, -2), labels, reduction=self.reduction)
        yield Loss(total, float((labels != -100).sum()))


def batch_of(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (6,), generator=generator)
    if kind == "images":
        return {"pixel_values": torch.randn(6, 3, 32, 32, generator=generator), "labels": labels}
    lengths = torch.randint(5, 24, (6, 1), generator=generator)
    mask = (torch.arange(int(lengths.max())) < lengths).long()
    words = torch.randint(3, 99, mask.shape, generator=generator) * mask
    texts = {"input_ids": words, "attention_mask": mask}
    if kind == "pairs":
        texts["decoder_input_ids"] = words
    return texts | {"labels": labels if kind == "texts" else words.masked_fill(mask == 0, -100)}


def comparison(model: Model, module: nn.Module, kind: str) -> str:
    """What became of it: passed, refused, or not computed."""
    check, batch, failed = LossCheck(model), batch_of(kind), []
    totals = check._totals

    def counted(*args: Any) -> Any:
        found = totals(*args)
        failed.extend([] if found else [1])
        return found

    check._totals = counted
    window = Window([MicroBatch(batch, 0, True, False, range(6))], model.weigh(batch), 6)
    try:
        check.check_additive(Forward(make_fabric("32-true", 1), model, module), window, 1, torch.default_generator)
    except RecipeError:
        return "refused"
    return "not computed" if failed else "passed"


def require_right(name: str) -> None:
    kind, build = EVERY[name]
    torch.manual_seed(0)
    module = build(name).train()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert comparison(Summed("sum"), module, kind) == "passed"
    assert comparison(Summed("mean"), module, kind) == "refused"
    assert module.training
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def fault_of(name: str) -> str:
    try:
        require_right(name)
    except Exception as error:
        return repr(error)[:200]
    return ""


@pytest.mark.parametrize("name", SOME)
def test_a_sum_passes_and_a_mean_is_refused(name):
    require_right(name)


@pytest.mark.slow
def test_a_sum_passes_and_a_mean_is_refused_of_every_architecture(record_property):
    faults = {name: fault_of(name) for name in EVERY}
    wrong = {name: fault for name, fault in faults.items() if fault}
    record_property("table", f"{len(EVERY)} architectures, {len(wrong)} false alarms or misses")
    assert wrong == {}
    assert len(EVERY) >= 100
