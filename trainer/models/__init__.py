"""Models: build, losses and blocks. Importing this loads no torch."""

from trainer.models.base import Objective
from trainer.models.bigbird import BigBird
from trainer.models.causal import CausalLM
from trainer.models.embedding import SentenceEmbedder
from trainer.models.image import ImageClassifier
from trainer.models.lora import LoRA
from trainer.models.masked import MaskedLM
from trainer.models.mlp import MLP
from trainer.models.text import TextClassifier
from trainer.models.vision import VisionTransformer

__all__ = ["MLP", "BigBird", "CausalLM", "ImageClassifier", "LoRA", "MaskedLM", "Objective", "SentenceEmbedder"]
__all__ += ["TextClassifier", "VisionTransformer"]
