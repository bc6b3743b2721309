"""What upstream says about cells that are not exact: a thread, a version with a fix, or a page of ours."""

from __future__ import annotations

from dataclasses import dataclass

GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Known:
    """A defect, or a documented limit, and the cells that show it.

    Args:
        trainers: names of adapters; ``("*",)`` for every one.
        cases: names of cases; ``("*",)`` for every one.
        cause: one line.
        thread: address of the issue or pull request upstream, if there is one.
        since: date of the thread.
        fixed_in: first version with a fix.
        page: of ``docs/upstream``, with a reproduction.
    """

    trainers: tuple[str, ...]
    cases: tuple[str, ...]
    cause: str
    thread: str = ""
    since: str = ""
    fixed_in: str = ""
    page: str = ""


SHORT = ("short-window", "short-window-2-epochs", "schedule-short", "2-ranks-short")
RAGGED = ("ragged", "regression", "multi-label", "label-smoothing", "two-losses")
TOKENS = ("texts", "ragged-texts", "padded", "masked", "gpt2", "tokens", "2-ranks-texts", "2-ranks-padded")
WEIGHTS = ("class-weights", "2-ranks-weights")
MEANS = (*RAGGED, *TOKENS, *WEIGHTS)
"""Cases that are exact only if micro-batches weigh by their items."""

KNOWN: tuple[Known, ...] = (
    Known(
        ("transformers", "llamafactory"),
        ("moe",),
        "the router's loss is multiplied by gradient_accumulation_steps",
        page="transformers-router-loss.md",
    ),
    Known(
        ("accelerate_remedy", "lightning_drop_in", "litgpt", "torchtitan", "torchtune", "transformers_remedy"),
        ("moe",),
        "the loss of this row comes from the logits, without the router's loss",
    ),
    Known(("*",), ("moe", "batch-norm"), "samples of a micro-batch depend on each other"),
    Known(
        ("accelerate", "accelerate_remedy", "llamafactory", "transformers", "transformers_remedy", "trl"),
        ("2-ranks-uneven",),
        "documented: even_batches=True repeats samples of the start",
        page="transformers-repeated-samples.md",
    ),
    Known(
        ("composer", "composer_remedy", "deepspeed", "fabric", "lightning", "lightning_remedy", "litgpt"),
        ("2-ranks-uneven",),
        "torch's DistributedSampler repeats samples",
        f"{GITHUB}pytorch/pytorch/issues/25162",
        "2019-08-25",
    ),
    Known(
        ("accelerate",),
        SHORT,
        "the loss is divided by gradient_accumulation_steps, whatever the window has",
        page="accelerate-windows.md",
    ),
    Known(
        ("accelerate",),
        MEANS,
        "documented: micro-batches have equal weights, unless items are counted ahead",
        f"{GITHUB}huggingface/accelerate/pull/3193",
        "2024-10-24",
        page="accelerate-windows.md",
    ),
    Known(
        ("transformers",),
        ("classifier", "tokens", "regression", "multi-label", "2-ranks-classifier"),
        "heads that take **kwargs do not divide by num_items_in_batch",
        f"{GITHUB}huggingface/transformers/issues/47688",
        "2026-07-31",
        page="transformers-classifiers.md",
    ),
    Known(
        ("transformers", "transformers_remedy"),
        ("gpt2",),
        "first tokens are counted if the model has no loss_type",
        page="transformers-gpt2-first-token.md",
    ),
    Known(
        ("transformers",),
        ("ragged", "label-smoothing", "two-losses", *WEIGHTS),
        "micro-batches have equal weights if the model takes no num_items_in_batch",
        f"{GITHUB}huggingface/transformers/issues/37766",
        "2025-04-24",
        page="transformers-mean-of-means.md",
    ),
    Known(
        ("transformers_remedy",),
        WEIGHTS,
        "num_items_in_batch counts labels and not their weights",
        page="transformers-class-weights.md",
    ),
    Known(
        ("transformers_remedy",),
        ("two-losses",),
        "Trainer takes the labels away, and the forward of this case needs them",
    ),
    Known(
        ("trl",), ("gpt2",), "first tokens are counted if the model has no loss_type", page="trl-gpt2-first-token.md"
    ),
    Known(
        ("llamafactory", "torchtune"),
        ("lora",),
        "peft rejects the version of torchao that the trainer needs",
    ),
    Known(
        ("llamafactory",),
        ("*",),
        "needs transformers <= 5.6.0, which counts first tokens",
        f"{GITHUB}huggingface/transformers/pull/46204",
        "2026-05-26",
        "transformers 5.10.1",
    ),
    Known(
        ("lightning",),
        ("2-ranks-short",),
        "documented: use_distributed_sampler shuffles; a short window has too small a gradient",
        f"{GITHUB}Lightning-AI/pytorch-lightning/issues/19987",
        "2024-06-17",
        page="lightning-windows.md",
    ),
    Known(
        ("lightning",),
        SHORT,
        "the loss is divided by accumulate_grad_batches, whatever the window has",
        f"{GITHUB}Lightning-AI/pytorch-lightning/issues/19987",
        "2024-06-17",
        page="lightning-windows.md",
    ),
    Known(
        ("lightning_remedy",),
        (*SHORT, "regression", "multi-label"),
        "the documented loop takes no step for a last window that is not full",
    ),
    Known(
        ("lightning", "lightning_remedy"),
        MEANS,
        "micro-batches have equal weights",
        f"{GITHUB}Lightning-AI/pytorch-lightning/issues/20350",
        "2024-10-19",
        page="lightning-windows.md",
    ),
    Known(("lightning_drop_in",), ("2-ranks-short",), "the adapter's sampler deals the samples in another order"),
    Known(
        ("fabric",),
        (*SHORT, *MEANS),
        "the documented loop weighs micro-batches equally, and drops the last window",
        page="lightning-fabric-loop.md",
    ),
    Known(("keras",), (*SHORT, *MEANS), "windows go on over the ends of epochs", page="keras-windows.md"),
    Known(("litgpt",), SHORT, "no step for a last window that is not full", page="litgpt-windows.md"),
    Known(("litgpt",), MEANS, "micro-batches have equal weights", page="litgpt-means.md"),
    Known(
        ("torchtune",),
        (*SHORT, "ragged-texts"),
        "no step at the end of an epoch, and samples that do not fill a micro-batch are dropped",
        f"{GITHUB}meta-pytorch/torchtune/pull/2745",
        "2025-05-17",
    ),
    Known(("torchtune",), TOKENS, "tokens are counted before the shift", page="torchtune-first-token.md"),
    Known(
        ("torchtitan",),
        SHORT,
        "documented: a step without enough data is canceled",
        f"{GITHUB}pytorch/torchtitan/pull/1238",
        "2025-06-04",
    ),
    Known(
        ("composer_remedy",),
        WEIGHTS,
        "the adapter rounds the weight of a micro-batch to a whole number of tokens",
    ),
    Known(
        ("composer",),
        MEANS,
        "documented: micro-batches weigh by samples, unless accumulate_train_batch_on_tokens is set",
        f"{GITHUB}mosaicml/composer/pull/3273",
        "2024-06-06",
    ),
    Known(
        ("deepspeed",),
        SHORT,
        "known: an incomplete window is left to the user",
        f"{GITHUB}deepspeedai/DeepSpeed/issues/7439",
        "2025-07-20",
    ),
    Known(("deepspeed",), MEANS, "the loss is divided by gradient_accumulation_steps"),
)


def known(trainer: str, case: str) -> Known | None:
    """Return the first entry about a cell, if there is one."""
    for entry in KNOWN:
        if {trainer, "*"} & set(entry.trainers) and {case, "*"} & set(entry.cases):
            return entry
    return None
