"""transformers 5.9.0, before a fix: the first token of a sample was counted, although no logit predicts it.

The loss of a causal language model was divided by too many items; #46204 fixed it in 5.10.1.
"""

from __future__ import annotations

from conformance.trainers import transformers

TITLE, VERSION_OF = "transformers Trainer before a fix", "transformers"
DOCS = "https://github.com/huggingface/transformers/pull/46204"
FEATURES = transformers.FEATURES
train = transformers.train
