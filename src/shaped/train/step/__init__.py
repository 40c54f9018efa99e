"""One step of training: parameters, gradients, optimiser, objective."""
