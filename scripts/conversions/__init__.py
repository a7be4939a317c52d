"""Real conversions of public projects as tables, each carried out in both directions against the project's own code."""
