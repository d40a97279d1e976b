"""Looking after the store: what is in it and whose it is, whether it is whole, what may go, and how much a campaign will need."""
