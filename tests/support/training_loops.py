"""Small trainings in the loops of transformers and Lightning, which may be killed half-way.

As a program: `python training_loops.py KIND FOLDER STEP` kills itself after that step.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood

N, LENGTH, WORDS, CLASSES = 64, 8, 30, 3
EPOCHS = 4


def texts(seed=0):
    """Made-up news: each class prefers words of its own; several lengths, padded with zeros."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (N,), generator=generator)
    own = torch.randint(1, 10, (N, LENGTH), generator=generator) + 9 * labels[:, None]
    any_word = torch.randint(1, WORDS, (N, LENGTH), generator=generator)
    tokens = torch.where(torch.rand(N, LENGTH, generator=generator) < 0.5, own, any_word)
    lengths = torch.randint(3, LENGTH + 1, (N, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return [
        {"input_ids": t, "attention_mask": m, "labels": y}
        for t, m, y in zip(tokens * mask, mask, labels, strict=True)
    ]


def bert(kind="BertForSequenceClassification", **options):
    import transformers

    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        **options,
    )
    torch.manual_seed(0)
    return getattr(transformers, kind)(config)


def learner_of(model, data, likelihood="classification", *, outputs=None, root=None, **options):
    prior = GaussianPrior(model, "layerwise", 0.1)
    ml = MarginalLikelihood(
        model,
        likelihood,
        n_data=len(data),
        prior=prior,
        outputs=outputs,
        root=root,
        generator=torch.Generator().manual_seed(3),
    )
    settings = {"rows": 24, "steps": 3, "steps_per_block": 3}
    return EvidenceLearner(ml, data, **{**settings, **options})


def dying_callback(step):
    """A callback of transformers that kills the process after a step."""
    from transformers import TrainerCallback

    class Dying(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

    return Dying()


def hugging_face(folder, *, die_at=None, resume=False, save="epoch", callback=None, **arguments):
    """Train a tiny BERT; gives the learner and the Trainer."""
    from transformers import Trainer, TrainingArguments

    from laplace_marglik.integrations.transformers import EvidenceCallback

    data = texts()
    model = bert()
    learner = learner_of(model, data)
    settings = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 16,
        "learning_rate": 5e-3,
        "save_strategy": save,
        "save_steps": 4,
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    args = TrainingArguments(output_dir=str(folder), **{**settings, **arguments})
    own = EvidenceCallback(learner) if callback is None else callback(learner)
    callbacks = [own, *([dying_callback(die_at)] if die_at else [])]
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume or None)
    return learner, trainer


def lightning_fit(folder, *, die_at=None, resume=False, validate=False, epochs=EPOCHS, **options):
    """Train a small network in Lightning; gives the learner and the Trainer."""
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from laplace_marglik.integrations.lightning import EvidenceCallback

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    lightning.seed_everything(2, verbose=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    data = TensorDataset(x, y)
    learner = learner_of(model, data)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return learner.ml.data_loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("loss", learner.ml.data_loss(self.model(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.01)

    class Dying(Callback):
        def on_train_batch_end(self, trainer, *_, **__):
            if trainer.global_step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    # Lightning does not keep the state of random numbers: batches in order, no dropout
    loader = DataLoader(data, 16)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        callbacks=[
            EvidenceCallback(learner, **options),
            Dying(),
            ModelCheckpoint(folder, save_last=True, every_n_epochs=1),
        ],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    path = Path(folder) / "last.ckpt"
    loaders = (loader, DataLoader(data, 16)) if validate else (loader,)
    trainer.fit(Module(), *loaders, ckpt_path=path if resume else None)
    return learner, trainer


KINDS = {
    "transformers": hugging_face,
    "transformers steps": lambda folder, **options: hugging_face(folder, save="steps", **options),
    "lightning": lightning_fit,
    "lightning validation": lambda folder, **o: lightning_fit(folder, validate=True, **o),
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](sys.argv[2], die_at=int(sys.argv[3]))
