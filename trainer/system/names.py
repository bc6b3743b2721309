"""Names of settings in other libraries, and suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Collection

from trainer.errors import closest_names

FOREIGN_NAMES = {
    "optim.lr": "learning_rate base_lr initial_lr",
    "optim.name": "optimizer optimizer_type opt optimizer_name",
    "optim.weight_decay": "wd decay l2",
    "optim.schedule": "scheduler sched lr_scheduler lr_scheduler_type lr_schedule",
    "optim.warmup_steps": "warmup num_warmup_steps warmup_iters lr_warmup_steps",
    "optim.clip_norm": "max_grad_norm gradient_clip_val grad_clip clip_grad clip gradient_clipping",
    "batch_size": "per_device_train_batch_size train_batch_size global_batch_size batchsize bs",
    "memory.micro_batch_size": "per_device_batch_size microbatch_size local_batch_size",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps accumulation_steps grad_accum",
    "epochs": "num_train_epochs max_epochs num_epochs n_epochs epoch",
    "max_steps": "num_steps total_steps max_iters iterations num_training_steps train_steps",
    "eval_every": "eval_steps val_check_interval eval_interval validate_every",
    "seed": "random_seed manual_seed",
    "memory.precision": "dtype torch_dtype mixed_precision amp bf16 fp16 half",
    "memory.activation_checkpointing": "gradient_checkpointing grad_checkpointing checkpoint_activations",
    "memory.strategy": "fsdp ddp distributed_strategy",
    "memory.compile": "torch_compile torchcompile",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit keep_checkpoints",
    "run.dir": "output_dir out_dir save_dir default_root_dir output outdir",
    "run.devices": "gpus num_gpus nproc_per_node num_processes world_size ngpus",
    "run.accelerator": "device gpu",
    "run.logger": "report_to log_with loggers",
    "run.project": "wandb_project experiment_name mlflow_experiment_name",
    "run.entity": "wandb_entity team",
    "run.tags": "wandb_tags",
    "run.tracking_uri": "mlflow_tracking_uri",
    "run.resume": "resume_from_checkpoint ckpt_path resume_from",
    "run.progress": "disable_tqdm enable_progress_bar",
    "data.workers": "num_workers dataloader_num_workers",
    "data.max_length": "max_seq_length max_seq_len seq_len sequence_length max_len",
    "data.val_fraction": "validation_split val_split val_size",
    "model.name": "model_name_or_path model_name pretrained_model_name_or_path name_or_path base_model",
    "model.weights": "pretrained checkpoint_path",
    "model.num_classes": "num_labels n_classes classes",
    "model.lora.rank": "lora_r r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "target_modules lora_target_modules lora_target",
}
"""The names of settings in transformers' Trainer, timm, Lightning and others."""

FOREIGN_SWITCHES = {
    "fp16": "memory.precision 16-mixed",
    "bf16": "memory.precision bf16-mixed",
    "gradient_checkpointing": "memory.activation_checkpointing full",
    "load_in_4bit": "model.lora.base nf4 --model.lora.rank 16",
    "torch_compile": "memory.compile blocks",
}
"""Flags of other trainers that often stand without a value, and what to give instead."""

OUR_NAMES = {word: key for key, words in FOREIGN_NAMES.items() for word in words.split()}


def foreign_switch(flag: str) -> str | None:
    """Return what to give instead of a switch of other trainers, or ``None``."""
    return FOREIGN_SWITCHES.get(flag.replace("-", "_").lower())


def did_you_mean(name: str, names: Collection[str], dashes: str = "") -> str:
    """Return "; did you mean NAME?" with a similar name, first from the same section, or ""."""
    section, dot, last = name.replace("-", "_").lower().rpartition(".")
    parts = [(full.rpartition(".")[2], full) for full in names]
    wanted = OUR_NAMES.get(last, "")
    if meant := [full for full in (wanted, wanted.rpartition(".")[2]) if full and full in names]:
        return f"; did you mean {dashes}{meant[0]}?"
    beside = {end: full for end, full in parts if full == section + dot + end}
    everywhere = dict(reversed(parts))  # the first of equal names wins
    exact = {last: everywhere[last]} if last in everywhere else {}
    for candidates, cutoff in ((exact, 1), (beside, 0.6), (everywhere, 0.75)):
        for close in closest_names(last, candidates, cutoff):
            return f"; did you mean {dashes}{candidates[close]}?"
    return ""


def unknown_keyword(kind: str, name: str, fields: Collection[str]) -> str:
    """Return a message about the keyword ``name``, which the class ``kind`` does not have, with a suggestion."""
    key = OUR_NAMES.get(name) or next((key for key in FOREIGN_NAMES if key.rpartition(".")[2] == name), "")
    section, _, last = key.rpartition(".")
    hint = f"; did you mean {last}?" if last in fields else did_you_mean(name, fields)
    if not hint and section in fields:
        hint = f"; it is in {section}: {section}={section.title()}({last}=...)"
    return f"{kind} has no setting {name!r}{hint or '; it has ' + ', '.join(fields)}"
