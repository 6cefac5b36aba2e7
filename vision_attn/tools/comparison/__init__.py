"""Networks side by side: the same recipe with other blocks, over seeds, and what the scores allow to say."""
