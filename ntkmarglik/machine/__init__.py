"""The machine a program runs on: devices, speed, signals and exit codes."""
