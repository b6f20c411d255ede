"""jgg inside training frameworks; docs/integrations.md has a recipe for each."""
