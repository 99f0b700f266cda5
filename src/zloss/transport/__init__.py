"""How a source reaches the hidden state and the weights: head loss, backends, gain, interventions."""
