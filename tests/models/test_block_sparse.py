"""BigBird's block-sparse attention: transformers' numbers, the kernel's registrations, and what it keeps."""

from __future__ import annotations

import copy
import dataclasses
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from helpers.matrix import perturbed
from helpers.problems import make_model
from helpers.rounding import ROUNDING
from torch.autograd import grad
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile

from trainer.errors import RecipeError
from trainer.models import block_sparse
from trainer.models.block_sparse import NAME, attention_counts, block_sparse_forward, flex_pattern, workspace_bytes

SMALL = {"max_position_embeddings": 128, "block_size": 4, "num_random_blocks": 3}
op = getattr(torch.ops.trainer, NAME)


def arguments(batch=2, heads=2, blocks=14, size=4, dtype=torch.float64, training=True):
    """Of the operation: queries, keys and values as linear layers make them, the last text shorter than the others."""
    torch.manual_seed(0)
    shape = (batch, blocks * size, heads, 8)
    made = [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    mask = torch.ones(batch, blocks * size, dtype=torch.bool)
    mask[-1, 1 - 3 * size :] = False
    counts = torch.from_numpy(attention_counts(1, heads, blocks, 3, size, blocks * size, training))[0]
    return *made, mask, counts, 5 + 3 * training


def pair(**config):
    """Ours, and transformers' own block-sparse model with the same weights, in fp64."""
    from transformers import BigBirdForSequenceClassification

    base = make_model("bigbird")
    model = dataclasses.replace(base, attention="block_sparse", config={**base.config, **SMALL, **config})
    torch.manual_seed(0)
    module = perturbed(model.build().double(), 0.3)
    theirs = BigBirdForSequenceClassification(copy.deepcopy(module.config)).double()
    theirs.load_state_dict(module.state_dict())
    assert theirs.bert.attention_type == "block_sparse"
    return model, module, theirs


def texts(lengths):
    ids = torch.randint(2, 120, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.first(4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("tokens", "config"),
    [
        (50, {}),  # not a multiple of the blocks
        (128, {}),
        (1024, {"block_size": 64, "max_position_embeddings": 4096}),  # as in the paper's plans, some blocks twice
        (1024, {"block_size": 64, "max_position_embeddings": 1024}),
        (1500, {"block_size": 64, "max_position_embeddings": 4096, "num_hidden_layers": 1}),
        pytest.param(4096, {"block_size": 64, "max_position_embeddings": 4096}, marks=pytest.mark.slow),
    ],
)
def test_block_sparse_attention_is_that_of_transformers(tokens, config, training):
    _, module, theirs = pair(**config)
    state = np.random.get_state()[1].copy()
    batch, found = texts([tokens, tokens * 2 // 3]), []
    for one in (module.train(training), theirs.train(training)):
        logits = one(**batch).logits
        learned = [p for name, p in one.named_parameters() if "pooler" not in name]
        found.append([logits, *grad(logits.square().sum(), learned)])
        if one is module:
            assert (np.random.get_state()[1] == state).all()
    for ours, others in zip(*found, strict=True):
        torch.testing.assert_close(ours, others, rtol=ROUNDING, atol=ROUNDING)


def test_a_short_batch_attends_fully_and_the_next_long_one_does_not():
    model, module, theirs = pair()
    module.train(), theirs.train()
    short, long = texts([44, 9]), texts([45, 60])
    expected = theirs(**long).logits
    torch.testing.assert_close(module(**short).logits, theirs(**short).logits, rtol=ROUNDING, atol=ROUNDING)
    assert theirs.bert.attention_type == "original_full"  # for good
    assert (theirs(**long).logits - expected).abs().max() > 1e-3
    torch.testing.assert_close(module(**long).logits, expected, rtol=ROUNDING, atol=ROUNDING)
    (loss,) = model.losses(module, {**long, "labels": torch.tensor([0, 1])})
    loss.total.backward()
    assert not any(p.grad is None for name, p in module.named_parameters() if "pooler" not in name)


def test_the_export_is_a_block_sparse_model_of_transformers(tmp_path):
    from transformers import AutoModelForSequenceClassification

    model, module, theirs = pair()
    model.save(module, tmp_path, module.state_dict())
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.bert.attention_type == loaded.config.attention_type == "block_sparse"
    assert list(module.state_dict()) == list(theirs.state_dict())
    batch = texts([70, 50])
    torch.testing.assert_close(loaded(**batch).logits, module.eval()(**batch).logits, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    given = arguments(dtype=dtype)
    checks = torch.library.opcheck(op.default, given)
    *inputs, width = (part.detach() if isinstance(part, torch.Tensor) else part for part in given)
    out, sums = op(*inputs, width)
    backward = getattr(torch.ops.trainer, f"{NAME}_backward").default
    checks |= torch.library.opcheck(backward, (torch.randn_like(out), *inputs, width, out, sums))
    assert set(checks.values()) == {"SUCCESS"}
    assert len(checks) == 4


@pytest.mark.first(1)
@pytest.mark.parametrize("tile", [64, 128])
def test_flex_attention_is_given_the_same_pattern(tile, monkeypatch):
    """Its kernels for GPUs are not here; its eager way computes every score, masked and weighted as is said to it."""
    monkeypatch.setattr(block_sparse, "_tile", lambda size: tile)
    for training in (True, False):
        given = arguments(blocks=15, size=64, training=training)
        query, key, value, mask, counts, width = (*(part.detach() for part in given[:-1]), given[-1])
        score_mod, block_mask = flex_pattern(mask, counts, 15 * 64)
        context = flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)
        real = mask[:, None, :, None]
        ours = block_sparse_forward(query, key, value, mask, counts, width)
        torch.testing.assert_close(context * real, ours * real, rtol=1e-7, atol=1e-7)
        dense, step = block_mask.to_dense()[0].bool(), tile // 64
        rows = [(counts > 0)[:, at : at + step].any(1) for at in range(0, 15, step)]
        wanted = [torch.stack([row[:, at : at + step].any(1) for at in range(0, 15, step)], 1) for row in rows]
        assert torch.equal(dense, torch.stack(wanted, 1))  # tiles without any attended block are left out, no other


def test_autocast_computes_in_the_lower_type_and_the_backward_may_be_inside_of_it():
    exact = arguments(dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        given = arguments(dtype=torch.float32)
        with torch.autocast("cpu", dtype=dtype):
            context = block_sparse_forward(*given)
            assert context.dtype == dtype
            context.float().square().sum().backward()
        block_sparse_forward(*exact).square().sum().backward()
        for ours, wanted in zip(given[:3], exact[:3], strict=True):
            assert ours.grad.dtype == torch.float32
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=0.05, atol=0.05 * wanted.grad.abs().max().item())
            wanted.grad = None
    plain = arguments(dtype=torch.float32)
    context = block_sparse_forward(*plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context.square().sum().backward()
    block_sparse_forward(*exact).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain[:3], exact[:3], strict=True))


def test_a_text_of_padding_alone_has_no_nan():
    *inputs, mask, counts, width = arguments()
    mask[1] = False
    context = block_sparse_forward(*inputs, mask, counts, width)
    assert all(part.isfinite().all() for part in (context, *grad(context.sum(), inputs)))


def test_nothing_of_all_pairs_of_tokens_is_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        block_sparse_forward(*(given := arguments(blocks=64)))
    assert max(tensor.numel() for tensor in kept) == given[0].numel() < 64 * 64 * 4


def test_more_random_blocks_than_there_are_is_refused():
    config = {"block_size": 256, "max_position_embeddings": 4096, "num_hidden_layers": 1}
    _, module, _ = pair(**config)
    with pytest.raises(RecipeError, match=r"model\.config: 3 random blocks of 256 tokens are too many"):
        module(**texts([4096]))


def _gradients(strategy, checkpointing):
    """Of half of a batch on each of two ranks, or of all of it on one, at 60 tokens."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from trainer.memory.activation_checkpointing import checkpoint_blocks

    model, module, _ = pair()
    batch = {**texts([60, 60]), "labels": torch.tensor([0, 1])}
    blocks = list(module.train().bert.encoder.layer)
    checkpoint_blocks(module, blocks, checkpointing)
    if strategy != "single":
        rank = torch.distributed.get_rank()
        batch = {name: value[rank : rank + 1] for name, value in batch.items()}
    wrapped = DistributedDataParallel(module) if strategy == "ddp" else module
    if strategy == "fsdp":
        for part in (*blocks, module):
            fully_shard(part)
    (loss,) = model.losses(wrapped, batch)
    (loss.total / len(batch["labels"])).backward()
    grads = [p.grad for p in module.parameters() if p.requires_grad]
    return [(g.full_tensor() if hasattr(g, "full_tensor") else g).numpy() for g in grads]


@pytest.mark.parametrize(("strategy", "checkpointing"), [("ddp", "full"), ("fsdp", "selective")])
def test_the_gradient_of_two_ranks_is_that_of_one(strategy, checkpointing, ranks):
    plain = _gradients("single", "none")
    for found in (_gradients("single", checkpointing), *ranks(2).run(_gradients, strategy, checkpointing)):
        for ours, wanted in zip(found, plain, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gpu", ["a100-80gb", "v100-32gb"])
def test_the_planner_sees_the_operation_what_it_allocates_and_what_it_computes(gpu):
    from trainer.fakegpu.gpus import gpu_named
    from trainer.fakegpu.target import Target
    from trainer.fakegpu.tracer import tracing

    with tracing(Target(gpu_named(gpu))) as tracer:
        module = pair()[1].float().to(tracer.target.device)
        tracer.records_work = True
        tracer.enter("forward")
        batch = {key: value.to(tracer.target.device) for key, value in texts([60, 60]).items()}
        loss = module.train()(**batch).logits.sum()
        tracer.enter("backward")
        loss.backward()
    work = [item for item in tracer.trace.work if item.op.startswith(NAME)]
    assert [item.op for item in work] == [NAME] * 2 + [f"{NAME}_backward"] * 2
    keys = 2 * 2 * 8 * (2 * 4 * 60 + 52 * 8 * 4)  # texts, heads, size of a head, pairs of tokens
    assert [item.flops for item in work] == [4 * keys] * 2 + [10 * keys] * 2
    inside = [event.bytes for event in tracer.trace.events if event.op == f"{NAME}_backward (inside)"]
    if gpu == "a100-80gb":
        assert inside == [2 * 2 * 60 * 4] * 2  # of FlexAttention, a number in fp32 for each query and head
    else:  # has none
        assert max(inside) == 13 * 8 * 4 * 8 * 4  # keys of 8 for each of the blocks but the first and the last


def allocated(call):
    """Bytes that torch's allocator had handed out at most during ``call``, beside those of the result; and the result.

    As its profiler has written them down, allocation by allocation.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes)) - sum(tensor.nbytes for tensor in result), result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_the_planner_knows_what_the_operation_allocates_for_itself(dtype, training):
    torch.manual_seed(0)
    query, key, value, up = (torch.randn(1, 2048, 2, 64, dtype=dtype).transpose(1, 2) for _ in range(4))
    counts = torch.from_numpy(attention_counts(1, 2, 32, 3, 64, 4096, training))[0]
    args = (query, key, value, torch.ones(1, 2048, dtype=torch.bool), counts, 5 + 3 * training)
    backward = getattr(torch.ops.trainer, f"{NAME}_backward").default
    measured, result = allocated(lambda: op.default(*args))
    assert sum(workspace_bytes(op.default, args, None)) == pytest.approx(measured, rel=0.05)
    args = (up, *args, *result)
    assert sum(workspace_bytes(backward, args, None)) == pytest.approx(allocated(lambda: backward(*args))[0], rel=0.05)


@pytest.mark.slow
def test_a_compiled_layer_computes_the_same():
    _, module, _ = pair()
    batch = texts([60, 45])
    expected = module.eval()(**batch).logits
    for layer in module.bert.encoder.layer:
        layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(module(**batch).logits, expected, rtol=ROUNDING, atol=ROUNDING)


def compiled(query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any) -> Any:
    """In the place of FlexAttention, which has no backward on CPUs."""
    return query + key + value


@pytest.mark.parametrize("kernel", [compiled, flex_attention])
def test_flex_attention_is_tried_once_and_left_with_a_warning_where_it_does_not_run(kernel, monkeypatch, recwarn):
    monkeypatch.setattr(block_sparse, "_flex_attention", lambda: kernel)
    block_sparse.flex_works.cache_clear()
    given = torch.device("cpu"), torch.float32, 16, 64
    assert [block_sparse.flex_works(*given) for _ in range(2)] == [kernel is compiled] * 2
    told = [str(one.message) for one in recwarn if "FlexAttention does not run" in str(one.message)]
    assert len(told) == (0 if kernel is compiled else 1)
    assert all("does not support backward on CPU" in line for line in told)
    block_sparse.flex_works.cache_clear()
