"""What compiled programs take: memory beside the plan, and the time to compile them."""
