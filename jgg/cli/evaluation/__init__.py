"""What `jgg evaluate` runs: the loss of a model on texts, and lm-eval's tasks."""
