"""Generation: tokens of a language model, one after another (`xrt.generate`)."""
