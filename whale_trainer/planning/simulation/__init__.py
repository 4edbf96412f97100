"""How long a plan takes: times of layers, links and sums, and the schedule played against them."""
