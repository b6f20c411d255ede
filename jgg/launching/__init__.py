"""How one launch of a kernel runs: chosen, compiled, kept, on a GPU or interpreted."""
