"""What `jgg demo` runs: `jgg train` with a preset, and a report."""
