"""Why cells are wrong, and what upstream says about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A cause of wrong cells.

    Args:
        trainers: names of adapters.
        cases: names of cases; ``*`` is every other one.
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
            f"Upstream: [{name}]({self.thread}){since}." if self.thread else "No upstream thread was found.",
            f"Fixed in {self.fixed_in}." if self.fixed_in else "",
            f"[Reproduction](upstream/{self.page})." if self.page else "",
        ]
        return " ".join(part for part in parts if part)


def known(trainer: str, case: str) -> Known | None:
    """Return the cause of a wrong cell."""
    return next((one for one in KNOWN if trainer in one.trainers and (case in one.cases or "*" in one.cases)), None)


GITHUB = "https://github.com/"
INEXACT = ("batch-norm", "moe")
MEANS = (
    "The loss of a micro-batch is a mean, and all micro-batches of a window have equal weights, also if they have "
    "different numbers of items."
)
OURS = ("ours", "ours_language", "accumulate", "transformers_drop_in", "trl_drop_in", "lightning_drop_in")
EVERYBODY = (
    *OURS,
    *("accelerate", "accelerate_remedy", "axolotl", "composer", "composer_remedy", "deepspeed", "fabric", "keras"),
    *("lightning", "lightning_remedy", "litgpt", "llamafactory", "nemo", "nemo_before", "swift", "swift_before"),
    *("timm", "torchtitan", "torchtune", "transformers", "transformers_remedy", "transformers_before"),
    *("trl", "trl_remedy", "trl_dpo", "trl_reward"),
)
HUGGING_FACE = (
    *("transformers_drop_in", "trl_drop_in"),
    *("transformers", "transformers_remedy", "transformers_before", "trl", "trl_remedy", "axolotl", "llamafactory"),
    *("swift", "swift_before"),
)
REPEATED = "Samples are repeated, so that all ranks have equally many micro-batches."

KNOWN: tuple[Known, ...] = (
    Known(EVERYBODY, INEXACT, "Samples depend on each other, so a batch that is split has another gradient."),
    Known(
        tuple(one for one in EVERYBODY if one != "nemo_before"),
        ("bf16",),
        "Gradients of bfloat16 weights are summed in bfloat16, which is torch's default.",
    ),
    Known(
        ("transformers_before",),
        ("*",),
        "The first token of each sample is counted, although no logit predicts it (transformers before 5.10.1).",
        f"{GITHUB}huggingface/transformers/pull/46204",
        fixed_in="transformers 5.10.1",
    ),
    Known(
        ("nemo_before",),
        (
            "even",
            "ragged",
            "classifier",
            "classifier-short",
            "2-ranks",
            "2-ranks-classifier",
            "2-ranks-dropout",
            "bf16",
        ),
        "The gradient of a sequence classifier is multiplied by the number of micro-batches.",
        f"{GITHUB}NVIDIA-NeMo/Automodel/pull/3830",
        "2026-09",
        "NeMo Automodel 0.7.0",
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
        "2025-07",
    ),
    Known(
        HUGGING_FACE,
        ("2-ranks-dropout",),
        "All ranks get the same seed, so they drop the same entries.",
        f"{GITHUB}huggingface/transformers/issues/31412",
        "2024-06",
    ),
    Known(("trl", "trl_remedy"), ("gpt2",), "GPT-2's first tokens are counted.", page="trl-gpt2-first-token.md"),
    Known(HUGGING_FACE, ("gpt2",), "GPT-2's first tokens are counted.", page="transformers-gpt2-first-token.md"),
    Known(
        tuple(one for one in HUGGING_FACE if "swift" not in one),
        ("2-ranks-uneven",),
        REPEATED,
        page="transformers-repeated-samples.md",
    ),
    Known(
        ("transformers", "swift", "axolotl"),
        ("classifier", "classifier-short", "2-ranks-classifier"),
        "The loss of a classifier is a mean, and is not divided by the number of micro-batches.",
        page="transformers-classifiers.md",
    ),
    Known(
        ("transformers_remedy",),
        ("class-weights", "2-ranks-weights"),
        "The items that the Trainer counts are samples, not weights of classes.",
        page="transformers-class-weights.md",
    ),
    Known(HUGGING_FACE, ("*",), MEANS, page="transformers-mean-of-means.md"),
    Known(("trl_dpo", "trl_reward"), ("*",), MEANS, page="trl-short-micro-batch.md"),
    Known(("accelerate", "accelerate_remedy"), ("2-ranks-uneven",), REPEATED, page="transformers-repeated-samples.md"),
    Known(
        ("accelerate",),
        ("*",),
        "Every micro-batch has the weight 1 / gradient_accumulation_steps, also in a window that has fewer.",
        page="accelerate-windows.md",
    ),
    Known(
        ("lightning", "lightning_remedy"),
        ("resume",),
        "Resumed in the middle of an epoch, the data starts again, unless the loader has a state. Lightning warns.",
        "https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html",
    ),
    Known(
        ("lightning", "litgpt"),
        ("evaluate-texts",),
        "The loss of an evaluation is a mean of the means of its batches.",
    ),
    Known(
        ("lightning", "lightning_remedy", "fabric", "composer", "composer_remedy", "litgpt", "deepspeed", "timm"),
        ("2-ranks-uneven",),
        REPEATED + " This is documented for torch's DistributedSampler.",
        "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler",
    ),
    Known(
        ("lightning", "lightning_remedy"),
        ("*",),
        "Micro-batches have equal weights, and a last window with fewer has too small a gradient, or none if the loop "
        "is manual.",
        f"{GITHUB}Lightning-AI/pytorch-lightning/issues/19987",
        "2024-06",
        page="lightning-windows.md",
    ),
    Known(
        ("timm",),
        ("classifier-short",),
        "In the last window an update is due when the number of batches is divisible by the length of that window.",
    ),
    Known(
        ("keras",),
        ("ema",),
        "The average of the weights is updated after each micro-batch.",
        page="keras-average.md",
    ),
    Known(
        ("keras",),
        ("*",),
        "Windows run on over the end of an epoch, the last one is lost, and micro-batches have equal weights.",
        page="keras-windows.md",
    ),
    Known(
        ("deepspeed",),
        ("short-window", "short-window-2-epochs", "classifier-short", "multi-label", "regression", "2-ranks-short"),
        "A window that is not full has no step at the end of an epoch.",
        f"{GITHUB}deepspeedai/DeepSpeed/issues/7439",
        "2025-07",
    ),
    Known(
        ("torchtune",),
        ("texts", "ragged-texts", "padded", "masked", "gpt2"),
        "Items are counted before the labels are shifted, and the loss is a mean after it. This matters if first "
        "tokens have labels, as in text completion.",
    ),
    Known(
        ("torchtune", "torchtitan", "fabric", "litgpt"),
        (
            "short-window",
            "short-window-2-epochs",
            "schedule-short",
            "classifier-short",
            "multi-label",
            "regression",
            "2-ranks-short",
        ),
        "A window that is not full at the end has no step.",
    ),
    Known(("litgpt", "fabric", "deepspeed", "composer", "composer_remedy", "timm", "torchtune"), ("*",), MEANS),
    Known(
        ("nemo", "nemo_before", "swift", "swift_before"),
        ("2-ranks-uneven",),
        "The last samples are left out, so that all ranks have equally many.",
    ),
)
