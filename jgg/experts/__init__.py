"""The experts' MLP, in the dtype of x or in FP8, and the exchange of tokens between devices."""
