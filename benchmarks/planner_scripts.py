"""Public training scripts, as they are, under ``trainer plan --script``: what comes out of each.

    python benchmarks/planner_scripts.py FOLDER [NAME ...]

FOLDER holds the checkouts that ``SCRIPTS`` names, in folders called as their repositories: nanoGPT, examples (pytorch),
transformers, accelerate, trl, pytorch-image-models, pytorch-lightning. What a script needs besides (a config.json, a
token file, a folder of images) is made in FOLDER/needed, from nothing. Writes ``results/planner_scripts.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import RESULTS, Record
from PIL import Image

from trainer.system.processes import trainer_command

GLUE = "sentence1:str:110,sentence2:str:110,label:int:2,idx:int"
QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
BERT = {"model_type": "bert", "vocab_size": 28996, "architectures": ["BertForMaskedLM"], "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert-base-cased": BERT,
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 1024},
    "vit": {"model_type": "vit", "architectures": ["ViTModel"], "image_size": 224},
    "qwen": QWEN,
    "qwen-reward": QWEN | {"architectures": ["Qwen2ForSequenceClassification"]},
    "distilbert": {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]},
    "t5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0},
}
"""Those of the hub's models of that name, as far as they are not the defaults of their class; BERT is Google's base."""


class Public(NamedTuple):
    """A script that somebody else has written, and how it is asked for."""

    path: str  # in FOLDER
    args: str = ""  # {needed} is the folder with what is made here
    flags: str = ""


LIGHTNING = "pytorch-lightning/examples"
LM, TEXT = "transformers/examples/pytorch/language-modeling", "transformers/examples/pytorch/text-classification"
VISION = "transformers/examples/pytorch/image-classification"
SCRIPTS = {
    "nanoGPT": Public("nanoGPT/train.py", "--gradient_accumulation_steps=2 --dataset={needed}"),
    "mnist": Public("examples/mnist/main.py"),
    "mnist_rnn": Public("examples/mnist_rnn/main.py", "--accel"),
    "mnist_forward_forward": Public("examples/mnist_forward_forward/main.py", "--train_size 1000"),
    "imagenet": Public("examples/imagenet/main.py", "--dummy -a resnet50 -b 64"),
    "vae": Public("examples/vae/main.py"),
    "dcgan": Public("examples/dcgan/main.py", "--dataset fake --accel"),
    "siamese": Public("examples/siamese_network/main.py"),
    "word_lm": Public(
        "examples/word_language_model/main.py", "--accel --use-optimizer --model Transformer --data {needed}/words"
    ),
    "word_lm_lstm": Public(
        "examples/word_language_model/main.py", "--accel --use-optimizer --model LSTM --data {needed}/words"
    ),
    "super_resolution": Public("examples/super_resolution/main.py", "--upscale_factor 3 --accel"),
    "gat": Public("examples/gat/main.py"),
    "nlp_example": Public(
        "accelerate/examples/nlp_example.py",
        "--mixed_precision bf16",
        f"--config bert-base-cased={{needed}}/bert-base-cased --columns {GLUE}",
    ),
    "cv_example": Public("accelerate/examples/cv_example.py", "--data_dir {needed}/pets"),
    "gradient_accumulation": Public(
        "accelerate/examples/by_feature/gradient_accumulation.py",
        "--gradient_accumulation_steps 2",
        f"--config bert-base-cased={{needed}}/bert-base-cased --columns {GLUE}",
    ),
    "checkpointing": Public(
        "accelerate/examples/by_feature/checkpointing.py",
        "--checkpointing_steps 1 --output_dir {needed}/out",
        f"--config bert-base-cased={{needed}}/bert-base-cased --columns {GLUE}",
    ),
    "run_glue": Public(
        f"{TEXT}/run_glue.py",
        "--model_name_or_path {needed}/bert-base-cased --task_name mrpc --do_train --output_dir {needed}/out "
        "--per_device_train_batch_size 32 --max_seq_length 128",
        f"--columns {GLUE}",
    ),
    "run_glue_no_trainer": Public(
        f"{TEXT}/run_glue_no_trainer.py",
        "--model_name_or_path {needed}/distilbert --task_name mrpc --per_device_train_batch_size 16",
        f"--columns {GLUE}",
    ),
    "run_clm": Public(
        f"{LM}/run_clm.py",
        "--model_name_or_path {needed}/gpt2 --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --do_train "
        "--per_device_train_batch_size 8 --output_dir {needed}/out --bf16",
        "--columns text:str:600 --rows 20000",
    ),
    "run_clm_no_trainer": Public(
        f"{LM}/run_clm_no_trainer.py",
        "--model_name_or_path {needed}/gpt2 --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 "
        "--per_device_train_batch_size 4",
        "--columns text:str:600 --rows 20000",
    ),
    "run_mlm": Public(
        f"{LM}/run_mlm.py",
        "--model_name_or_path {needed}/bert-base-cased --train_file {needed}/text.txt --do_train --line_by_line "
        "--output_dir {needed}/out --max_seq_length 256 --fp16",
    ),
    "run_image_classification": Public(
        f"{VISION}/run_image_classification.py",
        "--model_name_or_path {needed}/vit --train_dir {needed}/folder/train --do_train --output_dir {needed}/out "
        "--remove_unused_columns False --label_column_name label --per_device_train_batch_size 32",
    ),
    "timm": Public(
        "pytorch-image-models/train.py",
        "--data-dir {needed}/folder --model vit_small_patch16_224 --num-classes 2 -b 64 --amp --output {needed}/out",
    ),
    "timm_convnext": Public(
        "pytorch-image-models/train.py",
        "--data-dir {needed}/folder --model convnext_tiny --num-classes 2 -b 32 --pretrained --output {needed}/out "
        "--amp --amp-dtype bfloat16 --model-ema --mixup 0.2",
    ),
    "sft": Public(
        "trl/trl/scripts/sft.py",
        "--model_name_or_path {needed}/qwen --dataset_name trl-lib/Capybara --output_dir {needed}/out "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_length 1024 --packing",
        "--columns messages:chat:4000",
    ),
    "sft_lora": Public(
        "trl/trl/scripts/sft.py",
        "--model_name_or_path {needed}/qwen --dataset_name trl-lib/Capybara --output_dir {needed}/out --use_peft "
        "--lora_r 32 --lora_alpha 16 --per_device_train_batch_size 2",
        "--columns messages:chat:4000",
    ),
    "dpo": Public(
        "trl/trl/scripts/dpo.py",
        "--dataset_name trl-lib/ultrafeedback_binarized --model_name_or_path {needed}/qwen --output_dir {needed}/out "
        "--per_device_train_batch_size 2 --max_length 512",
        "--columns prompt:str:400,chosen:str:800,rejected:str:800",
    ),
    "reward": Public(
        "trl/trl/scripts/reward.py",
        "--dataset_name trl-lib/ultrafeedback_binarized --model_name_or_path {needed}/qwen-reward "
        "--output_dir {needed}/out --per_device_train_batch_size 4 --max_length 512",
        "--columns chosen:chat:1500,rejected:chat:1500",
    ),
    "lightning_autoencoder": Public(f"{LIGHTNING}/pytorch/basics/autoencoder.py"),
    "lightning_backbone": Public(f"{LIGHTNING}/pytorch/basics/backbone_image_classifier.py"),
    "lightning_bug_report": Public(f"{LIGHTNING}/pytorch/bug_report/bug_report_model.py"),
    "lightning_gan": Public(f"{LIGHTNING}/pytorch/domain_templates/generative_adversarial_net.py"),
    "lightning_imagenet": Public(
        f"{LIGHTNING}/pytorch/domain_templates/imagenet.py",
        "fit --model.data_path {needed}/folder --model.arch resnet18 --model.batch_size 64",
    ),
    "lightning_transformer": Public(f"{LIGHTNING}/pytorch/basics/transformer.py"),
    "fabric_torch": Public(f"{LIGHTNING}/fabric/image_classifier/train_torch.py"),
    "fabric": Public(f"{LIGHTNING}/fabric/image_classifier/train_fabric.py"),
    "fabric_lm": Public(f"{LIGHTNING}/fabric/language_model/train.py"),
    "fabric_trainer": Public(f"{LIGHTNING}/fabric/build_your_own_trainer/run.py"),
    "fabric_kfold": Public(f"{LIGHTNING}/fabric/kfold_cv/train_fabric.py"),
}


def make_needed(needed: Path) -> None:
    """What scripts find on the disk of whoever runs them: configurations, tokens, texts and images without meaning."""
    for name, config in CONFIGS.items():
        (needed / name).mkdir(parents=True, exist_ok=True)
        (needed / name / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        (random.integers(0, 50257, 200_000, dtype=np.uint16)).tofile(needed / f"{split}.bin")
    (needed / "text.txt").write_text("A line of a text that says nothing, long enough for a few tokens.\n" * 2000)
    (needed / "words").mkdir(exist_ok=True)
    for split in ("train", "valid", "test"):  # as many different words as WikiText-2 has
        (needed / "words" / f"{split}.txt").write_text(" ".join(f"word{number}" for number in range(33277)) + "\n")
    for place in ("folder/train/cat", "folder/train/dog", "folder/val/cat", "folder/val/dog", "pets"):
        (needed / place).mkdir(parents=True, exist_ok=True)
        for number in range(200):
            name = f"{'cat' if number % 2 else 'dog'}_{number}.jpg"
            Image.fromarray(random.integers(0, 255, (64, 64, 3), np.uint8)).save(needed / place / name)


def planned(script: Public, folder: Path, gpu: str) -> dict[str, Any]:
    """What ``trainer plan --script`` says of it, or the first line of its error."""
    needed, path = folder / "needed", folder / script.path
    if not path.is_file():
        return {"error": f"no {script.path} in the folder"}
    flags, args = (text.format(needed=needed).split() for text in (script.flags, script.args))
    out = needed / "plans" / f"{time.time():.3f}"
    words = trainer_command(
        "plan", "--script", path.name, "--gpu", gpu, "--json", "--out", str(out), *flags, "--", *args
    )
    began = time.perf_counter()
    done = subprocess.run(words, cwd=path.parent, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"code": done.returncode, "wall_s": round(time.perf_counter() - began, 1)}
    if done.stdout.startswith("{"):
        content = json.loads(done.stdout)
        return (
            found
            | {key: content[key] for key in ("fits", "reserved_gb", "allocated_gb", "host_gb", "peak_phase")}
            | {key: content[key] for key in ("step_ms", "steps", "categories", "outlined", "notes")}
        )
    error = (done.stderr.strip().splitlines() or ["nothing was said"])[-1].partition("; what it printed")[0]
    return found | {"error": error.removeprefix("trainer: error: ").replace(str(needed), "NEEDED")}


def main() -> None:
    """Plan all of them, or those that are named, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--gpu", default="rtx-4090")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for planner_scripts.json")
    options = parser.parse_args()
    folder = options.folder.resolve()
    make_needed(folder / "needed")
    record = Record("planner_scripts", {"gpu": options.gpu}, options.out)
    rows: list[dict[str, Any]] = []
    for name in options.names or SCRIPTS:
        script = SCRIPTS[name]
        row = {"name": name, "script": script.path, "args": script.args, "flags": script.flags}
        rows.append(shown := row | planned(script, folder, options.gpu))
        record.write(rows=rows)
        said = shown.get("error") or f"{shown['reserved_gb']:.3f} GB reserved, {shown['allocated_gb']:.3f} allocated"
        print(f"{name:24} {shown.get('wall_s', 0):6.1f} s  {said}", flush=True)
    record.write(complete=True)


if __name__ == "__main__":
    main()
