"""Peak memory and step time of a recipe, predicted without a GPU, and the fastest plan that fits a budget."""
