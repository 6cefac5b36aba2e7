"""Side-by-side timing and memory of attention on feature maps: ours, other libraries' and the floor below all."""
