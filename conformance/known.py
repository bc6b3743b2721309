"""Why cells are wrong, and what upstream says about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A cause of wrong cells.

    Args:
        trainers: names of adapters.
        cases: names of cases.
        cause: one sentence.
        thread: address of the upstream issue or documentation that mentions it, if one was found.
        since: date of that issue.
        fixed_in: the release with a fix.
        page: file in ``docs/upstream`` with a reproduction and the text of an issue.
    """

    trainers: tuple[str, ...]
    cases: tuple[str, ...]
    cause: str
    thread: str = ""
    since: str = ""
    fixed_in: str = ""
    page: str = ""

    def text(self) -> str:
        """Return the cause with its links, as Markdown for the page of results."""
        since = f", since {self.since}" if self.since else ""
        name = self.thread.removeprefix("https://").removeprefix("github.com/")
        parts = [
            self.cause,
            f"Upstream: [{name}]({self.thread}){since}." if self.thread else "No upstream thread is known.",
            f"Fixed in {self.fixed_in}." if self.fixed_in else "",
            f"[Reproduction](upstream/{self.page})." if self.page else "",
        ]
        return " ".join(part for part in parts if part)


def known(trainer: str, case: str) -> Known | None:
    """Return the cause of a wrong cell."""
    return next((one for one in KNOWN if trainer in one.trainers and case in one.cases), None)


GITHUB = "https://github.com/"
OURS = ("ours", "ours_language", "accumulate", "transformers_drop_in", "trl_drop_in", "lightning_drop_in")
TRANSFORMERS = ("transformers", "transformers_remedy", "transformers_before")
DERIVED = ("trl", "trl_remedy", "axolotl", "llamafactory", "swift", "swift_before")
HUGGING_FACE = (*TRANSFORMERS, *DERIVED, "transformers_drop_in", "trl_drop_in")
OTHERS = (
    *("accelerate", "accelerate_remedy", "composer", "composer_remedy", "deepspeed", "fabric", "keras", "lightning"),
    *("lightning_remedy", "litgpt", "nemo", "nemo_before", "timm", "torchtitan", "torchtune", "trl_dpo", "trl_reward"),
)
EVERYBODY = (*OURS, *TRANSFORMERS, *DERIVED, *OTHERS)
CLASSIFIERS = ("classifier", "classifier-short", "2-ranks-classifier")
SHORT = ("short-window", "short-window-2-epochs", "schedule-short", "2-ranks-short", "classifier-short")
SMALLER = (*SHORT, "regression", "multi-label")
EQUAL_WEIGHTS = "All micro-batches of a window have equal weights, also if they have different numbers of items."
NO_LAST_STEP = "A window that is not full at the end has no step."
REPEATED = "Samples are repeated, so that all ranks have equally many."
WEIGHTED = ("class-weights", "2-ranks-weights")
TEXTS = ("texts", "ragged-texts", "padded", "masked", "gpt2", "tokens", "2-ranks-texts", "2-ranks-padded")
UNEQUAL = ("ragged", "label-smoothing", "two-losses", "regression", "multi-label", *TEXTS, *WEIGHTED)
"""Cases whose micro-batches have different numbers of items."""
STATEFUL = ("momentum", "schedule", "resume", "evaluate-texts", "moe")


KNOWN: tuple[Known, ...] = (  # the first that fits is taken
    Known(
        ("transformers", "llamafactory"),
        ("moe",),
        "The router's loss is multiplied by gradient_accumulation_steps.",
        page="transformers-router-loss.md",
    ),
    Known(
        EVERYBODY,
        ("batch-norm", "moe"),
        "Samples depend on each other, so a batch that is split has another gradient.",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html",
    ),
    Known(
        ("nemo_before",),
        ("even", "ragged", "2-ranks", "2-ranks-dropout", "bf16", *CLASSIFIERS),
        "The gradient of a sequence classifier is multiplied by the number of micro-batches.",
        f"{GITHUB}NVIDIA-NeMo/Automodel/pull/3830",
        "2026-09",
        "NeMo Automodel 0.7.0",
    ),
    Known(
        EVERYBODY,
        ("bf16",),
        "Gradients of bfloat16 weights are summed in bfloat16, as torch does it by default.",
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.grad.html",
    ),
    Known(
        ("swift_before",),
        ("classifier-short",),
        "A window with fewer micro-batches has too small a gradient.",
        f"{GITHUB}modelscope/ms-swift/pull/10084",
        "2026-09",
        "ms-swift 4.6.0",
    ),
    Known(
        HUGGING_FACE,
        ("evaluate-texts",),
        "The loss of an evaluation is a mean over samples of the means of their batches.",
        f"{GITHUB}huggingface/transformers/issues/39241",
        "2025-07-07",
    ),
    Known(
        HUGGING_FACE,
        ("2-ranks-dropout",),
        "All ranks get the same seed, so they drop the same entries.",
        f"{GITHUB}huggingface/transformers/issues/31412",
        "2024-06-14",
    ),
    Known(("trl", "trl_remedy"), ("gpt2",), "GPT-2's first tokens are counted.", page="trl-gpt2-first-token.md"),
    Known(HUGGING_FACE, ("gpt2",), "GPT-2's first tokens are counted.", page="transformers-gpt2-first-token.md"),
    Known(
        ("trl_remedy",),
        ("2-ranks-uneven",),
        "Ranks with different numbers of micro-batches wait for each other.",
        page="trl-uneven-ranks.md",
    ),
    Known(
        ("swift", "swift_before", "nemo", "nemo_before"),
        ("2-ranks-uneven",),
        "The last samples are left out, so that all ranks have equally many.",
    ),
    Known(
        (*HUGGING_FACE, "accelerate", "accelerate_remedy"),
        ("2-ranks-uneven",),
        f"{REPEATED} This is documented (even_batches).",
        "https://huggingface.co/docs/accelerate/package_reference/utilities#accelerate.DataLoaderConfiguration",
        page="transformers-repeated-samples.md",
    ),
    Known(
        ("composer", "composer_remedy", "deepspeed", "fabric", "lightning", "lightning_remedy", "litgpt", "timm"),
        ("2-ranks-uneven",),
        f"{REPEATED} torch's DistributedSampler does this.",
        f"{GITHUB}pytorch/pytorch/issues/25162",
        "2019-08-25",
    ),
    Known(
        ("transformers", "transformers_before", "axolotl", "swift", "swift_before"),
        ("tokens", "regression", "multi-label", *CLASSIFIERS),
        "Heads that take keyword arguments do not divide by num_items_in_batch.",
        f"{GITHUB}huggingface/transformers/issues/47688",
        "2026-07-31",
        page="transformers-classifiers.md",
    ),
    Known(
        ("transformers_remedy",),
        WEIGHTED,
        "The items that the Trainer counts are samples, not weights of classes.",
        page="transformers-class-weights.md",
    ),
    Known(
        ("transformers", "transformers_before"),
        ("ragged", "label-smoothing", "two-losses", *WEIGHTED),
        "Micro-batches have equal weights if the model takes no num_items_in_batch.",
        f"{GITHUB}huggingface/transformers/issues/37766",
        "2025-04-24",
        page="transformers-mean-of-means.md",
    ),
    Known(
        ("transformers_before",),
        (*TEXTS, *SHORT, "tied", "frozen", "lora", "lora-dropout", "checkpointing", "clip-boundary", *STATEFUL),
        "The first token of each sample is counted, although no logit predicts it.",
        f"{GITHUB}huggingface/transformers/pull/46204",
        "2026-05-26",
        "transformers 5.10.1",
    ),
    Known(
        ("axolotl",),
        UNEQUAL,
        f"{EQUAL_WEIGHTS} model_accepts_loss_kwargs becomes false (core/trainers/base.py, line 131).",
        f"{GITHUB}axolotl-ai-cloud/axolotl/pull/3982",
        "2026-09-04",
    ),
    Known(("trl_dpo", "trl_reward"), ("dpo", "reward"), EQUAL_WEIGHTS, page="trl-short-micro-batch.md"),
    Known(
        ("accelerate",),
        SHORT,
        "The loss is divided by gradient_accumulation_steps, also in a window with fewer micro-batches.",
        page="accelerate-windows.md",
    ),
    Known(
        ("accelerate",),
        UNEQUAL,
        f"{EQUAL_WEIGHTS} This is documented; the remedy counts items ahead.",
        f"{GITHUB}huggingface/accelerate/pull/3193",
        "2024-10-24",
        page="accelerate-windows.md",
    ),
    Known(
        ("lightning", "lightning_remedy"),
        ("resume",),
        "Resumed in the middle of an epoch, the data starts again, unless the loader has a state. Lightning warns.",
        "https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html",
    ),
    Known(("lightning", "litgpt"), ("evaluate-texts",), "The loss is a mean of the means of its batches."),
    Known(
        ("lightning",),
        SHORT,
        "The loss is divided by accumulate_grad_batches, also in a window with fewer micro-batches.",
        f"{GITHUB}Lightning-AI/pytorch-lightning/issues/19987",
        "2024-06-17",
        page="lightning-windows.md",
    ),
    Known(("lightning_remedy",), SMALLER, f"{NO_LAST_STEP} This is the loop of the documentation."),
    Known(
        ("lightning", "lightning_remedy"),
        UNEQUAL,
        EQUAL_WEIGHTS,
        f"{GITHUB}Lightning-AI/pytorch-lightning/issues/20350",
        "2024-10-19",
        page="lightning-windows.md",
    ),
    Known(("keras",), ("ema",), "The average is updated after each micro-batch.", page="keras-average.md"),
    Known(
        ("keras",),
        ("ragged", *SHORT),
        "Windows go on over the ends of epochs, the last one is lost, and micro-batches have equal weights.",
        page="keras-windows.md",
    ),
    Known(
        ("deepspeed",),
        SMALLER,
        NO_LAST_STEP,
        f"{GITHUB}deepspeedai/DeepSpeed/issues/7439",
        "2025-07-20",
    ),
    Known(("litgpt",), SMALLER, NO_LAST_STEP, page="litgpt-windows.md"),
    Known(("litgpt",), UNEQUAL, EQUAL_WEIGHTS, page="litgpt-means.md"),
    Known(("fabric",), SMALLER, f"{NO_LAST_STEP} This is the loop of the page.", page="lightning-fabric-loop.md"),
    Known(
        ("torchtune",),
        SMALLER,
        NO_LAST_STEP,
        f"{GITHUB}meta-pytorch/torchtune/pull/2745",
        "2025-05-17",
    ),
    Known(
        ("torchtune",),
        UNEQUAL,
        "Items are counted before the labels are shifted, which matters if first tokens have labels.",
        page="torchtune-first-token.md",
    ),
    Known(
        ("torchtitan",),
        SMALLER,
        f"{NO_LAST_STEP} This is documented.",
        f"{GITHUB}pytorch/torchtitan/pull/1238",
        "2025-06-04",
    ),
    Known(
        ("timm",),
        ("classifier-short",),
        "In the last window an update is due when the number of batches is divisible by the length of that window.",
    ),
    Known(
        ("composer", "composer_remedy"),
        UNEQUAL,
        "Micro-batches weigh by samples, unless accumulate_train_batch_on_tokens is set.",
        f"{GITHUB}mosaicml/composer/pull/3273",
        "2024-06-06",
    ),
    Known(("deepspeed", "fabric", "timm"), UNEQUAL, EQUAL_WEIGHTS),
)
