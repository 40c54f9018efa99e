"""One training run: its settings, its folder, its loop."""
