"""What a campaign leaves behind, read back: its record, its history, its log."""
