"""Training loops of other libraries around `torch.compile(model, backend="xrt")`: their losses beside eager's.

    python benchmarks/torch_loops.py [NAME ...] [--steps N] [--engine NAME]    # NAME: trainer, accelerate, lightning

Each fine-tunes a small BERT with random weights, dropout included, on sentences whose label follows from a token, once
in eager and once compiled, from the same weights and seeds, and prints the largest difference of the losses of a step.
A loop whose library is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, LENGTH = 8, 24


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random sentences; the label says whether the first token is of the upper half."""

    def __init__(self, count: int) -> None:
        made = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 100, (count, LENGTH), generator=made)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = self.ids[i]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": (ids[0] >= 50).long()}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    # the model writes the kind of problem into its configuration otherwise, for which TorchDynamo captures it again
    config = BertConfig(vocab_size=100, problem_type="single_label_classification", **sizes)
    return BertForSequenceClassification(config)


def with_trainer(model: nn.Module, data: Sentences) -> list[float]:
    """Hugging Face's Trainer, whose model was compiled in place."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    losses: list[float] = []

    class Noted(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            losses.extend(v for k, v in (logs or {}).items() if k == "loss")

    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=1, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, use_cpu=True, seed=0, logging_nan_inf_filter=False,
        )  # fmt: skip
        trainer = Trainer(model, options, train_dataset=data, callbacks=[Noted()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return losses


def with_accelerate(model: nn.Module, data: Sentences) -> list[float]:
    """A loop of accelerate's: its prepared model, optimizer and batches, with gradients clipped and accumulated."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, BATCH))
    torch.manual_seed(0)
    losses = []
    for batch in batches:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def with_lightning(model: nn.Module, data: Sentences) -> list[float]:
    """Lightning's Trainer around a module that holds the compiled one."""
    import lightning

    losses: list[float] = []

    class Tuned(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, i: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-4)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, enable_model_summary=False, **quiet
    )
    torch.manual_seed(0)
    trainer.fit(Tuned(), DataLoader(data, BATCH))
    return losses


LOOPS: dict[str, tuple[str, Callable[[nn.Module, Sentences], list[float]]]] = {
    "trainer": ("transformers", with_trainer),
    "accelerate": ("accelerate", with_accelerate),
    "lightning": ("lightning", with_lightning),
}


def rows(names: list[str], steps: int, engine: str) -> Iterator[str]:
    """Lines of a table, one a loop."""
    import xrt_torch

    for name in names:
        library, loop = LOOPS[name]
        if importlib.util.find_spec(library) is None:
            yield f"| {name} | {library} is not installed | | | |"
            continue
        data, found = Sentences(steps * BATCH), []
        torch._dynamo.reset()
        for is_compiled in (False, True):
            model = bert().train()
            if is_compiled:
                # the first call waits, and an engine that is named is not timed against eager: XRT answers what follows
                model.compile(backend="xrt", options={"engine": engine, "background": False})
            found.append(loop(model, data))
        eager, compiled = found
        assert len(eager) == len(compiled) == steps, (len(eager), len(compiled))
        most = max(abs(a - b) for a, b in zip(eager, compiled, strict=True))
        known = xrt_torch.graphs(model)
        left = sum(g.reason is not None for g in known)
        losses = f"{eager[0]:.4f}, {eager[-1]:.4f}"
        yield f"| {name} | {steps} | {losses} | {most:.1e} | {len(known) - left} of {len(known)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=[*LOOPS])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--engine", default="xla")
    given = parser.parse_args()
    for name in {*given.names} - {*LOOPS}:
        parser.error(f"{name!r} is none of {', '.join(LOOPS)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| loop | steps | first and last loss | most off from eager's | graphs on XRT |\n|---|---|---|---|---|")
    for row in rows(given.names, given.steps, given.engine):
        print(row, flush=True)


if __name__ == "__main__":
    main()
