"""What the small models are trained on and asked."""
