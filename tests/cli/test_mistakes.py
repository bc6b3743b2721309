"""What people who come from elsewhere type first: each mistake is a line that says what was meant, and exit code 2."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.problems import tokenizer_folder
from PIL import Image

from trainer import Recipe, Run, fit
from trainer.cli import run
from trainer.commands.recipes import load_recipe
from trainer.data import Digits
from trainer.errors import RecipeError
from trainer.memory.plan import decide_plan
from trainer.models import MLP
from trainer.recipe import Memory
from trainer.run.description import suspicious_settings

FILES = {
    "section.yaml": "recipe: vit_digits\nseed: 3\noptmi: {lr: 0.1}\n",
    "nested.yaml": "recipe: vit_digits\noptim:\n  name: adamw\n  learning_rate: 0.1\n",
    "dotted.yaml": "recipe: vit_digits\n\nmemory.precison: bf16\n",
    "value.yaml": "recipe: vit_digits\noptim:\n  name: adamw\n  lr: fast\n",
    "choice.yaml": "recipe: vit_digits\nmemory:\n  strategy: deepspeed\n",
    "flat.yaml": "recipe: vit_digits\nlr: 0.1\n",
    "twice.yaml": "recipe: vit_digits\noptim: {lr: 0.1}\noptim.lr: 0.2\n",
    "hf.yaml": "recipe: vit_digits\nper_device_train_batch_size: 8\n",
    "resume.yaml": "recipe: vit_digits\nrun:\n  resume: yes\n",
    "other.yaml": "recipe: vit_digits\ndata:\n  train_file: a.csv\n",
    "typo.yaml": "recipe: vit_digit\n",
    "tab.yaml": "recipe: vit_digits\noptim:\n\tlr: 0.1\n",
    "learning_rate.py": "optim=Optim(learning_rate=0.1)",
    "max_grad_norm.py": "optim=Optim(\n    'adamw', max_grad_norm=1.0)",
    "lr.py": "lr=0.1",
    "precision.py": "precision='bf16'",
    "num_train_epochs.py": "num_train_epochs=3",
    "grad_ckpt.py": "memory=Memory(gradient_checkpointing=True)",
    "save_steps.py": "checkpoint=Checkpoint(save_steps=100)",
    "output_dir.py": "run=Run(output_dir='out')",
    "image_sise.py": "seed=len(str(ImageFolder('photos', image_sise=32)))",
    "wrong_type.py": "epochs='3'",
    "optim_name.py": "optim='adamw'",
    "fp8.py": "memory=Memory(precision='fp8')",
}
RECIPE = """from trainer import Checkpoint, Memory, Optim, Recipe, Run
from trainer.data import Digits, ImageFolder
from trainer.models import MLP

recipe = Recipe(model=MLP([8]), data=Digits(), batch_size=64, {})
"""

BEFORE_TRAINING = {
    # what others call it
    "lr": ("fit vit_digits --lr 0.1", "unknown flag --lr (value '0.1'); did you mean --optim.lr?"),
    "learning rate": (
        "fit vit_digits --learning_rate 0.1",
        "unknown flag --learning_rate (value '0.1'); did you mean --optim.lr?",
    ),
    "learning-rate": (
        "fit vit_digits --learning-rate=0.1",
        "unknown flag --learning-rate (value '0.1'); did you mean --optim.lr?",
    ),
    "epochs of transformers": (
        "fit vit_digits --num_train_epochs 3",
        "unknown flag --num_train_epochs (value '3'); did you mean --epochs?",
    ),
    "epochs of Lightning": (
        "fit vit_digits --max_epochs 3",
        "unknown flag --max_epochs (value '3'); did you mean --epochs?",
    ),
    "batch of transformers": (
        "fit vit_digits --per_device_train_batch_size 8",
        "unknown flag --per_device_train_batch_size (value '8'); did you mean --batch_size?",
    ),
    "accumulation of transformers": (
        "fit vit_digits --gradient_accumulation_steps 8",
        "unknown flag --gradient_accumulation_steps (value '8'); did you mean --accumulate?",
    ),
    "accumulation of Lightning": (
        "fit vit_digits --accumulate_grad_batches 8",
        "unknown flag --accumulate_grad_batches (value '8'); did you mean --accumulate?",
    ),
    "checkpointing of transformers": (
        "fit vit_digits --gradient_checkpointing true",
        "unknown flag --gradient_checkpointing (value 'true'); did you mean --memory.activation_checkpointing?",
    ),
    "clipping of Lightning": (
        "fit vit_digits --gradient_clip_val 1",
        "unknown flag --gradient_clip_val (value '1'); did you mean --optim.clip_norm?",
    ),
    "clipping of timm": (
        "fit vit_digits --clip-grad 1",
        "unknown flag --clip-grad (value '1'); did you mean --optim.clip_norm?",
    ),
    "optimizer of timm": (
        "fit vit_digits --opt adamw",
        "unknown flag --opt (value 'adamw'); did you mean --optim.name?",
    ),
    "schedule of timm": (
        "fit vit_digits --sched cosine",
        "unknown flag --sched (value 'cosine'); did you mean --optim.schedule?",
    ),
    "bf16 as a switch": (
        "fit vit_digits --bf16 true",
        "unknown flag --bf16 (value 'true'); did you mean --memory.precision?",
    ),
    "mixed_precision of accelerate": (
        "fit vit_digits --mixed_precision bf16",
        "unknown flag --mixed_precision (value 'bf16'); did you mean --memory.precision?",
    ),
    "output_dir": (
        "fit vit_digits --output_dir out",
        "unknown flag --output_dir (value 'out'); did you mean --run.dir?",
    ),
    "save_steps": (
        "fit vit_digits --save_steps 100",
        "unknown flag --save_steps (value '100'); did you mean --checkpoint.every?",
    ),
    "save_total_limit": (
        "fit vit_digits --save_total_limit 2",
        "unknown flag --save_total_limit (value '2'); did you mean --checkpoint.keep_last?",
    ),
    "eval_steps": (
        "fit vit_digits --eval_steps 100",
        "unknown flag --eval_steps (value '100'); did you mean --eval_every?",
    ),
    "report_to": (
        "fit vit_digits --report_to wandb",
        "unknown flag --report_to (value 'wandb'); did you mean --run.logger?",
    ),
    "resume_from_checkpoint": (
        "fit vit_digits --resume_from_checkpoint x",
        "unknown flag --resume_from_checkpoint (value 'x'); did you mean --run.resume?",
    ),
    "gpus": ("fit vit_digits --gpus 2", "unknown flag --gpus (value '2'); did you mean --run.devices?"),
    "num_workers": (
        "fit vit_digits --num_workers 2",
        "unknown flag --num_workers (value '2'); did you mean --data.workers?",
    ),
    "max_seq_length": (
        "fit distilbert_imdb --max_seq_length 128",
        "unknown flag --max_seq_length (value '128'); did you mean --data.max_length?",
    ),
    "num_labels": (
        "fit distilbert_imdb --num_labels 2",
        "unknown flag --num_labels (value '2'); did you mean --model.num_classes?",
    ),
    # a word in the wrong place
    "hydra": (
        "fit vit_digits epochs=3",
        "unexpected 'epochs=3': fit takes one RECIPE, then flags; did you mean --epochs 3?",
    ),
    "hydra, dotted": (
        "fit vit_digits optim.lr=0.1",
        "unexpected 'optim.lr=0.1': fit takes one RECIPE, then flags; did you mean --optim.lr 0.1?",
    ),
    "one dash": ("fit vit_digits -epochs 3", "unknown flag -epochs: flags start with two dashes"),
    "a run directory": (
        "fit TMP/run",
        "unknown recipe 'TMP/run'; did you mean TMP/run/recipe.yaml? (packaged recipes: …",
    ),
    "a word for resume": (
        "fit vit_digits --run.resume yes",
        "run.resume='yes' must be auto, none or the path of a checkpoint or run directory; did you mean auto?",
    ),
    "no resume": (
        "fit vit_digits --run.resume False",
        "run.resume='False' must be auto, none or the path of a checkpoint or run directory; did you mean none?",
    ),
    "resume in YAML": (
        "fit TMP/resume.yaml",
        "TMP/resume.yaml line 3: run.resume=True must be str; did you mean auto?",
    ),
    "fp8": (
        "fit vit_digits --memory.precision fp8",
        "memory.precision='fp8' must be auto|32-true|64-true|bf16-mixed|16-mixed|bf16-true|16-true",
    ),
    "int for bool": ("fit vit_digits --run.evaluate 2", "run.evaluate='2' must be bool"),
    # of another model or dataset
    "csv of IMDb": (
        "fit distilbert_imdb --data.train_file a.csv",
        (
            "unknown flag --data.train_file (value 'a.csv'); IMDb has no train_file, TextFiles has it: take --data "
            "TextFiles"
        ),
    ),
    "width of DistilBERT": (
        "fit distilbert_imdb --model.width 64",
        (
            "unknown flag --model.width (value '64'); TextClassifier has no width, VisionTransformer has it: take "
            "--model VisionTransformer"
        ),
    ),
    "sampling of streamed texts": (
        "fit distilbert_streaming --data.sampling balanced",
        "unknown flag --data.sampling (value 'balanced'); StreamedText has no sampling, HubText and IMDb and TextFiles "
        "have it: take --data TextFiles",
    ),
    "cross-validation": (
        "fit vit_digits --data.folds 5",
        "unknown flag --data.folds (value '5'); it is a flag of another command: trainer sweep RECIPE --folds",
    ),
    "width of Llama": (
        "fit lm_bytes --model.hidden_size 64",
        "unknown flag --model.hidden_size (value '64'); for an entry of its configuration, use …",
    ),
    "csv in YAML": (
        "fit TMP/other.yaml",
        (
            "TMP/other.yaml line 3: unknown key data.train_file; Digits has no train_file, TextFiles has it: take "
            "--data TextFiles"
        ),
    ),
    # YAML
    "section in YAML": ("fit TMP/section.yaml", "TMP/section.yaml line 3: unknown key optmi; did you mean optim?"),
    "key in YAML": (
        "fit TMP/nested.yaml",
        "TMP/nested.yaml line 4: unknown key optim.learning_rate; did you mean optim.lr?",
    ),
    "dotted key in YAML": (
        "fit TMP/dotted.yaml",
        "TMP/dotted.yaml line 3: unknown key memory.precison; did you mean memory.precision?",
    ),
    "section forgotten in YAML": ("fit TMP/flat.yaml", "TMP/flat.yaml line 2: unknown key lr; did you mean optim.lr?"),
    "value in YAML": ("fit TMP/value.yaml", "TMP/value.yaml line 4: optim.lr='fast' must be float"),
    "choice in YAML": (
        "fit TMP/choice.yaml",
        "TMP/choice.yaml line 3: memory.strategy='deepspeed' must be auto|single|ddp|fsdp",
    ),
    "twice in YAML": (
        "fit TMP/twice.yaml",
        "TMP/twice.yaml line 2: duplicate key optim.lr: given both nested and with a dot",
    ),
    "transformers' YAML": (
        "fit TMP/hf.yaml",
        "TMP/hf.yaml line 2: unknown key per_device_train_batch_size; did you mean batch_size?",
    ),
    "recipe in YAML": (
        "fit TMP/typo.yaml",
        "TMP/typo.yaml: unknown recipe 'vit_digit'; did you mean vit_digits? (packaged recipes: …",
    ),
    "tab in YAML": (
        "fit TMP/tab.yaml",
        "TMP/tab.yaml line 3: not valid YAML: found character '\\t' that cannot start any token",
    ),
    # Python
    "keyword": (
        "fit TMP/learning_rate.py",
        (
            "recipe TMP/learning_rate.py line 5: TypeError: Optim.__init__() got an unexpected keyword argument "
            "'learning_rate'; did you mean lr?"
        ),
    ),
    "keyword's line": (
        "fit TMP/max_grad_norm.py",
        (
            "recipe TMP/max_grad_norm.py line 5: TypeError: Optim.__init__() got an unexpected keyword argument "
            "'max_grad_norm'; did you mean clip_norm?"
        ),
    ),
    "keyword of transformers": (
        "fit TMP/max_grad_norm.py",
        (
            "recipe TMP/max_grad_norm.py line 5: TypeError: Optim.__init__() got an unexpected keyword argument "
            "'max_grad_norm'; did you mean clip_norm?"
        ),
    ),
    "lr of the recipe": (
        "fit TMP/lr.py",
        (
            "recipe TMP/lr.py line 5: TypeError: Recipe.__init__() got an unexpected keyword argument 'lr'; it is "
            "Optim that has lr"
        ),
    ),
    "precision of the recipe": (
        "fit TMP/precision.py",
        (
            "recipe TMP/precision.py line 5: TypeError: Recipe.__init__() got an unexpected keyword argument "
            "'precision'; it is Memory that has precision"
        ),
    ),
    "epochs in Python": (
        "fit TMP/num_train_epochs.py",
        (
            "recipe TMP/num_train_epochs.py line 5: TypeError: Recipe.__init__() got an unexpected keyword argument "
            "'num_train_epochs'; did you mean epochs?"
        ),
    ),
    "checkpointing in Python": (
        "fit TMP/grad_ckpt.py",
        (
            "recipe TMP/grad_ckpt.py line 5: TypeError: Memory.__init__() got an unexpected keyword argument "
            "'gradient_checkpointing'; did you mean activation_checkpointing?"
        ),
    ),
    "saving in Python": (
        "fit TMP/save_steps.py",
        (
            "recipe TMP/save_steps.py line 5: TypeError: Checkpoint.__init__() got an unexpected keyword argument "
            "'save_steps'; did you mean every?"
        ),
    ),
    "directory in Python": (
        "fit TMP/output_dir.py",
        (
            "recipe TMP/output_dir.py line 5: TypeError: Run.__init__() got an unexpected keyword argument "
            "'output_dir'; did you mean dir?"
        ),
    ),
    "typo in Python": (
        "fit TMP/image_sise.py",
        (
            "recipe TMP/image_sise.py line 5: TypeError: ImageFolder.__init__() got an unexpected keyword argument "
            "'image_sise'; did you mean image_size?"
        ),
    ),
    "text for a number": ("fit TMP/wrong_type.py", "recipe TMP/wrong_type.py line 5: epochs='3' must be an integer"),
    "text for Optim": ("fit TMP/optim_name.py", "recipe TMP/optim_name.py line 5: optim='adamw' must be a Optim"),
    "precision in Python": (
        "fit TMP/fp8.py",
        (
            "recipe TMP/fp8.py line 5: memory.precision='fp8' is not one of auto, 32-true, 64-true, bf16-mixed, "
            "16-mixed, bf16-true, 16-true"
        ),
    ),
    # other commands
    "ladder's steps": ("ladder vit_digits --max_steps 3", "--max_steps is set by the ladder: use --steps"),
    "action of checkpoint": (
        "checkpoint lst TMP/run",
        "checkpoint lst: no such action: use one of list, verify, export",
    ),
    "predict without input": (
        "predict TMP/run",
        "predict needs either --text TEXT or --image PATH, or files and folders after RUN_DIR",
    ),
    "predict of nothing": ("predict TMP/run --text=", "--text is empty: give a text"),
    "predict of a folder as an image": (
        "predict TMP/run --image TMP/run",
        "image 'TMP/run': is a folder: give it after RUN_DIR, without --image",
    ),
    "a figure of Lightning": (
        "fit vit_digits --run.metrics acc",
        "run.metrics='acc' is not a known metric; did you mean accuracy? (there are …)",
    ),
    "a figure of another task": (
        "fit vit_digits --run.metrics rmse",
        "run.metrics=rmse is not for single_label models: choose one of accuracy, auroc, …",
    ),
    "a file of streamed texts": (
        "fit distilbert_streaming --data.train_files TMP/nope",
        "data.train_files='TMP/nope': there is no such folder or file: give one by --data.train_files",
    ),
    "layer decay": (
        "fit vit_digits --optim.layer_decay 1.5",
        "optim.layer_decay=1.5 must be in (0, 1]",
    ),
    "a group's key": (
        """fit vit_digits --optim.groups {"head*":{"lr":10}}""",
        "optim.groups['head*'] has no lr; did you mean lr_scale?",
    ),
    "a sweep of nothing": (
        "sweep vit_digits --trials 2",
        "sweep needs something to vary: give --over KEY=LOW..HIGH (or KEY=A,B,C), once or more, or …",
    ),
    "devices of plan": (
        "plan vit_digits --devices two",
        "--devices='two' must be an integer from 1 to 1,000,000",
    ),
    "no command": ("train vit_digits", "unknown command train (commands: …"),
    "a recipe for evaluate": ("evaluate vit_digits", "run directory 'vit_digits': no such directory"),
}


TEXTS = "fit text_files --model.weights null --model.tokenizer TOKENIZER --run.progress false --data.train_file"
IMAGES = "fit vit_digits --run.predict false --data ImageFolder --data.image_size 8 --data.root"
CHATS = "fit lm_chat --model.name llama --model.weights null --model.tokenizer bytes --data.train_files"
READ = {
    "semicolons": f"{TEXTS} TMP/semicolon.csv",
    "latin-1": f"{TEXTS} TMP/latin.csv --data.encoding latin-1",
    "what Jupyter leaves in folders": f"{IMAGES} TMP/jupyter",
}
"""What others stumble over, and is read here."""
OWN = """from torch.nn.functional import cross_entropy
from trainer import Loss, Memory, Optim, Recipe, Run
from trainer.data import Digits
from trainer.models import MLP

class Net(MLP):
    def losses(self, module, batch):
        loss = cross_entropy(module(batch["pixel_values"]), batch["labels"], reduction="sum")
        {}

recipe = Recipe(model=Net([8]), data=Digits(), batch_size=64, max_steps=1, memory=Memory(micro_batch_size=16),
                run=Run(predict=False, evaluate=False, accelerator="cpu", progress=False))
"""
LOSSES = {
    "sum": 'yield Loss(loss, weight=len(batch["labels"]))',
    "mean": 'yield Loss(loss / len(batch["labels"]), weight=len(batch["labels"]))',
    "tensor": "return loss",
    "yielded": "yield loss",
    "pair": "return loss, 16",
    "item": 'yield Loss(loss.item(), weight=len(batch["labels"]))',
    "detached": 'yield Loss(loss.detach(), weight=len(batch["labels"]))',
    "vector": 'yield Loss(loss.expand(16), weight=len(batch["labels"]))',
    "weight": "yield Loss(loss, weight=1)",
    "named": 'yield Loss(loss, weight=len(batch["labels"]), name="ce")',
    "forgotten": "return None",
    "twice": "yield from [Loss(loss, weight=16)] * 2",
}
TABLES = {
    "header.csv": "text,label\n",
    "one.csv": "text,label\nein Film,gut\nnoch einer,gut\n",
    "numbers.csv": "text,label\n" + "".join(f"film {i},{i / 7:.3f}\n" for i in range(40)),
    "column.csv": "review,label\nein Film,gut\nnoch einer,schlecht\n",
    "semicolon.csv": "text;label\nein Film, ja;gut\nnoch einer;schlecht\n",
    "latin.csv": "text,label\nübel,schlecht\nschön,gut\n",
    "gap.csv": "text,label\nein Film,gut\nnoch einer,\n",
    "blank.txt": " \n",
    "latin.py": "# übel\n",
    "cut.jsonl": "".join(f'{{"prompt": "{one}", "completion": "It is."}}\n' for one in ("Is it so?", "Is it? " * 40)),
    "broken.jsonl": '{"prompt": "Is it so?", "completion": "It is."}\n\n{"prompt": "Is it so?\n',
    "refuses.jinja": "{{ raise_exception('no questions here') }}",
}
IN_TRAINING = {
    "a mean": (
        "fit TMP/mean.py",
        (
            "Net: loss 'loss' of some samples is …: losses() must return the sum over the samples, not a mean (use "
            "reduction='sum'). If the loss of a sample depends on the other samples of its micro-batch, set "
            "samples_interact = True"
        ),
    ),
    "a tensor": (
        "fit TMP/tensor.py",
        (
            "Net: losses() returns a Tensor: yield Loss(total, weight): the sum of the losses of the micro-batch's "
            "items, and the number of items"
        ),
    ),
    "a yielded tensor": (
        "fit TMP/yielded.py",
        (
            "Net: losses() yields a Tensor: yield Loss(total, weight): the sum of the losses of the micro-batch's "
            "items, and the number of items"
        ),
    ),
    "a pair": (
        "fit TMP/pair.py",
        (
            "Net: losses() yields a Tensor: yield Loss(total, weight): the sum of the losses of the micro-batch's "
            "items, and the number of items"
        ),
    ),
    "a number": (
        "fit TMP/item.py",
        "Net: loss 'loss' has a total of type float: give the sum as a scalar tensor (reduction='sum')",
    ),
    "no graph": (
        "fit TMP/detached.py",
        (
            "Net: loss 'loss' has no gradient graph, so the model cannot learn from it: compute its total from "
            "module(...) without .item(), .detach() or torch.no_grad(), and leave some parameters trainable"
        ),
    ),
    "a loss a sample": (
        "fit TMP/vector.py",
        "Net: loss 'loss' has a total of shape (16,): give the sum as a scalar tensor (reduction='sum')",
    ),
    "another weight": (
        "fit TMP/weight.py",
        (
            "Net: loss 'loss' reports weight 1, but weigh() returned 16 for the same micro-batch: make both count the "
            "same items"
        ),
    ),
    "another name": (
        "fit TMP/named.py",
        "Net: losses() yields 'ce', but loss_names has loss and weigh() returns loss: use the same names in all three",
    ),
    "no losses": (
        "fit TMP/forgotten.py",
        (
            "Net: losses() returns a NoneType: yield Loss(total, weight): the sum of the losses of the micro-batch's "
            "items, and the number of items"
        ),
    ),
    "a loss twice": (
        "fit TMP/twice.py",
        "Net: losses() yields 'loss' twice: yield each of loss_names once per micro-batch",
    ),
    "rows of a table": (f"{TEXTS} TMP/header.csv", "TMP/header.csv has no rows: add some, or give another file"),
    "a class": (
        f"{TEXTS} TMP/one.csv",
        (
            "TMP/one.csv: data.label_column='label' is 'gut' in every row, but a classifier needs two classes or "
            "more: add rows of another class, or name the column of the classes"
        ),
    ),
    "numbers for classes": (
        f"{TEXTS} TMP/numbers.csv",
        (
            "TMP/numbers.csv: data.label_column='label' has 40 different numbers such as 0.000, which looks like "
            "regression: use --model.task regression, or name the column of the classes"
        ),
    ),
    "a column": (
        f"{TEXTS} TMP/column.csv",
        "data.text_column='text': TMP/column.csv has no such column; it has 'review', 'label'",
    ),
    "a label": (
        f"{TEXTS} TMP/gap.csv",
        ("TMP/gap.csv row 3 (the header is row 1, blank lines are not counted) has no label: add it or remove the row"),
    ),
    "a folder for a table": (
        f"{TEXTS} TMP/run",
        "data.train_file='TMP/run': TMP/run is a folder: give a file in it by --data.train_file FILE",
    ),
    "a table": (
        f"{TEXTS} TMP/nowhere.csv",
        "data.train_file='TMP/nowhere.csv': there is no file TMP/nowhere.csv: give one by --data.train_file FILE",
    ),
    "Excel's table": (
        f"{TEXTS} TMP/latin.csv",
        "TMP/latin.csv line 2 is not utf-8 (byte 0xfc …): if that looks right, use --data.encoding cp1252 (Excel's), "
        "otherwise give the file's encoding, or save it as UTF-8",
    ),
    "an empty class": (
        f"{IMAGES} TMP/empty",
        "data.root='TMP/empty': TMP/empty/train/leer contains no images (.jpg …): remove the folder, or add images",
    ),
    "a document": (
        "fit lm_bytes --data.train_files TMP/blank.txt",
        "data.train_files='TMP/blank.txt': every document is empty: give other files",
    ),
    "a document's encoding": (
        "fit lm_bytes --data.train_files TMP/latin.py",
        "1 document cannot be learned from, more than data.max_bad_samples=0: TMP/latin.py is not utf-8 text (…): "
        "save it in that encoding, or leave it out. Fix or remove them",
    ),
    "a broken line": (
        f"{CHATS} TMP/broken.jsonl",
        "TMP/broken.jsonl cannot be read as jsonl (ValueError: line 3: Invalid control character at): fix the file",
    ),
    "a chat that is cut before the answer": (
        f"{CHATS} TMP/cut.jsonl --data.max_length 128",
        "1 conversation cannot be learned from, more than data.max_bad_samples=0: TMP/cut.jsonl row 2 (the first is "
        "row 1, blank lines are not counted) has no text of the assistant within data.max_length. Fix or remove them, "
        "raise data.max_length=128, or skip them with --data.max_bad_samples 1",
    ),
    "a template that refuses all": (
        f"{CHATS} TMP/cut.jsonl --data.chat_template TMP/refuses.jinja",
        "2 conversations cannot be learned from, more than data.max_bad_samples=0: TMP/cut.jsonl row 1 (the first is "
        "row 1, blank lines are not counted) is rejected by the chat template (TemplateError: no questions here); "
        "TMP/cut.jsonl row 2 is rejected by the chat template (TemplateError: no questions here). Fix or remove them",
    ),
    "a typo in a hub name": (
        "fit text_files --data.train_file TMP/semicolon.csv --model.tokenizer distilbert/distilbert-base-uncasd",
        "model.tokenizer='distilbert/distilbert-base-uncasd' cannot be loaded: it is neither a local folder nor in the "
        "hub's cache, and HF_HUB_OFFLINE is set, so the hub is not asked. Give a local folder as save_pretrained "
        "writes it, or bytes, which needs no files; unset HF_HUB_OFFLINE to ask the hub",
    ),
    "plateau without validation": (
        "fit vit_digits --optim.schedule plateau",
        "optim.schedule=plateau needs a validation set: create one, for example by data.val_fraction",
    ),
    "the best without validation": (
        "fit vit_digits --run.best accuracy",
        "run.best=accuracy needs a validation set: a test set that chooses the model can no longer measure it. Hold "
        "out a part of the training set (data.val_fraction 0.1), or set run.best test_accuracy",
    ),
    "several labels of one": (
        "fit vit_digits --model.task multi_label --data.mixup 0.8",
        "model.task=multi_label does not fit the data, Digits has labels for single_label: use one of these, or other "
        "data (docs/tasks.md)",
    ),
    "a resume from nowhere": (
        "fit TMP/mean.py --run.resume TMP/nowhere",
        "run.resume=TMP/nowhere: there is no checkpoint in TMP/nowhere",
    ),
    "a plan without a GPU": ("plan vit_digits", "no GPU found: choose one with --gpu: …"),
    "a rung": (
        "ladder vit_digits --rungs bf16-mxied",
        "--rungs: no rung 'bf16-mxied' here; did you mean bf16-mixed? (rungs: …",
    ),
}


def require_line(line: str, expected: str, made: Path) -> None:
    """The whole line is the one that is expected, where … stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.replace("TMP", str(made)).split("…"))
    assert re.fullmatch(f"trainer: error: {pattern}", line.rstrip("\n")), line


@pytest.mark.parametrize("name", IN_TRAINING)
def test_a_mistake_in_data_or_model_is_a_line_that_says_what_to_do(made, tmp_path, monkeypatch, capsys, name):
    command, expected = IN_TRAINING[name]
    monkeypatch.chdir(tmp_path)  # runs are made here
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = command.replace("TMP", str(made)).replace("TOKENIZER", tokenizer_folder()).split()
    assert run(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trainer: error: ")]
    require_line(line, expected, made)


@pytest.mark.parametrize("name", READ)
def test_what_others_stumble_over_is_read(made, tmp_path, monkeypatch, capsys, no_pictures, name):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    command = READ[name].replace("TMP", str(made)).replace("TOKENIZER", tokenizer_folder())
    small = """--model.name distilbert --model.config {"n_layers":1,"dim":8,"hidden_dim":8,"n_heads":1}"""
    folder = tmp_path / "trained"
    more = f"--max_steps 1 --optim.warmup_steps 0 --run.evaluate false --run.predict false --run.dir {folder}"
    tiny = small if "text_files" in command else TINY
    assert run([*command.split(), *tiny.split(), *more.split()]) == 0, capsys.readouterr().err
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 1)


def test_runs_of_own_models_and_of_python_are_predicted_and_evaluated(made, capsys, no_pictures):
    folder = str(made / "own")
    assert run(["fit", str(made / "sum.py"), "--run.dir", folder]) == 0
    for words, expected in (
        ("--text x", "--text needs a text model: Net has no tokenizer; it reads images: use --image"),
        (
            f"--image {made}/jupyter/test/cat/1.png",
            "Net.losses yields no logits to predict with: yield Loss(..., logits=...)",
        ),
    ):
        capsys.readouterr()
        assert run(["predict", folder, *words.split(), "--trust-recipe"]) == 2
        require_line(capsys.readouterr().err.splitlines()[-1], expected, made)
    quiet = Run(dir=str(made / "python"), predict=False, accelerator="cpu", progress=False)
    fitted = fit(Recipe(model=MLP([8]), data=Digits(), batch_size=64, max_steps=1, run=quiet))
    assert run(["evaluate", str(fitted.dir)]) == 0
    capsys.readouterr()
    assert run(["predict", str(fitted.dir), str(made / "jupyter" / "test")]) == 0
    assert capsys.readouterr().out.count("\n") == 2


def test_labels_that_are_called_otherwise_need_weigh():
    with pytest.raises(RecipeError, match=r"micro-batches have no tensor 'labels'.*define weigh\(batch\)"):
        MLP([8]).weigh({"pixel_values": None, "target": None})


def test_a_tensorboard_that_is_not_there_is_said_before_anything_is_started(made, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert run(["fit", "vit_digits", "--run.logger", "tensorboard", "--run.dir", str(made / "tb")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("trainer: error: run.logger=tensorboard needs the package tensorboard (")
    assert not (made / "tb").exists()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with all files of the table, and a run."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(RECIPE.format(text) if name.endswith(".py") else text)
    for name, line in LOSSES.items():
        (tmp_path / f"{name}.py").write_text(OWN.format(line))
    for name, text in TABLES.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    for part, name in itertools.product(("train", "test"), ("cat", "dog")):
        image = tmp_path / "jupyter" / part / name / "1.png"
        image.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), "red" if name == "cat" else "blue").save(image)
    shutil.copytree(tmp_path / "jupyter", tmp_path / "empty")
    (tmp_path / "jupyter" / "train" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "empty" / "train" / "leer").mkdir()
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("recipe: vit_digits\n")
    return tmp_path


@pytest.mark.parametrize("name", BEFORE_TRAINING)
def test_a_mistake_is_a_line_that_says_what_was_meant(made: Path, capsys: Any, name: str) -> None:
    command, expected = BEFORE_TRAINING[name]
    assert run(command.replace("TMP", str(made)).split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    require_line(err, expected, made)


TINY = "--model.layers=1 --model.width=8 --model.mlp_width=8 --model.heads=1 --run.accelerator=cpu --run.predict=false"
NO_TEST = """from trainer.commands.recipes import load_recipe
from trainer.data import Digits

class Own(Digits):
    def prepare(self, tokenizer=None):
        super().prepare(tokenizer)
        self.test = None

recipe = load_recipe("vit_digits")[0].replace(data=Own())
"""
WARNED = {
    "batch larger than the data": (
        "vit_digits --batch_size 100000 --max_steps 1 --optim.warmup_steps 0",
        "batch_size=100000 is larger than the 1,437 training samples: every step uses all of them",
    ),
    "warm-up longer than the run": (
        "vit_digits --optim.warmup_steps 5000 --max_steps 2",
        "optim.warmup_steps=5000, but the run ends after 2 steps: the learning rate never reaches optim.lr=",
    ),
    "nothing to evaluate": (
        "TMP/no_test.py --max_steps 1 --optim.warmup_steps 0",
        "no evaluation: the data has neither a validation set nor a test set; --data.val_fraction 0.1 holds out",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_is_hardly_meant_is_said_and_the_run_goes_on(tmp_path: Path, capsys: Any, no_pictures: None, name: str):
    flags, expected = WARNED[name]
    folder = tmp_path / "run"
    (tmp_path / "no_test.py").write_text(NO_TEST)
    assert run(["fit", *flags.replace("TMP", str(tmp_path)).split(), *TINY.split(), "--run.dir", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line.startswith(f"warning: {expected}")] != [], err
    assert sum(line.startswith("warning: ") for line in err.splitlines()) == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["batch_size"] == (1437 if "larger than" in expected else 64)
    assert f"batch {summary['batch_size']:,} samples per step on 1 rank" in " ".join(out.split())


def test_ranks_without_samples_are_counted():
    recipe = load_recipe("vit_digits")[0]
    for batch, ranks, idle in ((2, 3, 1), (2, 2, 0), (64, 3, 0), (5, 8, 3)):
        plan = decide_plan(recipe.replace(batch_size=batch, memory=Memory()), ranks)
        found = [line for line in suspicious_settings(recipe, plan, 1437, 10) if "ranks" in line]
        said = f"batch_size={batch} has fewer samples than ranks: {idle} of {ranks} ranks are idle in every step"
        assert [line.partition(";")[0] for line in found] == [said] * bool(idle)


def test_master_weights_that_every_rank_keeps_are_named_with_the_fix():
    recipe = load_recipe("vit_digits")[0]
    found = {}
    for strategy, ranks in (("ddp", 2), ("fsdp", 2), ("auto", 1)):
        asked = recipe.replace(memory=Memory(strategy=strategy, cpu_offload="optimizer"))
        lines = suspicious_settings(asked, decide_plan(asked, ranks), 1437, 10)
        found[strategy] = [line for line in lines if "memory.strategy fsdp" in line]
    assert list(map(len, found.values())) == [1, 0, 0]


@pytest.mark.parametrize(("given", "meant"), [("bf16", "bf16-mixed"), ("fp16", "16-mixed"), ("bf16-true", "bf16-true")])
def test_a_precision_is_what_it_is_called_everywhere_else(tmp_path: Path, capsys: Any, given: str, meant: str) -> None:
    (tmp_path / "own.py").write_text(RECIPE.format(f"memory=Memory(precision={given!r})"))
    (tmp_path / "own.yaml").write_text(f"recipe: vit_digits\nmemory: {{precision: {given}}}\n")
    assert load_recipe(str(tmp_path / "own.py"))[0].memory.precision == meant
    for words in ([str(tmp_path / "own.yaml")], ["vit_digits", f"--memory.precision={given}"]):
        assert run(["fit", *words, "--print_config"]) == 0
        assert f"  precision: {meant}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("plan", ["usage: trainer plan RECIPE [flags]", "--gpu GPU", "--interconnect", "--json", "--config"]),
        ("ladder", ["usage: trainer ladder RECIPE", "--rungs RUNGS", "--steps STEPS", "--trust-recipe"]),
        ("predict", ["usage: trainer predict RUN_DIR", "--text TEXT ...", "--image IMAGE ...", "[PATH ...] [flags]"]),
        (
            "evaluate",
            ["usage: trainer evaluate RUN_DIR", "--trust-recipe", "trainer evaluate RUN_DIR --help lists"],
        ),
        ("doctor", ["usage: trainer doctor RECIPE", "--json"]),
        ("checkpoint", ["usage: trainer checkpoint list DIR", "export DIR [--best] [--out FOLDER]"]),
    ],
)
def test_a_command_has_a_page_of_its_own(capsys: Any, command: str, parts: list[str]) -> None:
    assert run([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert [part for part in parts if part not in page] == [], page
    assert max(map(len, page.splitlines())) <= 120
