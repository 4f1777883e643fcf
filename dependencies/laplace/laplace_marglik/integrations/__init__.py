"""The learner in the training loops of other libraries; each module needs its library."""
