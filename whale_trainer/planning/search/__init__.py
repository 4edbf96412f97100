"""Where plans come from: shares, groups, cuts of layers, the search over degrees, Whale's algorithm."""
