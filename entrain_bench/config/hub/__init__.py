"""Models of the Hugging Face hub: their published configurations as models of this suite."""
