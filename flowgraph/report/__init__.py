"""What is said of a plan: drawn, priced, explained, compared. Nothing here changes it."""
