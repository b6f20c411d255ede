"""What `jgg grpo` runs: answers to prompts are drawn, rewarded and learned, by the trainer of `jgg finetune`."""
