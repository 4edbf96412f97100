"""What any interval of layers costs on a shard: FLOPs, bytes, memory of ranks item by item."""
