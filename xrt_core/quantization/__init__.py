"""Post-training quantisation to int8: calibration (recorded ranges), and insertion of Q/DQ nodes."""
