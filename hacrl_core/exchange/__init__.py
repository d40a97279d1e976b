"""What parties tell each other: signed messages, and what can be said about another party's answers."""
