"""Studies of many runs through RL Zoo. Each module is imported by its own name, so that nothing here is loaded early."""
