"""The learner in the Trainer of Hugging Face transformers.

learner = EvidenceLearner(ml, train_set, rows=200, collate_fn=collator)
trainer = Trainer(model, args, train_dataset=train_set, callbacks=[EvidenceCallback(learner)])
trainer.train()  # or trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asdl_marglik import evaluating, plain
from laplace_marglik.errors import MarglikError
from laplace_marglik.integrations.rounds import LearnerRounds, logged
from laplace_marglik.learner import Round

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.training_args import TrainingArguments
except ImportError as error:
    raise ImportError(
        "the callback for Hugging Face's Trainer needs transformers and accelerate: "
        "pip install 'ntk-marglik[transformers]'"
    ) from error

STATE = "evidence_learner"  # under which the Trainer's own state holds the learner's
COMPARED = 4  # data on which the loss of the model is compared with that of the evidence
SAME_LOSS = 1e-3  # relative: more than rounding in single precision, less than any other loss


class EvidenceCallback(LearnerRounds, TrainerCallback):
    """Learned weight decay in every step, a round of the learner after every epoch.

    Its state is part of the Trainer's own checkpoints (`trainer_state.json`), from which
    `train(resume_from_checkpoint=...)` continues bit for bit.

    Args:
        learner: of the model that is trained.
        every_steps: steps of the optimiser from round to round; None for epochs.
        decoupled: as in `EvidenceLearner.attach`.
        also_decays: as in `EvidenceLearner.attach`.
    """

    _log: Callable[[dict[str, float]], None] | None = None
    _gives_loss = False

    def connect(self, trainer: Trainer) -> None:
        """Train by the loss of the evidence, and log through the Trainer's own loggers.

        Needed where the model's own loss is another one: for regression with a learned noise,
        temperatures, several targets per datum (tokens), label smoothing or class weights.

        Args:
            trainer: gets the loss `ml.data_loss`, a mean over data, and this callback.
        """
        if not hasattr(trainer, "loss_is_scaled_for_ga"):
            raise MarglikError("update transformers: this Trainer cannot take the mean over data")
        trainer.compute_loss_func = self._loss
        trainer.loss_is_scaled_for_ga = False
        trainer.args.average_tokens_across_devices = False
        self._gives_loss = True
        self._log = trainer.log
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return self.learner.ml.data_loss(outputs, labels)

    # ------------------------------------------------------------------------------------- events

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if plain(kwargs["model"]) is not self.learner.ml.model:
            raise MarglikError(
                "the Trainer trains another model than that of the marginal likelihood; give both "
                "the same object (with adapters, what get_peft_model returned)"
            )
        self._resume(state)
        self._check_loss(args)
        self.learner.detach()  # of a training that was interrupted
        self._attach(kwargs["optimizer"])

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._after_round(state, self._complete(round(state.epoch or 0)))

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._after_round(state, self._complete(round(state.epoch or 0)))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.every_steps is not None and state.global_step % self.every_steps == 0:
            self._after_round(state, self.learner.round())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.learner.detach()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            path = Path(state.best_model_checkpoint) / TRAINER_STATE_NAME
            saved = json.loads(path.read_text())["stateful_callbacks"]
            self._load_rounds(_decoded(saved[STATE]["learner"]))

    # ------------------------------------------------------------------------------------- state

    def _after_round(self, state: TrainerState, result: Round | None) -> None:
        """Log what a round has found, and keep the learner's state where the Trainer saves its."""
        self._keep(state)
        if result is None:
            return
        values = logged(self.learner, result)
        if self._log is not None:
            self._log(values)
        else:
            state.log_history.append({**values, "epoch": state.epoch, "step": state.global_step})

    def _keep(self, state: TrainerState) -> None:
        _saved_with(state)[STATE] = {"learner": _encoded(self._rounds_state())}

    def _resume(self, state: TrainerState) -> None:
        """Take over the learner's state of the checkpoint that the Trainer has loaded."""
        saved = _saved_with(state).get(STATE)
        if saved is not None:
            self._load_rounds(_decoded(saved["learner"]))
        elif state.global_step:
            raise MarglikError(
                f"the checkpoint at step {state.global_step} has no state of the learner; it was "
                "written without this callback: resume without the callback, or start anew"
            )
        else:
            self.epochs = 0
        self._keep(state)

    def _check_loss(self, args: TrainingArguments) -> None:
        """Refuse to add the prior to another loss than the one it belongs to."""
        if self._gives_loss:
            return
        ml = self.learner.ml
        x, y = self.learner.examples.take(torch.arange(min(COMPARED, len(self.learner.examples))))
        own = self._loss_of_model(ml.placed(x), ml.placed(y))
        smoothing = args.label_smoothing_factor
        same_smoothing = smoothing == getattr(ml.likelihood, "label_smoothing", 0.0)
        if own is None and same_smoothing:
            return
        with torch.no_grad(), evaluating(ml.model):
            of_evidence = float(ml.data_loss(ml.outputs_of(ml.placed(x), seed=0), y))
        differs = own is not None and abs(own - of_evidence) > SAME_LOSS * abs(of_evidence)
        if differs or not same_smoothing:
            trained = f"{own:.6g}" if same_smoothing else f"label_smoothing_factor={smoothing:g}"
            raise MarglikError(
                f"the Trainer's loss ({trained}) is not the mean of -log p(y|f) over data "
                f"({of_evidence:.6g}), to which the learned weight decay belongs; call "
                "callback.connect(trainer), which trains by that"
            )

    def _loss_of_model(self, x: Any, y: Tensor) -> float | None:
        """The loss that the model computes itself from labels; None if it does not."""
        ml = self.learner.ml
        if isinstance(x, Tensor):
            return None
        with torch.no_grad(), evaluating(ml.model):
            try:
                outputs = ml.model(**x, **{ml.labels or "labels": y})
            except TypeError:  # its forward takes no labels
                return None
        loss = outputs.get("loss") if hasattr(outputs, "get") else None
        return None if loss is None else float(loss)


def _saved_with(state: TrainerState) -> dict[str, Any]:
    """The states of callbacks by name that are part of the Trainer's own."""
    assert isinstance(state.stateful_callbacks, dict)
    return state.stateful_callbacks


def _encoded(state: dict[str, Any]) -> str:
    """A state of tensors as text, for a JSON file."""
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def _decoded(text: str) -> dict[str, Any]:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
