"""What reaches the optimizer step: gradients before and after clipping, event rates over steps, and Adam's state.

- `recorder`: reads each step of a training loop (norms, clipping, micro-batches) into a `StepRecord`.
- `multi_tensor`: norms over all parameters at once, summed in fp64, without a transfer to the host.
- `adam_state`: Adam's second moment and its direction before learning rate and weight decay, sampled by the recorder.
- `adam_first_step`: the direction of Adam's first step, from one gradient.
- `endpoints`: tails, event rates and Adam endpoints of a run from its step records.
- `fp16_margin`: how far a static loss scale can go before a gradient overflows fp16.
"""
