"""What people's code does runs on the fake GPU as it does on a CPU, and what cannot names its line."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchao.optim
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers.optimization import Adafactor

from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.target import Target
from trainer.fakegpu.tracer import tracing
from trainer.system.child_jobs import ChildError, ChildJob, run_in_child

Case = Callable[[str], Any]
A100 = Target(gpu_named("a100-80gb"))


def floats(device: str, *shape: int, learns: bool = False) -> Tensor:
    return torch.randn(*shape, device=device, requires_grad=learns)


def whole(device: str) -> Tensor:
    return torch.arange(12, device=device) % 5


def gradient_of(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor | None:
    function(inputs).sum().backward()
    return inputs.grad


def buffered(device: str) -> Tensor:
    module = nn.Linear(3, 3)
    module.register_buffer("mask", torch.arange(3.0))
    module.to(floats(device, 1))
    return (
        module(floats(device, 2, 3)) + module.mask + torch.ones(3).to(module.mask) + torch.ones(3).type_as(module.mask)
    )


def within(device: str) -> list[Tensor]:
    with torch.device(device):
        return [torch.zeros(3), nn.Linear(2, 2).weight, torch.tensor([1.0]), torch.arange(3)]


def written(device: str) -> list[Any]:
    """Values follow what is written to views, data and copies."""
    whole, part = nn.Parameter(torch.zeros(4, device=device)), torch.zeros(4, device=device)
    whole.data.add_(1)
    part[1:3].fill_(2)
    part[whole == 1] += 1
    twin = copy.deepcopy(part)
    part.zero_()
    return [whole.tolist(), part.tolist(), twin.tolist(), part.sum().item()]


def packed(device: str) -> Tensor:
    lengths = torch.tensor([2, 5, 3])
    data = rnn.pack_padded_sequence(floats(device, 3, 5, 2), lengths, batch_first=True, enforce_sorted=False)
    return rnn.pad_packed_sequence(nn.LSTM(2, 3, batch_first=True).to(device)(data)[0], batch_first=True)[0]


def loaded(device: str) -> list[Any]:
    rows = TensorDataset(torch.randn(8, 3), torch.arange(8))
    return [[x.to(device), y.to(device)] for x, y in DataLoader(rows, 4, pin_memory=True, shuffle=True)]


def routed(device: str) -> Tensor:
    """A mixture of experts that loops over those that have tokens."""
    tokens, experts = floats(device, 8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(device)
    chosen = nn.Linear(4, 3).to(device)(tokens).topk(2).indices
    out = torch.zeros_like(tokens)
    for expert, taken in enumerate(F.one_hot(chosen, 3).permute(2, 1, 0)):
        _, rows = torch.where(taken)
        out.index_add_(0, rows, experts[expert](tokens[rows]))
    assert torch.bincount(chosen.flatten(), minlength=3).shape == (3,)
    return out


def checkpointed(device: str, reentrant: bool) -> Tensor | None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(device)
    return gradient_of(lambda x: checkpoint(layers, x, use_reentrant=reentrant), floats(device, 2, 3, learns=True))


def averaged(device: str) -> list[Tensor]:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    model = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        model.update_parameters(module)
    return [*model.parameters()]


def saved(device: str) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(nn.Linear(3, 3).to(device).state_dict(), file)
    file.seek(0)
    return [*torch.load(file).values(), *copy.deepcopy(nn.Linear(2, 2).to(device)).parameters()]


def queried(device: str) -> None:
    cuda = torch.cuda
    if device == "cuda":
        assert cuda.mem_get_info()[1] == A100.gpu.memory == cuda.get_device_properties(0).total_memory
        assert (cuda.get_device_capability(), cuda.is_bf16_supported(), cuda.device_count()) == ((8, 0), True, 1)
        assert cuda.memory_allocated() >= 0 <= cuda.max_memory_reserved()
        cuda.reset_peak_memory_stats()
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with cuda.device(0), cuda.stream(cuda.Stream()):
            begin.record()
            end.record()
        cuda.synchronize()
        assert begin.elapsed_time(end) >= 0
        cuda.set_rng_state_all(cuda.get_rng_state_all())


def drawn(device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    assert generator.device.type == device
    return [torch.randperm(5, device=device, generator=generator), torch.rand(2, device=device, generator=generator)]


CASES: dict[str, Case] = {
    "to another tensor": lambda d: torch.tensor([1.0]).to(floats(d, 2)) + torch.ones(2).to(floats(d, 2), copy=True),
    "to an index": lambda d: torch.ones(2).to(0 if d == "cuda" else d) + torch.ones(2).to(device=d),
    "new like": lambda d: [
        floats(d, 2).new_tensor([1.0]),
        floats(d, 2).new_zeros(3),
        torch.zeros_like(whole("cpu"), device=d),
    ],
    "of tensors": lambda d: torch.tensor([torch.tensor(1.0), torch.tensor(2.0)], device=d),
    "a module to a tensor": buffered,
    "inside of a device": within,
    "torch.cuda": queried,
    "generators": drawn,
    "rates": lambda d: [round(rate.item(), 3) for rate in torch.linspace(0, 0.4, 3, device=d)],
    "a root": lambda d: int(torch.tensor(16.0, device=d).sqrt()),
    "written": written,
    "random numbers": lambda d: [sorted(torch.randperm(5).tolist()), 0 <= torch.rand(1, device=d).item() <= 1],
    "arrays": lambda d: [whole(d).cpu().numpy().tolist(), floats(d, 3).cpu().numpy().shape],
    "a loop over positions": lambda d: [int(where) for where in (whole(d) > 2).nonzero().flatten()],
    "unique": lambda d: [*torch.unique(whole(d), return_inverse=True, return_counts=True), torch.bincount(whole(d))],
    "repeated": lambda d: torch.repeat_interleave(floats(d, 3, 2), torch.tensor([1, 2, 3], device=d), dim=0),
    "a boolean index": lambda d: gradient_of(lambda x: x[whole(d) > 2], floats(d, 12, learns=True)),
    "a choice": lambda d: torch.where(whole("cpu") > 2, whole("cpu"), -100).to(d),
    "experts": routed,
    "CTC": lambda d: F.ctc_loss(
        floats(d, 5, 2, 4).log_softmax(-1),
        whole(d)[1:5].view(2, 2).clamp(1, 3),
        *(torch.tensor(s, device=d) for s in ([5, 5], [2, 1])),
    ),
    "a margin": lambda d: F.multi_margin_loss(floats(d, 12, 5), whole(d)),
    "packed": packed,
    "FFT": lambda d: torch.fft.irfft(torch.fft.rfft(floats(d, 2, 8))),
    "inverse": lambda d: torch.linalg.inv(floats(d, 3, 3)),
    "distributions": lambda d: torch.distributions.Normal(floats(d, 3), floats(d, 3).exp()).rsample(),
    "per-sample gradients": lambda d: torch.func.vmap(torch.func.grad(lambda x: x.sin().sum()))(floats(d, 3, 2)),
    "an encoder, not training": lambda d: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        .to(d)
        .eval()(floats(d, 2, 5, 8), src_key_padding_mask=(torch.arange(5, device=d) > 3).expand(2, 5))
    ),
    "parametrized": lambda d: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).to(d)(floats(d, 2, 4)),
    "loaded": loaded,
    "checkpointed": partial(checkpointed, reentrant=True),
    "checkpointed anew": partial(checkpointed, reentrant=False),
    "averaged": averaged,
    "saved": saved,
    "pickled": lambda d: pickle.loads(pickle.dumps(torch.ones(3))).shape,
}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{name: getattr(torch.optim, name) for name in ("Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")},
    **{name: getattr(torch.optim, name) for name in ("Adadelta", "Adafactor", "Adagrad", "LBFGS", "Rprop", "SGD")},
    "fused": partial(torch.optim.AdamW, fused=True),
    "one by one": partial(torch.optim.AdamW, foreach=False),
    "a tensor for a rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
    "transformers": Adafactor,
    "transformers, at a rate": partial(Adafactor, lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9),
    "8 bits": torchao.optim.AdamW8bit,
    "4 bits": torchao.optim.AdamW4bit,
}


def stepped(device: str, optimizer: Callable[..., torch.optim.Optimizer]) -> list[int]:
    """The sizes of the states after two steps."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    updates = optimizer(module.parameters())

    def closure() -> Tensor:
        updates.zero_grad()
        loss = module(floats(device, 3, 64)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        closure()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        updates.step(closure if isinstance(updates, torch.optim.LBFGS) else None)
    states = [value for state in updates.state.values() for value in state.values()]
    return [value.numel() for value in states if isinstance(value, Tensor) and value.dim()]


def described(value: Any, device: str) -> Any:
    """What must be alike: shapes, types, whether it is on the device; of whole numbers also which they are."""
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype), value.device.type == device]
    return [described(item, device) for item in value] if isinstance(value, list | tuple) else value


def results(device: str) -> dict[str, Any]:
    found = {}
    cases = CASES | {name: partial(stepped, optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()}
    for name, case in cases.items():
        try:
            found[name] = described(case(device), device)
        except Exception as error:  # noqa: PERF203 - all of them are wanted
            found[name] = repr(error)
    return found


def on_the_fake_gpu() -> dict[str, Any]:
    with tracing(A100):
        return results("cuda")


@pytest.mark.slow
def test_code_runs_on_the_fake_gpu_as_on_a_cpu() -> None:
    # New interpreters: a case that computes can hang in a fork of a process that has compiled or has trained.
    real, fake = (ChildJob(job, anew=True).result() for job in (partial(results, "cpu"), on_the_fake_gpu))
    assert isinstance(real, dict), real  # otherwise the error that ended the process
    assert isinstance(fake, dict), fake
    assert {name: found for name, found in real.items() if isinstance(found, str)} == {}
    assert {name: found for name, found in fake.items() if found != real[name]} == {}


def trained_after() -> list[Any]:
    before = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    with tracing(A100):
        nn.Linear(3, 3).cuda()(before.cuda()).sum().backward()
    with tracing(Target(gpu_named("h100-sxm"))):  # and another card
        assert torch.cuda.get_device_capability() == (9, 0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
    query = before.view(1, 1, 4, 3).requires_grad_()
    attended = F.scaled_dot_product_attention(query, query, query).sum()
    with torch.autocast("cpu"):
        loss = module(copy.deepcopy(before.detach()).to(torch.ones(1))).float().square().mean() + attended
    loss.backward()
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    kinds = {type(value).__name__ for value in (loss, query.grad, module[0].weight.grad)}
    return [
        kinds == {"Tensor"},
        bool(loss.isfinite()),
        torch.cuda.is_available(),
        torch.Generator is type(torch.default_generator),
    ]


def test_torch_is_itself_again_afterwards() -> None:
    assert run_in_child(trained_after) == [True, True, False, True]


@torch.library.custom_op("tests_whatever_runs::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


def fails(act: Callable[[Tensor], Any]) -> str:
    def job() -> None:
        with tracing(A100):
            act(torch.ones(3, 3).cuda() * nn.Parameter(torch.randn(3, 3, device="cuda")).exp())

    with pytest.raises(ChildError) as caught:
        run_in_child(job)
    return str(caught.value)


def line_of(act: Callable[..., Any]) -> str:
    return f"({act.__code__.co_filename}:{act.__code__.co_firstlineno + 1})"


def test_what_cannot_be_traced_names_the_operation_and_the_line() -> None:
    def calls(x: Tensor) -> Any:
        return opaque(x)

    def packs(x: Tensor) -> Any:
        return torch.from_dlpack(x.detach())

    def coalesces(x: Tensor) -> Any:
        return x.to_sparse().coalesce()

    for act, words in ((calls, "tests_whatever_runs::opaque"), (packs, "meta"), (coalesces, "register_fake")):
        found = fails(act)
        assert words in found
        assert found.endswith(line_of(act))


def guessed() -> list[Any]:
    with tracing(A100) as tracer:
        x = nn.Linear(3, 3).cuda()(torch.ones(3, 3).cuda())
        assert x.data_ptr() != x.clone().data_ptr()
        if x.argmax() > 1:  # the line that is named
            raise ValueError("not the first")
        assert x.detach().argmax(-1).cpu().numpy().tolist() == [0, 0, 0]
    return [tracer.trace.guesses, [note.rpartition(":")[2] for note in tracer.trace.notes if __file__ in note]]


def test_a_guess_names_the_line_that_asks() -> None:
    first = guessed.__code__.co_firstlineno
    assert run_in_child(guessed) == [2, [str(first + 4), str(first + 6)]]
