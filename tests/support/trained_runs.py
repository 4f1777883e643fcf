"""Trainers of tiny problems, and where they may die."""

from ntkmarglik.learn.methods import METHODS
from ntkmarglik.learn.train import Trainer
from ntkmarglik.programs.classify.config import parse
from ntkmarglik.programs.classify.run import prepare

DEATHS = [("run/checkpoint.pt", 2), ("run/metrics.jsonl", 3), ("baseline/checkpoint.pt", 2)]


def trained(flags, data):
    problem = prepare(parse(flags), data)
    trainer = Trainer(problem, METHODS[problem.config.estimator.method](problem))
    for _ in range(problem.config.training.epochs):
        trainer._epoch()
    return trainer
