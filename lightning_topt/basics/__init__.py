"""Helpers that every other folder may import; they import nothing of this package, nor torch.

argument_checks   checks of constructors' arguments
units             quantities with units, to floats and back
once              results kept by the identity of an object
forked_call       a function in a forked copy of this process
core_wait         whether threads had cores: a busy machine, or a quiet one
own_files         files that other users cannot have made or changed
lazy_names        public names imported at first use
jit               kernels compiled by Numba
"""
