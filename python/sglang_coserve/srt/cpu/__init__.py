"""SGLang on a machine without CUDA: defaults, and replacements of its kernels."""
