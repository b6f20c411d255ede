"""Plain data and functions on it, which import nothing above: arguments, problems, schedules, devices, versions."""
