"""What reaches the step: the first Adam direction, and the fp16 margin of a gradient."""
