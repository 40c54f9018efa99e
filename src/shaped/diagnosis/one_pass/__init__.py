"""What happens in one forward and one backward pass: calls of attention, parts of the model, their quantities."""
