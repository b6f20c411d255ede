"""What `jgg finetune` and `jgg train` run: one trainer, with its data, its logs, its checkpoints and its devices."""
