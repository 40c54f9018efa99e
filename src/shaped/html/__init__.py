"""What the self-contained HTML pages of this package share: their frame, style and tables. Nothing in them runs or is loaded."""
