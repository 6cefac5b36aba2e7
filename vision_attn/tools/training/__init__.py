"""Training and evaluation of image classifiers, with or without attention in them. Heavy dependencies stay in here."""
