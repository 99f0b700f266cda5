"""`zloss recommend`: which arms to run, how many fit a budget of time, which one is chosen, and how sure the answer is."""
