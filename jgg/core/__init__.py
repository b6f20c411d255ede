"""Plain data and functions on it for all of jgg: arguments, problems, schedules, devices, versions."""
