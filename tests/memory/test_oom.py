"""Out of memory: what it is told by, what is said, and that what is said can be done."""

from __future__ import annotations

import json
import shlex

import pytest
import torch

from trainer import Memory, Optim, Recipe
from trainer.cli import run
from trainer.commands.flags import RecipeParser, split_argv
from trainer.contract import Data
from trainer.memory.oom import describe_oom, is_out_of_memory, next_knobs, sample_lengths, shapes_of
from trainer.memory.plan import decide_plan
from trainer.models import MLP
from trainer.run.description import plan_warnings
from trainer.settings import change

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.55 GiB of which 3.19 MiB is "
    "free. Including non-PyTorch memory, this process has 23.50 GiB memory in use. See documentation for more"
)


def recipe(**changes):
    values = {"model": MLP([8], num_classes=3, image_size=4), "data": Data(), "batch_size": 64}
    return Recipe(**(values | {"memory": Memory(micro_batch_size=16)} | changes))


def knobs(wishes, world_size=1, **options):
    return next_knobs(decide_plan(wishes, world_size), wishes, **options)


OURS = """\
CUDA error: out of memory CUDA kernel errors might be asynchronously reported at some other API call
CUDA driver error: out of memory
HIP error: out of memory
cuDNN SDPA execution failed: CUDA ran out of memory outside PyTorch's allocator
Triton Error [CUDA]: out of memory
NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error. Last error: Cuda failure 2 'out of memory'
Cuda failure 'out of memory'
cuDNN error: CUDNN_STATUS_ALLOC_FAILED
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`
[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 b
"""
OTHERS = """\
mat1 and mat2 shapes cannot be multiplied (4x7 and 8x3)
the word 'cuda' of sample 7 is of another language, and the vocabulary's is out of memory of the tokenizer
vocabulary out of memory
CUDA graphs are kept out of memory that is pinned
CUDA error: device-side assert triggered
CUDA error: an illegal memory access was encountered
CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSetStream(handle, stream)`
cuDNN error: CUDNN_STATUS_NOT_SUPPORTED
NCCL error: unhandled system error. Last error: socketStartConnect: Connect failed: Connection refused
"""


def test_it_is_known_in_the_words_of_every_library_and_told_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA_MESSAGE))
    for message in (CUDA_MESSAGE, *OURS.splitlines()):
        assert is_out_of_memory(RuntimeError(message)), message
        assert not is_out_of_memory(ValueError(message))
    for message in OTHERS.splitlines():
        assert not is_out_of_memory(RuntimeError(message)), message


def test_knobs_come_in_order_the_lossy_ones_last():
    assert knobs(recipe(), world_size=2) == [
        "--memory.micro_batch_size 8",
        "--memory.precision bf16-mixed",
        "--memory.activation_checkpointing full",
        "--memory.activation_offload true",
        "--memory.strategy fsdp",
        "--memory.cpu_offload optimizer",
        "--memory.cpu_offload parameters",
        "--memory.optimizer_state_bits 8 (lossy)",
        "--memory.precision bf16-true (lossy)",
    ]


def test_knobs_that_are_on_are_left_out():
    techniques = {"activation_checkpointing": "full", "activation_offload": True, "cpu_offload": "optimizer"}
    memory = Memory(micro_batch_size=1, precision="bf16-mixed", strategy="fsdp", **techniques)
    assert knobs(recipe(memory=memory), world_size=2) == [
        "--memory.cpu_offload parameters",
        # with fp32 master weights on the host, updates are not lost: no lossy one here
        "--memory.precision bf16-true",
    ]


def test_knobs_that_would_be_refused_are_left_out():
    memory = Memory(micro_batch_size=16, optimizer_in_backward=True)
    found = knobs(recipe(optim=Optim("sgd"), memory=memory, batch_size=16))
    assert "--memory.micro_batch_size 8" not in found  # several micro-batches a step, and one update a backward
    assert not any("cpu_offload" in knob or "state_bits" in knob for knob in found)
    assert "--memory.activation_checkpointing full" in found


WEIGHTS = ["strategy fsdp", "cpu_offload parameters", "precision bf16-true (lossy)"]
STATE = [
    "strategy fsdp",
    "cpu_offload optimizer",
    "cpu_offload parameters",
    "optimizer_state_bits 8 (lossy)",
    WEIGHTS[-1],
]
GRAPH = ["micro_batch_size 8", "precision bf16-mixed", "activation_checkpointing full", "strategy fsdp", *STATE[-2:]]


@pytest.mark.parametrize(
    ("phase", "on_gpu", "expected"),
    [("init", True, WEIGHTS), ("init", False, WEIGHTS[::2]), ("step", True, STATE), ("backward", False, GRAPH)],
)
def test_knobs_that_cannot_help_in_the_phase_are_left_out(phase, on_gpu, expected):
    assert knobs(recipe(), 2, phase=phase, on_gpu=on_gpu) == [f"--memory.{knob}" for knob in expected]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory": Memory(), "accumulate": 4},
        {"batch_size": None, "accumulate": 4, "memory": Memory(micro_batch_size=6)},
        {"batch_size": None, "accumulate": {0: 4, 2: 1}, "memory": Memory(micro_batch_size=9), "epochs": 3},
        {"accumulate": 4},
        {"memory": Memory(micro_batch_size=16, micro_batch_tokens=4096)},
        {"memory": Memory(micro_batch_size=16, precision="64-true", activation_checkpointing=0.5)},
        {"memory": Memory(micro_batch_size=16, optimizer_state_bits=8, precision="16-mixed")},
    ],
)
def test_every_knob_can_be_given_as_it_is_written_and_keeps_the_batch(changes):
    wishes = recipe(**changes)
    plan = decide_plan(wishes, 1)
    found = next_knobs(plan, wishes)
    assert len(found) >= 4
    for knob in found:
        _, flags = split_argv(shlex.split(knob.removesuffix(" (lossy)")))
        asked = RecipeParser(wishes, "trainer fit").read_flags(flags, {})
        decided = decide_plan(change(wishes, {}, asked), 1)
        assert decided.initial_cut.batch_size == plan.initial_cut.batch_size
        assert decided != plan
        assert ("(lossy)" in knob) == bool(set(decided.lossy) - set(plan.lossy))


def test_the_message_names_phase_rank_samples_plan_and_knobs():
    wishes = recipe()
    plan = decide_plan(wishes, 2)
    error = torch.OutOfMemoryError(CUDA_MESSAGE)
    message = describe_oom(error, "backward", 1, plan, [512, 40, 7], recipe=wishes)
    assert message.startswith(
        "out of memory in backward on rank 1 (20.00 MiB more requested, the device has 23.55 GiB); micro-batch of 3 "
        f"samples of 512, 40, 7 tokens; plan: {plan.describe()}; try next: --memory.micro_batch_size 8, --memory."
    )
    assert "\n" not in message
    assert "PyTorch" not in message
    shapes = describe_oom(error, None, 0, plan, shapes={"pixel_values": (16, 3, 8, 8)})
    assert shapes.startswith("out of memory between phases on rank 0 (20.00 MiB")
    assert "micro-batch of pixel_values 16×3×8×8; plan" in shapes
    many = describe_oom(error, "forward", 0, plan, list(range(100, 0, -1)))
    assert "100, 99, " in many
    assert "(longest 100) tokens" in many
    last = recipe(memory=Memory(precision="bf16-true", micro_batch_size=1, cpu_offload="parameters"))
    message = describe_oom(RuntimeError("can't allocate memory"), "init", 0, decide_plan(last, 1), recipe=last)
    assert message.endswith("no other knob can help: use more ranks, a larger device or a smaller model")


def test_lengths_and_shapes_of_micro_batches():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    text = {"input_ids": torch.zeros(2, 4), "attention_mask": mask, "names": ["a", "b"]}
    assert sample_lengths(text) == [3, 1]
    assert shapes_of(text) == {"input_ids": (2, 4), "attention_mask": (2, 4)}
    assert sample_lengths({"pixel_values": torch.zeros(2, 3)}) is None
    assert sample_lengths(None) is None
    assert shapes_of(None) == {}
    assert shapes_of((torch.zeros(2, 3), torch.zeros(2))) == {"0": (2, 3), "1": (2,)}
    assert shapes_of(torch.zeros(5)) == {"tensor": (5,)}


HUNGRY = '''
from dataclasses import dataclass

import torch

from trainer import Memory, Recipe, main
from trainer.data import Digits
from trainer.models import MLP


def too_much():
    torch.empty(1 << 60, dtype=torch.uint8)


@dataclass
class Hungry(MLP):
    """Wants more than there is in one phase, from the second step or the first evaluation on."""

    phase: str = "forward"

    def __post_init__(self):
        self.seen = 0

    def build(self):
        if self.phase == "init":
            too_much()
        return super().build()

    def losses(self, module, batch):
        phase = "forward" if torch.is_grad_enabled() else "evaluation"
        self.seen += module.training  # not what the first step compares beside it
        for loss in super().losses(module, batch):
            if self.seen > 4 and phase == self.phase:
                too_much()
            yield loss


recipe = Recipe(model=Hungry([8]), data=Digits(), batch_size=64, max_steps=6, memory=Memory(micro_batch_size=16))

if __name__ == "__main__":
    main(recipe)
'''


@pytest.fixture
def hungry(tmp_path):
    path = tmp_path / "hungry.py"
    path.write_text(HUNGRY)
    return path


LAST_CUT = "64 micro-batches of 1", "precision bf16-mixed"


@pytest.mark.parametrize("phase", ["forward", "evaluation"])
def test_a_run_that_dies_of_it_ends_in_one_line_and_says_failed(hungry, tmp_path, capsys, phase):
    run_dir = tmp_path / "run"
    argv = ["fit", str(hungry), "--model.phase", phase, "--run.dir", str(run_dir), "--run.progress", "false"]
    assert run(argv) == 1
    *taken_again, last = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"out of memory in {phase} on rank 0: retrying the step") for line in taken_again)
    assert last.startswith(f"trainer: error: out of memory in {phase} on rank 0 (1152921504.61 GB more requested); ")
    assert "micro-batch of pixel_values " in last
    # An evaluation is not taken again; of the step, micro-batches were halved until nothing was left to halve.
    cut, knob = ("4 micro-batches of 16", "micro_batch_size 8") if phase == "evaluation" else LAST_CUT
    assert f"{cut}, single, 32-true; try next: --memory.{knob}" in last
    content = json.loads((run_dir / "summary.json").read_text())
    assert (content["status"], content["steps"]) == ("failed", 6 if phase == "evaluation" else 1)
    assert content["memory"]["phases"]["forward"]["host_gb"] > 0
    assert (run_dir / "memory.png").exists()
    assert not (run_dir / "model").exists()


def test_a_model_that_cannot_be_built_gets_knobs_for_weights_and_no_snapshot_is_made_on_a_cpu(hungry, tmp_path, capsys):
    assert run(["fit", str(hungry), "--model.phase", "init", "--run.dir", str(tmp_path / "run")]) == 1
    found, line = capsys.readouterr().err.splitlines()
    assert found.startswith("python: 1 rank")
    assert "out of memory in init on rank 0" in line
    assert line.endswith("try next: --memory.precision bf16-true (lossy)")
    assert run(["fit", str(hungry), "--run.snapshot", "true", "--run.accelerator", "cpu"]) == 2
    assert "run.snapshot=true records the history of torch's CUDA allocator" in capsys.readouterr().err


def test_what_a_person_should_know_is_said_before_training():
    half = recipe(memory=Memory(precision="bf16-true"))
    assert "loses updates" in plan_warnings(half, on_gpu=True)[0]
    for knob in ({"stochastic_rounding": True}, {"cpu_offload": "optimizer"}):
        safe = Memory(precision="bf16-true", **knob)
        assert plan_warnings(recipe(memory=safe), on_gpu=True) == []
    offloaded = recipe(memory=Memory(cpu_offload="parameters"))
    assert plan_warnings(offloaded, on_gpu=True) == []
    assert "no memory is saved" in plan_warnings(offloaded, on_gpu=False)[0]
