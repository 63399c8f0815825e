"""Post-training quantisation to 8-bit integers: recording ranges, and the graph with Q/DQ nodes made from them."""
