"""The learner in the Trainer of PyTorch Lightning.

learner = EvidenceLearner(ml, train_set, rows=200)
trainer = lightning.Trainer(max_epochs=50, callbacks=[EvidenceCallback(learner)])
trainer.fit(module, loader)  # training_step returns ml.data_loss(f, y)
"""

from __future__ import annotations

from typing import Any

from laplace_marglik.errors import MarglikError
from laplace_marglik.integrations.rounds import LearnerRounds, logged
from laplace_marglik.learner import Round

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "the callback for Lightning needs lightning: pip install 'ntk-marglik[lightning]'"
    ) from error


class EvidenceCallback(LearnerRounds, Callback):
    """Learned weight decay in every step, a round of the learner after every epoch.

    `training_step` returns the loss of the data alone, `ml.data_loss(f, y)`. The state of the
    learner is part of Lightning's own checkpoints, from which `fit(..., ckpt_path=...)` continues
    bit for bit.

    Args:
        learner: of the model that is trained.
        every_steps: steps of the optimiser from round to round; None for epochs.
        decoupled: as in `EvidenceLearner.attach`.
        also_decays: as in `EvidenceLearner.attach`.
    """

    _steps = 0  # at the last round, with every_steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.learner.detach()  # of a training that was interrupted
        weights = {id(w) for w in self.learner.ml.weights.values()}
        attached = False
        for optimizer in trainer.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if any(id(p) in weights for p in parameters):
                self._attach(optimizer)
                attached = True
        if not attached:
            raise MarglikError(
                "no optimiser of the module has the weights of the marginal likelihood; give both "
                "the same network"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(pl_module, self._complete(trainer.current_epoch))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(pl_module, self._complete(trainer.current_epoch + 1))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        step = trainer.global_step
        if self.every_steps is None or step == self._steps or step % self.every_steps:
            return  # also while gradients are accumulated
        self._steps = step
        self._report(pl_module, self.learner.round())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.learner.detach()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.learner.detach()

    def state_dict(self) -> dict[str, Any]:
        return {**self._rounds_state(), "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load_rounds(state_dict)
        self._steps = state_dict["steps"]

    def _report(self, pl_module: LightningModule, result: Round | None) -> None:
        if result is not None:
            pl_module.log_dict(logged(self.learner, result))
