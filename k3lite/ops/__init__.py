"""Functions on tensors: no parameters, no modules, no config."""
