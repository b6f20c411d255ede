"""The experts' MLP: its steps in the arithmetic of a dtype or of FP8, and the exchange between devices."""
