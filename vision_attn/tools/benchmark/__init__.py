"""Time and memory of attention on feature maps, side by side: ours, other libraries' and the floor below all."""
