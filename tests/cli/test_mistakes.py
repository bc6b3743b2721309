"""Mistakes of users: each is refused in one line that names the fix, with exit code 2, before anything is written."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import RECIPE as POINTS
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

RECIPE = """from trainer import Checkpoint, Memory, Optim, Recipe, Run
from trainer.data import Digits, ImageFolder
from trainer.models import MLP

recipe = Recipe(model=MLP([8]), data=Digits(), batch_size=64, {})
"""
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
NO_TEST = """from trainer.commands.recipes import load_recipe
from trainer.data import Digits

class Own(Digits):
    def prepare(self, tokenizer=None):
        super().prepare(tokenizer)
        self.test = None

recipe = load_recipe("vit_digits")[0].replace(data=Own())
"""
ARGUMENTS = {
    "learning_rate": "optim=Optim(learning_rate=0.1)",
    "max_grad_norm": "optim=Optim(\n    'adamw', max_grad_norm=1.0)",
    "lr": "lr=0.1",
    "precision": "precision='bf16'",
    "num_train_epochs": "num_train_epochs=3",
    "grad_ckpt": "memory=Memory(gradient_checkpointing=True)",
    "save_steps": "checkpoint=Checkpoint(save_steps=100)",
    "output_dir": "run=Run(output_dir='out')",
    "image_sise": "seed=len(str(ImageFolder('photos', image_sise=32)))",
    "wrong_type": "epochs='3'",
    "optim_name": "optim='adamw'",
    "fp8": "memory=Memory(precision='fp8')",
}
"""Recipes by file name: arguments of the recipe."""
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
"""Recipes by file name: the last line of ``losses``."""
FILES = {
    "points.py": POINTS,
    "no_test.py": NO_TEST,
    "no_recipe.py": "x = 1\n",
    "number.py": "recipe = 3\n",
    "fails.py": "x = 1\nrecipe = None + 1\n",
    "syntax.py": "\n\nrecipe = (\n",
    "value.py": "from trainer import Optim\n\nOptim(lr=-1)\n",
    "import.py": "import no_such_module_here\n",
    "section.yaml": "recipe: vit_digits\nseed: 3\noptmi: {lr: 0.1}\n",
    "nested.yaml": "recipe: vit_digits\noptim:\n  name: adamw\n  learning_rate: 0.1\n",
    "dotted.yaml": "recipe: vit_digits\n\nmemory.precison: bf16\n",
    "value.yaml": "recipe: vit_digits\noptim:\n  name: adamw\n  lr: fast\n",
    "choice.yaml": "recipe: vit_digits\nmemory:\n  strategy: deepspeed\n",
    "flat.yaml": "recipe: vit_digits\nlr: 0.1\n",
    "twice.yaml": "recipe: vit_digits\noptim: {lr: 0.1}\noptim.lr: 0.2\n",
    "twice_nested.yaml": "optim:\n  lr: 1\n  name: sgd\n  lr: 2\n",
    "hf.yaml": "recipe: vit_digits\nper_device_train_batch_size: 8\n",
    "resume.yaml": "recipe: vit_digits\nrun:\n  resume: yes\n",
    "other.yaml": "recipe: vit_digits\ndata:\n  train_file: a.csv\n",
    "typo.yaml": "recipe: vit_digit\n",
    "tab.yaml": "recipe: vit_digits\noptim:\n\tlr: 0.1\n",
    "no_section.yaml": "memory: 3\n",
    "type.yaml": "data: {root: 3}\n",
    "list.yaml": "- epochs\n",
    "open.yaml": "epochs: [3\n",
    "bool.yaml": "epochs: !!bool x\n",
    "float.yaml": "epochs: !!float ''\n",
    "deep.yaml": "epochs: " + "[" * 200 + "]" * 200,
    "deeper.yaml": "epochs: " + "[" * 100_000 + "]" * 100_000,  # PyYAML's C code would crash
    "recipe.yaml": "recipe: vit_digits\n",
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files of the tables, and a run."""
    folder = tmp_path_factory.mktemp("made")
    content = FILES | {f"{name}.py": RECIPE.format(text) for name, text in ARGUMENTS.items()}
    content |= {f"loss_{name}.py": OWN.format(line) for name, line in LOSSES.items()}
    for name, text in content.items():
        (folder / name).write_text(text, encoding="latin-1")
    for part, name in itertools.product(("train", "test"), ("cat", "dog")):
        image = folder / "jupyter" / part / name / "1.png"
        image.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), "red" if name == "cat" else "blue").save(image)
    shutil.copytree(folder / "jupyter", folder / "empty")
    (folder / "jupyter" / "train" / ".ipynb_checkpoints").mkdir()
    (folder / "empty" / "train" / "leer").mkdir()
    for name in ("run", "no_model"):
        (folder / name).mkdir()
        (folder / name / "recipe.yaml").write_text("recipe: vit_digits\n")
    (folder / "run" / "model").mkdir()
    for name in ("ladder", "plan"):
        (folder / name).mkdir()
        (folder / name / f"{name}.json").touch()
    return folder


@pytest.fixture
def trainer(made, tmp_path, monkeypatch, capsys):
    """A function: run a command line in an empty folder; its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def call(command: str) -> tuple[int, str, str]:
        if "TOKENIZER" in command:
            command = command.replace("TOKENIZER", tokenizer_folder())
        code = run(shlex.split(command.replace("TMP", str(made))))
        out, err = capsys.readouterr()
        return code, out, err.replace(str(made), "TMP")

    return call


def lines(table: str) -> list[str]:
    """The command lines of a table, without its comments."""
    return [line for line in table.splitlines() if line and not line.startswith("#")]


LISTS = [r"(?<=packaged recipes: )[^)]*", r"(?<=commands: )[^)]*", r"(?<=\(rungs: )[^)]*", r"(?<=there are )[^)]*"]
LISTS += [r"(?<=images \()[^)]*", r"(?<=It has: ).*", r"(?<=choose one of ).*"]
"""Lists in messages that grow with the package and its libraries."""
NUMBERS = [r"\d\.\d+, but \d\.\d+ \+ \d\.\d+"]
"""Losses, which depend on the kernels."""

MISTAKES = r"""
# flags as other trainers call them: Lightning, timm, transformers, accelerate
fit vit_digits --lr 0.1
fit vit_digits --learning_rate 0.1
fit vit_digits --learning-rate=0.1
fit vit_digits --num_train_epochs 3
fit vit_digits --max_epochs 3
fit vit_digits --per_device_train_batch_size 8
fit vit_digits --gradient_accumulation_steps 8
fit vit_digits --accumulate_grad_batches 8
fit vit_digits --gradient_checkpointing true
fit vit_digits --gradient_clip_val 1
fit vit_digits --clip-grad 1
fit vit_digits --opt adamw
fit vit_digits --sched cosine
fit vit_digits --bf16 true
fit vit_digits --mixed_precision bf16
fit vit_digits --output_dir out
fit vit_digits --save_steps 100
fit vit_digits --save_total_limit 2
fit vit_digits --eval_steps 100
fit vit_digits --report_to wandb
fit vit_digits --resume_from_checkpoint x
fit vit_digits --gpus 2
fit vit_digits --num_workers 2
fit distilbert_imdb --max_seq_length 128
fit distilbert_imdb --num_labels 2
# a word in the wrong place
fit vit_digits epochs=3
fit vit_digits optim.lr=0.1
fit vit_digits -epochs 3
fit TMP/points.py -b 3
fit TMP/points.py extra
fit TMP/points.py --epochs
fit TMP/points.py --epochs --seed 3
fit TMP/points.py --print_config=yes
fit TMP/points.py --config absent.yaml
# misspelt and abbreviated flags
fit TMP/points.py --batchsize 32
fit TMP/points.py --batch 32
fit TMP/points.py --lr 1
fit TMP/points.py --epochs+ 3
fit TMP/points.py --memory.precison bf16-mixed
fit TMP/points.py --model.schedul 3
# values
fit vit_digits --run.resume yes
fit vit_digits --run.resume False
fit TMP/resume.yaml
fit vit_digits --memory.precision fp8
fit vit_digits --run.evaluate 2
fit vit_digits --run.metrics acc
fit vit_digits --run.metrics rmse
fit vit_digits --optim.layer_decay 1.5
fit vit_digits --optim.groups '{"head*":{"lr":10}}'
fit TMP/points.py --epochs three
fit TMP/points.py --run.progress maybe
fit TMP/points.py --accumulate '{0: 8, 0: 2}'
fit TMP/points.py --accumulate '{1: 8}'
fit TMP/points.py --optim.name adamx
fit TMP/points.py --memory.strategy dp
fit TMP/points.py --memory.strategy async
fit TMP/points.py --run.logger tensorbord
fit TMP/points.py --run.devices aut
fit TMP/points.py --memory.budget '3 bytes'
fit TMP/points.py --model.width 0
# of another model or dataset
fit distilbert_imdb --data.train_file a.csv
fit distilbert_imdb --model.width 64
fit distilbert_streaming --data.sampling balanced
fit distilbert_streaming --data.train_files TMP/nope
fit vit_digits --data.folds 5
fit lm_bytes --model.hidden_size 64
# YAML
fit TMP/section.yaml
fit TMP/nested.yaml
fit TMP/dotted.yaml
fit TMP/flat.yaml
fit TMP/value.yaml
fit TMP/choice.yaml
fit TMP/twice.yaml
fit TMP/hf.yaml
fit TMP/other.yaml
fit TMP/typo.yaml
fit TMP/tab.yaml
fit TMP/points.py --config TMP/twice_nested.yaml
fit TMP/points.py --config TMP/no_section.yaml
fit TMP/points.py --config TMP/type.yaml
fit TMP/points.py --config TMP/list.yaml
fit TMP/points.py --config TMP/open.yaml
fit TMP/points.py --config TMP/bool.yaml
fit TMP/points.py --config TMP/float.yaml
fit TMP/points.py --config TMP/deep.yaml
fit TMP/points.py --config TMP/deeper.yaml
fit TMP/points.py --config TMP/recipe.yaml
# Python
fit TMP/learning_rate.py
fit TMP/max_grad_norm.py
fit TMP/lr.py
fit TMP/precision.py
fit TMP/num_train_epochs.py
fit TMP/grad_ckpt.py
fit TMP/save_steps.py
fit TMP/output_dir.py
fit TMP/image_sise.py
fit TMP/wrong_type.py
fit TMP/optim_name.py
fit TMP/fp8.py
fit TMP/no_recipe.py
fit TMP/number.py
fit TMP/fails.py
fit TMP/syntax.py
fit TMP/value.py
fit TMP/import.py
fit absent.py
# commands
fti
train vit_digits
--verison
fit
fit vit_digit
fit TMP/run
ladder vit_digits --max_steps 3
ladder vit_digits --run.accelerator=cpu --steps 0
ladder vit_digits --run.accelerator=cpu --memory.precision bf16-mixed
ladder vit_digits --run.accelerator=cpu --run.dir x
ladder vit_digits --run.accelerator=cpu --rungs fulcheckpointing
ladder vit_digits --run.accelerator=cpu --out TMP/ladder
plan vit_digits --gpu a100-80gb --out TMP/plan
checkpoint verfy x
checkpoint lst TMP/run
checkpoint list
checkpoint list nowhere
checkpoint verify . --out x
checkpoint verify .
predict TMP/run
predict TMP/run --text=
predict TMP/run --image TMP/run
predict TMP/run --image absent.png
predict TMP/run --text
predict TMP/run --text a --temperature hot
predict TMP/run --text -
predict TMP/run - --text a
predict TMP/run -l
predict TMP/run --text a --image TMP/jupyter/test/cat/1.png
predict TMP/run a.png --text a
predict TMP/run a.png --top-k none
predict TMP/jupyter --text a
sweep vit_digits --trials 2
evaluate
evaluate vit_digits
evaluate TMP/no_model
# trainer run
run --
run --restarts 1.5 -- vit_digits
run --nproc 0 -- vit_digits
run --epochs 3 -- vit_digits
run --nnodes 2 -- vit_digits
run --restarts
run -- --epochs 3
run -- vit_digits --run.resume elsewhere
run --nproc 2 -- vit_digits --run.devices 3
# trainer plan
plan vit_digits --gpu a100-80g
plan vit_digits --devices two
plan vit_digits --gpu a100-80gb --devices 3 --nodes 2
plan vit_digits --gpu a100-80gb --lossy maybe
plan vit_digits --gpu a100-80gb --lossy
plan vit_digits --gpu a100-80gb --devces 2
plan vit_digits --gpu a100-80gb --json=yes
plan vit_digits --gpu a100-80gb --memory.budget much
plan vit_digits --gpu a100-80gb --out /dev/null/here
plan vit_digits --gpu a100-80gb --devices 1,x
plan vit_digits --gpu a100-80gb --devices 1,8,8
plan vit_digits --gpu a100-80gb --devices 16 --interconnect bogus
plan vit_digits --gpu a100-80gb --devices 12 --per-node 8
plan vit_digits --gpu a100-80gb --devices 8,12
plan vit_digits --gpu a100-80gb --devices 8,16 --nodes 1,2,4
plan vit_digits --gpu a100-80gb --devices 8,16 --nodes 1,3
plan vit_digits --gpu a100-80gb --devices 8,16 --nodes 2 --per-node 8
plan vit_digits --gpu a100-80gb --interconnect ib-hd
plan vit_digits --gpu a100-80gb --devices 8,16 --lossy true
plan vit_digits --gpu a100-80gb --devices 8,16 --all
plan vit_digits --gpu a100-80gb --devices 8,16 --memory.cpu_offload auto
# a section instead of one of its settings
fit lm_bytes --model.lora '{"rank":8}'
fit lm_bytes --model.lora 8
"""


@pytest.mark.parametrize("command", lines(MISTAKES))
def test_a_mistake_is_refused_in_one_line(trainer, tmp_path, golden, command):
    code, out, err = trainer(command)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert list(tmp_path.iterdir()) == []
    golden(err, hide=LISTS)


FOUND_IN_DATA = """
fit TMP/loss_mean.py
fit TMP/loss_tensor.py
fit TMP/loss_yielded.py
fit TMP/loss_pair.py
fit TMP/loss_item.py
fit TMP/loss_detached.py
fit TMP/loss_vector.py
fit TMP/loss_weight.py
fit TMP/loss_named.py
fit TMP/loss_forgotten.py
fit TMP/loss_twice.py
fit TMP/loss_mean.py --run.resume TMP/nowhere
# TEXTS, IMAGES and CHATS stand for a recipe and its settings
fit TEXTS TMP/header.csv
fit TEXTS TMP/one.csv
fit TEXTS TMP/numbers.csv
fit TEXTS TMP/column.csv
fit TEXTS TMP/gap.csv
fit TEXTS TMP/run
fit TEXTS TMP/nowhere.csv
fit TEXTS TMP/latin.csv
fit IMAGES TMP/empty
fit CHATS TMP/broken.jsonl
fit CHATS TMP/cut.jsonl --data.max_length 128
fit CHATS TMP/cut.jsonl --data.chat_template TMP/refuses.jinja
fit lm_bytes --data.train_files TMP/blank.txt
fit lm_bytes --data.train_files TMP/latin.py
fit text_files --data.train_file TMP/semicolon.csv --model.tokenizer x/y
fit vit_digits --optim.schedule plateau
fit vit_digits --run.best accuracy
fit vit_digits --model.task multi_label --data.mixup 0.8
"""
SETTINGS = {
    "TEXTS": "text_files --model.weights null --model.tokenizer TOKENIZER --run.progress false --data.train_file",
    "IMAGES": "vit_digits --run.predict false --data ImageFolder --data.image_size 8 --data.root",
    "CHATS": "lm_chat --model.name llama --model.weights null --model.tokenizer bytes --data.train_files",
}


def expand(command: str) -> str:
    for name, settings in SETTINGS.items():
        command = command.replace(name, settings)
    return command


@pytest.mark.parametrize("command", lines(FOUND_IN_DATA))
def test_data_and_models_are_refused_in_one_line(trainer, golden, command):
    code, _, err = trainer(expand(command))
    assert code == 2
    (line,) = [line for line in err.splitlines() if line.startswith("trainer: error: ")]
    golden(line, hide=LISTS + NUMBERS)


@pytest.mark.parametrize(
    "command", ["TEXTS TMP/semicolon.csv", "TEXTS TMP/latin.csv --data.encoding latin-1", "IMAGES TMP/jupyter"]
)
def test_files_of_other_programs_are_read(trainer, tmp_path, no_pictures, command):
    small = """--model.name distilbert --model.config '{"n_layers":1,"dim":8,"hidden_dim":8,"n_heads":1}'"""
    folder = tmp_path / "trained"
    more = f"--max_steps 1 --optim.warmup_steps 0 --run.evaluate false --run.predict false --run.dir {folder}"
    code, _, err = trainer(f"fit {expand(command)} {small if 'TEXTS' in command else TINY} {more}")
    assert code == 0, err
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 1)


def test_runs_of_own_models_and_of_python_are_predicted_and_evaluated(trainer, made, tmp_path, golden, no_pictures):
    assert trainer(f"fit TMP/loss_sum.py --run.dir {tmp_path}/own")[0] == 0
    for name, words in (("text", "--text x"), ("image", "--image TMP/jupyter/test/cat/1.png")):
        code, _, err = trainer(f"predict {tmp_path}/own {words} --trust-recipe")
        assert code == 2
        golden(err.splitlines()[-1], name)
    quiet = Run(dir=str(tmp_path / "python"), predict=False, accelerator="cpu", progress=False)
    fitted = fit(Recipe(model=MLP([8]), data=Digits(), batch_size=64, max_steps=1, run=quiet))
    assert trainer(f"evaluate {fitted.dir}")[0] == 0
    code, out, _ = trainer(f"predict {fitted.dir} TMP/jupyter/test")
    assert (code, out.count("\n")) == (0, 2)


def test_labels_that_are_called_otherwise_need_weigh(golden):
    with golden.raises(RecipeError):
        MLP([8]).weigh({"pixel_values": None, "target": None})


def test_a_missing_tensorboard_is_named_before_anything_is_started(trainer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = trainer(f"fit vit_digits --run.logger tensorboard --run.dir {tmp_path}/tb")
    assert code == 2
    assert err.splitlines()[-1].startswith("trainer: error: run.logger=tensorboard needs the package tensorboard (")
    assert not (tmp_path / "tb").exists()


TINY = "--model.layers=1 --model.width=8 --model.mlp_width=8 --model.heads=1 --run.accelerator=cpu --run.predict=false"


@pytest.mark.parametrize(
    ("flags", "batch_size"),
    [
        ("vit_digits --batch_size 100000 --max_steps 1 --optim.warmup_steps 0", 1437),
        ("vit_digits --optim.warmup_steps 5000 --max_steps 2", 64),
        ("TMP/no_test.py --max_steps 1 --optim.warmup_steps 0", 64),
    ],
)
def test_a_doubtful_setting_is_a_warning(trainer, tmp_path, golden, no_pictures, flags, batch_size):
    code, out, err = trainer(f"fit {flags} {TINY} --run.dir {tmp_path}/run")
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("warning: ")]
    golden(line)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["batch_size"] == batch_size
    assert f"; {batch_size:,} samples per step on 1 rank" in " ".join(out.split())


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
        ("checkpoint", ["usage: trainer checkpoint list DIR", "export DIR [--best | --last] [--out FOLDER]"]),
    ],
)
def test_a_command_has_a_page_of_its_own(capsys: Any, command: str, parts: list[str]) -> None:
    assert run([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert [part for part in parts if part not in page] == [], page
    assert max(map(len, page.splitlines())) <= 120
