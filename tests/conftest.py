"""Shapes and types are checked at run time here, and only here; the import hook must come before `shaped` is imported."""

import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)  # the tests run in several processes
install_import_hook("shaped", "beartype.beartype")  # for as long as the tests run: it ends with a `with` block, if it is given one
