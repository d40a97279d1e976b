"""``hacrl init``: the text of a first campaign, of a task of one's own, and of its test."""
