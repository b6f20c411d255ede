"""The linear layer: rows times matrices, whatever a matrix is made of, and its gradients."""
