"""Fused operations for GPUs, each with its plain reference and the conditions under which it is used."""
