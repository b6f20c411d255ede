"""jgg inside training frameworks, by one call or command for each; docs/integrations.md says which."""
