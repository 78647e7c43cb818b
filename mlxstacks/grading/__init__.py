"""What an answer is worth: numbers and letters in it, equal mathematics, programs that run."""
