"""transformers' Trainer with a small model from its configuration."""

import argparse
import tempfile

import torch
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=("causal", "classify"), default="causal")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()

set_seed(0)
texts = torch.randint(1, 29, (32, 6))
if args.task == "causal":
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=29, **sizes))
    data = [{"input_ids": text, "labels": text} for text in texts]
else:
    off = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    sizes = {"vocab_size": 29, "n_layers": 1, "n_heads": 2, "dim": 8, "hidden_dim": 8, "num_labels": 3}
    model = DistilBertForSequenceClassification(DistilBertConfig(**sizes, **off))
    data = [{"input_ids": text, "labels": text[0] % 3} for text in texts]
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        max_grad_norm=0.0,
        num_train_epochs=1,
        use_cpu=True,
        report_to="none",
    )
    Trainer(model, settings, train_dataset=data).train()
