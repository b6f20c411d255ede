"""jgg inside training frameworks, each with one call or command; see docs/integrations.md."""
