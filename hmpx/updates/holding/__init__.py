"""How a weight, its gradient and its state are held between two steps, and how a part of them is read and written."""
