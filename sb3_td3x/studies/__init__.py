"""Studies of many runs through RL Zoo. Import each module by its own name: nothing is loaded here."""
