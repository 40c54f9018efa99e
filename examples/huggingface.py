"""Train a small stock GPT-2 with shaped attention on a text of your own, offline, and get a stock GPT-2 back.

    python examples/huggingface.py [--text FILE] [--steps 200] [--out DIR]

The characters of the text are the tokens. Attention starts shaped, which keeps the tokens of deep models apart; Recover takes the shaping
to 0 in the first half of the training, and what is saved at the end is a plain GPT-2 that needs nothing of this package.
"""

from __future__ import annotations

import argparse
import pydoc
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from shaped.hf import DiagnosticsCallback, ShapingCallback, parameter_groups, shape, vanilla
from shaped.nn import Recover

LENGTH = 64


def sequences(text: str) -> tuple[list[dict[str, list[int]]], str]:
    """The text in pieces of 64 characters, as numbers, and its alphabet."""
    alphabet = "".join(sorted(set(text)))
    numbers = [alphabet.index(character) for character in text]
    pieces = [numbers[start : start + LENGTH] for start in range(0, len(numbers) - LENGTH + 1, LENGTH)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces], alphabet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(pydoc.__file__), help="a text file; by default a source file of Python's own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/huggingface"))
    options = parser.parse_args()
    set_seed(0)
    data, alphabet = sequences(options.text.read_text())
    if not data:
        raise SystemExit(f"--text must have at least {LENGTH} characters, got fewer in {options.text}")
    config = GPT2Config(vocab_size=len(alphabet), n_positions=LENGTH, n_embd=64, n_layer=12, n_head=4, bos_token_id=None, eos_token_id=None)
    model = shape(GPT2LMHeadModel(config))  # with GPT-2's own scaling, so that the way back is open
    diagnostics = DiagnosticsCallback(every=max(1, options.steps // 4))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.out),
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            logging_steps=max(1, options.steps // 5),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=data,  # pyright: ignore[reportArgumentType]
        callbacks=[ShapingCallback(Recover(max(1, options.steps // 2))), diagnostics],
        optimizers=(torch.optim.AdamW(parameter_groups(model), lr=1e-3), None),
    )
    trainer.train()
    for row in diagnostics.history:
        first, last = list(row["correlation"])[:: len(row["correlation"]) - 1]
        print(
            f"step {row['step']:4d}: gamma1 {row['gamma1'][last]:.2f}; last block: token correlation {row['correlation'][last]:.3f}, "
            f"attention entropy {row['entropy'][last]:.2f}; gradient of the first block {row['gradient_norm'][first]:.3f}"
        )
    vanilla(model).save_pretrained(options.out)
    stock: Any = AutoModelForCausalLM.from_pretrained(options.out)
    start = torch.tensor([data[0]["input_ids"][:16]], device=stock.device)
    written = stock.generate(start, max_new_tokens=LENGTH - 16, do_sample=False, pad_token_id=0)
    print(repr("".join(alphabet[number] for number in written[0].tolist())))


if __name__ == "__main__":
    main()
