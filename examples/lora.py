"""Fine-tune a language model with LoRA, by peft, on two CPU processes.

    python examples/lora.py

Needs `pip install -e ".[hf]"`. Only the adapters are trained, so that a few percent of
the parameters have gradients and optimizer states. The base model is small and has random weights,
so nothing is downloaded: put a pretrained one in its place.
"""

import argparse
import sys
import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_topt  # noqa: F401  (registers the strategy names)

try:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
except ModuleNotFoundError:
    sys.exit('this example needs peft: pip install -e ".[hf]"')

SEQUENCE = 64


class FineTuning(L.LightningModule):
    def __init__(self, *, rank: int, learning_rate: float = 5e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        # A pretrained model: AutoModelForCausalLM.from_pretrained(name), with its tokenizer.
        config = GPT2Config(vocab_size=256, n_positions=SEQUENCE, n_layer=4, n_embd=128, n_head=4)
        base = GPT2LMHeadModel(config)
        adapters = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
        )
        self.model = get_peft_model(base, adapters)  # freezes the base model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # (B, S) of token numbers
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def text_pieces(*, max_bytes: int) -> Tensor:  # (N, S) of token numbers
    """Return the standard library's source, byte by byte, in pieces of `SEQUENCE`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:max_bytes]
    return torch.tensor(list(text)).unfold(0, SEQUENCE, SEQUENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a language model with LoRA.")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=50)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--adapters", default="adapters.pt", help="file of the trained adapters")
    options = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        strategy="topt",
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.max_steps,
        logger=False,
        enable_checkpointing=False,
    )
    model = FineTuning(rank=options.rank)
    pieces = text_pieces(max_bytes=500_000)
    trainer.fit(model, DataLoader(pieces, 8, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        trained, every = model.model.get_nb_trainable_parameters()
        torch.save(get_peft_model_state_dict(model.model), options.adapters)
        print(f"plan: {trainer.strategy.parallel_plan.summary()}")
        print(f"trained: {trained:,} of {every:,} parameters, saved in {options.adapters}")
        print(f"loss: {float(trainer.callback_metrics['train_loss']):.2f} nats per byte")


if __name__ == "__main__":
    main()
