"""The rules that stop trials, prune arms and replace members of a population."""
