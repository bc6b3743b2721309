"""Any language model of transformers that predicts the next token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from trainer.errors import RunError, require, require_choice
from trainer.models.lora import LoRA
from trainer.models.text import NO_TOKENIZER, TextModel
from trainer.values import Loss, Task

Kernels = Literal["auto", "liger", "none"]
if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn


@dataclass
class CausalLM(TextModel):
    """Any ``AutoModelForCausalLM``: GPT-2, Llama, Qwen3, Gemma, SmolLM2, ...

    The loss is computed here, never by the model itself: the sum of the cross entropy of every token that is to be
    predicted from those before it. Its weight is the number of these tokens. Auxiliary losses of mixtures of experts,
    which depend on how a batch is cut, are left out.

    Args:
        config: entries of the configuration to override, such as {num_hidden_layers: 2, hidden_size: 128}.
        padding_free: compute on the tokens that are there only, the texts of a micro-batch one after another, each
            attending to itself: the same gradient. null does so for the architectures that are certified for it
            (docs/packing.md), but in no subclass with a module or losses of its own, unless it says true.
        train_last_blocks: freeze all but the last n blocks and what follows them; a head that is tied to the embedding
            stays frozen with it. null trains everything.
        lora: train adapters in the blocks instead of all weights.
        loss_chunk: how many tokens' logits are held at once; 0 holds those of all, which a long text and many words
            make large. null is as many as take 64 MiB in fp32 (on NVIDIA GPUs 128 MiB in the type of the products), or
            all of a model whose logits are no linear layer's.
        kernels: liger computes RMSNorm, rotary embedding and gated MLPs by the Triton kernels of that package on CUDA
            GPUs, none by torch's operations; auto is liger where it is installed and certified (docs/techniques.md).
    """

    name: str = "llama"
    weights: str | None = None
    tokenizer: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    dropout: float | None = None
    padding_free: bool | None = None
    train_last_blocks: int | None = None
    lora: LoRA = field(default_factory=LoRA)
    loss_chunk: int | None = None
    kernels: Kernels = "auto"  # lossless but for rounding; to install the optional package is to ask for it

    auto = "AutoModelForCausalLM"
    head_is_new = False
    task: ClassVar[Task] = "language"  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.kernels", self.kernels, Kernels)
        whole = isinstance(self.loss_chunk, int) and not isinstance(self.loss_chunk, bool) and self.loss_chunk >= 0
        fix = "say how many tokens, 0 for all, or null"
        require(self.loss_chunk is None or whole, f"model.loss_chunk={self.loss_chunk!r} is no number of tokens: {fix}")
        self._can_pack: bool | None = None  # not looked for yet

    def packs(self) -> bool:
        """Whether the texts of a micro-batch lie in one row, as ``padding_free`` says."""
        if self._can_pack is None and self.padding_free is not False:
            from trainer.models.packed_attention import why_not

            why = why_not(self.unloaded()._configuration())  # of a published one that is here, where a plan asks
            refused = f"model.padding_free=true cannot be for model.name={self.name!r}: {why}"
            require(why is None or self.padding_free is None, f"{refused}; leave it at null, which pads")
            own = ("build", "skeleton", "losses")
            plain = all(getattr(type(self), name) is getattr(CausalLM, name) for name in own)
            self._can_pack = why is None and (plain or self.padding_free is True)
        return bool(self._can_pack)

    def weigh(self, batch: Any) -> dict[str, float]:
        """The number of tokens that are predicted: the labels that are not -100, but for the first of each row."""
        return super().weigh({"labels": batch["labels"][:, 1:]} if "labels" in batch else batch)

    def packed(self, batch: Any) -> Any:
        """The micro-batch, in one row where the module computes so, with the ``places`` of the tokens that predict:
        known on the host, they need no waiting."""
        if not isinstance(batch, Mapping) or "labels" not in batch:
            return batch
        from trainer.models.token_loss import predicted_places

        if "attention_mask" in batch and self.packs():
            from trainer.models.packed_attention import pack_documents

            batch = pack_documents(batch) or batch
        return {**batch, "places": predicted_places(batch["labels"])}

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """The cross entropy of the next tokens, from ``input_ids``, ``attention_mask`` and ``labels``, int64
        ``(n, length)``, or ``packed``: position t predicts label t + 1, and -100 is not to be predicted."""
        yield Loss(module(**batch), targets=batch["labels"][:, 1:])

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that ``AutoModelForCausalLM`` and serving engines load, and read its weights again.

        Raises:
            RunError: when other values would be loaded than were saved.
        """
        self._complete_generation(cast(Any, module))
        super().save(module, folder, state)
        wrong = self._misread(folder, self.merged_state(module, state))
        fix = "look at the disk, and write it again by trainer checkpoint export"
        if wrong is not None:
            raise RunError(f"{folder} does not hold what was trained: {wrong} would be loaded with other values: {fix}")

    def _misread(self, folder: Path, merged: Mapping[str, Tensor]) -> str | None:
        """The name of the first tensor that is loaded from ``folder`` otherwise than it is in ``merged``. One is read
        at a time, but all of a model of which transformers computes weights from several in a file."""
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
        stored = saved.pretrained().stored
        tied = {name: names for names in tied_names(skeleton) for name in names}
        with WeightFiles() as files:
            for name, place in stored.items():
                value = files.read(place.file, place.key)
                if any(not torch.equal(value, merged[one].cpu()) for one in tied.get(name, [name])):
                    return name
        return None

    def _of_data(self) -> dict[str, Any]:
        """The size of the vocabulary, and the special tokens, of which a configuration has those of another."""
        tokenizer = self.tokenizer_or_none()
        if tokenizer is None:
            return {}
        special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if special["pad_token_id"] == special["eos_token_id"]:  # or no gradient would reach the end's embedding
            special["pad_token_id"] = None
        return {"vocab_size": len(tokenizer), **special}

    def _finished(self, module: nn.Module) -> nn.Module:
        """The module, which gives the summed loss where it gets labels, and takes packed texts where it can."""
        from trainer.models.liger import use_kernels
        from trainer.models.token_loss import give_loss

        module = super()._finished(module)
        ahead = _sees_ahead(module.config)
        seen = f"model.name={self.name!r} sees the tokens that it is to predict ({ahead}): "
        require(ahead is None, f"{seen}take a decoder, or set that by model.config")
        tokenizer, words = self.tokenizer_or_none(), module.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        few = f"model.tokenizer has {len(tokenizer or ())} words, and model.name={self.name!r} is made for {words}"
        require(tokenizer is None or len(tokenizer) <= words, f"{few}: take the tokenizer that belongs to it")
        # Before transformers 5.21, its ``sdpa`` left the cap of Gemma 2's scores out without a word.
        if self.packs() or getattr(module.config, "attn_logit_softcapping", None) is not None:
            from trainer.models.packed_attention import NAME, register

            register()
            module.set_attn_implementation(NAME)  # type: ignore[operator]
        use_kernels(module, self.kernels)
        give_loss(module, self.loss_chunk)
        return module

    def _complete_generation(self, module: Any) -> None:
        """Let ``generation_config.json`` say what the weights came with, and the token that ends a text here, which a
        chat template may have changed: without it a served model would not stop."""
        from transformers import GenerationConfig

        published = None if self.weights is None else self._folder(self.weights) / "generation_config.json"
        if published is not None and published.is_file():  # which nobody has read where weights were streamed
            module.generation_config = GenerationConfig.from_dict(json.loads(published.read_text()))
        config, tokenizer = module.generation_config, self.tokenizer_or_none()
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
            ends = [tokenizer.eos_token_id, *(one for one in ends if one not in (None, tokenizer.eos_token_id))]
            config.eos_token_id = ends if len(ends) > 1 else ends[0]
            module.config.eos_token_id = tokenizer.eos_token_id
        try:
            config.validate(strict=True)
        except ValueError:  # a temperature without do_sample, as some are published: it would not be saved
            config.do_sample = True


def _sees_ahead(config: Any) -> str | None:
    """The entry of a configuration that lets a token see those behind it, as of encoders; ``None`` for none."""
    entries = {"is_decoder": False, "is_causal": False, "causal": False, "use_bidirectional_attention": True}
    if "gpt_neox" in config.model_type:  # which never reads it
        del entries["is_decoder"]
    return next((f"{key}={value}" for key, value in entries.items() if getattr(config, key, None) is value), None)
