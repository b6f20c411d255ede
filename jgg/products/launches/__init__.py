"""The kernel launches of the products that multiply or activate, one file for each kind of kernel."""
