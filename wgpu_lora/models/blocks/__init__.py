"""What blocks of several architectures are made of."""
