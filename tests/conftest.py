"""Shapes and types of the layers are checked at run time here, and only here; the import hook must come before `shaped` is imported."""

import importlib.util
import os

os.environ["OMP_NUM_THREADS"] = "1"  # for NumPy in the workers of pytest-xdist, and for PyTorch in processes that tests start

import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)  # the tests run in several processes: threads of one would wait for cores that the others have
LAYERS = [f"shaped.layers.{name}" for name in ("terms", "attention", "feedforward")] + ["shaped.nn.networks", "shaped.nn.activations.relu"]
if importlib.util.find_spec("beartype") is not None:  # it is among what `make test` installs, but not on every machine with a GPU
    install_import_hook(LAYERS, "beartype.beartype")  # for as long as the tests run; given to `with`, it would end with its block
