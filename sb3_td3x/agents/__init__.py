"""Published agents. Import each module by its own name: nothing is loaded here."""
