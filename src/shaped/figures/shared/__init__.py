"""What several pages compute."""
