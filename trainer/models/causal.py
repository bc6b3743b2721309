"""Any language model of transformers that predicts the next token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.errors import RecipeError, RunError, require, require_choice
from trainer.models.text import NO_TOKENIZER, TextModel, require_tokens
from trainer.recipe import UNSUPPORTED_VALUES
from trainer.values import DataSpec, Loss, Task

Kernels = Literal["auto", "liger", "none"]
LMLoss = Literal["next_token", "dpo", "ipo", "orpo", "simpo"]
if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from typing_extensions import Self


@dataclass
class CausalLM(TextModel):
    """Any ``AutoModelForCausalLM``: GPT-2, Llama, Qwen3, Gemma, SmolLM2, ...

    The loss is computed here, never by the model itself: the cross entropy summed over all predicted tokens, weighted
    by their number. Auxiliary losses of mixtures of experts depend on how a batch is cut, so they are left out.

    Args:
        padding_free: skip padding: concatenate the texts of a micro-batch, each of which attends only to itself. The
            gradient is the same. null enables it for certified architectures (docs/packing.md), except in subclasses
            with a custom module or custom losses, which must set true.
        train_last_blocks: freeze everything except the last n blocks and the layers after them; a head that is tied to
            the embedding stays frozen with it. null trains everything.
        lora: train adapters in the blocks instead of all weights.
        loss_chunk: number of tokens whose logits are held at once; 0 holds all logits, which are large for long texts
            and large vocabularies. null uses as many tokens as fit in 64 MiB in fp32 (on NVIDIA GPUs in 128 MiB in
            the compute dtype), or all tokens if the logits do not come from a linear layer.
        kernels: liger computes RMSNorm, rotary embedding and gated MLPs with the Triton kernels of that package on
            CUDA GPUs, none with torch; auto uses liger if installed and certified (docs/techniques/kernels.md).
        tile_tokens: number of tokens whose MLPs and norms are computed at once; 0 for all. null uses 16 tiles for
            micro-batches of at least 32,768 tokens, in certified architectures (docs/long-texts.md).
        loss: next_token, or for the data Preferences dpo, ipo, orpo or simpo (docs/preferences.md).
        beta: strength of a loss of preferences; null is 0.1.
        gamma: target margin of the rewards of simpo; null is 0.5.
    """

    name: str = "llama"
    tokenizer: str | None = None
    padding_free: bool | None = None
    loss_chunk: int | None = None
    kernels: Kernels = "auto"  # lossless up to rounding; installing the optional package requests it
    tile_tokens: int | None = None
    loss: LMLoss = "next_token"
    beta: float | None = None
    gamma: float | None = None

    auto = "AutoModelForCausalLM"
    head_is_new = False

    @property
    def task(self) -> Task:  # type: ignore[override]
        """The task: language, or preference for a loss of pairs of answers."""
        return "language" if self.loss == "next_token" else "preference"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with log-probabilities before training."""
        return self.loss in ("dpo", "ipo")

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = UNSUPPORTED_VALUES.get(("model.loss", str(self.loss)))
        require(reason is None, f"model.loss={self.loss} is not supported: {reason}")
        require_choice("model.loss", self.loss, LMLoss)
        for key, value, users in (("beta", self.beta, "dpo, ipo, orpo, simpo"), ("gamma", self.gamma, "simpo")):
            if value is not None and self.loss not in users.split(", "):
                raise RecipeError(f"model.{key}={value} has no effect with model.loss={self.loss}: leave it out")
        require(self.beta is None or self.beta > 0, f"model.beta={self.beta} must be greater than 0, or null")
        require_choice("model.kernels", self.kernels, Kernels)
        require_tokens("loss_chunk", self.loss_chunk)
        require_tokens("tile_tokens", self.tile_tokens)
        self._can_pack: bool | None = None  # not determined yet

    def packs(self) -> bool:
        if self._can_pack is None and self.padding_free is not False:
            from trainer.models.packed_attention import unsupported_reason

            why = unsupported_reason(self.unloaded()._configuration())  # a plan may use a packaged configuration
            if why is not None and self.padding_free is not None:
                cause = f"model.padding_free=true is not supported for model.name={self.name!r}, because {why}"
                raise RecipeError(f"{cause}: leave it at null, which pads")
            self._can_pack = why is None and (self.padding_free is True or self._is_unmodified())
        return bool(self._can_pack)

    def weigh(self, batch: Any) -> dict[str, float]:
        """Return the number of predicted tokens: labels other than -100, without the first of each row; or of pairs."""
        if self.task == "preference" and "labels" in batch:
            return {"loss": float(len(batch["labels"]))}
        return super().weigh({"labels": batch["labels"][:, 1:]} if "labels" in batch else batch)

    def packed(self, batch: Any) -> Any:
        """Pack into one row if supported, and add ``places`` that predict a token, on the host, without a GPU sync."""
        if not isinstance(batch, Mapping) or "labels" not in batch:
            return batch
        if self.task == "preference":
            from trainer.models.preference import packed_pairs

            return packed_pairs(batch, self.packs(), with_prompts=self.loss == "orpo")
        from trainer.models.chunked_loss import target_positions

        if "attention_mask" in batch and self.packs():
            from trainer.models.packed_attention import pack_documents

            batch = pack_documents(batch) or batch
        return {**batch, "places": target_positions(batch["labels"])}

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """Yield the cross entropy of the next tokens: position t predicts label t + 1, and -100 is ignored.

        The batch has ``input_ids``, ``attention_mask`` and ``labels``, int64 ``(n, length)``, or is ``packed``. For a
        loss of preferences it must be ``packed``, from tensors ``(n, 2, length)`` of pairs.
        """
        if self.task == "preference":
            from trainer.models.preference import pair_loss

            yield pair_loss(self, module, batch)
            return
        yield Loss(module(**batch), targets=batch["labels"][:, 1:])

    def for_spec(self, spec: DataSpec) -> Self:
        """Return the model to plan with; the length of a pair is that of two texts."""
        halved = spec.length and spec.length // 2 if self.task == "preference" else spec.length
        return super().for_spec(replace(spec, length=halved))

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and serving engines load. Wrong weights raise ``RunError``."""
        self._complete_generation(cast(Any, module))
        super().save(module, folder, state)
        wrong = self._find_mismatch(folder, self.merged_state(module, state))
        if wrong is not None:
            cause = f"{folder} does not match the trained weights: {wrong} would be loaded with different values"
            raise RunError(f"{cause}: check the disk, and write the folder again with trainer checkpoint export")

    def _find_mismatch(self, folder: Path, merged: Mapping[str, Tensor]) -> str | None:
        """Return the first tensor that ``folder`` would load unlike ``merged``, reading single ones if possible."""
        import torch
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        from trainer.weights.streaming import WeightFiles, skeleton_on_meta, tied_names

        saved = self.saved_in(folder)
        saved.tokenizer = NO_TOKENIZER
        skeleton: Any = skeleton_on_meta(saved)
        if any(isinstance(one, WeightConverter) for one in get_model_conversion_mapping(skeleton)):
            loaded = saved.build().state_dict()
            return next((name for name in loaded if not torch.equal(loaded[name], merged[name].to(loaded[name]))), None)
        tied = {name: names for names in tied_names(skeleton) for name in names}
        with WeightFiles() as files:
            for name, place in saved.pretrained().stored.items():
                value = files.read(place.file, place.key)
                if any(not torch.equal(value, merged[one].cpu()) for one in tied.get(name, [name])):
                    return name
        return None

    def _config_from_data(self) -> dict[str, Any]:
        """Return the tokenizer's vocabulary size and special tokens, which replace the configuration's defaults."""
        tokenizer = self.tokenizer_or_none()
        if tokenizer is None:
            return {}
        special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if special["pad_token_id"] == special["eos_token_id"]:
            special["pad_token_id"] = None  # otherwise the end token's embedding would get no gradient
        return {"vocab_size": len(tokenizer), **special}

    def _finalize_module(self, module: nn.Module) -> nn.Module:
        """Make the module return the summed loss when given labels, and accept packed texts if supported."""
        from trainer.models.chunked_loss import patch_forward_to_return_loss
        from trainer.models.liger import use_kernels
        from trainer.models.token_tiles import use_tiles

        module = super()._finalize_module(module)
        ahead = _find_bidirectional_setting(module.config)
        cause = f"model.name={self.name!r} sees the tokens that it must predict ({ahead})"
        require(ahead is None, f"{cause}: use a decoder, or change that setting with model.config")
        self._require_embeddings(module)
        # Before transformers 5.21, its ``sdpa`` silently ignored the cap on Gemma 2's attention scores.
        if self.packs() or getattr(module.config, "attn_logit_softcapping", None) is not None:
            from trainer.models.packed_attention import NAME, register_packed_attention

            register_packed_attention()
            module.set_attn_implementation(NAME)  # type: ignore[operator]
        use_kernels(module, self.kernels)
        use_tiles(module, self.tile_tokens)
        patch_forward_to_return_loss(module, self.loss_chunk)
        return module

    def has_tiles(self, tokens: int) -> bool:
        """Return whether MLPs and norms of a text of ``tokens`` tokens are computed in tiles."""
        from trainer.models.token_tiles import CERTIFIED, num_tiles

        able = self.tile_tokens != 0 and self._configuration().model_type in CERTIFIED
        return able and num_tiles(tokens, self.tile_tokens) > 1

    def _complete_generation(self, module: Any) -> None:
        """Set ``generation_config`` to that of the weights plus this end token, at which served models stop."""
        from transformers import GenerationConfig

        published = None if self.weights is None else self._folder(self.weights) / "generation_config.json"
        if published is not None and published.is_file():  # not read yet if weights were streamed
            module.generation_config = GenerationConfig.from_dict(json.loads(published.read_text()))
        config, tokenizer = module.generation_config, self.tokenizer_or_none()
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
            ends = [tokenizer.eos_token_id, *(one for one in ends if one not in (None, tokenizer.eos_token_id))]
            config.eos_token_id = ends if len(ends) > 1 else ends[0]
            module.config.eos_token_id = tokenizer.eos_token_id
        try:
            config.validate(strict=True)
        except ValueError:  # some published ones set a temperature without do_sample and could not be saved
            config.do_sample = True


def _find_bidirectional_setting(config: Any) -> str | None:
    """Return the setting that lets a token see later tokens, as in encoders, or ``None``."""
    entries = {"is_decoder": False, "is_causal": False, "causal": False, "use_bidirectional_attention": True}
    if "gpt_neox" in config.model_type:  # GPT-NeoX ignores this setting
        del entries["is_decoder"]
    return next((f"{key}={value}" for key, value in entries.items() if getattr(config, key, None) is value), None)
