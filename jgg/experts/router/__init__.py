"""From router logits to rows sorted by expert, and the losses that balance experts."""
