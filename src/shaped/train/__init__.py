"""Pre-training and fine-tuning. Needs the extra `train`; nothing here is imported by `import shaped`."""
