"""``trainer plan --script``: scripts as people write them, on a simulated card."""

from __future__ import annotations

import json
import sys
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from cli.supervised import fork_processes
from torch import nn

from trainer.cli import run
from trainer.errors import RecipeError
from trainer.fakegpu.expected_error import expected_error
from trainer.fakegpu.script import Script, plan_script
from trainer.fakegpu.script_fallbacks import NoOpObject, columns_of
from trainer.planner import fake_gpu
from trainer.system.child_jobs import run_in_child

LOOP = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from trainer import name  # theirs, beside it

    model = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 16)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(512, 256), torch.randint(16, (512,)))
    for x, y in DataLoader(data, batch_size=int(sys.argv[1]), shuffle=True, num_workers=2, pin_memory=True):
        nn.functional.cross_entropy(model(x.to("cuda")), y.to("cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), "weights.pt")
    open("done", "w").write("it was not stopped")
"""
BERT = {"model_type": "bert", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30000}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes ``train.py`` into the working directory, which is the test's own."""
    ensure_running()  # the server of warm processes: where it starts, nothing else may be called trainer
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(dedent(text))
        (tmp_path / "trainer.py").write_text("name = 'not this package'")
        (tmp_path / "bert").mkdir()
        (tmp_path / "bert/config.json").write_text(json.dumps(BERT))
        return "train.py"

    return write


def planned(path: str, *words: str, flags: tuple[str, ...] = ()) -> dict:
    """``plan.json`` of a script that fits."""
    assert run(["plan", "--script", path, "--gpu", "rtx-4090", "--out", "out", *flags, "--", *words]) == 0
    assert (Path("out/plan.png")).stat().st_size > 10_000
    return json.loads(Path("out/plan.json").read_text())


def same_loop() -> dict:
    with fake_gpu("rtx-4090") as gpu:
        model = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 16)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            x, y = torch.randn(64, 256), torch.zeros(64, dtype=torch.int64)
            nn.functional.cross_entropy(model(x.to("cuda")), y.to("cuda")).backward()  # where the batch ends, too
            optimizer.step()
            optimizer.zero_grad()
    return gpu.to_json()


@pytest.mark.slow
def test_a_plain_loop_takes_what_the_same_loop_takes_in_fake_gpu(written, capsys):
    found = planned(written(LOOP), "64")
    assert "RTX 4090" in capsys.readouterr().out
    wanted = run_in_child(same_loop)
    whole = {key: value for key, value in wanted.items() if "_gb" in key and "host" not in key}
    assert {key: found[key] for key in whole} == whole
    assert found["categories"] == wanted["categories"]
    assert found["steps"] == 3
    assert found["step_ms"] == pytest.approx(wanted["step_ms"], rel=0.1)
    assert not Path("weights.pt").exists(), "fake weights were saved"
    assert not Path("done").exists(), "it went on"


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's process is a fork of one that has imported everything."""
    fork_processes(monkeypatch)


@pytest.mark.usefixtures("warm")
def test_a_script_that_fails_is_told_with_its_line(written, capsys):
    path = written("import torch\nx = torch.zeros(3, device='cuda')\nprint('so far')\nraise KeyError('lr')\n")
    assert run(["plan", "--script", path, "--gpu", "rtx-4090", "--out", "out"]) == 2
    told = capsys.readouterr().err
    assert "train.py failed by itself (train.py:4): KeyError: 'lr'" in told
    assert "so far" in Path("out/script.log").read_text()


GUESSES = """
    import os
    import torch

    assert "RANK" not in os.environ and os.environ["CUDA_VISIBLE_DEVICES"] == ""
    layer = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    while True:
        x = layer(torch.randn(8, 64, device="cuda"))
        if x.argmax() > 1:
            x = 2 * x
        x.sum().backward()
        optimizer.step()
"""


@pytest.mark.usefixtures("warm")
def test_guesses_and_a_budget_above_the_card_are_said_and_secrets_are_not(written, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    found = planned(written(GUESSES), "--hub_token", "abc123secret", "--lr", "1", flags=("--memory.budget", "90GB"))
    said = " ".join(found["notes"])
    assert "90GB was asked for" in said
    assert found["args"] == ["--hub_token", "<redacted>", "--lr", "1"]
    assert found["versions"]["torch"]
    assert found["date"]
    printed = capsys.readouterr().out
    assert "memory.budget: 90GB was asked for" in printed
    assert "abc123secret" not in printed + Path("out/plan.json").read_text()
    assert "train.py:10" in said


LATER = """
    import torch
    from torch import nn

    encoder = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)).to("cuda").requires_grad_(False)
    head = nn.Linear(256, 16).to("cuda")
    optimizer = torch.optim.AdamW(head.parameters())
    for step in range(1, 7):
        encoder.requires_grad_(step > 4)
        head(encoder(torch.randn(8 * step, 256, device="cuda"))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(head.state_dict(), "weights.pt")
    with torch.no_grad():
        encoder(torch.randn(512, 256, device="cuda"))
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("steps", ["3", "9"])
def test_what_a_script_would_do_later_is_said_and_what_was_left_out(written, capsys, golden, steps):
    found = planned(written(LATER), flags=("--steps", steps))
    printed = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(printed) if line.startswith("error "))
    golden("\n".join(printed[start:-2]))
    kind = "adapters" if steps == "3" else "eager"
    assert (found["kind"], found["expected_error"]) == (kind, expected_error(kind))
    assert "none" not in found["notes"]


@pytest.mark.usefixtures("warm")
def test_evaluation_that_was_seen_is_not_named(written):
    text = LOOP.replace("pin_memory=True):", "pin_memory=True):\n        torch.no_grad()(model)(x.to('cuda'))")
    (stopped,) = planned(written(text), "64")["notes"]
    assert stopped == "stopped after 3 steps; batches larger than [64, 256] later in the script were not seen"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_configuration_without_a_dtype_is_named(written, monkeypatch, dtype):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = """
        import torch
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained("bert").to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(input_ids=torch.zeros(2, 8, dtype=torch.long, device="cuda")).logits.sum().backward()
        optimizer.step()
    """
    path = written(text)
    Path("bert/config.json").write_text(json.dumps(BERT | ({"dtype": dtype} if dtype else {})))
    found = planned(path)
    named = "config.json of bert has no dtype: weights are taken as float32, and would be half as large in bfloat16"
    assert (named in found["outlined"]) == (dtype is None)
    assert found["notes"][0] == "the script has ended after 1 of 3 steps"


@pytest.mark.usefixtures("warm")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_must_be_named(written, capsys):
    assert run(["plan", "--script", written(LOOP), "--out", "out"]) == 2
    told = capsys.readouterr().err
    assert "no GPU found: choose one with --gpu: a10," in told
    assert "cpu" not in told


def test_nothing_can_be_used_as_a_number_and_as_a_dict():
    nothing = NoOpObject()
    assert f"{nothing.compute(references=[1])['accuracy']:.2f}" == "0.00"
    assert (len(nothing), float(nothing), dict(nothing), list(nothing)) == (0, 0.0, {}, [])
    with nothing as writer:
        writer["loss"] = 1
        assert writer


def test_no_launcher_starts_it(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert run(["plan", "--script", __file__, "--gpu", "rtx-4090"]) == 2
    assert "without a launcher" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import time\nwhile True:\n    time.sleep(1)\n", "more than 1 s, and was at line 3"),
        ("print('Timeout (0:00:01)!')\nimport os\nos._exit(1)\n", "ended its process, with code 1"),
        ("import torch\nx = (\n", "train.py:2): SyntaxError"),
        ("import os\nopen('own.py', 'w').write('\\n1 / 0')\nimport own\n", "own.py:2): ZeroDivisionError"),
        ("import sys\nsys.exit(3)\n", "ended itself with 3"),
        ("print('nothing to do')\n", "without a step of an optimizer"),
        ("open('no.csv')\n", "(train.py:1): FileNotFoundError: [Errno 2] No such file or directory: 'no.csv'"),
        (
            "import torch\no = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1)\no.step()\no.step()\n",
            "on the CPU",
        ),
        ("from transformers import AutoModel\nAutoModel.from_pretrained('org/none')\n", "--config org/none=FOLDER"),
        ("from datasets import load_dataset\nload_dataset('org/none')\n", "--columns"),
        ("from transformers import AutoModel\nAutoModel.from_pretrained('quantised')\n", "quantised weights"),
    ],
)
def test_what_cannot_be_planned_says_why(written, text, told, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = written(text)
    Path("quantised").mkdir()
    Path("quantised/config.json").write_text(json.dumps(BERT | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(RecipeError) as caught:
        plan_script(Script(path, [], ".", "rtx-4090", seconds=1 if "sleep" in text else 60))
    assert told in str(caught.value)


@pytest.mark.slow
def test_transformers_trainer_with_a_missing_tokenizer_and_data_set(written, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = """
        from datasets import load_dataset
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

        tokenizer = AutoTokenizer.from_pretrained("org/bert")
        rows = load_dataset("imdb", split="train")
        rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=64))
        model = AutoModelForSequenceClassification.from_pretrained("org/bert", num_labels=5)
        where = TrainingArguments("saved", per_device_train_batch_size=4, save_steps=1, bf16=True, logging_steps=1)
        Trainer(model, where, train_dataset=rows, processing_class=tokenizer).train()
    """
    flags = ("--config", "org/bert=bert", "--columns", "text:str:1000,label:int:5", "--rows", "20")
    found = planned(written(text), flags=flags)
    from transformers import BertConfig, BertForSequenceClassification

    weights = sum(p.numel() for p in BertForSequenceClassification(BertConfig(**BERT, num_labels=5)).parameters())
    assert found["categories"]["optimizer"] == pytest.approx(
        2 * 4 * weights / 1e9, rel=0.05
    )  # blocks waste up to 1 MiB each
    said = " ".join(found["outlined"])
    assert all(word in said for word in ("tokenizer", "imdb", "20 rows", "weights are not read"))
    assert not list(Path().glob("saved/**/*.safetensors"))


@pytest.mark.slow
def test_accelerate_and_a_scaler(written):
    text = """
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
        model = torch.nn.Linear(2048, 2048)
        optimizer = torch.optim.Adam(model.parameters())
        data = torch.utils.data.DataLoader(torch.randn(64, 2048), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    """
    found = planned(written(text))
    weights = 4 * 2048 * 2049 / 1e9
    assert found["categories"]["optimizer"] == pytest.approx(2 * weights, rel=0.02)
    assert found["categories"]["params"] == pytest.approx(weights, rel=0.02)


@pytest.mark.slow
def test_lightning_with_a_torchvision_data_set_that_is_missing(written):
    text = """
        import lightning as L, torch, torchvision
        from torchvision.transforms import ToTensor

        class Net(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torchvision.models.resnet18(weights="DEFAULT")

            def training_step(self, batch, index):
                loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.log("loss", loss, prog_bar=True)
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        data = torchvision.datasets.CIFAR10("data", download=True, transform=ToTensor())
        L.Trainer(max_epochs=1).fit(Net(), torch.utils.data.DataLoader(data, batch_size=32, num_workers=4))
    """
    found = planned(written(text))
    assert found["categories"]["params"] == pytest.approx(4 * 11.7e6 / 1e9, rel=0.02)
    said = " ".join(found["outlined"])
    assert "CIFAR10 is missing" in said
    assert "weights are not read" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--script", "none.py"], "no such file"),
        (["--script", __file__, "--gpu", "rtx-1"], "rtx-1"),
        (["--script", __file__, "--epochs", "3"], "put the arguments of the script after --"),
        (["--script", __file__, "--config", "a=b"], "no config.json"),
        (["--script", __file__, "--steps", "0"], "--steps"),
        (["--script", __file__, "--gpu", "cpu"], "not supported for scripts"),
        (["--script", __file__, "--gp", "rtx-4090"], "did you mean --gpu?"),
        (["--script", __file__, "--jso"], "did you mean --json?"),
        (["--script", __file__, "more"], "put the arguments of the script after --"),
    ],
)
def test_flags_that_cannot_be_meant(words, told, capsys, tmp_path):
    assert run(["plan", *words]) == 2
    assert told in capsys.readouterr().err


def test_columns():
    assert columns_of("text:str:500,label:int:2,x:float") == {
        "text": ("str", 500),
        "label": ("int", 2),
        "x": ("float", 0),
    }
    for wrong in ("text", "text:string", "a:int:b", ",b:int:2:3"):
        with pytest.raises(RecipeError, match="NAME:KIND"):
            columns_of(wrong)


def test_what_it_changes_stays_in_the_child():
    assert "trainer.fakegpu.script_fallbacks" in sys.modules  # by this test
    assert torch.utils.data.DataLoader.__init__.__module__ == "torch.utils.data.dataloader"
