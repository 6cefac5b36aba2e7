"""What a network declares and computes: metadata, layouts, example inputs, selection of modules, costs, quiet runs."""
