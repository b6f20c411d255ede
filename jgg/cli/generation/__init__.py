"""`jgg generate`: prompts from options, files or people, and the texts of a model, printed as they come."""
