"""SmolLM2-135M on everyday conversations from the hub; the loss covers only the assistant's words."""

from trainer import Memory, Optim, Recipe, main
from trainer.data import Conversations
from trainer.models import CausalLM

CHATS = {"name": "HuggingFaceTB/smoltalk", "config": "everyday-conversations", "test_split": "test"}

recipe = Recipe(
    model=CausalLM("HuggingFaceTB/SmolLM2-135M", weights="HuggingFaceTB/SmolLM2-135M"),
    data=Conversations(**CHATS, chat_template="chatml", max_length=1024),
    optim=Optim("adamw", lr=3e-4, schedule="cosine", warmup_ratio=0.1, clip_norm=1.0),
    batch_size=16,
    epochs=2,
    memory=Memory(micro_batch_size=16, micro_batch_tokens=8192, precision="bf16-mixed"),
)

if __name__ == "__main__":
    main(recipe)
