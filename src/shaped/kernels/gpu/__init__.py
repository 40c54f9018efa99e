"""The Triton sources of the fused operations. Importing them imports Triton."""
