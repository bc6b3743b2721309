"""Qwen3-8B on one GPU of 16 GB: LoRA adapters in every block, frozen weights quantised to NF4."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import Conversations
from trainer.models import CausalLM, LoRA

CHATS = {"name": "HuggingFaceTB/smoltalk", "config": "everyday-conversations", "test_split": "test"}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

recipe = Recipe(
    model=CausalLM("Qwen/Qwen3-8B", weights="Qwen/Qwen3-8B", lora=LoRA(rank=16, targets=LAYERS, base="nf4")),
    data=Conversations(**CHATS, chat_template="chatml", max_length=2048),
    optim=Optim("adamw", lr=2e-4, schedule="cosine", warmup_ratio=0.1, clip_norm=1.0),
    batch_size=16,
    epochs=1,
    memory=Memory(
        micro_batch_size=1, precision="bf16-true", activation_checkpointing="full", cpu_offload="optimizer"
    ),  # CPU memory holds fp32 masters of the adapters
)

if __name__ == "__main__":
    main(recipe)
