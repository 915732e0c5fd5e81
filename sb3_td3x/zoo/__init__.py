"""All that knows RL Zoo. Imports nothing here: the start-up hook runs while `rl_zoo3` is half imported."""
