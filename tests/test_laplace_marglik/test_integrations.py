"""Callbacks in the real Trainers: hyperparameters move, evidence rises, killed runs go on."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from programs import ROOT
from training_loops import (
    CLASSES,
    EPOCHS,
    KINDS,
    N,
    bert,
    hugging_face,
    learner_of,
    lightning_fit,
    texts,
)

from laplace_marglik import Categorical, MarglikError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from laplace_marglik.integrations.lightning import EvidenceCallback as LightningCallback  # noqa: E402
from laplace_marglik.integrations.transformers import EvidenceCallback  # noqa: E402

pytestmark = [
    # both libraries warn of what tiny runs on a CPU do not have: workers, loggers, pinned memory
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STEPS = N // 16  # of an epoch


def learned(learner):
    return learner.ml.prior.log_precision.detach().clone()


def die(kind, folder, step):
    """Run a training in a process that kills itself after a step."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    script = ROOT / "tests/support/training_loops.py"
    done = subprocess.run(
        [sys.executable, str(script), kind, str(folder), str(step)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_in_the_same_hyperparameters(kind, tmp_path):
    """Killed in an epoch, and right after the last step of one, before its round."""
    fit = KINDS[kind]
    whole, _ = fit(tmp_path / "whole")
    die(kind, tmp_path / "killed", 2 * STEPS + 1)
    resumed, _ = fit(tmp_path / "killed", resume=True)
    assert torch.equal(learned(resumed), learned(whole))
    assert resumed.calls == whole.calls == EPOCHS
    for a, b in zip(whole.ml.model.parameters(), resumed.ml.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fit", [hugging_face, lightning_fit], ids=["transformers", "lightning"])
def test_hyperparameters_move_and_the_evidence_rises(fit, tmp_path):
    start = learned(learner_of(bert(), texts()))[0]
    learner, _ = fit(tmp_path)
    assert ((learned(learner) - start).abs() > 0.05).all()
    assert learner.calls == EPOCHS and not learner._attached
    found = learner.measure().total
    with torch.no_grad():
        learner.ml.prior.log_precision.fill_(start)
    assert found > learner.measure().total


# ------------------------------------------------------------------------------- transformers


def test_what_is_logged_is_in_the_trainers_own_history(tmp_path):
    learner, trainer = hugging_face(tmp_path)
    rounds = [entry for entry in trainer.state.log_history if "evidence/total" in entry]
    assert [entry["epoch"] for entry in rounds] == [1, 2, 3, 4]
    assert rounds[-1]["precision/classifier.weight"] == pytest.approx(
        float(learner.ml.prior.precisions()["classifier.weight"])
    )
    saved = json.loads((tmp_path / f"checkpoint-{4 * STEPS}/trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["evidence_learner"]["learner"]


def test_rounds_by_steps(tmp_path):
    learner, _ = hugging_face(
        tmp_path,
        save="no",
        callback=lambda learner: EvidenceCallback(learner, every_steps=3),
    )
    assert learner.calls == EPOCHS * STEPS // 3


def test_the_learned_decay_is_in_every_step(tmp_path):
    """With a strong fixed prior the weights shrink, without the callback they do not."""
    learner, trainer = hugging_face(tmp_path, save="no", num_train_epochs=1)
    model = trainer.model
    with torch.no_grad():
        learner.ml.prior.log_precision.fill_(8.0)
    before = model.classifier.weight.norm().item()
    learner.attach(trainer.optimizer)
    trainer.model.zero_grad()
    for _ in range(3):
        loss = learner.ml.data_loss(model(**_batch(texts()[:8])), _labels(texts()[:8]))
        loss.backward()
        trainer.optimizer.param_groups[0]["lr"] = 1e-3
        trainer.optimizer.step()
    assert model.classifier.weight.norm().item() < before


def _batch(data):
    keys = ("input_ids", "attention_mask")
    return {key: torch.stack([entry[key] for entry in data]) for key in keys}


def _labels(data):
    return torch.stack([entry["labels"] for entry in data])


def test_a_loss_that_is_not_that_of_the_evidence_is_refused(tmp_path):
    with pytest.raises(MarglikError, match=r"label_smoothing_factor=0.2.*connect\(trainer\)"):
        hugging_face(tmp_path, label_smoothing_factor=0.2)

    def tempered(learner):
        learner.ml.likelihood = Categorical(3.0)
        return EvidenceCallback(learner)

    with pytest.raises(MarglikError, match=r"is not the mean of -log p.*connect\(trainer\)"):
        hugging_face(tmp_path, callback=tempered)


def trainer_for(model, data, folder, *, eval_dataset=None, **arguments):
    settings = {
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 1,
        "learning_rate": 5e-3,
        "per_device_train_batch_size": 16,
        "num_train_epochs": 2,
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **{**settings, **arguments})
    return transformers.Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=eval_dataset
    )


def token_texts():
    """Every word has a class; padding and every fifth text are ignored."""
    data = texts()
    for number, entry in enumerate(data):
        labels = torch.where(entry["attention_mask"] == 1, entry["input_ids"] % CLASSES, -100)
        entry["labels"] = torch.full_like(labels, -100) if number % 5 == 0 else labels
    return data


@pytest.mark.parametrize("accumulation", [1, 2])
def test_connected_the_trainer_minimises_the_loss_of_the_evidence(accumulation, tmp_path):
    """One step of SGD on all data is a step down the MAP loss, accumulated or not."""
    data = token_texts()
    model = bert("BertForTokenClassification", hidden_dropout_prob=0.0).eval()
    model.config.attention_probs_dropout_prob = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    learner = learner_of(model, data, "token-classification", burn_in=9)
    batch = torch.utils.data.default_collate(data)
    learner.ml.map_loss(batch).backward()
    want = {n: p.detach() - 0.1 * p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    trainer = trainer_for(
        model,
        data,
        tmp_path,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=1,
        per_device_train_batch_size=N // accumulation,
        gradient_accumulation_steps=accumulation,
    )
    trainer.add_callback(EvidenceCallback(learner))
    with pytest.raises(MarglikError, match="connect"):
        trainer.train()
    trainer.remove_callback(EvidenceCallback)
    callback = EvidenceCallback(learner)
    callback.connect(trainer)
    trainer.train()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), want[name], rtol=1e-4, atol=1e-6)
    assert learner.calls == 1


def test_a_language_model_with_its_own_labels(tmp_path):
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    data = texts()
    for entry in data:
        entry["labels"] = torch.where(entry["attention_mask"] == 1, entry["input_ids"], -100)
    learner = learner_of(model, data, "language-model", rows=16, steps=2, root="fisher")
    trainer = trainer_for(model, data, tmp_path)
    EvidenceCallback(learner).connect(trainer)
    start = learned(learner)
    trainer.train()
    assert (learned(learner) != start).all()
    # the model's own loss is a mean over tokens, ours the sum over a datum's
    batch = torch.utils.data.default_collate(data)
    tokens = (batch["labels"][:, 1:] != -100).sum()
    with torch.no_grad():
        model.eval()
        outputs = model(**batch)
    found = learner.ml.data_loss(outputs, batch["labels"])
    torch.testing.assert_close(found * N, outputs.loss * tokens, rtol=1e-4, atol=1e-4)


def test_mixed_precision_and_compiled_trainers(tmp_path):
    """The Trainer wraps the model's forward in autocast; the evidence is that of the weights."""
    learner, trainer = hugging_face(tmp_path, save="no", bf16=True)
    batch = torch.utils.data.default_collate(texts()[:8])
    assert hasattr(trainer.model, "_original_forward")
    found = learner.ml(batch).total
    plain = bert()
    plain.load_state_dict(trainer.model.state_dict())
    other = learner_of(plain, texts())
    other.ml.prior.load_state_dict(learner.ml.prior.state_dict())
    torch.testing.assert_close(found, other.ml(batch).total, rtol=1e-6, atol=1e-6)


def test_another_model_and_checkpoints_without_the_learner_are_refused(tmp_path):
    data = texts()
    trainer = trainer_for(bert(), data, tmp_path)
    trainer.add_callback(EvidenceCallback(learner_of(bert(), data)))
    with pytest.raises(MarglikError, match="another model"):
        trainer.train()
    trainer = trainer_for(bert(), data, tmp_path, save_strategy="epoch", num_train_epochs=1)
    trainer.train()
    model = bert()
    trainer = trainer_for(model, data, tmp_path, save_strategy="epoch", num_train_epochs=2)
    trainer.add_callback(EvidenceCallback(learner_of(model, data)))
    with pytest.raises(MarglikError, match="no state of the learner"):
        trainer.train(resume_from_checkpoint=True)


def test_the_best_models_hyperparameters_come_with_it(tmp_path):
    data = texts()
    model = bert()
    learner = learner_of(model, data)
    trainer = trainer_for(
        model,
        data,
        tmp_path,
        num_train_epochs=3,
        save_strategy="epoch",
        eval_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first
        eval_dataset=data,
    )
    trainer.add_callback(EvidenceCallback(learner))
    trainer.train()
    rounds = [entry for entry in trainer.state.log_history if "evidence/total" in entry]
    assert trainer.state.best_model_checkpoint.endswith(f"-{STEPS}")
    found = float(learner.ml.prior.precisions()["classifier.weight"])
    assert found == pytest.approx(rounds[0]["precision/classifier.weight"])


# ---------------------------------------------------------------------------------- lightning


def test_lightning_logs_what_was_learned(tmp_path):
    learner, trainer = lightning_fit(tmp_path, epochs=2)
    values = trainer.callback_metrics
    assert values["precision/0.weight"] == pytest.approx(
        float(learner.ml.prior.precisions()["0.weight"]), rel=1e-5
    )
    assert "evidence/total" in values


def test_lightning_rounds_by_steps(tmp_path):
    learner, _ = lightning_fit(tmp_path, every_steps=3)
    assert learner.calls == EPOCHS * STEPS // 3


def test_lightning_steps_are_those_of_the_map_loss(tmp_path):
    """Gradients are made by a closure inside the step, where a plain hook would miss them."""
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, (x[:, 0] > 0).long())
        learner = learner_of(model, data, rows=8, inducing=0, burn_in=99)
        with torch.no_grad():
            learner.ml.prior.log_precision.fill_(2.0)
        return model, data, learner

    class Module(lightning.LightningModule):
        def __init__(self, model, learner):
            super().__init__()
            self.model, self.learner = model, learner

        def training_step(self, batch, _):
            return self.learner.ml.data_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    model, data, learner = build()
    lightning.Trainer(
        default_root_dir=tmp_path,
        max_epochs=5,
        callbacks=[LightningCallback(learner)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(model, learner), DataLoader(data, 8))
    plain, data, other = build()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        other.ml.map_loss(*data.tensors).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_callbacks_refuse_what_means_nothing():
    learner = learner_of(bert(), texts())
    for kind in (EvidenceCallback, LightningCallback):
        with pytest.raises(MarglikError, match="every_steps"):
            kind(learner, every_steps=0)
